"""Operands of given sizes, as they lie in memory, or on `meta` without memory."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from math import prod
from typing import Literal

import torch

from . import arguments

Order = Literal["nn", "nt", "tn", "tt"]  # of A and B in memory: n by rows, t by columns


def operands_of_sizes(
    M: int, N: int, K: int, dtype: torch.dtype, layout: str, batch_a: int | None = None, batch_b: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [(batch_a,) M, K] and B [(batch_b,) K, N] on `meta`. TypeError or ValueError for what is no size or dtype."""
    for name, size in (("M", M), ("N", N), ("K", K)):
        arguments.count(name, size)
    arguments.dtype(dtype, "dtype")
    a, b = (() if batch is None else (batch,) for batch in (batch_a, batch_b))
    return matrix_without_memory((*a, M, K), layout[0], dtype), matrix_without_memory((*b, K, N), layout[1], dtype)


def matrix_without_memory(
    shape: tuple[int, ...], order: str, dtype: torch.dtype, pad: int = 0, offset: int = 0
) -> torch.Tensor:
    """On `meta`, as `matrix` has it."""
    torch.empty(shape, dtype=dtype, device="meta")  # says so where a matrix would be too large
    return matrix(partial(torch.empty, dtype=dtype, device="meta"), shape, order, pad, offset)


def matrix(
    storage: Callable[[int], torch.Tensor], shape: tuple[int, ...], order: str, pad: int = 0, offset: int = 0
) -> torch.Tensor:
    """By rows ("n") or columns ("t"), which are `pad` elements longer in memory; it begins at `offset`. storage: makes
    so many elements."""
    if order == "t":
        return matrix(storage, (*shape[:-2], shape[-1], shape[-2]), "n", pad, offset).mT
    *batch, rows, columns = shape
    sizes = (*batch, rows, columns + pad)
    return storage(offset + prod(sizes))[offset:].view(sizes)[..., :columns]
