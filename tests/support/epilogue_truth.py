"""What a product with an epilogue is, in fp64, and how wrong a kernel may be; of one matrix or a batch."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

import triton_gemm
from perf.measure.numerics import ARITHMETIC, accumulation_error, magnitude, reference, rounded, scaled


def activated(x: torch.Tensor, activation: str | None) -> torch.Tensor:
    functions = torch.nn.functional
    if activation == "gelu_tanh":
        return functions.gelu(x, approximate="tanh")
    return getattr(functions, activation)(x) if activation else x


def expected(
    a: torch.Tensor,
    b: torch.Tensor,
    c0: torch.Tensor | None,
    alpha: float = 1.0,
    beta: float = 0.0,
    bias: torch.Tensor | None = None,
    axis: str = "n",
    activation: str | None = None,
    *,
    mode: str,
    out_dtype: torch.dtype,
    parts: int = 1,
    residual: bool = False,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(activation(alpha a @ b + beta c0 + bias), the largest error of a kernel that sums K in `parts`).

    residual: whether beta c0 is added after the activation."""
    if residual:
        assert c0 is not None
        last = beta * c0.double()
        after, error = expected(
            *(a, b, None, alpha, 0.0, bias, axis, activation),
            mode=mode,
            out_dtype=torch.float32 if out_dtype.itemsize < 8 else out_dtype,
            parts=parts,
        )
        return after + last, rounded(error + 2.0**-23 * (after.abs() + last.abs()), after + last, out_dtype)
    added = torch.zeros((), dtype=torch.float64, device=a.device)
    if bias is not None:
        added = bias.double()[:, None] if axis == "m" else bias.double()[None, :]
    before = reference(a, b, c0, alpha, beta) + added
    error = accumulation_error(a.shape[-1] + parts, mode) * (magnitude(a, b, c0, alpha, beta) + added.abs())
    if activation is not None or bias is not None:
        # No activation is steeper than 1.13; each takes a few roundings of numbers below |x| + 1.
        error = 1.13 * error + 16 * (ARITHMETIC[mode].unit_roundoff or 2.0**-24) * (before.abs() + 1)
    after = activated(before, activation)
    return after, rounded(error, after, out_dtype)


def assert_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None = None,
    fast: bool = False,
) -> None:
    """Whether c is a product of fp8 or int8 with scales and a bias. fast: with `use_fast_accum`."""
    mode = "int8" if a.dtype == torch.int8 else "fp8 fast" if fast else "fp8"
    truth, bound = expected(
        scaled(a, scale_a), scaled(b, scale_b), None, bias=bias, mode=mode, out_dtype=c.dtype, parts=0
    )
    assert c.shape == truth.shape and ((c.double() - truth).abs() <= bound).all()


def assert_scales_keep_every_bit(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Sequence[torch.Tensor],
    powers: Iterable[tuple[int, int]],
    **how: bool,
) -> None:
    """Scales times powers of two give the product times both, but for the last bit of an element that is subnormal."""
    c = triton_gemm.scaled_matmul(a, b, *scales, out_dtype=torch.float32, **how).double()
    for of_each in powers:
        far = [(scale.double() * 2.0**power).float() for scale, power in zip(scales, of_each, strict=True)]
        found = triton_gemm.scaled_matmul(a, b, *far, out_dtype=torch.float32, **how).double()
        assert ((found - c * 2.0 ** sum(of_each)).abs() <= 2.0**-149).all(), of_each
