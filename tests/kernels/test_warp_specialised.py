"""What the warp-specialised kernel computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.gluon_on_cpu import run
from tests.support.group_truth import assert_right, listed_tiles
from tests.support.kernel_cases import (
    CIRCUMSTANCES,
    Case,
    Operands,
    blocks,
    circumstance,
    ids,
    of_bytes,
    splits,
    wholes,
)
from tests.support.simulated_plans import CPU, check, readable, simulation, summed
from tests.support.table_fakes import HOPPER
from tests.support.tiles_on_cpu import (
    CLUSTERED,
    CONFIGS,
    ORDERS,
    check_whole_and_split,
    every_form,
    in_form,
    of_cluster,
)
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.kernels import forms, warp_specialised
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.splitk import MAX_COUNTERS
from triton_gemm.problem import GemmProblem


def heights_and_schedules(schedules: Callable[..., object], config: TileConfig) -> set[Hashable]:
    """What the fast tier shows."""
    return {
        (schedules, config.BLOCK_M, config.num_warps),
        (schedules, config.tail_n > 0),
        config.BLOCK_N,
        config.BLOCK_K,
    }


@pytest.mark.few(shows=heights_and_schedules)
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
        check_whole_and_split(circumstance(name, (m + 8, 2 * n + 8, 6 * k + 3)), config, kernel)


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
            operands.check(simulation(operands.problem, config, schedule, kernel), schedule.split_k)


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
    check_whole_and_split(of_tf32(orders, config), config, kernel, times=2)


@pytest.mark.few
@pytest.mark.parametrize("precision", EMULATED)
@pytest.mark.parametrize("turn", range(4))
def test_planes(kernel: SimpleNamespace, turn: int, precision: str) -> None:
    """A few configurations, whole, split anywhere among the terms, and a batch."""
    probe = readable(Case((64, 64, 64), "nnn", dtype=torch.float32, precision=precision))
    configs = warp_specialised.configs(probe.planes.dtype)
    legal = [config for config in configs if warp_specialised.illegal(probe, HOPPER, config) is None]
    config = legal[(turn * 5 + list(EMULATED).index(precision)) % len(legal)]
    m, n, k = blocks(config)
    case = Case((m + 9, n + 8, 5 * k + 3), ORDERS[turn] + "n", dtype=torch.float32, precision=precision)
    check(case, config, Schedule(3), kernel, times=2)
    if warp_specialised.can_split_k(config):
        check(case, config, Schedule(20, split_tiles=4, split_k=5), kernel)
    check(replace(case, batch=2), config, Schedule(5), kernel)


GROUPS = replace(Operands(Case((64, 64, 64), "ntn"), CPU).problem, groups="m")


@pytest.mark.parametrize("config", [c for c in CONFIGS if warp_specialised.illegal(GROUPS, HOPPER, c) is None], ids=ids)
def test_groups(kernel: SimpleNamespace, config: TileConfig) -> None:
    """Groups of rows that are empty, end inside of tiles, and end before the matrix does, listed by the CPU."""
    m, n, k = blocks(config)
    ends = [0, m + 5, m + 5, 2 * m + 9]
    a, b = torch.randn(3 * m, 3 * k).bfloat16(), torch.randn(len(ends), n + 16, 3 * k).bfloat16().mT
    c = torch.full((3 * m, n + 16), torch.nan, dtype=torch.bfloat16)
    problem = GemmProblem.of(a, b, c, groups="m")
    _, launch = kernel.launches(problem, config, Schedule(3))
    tiles = listed_tiles(ends, len(a), m, 2)
    run(launch.programmatic(), {"a": a, "b": b, "c": c, "tiles": tiles}, {"alpha": 1.0, "beta": 0.0})
    assert_right(a, b, torch.tensor(ends), c)


BYTES = warp_specialised.configs(torch.int8)


def legal_bytes(config: TileConfig) -> list[Case]:
    cases = of_bytes(config, BYTES.index(config))
    return [case for case in cases if warp_specialised.illegal(Operands(case, CPU).problem, HOPPER, config) is None]


@pytest.mark.few(shows=lambda config: {config.BLOCK_M, ("tail", config.tail_n > 0)})
@pytest.mark.parametrize("config", [*filter(legal_bytes, BYTES)], ids=ids)
def test_bytes(kernel: SimpleNamespace, config: TileConfig) -> None:
    for case in legal_bytes(config):
        check_whole_and_split(case, config, kernel)


def test_all_configurations_that_leave_room_for_pieces_are_legal() -> None:
    legal = {}
    for precision, planes in EMULATED.items():
        problem = GemmProblem.of(*(torch.empty(512, 512, device="meta"),) * 3, precision=precision)
        problem = repacked(problem, ("a", "b"))
        found = [c for c in warp_specialised.configs(planes.dtype) if not warp_specialised.illegal(problem, HOPPER, c)]
        legal[precision] = [(c.BLOCK_M, c.BLOCK_N) for c in found]
    assert all((128, 192) in tiles and (128, 256) not in tiles for tiles in legal.values())


# --- Clusters ---

FORMS = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (8, 1), (1, 8))


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize(
    "config", [*CLUSTERED, *(in_form(tile, form) for form in FORMS for tile in ((64, 96), (192, 128)))], ids=ids
)
def test_every_cluster(kernel: SimpleNamespace, config: TileConfig) -> None:
    """One to three consumers; with tiles that lie outside of C, fewer clusters than tiles, tiles cut along K, and fewer
    k-tiles than the ring has slots."""
    m, n, k = of_cluster(config)
    orders = ORDERS[[*CLUSTERED, config].index(config) % 4] + "n"
    check(Case((m + 9, n + 8, 3 * k + 8), orders, integers=True), config, Schedule(3), kernel, times=2)
    check(Case((m - 7, 2 * n - 8, 9 * k + 8), orders), config, Schedule(1, group_m=2), kernel)
    if warp_specialised.can_split_k(config):
        check(Case((m + 9, n - 8, 7 * k), orders), config, Schedule(6, split_tiles=2, split_k=3), kernel)


@pytest.mark.full
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance_in_clusters(kernel: SimpleNamespace, name: str) -> None:
    turn = list(CIRCUMSTANCES).index(name)
    probe = Operands(circumstance(name, (64, 64, 64)), CPU).problem
    legal = [config for config in CLUSTERED if kernel.illegal(probe, HOPPER, config) is None]
    config = legal[turn * 5 % len(legal)]
    m, n, k = of_cluster(config)
    check_whole_and_split(circumstance(name, (m + 8, n // 2 + 8, 6 * k + 3)), config, kernel)


@pytest.mark.few(shows=lambda form, precision: {precision == "tf32"})
@pytest.mark.parametrize("precision", ["tf32", *EMULATED])
@pytest.mark.parametrize("form", [(2, 1), (2, 2), (4, 2)], ids=str)
def test_fp32_in_clusters(kernel: SimpleNamespace, form: tuple[int, int], precision: str) -> None:
    """Of tf32 A is transposed, and goes through registers."""
    planes = EMULATED.get(precision)
    of_dtype = warp_specialised.configs(torch.float32 if planes is None else planes.dtype, clusters=True)
    config = [c for c in of_dtype if form == (c.CLUSTER_M, c.CLUSTER_N)][2 if precision == "tf32" else 1]
    m, n, k = of_cluster(config)
    case = Case((m + 9, n + 8, 5 * k + 4), "ttn", dtype=torch.float32, precision=precision)
    check_whole_and_split(case, config, kernel)


@pytest.mark.few(shows=every_form)
@pytest.mark.parametrize("config", warp_specialised.configs(torch.int8, clusters=True), ids=ids)
def test_bytes_in_clusters(kernel: SimpleNamespace, config: TileConfig) -> None:
    """Both fp8 types, summed either way, with every kind of scales, and int8."""
    m, n, k = of_cluster(config)
    ran = set()
    for case in of_bytes(config, warp_specialised.configs(torch.int8, clusters=True).index(config)):
        case = replace(case, size=(m + 8, n // 2 + 16, 5 * k + 16))
        if kernel.illegal(Operands(case, CPU).problem, HOPPER, config) is None:
            check(case, config, Schedule(1), kernel)
            ran.add(case.precision)
    assert ran or config.BLOCK_N == 256


@pytest.mark.few(shows=lambda form: {form[0] * form[1]})
@pytest.mark.parametrize("form", FORMS, ids=str)
def test_a_cluster_s_sums_are_those_of_single_programs(kernel: SimpleNamespace, form: tuple[int, int]) -> None:
    """Bit for bit, also where K is cut into the same parts."""
    config = in_form((128, 96), form)
    m, n, k = of_cluster(config)
    operands, tiles = Operands(Case((m, n, 7 * k), "nnn", alpha=0.3), CPU), config.ctas
    alone = in_form((128, 96), (1, 1))
    for schedule, same in ((Schedule(1), Schedule(tiles)), (Schedule(3, 1, 3), Schedule(3 * tiles, tiles, 3))):
        assert summed(operands, config, schedule, kernel).equal(summed(operands, alone, same, kernel))


ILLEGAL_CLUSTERS = {
    "a cluster's sides are powers of two, for 8 CTAs at most, not 4x4": (4, 4),
    "a cluster's sides are powers of two, for 8 CTAs at most, not 3x1": (3, 1),
    "no cluster of 4x2 fits on 8 multiprocessors": (4, 2),
    "clusters need Triton 3.9 or newer": (2, 1),
    "a cluster's tiles are of one matrix, and groups end inside of them": (2, 1),
}


@pytest.mark.parametrize("reason", ILLEGAL_CLUSTERS)
def test_illegal_clusters_are_named(kernel: SimpleNamespace, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    config = in_form((64, 96), ILLEGAL_CLUSTERS[reason])
    problem = GemmProblem.of(*(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"),) * 3)
    device, illegal = HOPPER, kernel.illegal
    if "groups" in reason:
        problem = replace(problem, groups="m")
    if "multiprocessors" in reason:
        device = replace(HOPPER, num_sms=8)
    if "Triton" in reason:
        monkeypatch.setattr(forms, "CLUSTERS", False)
        illegal = warp_specialised.illegal
    assert illegal(problem, device, config) == reason
    assert illegal(problem, device, replace(config, CLUSTER_M=1, CLUSTER_N=1)) is None
    too_deep = replace(in_form((64, 96), (2, 2)), num_stages=20)
    assert "bytes of shared memory" in kernel.illegal(replace(problem, groups=None), HOPPER, too_deep)


# --- What it cannot be ---

SHAPELESS = {
    "one-stage": ({"num_stages": 1}, "a ring has two stages at least"),
    "two-warps": ({"num_warps": 2}, "one to three warpgroups multiply, not 2 warps"),
    "four-warpgroups": ({"BLOCK_M": 256, "num_warps": 16}, "one to three warpgroups multiply, not 16 warps"),
    "half-a-warpgroup's-rows": ({"num_warps": 8}, "each of 2 warpgroups has 64 or 128 rows, not a part of 64"),
    "more-rows": ({"BLOCK_M": 192}, "each of 1 warpgroups has 64 or 128 rows, not a part of 192"),
    "k-of-three-quarters": ({"BLOCK_K": 96}, "BLOCK_K = 96 is not a power of two"),
}


@pytest.mark.parametrize("name", SHAPELESS)
def test_a_message_names_tiles_that_no_warpgroups_have(name: str) -> None:
    """A consumer gives a slot back once the next one's products run, so that one stage would wait for itself."""
    problem, tile = Operands(Case((512, 512, 512), "ntn"), CPU).problem, warp_specialised.Config(64, 64, 64, 4, 4)
    change, why = SHAPELESS[name]
    assert warp_specialised.illegal(problem, HOPPER, tile) is None
    assert warp_specialised.illegal(problem, HOPPER, replace(tile, **change)) == why


def test_more_tiles_are_cut_than_there_are_counters_for() -> None:
    """One for each warpgroup of each."""
    problem = Operands(Case((64, 64, 512), "ntn"), CPU).problem
    problem, config = replace(problem, M=64 * 20_000), warp_specialised.Config(64, 64, 64, 4, 4)

    def why(config: TileConfig, cut: int) -> str | None:
        return warp_specialised.illegal(problem, HOPPER, config, Schedule(2 * cut, cut, 2))

    assert why(config, MAX_COUNTERS) is None
    assert why(config, MAX_COUNTERS + 1) == "tiles that are cut take 16385 counters, a stream has 16384"
    two = replace(config, BLOCK_M=128, num_warps=8)
    assert why(two, MAX_COUNTERS // 2) is None and "16386 counters" in str(why(two, MAX_COUNTERS // 2 + 1))
