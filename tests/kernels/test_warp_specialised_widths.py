"""The warp-specialised kernel in tiles of any width, and of few rows, without a GPU."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_cases import Case, Operands, ids
from tests.support.simulated_plans import CPU, check, readable, summed
from tests.support.table_fakes import HOPPER
from tests.support.tiles_on_cpu import CONFIGS, OF_FEW, OTHERS_IN_TURN, WIDE, in_form, of_cluster, of_few, of_width
from triton_gemm.config import TileConfig
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem

# --- Tiles of any width ---

ORDERS_OF_WIDTHS = ("ntn", "ttn", "ntt")
OF_WIDTHS = {
    "bias-m": {"bias": "m"},
    "bias-n": {"bias": "n", "alpha": 0.25},
    **{name: {"activation": name, "alpha": 0.25} for name in ACTIVATIONS},
    "float32": {"out_dtype": torch.float32},
    "float16": {"dtype": torch.float16},
    "batch": {"batch": 3},
    "batch-between": {"batch": 2, "between": True, "bias": "m"},
    "batch-of-one-a": {"batch": 3, "shared": True},
    "everything": {"bias": "n", "activation": "gelu", "alpha": -0.5, "dtype": torch.float16, "batch": 2},
}


def check_wide(case: Case, config: TileConfig, schedule: Schedule, module: SimpleNamespace, times: int = 1) -> None:
    """`check`, where one `wgmma` must span the tile."""
    problem = Operands(case, CPU).problem
    assert module.illegal(problem, HOPPER, config, schedule) is None
    (launch,) = module.launches(problem, config, schedule)
    assert launch.arguments["WIDE_MMA"]
    check(case, config, schedule, module, times)


def heights_and_forms(config: TileConfig, orders: str) -> set[Hashable]:
    """What the fast tier shows."""
    return {config.BLOCK_M, orders, (config.CLUSTER_M, config.CLUSTER_N), (config.BLOCK_K, orders)}


@pytest.mark.few(shows=heights_and_forms)
@pytest.mark.parametrize("orders", ORDERS_OF_WIDTHS)
@pytest.mark.parametrize("config", WIDE, ids=ids)
def test_every_width(kernel: SimpleNamespace, config: TileConfig, orders: str) -> None:
    """C ends inside of the last, narrow epilogue tile of its last tile; programs have several tiles; tiles are cut
    along K."""
    m, n, k = of_cluster(config)
    ends = 8 if orders[2] == "n" else 3
    check_wide(Case((m + 8, 2 * n - ends, 3 * k + 8), orders, integers=True), config, Schedule(2), kernel, times=2)
    check_wide(Case((m - 8, n + 8, 5 * k + 3), orders), config, Schedule(1, group_m=2), kernel)
    if warp_specialised.can_split_k(config):
        check_wide(Case((m + 8, n - 8, 7 * k), orders), config, Schedule(6, split_tiles=2, split_k=3), kernel)


@pytest.mark.few
@pytest.mark.parametrize("name", OF_WIDTHS)
@pytest.mark.parametrize("orders", ORDERS_OF_WIDTHS)
def test_every_circumstance_of_widths(kernel: SimpleNamespace, orders: str, name: str) -> None:
    """In one configuration in turn, whole and split; C's rows end inside of a narrow epilogue tile."""
    turn = list(OF_WIDTHS).index(name) + 5 * ORDERS_OF_WIDTHS.index(orders)
    probe = Operands(Case((64, 64, 64), orders, **OF_WIDTHS[name]), CPU).problem
    small = [config for config in WIDE if config.ctas <= 2 and warp_specialised.can_split_k(config)]
    legal = [config for config in small if kernel.illegal(probe, HOPPER, config) is None]
    config = legal[turn * 3 % len(legal)]
    m, n, k = of_cluster(config)
    end = 4 if OF_WIDTHS[name].get("out_dtype") == torch.float32 else 8
    case = Case((m - 8, n + config.BLOCK_N - end, 4 * k + 3), orders, **OF_WIDTHS[name])
    tiles = (case.batch or 1) * 2
    check_wide(case, config, Schedule(tiles - 1), kernel)
    check_wide(case, config, Schedule(2 * tiles, tiles, split_k=2, group_m=2), kernel)


