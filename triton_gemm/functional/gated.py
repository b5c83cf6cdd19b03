"""A linear layer with a gate, as in SwiGLU: `torch.ops.triton_gemm.gated_gemm`.

    gated_gemm(a, b, gate, bias, gate_bias, activation, precision, batch_invariant)
        = activation(a @ gate + gate_bias) * (a @ b + bias)

One kernel computes it in 16 bits, and stores the result alone. With gradients it is made of other operators (`apart`),
which store both products and the activation's result: to compute them again in the backward takes a third more
arithmetic. It is also made of them for forward differentiation, `torch.vmap`, DTensor, other dtypes and batch-invariant
calls.
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..arithmetic import HALF, result_dtype
from ..compat import below_autograd, differentiates_forward
from ..problem import Request
from ..runtime import plan
from . import fast_path, matrices, ops, sharding
from .activations import ACTIVATIONS

_fast = fast_path.FastPath()


def gated_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    activation: str,
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do. a [.., M, K], b and gate [(.., )K, N]; biases
    [N]."""
    operands = (a, b, gate, bias, gate_bias)
    if sharding.is_sharded(*operands):
        return apart(*operands, activation, precision, batch_invariant)
    if ops.is_plain(*operands):
        if ops.needs_grad(*operands):
            return apart(*operands, activation, precision, batch_invariant)
        return _compute(*operands, activation, precision, batch_invariant)
    return _op(*operands, activation, precision, batch_invariant)


def apart(
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: str = "silu",
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """The same by several operators."""
    request = Request(1, 1, precision=precision, batch_invariant=batch_invariant)
    return ACTIVATIONS[activation](ops.gemm(a, gate, gate_bias, request)) * ops.gemm(a, b, bias, request)


def _compute(
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: str = "silu",
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """gated_gemm of plain tensors."""
    how = activation, precision, batch_invariant
    said, auxiliary = words_of(gate, bias, gate_bias, *how)
    return _fast.run(said, a, b, auxiliary, lambda: launch(a, b, gate, bias, gate_bias, *how))


def words_of(
    gate: torch.Tensor, bias: torch.Tensor | None, gate_bias: torch.Tensor | None, *how: str | bool | None
) -> tuple[tuple[object, ...], tuple[torch.Tensor, ...]]:
    """What a call says to `FastPath.take` besides a and b, and its auxiliary operands."""
    auxiliary = tuple(x for x in (bias, gate, gate_bias) if x is not None)
    return ("gated_gemm", bias is None, *how), auxiliary


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    activation: str,
    precision: str | None,
    batch_invariant: bool | None,
) -> tuple[torch.Tensor, fast_path.Known | None]:
    """gated_gemm of plain tensors, and what calls like it launch on the fast path."""
    request = Request(1, 0, activation, None, precision, batch_invariant=batch_invariant, gate=True)
    if a.dtype not in HALF.dtypes or plan.remembering(request).batch_invariant:
        return apart(a, b, gate, bias, gate_bias, activation, precision, batch_invariant), fast_path.SLOW
    c = torch.empty(matrices.shape_of(a, b), dtype=result_dtype(a.dtype), device=a.device)
    if c.numel() == 0:
        return c, fast_path.SLOW
    given = [a, b, gate, *(x for x in (bias, gate_bias) if x is not None)]
    a, b, gate = a.resolve_neg(), b.resolve_neg(), gate.resolve_neg()
    if b.stride() != gate.stride() or (b.data_ptr() % 16 == 0) != (gate.data_ptr() % 16 == 0):
        b, gate = b.contiguous(), gate.contiguous()
        b, gate = (x if x.data_ptr() % 16 == 0 else x.clone() for x in (b, gate))
    biases: list[torch.Tensor] = []
    if bias is not None or gate_bias is not None:
        biases = [a.new_zeros(b.shape[1]) if x is None else x.resolve_neg().contiguous() for x in (bias, gate_bias)]
        request = request._replace(bias="n")
    found = [
        (left, right, of_gate, plan.multiply(left, right, into, request, (*biases[:1], of_gate, *biases[1:])))
        for (left, right, into), (_, of_gate, _) in zip(
            matrices.views(a, b, c), matrices.views(a, gate, c), strict=True
        )
    ]
    *launched, one = found[0]
    if len(found) > 1 or len(given) != 3 + len(biases):
        return c, fast_path.SLOW
    return c, fast_path.known(one, c, *zip(given, (*launched, *biases), strict=True))


def _kernel(a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, *rest: Any) -> torch.Tensor:
    """`_compute` for the dispatcher, whose callers may have checked nothing."""
    if not a.dtype == b.dtype == gate.dtype or b.shape != gate.shape:
        raise RuntimeError(f"gated_gemm: {b.dtype}{list(b.shape)} and {gate.dtype}{list(gate.shape)} do not match")
    return _compute(a, b, gate, *rest)


def _fake(a: torch.Tensor, b: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    return a.new_empty(matrices.shape_of(a, b), dtype=result_dtype(a.dtype))


def _autograd(
    a: torch.Tensor,
    b: torch.Tensor,
    gate: torch.Tensor,
    bias: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    activation: str = "silu",
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    arguments: Any = (a, b, gate, bias, gate_bias, activation, precision, batch_invariant)
    if ops.needs_grad(*arguments[:5]) or differentiates_forward(*arguments[:5]):
        return apart(*arguments)
    with below_autograd():
        return _op(*arguments)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    """Of products that are batched themselves."""
    given = list(zip(arguments, in_dims, strict=False))[:5]
    given += [(None, None)] * (5 - len(given))
    (a, of_a), (b, of_b), (gate, of_gate), (bias, of_bias), (gate_bias, of_gate_bias) = given
    *how, activation = *arguments[6:], arguments[5] if len(arguments) > 5 else "silu"
    how += [None] * (2 - len(how))
    request = Request(1, 1, precision=how[0], batch_invariant=how[1])
    products: list[torch.Tensor] = []
    for right, of_right, added, of_added in ((gate, of_gate, gate_bias, of_gate_bias), (b, of_b, bias, of_bias)):
        dims = (of_a, of_right, of_added)
        if dims == (None, None, None):
            products.append(ops.gemm(a, right, added, request).unsqueeze(0))
        else:
            operands: Any = ops.batched(info.batch_size, dims, (a, right, added))
            products.append(ops.gemm(operands[0], operands[1], operands[2], request))
    return ACTIVATIONS[activation](products[0]) * products[1], 0


_op, _library = ops.operator(
    "gated_gemm(Tensor a, Tensor b, Tensor gate, Tensor? bias=None, Tensor? gate_bias=None, "
    'str activation="silu", str? precision=None, bool? batch_invariant=None) -> Tensor',
    _kernel,
    _fake,
)
_library.impl("gated_gemm", _autograd, "Autograd")
torch.library.register_vmap("triton_gemm::gated_gemm", _vmap, lib=_library)


@register_flop_formula(torch.ops.triton_gemm.gated_gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    return 4 * prod(out_shape) * a_shape[-1]
