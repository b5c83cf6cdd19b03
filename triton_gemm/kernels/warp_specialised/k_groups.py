"""Sums over groups of K, as in gradients of experts' weights: the same tiles, loaded from where a group begins to where
it ends, which only the GPU knows.

K runs down the rows of both operands in memory (A is column-major, B row-major), so a box may begin at any k. Where a
group is no multiple of BLOCK_K long its first k-tile is the short one, and begins with zeros. For that a tensor map has
K twice: matrix number k of it is the BLOCK_K rows from row k on, and overlaps the next. The short k-tile is the box
that begins as many rows before matrix `begin` as it has too many. TMA fills these with zeros, as they are outside of
the matrix, and neither reads rows of the group before nor goes beyond the group's end.
"""

from __future__ import annotations

from dataclasses import replace

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from ...compat import aggregate, tma_load
from ...problem import GemmProblem
from ..groups import range_of
from ..launch import Launch, Pointer, Scalar, TensorMap
from ..schedule import Schedule, tile_coordinates
from .arguments import Config, Inputs, Output, Ring
from .configs import Config as Tiles
from .mma import finish_products, multiply
from .output import allocate_staging, load_bias, store_tile
from .ring import next_slot
from .tensor_maps import tensor_map
from .work import last_tiles


@aggregate
class Work:
    """Which tiles there are, and in which order programs take them, as in `arguments.Work`; where groups end."""

    num_items: gl.tensor
    num_m: gl.tensor
    group_m: gl.tensor
    per_group: gl.tensor
    per_batch: gl.tensor
    last_m: gl.tensor
    last_n: gl.tensor
    ends_ptr: gl.tensor
    K: gl.tensor


@gluon.jit
def item_of(work, index, config):
    """(group, m, n, begin, end, k-tiles) of a tile: where it begins in the group's matrix of C, and the group in K."""
    group, pid_m, pid_n = tile_coordinates(index, work.num_m, work.group_m, work.per_group, work.per_batch)
    m = gl.minimum(pid_m * config.BLOCK_M, work.last_m)
    n = gl.minimum(pid_n * config.BLOCK_N, work.last_n)
    begin, end = range_of(work.ends_ptr, group, work.K)
    return group, m, n, begin, end, (end - begin + config.BLOCK_K - 1) // config.BLOCK_K


@gluon.jit
def allocate_slots(inputs, config):
    """As `allocate_ring`, whose global WARP would be part of another kernel's key by which of both is hashed first."""
    STAGES: gl.constexpr = config.NUM_STAGES
    a_desc = inputs.a_desc
    b_desc = inputs.b_desc
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES * config.CONSUMERS] + a_desc.block_shape, a_desc.layout)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES] + b_desc.block_shape, b_desc.layout)
    b_tail = b
    if config.TAIL_N:
        tail_desc = inputs.b_tail_desc
        b_tail = gl.allocate_shared_memory(tail_desc.dtype, [STAGES] + tail_desc.block_shape, tail_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1)
        mbarrier.init(empty.index(slot), count=config.CONSUMERS)
    return Ring(a, b, b_tail, a, b, full, empty)


@gluon.jit
def load_groups(config, inputs, ring, work):
    """The producer, as `load_partition`."""
    if config.PDL:
        gdc_wait()
    a_desc = inputs.a_desc
    b_desc = inputs.b_desc
    tail_desc = inputs.b_tail_desc
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    tail_bytes: gl.constexpr = tail_desc.block_type.nbytes if config.TAIL_N else 0
    nbytes: gl.constexpr = config.CONSUMERS * a_desc.block_type.nbytes + b_desc.block_type.nbytes + tail_bytes
    slot = 0
    phase = 1  # the first round finds every slot empty
    for index in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        _, m, n, begin, end, k_tiles = item_of(work, index, config)
        for step in range(0, k_tiles):
            k = end - (k_tiles - step) * config.BLOCK_K
            row = gl.minimum(k - begin, 0)  # less than 0 in a short k-tile
            k = gl.maximum(k, begin)
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(full, nbytes)
            for w in gl.static_range(config.CONSUMERS):
                tma_load(a_desc, [k, row, m + w * ROWS], full, ring.a.index(slot * config.CONSUMERS + w))
            tma_load(b_desc, [k, row, n], full, ring.b.index(slot))
            if config.TAIL_N:
                tma_load(tail_desc, [k, row, n + config.MAIN_N], full, ring.b_tail.index(slot))
            slot, phase = next_slot(slot, phase, config)


