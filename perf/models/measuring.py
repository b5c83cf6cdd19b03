"""How a case is measured: errors first, then rounds in which torch and triton_gemm take turns, when nothing is compiled
any more."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from typing import Any

import torch

import triton_gemm
from perf.measure.timer import percentiles
from perf.models.cases import Work
from perf.models.tables import LEARNING, MEANWHILE, OURS, PROVIDERS, TORCH
from triton_gemm.functional import routing
from triton_gemm.functional.routing_rule import FirstCalls
from triton_gemm.runtime import background
from triton_gemm.tuning.timing import interleave, ratios, round_count

ROUNDS = (5, 20)
TURN_S = 0.1  # what a turn takes at least, in runs
PATIENCE_S = 120.0  # for what is compiled in the background, each time
RUNS = 6  # until nothing new is compiled
WRONG = 2.0  # times torch's error


def within(provider: str) -> AbstractContextManager[None]:
    """Where a provider's products are computed."""
    if provider in (OURS, MEANWHILE, LEARNING):
        first_calls: FirstCalls = "torch" if provider == MEANWHILE else "same bits"
        return triton_gemm.use(first_calls=first_calls, learn=provider == LEARNING)
    routing._unregister()  # torch's products as they are without this package; no other thread multiplies
    return nullcontext()


def measure(work: Work, budget_s: float, timed: bool = True) -> dict[str, Any]:
    """What is recorded of a case. timed: False where times would say nothing, as in the interpreter."""
    found = checked(work)
    if not timed:
        return found
    with within(TORCH):
        work.run(TORCH)
    found["settled"] = settled(partial(work.run, OURS))
    return {**found, **rounds(work, budget_s)}


def checked(work: Work) -> dict[str, Any]:
    """The errors of both, where products went, and what is `wrong`, if anything is."""
    found: dict[str, Any] = {"shape": work.shape, "amount": work.amount, "errors": {}}
    truth = work.truth()
    for provider in PROVIDERS:
        triton_gemm.report_routing(reset=True)
        with within(provider):
            result = work.result(provider)
        counts = triton_gemm.report_routing(reset=True)
        found["errors"][provider] = work.error(result, truth)
        del result
    found["routing"] = routed(counts)
    wrong = judged(found["errors"], found["routing"])
    return {**found, "wrong": wrong} if wrong else found


def routed(counts: Mapping[tuple[str, str], int]) -> dict[str, Any]:
    """How many products were `ours`, and how many of which operator were `left` to torch, with the reason."""
    ours = sum(n for (_, where), n in counts.items() if where == routing.OURS)
    left = {
        f"{name}: {where.removeprefix('torch: ')}": n for (name, where), n in counts.items() if where != routing.OURS
    }
    return {"ours": ours, "left": left}


def judged(errors: Mapping[str, float], products: Mapping[str, Any]) -> str | None:
    if not errors[OURS] <= WRONG * errors[TORCH]:
        return f"an error of {errors[OURS]:.2g}, where torch's is {errors[TORCH]:.2g}"
    return None if products["ours"] else "no product ran on triton_gemm"


def settled(run: Callable[[], object]) -> bool:
    """Runs it on our kernels until each has its own. False if they are not compiled in time."""
    for _ in range(RUNS):
        before = sum(background.counts.values())
        with within(OURS):
            run()
        if not triton_gemm.wait_until_compiled(PATIENCE_S):
            return False
        if sum(background.counts.values()) == before:
            return True
    return False


def rounds(work: Work, budget_s: float) -> dict[str, Any]:
    """Runs a second of each, `per_s`, and the `ratio` of the speeds in the same round, ours over torch's."""
    once = {provider: _turn(provider, work.run, 1)() for provider in PROVIDERS}
    runs = math.ceil(TURN_S / max(once.values()))
    starts = {provider: partial(_turn, provider, work.run, runs) for provider in PROVIDERS}
    interleave(starts, 1)
    count = round_count(1000 * runs * sum(once.values()), budget_s, ROUNDS)
    times = interleave(starts, count)
    per_s = {name: runs * work.amount / percentiles(own)["median"] for name, own in times.items()}
    return {"per_s": per_s, "ratio": percentiles(ratios(times, OURS, TORCH)), "rounds": count, "runs": runs}


def _turn(provider: str, run: Callable[[str], object], runs: int) -> Callable[[], float]:
    """Makes `runs` runs; a function that gives their wall time in seconds, until the GPU was idle."""
    with within(provider):
        run(provider)  # in which the products of a new `use()` are looked up
        _synchronize()
        began = time.perf_counter()
        for _ in range(runs):
            run(provider)
        _synchronize()
        seconds = time.perf_counter() - began
    return lambda: seconds


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()
