"""Puts the committed results and the rungs' headers into README.md and pages in docs/, between markers.

`python perf/pages.py` rewrites them; with `--check` it changes nothing and fails where they are stale.
A block reads `<!-- results:NAME -->`, its contents, `<!-- /results -->`.
"""

from __future__ import annotations

import argparse
import os
import re
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from perf import bench_tables, draw, example_tables, seeds, tables, targets, views
from perf.environment import ROOT
from perf.providers import MODES
from perf.record import FILE, Record, read_json
from perf.scores import Sweep
from perf.shapes import SUITES
from perf.suite import TF32_ROUNDING
from triton_gemm.ladder import LADDER, Rung

RESULTS = ROOT / "perf" / "results"
PAGES = (ROOT / "README.md", *(ROOT / "docs" / f"{name}.md" for name in ("ladder", "performance", "precision")))
PICTURE = "precision.png"  # beside the newest sweeps
NOTHING = "No measurement is committed yet; `make report` on a GPU makes one."
BLOCK = re.compile(r"(<!-- results:([\w-]+) -->\n)(.*?)(<!-- /results -->)", re.DOTALL)
HEADER_OF_A_SECTION = ("Changes", "Why", "Predicts", "Requires")
Block = Callable[[Record, Path], str]


def committed() -> Record | None:
    """The committed record; of several the one of the GPU with the most rungs on its ladder."""
    records = [Record.read(path.parent) for path in sorted(RESULTS.glob(f"*/{FILE}"))]
    return max(records, key=lambda record: len(views.ladder(record)), default=None)


def stale() -> list[Path]:
    """The pages that differ from what they would be rewritten to."""
    record = committed()
    return [path for path in PAGES if filled(path.read_text(), record, path.parent) != path.read_text()]


def rewrite() -> None:
    record = committed()
    for path in PAGES:
        path.write_text(filled(path.read_text(), record, path.parent))
    for folder in RESULTS.glob(f"*/{bench_tables.FOLDER}/*"):
        sweeps = [read_json(path) for path in folder.glob("*.json")]
        points = bench_tables.points(sweeps)
        if points:
            draw.precisions(points, bench_tables.where(sweeps[0]), folder / PICTURE)


def filled(text: str, record: Record | None, folder: Path) -> str:
    """The page `text`, which lies in `folder`, with its blocks made anew; raises ValueError for an unknown block."""

    def block(match: re.Match[str]) -> str:
        opening, name, _, closing = match.groups()
        return f"{opening}{contents(name, record, folder)}\n{closing}"

    return BLOCK.sub(block, text)


def contents(name: str, record: Record | None, folder: Path) -> str:
    rung = next((rung for rung in LADDER if rung.id == name), None)
    if rung is not None:
        return _rung(rung, record)
    if name in SWEEP_BLOCKS:
        return SWEEP_BLOCKS[name](bench_tables.committed(RESULTS))
    if name == "gpt":
        return example_tables.gpt(example_tables.committed(RESULTS))
    if name not in BLOCKS:
        known = [*BLOCKS, *SWEEP_BLOCKS, "gpt", *(rung.id for rung in LADDER)]
        raise ValueError(f"no block {name!r}; there are {', '.join(known)}")
    return BLOCKS[name](record, folder) if record else NOTHING


def _rung(rung: Rung, record: Record | None) -> str:
    """A rung's section: its header, and what was measured between prediction and consequence."""
    source = f"[`{rung.name}.py`](../triton_gemm/ladder/{rung.name}.py)"
    twins = [f"[`{stem}.cu`](../reference_cuda/{stem}.cu)" for stem in rung.twins]
    lines = ["Source: " + ", ".join([source, *twins]) + "."]
    lines += [f"**{name}** {rung.header[name]}" for name in HEADER_OF_A_SECTION]
    lines.append(f"**Measured** {_measured(rung, record)}")
    lines += [f"**{name}** {rung.header[name]}" for name in ("Bound by", "Next")]
    return "\n\n".join(lines)


def _measured(rung: Rung, record: Record | None) -> str:
    step = next((step for step in views.ladder(record) if step.rung == rung), None) if record else None
    if record is None or step is None:
        return NOTHING
    if step.tflops is None:
        return str(step.own.get("failed") or step.own.get("absent"))
    size = views.ladder_size(record)
    says = f"{tables.number(step.tflops)} TFLOPS at {size} x {size} x {size}"
    if step.own.get("ratio"):
        says += f", {tables.percent(step.own['ratio']['median'])} of cuBLAS"
    if step.twin_tflops:
        says += f"; {step.tflops / step.twin_tflops:.2f} times its fastest twin, `{step.twin}`"
    factor = next((factor for factor in views.factors(record) if factor.rung == rung), None)
    if factor and factor.measured:
        says += f"; {factor.measured:.2f} times {factor.over}, where {factor.predicted:g} was predicted"
    return f"{says}. Configuration: {step.own['config']}."


def _link(record: Record, folder: Path, file: str) -> str:
    return Path(os.path.relpath(record.folder / file, folder)).as_posix()


def _picture(file: str, says: str) -> Block:
    return lambda record, folder: f"![{says} on {record.environment['gpu']}]({_link(record, folder, file)})"


def _ladder(record: Record, folder: Path) -> str:
    made = record.environment
    size = views.ladder_size(record)
    where = f"{made['gpu']}, M = N = K = {size}, torch {made['torch']}, Triton {made['triton']}, CUDA {made['cuda']}"
    return f"{where}; [the whole report]({_link(record, folder, 'report.md')}).\n\n{tables.ladder(record)}"


def _targets(record: Record, folder: Path) -> str:
    rows = [
        (outcome.what, f"{outcome.wanted:.2f}", f"{outcome.measured:.2f}", "met" if outcome.met else "missed")
        for outcome in targets.outcomes(record)
    ]
    return tables.table(["target", "wanted", "measured", ""], rows)


def _experiments(record: Record, folder: Path) -> str:
    return "\n\n".join(
        f"### {source.id}: {source.source}\n\n{tables.experiment(record, source)}"
        for source in seeds.EXPERIMENTS
        if source in views.measured_experiments(record)
    )


def _tf32(record: Record, folder: Path) -> str:
    return tables.tf32_rounding(record) if TF32_ROUNDING in record["experiments"] else NOTHING


BLOCKS: dict[str, Block] = {
    "picture": _picture("ladder.png", "The ladder"),
    "ladder": _ladder,
    "targets": _targets,
    "factors": lambda record, folder: tables.factors(record),
    "roofline": _picture("roofline.png", "Every rung under measured ceilings"),
    "experiments": _experiments,
    "tf32": _tf32,
    **{f"sweep-{mode}": _picture(f"sweep-{mode}.png", "TFLOPS against size") for mode in MODES},
}
# Of the suites that `perf/bench.py` measures, which have files of their own.
SWEEP_BLOCKS: dict[str, Callable[[list[Sweep]], str]] = {
    "bench": bench_tables.summary,
    "precision": bench_tables.precision,
    **{f"bench-{name}": partial(bench_tables.suite, name=name) for name in SUITES},
}


def main() -> int:
    parser = argparse.ArgumentParser(prog="perf/pages.py", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is stale")
    if not parser.parse_args().check:
        rewrite()
        return 0
    old = stale()
    for path in old:
        print(f"{path.relative_to(ROOT)} is stale: python perf/pages.py", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
