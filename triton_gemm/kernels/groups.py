"""Tiles of groups whose sizes only the GPU knows: a list of them, written before the product by one program a group.

The host knows how many rows there are and how many groups. So it knows how many tiles there can be at most: each group
adds at most one that is not full. The list says how many there are, and of each which group it is of, where it begins,
and where the group's rows end. So the product's kernels find a tile by one read, whatever the number of groups.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ..config import TileConfig
from ..problem import GemmProblem
from .launch import Launch, Pointer, Temporary
from .programmatic import follow
from .schedule import tile_coordinates

CHUNK = 256  # tiles that a program lists at once


@triton.jit(do_not_specialize=["ends_ptr", "M", "num_n", "groups", "limit", "group_m"])
def list_tiles_kernel(
    ends_ptr,
    tiles_ptr,
    M: tl.int32,
    num_n: tl.int32,
    groups: tl.int32,
    limit: tl.int32,
    group_m: tl.int32,
    BLOCK_M: tl.constexpr,
    GROUPS: tl.constexpr,
    CHUNK: tl.constexpr,
    PDL: tl.constexpr,
):
    """tiles [1 + limit, 4]: first (their number, that of groups), then (group, first row, column of tiles, rows' end).

    Rows after the last group are one more group, which no matrix of b belongs to. Ends beyond M, or before those of the
    group before, are taken for M, and for empty groups.
    """
    follow(PDL)

    # How many tiles the groups before this one have
    group = tl.program_id(0)
    i = tl.arange(0, GROUPS)
    ends = tl.load(ends_ptr + i, mask=i < groups, other=M)
    begins = tl.load(ends_ptr + i - 1, mask=(i > 0) & (i <= groups), other=0)
    ends = tl.minimum(tl.maximum(ends, 0), M)
    begins = tl.minimum(tl.maximum(begins, 0), M)
    rows = (tl.maximum(ends - begins, 0) + BLOCK_M - 1) // BLOCK_M
    first = tl.sum(tl.where(i < group, rows, 0)) * num_n
    num_m = tl.sum(tl.where(i == group, rows, 0))
    begin = tl.sum(tl.where(i == group, begins, 0))
    end = tl.sum(tl.where(i == group, ends, 0))

    for tile in range(0, num_m * num_n, CHUNK):
        tiles = tile + tl.arange(0, CHUNK)
        _, pid_m, pid_n = tile_coordinates(tiles, num_m, group_m, group_m * num_n, num_m * num_n)
        entry_ptrs = tiles_ptr + (1 + first + tiles) * 4
        listed = (tiles < num_m * num_n) & (first + tiles < limit)
        tl.store(entry_ptrs, tl.zeros_like(tiles) + group, mask=listed)
        tl.store(entry_ptrs + 1, begin + pid_m * BLOCK_M, mask=listed)
        tl.store(entry_ptrs + 2, pid_n, mask=listed)
        tl.store(entry_ptrs + 3, tl.zeros_like(tiles) + end, mask=listed)
    if group == groups:
        tl.store(tiles_ptr, tl.minimum(first + num_m * num_n, limit))
        tl.store(tiles_ptr + 1, groups)


@triton.jit
def listed(tiles_ptr, tile, K):
    """(group, first row, end of the group's rows, column of tiles, end of the products) of a tile in the list."""
    entry_ptr = tiles_ptr + 4 + tile.to(tl.int64) * 4
    group = tl.load(entry_ptr)
    end_k = tl.where(group < tl.load(tiles_ptr + 1), K, 0)
    return group, tl.load(entry_ptr + 1), tl.load(entry_ptr + 3), tl.load(entry_ptr + 2), end_k


@triton.jit
def range_of(ends_ptr, group, K):
    """(begin, end) of a group within K."""
    before = tl.load(ends_ptr + group - 1, mask=group > 0, other=0)
    begin = tl.minimum(tl.maximum(before, 0), K)
    return begin, tl.maximum(tl.minimum(tl.load(ends_ptr + group), K), begin)


def max_tiles(problem: GemmProblem, config: TileConfig) -> int:
    """How many tiles there are at most."""
    return (problem.M // config.BLOCK_M + problem.batch + 1) * -(-problem.N // config.BLOCK_N)


def launch(problem: GemmProblem, config: TileConfig, band: int) -> Launch:
    """What lists the tiles, in each group in bands of `band` rows of tiles, in the temporary "tiles"."""
    limit = max_tiles(problem, config)
    arguments = {
        "ends_ptr": Pointer("ends"),
        "tiles_ptr": Pointer("tiles"),
        "M": problem.M,
        "num_n": -(-problem.N // config.BLOCK_N),
        "groups": problem.batch,
        "limit": limit,
        "group_m": band,
        "BLOCK_M": config.BLOCK_M,
        "GROUPS": triton.next_power_of_2(problem.batch + 1),
        "CHUNK": CHUNK,
        "PDL": False,
    }
    tiles = Temporary("tiles", (1 + limit, 4), torch.int32)
    return Launch(list_tiles_kernel, (problem.batch + 1, 1, 1), arguments, {"num_warps": 4}, temporaries=(tiles,))
