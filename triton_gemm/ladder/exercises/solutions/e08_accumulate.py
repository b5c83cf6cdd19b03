"""Accumulate: products of fp16 are summed in fp32 (k08).

fp16 has 11 bits: at 2048 its neighbours are 2 apart, and 0.5 that is added there is lost. Tensor cores sum in fp32 at
the same speed as in fp16 on a data centre's GPU. Keep the sums in fp32, and round once, at the end.

Checked: a sum that fp16 cannot accumulate; C against fp64; that C is rounded once, in whatever order it is
summed; that `tl.dot` multiplies a and b in fp16.
"""

import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + offs[:, None]
    columns = tl.program_id(1) * BLOCK + offs[None, :]
    # FILL IN: the sums' dtype, and the main loop that adds to them.
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows * stride_a + k + offs[None, :])
        b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns)
        acc = tl.dot(a, b, acc)
    # BEFORE:
    # acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float16)
    # for k in range(0, K, BLOCK):
    #     a = tl.load(a_ptr + rows * stride_a + k + offs[None, :])
    #     b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns)
    #     acc += tl.dot(a, b).to(tl.float16)
    # END
    tl.store(c_ptr + rows * stride_c + columns, acc.to(tl.float16))


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp16, row-major; sizes are multiples of 16."""
    (M, K), N = a.shape, b.shape[1]
    kernel[M // 16, N // 16](a, b, c, K, a.stride(0), b.stride(0), c.stride(0), BLOCK=16)


HINTS = (
    "`tl.dot(a, b, acc)` adds in fp32, where no `out_dtype` is given, and `acc` must be in that dtype.",
    "`.to(tl.float16)` belongs behind the loop alone, where the kernel has it already.",
)
