"""torch's rules for products, and torch's words for what breaks them.

Every function here raises what torch's function raises for the same mistake, with the same first sentence; where torch
leaves out shapes or dtypes they are added.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from math import prod
from numbers import Real

import torch

from .compat import INTERPRETED, overlaps_itself
from .precision import MODES
from .problem import ACTIVATIONS

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64, torch.int8)
FLOATING = DTYPES[:-1]  # that have an epilogue
HALF = (torch.float16, torch.bfloat16)

# --- Arguments ---


def tensors(function: str, **arguments: object) -> None:
    """Whether the first arguments of `function`, in their order, are tensors."""
    for position, (name, x) in enumerate(arguments.items(), 1):
        if not isinstance(x, torch.Tensor):
            raise TypeError(
                f"{function}(): argument '{name}' (position {position}) must be Tensor, not {type(x).__name__}"
            )


def numbers(function: str, **arguments: object) -> None:
    for name, x in arguments.items():
        if not isinstance(x, (Real, torch.SymInt, torch.SymFloat)):
            raise TypeError(f"{function}(): argument '{name}' must be Number, not {type(x).__name__}")


def activation(function: str, name: str | None) -> None:
    if name is not None and name not in ACTIVATIONS:
        raise ValueError(f"{function}(): activation must be one of {', '.join(ACTIVATIONS)} or None, not {name!r}")


def precision(function: str, name: str | None, dtype: torch.dtype) -> None:
    if name is None:
        return
    if name not in MODES:
        raise ValueError(f"{function}(): precision must be one of {', '.join(MODES)} or None, not {name!r}")
    if dtype != torch.float32:
        raise ValueError(f"{function}(): precision says how fp32 is multiplied, and operands are {dtype}")


# --- Shapes ---


def mm(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, x in (("self", a), ("mat2", b)):
        if x.dim() != 2:
            raise RuntimeError(f"{name} must be a matrix, got {by(a.shape)} and {by(b.shape)}")
    inner(a, b)


def addmm(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, x in (("mat1", a), ("mat2", b)):
        if x.dim() != 2:
            raise RuntimeError(f"{name} must be a matrix, got {x.dim()}-D tensor")
    inner(a, b)


def bmm(a: torch.Tensor, b: torch.Tensor) -> None:
    for name, x in (("batch1", a), ("batch2", b)):
        if x.dim() != 3:
            raise RuntimeError(f"{name} must be a 3D tensor, got {by(a.shape)} and {by(b.shape)}")
    if a.shape[0] != b.shape[0] or a.shape[2] != b.shape[1]:
        raise RuntimeError(_first_two([a.shape[0], a.shape[2]], list(b.shape[:2])))


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None) -> None:
    for name, x in (("mat_a", a), ("mat_b", b)):
        if x.dim() not in (2, 3):
            raise RuntimeError(f"{name} has to be 2 or 3d, not {x.dim()}d")
    if a.shape[-1] != b.shape[-2]:
        raise RuntimeError(f"contraction dimension of mat_a and mat_b must match, not {by(a.shape)} and {by(b.shape)}")
    if offs is None or a.dim() == b.dim() == 3:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    tensors("grouped_matmul", mat_a=a, mat_b=b, offs=offs)
    if offs.dim() != 1 or offs.device != a.device:
        raise RuntimeError(f"Offsets have to be 1d on {a.device}, not {offs.dim()}d on {offs.device}")
    if offs.dtype != torch.int32:
        raise RuntimeError(f"Offsets have to be int32, not {offs.dtype}")
    batched = next((x for x in (a, b) if x.dim() == 3), None)
    if batched is not None and batched.shape[0] != offs.shape[0]:
        raise RuntimeError(f"matrix batch sizes have to match, not {batched.shape[0]} matrices and {len(offs)} offsets")


def mv(a: torch.Tensor, b: torch.Tensor) -> None:
    if a.dim() != 2 or b.dim() != 1:
        raise RuntimeError(f"vector + matrix @ vector expected, got 1, {a.dim()}, {b.dim()}")
    matmul(a, b)


def matmul(a: torch.Tensor, b: torch.Tensor, function: str = "matmul") -> None:
    """The rules of torch.matmul, in the words of that of torch's products to which it gives such operands."""
    if a.dim() == 0 or b.dim() == 0:
        raise RuntimeError(
            f"both arguments to {function} need to be at least 1D, but they are {a.dim()}D and {b.dim()}D"
        )
    n = b.shape[0] if b.dim() == 1 else b.shape[-2]
    if a.shape[-1] == n:
        broadcast(a.shape[:-2], b.shape[:-2])
    elif a.dim() == b.dim() == 1:
        raise RuntimeError(
            f"inconsistent tensor size, expected tensor {list(a.shape)} and src {list(b.shape)} to have the same "
            f"number of elements, but got {a.numel()} and {n} elements respectively"
        )
    elif b.dim() == 1:
        rows = a.shape[:-1].numel()
        raise RuntimeError(f"size mismatch, got input ({rows}), mat ({rows}x{a.shape[-1]}), vec ({n})")
    elif b.dim() == 2:
        inner(a, b)
    else:
        broadcast(a.shape[:-2], b.shape[:-2])
        batch = torch.broadcast_shapes(a.shape[:-2], b.shape[:-2]).numel()
        raise RuntimeError(_first_two([batch, a.shape[-1]], [batch, b.shape[-2]]))


