"""Tile: a larger tile reads fewer bytes for each FLOP, until it no longer fits (k03, k05).

For each k a program reads BLOCK_M + BLOCK_N elements and does 2 BLOCK_M BLOCK_N FLOP with them. A tile of 16 x 16
makes 4 FLOP of a byte. Choose a tile that makes 16 or more, and that an A100 can still run: a thread's sums may have
a quarter of its 256 registers, and an SM has 163 KiB of shared memory for a program.

Checked: C; FLOP for each byte of A and B that is counted; registers and shared memory, without tensor cores.
"""

import triton
import triton.language as tl

NUM_WARPS, NUM_STAGES = 4, 3
# FILL IN: the tile, in powers of two. BLOCK_K is 16 at least.
BLOCK_M, BLOCK_N, BLOCK_K = 64, 64, 16
# BEFORE:
# BLOCK_M, BLOCK_N, BLOCK_K = 16, 16, 16
# END


@triton.jit
def kernel(a_ptr, b_ptr, c_ptr, K, stride_a, stride_b, stride_c, M: tl.constexpr, N: tl.constexpr, STEP: tl.constexpr):
    rows = tl.program_id(0) * M + tl.arange(0, M)[:, None]
    columns = tl.program_id(1) * N + tl.arange(0, N)[None, :]
    offs_k = tl.arange(0, STEP)
    acc = tl.zeros((M, N), dtype=tl.float32)
    for k in range(0, K, STEP):
        a = tl.load(a_ptr + rows * stride_a + k + offs_k[None, :])
        b = tl.load(b_ptr + (k + offs_k[:, None]) * stride_b + columns)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(c_ptr + rows * stride_c + columns, acc)


def run(a, b, c):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; sizes are multiples of the tile's."""
    (M, K), N = a.shape, b.shape[1]
    sizes = {"M": BLOCK_M, "N": BLOCK_N, "STEP": BLOCK_K, "num_warps": NUM_WARPS, "num_stages": NUM_STAGES}
    kernel[M // BLOCK_M, N // BLOCK_N](a, b, c, K, a.stride(0), b.stride(0), c.stride(0), **sizes)


HINTS = (
    "FLOP per byte are 2 m n / (4 (m + n)) in fp32. BLOCK_K cancels out: it costs shared memory and saves no bytes.",
    "The sums take m n / 128 registers of a thread, with 4 warps. Without tensor cores they may have a quarter of 256. "
    "Shared memory holds NUM_STAGES - 1 k-tiles of A and of B (k06).",
)
