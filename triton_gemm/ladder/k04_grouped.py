"""Grouped launch: programs cover C in groups of GROUP_M tile rows, so that those that run together share operands.

Changes: against k03, a 1-D grid and `grouped_pid`, which turns the program's number into a tile.
Why: a few programs run on each of 132 SMs at once. k03's go down the columns of tiles: they cover a few columns, and so
    need all of A. In groups of GROUP_M rows they cover GROUP_M rows by as many columns as they reach. Where C has many
    more rows of tiles than GROUP_M, that patch is squarer, and what it needs of A and B is less and stays in L2.
Predicts: a GPU that has room for W programs computes W tiles at once, a *wave*. A wave reads a strip of A for each of
    its rows of tiles and a strip of B for each column. In groups these are GROUP_M + W/GROUP_M strips; in k03, where a
    column of C has m tiles, m + W/m. If a group has fewer than W tiles, the wave reaches into the next one. At 4096^3 C
    is too small for a gain. Five programs an SM make a wave of 660 tiles of 64 x 64: in k03 of 64 rows and 11 columns,
    with GROUP_M = 8 of 16 rows and 64 columns. Either way the strips, 1 MiB each, are read from L2, and shared memory
    binds: a factor of 1.0 here, more where L2 is short.
Came out: as predicted. At 2048^3 the H100's tuning chose GROUP_M 1, and k04 has 0.93 of k03's speed: whether that is
    why is not known. The H200's chose 8, and both are equally fast.
Requires: fp32; any shape and strides.
Tuning: k03's tiles, and GROUP_M, the number of rows of tiles in a group. Concurrent programs then cover a block of C
    that is closer to a square, so more of their reads hit L2. At 4096^3 the first wave reads more strips in groups of 8
    than in groups of 1, 80 and not 75, and yet groups of 8 are 1.6 % faster: why is not known. Groups of more than 8
    rows, squarer at 16384^3, are not on the list. It changes no instruction of the main loop.
Bound by: shared-memory bandwidth and latency, as k03.
Next: k05 gives each thread more results, which lowers the shared-memory reads per FMA.
"""

import torch
import triton
import triton.language as tl

from ..config import GemmConfig
from .k03_blocked import operand_pointers, store_tile
from .rung import FMA_CAPABILITIES, Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps)
    for m, n, k, warps in [(64, 64, 16, 4), (64, 64, 32, 8), (32, 64, 32, 4), (64, 32, 32, 4), (32, 32, 32, 4)]
    for group in (8, 4, 1)
)

RUNG = Rung(
    module=__name__,
    title="grouped launch",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA", "LDS", "STS")),
    configs=CONFIGS,
    twins=("c03_shared_tiled",),
    predicted=("k03", 1.0),
)


@autotune(RUNG)
@triton.jit
def grouped_kernel(
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
    GROUP_M: tl.constexpr,
):
    # Locate the tile
    pid_m, pid_n = grouped_pid(tl.program_id(0), tl.cdiv(M, BLOCK_M), tl.cdiv(N, BLOCK_N), GROUP_M)

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
def grouped_pid(tile_id, num_m, num_n, GROUP_M: tl.constexpr):
    """Tile (pid_m, pid_n) of `tile_id`: C's num_m x num_n tiles are covered in groups of GROUP_M rows, each group
    column by column; the last group may have fewer rows. The order is that of Triton's tutorial 03."""
    group = tile_id // (GROUP_M * num_n)
    first_m = group * GROUP_M
    rows = tl.minimum(num_m - first_m, GROUP_M)
    within = tile_id % (GROUP_M * num_n)
    return first_m + within % rows, within // rows


def tiles(M: int, N: int):
    """The 1-D grid: one program for every tile of C."""
    return lambda meta: (triton.cdiv(M, meta["BLOCK_M"]) * triton.cdiv(N, meta["BLOCK_N"]),)


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
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}
    run(RUNG, grouped_kernel, tiles(*c.shape), arguments, config)
