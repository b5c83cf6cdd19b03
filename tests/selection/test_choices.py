"""Choices by name, and what they say: which kernel a mode, a size or a layout has on which GPU."""

from __future__ import annotations

import time
from dataclasses import replace
from math import prod

import pytest
import torch

import triton_gemm
from tests.selection.test_select import DEVICES, MODES, along_k, in_mode, of
from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.arithmetic import EMULATED
from triton_gemm.hardware.device import INTERPRETER, device_of_capability
from triton_gemm.hardware.device_model import model_of
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import cost_model, forms, gemv, skinny, warp_specialised
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.selection.select import Selection, illegal, launches, next_best, predicted, ranked, select


@pytest.mark.parametrize(
    ("programs", "piled", "most"),
    [
        pytest.param(132, 0.0, 1, id="one each"),
        pytest.param(133, 0.0, 2, id="one more"),
        pytest.param(60, 0.0, 1, id="fewer programs than SMs"),
        pytest.param(588, 0.0, 5, id="evenly distributed"),
        pytest.param(588, 1.0, 8, id="busiest SM full"),
        pytest.param(588, 0.5, 6.5, id="half of its free slots taken"),
        pytest.param(3, 1.0, 3, id="at most all programs"),
        pytest.param(132 * 9, 0.5, 12.5, id="a full wave, then a partial one"),
    ],
)
def test_load_imbalance(programs: int, piled: float, most: float) -> None:
    share = programs / 132
    assert cost_model.load_imbalance(programs, 132, 8, piled) == pytest.approx((most - share) / most)


def test_two_rows_take_longer_where_programs_are_dealt_out_unevenly() -> None:
    """924 programs of gemv are seven for each of 132 SMs; 928 eight for four of them, which are served no faster."""
    device, tile = named_device("h200"), gemv.Config(2, 2, 2048, 4)
    even, uneven = (gemv.microseconds(along_k(2, N, 17728), tile, 1, model_of(device)) for N in (1848, 1856))
    assert 1.05 < uneven / even < 1.14
    assert select(along_k(2, 1856, 17728), device).kernel == "warp_specialised", "in 17.9 us, where gemv takes 22.2"


@pytest.mark.parametrize(
    ("problem", "kernel"),
    [
        pytest.param(of(4096, 4096, 4096), "warp_specialised", id="large"),
        pytest.param(of(64, 64, 65536), "warp_specialised", id="long sum"),
        pytest.param(along_k(1, 512, 16384), "gemv", id="one row, few long columns"),
        pytest.param(along_k(1, 4096, 1024), "skinny", id="one row, many short columns"),
        pytest.param(along_k(4, 4096, 4096), "skinny", id="four rows, long columns for a wave"),
        pytest.param(of(4096, 1, 4096), "gemv", id="one column"),
        pytest.param(along_k(2, 4096, 1024), "skinny", id="two rows along k"),
        pytest.param(along_k(4096, 8, 4096), "skinny", id="few columns along k"),
        pytest.param(along_k(4096, 16, 4096), "skinny", id="sixteen columns along k"),
        pytest.param(along_k(17, 4096, 4096), "warp_specialised", id="more rows along k"),
        pytest.param(of(8, 4096, 4096), "warp_specialised", id="few rows along n"),
        pytest.param(along_k(8, 4096, 4100), "portable", id="few rows, k odd"),
        pytest.param(along_k(8, 64, 65536), "warp_specialised", id="few rows and columns, long sum"),
        pytest.param(of(4096, 4096, 0), "portable", id="empty sum"),
        pytest.param(of(64, 63, 65), "portable", id="small and odd"),
        pytest.param(of(4096, 4096, 4095), "warp_specialised", id="large and odd"),
        pytest.param(of(512, 512, 512, batch=16), "warp_specialised", id="batch"),
        pytest.param(of(64, 64, 64, dtype=torch.float32, precision="ieee"), "portable", id="tiny ieee"),
        pytest.param(of(1024, 1024, 1024, dtype=torch.float32, precision="ieee"), "fma", id="ieee"),
        pytest.param(of(4096, 2, 4096, dtype=torch.float32, precision="ieee"), "gemv", id="ieee, two columns"),
        pytest.param(of(512, 512, 512, 8, dtype=torch.float32, precision="ieee"), "fma", id="ieee batch"),
        pytest.param(of(256, 256, 256, dtype=torch.float32, precision="tf32"), "warp_specialised", id="tf32"),
        pytest.param(of(64, 64, 64, dtype=torch.float32, precision="ieee", bias="n"), "portable", id="and a bias"),
    ],
)
def test_what_hopper_runs(problem: GemmProblem, kernel: str) -> None:
    problem = replace(problem, out_dtype=problem.dtype)
    assert select(problem, HOPPER).kernel == kernel


