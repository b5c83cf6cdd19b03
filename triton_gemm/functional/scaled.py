"""Products of 8-bit matrices with scales: torch._scaled_mm's conventions.

The operator `torch.ops.triton_gemm.scaled_gemm` is what torch.compile, torch.export and profilers see of it. It has no
derivatives: what is rounded to 8 bits has none.
"""

from __future__ import annotations

from typing import Any, NoReturn

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import arguments
from ..arithmetic import SCALED, ScaleKind, default_arithmetic, scaled_arithmetic
from ..compat import may_differ
from ..problem import Activation, Request
from ..runtime import plan
from . import fast_path, operators, rules

_fast = fast_path.FastPath()
NAMES = "a", "b", "scale_a", "scale_b", "bias"
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
    activation: Activation | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """activation((scale_a a) @ (scale_b b) + bias) of fp8 or int8 matrices, as `torch._scaled_mm`.

    There is no derivative. A call with an argument that requires grad raises RuntimeError, and one under forward
    differentiation NotImplementedError.

    Args:
        a: [M, K] on a GPU: float8_e4m3fn, float8_e5m2 (compute capability 8.9 or newer) or int8, of any strides and
            size.
        b: [K, N], of the same dtype.
        scale_a, scale_b: fp32 tensors in one of three forms: one number each; [M, 1] and [1, N], one for each row of a
            and each column of b, where either may be one number; or blocks, for fp8 only. Those are [M, K / 128] and
            [K / 128, N / 128], rounded up, one for each 1 x 128 of a and each 128 x 128 of b. The product of one of a
            and one of b should be a normal fp32 number: below 1.2e-38 it loses digits, and above 3.4e38 the result is
            infinite or NaN.
        bias: [N], bf16, fp16 or fp32. It is added after the scales, before the one rounding to out_dtype.
        out_dtype: torch.bfloat16, torch.float16 or torch.float32.
        use_fast_accum: Accumulates fp8 in the tensor cores alone, which keep 14 bits of a sum: faster. By default sums
            are promoted to fp32 after every 128 of K. Not with block scales. int8 is summed exactly either way.
        activation: None, "relu", "gelu" (with erf), "gelu_tanh" or "silu", computed before the one rounding.
        batch_invariant: As in `matmul`.

    Returns:
        A matrix [M, N] of out_dtype.

    Raises:
        TypeError: Scales or a bias are not tensors.
        ValueError: Scales or a bias do not fit, or another out_dtype or activation.
        RuntimeError: Shapes, dtypes or devices do not match, an operand requires a gradient, or the GPU cannot multiply
            the dtype.
        NotImplementedError: Another dtype, a nested or a sparse tensor.
    """
    auxiliary = auxiliary_of(scale_a, scale_b, bias)
    key, c = _fast.take(("scaled_matmul", out_dtype, use_fast_accum, activation, batch_invariant), a, b, auxiliary)
    if c is not None:
        return c
    more = {} if bias is None else {"bias": bias}
    arguments.tensors("scaled_matmul", a=a, b=b, scale_a=scale_a, scale_b=scale_b, **more)
    if use_fast_accum is not False:
        arguments.flag("scaled_matmul", "use_fast_accum", use_fast_accum)
    if batch_invariant is not None:
        arguments.flag("scaled_matmul", "batch_invariant", batch_invariant)
    rules.activation("scaled_matmul", activation)
    operands = (a, b, scale_a, scale_b, bias)
    rules.no_tangents("scaled_matmul", *operands)
    if operators.needs_grad(*operands):
        of = next(name for name, x in zip(NAMES, operands, strict=True) if x is not None and x.requires_grad)
        raise RuntimeError(f"scaled_matmul has no derivative, and {of} requires a gradient: pass {of}.detach()")
    if not operators.is_plain(*operands):
        return _op(*operands, out_dtype, use_fast_accum, batch_invariant, activation)
    c, known = launch(*operands, out_dtype, use_fast_accum, batch_invariant, activation)
    _fast.keep(key, known)
    return c


def auxiliary_of(scale_a: torch.Tensor, scale_b: torch.Tensor, bias: torch.Tensor | None) -> tuple[torch.Tensor, ...]:
    """The operands besides a and b, in the order in which a plan takes them."""
    return (scale_a, scale_b) if bias is None else (bias, scale_a, scale_b)


def _compute(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    *how: Any,
) -> torch.Tensor:
    """scaled_matmul of tensors that hold data."""
    operands = a, b, scale_a, scale_b, bias
    return _fast.run(("scaled_gemm", *how), a, b, auxiliary_of(*operands[2:]), lambda: launch(*operands, *how))


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    batch_invariant: bool | None = None,
    activation: str | None = None,
    out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, fast_path.Known | None]:
    """The product, in `out` if given, and the launch that repeated calls take."""
    kind, scales = check(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    rules.runs("scaled_matmul", a)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device=a.device) if out is None else out
    auxiliary = scales if bias is None else (bias.resolve_neg().contiguous(), *scales)
    if c.numel() == 0:
        return c, None
    request = request_of(a.dtype, use_fast_accum, kind, bias is not None, activation)
    request = request._replace(batch_invariant=batch_invariant)
    found = plan.multiply(a, b, c, request, auxiliary)
    return c, fast_path.known(found, c, *zip(auxiliary_of(scale_a, scale_b, bias), auxiliary, strict=True))


