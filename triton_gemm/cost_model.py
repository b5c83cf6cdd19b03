"""How long the persistent kernel takes for a problem: waves, tail, tensor cores, L2, HBM and power, as arithmetic; and
that of outer products.

Times are microseconds. The figures were fitted to a sweep of tiles and splits over shapes of every regime on one H100
SXM; a choice depends on their relations only.
"""

from __future__ import annotations

from . import kernels
from .config import GemmConfig
from .device import DeviceInfo
from .kernels.schedule import Schedule
from .problem import GemmProblem, Layout

# What an SM needs for 128 bytes along K of a tile when its operands come from L2, at the clock of long products.
STEP: dict[tuple[int | None, int | None], float] = {
    (128, 256): 0.581,
    (256, 128): 0.643,
    (192, 128): 0.447,
    (128, 128): 0.301,
    (64, 256): 0.216,
    (128, 64): 0.159,
    (64, 128): 0.119,
    (64, 64): 0.0844,
    (128, 32): 0.133,
    (64, 32): 0.0726,
    (128, 16): 0.0985,
    (64, 16): 0.0514,
    (64, 96): 0.179,
    (128, 96): 0.196,
    (128, 160): 0.412,  # fitted 0.408; for one shape that tipped a tie to what takes 27 % longer
    (128, 192): 0.411,
    (192, 96): 0.343,
    (192, 192): 0.74,
    (256, 192): 0.979,
}
STAGE = 0.0231  # handing a stage of the ring over
LINE = 0.893e-3  # one line of 128 bytes from L2 to each of two neighbouring SMs
ALONE = 0.586  # of that to one whose neighbour is idle
BEYOND = 2.82e-3  # filling a line beyond the matrix with zeros
INSIDE_LINE = 1.52  # lines that 128 bytes of a row count for where rows begin inside of lines, at a sector's 32 bytes
INSIDE_SECTOR = 2.23  # where they begin inside of sectors
L2 = 121e3  # lines in a microsecond that L2 gives to all SMs
LAUNCH = 2.13
START = (0.0259, 1.5 / 32_768)  # filling the ring and storing a tile: a constant, and for each element of the tile
SECOND = 0.191  # storing a second piece of it
SHARE = (1.2, 1.86 / 32_768)  # handing partial sums to another program, likewise
PART = (2.8e-3, 1.47 / 32_768)  # adding one more program's partial sums, likewise
POWER = 953e6  # operations on 16 bits in a microsecond that the board's power limit allows
HBM = 3.02e6  # bytes in a microsecond
PAIRED = 63.8e3  # of them to each of two neighbouring SMs
COPY = 2.58  # copying an operand first: a constant
COPIED = 5.45e6  # and bytes in a microsecond, read or written
SHARPNESS = 3.0  # of the soft maximum

# Of outer products on CUDA cores, from few measurements
FMAS = 223e3  # multiply-adds in a microsecond of a multiprocessor with many warps
SIDES = 6  # what an element that is loaded costs, in multiply-adds
WARPS = 3.5  # with which it does half of them
PROGRAM = 2.0  # filling the ring, and storing a tile
HANDED_ON = (1.5, 0.66 / 16_384)  # partial sums: a constant, and for each element that a program writes or reads

PAIRS = 66  # of neighbouring SMs; programs go to one of each first
MAX_PARTS = 32
SECTOR = 32  # bytes


