"""The one timer. Every provider, cuBLAS included, is checked against fp64, then timed here and nowhere else.

Kernel time is the replay of a CUDA graph that walks over operand sets larger together than the L2 cache (cold), or
over one set (hot). Providers take turns, round by round, on a GPU whose clocks have settled; what is reported is the
median over rounds of a provider's time and of its ratio to the baseline in the same round, with p20 and p80. What
Python pays for a call, and how fast a queue of calls is without a graph, are measured separately. What runs on the
device, and how it takes turns, is `triton_gemm.tuning.timing`, which tunes by the same clock.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from perf.measure import environment
from perf.measure.operands import Check, Operands, Problem, check_rows, sets_of
from triton_gemm.problem import UnsupportedOperandError
from triton_gemm.runtime.background import held
from triton_gemm.tuning import timing
from triton_gemm.tuning.of_torch import fp32_precision
from triton_gemm.tuning.timing import REPLAY_MS, DeviceLostError, Replay, interleave, ratios, round_count

SLOW = 4.0  # times the baseline: from there on a provider is timed apart, so that the fast ones keep the GPU hot
ROUNDS = (5, 40)
SLOW_ROUNDS = (3, 10)
QUEUE_LENGTH = 200  # calls in a row; a driver's queue takes about a thousand before it makes Python wait
QUEUE_ROUNDS = (11, 101)
Call = Callable[..., object]


@dataclass(frozen=True)
class Provider:
    """A line in a plot: `call(a, b, c)`, then the bias and the scales where there are any, writes the result to
    c or returns it.

    `details` is asked, with the same arguments, after the first call. An UnsupportedOperandError or
    NotImplementedError from `call` means that it does not take the problem. within: what is open around its calls.
    """

    name: str
    call: Call
    out_dtype: torch.dtype | None = None
    details: Callable[..., dict[str, Any]] = lambda *_: {}
    within: Callable[[], AbstractContextManager[object]] = nullcontext


@dataclass(frozen=True)
class Pace:
    """What a measurement spends apart from its rounds.

    patience_s: at most this long for the clocks to settle; replay_ms: a replay repeats a kernel until it takes about
    this long; check_rows: at most so many rows of C are checked, None all; extras: whether clocks and the call time
    are taken too.
    """

    patience_s: float = 1.0
    replay_ms: float = REPLAY_MS
    check_rows: int | None = None
    extras: bool = True


REPORT = Pace()


@dataclass(frozen=True)
class Subject:
    """A provider that passed the check, ready to be timed."""

    provider: Provider
    result: dict[str, Any]
    estimate_ms: float
    replay: Replay


@held()
def measure(
    problem: Problem,
    providers: Sequence[Provider],
    baseline: str | None,
    budget_s: float,
    pace: Pace = REPORT,
    others: Sequence[str] = (),
) -> dict[str, Any]:
    """Checks and times `providers` on `problem`; `budget_s` is for the timing alone.

    Under `providers` each name has `time_ms`, `ratio` (baseline's time over its own; 1 is as fast), `ratio_to` (the
    same for each of `others`), `error` and the provider's details, or else `absent` (does not take the problem) or
    `failed` with the reason; at a pace with extras `call_us` as well.
    """
    record: dict[str, Any] = {name: getattr(problem, name) for name in ("M", "N", "K", "mode", "hot", "seed")}
    record["budget_s"] = budget_s
    if pace.extras:
        record["clocks_before"] = environment.clocks()
    with fp32_precision("tf32" if problem.mode == "tf32" else "ieee"):
        out_dtypes = {p.out_dtype or problem.out_dtype for p in providers}
        operands = Operands(problem, out_dtypes, sets_of(problem, out_dtypes))
        subjects = []
        for provider, result in _right(providers, operands, check_rows(problem, pace.check_rows), baseline, record):
            calls = calls_of(provider, operands)
            try:
                estimate_ms = timing.once_ms(calls[-1])
                replay = timing.Replay(calls, timing.repeats(estimate_ms, len(calls), pace.replay_ms))
                subjects.append(Subject(provider, result, estimate_ms, replay))
            except Exception as error:
                _failed(provider, result, error)
        _time(subjects, baseline, budget_s, pace, others)
        for subject in subjects if pace.extras else ():
            subject.result["call_us"] = call_time_us(subject, operands)
    if pace.extras:
        record["clocks_after"] = environment.clocks()
    return record


def calls_of(provider: Provider, operands: Operands) -> list[Callable[[], object]]:
    """The provider's call on each set."""
    return [partial(provider.call, *arguments) for arguments in operands.arguments(provider.out_dtype)]


def _right(
    providers: Sequence[Provider],
    operands: Operands,
    rows: torch.Tensor | None,
    baseline: str | None,
    record: dict[str, Any],
) -> Iterator[tuple[Provider, dict[str, Any]]]:
    """Those that pass the check of these rows, one after another, each with its result in the record, which says of the
    others why not."""
    check = Check(operands, rows)
    record |= {"sets": len(operands.sets), "providers": {p.name: {} for p in providers}}
    for provider in providers:
        result = record["providers"][provider.name]
        if is_right(provider, operands, check, result, torchs=provider.name == baseline):
            yield provider, result


