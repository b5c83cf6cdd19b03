"""torch's rules for products, and torch's words for what breaks them.

Every function here raises what torch's function raises for the same mistake, with the same first sentence, because
torch itself is asked for it (`refuse`), or in words of torch's source where torch has them on a GPU alone.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from math import prod
from typing import NoReturn

import torch
from torch.autograd import forward_ad

from .. import arguments
from ..arithmetic import ARITHMETICS, DTYPES, FLOATING, MODES, default_arithmetic, name_of, result_dtype
from ..compat import INTERPRETED, differ, differentiates_forward, may_differ, overlaps_itself
from ..problem import ACTIVATIONS, GATES


def activation(function: str, name: str | None) -> None:
    if isinstance(name, str) and name in GATES:
        raise ValueError(f"{function}(): {name} takes a second weight: call linear or grouped_matmul with gate=")
    arguments.one_of(function, "activation", name, ACTIVATIONS, or_none=True)


def gate_name(function: str, name: str | None) -> None:
    """That an activation is a gate's. The message for an activation that a gate has names the gate."""
    for gate, applied in GATES.items():
        if isinstance(name, str) and name == applied:
            raise ValueError(f'{function}(): with a gate activation must be "{gate}", the gate of {name}, not {name!r}')
    arguments.one_of(function, "activation", name, tuple(GATES))


def gate(function: str, name: str | None, x: torch.Tensor | None, weights: str) -> str:
    """What an activation, which must be a gate's, applies to the product of `x`. weights: the shapes and the names of
    the two, of which the second is x."""
    gate_name(function, name)
    assert name is not None
    if x is None:
        raise ValueError(f"{function}(): {name} takes two weights, {weights} and gate, and gate is missing")
    return GATES[name]


def precision(function: str, name: str | None, dtype: torch.dtype) -> None:
    if name is None:
        return
    arguments.one_of(function, "precision", name, MODES, or_none=True)
    if dtype not in ARITHMETICS[name].dtypes:
        raise ValueError(f"{function}(): precision says how fp32 is multiplied, and operands are {dtype}")


# --- Shapes and dtypes ---


def refuse(product: Callable[..., object], **operands: torch.Tensor | None) -> NoReturn:
    """Raises what torch's product of the same operands, given by torch's names, raises: they do not go together. Its
    words differ from version to version and from device to device, and leave out names, shapes or dtypes, which are
    added.

    autocast, which would make one dtype of several, is off: where it applies, operands have been cast before.
    """
    given = {name: x for name, x in operands.items() if x is not None}
    device = next(iter(given.values())).device.type
    cast = device in ("cuda", "cpu") and torch.is_autocast_enabled(device)
    try:
        with torch.autocast(device, enabled=False) if cast else nullcontext():
            product(*operands.values())
    except (RuntimeError, IndexError) as error:
        raised: Exception = error
    else:  # torch takes them, or looks at them only later, as on the meta device
        same_device(*operands.values())
        kind = "dtypes" if len({x.dtype for x in given.values()}) > 1 else "shapes"
        raised = RuntimeError(f"{product.__name__}: operands of these {kind} are not taken")
    first_line = str(raised).splitlines()[0].rstrip(".")
    raise type(raised)(f"{first_line}; got {shown(**given)}") from None


def shown(**operands: torch.Tensor) -> str:
    return ", ".join(f"{name} {name_of(x.dtype)}{list(x.shape)}" for name, x in operands.items())


def mm(a: torch.Tensor, b: torch.Tensor, names: tuple[str, str] = ("input", "mat2")) -> None:
    if not (a.dim() == b.dim() == 2 and not differ(a.shape[1], b.shape[0]) and a.dtype == b.dtype):
        refuse(torch.mm, **dict(zip(names, (a, b), strict=True)))


def bmm(a: torch.Tensor, b: torch.Tensor) -> None:
    if not (_are_batches(a, b) and a.dtype == b.dtype):
        refuse(torch.bmm, input=a, mat2=b)


def mv(a: torch.Tensor, b: torch.Tensor) -> None:
    if not (a.dim() == 2 and b.dim() == 1 and not differ(a.shape[1], b.shape[0]) and a.dtype == b.dtype):
        refuse(torch.mv, input=a, vec=b)


