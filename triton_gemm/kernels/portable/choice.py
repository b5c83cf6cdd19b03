"""Which ways to run the portable kernel are worth comparing, and how long they take."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import sqrt
from typing import Any

from ...config import REGISTERS_PER_SM
from ...cost_model import Remembered, average, on_busiest_sm, soft_maximum, swap_for_c, traffic
from ...device import DeviceInfo
from ...device_model import DeviceModel
from ...problem import GemmProblem
from ..candidate import Candidate
from .host import CONFIGS, MAX_REGISTERS, Config, itemsize_of_sums, tiles_of, vectors


@dataclass(frozen=True)
class Pace:
    """What a program takes on one GPU in addition to its products, in microseconds.

    move: one copy to shared memory, of an SM, of 16 bytes and of fewer; read: an element of an operand that a thread
    reads from there, but of 16 bits, where B is row-major and where it is K-major; latency: from a load to its
    arrival, which the stages of a pipeline share; step: the barriers of a k-tile; start: a program's first loads and
    its stores, a constant, and for each TILE elements of its tile; program: what each of an SM's programs adds to
    that; share: of all parts of a sum, likewise; part: adding one, likewise; piled: of the programs that an SM has
    room for, how many come together though others have none; memory: how much of its bandwidth is reached; spread:
    what starting programs on all SMs at once adds, on fewer a share of it.
    """

    move: tuple[float, float]
    latency: float
    step: float
    start: tuple[float, float]
    program: float
    share: tuple[float, float]
    part: tuple[float, float]
    piled: float
    memory: float
    spread: float
    read: tuple[float, float]


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. products: multiply-adds in a microsecond of an SM, and of a warp, by precision;
    tensor, ieee, fp64: the rest, by what multiplies."""

    KERNEL = "portable"

    products: Mapping[str, tuple[float, float]]
    tensor: Pace
    ieee: Pace
    fp64: Pace

    def __post_init__(self) -> None:
        for name in ("tensor", "ieee", "fp64"):
            object.__setattr__(self, name, Pace(**getattr(self, name)))


TILE = 16_384  # elements
_KNOWN = Remembered()
SHARED_MEMORY_PER_SM = 228 << 10
REGISTERS = 80  # of a thread, in addition to its sums


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Every tile, K whole or cut into parts while that gives more SMs something to do."""
    swap_ab = swap_for_c(problem)
    given = problem.swap_ab() if swap_ab else problem
    m, n = max(64, 2 * given.M), max(64, 2 * given.N)  # of larger tiles more than half would be empty
    configs = [config for config in CONFIGS[problem.precision] if config.BLOCK_M <= m and config.BLOCK_N <= n]
    for config in configs:
        yield Candidate(given, config, 1, swap_ab)
        count = tiles_of(given, config)
        most = 0 if problem.groups else min(problem.K // (4 * config.BLOCK_K), 2 * device.num_sms // max(1, count))
        for split_k in (2, 3, 4, 6, 8, 12, 16):
            if split_k <= most:
                yield Candidate(given, config, split_k, swap_ab)


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, whose programs wait for their loads, for memory, or for one another."""
    if problem.groups:
        problem = average(problem)
    known = _KNOWN.for_problem(problem, model)
    if config not in known:
        known[config] = _of_tile(problem, config, model)
    pace, tiles, at_once, work, alone, start, memory, share, part, ahead, copies = known[config]
    steps, programs = -(-problem.K // (split_k * config.BLOCK_K)), tiles * split_k
    filling = max(0, ahead - steps) * copies  # beyond K's end too

    def together(count: float) -> float:
        return start + count * (pace.program + filling) + steps * soft_maximum(alone, count * work)

    busy = on_busiest_sm(programs, model.num_sms, at_once, together, pace.piled)
    time = model.launch + pace.spread * min(1.0, programs / model.num_sms) + soft_maximum(busy, memory)
    return time + share + split_k * part if split_k > 1 else time


def _of_tile(problem: GemmProblem, config: Config, model: DeviceModel) -> tuple[Any, ...]:
    """Of a problem in tiles: (pace, how many, how many at once on an SM, time of a k-tile on a busy SM, and of one
    program alone, of its start, of memory, of sharing sums, of adding one, k-tiles that
    are loaded ahead, and time of the copies of one)."""
    costs, arithmetic = model.costs(Costs), problem.arithmetic
    pace: Pace = {"fma": costs.ieee, "dmma": costs.fp64}.get(arithmetic.instruction, costs.tensor)
    of_sm, of_warp = costs.products[arithmetic.name]
    m, n, k, warps = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps
    a_vector, b_vector, _ = (elements for _, elements in vectors(problem))
    products = len(problem.planes.terms) * m * n * k
    itemsize = problem.dtype.itemsize
    copies = k * m / a_vector * pace.move[a_vector * itemsize < 16]
    copies += k * n / b_vector * pace.move[b_vector * itemsize < 16]
    shared = copies
    if itemsize != 2:  # of 16 bits ldmatrix reads either way
        shared += k * pace.read[problem.b.column_major] * sqrt(32 * warps * m * n)
    # Elements of less than 4 bytes that are moved one by one go through registers, ahead of which no load is issued.
    ahead = config.num_stages - 1 if min(a_vector, b_vector) * itemsize >= 4 else 1
    alone = soft_maximum(pace.step + pace.latency / ahead, products / (of_warp * warps) + shared)
    size = m * n / TILE
    return (
        *(pace, tiles_of(problem, config)),
        _at_once(config, itemsize, itemsize_of_sums(problem)),
        *(products / of_sm + shared, alone, pace.start[0] + pace.start[1] * size),
        traffic(problem) / (pace.memory * model.memory),
        *(constant + slope * size for constant, slope in (pace.share, pace.part)),
        *(ahead, copies),
    )


@cache
def _at_once(config: Config, itemsize: int, sum_itemsize: int) -> int:
    """Programs that an SM has room for."""
    threads = 32 * config.num_warps
    registers = min(config.accumulators(sum_itemsize) + REGISTERS, MAX_REGISTERS)
    return max(
        1, min(SHARED_MEMORY_PER_SM // config.shared_memory(itemsize), REGISTERS_PER_SM // (registers * threads))
    )
