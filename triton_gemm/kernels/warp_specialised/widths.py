"""Widths that fill whole waves: tiles as wide as makes the busiest multiprocessor's work least. For more waves than
that can be said of, widths divide C's into equal columns of tiles, so that none computes much beyond C."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import cache, lru_cache

from ...hardware.device import SHARED_MEMORY
from ...problem import GemmProblem
from ..schedule import clusters_at_once
from .configs import CLUSTERED, CONFIGS, FEW_ROWS, FOR_LONG_SUMS, LONG, Config
from .host import spans_widths, wide_memory

NARROWEST, WIDEST = 64, 256
NARROWEST_OF_FEW = 32  # of tiles for at most FEW_ROWS
MOST_STAGES = 12
MOST_SUMS = {4: 192, 8: 192, 12: 96}  # registers of a thread, by warps, beside which nothing spills
# Heights of tiles, and clusters in which they won somewhere. Those of 8 CTAs share more, but 15 of them leave 12 of 132
# multiprocessors idle, which only small tiles make up for.
FORMS = {
    64: ((1, 1), (2, 1), (2, 2), (4, 2), (2, 4)),  # alone for few rows
    128: ((1, 1), (2, 1), (1, 2), (2, 2)),
    192: ((1, 1), (1, 2), (2, 1)),
    256: ((1, 1), (2, 1), (2, 2)),
}
WAVES = (1 / 3, 1 / 2, 1, 2, 3)  # a third or half of one: of tiles that are cut along K in three or two
COLUMNS = 4  # of clusters at most, into which C is divided where there are more waves than these
FOR_MANY_WAVES = {(128, 1, 1), (128, 2, 1), (192, 1, 1), (256, 1, 1)}  # heights and clusters, where it is
# For long sums, whose parts fill the wave: heights and clusters that span C in a few columns, as wide as those are.
SPANNING = {64: ((2, 1), (4, 1), (2, 2), (4, 2), (2, 4)), 128: ((2, 1), (4, 1), (2, 2))}
SPANNED = (1, 2, 3)  # columns


def widths(problem: GemmProblem, num_sms: int) -> Iterable[Config]:
    """Configurations whose tiles fill a number of waves, or make a number of columns, as wide as that needs; for a long
    sum also those that span C."""
    if not spans_widths(problem):
        return ()
    filling = _filling(problem, num_sms)
    if max(problem.M, problem.N) * LONG > problem.K:
        return filling
    return dict.fromkeys((*filling, *_spanning(problem.M, problem.N, num_sms)))


def _filling(problem: GemmProblem, num_sms: int) -> Iterator[Config]:
    M, N, out_itemsize = problem.M, problem.N, problem.out_dtype.itemsize
    for m, cluster_m, cluster_n, waves in _forms(num_sms):
        rows = problem.batch * -(-M // (m * cluster_m))
        fewest = max(1, -(-N // (WIDEST * cluster_n)))  # columns of clusters
        few = m == FEW_ROWS and cluster_m * cluster_n == 1
        if m * cluster_m >= 2 * max(M, 64) or (few and M > FEW_ROWS):
            continue
        if rows * fewest <= waves[-1]:
            numbers = [clusters // rows for clusters in waves]
        elif (m, cluster_m, cluster_n) in FOR_MANY_WAVES and waves[-1]:  # the GPU has room for such a cluster
            numbers = list(range(COLUMNS, 0, -1))
        else:
            continue
        found = 0
        for columns in numbers:
            if columns >= fewest:
                n = -(-N // (8 * cluster_n * columns)) * 8
                if n != found and n >= (NARROWEST_OF_FEW if few else NARROWEST):
                    found = n
                    form = m, n, cluster_m, cluster_n, out_itemsize
                    # With few rows the fixed cost of a k-tile exceeds the time of its products: deeper ones are faster.
                    # Where such a tile is listed, compare it with more stages of 64.
                    config = (few and _deepest(*form, k=128, fewest=4)) or _deepest(*form)
                    if config is not None:
                        yield config


@lru_cache(maxsize=1024)
def _spanning(M: int, N: int, num_sms: int) -> tuple[Config, ...]:
    """Configurations for a long sum's C [M, N], whose parts are fp32."""
    found = []
    for m, forms in SPANNING.items():
        for cluster_m, cluster_n in forms:
            if m * cluster_m >= 2 * max(M, 64) or not clusters_at_once(cluster_m * cluster_n, num_sms):
                continue
            for columns in SPANNED:
                n = -(-N // (8 * cluster_n * columns)) * 8
                config = _deepest(m, n, cluster_m, cluster_n, 4) if NARROWEST <= n <= WIDEST else None
                if config is not None:
                    found.append(config)
    return tuple(found)


@cache
def _forms(num_sms: int) -> tuple[tuple[int, int, int, tuple[int, ...]], ...]:
    """Heights of tiles, clusters along M and N, and how many clusters each of WAVES has."""
    found = []
    for m, forms in FORMS.items():
        for cluster_m, cluster_n in forms:
            at_once = clusters_at_once(cluster_m * cluster_n, num_sms)
            found.append((m, cluster_m, cluster_n, tuple(int(waves * at_once) for waves in WAVES)))
    return tuple(found)


@cache
def _deepest(
    m: int, n: int, cluster_m: int, cluster_n: int, out_itemsize: int, k: int = 64, fewest: int = 3
) -> Config | None:
    """The tile with as many stages as fit, or None if that is less than `fewest`, or it is listed."""
    num_warps = 8 if m == 256 else m // 16
    for stages in range(MOST_STAGES, fewest - 1, -1):
        config = Config(m, n, k, num_warps, stages, cluster_m, cluster_n)
        if config.accumulators() <= MOST_SUMS[num_warps] and wide_memory(config, out_itemsize) <= SHARED_MEMORY[9, 0]:
            return None if config in CONFIGS or config in CLUSTERED or config in FOR_LONG_SUMS else config
    return None
