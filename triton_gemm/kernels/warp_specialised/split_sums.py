"""Split-K: partial sums of a tile go through memory to the program that owns the tile (`splitk`)."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..splitk import arrive, wait_for


@gluon.jit
def share_sums(acc, tail, output, work, index, item, owned, CONSUMER: gl.constexpr, config):
    """(acc, tail): the owner's, with all other programs' sums for the tile, once those have come. Every other program
    stores its own, and counts itself."""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    MAIN_N: gl.constexpr = config.MAIN_N
    STRIDE: gl.constexpr = ROWS * (MAIN_N + config.TAIL_N)  # from one block of partial sums to the next
    split_tiles = work.split_tiles * (config.CLUSTER_M * config.CLUSTER_N)
    counter = output.counters_ptr + item.tile_id * config.CONSUMERS + CONSUMER
    workspace_ptr = output.workspace_ptr
    layout: gl.constexpr = acc.type.layout
    tail_layout: gl.constexpr = tail.type.layout
    sums = by_thread(acc)
    if config.TAIL_N:
        tail_sums = by_thread(tail)
    if owned:
        others = gl.where(index < split_tiles * work.split_k, work.split_k - 1, 0)
        if others > 0:
            wait_for(counter, others)
        block = item.tile_id * config.CONSUMERS + CONSUMER
        step = split_tiles * config.CONSUMERS
        sums = with_others(sums, workspace_ptr, block, step, others, STRIDE, config)
        acc = by_row(sums, ROWS, MAIN_N, layout)
        if config.TAIL_N:
            tail_sums = with_others(tail_sums, workspace_ptr + ROWS * MAIN_N, block, step, others, STRIDE, config)
            tail = by_row(tail_sums, ROWS, config.TAIL_N, tail_layout)
    else:
        block = ((item.part - 1) * split_tiles + item.tile_id) * config.CONSUMERS + CONSUMER
        store_sums(sums, workspace_ptr, block, STRIDE)
        if config.TAIL_N:
            store_sums(tail_sums, workspace_ptr + ROWS * MAIN_N, block, STRIDE)
        arrive(counter)
    return acc, tail


@gluon.jit
def by_thread(acc):
    """acc [rows, columns] as [threads and so on, 4], without moving data: a row holds two pairs of a thread, so that
    neighbouring threads read and write neighbouring 16 bytes."""
    R: gl.constexpr = acc.shape[0] // 64
    C: gl.constexpr = acc.shape[1] // 8
    # rows: 64s, warp, upper or lower half, lane // 4; columns: 8s, lane % 4, pair
    return acc.reshape((R, 4, 2, 8, C, 4, 2)).permute((0, 4, 1, 3, 5, 2, 6)).reshape((R * C * 128, 4))


@gluon.jit
def by_row(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """The inverse of `by_thread`."""
    x = x.reshape((ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2)).permute((0, 2, 5, 3, 1, 4, 6)).reshape((ROWS, COLUMNS))
    return gl.convert_layout(x, layout)


@gluon.jit
def sums_pointers(workspace_ptr, block, x, STRIDE: gl.constexpr):
    """Where x, of `by_thread`, is in block number `block` of the workspace, each of STRIDE elements."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, 4, gl.SliceLayout(0, layout))
    return workspace_ptr + block.to(gl.int64) * STRIDE + rows[:, None] * 4 + columns[None, :]


@gluon.jit
def store_sums(sums, workspace_ptr, block, STRIDE: gl.constexpr):
    """Stores sums, int32 ones bit by bit, in their block of the workspace."""
    gl.store(sums_pointers(workspace_ptr, block, sums, STRIDE), sums.to(gl.float32, bitcast=True))


@gluon.jit
def with_others(sums, workspace_ptr, block, step, others, STRIDE: gl.constexpr, config):
    """sums and those of the `others` programs for the same tile, in blocks `step` apart. A thread loads as many at once
    as it has registers for; of larger blocks first all left halves, then all right ones."""
    ROOM: gl.constexpr = 64 if config.CONSUMERS < 3 else 32  # registers for what others summed
    REGISTERS: gl.constexpr = sums.shape[0] * 4 // 128
    if REGISTERS > ROOM:
        half: gl.constexpr = sums.shape[0] // 2
        left, right = sums.reshape((2, half, 4)).permute((1, 2, 0)).split()
        left = with_others(left, workspace_ptr, block, step, others, STRIDE, config)
        right = with_others(right, workspace_ptr + half * 4, block, step, others, STRIDE, config)
        joined = gl.join(left, right).permute((2, 0, 1)).reshape((2 * half, 4))
        sums = gl.convert_layout(joined, sums.type.layout, assert_trivial=True)
    else:
        AT_ONCE: gl.constexpr = ROOM // REGISTERS
        for first in range(0, others, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                pointers = sums_pointers(workspace_ptr, block + (first + i) * step, sums, STRIDE)
                others_sums = gl.load(pointers, mask=first + i < others, other=0.0, cache_modifier=".cg")
                sums += others_sums.to(sums.dtype, bitcast=True)
    return sums
