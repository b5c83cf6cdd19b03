"""The order in which candidates are timed, and which one wins: pure logic over a `Bench`, so that it is tested with a
clock and kernels that are made up.

Candidates come in the model's order, its own choice first: the incumbent. All that are timed take turns with it, round
by round, and are compared within rounds. The first rounds, a few at a time, take whatever is compiled already. Then the
slower half is dropped while rounds double (successive halving: Jamieson and Talwalkar, AISTATS 2016). The final rounds
of the last few alone decide.

Many candidates are as fast as one another, so which is fastest depends on noise, and would differ from run to run. The
winner is therefore the first, in the model's order, of those that are as fast as the fastest. These are separated from
the slower ones at the widest gap between times in TIE, where noise moves least across it. The incumbent has to be
beaten by more than the noise besides. The winner of a tuning before comes first in that order, and stays as long as it
is within TIE, so that tuning again changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Generic, Protocol, TypeVar

FIRST_ROUNDS = 3  # at a time
AT_ONCE = 6  # candidates that are timed together in first rounds, with the incumbent
FINALISTS = 8  # candidates of the final rounds
FINAL_ROUNDS = (24, 480)  # at a time and at most
LEAST_ROUNDS = 5  # final ones where there is no time for more
SLOW = 2.0  # times the incumbent: what is slower at its first call is not timed
TIE = (0.004, 0.009)  # how much slower than the fastest one may be, and count as fast: at least, and at most
CONFIDENCE = 3.5  # standard deviations: one of 1000 intervals leaves the truth out, of few rounds one of 200
SHARE_OF_FIRST_ROUNDS = 0.6  # of the time: what has not been compiled then is not timed
PAUSE_S = 0.01

Candidate = TypeVar("Candidate")
_Candidate = TypeVar("_Candidate", contravariant=True)


class FailedError(Exception):
    """A candidate cannot be timed; the text says why."""


class Bench(Protocol[_Candidate]):
    """What compiles and times: a GPU, or a stand-in."""

    def now(self) -> float:
        """Seconds, from any beginning."""

    def pause(self, seconds: float) -> None:
        """Waits for what is being compiled."""

    def ready(self, candidate: _Candidate) -> bool:
        """Whether it need not be waited for: it is compiled, or has failed."""

    def prepare(self, candidate: _Candidate) -> float:
        """Makes it ready to be timed, and checks what it computes: about how many milliseconds a call takes.
        FailedError where it cannot be timed."""

    def time(self, candidates: Sequence[_Candidate], rounds: int) -> list[list[float]]:
        """Milliseconds of a call of each, in each of so many rounds in which they take turns."""

    def round_s(self, candidates: Sequence[_Candidate]) -> float:
        """About how many seconds such a round takes."""

    def drop(self, candidate: _Candidate) -> None:
        """It will not be timed again."""

    def close(self) -> None:
        """Gives its memory back."""


@dataclass(frozen=True)
class TrialResult(Generic[Candidate]):
    """What trial rounds have found."""

    winner: Candidate  # which is the incumbent unless another was faster by more than noise
    fastest: Candidate  # of all, noise or not
    ms: float  # milliseconds of a call of the winner in the final rounds
    incumbent_ms: float  # and of the incumbent
    fastest_ms: float  # and of the fastest
    # By how much the winner's time over the incumbent's may be off, as a share. Where the incumbent stays, that of the
    # fastest one's.
    noise: float
    rounds: int  # final ones
    timed: int  # how many candidates, the incumbent included
    failed: Mapping[Candidate, str] = field(default_factory=dict)  # why others could not be timed
    untried: tuple[Candidate, ...] = ()  # those that there was no time for
    # Milliseconds of a call of each that was timed. They are its last rounds' ratio to the incumbent times the
    # incumbent's last time, so that they can be compared.
    times: Mapping[Candidate, float] = field(default_factory=dict)
    # Milliseconds of a first call, of candidates that were not timed because of it.
    once: Mapping[Candidate, float] = field(default_factory=dict)


Callback = (
    Callable[[int, int, Candidate, float, float], None] | None
)  # timed, of how many, the best, its ms, candidates[0]'s ms


def run_trials(
    candidates: Sequence[Candidate],
    bench: Bench[Candidate],
    budget_s: float,
    *,
    before: Candidate | None = None,
    progress: Callback[Candidate] = None,
) -> TrialResult[Candidate]:
    """Times candidates against candidates[0], the incumbent, within `budget_s` seconds but for what is under way then.

    before: the winner of the last tuning, if known; progress: is called with what is timed and which one
    leads. FailedError where the incumbent cannot be timed.
    """
    begin = bench.now()
    running = _Trials(candidates, bench, before, progress)
    running.add(candidates[0])
    running.run_first_rounds(begin + SHARE_OF_FIRST_ROUNDS * budget_s)
    running.run_halving_rounds(begin + budget_s)
    return running.run_final_rounds(begin + budget_s)


class _Trials(Generic[Candidate]):
    """The candidates that are still timed, and what is known of all."""

    def __init__(
        self,
        candidates: Sequence[Candidate],
        bench: Bench[Candidate],
        before: Candidate | None,
        progress: Callback[Candidate],
    ) -> None:
        self.candidates, self.bench, self.before, self.progress = candidates, bench, before, progress
        self.place = {candidate: -1 if candidate == before else i for i, candidate in enumerate(candidates)}
        self.ms: dict[Candidate, float] = {}  # of those that are still timed, as far as is known
        self.left: dict[Candidate, float] = {}  # of those that were dropped
        self.once: dict[Candidate, float] = {}  # of those that were too slow to be added
        self.failed: dict[Candidate, str] = {}
        self.waiting = list(candidates[1:])
        self.timed = 1

    def add(self, candidate: Candidate) -> None:
        self.ms[candidate] = self.bench.prepare(candidate)

    def drop(self, candidate: Candidate) -> None:
        self.left[candidate] = self.ms.pop(candidate)
        self.bench.drop(candidate)

    def run_first_rounds(self, until: float) -> None:
        """Times candidates, a few at a time, as soon as they are compiled."""
        incumbent, bench = self.candidates[0], self.bench
        while self.waiting and bench.now() < until:
            ready = [candidate for candidate in self.waiting if bench.ready(candidate)][: AT_ONCE - 1]
            if not ready:
                bench.pause(PAUSE_S)
                continue
            self.waiting = [candidate for candidate in self.waiting if candidate not in ready]
            added = []
            for candidate in ready:
                try:
                    self.add(candidate)
                except FailedError as error:
                    self.failed[candidate] = str(error)
                    continue
                self.timed += 1
                if self.ms[candidate] > SLOW * self.ms[incumbent]:
                    self.once[candidate] = self.ms.pop(candidate)
                    bench.drop(candidate)
                else:
                    added.append(candidate)
            if added:
                self.time([incumbent, *added], FIRST_ROUNDS)
            self.report_progress()

    def time(self, candidates: Sequence[Candidate], rounds: int) -> list[list[float]]:
        """The logarithms of their times in each round, over those of the incumbent, which is among them."""
        times = self.bench.time(candidates, rounds)
        bases = times[candidates.index(self.candidates[0])]
        logs = [[log(own / base) for own, base in zip(row, bases, strict=True)] for row in times]
        base = median(bases)
        drift = base / self.ms[self.candidates[0]]  # of the clock, since the last rounds
        for known in (self.ms, self.left, self.once):
            known.update({candidate: ms * drift for candidate, ms in known.items()})
        self.ms.update({candidate: base * exp(middle(row)) for candidate, row in zip(candidates, logs, strict=True)})
        return logs

    def run_halving_rounds(self, end: float) -> None:
        rounds = 2 * FIRST_ROUNDS
        while len(self.ms) > FINALISTS:
            standing = self.order()
            if self.bench.now() + rounds * self.bench.round_s(standing) > (self.bench.now() + end) / 2:
                break
            self.time(standing, rounds)
            self.keep(max(FINALISTS, -(-len(standing) // 2)))
            rounds *= 2
            self.report_progress()
        self.keep(FINALISTS)

    def keep(self, count: int) -> None:
        """The incumbent, the fastest half of so many, and of others that may be as fast the first in order."""
        incumbent = self.candidates[0]
        fast = sorted(self.order(), key=self.ms.__getitem__)
        least = self.ms[fast[0]]
        kept = [incumbent, *fast[: count // 2]]
        rest = [candidate for candidate in fast if candidate not in kept]
        near = [
            candidate
            for candidate in self.order()
            if candidate in rest and self.ms[candidate] <= least * (1 + 2 * TIE[1])
        ]
        kept += near + [candidate for candidate in rest if candidate not in near]
        for candidate in [candidate for candidate in fast if candidate not in dict.fromkeys(kept[: max(count, 1)])]:
            self.drop(candidate)

    def order(self) -> list[Candidate]:
        """Those that are still timed, in the order in which ties are decided."""
        return sorted(self.ms, key=self.place.__getitem__)

    def run_final_rounds(self, end: float) -> TrialResult[Candidate]:
        candidates = running = self.order()
        incumbent = candidates.index(self.candidates[0])
        logs: list[list[float]] = [[] for _ in candidates]
        while True:
            fit = int((end - self.bench.now()) / self.bench.round_s(running))
            for candidate, more in zip(
                running, self.time(running, min(FINAL_ROUNDS[0], max(LEAST_ROUNDS, fit))), strict=True
            ):
                logs[candidates.index(candidate)] += more
            found = _judge(logs, incumbent, candidates[0] == self.before)
            running = [candidate for i, candidate in enumerate(candidates) if i == incumbent or not found.out[i]]
            over = self.bench.now() + FINAL_ROUNDS[0] * self.bench.round_s(running) > end
            if found.clear or over or len(logs[incumbent]) >= FINAL_ROUNDS[1] or len(running) == 1:
                break
        base = self.ms[candidates[incumbent]]
        chosen = found.chosen if found.beaten else incumbent
        ms = [base * exp(middle(row)) for row in logs]
        return TrialResult(
            winner=candidates[chosen],
            fastest=candidates[found.fastest],
            ms=ms[chosen],
            incumbent_ms=ms[incumbent],
            fastest_ms=ms[found.fastest],
            noise=found.noise,
            rounds=len(logs[incumbent]),
            timed=self.timed,
            failed=self.failed,
            untried=tuple(self.waiting),
            times={**self.left, **dict(zip(candidates, ms, strict=True))},
            once=self.once,
        )

    def report_progress(self) -> None:
        if self.progress is not None:
            best = min(self.ms, key=self.ms.__getitem__)
            self.progress(self.timed, len(self.candidates), best, self.ms[best], self.ms[self.candidates[0]])


@dataclass(frozen=True)
class _Verdict:
    """What final rounds have shown, by place among their candidates."""

    chosen: int  # which is chosen
    fastest: int  # which is fastest
    clear: bool  # whether more rounds would hardly change it
    out: tuple[bool, ...]  # which are surely too slow to be either
    # Of the chosen one's time over the incumbent's, as a logarithm; if that is the incumbent, of the fastest one's.
    noise: float
    beaten: bool  # whether the chosen one's time over the incumbent's is less than 1 by more than noise


def _judge(logs: Sequence[Sequence[float]], incumbent: int, defends: bool) -> _Verdict:
    """logs: of each finalist's times over the incumbent's; of some fewer rounds than of others. defends: whether the
    first has won before, and stays if it is in TIE at all."""
    places = [middle(row) for row in logs]
    fastest = min(range(len(places)), key=places.__getitem__)
    differences = [[x - y for x, y in zip(row, logs[fastest], strict=False)] for row in logs]
    behind = [middle(row) for row in differences]
    unsure = [CONFIDENCE * deviation(row) for row in differences]
    out = tuple(place - by > TIE[1] for place, by in zip(behind, unsure, strict=True))
    cut = TIE[1] if defends and behind[0] <= TIE[1] else _widest_gap(behind)
    chosen = next(i for i, place in enumerate(behind) if place <= cut)
    # On which side of the cut the chosen one is, and those that would be chosen before it.
    clear = all(i == fastest or abs(behind[i] - cut) > unsure[i] for i in range(chosen + 1))
    rival = chosen if chosen != incumbent else fastest
    noise = CONFIDENCE * deviation(logs[rival]) if rival != incumbent else 0.0
    beaten = chosen != incumbent and places[chosen] + noise < 0
    return _Verdict(chosen, fastest, clear, out, noise, beaten)


def _widest_gap(behind: Sequence[float]) -> float:
    """Where to part the fast from the slow: the middle of the widest gap between times behind the fastest in TIE."""
    low, high = TIE
    edges = sorted([low, *(place for place in behind if low < place < high), high])
    gaps = [(after - before, before) for before, after in pairwise(edges)]
    gap, before = max(gaps)
    return before + gap / 2


def middle(row: Sequence[float]) -> float:
    """The mean of the middle half: what disturbs a round is left out, at less noise than the median's."""
    cut = len(row) // 4
    return fmean(sorted(row)[cut : len(row) - cut])


def deviation(row: Sequence[float]) -> float:
    """Of `middle`, estimated from the winsorised variance (Tukey and McLaughlin, Sankhya A 25, 1963)."""
    count, cut = len(row), len(row) // 4
    ordered = sorted(row)
    if count < 4:
        return (ordered[-1] - ordered[0]) or 1e-9
    low, high = ordered[cut], ordered[count - 1 - cut]
    clipped = [min(max(x, low), high) for x in ordered]
    mean = fmean(clipped)
    variance = sum((x - mean) ** 2 for x in clipped) / (count - 1)
    return sqrt(variance / count) / ((count - 2 * cut) / count) or 1e-9
