"""Lower bounds of the warp-specialised kernel's predicted times, in a tenth of the time that predictions take: of most
configurations they say that these are not the fastest, however their tiles are dealt out."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache
from itertools import chain
from math import inf, sqrt
from typing import Any, NamedTuple

from ...hardware.device_model import DeviceModel
from ...problem import GemmProblem
from .configs import FEW_ROWS, Config, listed
from .costs import Costs, OfConfig, OfProblem, load_times, of_config
from .host import few_copied, promotes
from .widths import widths

MAX_PARTS = 32  # that one program adds up
SHORTEST_PART = 4  # k-tiles of those that a second launch adds up


class Bound(NamedTuple):
    """Of a configuration, what a lower bound of its time is made of, whatever a problem's sizes.

    least: time for an element of C and of K, if all SMs are busy; of: the configuration, and waiting, start: as there;
    m, n: its tiles' sides; most: how many run at once; ctas: of each; half: more keep both SMs of some pair busy; k:
    depth of a k-tile; multiply: time of its products; idle, busy: of its loads, where neighbouring SMs are idle and
    where they are busy; more: what is added to either; a_beyond, b_beyond: what a row of A and a column of B beyond the
    matrix add to the loads, 0 in a cluster with others along that side; a_row, b_row: upper bounds of the time of one
    row or column, which is subtracted where it is not copied; l2: L2's time for it.
    """

    least: float
    of: OfConfig
    waiting: float
    start: float
    m: int
    n: int
    most: int
    ctas: int
    half: int
    k: int
    multiply: float
    idle: float
    busy: float
    more: float
    a_beyond: float
    b_beyond: float
    a_row: float
    b_row: float
    l2: float


def floors(
    problem: GemmProblem, on: OfProblem, model: DeviceModel, limit: float, clusters: tuple[bool, bool]
) -> Iterator[tuple[float, int, OfConfig]]:
    """(what it takes at least, its place, configuration) of those that may take no more than a limit, however their
    tiles are dealt out: without what C's edges add, and L2's time where a tile is larger than C. clusters: whether
    configurations in clusters are compared, and those for long sums."""
    M, N, K, batch = problem.M, problem.N, problem.K, problem.batch
    few_m, few_n = few_copied(problem)
    always, spread, bias, others = on.fixed, on.spread, on.bias, on.cubes
    kind = len(problem.planes.terms), promotes(problem), on.a_lines, on.b_lines, model
    leasts, bounds = _bounds(problem.planes.dtype.itemsize, clusters, *kind)
    wide = [_bound(config, problem.dtype.itemsize, *kind) for config in widths(problem, model.num_sms)]
    shared = min(1.0, model.costs(Costs).shared) if batch == 1 and min(M, N) <= FEW_ROWS else 1.0
    within = bounds[: bisect_right(leasts, (limit - always) / max(1, batch * M * N * K * shared))]
    paired = (on.paired / model.num_sms) ** 3
    for place, bound in chain(within, enumerate(wide, len(bounds))):
        _, of, waiting, start, m, n, most, ctas, half, k, multiply, idle, busy, more = bound[:14]
        a_beyond, b_beyond, a_row, b_row, l2 = bound[14:]
        count, k_tiles = batch * -(-M // m) * -(-N // n), -(-K // k)
        beyond = 0.0
        if m >= M:
            if few_m:
                beyond = (few_m - M) * a_beyond - (of.config.BLOCK_M - few_m) * a_row
            else:
                beyond = (m - M) * a_beyond
            if M <= N:
                beyond -= (1 - shared) * M * a_row
        if n >= N:
            if few_n and few_n < of.config.BLOCK_N and not of.config.tail_n:
                beyond += (few_n - N) * b_beyond - (of.config.BLOCK_N - few_n) * b_row
            else:
                beyond += (n - N) * b_beyond
            if N < M:
                beyond -= (1 - shared) * N * b_row
        load = (busy if count > half else idle) + beyond
        pace = (multiply if multiply > load else load) + more
        start += bias
        fixed = always + waiting + spread * ctas * (count if count < most else most)
        room = limit - fixed
        if count * k_tiles * pace > room * most:  # each takes its share of all SMs
            continue
        cubes = others
        if m <= M and n <= N:
            loading = count * k_tiles * l2
            cubes += loading * loading * loading
        crowded = cubes + paired
        if count > half:
            cubes = crowded
        waves, rest = divmod(count, most)
        taken = (waves + (rest > 0)) * (k_tiles * pace + start)
        total = taken * taken * taken + cubes
        least = total ** (1 / 3) if total <= room * room * room else inf
        if 0 < 2 * rest <= most:  # others may share its tiles
            load = busy + beyond
            slower = (multiply if multiply > load else load) + more
            parts = min(most // rest, k_tiles // 2, MAX_PARTS)
            if of.cuts and parts > 1:
                alone = count + rest <= half
                one = k_tiles * (pace if alone else slower)
                cut = _least_cut(waves * (one + start) + start, one, parts, of, cubes if alone else crowded, room)
                least = min(least, cut)
            parts = min(most // rest, k_tiles // SHORTEST_PART)
            if not waves and parts > 1:
                steps = -(-k_tiles // parts)
                alone = count * -(-k_tiles // steps) <= half
                taken = steps * (pace if alone else slower) + start - bias
                reduced = (taken * taken * taken + (cubes if alone else crowded)) ** (1 / 3)
                least = min(least, reduced + on.reduction - (-k_tiles // steps) * on.reduced_part)
        if least <= room:
            yield fixed + least, place, of


def _least_cut(others: float, one: float, most: int, of: OfConfig, cubes: float, room: float) -> float:
    """No more than the time with a tile that takes `one` by itself cut into 2 to `most` parts, after what takes
    `others`; infinite where that is more than `room`. It is a convex function of the number of parts, so no less than
    its tangent where it is about least."""
    busy, left = others + one / most, room - of.share - of.part
    if busy * busy * busy + cubes > left * left * left:  # if adding up more than two parts took no time
        return inf
    parts = min(most, max(2.0, sqrt(one / of.part)))
    busy = others + one / parts
    total = (busy * busy * busy + cubes) ** (1 / 3)
    slope = of.part - one * (busy / (total * parts)) ** 2
    return of.share + (parts - 1) * of.part + total + slope * ((2 if slope > 0 else most) - parts)


@lru_cache(maxsize=64)
def _bounds(itemsize: int, clusters: tuple[bool, bool], *kind: Any) -> tuple[list[float], list[tuple[int, Bound]]]:
    """(place, `_bound`) of every configuration that is listed, that of least time for an element first; and before them
    these times."""
    places = enumerate(_bound(config, itemsize, *kind) for config in listed(itemsize, *clusters))
    found = sorted(places, key=lambda one: one[1].least)
    return [bound.least for _, bound in found], found


@lru_cache(maxsize=4096)
def _bound(
    config: Config, itemsize: int, terms: int, promoted: bool, a_lines: float, b_lines: float, model: DeviceModel
) -> Bound:
    costs, of = model.costs(Costs), of_config(config, itemsize, terms, promoted, model)
    m, n = config.BLOCK_M, config.BLOCK_N
    loads, beyond, rows = [], [], []
    for alone in (True, False):
        a, a_beyond = load_times(a_lines, config.CLUSTER_N, costs, alone)
        b, b_beyond = load_times(b_lines, config.CLUSTER_M, costs, alone)
        rows.append((of.lines * min(a, a_beyond), of.lines * min(b, b_beyond)))
        loads.append(of.lines * (m * min(a, a_beyond) + n * min(b, b_beyond)))
        beyond.append((of.lines * max(0.0, a_beyond - a), of.lines * max(0.0, b_beyond - b)))
    loaded = m * a_lines / config.CLUSTER_N + n * b_lines / config.CLUSTER_M
    pace = max(of.multiply, loads[0]) + of.more
    return Bound(
        least=pace / (of.m * of.n * config.BLOCK_K * of.most),
        of=of,
        waiting=of.waiting,
        start=of.start,
        m=of.m,
        n=of.n,
        most=of.most,
        ctas=config.ctas,
        half=model.num_sms // 2 // config.ctas,
        k=config.BLOCK_K,
        multiply=of.multiply,
        idle=loads[0],
        busy=loads[1],
        more=of.more,
        a_beyond=min(a for a, _ in beyond) * (config.CLUSTER_M == 1),
        b_beyond=min(b for _, b in beyond) * (config.CLUSTER_N == 1),
        a_row=max(a for a, _ in rows),
        b_row=max(b for _, b in rows),
        l2=config.ctas * of.lines * loaded / model.l2,
    )
