"""Finds the figures of a DeviceModel that predict times best, and choose best by them."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
from scipy.optimize import least_squares

from perf.calibrate.times import Measured
from triton_gemm import kernels
from triton_gemm.calibration.figures import Place, pace_of, places, rounded, value_at, with_values
from triton_gemm.calibration.fit import DIFFERENCE, Data
from triton_gemm.hardware.device_model import DeviceModel

ERROR = 1.2  # what a shape's errors weigh in a fit
REGRET = 2.5, 2.5  # and its regret: in that of the persistent kernel, and in that of the others
LEAST_REGRET = 1e-4
LIKE = 0.04  # predictions that differ by so much are hardly told apart
PRIOR = 0.3  # weight of a figure's logarithm against them
ITERATIONS = 15
SCALE = 0.5  # of errors and regrets: larger ones count less than by their squares
MOVES = (0.08, 0.04, 0.02, 0.04, 0.02, 0.01)  # of a figure's logarithm
CLOSE = 0.01  # LIKE, for these


def fit(measured: Sequence[Measured], model: DeviceModel) -> DeviceModel:
    """The model with the least squares of errors, logarithms of predicted over measured time, and of regrets: first of
    the figures of the GPU and of the persistent kernel, which comes nearest to what the GPU can do, by that kernel's
    times; then of the other kernels that were measured. Every figure is drawn to what it was before."""
    first, *others = kernels.KERNELS
    timed = {way.kernel for found in measured for way in found.us}
    precisions = {found.problem.precision for found in measured}
    paces = {pace_of(precision) for precision in precisions}

    def of_others(place: Place) -> bool:
        if place[0] != "kernels" or place[1] not in timed.intersection(others):
            return False
        return place[1] != "portable" or (place[3] in precisions if place[2] == "products" else place[2] in paces)

    persistent = [
        replace(found, us={way: us for way, us in found.us.items() if way.kernel == first}) for found in measured
    ]
    persistent = [found for found in persistent if found.us]
    model = _fit(persistent, model, lambda place: place[0] != "kernels" or place[1] == first, REGRET[0])
    return _fit(measured, model, of_others, REGRET[1]) if timed.intersection(others) else model


def _fit(measured: Sequence[Measured], model: DeviceModel, only: Callable[[Place], bool], regret: float) -> DeviceModel:
    entry = model.as_dict()
    where = [place for place in places(entry) if only(place)]
    start = np.log([value_at(entry, place) for place in where])
    data = Data([found.timed for found in measured])
    of, taken, matters, counts = (x.numpy() for x in (data.of, data.taken, data.matters, data.sizes))
    firsts = np.cumsum(counts) - counts
    weights = ERROR * matters / np.sqrt(counts[of])
    lost = np.minimum(matters**-0.5 - 1, 1.0)

    def at(x: np.ndarray) -> DeviceModel:
        return DeviceModel(**with_values(entry, dict(zip(where, np.exp(x), strict=True))))

    def errors(x: np.ndarray, rows: Sequence[int] | None = None) -> np.ndarray:
        return data.errors(at(x), rows).numpy()

    def residuals(error: np.ndarray, x: np.ndarray, like: float = LIKE) -> np.ndarray:
        # As if the pick were drawn, so that it has a derivative. Roots, so that many small regrets count as one large.
        guess = error + taken
        chance = np.exp((np.minimum.reduceat(guess, firsts)[of] - guess) / like)
        regrets = np.add.reduceat(chance * lost, firsts) / np.add.reduceat(chance, firsts)
        return np.concatenate([weights * error, regret * np.sqrt(regrets + LEAST_REGRET), PRIOR * (x - start)])

    def slopes(x: np.ndarray) -> np.ndarray:
        error = errors(x)
        others = error + DIFFERENCE * data.slopes(at(x), where).numpy().T
        there = x + DIFFERENCE * np.eye(len(x))
        return (np.array([*map(residuals, others, there)]) - residuals(error, x)).T / DIFFERENCE

    found = least_squares(
        lambda x: residuals(errors(x), x), start, jac=slopes, loss="soft_l1", f_scale=SCALE, max_nfev=ITERATIONS
    ).x

    # Which of two near predictions is less has no derivative: one figure after the other is moved while that helps.
    error = errors(found)
    least = cost(residuals(error, found, CLOSE))
    for by in MOVES:
        for j, place in enumerate(where):
            for direction in (by, -by):
                there, other, rows = found.copy(), error.copy(), data.concerned(place)
                there[j] += direction
                other[rows] = errors(there, rows)
                moved = cost(residuals(other, there, CLOSE))
                if moved < least:
                    found, error, least = there, other, moved
                    break
    return at(found)


def cost(residuals: np.ndarray) -> float:
    """What `least_squares` makes least."""
    return float(np.sum(np.sqrt(1 + (residuals / SCALE) ** 2) - 1))


def save(name: str, model: DeviceModel, out: Path) -> None:
    """Writes the model of a GPU, and keeps those of others."""
    entries = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**entries, name: rounded(model.as_dict())}, indent=1) + "\n")
