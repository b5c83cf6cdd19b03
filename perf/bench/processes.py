"""Measure what a warm call costs the host in processes with other things in them: python -m perf.bench processes.

Processes live side by side and take turns, two clean ones among them. A turn times queues of 64 x 64 GEMMs in bf16:
`matmul`, and torch's `linear` under `use()` and after it, where torch computes it. Exit status: 1 if a process fails,
2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import csv
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from statistics import median
from tempfile import TemporaryDirectory
from threading import Event, Thread, active_count
from typing import Any

import torch

import triton_gemm
from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown
from perf.measure import environment, operands
from perf.measure.timer import Queue, interleave, percentiles
from triton_gemm.runtime import native_build
from triton_gemm.tuning.timing import no_garbage

NAME, FILE = "processes", "processes.csv"
CLEAN, BAR, IDLE, LOADING = "clean", "after a tqdm bar", "16 idle threads", "4 threads load a checkpoint"
NO_COMPILER = "no compiler, empty cache"
KINDS = (CLEAN, "clean, another one", BAR, IDLE, LOADING, NO_COMPILER)
SIZE, CALLS, QUEUES, ROUNDS = 64, 100, 5, 10  # of operands, of a queue, of a turn
CHILD = f"from {__name__} import child; child()"
COLUMNS = ("process", "call", "host_us", "host_us_p20", "host_us_p80", "over_clean", "launched_by", "threads")
OF_ENVIRONMENT = ("date", "commit", "sources", "gpu", "driver", "torch", "triton", "cuda", "python")
Turns = dict[str, list[dict[str, Any]]]  # of each kind: microseconds of each call, and the rest of COLUMNS


def child() -> None:
    """In a process, whose kind the command line says: a turn for each line that it reads, printed as JSON."""
    during = become(sys.argv[1])
    a, b = torch.randn(2, SIZE, SIZE, device=operands.DEVICE, dtype=torch.bfloat16)
    linear = partial(torch.nn.functional.linear, a, b)
    calls: dict[str, Callable[[], Callable[[], float]]] = {
        "matmul": partial(queue, partial(triton_gemm.matmul, a, b), nullcontext),
        "linear under use()": partial(queue, linear, triton_gemm.use),
        "linear by torch": partial(queue, linear, nullcontext),
    }
    for _ in sys.stdin:
        with during(), no_garbage():
            us = {name: 1000 * median(times) for name, times in interleave(calls, QUEUES).items()}
            threads = active_count()
        by = "Python" if native_build.state() else "C++"
        print(json.dumps({"us": us, "launched_by": by, "threads": threads}), flush=True)


def queue(call: Callable[[], object], within: Callable[[], Any]) -> Callable[[], float]:
    with within():
        return Queue([call], CALLS, drain=False).start()


def become(kind: str) -> Callable[[], AbstractContextManager[None]]:
    """Makes this process one of that kind; what it returns is open in turns."""
    if kind == BAR:
        from tqdm import tqdm

        list(tqdm(range(3)))  # its monitor is a thread, and stays
    for _ in range(16 if kind == IDLE else 0):
        Thread(target=Event().wait, daemon=True).start()
    return loading() if kind == LOADING else nullcontext


def loading() -> Callable[[], AbstractContextManager[None]]:
    """Blocks in which 4 threads load a checkpoint of 64 MiB again and again."""
    from safetensors.torch import load_file, save_file

    folder = TemporaryDirectory()
    tensors = {f"{i}.weight": torch.zeros(512, 1024, dtype=torch.bfloat16) for i in range(64)}
    torch.save(tensors, f"{folder.name}/torch")
    save_file(tensors, f"{folder.name}/safetensors")

    def load(end: Event) -> None:
        while not end.is_set():
            torch.load(f"{folder.name}/torch"), load_file(f"{folder.name}/safetensors")

    @contextmanager
    def during() -> Iterator[None]:
        end = Event()
        threads = [Thread(target=load, args=(end,)) for _ in range(4)]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            end.set()
            for thread in threads:
                thread.join()

    return during


def started(kind: str, empty: str) -> subprocess.Popen[str]:
    """A process of that kind. empty: the folder that is PATH and cache of one without a compiler; what Triton built for
    those before is in Triton's own cache."""
    changed = {"PATH": empty, "XDG_CACHE_HOME": empty, "CXX": ""} if kind == NO_COMPILER else {}
    surroundings = {**os.environ, "TRITON_GEMM_BACKGROUND": "0", **changed}
    command, pipe = [sys.executable, "-c", CHILD, kind], subprocess.PIPE
    return subprocess.Popen(command, cwd=environment.ROOT, env=surroundings, stdin=pipe, stdout=pipe, text=True)


def take_turns(rounds: int) -> Turns:
    """After a turn that is not counted; every other round backwards. A kind whose process fails is left out."""
    turns: Turns = {kind: [] for kind in KINDS}
    with TemporaryDirectory() as empty, ExitStack() as stack:
        running: dict[str, Any] = {}
        for number in range(rounds + 1):
            for kind in list(turns)[:: -1 if number % 2 else 1]:
                process = running.get(kind) or running.setdefault(kind, stack.enter_context(started(kind, empty)))
                try:
                    os.write(process.stdin.fileno(), b"\n")
                    turns[kind].append(json.loads(process.stdout.readline()))
                except (BrokenPipeError, json.JSONDecodeError):
                    print(f"FAILED {kind}: its process printed no turn, as it says above", file=sys.stderr)
                    del turns[kind]
    return {kind: found[1:] for kind, found in turns.items()}


def rows(turns: Turns) -> list[list[formats.Cell]]:
    """COLUMNS of each kind and call. over_clean: the median of the ratios to the clean process in the same round."""
    found: list[list[formats.Cell]] = []
    for kind, own in turns.items():
        for call in own[0]["us"]:
            us = percentiles([turn["us"][call] for turn in own])
            over = median(turn["us"][call] / clean["us"][call] for turn, clean in zip(own, turns[CLEAN], strict=True))
            times = [f"{us[name]:.2f}" for name in ("median", "p20", "p80")]
            found.append([kind, call, *times, f"{over:.3f}", own[-1]["launched_by"], own[-1]["threads"]])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m perf.bench {NAME}", description=__doc__)
    parser.add_argument("--rounds", type=args.count, default=ROUNDS, metavar="N", help="turns of each (%(default)s)")
    rounds = parser.parse_args(arguments).rounds
    made: Mapping[str, Any] = environment.describe("host")
    if made["gpu"] is None:
        print(f"error: {NAME} needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    if (why := native_build.ahead()) is not None:
        print(f"C++ launches no calls: {why}", file=sys.stderr)
    if CLEAN not in (turns := take_turns(rounds)):
        return 1
    measured = rows(turns)
    file = environment.RESULTS / environment.slug(made["gpu"]) / FILE
    file.parent.mkdir(parents=True, exist_ok=True)
    with file.open("w", newline="") as opened:
        of = [made[name] for name in OF_ENVIRONMENT]
        csv.writer(opened, lineterminator="\n").writerows([[*COLUMNS, *OF_ENVIRONMENT], *([*x, *of] for x in measured)])
    print(f"{formats.table(COLUMNS, measured)}\n\nWritten to {shown(file)}.")
    return 0 if len(turns) == len(KINDS) else 1
