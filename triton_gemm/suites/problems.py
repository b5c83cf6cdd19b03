"""Shapes of suites as problems, without memory for operands."""

from __future__ import annotations

import torch

from ..arithmetic import ARITHMETICS, result_dtype
from ..operands import matrix_without_memory
from ..problem import GemmProblem
from .shapes import Shape

_HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
_SCALED_OUT = {torch.float8_e4m3fn: torch.bfloat16}  # what products of fp8 are stored as


def gemm_problem(shape: Shape, mode: str = "bf16") -> GemmProblem:
    """The problem of a product of that shape. mode: "bf16", "fp16", or the name of another `Arithmetic`, whose first
    dtype the operands have; KeyError for others."""
    arithmetic = ARITHMETICS["half" if mode in _HALF else mode]
    dtype = _HALF.get(mode) or arithmetic.dtypes[0]
    batch = () if shape.batch is None else (shape.batch,)
    a, b = (
        matrix_without_memory((*batch, *sizes), order, dtype, shape.pad, shape.offset)
        for sizes, order in zip(((shape.M, shape.K), (shape.K, shape.N)), shape.layout, strict=True)
    )
    out_dtype = _SCALED_OUT.get(dtype) or result_dtype(dtype)
    c = torch.empty(*batch, shape.M, shape.N, dtype=out_dtype, device="meta")
    more = {"bias": shape.bias, "activation": shape.activation, "scales": shape.scales}
    return GemmProblem.of(a, b, c, precision=arithmetic.name, **more)
