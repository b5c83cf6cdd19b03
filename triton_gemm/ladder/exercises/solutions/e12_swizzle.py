"""Swizzle: a tile in shared memory is written by rows and read by columns, without bank conflicts (k10).

A row of 64 fp16 has 128 bytes: 8 chunks of 16, which fill all 32 banks. Read down a column of chunks, 8 rows hit the
same 4 banks, and take 8 wavefronts instead of one. TMA's 128-byte swizzle permutes the chunks of each row, and tensor
cores read it so. Of rows 0 to 3 chunks 0 to 7 are in places 01234567, 10325476, 23016745 and 32107654, of row 7 in
76543210, and row 8 is as row 0. Memory is in rows of 64 elements here, as shared memory would be.

Checked: the tile that comes back; bank conflicts of rows that are written and columns that are read; where chunks
lie.
"""

import triton
import triton.language as tl


@triton.jit
def place_of(row, chunk):
    """Where in its row, 0 to 7, a chunk is kept."""
    # FILL IN: the 128-byte swizzle.
    return chunk ^ (row % 8)
    # BEFORE:
    # return chunk
    # END


@triton.jit
def kernel(x_ptr, shared_ptr, out_ptr, stride_x, stride_s, stride_o):
    rows = tl.arange(0, 64)[:, None]
    columns = tl.arange(0, 64)[None, :]
    place = rows * stride_s + place_of(rows, columns // 8) * 8 + columns % 8
    tl.store(shared_ptr + place, tl.load(x_ptr + rows * stride_x + columns))
    tl.debug_barrier()
    tl.store(out_ptr + rows * stride_o + columns, tl.load(shared_ptr + place))


def run(x, shared, out):
    """out = x, through `shared`; each [64, 64] in fp16."""
    kernel[(1,)](x, shared, out, x.stride(0), shared.stride(0), out.stride(0))


HINTS = (
    "8 rows that follow one another must keep a chunk of the same number in 8 different places.",
    "`^` is exclusive or: for each row it is another permutation of 0 to 7, and it undoes itself.",
)
