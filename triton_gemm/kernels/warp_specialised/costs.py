"""How long the warp-specialised kernel takes: waves, tail, tensor cores, L2, what enters an SM, memory and power, as
arithmetic."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache, lru_cache
from math import gcd, log2
from typing import NamedTuple

from ...hardware.device_model import DeviceModel
from ...problem import GemmProblem, Layout, both_products
from ..cost_model import SECTOR, Remembered, average, lines_of, traffic
from ..schedule import Schedule, clusters_at_once
from .configs import FEW_ROWS, Config
from .host import can_split_k, copied
from .promotion import in_waves, promotes

_KNOWN = Remembered()
GPC_SMS = 16  # at least, which programs of successive numbers are taken to fill
HELD = 2  # slots of the ring that are not being filled: consumers read one, and have yet to free the one before
TILE = 32_768  # elements of the largest tile that is stored at once, for which costs by its size are given
# Energy of an element that enters an SM, in units of a product's. It is half of what clocks of products that run alone
# say, as most take turns with others (perf/results/*/alone.csv, docs/log/measuring.md).
ENERGY_OF_ELEMENT = 30.0
MOST_LIMITED = 3.0  # of energy over time at the power limit; up to 3 `sustained` grows with each of its arguments


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds; a TILE: so many elements of C; a line: 128 bytes. The names
    are those of files of figures."""

    KERNEL = "warp_specialised"

    # Of a launch
    setup: float  # us of the barriers, beyond an empty launch
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it
    # Of a k-tile's products
    step: Mapping[str, float]  # us of wgmma for 128 bytes along K of a tile, "128x256", at the highest clock
    stage: tuple[float, float]  # us of handing a stage of the ring over: of operands of 16 bits, of others
    # us of adding a k-tile's sums outside of the tensor cores. The first is for a TILE of tiles whose width is a
    # multiple of 64, the second of others. The third is for each doubling of a cluster's CTAs, which wait for the
    # slowest. The fourth is for a second wave. The last is for a TILE with scales of blocks, in one wave.
    promotion: tuple[float, float, float, float, float]
    # Of what enters an SM's shared memory
    line: float  # us of a line from L2
    multicast: float  # us of a line that another CTA of the cluster asks for
    beyond: float  # us of filling a line of a tile that is larger than the matrix with zeros
    alone: float  # share of `line` and `beyond` that is left on an SM whose neighbour is idle
    inside_line: float  # lines that 128 bytes of a row count for where rows begin inside of lines, at a sector
    inside_sector: float  # and where they begin inside of sectors
    # us that a cluster's CTAs wait for one another at the start and the end; and in a k-tile, a share of its products
    cluster: tuple[float, float]
    # Of a tile
    start: tuple[float, float]  # us of filling the ring and storing the tile: a constant, and for a TILE
    tail: float  # us of storing a tile's second part
    share: tuple[float, float]  # us of handing partial sums to another program: a constant, and for a TILE
    part: tuple[float, float]  # us of adding one more program's partial sums: a constant, and for a TILE
    bias: float  # us of a bias for each column of a tile; one for each row adds nothing, as a thread has few rows
    reduction: tuple[float, float, float]  # us of a second launch, us of each part there, and bytes of parts in a us
    # Of L2 and memory
    paired: float  # bytes in a us from memory to each of two neighbouring SMs
    shared: float  # with at most FEW_ROWS rows or columns: share of `line` for one of these, which all SMs load
    round_trip: float  # us, with as few, from issuing a load from memory until its slot can be filled again
    delivered: float  # L2's cost of each further CTA that receives a line by multicast, in lines
    merged: float  # share of L2's cost of a line of A that is saved if an SM of the GPC loads it at about the same time
    unshared: float  # L2's cost of a line that one CTA of a cluster loads for itself alone; 1 is that without clusters
    straddling: float  # us of storing 128 rows (C column-major: columns) that begin or end inside of a sector


class OfProblem(NamedTuple):
    """What a problem's predicted times have in common, whatever its tiles. Times are microseconds."""

    fixed: float
    spread: float  # of each CTA
    power: float  # of the products' energy at the power limit, without that of operands
    memory_cubed: float  # the cube of memory's time
    paired: float  # that one of two neighbouring SMs would take to load all
    reduction: float  # of a second launch that adds up parts
    reduced_part: float  # of each part there
    bias: float  # of a tile
    a_lines: float  # that 128 bytes of a row of A count for, wherever tiles begin
    b_lines: float


