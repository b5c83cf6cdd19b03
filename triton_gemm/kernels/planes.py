"""fp32 values as sums of planes (`arithmetic.py`)."""

import triton
import triton.language as tl

from ..compat import INTERPRETED, dot_operand, round_tf32, round_to

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def split(x, dtype: tl.constexpr, PLANES: tl.constexpr):
    """Tuple of PLANES that add up to fp32 x, each bf16, or tf32 in fp32, and what rounding to nearest leaves over from
    those before; a single one is x itself. Where x is finite they are: it is rounded to the largest, not to infinity.
    """
    if PLANES == 1:
        return (x,)
    else:
        LARGEST: tl.constexpr = 3.3895313892515355e38 if dtype == tl.bfloat16 else 3.4011621342146535e38
        finite = tl.abs(x) < float("inf")
        first = nearest(tl.where(finite, tl.clamp(x, -LARGEST, LARGEST), x), dtype)
        left = tl.where(finite, x - dot_operand(first).to(tl.float32), 0.0)
        second = nearest(left, dtype)
        if PLANES == 2:
            return first, second
        else:
            tl.static_assert(PLANES == 3)
            return first, second, nearest(left - dot_operand(second).to(tl.float32), dtype)


@triton.jit
def nearest(x, dtype: tl.constexpr, INTERPRETED: tl.constexpr = _INTERPRETED):
    """fp32 x rounded to nearest bf16, or to nearest tf32 in fp32."""
    if dtype == tl.float32:
        return round_tf32(x)
    elif INTERPRETED:
        return round_to(x, dtype)
    else:  # Two at once: one by one, as the compiler would, at a quarter of the rate
        instruction: tl.constexpr = "cvt.rn.bf16x2.f32 $0, $2, $1;"
        return tl.inline_asm_elementwise(instruction, "=r,r,r", [x], tl.bfloat16, is_pure=True, pack=2)
