"""Derivatives of any order, by autograd and by torch.func."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.patches import noted
from tests.support.product_views import assert_gradients_as_near_as_torchs, draw, multiply_with_torch, torchs_linear
from tests.support.tiers import one
from triton_gemm.functional import matrices, ops
from triton_gemm.problem import ACTIVATIONS, GATES, Request
from triton_gemm.runtime import plan
from triton_gemm.selection import generation

Function = Callable[..., torch.Tensor]


def double(*shape: int, seed: int = 0) -> torch.Tensor:
    return draw(*shape, seed=seed).double().requires_grad_()


# --- Derivatives ---

CALLS: dict[str, tuple[Function, tuple[torch.Tensor, ...]]] = {
    "mm": (triton_gemm.mm, (double(2, 3), double(3, 4))),
    "mv": (triton_gemm.mv, (double(2, 3), double(3))),
    "bmm": (triton_gemm.bmm, (double(2, 2, 3), double(2, 3, 2))),
    "dot": (triton_gemm.matmul, (double(3), double(3, seed=1))),
    "vector and batch": (triton_gemm.matmul, (double(3), double(2, 3, 2))),
    "one weight": (triton_gemm.matmul, (double(2, 2, 3), double(3, 2))),
    "many weights": (triton_gemm.matmul, (double(2, 3), double(2, 3, 2))),
    "each with each": (triton_gemm.matmul, (double(2, 1, 2, 3), double(2, 3, 2))),
    "batches of one": (triton_gemm.matmul, (double(1, 2, 3), double(2, 1, 3, 2))),
    "addmm": (lambda *x: triton_gemm.addmm(*x, alpha=0.5, beta=-2), (double(4, 2), double(4, 3), double(3, 2))),
    "addmm row": (lambda c, a, b: triton_gemm.addmm(c, a, b, beta=3), (double(2), double(4, 3), double(3, 2))),
    "baddbmm": (triton_gemm.baddbmm, (double(2, 1), double(3, 2, 2), double(3, 2, 2, seed=1))),
    "linear": (triton_gemm.linear, (double(2, 2, 3), double(4, 3), double(4))),
    "column-major": (lambda a, b: triton_gemm.matmul(a.mT, b.mT), (double(2, 3, 4), double(2, 2, 3))),
    **{f"linear {name}": (lambda *x, name=name: triton_gemm.linear(*x, name), (double(2, 3), double(4, 3), double(4)))
       for name in ACTIVATIONS},
    **{f"fused {name}": (lambda *x, name=name: ops.gemm(*x, Request(0.7, 1.3, name)),
                         (double(2, 3), double(3, 2), double(2))) for name in ACTIVATIONS},
    **{f"residual {name}": (lambda *x, name=name: triton_gemm.linear(*x[:3], name, residual=x[3]),
                            (double(3, 4), double(2, 4), double(2), double(3, 2))) for name in (None, "relu", "gelu")},
    **{name: (lambda *x, name=name: triton_gemm.linear(*x[:3], name, gate=x[3], gate_bias=x[4]),
              tuple(double(*shape, seed=i) for i, shape in enumerate(((2, 3, 4), (2, 4), (2,), (2, 4), (2,)))))
       for name in GATES},
}  # fmt: skip


@pytest.fixture(params=["torch", "kernels"])
def multiplier(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """Who computes the products that derivatives are made of: in the interpreter kernels take long."""
    if request.param == "torch":
        monkeypatch.setattr(plan, "multiply", multiply_with_torch)
    products = noted(monkeypatch, plan, "multiply")
    yield request.param
    assert products


def torch_in_all_and_kernels_in_one(name: str, multiplier: str) -> set[str]:
    return {f"{name} by torch"} if multiplier == "torch" else {"by kernels"}


@pytest.mark.few(shows=torch_in_all_and_kernels_in_one)
@pytest.mark.parametrize("name", CALLS)
def test_derivatives(name: str, multiplier: str) -> None:
    """First and second, backwards, forwards and batched."""
    function, arguments = CALLS[name]
    fast = {"fast_mode": True}
    assert torch.autograd.gradcheck(function, arguments, check_forward_ad=True, **fast)
    assert torch.autograd.gradgradcheck(function, arguments, check_fwd_over_rev=True, **fast)


@pytest.mark.few(shows=torch_in_all_and_kernels_in_one)
@pytest.mark.parametrize("name", ["one weight", "each with each", "addmm", "linear gelu", "fused silu"])
def test_derivatives_under_vmap(name: str, multiplier: str) -> None:
    function, arguments = CALLS[name]
    assert torch.autograd.gradcheck(function, arguments, check_batched_grad=True)


def leaves(*tensors: torch.Tensor) -> list[torch.Tensor]:
    return [x.detach().clone().requires_grad_() for x in tensors]


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16], ids=str)
@pytest.mark.parametrize("activation", [None, "relu", "gelu"])
def test_gradients_are_torchs(activation: str | None, dtype: torch.dtype) -> None:
    """In the kernels' own arithmetic."""
    assert_gradients_as_near_as_torchs(
        lambda *x: triton_gemm.linear(*x, activation),
        lambda *x: torchs_linear(*x, activation),
        [draw(*shape, dtype=dtype) for shape in ((2, 5, 9), (7, 9), (7,))],
    )


