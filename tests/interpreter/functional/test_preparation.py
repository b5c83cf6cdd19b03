"""Preparing linear layers: torch's linear under `use()` asks for the problems that are prepared."""

from __future__ import annotations

from contextlib import nullcontext

import pytest
import torch

import triton_gemm
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import layers
from triton_gemm.functional import routing
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import plan, policies


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[tuple[GemmProblem, bool]]:
    """Problems as they are planned, and whether batch-invariantly. Nothing is multiplied."""
    found: list[tuple[GemmProblem, bool]] = []

    def new_plan(problem: GemmProblem, device: torch.device, invariant: bool | None) -> plan.Plan:
        found.append((problem, policies.current_policy().batch_invariant if invariant is None else invariant))
        return plan.InterpretedPlan(problem, plan.selection_for(problem, HOPPER))

    replace_all(monkeypatch, plan, _new_plan=new_plan, PLANS={})
    monkeypatch.setattr(plan.InterpretedPlan, "run", lambda *_: None)
    return found


@pytest.mark.parametrize("grad", [False, True], ids=["inference", "training"])
@pytest.mark.parametrize("invariant", [False, True], ids=["", "batch-invariant"])
@pytest.mark.parametrize("bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("shape", [(1,), (5,), (100,), (2, 1), (1, 1), (4, 8), (2, 3, 5)], ids=str)
@pytest.mark.parametrize("N,K,dtype", [(48, 64, torch.bfloat16), (33, 65, torch.float32), (1, 7, torch.float16)])
def test_linear_under_use_plans_what_is_prepared(
    N: int,
    K: int,
    dtype: torch.dtype,
    shape: tuple[int, ...],
    bias: bool,
    invariant: bool,
    grad: bool,
    planned: list[tuple[GemmProblem, bool]],
) -> None:
    layer, x = torch.nn.Linear(K, N, bias, dtype=dtype), torch.zeros(*shape, K, dtype=dtype)
    triton_gemm.report_routing(reset=True)
    with torch.set_grad_enabled(grad), policies.batch_invariant() if invariant else nullcontext(), triton_gemm.use():
        layer(x)
    prepared = layers.problems_of(layer, torch.Size(shape).numel(), dtype, False)
    assert planned == [(problem, invariant) for problem in prepared]
    assert triton_gemm.report_routing(reset=True) == {("addmm" if bias else "mm", routing.OURS): 1}


def test_nothing_is_prepared_where_triton_interprets() -> None:
    for device in (None, "h200"):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1 has Triton interpret kernels"):
            triton_gemm.prepare([(96, 64)], 1, device=device)
