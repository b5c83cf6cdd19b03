"""Which tiles, and which part of K, each program of a persistent grid computes.

Work is a list of items, of which a program takes every NUM_PROGRAMS-th. First come `split` tiles cut along K into
`parts` parts, as equal as k-tiles, or units of some, allow. Then come all others, whole. Parts of the same k-range
follow one another. So programs that run at the same time read the same k-tiles of A and B, out of L2. Stream-K (Osama
et al., PPoPP 2023) cuts all tiles into one equal run for each program. It gives this sharing up, and was up to twice as
slow here.

The part that begins at k = 0 comes last, and owns the tile: its program waits for the others. There are no more parts
than programs, so an owner waits for programs before it, which wait for none. Programs start in order: even where only a
few fit, beside another grid that waits likewise, those an owner waits for have started before it.

Where programs are CTAs of clusters, a cluster stands for a program here, and its CTAs' tiles together for a tile.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton
import triton.language as tl


@dataclass(frozen=True)
class Schedule:
    """How tiles are dealt out.

    programs: the grid. split_tiles: how many tiles are cut along K, so that programs share them. split_k: into how many
    parts each. group_m: rows of tiles that follow one another, for the sake of L2. reduction: whether a second launch
    adds the parts up, and no program waits (`reduction`). Then all tiles are cut. unit: k-tiles of which all parts but
    the last are multiples, so that tiles half as deep are cut at the same k.

    Where split_tiles is 0 and split_k is not 1, no tile is shared, and programs sum the parts of each in turn. That
    gives the bits of all tiles cut into so many parts, without partial sums in memory, and without waiting.
    """

    programs: int
    split_tiles: int = 0
    split_k: int = 1
    group_m: int = 8
    reduction: bool = False
    unit: int = 1

    def __post_init__(self) -> None:
        assert self.unit == 1 or self.split_k > 1, "parts of a unit's multiples, and none"
        assert self.split_tiles * self.split_k <= self.programs, "an owner may wait for a program that cannot start"

    @property
    def in_turn(self) -> bool:
        """Whether each program sums the parts of its tiles one after another."""
        return self.split_tiles == 0 and self.split_k > 1

    def items(self, num_tiles: int) -> int:
        return self.split_tiles * self.split_k + num_tiles - self.split_tiles


def clusters_at_once(ctas: int, num_sms: int) -> int:
    """How many clusters of so many CTAs, each of which fills an SM, run at the same time. Clusters of 2 fill all pairs
    of SMs. All CTAs of a larger one are in one GPC, whose SMs are no multiple of 4. Of an H200's 132 SMs 120 are used,
    by 30 clusters of 4 or 15 of 8 (measured). Of another number of SMs as large a part is assumed."""
    return num_sms // ctas if ctas <= 2 else num_sms * 10 // 11 // ctas


@triton.jit
def work_item(item, k_tiles, split_tiles, split_k, UNIT: tl.constexpr = 1):
    """(tile, part, first k-tile, end) of an item; part 0 owns the tile."""
    tile_id = item - split_tiles * split_k + split_tiles
    part = 0
    k_begin = 0
    k_end = k_tiles
    if item < split_tiles * split_k:
        part = split_k - 1 - item // split_tiles
        tile_id = item % split_tiles
        units = (k_tiles + UNIT - 1) // UNIT
        k_begin = part * units // split_k * UNIT
        k_end = (part + 1) * units // split_k * UNIT
        if UNIT > 1:
            k_end = min(k_end, k_tiles)
    return tile_id, part, k_begin, k_end


@triton.jit
def grouped_tile(tile_id, num_m, num_n, GROUP_M: tl.constexpr):
    """(pid_m, pid_n) of a tile of a matrix, in the order of `tile_coordinates`, for kernels with registers to spare."""
    group = tile_id // (GROUP_M * num_n)
    first_m = group * GROUP_M
    rows = tl.minimum(num_m - first_m, GROUP_M)
    within = tile_id % (GROUP_M * num_n)
    return first_m + within % rows, within // rows


@triton.jit
def tile_coordinates(tile_id, num_m, group_m, per_group, per_batch):
    """(batch, pid_m, pid_n) of a tile. The order is batch after batch, and in each batch by groups of group_m of the
    num_m rows of tiles. A group's tiles go column after column, so that programs that run at the same time read the
    same operands out of L2.

    per_group, per_batch: tiles of a whole group and of a matrix. A kernel short of registers has them as arguments, and
    reads them where it needs them: products of arguments would wait in registers through its main loop.
    """
    batch = tile_id // per_batch
    within = tile_id - batch * per_batch
    group = within // per_group
    rows = tl.minimum(num_m - group * group_m, group_m)
    within -= group * per_group
    column = within // rows
    return batch, group * group_m + within - column * rows, column
