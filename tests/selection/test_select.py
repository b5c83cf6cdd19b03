"""What matmul chooses, for GPUs that are not here; and what it says where there is none."""

from __future__ import annotations

from dataclasses import fields, replace
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.arithmetic import EMULATED, MODES
from triton_gemm.hardware.device import SHARED_MEMORY, DeviceInfo, device_of_capability
from triton_gemm.hardware.device_model import measured, model_of
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import cost_model, fma, forms, warp_specialised
from triton_gemm.kernels.launch import Pointer, TensorMap
from triton_gemm.kernels.portable import host
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised import costs
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout
from triton_gemm.runtime.binaries import launches_on
from triton_gemm.runtime.workspace import COUNTERS
from triton_gemm.selection import select as selection
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, about, illegal, launches, predicted, ranked, select
from triton_gemm.tables import records

DEVICES = [device_of_capability(capability) for capability in SHARED_MEMORY if capability >= (8, 0)]

KINDS = [
    *((torch.float32, torch.float32, "ieee"), (torch.float32, torch.float32, "tf32")),
    *((torch.float16, torch.float16, "half"), (torch.bfloat16, torch.bfloat16, "half")),
    *((torch.bfloat16, torch.float32, "half"), (torch.float64, torch.float64, "fp64")),
    *((torch.int8, torch.int32, "int8"), (torch.float32, torch.float32, "bf16x6")),
]
SIZES = st.one_of(st.integers(1, 2**17), st.sampled_from([1, 2, 4, 5, 16, 64, 128, 4096]))
ORDERS = ["row-major", "column-major", "steps"]
BATCHES = [1, 1, 1, 2, 64, 70_000]


@st.composite
def layouts(draw: st.DrawFn, rows: int, columns: int, batch: int, *, written: bool = False) -> Layout:
    """Any layout of [batch, rows, columns]: padded or not, unaligned; an operand's also of one row or one matrix."""
    order = draw(st.sampled_from(ORDERS))
    outer, inner = (columns, rows) if order == "column-major" else (rows, columns)
    step = 3 if order == "steps" else 1
    pitch = inner * step + draw(st.sampled_from([0, 0, 1, 8, -inner * step % 8]))
    matrix = outer * pitch + draw(st.sampled_from([0, 0, 5]))
    if not written:
        pitch *= draw(st.sampled_from([1, 1, 1, 0]))
        matrix *= draw(st.sampled_from([1, 1, 0]))
    strides = (step, pitch) if order == "column-major" else (pitch, step)
    return Layout((matrix if batch > 1 else 0, *strides), draw(st.sampled_from([True, True, True, False])))


@st.composite
def problems(draw: st.DrawFn) -> GemmProblem:
    M, N, K = draw(SIZES), draw(SIZES), draw(st.one_of(SIZES, st.just(0)))
    batch = draw(st.sampled_from(BATCHES))
    if batch * M * N > 2**36:  # more than any GPU holds
        M, N = min(M, 512), min(N, 512)
    dtype, out_dtype, precision = draw(st.sampled_from(KINDS))
    return GemmProblem(
        *(batch, M, N, K, dtype, out_dtype, precision),
        draw(layouts(M, K, batch)),
        draw(layouts(K, N, batch)),
        draw(layouts(M, N, batch, written=True)),
        has_beta=draw(st.booleans()),
        bias=draw(st.sampled_from([None, None, "m", "n"])),
        activation=draw(st.sampled_from([None, None, *ACTIVATIONS])),
    )


def of(M: int, N: int, K: int, batch: int = 1, **changes: object) -> GemmProblem:
    """A bf16 problem in contiguous matrices."""
    step = 1 if batch > 1 else 0
    layouts = (Layout((step * M * K, K, 1)), Layout((step * K * N, N, 1)), Layout((step * M * N, N, 1)))
    problem = GemmProblem(batch, M, N, K, torch.bfloat16, torch.bfloat16, "half", *layouts)
    return replace(problem, **changes)


def along_k(M: int, N: int, K: int, batch: int = 1, **changes: object) -> GemmProblem:
    """Like that, but B's columns lie along K, as weights do."""
    return of(M, N, K, batch, **{"b": Layout((K * N if batch > 1 else 0, 1, K)), **changes})


CASES = given(problems(), st.sampled_from(DEVICES))
MANY = settings(max_examples=400, deadline=None)