@pytest.mark.parametrize("rows", range(1, skinny.MAX_ROWS + 1))
def test_few_rows_along_k_are_read_once_on_every_gpu(rows: int) -> None:
    """And as many columns alike. With swap_ab the side that is read once fills a tile's columns."""
    swaps = set()
    sizes = [(4096, 512, 1), (50304, 1024, 1), (128, 2040, 64)]
    if rows > gemv.MAX_ROWS:
        sizes += [(1024, 1024, 1), (4093, 4096, 1), (32768, 4096, 1), (512, 8192, 64)]
    for others, K, batch in sizes:
        problem = along_k(rows, others, K, batch)
        for device in DEVICES:
            choice = select(problem, device)
            if choice.kernel in ("warp_specialised", "portable"):  # as fast; on sm_100 as predicted
                side = choice.config.BLOCK_N if choice.swap_ab else choice.config.BLOCK_M
                assert rows <= side and (rows > 8 or device.capability >= (10, 0))
                continue
            assert (choice.kernel, choice.schedule, choice.split_k, choice.packed) == ("skinny", None, 1, ())
            algorithm = choice.algorithm._replace(swap_ab=not choice.swap_ab)
            swapped = replace(choice, algorithm=algorithm, reason=select(problem.swap_ab(), device).reason)
            assert select(problem.swap_ab(), device) == swapped
            (launch,) = launches(problem, choice)
            assert launch.arguments["STREAMED"] == ("a" if choice.swap_ab else "b")
            swaps.add(choice.swap_ab)
    assert True in swaps or rows > 8


def test_an_operand_is_copied_where_l2_serves_the_copy_with_fewer_sectors(monkeypatch: pytest.MonkeyPatch) -> None:
    """M = 364, K = 5816: rows begin inside of sectors, and copying the small operand is soon paid for; not in clusters,
    whose CTAs share what L2 serves."""
    monkeypatch.setattr(forms, "CLUSTERS", False)
    b = Layout((0, 1, 5816))
    assert select(of(364, 6592, 5816, b=b), HOPPER).packed == ("a",)
    assert select(of(364, 6592, 5824, b=Layout((0, 1, 5824))), HOPPER).packed == ()
    assert select(of(6592, 364, 5816, b=b), HOPPER).packed == ("b",)
    both = select(of(4096, 4097, 4095), HOPPER)
    assert both.packed == ("a", "b") and "a repacked, b repacked: " in str(both)


@pytest.mark.parametrize("precision", EMULATED)
def test_fp32_as_planes(precision: str) -> None:
    problem = of(512, 512, 512, dtype=torch.float32, out_dtype=torch.float32, precision=precision)
    choice = select(problem, HOPPER)
    assert (choice.kernel, choice.packed, choice.precision) == ("warp_specialised", ("a", "b"), precision)
    assert f", {precision}, " in str(choice)
    made = launches(problem, choice)
    assert choice.schedule is not None and len(made) == 3 + choice.schedule.reduction
    assert made[2].arguments["TERMS"] == len(EMULATED[precision].terms)
    assert select(replace(problem, K=0), HOPPER).kernel == "portable"


NOT_HOPPER = [(8, 0), (8, 9), (10, 0), (12, 0)]


