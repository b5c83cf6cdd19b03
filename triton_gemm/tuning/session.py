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
from . import trials
from .candidates import candidates, refused
from .conditions import ATTEMPTS, Conditions, Monitor
from .gpu import TORCH, Candidate
from .journal import Journal
from .of_torch import torchs_product
from .report import Again, Measure, Progress, ShapeReport, TuningReport
from .rows import candidates_of_rows

LEAST_S = 2.0  # of a trial: of more problems than that leaves time for, the last are left out
LEAST_OF_ROWS_S = 0.5  # of one among few candidates, for a range of rows
MOST_S = 20.0
FEW = 5  # candidates that are compiled when trial rounds begin
AHEAD, AHEAD_OF_ROWS = 1, 5  # problems whose candidates are compiled during a trial; those of ranges have few
PATIENCE = 0.25  # of the budget, until they are for the first product
PAUSE_S = 0.05
RECENT_S = 1.0  # a trial's last conditions are the first of the next, if that begins so soon
OF_TORCH = (0.2, 2.0)  # for torch's product: the share of a trial's time, and the most seconds


class Lab(Protocol):
    """A GPU, or a stand-in."""

    info: DeviceInfo

    def now(self) -> float: ...

    def conditions(self) -> Conditions:
        """What a reference product takes now."""

    def prepare(self, problem: GemmProblem, candidates: Sequence[Selection]) -> None:
        """Has candidates compiled, after those that came before."""

    def ready(self, problem: GemmProblem, candidates: Sequence[Selection]) -> bool:
        """Whether all of these are compiled or have failed."""

    def pause(self, seconds: float) -> None:
        """Waits for what is being compiled."""

    def bench(self, problem: GemmProblem, candidates: Sequence[Selection], seed: int) -> trials.Bench[Candidate]:
        """torch.OutOfMemoryError where there is too little memory for the operands."""

    def forget(self, problem: GemmProblem) -> None:
        """Its candidates will not be timed again."""


@dataclass(frozen=True)
class Wishes:
    """The arguments of `tune`."""

    budget: float
    bits: Bits = "same"
    measure: Measure = "graph"
    configs: tuple[Any, ...] = ()
    resume: bool = False
    repeat: int = 1
    fewest_rows: Mapping[GemmProblem, int] = field(default_factory=dict)  # of products that stand for a range


@dataclass(frozen=True)
class _Task:
    """A problem with its candidates."""

    problem: GemmProblem
    candidates: tuple[Selection, ...]  # the model's choice, then others
    before: Selection | None  # which of them a table has
    left_out: tuple[tuple[str, str], ...]


