"""Sums that are promoted, without a GPU: in waves, in pieces and whole they have the same bits."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from tests.support.kernel_cases import Case, Operands
from tests.support.simulated_plans import CPU, summed
from tests.support.table_fakes import HOPPER
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.promotion import pieces, waves
from triton_gemm.problem import GemmProblem

CONFIGS = {(c.BLOCK_M, c.BLOCK_N, c.BLOCK_K): c for c in warp_specialised.configs(torch.int8)}
WHOLE = CONFIGS[128, 128, 128]
BY_ROWS, BY_COLUMNS = CONFIGS[256, 128, 128], CONFIGS[128, 256, 128]
DEEP = CONFIGS[64, 32, 256]
SPLIT = Schedule(9, split_tiles=3, split_k=3)


def case(scales: str, size: tuple[int, int, int] = (300, 520, 1300), precision: str = "fp8") -> Case:
    return Case(
        size, "ntn", dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, precision=precision, scales=scales, pad=16
    )


def problem(scales: str, precision: str = "fp8") -> GemmProblem:
    return Operands(case(scales, precision=precision), CPU).problem


@pytest.mark.parametrize(
    ("config", "scales"), [(BY_ROWS, "tensor"), (BY_COLUMNS, "tensor"), (BY_COLUMNS, "blocks"), (DEEP, "rows")], ids=str
)
def test_bits_do_not_depend_on_waves_and_pieces(
    kernel: SimpleNamespace, config: warp_specialised.Config, scales: str
) -> None:
    """Of random fp8, whose sums are rounded when they are promoted."""
    operands = Operands(case(scales), CPU)
    assert waves(operands.problem, config) * pieces(operands.problem, config) == 2
    results, classes = [], set()
    for one in (config, WHOLE):
        assert warp_specialised.illegal(operands.problem, HOPPER, one) is None
        results.append(summed(operands, one, Schedule(2), kernel))
        classes.add(warp_specialised.order_of_sums(operands.problem, one, Schedule(2)))
    assert torch.equal(*results)
    assert len(classes) == 1


def test_what_has_no_waves_or_pieces() -> None:
    assert waves(problem("rows"), WHOLE) == pieces(problem("rows"), WHOLE) == 1
    fast = problem("rows", precision="fp8 fast")
    assert waves(fast, BY_ROWS) == pieces(fast, DEEP) == 1
    for epilogue in ({"bias": "n"}, {"activation": "relu"}, {"has_beta": True}):
        why = warp_specialised.illegal(replace(problem("rows"), **epilogue), HOPPER, BY_ROWS)
        assert why is not None and "too few registers" in why
    for config, reason in ((BY_ROWS, "too few registers"), (DEEP, "more than a piece")):
        assert reason in (warp_specialised.illegal(problem("blocks"), HOPPER, config) or "")
