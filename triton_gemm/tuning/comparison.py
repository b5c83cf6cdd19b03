"""A comparison with torch: each product is timed by torch and by this package, in turns, by the timer that tunes. Logic
over a `Lab`, so that it is tested without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol

import torch

from ..hardware.device import DeviceInfo
from ..problem import GemmProblem
from ..runtime import policies
from ..selection.select import Selection
from ..tables.records import named as named_selection
from ..tables.records import plain
from . import race
from .conditions import Conditions, Watch
from .gpu import TORCH, Way
from .of_torch import torchs_product
from .report import named, number

ROUNDS = 24  # at a time
MOST_ROUNDS = 240
PRECISE = 0.005  # noise of a ratio from which on more rounds are not worth their time
TIMING_S = (0.5, 3.0)  # for the rounds of a product, at least and at most
ATTEMPTS = 2  # at a product during which the GPU was not fit to be measured

# "failed": the kernel, torch's product or the operands cannot be had; "refused": the GPU was not fit to be measured;
# "no time": the budget was spent.
Outcome = Literal["measured", "failed", "refused", "no time"]


@dataclass(frozen=True)
class ProductComparison:
    """One product by torch and by this package.

    calls: how often it was recorded, or named; torch_us, ours_us: microseconds of a call; ratio: torch's time over
    ours, above 1 where we are faster; noise: the share by which the ratio may be off, 3.5 standard deviations;
    torch_error, ours_error: the Frobenius norm of a result's difference from the fp64 result, over the norm of that;
    rounds: in which both were timed; kernel: what we ran; why: it was not measured.
    """

    problem: GemmProblem
    calls: int
    outcome: Outcome
    torch_us: float = math.nan
    ours_us: float = math.nan
    ratio: float = math.nan
    noise: float = math.nan
    torch_error: float = math.nan
    ours_error: float = math.nan
    rounds: int = 0
    kernel: str = ""
    why: str = ""

    @property
    def measured(self) -> bool:
        return self.outcome == "measured"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        found = {name: getattr(self, name) for name in self.__dataclass_fields__}
        found = {name: number(x) if isinstance(x, float) else x for name, x in found.items()}
        return found | {"problem": plain(self.problem)}

    def __str__(self) -> str:
        if not self.measured:
            return f"{named(self.problem)}: {self.outcome}{': ' if self.why else ''}{self.why}"
        times = f"{self.torch_us:.4g} us by torch, {self.ours_us:.4g} by triton_gemm"
        errors = f"errors {self.torch_error:.1e} and {self.ours_error:.1e}"
        return f"{named(self.problem)}: {times}, ratio {self.ratio:.3f} (noise {100 * self.noise:.1f} %), {errors}"


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. products: a record of each, the most called first; device: the GPU's name; recorded:
    whether calls were counted while a program ran; seconds: that it took. `str()` is a table for people."""

    products: tuple[ProductComparison, ...]
    device: str
    recorded: bool
    seconds: float

    @property
    def torch_ms(self) -> float:
        """Milliseconds of all calls of what was measured, by torch."""
        return sum(one.calls * one.torch_us for one in self.products if one.measured) / 1000

    @property
    def ours_ms(self) -> float:
        """The same by this package."""
        return sum(one.calls * one.ours_us for one in self.products if one.measured) / 1000

    @property
    def summary(self) -> str:
        """All calls together, in a sentence."""
        measured = [one for one in self.products if one.measured]
        if not measured:
            return f"{self.device}: nothing was measured"
        calls = sum(one.calls for one in measured)
        what = f"a step of your model, as recorded ({calls} calls)" if self.recorded else f"these {calls} calls"
        if not self.recorded and calls == len(measured):
            what = "these products once each"
        missing = len(self.products) - len(measured)
        without = f"; without {missing} of {len(self.products)} products" * bool(missing)
        times = f"{self.torch_ms:.4g} ms by torch, {self.ours_ms:.4g} by triton_gemm"
        return f"{what}: {times}, on {self.device}{without}"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        fields = {name: getattr(self, name) for name in ("device", "recorded", "seconds", "torch_ms", "ours_ms")}
        return fields | {"products": [one.as_dict() for one in self.products]}

    def __str__(self) -> str:
        return "\n".join([*map(str, self.products), self.summary])


class Bench(race.Bench[Way], Protocol):
    def errors(self) -> tuple[float, float]:
        """Torch's relative error and ours, once both are prepared."""

    def close(self) -> None:
        """Gives its memory back."""


