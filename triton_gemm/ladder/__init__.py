"""The ladder: `LADDER` lists its rungs from the naive kernel to the warp-specialised one."""

from . import (
    k01_naive,
    k02_coalesced,
    k03_blocked,
    k04_grouped,
    k05_register_tiled,
    k06_pipelined,
    k07_tf32,
    k08_tensor_cores,
    k09_persistent,
    k10_tma,
    k11_warp_specialised,
)
from .record import Rung

LADDER: tuple[Rung, ...] = tuple(
    module.RUNG
    for module in (
        k01_naive,
        k02_coalesced,
        k03_blocked,
        k04_grouped,
        k05_register_tiled,
        k06_pipelined,
        k07_tf32,
        k08_tensor_cores,
        k09_persistent,
        k10_tma,
        k11_warp_specialised,
    )
)

__all__ = ["LADDER", "Rung"]
