"""Products of 8-bit matrices with scales: torch._scaled_mm's conventions.

The operator `torch.ops.triton_gemm.scaled_gemm` is what torch.compile, torch.export and profilers see of it. It has no
derivatives: what is rounded to 8 bits has none.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from . import checks, ops, plan
from .precision import FP8_DTYPES, default_precision

SCALED_DTYPES = (*FP8_DTYPES, torch.int8)
SCALED_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def scaled_matmul(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> torch.Tensor:
    """(scale_a a) @ (scale_b b) + bias of fp8 or int8 matrices a [M, K] and b [K, N]: [M, N] of out_dtype, bf16, fp16
    or fp32.

    a and b are of one dtype, float8_e4m3fn, float8_e5m2 or int8, and of any strides. The scales are fp32, by torch's
    conventions (`torch._scaled_mm`): one number each; or [M, 1] and [1, N]; or of fp8 [M, K / 128] and [K / 128,
    N / 128], rounded up, one for each 1 x 128 of a and 128 x 128 of b. bias: [N], of any out_dtype. Products of int8
    are summed exactly. Of fp8 Hopper's tensor cores keep only 14 bits of a sum: every 128 of K it is added up in fp32,
    unless use_fast_accum.

    Raises what `matmul` raises, and ValueError for scales, a bias or an out_dtype that do not fit.
    """
    checks.tensors("scaled_matmul", a=a, b=b)
    arguments = (a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    return _compute(*arguments) if ops.is_plain(*arguments[:5]) else _op(*arguments)


def _compute(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    """scaled_matmul of tensors that hold data."""
    kind, scales = _check_scaled(a, b, *others)
    *_, bias, out_dtype, use_fast_accum = others
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device)
    if c.numel() > 0:
        precision = "fp8 fast" if use_fast_accum and a.dtype in FP8_DTYPES else default_precision(a.dtype)
        bias = None if bias is None else bias.contiguous()
        plan.multiply(a, b, c, bias=bias, precision=precision, scales=plan.Scales(kind, *scales))
    return c


def _check_scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> tuple[str, tuple[torch.Tensor, torch.Tensor]]:
    """The kind of scales, and the scales as kernels read them; raises as `scaled_matmul`."""
    checks.mm(a, b)
    checks.same_dtype("mm", a, b)
    checks.computable("scaled_matmul", a, b, dtypes=SCALED_DTYPES, devices=("cuda", "cpu", "meta"))
    (M, K), N = a.shape, b.shape[1]
    if out_dtype not in SCALED_OUT_DTYPES:
        raise ValueError(
            f"scaled_matmul(): out_dtype must be one of {checks.names(SCALED_OUT_DTYPES)}, not {out_dtype}"
        )
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32 or scale.device != a.device:
            raise ValueError(f"scaled_matmul(): {name} must be fp32 on {a.device}, not {scale.dtype} on {scale.device}")
    if bias is not None and (
        tuple(bias.shape) != (N,) or bias.dtype not in SCALED_OUT_DTYPES or bias.device != a.device
    ):
        raise ValueError(f"scaled_matmul(): bias must be [{N}] of {checks.names(SCALED_OUT_DTYPES)} on {a.device}")
    one_a, one_b = scale_a.numel() == 1, scale_b.numel() == 1
    if one_a and one_b:
        return "tensor", (scale_a, scale_b)
    rows_a, rows_b = tuple(scale_a.shape) == (M, 1), tuple(scale_b.shape) == (1, N)
    if (rows_a or one_a) and (rows_b or one_b):
        return "rows", (scale_a.expand(M, 1).contiguous(), scale_b.expand(1, N).contiguous())
    blocks = ((M, -(-K // 128)), (-(-K // 128), -(-N // 128)))
    if a.dtype in FP8_DTYPES and (tuple(scale_a.shape), tuple(scale_b.shape)) == blocks:
        if use_fast_accum:
            raise ValueError("scaled_matmul(): use_fast_accum leaves sums where no block of them could be scaled")
        return "blocks", (scale_a.mT.contiguous(), scale_b.mT.contiguous())
    raise ValueError(
        f"scaled_matmul(): scales of {list(a.shape)} and {list(b.shape)} must be one number each, {[M, 1]} and "
        f"{[1, N]}, or of fp8 {list(blocks[0])} and {list(blocks[1])}, not {list(scale_a.shape)} and "
        f"{list(scale_b.shape)}"
    )


def _fake(a: torch.Tensor, b: torch.Tensor, *others: Any) -> torch.Tensor:
    _check_scaled(a, b, *others)
    *_, out_dtype, _ = others
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_op = ops.operator(
    "scaled_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
    "bool use_fast_accum) -> Tensor",
    _compute,
    _fake,
)


@register_flop_formula(torch.ops.triton_gemm.scaled_gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]
