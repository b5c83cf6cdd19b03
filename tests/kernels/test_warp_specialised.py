"""What the warp-specialised kernel computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

import random
from collections.abc import Callable, Hashable
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support import planted_bugs
from tests.support.gluon_on_cpu import Barrier, Barriers, Program, run, simulated
from tests.support.group_truth import assert_right, listed_tiles
from tests.support.kernel_cases import (
    CIRCUMSTANCES,
    Case,
    Operands,
    bits,
    blocks,
    circumstance,
    ids,
    of_bytes,
    reduced,
    splits,
    wholes,
)
from tests.support.simulated_plans import CPU, Simulation, check
from tests.support.table_fakes import HOPPER
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.kernels import forms, warp_specialised
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.splitk import MAX_COUNTERS
from triton_gemm.problem import ACTIVATIONS, GemmProblem

CONFIGS = warp_specialised.CONFIGS
ORDERS = ("nn", "nt", "tn", "tt")


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


# --- Clusters ---

CLUSTERED = warp_specialised.CLUSTERED
FORMS = ((2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (4, 2), (2, 4), (8, 1), (1, 8))


def in_form(tile: tuple[int, int], form: tuple[int, int]) -> TileConfig:
    config = next(c for c in CONFIGS if tile == (c.BLOCK_M, c.BLOCK_N))
    return replace(config, CLUSTER_M=form[0], CLUSTER_N=form[1])


def of_cluster(config: TileConfig) -> tuple[int, int, int]:
    """What a cluster computes."""
    return config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N, config.BLOCK_K


def every_form(config: TileConfig) -> set[Hashable]:
    """What the fast tier shows."""
    return {(config.CLUSTER_M, config.CLUSTER_N), config.num_warps, ("tail", config.tail_n > 0)}


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
    case = circumstance(name, (m + 8, n // 2 + 8, 6 * k + 3))
    tiles = (case.batch or 1) * 2
    check(case, config, Schedule(tiles - 1), kernel)
    if warp_specialised.can_split_k(config):
        check(case, config, Schedule(3 * tiles, tiles, split_k=3, group_m=2), kernel)


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
    check(case, config, Schedule(3), kernel)
    check(case, config, Schedule(12, split_tiles=4, split_k=3), kernel)


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
    operands = Operands(Case((m, n, 7 * k), "nnn", alpha=0.3), CPU)
    tiles, results = config.ctas, []
    for one, whole, split in (
        (config, Schedule(1), Schedule(3, 1, 3)),
        (in_form((128, 96), (1, 1)), Schedule(tiles), Schedule(3 * tiles, tiles, 3)),
    ):
        for schedule in (whole, split):
            operands.c.fill_(0)
            Simulation(operands.problem, one, schedule, kernel).run(operands.a, operands.b, operands.c, (), 0.3, 0.0)
            results.append(operands.c.clone())
    assert torch.equal(results[0], results[2]) and torch.equal(results[1], results[3])


ILLEGAL_CLUSTERS = {
    "a cluster's sides are powers of two, for 8 CTAs at most, not 4x4": (4, 4),
    "a cluster's sides are powers of two, for 8 CTAs at most, not 3x1": (3, 1),
    "no cluster of 4x2 fits on 8 multiprocessors": (4, 2),
    "clusters need Triton 3.9 or newer": (2, 1),
    "a cluster's tiles are of one matrix, and groups end inside of them": (2, 1),
}


@pytest.mark.parametrize("reason", ILLEGAL_CLUSTERS)
def test_what_is_no_cluster_is_said(kernel: SimpleNamespace, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
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


def test_what_does_not_fit_in_clusters_either_is_said(kernel: SimpleNamespace) -> None:
    config = replace(in_form((64, 96), (2, 2)), num_stages=20)
    problem = GemmProblem.of(*(torch.empty(512, 512, dtype=torch.bfloat16, device="meta"),) * 3)
    assert "bytes of shared memory" in kernel.illegal(problem, HOPPER, config)


def test_a_program_may_not_end_while_something_comes() -> None:
    """Nor may its shared memory be reached afterwards."""
    ctas: list[Program] = []
    for i in range(2):
        ctas.append(Program((i, 0, 0), (2, 1, 1), 4, {}, ctas[0].cluster if ctas else [], all_warps=4))
        ctas[-1].cluster.append(ctas[-1])
    with pytest.raises(AssertionError, match="may not be there"):
        ctas[0].peer(1)
    for cta in ctas:
        cta.published, cta.joined = True, 4
    assert ctas[0].peer(1) is ctas[1]
    ctas[1].memory.append(Barriers([Barrier(1, loads=[lambda: 0])]))
    with pytest.raises(AssertionError, match="on its way"):
        ctas[1].end()
    with pytest.raises(AssertionError, match="has ended"):
        ctas[0].peer(1)


# --- Tiles of any width ---

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


DEEP = {(64, 40): (1, 1), (64, 88): (4, 1), (128, 104): (2, 1), (192, 72): (1, 2), (256, 112): (1, 1)}  # 128 along K


def of_width(m: int, n: int, form: tuple[int, int] = (1, 1), k: int = 64) -> TileConfig:
    """The ring is short, so that it goes round."""
    return warp_specialised.Config(m, n, k, 8 if m == 256 else m // 16, 3 if k == 64 else 2, *form)


WIDE = [of_width(m, n, form) for m, widths in WIDTHS.items() for n, form in widths.items()]
WIDE += [of_width(*tile, form, 128) for tile, form in DEEP.items()]


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
        schedule = Schedule(3 * tiles, tiles, 3) if split else Schedule(2)
        operands.c.fill_(0)
        simulation = Simulation(operands.problem, one, schedule, kernel)
        simulation.run(operands.a, operands.b, operands.c, (operands.bias,), 0.003, 0.0)
        results.append(operands.c.clone())
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
def test_what_no_wgmma_spans_is_said(kernel: SimpleNamespace, name: str) -> None:
    """Of such products the width is the sum of two powers of two."""
    problem = repacked(Operands(NO_WIDTHS[name], CPU).problem, ("a", "b") if name == "planes" else ())
    k = 128 // problem.dtype.itemsize
    why = kernel.illegal(problem, HOPPER, replace(of_width(64, 88), BLOCK_K=k))
    assert why == "tiles 88 wide need one wgmma, as Triton 3.9 has it for K-major operands of 16 bits"
    assert kernel.illegal(problem, HOPPER, replace(of_width(64, 96), BLOCK_K=k)) is None


# --- Parts in turn ---


def summed(operands: Operands, config: TileConfig, schedule: Schedule, module: SimpleNamespace) -> torch.Tensor:
    """The bits of C."""
    case, auxiliary = operands.case, (*([] if operands.bias is None else [operands.bias]), *operands.scales)
    operands.c.copy_(operands.c0)
    simulation = Simulation(operands.problem, config, schedule, module)
    simulation.run(operands.a, operands.b, operands.c, auxiliary, case.alpha, case.beta)
    return bits(operands.c).clone()


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
    operands, module = Operands(case, CPU), module or kernel
    planes = operands.problem.planes.count > 1
    problem = repacked(operands.problem, ("a", "b") if planes else ())
    tiles = (case.batch or 1) * config.tiles(*case.size[:2])
    in_turn = Schedule(max(1, tiles // 2), split_k=parts, group_m=2, unit=unit)
    shared = Schedule(parts * tiles, tiles, parts, unit=unit)
    assert kernel.illegal(problem, HOPPER, config, in_turn) is None
    orders = {kernel.order_of_sums(problem, config, schedule) for schedule in (in_turn, shared)}
    assert len(orders) == 1 and f"K in {parts} parts" in orders.pop()
    launch = module.launches(problem, config, in_turn)[-1]
    assert launch.workspace == launch.counters == 0
    operands.check(Simulation(operands.problem, config, in_turn, module), parts)
    found = summed(operands, config, in_turn, module)
    same = found == summed(operands, config, shared, kernel)
    assert same.all(), f"{int((~same).sum())} of {same.numel()} elements are others"
    return found


def legal_in_turn(case: Case, config: TileConfig) -> bool:
    """Whether it is, clusters or not, which not every Triton has."""
    problem = Operands(case, CPU).problem
    problem = repacked(problem, ("a", "b") if problem.planes.count > 1 else ())
    alone = replace(config, CLUSTER_M=1, CLUSTER_N=1)
    return warp_specialised.illegal(problem, HOPPER, alone, Schedule(1, split_k=2)) is None


PLAIN = Case((64, 64, 64), "nnn")
IN_TURN = [config for config in CONFIGS if legal_in_turn(PLAIN, config)]
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
    deep, flat = (replace(next(c for c in IN_TURN if blocks(c) == tile), num_stages=4) for tile in tiles)
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


OTHERS_IN_TURN = {
    "tf32": Case((64, 64, 64), "ntn", dtype=torch.float32, precision="tf32"),
    "tf32-a-by-registers": Case((64, 64, 64), "ttn", dtype=torch.float32, precision="tf32"),
    **{x: Case((64, 64, 64), "nnn", dtype=torch.float32, precision=x) for x in ("tf32x3", "bf16x3", "bf16x6")},
    **{
        f"fp8-{scales}": Case(
            (64, 64, 64),
            "ntn",
            pad=16,
            dtype=torch.float8_e4m3fn,
            out_dtype=torch.bfloat16,
            precision=how,
            scales=scales,
        )
        for scales, how in (("tensor", "fp8 fast"), ("rows", "fp8"), ("blocks", "fp8"))
    },
}


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
    config = next(c for c in CONFIGS if blocks(c) == (64, 64, 128))
    case = Case((100, 136, 1500), "ntn", alpha=0.3, bias="n", out_dtype=torch.float32)
    operands, tiles = Operands(case, CPU), config.tiles(100, 136)
    in_turn, shared, second, whole = (
        summed(operands, config, schedule, kernel)
        for schedule in (
            *(Schedule(2, split_k=5), Schedule(5 * tiles, tiles, 5), reduced(case, config, 5)),
            Schedule(2),
        )
    )
    assert torch.equal(in_turn, shared) and torch.equal(in_turn, second) and not torch.equal(in_turn, whole)


def test_what_has_no_parts_in_turn_is_said() -> None:
    in_turn = Schedule(1, split_k=2)

    def why(case: Case, config: TileConfig, **change: object) -> str | None:
        problem = replace(Operands(case, CPU).problem, **change)
        problem = repacked(problem, ("a", "b") if problem.planes.count > 1 else ())
        return warp_specialised.illegal(problem, HOPPER, config, in_turn)

    large, small = (next(c for c in CONFIGS if blocks(c)[:2] == tile) for tile in ((128, 256), (64, 16)))
    integers = Case((64, 64, 64), "ntn", pad=16, dtype=torch.int8, out_dtype=torch.int32)
    few = "leave a thread too few registers for sums of pieces"
    assert why(PLAIN, small) is None
    assert why(PLAIN, large) == f"128 accumulators {few}"
    assert why(integers, small) == "no group's sums, and no integers, have parts in turn"
    assert why(PLAIN, small, groups="m") == "no group's sums, and no integers, have parts in turn"
    planes = next(c for c in CONFIGS if blocks(c)[:2] == (128, 160))
    assert why(PLAIN, planes) is None and why(OTHERS_IN_TURN["bf16x6"], planes) == f"80 accumulators {few}"


BUGS_IN_TURN: dict[str, tuple[tuple[str, str], ...]] = {
    "one-sum": (('"IN_TURN": schedule.in_turn', '"IN_TURN": False'),),
    "parts-go-on-from-the-sum": (
        ("    acc, tail = accumulators(ring, config)\n    for kt in", "    acc, tail = sums\n    for kt in"),
        (
            "def multiply(ring, k_begin, k_end, slot, phase, CONSUMER: gl.constexpr, config):",
            "def multiply(ring, k_begin, k_end, slot, phase, CONSUMER: gl.constexpr, config, sums):",
        ),
        (
            "multiply(ring, begin, end, slot, phase, CONSUMER, config)\n            more, more_tail = f",
            "multiply(ring, begin, end, slot, phase, CONSUMER, config, (acc, tail))\n            more, more_tail = f",
        ),
        ("        acc += more\n", "        acc = more\n"),
        ("            tail += more_tail\n", "            tail = more_tail\n"),
    ),
    "longer-parts-first": (
        ("begin = part * units // parts * config.UNIT", "begin = k_tiles - (parts - part) * k_tiles // parts"),
        (
            "end = (part + 1) * units // parts * config.UNIT\n        if",
            "end = k_tiles - (parts - part - 1) * k_tiles // parts\n        if",
        ),
    ),
    "parts-of-equal-length": (
        ("end = (part + 1) * units // parts * config.UNIT\n        if", "end = begin + k_tiles // parts\n        if"),
    ),
    "a-part-less": (("for part in range(parts):", "for part in range(parts - 1):"),),
    "a-part-replaces-the-sum": (("        acc += more\n", "        acc = more\n"),),
    "the-tail-is-left-out": (("            tail += more_tail\n", "            pass\n"),),
    "adds-what-is-under-way": (("acc, tail = wait_for_products(acc, tail, 0, config)", "pass"),),
    "never-frees-a-part-s-last-slot": (
        ("previous_slot(slot, config), some, config)", "previous_slot(slot, config), False, config)"),
    ),
    "frees-the-next-slot": (("free_slot(ring, previous_slot(slot, config), some", "free_slot(ring, slot, some"),),
    "frees-a-slot-of-no-k-tile": (
        ("previous_slot(slot, config), some, config)", "previous_slot(slot, config), True, config)"),
    ),
    "starts-every-part-in-the-first-slot": (
        ("more, more_tail, slot, phase = multiply(ring, begin", "more, more_tail, _, _ = multiply(ring, begin"),
    ),
}


@planted_bugs.with_each(BUGS_IN_TURN)
def test_planted_bugs_of_parts_in_turn_are_caught(kernel: SimpleNamespace, bug: str) -> None:
    """In tiles with a tail, by one `wgmma` or two, in parts of unequal lengths, and in some that are empty."""
    broken = simulated("warp_specialised", BUGS_IN_TURN.get(bug, ()))
    with planted_bugs.caught(bug):
        for config, orders in ((of_width(64, 88), "ntn"), (next(c for c in IN_TURN if c.tail_n), "nnn")):
            m, n, k = blocks(config)
            for depth in (8 * k - 3, 2 * k):
                check_in_turn(Case((m + 8, n + 8, depth), orders, out_dtype=torch.float32), config, 3, kernel, broken)


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
def test_tiles_that_no_warpgroups_have_are_told(name: str) -> None:
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


# --- Planted bugs ---

BUGS_OF_CLUSTERS: dict[str, tuple[tuple[str, str], ...]] = {
    "counts-its-own-consumers-only": (("CONSUMER_WARPS * (cluster_m + cluster_n - 1)", "CONSUMER_WARPS"),),
    "counts-itself-twice": (
        ("CONSUMER_WARPS * (cluster_m + cluster_n - 1)", "CONSUMER_WARPS * (cluster_m + cluster_n)"),
    ),
    "counts-consumers-not-warps": (("consumers * CONSUMER_WARPS * (", "consumers * ("),),
    "arrives-at-those-that-share-a-only": (("lane, {cluster_m + cluster_n - 1}, chosen", "lane, {cluster_n}, chosen"),),
    "arrives-at-itself-twice": (("@beyond add.s32 other, other, 1;", ""),),
    "arrives-at-others-of-another-group": (("@beyond add.s32 peer, first, other;", "@beyond mov.u32 peer, other;"),),
    "frees-what-it-has-not-read": (("setp.ne.b32 chosen, $1, 0;", "setp.ne.b32 chosen, 1, 0;"),),
    "frees-the-slot-of-this-step": (("previous_slot(slot, config), kt", "slot, kt"),),
    "a-goes-to-neighbours": (("1 << cluster_m * j for", "1 << j for"),),
    "b-goes-to-the-first": (("(1 << cluster_m) - 1}, first", "(1 << cluster_m) - 1}, 0"),),
    "b-goes-to-itself": (("shl.b32 mask, {(1 << cluster_m) - 1}, first", "shl.b32 mask, 1, rank"),),
    "a-goes-to-one-more": (("for j in range(cluster_n))}, i", "for j in range(cluster_n)) | 2}, i"),),
    "slices-at-the-same-place": (("mad.lo.s32 into, begin, {panel * itemsize}, into;", ""),),
    "slices-overlap": (("begin, {mine}, {size};", "begin, {mine}, 8;"),),
    "slices-of-the-same-rows": (("add.s32 y, begin, $3;", "mov.b32 y, $3;"),),
    "panels-at-the-same-place": ((" add.s32 into, into, {outer * panel * itemsize};", ""),),
    "panels-as-far-apart-as-slices": (("into, {outer * panel", "into, {size * panel"),),
    "panels-of-the-same-columns": (("add.s32 x, x, {panel};", ""),),
    "every-lane-loads": (("{pieces}, elected", "{pieces}, 1"),),
    "slices-beyond-the-tile": (("{mine}, {pieces}, elected", "{mine}, 8, elected"),),
    "another-s-barrier-counts": (("mapa.shared::cluster.u32 full, $1, rank;", "mov.u32 full, $1;"),),
    "ends-before-others-have-freed": (("        wait_for_peers(ring, slot, phase, config)\n", "        pass\n"),),
    "ends-before-the-last-slot": (("range(config.NUM_STAGES)", "range(config.NUM_STAGES - 1)"),),
    "ends-in-the-wrong-phase": (
        ("wait_for_peers(ring, slot, phase, config)\n\n", "wait_for_peers(ring, slot, phase ^ 1, config)\n\n"),
    ),
    "phase-does-not-turn": (("phase ^ wrapped.to(gl.int32)", "phase"),),
    "loads-before-all-have-joined": (
        ("    join_cluster(config)\n    if config.PDL:\n        gdc_wait()\n    a_desc", "    a_desc"),
    ),
    "barriers-are-not-published": (('gl.inline_asm("fence.mbarrier_init.release.cluster;")', "pass"),),
    "idle-warps-do-not-join": (("IDLE: gl.constexpr = 2 if", "IDLE: gl.constexpr = 0 if"),),
    "tiles-in-another-order": (
        ("number % config.CLUSTER_M", "number // config.CLUSTER_N"),
        ("number // config.CLUSTER_M", "number % config.CLUSTER_N"),
    ),
    "sums-of-clusters-at-the-same-place": (
        ("work.split_tiles * (config.CLUSTER_M * config.CLUSTER_N)", "work.split_tiles"),
    ),
    "tiles-share-a-counter": (("tile_id = tile_id * CTAS + number", "tile_id = tile_id * CTAS"),),
}


@planted_bugs.with_each(BUGS_OF_CLUSTERS)
def test_planted_bugs_of_clusters_are_caught(bug: str) -> None:
    """In 4 x 2 CTAs, with a tail that has fewer slices than CTAs share it: where C is read, else one `wgmma` spans
    both."""
    broken = simulated("warp_specialised", BUGS_OF_CLUSTERS.get(bug, ()))
    config = next(c for c in CLUSTERED if (c.BLOCK_M, c.BLOCK_N) == (64, 144) and c.CLUSTER_M == 4)
    with planted_bugs.caught(bug):
        check(Case((250, 280, 1000), "ntn", beta=0.5), config, Schedule(1), broken)
        check(Case((250, 280, 1000), "nnn"), config, Schedule(3, split_tiles=1, split_k=3), broken)


BUGS: dict[str, tuple[tuple[str, str], ...]] = {
    "loads-into-full-slots": (("            mbarrier.wait(ring.empty.index(slot), phase)\n", ""),),
    "multiplies-what-has-not-come": (("mbarrier.wait(ring.full.index(slot), phase)\n", "pass\n"),),
    "frees-a-slot-that-is-read": (("kt > k_begin, config)", "True, config)"),),
    "frees-the-slot-of-this-step": (("previous_slot(slot, config), kt", "slot, kt"),),
    "waits-for-one-product-less": (("wait_for_products(acc, tail, IN_FLIGHT,", "wait_for_products(acc, tail, 2,"),),
    "never-frees-the-last-slot": (("item.k_end > item.k_begin, config)", "False, config)"),),
    "starts-in-the-wrong-phase": (("phase = 1  #", "phase = 0  #"),),
    "announces-too-few-bytes": (("config.CONSUMERS * loaded_rows(config.A_COPIED", "loaded_rows(config.A_COPIED"),),
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
        ("k_end = (part + 1) * units // split_k * UNIT", "k_end = (part + 1) * units // split_k * UNIT + 1"),
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


@planted_bugs.with_each(BUGS_OF_PLANES)
def test_planted_bugs_of_planes_are_caught(bug: str) -> None:
    broken = simulated("warp_specialised", BUGS_OF_PLANES.get(bug, ()))
    config = next(c for c in CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 128))
    case = Case((70, 72, 1050), "ntn", dtype=torch.float32, precision="bf16x6")
    with planted_bugs.caught(bug):
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


@planted_bugs.with_each(BUGS_OF_BYTES)
def test_planted_bugs_of_bytes_are_caught(bug: str) -> None:
    broken = simulated("warp_specialised", BUGS_OF_BYTES.get(bug, ()))
    config = next(c for c in BYTES if (c.BLOCK_M, c.BLOCK_N) == (128, 192))
    with planted_bugs.caught(bug):
        for case in of_bytes(config, 0):
            check(case, config, Schedule(9, split_tiles=3, split_k=3), broken)


BUGS_OF_WIDTHS: dict[str, tuple[tuple[str, str], ...]] = {
    "the-tail-in-the-main-s-registers": (("blocks * of_acc + block * of_tail", "block * of_tail"),),
    "both-blocks-in-the-same-registers": (("block * of_acc, blocks", "0, blocks"),),
    "both-blocks-tails-in-the-same-registers": (("blocks * of_acc + block * of_tail", "blocks * of_acc"),),
    "a-stays-along-k": (("{block * a_block + a_place}", "{block * a_block}"),),
    "b-stays-along-k": (("{panel * 8 * width + inside}", "{panel * 8 * width}"),),
    "a-s-second-panel-over-the-first": (("panel * 8 * rows + inside", "inside"),),
    "b-s-second-panel-over-the-first": (("{panel * 8 * width + inside}", "{inside}"),),
    "a-s-columns-step-as-rows-do": (("k * 8 * 16 if a_column_major else panel", "panel"),),
    "a-s-rows-step-as-columns-do": (("k * 8 * 16 if a_column_major else panel * 8 * rows + inside", "k * 8 * 16"),),
    "a-s-columns-are-read-as-rows": (('f"{int(a_column_major)}, 0;"', '"0, 0;"'),),
    "the-second-block-has-the-first-s-rows": (("{block * a_block + a_place}", "{a_place}"),),
    "the-second-block-is-32-rows-on": (("depth if a_column_major else 64)", "depth if a_column_major else 32)"),),
    "columns-of-the-second-block-begin-64-deep": (("8 * (depth if a_column_major else 64)", "8 * 64"),),
    "a-group-less-is-awaited": (("1 if config.WIDE_MMA else 2", "2"),),
    "b-s-last-slice-ends-beyond-it": (("min.s32 begin, begin, {copied - size};", ""),),
    "what-comes-twice-is-announced-once": (("loaded_rows(config.B_COPIED or MAIN, config.CLUSTER_M)", "MAIN"),),
    "b-s-slots-overlap": (("ring.b.index(slot * B_SLOT)", "ring.b.index(slot)"),),
    "b-is-loaded-where-slots-overlap": (("b_tile = ring.b.index(slot * B_SLOT)", "b_tile = ring.b.index(slot)"),),
    "b-is-read-in-the-first-slot": (("ring.b.index(slot * B_SLOT)]", "ring.b.index(0)]"),),
    "announces-one-block-of-b": (("(a_rows + b_rows) * k_bytes", "(a_rows + 8) * k_bytes"),),
    "announces-one-block-less": (("(a_rows + b_rows) * k_bytes", "(a_rows + b_rows - 8) * k_bytes"),),
    "slices-at-the-same-place": (("mad.lo.s32 into, begin, {panel * itemsize}, into;", ""),),
    "slices-of-the-same-columns": (("add.s32 y, begin, $3;", "mov.b32 y, $3;"),),
    "a-copy-moves-the-main-part-only": (("copied_rows=n,", "copied_rows=config.main_n,"),),
    "the-tail-over-the-main-part": (("n + MAIN_N,\n                    rows_end", "n,\n                    rows_end"),),
    "narrow-tiles-at-the-same-place": (("batch, m, n + begin, config)", "batch, m, n + WIDE * EPI_N, config)"),),
    "narrow-tiles-have-the-first-s-bias": (("m, n + begin, rows_end", "m, n + WIDE * EPI_N, rows_end"),),
    "narrow-tiles-have-the-first-s-sums": (("columns_from(acc, begin, REST_N)", "columns_from(acc, 0, REST_N)"),),
    "the-right-half-s-columns-are-the-left-s": (("columns_from(right, BEGIN", "columns_from(left, BEGIN"),),
    "narrow-tiles-share-a-buffer": (("staging.rest.index(p)", "staging.rest.index(0)"),),
    "narrow-buffers-are-written-at-once": (("    tma.store_wait(config.BLOCK_N // EPI_N)", "    pass"),),
    "a-store-too-many-may-read": (("store_wait(config.BLOCK_N // EPI_N)", "store_wait(config.BLOCK_N // EPI_N + 1)"),),
    "blocks-of-sums-overlap": (("ROWS * (MAIN_N + config.TAIL_N)", "ROWS * config.BLOCK_N"),),
    "the-tail-s-sums-over-the-main-s": (
        ("workspace_ptr + ROWS * MAIN_N, block, STRIDE", "workspace_ptr, block, STRIDE"),
    ),
}


@planted_bugs.with_each(BUGS_OF_WIDTHS)
def test_planted_bugs_of_widths_are_caught(bug: str) -> None:
    """In tiles of one wide store and three narrow ones, shared by four, whose last slice ends beyond the tile; of three
    and three, with two blocks of rows; and of three and five, one of which is wide and of the tail."""
    broken = simulated("warp_specialised", BUGS_OF_WIDTHS.get(bug, ()))
    with planted_bugs.caught(bug):
        check(Case((520, 168, 700), "ntn"), of_width(64, 88, (4, 1)), Schedule(1), broken)
        for orders in ("ttn", "ntn"):
            split = Schedule(6, split_tiles=2, split_k=3)
            check(Case((264, 112, 500), orders, bias="n"), of_width(256, 120), split, broken)
        check(Case((120, 456, 500), "ntn"), of_width(64, 232), Schedule(3), broken)
        for orders in ("ttn", "ntn"):
            check(Case((250, 112, 700), orders), of_width(256, 112, k=128), Schedule(1), broken)


# --- Few rows, of which no more are copied ---

# Tiles of which few rows are A's, and of which few columns are B's.
OF_FEW = {
    "a": ((64, 40, 128), (64, 64, 128), (64, 88, 64), (128, 64, 64)),
    "b": ((64, 16, 128), (128, 32, 128), (64, 128, 128)),
}
FEW_SIZES = (1, 7, 8, 9, 16, 17, 31, 33, 48)


def of_few(operand: str, tile: tuple[int, int, int], form: tuple[int, int] = (1, 1)) -> TileConfig:
    m, n, k = tile
    return warp_specialised.Config(m, n, k, m // 16, 3, *form)


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
    config = of_few(operand, tile)
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
    config = of_few(operand, OF_FEW[operand][-1], form) if operand == "b" else of_few(operand, (64, 64, 128), form)
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
    planes = case.dtype == torch.float32 and EMULATED.get(case.precision or "")
    itemsize = planes.dtype.itemsize if planes else case.dtype.itemsize
    step = min(256, Operands(case, CPU).problem.arithmetic.promotion or 256)  # bytes of K
    config = warp_specialised.Config(64, 64, step // itemsize, 4, 3)
    ran = 0
    for m, n in ((few, 120), (120, few)):
        sized = replace(case, size=(m, n, 5 * config.BLOCK_K + 16))
        problem = repacked(Operands(sized, CPU).problem, ("a", "b") if planes else ())
        if warp_specialised.illegal(problem, HOPPER, config) is None:
            along_k = not problem.a.column_major if m == few else problem.b.column_major
            assert max(rows_copied(kernel, problem, config)) == ((8 if few == 5 else 32) if along_k else 0)
            check(sized, config, Schedule(1), kernel)
            ran += 1
            if warp_specialised.illegal(problem, HOPPER, config, Schedule(6, 2, 3)) is None:
                check(sized, config, Schedule(6, 2, split_k=3), kernel)
    assert ran


BUGS_OF_FEW: dict[str, tuple[tuple[str, str], ...]] = {
    "announces-all-rows": (("loaded_rows(config.A_COPIED or ROWS, config.CLUSTER_N)", "ROWS"),),
    "announces-all-columns": (("loaded_rows(config.B_COPIED or MAIN, config.CLUSTER_M)", "MAIN"),),
    "copies-too-few": (("if rows >= extent", "if rows >= extent - 8"),),
    "the-second-panel-after-the-copied-rows": (("{outer * panel * itemsize}", "{copied * panel * itemsize}"),),
    "columns-of-a-tail": (("config.BLOCK_N and not config.tail_n", "config.BLOCK_N"),),
    "what-lies-across-k": (("0 if problem.a.column_major else a", "a"),),
}


@planted_bugs.with_each(BUGS_OF_FEW)
def test_planted_bugs_of_few_rows_are_caught(bug: str) -> None:
    """In tiles with a tail and without, A along K and across it."""
    broken = simulated("warp_specialised", BUGS_OF_FEW.get(bug, ()))
    with planted_bugs.caught(bug):
        for few in (5, 20):
            check(Case((few, 120, 700), "ntn"), of_few("a", (64, 64, 128)), Schedule(1), broken)
            check(Case((120, few, 700), "ntt"), of_few("b", (64, 64, 128)), Schedule(1), broken)
        check(Case((72, 40, 300), "ntn"), of_width(64, 88), Schedule(1), broken)
        check(Case((24, 64, 300), "ttn"), of_few("a", (64, 64, 64)), Schedule(1), broken)


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
        ("            if owned:\n                load_f", "            if True:\n                load_f"),
    ),
}


@planted_bugs.with_each(BUGS_OF_BETA)
def test_planted_bugs_of_beta_are_caught(bug: str) -> None:
    """In eight epilogue tiles through four buffers."""
    broken = simulated("warp_specialised", BUGS_OF_BETA.get(bug, ()))
    config = next(c for c in CONFIGS if (c.BLOCK_M, c.BLOCK_N) == (128, 256))
    with planted_bugs.caught(bug):
        for schedule in (Schedule(3, group_m=2), Schedule(6, split_tiles=2, split_k=3, group_m=2)):
            check(Case((330, 520, 400), "nnn", beta=0.5), config, schedule, broken)


@planted_bugs.with_each(BUGS)
def test_planted_bugs_are_caught(bug: str) -> None:
    """By one of two configurations: with four epilogue tiles and four buffers, or one and two."""
    broken = simulated("warp_specialised", BUGS.get(bug, ()))
    with planted_bugs.caught(bug):
        for tile in ((128, 256), (128, 64)):
            config = next(c for c in CONFIGS if tile == (c.BLOCK_M, c.BLOCK_N))
            tiles = 2 * 3 * (3 if tile[1] == 256 else 9)
            for schedule in (Schedule(3, group_m=2), Schedule(3 * tiles, tiles, split_k=3, group_m=2)):
                check(Case((330, 520, 700), "nnn", batch=2), config, schedule, broken)
