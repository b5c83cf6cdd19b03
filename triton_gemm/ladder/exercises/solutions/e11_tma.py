"""TMA: a tile is loaded by the coordinates of its box (k10).

A tensor descriptor knows a matrix's address, sizes and strides, and the box that one copy moves. A load names the
box's first row and first column. The unit computes the addresses, and fills with 0 what lies beyond the edge: no
masks.

Checked: C of 40 x 24 x 56 and of other sizes; where each box begins; the products of each program.
"""

import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor


@triton.jit
def kernel(a_desc, b_desc, c_desc, K, BLOCK: tl.constexpr):
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    # FILL IN: load the boxes of A and B for each k-tile, and multiply.
    for k in range(0, K, BLOCK):
        a = a_desc.load([pid_m * BLOCK, k])
        b = b_desc.load([k, pid_n * BLOCK])
        acc = tl.dot(a, b, acc, input_precision="ieee")
    # BEFORE:
    # for k in range(0, tl.cdiv(K, BLOCK)):
    #     a = a_desc.load([pid_m, k])
    #     b = b_desc.load([k, pid_n])
    #     acc = tl.dot(a, b, acc, input_precision="ieee")
    # END
    c_desc.store([pid_m * BLOCK, pid_n * BLOCK], acc)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major, in boxes of 16 x 16."""
    (M, K), N = a.shape, b.shape[1]
    descriptors = [TensorDescriptor.from_tensor(x, [16, 16]) for x in (a, b, c)]
    kernel[triton.cdiv(M, 16), triton.cdiv(N, 16)](*descriptors, K, BLOCK=16)


HINTS = (
    "Coordinates count elements, not tiles: the second box of a row begins at column 16, not at column 1.",
    "A is [M, K] and B is [K, N], so k is A's second coordinate and B's first.",
)
