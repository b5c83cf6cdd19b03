"""Measures how wrong products are: every kernel, in every precision and class of bits, against fp64.

Errors are shares of the largest that rounding allows, element by element (docs/accuracy.md). Integers and copies must
be exact, NaN and infinities where IEEE arithmetic puts them. It takes less than three minutes on an H200, most of them
compiling, and writes perf/results/<gpu>/accuracy/<Triton>.json. It fails where a result is wrong.

Without a GPU it measures small products in Triton's interpreter, which has no tensor cores: that shows what the kernels
compute, not how they round. Nothing is written then.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from perf.accuracy import tables
from perf.accuracy.judge import Bench, benches, ends, failures, long_benches
from perf.accuracy.ways import KINDS, LONG, SIZES, SMALL, SMALL_LONG, Kind
from perf.common import arguments as given_arguments
from perf.common.files import shown, write_json
from perf.common.progress import Task, run
from perf.measure import environment
from perf.measure.environment import RESULTS
from triton_gemm.compat import INTERPRETED
from triton_gemm.device import device_info
from triton_gemm.tuning.compiling import Compiler

IN_THE_INTERPRETER = (
    "In Triton's interpreter, on small products: kernels for Hopper are left out, and tensor cores' rounding is not "
    "shown. On a GPU this measures every kernel."
)


def possible(kind: Kind, device: torch.device) -> bool:
    """Whether the device multiplies such operands."""
    fp8 = kind.dtype.itemsize == 1 and kind.dtype.is_floating_point
    return not fp8 or device_info(device).capability >= (8, 9)


def prepared(kinds: Sequence[Kind], device: torch.device) -> tuple[list[Bench], list[Bench]]:
    """All that is measured: ways, and long sums."""
    sizes, long = (SMALL, SMALL_LONG) if INTERPRETED else (SIZES, LONG)
    found = [bench for kind in kinds for bench in benches(kind, sizes, device)]
    plain = [kind for kind in kinds if not (kind.scales or kind.groups or kind.odd)]
    return found, [bench for kind in plain for bench in long_benches(kind, long, device)]


def compile_all(found: Sequence[Bench], advance: Callable[[str], None]) -> None:
    """Compiles in threads; raises RuntimeError for what cannot be compiled."""

    def one(job: object) -> None:
        torch.cuda.set_device(0)
        found[job].compile()  # type: ignore[call-overload]

    compiler = Compiler(one)
    compiler.add(range(len(found)))
    try:
        for i in range(len(found)):
            while not compiler.done(i):
                compiler.pause(0.1)
            why = compiler.failure(i)
            if why is not None:
                raise RuntimeError(f"{found[i].way.selection}: {why}")
            advance(f"compiled {found[i].operands.kind.name}")
    finally:
        compiler.close()


def measured(kinds: Sequence[Kind], device: torch.device, console: Console) -> dict[str, Any]:
    """A record, without its environment."""
    begin = time.monotonic()
    found, long = prepared(kinds, device)
    made: dict[str, list[dict[str, Any]]] = {"ways": [], "long": [], "ends": []}

    def ask(part: str, bench: Bench) -> Callable[[Callable[[str], None]], None]:
        def asked(advance: Callable[[str], None]) -> None:
            made[part].append(bench.measure())
            advance(f"{bench.operands.kind.name}: {bench.way.bits}")

        return asked

    every = [*found, *long]
    tasks = [] if INTERPRETED else [Task("compiling", len(every), lambda advance: compile_all(every, advance))]
    tasks += [Task("measuring", 1, ask("ways", bench)) for bench in found]
    tasks += [Task("long sums", 1, ask("long", bench)) for bench in long]
    run(tasks, console)
    made["ends"] = [{"kind": kind.name, "wrong": wrong} for kind in kinds if (wrong := ends(kind, device))]
    failed = [words for part in made.values() for words in failures(part)]
    return {**made, "failed": failed, "seconds": round(time.monotonic() - begin, 1)}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.accuracy", description=__doc__)
    parser.add_argument("kinds", nargs="*", metavar="KIND", help=f"of {'; '.join(KINDS)}. Default: all")
    parser.add_argument("--out", type=given_arguments.path, metavar="FILE", help="where the record goes, instead")
    given = parser.parse_args(arguments)
    unknown = [name for name in given.kinds if name not in KINDS]
    if unknown:
        parser.error(f"no products {', '.join(unknown)}; there are {'; '.join(KINDS)}")
    if not torch.cuda.is_available() and not INTERPRETED:
        command = [sys.executable, "-m", "perf.accuracy", *(arguments if arguments is not None else sys.argv[1:])]
        surroundings = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"}
        return subprocess.run(command, env=surroundings, check=False).returncode
    device = torch.device("cpu" if INTERPRETED else "cuda:0")
    kinds = [kind for kind in KINDS.values() if kind.name in (given.kinds or KINDS) and possible(kind, device)]
    if INTERPRETED:  # of each kernel one class
        kinds = [replace(kind, every=False) for kind in kinds]
    if INTERPRETED:
        print(IN_THE_INTERPRETER, flush=True)
    record = {"environment": environment.describe("accuracy"), **measured(kinds, device, Console(stderr=True))}
    print(tables.text(record))
    _keep(record, given.out, whole=not given.kinds)
    for words in record["failed"]:
        print(f"FAILED: {words}", file=sys.stderr)
    return 1 if record["failed"] else 0


def _keep(record: dict[str, Any], out: Path | None, *, whole: bool) -> None:
    """Writes a record of a GPU, if it has all kinds, or where it is told to."""
    if out is None and (INTERPRETED or not whole):
        return
    path = out or tables.path_of(RESULTS, record["environment"])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, record)
    print(f"Written to {shown(path)} after {record['seconds']:.0f} s; `python -m perf.pages` shows it.")


if __name__ == "__main__":
    sys.exit(main())
