"""How the persistent kernel deals out its work: everything once, and nobody waits for one who waits."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from triton import language as tl

from tests.support.table_fakes import HOPPER
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.launch import MAX_SIZE
from triton_gemm.kernels.schedule import Schedule, clusters_at_once, tile_coordinates, work_item
from triton_gemm.kernels.warp_specialised.work import last_tiles
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime.workspace import COUNTERS

CONFIGS = st.sampled_from(warp_specialised.CONFIGS + warp_specialised.CLUSTERED)


def problem_of(M: int, N: int, K: int, batch: int = 1) -> GemmProblem:
    layouts = [Layout((0, columns, 1)) for columns in (K, N, N)]
    return GemmProblem(batch, M, N, K, torch.bfloat16, torch.bfloat16, "half", *layouts)


@st.composite
def dealt(draw: st.DrawFn) -> tuple[int, int, Schedule]:
    """Tiles, k-tiles, and any schedule of them whose parts have a k-tile each, or a unit of two."""
    tiles, k_tiles = draw(st.integers(1, 300)), draw(st.integers(1, 70))
    split = draw(st.integers(0, min(tiles, 75))) if k_tiles > 1 else 0
    unit = draw(st.sampled_from([1, 2])) if split and k_tiles > 2 else 1
    parts = draw(st.integers(2, min(-(-k_tiles // unit), 32))) if split else 1
    programs = draw(st.integers(max(1, split * parts), max(150, split * parts)))
    return tiles, k_tiles, Schedule(programs, split, parts, unit=unit)


def work(schedule: Schedule, tiles: int, k_tiles: int) -> list[tuple[int, int, range]]:
    """(tile, part, k-tiles) of every item, by the kernel's own arithmetic."""
    found = []
    for item in range(schedule.items(tiles)):
        tile, part, begin, end = work_item.fn(item, k_tiles, schedule.split_tiles, schedule.split_k, schedule.unit)
        found.append((tile, part, range(begin, end)))
    return found


