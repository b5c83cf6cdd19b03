"""A calibration: what is timed, the fit, whether it is better, and keeping it. Logic over a `Lab`, so that it is tested
without a GPU."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from ..hardware.device_model import DeviceModel, measured, model_without_calibration
from ..problem import GemmProblem
from ..selection.select import Selection
from ..tuning.session import Lab
from . import kept, measuring
from .figures import places, value_at
from .fit import SHIPPED, fit
from .measuring import Probe
from .probes import probes
from .report import CalibrationReport, Progress

FITTING = 0.15  # of the budget, for the fit
LEAST = 8  # products that a model can be fitted to
NOTED = 0.01  # by how much a figure changes that is reported

log = logging.getLogger("triton_gemm.calibration")


class Session:
    """One calibration."""

    def __init__(
        self,
        lab: Lab,  # a GPU
        budget: float,  # seconds
        keep: bool = True,
        # Why a candidate failed before, or None.
        failure: Callable[[GemmProblem, Selection], str | None] = lambda problem, selection: None,
        progress: Callable[[Progress], None] | None = None,
    ) -> None:
        self.lab, self.budget, self.keep, self.failure, self.progress = lab, budget, keep, failure, progress
        self.begin = lab.now()

    def run(self) -> CalibrationReport:
        """DeviceLostError where a candidate has cost the GPU; nothing is kept then."""
        device = self.lab.info
        start = model_without_calibration(device)
        left_out: list[tuple[str, str]] = []
        wanted = [self.without_failures(probe, left_out) for probe in probes(device)]
        wanted = [probe for probe in wanted if len(probe.candidates) > 1]
        until = self.begin + (1 - FITTING) * self.budget
        found = measuring.measure(self.lab, wanted, until, self.progress)
        counts: dict[str, Any] = {
            "shapes": len(found.timed),
            "timed": sum(len(x.us) for x in found.timed),
            "repeated": found.repeated,
        }
        report = CalibrationReport("refused", device.name, start.source, self.budget, 0.0, **counts)
        report = replace(report, failed=(*left_out, *found.failed))
        if found.refused > len(found.timed):
            return self.ended(replace(report, why=found.complaint))
        if len(found.timed) < LEAST:
            why = f"{len(found.timed)} products could be timed, {LEAST} are needed: give it a larger budget"
            return self.ended(replace(report, why=why))
        shipped = start in measured().values()
        fitted = fit(found.timed, start, SHIPPED if shipped else 1.0)
        before, after = fitted.before, fitted.after
        report = replace(report, error=(before.error, after.error), regret=(before.regret, after.regret))
        if after.misfit >= before.misfit:
            why = "the model predicts what it was not fitted to no better than the one before"
            return self.ended(replace(report, outcome="unchanged", why=why))
        if shipped and after.regret >= before.regret:  # which was fitted to many more products
            why = "its picks of what it was not fitted to are no faster than the shipped model's"
            return self.ended(replace(report, outcome="unchanged", why=why))
        report = replace(report, figures=changes(start, fitted.model))
        path = kept.store(fitted.model, device) if self.keep else None
        return self.ended(replace(report, outcome="not kept" if path is None else "kept", path=path))

    def without_failures(self, probe: Probe, left_out: list[tuple[str, str]]) -> Probe:
        """The probe without what failed before, which is noted; its first candidate stays, since users run it."""
        failures = {selection: self.failure(probe.problem, selection) for selection in list(probe.candidates)[1:]}
        failed = [selection for selection, why in failures.items() if why is not None]
        left_out += [
            (measuring.described(probe.problem, selection), f"skipped: {failures[selection]}") for selection in failed
        ]
        return measuring.without(probe, *failed)

    def ended(self, report: CalibrationReport) -> CalibrationReport:
        report = replace(report, seconds=self.lab.now() - self.begin)
        log.info("%s", report)
        return report


def changes(before: DeviceModel, after: DeviceModel) -> tuple[tuple[str, float, float], ...]:
    """The figures that differ by NOTED or more, by their names."""
    one, other = before.as_dict(), after.as_dict()
    pairs = ((".".join(place), value_at(one, place), value_at(other, place)) for place in places(one))
    return tuple(pair for pair in pairs if abs(pair[2] / pair[1] - 1) >= NOTED)
