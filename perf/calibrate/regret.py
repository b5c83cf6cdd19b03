"""How much slower a model's choices are than the best candidates that were timed."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from statistics import geometric_mean

from perf.calibrate.times import Calibration, Measured
from perf.common import formats
from perf.common.formats import Cell
from triton_gemm.hardware.device_model import DeviceModel
from triton_gemm.kernels.candidate import Candidate
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


def unmeasured(calibration: Calibration) -> list[str]:
    """Shapes for which select chooses what is not among the candidates."""
    chosen = ((x, select(x.problem, calibration.device).algorithm) for x in calibration.shapes)
    return [x.key for x, algorithm in chosen if algorithm not in {candidate.algorithm for candidate in x.us}]


def over_cublas(chosen: Iterable[Choice], candidate: Callable[[Choice], Candidate]) -> str | None:
    """cuBLAS's time over that of a candidate of each choice, in the geometric mean. Tuning does not time cuBLAS."""
    timed = [x for x in chosen if not math.isnan(x.measured.cublas_us)]
    return f"{geometric_mean(x.measured.cublas_us / x.measured.us[candidate(x)] for x in timed):.3f}" if timed else None


# Of a regime's name and choices.
COLUMNS: dict[str, Callable[[tuple[str, Sequence[Choice]]], Cell]] = {
    "regime": lambda of: of[0],
    "shapes": lambda of: len(of[1]),
    "mean regret": lambda of: f"{100 * mean_regret(of[1]):.2f} %",
    "worst": lambda of: f"{100 * max(choice.regret for choice in of[1]):.1f} %",
    "cuBLAS / pick": lambda of: over_cublas(of[1], lambda choice: choice.pick),
    "cuBLAS / best": lambda of: over_cublas(of[1], lambda choice: choice.measured.best),
}


def text(title: str, shapes: Sequence[Measured], model: DeviceModel) -> str:
    """A model's choices: a table by regime, and the worst."""
    chosen = choices(shapes, model)
    lines = [f"{title}: rms log error {rms_error(shapes, model):.3f}"]
    lines += ["", formats.table_by(COLUMNS, by_regime(chosen).items()), ""]
    for choice in sorted((x for x in chosen if x.regret >= WORST), key=lambda choice: -choice.regret):
        words = []
        for what, candidate in (("picked", choice.pick), ("best", choice.measured.best)):
            us, guess = choice.measured.us[candidate], predicted(choice.measured.problem, candidate, model)
            words.append(f"{what} {named(Selection.of(candidate, ''))}, {us:.4g} us (predicted {guess:.4g})")
        lines.append(f"{100 * choice.regret:.1f} % {choice.measured.key}: {'; '.join(words)}")
    return "\n".join(lines)
