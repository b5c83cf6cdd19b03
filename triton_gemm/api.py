"""What users call: torch's semantics and torch's errors, no kernels."""

from __future__ import annotations

import warnings

import torch

from . import plan
from .compat import INTERPRETED
from .precision import FP8_DTYPES, MODES, default_precision, fp32_precision
from .select import Selection

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8)
SCALED_DTYPES = (*FP8_DTYPES, torch.int8)
SCALED_OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)
PLAIN = (torch.Tensor, torch.nn.Parameter)  # what a subclass does with its data is its own affair

# Plans of calls that passed all checks, by everything that the checks and the choice depend on but the addresses.
_ready: dict[tuple[object, ...], plan.GemmPlan] = {}


def matmul(
    a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor | None = None, precision: str | None = None
) -> torch.Tensor:
    """The matrix product of a [M, K] and b [K, N]: [M, N], or `out` filled with it.

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides and any size, 0 and 1 included. fp16 and bf16
    accumulate in fp32; int8 gives int32, exactly (modulo 2^32), as `torch._int_mm`. precision says how fp32 is
    multiplied: "ieee"; "tf32", rounded to nearest; "tf32x3", "bf16x3", "bf16x6" or "bf16x9", as sums of planes on the
    tensor cores (docs/precision.md); or None, "ieee" unless `torch.backends.cuda.matmul.fp32_precision` is "tf32".
    Nothing is tuned at run time. The same product on the same GPU gives the same bits every time. With
    TRITON_INTERPRET=1 set before the import, tensors on the CPU are taken too.

    Raises what `torch.mm` raises: RuntimeError for shapes, dtypes or devices that do not go together,
    NotImplementedError for other dtypes, TypeError for other things than tensors; RuntimeError for operands that
    require grad, since the product is not differentiable yet, and for a precision that the GPU does not have; and
    ValueError for a precision that is none, or of other operands than fp32.
    """
    key = _key(a, b, out, precision)
    ready = _ready.get(key) if key is not None else None
    if ready is not None:
        if out is None:
            out = a.new_empty((a.shape[0], b.shape[1]), dtype=ready.out_dtype)
        elif ready.overlap(a, b, out):
            return _matmul(a, b, out, precision)
        ready.run(a, b, out)
        return out
    c = _matmul(a, b, out, precision)
    if key is not None and (out is None or c is out):
        found = plan.PLANS.get(plan.key_of(a, b, c, precision=precision))
        if isinstance(found, plan.GemmPlan):
            plan.keep(_ready, key, found, plan.MAX_PLANS)
    return c


def _key(
    a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, precision: str | None
) -> tuple[object, ...] | None:
    """What a call's checks and choice depend on; None where that is more than can be said in short."""
    if type(a) not in PLAIN or type(b) not in PLAIN:
        return None
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        return None
    dtype = a.dtype
    if dtype is torch.float32:
        precision = precision or fp32_precision()
    try:
        key = (
            *(a.shape, b.shape, a.stride(), b.stride(), dtype, b.dtype, a.get_device(), b.get_device()),
            *(a.data_ptr() & 15, b.data_ptr() & 15, a.is_neg(), b.is_neg(), precision),
        )
        if out is None:
            return key
        if type(out) is not torch.Tensor or out.requires_grad or out.is_neg():
            return None
        return (*key, out.shape, out.stride(), out.dtype, out.get_device(), out.data_ptr() & 15)
    except RuntimeError:  # a layout without strides, or without storage
        return None