def addmm(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: torch.dtype | None) -> None:
    if wanted is not None:
        arguments.dtype(wanted)
    matrices = a.dim() == b.dim() == 2 and not differ(a.shape[1], b.shape[0]) and a.dtype == b.dtype
    if not (matrices and expands(input, (a.shape[0], b.shape[1])) and (wanted or input.dtype == a.dtype)):
        refuse(torch.addmm, input=input.to(a.dtype) if wanted else input, mat1=a, mat2=b)
    out_dtype(wanted, a, input, "mat1")


def baddbmm(input: torch.Tensor, a: torch.Tensor, b: torch.Tensor, wanted: torch.dtype | None) -> None:
    if wanted is not None:
        arguments.dtype(wanted)
    batches = _are_batches(a, b) and a.dtype == b.dtype
    if not (batches and expands(input, (*a.shape[:2], b.shape[2])) and (wanted or input.dtype == a.dtype)):
        refuse(torch.baddbmm, input=input.to(a.dtype) if wanted else input, batch1=a, batch2=b)
    out_dtype(wanted, a, input, "batch1")


def matmul(a: torch.Tensor, b: torch.Tensor) -> None:
    ranks = a.dim() > 0 < b.dim()
    if not (ranks and not differ(a.shape[-1], b.shape[-2 if b.dim() > 1 else 0]) and a.dtype == b.dtype):
        refuse(torch.matmul, input=a, other=b)
    if a.dim() > 2 and b.dim() > 2:
        batches = zip(reversed(a.shape[:-2]), reversed(b.shape[:-2]), strict=False)
        if any(differ(x, y) and may_differ(x, 1) and may_differ(y, 1) for x, y in batches):
            refuse(torch.matmul, input=a, other=b)


