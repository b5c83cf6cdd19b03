"""The ladder: `LADDER` lists its rungs from the naive kernel to the warp-specialised one."""

from . import k01_naive, k02_coalesced, k03_blocked
from .rung import Rung

LADDER: tuple[Rung, ...] = tuple(module.RUNG for module in (k01_naive, k02_coalesced, k03_blocked))

__all__ = ["LADDER", "Rung"]
