"""Measure the host time of a warm call in processes under different conditions: python -m perf.bench processes.

CONDITIONS lists them: idle threads, a checkpoint being loaded, no compiler and others. The processes live at the same
time and are timed round-robin; two are clean. In each round a process times queues of 64 x 64 GEMMs in bf16: `matmul`,
and torch's `linear` under `use()` and outside it, where torch computes it. Exit status: 1 if a process fails, 2 for a
mistake in the call.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from pathlib import Path
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
from perf.measure.timer import percentiles
from triton_gemm.runtime import native_build
from triton_gemm.tuning.timing import Queue, interleave, no_garbage

NAME, FILE = "processes", "processes.csv"
CLEAN, BAR, IDLE, LOADING = "clean", "after a tqdm bar", "16 idle threads", "4 threads load a checkpoint"
NO_COMPILER = "no compiler, empty cache"
CONDITIONS = (CLEAN, "clean, another one", BAR, IDLE, LOADING, NO_COMPILER)
SIZE, CALLS, QUEUES, ROUNDS = 64, 100, 5, 10  # M, N and K; calls of a queue; queues of a round
CHILD = f"from {__name__} import child; child()"
COLUMNS = ("process", "call", "host_us", "host_us_p20", "host_us_p80", "over_clean", "launched_by", "threads")
Results = dict[str, list[dict[str, Any]]]  # of each condition and round: us of each call, and the rest of COLUMNS


def child() -> None:
    """Runs in a process, under the condition in sys.argv. For each line of stdin it measures, and prints JSON."""
    during = set_up(sys.argv[1])
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


def set_up(condition: str) -> Callable[[], AbstractContextManager[None]]:
    """Puts this process under the condition. Returns what makes a context manager, which is open during a round."""
    if condition == BAR:
        from tqdm import tqdm

        list(tqdm(range(3)))  # its monitor is a thread, and stays
    for _ in range(16 if condition == IDLE else 0):
        Thread(target=Event().wait, daemon=True).start()
    return loading() if condition == LOADING else nullcontext


def loading() -> Callable[[], AbstractContextManager[None]]:
    """Makes context managers within which 4 threads load a checkpoint of 64 MiB again and again."""
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


def started(condition: str, empty: str) -> subprocess.Popen[str]:
    """A process under the condition. empty: a folder that is PATH and the user's cache where there is no compiler. What
    Triton itself compiles there, it finds in its own cache, since the other processes have run it. The name there
    depends on what `file` says of Python's executable (platform.architecture), so PATH has that command."""
    changed: dict[str, str] = {}
    if condition == NO_COMPILER:
        changed = {"PATH": empty, "XDG_CACHE_HOME": empty, "CXX": "", "CC": ""}
        if command_file := shutil.which("file"):
            Path(empty, "file").symlink_to(command_file)
    surroundings = {**os.environ, "TRITON_GEMM_BACKGROUND": "0", **changed}
    command, pipe = [sys.executable, "-c", CHILD, condition], subprocess.PIPE
    return subprocess.Popen(command, cwd=environment.ROOT, env=surroundings, stdin=pipe, stdout=pipe, text=True)


def run_rounds(rounds: int) -> Results:
    """Runs all processes round-robin, in reverse order in odd rounds. An additional first round is warm-up and is
    dropped. If a process fails, the results do not have its condition."""
    results: Results = {condition: [] for condition in CONDITIONS}
    with TemporaryDirectory() as empty, ExitStack() as stack:
        running: dict[str, Any] = {}
        for number in range(rounds + 1):
            for name in list(results)[:: -1 if number % 2 else 1]:
                process = running.get(name) or running.setdefault(name, stack.enter_context(started(name, empty)))
                try:
                    os.write(process.stdin.fileno(), b"\n")
                    results[name].append(json.loads(process.stdout.readline()))
                except (BrokenPipeError, json.JSONDecodeError):
                    print(f"FAILED {name}: its process printed no result; its error is above", file=sys.stderr)
                    del results[name]
    return {name: found[1:] for name, found in results.items()}


def rows(results: Results) -> list[list[formats.Cell]]:
    """COLUMNS of each condition and call. over_clean: the median, over rounds, of the ratio to the clean process."""
    found: list[list[formats.Cell]] = []
    for condition, own in results.items():
        for call in own[0]["us"]:
            us = percentiles([one["us"][call] for one in own])
            over = median(one["us"][call] / clean["us"][call] for one, clean in zip(own, results[CLEAN], strict=True))
            times = [f"{us[name]:.2f}" for name in ("median", "p20", "p80")]
            found.append([condition, call, *times, f"{over:.3f}", own[-1]["launched_by"], own[-1]["threads"]])
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog=f"python -m perf.bench {NAME}", description=__doc__)
    parser.add_argument("--rounds", type=args.count, default=ROUNDS, metavar="N", help="rounds to time (%(default)s)")
    rounds = parser.parse_args(arguments).rounds
    surroundings: Mapping[str, Any] = environment.describe("host")
    if surroundings["gpu"] is None:
        print(f"error: {NAME} needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    if (why := native_build.ahead()) is not None:
        print(f"C++ launches no calls: {why}", file=sys.stderr)
    if CLEAN not in (results := run_rounds(rounds)):
        return 1
    measured = rows(results)
    file = environment.write_csv(surroundings, FILE, COLUMNS, measured)
    print(f"{formats.table(COLUMNS, measured)}\n\nWritten to {shown(file)}.")
    return 0 if len(results) == len(CONDITIONS) else 1
