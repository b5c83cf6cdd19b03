"""The operators `torch.ops.triton_gemm.gemm` and `gemm_for_backward`, and what torch must know of them: their shapes,
derivatives, vmap, FLOPs.

    gemm(a, b, input, alpha, beta, activation, out_dtype, precision, batch_invariant, residual, gate, gate_bias)
        = activation(alpha a @ b + beta input) + residual, or with a gate
          activation(a @ gate + gate_bias) (a @ b + input) + residual

a [.., M, K] and b [.., K, N] broadcast as torch.matmul's operands do, what is added to the result. Every function of
the API is views around it, and its derivatives are made of itself, so that they can be differentiated, batched and
traced again. Plain tensors go past the dispatcher, which costs more than the launch (`gemm`).

With gradients the same kernel runs as without, so that results have the same bits. It also stores what a backward needs
to know: what the activation is applied to, and with a gate a @ b + input (`gemm_for_backward` returns these, too).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..arithmetic import result_dtype
from ..compat import (
    before_withdrawal,
    below_autograd,
    differentiates_forward,
    dual,
    forward_grad_enabled,
    in_transform,
    may_differ,
    must_dispatch,
    single_level_autograd,
)
from ..problem import SUM, Request
from ..runtime import native, plan
from . import fast_path, matrices, sharding
from .activations import ACTIVATIONS, derivative, for_gradients, through_activation
from .matrices import Operands
from .native_products import NativeProducts, Places
from .operator_arguments import ARGUMENTS, batched_arguments, checked, parsed
from .operators import Derivatives, Tensors, for_backward, is_plain, needs_grad, operator

NAME = "triton_gemm::gemm"
KEYS = ("AutogradCUDA", "CUDA")  # of the operator's kernels that C++ overrides
MANY_ROWS = 1024  # of a gradient, from which on a product with ones sums them faster than torch's sum


# --- Computing it ---


def _show(extension: Any, table: Any) -> None:
    """Has C++ look up calls of the operator in this table, and a backward's products as such calls with defaults."""
    extension.backward_by(table, NAME, SUM, MANY_ROWS)
    _by_cpp.route(True, table)


_fast = fast_path.FastPath(_show)  # of forward and backward passes, and of the dispatcher, as from compiled graphs


def _computed(x: Operands, request: Request) -> Tensors:
    """The result, and preactivations if the request has them, by the fast path where a call like this one was made
    before. Operands are cast, if autocast is on."""
    before = _before(x, request)
    auxiliary = matrices.auxiliary_of(x, before)
    name = matrices.function_of(NAME, x)
    return _fast.run(name, x.a, x.b, auxiliary, lambda: matrices.compute(x, request, before), request), *before


def _before(x: Operands, request: Request) -> Tensors:
    """Where a request's preactivations go."""
    count = 0 if not request.preactivation else 1 if x.gate is None else 2
    return tuple([_empty(x, request) for _ in range(count)])


def _empty(x: Operands, request: Request) -> torch.Tensor:
    """A tensor like the result."""
    return x.a.new_empty(matrices.shape_of(x.a, x.b), dtype=request.out_dtype or result_dtype(x.a.dtype))


# --- The operators ---