@pytest.mark.parametrize("capability", NOT_HOPPER, ids=str)
@pytest.mark.parametrize("mode", MODES)
def test_each_mode_runs_on_the_portable_kernel_where_the_hardware_has_it(mode: str, capability) -> None:
    device, problem = device_of_capability(capability), in_mode(mode)
    if mode.startswith("fp8") and capability < (8, 9):
        with pytest.raises(RuntimeError, match=r"fp8.* on sm_80: fp8.* needs compute capability 8\.9 or newer"):
            select(problem, device)
        return
    choice = select(problem, device)
    assert choice.kernel == "portable" or (choice.kernel, mode) == ("fma", "ieee")
    assert choice.precision == problem.precision
    for size in ((1, 1, 1), (1, 4096, 4096), (4096, 5, 4096), (4097, 4099, 8195), (300, 200, 0), (33, 35, 2**17 + 1)):
        M, N, K = size
        orders = [Layout((0, K, 1)), Layout((0, 1, K), False), Layout((0, 1, M)), Layout((0, N, 1))]
        for a, b, c in ((0, 1, 3), (1, 1, 2), (0, 0, 3)):
            odd = replace(problem, M=M, N=N, K=K, a=orders[a], b=orders[b], c=orders[c])
            found = select(odd, device)
            others = {"gemv": ("half", "ieee", "tf32"), "skinny": ("half",), "fma": ("ieee",)}
            assert found.kernel == "portable" or mode in others[found.kernel]
            assert len(launches(odd, found)) == 1 + len(found.packed)


@pytest.mark.parametrize("mode", MODES)
def test_each_mode_runs_on_hopper(mode: str) -> None:
    expected = {"ieee": ("fma", "portable"), "fp64": ("mma_fp64",)}.get(mode, ("warp_specialised",))
    assert select(in_mode(mode), HOPPER).kernel in expected
    assert select(in_mode(mode, K=0), HOPPER).kernel in ("portable", "gemv")


def test_blocks_of_scales_are_sums_of_pieces() -> None:
    """And there is no swap_ab: A's blocks are not B's."""
    problem = in_mode("fp8 blocks", c=Layout((0, 1, 512)))
    for capability in NOT_HOPPER[1:]:
        assert not select(problem, device_of_capability(capability)).swap_ab
        with pytest.raises(RuntimeError, match="blocks of scales need promotion, fp8 fast has none"):
            select(replace(problem, precision="fp8 fast"), device_of_capability(capability))


def test_tf32_is_rounded_by_tma_and_read_along_k() -> None:
    """But for A, whose columns may go through registers."""
    along, across = Layout((0, 512, 1)), Layout((0, 1, 512))
    square = of(512, 512, 512, dtype=torch.float32, out_dtype=torch.float32, precision="tf32")
    for a, b, copies in ((along, across, 0), (across, across, 0), (along, along, 0), (across, along, 1)):
        problem = replace(square, a=a, b=b)
        choice = select(problem, HOPPER)
        assert len(choice.packed) == copies
        *_, launch = launches(problem, choice)
        maps = [launch.arguments[name] for name in ("a_desc", "b_desc", "b_tail_desc", "c_desc")]
        assert [x.to_tf32 for x in maps] == [True, True, True, False]
        assert launch.arguments["B_COLUMN_MAJOR"]


