"""Which ways to run the warp-specialised kernel are worth comparing, and how long they take: waves, tail, tensor cores,
L2, memory and power, as arithmetic."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ...compat import CLUSTERS
from ...cost_model import SECTOR, Remembered, average, pitch, soft_maximum, traffic
from ...device import DeviceInfo
from ...device_model import DeviceModel
from ...problem import GemmProblem, Layout
from .. import repack
from ..candidate import Candidate
from ..schedule import Schedule, clusters_at_once
from .host import Config, can_split_k, configs, promotes, unsuited
from .widths import widths

CLUSTERS_CHOSEN = False  # whether configurations in clusters are compared: not before their times are predicted
MAX_PARTS = 32
_KNOWN = Remembered()
TILE = 32_768  # elements of the largest tile that is stored at once, for which costs by its size are given


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU, in microseconds.

    setup: of its barriers, beyond an empty launch; spread: what starting programs on all SMs at once adds, on fewer a
    share of it; step: what an SM needs for 128 bytes along K of a tile, "128x256", when its operands come from L2, at
    the clock of long products; stage: handing a stage of the ring over, of operands of 16 bits and of others;
    promotion: adding a k-tile's sums outside of the tensor cores, for TILE elements; line: one line of 128 bytes from
    L2 to each of two neighbouring SMs, and alone: of that to one whose neighbour is idle; beyond: filling a line beyond
    the matrix with zeros; inside_line: lines that 128 bytes of a row count for where rows begin inside of lines, at a
    sector's 32 bytes, and inside_sector: where they begin inside of sectors; start: filling the ring and storing a
    tile, a constant and what is added for TILE elements; tail: storing a tile's second part; share: handing partial
    sums to another program, and part: adding one more program's, likewise; paired: bytes in a microsecond from memory
    to each of two neighbouring SMs.
    """

    KERNEL = "warp_specialised"

    setup: float
    spread: float
    step: Mapping[str, float]
    stage: tuple[float, float]
    promotion: float
    line: float
    alone: float
    beyond: float
    inside_line: float
    inside_sector: float
    start: tuple[float, float]
    tail: float
    share: tuple[float, float]
    part: tuple[float, float]
    paired: float


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Over copies of what TMA reads badly or not; swapped or not; in every tile that fits; whole and split."""
    programs = device.num_sms
    if problem.groups:
        if unsuited(problem, device) is None:
            for config in configs(problem.planes.dtype):
                yield Candidate(problem, config, Schedule(programs))
        return
    # A square is its own transpose, but for fp32 that wgmma reads from registers: that must be A.
    both = problem.scales != "blocks" and (problem.M != problem.N or problem.dtype.itemsize != 2)
    for packed in _packings(problem):
        readable = repack.repacked(problem, packed)
        for swap_ab in (False, True) if both else (False,):
            given = readable.swap_ab() if swap_ab else readable
            if unsuited(given, device) is None:
                clustered = configs(given.dtype, clusters=True) if CLUSTERS_CHOSEN and CLUSTERS else ()
                for config in (*configs(given.dtype), *clustered, *widths(given, device.num_sms)):
                    if _fits(given, config):
                        for schedule in schedules(given, config, device):
                            yield Candidate(given, config, schedule, swap_ab, packed)


def without_clusters() -> str:
    """What there is to say where Triton is too old for clusters, which would else be compared."""
    return "; without clusters, which need Triton 3.9" if CLUSTERS_CHOSEN and not CLUSTERS else ""


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
    """The ways to deal out a problem's tiles that are worth comparing: all whole, or those of the last wave cut along K
    into as few parts as make for less work on the busiest SM, of many parts not every number. Of clusters as of
    programs, of which fewer run at the same time."""
    count = problem.batch * config.tiles(problem.M, problem.N)
    programs = clusters_at_once(config.ctas, device.num_sms)
    k_tiles = -(-problem.K // config.BLOCK_K)
    found = [Schedule(min(count, programs))]
    if not can_split_k(config):
        return found
    rest = count % programs if count > programs else count
    longest = k_tiles
    for parts in range(2, min(k_tiles // 2, MAX_PARTS) + 1):
        if not 0 < rest * parts <= programs:  # `Schedule` says why no more
            break
        last = parts == MAX_PARTS or rest * (parts + 1) > programs
        if -(-k_tiles // parts) < longest and (last or parts % (1 << max(0, parts.bit_length() - 4)) == 0):
            longest = -(-k_tiles // parts)
            found.append(Schedule(min(rest * parts + count - rest, programs), rest, parts))
    return found


def microseconds(problem: GemmProblem, config: Config, schedule: Schedule, model: DeviceModel) -> float:
    """Predicted time of one launch whose operands lie in memory. What an SM gets by multicast is taken to cost it as
    much as what it loads by itself."""
    if problem.groups:
        problem = average(problem)
    count = problem.batch * config.tiles(problem.M, problem.N)
    k_tiles = -(-problem.K // config.BLOCK_K)
    programs = min(schedule.programs, schedule.items(count))
    ctas = programs * config.ctas
    alone = ctas <= model.num_sms // 2  # programs go to one of each pair of SMs first
    known = _KNOWN.for_problem(problem, model)
    if not known:
        known[None] = _of_problem(problem, model)
    tile = (config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.CLUSTER_M, config.CLUSTER_N, alone)
    if tile not in known:
        known[tile] = _of_tile(problem, config, model, alone)
    loaded, pace, start, share, part = known[tile]
    setup, spread, terms, moved, paired = known[None]
    busy = -(-(count - schedule.split_tiles) // programs) * (k_tiles * pace + start)
    shared = 0.0
    if schedule.split_tiles:
        waves = -(-schedule.split_tiles * schedule.split_k // programs)
        busy += waves * (-(-k_tiles // schedule.split_k) * pace + start)
        shared = share + (schedule.split_k - 1) * part
    return (
        model.launch
        + setup
        + spread * ctas
        + shared
        + soft_maximum(
            busy,
            count * config.ctas * k_tiles * loaded / model.l2,
            moved,
            0.0 if alone else paired / ctas,
            terms,
        )
    )


def _of_problem(problem: GemmProblem, model: DeviceModel) -> tuple[float, float, float, float, float]:
    """(setting up, what each program adds to it, tensor cores' time at the power limit, memory's, and that of one SM
    of two)."""
    costs = model.costs(Costs)
    products = problem.batch * problem.M * problem.N * problem.K * len(problem.planes.terms)
    moved = traffic(problem)
    power = problem.dtype.itemsize * products / model.tensor
    return costs.setup, costs.spread / model.num_sms, power, moved / model.memory, moved / costs.paired


def _of_tile(
    problem: GemmProblem, config: Config, model: DeviceModel, alone: bool
) -> tuple[float, float, float, float, float]:
    """Of a tile: (lines that a k-tile loads from L2, time of a k-tile, of its start and end, of handing partial sums
    on, and of adding one program's)."""
    costs, terms, itemsize = model.costs(Costs), len(problem.planes.terms), problem.dtype.itemsize
    m, n = config.BLOCK_M, config.BLOCK_N
    rows, columns = min(m, problem.M), min(n, problem.N)
    k_lines = config.BLOCK_K * itemsize / 128
    of_a, of_b = rows * _lines(problem.a, itemsize, costs), columns * _lines(problem.b, itemsize, costs)
    loaded = of_a / config.CLUSTER_N + of_b / config.CLUSTER_M
    load = (of_a + of_b) * costs.line * (costs.alone if alone else 1.0) + (m - rows + n - columns) * costs.beyond
    size = m * n / TILE
    pace = terms * (soft_maximum(step(m, n, costs) * k_lines, load * k_lines) + costs.stage[itemsize != 2])
    if promotes(problem):
        pace += costs.promotion * size
    start = costs.start[0] + costs.start[1] * size + costs.tail * bool(config.tail_n)
    share, part = (constant + slope * size for constant, slope in (costs.share, costs.part))
    return loaded * k_lines * terms, pace, start, share, part


def _lines(layout: Layout, itemsize: int, costs: Costs) -> float:
    """Lines of 128 bytes that 128 bytes of a row count for: they touch two where rows begin inside of lines, and five
    of their sectors instead of four where they begin inside of sectors."""
    bytes_apart = pitch(layout, itemsize)
    return 1.0 if bytes_apart % 128 == 0 else costs.inside_line if bytes_apart % SECTOR == 0 else costs.inside_sector


def step(m: int, n: int, costs: Costs) -> float:
    """Costs.step of a tile [m, n]; of one that was not measured what its parts take, whose sides are powers of two."""
    found = costs.step.get(f"{m}x{n}")
    if found is not None:
        return found
    width, height = 1 << n.bit_length() - 1, 1 << m.bit_length() - 1
    if width < n:
        return step(m, width, costs) + step(m, n - width, costs)
    height = height if height < m else m // 2
    return step(height, n, costs) + step(m - height, n, costs)
