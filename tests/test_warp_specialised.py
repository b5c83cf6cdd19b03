"""What the warp-specialised kernel computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests import planted
from tests.cases import CIRCUMSTANCES, Case, Operands, blocks, circumstance, ids, of_bytes, splits, wholes
from tests.gluon_on_cpu import run, simulated, to_tf32
from tests.groups import assert_right
from triton_gemm.arithmetic import EMULATED, Planes
from triton_gemm.config import TileConfig
from triton_gemm.device import device_of_capability
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem

CPU = torch.device("cpu")
HOPPER = device_of_capability((9, 0))
CONFIGS = warp_specialised.CONFIGS
ORDERS = ("nn", "nt", "tn", "tt")


@dataclass
class Simulation:
    """The kernel in one configuration and schedule, in a plan's place."""

    problem: GemmProblem
    config: TileConfig
    schedule: Schedule
    module: SimpleNamespace

    def run(self, a: Tensor, b: Tensor, c: Tensor, auxiliary: tuple[Tensor, ...], alpha: float, beta: float) -> None:
        problem, planes = self.problem, self.problem.planes
        if planes.count > 1:
            problem = repacked(problem, ("a", "b"))
            a, b = split(a, planes, problem.a.strides[1]), split(b.mT, planes, problem.b.strides[2])
        (launch,) = self.module.launches(problem, self.config, self.schedule)
        counters = torch.zeros(launch.counters, dtype=torch.int32)
        operands = {"a": a, "b": b, "c": c, "counters": counters}
        operands |= zip(problem.auxiliary, auxiliary, strict=True)
        operands["workspace"] = torch.full((launch.workspace // 4,), torch.nan)
        run(launch.programmatic(), operands, {"alpha": alpha, "beta": beta})
        assert not counters.any(), "counters are not zero afterwards"


def split(x: torch.Tensor, planes: Planes, pitch: int) -> torch.Tensor:
    """x [(batch,) rows, columns] as [(batch,) count, rows, pitch]."""
    pieces = torch.full((*x.shape[:-2], planes.count, x.shape[-2], pitch), torch.nan, dtype=planes.dtype)
    for i in range(planes.count):
        piece = to_tf32(x) if planes.dtype == torch.float32 else x.to(planes.dtype)
        pieces[..., i, :, : x.shape[-1]] = piece
        x = x - piece
    return pieces


@pytest.fixture(scope="module")
def kernel() -> SimpleNamespace:
    return simulated("warp_specialised")


def check(case: Case, config: TileConfig, schedule: Schedule, module: SimpleNamespace, times: int = 1) -> None:
    operands = Operands(case, CPU)
    operands.check(Simulation(operands.problem, config, schedule, module), schedule.split_k, times)


@pytest.mark.few
@pytest.mark.parametrize(
    ("schedules", "config"),
    [
        pytest.param(schedules, config, id=f"{schedules.__name__}-{ids(config)}")
        for schedules in (wholes, splits)
        for config in CONFIGS
        if schedules is wholes or warp_specialised.can_split_k(config)
    ],
)
def test_every_config_and_schedule(kernel: SimpleNamespace, schedules, config: TileConfig) -> None:
    """Layouts in turn; all but the sizes that fill a GPU."""
    turn = CONFIGS.index(config)
    for i, (size, schedule) in enumerate(schedules(config, HOPPER.num_sms)[:-1]):
        orders = ORDERS[(turn + i) % 4] + "n"
        check(Case(size, orders, integers=True), config, schedule, kernel, times=2)
        check(Case(size, orders), config, schedule, kernel)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance(kernel: SimpleNamespace, name: str) -> None:
    """In a few configurations in turn, whole and split."""
    turn = list(CIRCUMSTANCES).index(name)
    probe = Operands(circumstance(name, (64, 64, 64)), CPU).problem
    legal = [config for config in CONFIGS if warp_specialised.illegal(probe, HOPPER, config) is None]
    for config in (legal[turn % len(legal)], legal[(turn * 5 + 3) % len(legal)]):
        m, n, k = blocks(config)
        case = circumstance(name, (m + 8, 2 * n + 8, 6 * k + 3))
        tiles = (case.batch or 1) * 2 * 3
        check(case, config, Schedule(min(tiles, 5)), kernel)
        if warp_specialised.can_split_k(config):
            check(case, config, Schedule(3 * (tiles - 1), tiles - 1, split_k=3, group_m=2), kernel)


@pytest.mark.parametrize("seed", range(4))
def test_random_problems_in_what_the_cost_model_compares(kernel: SimpleNamespace, seed: int) -> None:
    chance = random.Random(seed)
    for _ in range(4):
        size = tuple(chance.choice([1, 8, 40, 200, 500]) + chance.randint(0, 70) for _ in range(3))
        size = (size[0], -(-size[1] // 8) * 8, size[2])
        operands = Operands(Case(size, chance.choice(ORDERS) + "n"), CPU)
        found = [
            (config, schedule)
            for config in CONFIGS
            if warp_specialised.illegal(operands.problem, HOPPER, config) is None
            for schedule in warp_specialised.schedules(operands.problem, config, HOPPER)
        ]
        for config, schedule in chance.sample(found, min(4, len(found))):
            operands.check(Simulation(operands.problem, config, schedule, kernel), schedule.split_k)


FP32 = warp_specialised.configs(torch.float32)


def of_tf32(orders: str, config: TileConfig) -> Case:
    m, n, k = blocks(config)
    how = {"dtype": torch.float32, "precision": "tf32"}
    return Case((m + 9, 2 * n + 8, 5 * k + 4), orders, integers=orders == "ntn", **how)


@pytest.mark.few
@pytest.mark.parametrize(
    ("orders", "config"),
    [
        pytest.param(orders, config, id=f"{orders}-{ids(config)}")
        for orders in ("ntn", "ttn", "ntt")
        for config in FP32
        if warp_specialised.illegal(Operands(of_tf32(orders, config), CPU).problem, HOPPER, config) is None
    ],
)
def test_tf32(kernel: SimpleNamespace, orders: str, config: TileConfig) -> None:
    """Operands along K, and A across it; C both ways round."""
    case = of_tf32(orders, config)
    check(case, config, Schedule(4), kernel, times=2)
    if warp_specialised.can_split_k(config):
        check(case, config, Schedule(9, split_tiles=3, split_k=3), kernel)


@pytest.mark.few
@pytest.mark.parametrize("precision", EMULATED)
@pytest.mark.parametrize("turn", range(4))
def test_planes(kernel: SimpleNamespace, turn: int, precision: str) -> None:
    """A few configurations, whole, split anywhere among the terms, and a batch."""
    planes = EMULATED[precision]
    probe = Operands(Case((64, 64, 64), "nnn", dtype=torch.float32, precision=precision), CPU).problem
    configs = warp_specialised.configs(planes.dtype)
    probe = repacked(probe, ("a", "b"))
    legal = [config for config in configs if warp_specialised.illegal(probe, HOPPER, config) is None]
    config = legal[(turn * 5 + list(EMULATED).index(precision)) % len(legal)]
    m, n, k = blocks(config)
    case = Case((m + 9, n + 8, 5 * k + 3), ORDERS[turn] + "n", dtype=torch.float32, precision=precision)
    check(case, config, Schedule(3), kernel, times=2)
    if warp_specialised.can_split_k(config):
        check(case, config, Schedule(20, split_tiles=4, split_k=5), kernel)
    check(replace(case, batch=2), config, Schedule(5), kernel)


@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_groups(kernel: SimpleNamespace, config: TileConfig) -> None:
    """Groups of rows that are empty, end inside of tiles, and end before the matrix does, listed by the CPU."""
    m, n, k = blocks(config)
    ends = [0, m + 5, m + 5, 2 * m + 9]
    a, b = torch.randn(3 * m, 3 * k).bfloat16(), torch.randn(len(ends), n + 16, 3 * k).bfloat16().mT
    c = torch.full((3 * m, n + 16), torch.nan, dtype=torch.bfloat16)
    problem = GemmProblem.of(a, b, c, groups="m")
    if warp_specialised.illegal(problem, HOPPER, config) is not None:
        return
    _, launch = kernel.launches(problem, config, Schedule(3))
    groups = [*zip([0, *ends], [*ends, len(a)], strict=True)]
    tiles = [
        (group, row, column, end)
        for group, (begin, end) in enumerate(groups)
        for row in range(begin, end, m)
        for column in range(2)
    ]
    table = torch.tensor([(len(tiles), len(ends), 0, 0), *tiles], dtype=torch.int32)
    run(launch.programmatic(), {"a": a, "b": b, "c": c, "tiles": table}, {"alpha": 1.0, "beta": 0.0})
    assert_right(a, b, torch.tensor(ends), c)


BYTES = warp_specialised.configs(torch.int8)


@pytest.mark.parametrize("config", BYTES, ids=ids)
def test_bytes(kernel: SimpleNamespace, config: TileConfig) -> None:
    for case in of_bytes(config, BYTES.index(config)):
        if warp_specialised.illegal(Operands(case, CPU).problem, HOPPER, config) is not None:
            continue
        check(case, config, Schedule(4), kernel)
        if warp_specialised.can_split_k(config):
            check(case, config, Schedule(9, split_tiles=3, split_k=3), kernel)


def test_all_configurations_that_leave_room_for_pieces_are_legal() -> None:
    legal = {}
    for precision, planes in EMULATED.items():
        problem = GemmProblem.of(*(torch.empty(512, 512, device="meta"),) * 3, precision=precision)
        problem = repacked(problem, ("a", "b"))
        found = [c for c in warp_specialised.configs(planes.dtype) if not warp_specialised.illegal(problem, HOPPER, c)]
        legal[precision] = [(c.BLOCK_M, c.BLOCK_N) for c in found]
    assert all((128, 192) in tiles and (128, 256) not in tiles for tiles in legal.values())


# --- Planted bugs ---

BUGS: dict[str, tuple[tuple[str, str], ...]] = {
    "loads-into-full-slots": (("            mbarrier.wait(ring.empty.index(slot), phase)\n", ""),),
    "multiplies-what-has-not-come": (("    mbarrier.wait(ring.full.index(slot), phase)\n", ""),),
    "frees-a-slot-that-is-read": (("kt > k_begin, config)", "True, config)"),),
    "frees-the-slot-of-this-step": (("previous_slot(slot, config), kt", "slot, kt"),),
    "waits-for-one-product-less": (("wait_for_products(acc, tail, IN_FLIGHT,", "wait_for_products(acc, tail, 2,"),),
    "never-frees-the-last-slot": (("item.k_end > item.k_begin, config)", "False, config)"),),
    "starts-in-the-wrong-phase": (("phase = 1  #", "phase = 0  #"),),
    "announces-too-few-bytes": (("config.CONSUMERS * a_desc.block_type.nbytes +", "a_desc.block_type.nbytes +"),),
    "phase-does-not-turn": (("phase ^ wrapped.to(gl.int32)", "phase"),),
    "stores-from-a-buffer-in-use": (("            tma.store_wait(BUFFERS - 1)", "            pass #"),),
    "next-tile-starts-in-the-same-buffer": (
        ("            count += EPI_TILES\n", "            count += EPI_TILES - EPI_TILES\n"),
    ),
    "leaves-before-c-is-stored": (("        tma.store_wait(0)\n", "        pass\n"),),
    "owner-does-not-wait": (("            wait_for(counter, others)\n", "            pass\n"),),
    "owner-adds-one-part-less": (("mask=first + i < others", "mask=first + i < others - 1"),),
    "parts-share-a-block": (("((item.part - 1) * split_tiles + item.tile_id)", "item.tile_id"),),
    "consumers-share-a-block": (
        ("block = item.tile_id * config.CONSUMERS + CONSUMER", "block = item.tile_id * config.CONSUMERS"),
    ),
    "rows-of-the-other-consumer": (("row = item.m + w * ROWS", "row = item.m"),),
    "groups-of-the-wrong-height": (("tl.minimum(num_m - group * group_m, group_m)", "group_m"),),
    "epilogue-tiles-at-the-same-place": (("m, n + p * EPI_N, rows_end", "m, n, rows_end"),),
    "batch-ignored-in-b": (("batch_b = item.batch * inputs.b_batches", "batch_b = item.batch * 0"),),
    "counter-is-left": (("    tl.store(counter_ptr, 0)\n", "    pass\n"),),
    "k-in-overlapping-parts": (
        ("k_end = (part + 1) * k_tiles // split_k", "k_end = (part + 1) * k_tiles // split_k + 1"),
    ),
}

BUGS_OF_PLANES: dict[str, tuple[tuple[str, str], ...]] = {
    "k-runs-on": (("k = step // config.TERMS", "k = step"),),
    "one-plane-for-all": (("batch_a += ", "batch_a += 0 * "),),
    "planes-of-a-for-b": (("gl.to_tensor(config.B_PLANES)", "gl.to_tensor(config.A_PLANES)"),),
    "a-k-tile-replaces-the-sum": (("return acc + more\n", "return more\n"),),
    "a-term-is-left-out": (("multiply(ring, 0, config.TERMS, slot", "multiply(ring, 0, config.TERMS - 1, slot"),),
    "frees-no-slot-after-a-k-tile": (("            free_slot(ring, used, True, config)\n", ""),),
}


@planted.with_each(BUGS_OF_PLANES)
def test_planted_bugs_of_planes_are_caught(bug: str) -> None:
    broken = simulated("warp_specialised", BUGS_OF_PLANES.get(bug, ()))
    config = next(c for c in CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 128))
    case = Case((70, 72, 1050), "ntn", dtype=torch.float32, precision="bf16x6")
    with planted.caught(bug):
        check(case, config, Schedule(2), broken)


BUGS_OF_BYTES: dict[str, tuple[tuple[str, str], ...]] = {
    "scales-of-the-other-consumer": (("CONSUMER * ROWS, acc", "0, acc"),),
    "does-not-wait-for-scales": (("                async_copy.mbarrier_arrive(full, increment_count=False)\n", ""),),
    "scales-of-the-first-k-tile": (("kt.to(gl.int64) * inputs.M + rows", "rows"),),
    "scales-of-the-k-tile-before": (("load_factors(ring, used,", "load_factors(ring, previous_slot(used, config),"),),
    "columns-of-one-block": (("gl.where(n % 128 == 0, left, right)", "left"),),
    "the-tail-has-the-scales-of-the-main": (("gl.convert_layout(right,", "gl.convert_layout(left,"),),
    "sums-go-through-fp32": (("sums.to(gl.float32, bitcast=True)", "sums.to(gl.float32)"),),
    "adds-what-is-under-way": (("warpgroup_mma_wait(1, deps=(more, more_tail))", "(more, more_tail)"),),
    "adds-the-tail-that-is-under-way": (("more_tail = warpgroup_mma_wait(0, deps=(more_tail,))", "pass"),),
    "leaves-the-tail-out": (("tail = promote(tail, more_tail, n, factors, True, config)", "pass"),),
}


@planted.with_each(BUGS_OF_BYTES)
def test_planted_bugs_of_bytes_are_caught(bug: str) -> None:
    broken = simulated("warp_specialised", BUGS_OF_BYTES.get(bug, ()))
    config = next(c for c in BYTES if (c.BLOCK_M, c.BLOCK_N) == (128, 192))
    with planted.caught(bug):
        for case in of_bytes(config, 0):
            check(case, config, Schedule(9, split_tiles=3, split_k=3), broken)


BUGS_OF_BETA: dict[str, tuple[tuple[str, str], ...]] = {
    "does-not-wait-for-c": (
        ("            mbarrier.wait(staging.loaded.index(count % BUFFERS), count // BUFFERS & 1)\n", ""),
    ),
    "waits-for-the-round-before": (("count // BUFFERS & 1", "count // BUFFERS + 1 & 1"),),
    "first-loads-into-buffers-in-use": (("    tma.store_wait(0)\n    for p", "    for p"),),
    "next-loads-into-buffers-in-use": (("                tma.store_wait(1)\n", ""),),
    "next-loads-into-this-buffer": (("count + BUFFERS - 1, batch", "count + BUFFERS, batch"),),
    "next-loads-of-other-columns": (("n + (BUFFERS - 1) * config", "n + BUFFERS * config"),),
    "one-epilogue-tile-is-not-loaded": (("p - 1 + BUFFERS < EPI_TILES", "p + BUFFERS < EPI_TILES"),),
    "who-shares-loads-too": (
        (
            "            if owned:\n                load_f",
            "            if True:\n                load_f",
        ),
    ),
}


@planted.with_each(BUGS_OF_BETA)
def test_planted_bugs_of_beta_are_caught(bug: str) -> None:
    """In eight epilogue tiles through four buffers."""
    broken = simulated("warp_specialised", BUGS_OF_BETA.get(bug, ()))
    config = next(c for c in CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 256))
    with planted.caught(bug):
        for schedule in (Schedule(3, group_m=2), Schedule(6, split_tiles=2, split_k=3, group_m=2)):
            check(Case((330, 520, 400), "nnn", beta=0.5), config, schedule, broken)


@planted.with_each(BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    """By one of two configurations: with four epilogue tiles and four buffers, or one and two."""
    broken = simulated("warp_specialised", BUGS.get(bug, ()))
    with planted.caught(bug):
        for tile in ((128, 256), (128, 64)):
            config = next(c for c in CONFIGS if tile == (c.BLOCK_M, c.BLOCK_N))
            tiles = 2 * 3 * (3 if tile[1] == 256 else 9)
            for schedule in (Schedule(3, group_m=2), Schedule(3 * tiles, tiles, split_k=3, group_m=2)):
                check(Case((330, 520, 700), "nnn", batch=2), config, schedule, broken)
