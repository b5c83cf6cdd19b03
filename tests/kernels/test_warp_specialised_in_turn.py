"""Parts of K that one program of the warp-specialised kernel sums in turn, without a GPU."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, blocks, circumstance, ids, reduced
from tests.support.simulated_plans import CPU, readable, summed
from tests.support.table_fakes import HOPPER
from tests.support.tiles_on_cpu import (
    CLUSTERED,
    IN_TURN,
    ORDERS,
    OTHERS_IN_TURN,
    PLAIN,
    WIDE,
    check_in_turn,
    every_form,
    legal_in_turn,
    of_cluster,
    of_tile,
)
from triton_gemm.config import TileConfig
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule

CLUSTERED_IN_TURN = [config for config in CLUSTERED if config.ctas <= 4 and legal_in_turn(PLAIN, config)]
WIDE_IN_TURN = [c for c in WIDE if c.ctas <= 4 and c.accumulators() <= (48 if c.num_warps == 12 else 96)]


@pytest.mark.few
@pytest.mark.parametrize("config", IN_TURN, ids=ids)
def test_parts_in_turn(kernel: SimpleNamespace, config: TileConfig) -> None:
    """In every configuration: uneven parts, and more parts than k-tiles; C ends inside of tiles, and the ring goes on
    from one tile to the next."""
    m, n, k = blocks(config)
    orders = ORDERS[IN_TURN.index(config) % 4] + "n"
    check_in_turn(Case((m - 7, 2 * n + 8, 7 * k + 3), orders), config, 3, kernel)
    check_in_turn(Case((m - 7, n - 8, 2 * k - 5), orders, integers=True), config, 5, kernel)


def test_parts_that_do_not_depend_on_the_depth_of_tiles(kernel: SimpleNamespace) -> None:
    """64-deep tiles with parts of 128s are of the class of 128-deep ones; with parts of 64s of another, with other
    bits. The second K ends inside of the first half of a 128-deep tile."""
    tiles = (64, 64, 128), (128, 96, 64)
    deep, flat = (replace(of_tile(*tile, among=IN_TURN), num_stages=4) for tile in tiles)
    for K in (640, 1060):
        case = Case((100, 136, K), "ntn", out_dtype=torch.float32)
        problem = Operands(case, CPU).problem
        found = [(config, Schedule(1, split_k=3, unit=unit)) for config, unit in ((deep, 1), (flat, 2), (flat, 1))]
        orders = [kernel.order_of_sums(problem, *one) for one in found]
        assert orders[0] == orders[1] != orders[2]
        assert not check_in_turn(case, flat, 3, kernel, unit=2).equal(check_in_turn(case, flat, 3, kernel))


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", CLUSTERED_IN_TURN, ids=ids)
def test_parts_in_turn_in_clusters(kernel: SimpleNamespace, config: TileConfig) -> None:
    m, n, k = of_cluster(config)
    check_in_turn(Case((m - 7, n + 8, 7 * k + 3), "ntn"), config, 3, kernel)


@pytest.mark.few(shows=lambda config: {config.BLOCK_M})
@pytest.mark.parametrize("config", WIDE_IN_TURN, ids=ids)
def test_parts_in_turn_of_any_width(kernel: SimpleNamespace, config: TileConfig) -> None:
    m, n, k = of_cluster(config)
    case = Case((m - 8, 2 * n - 8, 7 * k + 3), ("ntn", "ttn")[WIDE_IN_TURN.index(config) % 2])
    (launch,) = kernel.launches(Operands(case, CPU).problem, config, Schedule(1, split_k=3))
    assert launch.arguments["WIDE_MMA"]
    check_in_turn(case, config, 3, kernel)


@pytest.mark.few
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance_in_turn(kernel: SimpleNamespace, name: str) -> None:
    """Bias, activation, C's own values, C's layouts, batches."""
    legal = [c for c in IN_TURN if c.accumulators() <= 64 and legal_in_turn(circumstance(name, (64, 64, 64)), c)]
    config = legal[list(CIRCUMSTANCES).index(name) * 5 % len(legal)]
    m, n, k = blocks(config)
    check_in_turn(circumstance(name, (m - 8, n + 8, 4 * k + 3)), config, 3, kernel)


@pytest.mark.few
@pytest.mark.parametrize(
    ("name", "tile"),
    [
        pytest.param(name, tile, id=f"{name}-{tile}")
        for name in OTHERS_IN_TURN
        for tile in ((128, 128), (128, 96), (64, 16))
        if (name, tile) != ("fp8-blocks", (128, 96))  # which is wider than half a block, and no half of one
    ],
)
def test_other_sums_in_turn(kernel: SimpleNamespace, name: str, tile: tuple[int, int]) -> None:
    """Of promoted sums both they and their parts are added."""
    case, itemsize = OTHERS_IN_TURN[name], 2 if "bf16" in name else 1 if "fp8" in name else 4
    dtype = {1: torch.int8, 2: torch.bfloat16, 4: torch.float32}[itemsize]
    found = [c for c in warp_specialised.configs(dtype) if tile == (c.BLOCK_M, c.BLOCK_N) and legal_in_turn(case, c)]
    m, n, k = blocks(found[-1])
    check_in_turn(replace(case, size=(m - 16, n + 16, 4 * k + 16)), found[-1], 3, kernel)


def test_whoever_adds_parts_gives_the_same_bits(kernel: SimpleNamespace) -> None:
    """A program, owners, a second launch; and one sum gives others."""
    config = of_tile(64, 64, 128)
    case = Case((100, 136, 1500), "ntn", alpha=0.3, bias="n", out_dtype=torch.float32)
    operands, tiles = Operands(case, CPU), config.tiles(100, 136)
    in_turn, shared, second, whole = (
        summed(operands, config, schedule, kernel)
        for schedule in (Schedule(2, split_k=5), Schedule(5 * tiles, tiles, 5), reduced(case, config, 5), Schedule(2))
    )
    assert torch.equal(in_turn, shared) and torch.equal(in_turn, second) and not torch.equal(in_turn, whole)


def test_a_message_names_what_has_no_parts_in_turn() -> None:
    in_turn = Schedule(1, split_k=2)

    def why(case: Case, config: TileConfig, **change: object) -> str | None:
        return warp_specialised.illegal(replace(readable(case), **change), HOPPER, config, in_turn)

    large, small = of_tile(128, 256), of_tile(64, 16)
    integers = Case((64, 64, 64), "ntn", pad=16, dtype=torch.int8, out_dtype=torch.int32)
    few = "leave a thread too few registers for sums of pieces"
    assert why(PLAIN, small) is None
    assert why(PLAIN, large) == f"128 accumulators {few}"
    assert why(integers, small) == "no group's sums, and no integers, have parts in turn"
    assert why(PLAIN, small, groups="m") == "no group's sums, and no integers, have parts in turn"
    planes = of_tile(128, 160)
    assert why(PLAIN, planes) is None and why(OTHERS_IN_TURN["bf16x6"], planes) == f"80 accumulators {few}"
