"""The one epilogue: what happens to sums between the accumulators and C, in every kernel."""

import triton
import triton.language as tl

from ..compat import multiply_add, power_of_two, reciprocal


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """fp32 or fp64 x through "relu", "gelu" (erf), "gelu_tanh" or "silu" of torch.nn.functional, or none. Of -inf all
    but "relu" are NaN, as torch's are, which a product with gradients runs."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # not maximum(x, 0): a NaN stays one
    elif ACTIVATION == "gelu" and x.dtype == tl.float64:
        return 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    elif ACTIVATION == "gelu":
        # x Phi(x) = max(x, 0) - |x| Phi(-|x|), which cancels nowhere
        z = tl.abs(tl.minimum(x, 30.0))  # where Phi(-z) is 0, and infinity times it a NaN, which torch has of -inf only
        return tl.where(x < 0, 0.0, x) - z * upper_tail(z)
    elif ACTIVATION == "gelu_tanh":
        # 1 + tanh(z) = 2 sigmoid(2z)
        z = 0.7978845608028654 * (x + 0.044715 * x * x * x)
        return x / (1.0 + tl.exp(-2.0 * z))
    elif ACTIVATION == "silu":
        return x / (1.0 + tl.exp(-x))
    else:
        tl.static_assert(ACTIVATION is None or ACTIVATION == "", "unknown activation")
        return x


@triton.jit
def upper_tail(z):
    """Phi(-z) = erfc(z / sqrt 2) / 2 for z >= 0, to a relative 1e-6 up to z = 3, 2e-6 up to 6, 1.3e-5 up to 13.

    erfc by W. H. Press et al., Numerical Recipes, 6.2 (`erfcc`), with 1 / sqrt 2, log2 e and the half in its constants.
    It takes two thirds of the instructions of a division and an exponential that handle all of fp32.
    """
    t = reciprocal(1.0 + 0.35355339059327373 * z)
    p = -1.1861149 + t * 0.2465173
    p = 2.1474745 + t * p
    p = -1.6377532 + t * p
    p = 0.40232158 + t * p
    p = -0.26875686 + t * p
    p = 0.13963006 + t * p
    p = 0.53970062 + t * p
    p = 1.4427292 + t * p
    return t * power_of_two(z * z * -0.7213475204444817 - 2.8257482 + t * p)


@triton.jit
def scaled(acc, a_scale, b_scale):
    """fp32 acc a_scale b_scale, with the bits of acc (a_scale b_scale) where that product of scales stays in fp32's
    range. Elsewhere it is right, too: a_scale's power goes to acc, which is exact, and its rest to b_scale.

    That takes b_scale to be 0 or at least 2^-125, and acc to be 0 or between 2^-32 and 2^62."""
    rest, power = apart(a_scale)
    return acc.to(tl.float32) * power * (rest * b_scale)


@triton.jit
def scaled_once(acc, a_scale, b_scale):
    """(acc with the rests of one scale for all of A and one for B, their powers, which are alpha's): `scaled` at the
    cost of acc (a_scale b_scale)."""
    a_rest, a_power = apart(a_scale)
    b_rest, b_power = apart(b_scale)
    return acc.to(tl.float32) * (a_rest * b_rest), a_power * b_power


@triton.jit
def apart(scale):
    """(scale / p, p) of fp32, exactly: p is the power of two from 2^-63 to 2^63 next above scale."""
    exponent = scale.to(tl.int32, bitcast=True) & 0x7F800000
    power = tl.minimum(tl.maximum(exponent, 0x1F800000), 0x5E800000) + 0x800000
    return scale * (0x7F000000 - power).to(tl.float32, bitcast=True), power.to(tl.float32, bitcast=True)


@triton.jit
def gated(up, gate, ACTIVATION: tl.constexpr):
    """activation(gate) * up in their dtype."""
    return activate(gate, ACTIVATION) * up


@triton.jit
def biased(acc, bias, HAS_BIAS: tl.constexpr):
    """acc + bias in acc's dtype; the bias is read only where HAS_BIAS says so."""
    if HAS_BIAS:
        acc += bias.to(acc.dtype)
    return acc


@triton.jit
def before_activation(acc, alpha, beta, c, bias, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr):
    """alpha acc + beta c + bias in acc's dtype; c and bias, already broadcast against acc, are read only where HAS_BETA
    and HAS_BIAS say so. Where HAS_BETA is 2 beta c comes later. Integers are what they are: acc alone.

    beta c is rounded by itself, as CUTLASS does it. The compiler, if left to itself, fuses either product with the
    addition. In some kernels that was alpha acc, so that equal sums became elements of C that differ in a bit."""
    if acc.dtype == tl.int32:
        return acc
    elif HAS_BETA == 1:
        return biased(multiply_add(alpha, acc, beta * c.to(acc.dtype)), bias, HAS_BIAS)
    elif HAS_BIAS:
        return multiply_add(alpha, acc, bias.to(acc.dtype))
    else:
        return alpha * acc


@triton.jit
def after_activation(x, beta, c, HAS_BETA: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(x), plus beta c where HAS_BETA is 2, in x's dtype. Integers are what they are."""
    if x.dtype == tl.int32:
        return x
    elif HAS_BETA == 2:
        return multiply_add(beta, c.to(x.dtype), activate(x, ACTIVATION))
    else:
        return activate(x, ACTIVATION)
