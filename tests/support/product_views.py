"""What torch's products are tried on: views, batches that broadcast, the truth and its bound for whole batches."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

import triton_gemm
from perf.measure.numerics import accumulation_error, magnitude, reference, rounded
from tests.support.epilogue_truth import activated
from tests.support.product_checks import NAN
from tests.support.wrong_products import torchs
from triton_gemm.problem import GATES, PRODUCT, Request

View = Callable[[torch.Tensor], torch.Tensor]

# The same values, lying otherwise; what lies between them is NaN.
VIEWS: dict[str, View] = {
    "contiguous": lambda x: x,
    "column-major": lambda x: x.mT.contiguous().mT if x.dim() > 1 else x,
    "sliced": lambda x: torch.nn.functional.pad(x, (3, 5), value=NAN)[..., 3:-5],
    "every-other": lambda x: torch.stack([x, torch.full_like(x, NAN)], -1).flatten(-2)[..., ::2],
    "aligned": lambda x: torch.nn.functional.pad(x, (8, 16 - x.shape[-1] % 8), value=NAN)[..., 8 : 8 + x.shape[-1]],
    "rows-apart": lambda x: torch.stack([x, torch.full_like(x, NAN)], -2)[..., 0, :] if x.dim() > 1 else x,
    "batch-inside": lambda x: x.transpose(0, -2).contiguous().transpose(0, -2) if x.dim() > 2 else x,
    "batch-last": lambda x: x.movedim(0, -1).contiguous().movedim(-1, 0),
}
# One value, or one matrix, again and again.
EXPANDED: dict[str, View] = {
    "first-of-batch": lambda x: x[:1].expand_as(x),
    "first-of-rows": lambda x: x[..., :1].expand_as(x),
    "first-row": lambda x: x[..., :1, :].expand_as(x) if x.dim() > 1 else x,
    "first-element": lambda x: x[(slice(1),) * x.dim()].expand_as(x),
}

# Shapes of batches that broadcast.
BATCHES: dict[str, tuple[tuple[int, ...], tuple[int, ...]]] = {
    **{"none": ((), ()), "one": ((3,), (3,)), "left": ((3,), ()), "right": ((), (3,)), "of one": ((1,), (4,))},
    **{"two and none": ((2, 3), ()), "two and one": ((2, 3), (3,)), "outer": ((2, 1), (1, 3))},
    **{"middle": ((2, 1, 2), (3, 1)), "empty": ((0, 2), (2,))},
}


def draw(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(dtype)


def torchs_linear(
    x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None = None, activation: str | None = None
) -> torch.Tensor:
    return activated(torch.nn.functional.linear(x, w, bias), activation)


def torchs_gated(
    x: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    name: str,
    gate: torch.Tensor,
    gate_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """`linear` with a gate, in the operands' dtype."""
    return torchs_linear(x, gate, gate_bias, GATES[name]) * torch.nn.functional.linear(x, up, bias)


def assert_product(
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    out_dtype: torch.dtype | None = None,
) -> None:
    """c is alpha a @ b + beta input, as near as one rounding of sums in fp32 allows; vectors as torch.matmul has
    them."""
    beta = beta if input is not None else 0.0
    truth, size = (f(a, b, input, alpha, beta) for f in (reference, magnitude))
    before = accumulation_error(a.shape[-1] + 34, "fp64" if a.dtype == torch.float64 else "ieee") * size
    assert c.shape == truth.shape and c.dtype == (out_dtype or a.dtype)
    assert ((c.double() - truth).abs() <= rounded(before, truth, c.dtype)).all()


def assert_views_with_the_sign_turned(device: str) -> None:
    """Imaginary parts of conjugates: what lies in memory is their negative."""
    shapes = (20, 33), (33, 9), (9,), (20, 9)
    a, b, input, out = (torch.randn(shape, dtype=torch.complex64, device=device).conj().imag for shape in shapes)
    assert all(x.is_neg() for x in (a, b, input, out))
    for _ in range(2):
        assert_product(triton_gemm.linear(a, b.T, input), a, b, input)
        assert_product(triton_gemm.addmm(out, a, b), a, b, out)
        assert triton_gemm.mm(a, b, out=out) is out
        assert_product(out, a, b)


