"""A linear layer that adds a residual: `torch.ops.triton_gemm.residual_gemm`.

    residual_gemm(a, b, residual, bias, activation, precision, batch_invariant)
        = activation(a @ b + bias) + residual

What computes it in one launch is one operator, so that compilers see it as one. To autograd, `torch.vmap` and DTensor
it is made of other operators (`apart`), with their derivatives, batching and sharding rules.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..arithmetic import result_dtype
from ..compat import below_autograd, differentiates_forward
from ..problem import Request
from ..runtime import plan
from . import fast_path, matrices, ops, sharding
from .activations import ACTIVATIONS

_fast = fast_path.FastPath()


def residual_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do."""
    operands = (a, b, residual, bias)
    if ops.needs_grad(*operands) or sharding.is_sharded(*operands):
        return apart(*operands, activation, precision, batch_invariant)
    if ops.is_plain(*operands):
        return _compute(*operands, activation, precision, batch_invariant)
    return _op(*operands, activation, precision, batch_invariant)


def apart(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """The same by several operators: the residual is added by the product where nothing comes between."""
    request = Request(1, 1, precision=precision, batch_invariant=batch_invariant)
    if activation is None and bias is None:
        return ops.gemm(a, b, residual, request)
    c = ops.gemm(a, b, bias, request)
    return (c if activation is None else ACTIVATIONS[activation](c)) + residual


def _compute(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """residual_gemm of plain tensors."""
    how = activation, precision, batch_invariant
    said, auxiliary = words_of(residual, bias, *how)
    return _fast.run(said, a, b, auxiliary, lambda: launch(a, b, residual, bias, *how))


def words_of(
    residual: torch.Tensor, bias: torch.Tensor | None, *how: str | bool | None
) -> tuple[tuple[object, ...], tuple[torch.Tensor, ...]]:
    """What a call says to `FastPath.take` besides a and b, and its auxiliary operands, of which the last is copied."""
    return ("residual_gemm", *how), ((residual,) if bias is None else (bias, residual))


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    residual: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    precision: str | None,
    batch_invariant: bool | None,
) -> tuple[torch.Tensor, fast_path.Known | None]:
    """residual_gemm of plain tensors, and what calls like it launch on the fast path. The kernel adds to what the
    result holds before: the residual."""
    request = Request(1, 1, activation, None, precision, batch_invariant=batch_invariant, residual=True)
    c = torch.empty(matrices.shape_of(a, b), dtype=result_dtype(a.dtype), device=a.device)
    if c.numel() == 0:
        return c, fast_path.SLOW
    given: tuple[torch.Tensor, ...] = (a, b)
    auxiliary: tuple[torch.Tensor, ...] = ()
    if bias is not None:
        of_bias, auxiliary = matrices.adding(c, bias, request)
        if not auxiliary:  # a matrix, for which the kernel has no place beside the residual
            return apart(a, b, residual, bias, activation, precision, batch_invariant), fast_path.SLOW
        request, given = request._replace(bias=of_bias.bias), (a, b, bias)
    c.copy_(residual)
    views = matrices.views(a.resolve_neg(), b.resolve_neg(), c, join_rows=request.bias != "m")
    found = [(left, right, plan.multiply(left, right, into, request, auxiliary)) for left, right, into in views]
    *launched, one = found[0]
    if len(found) > 1:
        return c, fast_path.SLOW
    return c, fast_path.known(one, c, *zip(given, (*launched, *auxiliary), strict=True), copies=True)


def _kernel(a: torch.Tensor, b: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`_compute` for the dispatcher, whose callers may have checked nothing."""
    if a.dtype != b.dtype:
        raise RuntimeError(f"residual_gemm: {a.dtype} and {b.dtype} cannot be multiplied")
    return _compute(a, b, *rest)


def _fake(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return a.new_empty(matrices.shape_of(a, b), dtype=result_dtype(a.dtype))


def _autograd(
    a: torch.Tensor, b: torch.Tensor, residual: torch.Tensor, bias: torch.Tensor | None = None, *how: Any
) -> torch.Tensor:
    operands = (a, b, residual, bias)
    if ops.needs_grad(*operands) or differentiates_forward(*operands):
        return apart(*operands, *how)
    with below_autograd():
        return _op(*operands, *how)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    count = min(4, len(arguments))
    operands: Any = ops.batched(info.batch_size, in_dims[:count], arguments[:count])
    return apart(*operands, *arguments[4:]), 0


_op, _library = ops.operator(
    "residual_gemm(Tensor a, Tensor b, Tensor residual, Tensor? bias=None, str? activation=None, "
    "str? precision=None, bool? batch_invariant=None) -> Tensor",
    _kernel,
    _fake,
)
_library.impl("residual_gemm", _autograd, "Autograd")
torch.library.register_vmap("triton_gemm::residual_gemm", _vmap, lib=_library)


@register_flop_formula(torch.ops.triton_gemm.residual_gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    return 2 * prod(out_shape) * a_shape[-1]