class OfConfig(NamedTuple):
    """What a configuration's predicted times have in common, whatever the problem's sizes. Times are microseconds."""

    config: Config
    m: int  # rows of a cluster's tiles
    n: int  # columns of them
    most: int  # clusters that run at once
    cuts: bool  # whether tiles can be cut along K
    multiply: float  # of a k-tile's products
    lines: float  # of 128 bytes that a k-tile has of each row
    more: float  # of a k-tile, in addition to the longest of its products and loads
    start: float  # of a tile's start and end
    share: float  # of handing partial sums on
    part: float  # of adding one program's
    waiting: float  # that clusters wait, of a launch
    adding: float  # of adding sums outside of the tensor cores
    energy: float  # of a product with its operands; 1 is that of one without
    a_requested: float  # L2's cost of a line of A that all of the cluster's CTAs receive
    b_requested: float
    a_least: float  # and of A's if every other cluster of a GPC loads it, too
    merged: float  # share of A's that is saved if another cluster loads it
    clusters: int  # of a GPC


class OfTile(NamedTuple):
    """What a problem's tiles take in a configuration. Those at C's edges take as long as others, as they are shifted
    into C (`work.last_tiles`)."""

    k_tiles: int
    pace: float  # microseconds of a k-tile
    store: float  # microseconds of storing a tile, in addition
    l2: float  # microseconds of L2 for a cluster's tiles
    alone: bool  # whether neighbouring SMs are idle


def microseconds(problem: GemmProblem, config: Config, schedule: Schedule, model: DeviceModel) -> float:
    """Predicted time of one launch whose operands lie in memory."""
    if problem.gate:
        problem, config = both_products(problem), config.with_gate
    grouped = problem.groups is not None
    if grouped:
        problem = average(problem)
    count = problem.batch * config.tiles(problem.M, problem.N)
    programs = min(schedule.programs, schedule.items(count))
    alone = programs * config.ctas <= model.num_sms // 2  # on one of each pair of SMs, to which they go first
    known = _KNOWN.for_problem(problem, model)
    if not known:
        known[None] = of_problem(problem, model)
    key = config, alone, grouped
    if key not in known:
        of = of_config(config, problem.dtype.itemsize, *kind_of(problem), model)
        known[key] = of, of_tile(problem, known[None], of, model, alone, grouped)
    of, tile = known[key]
    if schedule.in_turn:  # sums of parts are added as promoted ones are
        tile = tile._replace(pace=tile.pace + of.adding * schedule.split_k / tile.k_tiles)
    return _time(known[None], of, tile, count, programs, schedule)


