"""Coalesced: the same arithmetic, but a warp's lanes run along a row of C.

Changes: against k01, the strip runs along N, and is 512 long, not 256: one program computes BLOCK_N columns of one row,
    and a thread four of them, not two.
Why: a warp's 32 lanes now read neighbouring elements of B, and share one element of A. A lane's four are 16 bytes, a
    warp's 512, in 16 sectors and four wavefronts. They write C in whole lines.
Predicts: with one column a thread, a step of K takes 2 wavefronts, where k01 needs 33: up to 16 times k01. Each step
    also asks L2 for 128 new bytes of B. An SM gets about 64 bytes a clock from there, which makes 2 clocks, too: 132
    SMs x 1.7 GHz x 64 B / 4 B an FMA = 3.6 T FMA/s = 7 TFLOPS. These sums give 16 times; 10 were predicted, to leave a
    margin.
Came out: higher. The programs that an SM runs at once have the same columns of B and find its row in L1, so L2's rate
    does not bind. And a thread's four columns share one element of A and one 16-byte load of B: 5 wavefronts for 128
    FMAs of a warp, four of each lane, and so 26 times fewer for an FMA than k01's 65 for 64. They keep L1 busy for 78 %
    of the time, and k01's for all of it: 26 x 0.78 = 20. The twins have one result a thread, and c02 is 12.7 times c01
    in the same block of 32 x 32, on the H200: so much is the index alone.
Requires: fp32; any strides, coalesced where B and C are row-major.
Tuning: nothing: one configuration, and no `triton.autotune`.
Bound by: L1 bandwidth and the latency of loads: there are two loads for every four FMAs, and nothing is kept.
Next: k03 loads a tile once and uses every element of it many times.

Port of the published kernels S3.2, S2.1 and S0.1: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..config import GemmConfig
from .k01_naive import store
from .rung import FMA_CAPABILITIES, Rung, checked, pointer_arguments

STRIP = GemmConfig(BLOCK_N=512, num_warps=4)

RUNG = Rung(
    module=__name__,
    title="coalesced",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA",)),
    configs=(STRIP,),
    twins=("c02_naive_coalesced",),
    predicted=("k01", 10.0),
)


@triton.jit
def coalesced_kernel(
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
    BLOCK_N: tl.constexpr,
):
    # Locate the strip: neighbouring programs take neighbouring rows, and share their columns of B in L2.
    pid = tl.program_id(0)
    pid_n = pid // M
    m = (pid % M).to(tl.int64)
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)  # lanes along N: coalesced

    # Prologue
    a_ptrs = a_ptr + m * stride_am
    b_ptrs = b_ptr + offs_n * stride_bn
    acc = tl.zeros((BLOCK_N,), dtype=tl.float32)

    # Main loop
    for k in range(K):
        acc += tl.load(a_ptrs) * tl.load(b_ptrs, mask=offs_n < N, other=0.0)
        a_ptrs += stride_ak
        b_ptrs += stride_bk

    # Epilogue
    store(c_ptr + m * stride_cm + offs_n * stride_cn, acc, offs_n < N, alpha, beta, HAS_BETA)


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
    assert config.BLOCK_N is not None
    M, N = c.shape
    grid = (M * triton.cdiv(N, config.BLOCK_N),)
    coalesced_kernel[grid](**pointer_arguments(a, b, c, alpha, beta), **config.kwargs())
