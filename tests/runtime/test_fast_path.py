"""The fast path of calls with an epilogue, and of the dispatcher's: what is planned once, and what is not."""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType

import pytest
import torch

from tests.support import plan_fakes
from tests.support.patches import noted
from triton_gemm.functional import api, fast_path, grouped, matrices, scaled
from triton_gemm.runtime import plan


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(sum(shape))).bfloat16()


ROW, MATRIX, GATE = random(48), random(64, 48), random(48, 32)
GROUPS = random(2, 32, 48), torch.tensor([4, 9], dtype=torch.int32)
SCALED = (
    *(torch.ones(shape, dtype=torch.int8) for shape in ((64, 32), (32, 48))),
    *(torch.ones(1), torch.ones(1), None, torch.bfloat16, False),
)
of_torch = torch.ops.triton_gemm
# Calls of a [64, 32] and b [32, 48], and where the first of them is launched.
EPILOGUES: dict[str, tuple[ModuleType, str, Callable[..., torch.Tensor]]] = {
    "gate": (matrices, "compute", lambda a, b: api.linear(a, b.mT, activation="swiglu", gate=GATE)),
    "gate and biases": (matrices, "compute", lambda a, b: api.linear(a, b.mT, ROW, "reglu", gate=GATE, gate_bias=ROW)),
    "gate of a batch": (matrices, "compute", lambda a, b: api.linear(a[None], b.mT, activation="geglu", gate=GATE)),
    "residual": (matrices, "compute", lambda a, b: api.linear(a, b.mT, residual=MATRIX)),
    "residual, broadcast": (matrices, "compute", lambda a, b: api.linear(a, b.mT, residual=MATRIX[:, :1])),
    "bias, residual": (matrices, "compute", lambda a, b: api.linear(a, b.mT, ROW, "silu", residual=MATRIX)),
    "a matrix": (matrices, "compute", lambda a, b: api.addmm(MATRIX, a, b, alpha=2)),
    "a matrix into out": (
        *(matrices, "compute_into"),
        lambda a, b: api.addmm(MATRIX, a, b, out=torch.zeros_like(MATRIX)),
    ),
    "operator with a matrix": (matrices, "compute", lambda a, b: of_torch.gemm(a, b, MATRIX)),
    "operator with a gate": (matrices, "compute", lambda a, b: of_torch.gemm(a, b, activation="silu", gate=GATE.mT)),
    "operator with a residual": (matrices, "compute", lambda a, b: of_torch.gemm(a, b, residual=MATRIX)),
    "operator of groups": (grouped, "launch", lambda a, b: of_torch.grouped_gemm(a, *GROUPS)),
    "operator with scales": (scaled, "launch", lambda a, b: of_torch.scaled_gemm(*SCALED)),
}


@pytest.mark.parametrize("name", EPILOGUES)
def test_calls_with_an_epilogue_share_the_fast_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    module, function, call = EPILOGUES[name]
    made = plan_fakes.take_plans_away(monkeypatch)
    a, b = random(64, 32), random(48, 32).mT
    launched = noted(monkeypatch, module, function)
    expected = call(a, b)
    [one] = made
    for x in (a, a.clone()):
        assert torch.equal(call(x, b), expected)
        assert one.runs[-1] == one.runs[0], "auxiliary operands in their order, and factors"
    assert len(launched) == len(made) == 1 and len(one.runs) == 3
    assert torch.equal(call(a, torch._neg_view(-b)), expected), "what is negated on the way does not lie in memory"


def test_a_gate_without_one_of_two_biases_does_not_share_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its zeros are made at every call."""
    plan_fakes.take_plans_away(monkeypatch)
    launched = noted(monkeypatch, matrices, "compute")
    for _ in range(3):
        api.linear(random(64, 32), GATE, ROW, "swiglu", gate=GATE)
    assert len(launched) == 3


def test_a_matrix_that_is_the_result_does_not_share_the_fast_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does one in its memory, which the copy would change on the way. Another matrix does, whoever came first."""
    plan_fakes.take_plans_away(monkeypatch)
    a, b, c = random(64, 32), random(32, 48), random(128, 48)
    own = MATRIX.clone()
    api.addmm(own, a, b, out=own)
    assert not api._fast.calls
    api.addmm(MATRIX, a, b, out=torch.zeros_like(MATRIX))
    [known] = api._fast.calls.values()
    assert known.copies
    expected = a @ b + c[32:96]
    assert torch.equal(api.addmm(c[32:96], a, b, out=c[:64]), expected)
    assert torch.equal(api.addmm(c[:64], a, b, out=c[:64]), a @ b + expected)


@pytest.mark.parametrize("name", ["linear", "groups"])
def test_gates_at_the_same_alignment_take_the_same_way(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A key says whether an address is a multiple of 16, and not by how much it is off."""
    storage = random(8192)

    def at(offset: int, *shape: int) -> torch.Tensor:
        return storage[offset:][: torch.Size(shape).numel()].view(shape)

    def planned(up: int, gate: int) -> list[tuple[bool, bool]]:
        made.clear()
        plan.PLANS.clear()
        for module in (api, grouped):
            monkeypatch.setattr(module, "_fast", fast_path.FastPath())
        if name == "linear":
            api.linear(random(64, 32), at(up, 48, 32), activation="swiglu", gate=at(4096 + gate, 48, 32))
        else:
            how = {"activation": "swiglu", "gate": at(4096 + gate, 2, 32, 48)}
            grouped.grouped_matmul(random(64, 32), at(up, 2, 32, 48), GROUPS[1], **how)
        return [(x.problem.b.aligned, x.problem.gate) for x in made]

    made = plan_fakes.take_plans_away(monkeypatch)
    assert planned(1, 2) == planned(1, 1) == [(False, True)]
    assert planned(0, 8) == [(True, True)]
    assert planned(0, 1) != [(False, True)], "no kernel reads them so"