@pytest.mark.few(shows=lambda config, split: {split})
@pytest.mark.parametrize("split", [False, True], ids=["whole", "split"])
@pytest.mark.parametrize("config", [c for c in WIDE if warp_specialised.can_split_k(c)][::4], ids=ids)
def test_bits_do_not_depend_on_the_width(kernel: SimpleNamespace, config: TileConfig, split: bool) -> None:
    """They are those of tiles 128 wide, epilogues included. (Products are of whole numbers, as here those of one k-tile
    are summed at once in these.)"""
    operands = Operands(Case((264, 520, 448), "ntn", bias="n", activation="gelu", alpha=0.003, integers=True), CPU)
    results = []
    for one in (config, in_form((128, 128), (1, 1))):
        tiles = one.tiles(264, 520)
        results.append(summed(operands, one, Schedule(3 * tiles, tiles, 3) if split else Schedule(2), kernel))
    assert torch.equal(*results)


NO_WIDTHS = {
    "beta": Case((64, 64, 64), "ntn", beta=0.5),
    "pointers-to-c": Case((64, 64, 64), "ntn", gap=1),
    "b-across": Case((64, 64, 64), "nnn"),
    "fp32": Case((64, 64, 64), "ntn", dtype=torch.float32, precision="tf32"),
    "planes": Case((64, 64, 64), "ntn", dtype=torch.float32, precision="bf16x3"),
}


WIDE_EPILOGUES = [config for config in CONFIGS if config.BLOCK_N == 256]


@pytest.mark.parametrize("config", WIDE_EPILOGUES, ids=ids)
@pytest.mark.parametrize("bias", ["m", "n"])
def test_each_epilogue_tile_has_its_own_bias(kernel: SimpleNamespace, config: TileConfig, bias: str) -> None:
    """Where it is loaded before the last products are done, and the epilogue, with its activation, is a loop."""
    case = Case((config.BLOCK_M + 8, config.BLOCK_N + 8, 2 * config.BLOCK_K), "ntn", bias=bias, activation="gelu")
    assert warp_specialised.host.early_bias(Operands(case, CPU).problem, config)
    check(case, config, Schedule(2), kernel)


@pytest.mark.parametrize("name", NO_WIDTHS)
def test_a_message_names_what_no_wgmma_spans(kernel: SimpleNamespace, name: str) -> None:
    """Of such products the width is the sum of two powers of two."""
    problem = readable(NO_WIDTHS[name])
    k = 128 // problem.dtype.itemsize
    why = kernel.illegal(problem, HOPPER, replace(of_width(64, 88), BLOCK_K=k))
    assert why == "tiles 88 wide need one wgmma, as Triton 3.9 has it for K-major operands of 16 bits"
    assert kernel.illegal(problem, HOPPER, replace(of_width(64, 96), BLOCK_K=k)) is None


# --- Few rows, of which no more are copied ---

FEW_SIZES = (1, 7, 8, 9, 16, 17, 31, 33, 48)


def case_of_few(operand: str, few: int, config: TileConfig, orders: str, **how: object) -> Case:
    """Two tiles along what is not few."""
    m, n, k = of_cluster(config)
    return Case((few, 2 * n - 8, 5 * k + 8) if operand == "a" else (2 * m - 8, few, 5 * k + 8), orders, **how)


def rows_copied(kernel: SimpleNamespace, problem: GemmProblem, config: TileConfig) -> tuple[int, int]:
    (launch,) = kernel.launches(problem, config, Schedule(1))
    return launch.arguments["A_COPIED"], launch.arguments["B_COPIED"]


