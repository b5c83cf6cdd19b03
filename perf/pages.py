"""Puts the committed results and the rungs' headers into README.md and pages in docs/, between markers.

`python perf/pages.py` rewrites them, and the pages in the folders of the results: each report.md, and for each GPU and
Triton version the shapes of the bench; and it draws the pictures of all records again. With `--check` it changes
nothing and fails where pages are stale.
A block reads `<!-- results:NAME -->`, its contents, `<!-- /results -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf import (
    bench_tables,
    draw,
    environment,
    example_tables,
    page,
    rung_diff,
    seeds,
    summary,
    tables,
    targets,
    views,
)
from perf.environment import ROOT
from perf.providers import CUBLAS, MODES
from perf.record import FILE, Record, read_json
from perf.scores import Sweep
from perf.suite import TF32_ROUNDING
from triton_gemm.ladder import LADDER, Rung

RESULTS = ROOT / "perf" / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("ladder", "performance", "precision", "use")))
PICTURE = "precision.png"  # beside the newest sweeps
NOTHING = "No measurement is committed yet; `make report` on a GPU makes one."
BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
HEADER_OF_A_SECTION = ("Changes", "Why", "Predicts", "Requires")


@dataclass(frozen=True)
class Results:
    """What is committed, each in the order of GPUs and Triton versions: reports, sweeps of the bench, GPTs."""

    records: list[Record]
    sweeps: list[Sweep]
    models: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Results:
        records = [Record.read(path.parent) for path in folder.glob(f"*/{FILE}")]
        records.sort(key=lambda record: environment.order(record.environment))
        return cls(records, bench_tables.committed(folder), example_tables.committed(folder))

    @cached_property
    def main(self) -> Record | None:
        """The record that docs/ladder.md explains: the one with the most rungs; of several the first measured."""
        order = sorted(self.records, key=lambda record: str(record.environment["date"]))
        return max(order, key=lambda record: len(views.ladder(record)), default=None)

    @cached_property
    def latest(self) -> Record | None:
        """The record that was measured last."""
        return max(self.records, key=lambda record: str(record.environment["date"]), default=None)


Block = Callable[[Results, Path], str]


def written() -> dict[Path, str]:
    """Every page, as it is made of today's results."""
    results = Results.read(RESULTS)
    found = {path: filled(path.read_text(), results, path.parent) for path in PAGES}
    for record in results.records:
        found[record.folder / page.FILE] = page.text(record, record.folder.glob("*.png"))
    for made, sweeps in bench_tables.by_place(results.sweeps):
        found[bench_tables.page_of(RESULTS, made)] = bench_tables.page(sweeps)
    return found


def stale() -> list[Path]:
    """The pages that differ from what they would be rewritten to.

    That sources have changed since a measurement makes no page stale: else each first edit of a kernel would.
    """
    return [
        path
        for path, text in written().items()
        if not path.exists() or _without_age(path.read_text()) != _without_age(text)
    ]


def _without_age(text: str) -> str:
    return text.replace(environment.CHANGED, "")


def rewrite() -> None:
    for record in Results.read(RESULTS).records:
        draw.everything(record, record.folder)
    for path, text in written().items():
        path.write_text(text)
    for folder in RESULTS.glob(f"*/{bench_tables.FOLDER}/*"):
        sweeps = [read_json(path) for path in folder.glob("*.json")]
        points = bench_tables.points(sweeps)
        if len({point.mode for point in points}) > 1:  # one has nothing to be compared with
            draw.precisions(points, bench_tables.where(sweeps[0]), folder / PICTURE)


