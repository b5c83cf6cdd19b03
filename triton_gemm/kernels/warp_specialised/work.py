"""The items of work that all partitions of a program go through, in the same order."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ..groups import listed
from ..schedule import tile_coordinates, work_item
from .arguments import Item
from .cluster import rank


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
    return Item(tile_id, part, k_begin, k_end, batch, m, pid_n * config.BLOCK_N, rows_end)
