"""Calls like one before that need gradients: C++ launches them, and its gradients are torch's. What else wants to see a
product on the way, Python takes."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support import fake_driver
from tests.support.epilogue_truth import activated
from tests.support.fake_driver import Driver
from tests.support.patches import replace_all
from tests.support.threads import at_once
from triton_gemm.functional import api, fast_path, matrices, ops, rules
from triton_gemm.problem import ACTIVATIONS, GATES, SUM, Request
from triton_gemm.runtime import native, native_build

pytestmark = pytest.mark.slow

F, linear = torch.nn.functional, triton_gemm.linear
Tensors = tuple[torch.Tensor, ...]
Function = Callable[..., torch.Tensor]


@pytest.fixture
def driver(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> Iterator[Driver]:
    """Products of CPU tensors are planned for Hopper, and launched by nothing. No call was made before."""
    monkeypatch.setattr(rules, "runs", lambda *_, **__: None)
    fake_driver.plan_for_hopper(monkeypatch)
    monkeypatch.setattr(api, "_fast", fast_path.FastPath())
    monkeypatch.setattr(ops, "_fast", fast_path.FastPath(ops._show))
    loaded = native.module()
    yield driver
    ops._by_cpp.unregister()
    loaded.backward_by(None, "", SUM, 0)


@pytest.fixture
def computed(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> list[tuple[torch.Size, torch.Size]]:
    """Shapes of products that Python computes, by torch: launches leave what was there before."""
    made: list[tuple[torch.Size, torch.Size]] = []
    compute, computed = matrices.compute, ops._computed

    def by_torch(x: matrices.Operands) -> torch.Tensor:
        made.append((x.a.shape, x.b.shape))
        return x.a @ x.b if x.input is None else x.a @ x.b + x.input

    # Both are planned, and become like one before.
    monkeypatch.setattr(matrices, "compute", lambda x, *how: (by_torch(x), compute(x, *how)[1]))

    def like_one_before(x: matrices.Operands, request: Request) -> tuple[torch.Tensor, ...]:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(matrices, "compute", compute)
            computed(x, request)
        return (by_torch(x),)

    monkeypatch.setattr(ops, "_computed", like_one_before)
    return made


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    """Of bf16 1 and -1, whose sums are exact."""
    drawn = torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(dtype)
    return (drawn.sign() if dtype == torch.bfloat16 else drawn).requires_grad_()


def in_cpp(driver: Driver, call: Callable[[], torch.Tensor]) -> torch.Tensor:
    """The result of a call that C++ makes, which Python has made before."""
    for _ in range(3):
        call()
    driver.by_python.clear(), driver.seen.clear()
    c = call()
    assert is_cpps(c) and driver.seen and not driver.by_python
    return c


def is_cpps(c: torch.Tensor) -> bool:
    return c.grad_fn is not None and "GemmNode" in c.grad_fn.name()


def by_columns(x: torch.Tensor) -> torch.Tensor:
    return x.detach().mT.contiguous().mT.requires_grad_()


X, W, B, BIAS = (64, 32), (48, 32), (32, 48), (48,)
# Ours, torch's, and the operands.
CASES: dict[str, tuple[Function, Function, Tensors]] = {
    "linear": (linear, F.linear, (random(*X), random(*W))),
    "a bias": (linear, F.linear, (random(*X), random(*W), random(*BIAS))),
    "a bias of a row": (linear, F.linear, (random(*X), random(*W), random(1, *BIAS))),
    "a batch": (linear, F.linear, (random(3, *X), random(*W), random(*BIAS))),
    "a batch by columns": (linear, F.linear, (by_columns(random(3, *X)), random(*W))),
    "columns": (linear, F.linear, (by_columns(random(*X)), by_columns(random(*W)))),
    "one row": (linear, F.linear, (random(1, 32), random(*W), random(*BIAS))),
    "one column": (linear, F.linear, (random(*X), random(1, 32))),
    "a frozen weight": (linear, F.linear, (random(*X), random(*W).detach(), random(*BIAS))),
    "a bias alone": (linear, F.linear, (random(*X).detach(), random(*W).detach(), random(*BIAS))),
    "data": (linear, F.linear, (random(*X).detach(), random(*W), random(*BIAS))),
    "fp64": (linear, F.linear, (random(*X, dtype=torch.float64), random(*W, dtype=torch.float64))),
    "many rows": (linear, F.linear, tuple(random(*s, dtype=torch.bfloat16) for s in ((1100, 32), W, BIAS))),
    "matmul": (triton_gemm.matmul, torch.matmul, (random(*X), random(*B))),
    "matmul of a batch": (triton_gemm.matmul, torch.matmul, (random(2, 3, *X), by_columns(random(*B)))),
    "mm": (triton_gemm.mm, torch.mm, (random(*X), random(*B))),
    "addmm": (triton_gemm.addmm, torch.addmm, (random(*BIAS), random(*X), random(*B))),
    "the operator": (ops.gemm, torch.matmul, (random(*X), random(*B))),
}


def grads_of(c: torch.Tensor, operands: Tensors, grad: torch.Tensor, **how: Any) -> Tensors:
    return torch.autograd.grad(c, [x for x in operands if x.requires_grad], grad, **how)


@pytest.mark.parametrize("name", CASES)
def test_gradients_are_torch_s(driver: Driver, computed: list[tuple[torch.Size, torch.Size]], name: str) -> None:
    ours, torchs, operands = CASES[name]
    c, expected = in_cpp(driver, lambda: ours(*operands)), torchs(*operands)
    assert (c.shape, c.dtype, c.requires_grad) == (expected.shape, expected.dtype, True)
    computed.clear()
    grad = random(*expected.shape, dtype=expected.dtype, seed=1).detach()
    found = grads_of(c, operands, grad)
    tolerance = {"rtol": 0, "atol": 0} if grad.dtype == torch.bfloat16 else {}
    torch.testing.assert_close(found, grads_of(expected, operands, grad), **tolerance)
    for x, of_x in zip([x for x in operands if x.requires_grad], found, strict=True):
        assert of_x.shape == x.shape and (1 in x.shape or of_x.stride() == x.stride()), "accumulating copies nothing"
    multiplied = operands[1:] if name == "addmm" else operands[:2]
    assert len(computed) == sum(x.requires_grad for x in multiplied) + (name == "many rows")


@pytest.mark.parametrize("trained", ["all", "input", "weights"])
@pytest.mark.parametrize("has_bias", [False, True], ids=["", "bias"])
@pytest.mark.parametrize("name", [*ACTIVATIONS, *GATES])
def test_gradients_of_activations_are_torch_s(
    driver: Driver, computed: list[Any], name: str, has_bias: bool, trained: str
) -> None:
    """Launches store nothing here: preactivations, or relu's result, are put where they are saved. A gate has no
    derivative of all rows by one kernel but in 16 bits."""
    dtype = torch.bfloat16 if name in GATES else torch.float32
    x, w, gate = (random(*shape, dtype=dtype, seed=i) for i, shape in enumerate((X, W, W)))
    bias, gate_bias = (random(*BIAS, dtype=dtype, seed=i) if has_bias else None for i in range(2))
    for operand in {"all": [], "input": [w, gate, bias, gate_bias], "weights": [x]}[trained]:
        if operand is not None:
            operand.requires_grad_(False)
    gates: dict[str, Any] = {"gate": gate, "gate_bias": gate_bias} if name in GATES else {}
    operands = tuple(y for y in (x, w, bias, *gates.values()) if y is not None)
    ungated, before = F.linear(x, w, bias), F.linear(x, gate if gates else w, gate_bias if gates else bias)
    expected = activated(before, GATES.get(name, name))
    saved = [expected if name == "relu" else before]
    if gates:
        expected, saved = expected * ungated, [before, ungated]
    packed: list[torch.Size] = []

    def pack(y: torch.Tensor) -> torch.Tensor:
        packed.append(y.shape)
        return saved.pop(0).detach() if y.shape == expected.shape else y

    for _ in range(3):
        triton_gemm.linear(x, w, bias, name, **gates)
    driver.by_python.clear(), driver.seen.clear()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda y: y):
        c = triton_gemm.linear(x, w, bias, name, **gates)
    assert c.grad_fn is not None and "ActivatedNode" in c.grad_fn.name() and driver.seen and not driver.by_python
    of_x, of_w = [torch.Size(X)], [torch.Size((W[1], W[0]))] * (2 if gates else 1)
    assert packed == of_x * w.requires_grad + of_w * x.requires_grad + [expected.shape] * (2 if gates else 1)
    grad = random(*expected.shape, dtype=dtype, seed=1).detach()
    torch.testing.assert_close(grads_of(c, operands, grad), grads_of(expected, operands, grad))


def test_gradients_of_gradients_are_torch_s(driver: Driver, computed: list[Any]) -> None:
    ours, torchs, operands = CASES["a bias"]
    grad = random(64, 48, seed=1)

    def second(c: torch.Tensor) -> Tensors:
        first = grads_of(c, operands, grad, create_graph=True)
        return torch.autograd.grad([x.square().sum() for x in first], [operands[0], operands[1], grad])

    torch.testing.assert_close(second(in_cpp(driver, lambda: ours(*operands))), second(torchs(*operands)))


def test_a_backward_s_products_are_launched_without_python(driver: Driver) -> None:
    """By a table of their own: it needs no overridden operator, so other threads may live."""
    x, w = random(64, 32), random(48, 32)
    grad = torch.ones(64, 48)

    def step() -> Tensors:
        return torch.autograd.grad(triton_gemm.linear(x, w), (x, w), grad)

    for _ in range(4):
        step()
    ops._by_cpp.unregister()
    driver.by_python.clear(), driver.seen.clear()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ops._fast, "take", lambda *_, **__: pytest.fail("Python was asked"))
        for grads in (step(), *at_once(step)):
            assert [x.shape for x in grads] == [x.shape, w.shape]
    assert len(driver.seen) == 6 and not driver.by_python


def flops(call: Callable[[], object]) -> int:
    with FlopCounterMode(display=False) as mode:
        call()
    return mode.get_total_flops()


def test_a_backward_shows_modes_its_products(driver: Driver, computed: list[Any]) -> None:
    _, _, operands = CASES["linear"]
    grad = torch.ones(64, 48)
    for _ in range(4):
        grads_of(in_cpp(driver, lambda: linear(*operands)), operands, grad)
    c = linear(*operands)
    assert is_cpps(c)
    assert flops(lambda: grads_of(c, operands, grad, retain_graph=True)) == 2 * 2 * 64 * 48 * 32
    with torch.profiler.profile() as profile:
        grads_of(c, operands, grad)
    assert sum(event.name == "triton_gemm::gemm" for event in profile.events()) == 2


def test_a_backward_is_batched_by_vmap(driver: Driver, computed: list[Any]) -> None:
    ours, torchs, operands = CASES["a bias"]
    many = torch.randn(5, 64, 48)
    c = in_cpp(driver, lambda: ours(*operands))
    found = grads_of(c, operands, many, is_grads_batched=True)
    torch.testing.assert_close(found, grads_of(torchs(*operands), operands, many, is_grads_batched=True))


@pytest.mark.parametrize("how", [{}, {"fullgraph": True}, {"fullgraph": True, "dynamic": True}], ids=str)
def test_a_backward_by_compiled_autograd(driver: Driver, computed: list[Any], how: dict[str, bool]) -> None:
    """In one graph, too, of sizes that the graph does not know."""
    _, torchs, operands = CASES["a bias"]
    x, w, bias = (x.detach().clone().requires_grad_() for x in operands)
    in_cpp(driver, lambda: linear(x, w, bias))
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager", **how)):
        for rows in (64, 64, 40):
            for operand in (x, w, bias):
                operand.grad = None
            c = in_cpp(driver, lambda rows=rows: linear(x[:rows], w, bias))
            c.backward(torch.ones_like(c))
            expected = grads_of(torchs(x[:rows], w, bias), (x, w, bias), torch.ones(rows, 48))
            torch.testing.assert_close((x.grad, w.grad, bias.grad), expected)


@pytest.mark.parametrize("columns", [32, 48])
def test_checkpoints_where_python_s_node_and_c_s_meet(
    driver: Driver, computed: list[Any], columns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What one has saved the other is given, by the recomputation. Python computes the backward's products."""
    monkeypatch.setattr(ops, "_fast", fast_path.FastPath())
    w, grad = random(columns, 32), random(64, columns, seed=1).detach()
    inputs = [random(64, 32, seed=i) for i in range(6)]
    results = [checkpoint(linear, x, w, use_reentrant=False) for x in inputs]
    assert not is_cpps(results[0]) and is_cpps(results[-1])
    for x, c in zip(inputs, results, strict=True):
        torch.testing.assert_close(grads_of(c, (x, w), grad), grads_of(F.linear(x, w), (x, w), grad))
    c = checkpoint(linear, inputs[0], w, use_reentrant=False)
    assert is_cpps(c)
    with torch.profiler.profile():  # so that Python computes it again
        found = grads_of(c, (inputs[0], w), grad)
    torch.testing.assert_close(found, grads_of(F.linear(inputs[0], w), (inputs[0], w), grad))


