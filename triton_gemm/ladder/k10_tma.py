"""TMA: a few instructions make the tensor memory accelerator copy whole tiles.

Changes: against k09, operands and result are tensor descriptors: tiles are loaded and stored by coordinates.
Why: a `cp.async` moves 16 bytes, and needs an address and a predicate in registers. For a k-tile of 128 x 256 x 64 a
    thread issues 12, and all threads 3072. A TMA copy is one instruction for a box, whose rows have up to 128 bytes if
    they are swizzled: one for A's 128 x 64, four for B's 64 x 256. The unit computes addresses, fills in zeros outside
    of a matrix, swizzles against bank conflicts, and signals an `mbarrier`. Registers and issue slots are left to
    `wgmma`.
Predicts: the k-loop's address arithmetic disappears: 1.04 times k09, 0.95 of cuBLAS.
Came out: half the gain over k09 at 4096^3, and more of cuBLAS. The predicted shares do not fit each other: k08's 0.9 of
    cuBLAS times 1.04 twice is 0.97, and not 0.95. By the counters k10 takes fewer issue slots, and its tensor cores are
    little busier for it.
Requires: fp16 or bf16, sm_90 or newer; every operand with one unit stride, the other stride a multiple of 16 bytes, and
    a base aligned to 16 bytes; C row-major, its rows a multiple of 16 bytes long.
Tuning: the number of warps. 4 can hold a tile of 128 x 128 x 64, in 168 registers. k09 would spill there, because it
    needs registers for addresses and predicates, too. 8 divide it, and one warpgroup may multiply while the other
    waits. The tile of C takes shared memory, which the ring then lacks. 128 x 128 x 32 in three stages has 32 KiB on
    their way, and 128 x 128 x 64 in four has 96: by the model the first waits for latency. The model's latency was
    taken from such small tiles of k09 and k10.
Bound by: tensor cores most of the time, at a clock that power sets. The rest was thought to be one instruction stream:
    the warps that wait for tiles, issue copies and store C are those that feed `wgmma`. k11 puts that to the test. The
    last wave has 116 tiles for 132 SMs, which leaves tensor cores idle for 3 % of the whole time.
Next: k11 gives the loads a warp of their own.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from ..compat import dot_operand, round_to
from ..config import GemmConfig
from ..problem import UnsupportedOperandError, column_major, tma_operands_illegal
from .k04_grouped import grouped_pid
from .k09_persistent import resident
from .rung import Choice, Rung, autotune, checked, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, k, warps, stages, group in [
        (128, 256, 64, 8, 3, 8),
        (128, 256, 64, 8, 3, 4),
        (128, 256, 64, 8, 3, 16),
        (256, 128, 64, 8, 3, 8),
        (128, 128, 64, 8, 4, 8),
        (128, 128, 64, 4, 4, 8),
        (64, 128, 64, 4, 4, 8),
        (64, 64, 64, 4, 4, 8),
        (128, 128, 32, 8, 3, 8),
    ]
)

RUNG = Rung(
    module=__name__,
    title="TMA",
    precision="half",
    dtypes=(torch.float16, torch.bfloat16),
    instructions={
        (9, 0): ("HGMMA", "UTMALDG", "UTMASTG"),
        (10, 0): ("UTCHMMA", "UTMALDG", "UTMASTG"),
        (12, 0): ("HMMA", "UTMALDG", "UTMASTG"),
    },
    configs=CONFIGS,
    descriptors=True,
    staged_outputs=(1, 2),
    least={"BLOCK_M": 8, "BLOCK_N": 8, "BLOCK_K": 16},  # TMA copies rows of 16 bytes or more
    predicted=("k09", 1.04),
)


def set_blocks(arguments):
    """Gives the descriptors the configuration's tiles; a column-major operand's descriptor sees its transpose."""
    m, n, k = (arguments[name] for name in ("BLOCK_M", "BLOCK_N", "BLOCK_K"))
    arguments["a_desc"].block_shape = [k, m] if arguments["A_COLUMN_MAJOR"] else [m, k]
    arguments["b_desc"].block_shape = [n, k] if arguments["B_COLUMN_MAJOR"] else [k, n]
    arguments["c_desc"].block_shape = [m, n]


@autotune(RUNG, pre_hook=set_blocks)
@triton.jit
def tma_kernel(
    a_desc,
    b_desc,
    c_desc,
    M,
    N,
    K,
    alpha,
    beta,
    A_COLUMN_MAJOR: tl.constexpr,
    B_COLUMN_MAJOR: tl.constexpr,
    HAS_BETA: tl.constexpr,
    TUNE_KEY: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile_id in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True):
        # Locate the tile
        pid_m, pid_n = grouped_pid(tile_id, num_m, num_n, GROUP_M)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N

        # Prologue
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)

        # Main loop
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([k, m]).T if A_COLUMN_MAJOR else a_desc.load([m, k])
            b = b_desc.load([n, k]).T if B_COLUMN_MAJOR else b_desc.load([k, n])
            acc = tl.dot(dot_operand(a), dot_operand(b), acc)

        # Epilogue
        out = alpha * acc
        if HAS_BETA:
            out += beta * c_desc.load([m, n]).to(tl.float32)
        c_desc.store([m, n], round_to(out, c_desc.dtype))


def tma_arguments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> dict[str, Any]:
    """What kernels on descriptors share: a, b, c by name (column-major operands transposed) and the scalars.

    Raises UnsupportedOperandError where TMA cannot take one.
    """
    if a.shape[1] == 0:  # a descriptor needs an element, even one that is never read
        a, b, alpha = a.new_empty(8, 8), b.new_empty(8, 8), 0.0
    why = tma_operands_illegal(a, b, c)
    if why is not None:
        raise UnsupportedOperandError(f"TMA cannot take {why}")
    return {
        "a_desc": a.T if column_major(a) else a,
        "b_desc": b.T if column_major(b) else b,
        "c_desc": c,
        "M": c.shape[0],
        "N": c.shape[1],
        "K": a.shape[1] if alpha != 0 else 0,
        "alpha": alpha,
        "beta": beta,
        "A_COLUMN_MAJOR": column_major(a),
        "B_COLUMN_MAJOR": column_major(b),
        "HAS_BETA": beta != 0,
        "TUNE_KEY": tune_key(a, b, c, beta),
    }


@checked(RUNG)
def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: Choice = None,
) -> None:
    """c = alpha a @ b + beta c for fp16 or bf16 a [M, K], b [K, N] and c [M, N] of fp16, bf16 or fp32.

    Raises UnsupportedOperandError for operands that TMA cannot read in place.
    """
    if c.numel() == 0:
        return
    arguments = tma_arguments(a, b, c, alpha, beta)
    for name in ("a_desc", "b_desc", "c_desc"):
        arguments[name] = TensorDescriptor.from_tensor(arguments[name], [1, 1])
    run(RUNG, tma_kernel, resident(c), arguments, config)
