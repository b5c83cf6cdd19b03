"""What a selection sums for each element of C, worked out tile by tile from how work is dealt out."""

from __future__ import annotations

from itertools import pairwise
from math import ceil

import numpy as np

from triton_gemm import kernels
from triton_gemm.kernels.schedule import work_item
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection

Parts = tuple[range, ...]


def parts(problem: GemmProblem, selection: Selection) -> dict[Parts, np.ndarray]:
    """For each way to cut K into ranges, in the order in which their sums are added, a mask [batch, M, N] of the
    elements of C that are summed so. An unsplit sum, and what is the last part, ends with K."""
    given = kernels.repack.repacked(problem, selection.packed)
    given = given.swap_ab() if selection.swap_ab else given
    config, found = selection.config, {}
    shape = (given.batch, given.M, given.N)
    k_tiles = -(-given.K // config.BLOCK_K)

    def mask(cut: tuple[range, ...]) -> np.ndarray:
        ranges = tuple(range(k.start * config.BLOCK_K, min(k.stop * config.BLOCK_K, given.K)) for k in cut if len(k))
        return found.setdefault(ranges, np.zeros(shape, bool))

    schedule = selection.schedule
    if schedule is None:
        split_k = selection.split_k
        share = ceil(k_tiles / split_k)
        if selection.kernel == "fma":
            share = ceil(ceil(given.K / split_k) / config.BLOCK_K)
        bounds = [min(part * share, k_tiles) for part in range(split_k + 1)]
        if selection.kernel == "gemv":
            bounds = [k_tiles * part // split_k for part in range(split_k + 1)]
        mask(tuple(range(*pair) for pair in pairwise(bounds)))[:] = True
    else:
        m, n = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N
        num_m, num_n = -(-given.M // m), -(-given.N // n)
        of_tile: dict[int, dict[int, range]] = {}
        for item in range(schedule.items(given.batch * num_m * num_n)):
            tile, part, *ks = work_item.fn(item, k_tiles, schedule.split_tiles, schedule.split_k, schedule.unit)
            of_tile.setdefault(tile, {})[part] = range(*ks)
            if schedule.in_turn:
                units, last = -(-k_tiles // schedule.unit), schedule.split_k
                bounds = [min(part * units // last * schedule.unit, k_tiles) for part in range(last + 1)]
                of_tile[tile] = {i: range(*pair) for i, pair in enumerate(pairwise(bounds))}
        for tile, cut in of_tile.items():
            batch, i, j = _coordinates(tile, num_m, num_n, schedule.group_m)
            mask(tuple(cut[part] for part in sorted(cut)))[batch, i * m : (i + 1) * m, j * n : (j + 1) * n] = True
    return {cut: np.swapaxes(x, 1, 2) if selection.swap_ab else x for cut, x in found.items()}


def _coordinates(tile: int, num_m: int, num_n: int, group_m: int) -> tuple[int, int, int]:
    """`schedule.tile_coordinates`, in integers."""
    batch, within = divmod(tile, num_m * num_n)
    group, within = divmod(within, group_m * num_n)
    rows = min(num_m - group * group_m, group_m)
    return batch, group * group_m + within % rows, within // rows


def same(one: dict[Parts, np.ndarray], other: dict[Parts, np.ndarray]) -> bool:
    return one.keys() == other.keys() and all(np.array_equal(one[cut], other[cut]) for cut in one)
