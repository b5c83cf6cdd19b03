"""Which ways to run the warp-specialised kernel are worth comparing, and how long they take: waves, tail, tensor cores,
L2, memory and power, as arithmetic."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import sqrt
from operator import itemgetter
from typing import Any, NamedTuple

import torch

from ...compat import CLUSTERS
from ...cost_model import SECTOR, Remembered, average, pitch, traffic
from ...device import DeviceInfo
from ...device_model import DeviceModel
from ...problem import GemmProblem, Layout
from .. import repack
from ..candidate import Candidate
from ..schedule import Schedule, clusters_at_once
from .host import Config, can_split_k, configs, promotes, rest_columns, unsuited

MAX_PARTS = 32
_KNOWN = Remembered()
TILE = 32_768  # elements of the largest tile that is stored at once, for which costs by its size are given


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU, in microseconds.

    setup: of its barriers, beyond an empty launch; spread: what starting programs on all SMs at once adds, on fewer a
    share of it; step: what wgmma needs for 128 bytes along K of a tile, "128x256", at the clock of long products;
    stage: handing a stage of the ring over, of operands of 16 bits and of others; promotion: adding a k-tile's sums
    outside of the tensor cores, for TILE elements; line: of 128 bytes from L2 into an SM's shared memory; multicast: of
    one that another CTA of the cluster asks for; beyond: filling a line beyond the matrix with zeros; alone: how much
    of line and beyond is left on an SM whose neighbour is idle; inside_line: lines that 128 bytes of a row count for
    where rows begin inside of lines, at a sector's 32 bytes, and inside_sector: where they begin inside of sectors;
    cluster: what CTAs of a cluster wait for one another, at the start and the end, and in a k-tile, as a share of its
    step; start: filling the ring and storing a tile, a constant and what is added for TILE elements; tail: storing a
    tile's second part; share: handing partial sums to another program, and part: adding one more program's, likewise;
    paired: bytes in a microsecond from memory to each of two neighbouring SMs.
    """

    KERNEL = "warp_specialised"

    setup: float
    spread: float
    step: Mapping[str, float]
    stage: tuple[float, float]
    promotion: float
    line: float
    multicast: float
    beyond: float
    alone: float
    inside_line: float
    inside_sector: float
    cluster: tuple[float, float]
    start: tuple[float, float]
    tail: float
    share: tuple[float, float]
    part: tuple[float, float]
    paired: float


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Over copies of what TMA reads badly or not; swapped or not; in every tile that fits; whole and split."""
    for given, swap_ab, packed in _given(problem, device):
        dtype = given.planes.dtype
        for config in (*configs(dtype), *(configs(dtype, clusters=True) if _clusters(given) else ())):
            if problem.groups:
                yield Candidate(given, config, Schedule(device.num_sms))
            elif _fits(given, config):
                for schedule in schedules(given, config, device):
                    yield Candidate(given, config, schedule, swap_ab, packed)


def _given(problem: GemmProblem, device: DeviceInfo) -> Iterator[tuple[GemmProblem, bool, tuple[str, ...]]]:
    """What the kernel may be given for a problem: (the problem, whether it is swapped, operands that are copied)."""
    if problem.groups:
        if unsuited(problem, device) is None:
            yield problem, False, ()
        return
    # A square is its own transpose, but for fp32 that wgmma reads from registers: that must be A.
    both = problem.scales != "blocks" and (problem.M != problem.N or problem.dtype.itemsize != 2)
    for packed in _packings(problem):
        readable = repack.repacked(problem, packed)
        for swap_ab in (False, True) if both else (False,):
            given = readable.swap_ab() if swap_ab else readable
            if unsuited(given, device) is None:
                yield given, swap_ab, packed


def _clusters(problem: GemmProblem) -> bool:
    """Whether configurations in clusters are compared: only where they can run."""
    return CLUSTERS and not problem.groups


def without_clusters() -> str:
    """What there is to say where Triton is too old for clusters, which would else be compared."""
    return "" if CLUSTERS else "; without clusters, which need Triton 3.9"


def _packings(problem: GemmProblem) -> list[tuple[str, ...]]:
    """Which operands to copy first: both as planes; of fp32 those that TMA cannot read, and perhaps others, which then
    are K-major; else those that TMA cannot read, and beside them none, or one whose rows begin inside of L2's
    sectors."""
    if problem.planes.count > 1:
        return [("a", "b")]
    itemsize = problem.dtype.itemsize
    layouts = {"a": problem.a, "b": problem.b}
    unreadable = {name for name, layout in layouts.items() if layout.tma_illegal(itemsize) is not None}
    found = [unreadable]
    if itemsize != 2:
        found += [unreadable | {"a"}, unreadable | {"b"}, {"a", "b"}]
    else:
        found += [unreadable | {name} for name, layout in layouts.items() if pitch(layout, itemsize) % SECTOR]
    return [tuple(sorted(names)) for i, names in enumerate(found) if names not in found[:i]]


def _fits(problem: GemmProblem, config: Config) -> bool:
    """Whether less than half of a tile, or a cluster's tiles, lies outside of C, where a smaller one would do."""
    m, n = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N
    return (m == 64 or m < 2 * problem.M) and (n == 16 or n < 2 * problem.N)


