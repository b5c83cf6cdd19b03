"""The items of work that all partitions of a program go through, in the same order, and where their tiles begin."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...problem import GemmProblem
from ..groups import listed
from ..launch import MAX_SIZE
from ..schedule import Schedule, tile_coordinates, work_item
from .arguments import Item
from .cluster import rank
from .configs import Config


@gluon.jit
def number_of_items(work, config):
    """How many items there are; of a grouped product only the GPU knows."""
    num_items = work.num_items
    if config.GROUPED:
        num_items = gl.load(work.tiles_ptr)
    return num_items


@gluon.jit
def item_of(work, item, M, config):
    """The Item of that number. In a cluster CTAs have items of successive numbers, which are one item of the schedule:
    the tile of each is one of a tile of the cluster."""
    CTAS: gl.constexpr = config.CLUSTER_M * config.CLUSTER_N
    if CTAS > 1:
        item = item // CTAS
    tile_id, part, k_begin, k_end = work_item(item, work.k_tiles, work.split_tiles, work.split_k, config.UNIT)
    rows_end = M
    if config.GROUPED:
        batch, m, rows_end, pid_n, k_end = listed(work.tiles_ptr, tile_id, work.k_tiles)
    else:
        batch, pid_m, pid_n = tile_coordinates(tile_id, work.num_m, work.group_m, work.per_group, work.per_batch)
        if CTAS > 1:
            number = rank(config)
            pid_m = pid_m * config.CLUSTER_M + number % config.CLUSTER_M
            pid_n = pid_n * config.CLUSTER_N + number // config.CLUSTER_M
            tile_id = tile_id * CTAS + number
        m = pid_m * config.BLOCK_M
        if config.SCALES != "blocks":
            m = gl.minimum(m, work.last_m)
    n = pid_n * config.BLOCK_N
    if config.SCALES != "blocks":
        n = gl.minimum(n, work.last_n)
    return Item(tile_id, part, k_begin, k_end, batch, m, n, rows_end)


def last_tiles(problem: GemmProblem, config: Config, schedule: Schedule) -> tuple[int, int]:
    """The last row and the last column at which a program's tile begins, at most MAX_SIZE.

    A tile that would pass the end of C begins earlier, where it may, and computes some elements of its neighbour again,
    with the same bits. Tiles that load rows outside of an operand were measured to be slower than whole ones. Probably
    their programs fall out of step with those that read the same operands, and share fewer requests to L2
    (docs/log/edge-tiles.md).

    It may not begin earlier where C is read, which the neighbour may have written. Nor may it where tiles are cut
    differently, where groups end inside of tiles, or inside of TMA's 16 bytes. Nor may it where scales have blocks,
    with which its columns must begin, and registers are few.
    """
    cut_alike = schedule.split_tiles in (0, problem.batch * config.tiles(problem.M, problem.N))
    free = cut_alike and not problem.has_beta and problem.groups is None and problem.scales != "blocks"

    def last(extent: int, side: int, *itemsizes: int) -> int:
        """itemsizes: bytes an element, of the operands that are contiguous along this dimension."""
        fits = extent >= side and all(extent * itemsize % 16 == 0 for itemsize in itemsizes)
        return extent - side if free and fits else MAX_SIZE

    size = problem.dtype.itemsize
    last_m = last(problem.M, config.BLOCK_M, *[size] * problem.a.column_major)
    last_n = last(problem.N, config.BLOCK_N, *[size] * (not problem.b.column_major))
    return last_m, last_n
