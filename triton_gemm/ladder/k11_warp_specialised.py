"""Warp-specialised: one warp loads, eight multiply, and neither waits for the other's instructions.

Changes: against k10, the kernel says which warps do what, and not Triton's compiler. It is written in Gluon, Triton's
    lower-level language. One warp, the load partition, fills a ring of tiles by TMA. Two warpgroups, the mma partition,
    multiply them by asynchronous `wgmma`, one in flight throughout the main loop. Barriers (`mbarrier`), full and
    empty, pass the ring's slots between them.
Why: k09 and k10 already load the next tile's first k-tiles while C is stored, and k10's store runs by itself. But the
    warps that issue the copies are those that feed the tensor cores: they fill a slot when they come round to it. As
    Triton 3.9.0 compiles k10, they meet at a barrier four times for each k-tile. Here a warp of its own fills each slot
    as soon as it is free, and those that multiply meet once. Registers are divided by need: 24 a thread for the load
    partition, 240 for an mma partition of eight warps. (168, in tables of registers, is what each of the 384 threads
    has at the launch, before they are divided: the load partition is given four warps, of which one works. With four
    mma warps it is 255, of 256 threads.)
Predicts: loads hide the epilogue's stores, and no issue slots are lost between `wgmma`s: 1.05 times k10, 1.00 of
    cuBLAS.
Came out: lower. The counters say that k10's tensor cores are as busy already, so the copies and issue slots that k11
    spares k10's warps did not bind it. And k10 hides the stores, too. At 1024^3 it gives more than predicted, though an
    SM has one tile there and no next one. The tile of 64 x 128 gains: at 4096^3, too, the H200's tuner timed it at 427
    TFLOPS in k10, with four slots, and at 572 to 587 here, with six. What slots and roles give each was not measured.
Requires: fp16 or bf16, sm_90 (`wgmma`); operands as k10.
Tuning: the depth of the ring against the tile. Three slots of 128 x 256 and a tile of C fill shared memory. (`matmul`'s
    kernel stores C in pieces of 64 columns, and has room for four.) Smaller tiles have more: five of 128 x 128 and six
    of 64 x 128, where six and eight would fit. The load partition runs that far ahead. num_warps counts the mma
    partition's warps, each of which needs 16 rows of the tile.
Bound by: tensor cores most of the time, at a clock that power sets, as cuBLAS is. k10's copies are taken off the warps
    that feed `wgmma`, and tensor cores are no busier. Of the clocks that pass they are idle for 11 %: 3 of these are
    the last wave's, and what the others are is not known, as in k10. The barrier of the counters is no `mbarrier` but a
    `bar.sync`. The three warps without work wait at one `bar.sync`, and the mma warps meet at another for each k-tile,
    while `wgmma` runs. Which of the two takes longer was not counted, nor whether waits for the end of a `wgmma` are
    among them. Traffic from L2 does not bind. If it did, tiles of 64 x 128 would be half as fast, as they read twice as
    much for each FLOP. They are faster than that.
Next: beyond the ladder: a tile chosen by shape, split-K where the last wave is not full, larger tiles, clusters whose
    programs load tiles for one another.

The roles and barriers are those of CUTLASS's cooperative kernel and of Gluon's tutorials on warp specialisation.
"""

from functools import cache

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from ..compat import tma_load, tma_store
from ..config import GemmConfig
from .k04_grouped import grouped_pid
from .k09_persistent import resident
from .k10_tma import set_blocks, tma_arguments
from .rung import Choice, Rung, autotune, checked, run

CONFIGS = tuple(
    GemmConfig(BLOCK_M=m, BLOCK_N=n, BLOCK_K=64, GROUP_M=group, num_warps=warps, num_stages=stages)
    for m, n, warps, stages in [
        (128, 256, 8, 3),
        (256, 128, 8, 3),
        (128, 128, 8, 5),
        (128, 128, 4, 5),
        (64, 256, 4, 4),
        (64, 128, 4, 6),
    ]
    for group in (8, 16)
)

