"""What tuning says, while it runs and at its end, and a comparison with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any, Literal

from ..problem import GemmProblem, problem_text
from ..selection.select import Selection
from ..tables.files import Bits
from ..tables.records import plain

Measure = Literal["graph", "eager"]
SHAPE_FIELDS = (
    *("problem", "calls", "outcome", "candidates", "timed", "rounds", "choice_us", "us", "fastest_us", "noise"),
    *("torch_us", "torch_faster", "choice", "selection", "why", "stored", "failed", "again", "times"),
)
COLUMNS = ("calls", "torch us", "triton_gemm us", "ratio", "noise %", "torch's error", "our error")

# "tuned": a selection was stored, unless `why` says that a table's stays.
# "stays": the model's choice was not beaten.
# "not stored": the winner could not be written into a table.
# "known": it was tuned before, with resume=True.
# "refused": the GPU was throttled or shared.
# "failed": the model's choice, or the operands, cannot be had.
# "no time": the budget was spent.
Outcome = Literal["tuned", "stays", "not stored", "known", "refused", "failed", "no time"]


@dataclass(frozen=True)
class Progress:
    """A step of `tune`.

    Attributes:
        number: Of this problem, from 1.
        count: How many problems there are.
        problem: The GEMM problem.
        timed: Candidates timed so far.
        candidates: How many there are.
        best: The best so far.
        best_us: Its time in microseconds, 0 before anything was timed.
        choice_us: The time of the model's choice.
        seconds_left: Of the budget.
    """

    number: int
    count: int
    problem: GemmProblem
    timed: int
    candidates: int
    best: Selection
    best_us: float
    choice_us: float
    seconds_left: float


@dataclass(frozen=True)
class ShapeReport:
    """What `tune` found for one GEMM problem.

    Attributes:
        problem: The GEMM problem.
        calls: How often it was recorded.
        outcome: One of `Outcome`.
        choice: The model's choice.
        selection: What runs from now on, if it could be stored.
        choice_us, us: Their times in microseconds.
        fastest_us: The time of the fastest candidate, whether or not by more than noise.
        noise: By how much the ratio of us to choice_us may be off, as a share.
        candidates, timed: How many there were, and how many were timed.
        rounds: Of the last trial.
        why: The reason, where the outcome has one.
        stored: Whether a table was written.
        failed: Candidates that could not be timed, and why.
        again: The further tunings of `repeat`.
        times: Of each timed candidate, the fastest first: microseconds in its last round, and its name.
        torch_us: The time of torch's kernel with bits="any", NaN if it was not timed.
        torch_faster: Whether that is less than us by more than noise.
    """

    problem: GemmProblem
    calls: int
    outcome: Outcome
    choice: Selection | None = None
    selection: Selection | None = None
    choice_us: float = math.nan
    us: float = math.nan
    fastest_us: float = math.nan
    noise: float = math.nan
    candidates: int = 0
    timed: int = 0
    rounds: int = 0
    why: str = ""
    stored: bool = False
    failed: tuple[tuple[str, str], ...] = ()
    again: tuple[Again, ...] = ()
    times: tuple[tuple[float, str], ...] = ()
    torch_us: float = math.nan
    torch_faster: bool = False

    @property
    def measured(self) -> bool:
        return self.outcome in ("tuned", "stays", "not stored")

    def __str__(self) -> str:
        p = self.problem
        batch = f"{p.batch}x" if p.batch > 1 else ""
        shape = f"{batch}{p.M}x{p.N}x{p.K} {plain(p.dtype)}"
        if not self.measured:
            return f"{shape}: {self.outcome}{': ' if self.why else ''}{self.why}"
        times = f"{self.choice_us:.4g} us"
        notes = "" if math.isnan(self.torch_us) else f"; torch {self.torch_us / self.us:.3g} of ours"
        notes += ", faster" * self.torch_faster
        notes += "; not stored" * (self.outcome == "not stored") + (self.why and f"; {self.why}")
        if self.us < self.choice_us and self.selection is not None:
            chosen = f"{self.selection.kernel} {self.selection.config}"
            gain = 100 * (self.choice_us / self.us - 1)
            noise = 100 * self.noise
            return f"{shape}: {times} to {self.us:.4g} us, {gain:.1f} % (noise {noise:.1f} %) faster, {chosen}{notes}"
        return f"{shape}: {times}, the model's choice stays ({self.timed} of {self.candidates} timed){notes}"


@dataclass(frozen=True)
class Again:
    """Another tuning of the same GEMM problem.

    Attributes:
        same: Whether the same candidate won.
        slower: How much longer its winner took than the first winner, as a share; 0 for the same.
    """

    same: bool
    slower: float


@dataclass(frozen=True)
class TuningReport:
    """What `tune` did. `str()` is a table for people.

    Attributes:
        shapes: A report of each GEMM problem, the most called first.
        device: The GPU's name.
        bits, measure, budget: As they were given.
        seconds: How long it took.
        served: With rows: the share of these numbers, over all weights, for which a table has a usable entry.
    """

    shapes: tuple[ShapeReport, ...]
    device: str
    bits: Bits
    measure: Measure
    budget: float
    seconds: float
    served: float = math.nan

    @property
    def regret_before(self) -> float:
        """How much longer the model's choices take than the fastest candidates that were timed, in the geometric mean,
        as a share; NaN where nothing was measured."""
        return _mean([one.choice_us / one.fastest_us for one in self.shapes if one.measured])

    @property
    def regret_after(self) -> float:
        """How much longer the selected candidates take than the fastest that were timed, as `regret_before`."""
        return _mean([one.us / one.fastest_us for one in self.shapes if one.measured])

    @property
    def same_again(self) -> float:
        """Of further trials (`repeat`), the share that the same candidate won; NaN where there were none."""
        again = [other.same for one in self.shapes for other in one.again]
        return sum(again) / len(again) if again else math.nan

    @property
    def within_1_percent(self) -> float:
        """Of the same, the share whose winner was within 1 % of the first trial's in time."""
        again = [abs(other.slower) <= 0.01 for one in self.shapes for other in one.again]
        return sum(again) / len(again) if again else math.nan

    @property
    def torch_faster(self) -> int:
        """For how many products torch is faster than what was found, by more than noise."""
        return sum(one.torch_faster for one in self.shapes)

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome == outcome for one in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        names = ("device", "bits", "measure", "budget", "seconds", "regret_before", "regret_after", "same_again")
        shapes = [values(one, *SHAPE_FIELDS) for one in self.shapes]
        return {**values(self, *names, "within_1_percent", "served"), "shapes": shapes}

    def __str__(self) -> str:
        lines = [str(one) for one in self.shapes]
        lines += [f"  {what}: {why}" for one in self.shapes for what, why in one.failed]
        counts = [f"{self.count(outcome)} {outcome}" for outcome in Outcome.__args__ if self.count(outcome)]  # type: ignore[attr-defined]
        lines.append(
            f"{self.device}: {', '.join(counts) or 'nothing to tune'}; {self.seconds:.0f} of {self.budget:g} s"
        )
        if not math.isnan(self.regret_before):
            before, after = 100 * self.regret_before, 100 * self.regret_after
            lines.append(f"regret (slower than the fastest that was timed): {before:.1f} % before, {after:.1f} % after")
        if not math.isnan(self.same_again):
            same, near = 100 * self.same_again, 100 * self.within_1_percent
            lines.append(f"tuned again: {same:.0f} % had the same winner, {near:.0f} % a winner within 1 %")
        if self.torch_faster:
            lines.append(f"torch is faster for {self.torch_faster} of them: use() leaves these to torch")
        if not math.isnan(self.served):
            lines.append(
                f"tables serve {100 * self.served:.0f} % of the numbers of rows; the model chooses for the others"
            )
        return "\n".join(lines)


