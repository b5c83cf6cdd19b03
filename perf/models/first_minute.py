"""The first minute of a model that answers requests, in a process of its own with an empty cache of compiled kernels.

Every request has another length, as they come to a server: products have numbers of rows that were not met before.
The minute begins when the weights are on the GPU. The providers' processes take turns, one request each, because the
host's clock frequency may halve within a minute. Only a process's own turns count towards its minute. Between them the
process and its descendants, such as compiler workers, are stopped.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from itertools import count
from random import Random
from select import select
from tempfile import TemporaryDirectory, TemporaryFile
from typing import Any, TextIO

import psutil
import torch

from perf.measure.environment import ROOT
from perf.models import zoo
from perf.models.measuring import within
from perf.models.tables import MEANWHILE, MOMENTS, OURS, PROVIDERS, TORCH
from perf.models.zoo import Model
from triton_gemm.runtime import background

SHORTEST, LONGEST = 16, 1024  # tokens of a request
GENERATED = 32  # of each answer
PATIENCE_S = 120.0  # for a process: to build its model, and for an answer
CHILD = f"from {__name__} import child; child()"
READY = "ready"
Curve = list[tuple[float, int]]  # at the end of each answer the seconds, and all tokens so far


class ProcessError(Exception):
    """A process ended without a result."""


def measure(model: Model) -> dict[str, Any]:
    """What is recorded: of each provider how many new tokens there were at each of MOMENTS. ProcessError if one of the
    processes fails."""
    take_turns(model, (TORCH,), 1.0)  # reads libraries from disk, which the others find in memory
    curves = take_turns(model, (*PROVIDERS, MEANWHILE), MOMENTS[-1])
    tokens = {provider: at_moments(curve) for provider, curve in curves.items()}
    last = f"{MOMENTS[-1]:g}"
    ratio = {"median": tokens[OURS][last] / tokens[TORCH][last]}
    return {"shape": f"1 x {GENERATED} for {SHORTEST} to {LONGEST}", "tokens": tokens, "ratio": ratio}


def take_turns(model: Model, providers: Sequence[str], seconds: float) -> dict[str, Curve]:
    """The curve of each provider. Fresh processes answer the same requests until each has used its seconds."""
    with ExitStack() as stack:
        # If SIGTERM ended this process at once, the stopped processes would be left behind.
        stack.callback(signal.signal, signal.SIGTERM, signal.signal(signal.SIGTERM, lambda *_: sys.exit(143)))
        processes = {provider: stack.enter_context(started(model, provider)) for provider in providers}
        curves: dict[str, Curve] = {provider: [] for provider in providers}
        for length in lengths():
            left = [x for x in providers if not curves[x] or curves[x][-1][0] < seconds]
            if not left:
                return curves
            for provider in left:
                before, tokens = curves[provider][-1] if curves[provider] else (0.0, 0)
                took = processes[provider].answer(length)
                curves[provider].append((round(before + took, 4), tokens + GENERATED))
    raise AssertionError("requests do not end")


def at_moments(curve: Sequence[tuple[float, int]], moments: Sequence[float] = MOMENTS) -> dict[str, float]:
    """How many tokens there were at each moment, by seconds; those of an answer come evenly."""
    found = {}
    for moment in moments:
        before = max((point for point in curve if point[0] <= moment), default=(0.0, 0))
        after = min((point for point in curve if point[0] > moment), default=before)
        share = (moment - before[0]) / (after[0] - before[0]) if after[0] > before[0] else 0.0
        found[f"{moment:g}"] = round(before[1] + share * (after[1] - before[1]), 1)
    return found


def lengths() -> Iterator[int]:
    """Of the requests, the same ones each time."""
    random = Random(0)
    for _ in count():
        yield round(SHORTEST * (LONGEST / SHORTEST) ** random.random())


class Process:
    """A provider's process, stopped except during its turns."""

    def __init__(self, provider: str, process: subprocess.Popen[bytes], errors: Any) -> None:
        self.provider, self.process, self.errors = provider, process, errors
        self.read = b""

    def expect(self) -> str:
        """The next line that it prints. ProcessError says how it ended instead."""
        assert self.process.stdout is not None
        deadline = time.monotonic() + PATIENCE_S
        while b"\n" not in self.read:
            if not select([self.process.stdout], [], [], max(0.0, deadline - time.monotonic()))[0]:
                raise ProcessError(f"{self.provider}: no answer within {PATIENCE_S:g} s")
            more = os.read(self.process.stdout.fileno(), 4096)
            if not more:
                code = self.process.wait()
                self.errors.seek(0)
                last = [line for line in self.errors.read().decode(errors="replace").splitlines() if line.strip()][-1:]
                raise ProcessError(f"{self.provider}: the process ended with {code}: {' '.join(last)[:300]}")
            self.read += more
        line, _, self.read = self.read.partition(b"\n")
        return line.decode()

    def answer(self, length: int) -> float:
        """Has it answer a request; the seconds that it took."""
        assert self.process.stdin is not None
        send(self.process.pid, signal.SIGCONT)
        with suppress(BrokenPipeError):  # `expect` says how it ended
            os.write(self.process.stdin.fileno(), f"{length}\n".encode())
        took = float(self.expect())
        send(self.process.pid, signal.SIGSTOP)
        return took


@contextmanager
def started(model: Model, provider: str) -> Iterator[Process]:
    """The process, which has built its model and is stopped; killed at the end. ProcessError says how it ended."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache, TemporaryFile() as errors:
        surroundings = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_GEMM_CACHE_DIR": f"{cache}/triton_gemm"}
        command = [sys.executable, "-c", CHILD, model.name, provider]
        pipe = subprocess.PIPE
        with subprocess.Popen(command, cwd=ROOT, env=surroundings, stdin=pipe, stdout=pipe, stderr=errors) as process:
            try:
                found = Process(provider, process, errors)
                while found.expect() != READY:  # libraries may print while they are imported
                    pass
                send(process.pid, signal.SIGSTOP)
                yield found
            finally:
                send(process.pid, signal.SIGKILL)


def send(pid: int, what: signal.Signals) -> None:
    """Sends a signal to a process and all of its descendants, parents first, until there are no new ones."""
    seen: set[psutil.Process] = set()
    with suppress(psutil.NoSuchProcess):
        process = psutil.Process(pid)
        while new := [x for x in (process, *process.children(recursive=True)) if x not in seen]:
            seen.update(new)
            for one in new:
                with suppress(psutil.NoSuchProcess):
                    one.send_signal(what)


def child() -> None:
    """In the process: measures the model and the provider that the command line names. Reads requests' lengths, a line
    each, and prints the seconds that an answer took, alone: what libraries print goes to the standard error."""
    name, provider = sys.argv[1:]
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    background.IDLE_S *= len(PROVIDERS) + 1  # which take turns
    given = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
    built: Any = zoo.build(zoo.BY_NAME[name], tiny=False, device="cuda", dtype=torch.bfloat16)
    random = torch.Generator("cuda").manual_seed(2)

    def answer(length: int) -> None:
        prompt = torch.randint(1, built.config.vocab_size, (1, length), generator=random, device="cuda")
        built.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **given)
        torch.cuda.synchronize()

    torch.cuda.synchronize()
    with within(provider):
        print(READY, file=answers)
        respond(answer, answers)


def respond(answer: Callable[[int], None], answers: TextIO) -> None:
    """Answers the requests of the standard input."""
    for line in sys.stdin:
        began = time.perf_counter()
        answer(int(line))
        print(time.perf_counter() - began, file=answers)