def tiles(problem: GemmProblem, config: GemmConfig) -> int:
    """Tiles of C in all matrices of the batch."""
    assert config.BLOCK_M is not None and config.BLOCK_N is not None
    return problem.batch * -(-problem.M // config.BLOCK_M) * -(-problem.N // config.BLOCK_N)


def schedules(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> list[Schedule]:
    """The ways to deal out a problem's tiles that are worth comparing: all whole, or those of the last wave cut along K
    into as few parts as make for less work on the busiest SM."""
    assert config.BLOCK_K is not None
    count, programs = tiles(problem, config), device.num_sms
    k_tiles = -(-problem.K // config.BLOCK_K)
    found = [Schedule(min(count, programs))]
    if not kernels.warp_specialised.splits(config):
        return found
    rest = count % programs if count > programs else count
    for parts in range(2, min(k_tiles // 2, MAX_PARTS) + 1):
        if not 0 < rest * parts <= programs:  # `Schedule` says why no more
            break
        found.append(Schedule(min(rest * parts + count - rest, programs), rest, parts))
    return found


def step(m: int, n: int) -> float:
    """STEP of a tile [m, n]; of one that was not measured what its parts take, whose sides are powers of two."""
    if (m, n) in STEP:
        return STEP[m, n]
    width, height = 1 << n.bit_length() - 1, 1 << m.bit_length() - 1
    if width < n:
        return step(m, width) + step(m, n - width)
    height = height if height < m else m // 2
    return step(height, n) + step(m - height, n)


def microseconds(problem: GemmProblem, config: GemmConfig, schedule: Schedule) -> float:
    """Predicted time of one launch whose operands lie in HBM."""
    m, n, k = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    assert m is not None and n is not None and k is not None
    count, terms = tiles(problem, config), len(problem.planes.terms)
    k_tiles = -(-problem.K // k)
    itemsize, rows, columns = problem.dtype.itemsize, min(m, problem.M), min(n, problem.N)
    k_lines = k * itemsize / 128
    loaded = (rows * lines(problem.a, itemsize) + columns * lines(problem.b, itemsize)) * k_lines
    beyond = (m - rows + n - columns) * k_lines
    alone = schedule.programs <= PAIRS
    load = loaded * LINE * (ALONE if alone else 1.0) + beyond * BEYOND
    pace = terms * (soft_maximum(step(m, n) * k_lines, load) + STAGE)
    start = START[0] + START[1] * m * n + SECOND * bool(kernels.warp_specialised.rest_columns(config))
    busy = -(-(count - schedule.split) // schedule.programs) * (k_tiles * pace + start)
    share = 0.0
    if schedule.split:
        waves = -(-schedule.split * schedule.parts // schedule.programs)
        busy += waves * (-(-k_tiles // schedule.parts) * pace + start)
        share = SHARE[0] + SHARE[1] * m * n + (schedule.parts - 1) * (PART[0] + PART[1] * m * n)
    moved = traffic(problem)
    return (
        LAUNCH
        + share
        + soft_maximum(
            busy,
            count * k_tiles * terms * loaded / L2,
            moved / HBM,
            0.0 if alone else moved / (schedule.programs * PAIRED),
            itemsize * problem.batch * problem.M * problem.N * problem.K * terms / POWER,
        )
    )


def outer_products(problem: GemmProblem, config: GemmConfig, split_k: int, device: DeviceInfo) -> float:
    """Predicted time of `kernels.fma`, K cut into `split_k` parts: of its busiest multiprocessor."""
    assert config.BLOCK_M is not None and config.BLOCK_N is not None and config.BLOCK_K is not None
    size, warps = config.BLOCK_M * config.BLOCK_N, config.num_warps
    at_once = kernels.fma.WARPS_PER_SM // warps
    pace = (1 + SIDES / config.BLOCK_M + SIDES / config.BLOCK_N) / FMAS
    work = -(-problem.K // (split_k * config.BLOCK_K)) * config.BLOCK_K * size * pace
    full, rest = divmod(-(-tiles(problem, config) * split_k // device.num_sms), at_once)
    busy = full * at_once * work * _latency(kernels.fma.WARPS_PER_SM) + (
        rest * work * _latency(rest * warps) if rest else 0.0
    )
    busy += (full + bool(rest)) * PROGRAM
    if split_k > 1:
        busy += HANDED_ON[0] + HANDED_ON[1] * size * (split_k + full * at_once + rest)
    return LAUNCH + busy


def _latency(warps: int) -> float:
    """How many times longer a multiprocessor takes for want of warps."""
    return 1 + (WARPS / warps) ** 2


def soft_maximum(*bounds: float) -> float:
    """The largest, and more where others are near it."""
    return sum(bound**SHARPNESS for bound in bounds) ** (1 / SHARPNESS)


def traffic(problem: GemmProblem) -> int:
    """Bytes that must move through HBM: each operand once."""
    operands = problem.dtype.itemsize * problem.planes.count * problem.K * (problem.M + problem.N)
    return problem.batch * (operands + problem.out_dtype.itemsize * problem.M * problem.N * (1 + problem.has_beta))


def copying(moved: int) -> float:
    """Predicted time of copying an operand before the launch: so many bytes are read or written."""
    return COPY + moved / COPIED


def lines(layout: Layout, itemsize: int) -> float:
    """Lines of 128 bytes that 128 bytes of a row count for: they touch two where rows begin inside of lines, and five
    of their sectors instead of four where they begin inside of sectors."""
    bytes_apart = pitch(layout, itemsize)
    return 1.0 if bytes_apart % 128 == 0 else INSIDE_LINE if bytes_apart % SECTOR == 0 else INSIDE_SECTOR


def pitch(layout: Layout, itemsize: int) -> int:
    """Bytes from one row to the next, or from one column where the unit stride runs down the columns."""
    _, row, column = layout.strides
    return (row if column == 1 else column) * itemsize
