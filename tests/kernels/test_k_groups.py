"""Sums over groups of K by the warp-specialised kernel, without a GPU: what its source computes on the CPU
(`gluon_on_cpu`), and what the compiler makes of it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch

from tests.kernels.test_compile_warp_specialised import compiled
from tests.support.group_truth import assert_right
from tests.support.kernel_cases import ids
from tests.support.simulated_plans import simulation
from tests.support.table_fakes import HOPPER
from triton_gemm.config import TileConfig
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select

CONFIGS = warp_specialised.CONFIGS
SMALL = CONFIGS[-1]  # 64x16x64
BF16 = torch.bfloat16
SIZES = (0, 3, 0, 130, 64, 1, 77, 0)  # of groups; after them come rows of none
ENDS = {
    "all in one": [200],
    "shorter than a k-tile": [5, 9, 40],
    "whole k-tiles": [64, 192, 256],
    "none in any": [0, 0],
    "back and beyond": [90, -7, 400, 120],
}


def bounds_of(ends: Sequence[int], K: int) -> list[tuple[int, int]]:
    """What groups are within K: an end before the group's begin, or beyond K, is taken for that."""
    inside = [min(max(end, 0), K) for end in ends]
    return [(begin, max(begin, end)) for begin, end in pairwise([0, *inside])]


def check(
    kernel: SimpleNamespace,
    config: TileConfig,
    ends: Sequence[int],
    K: int,
    dtype: torch.dtype = BF16,
    out_dtype: torch.dtype | None = None,
    turned: bool = False,
) -> None:
    """One group after another has numbers while all other rows are NaN: of each product its own rows alone are read."""
    M, N = config.BLOCK_M + 8, 2 * config.BLOCK_N - 8
    a, b = torch.randn(K, M).to(dtype).mT, torch.randn(K, N).to(dtype)
    c = torch.empty((len(ends), N, M) if turned else (len(ends), M, N), dtype=out_dtype or dtype)
    c = c.mT if turned else c
    problem = GemmProblem.of(a, b, c, groups="k")
    schedule = Schedule(3, group_m=2)
    assert kernel.illegal(problem, HOPPER, config, schedule) is None
    bounds = bounds_of(ends, K)
    for turn in range(2):  # every other group that is not empty
        kept = [g for g, (begin, end) in enumerate(bounds) if sum(j > i for i, j in bounds[:g]) % 2 == turn]
        x, y = torch.full_like(a.mT, torch.nan).mT, torch.full_like(b, torch.nan)
        for begin, end in (bounds[g] for g in kept):
            x[:, begin:end], y[begin:end] = a[:, begin:end], b[begin:end]
        simulation(problem, config, schedule, kernel).run(x, y, c, (torch.tensor(ends, dtype=torch.int32),), 1.0, 0.0)
        for g in kept:
            begin, end = bounds[g]
            assert_right(a[:, begin:end], b[begin:end], torch.tensor([end - begin]), c[g : g + 1])


def of_sizes(kernel: SimpleNamespace, config: TileConfig, **how: object) -> None:
    ends = torch.tensor(SIZES).cumsum(0).tolist()
    check(kernel, config, ends, ends[-1] + 5, **how)  # type: ignore[arg-type]


@pytest.mark.few
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
def test_every_config(kernel: SimpleNamespace, config: TileConfig) -> None:
    of_sizes(kernel, config)


@pytest.mark.parametrize(
    "how", [{"dtype": torch.float16}, {"out_dtype": torch.float32}, {"turned": True}], ids=["fp16", "fp32", "turned"]
)
def test_other_dtypes_and_c_column_major(kernel: SimpleNamespace, how: dict[str, object]) -> None:
    of_sizes(kernel, SMALL, **how)


@pytest.mark.parametrize("name", ENDS)
def test_ends_anywhere(kernel: SimpleNamespace, name: str) -> None:
    check(kernel, SMALL, ENDS[name], 256)


def problem(out_dtype: torch.dtype = BF16, dtype: torch.dtype = BF16, turned: bool = False) -> GemmProblem:
    M, N, K = 1024, 1280, 2048
    a, b, c = Layout((0, 1, M)), Layout((0, N, 1)), Layout((M * N, 1, M) if turned else (M * N, N, 1))
    return GemmProblem(4, M, N, K, dtype, out_dtype, "half", a, b, c, groups="k")


COMPILED = {"bf16": problem(), "fp16": problem(dtype=torch.float16, out_dtype=torch.float16)}
COMPILED |= {"fp32": problem(torch.float32), "turned": problem(turned=True)}


@pytest.mark.few(shows=lambda name, config: {name, config.num_warps, ("tail", config.tail_n > 0)})
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.parametrize("name", COMPILED)
def test_it_fits_spills_nothing_and_moves_all_by_tma(name: str, config: TileConfig) -> None:
    given, schedule = COMPILED[name], Schedule(HOPPER.num_sms)
    if warp_specialised.illegal(given, HOPPER, config, schedule) is not None:
        assert given.out_dtype == torch.float32, "no config may be there for nothing"
        return
    made = compiled(given, config, schedule)
    for instruction in ("HGMMA", "UTMALDG", "UTMASTG", "USETMAXREG", "ACQBULK"):
        assert made.instructions[instruction], instruction
    assert not made.instructions["STG"]


CHANGES = {
    "TMA's boxes begin on 16 bytes": {"a": Layout((0, 2048, 1))},
    "and groups anywhere along a unit stride": {"a": Layout((0, 2048, 1)), "b": Layout((0, 1, 2048))},
    "leave by TMA, as they are": {"activation": "relu"},
    "a gate is of 16 bits": {"gate": True, "activation": "silu"},
    "its rows are": {"b": Layout((0, 1281, 1))},
    "wgmma reads all but 16 bits along K": {"dtype": torch.float32, "precision": "tf32"},
}


@pytest.mark.parametrize("reason", CHANGES)
def test_what_it_cannot_sum_is_named(reason: str) -> None:
    other = replace(problem(), **CHANGES[reason])
    assert reason in str(warp_specialised.illegal(other, HOPPER, CONFIGS[0], Schedule(132)))
    assert select(replace(other, gate=False), HOPPER).kernel == "portable"


def test_it_is_chosen_in_a_class_of_its_own() -> None:
    choice = select(problem(), HOPPER)
    assert choice.kernel == "warp_specialised"
    assert bit_class(problem(), choice).endswith("one sum along K in steps from its end")
