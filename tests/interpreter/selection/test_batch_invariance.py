"""Rows have the same bits whatever is multiplied with them, in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
import torch.nn.functional as F

import triton_gemm
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
    """One to eight of them, in batches, among others' rows, in columns and unaligned; and of 70."""
    how = dict(KINDS[kind])
    dtype = how.pop("dtype", torch.float32)
    a, b = draw(70, 200, dtype=dtype), draw(200, 24, dtype=dtype)
    with triton_gemm.batch_invariant():
        whole = bits(triton_gemm.matmul(a, b, **how))
        for M in (*range(1, 9), 33):
            assert torch.equal(bits(triton_gemm.matmul(a[:M], b, **how)), whole[:M])
        assert torch.equal(bits(triton_gemm.matmul(a.view(10, 7, 200), b, **how)).view(70, 24), whole)
        apart = b.expand(10, 200, 24).contiguous()
        assert torch.equal(bits(triton_gemm.matmul(a.view(10, 7, 200), apart, **how)).view(70, 24), whole)
        columns, odd = a[:5].t().contiguous().t(), torch.empty(5, 207, dtype=dtype)[:, 3:203].copy_(a[:5])
        for other in (columns, odd):
            assert torch.equal(bits(triton_gemm.matmul(other, b, **how)), whole[:5])
        out = torch.empty(24, 5, dtype=dtype).t()
        assert torch.equal(bits(triton_gemm.matmul(a[:5], b, out=out, **how)), whole[:5])
    assert len(configs()) > (kind != "bf16x3"), "in several configurations"


def test_without_it_they_do() -> None:
    """Else nothing is shown."""
    a, b = draw(70, 200), draw(200, 24)
    whole = bits(triton_gemm.matmul(a, b))
    assert not all(torch.equal(bits(triton_gemm.matmul(a[:M], b)), whole[:M]) for M in range(1, 9))


def test_layers_and_their_backwards() -> None:
    """Rows of a layer, and of its input's gradient, however they are cut; under `use` too."""
    weight, bias, x, upstream = draw(24, 96), draw(24), draw(40, 96), draw(40, 24)

    def rows(layer: object, *sizes: int) -> list[torch.Tensor]:
        found = []
        for part, grad in zip(x.split(list(sizes)), upstream.split(list(sizes)), strict=True):
            part = part.clone().requires_grad_()
            y = layer(part, weight, bias)
            y.backward(grad)
            found.append(torch.cat([y.detach(), part.grad], 1))
        return [bits(torch.cat(found))]

    with triton_gemm.batch_invariant():
        for layer in (triton_gemm.linear, F.linear):
            with triton_gemm.use():
                (whole,) = rows(layer, 40)
                assert all(torch.equal(whole, *rows(layer, *sizes)) for sizes in ((1, 2, 37), (16, 24), (3, 30, 7)))
    assert all(found.selection.batch_invariant for found in plan.PLANS.values())


def test_groups_do_not_depend_on_their_sizes() -> None:
    a, b = draw(30, 64), draw(3, 64, 24)
    results = []
    for ends in ([10, 20, 30], [0, 25, 30]):
        offs = torch.tensor(ends, dtype=torch.int32)
        c = triton_gemm.grouped_matmul(a, b, offs, batch_invariant=True)
        results.append(bits(c))
    rows = [row for row in range(30) if (row >= 10) + (row >= 20) == 1 + (row >= 25)]
    assert rows and torch.equal(results[0][rows], results[1][rows])
    alone = triton_gemm.grouped_matmul(a[10:20], b, torch.tensor([0, 10, 10], dtype=torch.int32), batch_invariant=True)
    assert torch.equal(bits(alone), results[0][10:20])
