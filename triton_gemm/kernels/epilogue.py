"""The one epilogue: what happens to sums between the accumulators and C, in every kernel."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """fp32 x through "relu", "gelu" (erf), "gelu_tanh" or "silu" of torch.nn.functional, or none (None or "")."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # not maximum(x, 0): a NaN stays one
    elif ACTIVATION == "gelu":
        # x Phi(x) = max(x, 0) - |x| / 2 erfc(|x| / sqrt 2), which cancels nowhere
        z = tl.minimum(tl.abs(x), 30.0)  # where erfc is 0, and infinity times it would be a NaN
        return tl.where(x < 0, 0.0, x) - 0.5 * z * erfc(0.7071067811865476 * z)
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
def erfc(z):
    """1 - erf(z) for z >= 0, to a relative 1.2e-7: W. H. Press et al., Numerical Recipes, 6.2 (`erfcc`), a third of the
    instructions of libdevice's."""
    t = 1.0 / (1.0 + 0.5 * z)
    p = -0.82215223 + t * 0.17087277
    p = 1.48851587 + t * p
    p = -1.13520398 + t * p
    p = 0.27886807 + t * p
    p = -0.18628806 + t * p
    p = 0.09678418 + t * p
    p = 0.37409196 + t * p
    p = 1.00002368 + t * p
    return t * tl.exp(-z * z - 1.26551223 + t * p)


@triton.jit
def epilogue(acc, alpha, beta, c, bias, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(alpha acc + beta c + bias) in fp32; c and bias, already broadcast against acc, are read only where
    HAS_BETA and HAS_BIAS say so."""
    out = alpha * acc
    if HAS_BETA:
        out += beta * c.to(tl.float32)
    if HAS_BIAS:
        out += bias.to(tl.float32)
    return activate(out, ACTIVATION)