def is_right(provider: Provider, operands: Operands, check: Check, result: dict[str, Any], *, torchs: bool) -> bool:
    """Calls a provider once and checks what it gave: whether it can be timed. `result` says why not."""
    arguments = operands.arguments(provider.out_dtype)[0]
    c = arguments[2]
    try:
        c.fill_(math.nan if c.is_floating_point() else -(2**31))
        with provider.within():
            returned = provider.call(*arguments)
        torch.cuda.synchronize()
        given = returned if isinstance(returned, torch.Tensor) else c
        result["error"], complaint = check.verdict(given, torchs=torchs)
        if not complaint:
            result.update(provider.details(*arguments))
            return True
        result["failed"] = complaint
    except (UnsupportedOperandError, NotImplementedError) as error:
        result["absent"] = str(error)
    except Exception as error:
        _failed(provider, result, error)
    return False


def _failed(provider: Provider, result: dict[str, Any], error: Exception) -> None:
    result["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
    if (lost := timing.lost()) is not None:
        raise DeviceLostError(f"after {provider.name}: {lost}") from lost


def _time(
    subjects: list[Subject], baseline: str | None, budget_s: float, pace: Pace, others: Sequence[str] = ()
) -> None:
    """Fills in each subject's `time_ms`, `ratio`, `ratio_to`, `rounds` and `repeats`."""
    base = next((s for s in subjects if s.provider.name == baseline), None)
    limit = SLOW * (base or min(subjects, key=lambda s: s.estimate_ms)).estimate_ms if subjects else 0.0
    fast = [s for s in subjects if s.estimate_ms <= limit]
    slow = [s for s in subjects if s.estimate_ms > limit]
    for group, bounds in ((fast, ROUNDS), (slow, SLOW_ROUNDS)):
        if not group:
            continue
        running = group if base is None or base in group else [base, *group]
        if group is fast:
            timing.settle((base or running[0]).replay.start, patience_s=pace.patience_s)
        round_ms = sum(s.estimate_ms * s.replay.repeats for s in running)
        times = interleave({s.provider.name: s.replay.start for s in running}, round_count(round_ms, budget_s, bounds))
        for subject in group:
            found = _compared(times, subject.provider.name, baseline, others)
            subject.result.update(found, repeats=subject.replay.repeats)


def _compared(
    times: Mapping[str, Sequence[float]], name: str, baseline: str | None, others: Sequence[str]
) -> dict[str, Any]:
    """A provider's `time_ms`, `ratio`, `rounds` and, where there are `others`, `ratio_to`."""
    to = {other: percentiles(ratios(times, name, other)) for other in others if other in times and other != name}
    ratio = percentiles(ratios(times, name, baseline)) if baseline and baseline in times else None
    found = {"time_ms": percentiles(times[name]), "ratio": ratio, "rounds": len(times[name])}
    return {**found, "ratio_to": to} if to else found


@held()
def time_alone(call: Callable[[], object], budget_s: float, patience_s: float = 3.0) -> dict[str, float]:
    """Percentiles of the milliseconds of one call, on settled clocks, with nothing to take turns with."""
    estimate_ms = timing.once_ms(call)
    replay = timing.Replay([call], timing.repeats(estimate_ms, 1))
    timing.settle(replay.start, patience_s)
    rounds = round_count(estimate_ms * replay.repeats, budget_s, ROUNDS)
    return percentiles(interleave({"": replay.start}, rounds)[""])


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    p20, median, p80 = np.percentile(values, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def call_time_us(subject: Subject, operands: Operands) -> float:
    """Microseconds that Python spends in one call, the GPU's work aside: the least of a few batches."""
    call = calls_of(subject.provider, operands)[0]
    batch = max(1, min(50, int(10 / subject.estimate_ms)))
    least = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        least = min(least, (time.perf_counter() - begin) / batch)
    torch.cuda.synchronize()
    return 1e6 * least


def _start(provider: Provider, operands: Operands, drain: bool) -> Callable[[], float]:
    """Makes and times a queue of the provider's calls, after one that is not timed."""
    calls = calls_of(provider, operands)
    with provider.within():
        calls[0]()
        return timing.Queue(calls, max(QUEUE_LENGTH, len(calls)), drain, keep=bool(operands.problem.weights)).start()


@held()
def measure_calls(
    problem: Problem, providers: Sequence[Provider], baseline: str | None, budget_s: float, *, drain: bool
) -> dict[str, Any]:
    """As `measure`, for calls from Python without a graph on one operand set, which L2 keeps, or on one each weight.

    `time_ms` is Python's time for a call or, with `drain`, a call's share of the time in which a queue of them is
    made and worked off; `least_ms` is the least of the rounds.
    """
    operands = Operands(problem, {problem.out_dtype}, problem.weights or 1)
    record: dict[str, Any] = {"budget_s": budget_s}
    right = _right(providers, operands, None, baseline, record)
    starts = {provider.name: partial(_start, provider, operands, drain) for provider, _ in right}
    length = max(QUEUE_LENGTH, problem.weights)
    with timing.no_garbage():
        warm = interleave(starts, 2)  # the first calls fill caches and start the clocks
        round_ms = length * sum(min(times) for times in warm.values())
        times = interleave(starts, round_count(round_ms, budget_s, QUEUE_ROUNDS)) if starts else {}
    for name, own in times.items():
        found = _compared(times, name, baseline, [other for other in times if other != baseline])
        record["providers"][name] |= {"ratio_to": {}, **found, "least_ms": min(own), "repeats": length}
    return record
