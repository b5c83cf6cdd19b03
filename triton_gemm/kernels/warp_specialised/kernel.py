"""Hopper's production kernel: persistent, warp-specialised, TMA in and out, asynchronous `wgmma`, any operand layout.

One warp loads (`load`), one to three warpgroups multiply, each its own rows of the tile (`mma`). Warpgroups share
nothing but the ring of loaded k-tiles (`ring`), so that one may store its rows of C (`output`) while another has the
tensor cores to itself. C leaves in epilogue tiles of 64 columns through two small buffers, which leaves room for a
fourth stage.

The tiles of a partial wave are split along K, so that no multiprocessor idles (`schedule`). The program that owns a
tile adds up its parts (`split_sums`); where they are many, a second launch does (`reduction`). Where the bits of cut
tiles are wanted of more tiles than run at once, each program sums the parts of its tiles in turn
(`mma.multiply_in_turn`). Launches follow one another programmatically: while one grid runs out, the next sets up its
barriers and prefetches its first k-tiles into L2 (`prefetch`). It waits for the other's end only before it reads or
writes memory.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared
from triton.language.extra.cuda.gdc import gdc_launch_dependents

from .arguments import Config, Inputs, Output, Work
from .cluster import idle_partition, publish_barriers
from .load import load_partition
from .mma import mma_partition
from .output import allocate_staging
from .prefetch import prefetch_first_k_tiles
from .ring import allocate_ring


@gluon.jit(do_not_specialize=["num_m", "num_items", "k_tiles", "group_m", "per_group", "per_batch", "split_tiles",
                              "split_k", "last_m", "last_n", "a_batches", "b_batches", "alpha", "beta", "M", "N",
                              "stride_cb"])  # fmt: skip
def warp_specialised_kernel(
    a_desc,
    b_desc,
    b_tail_desc,
    c_desc,
    c_rest_desc,
    a_ptr,
    b_ptr,
    tiles_ptr,
    c_ptr,
    bias_ptr,
    workspace_ptr,
    counters_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    stride_cb,
    stride_cm,
    stride_cn,
    alpha,
    beta,
    num_m,
    num_items,
    k_tiles,
    group_m,
    per_group,
    per_batch,
    split_tiles,
    split_k,
    last_m,
    last_n,
    a_batches,
    b_batches,
    gate_bias_ptr,
    preactivation,
    preactivation_rest,
    ungated,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    C_COLUMN_MAJOR: gl.constexpr,
    C_TMA: gl.constexpr,
    HAS_BETA: gl.constexpr,
    BIAS: gl.constexpr,
    EARLY_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SCALES: gl.constexpr,
    GROUPED: gl.constexpr,
    SPLIT_K: gl.constexpr,
    REDUCTION: gl.constexpr,
    IN_TURN: gl.constexpr,
    UNIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    MAIN_N: gl.constexpr,
    TAIL_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    EPI_N: gl.constexpr,
    REST_N: gl.constexpr,
    C_BUFFERS: gl.constexpr,
    STORES: gl.constexpr,
    TERMS: gl.constexpr,
    A_PLANES: gl.constexpr,
    B_PLANES: gl.constexpr,
    PROMOTE: gl.constexpr,
    WAVES: gl.constexpr,
    PIECES: gl.constexpr,
    WIDE_MMA: gl.constexpr,
    A_COPIED: gl.constexpr,
    B_COPIED: gl.constexpr,
    CLUSTER_M: gl.constexpr,
    CLUSTER_N: gl.constexpr,
    GATE: gl.constexpr,
    num_stages: gl.constexpr,
    PDL: gl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias), of matrices or batches of them. With GATE it is
    c = activation(a @ gate + gate_bias) (a @ b + bias). `arguments` explains the names."""
    config = Config(
        CONSUMERS, num_stages, BLOCK_M, BLOCK_N, MAIN_N, TAIL_N, BLOCK_K, EPI_N, REST_N, C_BUFFERS, STORES,
        A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA, BIAS, EARLY_BIAS, ACTIVATION, SCALES,
        GROUPED, SPLIT_K, REDUCTION, IN_TURN, UNIT, TERMS, A_PLANES, B_PLANES, PROMOTE, WAVES, PIECES,
        WIDE_MMA, A_COPIED, B_COPIED, CLUSTER_M, CLUSTER_N, GATE, PDL,
    )  # fmt: skip
    inputs = Inputs(
        a_desc, b_desc, b_tail_desc, a_ptr, b_ptr, a_scale_ptr, b_scale_ptr, M, N, a_batches, b_batches
    )  # fmt: skip
    work = Work(
        num_items, k_tiles, split_tiles, split_k, num_m, group_m, per_group, per_batch, last_m, last_n, tiles_ptr
    )  # fmt: skip
    output = Output(
        c_desc, c_rest_desc, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm, stride_cn,
        alpha, beta, workspace_ptr, counters_ptr, gate_bias_ptr, preactivation, preactivation_rest, ungated,
    )  # fmt: skip
    if PDL:
        gdc_launch_dependents()
        if not GROUPED:
            prefetch_first_k_tiles(inputs, work, config)
    ring = allocate_ring(inputs, config)
    staging_0 = allocate_staging(output, ring.a, 0, config)
    staging_1 = allocate_staging(output, ring.a, 1, config)
    staging_2 = allocate_staging(output, ring.a, 2, config)
    fence_async_shared()
    publish_barriers(config)

    # The first partition is the launch's own warpgroup, and has the registers that the others leave. (A list of
    # partitions, and what is made of it, must not be a variable: its values would become tensors.)
    REGISTERS: gl.constexpr = 240 if CONSUMERS == 2 else 160
    IDLE: gl.constexpr = 2 if CLUSTER_M * CLUSTER_N > 1 else 0
    gl.warp_specialize(
        [
            (mma_partition, (config, ring, work, output, staging_0, 0)),
            (mma_partition, (config, ring, work, output, staging_1, 1)),
            (mma_partition, (config, ring, work, output, staging_2, 2)),
        ][:CONSUMERS]
        + [(load_partition, (config, inputs, ring, work))]
        + [(idle_partition, (config,)), (idle_partition, (config,))][:IDLE],
        [4, 4, 1, 1, 2][3 - CONSUMERS : 3 + IDLE],
        [REGISTERS, REGISTERS, 24, 24, 24][3 - CONSUMERS : 3 + IDLE],
    )