def linear(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | None) -> None:
    """Shapes and dtypes of a [.., K], b [K, N] or [K], and the bias."""
    matmul(a, b, "linear")
    if bias is None:
        same_dtype("mm" if b.dim() == 2 else "mv", a, b)
        return
    if b.dim() == 1 and bias.dim() > 0:
        raise RuntimeError("mat2 must be a matrix, got 1-D tensor")
    same_dtype("addmm", a, b, bias)
    rows = a.shape[:-1] if bias.dim() > 1 else (prod(a.shape[:-1]),)  # as torch folds them
    expandable(bias, (*rows, *b.shape[1:]))


def inner(a: torch.Tensor, b: torch.Tensor) -> None:
    """a [.., K] and b [K, N]."""
    if a.shape[-1] != b.shape[0]:
        rows = f"{a.shape[:-1].numel()}x{a.shape[-1]}"
        raise RuntimeError(f"mat1 and mat2 shapes cannot be multiplied ({rows} and {by(b.shape)})")


def broadcast(a: Sequence[int], b: Sequence[int]) -> None:
    for i in range(1, min(len(a), len(b)) + 1):
        if a[-i] != b[-i] and a[-i] != 1 and b[-i] != 1:
            raise RuntimeError(
                f"The size of tensor a ({a[-i]}) must match the size of tensor b ({b[-i]}) at non-singleton dimension "
                f"{max(len(a), len(b)) - i}"
            )


def expandable(x: torch.Tensor, shape: Sequence[int]) -> None:
    fits = all(size in (1, wanted) for size, wanted in zip(reversed(x.shape), reversed(shape), strict=False))
    if not fits or x.dim() > len(shape):
        x.expand(*shape)  # raises in torch's words


def _first_two(expected: list[int], found: list[int]) -> str:
    return f"Expected size for first two dimensions of batch2 tensor to be: {expected} but got: {found}."


def by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape))


# --- Dtypes and devices ---


def same_dtype(kind: str, a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None = None) -> None:
    """One dtype of all; kind: "dot", "mv", "mm", "addmm", "bmm" or "baddbmm", the product of torch that speaks."""
    if a.dtype == b.dtype and (input is None or input.dtype == b.dtype):
        return
    if kind == "baddbmm":
        assert input is not None
        if a.dtype == input.dtype:  # torch compares only the first two
            raise RuntimeError(f"expected scalar type {_scalar(a)} but found {_scalar(b)}")
        found = f"input {_cxx(input.dtype)}, batch1: {_cxx(a.dtype)}, batch2: {_cxx(b.dtype)}"
        raise RuntimeError(f"Input dtypes must be the same, got: {found}")
    if kind == "addmm":
        assert input is not None
        name, x = ("self", input) if input.dtype != b.dtype else ("mat1", a)
        raise RuntimeError(f"{name} and mat2 must have the same dtype, but got {_scalar(x)} and {_scalar(b)}")
    if kind == "dot":
        found = f"{_scalar(a)} and {_scalar(b)}"
        raise RuntimeError(f"dot : expected both vectors to have same dtype, but found {found}")
    if kind == "mv":
        found = f"{_scalar(b)}, {_scalar(a)}, and {_scalar(b)}"
        raise RuntimeError(f"addmv input tensors must have the same dtype, but got {found}")
    if kind == "bmm":
        raise RuntimeError(f"expected scalar type {_scalar(a)} but found {_scalar(b)}")
    operands = "mat1 and mat2" if a.is_cuda else "m1 and m2"  # torch's words differ by device
    raise RuntimeError(f"expected {operands} to have the same dtype, but got: {_cxx(a.dtype)} != {_cxx(b.dtype)}")


