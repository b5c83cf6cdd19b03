"""triton_gemm.scaled_matmul in Triton's interpreter: every kind of scales, and what it says to mistakes."""

from __future__ import annotations

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch.autograd import forward_ad
from torch.utils.flop_counter import FlopCounterMode

import triton_gemm
from tests.support.awkward_sizes import EMPTY
from tests.support.epilogue_truth import activated, assert_scaled, assert_scales_keep_every_bit
from tests.support.product_checks import NAN
from tests.support.tiers import one
from triton_gemm.problem import ACTIVATIONS
from triton_gemm.runtime import plan

E4M3, E5M2, INT8 = torch.float8_e4m3fn, torch.float8_e5m2, torch.int8
DTYPES = [E4M3, E5M2, INT8]
BY_DTYPE = pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
SIZES = [(45, 70, 300), (1, 70, 130), (70, 1, 130), (1, 1, 1), (128, 256, 256), (20, 30, 0)]


def draw(dtype: torch.dtype, rows: int, columns: int) -> torch.Tensor:
    if dtype == INT8:
        return torch.randint(-128, 128, (rows, columns), dtype=dtype)
    return torch.randn(rows, columns).to(dtype)


def draw_scales(kind: str, M: int, N: int, K: int) -> tuple[torch.Tensor, torch.Tensor]:
    """By torch's conventions, and of values that no one of them can stand for the others."""
    shapes = {
        "tensor": ((), (1,)),
        "rows": ((M, 1), (1, N)),
        "rows-and-tensor": ((M, 1), (1, 1)),
        "tensor-and-rows": ((1,), (1, N)),
        "blocks": ((M, -(-K // 128)), (-(-K // 128), -(-N // 128))),
    }[kind]
    a, b = (2.0 ** torch.randint(-3, 4, shape) * (1 + torch.rand(shape)) for shape in shapes)
    return a, b


@pytest.mark.few(shows=lambda dtype, kind, size: {(dtype, kind), size})
@pytest.mark.parametrize("size", SIZES, ids=str)
@pytest.mark.parametrize(
    ("dtype", "kind"),
    [
        pytest.param(dtype, kind, id=f"{str(dtype).removeprefix('torch.')}-{kind}")
        for kind in ("tensor", "rows", "rows-and-tensor", "tensor-and-rows", "blocks")
        for dtype in (DTYPES[:2] if kind == "blocks" else DTYPES)
    ],
)
def test_every_kind_of_scales(dtype: torch.dtype, kind: str, size: tuple[int, int, int]) -> None:
    M, N, K = size
    a, b, scales = draw(dtype, M, K), draw(dtype, K, N), draw_scales(kind, M, N, K)
    for right, out_dtype in ((b, torch.bfloat16), (b.T.contiguous().T, torch.float32)):
        c = triton_gemm.scaled_matmul(a, right, *scales, out_dtype=out_dtype)
        assert c.dtype == out_dtype
        assert_scaled(a, b, *scales, c)
    assert triton_gemm.scaled_matmul(a, b, *scales).dtype == torch.bfloat16


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_a_bias_is_added_after_the_scales(kind: str, out_dtype: torch.dtype) -> None:
    M, N, K = 33, 50, 140
    for dtype in DTYPES[: 2 if kind == "blocks" else 3]:
        a, b, scales = draw(dtype, M, K), draw(dtype, K, N), draw_scales(kind, M, N, K)
        scales = (scales[0] / 64, scales[1] / 64)
        for bias in (torch.randn(N), torch.randn(2 * N).bfloat16()[::2]):
            c = triton_gemm.scaled_matmul(a, b, *scales, bias=bias, out_dtype=out_dtype)
            assert_scaled(a, b, *scales, c, bias)


@pytest.mark.few
@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
@pytest.mark.parametrize("name", ACTIVATIONS)
def test_an_activation_comes_after_scales_and_bias(name: str, kind: str) -> None:
    M, N, K = 33, 50, 140
    for dtype in DTYPES[: 2 if kind == "blocks" else 3]:
        a, b, scales = draw(dtype, M, K), draw(dtype, K, N), draw_scales(kind, M, N, K)
        how = {"bias": torch.randn(N), "out_dtype": torch.float32}
        scales = (scales[0] / 64, scales[1] / 64)
        truth = activated(triton_gemm.scaled_matmul(a, b, *scales, **how).double(), name)
        c = triton_gemm.scaled_matmul(a, b, *scales, **how, activation=name)
        assert ((c.double() - truth).abs() <= 2.0**-20 * (truth.abs() + 1)).all()
    torch._dynamo.reset()
    compiled = torch.compile(triton_gemm.scaled_matmul, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(a, b, *scales, **how, activation=name), c)
    with pytest.raises(ValueError, match=r"scaled_matmul\(\): activation must be one of"):
        triton_gemm.scaled_matmul(a, b, *scales, activation="tanh")


@BY_DTYPE
def test_fast_sums(dtype: torch.dtype) -> None:
    """Which int8 has no need of."""
    a, b, scales = draw(dtype, 33, 300), draw(dtype, 300, 50), draw_scales("rows", 33, 50, 300)
    c = triton_gemm.scaled_matmul(a, b, *scales, use_fast_accum=True)
    assert_scaled(a, b, *scales, c, fast=True)
    precisions = {found.selection.precision for key, found in plan.PLANS.items() if dtype in key}
    assert ("fp8 fast" in precisions) == (dtype != INT8)


def test_operands_and_scales_of_any_strides() -> None:
    a, b = draw(E4M3, 600, 45).T[:, ::2], draw(E4M3, 70, 301)[:, 1:].T
    scale_a, scale_b = (x.T.contiguous().T for x in draw_scales("blocks", 45, 70, 300))
    c = triton_gemm.scaled_matmul(a, b, scale_a, scale_b, out_dtype=torch.float32)
    assert_scaled(a, b, scale_a, scale_b, c)


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_scales_and_a_bias_that_are_negative_views(kind: str) -> None:
    """Whose sign torch changes without touching memory: `.conj().imag`."""
    a, b = draw(E4M3, 33, 140), draw(E4M3, 140, 50)
    negative = [
        torch.complex(torch.zeros_like(x), x).conj().imag for x in (*draw_scales(kind, 33, 50, 140), torch.randn(50))
    ]
    assert all(x.is_neg() for x in negative)
    c = triton_gemm.scaled_matmul(a, b, *negative[:2], bias=negative[2], out_dtype=torch.float32)
    assert_scaled(a, b, *negative[:2], c, negative[2])


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("kind", ["tensor", "rows", "rows-and-tensor", "tensor-and-rows", "blocks"])
@settings(max_examples=12, deadline=None)
@example(of_a=-106, of_both=-146)
@example(of_a=120, of_both=0)
@example(of_a=-120, of_both=0)
@given(of_a=st.integers(-110, 110), of_both=st.integers(-150, 90))
def test_scales_of_any_size_keep_every_bit(kind: str, of_a: int, of_both: int) -> None:
    """Also where one would make a sum infinite and the other subnormal, or where the product of both is either; of
    blocks only where that is neither."""
    of_both = max(of_both, -110) if kind == "blocks" else of_both
    a, b, scales = draw(E5M2, 33, 140), draw(E5M2, 140, 50), draw_scales(kind, 33, 50, 140)
    assert_scales_keep_every_bit(a, b, scales, [(of_a, min(max(of_both - of_a, -120), 120))])


ENDS = {  # scales, and what they make of 1; the smallest is the least that docs/precision.md names
    "smallest": (1.5 * 2.0**-125, 1.25 * 2.0**127, 7.5),
    "largest": (1.75 * 2.0**127, 2.0**-125, 7.0),
    "subnormal": (3 * 2.0**-149, 1.25 * 2.0**100, 3.75 * 2.0**-49),
    "zero": (0.0, 3e38, 0.0),
    "infinity": (torch.inf, 2.0**-125, torch.inf),
    "nan": (torch.nan, 0.0, torch.nan),
    "too small": (2.0**-125, 2.0**-125, 0.0),
    "too large": (-1e38, 1e38, -torch.inf),
}


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("kind", ["tensor", "rows"])
@pytest.mark.parametrize("name", ENDS)
def test_scales_at_the_ends_of_fp32(name: str, kind: str, turned: bool) -> None:
    *scales, expected = ENDS[name]
    one = torch.ones(1, 1)
    a, b = (scale * (one if kind == "tensor" else one.expand(3, 1)) for scale in scales[:: -1 if turned else 1])
    c = triton_gemm.scaled_matmul(
        one.expand(3, 1).to(E4M3), one.expand(1, 3).to(E4M3), a, b.mT, out_dtype=torch.float32
    )
    assert torch.equal(c, torch.full((3, 3), expected)) or (c.isnan().all() and name == "nan")


@pytest.mark.parametrize("kind", ["tensor", "rows"])
def test_no_scales_make_a_zero_nan(kind: str) -> None:
    large = torch.full((1, 1) if kind == "tensor" else (3, 1), 1e28)
    c = triton_gemm.scaled_matmul(torch.zeros(3, 5).to(E4M3), draw(E4M3, 5, 3), large, large.mT)
    assert (c == 0).all()


@pytest.mark.parametrize("size", EMPTY.values(), ids=EMPTY)
def test_empty(size: tuple[int, int, int]) -> None:
    M, N, K = size
    c = triton_gemm.scaled_matmul(draw(E4M3, M, K), draw(E4M3, K, N), torch.ones(()), torch.ones(()))
    assert c.shape == (M, N)


def test_operands_are_not_changed_and_nothing_of_them_is_lost() -> None:
    a, b = torch.full((3, 5), NAN).to(E4M3), draw(E4M3, 5, 7)
    assert triton_gemm.scaled_matmul(a, b, torch.ones(()), torch.ones(())).isnan().all()
    assert a.float().isnan().all()


# --- Mistakes ---

ONE = torch.ones(())
MISTAKES = {
    "inner sizes": ({"b": draw(E4M3, 7, 3)}, RuntimeError, "shapes cannot be multiplied"),
    "one dimension": ({"a": draw(E4M3, 1, 5)[0]}, RuntimeError, "must be a matrix"),
    "not a tensor": ({"b": [[1.0]]}, TypeError, r"argument 'b' \(position 2\) must be Tensor, not list"),
    "another dtype": ({"a": draw(E5M2, 4, 5)}, RuntimeError, "to have the same dtype"),
    "bf16": (
        {"a": torch.zeros(4, 5).bfloat16(), "b": torch.zeros(5, 3).bfloat16()},
        NotImplementedError,
        "torch.bfloat16.*it takes torch.float8_e4m3fn, torch.float8_e5m2, torch.int8",
    ),
    "out_dtype": ({"out_dtype": torch.float64}, ValueError, "out_dtype must be one of torch.bfloat16, .*float64"),
    "scales of fp16": ({"scale_a": ONE.half()}, ValueError, "scale_a must be fp32 on cpu, not torch.float16 on cpu"),
    "scales elsewhere": ({"scale_b": ONE.to("meta")}, ValueError, "scale_b must be fp32 on cpu, .* on meta"),
    "a long bias": ({"bias": torch.ones(4)}, ValueError, r"bias must be \[3\] of torch.bfloat16, .* on cpu"),
    "a bias of fp64": ({"bias": torch.ones(3).double()}, ValueError, r"not \[3\] of torch.float64 on cpu"),
    "too few scales": ({"scale_a": torch.ones(3, 1)}, ValueError, r"\[4, 1\] and \[1, 3\].* not \[3, 1\] and \[\]"),
    "scales that lie down": ({"scale_a": torch.ones(1, 4), "scale_b": torch.ones(1, 3)}, ValueError, "one number each"),
    "fast blocks": (
        {
            **{"a": draw(E4M3, 4, 300), "b": draw(E4M3, 300, 200), "use_fast_accum": True},
            **{"scale_a": torch.ones(4, 3), "scale_b": torch.ones(3, 2)},
        },
        ValueError,
        "use_fast_accum leaves sums where no block of them could be scaled",
    ),
    "blocks of int8": (
        {
            **{"a": draw(INT8, 4, 300), "b": draw(INT8, 300, 200)},
            **{"scale_a": torch.ones(4, 3), "scale_b": torch.ones(3, 2)},
        },
        ValueError,
        "or of fp8",
    ),
}


@pytest.mark.parametrize(("changes", "kind", "text"), MISTAKES.values(), ids=MISTAKES)
def test_a_mistake_is_named(changes: dict[str, object], kind: type[Exception], text: str) -> None:
    call = {"a": draw(E4M3, 4, 5), "b": draw(E4M3, 5, 3), "scale_a": ONE, "scale_b": ONE, **changes}
    with pytest.raises(kind, match=text):
        triton_gemm.scaled_matmul(**call)


# --- It has no derivative, as torch's ---


def graph_of(name: str) -> tuple[dict[str, torch.Tensor], torch.Tensor]:
    """Arguments of which the one of that name requires grad, and it."""
    arguments = {
        "a": draw(E4M3, 16, 32),
        "b": draw(E4M3, 16, 32).T,
        "scale_a": torch.ones(()),
        "scale_b": torch.ones(()),
    }
    arguments["bias"] = torch.ones(16, dtype=torch.bfloat16)
    return arguments, arguments[name].detach().requires_grad_()


def by_torch(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    *positional, bias = arguments.values()
    return torch._scaled_mm(*positional, bias=bias, out_dtype=torch.bfloat16)


def by_us(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    return triton_gemm.scaled_matmul(**arguments)


def by_the_operator(arguments: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.ops.triton_gemm.scaled_gemm(*arguments.values(), torch.bfloat16, False)


CALLS = {"torch": by_torch, "ours": by_us, "operator": by_the_operator}


@pytest.mark.parametrize("name", ["a", "b", "scale_a", "scale_b", "bias"])
@pytest.mark.parametrize("call", CALLS)
def test_what_requires_grad_is_refused(call: str, name: str) -> None:
    """At once, but for operators, as torch's own: these compute it, and their backward raises."""
    arguments, leaf = graph_of(name)
    plain = CALLS[call](arguments)
    arguments[name] = leaf
    if call == "ours":
        with pytest.raises(RuntimeError, match=rf"no derivative, and {name} requires a gradient: pass {name}\.detach"):
            CALLS[call](arguments)
    else:
        c = CALLS[call](arguments)
        assert c.requires_grad and not plain.requires_grad and torch.equal(c, plain)
        of = r"derivative for (aten::_scaled_mm|triton_gemm::scaled_gemm) is not impl"
        with pytest.raises(RuntimeError, match=of):
            c.sum().backward()
    with torch.no_grad():
        assert not CALLS[call](arguments).requires_grad
    with forward_ad.dual_level():
        arguments[name] = forward_ad.make_dual(leaf.detach(), torch.ones_like(leaf))
        if call != "operator":
            with pytest.raises(NotImplementedError, match="forward"):
                CALLS[call](arguments)


@pytest.mark.parametrize("call", CALLS)
def test_nor_is_its_backward_compiled(call: str) -> None:
    torch._dynamo.reset()
    arguments, arguments["scale_a"] = graph_of("scale_a")
    compiled = torch.compile(CALLS[call], fullgraph=True, backend="aot_eager")
    with pytest.raises(Exception, match=r"derivative for .* is not implemented|has no derivative"):
        compiled(arguments)
    arguments["scale_a"] = arguments["scale_a"].detach()
    assert torch.equal(compiled(arguments), CALLS[call](arguments))


# --- Under torch's compilers ---


@pytest.mark.parametrize(("dtype", "kind"), [(INT8, "tensor"), (INT8, "rows-and-tensor"), (E4M3, "blocks")])
def test_the_operator_is_sound(dtype: torch.dtype, kind: str) -> None:
    """Of fp8 but for what torch's check of schemas would multiply it with."""
    M, N, K = 20, 30, 140
    operands = (draw(dtype, M, K), draw(dtype, K, N), *draw_scales(kind, M, N, K))
    checks = ("test_schema", "test_autograd_registration", "test_faketensor", "test_aot_dispatch_dynamic")
    for bias in (None, torch.randn(N)):
        arguments = (*operands, bias, torch.bfloat16, False)
        torch.library.opcheck(torch.ops.triton_gemm.scaled_gemm.default, arguments, test_utils=checks[dtype != INT8 :])


def test_compiled_without_a_break_once_for_all_rows() -> None:
    graphs = []

    def backend(graph: torch.fx.GraphModule, _: object) -> object:
        graphs.append(graph)
        return graph.forward

    torch._dynamo.reset()
    compiled = torch.compile(triton_gemm.scaled_matmul, fullgraph=True, dynamic=True, backend=backend)
    for M in (20, 33, 64):
        a, b, scales = draw(E4M3, M, 140), draw(E4M3, 140, 30), draw_scales("rows", M, 30, 140)
        assert torch.equal(compiled(a, b, *scales), triton_gemm.scaled_matmul(a, b, *scales))
    assert len(graphs) == 1


def test_meta_tensors_and_flops() -> None:
    a, b, one = (torch.empty(*shape, device="meta") for shape in ((20, 140), (140, 30), (1,)))
    c = triton_gemm.scaled_matmul(a.to(E4M3), b.to(E4M3), one, one, out_dtype=torch.float16)
    assert c.is_meta and c.shape == (20, 30) and c.dtype == torch.float16
    with FlopCounterMode(display=False) as counter:
        triton_gemm.scaled_matmul(draw(INT8, 20, 140), draw(INT8, 140, 30), torch.ones(()), torch.ones(()))
    assert counter.get_total_flops() == 2 * 20 * 140 * 30


@torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True)
@pytest.mark.parametrize("rows", [True, False])
def test_compile_of_rows_that_only_the_run_knows(rows: bool) -> None:
    """As many as a mask has ones, with a scale for each or one for all."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randint(-5, 6, shape, generator=generator).to(torch.int8) for shape in ((5, 64), (64, 8)))
    scale_a, scale_b = (torch.rand(shape, generator=generator) for shape in ((5, 1), (1, 8)))
    mask = torch.tensor([1, 0, 1, 1, 0])

    def of_the_mask(a: torch.Tensor, scale: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        which = mask.nonzero().squeeze(1)
        scale = scale[which] if rows else scale[:1]
        return triton_gemm.scaled_matmul(a[which], b, scale, scale_b, out_dtype=torch.float32)

    torch._dynamo.reset()
    call = torch.compile(of_the_mask, fullgraph=True, backend="aot_eager")
    assert torch.equal(call(a, scale_a, mask), of_the_mask(a, scale_a, mask))
