"""Candidate: one way to compute a product with a kernel, as `select` compares them."""

from __future__ import annotations

from typing import NamedTuple

from ..config import TileConfig
from ..problem import GemmProblem
from .schedule import Schedule

Work = Schedule | int


class Candidate(NamedTuple):
    """One way to compute a product with a kernel.

    problem: what the kernel is given: over copies of the operands `packed`, and c^T = b^T a^T with swap_ab; config: of
    the kernel's own kind; work: the Schedule of a persistent kernel, for others split_k, the number of programs that
    share a tile's sum.
    """

    problem: GemmProblem
    config: TileConfig
    work: Work = 1
    swap_ab: bool = False
    packed: tuple[str, ...] = ()
