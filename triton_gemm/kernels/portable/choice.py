"""Which candidates of the portable kernel are worth comparing, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from math import sqrt
from typing import Any, NamedTuple

from ...arithmetic import ARITHMETICS
from ...config import ASYNCHRONOUS, REGISTERS_PER_SM
from ...hardware.device import DeviceInfo
from ...hardware.device_model import LINE, DeviceModel
from ...problem import GemmProblem, both_products
from .. import repack
from ..candidate import Algorithm, Bounded, Candidate
from ..cost_model import Remembered, average, lines_of, on_busiest_sm, soft_maximum, swap_for_c, traffic
from ..schedule import Schedule
from .host import (
    GATED,
    MAX_REGISTERS,
    TMA_CONFIGS,
    Config,
    along_k,
    configs,
    itemsize_of_sums,
    tiles_of,
    vectors,
    with_gate,
)


@dataclass(frozen=True)
class Pace:
    """What a program takes on one GPU in addition to its products. us: microseconds; a TILE: so many elements of C. The
    names are those of files of figures."""

    move: tuple[float, float]  # us of an SM for a copy to shared memory: of 16 bytes, of fewer
    latency: float  # us from a load to its arrival, which a pipeline's stages share
    step: float  # us of a k-tile's barriers
    start: tuple[float, float]  # us of a program's first loads and its stores: a constant, and for a TILE
    program: float  # us that each of an SM's programs adds to `start`
    share: tuple[float, float]  # us of all parts of a sum together: a constant, and for a TILE
    part: tuple[float, float]  # us of adding one part: a constant, and for a TILE
    piled: float  # of the programs that an SM has room for, how many come together though others have none
    memory: float  # share of memory's bandwidth that is reached
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it
    # us for an element, not of 16 bits, that a thread reads from shared memory: with a row-major B, with a K-major one
    read: tuple[float, float]
    inside_line: float  # copies that one counts for where an operand's rows begin inside of lines of 128 bytes
    inside_sector: float  # and where they begin inside of sectors


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds. The names are those of files of figures."""

    KERNEL = "portable"

    products: Mapping[str, tuple[float, float]]  # by precision, multiply-adds in a us of an SM, and of a warp
    tensor: Pace  # the rest, by what multiplies
    ieee: Pace
    fp64: Pace

    def __post_init__(self) -> None:
        for name in ("tensor", "ieee", "fp64"):
            object.__setattr__(self, name, Pace(**getattr(self, name)))


TILE = 16_384  # elements
SPLITS = (2, 3, 4, 6, 8, 12, 16)  # of K
# Waves of programs at most that share tiles, by `mma`, and by `wgmma` and `tcgen05`, whose programs are longer.
WAVES = (4, 2)
_KNOWN = Remembered()
REGISTERS = 80  # of a thread, in addition to its sums


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Over copies or not, every tile, K whole or cut into parts while that gives more SMs something to do."""
    for given, swap_ab, packed in _given(problem, device):
        for config in (*configs(problem.precision, device.capability), *GATED * problem.gate):
            yield from _with(config, given, device, swap_ab, packed)


def _with(
    config: Config, given: GemmProblem, device: DeviceInfo, swap_ab: bool, packed: tuple[str, ...]
) -> Iterator[Candidate]:
    if _fits(given, config):
        for split_k in _splits(given, config, device):
            yield Candidate(given, Algorithm("portable", config, split_k, swap_ab, packed))


def unpredicted(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Those by TMA, on Blackwell, for the tuner only: they were never timed, so no time can be predicted."""
    given, swap_ab, _ = next(_given(problem, device))
    for config in TMA_CONFIGS.get(device.capability[0], ()) if device.capability[0] >= 10 and not problem.gate else ():
        if _fits(given, config):
            work = Schedule(min(tiles_of(given, config), device.num_sms))
            yield Candidate(given, Algorithm("portable", config, work, swap_ab))


