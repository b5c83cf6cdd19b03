"""A plan that Triton's interpreter runs."""

from __future__ import annotations

import torch

from ..compat import interpreting
from ..kernels.launch import materialise
from ..problem import GemmProblem
from ..selection.select import Selection, launches


class InterpretedPlan:
    """A plan that Triton's interpreter runs, launch by launch."""

    def __init__(self, problem: GemmProblem, selection: Selection) -> None:
        self.problem, self.selection, self.launches = problem, selection, launches(problem, selection)
        self.names = ("a", "b", "c", *problem.auxiliary)

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...] = (),
        alpha: float = 1.0,
        beta: float = 0.0,
    ) -> None:
        operands = dict(zip(self.names, (a, b, c, *auxiliary), strict=True))
        for launch in self.launches:
            operands |= {t.name: torch.empty(t.shape, dtype=t.dtype, device=c.device) for t in launch.temporaries}
            operands["workspace"] = torch.empty(launch.workspace // 4, dtype=torch.float32, device=c.device)
            operands["counters"] = torch.zeros(launch.counters, dtype=torch.int32, device=c.device)
            arguments = materialise(launch, operands, {"alpha": float(alpha), "beta": float(beta)})
            with interpreting:
                launch.kernel[launch.grid](**arguments, **launch.options)