def _dispatched(x: Operands, request: Request) -> Tensors:
    """The result, and preactivations if the request has them, by the dispatcher."""
    alpha, beta, activation, out_dtype, precision, *_ = request
    beta = 1 if x.input is None else beta
    how = alpha, beta, activation, out_dtype, precision, request.batch_invariant
    if not request.preactivation:
        more = () if x.is_product() else x[3:]
        return (_op(*x[:3], *how, *more),)
    c, before, ungated = _op_for_backward(*x[:3], *how, *x[3:])
    return (c, before) if x.gate is None else (c, before, ungated)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    request: Request = SUM,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    launched: list[fast_path.Known | None] | None = None,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do. launched: where what calls like this one launch
    is added, if this one is launched past the dispatcher."""
    x = Operands(a, b, input, residual, gate, gate_bias)
    if not is_plain(*x):
        if not torch.compiler.is_dynamo_compiling():
            sharding.register()
            if not x.is_product() and sharding.is_sharded(*x):
                return _decomposed(x, request)
        return _dispatched(x, request)[0]
    if needs_grad(*x):
        if in_transform():  # of other tensors; the dispatcher makes this a level of it
            return _dispatched(x, request)[0]
        request = plan.remembering(request)
        auxiliary = () if input is None else (input,)
        if x.is_product() and fast_path.may_differentiate(NAME, a, b, auxiliary, request):
            key, c = _fast.take(NAME, a, b, auxiliary, request)
            if c is None:
                launched = [] if launched is None and key is not None else launched
                c = _differentiable(x, request, launched)[0]
                if launched and launched[0] is not None:  # each table is offered one of its own
                    _fast.keep(key, replace(launched[0]) if launched[0].plan is not None else launched[0])
            return c
        return _differentiable(x, request, launched)[0]
    if launched is None:
        return _computed(x, request)[0]
    c, known = matrices.compute(x, request)
    launched.append(known)
    return c


def _decomposed(x: Operands, request: Request) -> torch.Tensor:
    """`gemm` by several operators, for which DTensor has sharding rules."""
    if request.activation is None and x.gate is None and x.input is None:
        return gemm(x.a, x.b, x.residual, request)
    return matrices.unfused(x, request, lambda product, how: gemm(*product[:3], how))


class _Gemm(Derivatives):
    """(result, what the activation is applied to, with a gate a @ b + input), of which only a result is given where no
    activation has to know more. All of them are differentiable, as the backward that is made of them is."""

    @staticmethod
    def forward(*arguments: Any) -> torch.Tensor | Tensors:
        *operands, request, launched = arguments
        x = Operands(*operands)
        if not is_plain(*x):
            # torch stops recording within a forward. The levels below this one are others', and go on.
            with below_autograd(), torch.enable_grad(), forward_grad_enabled():
                found = _dispatched(x, request)
        elif launched is None:
            found = _computed(x, request)
        else:
            before = _before(x, request)
            c, known = matrices.compute(x, request, before)
            if known is not None and before and known.plan is not None:
                known = replace(known, preactivations=len(before))
            launched.append(known)
            found = (c, *before)
        return found if len(found) > 1 else found[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor | Tensors) -> None:
        *operands, ctx.request, _ = inputs
        a, b, input, residual, gate, gate_bias = operands
        c, *before = (output,) if isinstance(output, torch.Tensor) else output
        ctx.set_materialize_grads(False)
        ctx.like = [None if x is None else _likeness(x) for x in (a, b, gate)]
        ctx.added = [None if x is None else (x.shape, x.dtype) for x in (input, residual, gate_bias)]
        needs = ctx.needs_input_grad
        ctx.through = any([needs[i] for i in (0, 1, 2, 4, 5)])  # not the residual alone
        keeps_c = ctx.request.activation == "relu" and not before and ctx.through
        ctx.save_for_backward(
            *(a if needs[1] or needs[4] else None, b if needs[0] else None, gate if needs[0] else None),
            *(c if keeps_c else None, *before, *[None] * (2 - len(before))),
        )
        if differentiates_forward(*operands):
            ctx.save_for_forward(a, b, gate, c, *before, *[None] * (2 - len(before)))

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *of_before: torch.Tensor | None) -> tuple[Any, ...]:
        grads: list[torch.Tensor | None] = [None] * 8
        if grad is None and all(x is None for x in of_before):
            return tuple(grads)
        a, b, gate, c, *before = ctx.saved_tensors  # once, as checkpoints give them once
        request = ctx.request
        invariant = request.batch_invariant
        product = Request(request.alpha, precision=request.precision, batch_invariant=invariant)
        of_input, of_residual, of_gate_bias = ctx.added
        needs = ctx.needs_input_grad
        if grad is not None and needs[3]:
            grads[3] = _through_addition(grad, 1, *of_residual)
        by_sum = by_gate = None
        if ctx.through:
            gated = ctx.like[2] is not None
            by_sum, by_gate = through_activation(request.activation, grad, c, before, of_before, gated)
        # Sizes are the operands': a compiler may know those of a gradient in the backward alone.
        a_like, b_like, gate_like = ctx.like
        a_shape, b_shape = a_like[0], b_like[0]
        batch, M, N = matrices.batch_of(a_shape, b_shape), a_shape[-2], b_shape[-1]
        for by, right, right_like, place in ((by_sum, b, b_like, 1), (by_gate, gate, gate_like, 4)):
            if by is not None and needs[0]:
                of_a = _summed(by.to(right.dtype).mT, right.mT, a_like, (*batch, N), product)
                grads[0] = of_a if grads[0] is None else grads[0] + of_a
            if by is not None and needs[place]:
                grads[place] = _summed(a, by.to(a.dtype), right_like, (*batch, M), product)
        if needs[2] and by_sum is not None:
            grads[2] = _through_addition(by_sum, request.beta, *of_input)
        if needs[5] and by_gate is not None:
            grads[5] = _through_addition(by_gate, 1, *of_gate_bias)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor | tuple[torch.Tensor | None, ...] | None:
        # torch stops forward differentiation within a jvp. This level's tangents end here; those of the levels below
        # it go on, through what the activation's derivative is made of too.
        with forward_grad_enabled():
            saved = tuple(None if x is None else dual(x)[0] for x in ctx.saved_tensors)
            found = _tangents(ctx.request, saved, *tangents[:6])
        return found if len(found) > 1 else found[0]


def _tangents(
    request: Request, saved: tuple[Any, ...], *tangents: torch.Tensor | None
) -> tuple[torch.Tensor | None, ...]:
    """The tangents of what `_Gemm` returns. saved: of `_Gemm`'s forward differentiation."""
    a, b, gate, c, *before = saved
    by_a, by_b, by_input, by_residual, by_right, by_gate_bias = tangents

    def of_product(right: torch.Tensor, by_right: torch.Tensor | None, tangent: torch.Tensor | None) -> Any:
        product = request._replace(activation=None, preactivation=False)
        for x, y in ((by_a, right), (a, by_right)):
            if x is not None and y is not None:
                tangent = gemm(x, y, tangent, product)
                product = product._replace(beta=1.0)
        if tangent is None:
            return None
        tangent = tangent if product.beta == 1 else product.beta * tangent
        return tangent.expand(c.shape).to(c.dtype)

    sums = of_product(b, by_b, by_input)
    of_before: tuple[Any, ...] = (sums, None)[: sum(x is not None for x in before)]
    if gate is not None:
        of_gate = of_product(gate, by_right, by_gate_bias)
        of_before = of_gate, sums
        tangent = None if of_gate is None else derivative(request.activation, of_gate, before[0]) * before[1]
        if sums is not None:
            through = ACTIVATIONS[request.activation](before[0]) * sums
            tangent = through if tangent is None else tangent + through
    elif sums is None or request.activation is None:
        tangent = sums
    else:
        tangent = derivative(request.activation, sums, before[0] if before[0] is not None else c)
    if by_residual is not None:
        by_residual = by_residual.expand(c.shape).to(c.dtype)
        tangent = by_residual if tangent is None else tangent + by_residual
    if not of_before:
        return (tangent,)
    # Of several outputs torch takes no tangent that is not there.
    return tuple([torch.zeros_like(c) if x is None else x for x in (tangent, *of_before)])


