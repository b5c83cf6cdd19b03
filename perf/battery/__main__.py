"""Runs all that shows the kernels to be right on a GPU, and prints one table: `make gpu-battery`.

Sections share the GPU and the cores. What has not ended after --budget seconds has failed. Some sections run kernels
with planted bugs, too, which are to be found. Writes perf/results/<gpu>/battery-<Triton>.json. Exit status: 1 if
something failed or a planted bug was not found, 3 if nothing did but something could not run here, 2 for a mistake in
the call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.battery import running, tables
from perf.battery.sections import Section, named, sections
from perf.common import arguments as args
from perf.common import progress
from perf.common.files import shown, write_json
from perf.measure import environment
from perf.measure.environment import RESULTS, ROOT

BUDGET_S = 570
LOGS = ROOT / "build" / "battery"  # what each command said, and the numerics' record


def battery(chosen: Sequence[Section], cores: int, budget: float) -> dict[str, Any]:
    """A record, without its environment."""
    begin = time.monotonic()
    outcomes: list[running.Outcome] = []

    def work(advance: progress.Advance) -> None:
        outcomes.extend(running.run(chosen, cores, budget, advance, LOGS))

    steps = sum(len(section.jobs) for section in chosen)
    progress.run([progress.Task("starting", steps, work)], Console(stderr=True))
    rows = [running.summary(section, outcomes) for section in chosen]
    return {"sections": rows, "cores": cores, "seconds": round(time.monotonic() - begin, 1)}


def status(record: dict[str, Any]) -> int:
    """The command's exit status."""
    if any(section["failures"] for section in record["sections"]):
        return 1
    return 3 if any(section["not_run"] for section in record["sections"]) else 0


def main(arguments: Sequence[str] | None = None) -> int:
    every = [section.name for section in sections(1, BUDGET_S, Path())]
    parser = argparse.ArgumentParser(prog="python -m perf.battery", description=__doc__)
    names = ", ".join(every)
    parser.add_argument("--only", nargs="+", choices=every, default=[], metavar="SECTION", help=f"of {names}")
    parser.add_argument("--budget", type=args.count, default=BUDGET_S, help="seconds after which what runs is ended")
    parser.add_argument("--cores", type=args.count, default=len(os.sched_getaffinity(0)), help="processes at a time")
    parser.add_argument("--out", type=args.path, metavar="FILE", help="where the record goes, instead")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        parser.error("there is no CUDA device here")
    chosen = named(sections(given.cores, given.budget, LOGS), given.only)
    record = {"environment": environment.describe("battery"), **battery(chosen, given.cores, given.budget)}
    print(f"{tables.text(record)}\n\nWhat each command said: {shown(LOGS)}")
    out = given.out or (None if given.only else tables.path_of(RESULTS, record["environment"]))
    if out is not None:
        out.parent.mkdir(parents=True, exist_ok=True)
        write_json(out, record)
        print(f"\nWritten to {shown(out)} after {record['seconds']:.0f} s; `python -m perf.pages` shows it.")
    return status(record)


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
