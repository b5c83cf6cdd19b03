"""Products of 8 bits, without a GPU: scales of any size, of which the product of both may leave fp32's range where the
result does not, and sums that are promoted."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from tests.support.kernel_cases import Case, Operands, reduced
from tests.support.simulated_plans import CPU, simulation, summed
from tests.support.table_fakes import HOPPER
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.promotion import pieces, waves
from triton_gemm.problem import GemmProblem

FP8 = {"dtype": torch.float8_e4m3fn, "out_dtype": torch.float32}
KINDS = {
    "fp8-tensor": {**FP8, "scales": "tensor"},
    "fp8-rows": {**FP8, "scales": "rows"},
    "int8-rows": {"dtype": torch.int8, "out_dtype": torch.bfloat16, "scales": "rows"},
}
CONFIG = next(c for c in warp_specialised.configs(torch.int8) if (c.BLOCK_M, c.BLOCK_N) == (64, 16))
PARTS = 3
EXPONENTS = st.tuples(st.integers(-115, 115), st.integers(-150, 80))  # of A's scales, and of the product of both


def check(kind: str, exponents: tuple[int, int], how: str, kernel: SimpleNamespace) -> None:
    """With scales near 2^of_a, whose products are near 2^of_both or as near as B's can bring them: every bit of the
    product with scales near 1, which is held to fp64."""
    case = Case((70, 24, 5 * CONFIG.BLOCK_K), "ntn", pad=16, **KINDS[kind])  # type: ignore[arg-type]
    operands = Operands(case, CPU)
    of_a, of_both = exponents
    of_b = min(max(of_both - of_a, -115), 115)
    powers = [
        2.0 ** torch.randint(exponent - 9, exponent + 10, scale.shape, generator=operands.generator).double()
        for scale, exponent in zip(operands.scales, (of_a, of_b), strict=True)
    ]
    whole = reduced(case, CONFIG, PARTS)
    schedule = {
        "whole": Schedule(2),
        "added by an owner": Schedule(whole.programs, whole.split_tiles, PARTS),
        "added by a second launch": whole,
    }[how]
    plan = simulation(operands.problem, CONFIG, schedule, kernel)
    operands.check(plan, schedule.split_k)
    found = []
    for scales in (operands.scales, [(x * power).float() for x, power in zip(operands.scales, powers, strict=True)]):
        plan.run(operands.a, operands.b, operands.c, tuple(scales), 1.0, 0.0)
        found.append(operands.c.double())
    last_bit = torch.finfo(operands.c.dtype).smallest_normal * torch.finfo(operands.c.dtype).eps  # of what is subnormal
    assert ((found[1] - found[0] * powers[0] * powers[1]).abs() <= last_bit).all()


@pytest.mark.parametrize(
    ("kind", "how"),
    [
        *((kind, "whole") for kind in KINDS),
        ("fp8-rows", "added by an owner"),
        *((kind, "added by a second launch") for kind in ("fp8-tensor", "fp8-rows")),  # int8 has no partial sums
    ],
)
@settings(max_examples=12, deadline=None)
@example(exponents=(-106, -146))
@example(exponents=(60, 80))
@given(exponents=EXPONENTS)
def test_no_product_of_scales_is_lost(kind: str, how: str, kernel: SimpleNamespace, exponents: tuple[int, int]) -> None:
    check(kind, exponents, how, kernel)


# --- Sums that are promoted: in waves, in pieces and whole they have the same bits ---

TILES = {(c.BLOCK_M, c.BLOCK_N, c.BLOCK_K): c for c in warp_specialised.configs(torch.int8)}
WHOLE = TILES[128, 128, 128]
BY_ROWS, BY_COLUMNS = TILES[256, 128, 128], TILES[128, 256, 128]
DEEP = TILES[64, 32, 256]


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