class Lab(Protocol):
    """A GPU, or a stand-in, as `session.Lab`."""

    info: DeviceInfo

    def now(self) -> float: ...

    def look(self) -> Conditions: ...

    def prepare(self, problem: GemmProblem, ways: Sequence[Selection]) -> None: ...

    def bench(self, problem: GemmProblem, ways: Sequence[Selection], seed: int) -> Bench: ...


def compared(
    lab: Lab,
    calls: Mapping[GemmProblem, int],
    budget: float,
    recorded: bool,
    said: Callable[[Comparison], None] = lambda report: None,
) -> Comparison:
    """Compares every problem, the most called first; `said` is told what was found after each. DeviceLostError where
    one has cost the GPU."""
    begin, watch = lab.now(), Watch(lab.look, lab.now)
    problems = sorted(calls, key=lambda problem: -calls[problem])  # of equals the first
    chosen = {problem: _chosen(problem, lab.info) for problem in problems}
    for problem, way in chosen.items():
        if isinstance(way, Selection):
            lab.prepare(problem, [way])
    report = Comparison((), lab.info.name, recorded, 0.0)
    for i, problem in enumerate(problems):
        way, left = chosen[problem], budget - (lab.now() - begin)
        if isinstance(way, ProductComparison):
            one = way
        elif left <= 0:
            one = ProductComparison(problem, 0, "no time")
        else:
            timing_s = min(max(left / (len(problems) - i), TIMING_S[0]), TIMING_S[1])
            one = _compare(lab, watch, problem, way, timing_s)
        products = (*report.products, replace(one, calls=calls[problem]))
        report = replace(report, products=products, seconds=lab.now() - begin)
        said(report)
    return report


def _chosen(problem: GemmProblem, device: DeviceInfo) -> Selection | ProductComparison:
    """What a call of this problem runs on, or why it is not compared."""
    failed = ProductComparison(problem, 0, "failed")
    if 0 in (problem.batch, problem.M, problem.N):
        return replace(failed, why="its result is empty")
    product, why = torchs_product(problem)
    if product is None:
        return replace(failed, why=why)
    try:
        return policies.choose(problem, device)
    except RuntimeError as error:
        return replace(failed, why=f"{error}".splitlines()[0])


def _compare(lab: Lab, watch: Watch, problem: GemmProblem, way: Selection, timing_s: float) -> ProductComparison:
    """One product; a second time where the GPU was not fit to be measured during the first."""
    report = ProductComparison(problem, 0, "failed", kernel=named_selection(way))
    for attempt in range(ATTEMPTS):
        try:
            bench = lab.bench(problem, [way], attempt)
        except torch.OutOfMemoryError as error:
            return replace(report, why=f"{error}".splitlines()[0])
        try:
            for name, one in (("triton_gemm", way), ("torch", TORCH)):
                try:
                    bench.prepare(one)
                except race.FailedError as error:
                    return replace(report, why=f"{name}: {error}")
            torch_error, ours_error = bench.errors()
            before = watch.before()
            found = replace(_timed(bench, way, timing_s, report), torch_error=torch_error, ours_error=ours_error)
        finally:
            bench.close()
        complaint = watch.complaint(before)
        if complaint is None:
            return found
        report = replace(report, outcome="refused", why=complaint)
    return report


def _timed(bench: Bench, way: Selection, timing_s: float, report: ProductComparison) -> ProductComparison:
    """Rounds in which torch and we take turns, until their ratio is known well enough or the time is over."""
    until = bench.now() + timing_s
    ways: list[Way] = [TORCH, way]
    torchs: list[float] = []
    ours: list[float] = []
    while True:
        fit = int((until - bench.now()) / bench.round_s(ways))
        for row, more in zip((torchs, ours), bench.time(ways, max(race.LEAST_ROUNDS, min(ROUNDS, fit))), strict=True):
            row += more
        logs = [math.log(x / y) for x, y in zip(torchs, ours, strict=True)]
        noise = race.CONFIDENCE * race.deviation(logs)
        if noise <= PRECISE or len(logs) >= MOST_ROUNDS or bench.now() >= until:
            break
    ratio, ours_us = math.exp(race.middle(logs)), 1000 * race.middle(ours)
    return replace(
        report,
        outcome="measured",
        torch_us=ratio * ours_us,
        ours_us=ours_us,
        ratio=ratio,
        noise=noise,
        rounds=len(logs),
        why="",
    )
