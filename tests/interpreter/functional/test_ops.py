"""The operator within torch: derivatives of any order, torch.func, compile, export, autocast, checkpoints, FLOPs."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support.epilogue_truth import activated
from tests.support.noting import noted
from tests.support.processes import printed
from tests.support.product_views import draw, multiply_with_torch
from tests.support.tiers import one
from tests.support.wrong_products import torchs
from triton_gemm.functional import matrices, ops
from triton_gemm.problem import ACTIVATIONS, Request
from triton_gemm.runtime import plan
from triton_gemm.selection import generation

Function = Callable[..., torch.Tensor]


def torchs_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    return activated(torch.nn.functional.linear(x, w, bias), activation)


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
    x, w, bias, grad = (draw(*shape, dtype=dtype) for shape in ((2, 5, 9), (7, 9), (7,), (2, 5, 7)))
    for expanded in (False, True):
        ours, theirs = leaves(x, w, bias), leaves(x, w, bias)
        for function, values in ((triton_gemm.linear, ours), (torchs_linear, theirs)):
            result = function(*values, activation)
            result.backward(grad[:1, :1, :1].expand_as(grad) if expanded else grad)
        for a, b in zip(ours, theirs, strict=True):
            assert a.grad is not None and a.grad.dtype == dtype and a.grad.stride() == a.stride()
            torch.testing.assert_close(
                a.grad, b.grad, rtol=4 * torch.finfo(dtype).eps, atol=16 * torch.finfo(dtype).eps
            )


class Quantized(torch.Tensor):
    """A weight that implements F.linear and nothing else, as torchao's do (pytorch/ao#391)."""

    @classmethod
    def __torch_function__(cls, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if function is torch.nn.functional.linear:
            input, weight, bias = args
            return function(input, weight.as_subclass(torch.Tensor).round(), bias)  # type: ignore[attr-defined]
        if function in (torch.Tensor.t, torch.Tensor.mm, torch.Tensor.matmul):
            raise NotImplementedError(f"Quantized: {function}")
        return super().__torch_function__(function, types, args, kwargs or {})


@pytest.mark.parametrize("activation", [None, "relu"])
def test_a_layer_whose_weight_was_quantized(activation: Any) -> None:
    layer = triton_gemm.nn.Linear(5, 3, activation=activation)
    weight, x = layer.weight.detach() * 4, draw(2, 5)
    del layer.weight
    layer.weight = weight.as_subclass(Quantized)
    expected = torch.nn.functional.linear(x, weight.round(), layer.bias)
    torch.testing.assert_close(layer(x), expected if activation is None else expected.relu())


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
        kept = [x for x in c.grad_fn.saved_tensors if x is not None]  # type: ignore[union-attr]
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
            assert bias.grad is not None
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


@pytest.mark.parametrize(
    "in_dims", [(0, None, None), (None, 0, None), (None, None, 0), (0, None, 1), (0, 1, 1)], ids=str
)
@pytest.mark.parametrize("activation", [None, "silu"])
def test_vmap_of_a_layer(in_dims: tuple[int | None, ...], activation: str | None) -> None:
    x, w, bias = (
        draw(*shape) if dim is None else draw(*shape[:dim], 6, *shape[dim:])
        for shape, dim in zip(((2, 5, 9), (7, 9), (7,)), in_dims, strict=True)
    )
    ours, theirs = (
        func.vmap(lambda *v, f=f: f(*v, activation), in_dims)(x, w, bias) for f in (triton_gemm.linear, torchs_linear)
    )
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


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


def test_dual_numbers_without_func() -> None:
    a, b, tangent = draw(4, 5), draw(5, 3), draw(4, 5, seed=1)
    with torch.autograd.forward_ad.dual_level():
        c = triton_gemm.matmul(torch.autograd.forward_ad.make_dual(a, tangent), b)
        torch.testing.assert_close(torch.autograd.forward_ad.unpack_dual(c).tangent, tangent @ b)


@pytest.mark.parametrize("activation", [None, "gelu"])
def test_compile_of_forward_derivatives(activation: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """By torch.func, and by dual numbers, whose levels the compiled graph opens by itself."""
    monkeypatch.setattr(plan, "multiply", multiply_with_torch)
    x, tangent, w, row = draw(4, 5), draw(4, 5, seed=1), draw(3, 5), draw(3)

    def dual_numbers(f: Function) -> Function:
        def tangent_of(x: torch.Tensor, tangent: torch.Tensor) -> torch.Tensor:
            with torch.autograd.forward_ad.dual_level():
                return torch.autograd.forward_ad.unpack_dual(f(torch.autograd.forward_ad.make_dual(x, tangent))).tangent

        return tangent_of

    def jvp(f: Function) -> Function:
        return lambda x, tangent: func.jvp(f, (x,), (tangent,))[1]

    for transform in (jvp, dual_numbers, lambda f: jvp(lambda x: jvp(f)(x, x.sin()))):
        ours = compiled(transform(lambda x: triton_gemm.linear(x, w, row, activation)))
        theirs = transform(lambda x: torchs_linear(x, w, row, activation))
        torch.testing.assert_close(ours(x, tangent), theirs(x, tangent), rtol=1e-4, atol=1e-5)


# --- Tracing ---

SAMPLES: dict[str, tuple[Any, ...]] = {
    "matrices": (draw(4, 5), draw(5, 3)),
    "vmapped weights": (draw(2, 1, 4, 5), draw(3, 5, 3)),
    "scaled and added": (draw(4, 5), draw(5, 3), draw(4, 3), 0.5, 2.0),
    "row and activation": (draw(2, 4, 5), draw(3, 5).mT, draw(3), 1.0, 1.0, "gelu"),
    "out_dtype": (draw(4, 5).half(), draw(5, 3).half(), None, 1.0, 1.0, None, torch.float32),
    "precision": (draw(4, 5), draw(5, 3), None, 1.0, 1.0, "relu", None, "ieee"),
    "nothing": (draw(0, 5), draw(5, 3)),
}


@pytest.mark.parametrize("name", SAMPLES)
def test_opcheck(name: str) -> None:
    sample = SAMPLES[name]
    torch.library.opcheck(torch.ops.triton_gemm.gemm.default, sample)
    with_grad = tuple(x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x for x in sample)
    torch.library.opcheck(torch.ops.triton_gemm.gemm.default, with_grad)


class Block(torch.nn.Module):
    """Every function of the API."""

    def __init__(self) -> None:
        super().__init__()
        self.up = triton_gemm.nn.Linear(8, 16, activation="gelu")
        self.down = triton_gemm.nn.Linear(16, 8, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.down(self.up(x))
        scores = triton_gemm.bmm(x, x.mT)
        x = triton_gemm.baddbmm(x, scores, x, beta=0.5)
        x = triton_gemm.matmul(x, self.up.weight.mT)
        rows = triton_gemm.addmm(self.up.bias, x.flatten(0, 1), triton_gemm.mm(self.up.weight, self.down.weight))
        return rows.sum() + triton_gemm.mv(rows, self.up.bias).sum()


def compiled(module: Function, **how: Any) -> Function:
    torch._dynamo.reset()
    return torch.compile(module, fullgraph=True, **{"backend": "aot_eager", **how})


def test_compile_with_gradients() -> None:
    block, x = Block(), draw(2, 5, 8)
    block(x).backward()
    expected = [p.grad for p in block.parameters()]
    block.zero_grad()
    result = compiled(block)(x)
    torch.testing.assert_close(result, block(x))
    result.backward()
    torch.testing.assert_close([p.grad for p in block.parameters()], expected)


def test_compile_once_for_all_batches() -> None:
    frames = 0

    def count(graph: torch.fx.GraphModule, _: Any) -> Function:
        nonlocal frames
        frames += 1
        return graph.forward

    block = Block()
    call = compiled(block, backend=count, dynamic=True)
    for batch in (2, 3, 7):
        torch.testing.assert_close(call(draw(batch, 5, 8)), block(draw(batch, 5, 8)))
    assert frames == 1
    call = compiled(block, backend=count)  # dynamic from the second shape on
    for batch in (2, 3, 7, 9):
        call(draw(batch, 5, 8))
    assert frames == 3


def test_a_factor_may_vary_in_compiled_code() -> None:
    """As torch's: once as a constant, and then as a variable, by a backend that has such; and a tensor is one."""
    frames = torch._dynamo.testing.CompileCounter()
    call = compiled(lambda x, a, b, factor: triton_gemm.addmm(x, a, b, alpha=factor), backend=frames)
    x, a, b = draw(3), draw(4, 5), draw(5, 3)
    for factor in (1.5, 2.5, 3.5, 4.5, -1.0):
        torch.testing.assert_close(call(x, a, b, factor), torch.addmm(x, a, b, alpha=factor))
    assert frames.frame_count == 2
    torch.testing.assert_close(call(x, a, b, torch.tensor(2.0)), torch.addmm(x, a, b, alpha=2))


def test_compile_once_for_few_rows_and_many() -> None:
    """Though eager gradients of a bias are computed otherwise from 1024 rows on."""
    layer, frames = triton_gemm.nn.Linear(8, 4, dtype=torch.bfloat16), []
    call = torch.compile(layer, dynamic=True, backend=torch._dynamo.testing.CompileCounterWithBackend("aot_eager"))
    torch._dynamo.reset()
    for rows in (500, 700, ops.MANY_ROWS + 76, 1500):
        call(draw(rows, 8).bfloat16()).sum().backward()
        frames.append(torch._dynamo.utils.counters["stats"]["unique_graphs"])
    assert frames == [frames[0]] * 4


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
def test_compile_of_a_size_that_only_the_run_knows() -> None:
    """A batch of as many matrices as a mask has ones, forwards and backwards."""
    layer = triton_gemm.nn.Linear(8, 4)
    call = compiled(lambda x, mask: layer(x[mask.nonzero().squeeze(1)]).sin().sum())
    x, mask = draw(5, 3, 8).requires_grad_(), torch.tensor([1, 0, 1, 1, 0])
    found = torch.autograd.grad(call(x, mask), (x, layer.weight, layer.bias))
    expected = torch.autograd.grad(layer(x[mask.bool()]).sin().sum(), (x, layer.weight, layer.bias))
    torch.testing.assert_close(found, expected)


def first(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """As many rows of x as count, a tensor, says."""
    rows = count.item()
    torch._check(rows >= 0)  # type: ignore[operator]
    torch._check(rows <= x.shape[0])  # type: ignore[operator]
    return x[:rows]


def ones(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask.nonzero().squeeze(1)]


UNKNOWN: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda f, a, b, m, n: f.matmul(ones(a, m), b), ((5, 8), (8, 4))),
    "rows of a batch": (lambda f, a, b, m, n: f.matmul(first(a, n), b.mT), ((5, 3, 8), (4, 8))),
    "columns": (lambda f, a, b, m, n: f.mm(a, first(b, n).T), ((3, 8), (5, 8))),
    "two sums": (lambda f, a, b, m, n: f.mm(ones(a, m).T, ones(b, m.flip(0))), ((5, 8), (5, 4))),
    "two batches": (lambda f, a, b, m, n: f.matmul(ones(a, m), ones(b, m.flip(0))), ((5, 3, 8), (5, 8, 4))),
    "a batch and a fixed one": (lambda f, a, b, m, n: f.bmm(ones(a, m), b), ((5, 3, 8), (3, 8, 4))),
    "a batch and one": (lambda f, a, b, m, n: f.matmul(ones(a, m), b), ((5, 3, 8), (1, 8, 4))),
    "an outer batch": (lambda f, a, b, m, n: f.matmul(ones(a, m), b), ((5, 2, 3, 8), (2, 8, 4))),
    "vectors": (lambda f, a, b, m, n: f.mv(ones(a, m), b), ((5, 8), (8,))),
    "added": (lambda f, c, a, b, m, n: f.addmm(ones(c, m), ones(a, m), b), ((5, 4), (5, 8), (8, 4))),
    "a column added": (lambda f, c, a, b, m, n: f.addmm(ones(c, m), ones(a, m), b), ((5, 1), (5, 8), (8, 4))),
    "a batch added": (
        lambda f, c, a, b, m, n: f.baddbmm(ones(c, m), ones(a, m), ones(b, m)), ((5, 3, 4), (5, 3, 8), (5, 8, 4)),
    ),
}  # fmt: skip


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True, capture_scalar_outputs=True)
@pytest.mark.parametrize("name", UNKNOWN)
def test_compile_of_sizes_that_only_the_run_knows(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "multiply", multiply_with_torch)
    function, shapes = UNKNOWN[name]
    operands = [draw(*shape, seed=i).requires_grad_() for i, shape in enumerate(shapes)]
    mask, count = torch.tensor([1, 0, 1, 1, 0]), torch.tensor(3)
    call = compiled(lambda *x: function(triton_gemm, *x))
    ours, theirs = call(*operands, mask, count), function(torch, *operands, mask, count)
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)
    gradients = [torch.autograd.grad(c.sin().sum(), operands) for c in (ours, theirs)]
    torch.testing.assert_close(*gradients, rtol=1e-4, atol=1e-5)


