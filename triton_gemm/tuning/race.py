"""The order in which candidates are timed, and which one wins: pure logic over a `Bench`, so that it is tested with a
clock and kernels that are made up.

Candidates come in the model's order, its own choice first: the incumbent. All that are timed take turns with it, round
by round, and are compared within rounds. Heats of a few rounds take whatever is compiled already; then halves of the
field drop out while rounds double (successive halving: Jamieson and Talwalkar, AISTATS 2016); the last few run a final,
whose rounds alone decide.

Many candidates are as fast as one another, so which is fastest depends on noise, and would differ from run to run. The
winner is therefore the first, in the model's order, of those that are as fast as the fastest: they are told from the
slower ones at the widest gap between times in TIE, where noise moves least across it. The incumbent has to be beaten by
more than the noise besides. What won a race before comes first in that order, and stays as long as it is within TIE, so
that racing again changes little.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from math import exp, log, sqrt
from statistics import fmean, median
from typing import Generic, Protocol, TypeVar

HEAT = 3  # rounds
AT_ONCE = 6  # candidates of a heat, with the incumbent
FINALISTS = 8
FINAL = (24, 480)  # rounds, at a time and at most
LEAST_ROUNDS = 5  # of a final for which there is no time
SLOW = 2.0  # times the incumbent: who is slower at its first call is not timed
TIE = (0.004, 0.009)  # how much slower than the fastest one may be, and count as fast: at least, and at most
CONFIDENCE = 3.5  # standard deviations: one of 1000 intervals leaves the truth out, of few rounds one of 200
SHARE_OF_HEATS = 0.6  # of the time: who has not been compiled then is not timed
PAUSE_S = 0.01

Way = TypeVar("Way")
_Way = TypeVar("_Way", contravariant=True)


class FailedError(Exception):
    """A candidate cannot be timed; the text says why."""


class Bench(Protocol[_Way]):
    """What compiles and times: a GPU, or a stand-in."""

    def now(self) -> float:
        """Seconds, from any beginning."""

    def pause(self, seconds: float) -> None:
        """Waits for what is being compiled."""

    def ready(self, way: _Way) -> bool:
        """Whether it need not be waited for: it is compiled, or has failed."""

    def prepare(self, way: _Way) -> float:
        """Makes it ready to be timed, and checks what it computes: about how many milliseconds a call takes.
        FailedError where it cannot be timed."""

    def time(self, ways: Sequence[_Way], rounds: int) -> list[list[float]]:
        """Milliseconds of a call of each, in each of so many rounds in which they take turns."""

    def round_s(self, ways: Sequence[_Way]) -> float:
        """About how many seconds such a round takes."""

    def drop(self, way: _Way) -> None:
        """It will not be timed again."""

    def close(self) -> None:
        """Gives its memory back."""


@dataclass(frozen=True)
class Race(Generic[Way]):
    """What came of a race."""

    way: Way  # the winner, which is the incumbent unless another was faster by more than noise
    fastest: Way  # of all, noise or not
    ms: float  # milliseconds of a call of the winner in the final
    incumbent_ms: float  # and of the incumbent
    fastest_ms: float  # and of the fastest
    # By how much the winner's time over the incumbent's may be off, as a share. Where the incumbent stays, that of the
    # fastest one's.
    noise: float
    rounds: int  # of the final
    timed: int  # how many candidates, the incumbent included
    failed: Mapping[Way, str] = field(default_factory=dict)  # why others could not be timed
    untried: tuple[Way, ...] = ()  # those that there was no time for
    # Milliseconds of a call of each that was timed. They are its last rounds' ratio to the incumbent times the
    # incumbent's last time, so that they can be compared.
    times: Mapping[Way, float] = field(default_factory=dict)
    # Milliseconds of a first call, of who was not timed because of it.
    once: Mapping[Way, float] = field(default_factory=dict)


Callback = Callable[[int, int, Way, float, float], None] | None  # timed, of how many, the best, its ms, ways[0]'s ms


def race(
    ways: Sequence[Way],
    bench: Bench[Way],
    budget_s: float,
    *,
    before: Way | None = None,
    progress: Callback[Way] = None,
) -> Race[Way]:
    """Times candidates against ways[0], the incumbent, within `budget_s` seconds but for what is under way then.

    before: the last race's winner, if known; progress: is called with what is timed and which one
    leads. FailedError where the incumbent cannot be timed.
    """
    begin = bench.now()
    running = _Field(ways, bench, before, progress)
    running.enter(ways[0])
    running.heats(begin + SHARE_OF_HEATS * budget_s)
    running.halve(begin + budget_s)
    return running.final(begin + budget_s)


class _Field(Generic[Way]):
    """The candidates that are still in the race."""

    def __init__(self, ways: Sequence[Way], bench: Bench[Way], before: Way | None, progress: Callback[Way]) -> None:
        self.ways, self.bench, self.before, self.progress = ways, bench, before, progress
        self.place = {way: -1 if way == before else i for i, way in enumerate(ways)}
        self.ms: dict[Way, float] = {}  # of who is in the race, as far as is known
        self.left: dict[Way, float] = {}  # of who was
        self.once: dict[Way, float] = {}  # of who was too slow to be in it
        self.failed: dict[Way, str] = {}
        self.waiting = list(ways[1:])
        self.timed = 1

    def enter(self, way: Way) -> None:
        self.ms[way] = self.bench.prepare(way)

    def leave(self, way: Way) -> None:
        self.left[way] = self.ms.pop(way)
        self.bench.drop(way)

    def heats(self, until: float) -> None:
        """Times who is compiled, a few at a time, as soon as they are."""
        incumbent, bench = self.ways[0], self.bench
        while self.waiting and bench.now() < until:
            ready = [way for way in self.waiting if bench.ready(way)][: AT_ONCE - 1]
            if not ready:
                bench.pause(PAUSE_S)
                continue
            self.waiting = [way for way in self.waiting if way not in ready]
            entered = []
            for way in ready:
                try:
                    self.enter(way)
                except FailedError as error:
                    self.failed[way] = str(error)
                    continue
                self.timed += 1
                if self.ms[way] > SLOW * self.ms[incumbent]:
                    self.once[way] = self.ms.pop(way)
                    bench.drop(way)
                else:
                    entered.append(way)
            if entered:
                self.time([incumbent, *entered], HEAT)
            self.report_progress()

    def time(self, ways: Sequence[Way], rounds: int) -> list[list[float]]:
        """The logarithms of their times in each round, over the incumbent's, who is among them."""
        times = self.bench.time(ways, rounds)
        bases = times[ways.index(self.ways[0])]
        logs = [[log(own / base) for own, base in zip(row, bases, strict=True)] for row in times]
        base = median(bases)
        drift = base / self.ms[self.ways[0]]  # of the clock, since the last rounds
        for known in (self.ms, self.left, self.once):
            known.update({way: ms * drift for way, ms in known.items()})
        self.ms.update({way: base * exp(middle(row)) for way, row in zip(ways, logs, strict=True)})
        return logs

    def halve(self, end: float) -> None:
        rounds = 2 * HEAT
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
        incumbent = self.ways[0]
        fast = sorted(self.order(), key=self.ms.__getitem__)
        least = self.ms[fast[0]]
        kept = [incumbent, *fast[: count // 2]]
        rest = [way for way in fast if way not in kept]
        near = [way for way in self.order() if way in rest and self.ms[way] <= least * (1 + 2 * TIE[1])]
        kept += near + [way for way in rest if way not in near]
        for way in [way for way in fast if way not in dict.fromkeys(kept[: max(count, 1)])]:
            self.leave(way)

    def order(self) -> list[Way]:
        """Who is in the race, in the order in which ties are decided."""
        return sorted(self.ms, key=self.place.__getitem__)

    def final(self, end: float) -> Race[Way]:
        ways = running = self.order()
        incumbent = ways.index(self.ways[0])
        logs: list[list[float]] = [[] for _ in ways]
        while True:
            fit = int((end - self.bench.now()) / self.bench.round_s(running))
            for way, more in zip(running, self.time(running, min(FINAL[0], max(LEAST_ROUNDS, fit))), strict=True):
                logs[ways.index(way)] += more
            found = _judge(logs, incumbent, ways[0] == self.before)
            running = [way for i, way in enumerate(ways) if i == incumbent or not found.out[i]]
            over = self.bench.now() + FINAL[0] * self.bench.round_s(running) > end
            if found.clear or over or len(logs[incumbent]) >= FINAL[1] or len(running) == 1:
                break
        base = self.ms[ways[incumbent]]
        chosen = found.chosen if found.beaten else incumbent
        ms = [base * exp(middle(row)) for row in logs]
        return Race(
            way=ways[chosen],
            fastest=ways[found.fastest],
            ms=ms[chosen],
            incumbent_ms=ms[incumbent],
            fastest_ms=ms[found.fastest],
            noise=found.noise,
            rounds=len(logs[incumbent]),
            timed=self.timed,
            failed=self.failed,
            untried=tuple(self.waiting),
            times={**self.left, **dict(zip(ways, ms, strict=True))},
            once=self.once,
        )

    def report_progress(self) -> None:
        if self.progress is not None:
            best = min(self.ms, key=self.ms.__getitem__)
            self.progress(self.timed, len(self.ways), best, self.ms[best], self.ms[self.ways[0]])


@dataclass(frozen=True)
class _Verdict:
    """What a final says, by place in it."""

    chosen: int  # who is chosen
    fastest: int  # who is fastest
    clear: bool  # whether more rounds would hardly change it
    out: tuple[bool, ...]  # who is surely too slow to be either
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
    # On which side of the cut the one who is chosen is, and those who would be chosen before.
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
