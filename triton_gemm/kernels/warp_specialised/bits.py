"""In which order the warp-specialised kernel sums along K, which decides the bits of its results."""

from __future__ import annotations

from ...problem import GemmProblem
from ..order import ONE, by_tensor_cores, exactly, in_parts, promoted
from ..schedule import Schedule
from .configs import Config
from .promotion import pieces


def order_of_sums(problem: GemmProblem, config: Config, schedule: Schedule) -> str:
    """One instruction after the other along K, of the parts of a tile one part after the other, whichever program adds
    them up. The tiles, and their order, decide which of C's elements are in tiles that are cut. Of groups along K the
    first instruction is the one with fewer products."""
    if problem.arithmetic.exact:
        return exactly(problem, "warp_specialised")
    how = by_tensor_cores(problem, "warp_specialised", warpgroups=True)
    if problem.groups == "k":
        return f"{how}, {ONE} in steps from its end"
    promotion = promoted(problem, config.BLOCK_K // pieces(problem, config))
    if schedule.split_k == 1:
        return f"{how}, {ONE}{promotion}"
    depth, parts = schedule.unit * config.BLOCK_K, schedule.split_k
    units = -(-problem.K // depth)
    cut = in_parts(parts, units // parts * depth, "" if units % parts == 0 else f"{depth}-deep tiles")
    count = problem.batch * config.tiles(problem.M, problem.N)
    if not schedule.in_turn and schedule.split_tiles < count:
        tile = f"{config.BLOCK_M * config.CLUSTER_M}x{config.BLOCK_N * config.CLUSTER_N}"
        c = f"{problem.M}x{problem.N}{' column-major' * problem.c.column_major}"
        cut += f", {schedule.split_tiles} of {count} tiles {tile} of C {c}, in groups of {schedule.group_m}"
    return f"{how}, {cut}{promotion}"