def seen_by_kernel(problem: GemmProblem, choice: Selection) -> GemmProblem:
    """The problem that the chosen kernel is given: after copies and swap_ab."""
    problem = repacked(problem, choice.packed)
    return problem.swap_ab() if choice.swap_ab else problem


@MANY
@CASES
def test_every_choice_is_legal_and_the_fastest_and_says_why(problem: GemmProblem, device: DeviceInfo) -> None:
    """For its kernel, and by the model's predictions; the same every time."""
    choice = select(problem, device)
    kernel = kernels.named(choice.kernel)
    assert kernel.illegal(seen_by_kernel(problem, choice), device, choice.config, choice.work) is None
    assert isinstance(choice.config, kernel.Config) and choice.split_k >= 1
    assert select(problem, device) == choice
    assert str(choice).startswith(f"{choice.kernel} {choice.config}") and str(choice).endswith(f": {choice.reason}")
    for microseconds, candidate in ranked(problem, device):
        if Selection.of(candidate, "") == replace(choice, reason=""):
            assert choice.reason.startswith(about(microseconds, problem, device))
            return
        assert illegal(problem, device, candidate) is not None
    pytest.fail("what was chosen is no candidate")


@MANY
@CASES
def test_its_launches_name_operands_there_are(problem: GemmProblem, device: DeviceInfo) -> None:
    choice = select(problem, device)
    there = {"a", "b", "c"} | ({"bias"} if problem.bias else set())
    made = launches(problem, choice)
    reduced = choice.schedule is not None and choice.schedule.reduction
    assert len(made) == len(choice.packed) + 1 + reduced
    for launch in made:
        there |= {temporary.name for temporary in launch.temporaries}
        there |= {"workspace", "counters"} if launch.counters else set()
        named = {x.operand for x in launch.arguments.values() if isinstance(x, Pointer | TensorMap)}
        assert named <= there, "a launch names an operand that nobody gives it"
        assert list(launch.arguments) == launch.kernel.arg_names
        assert all(size > 0 for size in launch.grid) and launch.grid[0] < 2**31
        assert max(launch.grid[1:]) <= 65_535
    assert made[-1].counters <= COUNTERS
    assert made[-1].counters or not made[-1].workspace, "who shares a workspace counts"


