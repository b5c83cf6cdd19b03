"""How to compute a product: an Algorithm, and a Candidate, one for a given problem, as `select` compares them."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from ..config import TileConfig
from ..problem import GemmProblem
from .schedule import Schedule

Work = Schedule | int
FEW_ROWS = 16  # of C, or columns: the most that the kernels for few rows are for


def parts_of(work: Work) -> int:
    """In how many parts K is, of tiles that are cut."""
    return work.split_k if isinstance(work, Schedule) else work


class Algorithm(NamedTuple):
    """All that decides what is launched for a problem.

    Attributes:
        kernel: its name, one of KERNELS.
        config: of the kernel's own kind.
        work: the Schedule of a persistent kernel, for others split_k, the number of programs that share a tile's sum.
        swap_ab: whether c^T = b^T a^T is computed.
        packed: operands ("a", "b") that are copied first.
    """

    kernel: str
    config: TileConfig
    work: Work = 1
    swap_ab: bool = False
    packed: tuple[str, ...] = ()


class Candidate(NamedTuple):
    """An algorithm, and the problem as its kernel is given it: over copies of the operands `packed`, and c^T = b^T a^T
    with swap_ab."""

    problem: GemmProblem
    algorithm: Algorithm


# A lower bound of the predicted microseconds of a configuration's candidates, the configuration's place in
# `candidates`' order, and these candidates.
Bounded = tuple[float, tuple[int, int], Iterable[Candidate]]
