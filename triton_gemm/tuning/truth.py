"""How wrong results are: against fp64, which is computed of a sample of them."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from ..problem import GemmProblem
from .of_torch import ACTIVATIONS
from .operands import BETA, Operands

ROWS, COLUMNS, MATRICES = 256, 1024, 8  # of a sample, at most


def distance(c: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what was expected; infinite where c is not finite."""
    off = float((c.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    return off if math.isfinite(off) else math.inf


def relative_errors(
    problem: GemmProblem, of: Operands, c0: torch.Tensor | None, results: Sequence[torch.Tensor]
) -> list[float]:
    """The `distance` from fp64 of each result that these operands gave, over a sample of it: rows, columns and matrices
    of a batch, evenly spaced. c0: C before the call, where it is read."""
    samples = [_samples(problem, of, c0, results, i) for i in _spaced(problem.batch, MATRICES).tolist()]
    expected, *found = (torch.cat([x.flatten() for x in of_one]) for of_one in zip(*samples, strict=True))
    return [distance(x, expected) for x in found]


def _samples(
    problem: GemmProblem, of: Operands, c0: torch.Tensor | None, results: Sequence[torch.Tensor], number: int
) -> list[torch.Tensor]:
    """Of one product of a batch, or of one group, the same elements of C in fp64 and in each result."""
    auxiliary = dict(zip(problem.auxiliary, of[3:], strict=True))
    place_a, place_b, place_c = _places(problem, number)
    a, b = of[0][place_a], of[1][place_b]
    rows, columns = _spaced(len(a), ROWS).to(a.device), _spaced(b.shape[1], COLUMNS).to(a.device)

    def sample(c: torch.Tensor) -> torch.Tensor:
        return c[place_c].index_select(0, rows).index_select(1, columns).double()

    a, b = a.index_select(0, rows).double(), b.index_select(1, columns).double()
    if problem.scales is not None:
        a_scale, b_scale = auxiliary["a_scale"], auxiliary["b_scale"]
        if problem.scales == "rows":
            a_scale, b_scale = a_scale[rows][:, None], b_scale[columns]
        elif problem.scales == "blocks":
            a_scale = a_scale[:, rows].repeat_interleave(128, 0)[: problem.K].mT
            b_scale = b_scale[columns // 128].repeat_interleave(128, 1)[:, : problem.K].mT
        a, b = a * a_scale.double(), b * b_scale.double()
    c = a @ b
    if c0 is not None:
        c += BETA * sample(c0)
    if problem.bias is not None:
        bias = auxiliary["bias"].double()
        c += bias[columns] if problem.bias == "n" else bias[rows][:, None]
    if problem.activation is not None:
        c = ACTIVATIONS[problem.activation](c)
    return [c, *map(sample, results)]


def _places(problem: GemmProblem, number: int) -> tuple[Any, Any, Any]:
    """Where A, B and C of one product of a batch, or of one group, are."""
    if problem.groups is None:
        return (number,) * 3 if problem.batch > 1 else (...,) * 3
    size = problem.M if problem.groups == "m" else problem.K
    group = slice(size * number // problem.batch, size * (number + 1) // problem.batch)
    return (group, number, group) if problem.groups == "m" else ((slice(None), group), group, number)


def _spaced(size: int, most: int) -> torch.Tensor:
    """Numbers below `size`, so many at most, the first and the last among them."""
    return torch.linspace(0, size - 1, min(size, most), dtype=torch.float64).round().long()