@pytest.mark.few(shows=lambda operand, tile, few: {(operand, few), tile})
@pytest.mark.parametrize("few", FEW_SIZES)
@pytest.mark.parametrize(("operand", "tile"), [(x, tile) for x, tiles in OF_FEW.items() for tile in tiles])
def test_few_rows_are_copied_alone(kernel: SimpleNamespace, operand: str, tile: tuple[int, int, int], few: int) -> None:
    """At most 15 rows beyond the matrix are copied; the tile's other rows, NaN here, reach no result. Whole and cut
    along K, in a batch, with a bias."""
    config = of_few(tile)
    for how in ({}, {"batch": 2, "bias": "n", "activation": "gelu"}):
        # C's rows are whole vectors of 16 bytes, or it is stored past TMA.
        case = case_of_few(operand, few, config, "ntn" if operand == "a" else "ntt", **how)
        problem = Operands(case, CPU).problem
        rows = rows_copied(kernel, problem, config)["ab".index(operand)]
        side = tile["ab".index(operand)]
        assert few <= rows < few + 16 <= side + 16 if rows else few > side - 16
        tiles = 2 * (case.batch or 1)
        check(case, config, Schedule(tiles - 1), kernel)
        check(case, config, Schedule(3 * tiles, tiles, split_k=3), kernel)


@pytest.mark.parametrize("form", [(1, 4), (2, 2), (4, 1)], ids=str)
@pytest.mark.parametrize("operand", OF_FEW)
def test_few_rows_in_clusters(kernel: SimpleNamespace, operand: str, form: tuple[int, int]) -> None:
    """Of 8 rows one CTA loads all, for those that share them; of 33 each loads a slice of 48."""
    config = of_few(OF_FEW[operand][-1], form) if operand == "b" else of_few((64, 64, 128), form)
    for few in (3, 33):
        check(case_of_few(operand, few, config, "ntn" if operand == "a" else "ntt"), config, Schedule(1), kernel)


@pytest.mark.parametrize("orders", ["tnn", "nnn", "ttn"])
def test_what_does_not_lie_along_k_is_copied_whole(kernel: SimpleNamespace, orders: str) -> None:
    """Its rows in shared memory are along K."""
    problem = Operands(Case((24, 24, 256), orders), CPU).problem
    config = warp_specialised.Config(64, 64, 64, 4, 3)
    assert rows_copied(kernel, problem, config) == (0 if orders[0] == "t" else 32, 0 if orders[1] == "n" else 32)
    check(Case((24, 24, 256), orders), config, Schedule(1), kernel)


@pytest.mark.parametrize("few", [5, 20])
@pytest.mark.parametrize("name", ["beta", "pointers-to-c", "int8", *OTHERS_IN_TURN])
def test_few_rows_of_every_kind(kernel: SimpleNamespace, name: str, few: int) -> None:
    """With C's own values, past TMA, rounded to TF32, in planes, promoted, and with scales; as rows and as columns."""
    kinds = {
        "beta": Case((64, 64, 64), "ntn", beta=0.5),
        "pointers-to-c": Case((64, 64, 64), "ntn", gap=1),
        "int8": Case((64, 64, 64), "ntn", pad=16, dtype=torch.int8, out_dtype=torch.int32),
    }
    case = (kinds | OTHERS_IN_TURN)[name]
    probe = readable(case)
    step = min(256, probe.arithmetic.promotion or 256)  # bytes of K
    config = warp_specialised.Config(64, 64, step // probe.planes.dtype.itemsize, 4, 3)
    ran = 0
    for m, n in ((few, 120), (120, few)):
        sized = replace(case, size=(m, n, 5 * config.BLOCK_K + 16))
        problem = readable(sized)
        if warp_specialised.illegal(problem, HOPPER, config) is None:
            along_k = not problem.a.column_major if m == few else problem.b.column_major
            assert max(rows_copied(kernel, problem, config)) == ((8 if few == 5 else 32) if along_k else 0)
            check(sized, config, Schedule(1), kernel)
            ran += 1
            if warp_specialised.illegal(problem, HOPPER, config, Schedule(6, 2, 3)) is None:
                check(sized, config, Schedule(6, 2, split_k=3), kernel)
    assert ran
