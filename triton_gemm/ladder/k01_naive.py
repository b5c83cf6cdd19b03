"""Naive: every result is a dot product read straight from global memory, and a warp's lanes run down a column of C.

Changes: nothing: it is the first. One program computes a strip of C: BLOCK_M rows of one column.
Why: a warp's 32 lanes have 32 rows of A, which lie K elements apart. So every load of A touches 32 sectors of 32 bytes,
    to use 4 bytes of each. All lanes need the same element of B, which is broadcast to them. The L1 cache gives the
    rest of each sector to the next seven steps, if it is still there. Sectors are what L2 sends. L1 itself takes a
    wavefront for each word in the same bank: 32, as K is a multiple of 32 here.
Predicts: a step of K takes a warp 33 wavefronts: 32 to load A, and one for B's element. An SM's L1 does one a clock:
    132 SMs x 1.7 GHz x 32 FMA / 33 wavefronts = 0.22 T FMA/s = 0.4 TFLOPS, under 1 % of cuBLAS.
Came out: higher. A thread has two rows, so one load of B serves two FMAs: 65 wavefronts for 64 FMAs of a warp, two of
    each lane. And the clock stays at 1.98 GHz, which makes 0.51 TFLOPS. That holds where K is a multiple of 32, so that
    all words of a load lie in one of L1's 32 banks. At 1400 and 3000 they lie in four: wavefronts would allow 1.97
    TFLOPS. k01 has 0.75 to 0.99 there, and what limits it was not counted.
Requires: fp32; any strides.
Tuning: nothing: one configuration, and no `triton.autotune`.
Bound by: the L1 cache's wavefronts, not by memory and not by arithmetic. The SMs received from L2 about a third of the
    sectors that loads touched, 2.9 TB/s. L2's busiest part is busy for 67 %; which part that is was not counted.
Next: k02 makes the strip horizontal, so that lanes run along a row.

Port of the published kernels S3.1 and S4.0: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..compat import round_to
from ..config import GemmConfig
from .rung import FMA_CAPABILITIES, Rung, checked, pointer_arguments

STRIP = GemmConfig(BLOCK_M=256, num_warps=4)

RUNG = Rung(
    module=__name__,
    title="naive",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA",)),
    configs=(STRIP,),
    twins=("c01_naive_uncoalesced",),
)


@triton.jit
def naive_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    M,
    N,
    K,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    stride_cm,
    stride_cn,
    alpha,
    beta,
    HAS_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
):
    # Locate the strip: neighbouring programs take neighbouring columns, and share their rows of A in L2.
    pid = tl.program_id(0)
    pid_m = pid // N
    n = (pid % N).to(tl.int64)
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # lanes along M: uncoalesced

    # Prologue
    a_ptrs = a_ptr + offs_m * stride_am
    b_ptrs = b_ptr + n * stride_bn
    acc = tl.zeros((BLOCK_M,), dtype=tl.float32)

    # Main loop
    for k in range(K):
        acc += tl.load(a_ptrs, mask=offs_m < M, other=0.0) * tl.load(b_ptrs)
        a_ptrs += stride_ak
        b_ptrs += stride_bk

    # Epilogue
    store(c_ptr + offs_m * stride_cm + n * stride_cn, acc, offs_m < M, alpha, beta, HAS_BETA)


@triton.jit
def store(c_ptrs, acc, mask, alpha, beta, HAS_BETA: tl.constexpr):
    """C = alpha acc + beta C at c_ptrs, rounded once; without HAS_BETA no element of C is read."""
    out = alpha * acc
    if HAS_BETA:
        out += beta * tl.load(c_ptrs, mask=mask, other=0.0).to(tl.float32)
    tl.store(c_ptrs, round_to(out, c_ptrs.dtype.element_ty), mask=mask)


@checked(RUNG)
def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: GemmConfig | None = None,
) -> None:
    """c = alpha a @ b + beta c for fp32 a [M, K], b [K, N], c [M, N]."""
    config = config or STRIP
    assert config.BLOCK_M is not None
    M, N = c.shape
    grid = (triton.cdiv(M, config.BLOCK_M) * N,)
    naive_kernel[grid](**pointer_arguments(a, b, c, alpha, beta), **config.kwargs())
