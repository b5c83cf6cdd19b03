"""fp64 by `mma_fp64`: right, tidy, and the same bits every time, in every tile and order of operands."""

from __future__ import annotations

import itertools

import pytest
import torch

from tests.gpu.kernels.test_kernels_gpu import DEVICE, Operands, gpu, hopper
from tests.support.kernel_cases import CIRCUMSTANCES, Case, blocks, circumstance, ids
from tests.support.product_checks import NAN
from triton_gemm.config import TileConfig
from triton_gemm.kernels import mma_fp64
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.select import Selection

pytestmark = hopper


def check_mma_fp64(case: Case, config: TileConfig, times: int = 1) -> None:
    operands = Operands(case)
    choice = Selection(Algorithm("mma_fp64", config, swap_ab=case.orders[2] == "t"), "by a test", "fp64")
    if mma_fp64.illegal(operands.problem, gpu(), config) is None:
        operands.check(GemmPlan(operands.problem, choice, DEVICE), times=times)


@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("config", mma_fp64.CONFIGS, ids=ids)
def test_mma_fp64(config: TileConfig, orders: str) -> None:
    """Every edge partial, whole tiles, less than a tile, and many tiles; 16 bytes at a time, 8, and no unit stride."""
    m, n, k = blocks(config)
    ragged = (m + 9, 2 * n + 7, 7 * k + 5)
    for size in (ragged, (2 * m, n, 8 * k), (3, 5, 2 * k), (1, 1, 1), (16 * m + 4, 15 * n, 40 * k)):
        check_mma_fp64(Case(size, orders + "n", dtype=torch.float64, integers=True), config, times=2)
        check_mma_fp64(Case(size, orders + "n", dtype=torch.float64), config)
    for how in ({"pad": 1}, {"step": 2}, {"offset": 1}, {"batch": 3, "between": True}):
        check_mma_fp64(Case(ragged, orders + "n", dtype=torch.float64, **how), config)
    check_mma_fp64(Case(ragged, orders + "t", dtype=torch.float64), config)


@pytest.mark.parametrize(
    "name", [n for n, change in CIRCUMSTANCES.items() if {"dtype", "out_dtype"}.isdisjoint(change)]
)
def test_mma_fp64_in_every_circumstance(name: str) -> None:
    for config in mma_fp64.CONFIGS:
        check_mma_fp64(circumstance(name, (133, 136, 99), dtype=torch.float64), config)


def test_all_tiles_and_orders_of_mma_fp64_give_the_same_bits() -> None:
    a, b = (torch.randn(shape, dtype=torch.float64, device=DEVICE) for shape in ((321, 517), (517, 277)))
    results = []
    for x, y in itertools.product((a, a.mT.contiguous().mT), (b, b.mT.contiguous().mT)):
        for config in mma_fp64.CONFIGS:
            c = torch.full((321, 277), NAN, dtype=torch.float64, device=DEVICE)
            problem = GemmProblem.of(x, y, c)
            if mma_fp64.illegal(problem, gpu(), config) is None:
                GemmPlan(problem, Selection(Algorithm("mma_fp64", config), "by a test", "fp64"), DEVICE).run(x, y, c)
                results.append(c)
    assert len(results) > 4 and all(torch.equal(c, results[0]) for c in results)
