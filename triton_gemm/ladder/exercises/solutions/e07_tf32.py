"""TF32: fp32 operands are rounded to 10 bits of mantissa, not cut off (k07).

A tensor core ignores the last 13 bits of an fp32 operand in TF32. Left as they are, that truncates: every operand
shrinks, and the error of a sum grows with its length. Round to nearest first, ties away from zero, as
`cvt.rna.tf32.f32` does. A NaN stays one, also when its last 13 bits are ignored. The interpreter has no inline
assembly: use integers.

Checked: the bits of the rounded values, of ties, carries, subnormals, infinities and NaNs of both signs among them.
"""

import triton
import triton.language as tl


@triton.jit
def round_tf32(x):
    """fp32 x with the last 13 bits rounded away."""
    bits = x.to(tl.uint32, bitcast=True)
    # FILL IN: `rounded`, the bits of x rounded to nearest, ties away from zero. A NaN stays one.
    rounded = (bits + 0x1000) & 0xFFFFE000
    rounded = tl.where(x == x, rounded, 0x7FFFE000)
    # BEFORE:
    # rounded = bits & 0xFFFFE000
    # END
    return rounded.to(tl.uint32).to(tl.float32, bitcast=True)


@triton.jit
def kernel(x_ptr, out_ptr, count, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + offs, mask=offs < count, other=0.0)
    tl.store(out_ptr + offs, round_tf32(x), mask=offs < count)


def run(x, out):
    """out = x rounded to TF32; both are one row in fp32."""
    kernel[(1,)](x, out, x.shape[1], BLOCK=triton.next_power_of_2(x.shape[1]))


HINTS = (
    "The sign is a bit of its own, so magnitudes can be rounded as whole numbers: add half of the last bit that stays, "
    "then clear the bits below it. A carry into the exponent is right as it is.",
    "Half a unit in the last place of tf32 is 0x1000. A NaN with only low mantissa bits set would become infinity: "
    "detect NaNs by `x == x`, which is false.",
)