def out_dtype(
    wanted: torch.dtype | None, a: torch.Tensor, input: torch.Tensor | None = None, name: str = "mat1"
) -> None:
    """fp32 of fp16 and bf16, to which `input` may be given in fp32 too; else the operands' own."""
    if wanted is None:
        return
    if wanted != a.dtype and (wanted != torch.float32 or a.dtype not in HALF):
        raise RuntimeError(
            f"out_dtype must be the same as input dtype or fp32 for fp16/bf16 inputs, not {wanted} of {a.dtype}"
        )
    if input is not None and input.dtype not in (wanted, a.dtype):
        raise RuntimeError(f"self dtype must match either out_dtype or {name} dtype, not {input.dtype}")


def computable(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
    devices: Sequence[str] = ("cuda", "cpu"),
) -> None:
    """Whether there is a kernel for operands that torch would take."""
    for x in (b, input):
        if x is not None and x.device != a.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{a.device} and {x.device}!"
            )
    for x in (a, b):
        if x.layout != torch.strided:
            raise NotImplementedError(f"{function} takes strided tensors, got {x.layout}")
    if a.dtype not in dtypes:
        shapes = f"{by(a.shape)} and {by(b.shape)}"
        raise NotImplementedError(f"{function} is not implemented for {a.dtype} ({shapes}); it takes {names(dtypes)}")
    if a.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{function} runs on CUDA tensors; to run its kernels on CPU tensors in Triton's interpreter, "
            "set TRITON_INTERPRET=1 before importing triton_gemm"
        )
    if a.device.type not in devices:
        raise NotImplementedError(f"{function} runs on CUDA tensors, got tensors on {a.device}")


# --- out= ---


def out(out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, asked: bool = False) -> None:
    """torch's rules for `out=`: same dtype and device, resized where its shape differs, no overlap in itself. asked:
    whether dtype is an out_dtype=."""
    if asked and out.dtype != dtype:
        raise RuntimeError(
            f"out_dtype must be the same as the dtype of the provided out tensor, got {dtype} and {out.dtype}"
        )
    if out.dtype != dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {_cxx(dtype)}, but got {_cxx(out.dtype)} instead")
    if out.device != device:
        raise RuntimeError(f"Expected out tensor to have device {device}, but got {out.device} instead")
    if tuple(out.shape) != tuple(shape):
        if out.numel() > 0:
            warnings.warn(
                "An output with one or more elements was resized since it had shape "
                f"{list(out.shape)}, which does not match the required output shape {list(shape)}. This behavior is "
                "deprecated, and in a future PyTorch release outputs will not be resized unless they have zero "
                "elements.",
                stacklevel=4,
            )
        out.resize_(shape)
    if not torch.compiler.is_compiling() and overlaps_itself(out):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            "location. Please clone() the tensor before performing the operation."
        )


def no_grad_into_out(function: str) -> RuntimeError:
    return RuntimeError(
        f"{function}(): functions with out=... arguments don't support automatic differentiation, but one of the "
        "arguments requires grad."
    )


def may_alias(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory behind x and y overlaps, though perhaps not in the elements they show."""
    x_storage, y_storage = x.untyped_storage(), y.untyped_storage()
    x_start, y_start = x_storage.data_ptr(), y_storage.data_ptr()
    return x_start < y_start + y_storage.nbytes() and y_start < x_start + x_storage.nbytes()


# --- Names of dtypes ---

# As torch's C++ messages print them: the C++ type, and the ScalarType.
_NAMES = {
    torch.float16: ("c10::Half", "Half"),
    torch.bfloat16: ("c10::BFloat16", "BFloat16"),
    torch.float32: ("float", "Float"),
    torch.float64: ("double", "Double"),
    torch.uint8: ("unsigned char", "Byte"),
    torch.int8: ("signed char", "Char"),
    torch.int16: ("short int", "Short"),
    torch.int32: ("int", "Int"),
    torch.int64: ("long int", "Long"),
    torch.bool: ("bool", "Bool"),
}


def _cxx(dtype: torch.dtype) -> str:
    return _NAMES[dtype][0] if dtype in _NAMES else str(dtype).removeprefix("torch.")


def _scalar(x: torch.Tensor) -> str:
    return _NAMES[x.dtype][1] if x.dtype in _NAMES else str(x.dtype).removeprefix("torch.")


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))