@dataclass(frozen=True)
class ProductComparison:
    """One GEMM with torch and with this package.

    Attributes:
        problem: The GEMM problem.
        outcome: "measured"; "failed" if our kernel, torch's function or the operands cannot be had; "refused" if the
            GPU was throttled or shared; "no time" if the budget was spent.
        why: The reason in words.
        calls: How often it was recorded, or named.
        torch_us, ours_us: Microseconds of a call.
        ratio: torch's time over ours, above 1 if this package is faster.
        noise: The share by which the ratio may be off, 3.5 standard deviations.
        torch_error, ours_error: The Frobenius norm of a result's difference from the fp64 result, over the norm of
            that.
        rounds: In which both were timed.
        kernel: Ours.
    """

    problem: GemmProblem
    outcome: Literal["measured", "failed", "refused", "no time"]
    why: str = ""
    calls: int = 1
    torch_us: float = math.nan
    ours_us: float = math.nan
    ratio: float = math.nan
    noise: float = math.nan
    torch_error: float = math.nan
    ours_error: float = math.nan
    rounds: int = 0
    kernel: str = ""

    @property
    def measured(self) -> bool:
        return self.outcome == "measured"

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        return {"product": problem_text(self.problem), **values(self, *vars(self))}


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. `str()` is a table for people.

    Attributes:
        device: The GPU's name.
        recorded: Whether calls were counted while a program ran.
        products: A record of each GEMM, the most called first.
        seconds: How long it took.
    """

    device: str
    recorded: bool
    products: tuple[ProductComparison, ...] = ()
    seconds: float = 0.0

    @property
    def torch_ms(self) -> float:
        """Total milliseconds in torch, over all calls of the measured products."""
        return sum(one.calls * one.torch_us for one in self.products if one.measured) / 1000

    @property
    def ours_ms(self) -> float:
        """Total milliseconds in this package, likewise."""
        return sum(one.calls * one.ours_us for one in self.products if one.measured) / 1000

    @property
    def ratio(self) -> float:
        """`torch_ms` over `ours_ms`, above 1 if this package is faster; NaN if nothing was measured."""
        return self.torch_ms / self.ours_ms if self.ours_ms else math.nan

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        products = [one.as_dict() for one in self.products]
        return {**values(self, "device", "recorded", "seconds", "torch_ms", "ours_ms", "ratio"), "products": products}

    def __str__(self) -> str:
        measured = [one for one in self.products if one.measured]
        width = max([7, *(len(problem_text(one.problem)) for one in measured)])
        lines = [f"{'GEMM':{width}}  {'  '.join(COLUMNS)}"] * bool(measured)
        for one in measured:
            figures = [f"{one.calls}", f"{one.torch_us:.4g}", f"{one.ours_us:.4g}", f"{one.ratio:.3f}"]
            figures += [f"{100 * one.noise:.1f}", f"{one.torch_error:.1e}", f"{one.ours_error:.1e}"]
            cells = (f"{x:>{len(column)}}" for x, column in zip(figures, COLUMNS, strict=True))
            lines.append(f"{problem_text(one.problem):{width}}  {'  '.join(cells)}")
        others = [one for one in self.products if not one.measured]
        lines += [f"{problem_text(one.problem)}: {one.outcome}{one.why and ': ' + one.why}" for one in others]
        calls = sum(one.calls for one in measured)
        what = f"a step of your model, as recorded ({calls} calls)" if self.recorded else f"these {calls} calls"
        if not self.recorded and calls == len(measured):
            what = "these GEMMs once each"
        without = f", without {len(others)} of {len(self.products)} GEMMs" * bool(others)
        times = f"{self.torch_ms:.4g} ms with torch, {self.ours_ms:.4g} with triton_gemm"
        return "\n".join(
            [*lines, f"{what}{without}: {times}, on {self.device}" if measured else "nothing was measured"]
        )


def _mean(ratios: Sequence[float]) -> float:
    """The geometric mean of ratios, less 1."""
    return geometric_mean(ratios) - 1 if ratios else math.nan


def values(of: object, *names: str) -> dict[str, Any]:
    """Attributes as JSON has them; None for what was not measured."""
    return {name: _value(getattr(of, name)) for name in names}


def _value(x: Any) -> Any:
    if isinstance(x, tuple):
        return [_value(y) for y in x]
    return str(x) if isinstance(x, Selection) else None if x != x else plain(x)
