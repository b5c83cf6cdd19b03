"""Orders products so that with each the most is learnt about what decides between candidates, by how the model says
that figures change its predictions: what `triton_gemm.calibrate` times, and in which order.

Greedy Bayesian design (Chaloner and Verdinelli, Statistical Science 10, 1995): the next product is the one that most
lowers the variance of the differences between candidates of all products, each regime of bf16 as important as the next.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence

import torch

from perf.calibrate.times import Measured
from triton_gemm.calibration.figures import places
from triton_gemm.calibration.fit import Data, Timed, covariance
from triton_gemm.calibration.probes import of_each_config
from triton_gemm.hardware.device_model import DeviceModel

OTHERS = 0.3  # of the weight of bf16's regimes have those of other dtypes and precisions


def design(measured: Sequence[Measured], model: DeviceModel, count: int) -> list[Measured]:
    """The `count` products that tell most, the best first."""
    where = list(places(model.as_dict()))
    spread = covariance(where)
    regimes = Counter(found.regime for found in measured)
    rows, differences = [], []
    for found in measured:
        data = Data([few(found, model)])
        slopes = data.slopes(model, where)
        rows.append(data.whitened(slopes, data.matters))
        mean = (data.matters[:, None] * slopes).sum(0) / data.matters.sum()
        scale = (OTHERS if found.mode != "bf16" else 1.0) / (len(slopes) * regimes[found.regime]) ** 0.5
        differences.append((slopes - mean) * data.matters[:, None] * scale)
    aims = torch.cat(differences)
    chosen: list[int] = []
    while len(chosen) < min(count, len(measured)):
        known = spread @ (aims.T @ aims) @ spread
        gains = {
            i: float(torch.linalg.solve(_noisy(x, spread), x @ known @ x.T).trace())
            for i, x in enumerate(rows)
            if i not in chosen
        }
        chosen.append(max(gains, key=gains.__getitem__))
        x = rows[chosen[-1]]
        spread = spread - spread @ x.T @ torch.linalg.solve(_noisy(x, spread), x @ spread)
    return [measured[i] for i in chosen]


def _noisy(x: torch.Tensor, spread: torch.Tensor) -> torch.Tensor:
    return x @ spread @ x.T + torch.eye(len(x), dtype=torch.float64)


def few(measured: Measured, model: DeviceModel) -> Timed:
    """The times that a calibration would have: of the fastest as predicted, each in another configuration."""
    ranks = sorted(zip(measured.predicted(model), measured.us, strict=True), key=lambda one: one[0])
    return Timed(
        measured.problem,
        {candidate: measured.us[candidate] for candidate in of_each_config(candidate for _, candidate in ranks)},
    )
