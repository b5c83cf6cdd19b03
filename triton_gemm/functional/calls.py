"""What every call of `api` goes through that is like none before: autocast, views around the operator, `out`."""

from __future__ import annotations

import torch
from torch.autograd.graph import increment_version

from .. import arguments
from ..arithmetic import DTYPES, FLOATING, result_dtype
from ..problem import Request
from ..runtime import plan
from . import fast_path, matrices, ops, rules
from .matrices import Operands
from .operators import is_plain, needs_grad


def product(
    function: str,
    request: Request,
    x: Operands,
    out: torch.Tensor | None,
    key: fast_path.Key | None,
    fast: fast_path.FastPath,
) -> torch.Tensor:
    """The product of operands whose shapes and dtypes go together, in `out` where given. What it launches is kept in
    `fast` by the key, if there is one."""
    plain = x.input is None and x.residual is None and request.activation is None
    rules.computable(function, x.a, x.b, x.input, dtypes=DTYPES if plain else FLOATING, devices=("cuda", "cpu", "meta"))
    rules.precision(function, request.precision, x.a.dtype)
    if request.batch_invariant is not None:
        arguments.flag(function, "batch_invariant", request.batch_invariant)
    a, b, vectors = _matrices(x.a, x.b)
    x = x._replace(a=a, b=b)
    if out is not None:
        found = _product_into(function, request, out, x, vectors)
        # Unless `out` was resized, and is not what the key says.
        if key is not None and not vectors and key[1] == plan.key_of(request, a, b, out, matrices.auxiliary_of(x)):
            fast.keep(key, found)
        return out
    if key is None:
        return _without(ops.gemm(*x[:3], request, *x[3:]), vectors)
    launched: list[fast_path.Known | None] = []
    c = ops.gemm(*x[:3], request, *x[3:], launched=launched)
    if launched:
        fast.keep(key, fast_path.SLOW if vectors else launched[0])
    return _without(c, vectors)


def _product_into(
    function: str, request: Request, out: torch.Tensor, x: Operands, vectors: tuple[int, ...]
) -> fast_path.Known | None:
    """Fills out with `product` without the dimensions `vectors`; what launches it, where that is one launch."""
    a, b, input, *_ = x
    arguments.tensor(function, "'out'", out)
    if needs_grad(a, b, input, out):
        raise rules.no_grad_into_out(function)
    shape = list(matrices.shape_of(a, b))
    for dim in vectors:
        del shape[dim]
    in_place = is_plain(a, b, input, out) and not out.is_neg()
    if in_place:  # out may share memory with what is read, and be resized
        a, b = (y.clone() if rules.may_alias(out, y) else y for y in (a, b))
        if input is not None and (input is not out or list(out.shape) != shape) and rules.may_alias(out, input):
            input = input.clone()
    dtype = request.out_dtype or result_dtype(a.dtype)
    rules.out(out, shape, dtype, a.device, request.out_dtype is not None)
    if not in_place:
        out.copy_(_without(ops.gemm(a, b, input, request), vectors))
        return None
    c = out
    for dim in reversed(vectors):
        c = c.unsqueeze(dim)
    found = matrices.compute_into(c, Operands(a, b, c if input is out else input), request)
    increment_version(out)
    return found


def _without(c: torch.Tensor, vectors: tuple[int, ...]) -> torch.Tensor:
    """c without these dimensions: one by one, as DTensor's rules for it are (torch 2.11)."""
    for dim in vectors:
        c = c.squeeze(dim)
    return c


def _matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """a [.., M, K] and b [.., K, N], and which dimensions of the product only stand for those that vectors lack."""
    vectors = (-2,) * (a.dim() == 1) + (-1,) * (b.dim() == 1)
    return (a.unsqueeze(0) if a.dim() == 1 else a), (b.unsqueeze(1) if b.dim() == 1 else b), vectors


def autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands as torch.autocast has torch.mm take them. As there, calls with `out` or `out_dtype` are exempt."""
    device = operands[0].device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device else x
        for x in operands
    )
