"""Pipelined: the loads of the next k-tiles overlap the FMAs of this one.

Changes: against k05, num_stages goes from 1 to between 2 and 4, and most k-tiles are 16 deep. Triton turns the loop's
    loads into `cp.async` copies into a ring of tiles in shared memory, and starts them num_stages - 1 iterations ahead.
    The ring has as many slots: two for three stages, which CUDA C++ calls double buffering.
Why: a load from L2 takes some 300 clocks, from memory 600 to 800. For k05's k-tile of 64 x 128 x 32 each thread of four
    warps does 2048 FMAs. If the program is alone on its SM, each scheduler has one of its warps, and issues these in
    2048 clocks. Loads that run meanwhile cost issue slots, and no waiting. `cp.async` also saves the registers and the
    store to shared memory that other loads need.
Predicts: k05 waits for one latency and two barriers in each k-tile, about 500 of 2500 clocks: 1.2 times k05, near 0.85
    of cuBLAS.
Came out: a lower gain over k05, whose three or four programs on an SM already hide part of that latency. Its share of
    cuBLAS is higher than predicted: 0.85 is 1.2 times 0.71, and k05's share is more than 0.71. (0.85 is also the
    report's target.) By themselves 500 of 2500 clocks would be 1.25 times. They count a program alone on its SM, with a
    latency between L2's and memory's. The drawing waits 984: 600 for memory, and 384 for a transfer of 24 KiB. But the
    assembler splits k05's loads into three groups, so it waits for three latencies.
Requires: fp32, sm_80 or newer for `cp.async`; any shape and strides. It is fast only if sizes are multiples of 16, as
    k05 is: otherwise eight of eleven configurations are left out. Workspace for copies of A, and of a B that is not
    row-major, whose elements would be loaded one by one.
Tuning: num_stages: each is one more k-tile in shared memory, and one more load under way. Triton keeps num_stages - 1
    slots here, because a copy into a slot starts after the last read of the k-tile that was there. Its last operands
    are in registers then. So two stages have one slot, and their loads overlap with the last FFMAs alone. In k08 on
    Hopper tensor cores still read a k-tile when the next copy starts, so it keeps num_stages slots. More stages than
    latency needs give nothing. They cost where shared memory, and not registers, limits the programs on an SM.
Bound by: issue slots, which are the busiest: for 64 FFMAs a thread also issues 5 shared loads and some address
    arithmetic.
Next: more speed needs other arithmetic; k07 uses the tensor cores.

Port of the published kernel S2.4: "The published experiments" in docs/ladder.md.
"""

import torch

from ..config import GemmConfig
from .k04_grouped import grouped_kernel, tiles
from .k05_register_tiled import m_major, repacked
from .rung import FMA_CAPABILITIES, Choice, Rung, autotune, checked, pointer_arguments, run, tune_key

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, k, warps, depths in [
        (128, 64, 16, 4, (3, 4)),
        (64, 128, 16, 4, (2,)),
        (256, 64, 16, 8, (3,)),
        (64, 64, 16, 4, (3, 4)),
        (32, 64, 32, 4, (2,)),
    ]
    for stages in depths
    for group in ((8, 4, 16) if (m, n) == (128, 64) else (8,))
)

RUNG = Rung(
    module=__name__,
    title="pipelined",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions=dict.fromkeys(FMA_CAPABILITIES, ("FFMA", "LDGSTS", "LDS.128")),
    configs=CONFIGS,
    twins=("c07_warp_tiled",),
    predicted=("k05", 1.2),
)

pipelined_kernel = autotune(RUNG)(grouped_kernel.fn)


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
        if b.stride(1) != 1 and min(b.shape) > 1:
            b = repacked(b)[:, : b.shape[1]]
    arguments = {**pointer_arguments(a, b, c, alpha, beta), "TUNE_KEY": tune_key(a, b, c, beta)}
    run(RUNG, pipelined_kernel, tiles(*c.shape), arguments, config)
