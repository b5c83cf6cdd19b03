"""Kernels that store what an activation is applied to, in a plan's place, against the same kernels without it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, Runnable, bits
from tests.support.product_checks import SENTINEL
from triton_gemm.problem import GATES, GemmProblem

CPU = torch.device("cpu")
PlanOf = Callable[[GemmProblem], Runnable]  # of one configuration

# With an activation where they have none, in turn.
STORING = {
    **{name: change for name, change in CIRCUMSTANCES.items() if name not in ("relu", "gelu", "gelu_tanh")},
    "residual-c-column-major": {"orders": "ntt", "beta": 1.0, "residual": True, "activation": "gelu_tanh"},
    "residual-batch": {"batch": 3, "orders": "ntn", "beta": 0.5, "residual": True, "activation": "relu", "bias": "n"},
}


def storing(name: str, size: tuple[int, int, int], **changes: object) -> Case:
    """A circumstance with an activation."""
    turn = list(STORING).index(name)
    change = {"activation": ("silu", "relu", "gelu_tanh", "gelu")[turn % 4], **STORING[name], **changes}
    ragged = change.pop("ragged", 0)
    return Case((size[0], size[1] + ragged, size[2]), **change)  # type: ignore[arg-type]


def check(case: Case, plan_of: PlanOf, parts: int = 1) -> None:
    """C has the bits that it has alone, and what is stored beside it those of the same kernel without an activation,
    which are right; nothing else is written."""
    operands = Operands(case, CPU)
    problem = operands.problem
    buffer, before = operands.place(torch.full_like(operands.c0, SENTINEL), case.orders[2], SENTINEL, output=True)

    def run(problem: GemmProblem, beta: float, *more: Tensor) -> Tensor:
        operands.c.copy_(operands.c0)
        plan_of(problem).run(operands.a, operands.b, operands.c, (*operands.auxiliary, *more), case.alpha, beta)
        return operands.c.clone()

    c = run(replace(problem, preactivation=True), case.beta, before)
    assert torch.equal(bits(c), bits(run(problem, case.beta))), "C has other bits"
    beta = 0.0 if case.residual else case.beta
    plain = run(replace(problem, activation=None, residual=False, has_beta=beta != 0), beta)
    assert torch.equal(bits(before), bits(plain)), "stores something else"
    truth, bound = operands.truth(parts, beta=beta, activation=None, residual=False)
    assert ((before.double() - truth).abs() <= bound).all()
    for whole, window in ((buffer, before), (operands.c_buffer, operands.c)):
        window.fill_(SENTINEL)
        assert (whole == SENTINEL).all(), "wrote outside"


def check_gated(
    size: tuple[int, int, int],
    name: str,
    plan_of: PlanOf,
    *,
    biased: bool = False,
    dtype: torch.dtype = torch.bfloat16,
    ends: list[int] | None = None,
) -> None:
    """The same with a gate, of whose products both are stored. ends: of groups of rows, each with a pair of matrices;
    rows after the last are of none."""
    M, N, K = size
    groups = () if ends is None else (len(ends),)
    generator = torch.Generator().manual_seed(M + N + K)
    a, b, gate = (torch.randn(x, generator=generator).to(dtype) for x in ((M, K), (*groups, N, K), (*groups, N, K)))
    biases = [torch.randn(N, generator=generator).to(dtype) for _ in range(2 * biased)]
    outer = torch.full((3, M + 2, N + 16), SENTINEL, dtype=dtype)
    c, before, ungated = outer[:, 1:-1, 8:-8]
    words = {"groups": None if ends is None else "m", "bias": "n" if biased else None}
    problem = GemmProblem.of(a, b.mT, c, activation=GATES[name], gate=True, **words)
    listed = () if ends is None else (torch.tensor(ends, dtype=torch.int32),)

    def run(problem: GemmProblem, b: Tensor, *auxiliary: Tensor) -> Tensor:
        c.fill_(SENTINEL)
        plan_of(problem).run(a, b.mT, c, auxiliary, 1.0, 0.0)
        return c.clone()

    of_gate = (*biases[:1], gate.mT, *biases[1:], *listed)
    found = run(replace(problem, preactivation=True), b, *of_gate, before, ungated)
    assert torch.equal(bits(found), bits(run(problem, b, *of_gate))), "C has other bits"
    alone = replace(problem, activation=None, gate=False)
    for stored, matrix, bias in ((ungated, b, biases[:1]), (before, gate, biases[1:])):
        assert torch.equal(bits(stored), bits(run(alone, matrix, *bias, *listed))), "stores something else"
    outer[:, 1:-1, 8:-8] = SENTINEL
    assert (outer == SENTINEL).all(), "wrote outside"