def _time(on: OfProblem, of: OfConfig, tile: OfTile, count: int, programs: int, schedule: Schedule) -> float:
    """Predicted time of `count` tiles by `programs`. Parts are added up by tiles' owners, or with `reduction` by a
    second launch."""
    split_tiles, split_k, unit, reduction = schedule.split_tiles, schedule.split_k, schedule.unit, schedule.reduction
    k_tiles, pace, store, l2, alone = tile
    waves = -(-(count - split_tiles) // programs)
    steps, shared = waves * k_tiles, of.waiting
    if split_tiles:
        cut = -(-split_tiles * split_k // programs)
        waves += cut
        steps += cut * -(-k_tiles // (split_k * unit)) * unit
        if reduction:
            shared += on.reduction + split_k * on.reduced_part
        else:
            shared += of.share + (split_k - 1) * of.part
    busy = steps * pace + waves * (of.start + store + on.bias * (not reduction))
    l2 *= count
    ctas = programs * of.config.ctas
    paired = 0.0 if alone else on.paired / ctas
    others = l2 * l2 * l2 + paired * paired * paired + on.memory_cubed
    return on.fixed + on.spread * ctas + shared + sustained(busy, others, on.power * of.energy)


def sustained(busy: float, others: float, power: float) -> float:
    """The soft maximum of SMs' time, which the power limit may stretch, and of others, whose cubes are added.

    power: how long the product's energy at the highest clock takes at the power limit. Power goes with the cube of the
    clock, as the voltage goes with it, so the clock falls by the cube root of energy over time. Grows with each.
    """
    cubes = busy * busy * busy
    limited = power / (cubes + others) ** (1 / 3)
    if limited > 1:
        cubes *= min(limited, MOST_LIMITED)
    return (cubes + others) ** (1 / 3)


def of_problem(problem: GemmProblem, model: DeviceModel) -> OfProblem:
    costs = model.costs(Costs)
    products = problem.batch * problem.M * problem.N * problem.K * len(problem.planes.terms)
    moved = traffic(problem)
    power, memory = problem.dtype.itemsize * products / model.tensor, moved / model.memory
    return OfProblem(
        fixed=model.launch + costs.setup,
        spread=costs.spread / model.num_sms,
        power=power,
        memory_cubed=memory * memory * memory,
        paired=moved / costs.paired,
        reduction=costs.reduction[0],
        reduced_part=costs.reduction[1] + 4 * problem.batch * problem.M * problem.N / costs.reduction[2],
        bias=costs.bias * (problem.bias == "n"),
        a_lines=lines_of(problem.a, problem.dtype.itemsize, costs),
        b_lines=lines_of(problem.b, problem.dtype.itemsize, costs),
    )


def kind_of(problem: GemmProblem) -> tuple[int, bool, bool]:
    """What `of_config` asks of a problem: products a k-tile, whether these are promoted, and by scales of blocks."""
    return len(problem.planes.terms), promotes(problem), problem.scales == "blocks"


@lru_cache(maxsize=4096)
def of_config(config: Config, itemsize: int, terms: int, promoted: bool, blocks: bool, model: DeviceModel) -> OfConfig:
    costs, m, n, k_lines = model.costs(Costs), config.BLOCK_M, config.BLOCK_N, config.BLOCK_K * itemsize / 128
    size, clustered = m * n / TILE, config.ctas > 1
    adding = costs.promotion[n % 64 != 0] * size
    a_requested = config.ctas * _requested(config.CLUSTER_N, config.ctas, costs)
    merged = costs.merged * (config.CLUSTER_N == 1)
    waves = promoted and terms == 1 and in_waves(config)  # of half a tile: alike, whichever side is longer
    multiply = step(min(m, n) if waves else m, max(m, n) if waves else n, costs) * k_lines
    more = costs.stage[itemsize != 2] + costs.cluster[1] * multiply * clustered
    # Of a k-tile in pieces the last one's sums are added when nothing else is under way.
    promoting = adding * (1 if terms == 1 else k_lines) + costs.promotion[2] * log2(config.ctas)
    promoting += costs.promotion[3] if waves else costs.promotion[4] * size * blocks
    return OfConfig(
        config=config,
        m=m * config.CLUSTER_M,
        n=n * config.CLUSTER_N,
        most=clusters_at_once(config.ctas, model.num_sms),
        cuts=can_split_k(config),
        multiply=terms * multiply,
        lines=terms * k_lines,
        more=terms * more + promoting * promoted,
        start=costs.start[0] + costs.start[1] * size + costs.tail * bool(config.tail_n),
        share=costs.share[0] + costs.share[1] * size,
        part=costs.part[0] + costs.part[1] * size,
        waiting=costs.cluster[0] * clustered,
        adding=adding,
        energy=1 + ENERGY_OF_ELEMENT * (1 / m + 1 / n),
        a_requested=a_requested,
        b_requested=config.ctas * _requested(config.CLUSTER_M, config.ctas, costs),
        a_least=a_requested * (1 - merged),
        merged=merged,
        clusters=max(1, GPC_SMS // config.ctas),
    )


def of_tile(
    problem: GemmProblem, on: OfProblem, of: OfConfig, model: DeviceModel, alone: bool, grouped: bool = False
) -> OfTile:
    """grouped: whether the problem is the average of groups, which end where others begin."""
    costs, config = model.costs(Costs), of.config
    m, n = config.BLOCK_M, config.BLOCK_N
    a_lines = max(on.a_lines, _lines_of_tiles(problem.a, 1, m, problem.M, problem.dtype.itemsize))
    b_lines = max(on.b_lines, _lines_of_tiles(problem.b, 2, n, problem.N, problem.dtype.itemsize))
    rows, columns = -(-problem.M // of.m), -(-problem.N // of.n)  # of tiles of clusters
    beyond_m, beyond_n = max(0, m - problem.M), max(0, n - problem.N)  # of a matrix that is smaller than a tile
    few_m, few_n = (0, 0) if grouped else copied(problem, config)
    if few_m:
        m, beyond_m = few_m, few_m - problem.M
    if few_n:
        n, beyond_n = few_n, few_n - problem.N
    a_line, a_beyond = load_times(a_lines, config.CLUSTER_N, costs, alone)
    b_line, b_beyond = load_times(b_lines, config.CLUSTER_M, costs, alone)
    few = config.ctas == 1 and not grouped and min(problem.M, problem.N) <= FEW_ROWS
    if few and problem.batch == 1:  # all programs load the same rows
        if rows == 1 and problem.M <= problem.N:
            a_line *= costs.shared
        elif columns == 1 and problem.N < problem.M:
            b_line *= costs.shared
    loaded = (m - beyond_m) * a_line + beyond_m * a_beyond + (n - beyond_n) * b_line + beyond_n * b_beyond
    pace = max(of.multiply, loaded * of.lines)
    if few:
        slots = len(problem.planes.terms)  # of a k-tile
        pace = max(pace, slots * costs.round_trip / max(1, config.num_stages - HELD) - of.more)
    k_tiles = -(-problem.K // config.BLOCK_K)
    return OfTile(
        k_tiles=k_tiles,
        pace=pace + of.more,
        store=_straddling(problem, config, costs),
        l2=k_tiles * of.lines * l2_lines(problem, (a_lines, b_lines), of, rows, columns) / model.l2,
        alone=alone,
    )


def _lines_of_tiles(layout: Layout, dim: int, side: int, size: int, itemsize: int) -> float:
    """Lines of 128 bytes that 128 bytes of a row count for, because of where tiles of that side begin along `dim`.

    Where rows in memory run along it, a tile that begins inside of a line has two lines touched by each 128 bytes that
    TMA copies. Of tiles one after another the share gcd(side in bytes, 128) / 128 begins at a line.
    """
    if layout.strides[dim] != 1 or layout.strides[3 - dim] == 1 or size <= side:
        return 1.0
    return 2 - gcd(side * itemsize, 128) / 128


def _straddling(problem: GemmProblem, config: Config, costs: Costs) -> float:
    """What a tile's sectors add of which it writes a part, and its neighbour the rest."""
    rows, columns = config.BLOCK_M, config.BLOCK_N
    if problem.c.column_major:
        rows, columns = columns, rows
    return costs.straddling * rows / 128 * (columns * problem.out_dtype.itemsize % SECTOR != 0)


def l2_lines(problem: GemmProblem, lines: tuple[float, float], of: OfConfig, rows: int, columns: int) -> float:
    """L2's cost of 128 bytes along K of a cluster's tiles, in lines that it gives to one CTA.

    lines: that 128 bytes of a row of A and of B count for. rows, columns: of tiles of clusters in C. Successive
    programs go down a group of rows of tiles, and then begin the next column. So clusters on a GPC load the same lines
    of B. They load the same lines of A only where a group has fewer rows than a GPC has clusters. Lines that others
    there load at about the same time are merged into one request.
    """
    config = of.config
    a = min(config.BLOCK_M, problem.M) * lines[0] * of.a_requested
    b = min(config.BLOCK_N, problem.N) * lines[1] * of.b_requested
    alone = max(min(rows, Schedule.group_m) / of.clusters, 1 / columns)  # share of A's lines that no other loads
    if alone < 1:
        a *= 1 - of.merged * (1 - alone)
    return a + b


def _requested(sharing: int, ctas: int, costs: Costs) -> float:
    """L2's cost, for each CTA of a cluster of so many, of a line that `sharing` of them load by multicast. A line
    loaded by a CTA in no cluster costs 1."""
    if sharing == 1:
        return costs.unshared if ctas > 1 else 1.0
    return (1 + costs.delivered * (sharing - 1)) / sharing


def load_times(lines: float, sharing: int, costs: Costs, alone: bool) -> tuple[float, float]:
    """Time of a row's 128 bytes, which count for so many lines, on an SM whose cluster has so many that share them. The
    SM requests its part, and gets the rest. And the time of a row beyond the matrix."""
    slower = costs.alone if alone else 1.0
    others = costs.multicast * (1 - 1 / sharing)
    return lines * costs.line * slower / sharing + others, costs.beyond * slower / sharing


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
