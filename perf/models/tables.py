"""Records of models as tables: what the command prints and docs/models.md shows."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from perf.bench.scores import geometric_mean
from perf.common import formats
from perf.common.formats import Cell
from perf.measure.environment import Records
from perf.models import zoo

TORCH, OURS = PROVIDERS = ("torch", "triton_gemm")
MEANWHILE = 'triton_gemm, first_calls="torch"'  # in the first minute, too
LEAST, MEAN = 0.99, 1.03  # what every ratio of inference is to reach, and their mean
MOMENTS = (1.0, 5.0, 10.0, 20.0, 40.0, 60.0)  # of the first minute, in seconds
COLUMNS = (
    "model and case",
    "tokens or images",
    "per second, torch",
    "triton_gemm",
    "ratio",
    "p20 to p80",
    "error, torch",
    "error, triton_gemm",
    "routed",
    "",
)
OF_THE_LIST = ("model", "sizes of", "forward and training", "generated", "attention", "cases")

Record = Mapping[str, Any]


# --- What is in the list ---


def list_of_models() -> str:
    """The models, their sizes, and what is run with each."""
    rows: list[list[Cell]] = []
    for model in zoo.LIST:
        generates = any(case in zoo.GENERATING for case in model.cases)
        read = f"{model.rows} images" if model.inputs == "image" else f"{model.rows} x {model.length}"
        generated = f"{model.asked} x ({model.prompt} + {model.generated})" if generates else None
        rows.append(
            [
                model.name,
                model.like,
                read,
                generated,
                model.attention,
                "; ".join(filter(model.cases.__contains__, zoo.CASES)),
            ]
        )
    return formats.table(OF_THE_LIST, rows)


# --- What was measured ---


def ordered(record: Record) -> Iterator[tuple[str, str, Mapping[str, Any]]]:
    """Name, kind of case and result of all cases that a record has, in the order of the list."""
    for model, case in zoo.listed():
        name = zoo.key(model, case)
        if name in record["cases"]:
            yield name, case, record["cases"][name]


def row(name: str, case: str, found: Mapping[str, Any]) -> list[Cell]:
    """A line of COLUMNS, without the first minute."""
    if "failed" in found:
        return [name, found.get("shape"), *[None] * 7, f"FAILED: {_short(found['failed'])}"]
    errors, share = found["errors"], None
    if products := found.get("routing"):
        share = f"{products['ours']:,} of {products['ours'] + sum(products['left'].values()):,}"
    cells: list[Cell] = [name, found["shape"]]
    if "ratio" in found:
        speeds = [formats.number(found["per_s"][provider], 4) for provider in PROVIDERS]
        ratio = found["ratio"]
        cells += [*speeds, f"{ratio['median']:.3f}", f"{ratio['p20']:.3f} to {ratio['p80']:.3f}"]
    else:
        cells += [None] * 4
    return [*cells, *(formats.error(errors[provider]) for provider in PROVIDERS), share, verdict(case, found)]


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
    if missing:
        lines.append(f"Not measured: {'; '.join(missing)}.")
    return " ".join(lines)


def left(record: Record) -> str:
    """The products that stayed torch's, and why; nothing where all were routed."""
    rows = [
        [name, why, count]
        for name, _, found in ordered(record)
        for why, count in found.get("routing", {}).get("left", {}).items()
    ]
    return formats.table(("left to torch", "operator and reason", "calls"), rows) if rows else ""


def first_minutes(record: Record) -> str:
    """New tokens at each moment, and their ratio; nothing where none was measured."""
    rows: list[list[Cell]] = []
    for name, case, found in ordered(record):
        if case != zoo.FIRST_MINUTE:
            continue
        if "failed" in found:
            rows.append([f"{name}: FAILED: {_short(found['failed'])}", *[None] * len(MOMENTS)])
            continue
        tokens = found["tokens"]
        moments = [f"{moment:g}" for moment in MOMENTS]
        for provider, counts in tokens.items():
            rows.append([f"{name}, {provider}", *(f"{counts[at]:,.0f}" for at in moments)])
            if provider != TORCH:
                ratios = [counts[at] / tokens[TORCH][at] if tokens[TORCH][at] else None for at in moments]
                rows.append(["ratio", *(None if ratio is None else f"{ratio:.3f}" for ratio in ratios)])
    return formats.table(("new tokens after", *(f"{moment:g} s" for moment in MOMENTS)), rows) if rows else ""


def text(record: Record) -> str:
    """All of one record."""
    rows = [row(*each) for each in ordered(record) if each[1] != zoo.FIRST_MINUTE]
    parts = [summary(record), formats.table(COLUMNS, rows) if rows else "", first_minutes(record), left(record)]
    return "\n\n".join(filter(None, parts))


NOTHING = "No model is committed yet; `python -m perf.models` on a GPU measures them."
RECORDS = Records("models/{triton}.json", "models", NOTHING, text)


def _short(words: str) -> str:
    """In a cell of a table."""
    return " ".join(words.split()).replace("|", "/")[:160]
