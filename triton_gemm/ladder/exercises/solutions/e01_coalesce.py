"""Coalesce: neighbouring lanes of a warp read neighbouring addresses (k02).

A program computes a strip of BLOCK results of C. The strip runs down a column of C, so each lane reads a row of A of
its own: a warp's load touches 32 sectors of 32 bytes, and uses 4 bytes of each. Turn the strip, so that it runs along
a row.

Checked: C of 64 x 96 x 8 and of other sizes; the sectors that a warp touches in each load and store: at most 4, for
32 x 4 bytes.
"""

import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, N, K, stride_a, stride_b, stride_c, BLOCK: tl.constexpr):
    pid = tl.program_id(0)
    lanes = tl.arange(0, BLOCK)
    # FILL IN: the rows and the columns of C that this program's lanes compute, each [BLOCK].
    strips = N // BLOCK
    rows = pid // strips + tl.zeros_like(lanes)
    columns = pid % strips * BLOCK + lanes
    # BEFORE:
    # rows = pid // N * BLOCK + lanes
    # columns = pid % N + tl.zeros_like(lanes)
    # END
    acc = tl.zeros((BLOCK,), dtype=tl.float32)
    for k in range(K):
        acc += tl.load(a_ptr + rows * stride_a + k) * tl.load(b_ptr + k * stride_b + columns)
    tl.store(c_ptr + rows * stride_c + columns, acc)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; N is a multiple of 32."""
    (M, K), N = a.shape, b.shape[1]
    kernel[(M * N // 32,)](a, b, c, N, K, a.stride(0), b.stride(0), c.stride(0), BLOCK=32)


HINTS = (
    "Lanes of a warp are neighbours in `lanes`. Which of `rows` and `columns` may differ between them, if they are to "
    "read neighbouring elements of a row-major B?",
    "A row of C has N // BLOCK strips. Programs are numbered along the row first: `pid // strips` is the row.",
)
