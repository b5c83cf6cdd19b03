"""Launches that Triton's interpreter runs, in a plan's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from tests.support.product_checks import NAN, SENTINEL
from triton_gemm.kernels.launch import Launch, materialise
from triton_gemm.problem import GemmProblem

SPARE = 16  # elements behind a workspace


def run(
    launch: Launch,
    operands: dict[str, Tensor],
    bind: Callable[[Launch, dict[str, Tensor], dict[str, float]], dict[str, Any]] = materialise,
    **scalars: float,
) -> None:
    """On a workspace full of NaN with nothing to spare; its counters must be zero again."""
    counters = torch.zeros(launch.counters, dtype=torch.int32)
    workspace = torch.full((launch.workspace // 4 + SPARE,), NAN)
    workspace[-SPARE:] = SENTINEL
    operands = {**operands, "workspace": workspace, "counters": counters}
    launch.kernel[launch.grid](**bind(launch, operands, scalars), **launch.options)
    assert not counters.any(), "counters are not zero afterwards"
    assert (workspace[-SPARE:] == SENTINEL).all(), "wrote past the workspace"


@dataclass
class Interpreted:
    """bind: `materialise` of the package that the launches are of."""

    problem: GemmProblem
    launches: Sequence[Launch]
    bind: Callable[..., dict[str, Any]] = materialise

    def run(
        self, a: Tensor, b: Tensor, c: Tensor, auxiliary: Sequence[Tensor] = (), alpha: float = 1.0, beta: float = 0.0
    ) -> None:
        operands = {"a": a, "b": b, "c": c, **dict(zip(self.problem.auxiliary, auxiliary, strict=True))}
        for launch in self.launches:
            for new in launch.temporaries:
                operands[new.name] = torch.full(new.shape, NAN if new.dtype.is_floating_point else 0, dtype=new.dtype)
            run(launch, operands, self.bind, alpha=alpha, beta=beta)
