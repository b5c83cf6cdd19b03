"""torch's products of 8 bits and of groups under `use()`: what is computed, what stays torch's, and what is counted."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import nullcontext, suppress
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.group_truth import matrices_of
from tests.support.numerics import scale_shapes
from tests.support.product_views import assert_as_near_as_torchs
from triton_gemm.functional import other_products, routing
from triton_gemm.hardware.gpus import named_device

GENERATOR = torch.Generator().manual_seed(0)
FP8 = torch.float8_e4m3fn
OFFS = torch.tensor([5, 5, 24], dtype=torch.int32)


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Scales of two kinds are routed, whatever committed records come to say of them."""
    monkeypatch.setitem(other_products.SCALES, (9, 0), frozenset({("tensor", True), ("rows", False)}))
    triton_gemm.report_routing(reset=True)
    yield
    routing._unregister()


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-100, 100, shape, dtype=torch.int8, generator=GENERATOR)


def eighths(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(FP8)


def half(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).bfloat16()


def scales(M: int, N: int, kind: str) -> dict[str, torch.Tensor]:
    a, b = (0.5 + torch.rand(shape, generator=GENERATOR) for shape in scale_shapes(kind, M, N, 64))
    return {"scale_a": a, "scale_b": b}


def scaled(M: int = 32, kind: str = "rows", **how: Any) -> torch.Tensor:
    how = {"out_dtype": torch.bfloat16, **how}
    return torch._scaled_mm(eighths(M, 64), eighths(48, 64).t(), **{**scales(M, 48, kind), **how})


CALLS: dict[str, Callable[[], torch.Tensor]] = {
    "_int_mm": lambda: torch._int_mm(whole(32, 64), whole(48, 64).t()),
    "_int_mm of rows": lambda: torch._int_mm(whole(32, 64), whole(64, 48)),
    "_int_mm into out": lambda: torch._int_mm(
        whole(32, 64), whole(48, 64).t(), out=torch.empty(32, 48, dtype=torch.int32)
    ),
    "_scaled_mm": lambda: scaled(kind="tensor", use_fast_accum=True),
    "_scaled_mm of rows": lambda: scaled(bias=half(48)),
    "_scaled_mm to fp32": lambda: scaled(out_dtype=torch.float32),
    "_scaled_mm into out": lambda: scaled(out=half(32, 48)),
    "_grouped_mm of rows": lambda: torch._grouped_mm(half(24, 64), half(3, 64, 48), offs=OFFS),
    "_grouped_mm of columns": lambda: torch._grouped_mm(half(3, 24, 64), half(64, 24), offs=OFFS),
    "_grouped_mm along k": lambda: torch._grouped_mm(half(32, 24), half(24, 48), offs=OFFS),
}


@pytest.mark.parametrize("name", CALLS)
def test_products_are_those_of_torch(name: str) -> None:
    """In both calls, of which the second goes past the checks."""
    for _ in range(2):
        GENERATOR.manual_seed(7)
        expected = CALLS[name]()
        GENERATOR.manual_seed(7)
        with triton_gemm.use():
            found = CALLS[name]()
        assert triton_gemm.report_routing(reset=True) == {(name.split()[0], "triton_gemm"): 1}
        assert found.dtype == expected.dtype and found.shape == expected.shape
        if found.is_floating_point():
            # One rounding apart, and sums in fp32 of 64 products that add up to less than 256.
            rtol, atol = torch.finfo(found.dtype).eps, 64 * 2.0**-24 * 256
            torch.testing.assert_close(found, expected, rtol=rtol, atol=atol)
        else:
            assert torch.equal(found, expected)


def test_groups_have_torchs_derivatives() -> None:
    """No further from fp64 than twice torch's."""
    operands, grads = (half(24, 64), half(3, 64, 48)), []
    for routed in (False, True):
        a, b = (x.clone().requires_grad_() for x in operands)
        with triton_gemm.use() if routed else nullcontext():
            torch._grouped_mm(a, b, offs=OFFS).float().square().sum().backward()
        grads.append((a.grad, b.grad))
    a, b = (x.double().requires_grad_() for x in operands)
    torch.cat([x @ y for x, y in matrices_of(a, b, OFFS)]).square().sum().backward()
    torchs, ours = grads
    assert_as_near_as_torchs(ours, torchs, (a.grad, b.grad))
    assert triton_gemm.report_routing()["_grouped_mm", "triton_gemm"] >= 1


STAYS: dict[str, tuple[Callable[[], object], str]] = {
    "few rows": (lambda: torch._int_mm(whole(16, 64), whole(48, 64).t()), "more than 16 rows"),
    "sizes": (lambda: torch._int_mm(whole(32, 63), whole(48, 63).t()), "multiples of 8"),
    "to fp8": (lambda: scaled(kind="tensor", out_dtype=FP8), "to torch.float8_e4m3fn is not computed"),
    "overlap": (lambda: scaled(out=half(64, 48).as_strided((32, 48), (0, 1))), "overlap an operand, or itself"),
    "wider out": (
        lambda: torch._int_mm(whole(32, 64), whole(64, 48), out=torch.empty(0, dtype=torch.int32)),
        "another shape",
    ),
    "bias of groups": (
        lambda: torch._grouped_mm(half(24, 64), half(3, 64, 48), offs=OFFS, bias=half(3, 48)),
        "groups have a bias",
    ),
    "mistake": (lambda: torch._grouped_mm(half(24, 64), half(3, 32, 48), offs=OFFS), "contraction dimension"),
}


@pytest.mark.parametrize("name", STAYS)
def test_what_stays_torchs_says_why(name: str) -> None:
    """torch's errors included, which are its own."""
    call, why = STAYS[name]
    with triton_gemm.use(), suppress(RuntimeError, ValueError):
        call()
    (_, where), *_ = triton_gemm.report_routing()  # torch's own may call others for it
    assert where.startswith("torch: ") and why in where


def test_rules_name_them() -> None:
    with triton_gemm.use(exclude="_int_mm"):
        CALLS["_int_mm"]()
        CALLS["_scaled_mm"]()
    with triton_gemm.use(only="_int_mm"):
        CALLS["_int_mm"]()
    with triton_gemm.use(predicate=lambda op, a, b: op != "_scaled_mm"):
        CALLS["_scaled_mm"]()
    counts = {name: count for name, count in triton_gemm.report_routing().items() if name[0] != "mm"}
    assert counts == {  # torch's own multiplies by mm on the CPU
        ("_int_mm", "torch: _int_mm is excluded"): 1,
        ("_int_mm", "triton_gemm"): 1,
        ("_scaled_mm", "torch: the predicate says no"): 1,
        ("_scaled_mm", "triton_gemm"): 1,
    }
    with (
        pytest.raises(ValueError, match=r"only must have dtypes or names of mm, .*_grouped_mm, not "),
        triton_gemm.use(only="_weight_int8pack_mm"),
    ):
        pass


def test_scales_that_records_show_slower_stay_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """And all on GPUs that have no records."""
    with triton_gemm.use():
        scaled(kind="tensor")
        monkeypatch.setattr(routing.plan, "info_of", lambda _: named_device("l40s"))
        scaled(kind="tensor", use_fast_accum=True)
    counts = triton_gemm.report_routing()
    for kind in ("tensor", "tensor with fast sums"):
        assert counts["_scaled_mm", f"torch: no record shows scales of {kind} as fast as torch's here"] == 1


def test_groups_along_k_stay_torchs_where_it_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """But not in gradients of weights, nor where bits must not depend on what torch does with more rows."""
    a, b = half(16, 24), half(24, 48)
    monkeypatch.setitem(other_products.K_IN_GROUPS, routing.plan.info_of(a.device).capability, 0.83)
    monkeypatch.setattr(other_products, "INTERPRETER", None)  # of which no record speaks
    with triton_gemm.use():
        torch._grouped_mm(a, b, offs=OFFS)
        torch._grouped_mm(half(24, 16).mT, b, offs=OFFS)
        with triton_gemm.batch_invariant():
            torch._grouped_mm(a, b, offs=OFFS)
    counts = triton_gemm.report_routing()
    assert counts["_grouped_mm", "torch: groups along K take 1.2 times as long here"] == 1
    assert counts["_grouped_mm", "triton_gemm"] == 2


def test_other_products_are_counted() -> None:
    x = torch.ones(3, 3)
    with triton_gemm.use():
        torch.mv(x, x[0])
        x.addmm_(x, x)
    assert triton_gemm.report_routing() == {
        ("addmm_", "torch: it is not routed"): 1,
        ("addmv_", "torch: it is not routed"): 1,
    }
    torch.mv(x, x[0])
    assert len(triton_gemm.report_routing()) == 2, "nothing is counted where nothing is routed"
