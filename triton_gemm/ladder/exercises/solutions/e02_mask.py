"""Mask: a tile that hangs over a matrix's edge reads nothing beyond it (k03).

Sizes are rarely multiples of the tile. What lies behind the last row or column is another tensor's memory, or none. A
masked load does not touch it, and `other` says what the lane holds instead.

Checked: C of 37 x 29 x 45 and of other sizes in tiles of 16; every address that is read; that masked loads have
`other`, and that tiles are 0 outside of the matrix.
"""

import triton
import triton.language as tl


@triton.jit
def load_tile(ptr, rows, columns, height, width, stride):
    """The elements [rows, columns] of a row-major matrix [height, width], and 0 outside of it."""
    pointers = ptr + rows[:, None] * stride + columns[None, :]
    # FILL IN: load what is inside of the matrix, and 0 for the rest.
    inside = (rows[:, None] < height) & (columns[None, :] < width)
    return tl.load(pointers, mask=inside, other=0.0)
    # BEFORE:
    # return tl.load(pointers)
    # END


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + offs
    columns = tl.program_id(1) * BLOCK + offs
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a = load_tile(a_ptr, rows, k + offs, M, K, stride_a)
        b = load_tile(b_ptr, k + offs, columns, K, N, stride_b)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    inside = (rows[:, None] < M) & (columns[None, :] < N)
    tl.store(c_ptr + rows[:, None] * stride_c + columns[None, :], acc, mask=inside)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major."""
    (M, K), N = a.shape, b.shape[1]
    grid = (triton.cdiv(M, 16), triton.cdiv(N, 16))
    kernel[grid](a, b, c, M, N, K, a.stride(0), b.stride(0), c.stride(0), BLOCK=16)


HINTS = (
    "`tl.load` takes `mask=`, a block of booleans of the pointers' shape. Compare `rows` with `height`, `columns` with "
    "`width`, and join both with `&`.",
    "Rows beyond M may hold anything, since they are not stored. Elements beyond K go into every sum: they must be 0, "
    "which is `other=0.0`.",
)
