"""How long the persistent kernel takes for a problem: waves, tail, tensor cores, L2, HBM and power, as arithmetic.

Times are microseconds. The figures were fitted to a sweep of tiles and splits over shapes of every regime on one H100
SXM; a choice depends on their relations only.
"""

from __future__ import annotations

from .config import GemmConfig
from .device import DeviceInfo
from .kernels import warp_specialised
from .kernels.schedule import Schedule
from .problem import GemmProblem, Layout

# What an SM needs for 64 of K of a tile when its operands come from L2 and the tensor cores are not throttled.
STEP: dict[tuple[int | None, int | None], float] = {
    (128, 256): 0.584,
    (256, 128): 0.626,
    (192, 128): 0.437,
    (128, 128): 0.304,
    (64, 256): 0.23,
    (128, 64): 0.171,
    (64, 128): 0.137,
    (64, 64): 0.069,
    (128, 32): 0.108,
    (64, 32): 0.064,
    (128, 16): 0.088,
    (64, 16): 0.053,
}
STAGE = 5.5e-3  # handing a stage of the ring over
LINE = 0.721e-3  # one line of 128 bytes from L2 to one SM
L2 = 115e3  # lines in a microsecond that L2 gives to all SMs
LAUNCH = 2.15
START = (0.15, 1.23 / 32_768)  # filling the ring and storing a tile: a constant, and for each element of the tile
SHARE = (0.99, 5.03 / 32_768)  # handing partial sums to another program, likewise
PART = (0.02, 1.15 / 32_768)  # adding one more program's partial sums, likewise
POWER = 943e6  # operations in a microsecond that the board's power limit allows
HBM = 2.86e6  # bytes in a microsecond
SHARPNESS = 3.0  # of the bounds' soft maximum: near one another they add up

MAX_PARTS = 32


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
    if not warp_specialised.splits(config):
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
    count, k_tiles = tiles(problem, config), -(-problem.K // k)
    lines = (m * _lines(problem.a, problem.dtype.itemsize) + n * _lines(problem.b, problem.dtype.itemsize)) * k / 64
    pace = ((step(m, n) * k / 64) ** 4 + (lines * LINE) ** 4) ** 0.25 + STAGE
    start = START[0] + START[1] * m * n
    busy = -(-(count - schedule.split) // schedule.programs) * (k_tiles * pace + start)
    share = 0.0
    if schedule.split:
        waves = -(-schedule.split * schedule.parts // schedule.programs)
        busy += waves * (-(-k_tiles // schedule.parts) * pace + start)
        share = SHARE[0] + SHARE[1] * m * n + (schedule.parts - 1) * (PART[0] + PART[1] * m * n)
    power = 2 * problem.batch * problem.M * problem.N * problem.K / POWER
    bounds = (busy, power, traffic(problem) / HBM, count * k_tiles * lines / L2)
    return LAUNCH + share + sum(bound**SHARPNESS for bound in bounds) ** (1 / SHARPNESS)


def traffic(problem: GemmProblem) -> int:
    """Bytes that must move through HBM: each operand once."""
    operands = problem.dtype.itemsize * problem.K * (problem.M + problem.N)
    return problem.batch * (operands + problem.out_dtype.itemsize * problem.M * problem.N * (1 + problem.has_beta))


def _lines(layout: Layout, itemsize: int) -> int:
    """Lines of 128 bytes that 128 bytes of a row touch: two where rows begin inside of lines."""
    _, row, column = layout.strides
    return 2 if (row if column == 1 else column) * itemsize % 128 else 1
