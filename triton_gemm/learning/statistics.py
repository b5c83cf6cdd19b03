"""How often products are called, whether a race of theirs would pay, and what may be spent on races."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any
from weakref import ref

from ..problem import GemmProblem
from ..runtime.turns import Turn
from ..selection.select import Selection

SHARE = 0.01  # of the GPU time of calls that races may take
LONGEST_US = 1000.0  # of a launch: what takes longer is not raced in service
LEAST_CALLS = 512
COST, GAIN = 240, 0.015  # launches of a race, and what it gains in the mean: by simulation on committed records
HORIZON_S = 600.0  # that calls are expected to go on for as they came until now, if not for longer


@dataclass(eq=False)
class Product:
    """A problem with the kernel that its calls run on, and all plans of these. us: what a launch takes, by the model
    until it was sampled; since, at: when it was called first and last; not_before: when it may be raced; over: whether
    it was; before, saved_us: of a call, by what was learned; ranked: what is raced next, once few were."""

    problem: GemmProblem
    selection: Selection
    index: int
    us: float
    since: float
    calls: int = 0
    not_before: float = 0.0
    over: bool = False
    before: Selection | None = None
    saved_us: float = 0.0
    at: float = -math.inf
    ranked: Sequence[Any] = ()
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
    """Of all races. of_calls, spent: microseconds of the GPU, by the times that are known or predicted; loaded: when a
    module was loaded last; modules: by device, of kernels that are loaded; full_until: when it is looked again whether
    there is memory."""

    of_calls: float = 0.0
    spent: float = 0.0
    loaded: float = -math.inf
    modules: set[tuple[int, str]] = field(default_factory=set)
    full_until: float = -math.inf

    def allows(self, us: float) -> bool:
        return self.spent + us <= SHARE * self.of_calls
