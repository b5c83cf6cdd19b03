"""Triton's language: whether kernels are compiled or interpreted, and device functions that have another body in the
interpreter, which lacks dtypes and all inline PTX. It is the first module of the room to be imported: where Triton's
interpreter cannot be had, importing Triton fails here, and here it is said what is missing."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib import metadata
from typing import Any

try:
    import triton
except ModuleNotFoundError as error:
    if error.name != "numpy":
        raise
    raise ModuleNotFoundError(
        "TRITON_INTERPRET=1 selects Triton's interpreter, which needs NumPy: pip install numpy", name="numpy"
    ) from error
import triton.language as tl

from .locks import free_in_children

# Whether kernels made from here on run in Triton's interpreter; it is read when triton.jit decorates.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

# Held by each launch: the interpreter keeps the program's index, and its changes of triton.language, for all threads.
interpreting: AbstractContextManager[Any] = free_in_children(threading.RLock()) if INTERPRETED else nullcontext()

if isinstance(tl.cdiv, triton.runtime.jit.JITFunction) is INTERPRETED:  # Triton's own functions were decorated before
    raise ImportError("TRITON_INTERPRET was changed after `import triton`: set it, or unset it, before Python starts")
if INTERPRETED and triton.__version__.startswith("3.6."):
    _numpy = tuple(map(int, metadata.version("numpy").split(".")[:2]))
    if _numpy >= (2, 4):
        raise ImportError("Triton 3.6's interpreter does not run on NumPy 2.4 or newer: pip install 'numpy<2.4'")

# Device functions take it as a default. Were it a global of theirs, a kernel's key in Triton's cache would depend on
# which kernel came first in the process: Triton adds a function's globals to those callers alone that are hashed after
# it.
_INTERPRETED = tl.constexpr(INTERPRETED)


@contextmanager
def decorating() -> Iterator[None]:
    """Inside, kernels are decorated for the interpreter or the compiler as those before, whatever TRITON_INTERPRET says
    by now."""
    with triton.knobs.runtime.scope():
        triton.knobs.runtime.interpret = INTERPRETED
        yield


@triton.jit
def dot_operand(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """x, or in the interpreter the fp32 value of bf16 or fp8: NumPy has neither, multiplies bf16's bits
    (triton#11584), and casts from them flush subnormals and lose the NaN of float8_e4m3fn."""
    if INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    elif INTERPRETED and x.dtype == tl.float8e5:  # the upper half of an fp16
        return (x.to(tl.uint8, bitcast=True).to(tl.uint16) << 8).to(tl.float16, bitcast=True).to(tl.float32)
    elif INTERPRETED and x.dtype == tl.float8e4nv:  # an fp16 without the last bits, and with another bias
        bits = x.to(tl.uint8, bitcast=True).to(tl.uint16)
        value = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True).to(tl.float32) * 256
        return tl.where((bits & 0x7F) == 0x7F, float("nan"), value)
    else:
        return x


@triton.jit
def number(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """A launch's scalar in dtype; in the interpreter it is Python's, which any dtype goes with."""
    if INTERPRETED:
        return x
    else:
        return tl.cast(x, dtype)


@triton.jit
def multiply_add(x, y, z, INTERPRETED: tl.constexpr = _INTERPRETED):
    """x y + z, rounded once; in the interpreter, where x may be a `number`, twice."""
    if INTERPRETED:
        return x * y + z
    else:
        return tl.fma(x, y, z)


@triton.jit
def round_to(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """fp32 x rounded to nearest even in dtype; the interpreter's own cast to bf16 truncates."""
    if INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)  # a NaN must not carry into the exponent
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


@triton.jit
def round_tf32(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """fp32 x rounded to TF32: to nearest, ties away from zero, as `cvt.rna.tf32.f32` (PTX ISA, `cvt`). A NaN stays one,
    of which that instruction makes infinity where its payload lies in the bits that it drops."""
    if INTERPRETED:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    else:
        asm: tl.constexpr = "cvt.rna.tf32.f32 $0, $1;"
        nearest = tl.inline_asm_elementwise(asm, "=r,r", [x], tl.float32, is_pure=True, pack=1)
    return tl.where(x == x, nearest, float("nan"))


@triton.jit
def reciprocal(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """1 / x of fp32 to 1 ulp, for x between 1 and 2^126, and above it 0: one instruction, and none for the ends of
    fp32's range."""
    if INTERPRETED:
        return 1.0 / x
    else:
        return tl.inline_asm_elementwise("rcp.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def power_of_two(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """2^x of fp32 to 2 ulp, 0 where that would be subnormal: one instruction."""
    if INTERPRETED:
        return tl.exp2(x)
    else:
        return tl.inline_asm_elementwise("ex2.approx.ftz.f32 $0, $1;", "=r,r", [x], tl.float32, is_pure=True, pack=1)


@triton.jit
def prefetch(pointers, INTERPRETED: tl.constexpr = _INTERPRETED):
    """Asks for the sectors of global memory around the pointers to be fetched into L2. Nothing in the interpreter."""
    if not INTERPRETED:
        asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.b32 $0, 0;"
        tl.inline_asm_elementwise(asm, "=r,l", [pointers.to(tl.int64)], tl.int32, is_pure=False, pack=1)


def multiplies_block_scaled(_semantic: Any = None) -> tl.constexpr:
    """Whether a kernel is compiled for compute capability 12.0, where GeForce has its full rate in fp8 with scales of
    blocks only. False in the interpreter. For 12.1 Triton 3.7 makes bf16 of such products."""
    arch = None if _semantic is None else _semantic.builder.options.arch
    return tl.constexpr(arch == "sm120")


multiplies_block_scaled.__triton_builtin__ = True  # type: ignore[attr-defined]
