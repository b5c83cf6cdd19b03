"""Measures how wrong products are: every kernel, in every precision and class of bits, against fp64.

Errors are shares of the largest that rounding allows, element by element (docs/accuracy.md). Integers and copies must
be exact, NaN and infinities where IEEE arithmetic puts them. It takes less than three minutes on an H200, most of them
compiling, and writes perf/results/<gpu>/accuracy/<Triton>.json. It fails where a result is wrong.

Without a GPU it measures small products in Triton's interpreter, which has no tensor cores: that shows what the kernels
compute, not how they round. Nothing is written then.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace
from multiprocessing import get_context
from typing import Any

import torch
from rich.console import Console

from perf.accuracy import tables
from perf.accuracy.candidates import KINDS, Kind, possible
from perf.accuracy.judge import PARTS, Row, failures, of_kind
from perf.common import arguments as args
from perf.common.files import shown, write_json
from perf.common.progress import Task, run
from perf.measure import environment
from perf.measure.environment import RESULTS
from triton_gemm.compat import INTERPRETED

IN_THE_INTERPRETER = (
    "In Triton's interpreter, on small products: kernels for Hopper are left out, and tensor cores' rounding is not "
    "shown. On a GPU this measures every kernel."
)


def measured(kinds: Sequence[Kind], device: torch.device, jobs: int, console: Console) -> dict[str, Any]:
    """A record, without its environment: `jobs` processes each take a kind at a time."""
    begin = time.monotonic()
    found: dict[str, dict[str, list[Row]]] = {}

    def measure(advance: Callable[[str], None]) -> None:
        first = sorted(kinds, key=lambda kind: not kind.every)  # what takes longest
        with ProcessPoolExecutor(jobs, get_context("spawn")) as pool:
            running = {pool.submit(of_kind, kind, device): kind.name for kind in first}
            for done in as_completed(running):
                found[running[done]] = done.result()
                advance(running[done])

    run([Task("measuring", len(kinds), measure)], console)
    made = {part: [row for kind in kinds for row in found[kind.name][part]] for part in PARTS}
    failed = [words for rows in made.values() for words in failures(rows)]
    return {**made, "failed": failed, "seconds": round(time.monotonic() - begin, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser("accuracy", __doc__)
    names = f"of {'; '.join(KINDS)}. Default: all"
    parser.add_argument("kinds", nargs="*", type=args.name_of(KINDS), metavar="KIND", help=names)
    parser.add_argument("--out", type=args.path, metavar="FILE", help="where the record goes, instead")
    parser.add_argument("--jobs", type=args.count, default=min(8, len(os.sched_getaffinity(0))), help="processes")
    given = parser.parse_args(arguments)
    if not torch.cuda.is_available() and not INTERPRETED:
        command = [sys.executable, "-m", "perf.accuracy", *(arguments if arguments is not None else sys.argv[1:])]
        surroundings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.run(command, env=surroundings, check=False).returncode
    device = torch.device("cpu" if INTERPRETED else "cuda:0")
    kinds = [kind for kind in KINDS.values() if kind.name in (given.kinds or KINDS) and possible(kind, device)]
    if INTERPRETED:
        kinds = [replace(kind, every=False) for kind in kinds]  # of each kernel one class
        print(IN_THE_INTERPRETER, flush=True)
    jobs = min(given.jobs, len(kinds))
    record = {"environment": environment.describe("accuracy"), **measured(kinds, device, jobs, Console(stderr=True))}
    print(f"{tables.text(record)}\n\n{tables.summary(record)}")
    out = given.out or (None if INTERPRETED or given.kinds else tables.RECORDS.path(RESULTS, record["environment"]))
    if out is not None:
        write_json(out, record)
        print(f"Written to {shown(out)} after {record['seconds']:.0f} s; `python -m perf.pages` shows it.")
    for words in record["failed"]:
        print(f"FAILED: {words}", file=sys.stderr)
    return 1 if record["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
