"""What the portable kernel and `gemv` store of an activation's operand, in Triton's interpreter."""

from __future__ import annotations

from functools import partial
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch

from tests.interpreter.kernels.test_portable import SMALL_TILES
from tests.support import planted_bugs
from tests.support.interpreted_plans import Interpreted
from tests.support.kernel_cases import Case
from tests.support.kernel_mutants import kernels_with
from tests.support.preactivations import STORING, check, check_gated, storing
from triton_gemm import kernels
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import TileConfig
from triton_gemm.kernels import gemv, portable
from triton_gemm.kernels.candidate import Work
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GATES, GemmProblem

FEW = gemv.Config(BLOCK_M=4, BLOCK_N=16, BLOCK_K=128, num_warps=1)


def interpreted(
    problem: GemmProblem, config: TileConfig = SMALL_TILES, work: Work = 1, module: ModuleType = portable
) -> Interpreted:
    return Interpreted(problem, module.launches(problem, config, work))


@pytest.mark.few
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("name", STORING)
def test_portable(name: str, split_k: int) -> None:
    check(storing(name, (37, 48, 70)), partial(interpreted, work=split_k), split_k)


@pytest.mark.few
@pytest.mark.parametrize("split_k", [1, 3])
@pytest.mark.parametrize("name", [x for x in STORING if "row" not in x])
def test_gemv(name: str, split_k: int) -> None:
    check(storing(name, (3, 37, 300)), partial(interpreted, config=FEW, work=split_k, module=gemv), split_k)


@pytest.mark.parametrize("precision", ["ieee", "tf32", "fp64", *EMULATED])
def test_other_sums(precision: str) -> None:
    dtype = torch.float64 if precision == "fp64" else torch.float32
    check(Case((37, 40, 70), "ntn", dtype=dtype, precision=precision, activation="gelu", bias="n"), interpreted)


@pytest.mark.parametrize("orders", ["nnn", "ttn"])
def test_operands_by_tma(orders: str) -> None:
    case = Case((40, 48, 64), orders, activation="relu", bias="n", alpha=0.5)
    check(case, partial(interpreted, work=Schedule(3)))


@pytest.mark.parametrize("name", GATES)
def test_gates(name: str) -> None:
    turn = list(GATES).index(name)
    dtype = (torch.bfloat16, torch.float16)[turn % 2]
    check_gated((37, 40 + turn % 2, 70), name, interpreted, biased=turn < 2, dtype=dtype)
    check_gated((80, 40, 48), name, interpreted, ends=[0, 1, 33, 33, 70], dtype=dtype)


def test_groups() -> None:
    """Groups of rows, each with a matrix of its own, and of products along K."""
    ends = torch.tensor([5, 5, 40], dtype=torch.int32)
    for groups, shapes in (("m", ((48, 30), (3, 30, 24), (48, 24))), ("k", ((20, 48), (48, 24), (3, 20, 24)))):
        a, b = (torch.randn(shape).bfloat16() for shape in shapes[:2])
        results = {}
        for activation, stores in (("silu", False), ("silu", True), (None, False)):
            c, before = torch.full((2, *shapes[2]), torch.nan, dtype=torch.bfloat16)
            problem = GemmProblem.of(a, b, c, groups=groups, activation=activation, preactivation=stores)
            interpreted(problem).run(a, b, c, (ends, before) if stores else (ends,), 1.0, 0.0)
            results[activation, stores] = before if stores else c
            if stores:
                assert torch.equal(c, results["silu", False])
        assert torch.equal(results["silu", True], results[None, False])


BUGS = {
    "of other matrices of a batch": ("tile_pointers(ptr + out.start,", "tile_pointers(ptr,"),
    "after the activation": (
        "store_beside(acc, out.",
        "store_beside(after_activation(acc, 0, 0, 0, epi.ACTIVATION), out.",
    ),
    "everywhere": ("round_to(x, out.c_ptr.dtype.element_ty), mask=mask)", "round_to(x, out.c_ptr.dtype.element_ty))"),
    "the products are taken for one another": ("store_beside(acc, ungated_ptr", "store_beside(gate_acc, ungated_ptr"),
}


@planted_bugs.with_each(BUGS)
def test_planted_bugs_are_found(bug: str, tmp_path: Path) -> None:
    package = kernels_with([BUGS[bug]], tmp_path) if bug in BUGS else kernels
    module, launch = (import_module(f"{package.__name__}.{part}") for part in ("portable", "launch"))

    def made(problem: GemmProblem) -> Interpreted:
        return Interpreted(problem, module.launches(problem, SMALL_TILES), launch.materialise)

    with planted_bugs.caught(bug):
        check(storing("batch", (37, 40, 48)), made)
        check_gated((37, 40, 48), "swiglu", made)