@MANY
@CASES
def test_kernels_and_copies_are_those_that_a_problem_needs(problem: GemmProblem, device: DeviceInfo) -> None:
    """Hopper's kernel for Hopper's tensor cores, outer products for IEEE, copies where operands cannot be read as they
    lie, or are read badly; and c^T = b^T a^T is the same work, for the same kernel."""
    choice = select(problem, device)
    by_ws, by_fma = choice.kernel == "warp_specialised", choice.kernel == "fma"
    assert (choice.schedule is not None) == by_ws
    assert not by_fma or fma.unreadable(problem) == choice.packed
    if device.capability != (9, 0) or problem.precision in ("ieee", "fp64") or problem.K == 0:
        across = problem.dtype.itemsize == 1 and device.capability[0] in (8, 12)
        assert not by_ws and (by_fma or not choice.packed or across)
    if by_fma:
        assert problem.precision == "ieee"
        seen = seen_by_kernel(problem, choice)
        many = seen.batch * choice.config.tiles(seen.M, seen.N) > COUNTERS
        assert many or choice.split_k >= fma.MAX_SPLIT or -(-problem.K // choice.split_k) <= fma.LONGEST_CHAIN
    elif not by_ws:  # the portable kernel copies 8-bit operands that do not lie along K
        assert not choice.packed or not {*choice.packed} & {*host.along_k(problem)}
    else:
        assert problem.planes.count == 1 or choice.packed == ("a", "b")
        itemsize, layouts = problem.dtype.itemsize, {"a": problem.a, "b": problem.b}
        unreadable = {name for name, layout in layouts.items() if layout.tma_illegal(itemsize) is not None}
        others = set(choice.packed) - unreadable
        assert unreadable <= set(choice.packed) and choice.packed == tuple(sorted(choice.packed))
        assert repacked(problem, choice.packed).tma_illegal() is None
        if problem.precision == "half":
            assert len(others) <= 1
            assert all(cost_model.pitch(layouts[name], itemsize) % cost_model.SECTOR for name in others)
    if problem.M != problem.N:
        assert select(problem.swap_ab(), device).kernel == choice.kernel


@pytest.mark.parametrize("groups", ["m", "k"])
@pytest.mark.parametrize("precision", MODES)
def test_groups_are_not_split_into_planes(precision: str, groups: str) -> None:
    """Those of tf32x3 have the dtype of their operands, which so must not be taken for planes."""
    problem = along_k(512, 256, 256, groups=groups, dtype=torch.float32, out_dtype=torch.float32, precision=precision)
    problem = replace(problem, batch=4, a=Layout((0, 256, 1)), b=Layout((256 * 256, 1, 256)), c=Layout((0, 256, 1)))
    for _, candidate in ranked(problem, HOPPER):
        assert candidate.algorithm.kernel != "warp_specialised" or candidate.problem.planes.count == 1
    if problem.planes.count > 1:  # of a table, too
        config = warp_specialised.configs(torch.float32)[0]
        assert "planes" in str(warp_specialised.illegal(problem, HOPPER, config, Schedule(132)))


def test_a_gpu_that_is_treated_as_an_older_one_is_offered_what_that_has() -> None:
    """By TRITON_GEMM_CAPABILITY; its model is its own."""
    device = replace(named_device("h100"), capability=(8, 0))
    for problem in (of(4096, 4096, 4096), of(512, 4096, 14336), in_mode("int8", M=4096, N=4096, K=4096)):
        first = next(one for _, one in ranked(problem, device) if illegal(problem, device, one) is None)
        assert select(problem, device).algorithm == first.algorithm


@pytest.mark.parametrize("clusters", [True, False])
@pytest.mark.parametrize("groups", [None, "m", "k"])
@pytest.mark.parametrize("name", measured())
def test_what_is_left_out_would_not_have_been_chosen(
    name: str, groups: str | None, clusters: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """`select` compares only what may be the fastest: as if it had compared all."""
    monkeypatch.setattr(forms, "CLUSTERS", clusters)
    device, random = replace(HOPPER, name=name), Random(0)
    for _ in range(40):
        M, N, K = (random.choice([random.randrange(8, 1024, 8), 2 ** random.randint(4, 14)]) for _ in range(3))
        problem = random.choice([of, along_k])(M, N, K, 8 if groups else random.choice([1, 1, 16]), groups=groups)
        if groups:
            b = Layout((0, N, 1)) if groups == "k" else problem.b
            c = Layout((0, N, 1)) if groups == "m" else problem.c
            problem = replace(problem, a=Layout((0, K, 1)), b=b, c=c)
        time, candidate = next(one for one in ranked(problem, device) if illegal(problem, device, one[1]) is None)
        choice = select(problem, device)
        assert choice == Selection.of(candidate, choice.reason)
        assert choice.reason.startswith(f"about {time:.3g} us")


@pytest.mark.parametrize("name", ["warp_specialised", "portable"])
@pytest.mark.parametrize("mode", ["half", "int8", "tf32", "bf16x3"])
@pytest.mark.parametrize("K", [200, 4096, 65536])
def test_no_candidate_takes_less_than_its_bound(name: str, mode: str, K: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """And each has one: whole, cut on its last wave or all over, added up by a second launch, and of few rows."""
    monkeypatch.setattr(forms, "CLUSTERS", True)
    kernel, model = kernels.named(name), model_of(HOPPER)
    for M, N, batch in ((1, 4096, 1), (48, 512, 3), (136, 1536, 1), (640, 2112, 1), (4096, 4096, 1), (264, 256, 16)):
        problem = in_mode(mode, M=M, N=N, K=K, batch=batch)
        problem = along_k(M, N, K, batch, bias="n") if mode == "half" else problem
        found = []
        for bound, place, candidates in kernel.lower_bounds(problem, HOPPER, model):
            listed = list(candidates)
            assert all(bound <= predicted(problem, one, model) * cost_model.ROUNDING for one in listed)
            found += [(place, one) for one in listed]
        assert [one for _, one in found] == list(kernel.candidates(problem, HOPPER))
        assert found == sorted(found, key=lambda one: one[0])


@MANY
@given(st.lists(st.floats(0.1, 1e4), min_size=3, max_size=3), st.integers(0, 2), st.floats(1.0, 4.0))
def test_a_time_at_the_power_limit_grows_with_each_part(parts: list[float], which: int, factor: float) -> None:
    """Or bounds would be none. It is no less than without the limit, and stretched by MOST_LIMITED at most."""
    times = []
    for scale in (1.0, factor):
        busy, others, power = (x * (scale if i == which else 1.0) for i, x in enumerate(parts))
        times.append(costs.sustained(busy, others**3, power))
        least, most = ((limited * busy**3 + others**3) ** (1 / 3) for limited in (1.0, costs.MOST_LIMITED))
        assert least <= times[-1] * cost_model.ROUNDING and times[-1] <= most * cost_model.ROUNDING
    assert times[0] <= times[1] * cost_model.ROUNDING


def test_bounds_leave_few_candidates_to_predict(monkeypatch: pytest.MonkeyPatch) -> None:
    """Less than one in five, of matrices of a layer and many rows."""
    times: list[float] = []

    def counted(*arguments: Any) -> float:
        times.append(predicted(*arguments))
        return times[-1]

    monkeypatch.setattr(selection, "predicted", counted)
    problems = [along_k(M, 4096, 7168) for M in (300, 1000, 2048, 4096)]
    for problem in problems:
        select(problem, HOPPER)
    assert 0 < 5 * len(times) < sum(len(ranked(problem, HOPPER)) for problem in problems)


# Problems that each kernel takes, and figures that none proposes, but a user or a file may.
TAKEN = [
    along_k(4, 6144, 4096),
    along_k(40, 1, 1024, 2),
    of(2, 4096, 1000),
    of(3, 512, 520, dtype=torch.float32, out_dtype=torch.float32, precision="ieee"),
    along_k(512, 1024, 2048, bias="n", activation="gelu"),
    along_k(72, 136, 65_536),
    of(131, 200, 1040, 3, has_beta=True),
    of(300, 200, 9000, dtype=torch.float32, out_dtype=torch.float32, precision="ieee"),
    along_k(300, 200, 900, dtype=torch.float32, out_dtype=torch.float32, precision="bf16x6"),
    along_k(300, 200, 900, dtype=torch.float64, out_dtype=torch.float64, precision="fp64"),
    along_k(128, 256, 512, dtype=torch.int8, out_dtype=torch.int32, precision="int8"),
    along_k(128, 256, 512, dtype=torch.float8_e4m3fn, precision="fp8", scales="blocks"),
    of(512, 1024, 2048, 8, a=Layout((0, 2048, 1)), c=Layout((0, 1024, 1)), groups="m"),
]
FIGURES = st.sampled_from([1, 2, 3, 4, 8, 12, 16, 32, 64, 96, 128, 160, 192, 256, 512, 1024, 4096, 2**16])


@pytest.mark.parametrize("name", kernels.KERNELS)
@MANY
@given(st.data())
def test_what_is_legal_can_be_launched(name: str, data: st.DataObject) -> None:
    """Some figures of a candidate are others: where the kernel does not say why it cannot run, it says what it runs."""
    device = data.draw(st.sampled_from([HOPPER] if name in ("warp_specialised", "mma_fp64") else DEVICES))
    problem = data.draw(st.sampled_from([one for one in TAKEN if any(kernels.named(name).candidates(one, device))]))
    _, algorithm = data.draw(st.sampled_from(list(kernels.named(name).candidates(problem, device))))
    config, work = algorithm.config, algorithm.work
    for changed in data.draw(st.sets(st.sampled_from([field.name for field in fields(config)]), max_size=3)):
        config = replace(config, **{changed: data.draw(FIGURES)})
    if isinstance(work, int) and data.draw(st.booleans()):
        work = data.draw(FIGURES)
    algorithm = algorithm._replace(config=config, work=work)
    if records.nonsense(algorithm) is None and records.illegal(problem, device, algorithm) is None:
        selection = Selection(algorithm, "", problem.precision)
        assert launches_on(device, problem, selection) and bit_class(problem, selection)


# Tiles that a kernel does not have on any problem, of kernels that have few.
NO_TILES = [
    ("skinny", (16, 32, 512, 4, 2), "16x8 or 16, not 16x32"),
    ("skinny", (8, 16, 512, 4, 2), "not 8x16"),
    ("skinny", (16, 8, 256, 4, 2), "512 elements along K, not 256"),
    ("skinny", (16, 8, 4096, 32, 2), "more than a multiprocessor has"),
    ("fma", (64, 64, 16, 8, 3), "no tile 64x64 of 8 warps"),
    ("fma", (128, 32, 16, 2, 3), "no tile 128x32 of 2 warps"),
    ("fma", (256, 256, 16, 32, 2), "no tile 256x256 of 32 warps"),
    ("fma", (64, 64, 16, 2, 1), "two stages"),
    ("mma_fp64", (64, 64, 16, 8, 3), "no tile 64x64x16"),
    ("mma_fp64", (64, 64, 8, 2, 1), "two stages"),
]


@pytest.mark.parametrize(("name", "figures", "why"), NO_TILES)
def test_tiles_that_a_kernel_does_not_have_are_refused(name: str, figures: tuple[int, ...], why: str) -> None:
    kernel = kernels.named(name)
    problem = next(one for one in TAKEN if any(kernel.candidates(one, HOPPER)))
    assert why in str(kernel.illegal(problem, HOPPER, kernel.Config(*figures), 1))
    candidate = next(iter(kernel.candidates(problem, HOPPER)))
    assert illegal(problem, HOPPER, candidate) is None


def test_an_operand_that_takes_more_programs_than_a_grid_has_is_not_copied_first() -> None:
    problem = of(85_313, 1, 1409, 70_000, dtype=torch.float32, out_dtype=torch.float32, precision="ieee")
    assert "a grid has at most 2147483647" in str(kernels.repack.illegal(problem, ("a",)))
    assert all(launch.grid[0] < 2**31 for launch in launches(problem, select(problem, HOPPER)))


@pytest.mark.parametrize("size", [(2**31 + 64, 8, 8), (8, 2**31 + 64, 8), (2, 8, 2**31 + 64)], ids=str)
def test_no_kernel_takes_a_side_that_32_bits_do_not_count(size: tuple[int, int, int]) -> None:
    """Their tiles, and TMA's coordinates, are of 32 bits."""
    problem = along_k(*size)
    found = [
        (kernels.named(name).illegal(given, HOPPER, algorithm.config, algorithm.work), name)
        for name in kernels.KERNELS
        for given, algorithm in kernels.named(name).candidates(problem, HOPPER)
    ]
    assert found
    assert [name for why, name in found if why is None] == []


def test_no_tile_is_cut_into_parts_that_32_bits_do_not_count() -> None:
    """A part begins at a k-tile that is found as k-tiles times parts."""
    K = 2**31 - 1024
    problem = of(1, 4, K, dtype=torch.float16, out_dtype=torch.float16)
    tile = kernels.gemv.Config(1, 64, 32, 4)
    assert kernels.gemv.illegal(problem, HOPPER, tile, 16) is None
    assert "k-tiles times parts" in str(kernels.gemv.illegal(problem, HOPPER, tile, 64))
    problem = along_k(16, 16, K)
    config = kernels.warp_specialised.Config(64, 16, 64, 4, 8)
    for parts, legal in ((32, True), (132, False)):
        why = kernels.warp_specialised.illegal(problem, HOPPER, config, Schedule(parts, 1, parts, reduction=True))
        assert (why is None) == legal and (legal or "k-tiles times parts" in str(why))


FP8, FAST = torch.float8_e4m3fn, torch.float8_e5m2
MODES: dict[str, tuple[torch.dtype, torch.dtype, str, str | None]] = {
    "half": (torch.float16, torch.float16, "half", None),
    "ieee": (torch.float32, torch.float32, "ieee", None),
    "tf32": (torch.float32, torch.float32, "tf32", None),
    **{mode: (torch.float32, torch.float32, mode, None) for mode in EMULATED},
    "fp64": (torch.float64, torch.float64, "fp64", None),
    "int8": (torch.int8, torch.int32, "int8", None),
    "int8 rows": (torch.int8, torch.bfloat16, "int8", "rows"),
    "fp8 tensor": (FP8, torch.bfloat16, "fp8", "tensor"),
    "fp8 rows": (FAST, torch.bfloat16, "fp8", "rows"),
    "fp8 blocks": (FP8, torch.bfloat16, "fp8", "blocks"),
    "fp8 fast": (FAST, torch.float32, "fp8 fast", "tensor"),
}


def in_mode(mode: str, M: int = 512, N: int = 768, K: int = 1024, **changes: object) -> GemmProblem:
    dtype, out_dtype, precision, scales = MODES[mode]
    return of(M, N, K, dtype=dtype, out_dtype=out_dtype, precision=precision, scales=scales, **changes)
