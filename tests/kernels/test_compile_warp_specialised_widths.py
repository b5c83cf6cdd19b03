"""What the compiler makes of the warp-specialised kernel in clusters, in tiles of any width, and in turn."""

from __future__ import annotations

import math
import re
from collections.abc import Hashable
from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.kernels.test_compile_warp_specialised import (
    BYTE_CIRCUMSTANCES,
    CAPABILITY,
    CIRCUMSTANCES,
    CONFIGS,
    FP32_CIRCUMSTANCES,
    HOPPER,
    PARTS_IN_TURN,
    SCHEDULES,
    SPLITTING,
    M,
    N,
    accesses,
    assert_claims,
    compiled,
    in_turn,
    of,
)
from tests.support.kernel_cases import ids
from triton_gemm.compat import CLUSTERS
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout

# --- Clusters ---

CLUSTERED_CIRCUMSTANCES = {
    **{orders: of(orders + "n") for orders in ("nn", "nt", "tn", "tt")},
    **{name: CIRCUMSTANCES[name] for name in ("beta", "beta-c-odd", "bias-n", "gelu", "batch", "everything-odd")},
    **FP32_CIRCUMSTANCES,
    **BYTE_CIRCUMSTANCES,
}
OTHER_FORMS = {(4, 1): (192, 128), (1, 4): (64, 64), (8, 1): (64, 64), (1, 8): (64, 64)}


def clustered_cases() -> list[Any]:
    """Every circumstance in a third of its configurations; of other forms one with three consumers and small ones."""
    found = []
    for turn, (name, problem) in enumerate(CLUSTERED_CIRCUMSTANCES.items()):
        configs = warp_specialised.configs(problem.planes.dtype, clusters=True)
        possible = [config for config in configs if alone_illegal(problem, config) is None]
        found += [(name, config) for config in possible[turn % 3 :: 3]]
    for form, tile in OTHER_FORMS.items():
        config = next(config for config in CONFIGS if tile == (config.BLOCK_M, config.BLOCK_N))
        found.append(("nn", replace(config, CLUSTER_M=form[0], CLUSTER_N=form[1])))
    return [pytest.param(name, config, id=f"{name}-{ids(config)}") for name, config in found]


def alone_illegal(problem: GemmProblem, config: TileConfig) -> str | None:
    """Why the configuration is illegal even without clusters, which not every Triton has."""
    return warp_specialised.illegal(problem, HOPPER, replace(config, CLUSTER_M=1, CLUSTER_N=1))


def every_form(name: str, config: TileConfig) -> set[Hashable]:
    """The fast tier compiles every form and every arithmetic."""
    return {(config.CLUSTER_M, config.CLUSTER_N), CLUSTERED_CIRCUMSTANCES[name].precision}


@pytest.mark.skipif(not CLUSTERS, reason="clusters need Triton 3.9 or newer")
@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize(("name", "config"), clustered_cases())
def test_every_cluster(name: str, config: TileConfig) -> None:
    """Loads are multicast, barriers of other CTAs are reached, and nothing waits for the whole GPU's memory."""
    problem = CLUSTERED_CIRCUMSTANCES[name]
    assert warp_specialised.illegal(problem, HOPPER, config) is None
    turn = config.CLUSTER_M + list(CLUSTERED_CIRCUMSTANCES).index(name)
    kernel = compiled(problem, config, in_turn(config, turn))
    multicast = kernel.asm["sass"].count("UTMALDG.3D.MULTICAST")
    (launch,) = warp_specialised.launches(problem, config, SCHEDULES["whole"])
    tiles = [launch.arguments[name] for name in ("a_desc", "b_desc", "b_tail_desc")]
    a, b, b_tail = (math.ceil(x.block[2] * x.dtype.itemsize / 128) for x in tiles)  # panels
    consumers, two = config.num_warps // 4, config.tail_n and not launch.arguments["WIDE_MMA"]
    wanted = (config.CLUSTER_N > 1) * consumers * a + (config.CLUSTER_M > 1) * (b + (b_tail if two else 0))
    assert multicast == wanted
    # Both idle partitions are the same code.
    assert kernel.asm["sass"].count("UCGABAR_WAIT") == consumers + 2, (
        "each partition joins the cluster, and that is all"
    )
    assert "MEMBAR.ALL.GPU" not in kernel.asm["sass"] or in_turn(config, turn) == "split"


