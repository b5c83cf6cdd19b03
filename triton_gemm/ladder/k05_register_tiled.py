"""Register-tiled: large tiles, up to 64 results a thread, and an M-major A, so that their reads are wide.

Changes: against k04, larger tiles of the same kernel: 64 x 128 on 4 warps, or 128 x 128 on 8. (In CUDA C++ that is
    another kernel, here a launch parameter.) A pass before it copies A to M-major, so that M is contiguous. (Where C
    has fewer than 1024 columns it would cost more than it gains, and is left out.)
Why: a thread with TM x TN results reads TM + TN words from shared memory for TM x TN FMAs. Its reads are wide if the
    operands of neighbouring results are contiguous: 16 bytes of B are 4 columns. But 16 bytes of a row-major A are 4
    steps of K, so a thread would hold 4 steps of all its rows at once. CUDA kernels transpose A on the way into shared
    memory. Triton keeps the order of global memory there, so A is transposed before.
Predicts: a thread with 8 x 8 results reads 16 words for 64 FMAs, 1 for 4. In k04, with 4 x 4 to 8 x 4, it reads 1 for 2
    to 2.7. So shared memory, which bound k04, is read half as much: 1.8 times k04. The pass moves 8 bytes for each
    element of A, 2 % of the time at 4096^3.
Came out: lower. The prediction weighed shared memory alone, and is above the units' peak. Triton gives a thread 16 x 4
    results (rows x columns) and not 8 x 8, as lanes fill a row of the tile first: 20 words for 64 FMAs, 1 for 3.2. And
    k04's best tile, 64 x 64 on 4 warps, has 8 x 4 already. Without the M-major copy large tiles gained little when that
    was tried, which is not recorded. A thread then holds 4 steps of K of its 16 rows of A, and not 1, which takes up to
    48 registers more. So an SM has room for two programs of 128 x 64 instead of three. Of the twins c06 reads twice
    c05's words for an FMA, and is 1.44 times as fast. It loads 16 bytes at a time from global memory, where c05 loads
    4, and has four times the threads in a block. And it stores A transposed, where c05's reads of A conflict on banks.
    Which of these matters was not measured.
Requires: fp32; any shape and strides, fast only where sizes and strides are multiples of 16; workspace for a copy of A.
    Elsewhere operands are loaded word by word, and a rule (`GemmConfig.illegal`) leaves out six of seven
    configurations, which may spill.
Tuning: the shape of a thread's 64 results, and the depth of a k-tile. A deeper one has fewer barriers, and takes more
    registers. Only other programs hide the loads, so it matters how many an SM has room for: three or four of 64 x 128
    on 4 warps, one or two of 128 x 128 on 8 warps.
Bound by: issue slots, and latency at the start of each k-tile: with num_stages = 1 the loads wait for the FMAs, and the
    FMAs for the loads.
Next: k06 loads the next tiles while this one multiplies.

Port of the published kernels S2.3, S3.4, S4.2 and S4.3: "The published experiments" in docs/ladder.md.
"""

import torch
import triton
import triton.language as tl

from ..config import OPTIONS, GemmConfig
from .k04_grouped import grouped_kernel, tiles
from .rung import FMA_CAPABILITIES, Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps)
    for m, n, k, warps in [
        (64, 128, 32, 4),
        (128, 64, 16, 4),
        (128, 128, 32, 8),
        (128, 128, 16, 8),
        (64, 64, 32, 8),
    ]
    for group in ((8, 4, 16) if (m, n) == (64, 128) else (8,))
)

RUNG = Rung(
    module=__name__,
    title="register-tiled",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA", "LDG.E.128", "LDS.128")),
    configs=CONFIGS,
    twins=("c04_thread_tiled_1d", "c05_thread_tiled_2d", "c06_register_blocked"),
    predicted=("k04", 1.8),
)

M_MAJOR_FROM_N = 1024  # with fewer columns of C the pass costs more than it gains

register_tiled_kernel = autotune(RUNG)(grouped_kernel.fn)


@triton.jit
def identity(x):
    return x


@triton.jit
def repack_kernel(
    x_ptr,
    out_ptr,
    rows,
    columns,
    padded,
    stride_row,
    stride_column,
    CONVERT: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_COLUMNS: tl.constexpr,
):
    """out [rows, padded], row-major, becomes CONVERT(x) for x [rows, columns]; the padding becomes 0."""
    blocks = tl.cdiv(padded, BLOCK_COLUMNS)
    pid = tl.program_id(0)
    r = ((pid // blocks) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)).to(tl.int64)[:, None]
    k = ((pid % blocks) * BLOCK_COLUMNS + tl.arange(0, BLOCK_COLUMNS)).to(tl.int64)[None, :]
    x = tl.load(x_ptr + r * stride_row + k * stride_column, mask=(r < rows) & (k < columns), other=0.0)
    tl.store(out_ptr + r * padded + k, CONVERT(x), mask=(r < rows) & (k < padded))


def repacked(x: torch.Tensor, convert=identity) -> torch.Tensor:
    """convert(x) for x [rows, columns], row-major, its rows padded with zeros to a multiple of 32 elements."""
    rows, columns = x.shape
    padded = 32 * triton.cdiv(columns, 32)
    out = torch.empty(rows, padded, dtype=x.dtype, device=x.device)
    grid = (triton.cdiv(rows, 64) * triton.cdiv(padded, 64),)
    config = {"CONVERT": convert, "BLOCK_ROWS": 64, "BLOCK_COLUMNS": 64, "num_warps": 8}
    repack_kernel[grid](x, out, rows, columns, padded, *x.stride(), **config, **OPTIONS)
    return out


def m_major(a: torch.Tensor, N: int) -> torch.Tensor:
    """a [M, K], or an M-major copy of it if C has enough columns N for that to pay."""
    M = a.shape[0]
    return a if N < M_MAJOR_FROM_N or a.stride(0) == 1 else repacked(a.T)[:, :M].T


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
    if alpha != 0:
        a = m_major(a, c.shape[1])
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}
    run(RUNG, register_tiled_kernel, tiles(*c.shape), arguments, config)
