"""TF32 tensor cores: fp32 operands rounded to ten bits of mantissa, multiplied by tensor cores, summed in fp32.

Changes: against k06, `tl.dot(input_precision="tf32")`, and a pass before it that rounds the operands to nearest and
    makes both K-major (K contiguous).
Why: a Hopper SM does 1024 dense TF32 FMAs a clock, eight times its 128 FFMAs. The unit ignores the low 13 bits of its
    operands, which truncates: errors up to 2^-10 and all toward zero, where cuBLAS rounds. And `wgmma` reads TF32 from
    shared memory only K-major: a row-major B must be transposed somewhere.
Predicts: the product alone at 0.9 of cuBLAS. The pass reads and writes 4 bytes of every element of A and B: 256 MiB at
    4096^3, 0.09 ms next to the product's 0.37 ms. Together 0.7 of cuBLAS, 5.5 times k06. Truncated, the error is 2.6
    times that of cuBLAS; rounded, equal.
Came out: near the factor, as k06 and k07 are both slower than predicted. The predicted 0.46 ms are 299 TFLOPS, 5.5
    times 54, which k06 would have with its predicted 1.2 times k05. The shares do not fit each other: 0.37 ms are 0.9
    of a cuBLAS with 412 TFLOPS, and 299 are 0.7 of one with 427. The H100's has 355. The pass's 0.09 ms are at a copy's
    3.02 TB/s; at page 0's 3.35 they would be 0.08.
Requires: fp32, sm_80 or newer; any shape and strides, fast only where N and C's strides are multiples of 16; workspace
    for a rounded copy of A and of B. Elsewhere C is stored word by word, and a rule (`GemmConfig.illegal`) leaves out
    ten of eleven configurations, which may spill.
Tuning: the tile, first of all: for each FLOP 128 x 256 reads a quarter less from L2 than 128 x 128, and half as much as
    64 x 128. Its sums are half the registers of 8 warps, so that one program runs on an SM, and stages hide latency
    instead of other programs. Small tiles win where large ones leave SMs without work.
Bound by: tensor cores most of the time, and by memory traffic while the pass runs. In one launch the product alone is
    nearly as fast as cuBLAS in *Measured*, at a higher clock than there. Shared memory would just be full by
    arithmetic. It gives 128 bytes in a clock, and at the units' rate `wgmma` asks 80 of them, in TF32 as in fp16: for 8
    of K each warpgroup reads 64 rows of A and all of B, 2 and 8 KiB, in the 128 clocks of its FMAs. Writing the k-tile,
    48 KiB in 1024 clocks, takes the other 48. The counters have 53 %, where reads make 47 while tensor cores are busy
    for 75 % of the clocks: they hold little of the writing, so they cannot tell. But k08 reads and writes as much in a
    clock, and keeps tensor cores busy for 97 % of them at 16384^3. So shared memory hardly binds.
Next: k08 halves the operands' bytes.

Port of the published kernel S2.5: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..compat import INTERPRETED
from ..config import GemmConfig
from .k03_blocked import operand_pointers, store_tile
from .k04_grouped import grouped_pid, tiles
from .k05_register_tiled import repacked
from .rung import Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (128, 256, 32, 8, 4),
        (128, 256, 32, 8, 3),
        (256, 128, 32, 8, 3),
        (128, 128, 32, 4, 4),
        (128, 128, 32, 8, 3),
        (64, 128, 32, 4, 4),
        (64, 64, 32, 4, 4),
    ]
    for group in ((8, 4, 16) if (m, n) == (128, 256) else (8,))
)

RUNG = Rung(
    module=__name__,
    title="TF32 tensor cores",
    precision="tf32",
    dtypes=(torch.float32,),
    instructions={
        (8, 0): ("HMMA", "TF32", "LDGSTS"),
        (8, 9): ("HMMA", "TF32", "LDGSTS"),
        (9, 0): ("HGMMA", "TF32", "LDGSTS"),
        (10, 0): ("UTCHMMA", "LDGSTS"),
        (12, 0): ("HMMA", "TF32", "LDGSTS"),
    },
    configs=CONFIGS,
    twins=("c08_wmma_tf32",),
    predicted=("k06", 5.5),
)

_INTERPRETED = tl.constexpr(INTERPRETED)


@triton.jit
def round_tf32(x, INTERPRETED: tl.constexpr = _INTERPRETED):
    """fp32 x rounded to TF32: to nearest, ties away from zero, as `cvt.rna.tf32.f32` (PTX ISA, `cvt`).

    That instruction makes infinity of a NaN whose payload lies in the bits it drops; here it stays a NaN.
    """
    if INTERPRETED:  # runs no inline assembly
        bits = x.to(tl.uint32, bitcast=True)
        nearest = ((bits + 0x1000) & 0xFFFFE000).to(tl.float32, bitcast=True)
    else:
        nearest = tl.inline_asm_elementwise(
            "cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.where(x == x, nearest, float("nan"))


@autotune(RUNG)
@triton.jit
def tf32_kernel(
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
        acc = tl.dot(a, b, acc, input_precision="tf32")
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
    *,
    round_operands: bool = True,
) -> None:
    """c = alpha a @ b + beta c for fp32 a [M, K], b [K, N], c [M, N]; without `round_operands` they are truncated."""
    if round_operands and alpha != 0:
        a, b = repacked(a, round_tf32), repacked(b.T, round_tf32).T
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}
    run(RUNG, tf32_kernel, tiles(*c.shape), arguments, config)