# --- Tiles of any width ---

WIDTHS = {
    64: {24: (1, 1), 40: (1, 1), 72: (4, 2), 104: (2, 1), 136: (2, 2), 168: (2, 4), 200: (1, 1), 248: (2, 1)},
    128: {72: (1, 1), 88: (2, 1), 120: (1, 2), 152: (2, 2), 168: (2, 1), 200: (1, 1), 232: (2, 1), 248: (1, 2)},
    192: {72: (1, 1), 120: (2, 1), 136: (1, 2), 184: (1, 1)},
    256: {80: (1, 1), 120: (2, 1), 136: (2, 2), 152: (1, 1), 176: (2, 1), 184: (1, 1)},
}
WIDE_CIRCUMSTANCES = {
    **{orders: of(orders) for orders in ("ntn", "ttn", "ntt")},
    "bias-m": of("ttn", bias="m"),
    "bias-n": of("ntn", bias="n"),
    "gelu": of("ntn", activation="gelu"),
    "float32": of("ntn", out_dtype=torch.float32),
    "float16": of("ttt", dtype=torch.float16, batch=3),
    "everything": of("ntn", bias="n", activation="gelu_tanh", out_dtype=torch.float32),
}


DEEP = ((64, 48, (1, 1)), (64, 88, (1, 1)), (64, 120, (1, 1)))  # of k-tiles 128 deep


