"""Sizes and suites' shapes as operands and problems, without memory."""

from __future__ import annotations

from typing import Literal

import torch

from .. import arguments
from ..arithmetic import ARITHMETICS, result_dtype
from ..problem import GemmProblem
from .shapes import Shape

Order = Literal["nn", "nt", "tn", "tt"]  # of A and B in memory: n by rows, t by columns
_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALED_OUT = {torch.float8_e4m3fn: torch.bfloat16}  # what products of fp8 are stored as


def gemm_problem(shape: Shape, mode: str = "bf16") -> GemmProblem:
    """The problem of a product of that shape. mode: "bf16", "fp16", or the name of another `Arithmetic`, whose first
    dtype the operands have; KeyError for others."""
    arithmetic = ARITHMETICS["half" if mode in _HALF else mode]
    dtype = _HALF.get(mode) or arithmetic.dtypes[0]
    batch = () if shape.batch is None else (shape.batch,)
    a, b = (
        _matrix((*batch, *sizes), order, dtype, shape.pad, shape.offset)
        for sizes, order in zip(((shape.M, shape.K), (shape.K, shape.N)), shape.layout, strict=True)
    )
    out_dtype = _SCALED_OUT.get(dtype) or result_dtype(dtype)
    c = torch.empty(*batch, shape.M, shape.N, dtype=out_dtype, device="meta")
    more = {"bias": shape.bias, "activation": shape.activation, "scales": shape.scales}
    return GemmProblem.of(a, b, c, precision=arithmetic.name, **more)


def operands_of_sizes(
    M: int, N: int, K: int, dtype: torch.dtype, layout: str, batch_a: int | None = None, batch_b: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """A [(batch_a,) M, K] and B [(batch_b,) K, N] on `meta`. TypeError or ValueError for what is no size or dtype."""
    for name, size in (("M", M), ("N", N), ("K", K)):
        arguments.count(name, size)
    arguments.dtype(dtype, "dtype")
    a, b = (() if batch is None else (batch,) for batch in (batch_a, batch_b))
    return _matrix((*a, M, K), layout[0], dtype), _matrix((*b, K, N), layout[1], dtype)


def _matrix(shape: tuple[int, ...], order: str, dtype: torch.dtype, pad: int = 0, offset: int = 0) -> torch.Tensor:
    """On `meta`, by rows ("n") or columns ("t"), which are `pad` elements longer in memory; it begins at `offset`."""
    if order == "t":
        return _matrix((*shape[:-2], shape[-1], shape[-2]), "n", dtype, pad, offset).mT
    *batch, rows, columns = shape
    sizes = (*batch, rows, columns + pad)
    memory = torch.empty(sizes, dtype=dtype, device="meta")
    if offset:
        memory = torch.empty(memory.numel() + offset, dtype=dtype, device="meta")[offset:].view(sizes)
    return memory[..., :columns]
