"""What tuning says, while it runs and at its end, and a comparison with torch."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from ..problem import GemmProblem, problem_text
from ..selection.select import Selection
from ..tables.files import Bits
from ..tables.records import plain

Measure = Literal["graph", "eager"]
COLUMNS = ("calls", "torch us", "triton_gemm us", "ratio", "noise %", "torch's error", "our error")

# "tuned": a selection was stored, unless `why` says that a table's stays; "stays": the model's choice was not beaten;
# "not stored": what was found should be in a table, and could not be written there; "known": it was tuned before, with
# resume=True; "refused": the GPU was not fit to be measured; "failed": the model's choice, or the operands, cannot be
# had; "no time": the budget was spent.
Outcome = Literal["tuned", "stays", "not stored", "known", "refused", "failed", "no time"]


@dataclass(frozen=True)
class Progress:
    """number: of this problem, from 1, of how many; timed: candidates so far, of how many; best: so far, and its time
    and that of the model's choice, in microseconds (0 before anything was timed); seconds_left: of the budget."""

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
    """What came of one problem.

    calls: how often it was recorded; choice: the model's, and choice_us its time in microseconds; selection: what is
    run from now on, if it could be stored, and its time us; fastest_us: that of the fastest candidate, noise or not;
    noise: by how much the ratio of us to choice_us may be off; clocks and reference product as found in `why` where
    they are refused; candidates: how many there were, and how many were timed; failed: those that could not be, and
    why; again: of each further race of `repeat`, how much slower its winner was than this one, and 0 where it was the
    same; times: of each candidate that was timed, the fastest first, microseconds as last measured, and which;
    torch_us: with bits="any" the time of torch's product, NaN where it was not timed, and torch_faster: whether that is
    less than us by more than noise.
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
    """Another race over the same problem. same: whether its winner was the same; slower: how much more time it took
    than the first one's, as measured in the race that won it, as a share."""

    same: bool
    slower: float


@dataclass(frozen=True)
class TuningReport:
    """What `tune` did. shapes: a report of each problem, the most called first; device: the GPU's name; bits, measure,
    budget (seconds): as they were given; seconds: that it took; served: with rows, the share of these numbers, over all
    weights, for which a table has what is used. `str()` is a table for people."""

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
        """Of further races (`repeat`), the share that the same candidate won; NaN where there were none."""
        again = [race.same for one in self.shapes for race in one.again]
        return sum(again) / len(again) if again else math.nan

    @property
    def within_1_percent(self) -> float:
        """Of the same, the share whose winner was within 1 % of the first race's in time."""
        again = [abs(race.slower) <= 0.01 for one in self.shapes for race in one.again]
        return sum(again) / len(again) if again else math.nan

    @property
    def torch_faster(self) -> int:
        """For how many products torch is faster than what was found, by more than noise."""
        return sum(one.torch_faster for one in self.shapes)

    def count(self, outcome: Outcome) -> int:
        return sum(one.outcome == outcome for one in self.shapes)

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        shapes = [
            {
                "problem": plain(one.problem),
                **{name: getattr(one, name) for name in ("calls", "outcome", "candidates", "timed", "rounds")},
                **{name: _number(getattr(one, name)) for name in ("choice_us", "us", "fastest_us", "noise")},
                **{"torch_us": _number(one.torch_us), "torch_faster": one.torch_faster},
                **{name: getattr(one, name) and str(getattr(one, name)) for name in ("choice", "selection")},
                **{"why": one.why, "stored": one.stored, "failed": [list(pair) for pair in one.failed]},
                "again": [{"same": race.same, "slower": race.slower} for race in one.again],
                "times": [list(pair) for pair in one.times],
            }
            for one in self.shapes
        ]
        names = ("regret_before", "regret_after", "same_again", "within_1_percent", "served")
        given = {name: getattr(self, name) for name in ("device", "bits", "measure", "budget", "seconds")}
        return {**given, **{name: _number(getattr(self, name)) for name in names}, "shapes": shapes}

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
    """One product by torch and by this package.

    outcome: "failed" where its kernel, torch's product or its operands cannot be had, "refused" where the GPU was not
    fit to be measured, "no time" where the budget was spent; why: in words; calls: how often it was recorded, or named;
    torch_us, ours_us: microseconds of a call; ratio: torch's time over ours, above 1 where we are faster; noise: the
    share by which the ratio may be off, 3.5 standard deviations; torch_error, ours_error: the Frobenius norm of a
    result's difference from the fp64 result, over the norm of that; rounds: in which both were timed; kernel: ours.
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
        found = {name: None if x != x else x for name, x in asdict(self).items()}
        return {"product": problem_text(self.problem), **found, "problem": plain(self.problem)}


@dataclass(frozen=True)
class Comparison:
    """What `compare` found. device: the GPU's name; recorded: whether calls were counted while a program ran; products:
    a record of each, the most called first; seconds: that it took. `str()` is a table for people."""

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

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        fields = {name: getattr(self, name) for name in ("device", "recorded", "seconds", "torch_ms", "ours_ms")}
        return fields | {"products": [one.as_dict() for one in self.products]}

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
    return math.exp(sum(map(math.log, ratios)) / len(ratios)) - 1 if ratios else math.nan


def _number(x: float) -> float | None:
    return None if math.isnan(x) else x
