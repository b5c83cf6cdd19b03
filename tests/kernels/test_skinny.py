"""What the kernel of few rows along K computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

from dataclasses import replace
from itertools import count
from types import SimpleNamespace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, blocks, circumstance_along_k, few_rows, ids
from tests.support.simulated_plans import CPU, Launched
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import skinny
from triton_gemm.kernels.launch import Launch
from triton_gemm.problem import GemmProblem, Layout

KERNEL = "skinny"
DEVICE = device_of_capability((8, 0))
ROWS = range(1, skinny.MAX_ROWS + 1)


def simulation(problem: GemmProblem, config: TileConfig, module: SimpleNamespace, swapped: bool = False) -> Launched:
    """Every other launch waits for the one before by itself, and prefetches."""
    turns = count()

    def launches(problem: GemmProblem) -> tuple[Launch, ...]:
        assert skinny.illegal(problem, DEVICE, config) is None
        (launch,) = module.launches(problem, config)
        assert not (launch.workspace or launch.counters or launch.temporaries)
        return (launch.programmatic() if next(turns) % 2 else launch,)

    return Launched(problem, launches, swapped)


def check(case: Case, config: TileConfig, module: SimpleNamespace, *, swapped: bool = False) -> None:
    operands = Operands(case, CPU)
    operands.check(simulation(operands.problem, config, module, swapped), times=2)


@pytest.mark.few
@pytest.mark.parametrize("config", skinny.CONFIGS, ids=ids)
@pytest.mark.parametrize("rows", ROWS)
def test_every_config_and_number_of_rows(kernel: SimpleNamespace, rows: int, config: TileConfig) -> None:
    for case, swapped in few_rows(rows, config):
        check(case, config, kernel, swapped=swapped)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance(kernel: SimpleNamespace, name: str) -> None:
    config = skinny.CONFIGS[list(CIRCUMSTANCES).index(name) % len(skinny.CONFIGS)]
    m, n, k = blocks(config)
    for size in ((m - 3, 2 * n + 3, 2 * k + 40), (2 * m + 3, n - 1, k + 8)):
        case = circumstance_along_k(name, size)
        check(case, config, kernel)
        M, N, K = case.size
        check(replace(case, size=(N, M, K)), config, kernel, swapped=True)


# --- What is refused, and what is chosen ---

TILE = skinny.CONFIGS[0]
FP32 = {"dtype": torch.float32, "precision": "ieee"}
REFUSED: dict[str, tuple[Case, dict[str, object], str]] = {
    "k-odd": (Case((4, 40, 1001), "ntn", pad=1), {}, "a cannot be read along k 16 bytes"),
    "k-ends-inside-16-bytes": (Case((4, 40, 1004), "ntn"), {}, "a cannot be read along k 16 bytes"),
    "pitch": (Case((4, 40, 1000), "ntn", pad=6), {}, "a cannot be read along k 16 bytes"),
    "pitch-of-b": (Case((1, 40, 1000), "ntn", pad=6), {}, "b cannot be read along k 16 bytes"),
    "matrices-of-b": (Case((4, 40, 1000), "ntn"), {"batch": 2, "b": Layout((4, 1, 1000))}, "b cannot be read"),
    "unaligned": (Case((4, 40, 1000), "ntn", offset=4), {}, "a cannot be read along k 16 bytes"),
    "a-along-m": (Case((4, 40, 1000), "ttn"), {}, "a cannot be read along k"),
    "b-along-n": (Case((4, 40, 1000), "nnn"), {}, "b cannot be read along k"),
    "steps": (Case((4, 40, 1000), "ntn", step=2), {}, "a cannot be read along k"),
    "ieee": (Case((4, 40, 1000), "ntn", **FP32), {}, "16 bits"),
    "tf32": (Case((4, 40, 1000), "ntn", **{**FP32, "precision": "tf32"}), {}, "16 bits"),
    "fp32-as-planes": (Case((4, 40, 1000), "ntn", **{**FP32, "precision": "bf16x3"}), {}, "16 bits"),
    "fp64": (Case((4, 40, 1000), "ntn", dtype=torch.float64), {}, "16 bits"),
    "int8": (Case((4, 40, 1024), "ntn", pad=16, dtype=torch.int8, out_dtype=torch.int32), {}, "16 bits"),
    "scales": (Case((4, 40, 1000), "ntn"), {"scales": "rows"}, "without scales"),
    "groups-of-rows": (Case((4, 40, 1000), "ntn"), {"groups": "m"}, "whole matrices"),
    "groups-along-k": (Case((4, 40, 1000), "ntn"), {"groups": "k"}, "whole matrices"),
    "empty-sum": (Case((4, 40, 1000), "ntn"), {"K": 0}, "nothing to load"),
    "many-rows-and-columns": (Case((17, 9, 1000), "ntn"), {}, "neither rows nor columns"),
    "too-large": (Case((4, 40, 1000), "ntn"), {"N": 2**31 - 8}, "must not exceed"),
    "too-many-tiles": (Case((4, 40, 1000), "ntn"), {"batch": 2**28, "N": 72}, "must not exceed"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused(name: str) -> None:
    case, changes, why = REFUSED[name]
    problem = replace(Operands(case, CPU).problem, **changes)
    assert why in str(skinny.illegal(problem, DEVICE, TILE))


def test_who_is_refused() -> None:
    problem = Operands(Case((4, 40, 1000), "ntn"), CPU).problem
    for capability in SHARED_MEMORY:
        why = skinny.illegal(problem, device_of_capability(capability), TILE)
        assert why is None if capability >= (8, 0) else "needs compute capability 8.0" in str(why)


@given(
    st.integers(1, skinny.MAX_ROWS),
    st.one_of(st.integers(1, 2**17), st.sampled_from([1, 8, 16, 1024, 4096, 14336])),
    st.one_of(st.integers(64, 2**14), st.sampled_from([64, 128, 256, 512, 1024])),
    st.sampled_from([1, 1, 2, 64]),
    st.sampled_from([device_of_capability(capability) for capability in SHARED_MEMORY if capability >= (8, 0)]),
)
def test_its_candidates_are_legal(rows: int, others: int, eighths: int, batch: int, device) -> None:
    K = 8 * eighths
    a, b = Layout((K if batch > 1 else 0, batch * K, 1)), Layout((others * K if batch > 1 else 0, 1, K))
    c = Layout((rows * others if batch > 1 else 0, others, 1))
    problem = GemmProblem(batch, rows, others, K, torch.bfloat16, torch.bfloat16, "half", a, b, c)
    found = list(skinny.candidates(problem, device))
    assert {one.algorithm.config for one in found} == set(skinny.CONFIGS)
    assert {one.algorithm.swap_ab for one in found} == {False, True}
    for its, (kernel, config, split_k, swap_ab, packed) in found:
        assert kernel == "skinny" and its == (problem.swap_ab() if swap_ab else problem) and packed == ()
        assert skinny.illegal(its, device, config, split_k) is None
        assert 0 < skinny.microseconds(its, config, split_k, model_of(device)) < 1e9
