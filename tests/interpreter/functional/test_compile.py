"""The operator in graphs: compiled, exported, traced, and without memory."""

from __future__ import annotations

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support.product_views import compiled, draw, multiply_with_torch, torchs_linear
from tests.support.tiers import one
from triton_gemm.functional import ops
from triton_gemm.runtime import plan

Function = Callable[..., torch.Tensor]


SAMPLES: dict[str, tuple[Any, ...]] = {
    "matrices": (draw(4, 5), draw(5, 3)),
    "vmapped weights": (draw(2, 1, 4, 5), draw(3, 5, 3)),
    "scaled and added": (draw(4, 5), draw(5, 3), draw(4, 3), 0.5, 2.0),
    "row and activation": (draw(2, 4, 5), draw(3, 5).mT, draw(3), 1.0, 1.0, "gelu"),
    "out_dtype": (draw(4, 5).half(), draw(5, 3).half(), None, 1.0, 1.0, None, torch.float32),
    "precision": (draw(4, 5), draw(5, 3), None, 1.0, 1.0, "relu", None, "ieee"),
    "nothing": (draw(0, 5), draw(5, 3)),
}
# And keyword arguments, of both operators.
BOTH: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {
    "activation": ((draw(20, 33), draw(33, 9), draw(9), 1, 1, "relu"), {}),
    "residual": ((draw(20, 33), draw(33, 9), draw(9), 1, 1, "gelu"), {"residual": draw(20, 9)}),
    "gate": (
        (*(draw(*shape).bfloat16() for shape in ((3, 8), (8, 16), (16,))), 1, 1, "gelu"),
        {"gate": draw(8, 16, seed=1).bfloat16(), "gate_bias": draw(16, seed=1).bfloat16()},
    ),
}


def with_grad(x: Any) -> Any:
    return x.detach().requires_grad_() if isinstance(x, torch.Tensor) else x


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("name", [*SAMPLES, *BOTH])
def test_opcheck(name: str) -> None:
    of_torch = torch.ops.triton_gemm
    arguments, named = BOTH.get(name) or (SAMPLES[name], {})
    torch.library.opcheck(of_torch.gemm.default, arguments, named)
    arguments, named = tuple(map(with_grad, arguments)), {key: with_grad(x) for key, x in named.items()}
    for operator in (of_torch.gemm.default, of_torch.gemm_for_backward.default)[: 1 + (name in BOTH)]:
        torch.library.opcheck(operator, arguments, named)


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


@pytest.mark.parametrize("backend", ["aot_eager", pytest.param("inductor", marks=[pytest.mark.full, pytest.mark.slow])])
def test_compile_with_gradients(backend: str) -> None:
    block, x = Block(), draw(2, 5, 8)
    block(x).backward()
    expected = [p.grad for p in block.parameters()]
    block.zero_grad()
    result = compiled(block, backend=backend)(x)
    torch.testing.assert_close(result, block(x), rtol=1e-4, atol=1e-4)
    result.backward()
    torch.testing.assert_close([p.grad for p in block.parameters()], expected, rtol=1e-4, atol=1e-4)


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


def first(x: torch.Tensor, count: torch.Tensor) -> torch.Tensor:
    """As many rows of x as count, a tensor, says."""
    rows = count.item()
    torch._check(rows >= 0)
    torch._check(rows <= x.shape[0])
    return x[:rows]


def ones(x: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
    return x[mask.nonzero().squeeze(1)]


UNKNOWN: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "rows": (lambda f, a, b, m, n: f.matmul(ones(a, m), b), ((5, 8), (8, 4))),
    "rows of a batch": (lambda f, a, b, m, n: f.matmul(first(a, n), b.mT), ((5, 3, 8), (4, 8))),
    "columns": (lambda f, a, b, m, n: f.mm(a, first(b, n).T), ((3, 8), (5, 8))),
    "a layer": (
        lambda f, a, w, bias, m, n: getattr(f, "linear", torch.nn.functional.linear)(ones(a, m), w, bias),
        ((5, 3, 8), (4, 8), (4,)),
    ),
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
    f = torch.func.vmap(torch.func.grad(lambda a, b: triton_gemm.matmul(a, b).sin().sum(), (0, 1)), (0, None))
    torch.testing.assert_close(compiled(f)(a, b), f(a, b))
    into = compiled(lambda a, b, out: triton_gemm.matmul(a, b, out=out))
    out = torch.empty(6, 4, 3)
    assert into(a, b, out) is out
    torch.testing.assert_close(out, a @ b)


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
        return lambda x, tangent: torch.func.jvp(f, (x,), (tangent,))[1]

    for transform in (jvp, dual_numbers, lambda f: jvp(lambda x: jvp(f)(x, x.sin()))):
        ours = compiled(transform(lambda x: triton_gemm.linear(x, w, row, activation)))
        theirs = transform(lambda x: torchs_linear(x, w, row, activation))
        torch.testing.assert_close(ours(x, tangent), theirs(x, tangent), rtol=1e-4, atol=1e-5)