def request_of(
    dtype: torch.dtype, use_fast_accum: bool, kind: ScaleKind, has_bias: bool, activation: str | None = None
) -> Request:
    precision = scaled_arithmetic(dtype, use_fast_accum).name
    return Request(activation=activation, precision=precision, bias="n" if has_bias else None, scales=kind)


def check(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
) -> tuple[ScaleKind, tuple[torch.Tensor, torch.Tensor]]:
    """The kind of scales, and the scales as kernels read them; raises as `scaled_matmul`, wherever operands lie."""
    rules.mm(a, b, NAMES[:2])
    rules.implemented("scaled_matmul", a, b, dtypes=SCALED)
    rules.strided("scaled_matmul", scale_a, scale_b, bias)
    (M, K), N = a.shape, b.shape[1]
    if out_dtype not in SCALED_OUT_DTYPES:
        arguments.dtype(out_dtype)
        raise ValueError(f"scaled_matmul(): out_dtype must be one of {rules.names(SCALED_OUT_DTYPES)}, not {out_dtype}")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32 or scale.device != a.device:
            raise ValueError(f"scaled_matmul(): {name} must be fp32 on {a.device}, not {scale.dtype} on {scale.device}")
    if bias is not None and (
        not rules.may_be(bias.shape, (N,)) or bias.dtype not in SCALED_OUT_DTYPES or bias.device != a.device
    ):
        wanted = f"[{N}] of {rules.names(SCALED_OUT_DTYPES)} on {a.device}"
        given = f"{list(bias.shape)} of {bias.dtype} on {bias.device}"
        raise ValueError(f"scaled_matmul(): bias must be {wanted}, not {given}")
    scale_a, scale_b = scale_a.resolve_neg(), scale_b.resolve_neg()
    one_a, one_b = not may_differ(scale_a.numel(), 1), not may_differ(scale_b.numel(), 1)
    if one_a and one_b:
        return "tensor", (scale_a, scale_b)
    rows_a, rows_b = rules.may_be(scale_a.shape, (M, 1)), rules.may_be(scale_b.shape, (1, N))
    if (rows_a or one_a) and (rows_b or one_b):
        return "rows", (scale_a.expand(M, 1).contiguous(), scale_b.expand(1, N).contiguous())
    blocks = ((M, -(-K // 128)), (-(-K // 128), -(-N // 128)))
    in_blocks = rules.may_be(scale_a.shape, blocks[0]) and rules.may_be(scale_b.shape, blocks[1])
    if "blocks" in default_arithmetic(a.dtype).scales and in_blocks:
        if "blocks" not in scaled_arithmetic(a.dtype, use_fast_accum).scales:
            raise ValueError("scaled_matmul(): use_fast_accum leaves sums where no block of them could be scaled")
        return "blocks", (scale_a.mT.contiguous(), scale_b.mT.contiguous())
    raise ValueError(
        f"scaled_matmul(): scales of {list(a.shape)} and {list(b.shape)} must be one number each, {[M, 1]} and "
        f"{[1, N]}, or of fp8 {list(blocks[0])} and {list(blocks[1])}, not {list(scale_a.shape)} and "
        f"{list(scale_b.shape)}"
    )


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    use_fast_accum: bool,
    batch_invariant: bool | None = None,
    activation: str | None = None,
) -> torch.Tensor:
    check(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    return a.new_empty((a.shape[0], b.shape[1]), dtype=out_dtype)


_op, _library = operators.operator(
    "scaled_gemm(Tensor a, Tensor b, Tensor scale_a, Tensor scale_b, Tensor? bias, ScalarType out_dtype, "
    "bool use_fast_accum, bool? batch_invariant=None, str? activation=None) -> Tensor",
    _compute,
    _fake,
)


def _no_derivative(*_: Any) -> NoReturn:
    raise RuntimeError("derivative for triton_gemm::scaled_gemm is not implemented")


def _batched(info: Any, in_dims: tuple[int | None, ...], *operands: Any) -> tuple[torch.Tensor, int]:
    """torch.vmap's products, one by one."""
    given = list(zip(operands, in_dims, strict=True))
    each = [_op(*(x if at is None else x.select(at, i) for x, at in given)) for i in range(info.batch_size)]
    return torch.stack(each), 0


torch.library.register_vmap("triton_gemm::scaled_gemm", _batched, lib=_library)
torch.library.register_autograd("triton_gemm::scaled_gemm", _no_derivative, lib=_library)


@register_flop_formula(torch.ops.triton_gemm.scaled_gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *_: Any, **__: Any) -> int:
    return 2 * a_shape[0] * a_shape[1] * b_shape[1]
