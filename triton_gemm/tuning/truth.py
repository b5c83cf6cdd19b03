"""How wrong results are: against fp64, which is computed for some of their rows."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

import torch

from ..functional.activations import ACTIVATIONS
from ..problem import GemmProblem
from .of_torch import scales_of
from .operands import BETA, Operands

ROWS = 256  # of each matrix, evenly spaced, at most


def distance(c: torch.Tensor, expected: torch.Tensor) -> float:
    """The norm of the difference over that of what was expected; infinite where c is not finite."""
    off = float((c.double() - expected.double()).norm() / expected.double().norm().clamp(min=1e-300))
    return off if math.isfinite(off) else math.inf


def relative_errors(
    problem: GemmProblem, of: Operands, c0: torch.Tensor | None, results: Sequence[torch.Tensor]
) -> list[float]:
    """The `distance` from fp64 of each result that these operands gave. c0: C before the call, where it is read."""
    named = dict(zip(problem.auxiliary, of[3:], strict=True))
    count = min(problem.M, ROWS)
    rows = torch.linspace(0, problem.M - 1, count, dtype=torch.float64, device=of[0].device).round().long()
    a, b = of[0].index_select(-2, rows).double(), of[1]
    if problem.scales is not None:
        a_scale, b_scale = scales_of(of)
        if problem.scales != "tensor":
            a_scale = a_scale[rows]
        if problem.scales == "blocks":
            a_scale = a_scale.repeat_interleave(128, 1)[:, : problem.K]
            b_scale = b_scale.repeat_interleave(128, 0)[: problem.K].repeat_interleave(128, 1)[:, : problem.N]
        a, b = a * a_scale, b.double() * b_scale

    def product(b: torch.Tensor) -> torch.Tensor:
        if problem.groups is None:
            return a @ b.double()
        groups = list(enumerate(pairwise([0, *named["ends"].tolist()])))
        if problem.groups == "m":
            return torch.cat([a[(rows >= i) & (rows < j)] @ b[g].double() for g, (i, j) in groups])
        return torch.stack([a[:, i:j] @ b[i:j].double() for _, (i, j) in groups])

    c = product(b)

    def sample(x: torch.Tensor) -> torch.Tensor:
        return x.index_select(-2, rows).double()

    if c0 is not None and not problem.residual:
        c += BETA * sample(c0)
    if problem.bias is not None:
        bias = named["bias"].double()
        c += bias if problem.bias == "n" else bias[rows][:, None]
    if problem.gate:
        before = product(named["gate"])
        if problem.bias is not None:
            before += named["gate_bias"].double()
        c = c * ACTIVATIONS[problem.activation or ""](before)
    elif problem.activation is not None:
        c = ACTIVATIONS[problem.activation](c)
    if c0 is not None and problem.residual:
        c = c + BETA * sample(c0)
    return [distance(sample(x), c) for x in results]
