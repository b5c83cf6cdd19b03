"""The fast path of calls with an epilogue, and of the dispatcher's: what is planned once, and what is not."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest
import torch

import triton_gemm
from tests.runtime.test_plan import FakeStep, half, key_of, plan_without_a_gpu
from tests.support import fake_driver, plan_fakes
from tests.support.patches import noted, replace_all
from triton_gemm.functional import api, fast_path, grouped, matrices, ops, scaled
from triton_gemm.problem import ACTIVATIONS, PRODUCT, Request
from triton_gemm.runtime import native_build, plan, policies
from triton_gemm.selection import generation


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
def test_gates_at_the_same_alignment_take_the_same_path(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_a_call_that_resized_its_out_is_not_repeated(checked: list[Request]) -> None:
    """The next `out` of that shape is as small, and a launch without checks would write past its end."""
    a, b = half(64, 32), half(32, 48)
    plan.PLANS[key_of(a, b, half(64, 48))] = plan_without_a_gpu(a, b, half(64, 48))
    api.matmul(a, b, out=half(64, 48))
    assert len(api._fast.calls) == 1
    api.matmul(a, b, out=half(0))
    api.matmul(a, b, out=half(3, 3))
    assert len(api._fast.calls) == 1


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Request]:
    """Nothing is planned, and what is planned launches on no device. The requests of calls that were not like one
    before."""
    multiplied: list[Request] = []

    def multiply(
        a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, request: Request = PRODUCT, auxiliary: Any = ()
    ) -> plan.Plan | None:
        multiplied.append(request)
        return plan.PLANS.get(plan.key_of(request, a, b, c, auxiliary))

    fake_driver.launch_on_device_0(monkeypatch)
    replace_all(monkeypatch, plan, multiply=multiply, PLANS={})
    monkeypatch.setattr(api.rules, "computable", lambda *_, **__: None)
    for module in (api, ops):
        monkeypatch.setattr(module, "_fast", fast_path.FastPath())
    return multiplied


FAST: dict[str, Callable[..., torch.Tensor]] = {
    "matmul": lambda a, b, bias: api.matmul(a, b),
    "mm": lambda a, b, bias: api.mm(a, b),
    "bmm": lambda a, b, bias: api.bmm(a[None], b[None])[0],
    "addmm": lambda a, b, bias: api.addmm(bias, a, b),
    "linear": lambda a, b, bias: api.linear(a, b.mT, bias),
}


def plan_by_hand(name: str, a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor) -> torch.Tensor | None:
    """Plans what a function in FAST launches; the bias, where it adds one."""
    added = bias if name in ("addmm", "linear") else None
    x, y = (a, b.mT.mT) if name != "bmm" else (a[None], b[None])
    made = plan_without_a_gpu(a, b, half(64, 48))
    made.names, made.allocates, made.steps = ("a", "b", "c", *["bias"] * (added is not None)), False, [FakeStep()]
    first, *_ = matrices.views(x, y, half(*x.shape[:-1], 48))
    plan.PLANS[key_of(*first, bias=added)] = made
    return added


@pytest.mark.parametrize("name", FAST)
def test_calls_like_one_before_go_past_the_checks(name: str, checked: list[Request]) -> None:
    """But not those whose bias is broadcast, of which a kernel would read more than there is."""
    a, b, bias = half(64, 32), half(32, 48), half(48)
    added = plan_by_hand(name, a, b, bias)
    for _ in range(3):
        FAST[name](a, b, bias)
    assert len(checked) == 1 and len(api._fast.calls) == 1
    if added is not None:
        for _ in range(2):
            FAST[name](a, b, half(1))
        assert len(checked) == 3
    if name == "addmm":
        for factors in ({"alpha": 0, "beta": 0}, {"beta": 0}, {"beta": 2}):
            api.addmm(bias, a, b, **factors)
        assert len(checked) == 6, "another beta is no bias"
    count = len(checked)
    for _ in range(2):
        FAST[name](torch._neg_view(a), b, bias)
    assert len(checked) == count + 2, "what is negated on the way does not lie in memory"
    count = len(checked)
    FAST[name](a.clone().requires_grad_(), b, bias)
    assert len(checked) == count + 1
    ops._fast.calls.clear()
    torch.func.functionalize(FAST[name])(a, b, bias)
    assert len(checked) == count + 2, "a functional tensor has no data pointer"
    if added is not None:
        ops._fast.calls.clear()
        torch.func.functionalize(lambda x: FAST[name](a, b, x))(bias)
        assert len(checked) == count + 3


# Functions of the package that a call like one before goes through, down to its launch.
WARM_CALLS = {"matmul": 5, "mm": 6, "bmm": 6, "addmm": 5, "linear": 5}


@pytest.mark.parametrize("name", FAST)
def test_a_warm_call_goes_through_few_functions(name: str, checked: list[Request], monkeypatch: Any) -> None:
    """Each costs a call about a tenth of a microsecond. One more fills in the address of a result that is new."""
    monkeypatch.setattr(generation, "contexts", None)  # where a policy was set in some context, a call asks for it
    replace_all(monkeypatch, native_build, _module=None, _begun=True, _why="the test says so")  # which is not awaited
    a, b, bias = half(64, 32), half(32, 48), half(48)
    plan_by_hand(name, a, b, bias)
    calls: list[list[str]] = []

    def note(frame: FrameType, event: str, _: object) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(PACKAGE) and frame.f_code.co_name[0] != "<":
            calls[-1].append(frame.f_code.co_name)

    for _ in range(5):
        calls.append([])
        sys.setprofile(note)
        try:
            FAST[name](a, b, bias)
        finally:
            sys.setprofile(None)
    least = min(calls[-2:], key=len)
    assert len(least) == WARM_CALLS[name], least


@pytest.mark.parametrize("copied", [False, True])
@pytest.mark.parametrize("name", ["grouped", "gated groups", "scaled"])
def test_grouped_and_scaled_calls_share_the_fast_path(name: str, copied: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """But not those whose groups' ends, or scales, are copied for the launch, at each call."""
    module = scaled if name == "scaled" else grouped
    plan_fakes.take_plans_away(monkeypatch)
    monkeypatch.setattr(module, "_fast", fast_path.FastPath())
    made = noted(monkeypatch, module, "launch")
    for _ in range(3):
        if name != "scaled":
            ends = torch.tensor([4, 0, 9, 0], dtype=torch.int32)[:: 2 if copied else 1]
            how = {"activation": "swiglu", "gate": half(len(ends), 32, 48)} if name == "gated groups" else {}
            grouped.grouped_matmul(half(16, 32), half(len(ends), 32, 48), ends, **how)
        else:
            scales = torch.ones(16, 1), torch.ones(1, 1 if copied else 48)
            scaled.scaled_matmul(half(16, 32).to(torch.int8), half(32, 48).to(torch.int8), *scales)
    assert len(made) == (3 if copied else 1)
    assert all((x is fast_path.SLOW) == copied for x in module._fast.calls.values())