@settings(deadline=None)
@given(dealt())
def test_every_tile_has_one_owner_and_each_k_tile_once(case: tuple[int, int, Schedule]) -> None:
    """Parts are in the order of K."""
    tiles, k_tiles, schedule = case
    parts: dict[int, dict[int, range]] = defaultdict(dict)
    for tile, part, ks in work(schedule, tiles, k_tiles):
        assert part not in parts[tile]
        parts[tile][part] = ks
    assert sorted(parts) == list(range(tiles))
    for tile, found in parts.items():
        assert sorted(found) == list(range(schedule.split_k if tile < schedule.split_tiles else 1))
        assert [k for part in sorted(found) for k in found[part]] == list(range(k_tiles))
        sizes = [-(-len(ks) // schedule.unit) for ks in found.values()]
        assert max(sizes) - min(sizes) <= 1, "parts are not equal"
        assert not [ks for ks in found.values() if ks.start % schedule.unit], "a part begins inside of a unit"


@given(st.integers(3, 200), st.integers(2, 16))
def test_parts_of_units_begin_where_those_of_deeper_tiles_do(deep: int, parts: int) -> None:
    """Also where the last of the deeper tiles is half full."""
    for k_tiles in (2 * deep - 1, 2 * deep):
        for item in range(parts):
            _, part, begin, end = work_item.fn(item, deep, 1, parts)
            halves = work_item.fn(item, k_tiles, 1, parts, 2)
            assert halves == (0, part, 2 * begin, min(2 * end, k_tiles))


@settings(deadline=None)
@given(dealt())
def test_nobody_waits_for_one_who_waits(case: tuple[int, int, Schedule]) -> None:
    """Owners wait for the other parts of their tile. Those lie before them in the list, so also in a program that has
    both, and no program takes one of them after it waited itself: all are reached without waiting."""
    tiles, k_tiles, schedule = case
    items = work(schedule, tiles, k_tiles)
    owners = {tile: item for item, (tile, part, _) in enumerate(items) if part == 0}
    waited_for = [item for item, (_, part, _) in enumerate(items) if part > 0]
    assert all(item < owners[items[item][0]] for item in waited_for)
    for program in range(schedule.programs):
        own = range(program, len(items), schedule.programs)
        waits = [item for item in own if items[item][0] < schedule.split_tiles and items[item][1] == 0]
        assert not [item for item in own if waits and item > waits[0] and items[item][1] > 0]


@settings(deadline=None)
@given(dealt())
def test_parts_of_the_same_k_follow_one_another(case: tuple[int, int, Schedule]) -> None:
    """Programs that run at the same time read the same k-tiles, out of L2."""
    tiles, k_tiles, schedule = case
    starts = [ks.start for tile, _, ks in work(schedule, tiles, k_tiles) if tile < schedule.split_tiles]
    assert starts == sorted(starts, reverse=True)


@settings(deadline=None)
@given(
    dealt(),
    st.sampled_from(
        [c for c in warp_specialised.CONFIGS + warp_specialised.CLUSTERED if warp_specialised.can_split_k(c)]
    ),
)
def test_partial_sums_have_places_of_their_own(case: tuple[int, int, Schedule], config: TileConfig) -> None:
    tiles, k_tiles, schedule = case
    m, n, k = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N, config.BLOCK_K
    (launch,) = warp_specialised.launches(problem_of(m * tiles, n, k * k_tiles), config, schedule)
    blocks = [
        (part - 1) * schedule.split_tiles + tile for tile, part, _ in work(schedule, tiles, k_tiles) if part > 0
    ]  # as `share_sums` numbers them
    assert sorted(blocks) == list(range(len(blocks)))
    assert launch.workspace == len(blocks) * m * n * 4
    assert launch.counters == schedule.split_tiles * config.ctas * config.num_warps // 4
    assert launch.arguments["num_items"] == schedule.items(tiles) * config.ctas
    assert launch.grid == (schedule.programs * launch.cluster, 1, 1) and launch.cluster == config.ctas


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(1, 300), CONFIGS)
def test_tiles_end_inside_of_c_and_cover_it(eighths_m: int, eighths_n: int, config: TileConfig) -> None:
    """Along a side that has room for one, and each element is in one that begins where it would without an end."""
    problem = problem_of(8 * eighths_m, 8 * eighths_n, 64)
    sides = (problem.M, config.BLOCK_M), (problem.N, config.BLOCK_N)
    for last, (extent, side) in zip(last_tiles(problem, config, Schedule(1)), sides, strict=True):
        begins = [min(begin, last) for begin in range(0, extent + 3 * side, side)]  # of a cluster some are past the end
        covered = {i for begin in begins for i in range(begin, min(begin + side, extent))}
        assert covered == set(range(extent))
        assert extent < side or max(begins) + side == extent


LAST: dict[str, tuple[dict[str, object], Schedule, tuple[bool, bool]]] = {
    "whole sums": ({}, Schedule(8), (True, True)),
    "all tiles cut": ({}, Schedule(24, split_tiles=12, split_k=2), (True, True)),
    "all tiles cut, for a second launch": ({}, Schedule(24, split_tiles=12, split_k=2, reduction=True), (True, True)),
    "parts in turn": ({}, Schedule(8, split_k=2), (True, True)),
    "some tiles cut": ({}, Schedule(8, split_tiles=4, split_k=2), (False, False)),
    "C is read": ({"has_beta": True}, Schedule(8), (False, False)),
    "groups": ({"groups": "m"}, Schedule(8), (False, False)),
    "blocks of scales": ({"scales": "blocks"}, Schedule(8), (False, False)),
    "A column-major": ({"a": Layout((0, 1, 504))}, Schedule(8), (False, True)),
    "A column-major, M a multiple of 8": ({"M": 504, "a": Layout((0, 1, 504))}, Schedule(8), (True, True)),
    "B row-major": ({"N": 300, "b": Layout((0, 304, 1))}, Schedule(8), (True, False)),
    "B column-major": ({"N": 300, "b": Layout((0, 1, 1024))}, Schedule(8), (True, True)),
    "few rows": ({"M": 100}, Schedule(8), (False, True)),
    "as many rows as a tile": ({"M": 128}, Schedule(8), (True, True)),
    "the tiles of one of two products": ({"batch": 2}, Schedule(24, split_tiles=12, split_k=2), (False, False)),
    "all tiles of two products": ({"batch": 2}, Schedule(48, split_tiles=24, split_k=2), (True, True)),
}


def test_tiles_of_clusters_that_are_all_cut_begin_earlier() -> None:
    """Clusters' tiles are counted, of which there are fewer."""
    config = next(x for x in warp_specialised.CLUSTERED if x.ctas == 2)
    problem = problem_of(3 * 2 * config.BLOCK_M + 8, 3 * 2 * config.BLOCK_N + 8, 1024)
    count = config.tiles(problem.M, problem.N)
    for cut, moved in ((count, True), (2 * count, False)):
        found = last_tiles(problem, config, Schedule(2 * cut, split_tiles=cut, split_k=2))
        assert [x < MAX_SIZE for x in found] == [moved, moved]


@pytest.mark.parametrize("name", LAST)
def test_tiles_that_may_not_begin_earlier(name: str) -> None:
    changes, schedule, moved = LAST[name]
    problem = replace(problem_of(500, 304, 1024), **changes)  # type: ignore[arg-type]
    config = next(x for x in warp_specialised.CONFIGS if (x.BLOCK_M, x.BLOCK_N) == (128, 128))
    found = last_tiles(problem, config, schedule)
    assert [x < MAX_SIZE for x in found] == list(moved)


@pytest.mark.parametrize("config", [warp_specialised.CONFIGS[4], warp_specialised.CLUSTERED[0]], ids=str)
def test_parts_in_turn_are_whole_items_that_share_nothing(config: TileConfig) -> None:
    """And those parts are those of tiles that are cut."""
    tiles, k_tiles, schedule = 7, 23, Schedule(5, split_k=4)
    assert schedule.in_turn and not Schedule(5).in_turn and not Schedule(28, 7, 4).in_turn
    assert work(schedule, tiles, k_tiles) == [(tile, 0, range(k_tiles)) for tile in range(tiles)]
    m, n, k = config.BLOCK_M * config.CLUSTER_M, config.BLOCK_N * config.CLUSTER_N, config.BLOCK_K
    (launch,) = warp_specialised.launches(problem_of(m * tiles, n, k * k_tiles), config, schedule)
    assert launch.workspace == launch.counters == 0 and launch.grid == (5 * config.ctas, 1, 1)
    assert launch.arguments["num_items"] == tiles * config.ctas and launch.arguments["split_k"] == 4
    assert launch.arguments["IN_TURN"] and not launch.arguments["SPLIT_K"]


def test_parts_in_turn_take_what_adding_them_does() -> None:
    """A whole sum's time, and for each part of each tile of the busiest program that of promoting a k-tile's sums."""
    config, model = warp_specialised.CONFIGS[4], model_of(HOPPER)
    problem = problem_of(4096, 4096, 4096)
    whole = Schedule(HOPPER.num_sms)
    times = [
        warp_specialised.microseconds(problem, config, replace(whole, split_k=parts), model) for parts in (1, 2, 4, 8)
    ]
    assert times == sorted(set(times))
    size = config.BLOCK_M * config.BLOCK_N / warp_specialised.costs.TILE
    waves = -(-config.tiles(4096, 4096) // HOPPER.num_sms)
    added = waves * 8 * size * model.costs(warp_specialised.Costs).promotion[0]
    assert 0 < times[-1] - times[0] <= added * 1.001


def test_clusters_that_run_at_once_are_those_of_an_h200() -> None:
    assert [clusters_at_once(ctas, 132) for ctas in (1, 2, 4, 8)] == [132, 66, 30, 15]
    for sms in range(1, 200):
        assert all(clusters_at_once(ctas, sms) * ctas <= sms for ctas in (1, 2, 4, 8))


@pytest.mark.parametrize(
    ("batch", "num_m", "num_n", "group"),
    [
        pytest.param(1, 1, 1, 8, id="one tile"),
        pytest.param(1, 7, 5, 8, id="fewer rows than a band"),
        pytest.param(1, 19, 3, 8, id="a low last band"),
        pytest.param(3, 11, 4, 4, id="batch"),
        pytest.param(2, 5, 6, 1, id="bands of one row"),
    ],
)
def test_every_tile_is_located_once(
    batch: int, num_m: int, num_n: int, group: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tl, "minimum", min)
    found = [
        tile_coordinates.fn(tile, num_m, group, group * num_n, num_m * num_n) for tile in range(batch * num_m * num_n)
    ]
    assert sorted(found) == [(b, m, n) for b in range(batch) for m in range(num_m) for n in range(num_n)]
    assert [b for b, _, _ in found] == sorted(b for b, _, _ in found), "batches are not one after another"


# --- What is worth comparing ---

SIZES = st.integers(1, 2**17)
DEVICES = st.integers(1, 200).map(lambda sms: DeviceInfo("gpu", (9, 0), sms, HOPPER.shared_memory))


@settings(max_examples=300, deadline=None)
@given(SIZES, SIZES, SIZES, st.integers(1, 70), CONFIGS, DEVICES)
def test_every_schedule_can_be_run(M: int, N: int, K: int, batch: int, config: TileConfig, device: DeviceInfo) -> None:
    problem = problem_of(M, N, K, batch)
    count, k_tiles = batch * config.tiles(M, N), -(-K // config.BLOCK_K)
    assume(clusters_at_once(config.ctas, device.num_sms) > 0)
    found = warp_specialised.schedules(problem, config, device)
    assert found[0].split_tiles == 0 and len(set(found)) == len(found)
    for schedule in found:
        at_once = clusters_at_once(config.ctas, device.num_sms)
        assert 1 <= schedule.programs <= at_once, "programs that wait must all run at once"
        assert schedule.programs <= schedule.items(count), "programs without work"
        assert 0 <= schedule.split_tiles <= count
        assert (schedule.split_tiles == 0) == (schedule.split_k == 1)
        assert schedule.split_k == 1 or 2 * schedule.split_k <= k_tiles
        assert schedule.split_tiles * config.ctas * (config.num_warps // 4) <= COUNTERS
        assert warp_specialised.microseconds(problem, config, schedule, model_of(HOPPER)) > 0


@settings(deadline=None)
@given(st.integers(1, 600), st.integers(2, 200))
def test_splitting_makes_the_busiest_multiprocessor_less_busy(tiles: int, k_tiles: int) -> None:
    config = warp_specialised.CONFIGS[0]
    problem = problem_of(128 * tiles, 256, 64 * k_tiles)

    def busiest(schedule: Schedule) -> int:
        loads = [0] * schedule.programs
        for item, (_, _, ks) in enumerate(work(schedule, tiles, k_tiles)):
            loads[item % schedule.programs] += len(ks)
        return max(loads)

    whole, *others = warp_specialised.schedules(problem, config, HOPPER)
    assert all(busiest(schedule) <= busiest(whole) for schedule in others)


def test_more_of_anything_takes_longer() -> None:
    config, base = warp_specialised.CONFIGS[0], problem_of(2048, 4096, 1024)

    def predicted(problem: GemmProblem) -> float:
        return warp_specialised.microseconds(problem, config, Schedule(HOPPER.num_sms), model_of(HOPPER))

    for change in ({"M": 8192}, {"N": 16384}, {"K": 4096}, {"batch": 4}, {"has_beta": True}):
        assert predicted(replace(base, **change)) > predicted(base)


def test_multicast_lines_cost_l2_more_with_each_cta_that_receives_them() -> None:
    alone, problem = warp_specialised.CONFIGS[0], problem_of(4096, 4096, 4096)
    model = model_of(HOPPER)

    def predicted(config: warp_specialised.Config, delivered: float) -> float:
        figures = dict(model.kernels["warp_specialised"]) | {"delivered": delivered}
        changed = replace(model, kernels=dict(model.kernels) | {"warp_specialised": figures})
        schedule = Schedule(HOPPER.num_sms // config.ctas)
        return warp_specialised.microseconds(problem, config, schedule, changed)

    for config in (replace(alone, CLUSTER_M=2), replace(alone, CLUSTER_N=2)):
        assert predicted(config, 0.0) < predicted(config, 0.5) < predicted(config, 1.0)
    assert predicted(alone, 0.0) == predicted(alone, 1.0)
