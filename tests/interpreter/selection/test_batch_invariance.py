"""Rows have the same bits whatever is multiplied with them, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import triton_gemm
from tests.support import row_bits
from tests.support.dot_order import add_at_once
from tests.support.kernel_cases import bits
from triton_gemm.runtime import plan
from triton_gemm.runtime.plan import InterpretedPlan

GENERATOR = torch.Generator()


@pytest.fixture(autouse=True)
def instructions(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Rows are summed as on a GPU, not as BLAS would each shape of tile; and plans are this test's own."""
    add_at_once(monkeypatch, 4)
    monkeypatch.setattr(plan, "PLANS", {})
    GENERATOR.manual_seed(0)
    yield


def draw(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=GENERATOR).to(dtype)


def configs() -> set[str]:
    """Of all plans."""
    kinds = {type(found) for found in plan.PLANS.values()}
    assert kinds == {InterpretedPlan}
    return {f"{found.selection.kernel} {found.selection.config}" for found in plan.PLANS.values()}


KINDS = {
    "bf16": {"dtype": torch.bfloat16},
    "ieee": {"precision": "ieee"},
    "tf32": {"precision": "tf32"},
    "bf16x3": {"precision": "bf16x3"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_do_not_depend_on_rows(kind: str) -> None:
    """One to eight of them, 33, and all 70; in batches, in columns and unaligned."""
    how = dict(KINDS[kind])
    dtype = how.pop("dtype", torch.float32)
    a, b = draw(70, 200, dtype=dtype), draw(200, 24, dtype=dtype)
    with triton_gemm.batch_invariant():
        whole = bits(triton_gemm.matmul(a, b, **how))
        for M in (*range(1, 9), 33):
            assert torch.equal(bits(triton_gemm.matmul(a[:M], b, **how)), whole[:M])
        row_bits.assert_lie_anywhere(a, b, 10, **how)
        row_bits.assert_lie_anywhere(a[:4], b, 2, **how)
    assert len(configs()) > (kind != "bf16x3"), "in several configurations"


def test_without_it_they_do() -> None:
    """Else nothing is shown."""
    a, b = draw(70, 200), draw(200, 24)
    whole = bits(triton_gemm.matmul(a, b))
    assert not all(torch.equal(bits(triton_gemm.matmul(a[:M], b)), whole[:M]) for M in range(1, 9))


def test_layers_and_their_backwards() -> None:
    """Rows of a layer, and of its input's gradient, however they are cut; under `use` too."""
    weight, bias, x, upstream = draw(24, 96), draw(24), draw(40, 96), draw(40, 24)
    with triton_gemm.batch_invariant():
        for layer in (triton_gemm.linear, F.linear):
            with triton_gemm.use():
                rows = [
                    row_bits.of_layer(lambda x, f=layer: f(x, weight, bias), x, upstream, *sizes)
                    for sizes in ((40,), (1, 2, 37), (16, 24), (3, 30, 7))
                ]
                assert all(torch.equal(rows[0], cut) for cut in rows)
    assert all(found.selection.batch_invariant for found in plan.PLANS.values())


def test_groups_do_not_depend_on_their_sizes() -> None:
    row_bits.assert_groups_are_alike(draw(30, 64), draw(3, 64, 24), [10, 20, 30], [0, 25, 30])
