"""Classes of bits: equal only where K is cut alike for every element of C, and told apart by nothing else."""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.test_compile_portable import instruction
from tests.support.compiled_kernels import compile_launch
from tests.support.sums_by_hand import parts, same
from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.arithmetic import ARITHMETICS, HALF, Arithmetic
from triton_gemm.hardware.device import DeviceInfo, device_of_capability
from triton_gemm.kernels import fma, gemv, portable, skinny, warp_specialised
from triton_gemm.kernels.candidate import Algorithm, Work
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised import promotion
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, launches, ranked, select

AMPERE = device_of_capability((8, 0))


def layout(rows: int, columns: int, order: str, pad: int = 16) -> Layout:
    row, column = -(-rows // pad) * pad, -(-columns // pad) * pad
    return Layout((0, column, 1) if order == "n" else (0, 1, row))


def problem_of(
    M: int = 300,
    N: int = 500,
    K: int = 1024,
    precision: str = "half",
    orders: str = "ntn",
    pad: int = 16,
    **fields: object,
) -> GemmProblem:
    arithmetic = ARITHMETICS[precision]
    dtype = arithmetic.dtypes[-1]
    scales = fields.pop("scales", None if arithmetic.plain else "tensor")
    out = torch.bfloat16 if dtype.itemsize == 1 and scales else arithmetic.out_dtype or dtype
    layouts = [layout(*shape, order, pad) for shape, order in zip(((M, K), (K, N), (M, N)), orders, strict=True)]
    return GemmProblem(1, M, N, K, dtype, out, precision, *layouts, scales=scales, **fields)


@st.composite
def problems(draw: st.DrawFn, arithmetics: tuple[Arithmetic, ...] = tuple(ARITHMETICS.values())) -> GemmProblem:
    arithmetic = draw(st.sampled_from(arithmetics))
    sizes = [draw(st.integers(1, size)) for size in (700, 700, 9000)]
    fields: dict[str, object] = {"scales": None if arithmetic.plain else draw(st.sampled_from(arithmetic.scales))}
    if arithmetic.dtypes[0].itemsize > 1:
        fields |= {"has_beta": draw(st.booleans()), "activation": draw(st.sampled_from([None, *ACTIVATIONS]))}
    orders = "".join(draw(st.sampled_from("nt")) for _ in range(3))
    return problem_of(*sizes, arithmetic.name, orders, draw(st.sampled_from([1, 16])), **fields)


def selections(problem: GemmProblem, device: DeviceInfo) -> list[Selection]:
    """Of all legal candidates."""
    found = ranked(problem, device, any_bits=True)
    return [Selection.of(x, "") for _, x in found if illegal(problem, device, x) is None]


@pytest.mark.parametrize("arithmetic", [HALF, ARITHMETICS["tf32"], ARITHMETICS["fp8"], ARITHMETICS["int8"]], ids=str)
def test_by_default_bits_do_not_depend_on_the_size_of_c(arithmetic: Arithmetic) -> None:
    """Tiles of the last of several waves alone are cut where any bits are asked for, and in exact sums."""
    scales = None if arithmetic.plain else "tensor"
    for M, N, K in ((569, 28672, 4096), (272, 51200, 5120), (8192, 10240, 8192), (3712, 10688, 7808)):
        problem = problem_of(M, N, K, arithmetic.name, "ntn", scales=scales)
        assert " of C " not in bit_class(problem, select(problem, HOPPER))
        assert not any(" of C " in bit_class(problem, one) for _, one in ranked(problem, HOPPER))
        more = [one for _, one in ranked(problem, HOPPER, any_bits=True)]
        cut = [one for one in more if isinstance(one.algorithm.work, Schedule) and one.algorithm.work.split_tiles]
        assert cut and any(" of C " in bit_class(problem, one) for one in cut) == (not arithmetic.exact)


def promoted(problem: GemmProblem, selection: Selection) -> int:
    """How many elements along K are summed by tensor cores before their sum is promoted: a k-tile, or a piece of it."""
    pieces = promotion.pieces(problem, selection.config) if selection.kernel == "warp_specialised" else 1
    return selection.config.BLOCK_K // pieces


@settings(deadline=None, max_examples=40)
@given(problems(), st.sampled_from([HOPPER, AMPERE]))
def test_equal_classes_cut_k_alike(problem: GemmProblem, device: DeviceInfo) -> None:
    """Every element of C, whatever computes it."""
    classes = defaultdict(list)
    for selection in selections(problem, device):
        classes[bit_class(problem, selection)].append(selection)
    for name, members in classes.items():
        if "exact" in name:
            continue
        first, *others = (parts(problem, x) for x in members[:: max(1, len(members) // 8)])
        assert all(same(first, other) for other in others), name
        assert len({x.precision for x in members}) == 1
        assert len({promoted(problem, x) for x in members}) == 1 or "promoted" not in name


@settings(deadline=None, max_examples=40)
@given(problems((HALF,)))
def test_classes_say_no_more_than_matters(problem: GemmProblem) -> None:
    """What one kernel sums alike, by the same instructions and in even parts, is one class."""
    seen: list[tuple[dict[tuple[range, ...], np.ndarray], str, str]] = []
    for selection in selections(problem, HOPPER)[::7]:
        if selection.kernel not in ("warp_specialised", "portable"):
            continue
        name, cut = bit_class(problem, selection), parts(problem, selection)
        if "tiles" in name:  # where k-tiles end was told apart
            continue
        for other, kernel, other_name in seen:
            by_warps = "warp by warp" in name, "warp by warp" in other_name
            if kernel == selection.kernel and by_warps[0] == by_warps[1] and same(cut, other) and len(cut) == 1:
                assert longest(cut) != longest(other) or name == other_name
        seen.append((cut, selection.kernel, name))


def longest(cut: dict[tuple[range, ...], np.ndarray]) -> list[int]:
    return sorted(len(ranges) for ranges in cut)


def ws(config: int | warp_specialised.Config = 0, schedule: Schedule | None = None, **how: object) -> Selection:
    config = warp_specialised.CONFIGS[config] if isinstance(config, int) else config
    return by("warp_specialised", config, schedule or Schedule(132), **how)


def by(kernel: str, config: object, work: Work = 1, **how: object) -> Selection:
    return Selection(Algorithm(kernel, config, work, **how), "")


def by_portable(precision: str, number: int, work: Work = 1) -> Selection:
    return by("portable", portable.CONFIGS[precision][number], work)


def test_what_does_not_matter_is_not_in_it() -> None:
    problem = problem_of()
    one = "bf16, tensor cores, one sum along K"
    whole = [
        *(ws(i, swap_ab=swap) for i in range(len(warp_specialised.CONFIGS)) for swap in (False, True)),
        *(ws(config) for config in warp_specialised.CLUSTERED),
        ws(schedule=Schedule(7, group_m=3)),
        ws(packed=("a",)),
        ws(packed=("a", "b"), swap_ab=True),
        *(by("portable", config) for config in portable.CONFIGS["half"] if config.BLOCK_M >= 64),
    ]
    assert {bit_class(problem, x) for x in whole} == {one}
    split = [ws(i, Schedule(400, warp_specialised.CONFIGS[i].tiles(problem.M, problem.N), 4)) for i in (13, 14, 17)]
    split += [ws(i, Schedule(9, split_k=4)) for i in (6, 13, 14, 17)]  # each program's in turn
    split.append(ws(warp_specialised.CLUSTERED[0], Schedule(3, split_k=4, group_m=2), swap_ab=True))
    split.append(by_portable("half", 2, 4))
    assert {bit_class(problem, x) for x in split} == {"bf16, tensor cores, K in 4 parts of 256"}
    lying = Layout((0, 1, 2048), False)
    for change in ({"bias": "n"}, {"has_beta": True}, {"batch": 3}, {"a": lying}, {"c": lying}):
        assert bit_class(replace(problem, **change), ws()) == one, change
    of_fp32 = problem_of(precision="ieee")
    assert len({bit_class(of_fp32, by("fma", x, 3, swap_ab=s)) for x in fma.CONFIGS for s in (False, True)}) == 1
    integers = problem_of(precision="int8")
    assert {bit_class(integers, x) for x in (ws(), by_portable("int8", -1, 5))} == {"int8, exact sums"}


DIFFERENT = {
    "parts": (problem_of(), ws(14, Schedule(132, 20, 2)), ws(14, Schedule(132, 20, 3))),
    "parts in turn": (problem_of(), ws(14, Schedule(132, split_k=2)), ws(14, Schedule(132, split_k=4))),
    "whether there are parts in turn": (problem_of(), ws(14, Schedule(132)), ws(14, Schedule(132, split_k=4))),
    "whether all tiles have parts": (problem_of(), ws(14, Schedule(132, 3, 2)), ws(14, Schedule(132, split_k=2))),
    "which tiles are cut": (problem_of(), ws(14, Schedule(132, 3, 2)), ws(14, Schedule(132, 4, 2))),
    "which tiles come first": (problem_of(), ws(14, Schedule(132, 3, 2)), ws(14, Schedule(132, 3, 2, group_m=2))),
    "how large cut tiles are": (problem_of(), ws(14, Schedule(132, 3, 2)), ws(13, Schedule(132, 3, 2))),
    "which way they go": (problem_of(500, 500), ws(14, Schedule(132, 3, 2)), ws(14, Schedule(132, 3, 2), swap_ab=True)),
    "where uneven parts end": (problem_of(K=1088), ws(10, Schedule(132, 12, 3)), ws(14, Schedule(132, 20, 3))),
    "rounded down and up": (problem_of(K=1088), ws(10, Schedule(132, 12, 3)), by_portable("half", 2, 3)),
    "what multiplies": (problem_of(), by_portable("half", 2), by_portable("half", -1)),
    "how often sums are promoted": (problem_of(precision="fp8"), by_portable("fp8", 2), by_portable("fp8", 4)),
    "an activation, which was not measured": (problem_of(activation="gelu"), ws(), by_portable("half", 2)),
    "chains of FMAs": (problem_of(precision="ieee"), by("fma", fma.CONFIGS[0], 2), by("fma", fma.CONFIGS[0], 3)),
}


@pytest.mark.parametrize("name", DIFFERENT)
def test_what_matters_is_in_it(name: str) -> None:
    problem, one, other = DIFFERENT[name]
    assert bit_class(problem, one) != bit_class(problem, other)


def test_kernels_that_leave_their_order_to_the_compiler_share_no_class() -> None:
    few = problem_of(2, 4096, 8192)
    classes = defaultdict(set)
    for selection in selections(few, HOPPER):
        classes[bit_class(few, selection)].add(selection.kernel)
    of = {kernel for names in classes.values() for kernel in names}
    assert of == {"warp_specialised", "skinny", "gemv", "portable"}
    assert all(len(names) == 1 or names == {"warp_specialised", "portable"} for names in classes.values())


def test_what_the_compiler_makes_of_tl_dot_is_in_it() -> None:
    """By the rule that `test_compile_portable` holds every configuration to."""
    for precision in ("half", "tf32", "fp8", "bf16x6", "tf32x3"):
        for config in portable.CONFIGS[precision]:
            by_warps = "warp by warp" in bit_class(problem_of(precision=precision), by("portable", config))
            assert by_warps == ("GMMA" not in instruction(precision, config, (9, 0)))


TAIL = warp_specialised.Config(64, 96, 128, 4, 4)  # 32 of its columns are sums of their own
ADDED = {
    "portable": by_portable("half", -3),
    "whole": ws(14),
    "by-owners": ws(TAIL, Schedule(128, 32, 4)),
    "in-turn": ws(TAIL, Schedule(32, 0, 4)),
    "by-a-second-launch": ws(TAIL, Schedule(256, 64, 4, reduction=True)),
    "skinny": by("skinny", skinny.CONFIGS[0]),
    "gemv": by("gemv", gemv.CONFIGS[0]),
}


@pytest.mark.parametrize("selection", ADDED.values(), ids=ADDED)
def test_what_is_added_is_fused_alike(selection: Selection) -> None:
    """Of alpha acc + beta c one product is rounded by itself in every kernel, and in all of it: beta c."""
    few = selection.kernel in ("skinny", "gemv")
    problem = problem_of(1 if few else 200, 1536, 1024, has_beta=True)
    dtypes = {**dict.fromkeys("abc", torch.bfloat16), **dict.fromkeys(("sums", "workspace"), torch.float32)}
    launch = launches(problem, selection)[-1]
    assert launch.arguments["HAS_BETA"]
    ptx = compile_launch(launch, {**dtypes, "counters": torch.int32}, (9, 0)).asm["ptx"]
    scalars = re.findall(r"ld\.param\.(?:v2\.)?b\d+ \t{?(%rd?\d+)(?:, (%r\d+)})?, \[\w+_param_(\d+)", ptx)
    place = {name: 2 * int(number) + i for *names, number in scalars for i, name in enumerate(names)}
    place |= {x: place[y] for x, y in re.findall(r"cvt\.rn\.f32\.f64 \t(%r\d+), (%rd\d+);", ptx)}
    products = dict(re.findall(r"mul\.f32 \t(%r\d+), (%r\d+), ", ptx))
    fused = re.findall(r"fma\.rn\.f32 \t%r\d+, (%r\d+), %r\d+, (%r\d+);", ptx)
    ((alpha, beta),) = {(place[x], place[products[y]]) for x, y in fused if x in place and y in products}
    assert alpha < beta <= alpha + 2, "alpha comes first"


def test_every_kernel_says_its_order() -> None:
    for name in kernels.KERNELS:
        assert kernels.named(name).order_of_sums.__doc__