def filled(text: str, results: Results, folder: Path) -> str:
    """The page `text`, which lies in `folder`, with its blocks made anew; raises ValueError for an unknown block."""

    def block(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        if name not in BLOCKS:
            raise ValueError(f"no block {name!r}; there are {', '.join(BLOCKS)}")
        return f"{opening}{BLOCKS[name](results, folder)}\n{closing}"

    return BLOCK.sub(block, text)


# --- Of the report ---


def _rung(rung: Rung, results: Results, folder: Path) -> str:
    """A rung's section: its header, its source against the rung before, and what was measured."""
    source = f"[`{rung.name}.py`](../triton_gemm/ladder/{rung.name}.py)"
    twins = [f"[`{stem}.cu`](../reference_cuda/{stem}.cu)" for stem in rung.twins]
    lines = ["Source: " + ", ".join([source, *twins]) + "."]
    lines += [f"**{name}** {rung.header[name]}" for name in HEADER_OF_A_SECTION]
    lines += filter(None, [rung_diff.difference(rung)])
    measured = [line for record in results.records for line in _measured(rung, record)]
    lines += [f"**Measured** {line}" for line in measured or [NOTHING]]
    lines += [f"**{name}** {rung.header[name]}" for name in ("Bound by", "Next")]
    return "\n\n".join(lines)


def _measured(rung: Rung, record: Record) -> Iterator[str]:
    """What a rung did on one GPU, in words; nothing if it was not asked."""
    step = next((step for step in views.ladder(record) if step.rung == rung), None)
    if step is None:
        return
    on = f"on {environment.short(record.environment['gpu'])}:"
    if step.tflops is None:
        yield f"{on} {step.own.get('failed') or step.own.get('absent')}"
        return
    size = views.ladder_size(record)
    says = f"{on} {tables.number(step.tflops)} TFLOPS at {size} x {size} x {size}"
    share = step.share(step.own)
    if share:
        says += f", {tables.percent(share)} of cuBLAS"
    if step.twin_tflops:
        says += f"; {step.tflops / step.twin_tflops:.2f} times its fastest twin, `{step.twin}`"
    factor = next((factor for factor in views.factors(record) if factor.rung == rung), None)
    if factor and factor.measured:
        says += f"; {factor.measured:.2f} times {factor.over}, where {factor.predicted:g} was predicted"
    yield f"{says}. Configuration: {step.own['config']}."


def _link(file: Path, folder: Path) -> str:
    return Path(os.path.relpath(file, folder)).as_posix()


def _picture(record: Record, file: str, says: str, folder: Path) -> str:
    return f"![{says} on {record.environment['gpu']}]({_link(record.folder / file, folder)})"


def _made(record: Record, folder: Path) -> str:
    """What a ladder was measured on and with."""
    size = views.ladder_size(record)
    report = f"[the whole report]({_link(record.folder / page.FILE, folder)})"
    origin = environment.origin([record.environment], "ladder")
    return f"{environment.named(record.environment)}; M = N = K = {size}; {report}. {origin}"


def _ladder(results: Results, folder: Path) -> str:
    """The whole table of every GPU."""
    return "\n\n".join(f"{_made(record, folder)}\n\n{tables.ladder(record)}" for record in results.records) or NOTHING


def _ladders(results: Results, folder: Path) -> str:
    """One table for all GPUs, with less in it."""
    made = "\n".join(f"- {_made(record, folder)}" for record in results.records)
    return f"{made}\n\n{tables.ladders(results.records)}" if made else NOTHING


def _of_main(contents: Callable[[Record], str]) -> Block:
    """A table of the main record, and which GPU it is of."""
    return lambda results, folder: (
        f"{results.main.environment['gpu']}:\n\n{contents(results.main)}" if results.main else NOTHING
    )


def _picture_of_main(file: str, says: str) -> Block:
    return lambda results, folder: _picture(results.main, file, says, folder) if results.main else NOTHING


def _targets(record: Record) -> str:
    rows = [
        (outcome.what, f"{outcome.wanted:.2f}", f"{outcome.measured:.2f}", "met" if outcome.met else "missed")
        for outcome in targets.outcomes(record)
    ]
    return tables.table(["target", "wanted", "measured", ""], rows)


def _experiments(record: Record) -> str:
    return "\n\n".join(
        f"### {source.id}: {source.source}\n\n{tables.experiment(record, source)}"
        for source in seeds.EXPERIMENTS
        if source in views.measured_experiments(record)
    )


def _tf32(record: Record) -> str:
    return tables.tf32_rounding(record) if TF32_ROUNDING in record["experiments"] else NOTHING


# --- Of the bench ---


def _bench(results: Results, folder: Path) -> str:
    """What every suite comes to on each GPU, with a link to its page."""
    return bench_tables.compact(results.sweeps, lambda made: _link(bench_tables.page_of(RESULTS, made), folder))


def _versions(results: Results, folder: Path) -> str:
    """Every score of every GPU and Triton version, with a link to its page."""
    parts = [
        f"### {environment.short(made['gpu'])}, Triton {made['triton']}\n\n"
        f"{bench_tables.where(sweeps[0])}: [every shape]({_link(bench_tables.page_of(RESULTS, made), folder)}). "
        f"{bench_tables.origin(sweeps)}\n\n{bench_tables.summary(sweeps)}"
        for made, sweeps in bench_tables.by_place(results.sweeps)
    ]
    return "\n\n".join(parts) or bench_tables.NOTHING


# --- Of both ---

MORE_RATES = ("fp8", "int8", "fp64")  # of cuBLAS, which only the bench measures


def _gpus(results: Results, folder: Path) -> str:
    """What differs between the GPUs: their units, and what copies and cuBLAS's products reach there."""
    reports = {record.environment["gpu"]: record for record in results.records}
    sweeps: dict[str, list[Sweep]] = {}
    for sweep in environment.newest(results.sweeps):
        sweeps.setdefault(sweep["environment"]["gpu"], []).append(sweep)
    facts = {gpu: _facts(reports.get(gpu), sweeps.get(gpu, [])) for gpu in sorted({*reports, *sweeps})}
    names = dict.fromkeys(name for found in facts.values() for name in found)
    rows = [[name, *(found.get(name) for found in facts.values())] for name in names]
    return tables.table(["", *map(environment.short, facts)], rows) if facts else NOTHING


def _facts(record: Record | None, sweeps: list[Sweep]) -> dict[str, str]:
    """Of one GPU by name: what its report and its newest sweeps say."""
    made = record.environment if record else sweeps[0]["environment"]
    measured = record["ceilings"].get("measured", {}) if record else {}
    figures: dict[str, float | None] = {
        "SMs": made.get("num_sms"),
        "L2, MiB": made["l2_bytes"] / 2**20 if made.get("l2_bytes") else None,
        "memory, GiB": made["memory_bytes"] / 2**30 if made.get("memory_bytes") else None,
        "power limit, W": made.get("power_limit_w"),
        "SM clock while fp32 is multiplied, MHz": measured.get("sm_clock_mhz"),
        "copy, read and written, TB/s": measured.get("copy_tbs"),
        "copy, as suite `decode` measured it, TB/s": next((s["copy_tbs"] for s in sweeps if "copy_tbs" in s), None),
    }
    if record:
        figures |= {f"{roof.label}, TFLOPS": roof.tflops for roof in views.roofs(record)[1] if CUBLAS in roof.label}
    rates = {point.mode: point.tflops for point in bench_tables.points(sweeps) if point.provider == CUBLAS}
    figures |= {f"{CUBLAS} {mode}, {bench_tables.PRECISION_SIZE}, TFLOPS": rates.get(mode) for mode in MORE_RATES}
    return {name: f"{figure:,.4g}" if figure < 1000 else f"{figure:,.0f}" for name, figure in figures.items() if figure}


BLOCKS: dict[str, Block] = {
    **{rung.id: partial(_rung, rung) for rung in LADDER},
    "picture": lambda results, folder: (
        _picture(results.latest, "ladder.png", "The ladder", folder) if results.latest else NOTHING
    ),
    "climb": lambda results, _: summary.climb(results.latest) if results.latest else NOTHING,
    "summary": lambda results, _: summary.speed(results.sweeps, results.models),
    "ladder": _ladder,
    "ladders": _ladders,
    "targets": _of_main(_targets),
    "factors": _of_main(tables.factors),
    "roofline": _picture_of_main("roofline.png", "Every rung under measured ceilings"),
    "experiments": _of_main(_experiments),
    "tf32": _of_main(_tf32),
    **{f"sweep-{mode}": _picture_of_main(f"sweep-{mode}.png", "TFLOPS against size") for mode in MODES},
    "gpus": _gpus,
    "bench": _bench,
    "bench-versions": _versions,
    "precision": lambda results, folder: bench_tables.precision(results.sweeps),
    "gpt": lambda results, folder: example_tables.gpt(environment.newest(results.models)),
    "gpt-versions": lambda results, folder: example_tables.gpt(results.models),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="perf/pages.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is stale")
    if not parser.parse_args(arguments).check:
        rewrite()
        return 0
    old = stale()
    for path in old:
        print(f"{os.path.relpath(path)} is stale: python perf/pages.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