def schedules(problem: GemmProblem, config: Config, device: DeviceInfo) -> list[Schedule]:
    """The ways to deal out a problem's tiles that are worth comparing: all whole, or those of the last wave cut along
    K. Of clusters as of programs, of which fewer run at the same time."""
    count = problem.batch * config.tiles(problem.M, problem.N)
    programs = clusters_at_once(config.ctas, device.num_sms)
    found = [Schedule(min(count, programs))]
    if can_split_k(config):
        k_tiles = -(-problem.K // config.BLOCK_K)
        found += [Schedule(n, rest, parts) for n, rest, parts in _cuts(count, k_tiles, programs)]
    return found


def _cuts(count: int, k_tiles: int, most: int) -> Iterator[tuple[int, int, int]]:
    """(programs, tiles that are cut, into how many parts), for `most` programs at once: the tiles of the last wave,
    into as few parts as make for less work on the busiest SM; of many parts not every number."""
    rest = count % most if count > most else count
    if rest == 0:
        return
    enough = min(k_tiles // 2, MAX_PARTS, most // rest)  # `Schedule` says why no more than there are programs
    longest = k_tiles
    for parts in range(2, enough + 1):
        if parts < 16 or parts % 2 == 0 or parts == most // rest:
            if -(-k_tiles // parts) < longest:
                longest = -(-k_tiles // parts)
                yield min(rest * parts + count - rest, most), rest, parts


class _OfProblem(NamedTuple):
    """Of a problem, whatever its tiles: fixed, and what each CTA adds to it; the cubes of the tensor cores' time at the
    power limit and of memory's, added; and the time that one of two neighbouring SMs would take to load all."""

    fixed: float
    spread: float
    cubes: float
    paired: float


class _OfConfig(NamedTuple):
    """Of a configuration, whatever the problem's sizes: the sides of a cluster's tiles, how many clusters run at once,
    and whether tiles can be cut; the time of a k-tile's products, how often it loads 128 bytes of a row, and the time
    that it takes in addition; of a tile start and end, handing partial sums on, and adding one program's; of a launch
    what clusters wait for."""

    config: Config
    m: int
    n: int
    most: int
    cuts: bool
    multiply: float
    lines: float
    more: float
    start: float
    share: float
    part: float
    waiting: float


class _OfTile(NamedTuple):
    """Of a problem in a configuration: k_tiles, the time of one, and what is added to it at C's edges, where `edges` of
    `tiles` tiles lie; L2's time for a cluster's tiles; whether neighbouring SMs are idle."""

    k_tiles: int
    pace: float
    edge: float
    edges: int
    tiles: int
    l2: float
    alone: bool


def microseconds(problem: GemmProblem, config: Config, schedule: Schedule, model: DeviceModel) -> float:
    """Predicted time of one launch whose operands lie in memory."""
    if problem.groups:
        problem = average(problem)
    count = problem.batch * config.tiles(problem.M, problem.N)
    programs = min(schedule.programs, schedule.items(count))
    alone = _alone(programs * config.ctas, model)
    known = _KNOWN.for_problem(problem, model)
    if not known:
        known[None] = _of_problem(problem, model)
    if (config, alone) not in known:
        of = _of_config(config, problem.dtype.itemsize, len(problem.planes.terms), promotes(problem), model)
        known[config, alone] = of, _of_tile(problem, of, model, alone)
    of, tile = known[config, alone]
    return _time(known[None], of, tile, count, programs, schedule.split_tiles, schedule.split_k)


def _alone(ctas: int, model: DeviceModel) -> bool:
    """Whether so many run on one of each pair of SMs, to which they go first."""
    return ctas <= model.num_sms // 2


def _time(
    on: _OfProblem, of: _OfConfig, tile: _OfTile, count: int, programs: int, split_tiles: int, split_k: int
) -> float:
    """Predicted time of `count` tiles by `programs`, split_tiles of them in split_k parts. The busiest SM is taken to
    have as many tiles at C's edges as its share of them, rounded up."""
    k_tiles, pace, edge, edges, tiles, l2, alone = tile
    waves = -(-(count - split_tiles) // programs)
    steps, shared = waves * k_tiles, of.waiting
    if split_tiles:
        cut = -(-split_tiles * split_k // programs)
        waves += cut
        steps += cut * -(-k_tiles // split_k)
        shared += of.share + (split_k - 1) * of.part
    busy = steps * (pace + edge * -(-waves * edges // tiles) / waves) + waves * of.start
    l2 *= count
    ctas = programs * of.config.ctas
    paired = 0.0 if alone else on.paired / ctas
    cubes = busy * busy * busy + l2 * l2 * l2 + paired * paired * paired + on.cubes
    return on.fixed + on.spread * ctas + shared + cubes ** (1 / 3)


def _of_problem(problem: GemmProblem, model: DeviceModel) -> _OfProblem:
    costs = model.costs(Costs)
    products = problem.batch * problem.M * problem.N * problem.K * len(problem.planes.terms)
    moved = traffic(problem)
    power, memory = problem.dtype.itemsize * products / model.tensor, moved / model.memory
    cubes = power * power * power + memory * memory * memory
    return _OfProblem(model.launch + costs.setup, costs.spread / model.num_sms, cubes, moved / costs.paired)


def _of_config(config: Config, itemsize: int, terms: int, promoted: bool, model: DeviceModel) -> _OfConfig:
    costs, m, n, k_lines = model.costs(Costs), config.BLOCK_M, config.BLOCK_N, config.BLOCK_K * itemsize / 128
    size, clustered = m * n / TILE, config.ctas > 1
    multiply = step(m, n, costs) * k_lines
    more = costs.stage[itemsize != 2] + costs.cluster[1] * multiply * clustered
    return _OfConfig(
        config=config,
        m=m * config.CLUSTER_M,
        n=n * config.CLUSTER_N,
        most=clusters_at_once(config.ctas, model.num_sms),
        cuts=can_split_k(config),
        multiply=terms * multiply,
        lines=terms * k_lines,
        more=terms * more + costs.promotion * size * promoted,
        start=costs.start[0] + costs.start[1] * size + costs.tail * bool(rest_columns(config)),
        share=costs.share[0] + costs.share[1] * size,
        part=costs.part[0] + costs.part[1] * size,
        waiting=costs.cluster[0] * clustered,
    )


def _of_tile(problem: GemmProblem, of: _OfConfig, model: DeviceModel, alone: bool) -> _OfTile:
    costs, itemsize, config = model.costs(Costs), problem.dtype.itemsize, of.config
    m, n = config.BLOCK_M, config.BLOCK_N
    rows, columns = -(-problem.M // m), -(-problem.N // n)
    beyond_m, beyond_n = rows * m - problem.M, columns * n - problem.N  # of the last tile
    a_lines, b_lines = _lines(problem.a, itemsize, costs), _lines(problem.b, itemsize, costs)
    a_line, a_beyond = _load(a_lines, config.CLUSTER_N, costs, alone)
    b_line, b_beyond = _load(b_lines, config.CLUSTER_M, costs, alone)
    outer = (m - beyond_m) * a_line + beyond_m * a_beyond + (n - beyond_n) * b_line + beyond_n * b_beyond
    inner = outer
    if rows > 1:
        inner += beyond_m * (a_line - a_beyond)
    if columns > 1:
        inner += beyond_n * (b_line - b_beyond)
    pace = max(of.multiply, inner * of.lines)
    k_tiles = -(-problem.K // config.BLOCK_K)
    loaded = min(m, problem.M) * a_lines / config.CLUSTER_N + min(n, problem.N) * b_lines / config.CLUSTER_M
    inside = (rows - (beyond_m > 0)) * (columns - (beyond_n > 0))
    return _OfTile(
        k_tiles=k_tiles,
        pace=pace + of.more,
        edge=max(0.0, outer * of.lines - pace),
        edges=rows * columns - inside,
        tiles=rows * columns,
        l2=config.ctas * k_tiles * of.lines * loaded / model.l2,
        alone=alone,
    )


def _load(lines: float, sharing: int, costs: Costs, alone: bool) -> tuple[float, float]:
    """Time of a row's 128 bytes, which count for so many lines, on an SM whose cluster has so many that share them: it
    asks for its part, and gets the rest. And of a row beyond the matrix."""
    slower = costs.alone if alone else 1.0
    others = costs.multicast * (1 - 1 / sharing)
    return lines * costs.line * slower / sharing + others, costs.beyond * slower / sharing


def _lines(layout: Layout, itemsize: int, costs: Costs) -> float:
    """Lines of 128 bytes that 128 bytes of a row count for: they touch two where rows begin inside of lines, and five
    of their sectors instead of four where they begin inside of sectors."""
    bytes_apart = pitch(layout, itemsize)
    return 1.0 if bytes_apart % 128 == 0 else costs.inside_line if bytes_apart % SECTOR == 0 else costs.inside_sector


def step(m: int, n: int, costs: Costs) -> float:
    """Costs.step of a tile [m, n]. One that was not measured takes as much more than `_clocks` as the measured ones
    next to it in width do, of the same height or else of 64 rows."""
    found = costs.step.get(f"{m}x{n}")
    return _step(m, n, tuple(costs.step.items())) if found is None else found


@cache
def _step(m: int, n: int, measured: tuple[tuple[str, float], ...]) -> float:
    sizes = {tuple(map(int, tile.split("x"))): time for tile, time in measured}
    height = m if any(rows == m for rows, _ in sizes) else 64
    ratios = sorted((width, time / _clocks(rows, width)) for (rows, width), time in sizes.items() if rows == height)
    below = [one for one in ratios if one[0] < n] or ratios[:1]
    above = [one for one in ratios if one[0] > n] or ratios[-1:]
    (left, low), (right, high) = below[-1], above[0]
    return _clocks(m, n) * (low + (high - low) * (n - left) / (right - left) if right > left else low)


def _clocks(m: int, n: int) -> float:
    """That wgmma takes for 16 along K: the tensor cores' n / 2 for each 64 rows, or those of reading both operands from
    shared memory, 128 bytes a clock."""
    return m / 64 * max(n / 2, 16 + n / 4)


def faster(
    problem: GemmProblem, device: DeviceInfo, model: DeviceModel, limit: Callable[[], float]
) -> Iterator[tuple[float, Candidate]]:
    """(predicted microseconds, candidate) of candidates that take less than limit(), first those that may be the
    fastest: what `select` needs, in a fraction of the time that all take."""
    floors = []
    for given, swap_ab, packed in _given(problem, device):
        copying = repack.microseconds(problem, packed, model)
        on = _of_problem(given, model)
        how = given, swap_ab, packed, copying, on
        floors += [(copying + floor, of, how) for floor, of in _floors(given, on, model)]
    floors.sort(key=itemgetter(0))
    for floor, of, (given, swap_ab, packed, copying, on) in floors:
        if floor >= limit():
            return
        if _fits(given, of.config):
            time, schedule = _best_schedule(given, of, model, on)
            if copying + time < limit():
                yield copying + time, Candidate(given, of.config, schedule, swap_ab, packed)


def _best_schedule(problem: GemmProblem, of: _OfConfig, model: DeviceModel, on: _OfProblem) -> tuple[float, Schedule]:
    """The first of the `schedules` of least predicted time, and that time."""
    count = problem.batch * -(-problem.M // of.m) * -(-problem.N // of.n)
    best = min(count, of.most), 0, 1
    tile = _of_tile(problem, of, model, _alone(best[0] * of.config.ctas, model))
    least = _time(on, of, tile, count, *best)
    if of.cuts:
        for cut in _cuts(count, tile.k_tiles, of.most):  # into more and more parts, on more and more SMs
            if on.fixed + of.waiting + of.share + (cut[2] - 1) * of.part + on.cubes ** (1 / 3) >= least:
                break
            if tile.alone and not _alone(cut[0] * of.config.ctas, model):
                tile = _of_tile(problem, of, model, alone=False)
            time = _time(on, of, tile, count, *cut)
            if time < least:
                least, best = time, cut
    return least, Schedule(*best)


def _floors(problem: GemmProblem, on: _OfProblem, model: DeviceModel) -> list[tuple[float, _OfConfig]]:
    """What each configuration takes at least, however its tiles are dealt out: as if those of a last wave, where they
    can be cut, took their share of all SMs; without L2's time and what C's edges add."""
    costs, itemsize = model.costs(Costs), problem.dtype.itemsize
    lines = _lines(problem.a, itemsize, costs), _lines(problem.b, itemsize, costs)
    M, N, K, batch, fixed, cubes, found = problem.M, problem.N, problem.K, problem.batch, on.fixed, on.cubes, []
    kind = problem.planes.dtype, _clusters(problem), len(problem.planes.terms), promotes(problem)
    for of, m, n, most, cuts, near, far, half, start in _paces(*kind, *lines, model):
        count = batch * -(-M // m) * -(-N // n)
        one = K * (far if count > half else near)
        waves, rest = divmod(count, most)
        busy = (waves + (rest > 0)) * (one + start)
        least = (busy * busy * busy + cubes) ** (1 / 3)
        if cuts and 0 < 2 * rest <= most:
            cut = _least_cut(waves * (one + start) + start, one, min(most // rest, MAX_PARTS), of, cubes)
            least = min(least, cut)
        found.append((fixed + of.waiting + least, of))
    return found


def _least_cut(others: float, one: float, most: int, of: _OfConfig, cubes: float) -> float:
    """What is no more than the time with a tile that takes `one` by itself cut into `most` parts or fewer, after what
    takes `others`: the smallest parts but only two to add up, or as many as are best if nothing else is waited for."""
    busy = others + one / most
    best = min(most, sqrt(one / of.part))  # beyond that a part costs more than it saves
    return of.share + max((busy * busy * busy + cubes) ** (1 / 3) + of.part, others + one / best + (best - 1) * of.part)


@lru_cache(maxsize=64)
def _paces(
    dtype: torch.dtype, clusters: bool, terms: int, promoted: bool, a_lines: float, b_lines: float, model: DeviceModel
) -> list[tuple[Any, ...]]:
    """For `_floors`, of each configuration: it; its tiles' sides, how many run at once, and whether they can be cut;
    time for one of K where neighbouring SMs are idle, and where they are busy, as they are with more clusters than are
    said next; time of a tile's start."""
    costs, found = model.costs(Costs), []
    for config in (*configs(dtype), *(configs(dtype, clusters=True) if clusters else ())):
        of = _of_config(config, dtype.itemsize, terms, promoted, model)
        paces = []
        for alone in (True, False):
            of_a = min(_load(a_lines, config.CLUSTER_N, costs, alone))
            of_b = min(_load(b_lines, config.CLUSTER_M, costs, alone))
            load = (config.BLOCK_M * of_a + config.BLOCK_N * of_b) * of.lines
            paces.append((max(of.multiply, load) + of.more) / config.BLOCK_K)
        found.append((of, of.m, of.n, of.most, of.cuts, *paces, model.num_sms // 2 // config.ctas, of.start))
    return found