def _differentiable(x: Operands, request: Request, launched: list[fast_path.Known | None] | None = None) -> Tensors:
    """The result, and what else `_Gemm` returns, with their derivatives."""
    through = any([y is not None and y.requires_grad for y in x._replace(residual=None)]) or differentiates_forward(*x)
    if through and not request.preactivation:
        request = for_gradients(request, x.residual is None and x.gate is None)
    found = _Gemm.apply(*x, request, launched)  # type: ignore[attr-defined]
    return (found,) if isinstance(found, torch.Tensor) else found


def _likeness(x: torch.Tensor) -> tuple[torch.Size, bool]:
    """x's shape, and whether its columns lie together."""
    return x.shape, not may_differ(x.stride(-2), 1) and may_differ(x.stride(-1), 1)


def _summed(
    x: torch.Tensor, y: torch.Tensor, like: tuple[torch.Size, bool], over: Sequence[int], product: Request
) -> torch.Tensor:
    """`product` x^T y of x [.., R, I] and y [.., R, J] as the gradient of an operand [.., I, J] like `like`. It is
    summed over the dimensions of the batch in which that was broadcast, by joining them with R. It has that operand's
    strides, so that it is not copied when gradients are accumulated. over: the batch's sizes and R."""
    shape, column_major = like
    if column_major:
        transposed = torch.Size((*shape[:-2], shape[-1], shape[-2]))
        return _summed(y, x, (transposed, False), over, product).mT
    *batch, rows = over
    target = (1,) * (len(batch) + 2 - len(shape)) + tuple(shape[:-2])
    joined = [i for i in range(len(batch)) if not may_differ(target[i], 1) and may_differ(batch[i], 1)]
    if joined:
        kept = [size for i, size in enumerate(batch) if i not in joined]
        order = [*(i for i in range(len(batch)) if i not in joined), *joined, len(batch), len(batch) + 1]
        rows = prod(batch[i] for i in joined) * rows
        x, y = (z.expand(*batch, *z.shape[-2:]) for z in (x, y))
        if not all(sharding.can_join(z, [*joined, len(batch)]) for z in (x, y)):
            return gemm(x.mT, y, None, product).sum(joined).reshape(shape)
        x, y = (z.permute(order).reshape(*kept, rows, z.shape[-1]) for z in (x, y))
    return gemm(x.mT, y, None, product).reshape(shape)


