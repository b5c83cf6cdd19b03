"""Register-tiled: k04's kernel on tiles so large that every thread owns up to 64 results.

Changes: against k04, nothing in the kernel's text; only the tiles grow, to 64 x 128 on 4 warps and 128 x 128 on 8. What
    takes a new kernel in CUDA C++ (1-D and 2-D thread tiling, float4 loads) is a launch parameter here.
Why: a thread with TM x TN results reads TM + TN words from shared memory for TM x TN FMAs. Triton spreads the tile
    over the warps, keeps the outer products in registers and reads 16 bytes at a time where K allows it.
Predicts: 8 x 8 results read 16 words for 64 FMAs, 1 for 4, where k04's 4 x 4 to 4 x 8 read 1 for 2 to 2.7:
    shared memory, which bound k04, is asked for half as much, so 1.8 times k04. Missed high: Triton gives k04's
    best tile, 64 x 64 on 4 warps, 4 x 8 results a thread already, and four such programs on an SM hide one another's
    latency where one or two large ones cannot.
Requires: fp32; any shape and strides, wide loads where rows start on 16 bytes.
Bound by: latency at the start of each k-tile: with num_stages = 1 the loads wait for the FMAs, and they for the loads.
Next: k06 loads the next tiles while this one multiplies.

Retells seeds S2.3, S3.4, S4.2 and S4.3.
"""

import torch

from ..config import GemmConfig
from .k04_grouped import grouped_kernel, tiles
from .rung import FMA_CAPABILITIES, Rung, autotune, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=8, num_warps=warps)
    for m, n, k, warps in [
        (64, 128, 32, 4),
        (128, 64, 32, 4),
        (64, 128, 16, 4),
        (128, 64, 16, 4),
        (128, 128, 32, 8),
        (128, 128, 16, 8),
        (64, 64, 16, 4),
    ]
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

register_tiled_kernel = autotune(RUNG)(grouped_kernel.fn)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    config: GemmConfig | None = None,
) -> None:
    """c = alpha a @ b + beta c for fp32 a [M, K], b [K, N], c [M, N]."""
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c)}
    run(RUNG, register_tiled_kernel, tiles(*c.shape), arguments, config)
