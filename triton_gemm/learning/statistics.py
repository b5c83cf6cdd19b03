"""How often products are called, whether a trial of theirs would pay, and what may be spent on trials."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from ..problem import GemmProblem
from ..runtime.turns import Turn
from ..selection.select import Selection

SHARE = 0.01  # of the GPU time of calls that trials may take
LONGEST_US = 1000.0  # of a launch: what takes longer is not timed in service
LEAST_CALLS = 512
COST, GAIN = 240, 0.015  # launches of a trial, and what it gains in the mean: by simulation on committed records
HORIZON_S = 600.0  # that calls are expected to go on for as they came until now, if not for longer


@dataclass(eq=False)
class Product:
    """A problem with the kernel that its calls run on, and all plans of these. Moments are seconds of the tuner's
    clock."""

    problem: GemmProblem
    selection: Selection
    index: int
    us: float  # microseconds of a launch, by the model until it was sampled
    since: float  # when it was called first
    calls: int = 0
    not_before: float = 0.0  # when it may be timed
    over: bool = False  # whether it was timed
    before: Selection | None = None  # what calls ran on before a trial's winner
    saved_us: float = 0.0  # microseconds of a call, by what was learned
    at: float = -math.inf  # when it was called last
    ranked: Sequence[Any] = ()  # what is timed next, once few were
    references: list[ref[Any]] = field(default_factory=list)  # replaced as a whole: threads may be reading

    def add(self, plan: Any) -> None:
        """Gives a plan a turn, and then counts its calls."""
        plan.turn = Turn(self)
        self.references = [x for x in self.references if x() is not None] + [ref(plan)]

    @property
    def plans(self) -> list[Any]:
        """All that have not ended, each with a turn."""
        return [plan for x in [*self.references] if (plan := x()) is not None]

    @property
    def worth(self) -> float:
        """Microseconds of the GPU that its calls have taken."""
        return self.calls * self.us

    def pays(self, now: float) -> bool:
        """Whether it is called often enough: as many calls are expected as there were, or as come in HORIZON_S at that
        rate."""
        if self.over or self.calls < LEAST_CALLS or now < self.not_before:
            return False
        expected = self.calls * max(1.0, HORIZON_S / max(now - self.since, 1.0))
        return expected * GAIN >= COST


@dataclass
class Tempo:
    """What counts for all trials."""

    of_calls: float = 0.0  # microseconds of the GPU that calls have taken, by the times that are known or predicted
    spent: float = 0.0  # microseconds of the GPU that trials have taken, likewise
    loaded: float = -math.inf  # when a module was loaded last
    modules: set[tuple[int, str]] = field(default_factory=set)  # of kernels that are loaded, by device
    full_until: float = -math.inf  # when the memory that is free is read again

    def allows(self, us: float) -> bool:
        return self.spent + us <= SHARE * self.of_calls