class Ends(torch.autograd.Function):
    """Gives no gradient, and not zeros."""

    @staticmethod
    def forward(context: Any, x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    @staticmethod
    def backward(context: Any, grad: torch.Tensor) -> None:
        return None


def test_hooks_checkpoints_and_no_gradient(driver: Driver, computed: list[Any]) -> None:
    _, torchs, (x, w) = CASES["linear"]
    in_cpp(driver, lambda: linear(x, w))
    ones = torch.ones(64, 48)
    expected = grads_of(torchs(x, w), (x, w), ones)
    c = checkpoint(linear, x, w, use_reentrant=False)
    torch.testing.assert_close(grads_of(c, (x, w), ones), expected)
    packed: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t.clone(), lambda t: t):
        c = linear(x, w)
    assert len(packed) == 2 and is_cpps(c)
    torch.testing.assert_close(grads_of(c, (x, w), ones), expected)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t.double(), lambda t: t):
        c = linear(x, w)
    torch.testing.assert_close(grads_of(c, (x, w), ones), expected)
    assert torch.autograd.grad(Ends.apply(linear(x, w)), x, ones, allow_unused=True) == (None,)


def test_what_was_saved_is_checked_and_given_back(driver: Driver, computed: list[Any]) -> None:
    x, w = random(64, 32), random(48, 32)
    c = in_cpp(driver, lambda: linear(x, w))
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        c.backward(torch.ones_like(c))
    c = linear(x, w)
    c.backward(torch.ones_like(c))
    with pytest.raises(RuntimeError, match="second time"):
        c.backward(torch.ones_like(c))
    kept = weakref.ref(held := torch.empty(64, 32))
    c = linear(held, w)
    assert is_cpps(c)
    del held
    assert kept() is not None
    del c
    gc.collect()
    assert kept() is None