SIZES = ((2, 4, 6), (3, 7, 6), (4, 9, 8), (5, 5, 5))  # batch, rows, columns

DYNAMIC: dict[str, tuple[str, Callable[[int, int, int], tuple[tuple[int, ...], ...]]]] = {
    "mm": ("mm", lambda batch, m, n: ((m, 5), (5, n))),
    "mv": ("mv", lambda batch, m, n: ((m, n), (n,))),
    "bmm": ("bmm", lambda batch, m, n: ((batch, m, 5), (batch, 5, n))),
    "one weight": ("matmul", lambda batch, m, n: ((batch, m, 5), (5, n))),
    "outer": ("matmul", lambda batch, m, n: ((batch, 3, m, 5), (3, 5, n))),
    "row": ("addmm", lambda batch, m, n: ((n,), (m, 5), (5, n))),
    "added": ("addmm", lambda batch, m, n: ((m, n), (m, 5), (5, n))),
    "batch added": ("baddbmm", lambda batch, m, n: ((n,), (batch, m, 5), (batch, 5, n))),
}


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("name", DYNAMIC)
def test_compile_once_for_all_sizes(name: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """As torch's own products; and no graph is traced twice, as one with a float for a variable is."""
    monkeypatch.setattr(plan, "multiply", multiply_with_torch)
    function, shapes = DYNAMIC[name]
    frames = torch._dynamo.testing.CompileCounterWithBackend("aot_eager")
    call = compiled(getattr(triton_gemm, function), backend=frames, dynamic=True)
    for sizes in SIZES:
        operands = [draw(*shape).requires_grad_(grad) for shape in shapes(*sizes)]
        c = call(*operands)
        torch.testing.assert_close(c, getattr(torch, function)(*operands), rtol=1e-4, atol=1e-5)
        if grad:
            c.sum().backward()
    assert frames.frame_count == 1


MULTIPLY: dict[str, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = {
    "mm": triton_gemm.mm,
    "matmul": triton_gemm.matmul,
    "bmm": lambda a, b: triton_gemm.bmm(a[None], b[None])[0],
    "addmm": lambda a, b: triton_gemm.addmm(a.new_zeros(1), a, b),
    "linear": lambda a, b: triton_gemm.linear(a, b.mT),
    "grouped_matmul": lambda a, b: triton_gemm.grouped_matmul(a, b[None], torch.tensor([len(a)], dtype=torch.int32)),
}


@pytest.mark.parametrize("name", MULTIPLY)
def test_compile_of_a_function_whose_backward_multiplies(name: str) -> None:
    """Dynamo traces a backward in a mode in which no tensor's layout may be asked for (pytorch#130736)."""
    multiply = MULTIPLY[name]

    class Product(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            ctx.save_for_backward(a, b)
            return a @ b

        @staticmethod
        def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
            a, b = ctx.saved_tensors
            return multiply(grad, b.mT), multiply(a.mT, grad)

    torch._dynamo.reset()
    a, b = (x.requires_grad_() for x in (draw(4, 6), draw(6, 5)))
    torch.compile(lambda a, b: Product.apply(a, b), fullgraph=True, backend="aot_eager")(a, b).sum().backward()
    ones = torch.ones(4, 5)
    torch.testing.assert_close(a.grad, ones @ b.detach().mT)
    torch.testing.assert_close(b.grad, a.detach().mT @ ones)


def test_a_backward_by_compiled_autograd() -> None:
    a, b = draw(4, 5).requires_grad_(), draw(5, 3).requires_grad_()
    c = triton_gemm.matmul(a, b).sin().sum()
    expected = torch.autograd.grad(c, (a, b), retain_graph=True)
    torch._dynamo.reset()
    with torch._dynamo.compiled_autograd._enable(torch.compile(backend="aot_eager")):
        c.backward()
    torch.testing.assert_close((a.grad, b.grad), expected)


def test_compile_of_transforms_and_out() -> None:
    a, b = draw(6, 4, 5), draw(5, 3)
    f, _ = TRANSFORMS["vmap of grad"](triton_gemm.matmul)
    torch.testing.assert_close(compiled(f)(a, b), f(a, b))
    into = compiled(lambda a, b, out: triton_gemm.matmul(a, b, out=out))
    out = torch.empty(6, 4, 3)
    assert into(a, b, out) is out
    torch.testing.assert_close(out, a @ b)


@pytest.mark.full
@pytest.mark.slow
def test_compile_by_inductor() -> None:
    block, x = Block(), draw(2, 5, 8)
    result = compiled(block, backend="inductor")(x)
    torch.testing.assert_close(result, block(x), rtol=1e-4, atol=1e-4)
    result.backward()


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict: bool) -> None:
    block, batch = Block().eval(), torch.export.Dim("batch")
    with torch.no_grad():
        program = torch.export.export(block, (draw(2, 5, 8),), dynamic_shapes=({0: batch},), strict=strict)
    program = program.run_decompositions()
    targets = [str(node.target) for node in program.graph.nodes]
    assert targets.count("triton_gemm.gemm.default") == 8
    assert not any("gelu" in target for target in targets), "the activation is in the product"
    buffer = io.BytesIO()
    torch.export.save(program, buffer)
    buffer.seek(0)
    loaded = torch.export.load(buffer).module()
    with torch.no_grad():  # as it was exported: the activation is in the product
        for x in (draw(2, 5, 8), draw(7, 5, 8)):
            torch.testing.assert_close(loaded(x), block(x))


@pytest.mark.full
def test_a_package_compiled_ahead_of_time_holds_the_operator(tmp_path: Path) -> None:
    """By AOTInductor, for any batch; torch's own products it calls past the dispatcher, where nothing is routed."""
    layer, x = triton_gemm.nn.Linear(16, 8, activation="relu"), draw(4, 16)
    shapes = ({0: torch.export.Dim("batch", min=2, max=64)},)
    with torch.no_grad():
        exported = torch.export.export(layer, (x,), dynamic_shapes=shapes)
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "layer.pt2"))
        loaded = torch._inductor.aoti_load_package(package)
        for rows in (4, 9):
            x = draw(rows, 16)
            assert torch.equal(loaded(x), layer(x))