@gluon.jit
def multiply_groups(config, ring, work, output, staging, CONSUMER: gl.constexpr):
    """A consumer, as `mma_partition`."""
    if config.PDL:
        gdc_wait()
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    MAIN_N: gl.constexpr = config.MAIN_N
    FIRST: gl.constexpr = MAIN_N // config.EPI_N
    slot = 0
    phase = 0
    count = 0  # of epilogue tiles
    for index in range(gl.program_id(0), work.num_items, gl.num_programs(0)):
        group, m, n, _, _, k_tiles = item_of(work, index, config)
        acc, tail, slot, phase = multiply(ring, 0, k_tiles, slot, phase, CONSUMER, config)
        acc, tail = finish_products(ring, acc, tail, slot, k_tiles > 0, config)
        m += CONSUMER * ROWS
        none = load_bias(output, m, n, m, MAIN_N, "", config)
        store_tile(acc, none, output, staging, count, group, m, n, m, 0, config)
        if config.TAIL_N:
            none = load_bias(output, m, n, m, config.TAIL_N, "", config)
            store_tile(tail, none, output, staging, count + FIRST, group, m, n + MAIN_N, m, FIRST, config)
        count += config.BLOCK_N // config.EPI_N
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["ends_ptr", "K", "M", "N", "num_m", "num_items", "group_m", "per_group", "per_batch",
                              "last_m", "last_n"])  # fmt: skip
def k_groups_kernel(
    a_desc, b_desc, b_tail_desc, c_desc, c_ptr, ends_ptr, alpha, M, N, K,
    num_m, num_items, group_m, per_group, per_batch, last_m, last_n,
    C_COLUMN_MAJOR: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr,
    MAIN_N: gl.constexpr, TAIL_N: gl.constexpr, BLOCK_K: gl.constexpr, EPI_N: gl.constexpr, C_BUFFERS: gl.constexpr,
    num_stages: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """c = a @ b for each group of K; `arguments` explains the names."""
    config = Config(
        CONSUMERS, num_stages, BLOCK_M, BLOCK_N, MAIN_N, TAIL_N, BLOCK_K, EPI_N, 0, C_BUFFERS, 1,
        True, False, C_COLUMN_MAJOR, True, 0, "", "", "", "",
        False, False, False, False, 1, 1, 0, 0, False, 1, 1,
        False, 0, 0, 1, 1, False, PDL,
    )  # fmt: skip
    inputs = Inputs(a_desc, b_desc, b_tail_desc, c_ptr, c_ptr, c_ptr, c_ptr, M, N, M, M)
    work = Work(num_items, num_m, group_m, per_group, per_batch, last_m, last_n, ends_ptr, K)
    output = Output(
        c_desc, c_desc, c_ptr, c_ptr, c_ptr, c_ptr, M, N, M, 1, 1, alpha, alpha, c_ptr, c_ptr, c_ptr, None, None, None
    )
    if PDL:
        gdc_launch_dependents()
    ring = allocate_slots(inputs, config)
    staging_0 = allocate_staging(output, ring.a, 0, config)
    staging_1 = allocate_staging(output, ring.a, 1, config)
    staging_2 = allocate_staging(output, ring.a, 2, config)
    fence_async_shared()
    REGISTERS: gl.constexpr = 240 if CONSUMERS == 2 else 160
    gl.warp_specialize(
        [
            (multiply_groups, (config, ring, work, output, staging_0, 0)),
            (multiply_groups, (config, ring, work, output, staging_1, 1)),
            (multiply_groups, (config, ring, work, output, staging_2, 2)),
        ][:CONSUMERS]
        + [(load_groups, (config, inputs, ring, work))],
        [4, 4, 1][3 - CONSUMERS :],
        [REGISTERS, REGISTERS, 24][3 - CONSUMERS :],
    )


def launch(problem: GemmProblem, config: Tiles, schedule: Schedule, part: int, buffers: int) -> Launch:
    """The launch that computes `problem`, and stores C in parts of `part` columns through so many buffers."""
    m, n, k, consumers = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps // 4
    num_m, num_n, rows = -(-problem.M // m), -(-problem.N // n), m // consumers
    last_m, last_n = last_tiles(replace(problem, groups=None), config, schedule)

    def of_groups(operand: str, pitch: int, columns: int, block: int) -> TensorMap:
        """BLOCK_K rows in memory from each k on."""
        return TensorMap(operand, problem.dtype, (problem.K, k, columns), (pitch, pitch, 1), (1, k, block))

    b = of_groups("b", problem.b.strides[1], problem.N, config.main_n)
    arguments = {
        "a_desc": of_groups("a", problem.a.strides[2], problem.M, rows),
        "b_desc": b,
        "b_tail_desc": replace(b, block=(1, k, config.tail_n)) if config.tail_n else b,
        "c_desc": tensor_map("c", problem.c, problem.out_dtype, problem.batch, problem.M, problem.N, rows, part),
        **{"c_ptr": Pointer("c"), "ends_ptr": Pointer("ends"), "alpha": Scalar("alpha")},
        **{"M": problem.M, "N": problem.N, "K": problem.K},
        **{"num_m": num_m, "num_items": problem.batch * num_m * num_n, "group_m": schedule.group_m},
        **{"per_group": schedule.group_m * num_n, "per_batch": num_m * num_n},
        **{"last_m": last_m, "last_n": last_n, "C_COLUMN_MAJOR": problem.c.column_major},
        **{"CONSUMERS": consumers, "BLOCK_M": m, "BLOCK_N": n, "MAIN_N": config.main_n, "TAIL_N": config.tail_n},
        **{"BLOCK_K": k, "EPI_N": part, "C_BUFFERS": buffers, "num_stages": config.num_stages, "PDL": False},
    }
    return Launch(k_groups_kernel, (schedule.programs, 1, 1), arguments, {"num_warps": 4})
