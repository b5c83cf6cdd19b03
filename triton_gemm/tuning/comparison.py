"""A comparison with torch: each product is timed by torch and by this package, in turns, by the timer that tunes."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace

import torch

from ..problem import GemmProblem
from ..runtime import policies
from ..selection.select import Selection
from ..tables.records import named
from . import trials
from .conditions import Monitor
from .gpu import TORCH, Bench, Candidate, Gpu
from .of_torch import torchs_product
from .report import Comparison, ProductComparison

ROUNDS, MOST_ROUNDS = 24, 240  # at a time, and of a product
PRECISE = 0.005  # noise of a ratio from which on more rounds are not worth their time
TIMING_S = (0.5, 3.0)  # for the rounds of a product, at least and at most


class Comparing:
    """A comparison that is under way on a GPU; `progress` is called with the report so far after every product."""

    def __init__(self, gpu: Gpu, budget: float, progress: Callable[[Comparison], None]) -> None:
        self.gpu, self.budget, self.progress, self.begin = gpu, budget, progress, gpu.now()
        self.monitor = Monitor(gpu.conditions, gpu.now)

    def run(self, calls: Mapping[GemmProblem, int], recorded: bool) -> Comparison:
        """Compares every problem, the most called first. DeviceLostError where one has cost the GPU."""
        chosen = {problem: self.choose(problem) for problem in sorted(calls, key=lambda problem: -calls[problem])}
        for problem, candidate in chosen.items():
            if isinstance(candidate, Selection):
                self.gpu.prepare(problem, [candidate])
        report = Comparison(self.gpu.info.name, recorded)
        for i, (problem, candidate) in enumerate(chosen.items()):
            left = self.budget - (self.gpu.now() - self.begin)
            if isinstance(candidate, str):
                one = ProductComparison(problem, "failed", candidate)
            elif left <= 0:
                one = ProductComparison(problem, "no time")
            else:
                one = self.compare(problem, candidate, min(max(left / (len(chosen) - i), TIMING_S[0]), TIMING_S[1]))
            products = (*report.products, replace(one, calls=calls[problem]))
            report = replace(report, products=products, seconds=self.gpu.now() - self.begin)
            self.progress(report)
        return report

    def choose(self, problem: GemmProblem) -> Selection | str:
        """What a call of this problem runs on, or why it is not compared."""
        product, why = torchs_product(problem)
        if product is None or 0 in (problem.batch, problem.M, problem.N):
            return why or "its result is empty"
        try:
            return policies.choose(problem, self.gpu.info)
        except RuntimeError as error:
            return f"{error}".splitlines()[0]

    def compare(self, problem: GemmProblem, candidate: Selection, timing_s: float) -> ProductComparison:
        """One product; a second time where the GPU was not fit to be measured during the first."""
        try:
            for attempt in self.monitor.attempts():
                with closing(self.gpu.bench(problem, [candidate], attempt)) as bench:
                    bench.prepare(candidate)
                    bench.prepare(TORCH)
                    self.monitor.before()
                    found = timed(bench, ProductComparison(problem, "measured", kernel=named(candidate)), timing_s)
        except (trials.FailedError, torch.OutOfMemoryError) as error:
            return ProductComparison(problem, "failed", f"{error}".splitlines()[0])
        return found if self.monitor.why is None else ProductComparison(problem, "refused", self.monitor.why)


def timed(bench: Bench, report: ProductComparison, timing_s: float) -> ProductComparison:
    """Rounds in which torch and we take turns, until their ratio is known well enough or the time is over."""
    torch_error, ours_error = bench.errors()
    until = bench.now() + timing_s
    candidates: list[Candidate] = [TORCH, bench.incumbent]
    rows: tuple[list[float], list[float]] = ([], [])
    noise = math.inf
    while noise > PRECISE and len(rows[0]) < MOST_ROUNDS and (not rows[0] or bench.now() < until):
        fit = int((until - bench.now()) / bench.round_s(candidates))
        for row, more in zip(rows, bench.time(candidates, max(trials.LEAST_ROUNDS, min(ROUNDS, fit))), strict=True):
            row += more
        logs = [math.log(torchs / ours) for torchs, ours in zip(*rows, strict=True)]
        noise = trials.CONFIDENCE * trials.deviation(logs)
    ratio, ours_us = math.exp(trials.middle(logs)), 1000 * trials.middle(rows[1])
    errors = {"torch_error": torch_error, "ours_error": ours_error}
    times = {"torch_us": ratio * ours_us, "ours_us": ours_us, "ratio": ratio, "noise": noise}
    return replace(report, rounds=len(logs), **times, **errors)  # type: ignore[arg-type]  # which are figures
