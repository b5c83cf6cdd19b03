"""Records of models as tables: what the command prints and docs/models.md shows."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from statistics import geometric_mean
from typing import Any

from perf.common import formats
from perf.common.formats import Cell
from perf.measure.environment import Records
from perf.models import zoo
from perf.models.zoo import Model

TORCH, OURS = PROVIDERS = ("torch", "triton_gemm")
LEARNING = "triton_gemm, learn=True"  # in the first and the third minute
MEANWHILE = 'triton_gemm, first_calls="torch"'  # in the first minute, too
LEAST, MEAN = 0.99, 1.03  # what every ratio of inference is to reach, and their mean
MOMENTS = (1.0, 5.0, 10.0, 20.0, 40.0, 60.0)  # of the first minute, in seconds

Record = Mapping[str, Any]


# --- What is in the list ---


MODELS: dict[str, Callable[[Model], Cell]] = {
    "model": lambda x: x.name,
    "sizes of": lambda x: x.like,
    "forward and training": lambda x: f"{x.rows} images" if x.inputs == "image" else f"{x.rows} x {x.length}",
    "generated": lambda x: f"{x.requests} x ({x.prompt} + {x.generated})" if {*zoo.GENERATING} & {*x.cases} else None,
    "attention": lambda x: x.attention,
    "cases": lambda x: "; ".join(filter(x.cases.__contains__, zoo.CASES)),
}


def list_of_models() -> str:
    """The models, their sizes, and what is run with each."""
    return formats.table_by(MODELS, zoo.LIST)


# --- What was measured ---


def ordered(record: Record) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, kind of case and result of all cases that a record has, in the order of the list."""
    for model, case in zoo.listed():
        name = zoo.key(model, case)
        if name in record["cases"]:
            yield name, case, record["cases"][name]


def row(name: str, case: str, found: Mapping[str, Any]) -> dict[str, Cell]:
    """A case by column, without the first minute."""
    cells: dict[str, Cell] = {"model and case": name, "tokens or images": found.get("shape")}
    if "failed" in found:
        return cells | {"": f"FAILED: {_short(found['failed'])}"}
    if ratio := found.get("ratio"):
        theirs, ours = (formats.number(found["per_s"][provider], 4) for provider in PROVIDERS)
        cells |= {"per second, torch": theirs, OURS: ours, "ratio": f"{ratio['median']:.3f}"}
        cells["p20 to p80"] = f"{ratio['p20']:.3f} to {ratio['p80']:.3f}"
    cells |= {f"error, {provider}": formats.error(found["errors"][provider]) for provider in PROVIDERS}
    products = found.get("routing")
    routed = f"{products['ours']:,} of {products['ours'] + sum(products['left'].values()):,}" if products else None
    return cells | {"routed": routed, "": verdict(case, found)}


def verdict(case: str, found: Mapping[str, Any]) -> str:
    """What the last column says of a case that did not fail."""
    if "wrong" in found:
        return f"WRONG: {found['wrong']}"
    if "ratio" not in found:
        return "not timed"
    unsettled = "" if found["settled"] else ", while kernels were being compiled"
    if case in zoo.TRAINING:
        return f"reported{unsettled}"
    return ("met" if found["ratio"]["median"] >= LEAST else "missed") + unsettled


def summary(record: Record) -> str:
    """Whether the target is met, and which cases of the list are missing, in sentences."""
    ratios = {
        name: 0.0 if "failed" in found or "wrong" in found else found["ratio"]["median"]
        for name, case, found in ordered(record)
        if case not in (*zoo.TRAINING, zoo.FIRST_MINUTE) and ("ratio" in found or "failed" in found)
    }
    there = [ratio for ratio in ratios.values() if ratio]
    lines = []
    if there:
        lost = sorted((name for name, ratio in ratios.items() if ratio < LEAST), key=ratios.__getitem__)
        mean = geometric_mean(there)
        met = mean >= MEAN and not lost
        lines.append(
            f"{len(there)} cases of inference: {mean:.3f} of torch in the geometric mean, {min(there):.3f} at least "
            f"(targets {MEAN:.2f} and {LEAST:.2f}: {'met' if met else 'missed'})."
        )
        if lost:
            lines.append(f"Below {LEAST:.2f}: {'; '.join(lost)}.")
    missing = [name for model, case in zoo.listed() if (name := zoo.key(model, case)) not in record["cases"]]
    if all(case == zoo.FIRST_MINUTE for _, case, _ in ordered(record)):
        lines.append("Only first minutes were measured.")
    elif missing:
        lines.append(f"Not measured: {'; '.join(missing)}.")
    return " ".join(lines)


def left(record: Record) -> str:
    """The products that stayed torch's, and why; nothing where all were routed."""
    return formats.table_of(
        {"left to torch": name, "operator and reason": why, "calls": count}
        for name, _, found in ordered(record)
        for why, count in found.get("routing", {}).get("left", {}).items()
    )


def first_minutes(record: Record) -> str:
    """New tokens at each moment, and their ratio; nothing where none was measured."""
    rows: list[dict[str, Cell]] = []
    after = "new tokens after"
    for name, case, found in ordered(record):
        if case == zoo.FIRST_MINUTE and "failed" in found:
            rows.append({after: f"{name}: FAILED: {_short(found['failed'])}"})
        elif case == zoo.FIRST_MINUTE:
            for provider, counts in found["tokens"].items():
                rows.append({after: f"{name}, {provider}", **{f"{at} s": f"{n:,.0f}" for at, n in counts.items()}})
                if provider != TORCH:
                    pairs = [(at, n, found["tokens"][TORCH][at]) for at, n in counts.items()]
                    ratios = {f"{at} s": f"{n / of:.3f}" if of else None for at, n, of in pairs}
                    rows.append({after: "ratio", **ratios})
    return formats.table_of(rows)


def text(record: Record) -> str:
    """All of one record."""
    cases = formats.table_of(row(*each) for each in ordered(record) if each[1] != zoo.FIRST_MINUTE)
    return "\n\n".join(filter(None, [summary(record), cases, first_minutes(record), left(record)]))


NOTHING = "No model is committed yet; `python -m perf.models` on a GPU measures them."
RECORDS = Records("models/{triton}.json", "models", NOTHING, text)


def _short(words: str) -> str:
    """In a cell of a table."""
    return " ".join(words.split()).replace("|", "/")[:160]
