"""Pipeline: the next k-tile is on its way while this one is multiplied (k06).

A load takes hundreds of clocks. Where it is followed at once by the product that needs it, the units wait. Issue the
loads of the next k-tile before the product of this one. `num_stages` has Triton's compiler do that; do it by hand
once.

Checked: C of 6 k-tiles and of other numbers, bit for bit; that each k-tile is loaded once, and before the
product of the one before it.
"""

import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + offs[:, None]
    columns = tl.program_id(1) * BLOCK + offs[None, :]
    a_ptrs = a_ptr + rows * stride_a + offs[None, :]
    b_ptrs = b_ptr + offs[:, None] * stride_b + columns
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    # FILL IN: the main loop, one k-tile ahead. K is a multiple of BLOCK, and not 0.
    a = tl.load(a_ptrs)
    b = tl.load(b_ptrs)
    for k in range(BLOCK, K, BLOCK):
        a_ptrs += BLOCK
        b_ptrs += BLOCK * stride_b
        next_a = tl.load(a_ptrs)
        next_b = tl.load(b_ptrs)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a = next_a
        b = next_b
    acc = tl.dot(a, b, acc, input_precision="ieee")
    # BEFORE:
    # for k in range(0, K, BLOCK):
    #     a = tl.load(a_ptrs)
    #     b = tl.load(b_ptrs)
    #     acc = tl.dot(a, b, acc, input_precision="ieee")
    #     a_ptrs += BLOCK
    #     b_ptrs += BLOCK * stride_b
    # END
    tl.store(c_ptr + rows * stride_c + columns, acc)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; sizes are multiples of 16."""
    (M, K), N = a.shape, b.shape[1]
    kernel[M // 16, N // 16](a, b, c, K, a.stride(0), b.stride(0), c.stride(0), BLOCK=16)


HINTS = (
    "Three parts: a prologue that loads the first k-tile, a loop that loads the next and multiplies the last, and an "
    "epilogue that multiplies the one that is left.",
    "The loop has one turn less than there are k-tiles, so that nothing beyond K is loaded.",
)