def _given(problem: GemmProblem, device: DeviceInfo) -> Iterator[tuple[GemmProblem, bool, tuple[str, ...]]]:
    """What the kernel may be given for a problem: (the problem, whether it is swapped, operands that are copied).

    `ldmatrix` reads 8 bits along K only, and threads read another operand of `mma` by elements. On Hopper
    `warp_specialised` has such copies.
    """
    swap_ab = swap_for_c(problem)
    yield problem.swap_ab() if swap_ab else problem, swap_ab, ()
    across = tuple(name for name in ("a", "b") if name not in along_k(problem))
    by_elements = across and problem.dtype.itemsize == 1 and device.capability[0] not in ASYNCHRONOUS
    if by_elements and problem.K and not problem.groups:
        readable = repack.repacked(problem, across)
        yield readable.swap_ab() if swap_ab else readable, swap_ab, across


def _fits(problem: GemmProblem, config: Config) -> bool:
    """Whether no more than half of a tile is empty, where a smaller one would do."""
    return config.BLOCK_M <= max(64, 2 * problem.M) and config.BLOCK_N <= max(64, 2 * problem.N)


def _splits(problem: GemmProblem, config: Config, device: DeviceInfo) -> list[int]:
    """Into how many parts K may be cut."""
    steps = problem.K // (4 * config.BLOCK_K)
    if problem.groups or problem.gate or steps < SPLITS[0]:
        return [1]
    programs = WAVES[device.capability[0] in ASYNCHRONOUS] * device.num_sms
    most = min(steps, programs // max(1, tiles_of(problem, config)))
    return [1, *(split_k for split_k in SPLITS if split_k <= most)]


class _OfProblem(NamedTuple):
    """Of a problem, whatever its tiles: the pace of what multiplies, and the time of memory."""

    pace: Pace
    memory: float


class _OfConfig(NamedTuple):
    """What a configuration's predicted times have in common, whatever the problem's sizes. Times are microseconds."""

    work: float  # of a k-tile on a busy SM
    alone: float  # of a k-tile of one program alone
    start: float  # of a program
    share: float  # of sharing sums
    part: float  # of adding one
    at_once: int  # programs that an SM has room for
    ahead: int  # k-tiles that are loaded ahead
    copies: float  # of a k-tile's copies
    l2: float  # in which L2 gives a k-tile to whichever SM, where that is not in `work`


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, whose programs wait for their loads, for memory, or for one another."""
    if problem.groups:
        problem = average(problem)
    if problem.gate:
        problem, config = both_products(problem), with_gate(config)
    known = _KNOWN.for_problem(problem, model)
    if not known:
        on = _of_problem(problem, model)
        known[None] = on, _kind(problem, on.pace)
    on, kind = known[None]
    if config not in known:
        known[config] = tiles_of(problem, config), _of_config(config, *kind, model)
    tiles, of = known[config]
    return _time(on, of, tiles, -(-problem.K // (split_k * config.BLOCK_K)), split_k, model)


def _time(on: _OfProblem, of: _OfConfig, tiles: int, steps: int, split_k: int, model: DeviceModel) -> float:
    """Predicted time of `tiles` by split_k programs each, which take `steps` k-tiles."""
    work, alone, start, share, part, at_once, ahead, copies, l2 = of
    pace, memory = on
    programs = tiles * split_k
    filling = max(0, ahead - steps) * copies  # beyond K's end too

    def together(count: float) -> float:
        return start + count * (pace.program + filling) + steps * soft_maximum(alone, count * work)

    busy = on_busiest_sm(programs, model.num_sms, at_once, together, pace.piled)
    time = model.launch + pace.spread * min(1.0, programs / model.num_sms)
    time += soft_maximum(busy, memory, programs * steps * l2)
    return time + share + split_k * part if split_k > 1 else time


def _of_problem(problem: GemmProblem, model: DeviceModel) -> _OfProblem:
    pace, _ = _figures(problem.precision, model)
    return _OfProblem(pace, traffic(problem) / (pace.memory * model.memory))


@lru_cache(maxsize=64)
def _figures(precision: str, model: DeviceModel) -> tuple[Pace, tuple[float, float]]:
    """The pace of what multiplies, and the multiply-adds of an SM and of a warp in a microsecond."""
    costs = model.costs(Costs)
    pace: Pace = {"fma": costs.ieee, "dmma": costs.fp64}.get(ARITHMETICS[precision].instruction, costs.tensor)
    return pace, costs.products[precision]


def _kind(problem: GemmProblem, pace: Pace) -> tuple[str, int, int, int, int, float, float, bool]:
    """What a tile's time depends on of a problem. First come its arithmetic, and bytes of an element and of a sum. Then
    come elements of A and of B that are moved at once, and what such a copy counts for. The last says whether B is
    K-major."""
    (_, of_a), (_, of_b), _ = vectors(problem)
    sizes = problem.dtype.itemsize, itemsize_of_sums(problem)
    of_lines = [lines_of(layout, problem.dtype.itemsize, pace) for layout in (problem.a, problem.b)]
    return (problem.precision, *sizes, of_a, of_b, of_lines[0], of_lines[1], problem.b.column_major)


@lru_cache(maxsize=4096)
def _of_config(
    config: Config,
    precision: str,
    itemsize: int,
    sum_itemsize: int,
    a_vector: int,
    b_vector: int,
    a_lines: float,
    b_lines: float,
    k_major: bool,
    model: DeviceModel,
) -> _OfConfig:
    arithmetic, pace, (of_sm, of_warp) = ARITHMETICS[precision], *_figures(precision, model)
    m, n, k, warps = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps
    products = (len(arithmetic.planes.terms) if arithmetic.planes else 1) * m * n * k
    copies = k * m / a_vector * pace.move[a_vector * itemsize < 16] * a_lines
    copies += k * n / b_vector * pace.move[b_vector * itemsize < 16] * b_lines
    shared = copies
    if itemsize != 2:  # of 16 bits ldmatrix reads either way
        shared += k * pace.read[k_major] * sqrt(32 * warps * m * n)
    # Elements of less than 4 bytes that are moved one by one go through registers, ahead of which no load is issued.
    ahead = config.num_stages - 1 if min(a_vector, b_vector) * itemsize >= 4 else 1
    size = m * n / TILE
    return _OfConfig(
        work=products / of_sm + shared,
        alone=soft_maximum(pace.step + pace.latency / ahead, products / (of_warp * warps) + shared),
        start=pace.start[0] + pace.start[1] * size,
        share=pace.share[0] + pace.share[1] * size,
        part=pace.part[0] + pace.part[1] * size,
        at_once=programs_per_sm(config, itemsize, sum_itemsize, model),
        ahead=ahead,
        copies=copies,
        l2=0.0 if model.capability[0] in ASYNCHRONOUS else (m + n) * k * itemsize / (LINE * model.l2),
    )


def lower_bounds(problem: GemmProblem, device: DeviceInfo, model: DeviceModel) -> Iterator[Bounded]:
    """`Bounded` for each configuration that `candidates` compares, into however many parts it cuts K."""
    for i, (given, swap_ab, packed) in enumerate(_given(problem, device)):
        copying, on = repack.microseconds(problem, packed, model), _of_problem(given, model)
        for j, (config, of) in enumerate(_configs(device.capability, *_kind(given, on.pace), model)):
            steps = -(-given.K // config.BLOCK_K)
            busy = max(tiles_of(given, config) * steps * of.work / model.num_sms, steps * of.alone / SPLITS[-1])
            least = copying + model.launch + max(busy, on.memory)
            yield least, (i, j), _with(config, given, device, swap_ab, packed)


@lru_cache(maxsize=64)
def _configs(capability: tuple[int, int], precision: str, *rest: Any) -> list[tuple[Config, _OfConfig]]:
    return [(config, _of_config(config, precision, *rest)) for config in configs(precision, capability)]


def registers_of(config: Config, sum_itemsize: int) -> int:
    """Of a thread, estimated."""
    return min(config.accumulators(sum_itemsize) + REGISTERS, MAX_REGISTERS)


def programs_per_sm(config: Config, itemsize: int, sum_itemsize: int, model: DeviceModel) -> int:
    """Programs that an SM has room for."""
    registers = 32 * config.num_warps * registers_of(config, sum_itemsize)
    shared = config.shared_memory(itemsize, buffers=config.buffers(model.capability))
    return max(1, min(model.shared_memory_per_sm // shared, REGISTERS_PER_SM // registers))
