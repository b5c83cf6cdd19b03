"""Persistent: one program on each SM computes tile after tile.

Changes: against k08, the grid has one program for each SM, also where several would fit. Each program loops over tiles
    that are as many apart as there are programs.
Why: a program's prologue (the first k-tiles' latency) and epilogue (the store) leave the tensor cores idle. An SM has
    room for one tile of 128 x 256, so nothing else runs there meanwhile. With a loop over tiles in one program, the
    compiler may start the next tile's loads during this one's epilogue. `flatten=True` makes one loop of the two, so
    that it does.
Predicts: at 4096^3 a tile of 64 k-tiles takes some 50 us: 2 x 128 x 256 x 4096 FLOP at an SM's share of 700 TFLOPS.
    About 2 us are prologue and epilogue: 1.04 times k08 if they are hidden. The number of waves stays: 512 tiles on 132
    SMs are 3.88.
Came out: half the gain at 4096^3. What is left of a tile's ends was not measured. At 1024^3 tiles of 64 x 128 are 128,
    one for an SM: no next tile is there to load early.
Requires: fp16 or bf16, sm_80 or newer; any shape and strides, fast only in multiples of 16 elements, as k08.
Tuning: most of k08's tiles. Small ones are slower here: of 64 x 64 x 32 k08 has up to six programs on an SM, which fill
    one another's waits, and k09 has one. C now passes through shared memory next to the ring: half a tile of 128 x 256
    at a time if C has 16 bits. The check of configurations counts the whole tile, so it allows 128 x 256 x 64 three
    stages, which take 176 KiB. Four would take 224 of 227 KiB, and were not timed. If C is fp32, as it may be, that
    tile is left out. GROUP_M no longer orders launches. It still says which 132 tiles are computed at once.
Bound by: tensor cores most of the time, at a clock that power sets. Of the clocks that pass they are idle for 13 %: 3
    of these are the last wave's, and k10, which has no `cp.async`, gains 2. What the others are is not known. Registers
    limit which tiles there are: addresses and predicates of two nested loops stay live, so 128 x 128 x 64 on 4 warps
    would spill.
Next: k10 lets the TMA unit compute addresses.
"""

import torch
import triton
import triton.language as tl

from ..compat import dot_operand
from ..config import GemmConfig
from ..hardware.device import device_info
from .k03_blocked import operand_pointers, store_tile
from .k04_grouped import grouped_pid, tiles
from .rung import Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages in [
        (128, 256, 64, 8, 3),
        (128, 128, 64, 8, 3),
        (128, 128, 32, 4, 4),
        (64, 128, 64, 4, 4),
        (64, 64, 64, 8, 4),
        (64, 64, 32, 4, 4),
    ]
    for group in ((8, 4, 16) if (m, n) == (128, 256) else (8,))
)

RUNG = Rung(
    module=__name__,
    title="persistent",
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
    staged_outputs=(1, 1),
    predicted=("k08", 1.04),
)


@autotune(RUNG)
@triton.jit
def persistent_kernel(
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
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    for tile_id in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        # Locate the tile
        pid_m, pid_n = grouped_pid(tile_id, num_m, num_n, GROUP_M)

        # Prologue
        a_ptrs, b_ptrs = operand_pointers(
            a_ptr, b_ptr, pid_m, pid_n, M, N, stride_am, stride_ak, stride_bk, stride_bn, BLOCK_M, BLOCK_N, BLOCK_K
        )
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

        # Main loop
        for k in range(0, K, BLOCK_K):
            a = tl.load(a_ptrs, mask=offs_k[None, :] < K - k, other=0.0)
            b = tl.load(b_ptrs, mask=offs_k[:, None] < K - k, other=0.0)
            acc = tl.dot(dot_operand(a), dot_operand(b), acc)
            a_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_ak
            b_ptrs += tl.cast(BLOCK_K, tl.int64) * stride_bk

        # Epilogue
        store_tile(c_ptr, acc, pid_m, pid_n, M, N, stride_cm, stride_cn, alpha, beta, HAS_BETA, BLOCK_M, BLOCK_N)


def resident(c: torch.Tensor):
    """The grid: a program an SM, or a program a tile of c [M, N] where there are fewer tiles."""
    num_sms = device_info(c.device).num_sms
    return lambda meta: (min(num_sms, tiles(*c.shape)(meta)[0]),)


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
    run(RUNG, persistent_kernel, resident(c), arguments, config)
