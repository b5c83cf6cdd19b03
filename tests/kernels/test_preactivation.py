"""What kernels in Gluon store of an activation's operand, without a GPU: their source runs on the CPU."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.kernels import test_fma as of_fma
from tests.kernels import test_skinny as of_skinny
from tests.support.gluon_on_cpu import run, simulated
from tests.support.group_truth import listed_tiles
from tests.support.kernel_cases import Case, Operands, blocks, ids, reduced
from tests.support.preactivations import CPU, STORING, check, check_gated, storing
from tests.support.simulated_plans import Launched, simulation
from tests.support.table_fakes import HOPPER
from tests.support.tiles_on_cpu import of_tile
from triton_gemm.config import TileConfig
from triton_gemm.kernels import fma, skinny, warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED
from triton_gemm.problem import GATES, GemmProblem

CONFIGS = warp_specialised.CONFIGS


# Four epilogue tiles, in a loop; a tail; two consumers; what leaves room for sums of parts in turn.
TILES = (of_tile(64, 256), of_tile(64, 96), of_tile(128, 128), of_tile(64, 32))
NARROW = replace(of_tile(64, 64), BLOCK_N=88, BLOCK_K=64)  # its last columns are stored in narrow epilogue tiles


def plan_of(kernel: SimpleNamespace, config: TileConfig, schedule: Schedule) -> Callable[[GemmProblem], Launched]:
    return lambda problem: simulation(problem, config, schedule, kernel)


def schedules(case: Case, config: TileConfig) -> dict[str, Schedule]:
    tiles = (case.batch or 1) * config.tiles(*case.size[:2])
    return {
        "whole": Schedule(min(tiles, 5)),
        "split": Schedule(3 * tiles - 2, tiles - 1, split_k=3, group_m=2),
        "in turn": Schedule(2, split_k=3),
        "second launch": reduced(case, config, 4),
    }


@pytest.mark.few
@pytest.mark.parametrize("how", ["whole", "split", "in turn", "second launch"])
@pytest.mark.parametrize("name", STORING)
def test_warp_specialised(kernel: SimpleNamespace, name: str, how: str) -> None:
    """In a tile in turn, of those that are legal; C ends inside of tiles."""
    turn = list(STORING).index(name)
    case = storing(name, (72, 264, 600))
    probe = Operands(case, CPU).problem
    found = [(config, schedules(case, config)[how]) for config in TILES]
    legal = [one for one in found if kernel.illegal(probe, HOPPER, *one) is None]
    config, schedule = legal[turn % len(legal)]
    check(case, plan_of(kernel, config, schedule), schedule.split_k)


OTHER_SUMS = {
    "tf32": {"dtype": torch.float32, "precision": "tf32", "activation": "gelu"},
    "planes": {"dtype": torch.float32, "precision": "bf16x3", "activation": "silu", "bias": "n"},
    "narrow epilogue tiles": {"activation": "gelu_tanh", "bias": "n", "alpha": 0.5},
    "narrow epilogue tiles of columns": {"orders": "ntt", "activation": "relu", "bias": "m"},
}


@pytest.mark.parametrize("name", OTHER_SUMS)
def test_other_sums_of_the_warp_specialised_kernel(kernel: SimpleNamespace, name: str) -> None:
    """Of other operands, and where one `wgmma` spans a width that is no power of two; whole and split."""
    narrow = name.startswith("narrow")
    case = Case((72, 184, 600), **{"orders": "ntn", **OTHER_SUMS[name]})  # type: ignore[arg-type]
    config = NARROW if narrow else replace(of_tile(64, 64), BLOCK_K=32)
    for how in ("whole", "split"):
        schedule = schedules(case, config)[how]
        launch = kernel.launches(Operands(case, CPU).problem, config, schedule)[-1]
        assert (launch.arguments["REST_N"] > 0) == narrow or case.dtype == torch.float32
        check(case, plan_of(kernel, config, schedule), schedule.split_k)


@pytest.mark.few
@pytest.mark.parametrize("config", GATED, ids=ids)
def test_gates(kernel: SimpleNamespace, config: TileConfig) -> None:
    """C by TMA and by pointers."""
    turn = GATED.index(config)
    m, n, k = blocks(config)
    for N in (2 * n + 8, n + 1):
        check_gated(
            (m + 9, N, 3 * k + 8), list(GATES)[turn % 4], plan_of(kernel, config, Schedule(2)), biased=turn % 2 > 0
        )


@dataclass
class InGroups:
    """A plan of groups of rows. The CPU lists its tiles in reverse order, so that a store out of bounds is not
    overwritten by the next tile."""

    problem: GemmProblem
    config: TileConfig
    module: SimpleNamespace

    def run(self, a: Tensor, b: Tensor, c: Tensor, auxiliary: tuple[Tensor, ...], alpha: float, beta: float) -> None:
        *_, launch = self.module.launches(self.problem, self.config, Schedule(3))
        operands = {"a": a, "b": b, "c": c, **dict(zip(self.problem.auxiliary, auxiliary, strict=True))}
        columns = -(-c.shape[1] // self.config.BLOCK_N)
        listed = listed_tiles(operands["ends"].tolist(), len(a), self.config.BLOCK_M, columns)
        operands["tiles"] = torch.cat([listed[:1], listed[1:].flip(0)])
        run(launch.programmatic(), operands, {"alpha": alpha, "beta": beta})


def check_groups(kernel: SimpleNamespace) -> None:
    config = of_tile(64, 64, among=GATED)
    made = partial(InGroups, config=config, module=kernel)
    check_gated((150, 136, 200), "swiglu", made, ends=[0, 1, 69, 69, 133])


def test_groups_with_a_gate(kernel: SimpleNamespace) -> None:
    """Groups of rows that are empty, of one row, end inside of tiles, and end before the matrix does."""
    check_groups(kernel)


# --- Other kernels ---


@pytest.mark.few
@pytest.mark.parametrize("split_k", of_fma.SPLITS)
@pytest.mark.parametrize("name", [x for x in STORING if "float" not in x])
def test_fma(name: str, split_k: int) -> None:
    turn = list(STORING).index(name)
    config = fma.CONFIGS[turn % len(fma.CONFIGS)]
    case = storing(name, (config.BLOCK_M + 9, config.BLOCK_N + 7, 83), **of_fma.FP32)
    if case.beta and case.activation == "gelu":
        case = replace(case, activation="silu")
    kernel = simulated("fma")
    check(case, lambda problem: of_fma.simulation(problem, config, split_k, kernel, turn % 2 > 0), abs(split_k))


@pytest.mark.few
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize("name", STORING)
def test_skinny(name: str, swapped: bool) -> None:
    config = skinny.CONFIGS[list(STORING).index(name) % len(skinny.CONFIGS)]
    m, n, k = blocks(config)
    case = storing(name, (m - 3, 2 * n + 3, k + 40))
    case = replace(case, orders="nt" + case.orders[2], size=(*case.size[1::-1], case.size[2]) if swapped else case.size)
    kernel = simulated("skinny")
    check(case, lambda problem: of_skinny.simulation(problem, config, kernel, swapped))