def with_deepest_ring(m: int, n: int, form: tuple[int, int], out_itemsize: int, k: int = 64) -> TileConfig:
    found = [warp_specialised.Config(m, n, k, 8 if m == 256 else m // 16, stages, *form) for stages in range(2, 13)]
    return [c for c in found if warp_specialised.host.wide_memory(c, out_itemsize) <= SHARED_MEMORY[CAPABILITY]][-1]


def wide_cases() -> list[Any]:
    """Every circumstance in a third of all widths, and in those that leave a thread the fewest registers."""
    found = []
    for turn, (name, problem) in enumerate(WIDE_CIRCUMSTANCES.items()):
        itemsize = problem.out_dtype.itemsize
        tiles = [(m, n, form) for m, widths in WIDTHS.items() for n, form in widths.items()]
        configs = [with_deepest_ring(*tile, itemsize) for tile in tiles]
        configs += [with_deepest_ring(*tile, itemsize, 128) for tile in DEEP]
        found += [
            pytest.param(name, config, id=f"{name}-{ids(config)}")
            for i, config in enumerate(configs)
            if i % 3 == turn % 3 or (config.BLOCK_M >= 192 and config.BLOCK_N == 184)
        ]
    return found


def every_height(name: str, config: TileConfig) -> set[Hashable]:
    """The fast tier compiles every circumstance and every height, with the most accumulators."""
    return {name, config.BLOCK_M, config.BLOCK_K, ("accumulators", config.BLOCK_M, config.accumulators() >= 96)}


@pytest.mark.skipif(not CLUSTERS, reason="wide products need Triton 3.9 or newer")
@pytest.mark.few(shows=every_height)
@pytest.mark.parametrize(("name", "config"), wide_cases())
def test_every_width(name: str, config: TileConfig) -> None:
    """One `wgmma` of that width for 16 of K and 64 rows, and none waits for the one before; whole and split in turn."""
    problem = WIDE_CIRCUMSTANCES[name]
    assert warp_specialised.illegal(problem, HOPPER, config) is None
    schedule = in_turn(config, list(WIDE_CIRCUMSTANCES).index(name) + config.BLOCK_N // 8)
    kernel = compiled(problem, config, schedule)
    assert_claims(kernel, problem, schedule)
    products = re.findall(r"HGMMA\.(\w+)", kernel.asm["sass"])
    assert products == [f"64x{config.BLOCK_N}x16"] * (config.BLOCK_M // 64 * config.BLOCK_K // 16)
    waits = re.findall(r"WARPGROUP\.DEPBAR", kernel.asm["sass"])
    assert len(waits) == 2 * config.num_warps // 4, "a product waits for the one before"


# --- Few rows ---

OF_FEW = {
    "bf16": (of("ntn"), (64, 48, 128, 7), (5, N)),
    "bf16-columns": (of("ntt"), (64, 16, 128, 8), (M, 5)),
    "split": (of("ntn", out_dtype=torch.float32), (64, 64, 128, 6), (33, N)),
    "tf32": (of("ntn", dtype=torch.float32, precision="tf32"), (64, 64, 64, 6), (20, N)),
    "int8": (of("ntn", dtype=torch.int8, out_dtype=torch.int32), (64, 128, 256, 4), (9, N)),
    "fp8-blocks": (BYTE_CIRCUMSTANCES["fp8-blocks"], (64, 64, 128, 8), (20, N)),
}


@pytest.mark.skipif(not CLUSTERS, reason="all rows of a tile are copied before Triton 3.9")
@pytest.mark.parametrize("name", OF_FEW)
def test_few_rows(name: str) -> None:
    """One box fewer than a tile has rows, by PTX; it fits, and spills nothing."""
    whole, (m, n, k, stages), (rows, columns) = OF_FEW[name]
    a, b, c = whole.a.strides, whole.b.strides, whole.c.strides
    across = Layout((0, 1, rows)) if whole.c.column_major else Layout((0, columns, 1))
    problem = replace(whole, M=rows, N=columns, a=Layout(a), b=Layout(b), c=across if c[0] == 0 else whole.c)
    config = warp_specialised.Config(m, n, k, 4, stages)
    assert warp_specialised.illegal(problem, HOPPER, config) is None
    (launch,) = warp_specialised.launches(problem, config, Schedule(20))
    assert min(rows, columns) <= max(launch.arguments["A_COPIED"], launch.arguments["B_COPIED"]) < 64
    kernel = compiled(problem, config, "split" if name == "split" else Schedule(20))
    assert "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier" in kernel.asm["ptx"]


# --- Parts in turn ---

CIRCUMSTANCES_IN_TURN = {
    **{orders: of(orders + "n") for orders in ("nt", "tn")},
    **{name: CIRCUMSTANCES[name] for name in ("beta", "beta-c-odd", "bias-n", "gelu", "everything", "everything-odd")},
    **FP32_CIRCUMSTANCES,
    **{name: BYTE_CIRCUMSTANCES[name] for name in ("fp8", "fp8-blocks", "fp8-fast")},
}


def cases_in_turn() -> list[Any]:
    """Every circumstance in all legal configurations, a third of those in clusters, and widths with the most
    accumulators."""
    found = []
    for turn, (name, problem) in enumerate(CIRCUMSTANCES_IN_TURN.items()):
        configs = list(warp_specialised.configs(problem.planes.dtype))
        if CLUSTERS:
            configs += warp_specialised.configs(problem.planes.dtype, clusters=True)[turn % 3 :: 3]
            configs += [
                with_deepest_ring(*tile, 2) for tile in ((64, 184, (2, 1)), (128, 184, (1, 2)), (256, 96, (2, 1)))
            ]
        possible = [c for c in configs if warp_specialised.illegal(problem, HOPPER, c, PARTS_IN_TURN) is None]
        assert possible, "nothing is legal in turn"
        found += [pytest.param(name, config, id=f"{name}-{ids(config)}") for config in possible]
    return found


def most_sums(name: str, config: TileConfig) -> set[Hashable]:
    """What the fast tier shows: of every dtype where registers are fewest."""
    problem = CIRCUMSTANCES_IN_TURN[name]
    configs = warp_specialised.configs(problem.planes.dtype)
    legal = [c for c in configs if warp_specialised.illegal(problem, HOPPER, c, PARTS_IN_TURN) is None]
    most = config.accumulators() == max(c.accumulators() for c in legal)
    return {problem.dtype if most else "others", config.num_warps, ("cluster", config.ctas > 1)}


@pytest.mark.few(shows=most_sums)
@pytest.mark.parametrize(("name", "config"), cases_in_turn())
def test_parts_in_turn(name: str, config: TileConfig) -> None:
    """Nothing goes through memory but what the epilogue reads, and no product waits for the one before. Half of them
    have parts of two k-tiles' multiples."""
    problem = CIRCUMSTANCES_IN_TURN[name]
    kernel = compiled(problem, config, replace(PARTS_IN_TURN, unit=1 + config.BLOCK_N // 16 % 2))
    assert not SPLITTING["ld"] & accesses(kernel, "ld")
    waits = re.findall(r"WARPGROUP\.DEPBAR", kernel.asm["sass"])
    promoted = warp_specialised.promotion.promotes(problem)
    assert len(waits) <= config.num_warps // 4 * (4 if promoted else 2)
