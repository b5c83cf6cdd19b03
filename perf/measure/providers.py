"""What every measurement compares: cuBLAS, as torch calls it, and triton_gemm."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F

import triton_gemm
from perf.measure.operands import Problem, scaled_by_torch
from perf.measure.timer import Call, Provider
from triton_gemm.functional.activations import ACTIVATIONS
from triton_gemm.problem import Request
from triton_gemm.runtime import plan

CUBLAS = "cuBLAS"
OURS = "triton_gemm"
ROUTED = "use()"


def cublas(problem: Problem | None = None) -> Provider:
    """torch's own product, eager; which precision fp32 is multiplied in is set around it (`fp32_precision`)."""
    if problem is None:
        return Provider(CUBLAS, lambda a, b, c: torch.mm(a, b, out=c))
    if problem.scales is not None:
        return Provider(CUBLAS, lambda a, b, c, *scales: scaled_by_torch(problem, a, b, *scales))
    if problem.grouped:
        return Provider(CUBLAS, lambda a, b, c, ends: F.grouped_mm(a, b, offs=ends).view_as(c))
    if problem.weights or not problem.plain:
        return Provider(CUBLAS, fused_in_torch(problem))
    if problem.dtype == torch.int8:
        return Provider(CUBLAS, lambda a, b, c: torch._int_mm(a, b, out=c))
    if problem.batch is not None:
        return Provider(CUBLAS, lambda a, b, c: torch.bmm(a, b, out=c))
    if problem.given_out:
        return Provider(CUBLAS, lambda a, b, c: torch.mm(a, b, out=c))
    return Provider(CUBLAS, lambda a, b, c: torch.mm(a, b))


def in_torch(problem: Problem) -> Call:
    """The problem in torch's words, as a model has them: the result is returned."""
    if problem.scales is not None:
        return lambda a, b, c, *scales: scaled_by_torch(problem, a, b, *scales)
    if problem.dtype == torch.int8:
        return lambda a, b, c: torch._int_mm(a, b)
    return fused_in_torch(problem)


def fused_in_torch(problem: Problem) -> Call:
    """The problem in torch's words: F.linear, for a bias over M addition, then the activation."""
    activation = ACTIVATIONS[problem.activation] if problem.activation else None

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
        if problem.batch is None and problem.bias != "m":
            product = F.linear(a, b.mT, bias)
        else:
            product = torch.matmul(a, b)
            if bias is not None:
                product = product + (bias[:, None] if problem.bias == "m" else bias)
        return product if activation is None else activation(product)

    return call


def ours(problem: Problem) -> Provider:
    """triton_gemm: `matmul` where that is all, else what is below it; the details say which kernel it chose."""
    if problem.scales is not None:
        return scaled_by_us(problem)
    if problem.grouped:
        return Provider(OURS, lambda a, b, c, ends: triton_gemm.grouped_matmul(a, b, ends).view_as(c))
    if problem.weights:
        return Provider(OURS, lambda a, b, c, *bias: triton_gemm.linear(a, b.mT, *bias))
    precision: Any = problem.mode if problem.dtype == torch.float32 else None
    request = Request(activation=problem.activation, precision=precision, bias=problem.bias)

    def details(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, bias: torch.Tensor | None = None) -> dict[str, Any]:
        return {"config": str(plan.selection_of(a, b, c, request))}

    if not problem.plain or problem.batch is not None:
        return Provider(OURS, lambda a, b, c, *bias: plan.multiply(a, b, c, request, bias), details=details)
    if problem.given_out:
        return Provider(OURS, lambda a, b, c: triton_gemm.matmul(a, b, out=c, precision=precision), details=details)
    return Provider(OURS, lambda a, b, c: triton_gemm.matmul(a, b, precision=precision), details=details)


def routed(problem: Problem) -> Provider:
    """torch's own call, which `triton_gemm.use` routes here."""
    return replace(cublas(problem), name=ROUTED, within=triton_gemm.use)


def scaled_by_us(problem: Problem) -> Provider:
    """triton_gemm.scaled_matmul."""
    how: dict[str, Any] = {"out_dtype": problem.out_dtype, "use_fast_accum": problem.mode == "fp8 fast"}

    def details(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *_: torch.Tensor) -> dict[str, Any]:
        return {"config": str(plan.selection_of(a, b, c, Request(precision=problem.mode, scales=problem.scales)))}

    return Provider(OURS, lambda a, b, c, *scales: triton_gemm.scaled_matmul(a, b, *scales, **how), details=details)