@pytest.mark.parametrize("newer", [True, False])
def test_clusters_are_chosen_where_they_can_run_and_missed_where_not(
    newer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = of(712, 1264, 4976)
    monkeypatch.setattr(forms, "CLUSTERS", newer)
    compared = {candidate.algorithm.config for _, candidate in ranked(problem, HOPPER)}
    assert bool(compared & {*warp_specialised.CLUSTERED}) == newer
    choice = select(problem, HOPPER)
    assert (choice.config.ctas > 1) == newer
    assert choice.reason.endswith("; without clusters, which need Triton 3.9") != newer
    groups = replace(problem, batch=8, groups="m", b=Layout((problem.N * problem.K, 1, problem.K)))
    assert select(groups, HOPPER).kernel == "warp_specialised"
    assert "clusters" not in select(groups, HOPPER).reason, "groups never have them"


@pytest.mark.parametrize("size", [(8192, 4096, 1024), (8192, 3072, 1024), (8192, 1024, 1024)], ids=str)
def test_a_bias_of_columns_is_read_as_one_of_rows(size: tuple[int, int, int]) -> None:
    """By swap_ab: a thread then reads one value per row. Measured, 3 to 5 % faster with these tiles."""
    M, N, K = size
    plain = along_k(M, N, K)
    assert select(replace(plain, bias="n"), HOPPER).swap_ab
    assert not select(replace(plain, bias="m"), HOPPER).swap_ab


def test_the_interpreter_gets_what_it_can_run() -> None:
    """It has no Gluon; of few rows a few wide programs: it took a minute for 1x4096x1024 in tiles of one column."""
    assert select(in_mode("tf32"), INTERPRETER).kernel == "portable"
    for size in ((4096, 4096, 4096), (4096, 4097, 4095), (1, 512, 512)):
        assert select(of(*size), INTERPRETER).kernel in ("portable", "gemv")
    for rows in range(1, skinny.MAX_ROWS + 1):
        assert select(along_k(rows, 4096, 4096), INTERPRETER).kernel in ("portable", "gemv")
    for size in ((1, 4096, 1024), (4096, 4, 1024), (3, 4095, 1023)):
        problem = along_k(*size, dtype=torch.float32, precision="ieee")
        (launch,) = launches(problem, select(problem, INTERPRETER))
        assert prod(launch.grid) <= 64


def test_it_takes_no_time() -> None:
    sizes = [1, 40, 500, 3000, 20_000, 130_000]
    problems = [of(M, N, K) for M in sizes for N in sizes for K in sizes]
    start = time.process_time()
    for problem in problems:
        select(problem, HOPPER)
    assert (time.process_time() - start) / len(problems) < 0.02


def test_the_message_for_an_old_gpu_names_what_is_needed() -> None:
    with pytest.raises(RuntimeError, match=r"^matmul needs compute capability 8\.0 or newer, sm_75 has less$"):
        select(of(64, 64, 64), device_of_capability((7, 5)))


@pytest.mark.parametrize(
    ("problem", "why"),
    [
        (of(100, 100, 101), "; TMA cannot take a (100, 101): its rows are 202 bytes apart"),
        (of(64, 64, 64), ""),
        (of(65, 65, 0), ""),
    ],
    ids=["odd rows", "what it could take", "nothing to load"],
)
def test_hopper_says_what_kept_tma_away(problem: GemmProblem, why: str) -> None:
    choice = select(problem, HOPPER)
    assert choice.kernel == "portable" and why in choice.reason
    assert bool(why) == ("TMA" in choice.reason)
    for capability in NOT_HOPPER:
        assert "TMA" not in select(problem, device_of_capability(capability)).reason


@pytest.mark.parametrize("problem", [of(64, 64, 64), of(100, 100, 101), of(1, 512, 512), of(65, 65, 0)], ids=str)
def test_the_next_best_kernel_is_the_first_other_that_is_legal(problem: GemmProblem) -> None:
    choice = select(problem, HOPPER)
    others = [
        (time, candidate.algorithm.kernel)
        for time, candidate in ranked(problem, HOPPER)
        if candidate.algorithm.kernel != choice.kernel and illegal(problem, HOPPER, candidate) is None
    ]
    about, us, rest = choice.reason.partition(" us")
    expected = f"{about}{us}, {others[0][1]} about {others[0][0]:.3g} us{rest}" if others else choice.reason
    assert next_best(problem, HOPPER, choice) == replace(choice, reason=expected)


@pytest.mark.parametrize(
    "problem", [of(512, 511, 509), in_mode("tf32x3"), of(64, 64, 64)], ids=["odd", "planes", "none"]
)
def test_a_prediction_has_the_time_of_copies(problem: GemmProblem) -> None:
    model, compared = model_of(HOPPER), ranked(problem, HOPPER)
    for us, candidate in compared:
        assert predicted(problem, candidate, model) == us
        name, config, work, _, packed = candidate.algorithm
        own = kernels.named(name).microseconds(candidate.problem, config, work, model)
        assert us > own if packed else us == own
    assert any(candidate.algorithm.packed for _, candidate in compared) == (problem.M != 64)


def test_a_choice_has_a_schedule_or_a_number_of_parts() -> None:
    """Which its words have, as a cluster's form."""
    persistent, other = select(of(4096, 4096, 4096), HOPPER), select(of(64, 64, 64), HOPPER)
    assert persistent.work is persistent.schedule is not None and persistent.split_k == 1
    assert other.schedule is None and other.work == other.split_k >= 1
    plain = Selection(Algorithm("portable", other.config), "because")
    assert plain.work == 1 and str(plain) == f"portable {other.config}: because"
    algorithm = Algorithm("portable", other.config, 3, swap_ab=True, packed=("b",))
    parts = replace(plain, algorithm=algorithm, precision="tf32", device="a GPU")
    assert (parts.kernel, parts.config, parts.work, parts.swap_ab, parts.packed) == algorithm
    assert (parts.schedule, parts.split_k) == (None, 3)
    assert str(parts) == f"portable {other.config}, tf32, K in 3 parts, swap_ab, b repacked, on a GPU: because"
    split = select(of(64, 64, 65536), HOPPER)
    assert split.schedule is not None and split.schedule.split_tiles > 0
    assert f"{split.schedule.split_tiles} tiles in {split.schedule.split_k} parts" in str(split)
    config = replace(warp_specialised.CONFIGS[0], CLUSTER_M=4, CLUSTER_N=2)
    clustered = Selection(Algorithm("warp_specialised", config, Schedule(15)), "because")
    assert str(clustered) == "warp_specialised 128x256x64 8 warps 4 stages cluster 4x2: because"


def test_ieee_is_multiplied_across_k() -> None:
    """What does not lie so is copied: A along K, B along K, rows of an odd pitch, an address inside of 16 bytes."""
    square = of(1024, 1024, 1024, dtype=torch.float32, out_dtype=torch.float32, precision="ieee")
    along, across = Layout((0, 1024, 1)), Layout((0, 1, 1024))
    for a, b, packed in (
        *((across, along, ()), (along, along, ("a",)), (across, across, ("b",)), (along, across, ("a", "b"))),
        *((Layout((0, 1, 1025)), along, ("a",)), (across, Layout((0, 1024, 1), False), ("b",))),
    ):
        for device in DEVICES:
            choice = select(replace(square, a=a, b=b), device)
            assert (choice.kernel, choice.packed) == ("fma", packed)


def test_long_sums_of_many_tiles_take_turns_in_little_memory() -> None:
    square = of(4096, 4096, 14336, dtype=torch.float32, out_dtype=torch.float32, precision="ieee")
    choice = select(square, HOPPER)
    *_, launch = launches(square, choice)
    assert choice.split_k == 4 and launch.arguments["IN_TURN"]
    assert [t.shape for t in launch.temporaries] == [(launch.counters, 128 * 128)] and launch.workspace == 0


def test_cpu_tensors_name_the_interpreter() -> None:
    for call in (triton_gemm.matmul, triton_gemm.explain):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            call(torch.ones(2, 3), torch.ones(3, 4))


def test_a_reduction_s_bound_counts_the_parts_that_there_are() -> None:
    """Not those that there would be room for: with fewer every second SM may be idle, and the others load faster."""
    layouts = Layout((598016, 4672, 1)), Layout((574656, 1, 4672)), Layout((15744, 1, 128))
    problem = GemmProblem(2, 128, 123, 4660, torch.bfloat16, torch.float32, "half", *layouts, bias="n")
    device = named_device("h200")
    assert float(select(problem, device).reason.split()[1]) <= ranked(problem, device)[0][0] * 1.01


def test_groups_are_predicted_with_all_rows_of_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """A tile that ends beyond its group loads the next one's rows."""
    host, layouts = warp_specialised.host, (Layout((0, 7168, 1)), Layout((0, 1, 7168)), Layout((0, 2048, 1)))
    problem = GemmProblem(64, 512, 2048, 7168, torch.bfloat16, torch.bfloat16, "half", *layouts, groups="m")
    assert host.few_copied(problem) == (0, 0)
    times = []
    for copied in (host.few_copied, lambda problem: (0, 0)):
        monkeypatch.setattr(host, "few_copied", copied)
        monkeypatch.setattr(warp_specialised.costs, "_KNOWN", cost_model.Remembered())
        found = ranked(problem, named_device("h200"))
        times.append([time for time, candidate in found if candidate.algorithm.kernel == "warp_specialised"])
    assert times[0] == times[1] and times[0]