def linear(a: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """a [.., K], weight [N, K] or [K], and what can be added to their product, for which torch folds a's rows into one
    dimension."""
    ranks = a.dim() > 0 and weight.dim() in (1, 2)
    if not (ranks and not differ(a.shape[-1], weight.shape[-1]) and a.dtype == weight.dtype):
        refuse(torch.nn.functional.linear, input=a, weight=weight, bias=bias)
    if bias is None:
        return
    rows = a.shape[:-1] if bias.dim() > 1 else (prod(a.shape[:-1]),)
    fits = expands(bias, (*rows, weight.shape[0])) if weight.dim() == 2 else bias.dim() == 0
    if not fits or bias.dtype != a.dtype:
        refuse(torch.nn.functional.linear, input=a, weight=weight, bias=bias)


def gated(
    function: str,
    a: torch.Tensor,
    up: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
) -> None:
    """Whether a [.., K] can be multiplied by both weights [N, K], and what is added to each product is [N]."""
    for x in (up, gate, bias, gate_bias):
        same_device(a, x)
    strided(function, a, up, gate, bias, gate_bias)
    shapes = f"{list(a.shape)} with weight {list(up.shape)} and gate {list(gate.shape)}"
    pair = up.dim() == gate.dim() == 2 and not differ(up.shape[0], gate.shape[0])
    if a.dim() == 0 or not pair or differ(up.shape[1], a.shape[-1]) or differ(gate.shape[1], a.shape[-1]):
        raise RuntimeError(f"{function}(): input [.., K] goes with weight and gate [N, K]; got {shapes}")
    for name, x in (("bias", bias), ("gate_bias", gate_bias)):
        if x is not None and not may_be(x.shape, up.shape[:1]):
            raise RuntimeError(
                f"{function}(): {name} must be [N] = {list(up.shape[:1])} with a gate, not {list(x.shape)}"
            )
    dtypes = {x.dtype for x in (a, up, gate, bias, gate_bias) if x is not None}
    if len(dtypes) > 1:
        raise RuntimeError(
            f"{function}(): all must be of one dtype, got {', '.join(sorted(map(str, dtypes)))}; {shapes}"
        )
    computable(function, a, up, dtypes=FLOATING, devices=("cuda", "cpu", "meta"))


def residual(function: str, a: torch.Tensor, weight: torch.Tensor, x: torch.Tensor) -> None:
    """Whether x can be added to the product of a [.., K] and a weight [N, K] or [K] that go together."""
    same_device(a, x)
    strided(function, x)
    shape = (*a.shape[:-1], *weight.shape[:-1])
    if x.dtype != a.dtype or not expands(x, shape):
        raise RuntimeError(
            f"{function}(): residual must be of {a.dtype} and broadcast to the result {list(shape)}, "
            f"not {x.dtype} of {list(x.shape)}"
        )


def grouped(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor | None, gate: torch.Tensor | None = None) -> None:
    if gate is not None:
        gate_of_groups(a, b, gate, 2)
    for name, x in (("mat_a", a), ("mat_b", b)):
        if x.dim() not in (2, 3):
            raise RuntimeError(f"{name} has to be 2 or 3d, not {x.dim()}d")
    if differ(a.shape[-1], b.shape[-2]):
        raise RuntimeError(f"contraction dimension of mat_a and mat_b must match, not {by(a.shape)} and {by(b.shape)}")
    if a.dtype != b.dtype:
        raise RuntimeError(
            f"mat_a and mat_b must have the same dtype, not {a.dtype} and {b.dtype}; autocast does not cast them"
        )
    if offs is None or a.dim() == b.dim() == 3:
        raise RuntimeError("Have to provide offsets if there is a 2d matrix, or no offset if both matrices are 3d")
    arguments.tensors("grouped_matmul", mat_a=a, mat_b=b, offs=offs)
    if offs.dim() != 1 or offs.device != a.device:
        raise RuntimeError(f"Offsets have to be 1d on {a.device}, not {offs.dim()}d on {offs.device}")
    if offs.dtype != torch.int32:
        raise RuntimeError(f"Offsets have to be int32, not {offs.dtype}")
    batched = next((x for x in (a, b) if x.dim() == 3), None)
    if batched is not None and differ(batched.shape[0], offs.shape[0]):
        raise RuntimeError(f"matrix batch sizes have to match, not {batched.shape[0]} matrices and {len(offs)} offsets")


def gate_of_groups(a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, rank: int) -> None:
    """Whether b and `gate` are matrices for each group, or of a batch, of a, which has that rank."""
    same_device(a, b, gate)
    strided("grouped_matmul", a, b, gate)
    pair = b.dim() == 3 and may_be(gate.shape, b.shape) and a.dtype == b.dtype == gate.dtype
    if not pair or a.dim() != rank or differ(a.shape[-1], b.shape[1]) or (rank == 3 and differ(a.shape[0], b.shape[0])):
        raise RuntimeError(
            "grouped_matmul(): with a gate mat_a is [M, K] (without offs [G, M, K]), and mat_b and gate are "
            f"[G, K, N], all of one dtype, as autocast does not cast them; got {shown(mat_a=a, mat_b=b, gate=gate)}"
        )


def _are_batches(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.dim() == b.dim() == 3 and not differ(a.shape[0], b.shape[0]) and not differ(a.shape[2], b.shape[1])


def expands(x: torch.Tensor, shape: Sequence[int]) -> bool:
    """Whether x broadcasts to the shape, as far as sizes are known."""
    sizes = zip(reversed(x.shape), reversed(shape), strict=False)
    return x.dim() <= len(shape) and not any(differ(size, wanted) and may_differ(size, 1) for size, wanted in sizes)


def may_be(shape: Sequence[int], wanted: Sequence[int]) -> bool:
    """Whether a shape is the one wanted, as far as sizes are known."""
    return len(shape) == len(wanted) and not any(map(differ, shape, wanted))


def by(shape: Sequence[int]) -> str:
    return "x".join(map(str, shape)) or "0-D"


def out_dtype(
    wanted: torch.dtype | None, a: torch.Tensor, input: torch.Tensor | None = None, name: str = "mat1"
) -> None:
    """fp32 of fp16 and bf16, to which `input` may be given in fp32 too; else the one that there is without it."""
    if wanted is None:
        return
    arguments.dtype(wanted)
    others = default_arithmetic(a.dtype).out_dtypes if a.dtype in DTYPES else ()
    if wanted not in (result_dtype(a.dtype), *others):
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
    """Whether there is a kernel for operands that torch would take, and their device runs it."""
    implemented(function, a, b, input, dtypes=dtypes)
    runs(function, a, devices)


def runs(function: str, a: torch.Tensor, devices: Sequence[str] = ("cuda", "cpu")) -> None:
    """Whether kernels run where operands lie."""
    if a.device.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            f"{function} runs on CUDA tensors; to run its kernels on CPU tensors in Triton's interpreter, "
            "set TRITON_INTERPRET=1 before Python starts"
        )
    if a.device.type not in devices:
        raise NotImplementedError(f"{function} runs on CUDA tensors, got tensors on {a.device}")


def same_device(a: torch.Tensor | None, *others: torch.Tensor | None) -> None:
    """Whether all are on the device of the first."""
    for x in others:
        if a is not None and x is not None and x.device != a.device:
            raise RuntimeError(
                "Expected all tensors to be on the same device, but found at least two devices, "
                f"{a.device} and {x.device}!"
            )


def strided(function: str, *tensors: torch.Tensor | None) -> None:
    """Whether none is sparse. Dynamo may not ask for a layout in a backward that it traces; the operator refuses it."""
    for x in () if torch.compiler.is_dynamo_compiling() else tensors:
        if x is not None and x.layout != torch.strided:
            raise NotImplementedError(f"{function} takes strided tensors, got {x.layout}")


def implemented(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    *,
    dtypes: Sequence[torch.dtype] = DTYPES,
) -> None:
    """Whether there is a kernel for such operands, wherever it would run."""
    same_device(a, b, input)
    strided(function, a, b, input)
    if a.dtype not in dtypes:
        shapes = f"{by(a.shape)} and {by(b.shape)}"
        alone = "; int8 goes without bias, input, residual, gate, activation and groups" * (a.dtype == torch.int8)
        takes = f"it takes {names(dtypes)}{alone}"
        raise NotImplementedError(f"{function} is not implemented for {a.dtype} ({shapes}); {takes}")


# --- out= ---


def out(
    out: torch.Tensor, shape: Sequence[int], dtype: torch.dtype, device: torch.device, has_out_dtype: bool = False
) -> None:
    """torch's rules for `out=`: same dtype and device, resized where its shape differs, no overlap in itself. asked:
    whether dtype is an out_dtype=."""
    if has_out_dtype and out.dtype != dtype:
        raise RuntimeError(
            f"out_dtype must be the same as the dtype of the provided out tensor, got {dtype} and {out.dtype}"
        )
    if out.dtype != dtype:
        raise RuntimeError(f"Expected out tensor to have dtype {_cxx(dtype)}, but got {_cxx(out.dtype)} instead")
    if out.device != device:
        raise RuntimeError(f"Expected out tensor to have device {device}, but got {out.device} instead")
    compiling = torch.compiler.is_compiling()
    if not compiling and out.is_inference() and not torch.is_inference_mode_enabled():
        raise RuntimeError(
            "Inplace update to inference tensor outside InferenceMode is not allowed.You can make a clone to get a "
            "normal tensor before doing inplace update."
        )
    if not may_be(out.shape, shape):
        if out.numel() > 0:
            warnings.warn(
                "An output with one or more elements was resized since it had shape "
                f"{list(out.shape)}, which does not match the required output shape {list(shape)}. This behavior is "
                "deprecated, and in a future PyTorch release outputs will not be resized unless they have zero "
                "elements.",
                stacklevel=6,  # of `product`, whose callers are public functions' `_product`
            )
        out.resize_(shape)
    if not compiling and overlaps_itself(out):
        raise RuntimeError(
            "unsupported operation: more than one element of the written-to tensor refers to a single memory "
            f"location. Please clone() the tensor before performing the operation; got {shown(out=out)}"
        )


def no_grad_into_out(function: str) -> RuntimeError:
    return RuntimeError(
        f"{function}(): functions with out=... arguments don't support automatic differentiation, but one of the "
        "arguments requires grad."
    )


def no_tangents(function: str, *tensors: torch.Tensor | None) -> None:
    """Whether nothing is to be differentiated forwards, which `function` does not do."""
    if not differentiates_forward(*tensors):
        return
    if any(x is not None and forward_ad.unpack_dual(x).tangent is not None for x in tensors):
        raise NotImplementedError(f"{function} is not differentiated forwards")


def may_alias(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether the memory behind x and y overlaps, though perhaps not in the elements they show."""
    x_storage, y_storage = x.untyped_storage(), y.untyped_storage()
    x_start, y_start = x_storage.data_ptr(), y_storage.data_ptr()
    return x_start < y_start + y_storage.nbytes() and y_start < x_start + x_storage.nbytes()


# --- Names of dtypes ---

# As torch's C++ messages print them.
_CXX = {
    torch.float16: "c10::Half",
    torch.bfloat16: "c10::BFloat16",
    torch.float32: "float",
    torch.float64: "double",
    torch.uint8: "unsigned char",
    torch.int8: "signed char",
    torch.int16: "short int",
    torch.int32: "int",
    torch.int64: "long int",
    torch.bool: "bool",
}


def _cxx(dtype: torch.dtype) -> str:
    return _CXX.get(dtype, name_of(dtype))


def names(dtypes: Sequence[torch.dtype]) -> str:
    return ", ".join(map(str, dtypes))