class Session:
    def __init__(
        self, lab: Lab, journal: Journal, wishes: Wishes, progress: Callable[[Progress], None] | None = None
    ) -> None:
        self.lab, self.journal, self.wishes, self.progress = lab, journal, wishes, progress
        self.begin = lab.now()
        self.monitor = Monitor(lab.conditions, lab.now)
        self.waited = False  # for the first product's candidates
        self.winners: dict[GemmProblem | None, list[Algorithm]] = {}  # for other numbers of rows, by weight

    def left(self) -> float:
        return self.wishes.budget - (self.lab.now() - self.begin)

    def run(self, calls: Mapping[GemmProblem, int], ended: Callable[[ShapeReport], None]) -> TuningReport:
        """Tunes every problem; `ended` is called after each. DeviceLostError where a candidate has cost the GPU: all
        that was found before is stored."""
        problems = sorted(calls, key=lambda problem: -calls[problem])  # of equals the first
        ahead = 0 if self.wishes.measure == "eager" else AHEAD_OF_ROWS if self.wishes.fewest_rows else AHEAD
        tasks: dict[GemmProblem, _Task | ShapeReport] = {}
        reports = []
        for i, problem in enumerate(problems):
            for near in problems[i : i + 1 + ahead]:
                again = near == problem and near in self.wishes.fewest_rows  # winners for fewer rows are known now
                if (near not in tasks or again) and self.left() > 0:
                    tasks[near] = found = self.enter(near)
                    if isinstance(found, _Task):
                        self.lab.prepare(near, found.candidates)
            self.await_few(tasks.get(problem), self.left() / (len(problems) - i))
            share = self.left() / (len(problems) - i)
            report = self.tune(tasks.get(problem), problem, share, (i + 1, len(problems)))
            self.lab.forget(problem)
            reports.append(replace(report, calls=calls[problem]))
            ended(reports[-1])
        wishes, seconds = self.wishes, self.lab.now() - self.begin
        return TuningReport(
            tuple(reports), self.lab.info.name, wishes.bits, wishes.measure, wishes.budget, seconds=seconds
        )

    def await_few(self, task: _Task | ShapeReport | None, share: float) -> None:
        """Until FEW of its candidates are compiled, so that there is something to time: the processes that compile
        take seconds to start, and candidates seconds to compile. For the first product a part of the budget at most,
        for others half of their share."""
        if not isinstance(task, _Task):
            return
        others = task.candidates[1:]
        least = self.least_s(task.problem)
        until = self.lab.now() + (max(share / 2, least) if self.waited else PATIENCE * self.wishes.budget)
        self.waited |= bool(others)

        def ready() -> int:
            return sum(self.lab.ready(task.problem, [candidate]) for candidate in others)

        while ready() < min(FEW, len(others)) and self.lab.now() < until and self.left() > 0:
            self.lab.pause(PAUSE_S)

    def least_s(self, problem: GemmProblem) -> float:
        """Of a trial."""
        return LEAST_OF_ROWS_S if problem in self.wishes.fewest_rows else LEAST_S

    def enter(self, problem: GemmProblem) -> _Task | ShapeReport:
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
            before = next((candidate for candidate in offered if replace(candidate, source="tuner") == known), known)
            offered = list(dict.fromkeys([choice, before, *offered]))  # it is compiled before others
        failures = {candidate: self.journal.failure(problem, candidate) for candidate in offered[1:]}
        left_out += [(named(candidate), f"skipped: {why}") for candidate, why in failures.items() if why is not None]
        selections = tuple(candidate for candidate in offered if failures.get(candidate) is None)
        return _Task(problem, selections, before, tuple(left_out))

    def tune(
        self, task: _Task | ShapeReport | None, problem: GemmProblem, share: float, number: tuple[int, int]
    ) -> ShapeReport:
        if isinstance(task, ShapeReport):
            return task
        if task is None or self.left() <= 0:
            return ShapeReport(problem, 0, "no time")
        count = self.wishes.repeat
        allowance = min(max(share, self.least_s(problem) * count), self.left(), MOST_S * count) / count
        report, tried = self.time_candidates(task, allowance, 0, number)
        if not report.measured:
            return report
        assert report.selection is not None
        again = []
        for seed in range(1, self.wishes.repeat):
            if self.left() <= 0:
                break
            # Of the same field: what is compiled only by now could win, and say nothing of the first trial.
            other, _ = self.time_candidates(tried, min(allowance, self.left()), seed, number, independent=True)
            if other.measured:
                same = other.selection == report.selection
                slower = 0.0 if same else (other.us / other.choice_us) / (report.us / report.choice_us) - 1
                again.append(Again(same, slower))
        report = replace(report, again=tuple(again))
        if task.before in task.candidates and task.before not in tried.candidates:  # there was no time for it
            return replace(report, why="the table's entry stays: there was no time to measure it")
        return self.store(report, task)

    def time_candidates(
        self,
        task: _Task,
        allowance: float,
        seed: int,
        number: tuple[int, int],
        *,
        independent: bool = False,
    ) -> tuple[ShapeReport, _Task]:
        """Trial rounds, and once more where the GPU was not fit to be measured during the first; and the task without
        the candidates that there was no time for."""
        problem, selections = task.problem, task.candidates
        begin, callback = self.lab.now(), self.progress_callback(problem, number)
        with_torch = self.wishes.bits == "any" and not independent and torchs_product(problem)[0] is not None
        preferred = None if independent or self.wishes.repeat > 1 else task.before
        for attempt in self.monitor.attempts(clock_lags=True):  # a trial compares within rounds
            if attempt and allowance - (self.lab.now() - begin) < self.least_s(problem):
                break
            try:
                with closing(self.lab.bench(problem, selections, ATTEMPTS * seed + attempt)) as bench:
                    self.monitor.before(RECENT_S)
                    trial_s = max(0.0, allowance - (self.lab.now() - begin) - self.monitor.measure_s)
                    torch_s = min(OF_TORCH[0] * trial_s, OF_TORCH[1]) if with_torch else 0.0
                    found = trials.run_trials(selections, bench, trial_s - torch_s, before=preferred, progress=callback)
                    of_torch = against_torch(bench, found.winner, torch_s) if with_torch else None
            except (trials.FailedError, torch.OutOfMemoryError) as error:
                message = "the model's choice: " * isinstance(error, trials.FailedError) + f"{error}".splitlines()[0]
                return ShapeReport(problem, 0, "failed", choice=selections[0], why=message), task
        if (why := self.monitor.why) is not None:
            return ShapeReport(problem, 0, "refused", choice=selections[0], candidates=len(selections), why=why), task
        report = ShapeReport(
            problem=problem,
            calls=0,
            outcome="stays" if found.winner == selections[0] else "tuned",
            choice=selections[0],
            selection=found.winner,
            choice_us=1000 * found.incumbent_ms,
            us=1000 * found.ms,
            fastest_us=1000 * found.fastest_ms,
            noise=found.noise,
            candidates=len(selections),
            timed=found.timed,
            rounds=found.rounds,
            failed=(*task.left_out, *((named(candidate), reason) for candidate, reason in found.failed.items())),
            times=tuple(sorted((1000 * ms, named(candidate)) for candidate, ms in found.times.items())),
        )
        if of_torch is not None:
            report = replace(report, torch_us=of_torch[0] * report.us, torch_faster=of_torch[1])
        return report, replace(
            task, candidates=tuple(candidate for candidate in selections if candidate not in found.untried)
        )

    def progress_callback(self, problem: GemmProblem, number: tuple[int, int]) -> trials.Callback[Selection]:
        if (progress := self.progress) is None:
            return None

        def callback(timed: int, count: int, best: Selection, ms: float, choice_ms: float) -> None:
            progress(Progress(*number, problem, timed, count, best, 1000 * ms, 1000 * choice_ms, self.left()))

        return callback

    def store(self, report: ShapeReport, task: _Task) -> ShapeReport:
        """Writes the winner to the table; returns the report with `stored` set, and the outcome "not stored" if that
        failed. The model's choice is written only to replace an entry that it now beats, or where torch is faster."""
        problem, bits = report.problem, self.wishes.bits
        assert report.selection is not None
        if report.outcome == "tuned" or task.before is not None or report.torch_faster:
            how: dict[str, Any] = {"us": report.us, "default_us": report.choice_us, "bits": bits}
            how["least_rows"] = self.wishes.fewest_rows.get(problem, 0)
            how["torch_us"] = report.torch_us if report.torch_faster else None
            self.winners.setdefault(weight_of(problem), []).append(report.selection.algorithm)
            kept = tables.store(problem, report.selection, self.lab.info, **how)
            return replace(report, stored=kept, outcome=report.outcome if kept else "not stored")
        if report.timed == report.candidates - len(report.failed) + len(task.left_out):  # there was time for all
            self.journal.stays(problem, bits, task.candidates[0])
        return report


def against_torch(bench: trials.Bench[Candidate], winner: Selection, budget_s: float) -> tuple[float, bool] | None:
    """Torch's time over the winner's, in rounds in which they take turns, and whether torch is faster by more than
    noise; None where torch's product, or the winner again, cannot be timed."""
    from ..functional.routing import nothing_routed

    pair: list[Candidate] = [winner, TORCH]
    try:
        with nothing_routed():
            found = trials.run_trials(pair, bench, budget_s)
    except trials.FailedError:
        return None
    times = {**found.once, **found.times}
    return (times[TORCH] / found.incumbent_ms, found.winner == TORCH) if TORCH in times else None