def test_a_gradient_lies_as_its_operand() -> None:
    """Or it would be copied when it is accumulated."""
    for a, b in ((draw(5, 9), draw(7, 9).T), (draw(9, 5).T, draw(9, 7)), (draw(2, 5, 9), draw(2, 7, 9).mT)):
        leaves = a.requires_grad_(), b.requires_grad_()
        gradients = torch.autograd.grad(triton_gemm.matmul(a, b).sum(), leaves)
        assert [x.stride() for x in gradients] == [x.stride() for x in leaves]


def test_only_the_gradients_that_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = noted(monkeypatch, plan, "multiply", lambda a, b, c, *_: tuple(c.shape))
    for which, products in (("x", [(20, 7), (20, 9)]), ("w", [(20, 7), (7, 9)]), ("bias", [(20, 7)])):
        values = {"x": draw(20, 9), "w": draw(7, 9), "bias": draw(7)}
        values[which].requires_grad_()
        calls.clear()
        generation.advance()  # no call is like one before
        c = triton_gemm.linear(values["x"], values["w"], values["bias"])
        kept = [x for x in c.grad_fn.saved_tensors if x is not None]
        assert len(kept) == {"x": 1, "w": 1, "bias": 0}[which]
        c.sum().backward()
        assert calls == products
    with torch.no_grad():
        assert not triton_gemm.linear(*values.values()).requires_grad


