"""Blocked: one program computes a tile of C from tiles of A and B in shared memory.

Changes: against k02, a program computes BLOCK_M x BLOCK_N results and steps through K by BLOCK_K with `tl.dot`.
Why: a BLOCK_M x BLOCK_K tile of A is read once from L2 and used BLOCK_N times, a tile of B BLOCK_M times. There are no
    tensor cores for IEEE fp32: `tl.dot` becomes FFMAs, and each thread computes small outer products. Threads share
    both tiles through shared memory: Triton stores them there before `tl.dot`, which the source does not show.
Predicts: L2 traffic falls by a factor of the tile's edge (32 to 64), and shared-memory reads become the limit. A thread
    with 4 x 4 results reads 8 words for 16 FMAs, one with 8 x 4 results 12 words for 32. Against the 2 words that k02
    reads for one FMA, as predicted, these sums give 4 to 5 times; 3 to 4 times k02 were predicted, to leave a margin.
Came out: as predicted, but L2 is not the reason. k02 finds most of what it reads in L1, and its traffic from L2 is
    small already. The bytes loaded through L1, which bound k02, fall 32 times, by half the tile's edge: those of B fall
    64 times, and those of A rise, as a program of k02 uses an element of A 512 times. k03 is faster than its twin
    because its threads have more results, not because it is written in Triton. A thread of c03 has one result. For 32
    FMAs it issues 40 loads, 8 of which read 4 words of A each. A thread of k03 has 32 results, and reads 12 words for
    32 FMAs.
Requires: fp32; any strides; N up to 65,535 tiles, the limit of a grid's second axis.
Tuning: the tile against the threads. With 64 x 64 on 4 warps a thread has 32 results, and few reads of shared memory
    for each FMA; on 8 warps it has 16. Smaller tiles also read more from L2. 64 x 32 is slower than 32 x 64 with the
    same instructions. In 64 x 32 lanes of a warp read four rows of A at once, which share banks, and in 32 x 64 two.
    And a thread takes 80 registers there and 72 here, so that six programs fit, and not seven. What each costs was not
    counted. With num_stages = 1 only other programs on the SM hide latency, and registers limit how many there are.
Bound by: shared-memory bandwidth, and latency: loads and FMAs alternate (num_stages = 1).
Next: k04 changes the order of the programs so that L2 is hit more often.

Port of the published kernels S0.2, S1, S2.2, S3.3 and S4.1: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..config import GemmConfig
from .k01_naive import store
from .rung import FMA_CAPABILITIES, Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=warps)
    for m, n, k, warps in [
        (64, 64, 16, 4),
        (64, 64, 32, 8),
        (32, 64, 32, 4),
        (64, 32, 32, 4),
        (32, 32, 32, 4),
    ]
)

RUNG = Rung(
    module=__name__,
    title="blocked",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA", "LDS", "STS")),
    configs=CONFIGS,
    twins=("c03_shared_tiled",),
    predicted=("k02", 3.5),
)


@autotune(RUNG)
@triton.jit
def blocked_kernel(
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
    TUNE_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    # Locate the tile
    pid_m = tl.program_id(0)
    pid_n = tl.program_id(1)

    # Prologue
    a_ptrs, b_ptrs = operand_pointers(
        a_ptr, b_ptr, pid_m, pid_n, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
    )
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

    # Main loop
    offs_k = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
        b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
        a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk

    # Epilogue
    store_tile(c_ptr, acc, pid_m, pid_n, M, N, stride_cm, stride_cn, alpha, beta, HAS_BETA, BLOCK_M, BLOCK_N)


@triton.jit
def operand_pointers(
    a_ptr,
    b_ptr,
    pid_m,
    pid_n,
    M,
    N,
    stride_am,
    stride_ak,
    stride_bk,
    stride_bn,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Pointers to the first tiles, [BLOCK_M, BLOCK_K] of A and [BLOCK_K, BLOCK_N] of B.

    Rows past M and columns past N wrap round to valid ones, so that only K needs a mask (the trick is Triton's
    tutorial 03); what they compute is not stored. Offsets are 64-bit: strides may span more than 2^31 elements.
    """
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)) % M
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N)) % N
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    a_ptrs = a_ptr + offs_m[:, None].to(tl.int64) * stride_am + offs_k[None, :] * stride_ak
    b_ptrs = b_ptr + offs_k[:, None] * stride_bk + offs_n[None, :].to(tl.int64) * stride_bn
    return a_ptrs, b_ptrs


@triton.jit
def store_tile(
    c_ptr,
    acc,
    pid_m,
    pid_n,
    M,
    N,
    stride_cm,
    stride_cn,
    alpha,
    beta,
    HAS_BETA: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
):
    """Stores acc [BLOCK_M, BLOCK_N] as tile (pid_m, pid_n) of C."""
    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    offs_n = (pid_n * BLOCK_N + tl.arange(0, BLOCK_N))[None, :].to(tl.int64)
    c_ptrs = c_ptr + offs_m * stride_cm + offs_n * stride_cn
    store(c_ptrs, acc, (offs_m < M) & (offs_n < N), alpha, beta, HAS_BETA)


@checked(RUNG)
def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Choice = None,
) -> None:
    """c = alpha a @ b + beta c for fp32 a [M, K], b [K, N], c [M, N]."""
    M, N = c.shape
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}

    def grid(meta):
        num_m, num_n = triton.cdiv(M, meta["BLOCK_M"]), triton.cdiv(N, meta["BLOCK_N"])
        if num_n > 65_535:
            raise ValueError(f"{RUNG.name}: c has {num_n} columns of tiles; a grid's second axis takes 65535: take k04")
        return num_m, num_n

    run(RUNG, blocked_kernel, grid, arguments, config)
