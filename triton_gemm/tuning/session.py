"""A tuning: one problem after another, the most called first, each with its share of what is left of the budget; what
was found is stored after each. Pure logic over a `Lab`, so that it is tested without a GPU."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from .. import tables
from ..hardware.device import DeviceInfo
from ..kernels.candidate import Algorithm
from ..problem import GemmProblem
from ..selection.select import Selection, select
from ..tables.files import Bits
from ..tables.records import named
from ..tables.weights import weight_of
from . import race
from .candidates import candidates, refused
from .conditions import ATTEMPTS, Conditions, Monitor
from .gpu import TORCH, Way
from .journal import Journal
from .of_torch import torchs_product
from .report import Again, Measure, Progress, ShapeReport, TuningReport
from .rows import candidates_of_rows

LEAST_S = 2.0  # of a race: of more problems than that leaves time for, the last are left out
LEAST_OF_ROWS_S = 0.5  # of one among few candidates, for a range of rows
MOST_S = 20.0
FEW = 5  # candidates that are compiled when a race begins
AHEAD, AHEAD_OF_ROWS = 1, 5  # problems whose candidates are compiled during a race; those of ranges have few
PATIENCE = 0.25  # of the budget, until they are for the first product
PAUSE_S = 0.05
RECENT_S = 1.0  # a look at the GPU after one race is also the one before the next, which begins so soon
OF_TORCH = (0.2, 2.0)  # for torch's product: the share of a race's time, and the most seconds


class Lab(Protocol):
    """A GPU, or a stand-in."""

    info: DeviceInfo

    def now(self) -> float: ...

    def look(self) -> Conditions:
        """What a reference product takes now."""

    def prepare(self, problem: GemmProblem, ways: Sequence[Selection]) -> None:
        """Has candidates compiled, after those that came before."""

    def ready(self, problem: GemmProblem, ways: Sequence[Selection]) -> bool:
        """Whether all of these are compiled or have failed."""

    def pause(self, seconds: float) -> None:
        """Waits for what is being compiled."""

    def bench(self, problem: GemmProblem, ways: Sequence[Selection], seed: int) -> race.Bench[Way]:
        """torch.OutOfMemoryError where there is too little memory for the operands."""

    def forget(self, problem: GemmProblem) -> None:
        """Its candidates will not be timed again."""


@dataclass(frozen=True)
class Wishes:
    """What `tune` was told."""

    budget: float
    bits: Bits = "same"
    measure: Measure = "graph"
    configs: tuple[Any, ...] = ()
    resume: bool = False
    repeat: int = 1
    fewest_rows: Mapping[GemmProblem, int] = field(default_factory=dict)  # of products that stand for a range


@dataclass(frozen=True)
class _Entrant:
    """A problem with its candidates."""

    problem: GemmProblem
    ways: tuple[Selection, ...]  # the model's choice, then others
    before: Selection | None  # which of them a table has
    left_out: tuple[tuple[str, str], ...]


class Session:
    def __init__(
        self, lab: Lab, journal: Journal, wishes: Wishes, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.lab, self.journal, self.wishes, self.progress = lab, journal, wishes, progress
        self.begin = lab.now()
        self.monitor = Monitor(lab.look, lab.now)
        self.waited = False  # for the first product's candidates
        self.winners: dict[GemmProblem | None, list[Algorithm]] = {}  # for other numbers of rows, by weight

    def left(self) -> float:
        return self.wishes.budget - (self.lab.now() - self.begin)

    def run(self, calls: Mapping[GemmProblem, int], ended: Callable[[ShapeReport], None]) -> TuningReport:
        """Tunes every problem; `ended` is called after each. DeviceLostError where a candidate has cost the GPU: all
        that was found before is stored."""
        problems = sorted(calls, key=lambda problem: -calls[problem])  # of equals the first
        ahead = 0 if self.wishes.measure == "eager" else AHEAD_OF_ROWS if self.wishes.fewest_rows else AHEAD
        entrants: dict[GemmProblem, _Entrant | ShapeReport] = {}
        reports = []
        for i, problem in enumerate(problems):
            for near in problems[i : i + 1 + ahead]:
                again = near == problem and near in self.wishes.fewest_rows  # winners for fewer rows are known now
                if (near not in entrants or again) and self.left() > 0:
                    entrants[near] = found = self.enter(near)
                    if isinstance(found, _Entrant):
                        self.lab.prepare(near, found.ways)
            self.await_few(entrants.get(problem), self.left() / (len(problems) - i))
            share = self.left() / (len(problems) - i)
            report = self.tune(entrants.get(problem), problem, share, (i + 1, len(problems)))
            self.lab.forget(problem)
            reports.append(replace(report, calls=calls[problem]))
            ended(reports[-1])
        wishes, seconds = self.wishes, self.lab.now() - self.begin
        return TuningReport(
            tuple(reports), self.lab.info.name, wishes.bits, wishes.measure, wishes.budget, seconds=seconds
        )

    def await_few(self, entrant: _Entrant | ShapeReport | None, share: float) -> None:
        """Until FEW of its candidates are compiled, so that there is something to race with: the processes that compile
        take seconds to start, and candidates seconds to compile. For the first product a part of the budget at most,
        for others half of their share."""
        if not isinstance(entrant, _Entrant):
            return
        others = entrant.ways[1:]
        least = self.least_s(entrant.problem)
        until = self.lab.now() + (max(share / 2, least) if self.waited else PATIENCE * self.wishes.budget)
        self.waited |= bool(others)

        def ready() -> int:
            return sum(self.lab.ready(entrant.problem, [way]) for way in others)

        while ready() < min(FEW, len(others)) and self.lab.now() < until and self.left() > 0:
            self.lab.pause(PAUSE_S)

    def least_s(self, problem: GemmProblem) -> float:
        """Of a race."""
        return LEAST_OF_ROWS_S if problem in self.wishes.fewest_rows else LEAST_S

    def enter(self, problem: GemmProblem) -> _Entrant | ShapeReport:
        """The candidates of a problem, or why it is not tuned."""
        device, bits = self.lab.info, self.wishes.bits
        try:
            choice = replace(select(problem, device), reason="")
        except RuntimeError as error:
            return ShapeReport(problem, 0, "failed", why=f"{error}")
        entry = tables.entry(problem, device, bits)
        if entry is not None and not tables.serves(problem, device, entry, bits):  # as after a calibration
            entry = None
        if self.wishes.resume:
            current = entry is not None and entry.torch in ("", tables.torchs_versions())
            if entry is not None and current and entry.by == tables.versions():
                known = entry.selection(problem, "user's table")
                report = ShapeReport(problem, 0, "known", choice=choice, selection=known, why="a table has an entry")
                report = replace(report, torch_us=entry.torch_us or math.nan, torch_faster=bool(entry.torch))
                return replace(report, choice_us=entry.default_us, us=entry.us)
            if self.journal.has_stayed(problem, bits, choice):
                why = "the model's choice was not beaten"
                return ShapeReport(problem, 0, "known", choice=choice, selection=choice, why=why)
        offered = candidates(problem, device, choice, bits, self.wishes.configs)
        if problem in self.wishes.fewest_rows:
            winners = self.winners.get(weight_of(problem), ())
            offered = candidates_of_rows(problem, device, bits, self.wishes.fewest_rows[problem], winners, offered)
        left_out = refused(problem, device, offered, bits, self.wishes.configs)
        before = None
        if entry is not None:
            known = replace(entry.selection(problem, "tuner"), reason="")
            before = next((way for way in offered if replace(way, source="tuner") == known), known)
            offered = list(dict.fromkeys([choice, before, *offered]))  # it is compiled before others
        failures = {way: self.journal.failure(problem, way) for way in offered[1:]}
        left_out += [(named(way), f"skipped: {why}") for way, why in failures.items() if why is not None]
        ways = tuple(way for way in offered if failures.get(way) is None)
        return _Entrant(problem, ways, before, tuple(left_out))

    def tune(
        self, entrant: _Entrant | ShapeReport | None, problem: GemmProblem, share: float, number: tuple[int, int]
    ) -> ShapeReport:
        if isinstance(entrant, ShapeReport):
            return entrant
        if entrant is None or self.left() <= 0:
            return ShapeReport(problem, 0, "no time")
        races = self.wishes.repeat
        allowance = min(max(share, self.least_s(problem) * races), self.left(), MOST_S * races) / races
        report, tried = self.races(entrant, allowance, 0, number)
        if not report.measured:
            return report
        assert report.selection is not None
        again = []
        for seed in range(1, self.wishes.repeat):
            if self.left() <= 0:
                break
            # Of the same field: what is compiled only by now could win, and say nothing of the first race.
            other, _ = self.races(tried, min(allowance, self.left()), seed, number, independent=True)
            if other.measured:
                same = other.selection == report.selection
                slower = 0.0 if same else (other.us / other.choice_us) / (report.us / report.choice_us) - 1
                again.append(Again(same, slower))
        report = replace(report, again=tuple(again))
        if entrant.before in entrant.ways and entrant.before not in tried.ways:  # there was no time for it
            return replace(report, why="the table's entry stays: there was no time to measure it")
        return self.store(report, entrant)

    def races(
        self,
        entrant: _Entrant,
        allowance: float,
        seed: int,
        number: tuple[int, int],
        *,
        independent: bool = False,
    ) -> tuple[ShapeReport, _Entrant]:
        """A race, or a second one where the GPU was not fit to be measured during the first; and the entrant without
        the candidates that there was no time for."""
        problem, ways = entrant.problem, entrant.ways
        begin, callback = self.lab.now(), self.progress_callback(problem, number)
        with_torch = self.wishes.bits == "any" and not independent and torchs_product(problem)[0] is not None
        preferred = None if independent or self.wishes.repeat > 1 else entrant.before
        for attempt in self.monitor.attempts(clock_lags=True):  # a race compares within rounds
            if attempt and allowance - (self.lab.now() - begin) < self.least_s(problem):
                break
            try:
                with closing(self.lab.bench(problem, ways, ATTEMPTS * seed + attempt)) as bench:
                    self.monitor.before(RECENT_S)
                    race_s = max(0.0, allowance - (self.lab.now() - begin) - self.monitor.look_s)
                    torch_s = min(OF_TORCH[0] * race_s, OF_TORCH[1]) if with_torch else 0.0
                    found = race.race(ways, bench, race_s - torch_s, before=preferred, progress=callback)
                    of_torch = against_torch(bench, found.way, torch_s) if with_torch else None
            except (race.FailedError, torch.OutOfMemoryError) as error:
                told = "the model's choice: " * isinstance(error, race.FailedError) + f"{error}".splitlines()[0]
                return ShapeReport(problem, 0, "failed", choice=ways[0], why=told), entrant
        if (why := self.monitor.why) is not None:
            return ShapeReport(problem, 0, "refused", choice=ways[0], candidates=len(ways), why=why), entrant
        report = ShapeReport(
            problem=problem,
            calls=0,
            outcome="stays" if found.way == ways[0] else "tuned",
            choice=ways[0],
            selection=found.way,
            choice_us=1000 * found.incumbent_ms,
            us=1000 * found.ms,
            fastest_us=1000 * found.fastest_ms,
            noise=found.noise,
            candidates=len(ways),
            timed=found.timed,
            rounds=found.rounds,
            failed=(*entrant.left_out, *((named(way), reason) for way, reason in found.failed.items())),
            times=tuple(sorted((1000 * ms, named(way)) for way, ms in found.times.items())),
        )
        if of_torch is not None:
            report = replace(report, torch_us=of_torch[0] * report.us, torch_faster=of_torch[1])
        return report, replace(entrant, ways=tuple(way for way in ways if way not in found.untried))

    def progress_callback(self, problem: GemmProblem, number: tuple[int, int]) -> race.Callback[Selection]:
        if (progress := self.progress) is None:
            return None

        def callback(timed: int, count: int, best: Selection, ms: float, choice_ms: float) -> None:
            progress(Progress(*number, problem, timed, count, best, 1000 * ms, 1000 * choice_ms, self.left()))

        return callback

    def store(self, report: ShapeReport, entrant: _Entrant) -> ShapeReport:
        """Writes the winner to the table; returns the report with `stored` set, and the outcome "not stored" if that
        failed. The model's choice is written only to replace an entry that it now beats, or where torch is faster."""
        problem, bits = report.problem, self.wishes.bits
        assert report.selection is not None
        if report.outcome == "tuned" or entrant.before is not None or report.torch_faster:
            how: dict[str, Any] = {"us": report.us, "default_us": report.choice_us, "bits": bits}
            how["least_rows"] = self.wishes.fewest_rows.get(problem, 0)
            how["torch_us"] = report.torch_us if report.torch_faster else None
            self.winners.setdefault(weight_of(problem), []).append(report.selection.algorithm)
            kept = tables.store(problem, report.selection, self.lab.info, **how)
            return replace(report, stored=kept, outcome=report.outcome if kept else "not stored")
        if report.timed == report.candidates - len(report.failed) + len(entrant.left_out):  # there was time for all
            self.journal.stays(problem, bits, entrant.ways[0])
        return report


def against_torch(bench: race.Bench[Way], winner: Selection, budget_s: float) -> tuple[float, bool] | None:
    """Torch's time over the winner's, in rounds in which they take turns, and whether torch is faster by more than
    noise; None where torch's product, or the winner again, cannot be timed."""
    from ..functional.routing import nothing_routed

    pair: list[Way] = [winner, TORCH]
    try:
        with nothing_routed():
            found = race.race(pair, bench, budget_s)
    except race.FailedError:
        return None
    times = {**found.once, **found.times}
    return (times[TORCH] / found.incumbent_ms, found.way == TORCH) if TORCH in times else None
