"""Climb the ladder: measure every rung, its CUDA twin and cuBLAS, and write pictures, tables and one page.

Without a GPU: every rung in Triton's interpreter against fp64, and what it compiles to for five architectures.
A second run continues where the first one ended. Exit status: 1 if a provider gave wrong results or ncu failed, 2 for a
mistake in the call, 130 if interrupted.
"""

from __future__ import annotations

import argparse
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from rich.console import Console

from perf.common import arguments as args
from perf.common import progress
from perf.common.files import shown
from perf.ladder import counters, plots, report_page, tasks
from perf.ladder.record import Record
from perf.ladder.rungs_and_twins import MODES, rungs_of
from perf.measure import environment
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.tuning.timing import DeviceLostError

DTYPES = {"fp32": "ieee", "tf32": "tf32", "fp16": "fp16", "bf16": "bf16"}


def main(arguments: Sequence[str] | None = None) -> int:
    options, folder, fresh = parse(arguments)
    console = Console(stderr=True)
    surroundings = environment.describe("ladder")
    folder = folder or default_folder(surroundings["gpu"])
    try:
        record, state = Record.open(folder, surroundings, fresh=fresh, adding=options.tuning or options.counters)
    except OSError as error:
        print(f"error: cannot write to {folder}: {error.strerror or error}", file=sys.stderr)
        return 2
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    machine = surroundings["gpu"] or "no GPU: static facts and the interpreter, no timings"
    print(f"{machine}; {state} in {shown(folder)}", file=sys.stderr)
    try:
        measure(record, options, console)
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept; run again to go on", file=sys.stderr)
        return 130
    except counters.CountingError as error:
        print(f"error: ncu: {error}; what was measured is kept", file=sys.stderr)
        return 1
    except DeviceLostError as lost:
        print(f"error: the GPU cannot be used any more {lost}; what was measured is kept", file=sys.stderr)
        return 1
    draw = plots.tunings if options.tuning else plots.everything
    pictures = [] if options.counters else draw(record, folder)
    adding = options.tuning or options.counters
    written = report_page.write(record, folder.glob("*.png") if adding else pictures)
    print(f"report: {shown(written)}, {len(pictures)} pictures next to it", file=sys.stderr)
    failures = record.failures()
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


def measure(record: Record, options: tasks.Options, console: Console) -> None:
    """Runs what the record lacks."""
    record.save()
    twins: tasks.Twins = {}
    if record.environment["gpu"] is None:
        progress.run(tasks.cpu_tasks(record, options), console)
    elif options.tuning:
        progress.run(tasks.tuning_tasks(record, options), console)
    elif options.counters:
        progress.run(tasks.counting_tasks(record, options), console)
    else:
        progress.run([tasks.build_task(record, twins)], console)
        progress.run(tasks.gpu_tasks(record, options, twins), console)


def default_folder(gpu: str | None) -> Path:
    """Results of a GPU belong to the project; facts that every machine can find again do not."""
    return environment.RESULTS / environment.slug(gpu) if gpu else environment.ROOT / "build" / "report-no-gpu"


def parse(arguments: Sequence[str] | None) -> tuple[tasks.Options, Path | None, bool]:
    parser = argparse.ArgumentParser(prog="perf/report.py", description=__doc__)
    add = parser.add_argument
    add(
        "--quick",
        action="store_true",
        help="two sizes, short timings and no bf16, unless --sizes and --dtype say otherwise (on a GPU); "
        "without a GPU each rung's first configuration alone",
    )
    add("--rungs", type=_rungs, default=LADDER, metavar="k03,k06", help="only these (and their twins)")
    add("--dtype", choices=DTYPES, help="only this precision class (on a GPU)")
    add("--sizes", type=_sizes, metavar="512,1024", help="M = N = K of the sweeps (on a GPU)")
    add("--out", type=args.path, metavar="DIR", help="default perf/results/<gpu>")
    add(
        "--counters",
        action="store_true",
        help="only Nsight Compute's counters of each rung, added to the record that is there (on a GPU, with ncu)",
    )
    add(
        "--tuning",
        action="store_true",
        help="only what the autotuner times for each rung at 4096, added to the record that is there (on a GPU)",
    )
    add("--fresh", action="store_true", help="drop the record that is in the folder")
    chosen = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        args.refuse(
            parser, chosen, ("dtype", "sizes", "counters", "tuning"), "torch sees no GPU here, and nothing is timed"
        )
    if chosen.dtype and not rungs_of(DTYPES[chosen.dtype], chosen.rungs):
        parser.error(f"none of the rungs of --rungs multiplies {chosen.dtype}")
    adding = [f"--{name}" for name in ("tuning", "counters") if getattr(chosen, name)]
    if len(adding) > 1 or (adding and chosen.fresh):
        other = "--fresh" if chosen.fresh else adding[1]
        parser.error(f"{adding[0]} adds to the record that is there, and measures nothing else: leave out {other}")
    if chosen.counters:
        sizes = f"{counters.SIZE} and {counters.LARGE_SIZE}"
        args.refuse(parser, chosen, ("dtype", "sizes", "quick"), f"--counters counts each rung at {sizes}")
        if shutil.which("ncu") is None:
            parser.error("--counters needs Nsight Compute: ncu is not on PATH")
    few = chosen.quick or chosen.tuning
    modes = (DTYPES[chosen.dtype],) if chosen.dtype else tasks.QUICK_MODES if few else MODES
    options = tasks.Options(
        rungs=chosen.rungs,
        every_rung=chosen.rungs == LADDER and chosen.dtype is None,
        modes=modes,
        sizes=chosen.sizes or (tasks.QUICK_SIZES if few else tasks.SIZES),
        quick=chosen.quick,
        counters=chosen.counters,
        tuning=chosen.tuning,
    )
    return options, chosen.out, chosen.fresh


def _rungs(text: str) -> tuple[Rung, ...]:
    wanted = text.split(",")
    known = {key: rung for rung in LADDER for key in (rung.id, rung.name)}
    for name in wanted:
        if name not in known:
            raise argparse.ArgumentTypeError(f"no rung {name!r}; there are {', '.join(rung.id for rung in LADDER)}")
    return tuple(rung for rung in LADDER if rung.id in wanted or rung.name in wanted)


def _sizes(text: str) -> tuple[int, ...]:
    try:
        sizes = tuple(sorted({int(size) for size in text.split(",")}))
    except ValueError:
        raise argparse.ArgumentTypeError(f"sizes are whole numbers with commas between, not {text!r}") from None
    if sizes[0] < 1:
        raise argparse.ArgumentTypeError("sizes start at 1")
    return sizes
