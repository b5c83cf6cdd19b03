"""The one epilogue: what happens to sums between the accumulators and C, in every kernel."""

import triton
import triton.language as tl


@triton.jit
def activate(x, ACTIVATION: tl.constexpr):
    """fp32 x through "relu", "gelu" (erf), "gelu_tanh" or "silu" of torch.nn.functional, or none (None or "")."""
    if ACTIVATION == "relu":
        return tl.where(x < 0, 0.0, x)  # not maximum(x, 0): a NaN stays one
    elif ACTIVATION == "gelu":
        return 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
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
def epilogue(acc, alpha, beta, c, bias, HAS_BETA: tl.constexpr, HAS_BIAS: tl.constexpr, ACTIVATION: tl.constexpr):
    """activation(alpha acc + beta c + bias) in fp32; c and bias, already broadcast against acc, are read only where
    HAS_BETA and HAS_BIAS say so."""
    out = alpha * acc
    if HAS_BETA:
        out += beta * c.to(tl.float32)
    if HAS_BIAS:
        out += bias.to(tl.float32)
    return activate(out, ACTIVATION)
