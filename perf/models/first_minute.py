"""The first minute of a model that answers requests, in a process of its own with an empty cache of compiled kernels.

Every request has another length, as they come to a server: products have numbers of rows that were not met before.
The minute begins when the weights are on the GPU.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

from perf.measure.environment import ROOT
from perf.models import zoo
from perf.models.measuring import within
from perf.models.tables import MEANWHILE, MOMENTS, OURS, PROVIDERS, TORCH
from perf.models.zoo import Model

SHORTEST, LONGEST = 16, 1024  # tokens of a request
GENERATED = 32  # of each answer
PATIENCE_S = 300.0  # for a process: the minute, and what comes before it
CHILD = f"from {__name__} import child; child()"


class ProcessError(Exception):
    """A process ended without a result."""


def measure(model: Model) -> dict[str, Any]:
    """What is recorded: of each provider how many new tokens there were at each of MOMENTS."""
    found: dict[str, Any] = {"shape": f"1 x {GENERATED} for {SHORTEST} to {LONGEST}", "tokens": {}}
    _run(model, TORCH, 1.0)  # reads libraries from disk, which the others find in memory
    for provider in (*PROVIDERS, MEANWHILE):
        found["tokens"][provider] = at_moments(_run(model, provider))
    last = f"{MOMENTS[-1]:g}"
    found["ratio"] = {"median": found["tokens"][OURS][last] / found["tokens"][TORCH][last]}
    return found


def at_moments(curve: Sequence[tuple[float, int]]) -> dict[str, float]:
    """How many tokens there were at each moment, by seconds; those of an answer come evenly. curve: at the end of each
    answer the seconds, and all tokens so far."""
    found = {}
    for moment in MOMENTS:
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


def answers(
    answer: Callable[[int], int], seconds: float, clock: Callable[[], float] = time.perf_counter
) -> list[tuple[float, int]]:
    """The curve of `at_moments`, of requests one after another until the time is over."""
    began, tokens = clock(), 0
    curve: list[tuple[float, int]] = []
    for length in lengths():
        tokens += answer(length)
        curve.append((round(clock() - began, 4), tokens))
        if curve[-1][0] >= seconds:
            return curve
    raise AssertionError("requests do not end")


def child() -> None:
    """In the process: measures the model, the provider and the seconds that the command line names. Prints one line of
    JSON."""
    name, provider, seconds = sys.argv[1:]
    model = zoo.BY_NAME[name]
    given = {"max_new_tokens": GENERATED, "min_new_tokens": GENERATED, "do_sample": False}
    built: Any = zoo.build(model, tiny=False, device="cuda", dtype=torch.bfloat16)
    random = torch.Generator("cuda").manual_seed(2)

    def answer(length: int) -> int:
        prompt = torch.randint(1, built.config.vocab_size, (1, length), generator=random, device="cuda")
        built.generate(input_ids=prompt, attention_mask=torch.ones_like(prompt), **given)
        torch.cuda.synchronize()
        return GENERATED

    torch.cuda.synchronize()
    with within(provider):
        print(json.dumps(answers(answer, float(seconds))))


def _run(model: Model, provider: str, seconds: float = MOMENTS[-1]) -> list[tuple[float, int]]:
    """The curve of a fresh process. ProcessError says how it ended."""
    with TemporaryDirectory(ignore_cleanup_errors=True) as cache:  # a worker may still write there
        surroundings = {**os.environ, "TRITON_CACHE_DIR": cache, "TRITON_GEMM_CACHE_DIR": f"{cache}/triton_gemm"}
        command = [sys.executable, "-c", CHILD, model.name, provider, str(seconds)]
        try:
            done = subprocess.run(
                command, cwd=ROOT, env=surroundings, capture_output=True, text=True, timeout=PATIENCE_S
            )
        except subprocess.TimeoutExpired:
            raise ProcessError(f"{provider}: no end after {PATIENCE_S:.0f} s") from None
    if done.returncode:
        last = [line for line in done.stderr.splitlines() if line.strip()][-1:]
        raise ProcessError(f"{provider}: the process ended with {done.returncode}: {' '.join(last)[:300]}")
    found: list[tuple[float, int]] = json.loads(done.stdout.splitlines()[-1])
    return found
