"""Group: programs that run at once share rows of A and columns of B (k04).

A GPU starts programs in order, some 16 at once here. Along a row of tiles these read one strip of A and 16 of B. In
groups of GROUP_M rows, each walked down its columns, they cover 4 x 4 tiles, and read 4 strips of A and 4 of B.

Checked: C; that each tile is computed once; the strips that each 16 programs read, for 10 x 16
tiles and for other numbers.
"""

import triton
import triton.language as tl


@triton.jit
def tile_of(pid, num_m, num_n, GROUP_M: tl.constexpr):
    """The tile (row, column) of C that program `pid` computes, of num_m x num_n tiles."""
    # FILL IN: go through C in groups of GROUP_M rows of tiles, down the columns of each.
    group = pid // (GROUP_M * num_n)
    rows = tl.minimum(num_m - group * GROUP_M, GROUP_M)  # the last group may have fewer
    within = pid % (GROUP_M * num_n)
    return group * GROUP_M + within % rows, within // rows
    # BEFORE:
    # return pid // num_n, pid % num_n
    # END


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, M, N, K, stride_a, stride_b, stride_c, GROUP_M: tl.constexpr, BLOCK: tl.constexpr):
    row, column = tile_of(tl.program_id(0), M // BLOCK, N // BLOCK, GROUP_M)
    offs = tl.arange(0, BLOCK)
    rows = row * BLOCK + offs[:, None]
    columns = column * BLOCK + offs[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(0, K, BLOCK):
        a = tl.load(a_ptr + rows * stride_a + k + offs[None, :])
        b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows * stride_c + columns, acc)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; sizes are multiples of 16."""
    (M, K), N = a.shape, b.shape[1]
    tiles = M // 16 * (N // 16)
    kernel[(tiles,)](a, b, c, M, N, K, a.stride(0), b.stride(0), c.stride(0), GROUP_M=4, BLOCK=16)


HINTS = (
    "A whole group has GROUP_M * num_n tiles: divide `pid` by that for the group, and take the remainder within it.",
    "Within a group go down first: the remainder modulo the group's rows is the row, divided by them the column.",
    "10 rows of tiles are two groups of 4 and one of 2. `tl.minimum` says how many rows the group at hand has.",
)