def test_tracing_and_modes_see_the_operator() -> None:
    a, b = draw(4, 5), draw(5, 3)
    triton_gemm.matmul(a, b)  # also a call that could be repeated without checks
    for mode in ("real", "fake", "symbolic"):
        graph = make_fx(lambda a, b: triton_gemm.matmul(a, b), tracing_mode=mode)(a, b).graph
        assert [str(node.target) for node in graph.nodes if node.op == "call_function"] == ["triton_gemm.gemm.default"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_the_old_tracer_sees_the_operator() -> None:
    layer, x = triton_gemm.nn.Linear(5, 3, activation="relu"), draw(4, 5)
    with torch.no_grad():
        traced = torch.jit.trace(layer, x)
    torch.testing.assert_close(traced(2 * x), layer(2 * x))


def test_meta_tensors() -> None:
    a, b = draw(2, 4, 5).to("meta"), draw(5, 3).to("meta").requires_grad_()
    c = triton_gemm.matmul(a, b)
    assert c.shape == (2, 4, 3) and c.is_meta
    c.backward(torch.empty_like(c))
    assert b.grad is not None and b.grad.shape == b.shape
    assert triton_gemm.mm(a[0].half(), b.half(), torch.float32).dtype == torch.float32


def test_flops() -> None:
    """Two for each multiply-add; the backward of a layer is two more products."""
    layer, x = triton_gemm.nn.Linear(9, 7, activation="relu"), draw(2, 5, 9).requires_grad_()
    with FlopCounterMode(display=False) as counter:
        layer(x).sum().backward()
    assert counter.get_total_flops() == 3 * 2 * 10 * 9 * 7
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        triton_gemm.matmul(draw(2, 1, 4, 5), draw(3, 5, 6))
    assert counter.get_total_flops() == 2 * 2 * 3 * 4 * 5 * 6


# --- Autocast ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_autocast_casts_as_torch(dtype: torch.dtype) -> None:
    a, b, c = draw(2, 4, 5), draw(2, 5, 3), draw(3)
    calls: list[tuple[str, tuple[Any, ...]]] = [
        *(("matmul", (a, b[0])), ("matmul", (a[0], b[0].half())), ("mm", (a[0], b[0].bfloat16())), ("bmm", (a, b))),
        *(("addmm", (c, a[0], b[0])), ("baddbmm", (c, a, b)), ("linear", (a, b[0].T, c))),
    ]
    for name, arguments in calls:
        with torch.autocast("cpu", dtype):
            expected, found = torchs(name)(*arguments), getattr(triton_gemm, name)(*arguments)
        assert found.dtype == expected.dtype == dtype, name
        torch.testing.assert_close(found, expected)
    with torch.autocast("cpu", dtype):
        assert triton_gemm.mv(b[0], c).dtype == dtype, "as torch's on CUDA; its list for CPUs lacks mv"
        assert triton_gemm.mm(a[0], b[0], out=torch.empty(4, 3)).dtype == torch.float32
        assert triton_gemm.mm(a[0], b[0], torch.float32).dtype == torch.float32
        with pytest.raises(RuntimeError, match="to have the same dtype"):
            triton_gemm.mm(a[0].double(), b[0])
        with torch.autocast("cpu", enabled=False):
            assert triton_gemm.matmul(a, b).dtype == torch.float32
        with pytest.raises(ValueError, match="precision says how fp32 is multiplied, and operands are torch"):
            triton_gemm.matmul(a, b, precision="ieee")


def test_autocast_in_training_and_compiled() -> None:
    layer, x = triton_gemm.nn.Linear(9, 7), draw(2, 5, 9)
    for call in (layer, compiled(layer)):
        layer.zero_grad()
        with torch.autocast("cpu", torch.bfloat16):
            result = call(x)
        result.sum().backward()
        assert result.dtype == torch.bfloat16 and layer.weight.grad is not None
        assert layer.weight.grad.dtype == torch.float32


# --- Modules and checkpoints ---


def test_linear_is_a_drop_in() -> None:
    theirs = torch.nn.Linear(9, 7)
    ours = triton_gemm.nn.Linear(9, 7)
    assert isinstance(ours, torch.nn.Linear) and list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    for x in (draw(9), draw(4, 9), draw(2, 3, 9)):
        torch.testing.assert_close(ours(x), theirs(x))
    torch.manual_seed(0)
    ours = triton_gemm.nn.Linear(9, 7, False, dtype=torch.float16, activation="silu")
    torch.manual_seed(0)
    theirs = torch.nn.Linear(9, 7, False, dtype=torch.float16)
    assert ours.bias is None and torch.equal(ours.weight, theirs.weight)
    torch.testing.assert_close(ours(draw(4, 9).half()), torch.nn.functional.silu(theirs(draw(4, 9).half())))


def test_linear_says_how_it_computes() -> None:
    layer = triton_gemm.nn.Linear(9, 7, activation="relu", precision="tf32")
    assert repr(layer) == "Linear(in_features=9, out_features=7, bias=True, activation='relu', precision='tf32')"
    assert repr(triton_gemm.nn.Linear(9, 7)) == repr(torch.nn.Linear(9, 7))
    with pytest.raises(ValueError, match=r"Linear\(\): activation must be one of"):
        triton_gemm.nn.Linear(9, 7, activation="tanh")
    with pytest.raises(ValueError, match=r"Linear\(\): swiglu takes a second weight: call linear .* with gate="):
        triton_gemm.nn.Linear(9, 7, activation="swiglu")
    with pytest.raises(ValueError, match=r"Linear\(\): precision says how fp32"):
        triton_gemm.nn.Linear(9, 7, dtype=torch.float16, precision="tf32")


def test_linear_is_copied_and_pickled() -> None:
    layer, x = triton_gemm.nn.Linear(9, 7, activation="gelu"), draw(4, 9)
    buffer = io.BytesIO()
    torch.save(layer, buffer)
    buffer.seek(0)
    for other in (copy.deepcopy(layer), pickle.loads(pickle.dumps(layer)), torch.load(buffer, weights_only=False)):
        assert torch.equal(other(x), layer(x)) and other.activation == "gelu"


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpoints(reentrant: bool) -> None:
    layers = torch.nn.Sequential(triton_gemm.nn.Linear(9, 7, activation="gelu"), triton_gemm.nn.Linear(7, 9))
    gradients = []
    for run in (layers, lambda x: checkpoint(layers, x, use_reentrant=reentrant)):
        x = draw(4, 9).requires_grad_()
        layers.zero_grad()
        run(x).sin().sum().backward()
        gradients.append([x.grad, *(p.grad for p in layers.parameters())])
    # Without gradients, as the reentrant one first runs it, the activation is fused and rounds once less.
    torch.testing.assert_close(*gradients, **({} if reentrant else {"rtol": 0, "atol": 0}))


def test_a_checkpoint_of_the_operator_itself() -> None:
    """Which computes again in its backward what the activation was applied to; a checkpoint gives tensors once."""
    a, b = draw(4, 5).requires_grad_(), draw(5, 3).requires_grad_()
    gradients = []
    for call in (gelu_of_product, lambda *operands: checkpoint(gelu_of_product, *operands, use_reentrant=False)):
        gradients.append(torch.autograd.grad(call(a, b).sum(), (a, b)))
    torch.testing.assert_close(*gradients, rtol=0, atol=0)


def gelu_of_product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    c: torch.Tensor = torch.ops.triton_gemm.gemm(a, b, None, 1.0, 1.0, "gelu")
    return c


def test_the_operator_refuses_two_dtypes() -> None:
    with pytest.raises(RuntimeError, match=r"torch\.float32 and torch\.float16 cannot be multiplied"):
        torch.ops.triton_gemm.gemm(draw(4, 5), draw(5, 3).half())


def test_a_subclass_stays_one() -> None:
    class Tagged(torch.Tensor):
        pass

    a, b = draw(4, 5).as_subclass(Tagged), draw(5, 3)
    assert type(triton_gemm.matmul(a, b)) is Tagged
    torch.testing.assert_close(triton_gemm.matmul(a, b).as_subclass(torch.Tensor), triton_gemm.matmul(draw(4, 5), b))


RELOADED = """
import importlib, sys, warnings
warnings.simplefilter("error")
import torch, triton_gemm
from torch.utils.flop_counter import FlopCounterMode

def multiplies(tg):
    a, b = torch.randn(3, 5, 7, requires_grad=True), torch.randn(7, 4)
    c = tg.matmul(a, b)
    torch.testing.assert_close(c, a @ b)
    torch.testing.assert_close(torch.autograd.grad(c.sum(), a)[0], b.sum(1).expand(3, 5, 7))
    torch.testing.assert_close(torch.vmap(tg.matmul, (0, None))(a, b), a @ b)
    with FlopCounterMode(display=False) as flops:
        tg.matmul(a, b)
    assert flops.get_total_flops() == 2 * 3 * 5 * 7 * 4
    offs = torch.tensor([2, 5], dtype=torch.int32)
    tg.grouped_matmul(a[0], b.expand(2, 7, 4), offs).sum().backward()

multiplies(triton_gemm)
for name in ("ops", "grouped", "scaled", "ops"):
    importlib.reload(importlib.import_module(f"triton_gemm.functional.{name}"))
    multiplies(triton_gemm)
for name in [name for name in sys.modules if name.partition(".")[0] == "triton_gemm"]:
    del sys.modules[name]
import triton_gemm as again
assert again is not triton_gemm
multiplies(again)
"""


def test_modules_can_be_loaded_again() -> None:
    """As IPython's autoreload does it, and tests that delete modules."""
    printed(RELOADED)
