"""fp8 and int8: every layout and size, every kind of scales, and as accurate as torch's own."""

from __future__ import annotations

import pytest
import torch

import triton_gemm
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.support.epilogue_truth import assert_scaled, assert_scales_keep_every_bit
from tests.support.numerics import reference, scale_shapes, scaled
from triton_gemm.arithmetic import FP8
from triton_gemm.selection import generation

pytestmark = hopper
LAYOUTS = ("nn", "nt", "tn", "tt")
SIZES = ((256, 384, 512), (300, 1000, 5000), (77, 129, 333), (1, 512, 512), (1000, 8, 64), (3, 5, 7), (64, 64, 0))


def generator() -> torch.Generator:
    return torch.Generator("cuda").manual_seed(0)


def laid(x: torch.Tensor, layout: str) -> torch.Tensor:
    return x if layout == "n" else x.mT.contiguous().mT


def operands(size: tuple[int, int, int], layout: str, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    M, N, K = size
    return laid(draw(M, K, dtype), layout[0]), laid(draw(K, N, dtype), layout[1])


def draw(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (rows, columns), dtype=dtype, device="cuda", generator=generator())
    return torch.randn(rows, columns, device="cuda", generator=generator()).to(dtype)


def scales_of(size: tuple[int, int, int], kind: str) -> list[torch.Tensor]:
    """As torch._scaled_mm wants them laid out."""
    shapes = scale_shapes(kind, *size)
    return [0.5 + torch.rand(shape[::-1], device="cuda", generator=generator()).T for shape in shapes]


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
@pytest.mark.parametrize("dtype", [*FP8.dtypes, torch.int8], ids=str)
def test_every_layout_and_size(dtype: torch.dtype, kind: str) -> None:
    if kind == "blocks" and dtype == torch.int8:
        pytest.skip("blocks of scales are for fp8")
    for i, size in enumerate(SIZES):
        for layout in LAYOUTS:
            a, b = operands(size, layout, dtype)
            scale_a, scale_b = scales_of(size, kind)
            scale_a = scale_a * (2.0**-8 if dtype == torch.int8 else 1)  # fp16 ends at 65504
            fast = i % 2 == 1 and kind != "blocks" and dtype != torch.int8
            out_dtype = (torch.float32, torch.bfloat16, torch.float16)[i % 3]
            bias = torch.randn(size[1], device="cuda", generator=generator()).to(out_dtype) if i % 2 else None
            how = {"bias": bias, "out_dtype": out_dtype, "use_fast_accum": fast}
            c = triton_gemm.scaled_matmul(a, b, scale_a, scale_b, **how)
            assert c.dtype == out_dtype
            assert_scaled(a, b, scale_a, scale_b, c, bias, fast)
            again = triton_gemm.scaled_matmul(a, b, scale_a, scale_b, **how)
            assert torch.equal(c.view(torch.uint8), again.view(torch.uint8)), "other bits"


@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_a_call_like_one_before_is_of_its_own_operands(kind: str) -> None:
    """Scales that a kernel reads where they lie are on the fast path; of others it would read the first call's copy."""
    size = (256, 384, 512)
    for copied in (False, True):
        for i in range(3):
            a, b = operands(size, "nt", torch.float8_e4m3fn)
            scales = [(1 + i) * (x.contiguous() if copied else x) for x in scales_of(size, kind)]
            bias = torch.full((size[1],), float(i), device="cuda", dtype=torch.bfloat16)
            found = triton_gemm.scaled_matmul(a, b, *scales, bias=bias)
            generation.advance()
            assert torch.equal(found, triton_gemm.scaled_matmul(a, b, *scales, bias=bias))


@pytest.mark.parametrize("mode", ["fp8", "fp8 fast"])
@pytest.mark.parametrize("kind", ["tensor", "rows", "blocks"])
def test_no_less_accurate_than_torch(kind: str, mode: str) -> None:
    """On random and on all-positive operands."""
    if kind == "blocks" and mode == "fp8 fast":
        pytest.skip("blocks of scales are added up in fp32")
    size, fast = (512, 768, 4096), mode == "fp8 fast"
    for positive in (False, True):
        a, b = operands(size, "nt", torch.float8_e4m3fn)
        if positive:
            a, b = (x.float().abs().to(x.dtype) for x in (a, b))
        scales = scales_of(size, kind)
        truth = reference(scaled(a, scales[0]), scaled(b, scales[1]))
        ours = triton_gemm.scaled_matmul(a, b, *scales, use_fast_accum=fast)
        theirs = torch._scaled_mm(a, b, *scales, out_dtype=torch.bfloat16, use_fast_accum=fast)
        assert (ours.double() - truth).norm() <= 1.02 * (theirs.double() - truth).norm()


OPPOSITE = ((124, -124), (-124, 124))  # times a sum the larger one would be infinite, and the smaller one subnormal
SUBNORMAL = ((-106, -24), (-24, -106), (-106, -40))


@pytest.mark.parametrize("size", [(1, 512, 512), (256, 384, 512), (77, 129, 333)], ids=str)
@pytest.mark.parametrize(
    ("dtype", "kind", "fast", "powers"),
    [
        *((torch.float8_e4m3fn, kind, False, OPPOSITE) for kind in ("tensor", "rows", "blocks")),
        *((torch.float8_e4m3fn, kind, True, OPPOSITE) for kind in ("tensor", "rows")),
        *((torch.float8_e4m3fn, kind, False, SUBNORMAL) for kind in ("tensor", "rows")),
        *((torch.int8, kind, False, SUBNORMAL) for kind in ("tensor", "rows")),
    ],
    ids=str,
)
def test_scales_keep_every_bit(
    dtype: torch.dtype, kind: str, fast: bool, powers: tuple[tuple[int, int], ...], size: tuple[int, int, int]
) -> None:
    assert_scales_keep_every_bit(*operands(size, "nt", dtype), scales_of(size, kind), powers, use_fast_accum=fast)


def test_sums_of_fp8_are_promoted_unless_fast_ones_are_asked_for() -> None:
    """The tensor cores' sum of ones stops at 2^14: one more is lost."""
    K = 2**15
    a, b = (torch.ones(shape, device="cuda").to(torch.float8_e4m3fn) for shape in ((64, K), (K, 64)))
    one = torch.ones((), device="cuda")
    exact, fast = (
        triton_gemm.scaled_matmul(a, b, one, one, out_dtype=torch.float32, use_fast_accum=fast)
        for fast in (False, True)
    )
    assert (exact == K).all()
    assert (fast <= K).all()


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("size", [*SIZES, (64, 64, 65536), (128, 257, 40001), (2000, 2001, 300)])
def test_int8_is_exact(size: tuple[int, int, int], layout: str) -> None:
    """Where fp32 would not be: sums of 65536 products reach 2^30."""
    a, b = operands(size, layout, torch.int8)
    if size[2] > 10000:
        a, b = a | 64, b | 64
    c = triton_gemm.matmul(a, b)
    assert c.dtype == torch.int32
    assert torch.equal(c.double(), a.double() @ b.double())
    out = torch.empty_like(c)
    assert triton_gemm.matmul(a, b, out=out) is out
    assert torch.equal(out, c)
