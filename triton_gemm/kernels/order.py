"""The words in which kernels say in what order they sum, for `bit_classes`: where two kernels give the same bits they
must say the same."""

from __future__ import annotations

from ..arithmetic import HALF
from ..problem import GemmProblem

ONE = "one sum along K"


def by_tensor_cores(problem: GemmProblem, kernel: str, *, warpgroups: bool) -> str:
    """What multiplies. warpgroups: whether four warps do it together, by `wgmma` on Hopper; else each by its own `mma`.

    That two kernels give the same bits was measured in 16 bits; and what they add, the compiler adds alike. Elsewhere,
    and where an activation is more than a choice, their names are in it.
    """
    how = "tensor cores" if warpgroups else "tensor cores, warp by warp"
    shared = problem.arithmetic is HALF and problem.activation in (None, "relu")
    return how if shared else f"{how}, {kernel}"


def exactly(problem: GemmProblem, kernel: str) -> str:
    """Of sums of integers, which have no order. What multiplies them by scales does it in fp32."""
    return "exact sums" if problem.scales is None else f"exact sums, scaled by {kernel}"


def promoted(problem: GemmProblem, depth: int) -> str:
    """What is said of k-tiles `depth` deep: nothing, unless their sums are promoted."""
    return "" if problem.arithmetic.promotion is None else f", promoted every {depth}"


def in_parts(parts: int, longest: int, lengths: str = "") -> str:
    """K in parts whose sums are added in their order, each but the last ones of `longest` elements; lengths: what
    decides how long they are where that is not so."""
    return ONE if parts == 1 else f"K in {parts} parts of {lengths or longest}"
