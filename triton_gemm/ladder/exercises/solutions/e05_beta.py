"""Beta: C = alpha A B + beta C reads C only where beta is not 0, and rounds once (k03).

With beta = 0 BLAS does not read C: it may be fresh memory that holds a NaN, and 0 times NaN is NaN. HAS_BETA is known
when the kernel is compiled, so an `if` on it costs nothing. C is fp16 here, and the sums are fp32. Convert C to fp32
before it is multiplied: the interpreter multiplies fp16 by a number in fp16, unlike a GPU.

Checked: C with beta = 0 and C full of NaN; the loads of C; the bits of C with beta = -1.5; C with alpha = 0,
and with other values of both.
"""

import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, alpha, beta, K, stride_a, stride_b, stride_c, HAS_BETA: tl.constexpr):
    offs = tl.arange(0, 16)
    rows = tl.program_id(0) * 16 + offs[:, None]
    columns = tl.program_id(1) * 16 + offs[None, :]
    acc = tl.zeros((16, 16), dtype=tl.float32)
    for k in range(0, K, 16):
        a = tl.load(a_ptr + rows * stride_a + k + offs[None, :])
        b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns)
        acc = tl.dot(a, b, acc)
    c_ptrs = c_ptr + rows * stride_c + columns
    # FILL IN: `out`, in fp32, without a load of C where beta is 0.
    out = alpha * acc
    if HAS_BETA:
        out += beta * tl.load(c_ptrs).to(tl.float32)
    # BEFORE:
    # out = alpha * acc + beta * tl.load(c_ptrs).to(tl.float32)
    # END
    tl.store(c_ptrs, out.to(tl.float16))


def run(a, b, c, alpha, beta):
    """c [M, N] = alpha a [M, K] @ b [K, N] + beta c in fp16, row-major; sizes are multiples of 16."""
    (M, K), N = a.shape, b.shape[1]
    strides = a.stride(0), b.stride(0), c.stride(0)
    kernel[M // 16, N // 16](a, b, c, alpha, beta, K, *strides, HAS_BETA=beta != 0)


HINTS = (
    "`tl.where(beta == 0, ...)` chooses between two values, and both are computed: C is loaded all the same.",
    "`if HAS_BETA:` is decided by the compiler, since HAS_BETA is a `tl.constexpr`. Put the load inside.",
)
