"""What is timed when: one product after another, as soon as its candidates are compiled, while the time lasts. Pure
logic over a `Lab`, so that it is tested without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from statistics import median

import torch

from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..selection.select import Selection
from ..tables.records import named
from ..tuning import trials
from ..tuning.conditions import ATTEMPTS, Monitor
from ..tuning.session import Lab
from .fit import Timed
from .report import Progress

ROUNDS = 7  # in which the candidates of a product take turns
SLOW = 3.0  # times the model's choice: who is slower at the first call is not timed
PAUSE_S = 0.02


@dataclass(frozen=True)
class Probe:
    """A product, and what is timed of it."""

    problem: GemmProblem
    candidates: dict[Selection, Candidate]  # its candidates; the first's result is what others' are compared with


@dataclass
class Measured:
    """What `measure` has found."""

    timed: list[Timed] = field(default_factory=list)  # what counts
    failed: list[tuple[str, str]] = field(default_factory=list)  # candidates that could not be timed, and why
    repeated: int = 0  # products that were timed again
    refused: int = 0  # products that still do not count in the end
    complaint: str = ""  # why one did not count, the last time


def measure(
    lab: Lab, probes: Sequence[Probe], until: float, progress: Callable[[Progress], None] | None = None
) -> Measured:
    """Times the probes' candidates until `until`, by the lab's clock, but for what is under way then. Products during
    which the GPU was throttled or shared are timed once more, after the others. DeviceLostError where a candidate has
    cost the GPU."""
    found, monitor = Measured(), Monitor(lab.conditions, lab.now)
    waiting = [(probe, 0) for probe in probes]
    for probe in probes:
        lab.prepare(probe.problem, list(probe.candidates))
    while waiting and lab.now() < until:
        ready = next((one for one in waiting if lab.ready(one[0].problem, list(one[0].candidates))), None)
        if ready is None:
            lab.pause(PAUSE_S)
            continue
        waiting.remove(ready)
        probe, attempt = ready
        found.repeated += attempt > 0
        if progress is not None:
            count = sum(len(timed.us) for timed in found.timed)
            number = len(probes) - len(waiting)
            left = until - lab.now()
            progress(Progress(number, count=len(probes), problem=probe.problem, timed=count, seconds_left=left))
        monitor.before(recent_s=math.inf)
        timed = _time(lab, probe, attempt, found)
        why = monitor.after()
        if timed is None:
            continue
        found.complaint = why or found.complaint
        if why is None:
            found.timed.append(timed)
        elif attempt + 1 < ATTEMPTS:
            waiting.append((probe, attempt + 1))
        else:
            found.refused += 1
    found.refused += sum(attempt > 0 for _, attempt in waiting)
    return found


def _time(lab: Lab, probe: Probe, seed: int, found: Measured) -> Timed | None:
    """The times of a probe's candidates that can be timed, at least two, or None."""
    first, *others = probe.candidates
    try:
        with closing(lab.bench(probe.problem, list(probe.candidates), seed)) as bench:
            ms = {first: bench.prepare(first)}
            for selection in others:
                try:
                    ms[selection] = bench.prepare(selection)
                except trials.FailedError as error:
                    found.failed.append((described(probe.problem, selection), f"{error}"))
            selections = [selection for selection in ms if ms[selection] <= SLOW * ms[first]]
            us = {
                probe.candidates[selection]: 1000 * median(row)
                for selection, row in zip(selections, bench.time(selections, ROUNDS), strict=True)
            }
    except (trials.FailedError, torch.OutOfMemoryError) as error:
        found.failed.append((described(probe.problem, first), f"{error}".splitlines()[0]))
        if isinstance(error, torch.OutOfMemoryError) or len(others) < 2:
            return None
    else:
        return Timed(probe.problem, us) if len(us) > 1 else None
    return _time(lab, without(probe, first), seed, found)  # others are compared with the next


def without(probe: Probe, *selections: Selection) -> Probe:
    """The probe with fewer candidates."""
    return Probe(
        probe.problem,
        {selection: candidate for selection, candidate in probe.candidates.items() if selection not in selections},
    )


def described(problem: GemmProblem, selection: Selection) -> str:
    """A candidate, for people."""
    return f"{problem.M}x{problem.N}x{problem.K}: {named(selection)}"
