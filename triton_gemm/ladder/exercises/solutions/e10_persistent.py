"""Persistent: one program for each SM goes from tile to tile (k09).

A program that ends leaves its SM idle until the next has started. Start one program for each SM, 5 here, and let it
loop over tiles. Programs work side by side: those that run at once should have neighbouring tiles, which share
operands.

Checked: C; that each tile is computed once, of 4 x 3 and of other numbers; the tiles of the busiest program; that tiles
which are computed at once follow one another.
"""

import triton
import triton.language as tl


@triton.jit
def compute_tile(tile, a_ptr, b_ptr, c_ptr, N, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = tile // (N // BLOCK) * BLOCK + offs[:, None]
    columns = tile % (N // BLOCK) * BLOCK + offs[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows * stride_a + k + offs[None, :])
        b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows * stride_c + columns, acc)


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    tiles = (M // BLOCK) * (N // BLOCK)
    # FILL IN: have this program compute its share of the tiles 0 to tiles - 1.
    for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):
        compute_tile(tile, a_ptr, b_ptr, c_ptr, N, K, stride_a, stride_b, stride_c, BLOCK)
    # BEFORE:
    # tile = tl.program_id(0)
    # compute_tile(tile, a_ptr, b_ptr, c_ptr, N, K, stride_a, stride_b, stride_c, BLOCK)
    # END


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; sizes are multiples of 16."""
    (M, K), N = a.shape, b.shape[1]
    kernel[(5,)](a, b, c, M, N, K, a.stride(0), b.stride(0), c.stride(0), BLOCK=16)


HINTS = (
    "A loop over `range(start, stop, step)`: where does program 2 of 5 begin, and how far is its next tile?",
    "`tl.num_programs(0)` is the number of programs. With it as the step, programs 0 to 4 have tiles 0 to 4 first.",
)
