"""What the kernels' predicted times have in common, as arithmetic on a problem. Times are microseconds."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, Protocol

from ..hardware.device import DeviceInfo
from ..hardware.device_model import DeviceModel
from ..hardware.gpus import bandwidth, rate
from ..problem import GemmProblem, Layout, both_products

SECTOR = 32  # bytes
ROUNDING = 1 + 1e-9  # more than what two computations of one time differ by


class Remembered:
    """What predictions for one problem share, kept for the last problem, in a dictionary of its own."""

    def __init__(self) -> None:
        self._last: tuple[object, object, dict[Any, Any]] = (None, None, {})

    def for_problem(self, problem: GemmProblem, model: DeviceModel) -> dict[Any, Any]:
        last_problem, last_model, found = self._last
        if last_problem is not problem or last_model is not model:
            found = {}
            self._last = problem, model, found
        return found


def soft_maximum(*bounds: float) -> float:
    """The largest, and more where others are near it."""
    total = 0.0
    for bound in bounds:
        total += bound * bound * bound
    return total ** (1 / 3)


def on_busiest_sm(
    programs: int, num_sms: int, at_once: int, together: Callable[[float], float], piled: float = 0.0
) -> float:
    """Time of the SM with the most programs, of which it runs `at_once`; together(n): what n take on an SM.

    piled: of the programs that an SM still has room for, how many come to it though others have none. While the grid
    before runs out, programs start where there is room first.
    """
    full, rest = _waves(programs, num_sms, at_once, piled)
    return full * together(at_once) + (together(rest) if rest else 0.0)


def load_imbalance(programs: int, num_sms: int, at_once: int, piled: float) -> float:
    """Fraction of the busiest SM's programs that exceeds the average per SM, for one program or more."""
    full, rest = _waves(programs, num_sms, at_once, piled)
    return 1 - programs / (num_sms * (full * at_once + rest))


def _waves(programs: int, num_sms: int, at_once: int, piled: float) -> tuple[int, float]:
    """Of the busiest SM: the number of full waves, of `at_once` programs each, and the programs of its last wave."""
    full, rest = divmod(-(-programs // num_sms), at_once)
    return full, rest + piled * (min(at_once, programs) - rest) if rest else 0.0


def traffic(problem: GemmProblem) -> int:
    """Bytes that must move through memory: each operand once."""
    operands = problem.dtype.itemsize * problem.planes.count * problem.K * (problem.M + problem.N)
    return problem.batch * (operands + problem.out_dtype.itemsize * problem.M * problem.N * (1 + problem.has_beta))


def roofline(problem: GemmProblem, device: DeviceInfo) -> float:
    """Microseconds that no kernel can beat: all products at the peak of what multiplies, or each operand moved once at
    memory's bandwidth (Williams, Waterman and Patterson, Roofline, CACM 2009)."""
    seen = average(both_products(problem) if problem.gate else problem)
    terms = len(seen.planes.terms)
    peak = device.num_sms * rate(device, seen.arithmetic.unit)
    products = seen.batch * terms * seen.M * seen.N * seen.K
    sizes = (seen.a, seen.M * seen.K), (seen.b, seen.K * seen.N)
    elements = sum(size * (seen.batch if layout.strides[0] else 1) for layout, size in sizes)
    written = seen.out_dtype.itemsize * seen.batch * seen.M * seen.N * (1 + seen.has_beta) // (1 + problem.gate)
    moved = (seen.dtype.itemsize * elements + written) / bandwidth(device)
    return max(products / peak if peak else 0.0, moved)


def pitch(layout: Layout, itemsize: int) -> int:
    """Bytes from one row to the next, or from one column where the unit stride runs down the columns."""
    _, row, column = layout.strides
    return (row if column == 1 else column) * itemsize


class Lines(Protocol):
    """Figures of a kernel."""

    # Lines that 128 bytes of a row count for: where rows begin inside of lines, at a sector's 32 bytes, and where they
    # begin inside of sectors.
    @property
    def inside_line(self) -> float: ...
    @property
    def inside_sector(self) -> float: ...


def lines_of(layout: Layout, itemsize: int, costs: Lines) -> float:
    """Lines of 128 bytes that 128 bytes of a row count for. They touch two lines where rows begin inside of lines. They
    touch five sectors instead of four where rows begin inside of sectors."""
    bytes_apart = pitch(layout, itemsize)
    return 1.0 if bytes_apart % 128 == 0 else costs.inside_line if bytes_apart % SECTOR == 0 else costs.inside_sector


def average(problem: GemmProblem) -> GemmProblem:
    """A batch of products as large as groups are on average; a problem without groups is its own."""
    if problem.groups is None:
        return problem
    size = problem.groups.upper()
    return replace(problem, groups=None, **{size: max(1, -(-getattr(problem, size) // problem.batch))})


def swap_for_c(problem: GemmProblem) -> bool:
    """Whether c^T = b^T a^T is better to write: where its rows lie together in memory, or where it is wider and
    neither's rows do. It never is with blocks of scales, of which A's are not B's, with groups, or with a gate."""
    if problem.scales == "blocks" or problem.groups or problem.gate:
        return False
    row, column = problem.c.strides[1:]
    return row == 1 if (row == 1) != (column == 1) else problem.M > problem.N
