"""What plans have in common, and a plan that Triton's interpreter runs."""

from __future__ import annotations

from typing import Any

import torch

from ..compat import interpreting
from ..kernels.launch import materialise
from ..problem import GemmProblem, Layout
from ..selection.select import Selection, launches


class PlanOfProblem:
    """A selection for one problem."""

    index: int | None = None  # of the CUDA device that it runs on, if it does
    compiled = False
    # A plan of the same problem, device and bits that calls run on from now on, because it was measured to be faster.
    instead: Any = None

    def __init__(self, problem: GemmProblem, selection: Selection) -> None:
        self.problem, self.selection = problem, selection
        batch, M, N, K = problem.batch, problem.M, problem.N, problem.K
        self.extents = (
            _extent((batch, M, K), problem.a) * problem.dtype.itemsize,
            _extent((batch, K, N), problem.b) * problem.dtype.itemsize,
            _extent((batch, M, N), problem.c) * problem.out_dtype.itemsize,
        )

    def overlap(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> bool:
        """Whether the memory that c spans overlaps that of a or of b."""
        a_bytes, b_bytes, c_bytes = self.extents
        begin, first, second = c.data_ptr(), a.data_ptr(), b.data_ptr()
        end = begin + c_bytes
        return (begin < first + a_bytes and first < end) or (begin < second + b_bytes and second < end)


def _extent(shape: tuple[int, int, int], layout: Layout) -> int:
    """Elements from the first of a batch of matrices that lie so to the end of the last."""
    return 1 + sum([(size - 1) * stride for size, stride in zip(shape, layout.strides, strict=True)])


class InterpretedPlan(PlanOfProblem):
    """A plan that Triton's interpreter runs, launch by launch."""

    def __init__(self, problem: GemmProblem, selection: Selection) -> None:
        super().__init__(problem, selection)
        self.launches = launches(problem, selection)
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
