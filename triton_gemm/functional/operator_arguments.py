"""The operators' arguments, as torch gives them to kernels, derivatives and vmap: in order, and some left out."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from ..problem import Request
from .activations import ACTIVATIONS
from .matrices import Operands
from .operators import batched

ARGUMENTS = (
    "(Tensor a, Tensor b, Tensor? input=None, Scalar alpha=1.0, Scalar beta=1.0, str? activation=None, "
    "ScalarType? out_dtype=None, str? precision=None, bool? batch_invariant=None, Tensor? residual=None, "
    "Tensor? gate=None, Tensor? gate_bias=None)"
)


def parsed(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    alpha: float = 1,
    beta: float = 1,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
) -> tuple[Operands, Request]:
    """The operators' arguments, with their defaults: torch leaves out trailing ones."""
    request = Request(alpha, beta, activation, out_dtype, precision, batch_invariant=batch_invariant)
    return Operands(a, b, input, residual, gate, gate_bias), request


def checked(*arguments: Any) -> tuple[Operands, Request]:
    """`parsed` of arguments whose caller may have checked nothing."""
    x, request = parsed(*arguments)
    if not x.a.dtype == x.b.dtype == (x.b if x.gate is None else x.gate).dtype:
        raise RuntimeError(f"gemm: {x.a.dtype} and {x.b.dtype} cannot be multiplied")
    if x.gate is None and x.gate_bias is not None:
        raise RuntimeError("gemm: a gate's bias needs a gate")
    if request.activation is not None and request.activation not in ACTIVATIONS:
        raise RuntimeError(f"gemm: there is no activation {request.activation!r}")
    if x.gate is not None and (x.gate.shape != x.b.shape or request[:2] != (1, 1) or request.activation is None):
        raise RuntimeError("gemm: a gate has b's shape and an activation, and no factors")
    return x, request


def batched_arguments(size: int, in_dims: Sequence[int | None], arguments: Sequence[Any]) -> list[Any]:
    """The operators' arguments, with a first dimension for those of vmap. A gate has one where b has."""
    places = [i for i in (0, 1, 2, 9, 10, 11) if i < len(arguments)]
    given, dims = [arguments[i] for i in places], [in_dims[i] for i in places]
    found = list(arguments)
    if len(given) > 4 and given[4] is not None and (dims[1] is None) != (dims[4] is None):
        i = 1 if dims[1] is None else 4
        given[i], dims[i] = given[i].expand(size, *given[i].shape), 0
    for i, x in zip(places, batched(size, dims, given), strict=True):
        found[i] = x
    return found
