"""Tiles, schedules and products that tests of the warp-specialised kernel share, on the CPU."""

from __future__ import annotations

from collections.abc import Hashable, Iterable
from dataclasses import replace
from types import SimpleNamespace

import torch

from tests.support.kernel_cases import Case, Operands
from tests.support.simulated_plans import CPU, check, readable, simulation, summed
from tests.support.table_fakes import HOPPER
from triton_gemm.config import TileConfig
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule

CONFIGS, CLUSTERED = warp_specialised.CONFIGS, warp_specialised.CLUSTERED
ORDERS = ("nn", "nt", "tn", "tt")


def of_tile(m: int, n: int, k: int | None = None, among: Iterable[TileConfig] = CONFIGS) -> TileConfig:
    """The first configuration of this tile."""
    return next(c for c in among if (m, n) == (c.BLOCK_M, c.BLOCK_N) and k in (None, c.BLOCK_K))


def in_form(tile: tuple[int, int], form: tuple[int, int]) -> TileConfig:
    return replace(of_tile(*tile), CLUSTER_M=form[0], CLUSTER_N=form[1])


def of_cluster(config: TileConfig) -> tuple[int, int, int]:
    """What a cluster computes."""
    return config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N, config.BLOCK_K


def every_form(config: TileConfig) -> set[Hashable]:
    """What the fast tier shows."""
    return {(config.CLUSTER_M, config.CLUSTER_N), config.num_warps, ("tail", config.tail_n > 0)}


def of_width(m: int, n: int, form: tuple[int, int] = (1, 1), k: int = 64) -> TileConfig:
    """The ring is short, so that it goes round."""
    return warp_specialised.Config(m, n, k, 8 if m == 256 else m // 16, 3 if k == 64 else 2, *form)


# For one, two and three consumers, and for two with two blocks of 64 rows each; alone and in clusters, whose CTAs along
# M cannot share most of them evenly in blocks of 8.
WIDTHS = {
    64: {
        **{24: (1, 1), 40: (1, 1), 72: (4, 1), 88: (1, 1), 120: (2, 1), 136: (4, 2), 168: (2, 2), 200: (1, 4)},
        **{232: (8, 1), 248: (2, 4)},
    },
    128: {80: (1, 1), 96: (2, 2), 104: (2, 1), 120: (1, 2), 144: (4, 1), 152: (4, 2), 160: (1, 1), 248: (2, 1)},
    192: {72: (1, 2), 88: (2, 1), 96: (1, 1), 120: (4, 2)},
    256: {72: (2, 1), 96: (2, 2), 112: (4, 1), 120: (1, 1), 136: (2, 1), 152: (1, 1), 168: (2, 2), 184: (1, 1)},
}
DEEP = {(64, 40): (1, 1), (64, 88): (4, 1), (128, 104): (2, 1), (192, 72): (1, 2), (256, 112): (1, 1)}  # 128 along K
WIDE = [of_width(m, n, form) for m, widths in WIDTHS.items() for n, form in widths.items()]
WIDE += [of_width(*tile, form, 128) for tile, form in DEEP.items()]
# Tiles of which few rows are A's, and of which few columns are B's.
OF_FEW = {
    "a": ((64, 40, 128), (64, 64, 128), (64, 88, 64), (128, 64, 64)),
    "b": ((64, 16, 128), (128, 32, 128), (64, 128, 128)),
}


def of_few(tile: tuple[int, int, int], form: tuple[int, int] = (1, 1)) -> TileConfig:
    m, n, k = tile
    return warp_specialised.Config(m, n, k, m // 16, 3, *form)


def check_whole_and_split(case: Case, config: TileConfig, kernel: SimpleNamespace, times: int = 1) -> None:
    """By fewer programs than tiles, and, if the configuration can be, with all but a tile cut in three."""
    tiles = (case.batch or 1) * config.tiles(*case.size[:2])
    check(case, config, Schedule(max(1, min(tiles - 1, 5))), kernel, times)
    if warp_specialised.can_split_k(config):
        cut = max(1, tiles - 1)
        check(case, config, Schedule(3 * cut, cut, split_k=3, group_m=2), kernel)


def check_in_turn(
    case: Case,
    config: TileConfig,
    parts: int,
    kernel: SimpleNamespace,
    module: SimpleNamespace | None = None,
    unit: int = 1,
) -> torch.Tensor:
    """Right by `module`, and bit for bit what owners of tiles sum by `kernel`; by fewer programs than tiles. The bits
    of C."""
    operands, problem, module = Operands(case, CPU), readable(case), module or kernel
    tiles = (case.batch or 1) * config.tiles(*case.size[:2])
    in_turn = Schedule(max(1, tiles // 2), split_k=parts, group_m=2, unit=unit)
    shared = Schedule(parts * tiles, tiles, parts, unit=unit)
    assert kernel.illegal(problem, HOPPER, config, in_turn) is None
    orders = {kernel.order_of_sums(problem, config, schedule) for schedule in (in_turn, shared)}
    assert len(orders) == 1 and f"K in {parts} parts" in orders.pop()
    launch = module.launches(problem, config, in_turn)[-1]
    assert launch.workspace == launch.counters == 0
    operands.check(simulation(operands.problem, config, in_turn, module), parts)
    found = summed(operands, config, in_turn, module)
    same = found == summed(operands, config, shared, kernel)
    assert same.all(), f"{int((~same).sum())} of {same.numel()} elements are others"
    return found


def legal_in_turn(case: Case, config: TileConfig) -> bool:
    """Whether it is, clusters or not, which not every Triton has."""
    alone = replace(config, CLUSTER_M=1, CLUSTER_N=1)
    return warp_specialised.illegal(readable(case), HOPPER, alone, Schedule(1, split_k=2)) is None


PLAIN = Case((64, 64, 64), "nnn")
IN_TURN = [config for config in CONFIGS if legal_in_turn(PLAIN, config)]


FP8_TO_BF16 = {"dtype": torch.float8_e4m3fn, "out_dtype": torch.bfloat16}
OTHERS_IN_TURN = {
    "tf32": Case((64, 64, 64), "ntn", dtype=torch.float32, precision="tf32"),
    "tf32-a-by-registers": Case((64, 64, 64), "ttn", dtype=torch.float32, precision="tf32"),
    **{x: Case((64, 64, 64), "nnn", dtype=torch.float32, precision=x) for x in ("tf32x3", "bf16x3", "bf16x6")},
    **{
        f"fp8-{scales}": Case((64, 64, 64), "ntn", pad=16, precision=how, scales=scales, **FP8_TO_BF16)
        for scales, how in (("tensor", "fp8 fast"), ("rows", "fp8"), ("blocks", "fp8"))
    },
}
