"""What a calibration says: while it runs, and at its end."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from ..problem import GemmProblem
from ..tuning.report import values

# "kept": the model is stored, and used from now on.
# "not kept": it was not wanted (keep=False), or the folder cannot be written to.
# "unchanged": it predicts products that it was not fitted to no better than the model before, or picks nothing faster
# for them than a shipped one.
# "refused": the GPU was throttled or shared, or too few products could be timed.
Outcome = Literal["kept", "not kept", "unchanged", "refused"]


@dataclass(frozen=True)
class Progress:
    """A step of `calibrate`.

    Attributes:
        number: Of this GEMM, from 1.
        count: How many there are.
        problem: The GEMM problem that is timed now.
        timed: Candidates timed so far.
        seconds_left: Of the budget.
    """

    number: int
    count: int
    problem: GemmProblem
    timed: int
    seconds_left: float


@dataclass(frozen=True)
class CalibrationReport:
    """What `calibrate` did. `str()` is for people.

    Attributes:
        outcome: One of `Outcome`.
        device: The GPU's name.
        start: The model that the fit started from.
        budget, seconds: Given, and taken.
        why: The reason, if the outcome is "unchanged" or "refused".
        path: The file of the model.
        shapes, timed: How many GEMMs and candidates were timed.
        failed: Candidates that could not be timed, and why.
        repeated: GEMMs whose times did not count at first.
        error: Of the old and the new model, on held-out GEMMs (cross-validation): the root mean square of the
            logarithms of predicted over measured times.
        regret: Of both, on the same GEMMs: how much longer their choices took than the fastest candidates.
        figures: (name, before, after) of each parameter that changed by 1 % or more.
    """

    outcome: Outcome
    device: str
    start: str
    budget: float
    seconds: float
    why: str = ""
    path: Path | None = None
    shapes: int = 0
    timed: int = 0
    failed: tuple[tuple[str, str], ...] = ()
    repeated: int = 0
    error: tuple[float, float] = (math.nan, math.nan)
    regret: tuple[float, float] = (math.nan, math.nan)
    figures: tuple[tuple[str, float, float], ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Plain values, as JSON has them; None for what was not measured."""
        names = ("outcome", "why", "device", "start", "budget", "seconds", "shapes", "timed", "repeated")
        error, regret = values(self, "error", "regret").values()
        pairs = {"error_before": error[0], "error_after": error[1]}
        pairs |= {"regret_before": regret[0], "regret_after": regret[1]}
        figures = {name: {"before": before, "after": after} for name, before, after in self.figures}
        path = self.path and str(self.path)
        return {**values(self, *names), **pairs, "path": path, **values(self, "failed"), "figures": figures}

    def __str__(self) -> str:
        lines = [f"  {what}: {why}" for what, why in self.failed]
        lines += [f"  {name}: {before:.4g} -> {after:.4g}" for name, before, after in self.figures]
        lines.append(
            f"{self.device}: {self.timed} candidates of {self.shapes} GEMMs timed, in {self.seconds:.0f} of "
            f"{self.budget:g} s, starting from the model {self.start.split(':')[0][:80]}"
        )
        if not math.isnan(self.error[0]):
            error, regret = ([f"{100 * x:.1f} %" for x in pair] for pair in (self.error, self.regret))
            lines.append(
                f"on held-out GEMMs: predictions are off by {error[0]} before, {error[1]} after; "
                f"choices are {regret[0]} slower than the fastest before, {regret[1]} after"
            )
        outcome = {"kept": f"kept in {self.path}", "not kept": "not kept"}.get(self.outcome, self.outcome)
        lines.append(f"{outcome}{': ' if self.why else ''}{self.why}")
        return "\n".join(lines)