def test_gradients_of_out_dtype() -> None:
    a, b, input = leaves(draw(5, 9).half(), draw(9, 7).half(), draw(5, 7))
    grad = draw(5, 7, seed=3)
    triton_gemm.addmm(input, a, b, torch.float32, alpha=0.5).backward(grad)
    torch.testing.assert_close(input.grad, grad)
    assert a.grad is not None and a.grad.dtype == torch.float16
    torch.testing.assert_close(a.grad, 0.5 * (grad.half() @ b.T.detach()), rtol=1e-2, atol=1e-2)


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32], ids=str)
def test_the_gradient_of_a_bias_under_many_rows(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """In 16 bits a product with ones, which is torch's sum."""
    sizes = noted(monkeypatch, matrices, "compute", lambda x, *_: (*x.a.shape, x.b.shape[-1]))
    rows = ops.MANY_ROWS + 6
    a, b, grad = (torch.randint(-2, 3, size).to(dtype) for size in ((rows, 2), (2, 5), (rows, 5)))
    for shape in ((5,), (1, 5), (1, 1)):
        (bias,) = leaves(torch.randint(-2, 3, shape).to(dtype))
        for beta in (1.0, -2.0):
            sizes.clear()
            generation.advance()  # no call is like one before
            triton_gemm.addmm(bias, a, b, beta=beta).backward(grad)
            assert ((1, rows, 5) in sizes) == (dtype != torch.float32 and shape[-1] == 5)
            torch.testing.assert_close(bias.grad, beta * grad.sum_to_size(shape), rtol=0, atol=0)
            bias.grad = None


@pytest.mark.parametrize("columns", [1, 5])
@pytest.mark.parametrize("shape", ["", "1", "1 1", "rows 1", "columns", "rows columns"])
def test_the_gradient_of_what_broadcasts(shape: str, columns: int) -> None:
    """A number is of no dimensions, and is the only one that a product of one column has."""
    sizes = {"1": 1, "rows": 4, "columns": columns}
    values = draw(*(sizes[size] for size in shape.split()), seed=2), draw(4, 5), draw(5, columns)
    for beta in (1.0, -2.0):
        ours, theirs = leaves(*values), leaves(*values)
        triton_gemm.addmm(*ours, beta=beta).sin().sum().backward()
        torch.addmm(*theirs, beta=beta).sin().sum().backward()
        for x, y in zip(ours, theirs, strict=True):
            torch.testing.assert_close(x.grad, y.grad, rtol=1e-4, atol=1e-5)


def test_the_precision_is_the_gradients_too(monkeypatch: pytest.MonkeyPatch) -> None:
    used = []
    monkeypatch.setattr(plan, "multiply", lambda a, b, c, request, *_: (used.append(request.precision), c.zero_()))
    x, w = leaves(draw(4, 5), draw(3, 5))
    triton_gemm.linear(x, w, precision="bf16x6").sum().backward()
    assert used == ["bf16x6"] * 3


# --- torch.func ---

func = torch.func


def loss(function: Function) -> Function:
    return lambda a, b: function(a, b).sin().sum()


TRANSFORMS: dict[str, Callable[[Function], tuple[Function, tuple[torch.Tensor, ...]]]] = {
    "grad": lambda f: (func.grad(loss(f), (0, 1)), (draw(4, 5), draw(5, 3))),
    "grad of grad": lambda f: (
        func.grad(lambda a, b: func.grad(loss(f))(a, b).sin().sum(), (0, 1)), (draw(4, 5), draw(5, 3)),
    ),
    "hessian": lambda f: (func.hessian(loss(f), 1), (draw(2, 3), draw(3, 2))),
    "jacrev": lambda f: (func.jacrev(f, (0, 1)), (draw(2, 3), draw(3, 4))),
    "jacfwd": lambda f: (func.jacfwd(f, (0, 1)), (draw(2, 3), draw(3, 4))),
    "jacrev of jacrev": lambda f: (func.jacrev(func.jacrev(loss(f))), (draw(2, 3), draw(3, 2))),
    "jvp": lambda f: (lambda a, b: func.jvp(f, (a, b), (a.cos(), b.sin()))[1], (draw(4, 5), draw(5, 3))),
    "vmap": lambda f: (func.vmap(f), (draw(6, 4, 5), draw(6, 5, 3))),
    "vmap of one": lambda f: (func.vmap(f, (None, 2), 1), (draw(4, 5), draw(5, 3, 6))),
    "vmap of rows": lambda f: (func.vmap(f, (0, None)), (draw(6, 5), draw(5, 3))),
    "vmap of batches": lambda f: (func.vmap(f, (3, 0)), (draw(2, 4, 5, 6), draw(6, 5, 3))),
    "vmap of vmap": lambda f: (func.vmap(func.vmap(f, (0, None)), (None, 0)), (draw(6, 4, 5), draw(7, 5, 3))),
    "vmap of grad": lambda f: (func.vmap(func.grad(loss(f), (0, 1)), (0, None)), (draw(6, 4, 5), draw(5, 3))),
    "grad of vmap": lambda f: (
        func.grad(lambda a, b: func.vmap(loss(f), (0, None))(a, b).sum(), (0, 1)), (draw(6, 4, 5), draw(5, 3)),
    ),
    "functionalize": lambda f: (func.functionalize(f), (draw(4, 5), draw(5, 3))),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMS)
def test_func(name: str) -> None:
    ours, arguments = TRANSFORMS[name](triton_gemm.matmul)
    theirs, _ = TRANSFORMS[name](torch.matmul)
    torch.testing.assert_close(ours(*arguments), theirs(*arguments), rtol=1e-4, atol=1e-5)


def test_func_of_the_operator_itself() -> None:
    """As the compiler has it, which knows nothing of the API."""
    arguments = draw(4, 5), draw(5, 3)
    for transform in ("grad of grad", "vmap of grad", "grad of vmap"):
        ours, arguments = TRANSFORMS[transform](torch.ops.triton_gemm.gemm)
        torch.testing.assert_close(ours(*arguments), TRANSFORMS[transform](torch.matmul)[0](*arguments))


NESTED: dict[str, Callable[[Function], Function]] = {
    "jvp of jvp": lambda f: lambda x: func.jvp(lambda y: func.jvp(f, (y,), (y.cos(),))[1], (x,), (x.sin(),))[1],
    "jacfwd of jacfwd": lambda f: func.jacfwd(func.jacfwd(f)),
    "three times jacfwd": lambda f: func.jacfwd(func.jacfwd(func.jacfwd(f))),
    "jacfwd of jacfwd of jacrev": lambda f: func.jacfwd(func.jacfwd(func.jacrev(f))),
    "jacrev of jacfwd": lambda f: func.jacrev(func.jacfwd(f)),
}


@pytest.mark.parametrize("activation", [None, *ACTIVATIONS])
@pytest.mark.parametrize("name", NESTED)
def test_forward_derivatives_of_forward_derivatives(
    name: str, activation: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of an activation in the kernel, too; x is in both operands and in what is added."""
    monkeypatch.setattr(plan, "multiply", multiply_with_torch)
    x, w, row = draw(2, 2).double(), draw(2, 2, seed=1).double(), draw(2, seed=2).double()
    ours = NESTED[name](lambda x: triton_gemm.linear(x, x * w, x.sum(0) * row, activation))(x)
    theirs = NESTED[name](lambda x: torchs_linear(x, x * w, x.sum(0) * row, activation))(x)
    torch.testing.assert_close(ours, theirs, rtol=1e-9, atol=1e-9)


def test_func_of_products_of_others() -> None:
    """A transform whose own tensors a product has none of, as where weights are made of trained factors in it."""
    W, down, up = draw(5, 4), draw(2, 4).requires_grad_(), draw(5, 2).requires_grad_()
    rows = draw(3, 4)

    def results(matmul: Function, linear: Function) -> list[torch.Tensor]:
        def loss(row: torch.Tensor) -> torch.Tensor:
            return linear(row, W + matmul(up, down)).sin().sum()

        of_samples = torch.func.vmap(torch.func.grad(loss))(rows)
        total = torch.func.vmap(lambda row: row.sum() + matmul(up, down).sum())(rows).sum()
        return [of_samples, *torch.autograd.grad(of_samples.sum() + total, (up, down))]

    torch.testing.assert_close(
        results(triton_gemm.matmul, triton_gemm.linear), results(torch.matmul, torch.nn.functional.linear)
    )


def test_ensembles_and_gradients_per_sample() -> None:
    """Of a module's parameters, as torch.func has them."""
    ours, theirs = triton_gemm.nn.Linear(5, 3, activation="relu"), torch.nn.Linear(5, 3)
    theirs.load_state_dict(ours.state_dict())
    x = draw(6, 5)
    gradients = []
    for layer, activation in ((ours, torch.clone), (theirs, torch.relu)):

        def loss(parameters: Any, x: torch.Tensor, layer: Any = layer, activation: Any = activation) -> torch.Tensor:
            return activation(func.functional_call(layer, parameters, x)).sin().sum()

        gradients.append(func.vmap(func.grad(loss), (None, 0))(dict(layer.named_parameters()), x))
    torch.testing.assert_close(*gradients)
