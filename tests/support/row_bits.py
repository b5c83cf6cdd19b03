"""Rows whose bits depend on no other row: what a batch-invariant product must do, on any device."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

import triton_gemm
from tests.support.kernel_cases import bits


def assert_lie_anywhere(a: torch.Tensor, b: torch.Tensor, batch: int, **how: Any) -> None:
    """Rows have the same bits in a batch with one weight or one each, unaligned, in columns, and in such an `out`."""
    (rows, K), N = a.shape, b.shape[1]
    whole, matmul = bits(triton_gemm.matmul(a, b, **how)), triton_gemm.matmul
    for weights in (b, b.expand(batch, K, N).contiguous()):
        assert torch.equal(bits(matmul(a.view(batch, -1, K), weights, **how)).view(rows, N), whole)
    padded = a.new_full((rows, K + 17), torch.nan)
    for offset in (0, 1, 8):
        padded[:, offset : offset + K] = a
        assert torch.equal(bits(matmul(padded[:, offset : offset + K], b, **how)), whole)
    assert torch.equal(bits(matmul(a.t().contiguous().t(), b, **how)), whole)
    assert torch.equal(bits(matmul(a, b, out=a.new_empty(N, rows).t(), **how)), whole)


def of_layer(
    layer: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor, upstream: torch.Tensor, *sizes: int
) -> torch.Tensor:
    """Rows of a layer and of its input's gradient, computed so many at a time."""
    found = []
    for part, grad in zip(x.split(list(sizes)), upstream.split(list(sizes)), strict=True):
        leaf = part.clone().requires_grad_()
        y = layer(leaf)
        y.backward(grad)
        assert leaf.grad is not None
        found.append(torch.cat([y.detach(), leaf.grad], 1))
    return bits(torch.cat(found))


def assert_groups_are_alike(a: torch.Tensor, b: torch.Tensor, *ends: list[int]) -> None:
    """Rows that have the same matrix by the first ends and by the second have the same bits; and so have seven of the
    second group alone."""

    def rows(a: torch.Tensor, ends: list[int]) -> torch.Tensor:
        offs = torch.tensor(ends, dtype=torch.int32, device=a.device)
        return bits(triton_gemm.grouped_matmul(a, b, offs, batch_invariant=True))

    first, second = (rows(a, x) for x in ends)
    groups = [(torch.arange(len(a))[:, None] >= torch.tensor(x)).sum(1) for x in ends]
    same = (groups[0] == groups[1]).to(a.device)
    assert same.any() and not same.all() and torch.equal(first[same], second[same])
    begin = ends[0][0]
    assert torch.equal(rows(a[begin : begin + 7], [0, 7, 7]), first[begin : begin + 7])
