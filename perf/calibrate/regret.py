"""How much slower a model's choices are than the best candidates that were timed."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from statistics import geometric_mean

from rich.console import Console
from rich.table import Table

from perf.calibrate.times import Calibration, Measured
from triton_gemm.hardware.device_model import DeviceModel
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, predicted, select
from triton_gemm.tables.records import named

WORST = 0.05  # regret from which on a shape is named


@dataclass(frozen=True)
class Choice:
    """What the model picked for a measured shape."""

    measured: Measured
    pick: Candidate

    @property
    def regret(self) -> float:
        """How much longer the pick takes than the best: 0.02 for 2 % longer."""
        return self.measured.us[self.pick] / self.measured.us[self.measured.best] - 1


def choices(measured: Iterable[Measured], model: DeviceModel) -> list[Choice]:
    """The picks of a model."""
    return [Choice(found, found.pick(model)) for found in measured]


def mean_regret(chosen: Sequence[Choice]) -> float:
    return sum(choice.regret for choice in chosen) / len(chosen)


def rms_error(measured: Sequence[Measured], model: DeviceModel) -> float:
    """Of the logarithm of predicted over measured time, all candidates alike."""
    pairs = [zip(found.predicted(model), found.us.values(), strict=True) for found in measured]
    errors = [math.log(guess / us) for found in pairs for guess, us in found]
    return math.sqrt(sum(error * error for error in errors) / len(errors))


def by_regime(chosen: Sequence[Choice]) -> dict[str, list[Choice]]:
    """The choices of each regime, and all."""
    found: dict[str, list[Choice]] = {}
    for choice in chosen:
        found.setdefault(choice.measured.regime, []).append(choice)
    return {**found, "all": list(chosen)}


def without_classes_of_c(shapes: Iterable[Measured], model: DeviceModel) -> list[float]:
    """For each shape, the slowdown of the model's pick without candidates whose bits depend on the size of C."""
    found = []
    for measured in shapes:
        left = {
            candidate: us
            for candidate, us in measured.us.items()
            if " of C " not in bit_class(measured.problem, candidate)
        }
        if left:
            pick = replace(measured, us=left).pick(model)
            found.append(left[pick] / measured.us[measured.pick(model)] - 1)
    return found


def unmeasured(calibration: Calibration) -> list[str]:
    """Shapes for which select chooses what is not among the candidates."""
    chosen = ((x, select(x.problem, calibration.device).algorithm) for x in calibration.shapes)
    return [x.key for x, algorithm in chosen if algorithm not in {candidate.algorithm for candidate in x.us}]


def show_regret(title: str, shapes: Sequence[Measured], model: DeviceModel, console: Console) -> None:
    """A model's choices: a table by regime, and the worst."""
    table = Table(title=f"{title}: rms log error {rms_error(shapes, model):.3f}", title_justify="left")
    table.add_column("regime")
    for name in ("shapes", "mean regret", "worst", "cuBLAS / pick", "cuBLAS / best"):
        table.add_column(name, justify="right")
    chosen = choices(shapes, model)
    for name, group in by_regime(chosen).items():
        pairs = [
            (x.measured.cublas_us / x.measured.us[x.pick], x.measured.cublas_us / x.measured.us[x.measured.best])
            for x in group
        ]
        against = [pair for pair in pairs if not math.isnan(pair[0])]  # tuning does not time cuBLAS
        table.add_row(
            name,
            str(len(group)),
            f"{100 * mean_regret(group):.2f} %",
            f"{100 * max(choice.regret for choice in group):.1f} %",
            *(f"{geometric_mean(ratios):.3f}" for ratios in zip(*against, strict=True)),
        )
    console.print(table)
    for choice in sorted(chosen, key=lambda choice: -choice.regret):
        if choice.regret < WORST:
            break
        words = [f"{100 * choice.regret:.1f} % {choice.measured.key}:"]
        for what, candidate in (("picked", choice.pick), ("best", choice.measured.best)):
            us, guess = choice.measured.us[candidate], predicted(choice.measured.problem, candidate, model)
            words.append(f"{what} {named(Selection.of(candidate, ''))}, {us:.4g} us (predicted {guess:.4g});")
        console.print(" ".join(words).rstrip(";"), highlight=False, soft_wrap=True)