# What Python takes, though a call with these operands is C++'s. A call of x and w.
PYTHONS: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
    "a batch of matrices": lambda x, w: triton_gemm.matmul(x, w.T.expand(2, 32, 48)),
    "a matrix that is added": lambda x, w: triton_gemm.addmm(torch.ones(64, 48), x, w.T),
    "a precision": lambda x, w: triton_gemm.linear(x, w, precision="ieee"),
    "a factor": lambda x, w: triton_gemm.addmm(torch.ones(48), x, w.T, alpha=0.5),
    "a batch-invariant call": lambda x, w: triton_gemm.linear(x, w, batch_invariant=True),
    "a batch-invariant context": lambda x, w: triton_gemm.batch_invariant()(triton_gemm.linear)(x, w),
    "a negative view": lambda x, w: triton_gemm.linear(torch._neg_view(x), w),
}


@pytest.mark.parametrize("name", PYTHONS)
def test_other_calls_have_python_s_derivatives(driver: Driver, computed: list[Any], name: str) -> None:
    x, w = random(64, 32), random(48, 32)
    in_cpp(driver, lambda: linear(x, w))
    in_cpp(driver, lambda: triton_gemm.addmm(torch.ones(48), x, w.T))
    for _ in range(4):
        c = PYTHONS[name](x, w)
        assert c.grad_fn is not None and not is_cpps(c)


