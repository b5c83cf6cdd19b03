"""How wrong a product may be: the fp64 truth, and the elementwise bound that rounding allows. Pure arithmetic."""

from __future__ import annotations

from dataclasses import replace

import torch

from triton_gemm.arithmetic import ARITHMETICS, HALF, TF32

# How a mode multiplies; fp16 and bf16 are told apart by C's dtype alone.
ARITHMETIC = {
    **ARITHMETICS,
    "fp16": HALF,
    "bf16": HALF,
    "tf32_truncated": replace(TF32, operand_error=2 * TF32.operand_error),
}


def mode_of(precision: str, dtype: torch.dtype) -> str:
    """The mode of a problem's precision on operands of `dtype`: "half" is "fp16" or "bf16"."""
    return precision if precision != HALF.name else "bf16" if dtype == torch.bfloat16 else "fp16"


def reference(
    a: torch.Tensor, b: torch.Tensor, c0: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """alpha a @ b + beta c0 in fp64. As in BLAS alpha = 0 reads neither a nor b, and beta = 0 does not read c0."""
    return _combine(a.double(), b.double(), c0, alpha, beta)


def magnitude(
    a: torch.Tensor, b: torch.Tensor, c0: torch.Tensor | None = None, alpha: float = 1.0, beta: float = 0.0
) -> torch.Tensor:
    """|alpha| |a| @ |b| + |beta| |c0| in fp64: what the errors of a sum are measured against."""
    return _combine(a.double().abs(), b.double().abs(), None if c0 is None else c0.abs(), abs(alpha), abs(beta))


def error_bound(
    a: torch.Tensor,
    b: torch.Tensor,
    c0: torch.Tensor | None,
    alpha: float,
    beta: float,
    mode: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """The largest error, element by element, that an honest product in `mode` stored as `out_dtype` can have.

    `mode` is a key of ARITHMETIC; sums are in fp32 in any order. Compare with |C - reference(...)|.
    """
    mag = magnitude(a, b, c0, alpha, beta)
    before_rounding = accumulation_error(a.shape[1], mode) * mag
    expected = reference(a, b, c0, alpha, beta).abs()
    return rounded(before_rounding, expected, out_dtype)


def accumulation_error(K: int, mode: str) -> float:
    """The factor of `magnitude` that bounds the error of K products in `mode`, summed in fp32 (fp64: in fp64; int8:
    exactly, and rounded to fp32 where scales follow)."""
    arithmetic = ARITHMETIC[mode]
    itemsize = (arithmetic.planes.dtype if arithmetic.planes else arithmetic.dtypes[0]).itemsize
    together = min(K, arithmetic.promotion // itemsize) if arithmetic.promotion else K  # summed by tensor cores alone
    sums = gamma(5, 2.0**-24) if arithmetic.exact else gamma(K + 2, arithmetic.unit_roundoff)
    return 2 * arithmetic.operand_error + together * arithmetic.cut + sums


def underflow(mode: str) -> float:
    """What may be lost of an operand in `mode` whatever its size: numbers below the smallest normal one have fewer bits
    in planes, and in tf32, than in fp32."""
    arithmetic = ARITHMETIC[mode]
    if arithmetic.planes and arithmetic.planes.dtype == torch.bfloat16:
        return 3 * 2.0**-134
    return 3 * 2.0**-136 if arithmetic.operand_error else 0.0


def rounded(bound: torch.Tensor, expected: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """`bound` after one more rounding, of a number near `expected`, to `out_dtype`."""
    if not out_dtype.is_floating_point:
        return torch.zeros_like(bound)
    smallest = torch.finfo(out_dtype).smallest_normal * torch.finfo(out_dtype).eps
    return bound + torch.finfo(out_dtype).eps / 2 * (expected.abs() + bound) + smallest


def scale_shapes(kind: str, M: int, N: int, K: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The shapes of A's and B's scales: "tensor", "rows", or "blocks" of 1 x 128 and 128 x 128."""
    k = -(-K // 128)
    return {"tensor": ((1, 1), (1, 1)), "rows": ((M, 1), (1, N)), "blocks": ((M, k), (k, -(-N // 128)))}[kind]


def scaled(x: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """fp64 x [.., rows, columns] times its scales, each for as many elements as there are to one."""
    if scale.dim() == 2:
        for dim, size in enumerate(x.shape[-2:]):
            if 1 < scale.shape[dim] < size:
                scale = scale.repeat_interleave(128, dim).narrow(dim, 0, size)
    return x.double() * scale.double()


def gamma(n: int, unit_roundoff: float) -> float:
    """n u / (1 - n u), the growth of n roundings (Higham, Accuracy and Stability of Numerical Algorithms, 3.1)."""
    product = n * unit_roundoff
    return product / (1 - product) if product < 1 else float("inf")


def _combine(a: torch.Tensor, b: torch.Tensor, c0: torch.Tensor | None, alpha: float, beta: float) -> torch.Tensor:
    if alpha == 0:
        product = torch.zeros(a.shape[0], b.shape[1], dtype=torch.float64, device=a.device)
    else:
        product = alpha * (a @ b)
    if beta == 0:
        return product
    assert c0 is not None, "beta != 0 needs c0"
    return product + beta * c0.double()
