"""What is timed against an incumbent: kernels of its bit class that the model predicts to be nearly as fast. And what
comes of it."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter
from typing import Any, NamedTuple

from ..hardware.device import DeviceInfo
from ..hardware.device_model import model_of
from ..hardware.graphs import rest
from ..kernels import forms
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..runtime import kit, kits
from ..runtime.binaries import identities
from ..selection import batch_invariance
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, about, each_within, given, illegal, predicted_or_inf
from .halving import MOST

SLOWER = 1.3  # times the incumbent's predicted time


class Ranked(NamedTuple):
    """A candidate as the model ranks it."""

    us: float  # microseconds of a launch, by the model
    selection: Selection
    is_there: bool  # whether kits have its kernels
    binaries: tuple[Hashable, ...]  # what tells its kernels from others, for `background.order`
    modules: tuple[str, ...]  # the same in short


@dataclass(eq=False)
class TrialCandidate:
    """A candidate while it is timed."""

    ranked: Ranked
    us: float  # microseconds of a launch, by the model and then by the last sample
    wanted: Any = None  # its compilation, if it needs one
    plan: Any = None
    graph: Any = None  # a sample, of `count` launches
    count: int = 0

    @property
    def selection(self) -> Selection:
        return self.ranked.selection

    @property
    def is_compiled(self) -> bool:
        return self.wanted is None or self.wanted.error is not None


@dataclass(frozen=True)
class Outcome:
    """What a trial has found."""

    plan: Any  # the winner's, or None where the incumbent stays
    ranked: Ranked
    us: float  # microseconds of a launch of the winner
    before_us: float  # and of the incumbent, in the same places
    samples: int  # of the winner
    candidates: int  # that were timed, with the incumbent


def is_foreign(selection: Selection, device: DeviceInfo) -> bool:
    """Whether it is a kit's of another Triton than the installed one, as all that is timed against it must be."""
    return selection.kit and bool(kits.others(device.capability))


def predicted_us(problem: GemmProblem, device: DeviceInfo, selection: Selection) -> float:
    """Infinite for what the model knows nothing of."""
    own = Candidate(given(problem, selection.algorithm), selection.algorithm)
    with forms.of_kits() if is_foreign(selection, device) else nullcontext():
        return predicted_or_inf(problem, own, model_of(device))


def ranked(problem: GemmProblem, device: DeviceInfo, incumbent: Selection) -> list[Ranked]:
    """The incumbent, then at most MOST - 1 others in the model's order. It takes Python for 10 ms and more, so another
    process does it, if one can; else other threads may have Python meanwhile."""
    found = []
    for us, selection in candidates(problem, device, incumbent):
        binaries = identities(device, problem, selection)
        is_there = kits.serves(problem, device, selection)
        found.append(Ranked(us, selection, is_there, binaries, tuple(map(kit.key_of, binaries))))
        rest()
    return found


def candidates(problem: GemmProblem, device: DeviceInfo, incumbent: Selection) -> list[tuple[float, Selection]]:
    """Predicted microseconds and the selection, as `ranked` has them."""
    own_us, foreign = predicted_us(problem, device, incumbent), is_foreign(incumbent, device)
    found = [(own_us, incumbent)]
    with forms.of_kits() if foreign else nullcontext():
        wanted, near = bit_class(problem, incumbent), []
        for us, candidate in _near(problem, device, incumbent, SLOWER * own_us):
            if candidate.algorithm != incumbent.algorithm and bit_class(problem, candidate) == wanted:
                near.append((us, candidate))
            rest()
        for us, candidate in sorted(near, key=itemgetter(0)):
            like = Selection.of(candidate, about(us, problem, device), "user's table")
            like = replace(like, batch_invariant=incumbent.batch_invariant, kit=foreign)
            if len(found) < MOST and not (foreign and not kits.holds(problem, device, like, True)):
                found.append((us, like))
            rest()
    return found


def _near(
    problem: GemmProblem, device: DeviceInfo, incumbent: Selection, limit_us: float
) -> Iterable[tuple[float, Candidate]]:
    """Legal candidates that are predicted to take at most so long."""
    if not incumbent.batch_invariant:
        return each_within(problem, device, limit_us)
    ranked = batch_invariance.ranked(problem, device)
    return (x for x in ranked if x[0] <= limit_us and illegal(problem, device, x[1]) is None)