def test_transforms_and_modes_see_a_product(driver: Driver, computed: list[Any]) -> None:
    x, w = random(64, 32), random(48, 32)
    in_cpp(driver, lambda: linear(x, w))
    found = torch.func.grad(lambda x: linear(x, w).sum())(x)
    torch.testing.assert_close(found, torch.ones(64, 48) @ w)
    found = torch.func.grad(lambda y: (linear(x, w) * y).sum())(torch.ones(48))
    torch.testing.assert_close(found, F.linear(x, w).sum(0))
    assert flops(lambda: linear(x, w)) == 2 * 64 * 48 * 32


def test_an_extension_that_was_built_before_has_derivatives(
    driver: Driver, computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As `native.built` leaves its state."""
    replace_all(monkeypatch, native_build, _begun=True, _why="no call was made twice")
    in_cpp(driver, lambda: linear(random(64, 32), random(48, 32)))
    assert len(api._fast.calls) == 1


def test_threads_share_a_table(driver: Driver) -> None:
    """In which a backward looks, too."""
    shown: list[Any] = []
    fast = fast_path.FastPath(lambda _, table: shown.append(table))
    found = {id(x) for _ in range(3) for x in at_once(lambda: fast._table(native.module()))}
    assert found == {id(fast.table)} and shown == [fast.table]
    c = in_cpp(driver, lambda: linear(random(64, 32), random(48, 32)))
    native.module().backward_by(None, "", SUM, 0)
    c.sum().backward()  # by the operator
    with pytest.raises(TypeError, match="no table"):
        native.module().backward_by(fast, "", SUM, 0)


def test_without_an_extension_python_has_the_derivatives(
    driver: Driver, computed: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And no key is made, which takes time."""
    replace_all(monkeypatch, native_build, _module=None, _begun=True, _why="the test says so")
    x, w = random(64, 32), random(48, 32)
    for _ in range(3):
        assert not is_cpps(linear(x, w))
    assert not api._fast.calls
