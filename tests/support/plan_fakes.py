"""Plans without a GPU: they compute on the CPU."""

from __future__ import annotations

import pytest
import torch

from tests.support.patches import replace_all
from triton_gemm.functional import api, fast_path, grouped, ops, scaled
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import plan
from triton_gemm.selection.select import Selection


class FakePlan:
    """Multiplies bf16 matrices by torch, and takes others' products for zeros; `made` notes all."""

    made: list[FakePlan]
    index, compiled, instead = 0, False, None

    def __init__(self, problem: GemmProblem, selection: Selection, device: torch.device, *_: object) -> None:
        self.problem, self.selection = problem, selection
        self.runs: list[tuple[object, ...]] = []  # of each, where its auxiliary operands lie, and its factors
        self.made.append(self)

    def overlap(self, *_: torch.Tensor) -> bool:
        return False

    def run(
        self,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        auxiliary: tuple[torch.Tensor, ...] = (),
        alpha: float = 1,
        beta: float = 0,
    ) -> None:
        self.runs.append((*(x.data_ptr() for x in auxiliary), alpha, beta))
        b = b if b.shape[-1] == c.shape[-1] else b.mT  # as `linear` is given it
        whole = a.dtype == torch.bfloat16 and not self.problem.groups and b.shape[-2] == a.shape[-1]
        product = a @ b if whole else torch.zeros_like(c)
        c.copy_(product + beta * c if beta else product)


def take_plans_away(patch: pytest.MonkeyPatch) -> list[FakePlan]:
    """Has products on the CPU planned as on a Hopper GPU; the plans, as they are made."""
    hopper = device_of_capability((9, 0))
    patch.setattr(FakePlan, "made", [], raising=False)
    replace_all(patch, plan, GemmPlan=FakePlan, device_info=lambda _: hopper, PLANS={})
    for module in (api, grouped, ops, scaled):
        patch.setattr(module, "_fast", fast_path.FastPath())
    patch.setattr(fast_path, "current_device", lambda: 0)
    replace_all(patch, api.rules, computable=lambda *_, **__: None, runs=lambda *_: None)
    return FakePlan.made