def assert_autocast_casts_as_torch(dtype: torch.dtype, device: str) -> None:
    a, b, c = (draw(*shape).to(device) for shape in ((2, 40, 50), (2, 50, 30), (30,)))
    calls: list[tuple[str, tuple[torch.Tensor, ...]]] = [
        *(("matmul", (a, b[0])), ("matmul", (a[0, 0], b)), ("matmul", (a[0], b[0].half())), ("bmm", (a, b))),
        *(("mm", (a[0], b[0].half())), ("mm", (a[0], b[0].bfloat16())), ("addmm", (c, a[0], b[0]))),
        *(("baddbmm", (c, a, b)), ("linear", (a, b[0].T, c)), ("mv", (b[0], c))),
    ]
    for name, arguments in calls:
        ours = getattr(triton_gemm, name)
        ours(*(x.float() for x in arguments))  # a call that could be repeated without checks
        with torch.autocast(device, dtype):
            found = ours(*arguments)
            if name != "mv" or device == "cuda":  # torch's list for CPUs lacks mv
                expected = torchs(name)(*arguments)
                assert (found.dtype, found.shape) == (expected.dtype, expected.shape), name
        *added, x, y = (z.to(dtype) for z in arguments)
        if name == "linear":
            x, y, added = added[0], x.mT, [y]
        assert_product(found, x, y, *added)
    with torch.autocast(device, dtype):
        assert triton_gemm.mm(a[0], b[0], out=torch.empty(40, 30, device=device)).dtype == torch.float32
        assert triton_gemm.mm(a[0], b[0], out_dtype=torch.float32).dtype == torch.float32


def assert_vmap_is_each(
    function: Callable[..., tuple[torch.Tensor, ...]], each: list[tuple[torch.Tensor, ...]], in_dims: tuple[Any, ...]
) -> None:
    """vmap of a function gives what the function gives for each element of the batch. An operand is stacked along its
    in_dim, or the first one is taken where that is None."""
    pairs = zip(zip(*each, strict=True), in_dims, strict=True)
    operands = [xs[0] if dim is None else torch.stack(xs, dim) for xs, dim in pairs]
    found = torch.func.vmap(function, in_dims)(*operands)
    for i in range(len(each)):
        own = [x if dim is None else x.select(dim, i) for x, dim in zip(operands, in_dims, strict=True)]
        torch.testing.assert_close([x[i] for x in found], list(function(*own)))


def compiled(call: Callable[..., Any], **how: Any) -> Callable[..., Any]:
    """In one graph."""
    torch._dynamo.reset()
    return torch.compile(call, fullgraph=True, **{"backend": "aot_eager", **how})


def traced(call: Callable[..., torch.Tensor], *operands: torch.Tensor) -> tuple[torch.Tensor, list[str]]:
    """The result of the compiled call, and the functions that its one graph calls."""
    graphs: list[torch.fx.GraphModule] = []

    def backend(graph: torch.fx.GraphModule, _: object) -> Callable[..., object]:
        graphs.append(graph)
        return graph.forward

    found = compiled(call, backend=backend)(*operands)
    return found, [str(node.target) for node in graphs[0].graph.nodes if node.op == "call_function"]


def assert_gradients_as_near_as_torchs(
    ours: Callable[..., torch.Tensor], torchs: Callable[..., torch.Tensor], operands: Sequence[torch.Tensor]
) -> None:
    """Of the sum of squares; each has the dtype of its operand."""
    found = []
    for function, dtype in ((ours, None), (torchs, None), (torchs, torch.float64)):
        own = [x.detach().to(dtype or x.dtype, copy=True).requires_grad_() for x in operands]
        function(*own).double().square().sum().backward()
        found.append([x.grad for x in own])
    assert_as_near_as_torchs(*found)


def assert_as_near_as_torchs(ours: Any, theirs: Any, truth: Any) -> None:
    """The error of each of our tensors is at most twice that of torch's."""
    for mine, other, exact in zip(ours, theirs, truth, strict=True):
        errors = [float((x.double() - exact).norm() / exact.norm()) for x in (mine, other)]
        assert errors[0] <= 2 * errors[1], errors


def multiply_with_torch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    request: Request = PRODUCT,
    auxiliary: tuple[torch.Tensor, ...] = (),
) -> None:
    """plan.multiply without a kernel, for what is made of many products and is about none of them."""
    product = request.alpha * (a @ b) if request.alpha else torch.zeros_like(c)
    last = request.beta * c if request.beta else torch.zeros(())
    if not request.residual:
        product += last
    *added, before = (*auxiliary, None) if not request.preactivation else auxiliary
    for bias in added:
        product += bias[:, None] if request.bias == "m" else bias
    if before is not None:
        before.copy_(product)
    c.copy_(activated(product, request.activation) + (last if request.residual else 0))