RUNG = Rung(
    module=__name__,
    title="warp-specialised",
    precision="half",
    dtypes=(torch.float16, torch.bfloat16),
    instructions={(9, 0): ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG")},
    configs=CONFIGS,
    descriptors=True,
    staged_outputs=(1, 1),
    interpretable=False,
    least={"BLOCK_N": 8, "BLOCK_K": 16, "num_warps": 4, "num_stages": 2},  # a warpgroup; one slot fills, one is read
    most={"BLOCK_N": 256, "num_warps": 16},  # `wgmma` takes 256; the load partition is four warps more
    rows_per_warp=16,  # `wgmma` gives a warp 16 rows
    predicted=("k10", 1.05),
)

LOADER_REGISTERS = gl.constexpr(24)


def set_blocks_and_layouts(arguments):
    """Gives the descriptors the configuration's tiles, and the shared-memory layout `wgmma` reads of each."""
    set_blocks(arguments)
    for desc in (arguments[name] for name in ("a_desc", "b_desc", "c_desc")):
        desc.layout = shared_layout(tuple(desc.block_shape), desc.base.dtype)


@cache
def shared_layout(block_shape: tuple[int, int], dtype: torch.dtype):
    """The swizzled layout of a tile: 128-byte rows where the tile is as wide."""
    return gl.NVMMASharedLayout.get_default_for(list(block_shape), getattr(gl, str(dtype).removeprefix("torch.")))


@gluon.jit
def load_partition(
    a_desc, b_desc, a_tiles, b_tiles, full_bars, empty_bars, M, N, K, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """The producer: fills every slot of the ring that has been emptied, tile after tile."""
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_stages: gl.constexpr = a_tiles.shape[0]
    step = 0
    for tile_id in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        pid_m, pid_n = grouped_pid(tile_id, num_m, num_n, GROUP_M)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        for k in range(0, K, BLOCK_K):
            slot = step % num_stages
            phase = (step // num_stages) & 1
            full = full_bars.index(slot)
            mbarrier.wait(empty_bars.index(slot), phase ^ 1)  # the first round finds every slot empty
            mbarrier.expect(full, a_desc.block_type.nbytes + b_desc.block_type.nbytes)
            tma_load(a_desc, [k, m] if A_COLUMN_MAJOR else [m, k], full, a_tiles.index(slot))
            tma_load(b_desc, [n, k] if B_COLUMN_MAJOR else [k, n], full, b_tiles.index(slot))
            step += 1


@gluon.jit
def mma_partition(
    c_desc, a_tiles, b_tiles, c_tile, full_bars, empty_bars, c_ptr, M, N, K, stride_cm, alpha, beta,
    HAS_BETA: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr, num_warps: gl.constexpr,
):  # fmt: skip
    """The consumer: multiplies slots in order, hands each back one `wgmma` later, and stores C by TMA."""
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    num_stages: gl.constexpr = a_tiles.shape[0]
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[num_warps, 1], instr_shape=[16, BLOCK_N, 16]
    )
    step = 0
    for tile_id in range(gl.program_id(0), num_m * num_n, gl.num_programs(0)):
        # Locate the tile
        pid_m, pid_n = grouped_pid(tile_id, num_m, num_n, GROUP_M)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N

        # Prologue
        acc = gl.zeros((BLOCK_M, BLOCK_N), gl.float32, layout)

        # Main loop
        for k in range(0, K, BLOCK_K):
            slot = step % num_stages
            mbarrier.wait(full_bars.index(slot), (step // num_stages) & 1)
            a = a_tiles.index(slot)
            b = b_tiles.index(slot)
            if A_COLUMN_MAJOR:
                a = a.permute((1, 0))
            if B_COLUMN_MAJOR:
                b = b.permute((1, 0))
            acc = warpgroup_mma(a, b, acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=(acc,))
            # The wgmma before this one is done, so its slot may be filled again.
            mbarrier.arrive(empty_bars.index((step + num_stages - 1) % num_stages), pred=k > 0)
            step += 1
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty_bars.index((step + num_stages - 1) % num_stages), pred=K > 0)

        # Epilogue: the TMA store of this tile runs under the next tile's main loop.
        out = alpha * acc
        if HAS_BETA:
            offs_m = m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
            offs_n = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
            c_ptrs = c_ptr + offs_m[:, None].to(gl.int64) * stride_cm + offs_n[None, :]
            mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
            out += beta * gl.load(c_ptrs, mask=mask, other=0.0).to(gl.float32)
        tma.store_wait(0)
        c_tile.store(out.to(c_desc.dtype))
        fence_async_shared()
        tma_store(c_desc, [m, n], c_tile)
    tma.store_wait(0)


@autotune(RUNG, pre_hook=set_blocks_and_layouts)
@gluon.jit
def warp_specialised_kernel(
    a_desc,
    b_desc,
    c_desc,
    c_ptr,
    M,
    N,
    K,
    stride_cm,
    alpha,
    beta,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    HAS_BETA: gl.constexpr,
    TUNE_KEY: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_stages: gl.constexpr,
    num_warps: gl.constexpr,
):
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [num_stages] + a_desc.block_shape, a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [num_stages] + b_desc.block_shape, b_desc.layout)
    c_tile = gl.allocate_shared_memory(c_desc.dtype, c_desc.block_shape, c_desc.layout)
    full_bars = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(num_stages):
        mbarrier.init(full_bars.index(slot), count=1)
        mbarrier.init(empty_bars.index(slot), count=1)
    fence_async_shared()

    # fmt: off
    gl.warp_specialize(
        [
            (mma_partition, (
                c_desc, a_tiles, b_tiles, c_tile, full_bars, empty_bars, c_ptr, M, N, K, stride_cm, alpha, beta,
                HAS_BETA, BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_COLUMN_MAJOR, B_COLUMN_MAJOR, num_warps,
            )),
            (load_partition, (
                a_desc, b_desc, a_tiles, b_tiles, full_bars, empty_bars, M, N, K,
                BLOCK_M, BLOCK_N, BLOCK_K, GROUP_M, A_COLUMN_MAJOR, B_COLUMN_MAJOR,
            )),
        ],
        [1],
        [LOADER_REGISTERS],
    )
    # fmt: on


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
    arguments = {**tma_arguments(a, b, c, alpha, beta), "c_ptr": c, "stride_cm": c.stride(0)}
    for name in ("a_desc", "b_desc", "c_desc"):
        layout = shared_layout((64, 64), arguments[name].dtype)
        arguments[name] = TensorDescriptor.from_tensor(arguments[name], [64, 64], layout)
    run(RUNG, warp_specialised_kernel, resident(c), arguments, config)
