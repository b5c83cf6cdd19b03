"""How wrong results are: against fp64, which is computed for some of their rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise

import torch

from ..functional.activations import ACTIVATIONS
from ..problem import GemmProblem
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
    count = min(problem.M, ROWS)
    rows = torch.linspace(0, problem.M - 1, count, dtype=torch.float64, device=of[0].device).round().long()
    expected = exact(problem, of, c0, rows=rows)
    return [distance(x.index_select(-2, rows), expected) for x in results]


def exact(
    problem: GemmProblem,
    of: Operands,
    c0: torch.Tensor | None,
    beta: float = BETA,
    *,
    rows: torch.Tensor | None = None,
    multiply: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] = torch.matmul,
) -> torch.Tensor:
    """C in fp64, or some rows of it. c0: C before the call, where it is read; multiply: matrices of fp64."""
    named = dict(zip(problem.auxiliary, of[3:], strict=True))
    rows = torch.arange(problem.M, device=of[0].device) if rows is None else rows
    a, b = of[0].index_select(-2, rows).double(), of[1]
    if problem.scales is not None:
        a_scale, b_scale = named["a_scale"], named["b_scale"]
        if problem.scales == "blocks":
            a_scale = a_scale.mT[rows].repeat_interleave(128, 1)[:, : problem.K]
            b_scale = b_scale.mT.repeat_interleave(128, 0)[: problem.K].repeat_interleave(128, 1)[:, : problem.N]
        elif problem.scales == "rows":
            a_scale, b_scale = a_scale.view(-1, 1)[rows], b_scale.view(1, -1)
        a, b = a * a_scale, b.double() * b_scale

    def product(b: torch.Tensor) -> torch.Tensor:
        if problem.groups is None:
            return multiply(a, b.double())
        groups = list(enumerate(pairwise([0, *named["ends"].tolist()])))
        if problem.groups == "k":
            return torch.stack([multiply(a[:, i:j], b[i:j].double()) for _, (i, j) in groups])
        found = a.new_zeros(len(rows), problem.N)  # of rows after the last group, too
        for g, (i, j) in groups:
            inside = (rows >= i) & (rows < j)
            found[inside] = multiply(a[inside], b[g].double())
        return found

    c = product(b)
    added = 0.0 if c0 is None else beta * c0.index_select(-2, rows).double()
    if not problem.residual:
        c += added
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
    return c + added if problem.residual else c
