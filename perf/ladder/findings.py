"""What a record of the ladder found, in sentences: each figure is computed from the record. Nothing here measures."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import pairwise

from perf.common.formats import number, percent
from perf.ladder import views
from perf.ladder.record import Record
from perf.ladder.views import Step
from triton_gemm.ladder import Rung

SMALL = 1024  # M = N = K where few tiles are left for an SM
CLOSE = 1.25  # a prediction is right within this factor


def sentences(record: Record) -> list[str]:
    """The findings, the largest gains first; what the record cannot tell is left out."""
    steps = [step for step in views.ladder(record) if step.tflops]
    return [*_climb(steps), *_last_rungs(record, steps), *_unaligned(record, steps), *_twins(steps), *_guesses(record)]


def _climb(steps: Sequence[Step]) -> Iterator[str]:
    """From the first rung to the last, a sentence a precision."""
    if len(steps) > 1:
        first, last = steps[0], steps[-1]
        own = f"{_name_of(last.rung)} reaches {number(last.tflops)} TFLOPS{_of_cublas(last)}"
        yield f"{own}: {number(_gain(first, last))} times as much as {_name(first)}."
    fp32 = [step for step in steps if step.rung.precision == "ieee"]
    if len(fp32) > 1:
        gain = number(_gain(fp32[0], fp32[-1]))
        best = max(pairwise(fp32), key=lambda pair: _gain(*pair))
        yield (
            f"On fp32 units, TFLOPS climb from {number(fp32[0].tflops)} to {number(fp32[-1].tflops)}, {gain} times as "
            f"much{_of_cublas(fp32[-1])}. The largest step is {_name(best[1])}: {_gain(*best):.2f} times "
            f"{best[0].rung.id}."
        )
    ends = {step.rung.precision: step for step in steps}
    tf32, half = ends.get("tf32"), next((step for step in steps if step.rung.precision == "half"), None)
    if fp32 and tf32:
        over = f"{_gain(fp32[-1], tf32):.2f} times {fp32[-1].rung.id}"
        yield f"Tensor cores give {over}: {_name(tf32)}{_of_cublas(tf32)}."
    if tf32 and half:
        over = f"{_gain(tf32, half):.2f} times {tf32.rung.id}"
        yield f"Twice the units' rate and no pass over operands give {over}: {_name(half)}{_of_cublas(half)}."


def _last_rungs(record: Record, steps: Sequence[Step]) -> Iterator[str]:
    """What the rungs after the first in half precision give together, at the ladder's size and at a small one."""
    half = [step for step in steps if step.rung.precision == "half"]
    if len(half) < 2:
        return
    first, last = half[0].rung, half[-1].rung
    before = half[-2].rung
    gains = [f"{_more(_gain(half[0], half[-1]))} at {views.ladder_size(record)}"]
    small = views.squares(record, half[0].problem.mode).get(SMALL)
    speeds = [small.tflops(rung.name) for rung in (first, before, last)] if small else []
    alone = ""
    if speeds and all(speeds) and views.ladder_size(record) != SMALL:
        of_first, of_before, own = (speed or 0.0 for speed in speeds)
        gains.append(f"{_more(own / of_first)} at {SMALL}")
        alone = f" At {SMALL}, {_name_of(last)} alone gives {_more(own / of_before)} over {before.id}."
    names = ", ".join(step.rung.id for step in half[1:-1])
    names += " and " if names else ""
    yield f"The last rungs, {names}{last.id}, give {' and '.join(gains)} over {first.id}.{alone}"


def _unaligned(record: Record, steps: Sequence[Step]) -> Iterator[str]:
    """The slowest and the fastest rung in half precision, at the smallest size that is no multiple of 16."""
    half = [step for step in steps if step.rung.precision == "half"]
    problems = views.squares(record, half[0].problem.mode) if half else {}
    size = next((size for size in problems if not views.aligned(size)), None)
    if size is None:
        return
    known = [(speed, step.rung) for step in half if (speed := problems[size].tflops(step.rung.name))]
    if len(known) > 1:
        (slow, slowest), (fast, fastest) = (choose(known, key=lambda pair: pair[0]) for choose in (min, max))
        yield (
            f"At {size}, no multiple of 16, {_name_of(slowest)} falls to {number(slow)} TFLOPS, and "
            f"{_name_of(fastest)} keeps {number(fast)}."
        )


def _twins(steps: Sequence[Step]) -> Iterator[str]:
    """Rungs against their twins in CUDA C++."""
    over = {step.rung.id: gain for step in steps if (gain := step.over_twin)}
    if over:
        least, most = min(over, key=over.__getitem__), max(over, key=over.__getitem__)
        yield (
            f"Of {len(over)} rungs with a twin in CUDA C++, {sum(gain >= 1 for gain in over.values())} are at least as "
            f"fast: from {over[least]:.2f} times ({least}) to {over[most]:.2f} times ({most})."
        )


def _guesses(record: Record) -> Iterator[str]:
    """How the predictions of the headers did."""
    known = [factor for factor in views.factors(record) if factor.measured]
    off = [factor for factor in known if not 1 / CLOSE <= (factor.measured or 0.0) / factor.predicted <= CLOSE]
    if known:
        misses = ", ".join(
            f"{one.rung.id} over {one.over} ({one.predicted:g} predicted, {one.measured:.2f} measured)" for one in off
        )
        yield (
            f"Of {len(known)} gains that were predicted before measuring, {len(known) - len(off)} came out within a "
            f"factor of {CLOSE:g}" + (f". Missed: {misses}." if off else ".")
        )


def _gain(before: Step, after: Step) -> float:
    return (after.tflops or 0.0) / (before.tflops or 1.0)


def _more(gain: float) -> str:
    return f"{100 * (gain - 1):+.1f} %"


def _name_of(rung: Rung) -> str:
    return f"{rung.id} ({rung.title})"


def _name(step: Step) -> str:
    return f"{step.rung.id} ({step.rung.title}, {number(step.tflops)} TFLOPS)"


def _of_cublas(step: Step) -> str:
    share = step.share(step.rung.name)
    return f", {percent(share)} of cuBLAS in that precision" if share else ""