def _through_addition(grad: torch.Tensor, beta: float, shape: torch.Size, dtype: torch.dtype) -> torch.Tensor:
    """The gradient of an `input` of that shape and dtype, beta of which was added to what grad [.., N] is of.

    Of a bias it is a sum down columns, which is a product with a row of ones. In 16 bits that was 1.5 to 2.1 times as
    fast as torch's sum on an H100, for 2048 to 8192 rows of 1024 to 4096. Compilers fuse the sum with what comes before
    it.
    """
    if is_plain(grad) and grad.dtype == dtype and dtype.itemsize == 2:
        columns = grad.shape[-1]
        rows = grad.numel() // max(columns, 1)
        if rows >= MANY_ROWS and tuple(shape[-1:]) == (columns,) and shape.numel() == columns:
            return gemm(grad.new_ones(1, rows), grad.reshape(rows, columns), None, Request(beta)).reshape(shape)
    summed = grad.sum_to_size(shape).to(dtype)
    return summed if beta == 1 else beta * summed


def _autograd(*arguments: Any) -> torch.Tensor:
    sharding.register()
    x, request = parsed(*arguments)
    if not (needs_grad(*x) or differentiates_forward(*x)):
        with below_autograd():
            return _op(*arguments)
    if (request.activation is not None or not x.is_product()) and sharding.is_sharded(*x):
        return _decomposed(x, request)
    with single_level_autograd():
        # What a compiler traces does as it is told where it runs.
        return _differentiable(x, request if must_dispatch() else plan.remembering(request))[0]


def _autograd_for_backward(*arguments: Any) -> Tensors:
    x, request = parsed(*arguments)
    if not (needs_grad(*x) or differentiates_forward(*x)):
        with below_autograd():
            return _op_for_backward(*arguments)
    with single_level_autograd():
        return for_backward(_differentiable(x, request._replace(preactivation=True)))


def _kernel(*arguments: Any) -> torch.Tensor:
    return _computed(*checked(*arguments))[0]


def _kernel_for_backward(*arguments: Any) -> Tensors:
    x, request = checked(*arguments)
    if request.activation is None:
        raise RuntimeError("gemm_for_backward: without an activation there is nothing else to return")
    return for_backward(_computed(x, request._replace(preactivation=True)))


def _fake(*arguments: Any, **named: Any) -> torch.Tensor:
    return _empty(*parsed(*arguments, **named))


def _fake_for_backward(*arguments: Any, **named: Any) -> Tensors:
    x, request = parsed(*arguments, **named)
    return for_backward(tuple(_empty(x, request) for _ in range(2 if x.gate is None else 3)))


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    return _op(*batched_arguments(info.batch_size, in_dims, arguments)), 0


def _vmap_for_backward(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Tensors, Any]:
    found = _op_for_backward(*batched_arguments(info.batch_size, in_dims, arguments))
    return found, (0, 0, None if found[2].dim() == 1 else 0)


_op, _library = operator(f"gemm{ARGUMENTS} -> Tensor", _kernel, _fake)
_library.impl("gemm", _autograd, "Autograd")
_by_cpp = NativeProducts({NAME: (NAME, Places(0, 1, 2, 3, 4))})
_by_cpp.register(KEYS, native.built())  # before anything can call the operator
before_withdrawal("gemm", _by_cpp.unregister)
torch.library.register_vmap("triton_gemm::gemm", _vmap, lib=_library)

_op_for_backward, _library_for_backward = operator(
    f"gemm_for_backward{ARGUMENTS} -> (Tensor, Tensor, Tensor)", _kernel_for_backward, _fake_for_backward
)
_library_for_backward.impl("gemm_for_backward", _autograd_for_backward, "Autograd")
torch.library.register_vmap("triton_gemm::gemm_for_backward", _vmap_for_backward, lib=_library_for_backward)


@register_flop_formula([torch.ops.triton_gemm.gemm, torch.ops.triton_gemm.gemm_for_backward])
def _flops(a_shape: torch.Size, b_shape: torch.Size, *more: Any, out_shape: Any, gate: Any = None, **__: Any) -> int:
    c = out_shape[0] if isinstance(out_shape[0], (tuple, list)) else out_shape
    products = 2 if gate is not None or (len(more) > 8 and more[8] is not None) else 1
    return 2 * products * prod(c) * a_shape[-1]
