"""Which sums leave the tensor cores before the end of K, to be added in fp32, and how a tile's are dealt with."""

from __future__ import annotations

from ...problem import GemmProblem
from .configs import Config


def promotes(problem: GemmProblem) -> bool:
    """Whether k-tiles are summed apart: those of planes, and of fp8 unless fast sums will do."""
    return problem.arithmetic.promotion is not None


def in_waves(config: Config) -> bool:
    """Whether a thread has so many sums that both of two consumers multiply a promoted k-tile of one plane in two
    waves."""
    return config.num_warps == 8 and config.accumulators() == 128 and not config.tail_n


def waves(problem: GemmProblem, config: Config) -> int:
    """In how many waves a consumer multiplies a k-tile, one part of the tile after the other."""
    return 2 if promotes(problem) and len(problem.planes.terms) == 1 and in_waves(config) else 1


def pieces(problem: GemmProblem, config: Config) -> int:
    """In how many pieces along K a k-tile is promoted."""
    return -(-config.BLOCK_K * problem.dtype.itemsize // (problem.arithmetic.promotion or 2**31))
