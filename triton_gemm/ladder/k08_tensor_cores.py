"""FP16 and BF16 tensor cores, fp32 accumulation.

Changes: against k07, 16-bit operands, read straight from global memory: no rounding and no copy. Most k-tiles are 64
    deep.
Why: a Hopper SM does 2048 dense 16-bit FMAs a clock, twice the TF32 rate, and an operand has half the bytes, so the
    same shared memory holds twice the depth. 16-bit `wgmma` reads either operand K-major or not.
Predicts: twice the rate of k07's product, and no pass: 2.5 times k07, 0.9 of cuBLAS. The units' 989 TFLOPS are out of
    reach: at 700 W the clock falls. cuBLAS is expected to hold 0.75 of that rate.
Came out: cuBLAS holds less of the units' rate than expected. The parts of the prediction do not fit each other: 0.75 of
    989 is 742 TFLOPS, and twice k07's product in 0.37 ms is as much. So 2.5 times k07's 299 is all of cuBLAS, and 0.9
    of it is 2.2 times. On the H200 the factor is smaller. k08 is slower there, and k07 is faster by 44 us: the faster
    memory saves its pass 27 of them at most. What saves the others is not known; Triton is another, too.
Requires: fp16 or bf16, sm_80 or newer; any shape and strides, fast only where sizes and strides are multiples of 16
    elements. Triton knows no finer multiple. If K (for a row-major A) or N (for a row-major B) is not such a multiple,
    that operand's elements are loaded one by one, 2 bytes each, through registers. Rows of a multiple of 8 are loaded
    so as well, although they are aligned to 16 bytes. `cp.async` copies at least 4 bytes, so it cannot be used, and
    these loads do not overlap with products.
Tuning: as k07's, with twice the depth in the same shared memory: 128 x 256 x 64 in three stages takes 144 KiB. At 512^3
    that tile gives 8 SMs work, and 64 x 128 gives it to 32, so sizes want different tiles.
Bound by: tensor cores most of the time, at a clock that power sets. Of the clocks that pass they are idle for 15 %. Of
    these 3 are the last wave's, which has 116 tiles for 132 SMs. All warps compute addresses and issue 16-byte copies
    between their `wgmma`s, which costs 3 at most: at 16384^3, with the same loop, tensor cores are idle for 3 % in all.
    A program's prologue and epilogue overlap nothing. What they and the first loads cost was not counted.
Next: k09 keeps a program running from tile to tile.

Port of the published kernels S2.6, S4.4 and S4.5: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..compat import dot_operand
from ..config import GemmConfig
from .k03_blocked import operand_pointers, store_tile
from .k04_grouped import grouped_pid, tiles
from .rung import Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (128, 256, 64, 8, 3),
        (128, 256, 64, 8, 4),
        (256, 128, 64, 8, 3),
        (128, 128, 64, 4, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 32, 4, 4),
        (128, 64, 64, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 8, 4),
        (64, 64, 32, 4, 4),
    ]
    for group in ((8, 4, 16) if (m, n) == (128, 256) else (8,))
)

RUNG = Rung(
    module=__name__,
    title="FP16/BF16 tensor cores",
    precision="half",
    dtypes=(torch.float16, torch.bfloat16),
    instructions={
        (8, 0): ("HMMA", "LDGSTS"),
        (8, 9): ("HMMA", "LDGSTS"),
        (9, 0): ("HGMMA", "LDGSTS"),
        (10, 0): ("UTCHMMA", "LDGSTS"),
        (12, 0): ("HMMA", "LDGSTS"),
    },
    configs=CONFIGS,
    twins=("c09_wmma_fp16", "c10_wmma_fp16_padded", "c11_wmma_fp16_warp_tiled"),
    predicted=("k07", 2.5),
)


@autotune(RUNG)
@triton.jit
def tensor_core_kernel(
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
        acc = tl.dot(dot_operand(a), dot_operand(b), acc)
        a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
        b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk

    # Epilogue
    store_tile(c_ptr, acc, pid_m, pid_n, M, N, stride_cm, stride_cn, alpha, beta, HAS_BETA, BLOCK_M, BLOCK_N)


@checked(RUNG)
def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Choice = None,
) -> None:
    """c = alpha a @ b + beta c for fp16 or bf16 a [M, K], b [K, N] and c [M, N] of fp16, bf16 or fp32."""
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}
    run(RUNG, tensor_core_kernel, tiles(*c.shape), arguments, config)
