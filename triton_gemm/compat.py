"""The differences between the Tritons this package runs on (3.6 to 3.9) and their interpreter, in one place."""

from __future__ import annotations

import triton
import triton.language as tl
from triton.experimental.gluon.language.nvidia.hopper import tma

# Whether kernels made from here on run in Triton's interpreter; it is read when triton.jit decorates.
INTERPRETED: bool = bool(triton.knobs.runtime.interpret)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def dot_operand(x):
    """x, or in the interpreter its fp32 value: NumPy has no bf16, multiplies its bits (triton#11584), and a cast
    from it flushes subnormals."""
    if _INTERPRETED and x.dtype == tl.bfloat16:
        return (x.to(tl.uint16, bitcast=True).to(tl.uint32) << 16).to(tl.float32, bitcast=True)
    else:
        return x


@triton.jit
def round_to(x, dtype: tl.constexpr):
    """fp32 x rounded to nearest even in dtype; the interpreter's own cast to bf16 truncates."""
    if _INTERPRETED and dtype == tl.bfloat16:
        bits = x.to(tl.uint32, bitcast=True)
        nearest = bits + 0x7FFF + ((bits >> 16) & 1)
        bits = tl.where(x == x, nearest, bits)  # a NaN must not carry into the exponent
        return (bits >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        return x.to(dtype)


# Triton 3.9 renamed Gluon's TMA copies and removed the old names.
tma_load = getattr(tma, "async_load", None) or tma.async_copy_global_to_shared
tma_store = getattr(tma, "async_store", None) or tma.async_copy_shared_to_global