def _matmul(a: torch.Tensor, b: torch.Tensor, out: torch.Tensor | None, precision: str | None) -> torch.Tensor:
    """`matmul` with all its checks."""
    _check(a, b, precision)
    if torch.is_grad_enabled() and (a.requires_grad or b.requires_grad or (out is not None and out.requires_grad)):
        raise RuntimeError(
            "matmul(): automatic differentiation is not supported yet, but one of the arguments requires grad; "
            "use torch.no_grad() or detach() it"
        )
    a, b = a.resolve_neg(), b.resolve_neg()
    shape, dtype = (a.shape[0], b.shape[1]), _out_dtype(a.dtype)
    if out is None:
        out = torch.empty(shape, dtype=dtype, device=a.device)
    else:
        a, b = (x.clone() if _may_alias(out, x) else x for x in (a, b))
        _check_out(out, shape, dtype, a.device)
    c = torch.empty(shape, dtype=dtype, device=a.device) if out.is_neg() else out
    if c.numel() > 0:
        plan.multiply(a, b, c, precision=precision)
    if c is not out:
        out.copy_(c)
    return out


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
    kind, scales = _check_scaled(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
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
    _check(a, b, None, SCALED_DTYPES)
    (M, K), N = a.shape, b.shape[1]
    if out_dtype not in SCALED_OUT_DTYPES:
        raise ValueError(f"scaled_matmul(): out_dtype must be one of {_names(SCALED_OUT_DTYPES)}, not {out_dtype}")
    for name, scale in (("scale_a", scale_a), ("scale_b", scale_b)):
        if scale.dtype != torch.float32 or scale.device != a.device:
            raise ValueError(f"scaled_matmul(): {name} must be fp32 on {a.device}, not {scale.dtype} on {scale.device}")
    if bias is not None and (
        tuple(bias.shape) != (N,) or bias.dtype not in SCALED_OUT_DTYPES or bias.device != a.device
    ):
        raise ValueError(f"scaled_matmul(): bias must be [{N}] of {_names(SCALED_OUT_DTYPES)} on {a.device}")
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


def explain(a: torch.Tensor, b: torch.Tensor, *, precision: str | None = None) -> Selection:
    """Which kernel and configuration `matmul(a, b, precision=...)` runs, and why; nothing is launched. Raises as
    `matmul`."""
    _check(a, b, precision)
    c = torch.empty(a.shape[0], b.shape[1], dtype=_out_dtype(a.dtype), device="meta")
    return plan.plan(a, b, c, precision=precision)


def _check(a: torch.Tensor, b: torch.Tensor, precision: str | None, dtypes: tuple[torch.dtype, ...] = DTYPES) -> None:
    for name, x in (("a", a), ("b", b)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"matmul(): argument '{name}' must be Tensor, not {type(x).__name__}")
    shapes = f"{_by(a.shape)} and {_by(b.shape)}"
    for name, x in (("self", a), ("mat2", b)):
        if x.dim() != 2:
            raise RuntimeError(f"{name} must be a matrix; only 2-D operands are supported yet, got {shapes}")
        if x.layout != torch.strided:
            raise NotImplementedError(f"matmul takes strided tensors, got {x.layout}")
    if a.device != b.device:
        raise RuntimeError(
            f"Expected all tensors to be on the same device, but found at least two devices, {a.device} and {b.device}!"
        )
    if a.shape[1] != b.shape[0]:
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({shapes})")
    if a.dtype != b.dtype:
        operands = "mat1 and mat2" if a.is_cuda else "m1 and m2"  # torch's words differ by device
        raise RuntimeError(f"expected {operands} to have the same dtype, but got: {_name(a.dtype)} != {_name(b.dtype)}")
    if a.dtype not in dtypes:
        raise NotImplementedError(f"matmul is not implemented for {a.dtype} ({shapes}); it takes {_names(dtypes)}")
    if precision is not None and precision not in MODES:
        raise ValueError(f"matmul(): precision must be one of {', '.join(MODES)} or None, not {precision!r}")
    if precision is not None and a.dtype != torch.float32:
        raise ValueError(f"matmul(): precision says how fp32 is multiplied, and operands are {a.dtype}")
    if a.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            "matmul runs on CUDA tensors; to run its kernels on CPU tensors in Triton's interpreter, "
            "set TRITON_INTERPRET=1 before importing triton_gemm"
        )
    if a.device.type not in ("cpu", "cuda"):
        raise NotImplementedError(f"matmul runs on CUDA tensors, got tensors on {a.device}")


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    """The product's dtype of operands of `dtype`."""
    return torch.int32 if dtype == torch.int8 else dtype


def _check_out(out: torch.Tensor, shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """torch's rules for `out=`: same dtype and device, resized where its shape differs, no overlap in itself."""
    if out.dtype != dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {_name(dtype)}, but got {_name(out.dtype)} instead")
    if out.device != device:
        raise RuntimeError(f"Expected out tensor to have device {device}, but got {out.device} instead")
    if tuple(out.shape) != shape:
        if out.numel() > 0:
            warnings.warn(
                f"An output with one or more elements was resized since it had shape {list(out.shape)}, which does not "
                f"match the required output shape {list(shape)}. This behavior is deprecated, and in a future PyTorch "
                "release outputs will not be resized unless they have zero elements.",
                stacklevel=3,
            )
        out.resize_(shape)
    if torch._debug_has_internal_overlap(out) == 1:
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def _may_alias(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory behind x and y overlaps, though perhaps not in the elements they show."""
    x_storage, y_storage = x.untyped_storage(), y.untyped_storage()
    x_start, y_start = x_storage.data_ptr(), y_storage.data_ptr()
    return x_start < y_start + y_storage.nbytes() and y_start < x_start + x_storage.nbytes()


def _by(shape: torch.Size) -> str:
    return "x".join(map(str, shape))


def _names(dtypes: tuple[torch.dtype, ...]) -> str:
    return ", ".join(map(str, dtypes))


def _name(dtype: torch.dtype) -> str:
    """The name torch's C++ messages use."""
    names = {
        torch.float16: "c10::Half",
        torch.bfloat16: "c10::BFloat16",
        torch.float32: "float",
        torch.float64: "double",
        torch.uint8: "unsigned char",
        torch.int8: "signed char",
        torch.int16: "short int",
        torch.int32: "int",
        torch.int64: "long int",
    }
    return names.get(dtype, str(dtype).removeprefix("torch."))