def test_a_factor_is_that_of_the_call_on_the_fast_path(checked: list[Request]) -> None:
    """One of the product, read at the launch; one of a bias is multiplied before, and its call is always checked."""
    a, b, bias, step = half(64, 32), half(32, 48), half(48), FakeStep()
    made = plan_without_a_gpu(a, b, half(64, 48))
    made.names, made.allocates, made.steps = ("a", "b", "c", "bias"), False, [step]
    plan.PLANS[key_of(a, b, half(64, 48), bias=bias)] = made
    for alpha in (1, 0.5, -2.0):
        api.addmm(bias, a, b, alpha=alpha)
    assert [request.alpha for request in checked] == [1] and [call[-2] for call in step.calls] == [0.5, -2.0]
    for beta in (0.5, 2, torch.tensor(1.0)):
        for _ in range(2):
            api.addmm(bias, a, b, beta=beta)
    api.addmm(bias, a, b, alpha=0)
    # The last beta is 1, and its second call is like one before to the operator.
    assert len(checked) == 7 and [call[-2] for call in step.calls[2:]] == [1]


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *(("addmm", how) for how in ({}, {"alpha": 2, "beta": 2}, {"alpha": 2}, {"out_dtype": torch.float32})),
        *(("linear", how) for how in ({}, {"precision": "tf32"}, {"activation": "relu"})),
    ],
    ids=str,
)
def test_the_fast_path_gets_all_of_a_call(name: str, how: dict[str, Any], monkeypatch: Any) -> None:
    requests: list[Request] = []
    monkeypatch.setattr(api._fast, "take", lambda *given: (None, requests.append(given[4])))
    monkeypatch.setattr(api, "_product", lambda _, request, *__: requests.append(request))
    a, b, bias = half(64, 32), half(32, 48), half(48)
    api.addmm(bias, a, b, **how) if name == "addmm" else api.linear(a, b.mT, bias, **how)
    assert requests == 2 * [Request(**{"alpha": 1, "beta": 1, **how})]


def test_what_many_calls_say_is_made_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: list[Request] = []
    monkeypatch.setattr(api._fast, "take", lambda *given: (None, requests.append(given[4]) or half(64, 48)))
    a, b = half(64, 32), half(48, 32)
    for activation in (None, *ACTIVATIONS):
        for _ in range(2):
            api.linear(a, b, None, activation)
        assert requests[-1] is requests[-2] and requests[-1] == Request(beta=1.0, activation=activation)
    # Nor does a call that is in no backward look for the context of one, though a policy was set in some context.
    monkeypatch.setattr(generation, "contexts", True)
    monkeypatch.setattr(policies, "context_of_backward", lambda: pytest.fail("it was asked"))
    key_of(a, b.mT, half(64, 48))


def test_forward_and_backward_passes_like_one_before_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither does the product that a bias's gradient is, with many rows."""
    made = plan_fakes.take_plans_away(monkeypatch)
    x, weight, bias = half(ops.MANY_ROWS, 32), half(48, 32), half(48)

    def gradients() -> tuple[torch.Tensor, ...]:
        leaves = [given.clone().requires_grad_() for given in (x, weight, bias)]
        return torch.autograd.grad(api.linear(*leaves).float().square().sum(), leaves)

    expected = gradients()
    planned = len(made)
    assert planned == 4
    gradients()  # the first call was kept as one of `linear`, this one is kept as one of the operator
    monkeypatch.setattr(plan, "multiply", None)
    assert all(map(torch.equal, gradients(), expected)) and len(made) == planned


def test_calls_of_the_dispatcher_like_one_before_plan_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a compiled graph makes them."""
    made = plan_fakes.take_plans_away(monkeypatch)
    a, b, bias = half(64, 32), half(32, 48), half(48)
    expected = torch.ops.triton_gemm.gemm(a, b, bias)
    assert len(made) == 1
    negated = torch.ops.triton_gemm.gemm(a._neg_view(), b)
    monkeypatch.setattr(matrices, "compute", None)
    assert torch.equal(torch.ops.triton_gemm.gemm(a.clone(), b.clone(), bias.clone()), expected)
    assert torch.equal(torch.ops.triton_gemm.gemm(-a, b), negated) and len(made) == 2


PACKAGE = str(Path(triton_gemm.__file__).parent)
