"""The one operator, `torch.ops.triton_gemm.gemm`, and what torch must know of it: its shape, derivatives, vmap, FLOPs.

    gemm(a, b, input, alpha, beta, activation, out_dtype, precision, batch_invariant)
        = activation(alpha a @ b + beta input)

a [.., M, K] and b [.., K, N] broadcast as torch.matmul's operands do, input to the result. Every function of the API is
views around it, and its derivatives are made of itself, so that they can be differentiated, batched and traced again.
Plain tensors go past the dispatcher, which costs more than the launch (`gemm`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from ..arithmetic import result_dtype
from ..compat import (
    SingleLevelFunction,
    before_withdrawal,
    below_autograd,
    differentiates_forward,
    dual,
    forward_grad_enabled,
    grad_enabled,
    in_transform,
    is_wrapper,
    library_of,
    may_differ,
    must_dispatch,
    single_level_autograd,
)
from ..problem import SUM, Request
from ..runtime import native, plan
from . import fast_path, matrices, sharding
from .fast_path import PLAIN
from .native_products import NativeProducts, Places

NAME = "triton_gemm::gemm"
KEYS = ("AutogradCUDA", "CUDA")  # of the operator's kernels that C++ overrides
MANY_ROWS = 1024  # of a gradient, from which on a product with ones sums them faster than torch's sum


# --- Computing it ---


def _show(extension: Any, table: Any) -> None:
    """Has C++ look up calls of the operator in this table, and a backward's products as such calls with defaults."""
    extension.backward_by(table, NAME, SUM, MANY_ROWS)
    _by_cpp.route(True, table)


_fast = fast_path.FastPath(_show)  # of forward and backward passes, and of the dispatcher, as from compiled graphs


def _computed(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, request: Request) -> torch.Tensor:
    """`compute`, by the fast path where a call like this one was made before. Operands are cast, if autocast is on."""

    def launch() -> tuple[torch.Tensor, fast_path.Known | None]:
        c = matrices.compute(a, b, input, request)
        return c, matrices.known(a, b, c, input, request)

    return _fast.run(NAME, a, b, () if input is None else (input,), launch, request)


# --- The operator ---


def operator(
    schema: str, kernel: Callable[..., torch.Tensor], fake: Callable[..., torch.Tensor]
) -> tuple[Any, torch.library.Library]:
    """Defines `torch.ops.triton_gemm`'s operator of that schema: what computes it, and its result without data. The
    operator, and its library."""
    name = schema.partition("(")[0]
    library = library_of(name)
    # flexible_layout: the kernels take any strides, so the compiler need not copy operands into those that it traced.
    library.define(schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    for key in ("CUDA", "CPU"):
        library.impl(name, kernel, key)
    torch.library.register_fake(f"triton_gemm::{name}", fake, lib=library)
    return getattr(torch.ops.triton_gemm, name).default, library


def _request(
    alpha: float = 1,
    beta: float = 1,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
) -> Request:
    """What follows `input` among the operator's arguments, with its defaults: torch leaves out trailing ones."""
    return Request(alpha, beta, activation, out_dtype, precision, batch_invariant=batch_invariant)


def _dispatched(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, request: Request) -> torch.Tensor:
    """The operator, by the dispatcher."""
    alpha, beta, activation, out_dtype, precision, *_ = request
    beta = 1 if input is None else beta
    return _op(a, b, input, alpha, beta, activation, out_dtype, precision, request.batch_invariant)


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are nothing but data, and no mode, tracer or profiler is active. Gradients apart."""
    if must_dispatch():
        return False
    return all(x is None or (type(x) in PLAIN and not x.is_meta and not is_wrapper(x)) for x in tensors)


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    return grad_enabled() and any(x is not None and x.requires_grad for x in tensors)


def gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    request: Request = SUM,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do."""
    if not is_plain(a, b, input):
        if not torch.compiler.is_dynamo_compiling():
            sharding.register()
        return _dispatched(a, b, input, request)
    if needs_grad(a, b, input):
        if in_transform():  # of other tensors; the dispatcher makes this a level of it
            return _dispatched(a, b, input, request)
        request = plan.remembering(request)
        auxiliary = () if input is None else (input,)
        if fast_path.may_differentiate(NAME, a, b, auxiliary, request):
            _, c = _fast.take(NAME, a, b, auxiliary, request)
            if c is not None:
                return c
        return _differentiable(a, b, input, request)
    return _computed(a, b, input, request)


class Derivatives(SingleLevelFunction):
    """An operator's derivatives, for one level of differentiation.

    This is what torch itself makes of a `torch.autograd.Function` for each level of functorch's transforms. The
    dispatcher calls the operator's Autograd kernel once for each level too, so that must be such a function from the
    start; as a plain Function it would be handed back to functorch, and fail.
    """

    @staticmethod
    def _compiled_autograd_key(ctx: Any) -> tuple[int, ...]:
        """By which compiled autograd tells nodes apart, as plain Functions have it."""
        return (ctx._autograd_function_id,)


class _Gemm(Derivatives):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, request: Request) -> torch.Tensor:
        if is_plain(a, b, input):
            return _computed(a, b, input, request)
        # torch stops recording within a forward. The levels below this one are others', and go on.
        with below_autograd(), torch.enable_grad(), forward_grad_enabled():
            return _dispatched(a, b, input, request)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, b, input, ctx.request = inputs
        ctx.set_materialize_grads(False)
        ctx.a_like, ctx.b_like = _likeness(a), _likeness(b)
        ctx.input_like = None if input is None else (input.shape, input.dtype)
        activation = ctx.request.activation
        again = activation not in (None, "relu")  # whether the backward computes what the activation was applied to
        keep_a, keep_b = ctx.needs_input_grad[1] or again, ctx.needs_input_grad[0] or again
        ctx.save_for_backward(
            *(a if keep_a else None, b if keep_b else None),
            *(input if again else None, output if activation == "relu" else None),
        )
        if differentiates_forward(a, b, input):
            ctx.save_for_forward(a, b, input, output)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        grads: list[torch.Tensor | None] = [None] * 4
        if grad is None:
            return tuple(grads)
        a, b, *_ = saved = ctx.saved_tensors  # once, as checkpoints give them once
        invariant = ctx.request.batch_invariant
        product = Request(ctx.request.alpha, precision=ctx.request.precision, batch_invariant=invariant)
        grad = _through_activation(ctx.request, saved, grad)
        # Sizes are the operands': a compiler may know those of a gradient in the backward alone.
        a_shape, b_shape = ctx.a_like[0], ctx.b_like[0]
        batch, M, N = matrices.batch_of(a_shape, b_shape), a_shape[-2], b_shape[-1]
        if ctx.needs_input_grad[0]:
            grads[0] = _summed(grad.to(b.dtype).mT, b.mT, ctx.a_like, (*batch, N), product)
        if ctx.needs_input_grad[1]:
            grads[1] = _summed(a, grad.to(a.dtype), ctx.b_like, (*batch, M), product)
        if ctx.needs_input_grad[2]:
            grads[2] = _through_addition(grad, ctx.request.beta, *ctx.input_like)
        return tuple(grads)

    @staticmethod
    def jvp(ctx: Any, *tangents: Any) -> torch.Tensor | None:
        # torch stops forward differentiation within a jvp. This level's tangents end here; those of the levels below
        # it go on, through what the activation's derivative is made of too.
        with forward_grad_enabled():
            saved = tuple(None if x is None else dual(x)[0] for x in ctx.saved_tensors)
            return _Gemm._tangent(ctx.request, saved, *tangents[:3])

    @staticmethod
    def _tangent(
        request: Request,
        saved: tuple[torch.Tensor | None, ...],
        by_a: torch.Tensor | None,
        by_b: torch.Tensor | None,
        tangent: torch.Tensor | None,
    ) -> torch.Tensor | None:
        a, b, _, output = saved
        assert a is not None and b is not None and output is not None
        product = request._replace(activation=None)
        for left, right in ((by_a, b), (a, by_b)):
            if left is not None and right is not None:
                tangent = gemm(left, right, tangent, product)
                product = product._replace(beta=1.0)
        if tangent is None:
            return None
        tangent = tangent if product.beta == 1 else product.beta * tangent
        return _through_activation(request, saved, tangent.expand(output.shape).to(output.dtype))


_differentiable: Callable[..., torch.Tensor] = _Gemm.apply  # type: ignore[attr-defined]


def _likeness(x: torch.Tensor) -> tuple[torch.Size, bool]:
    """x's shape, and whether its columns lie together."""
    return x.shape, not may_differ(x.stride(-2), 1) and may_differ(x.stride(-1), 1)


def _summed(
    x: torch.Tensor, y: torch.Tensor, like: tuple[torch.Size, bool], over: Sequence[int], product: Request
) -> torch.Tensor:
    """`product` x^T y of x [.., R, I] and y [.., R, J] as the gradient of an operand [.., I, J] like `like`: summed
    over the dimensions of the batch in which that was broadcast, by joining them with R; and with its strides, so that
    it is not copied when gradients are accumulated. over: the batch's sizes and R."""
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

    Of a bias it is a sum down columns, which is a product with a row of ones: in 16 bits that was 1.5 to 2.1 times as
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


def _through_activation(request: Request, saved: tuple[torch.Tensor | None, ...], x: torch.Tensor) -> torch.Tensor:
    """x times the activation's derivative. saved: what `setup_context` saved."""
    activation = request.activation
    if activation is None:
        return x
    a, b, input, output = saved
    if activation == "relu":
        return torch.ops.aten.threshold_backward(x, output, 0)
    assert a is not None and b is not None
    before = gemm(a, b, input, request._replace(activation=None))
    if activation == "silu":
        gate = before.sigmoid()
        return x * (gate * (1 + before * (1 - gate)))
    approximate = "tanh" if activation == "gelu_tanh" else "none"
    return torch.ops.aten.gelu_backward(x, before, approximate=approximate)


def _autograd(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None = None, *arguments: Any) -> torch.Tensor:
    sharding.register()
    if needs_grad(a, b, input) or differentiates_forward(a, b, input):
        with single_level_autograd():
            request = _request(*arguments)
            # What a compiler traces does as it is told where it runs.
            return _differentiable(a, b, input, request if must_dispatch() else plan.remembering(request))
    with below_autograd():
        return _op(a, b, input, *arguments)


def _kernel(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None = None, *arguments: Any) -> torch.Tensor:
    if a.dtype != b.dtype:
        raise RuntimeError(f"gemm: {a.dtype} and {b.dtype} cannot be multiplied")
    return _computed(a, b, input, _request(*arguments))


def _fake(
    a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None = None, *arguments: Any, **named: Any
) -> torch.Tensor:
    return a.new_empty(matrices.shape_of(a, b), dtype=_request(*arguments, **named).out_dtype or result_dtype(a.dtype))


def batched(
    size: int, in_dims: Sequence[int | None], given: Sequence[torch.Tensor | None]
) -> list[torch.Tensor | None]:
    """a, b and what is added to their product, of which some have a new dimension of that size: it becomes the first of
    the batch; operands without it are broadcast along it."""
    operands = list(zip(given, in_dims, strict=True))
    rank = max(x.dim() - (dim is not None) for x, dim in operands if x is not None)
    if in_dims[0] is None and in_dims[1] is None:  # only what is added has it
        assert given[0] is not None
        operands[0] = given[0].expand(size, *given[0].shape), 0

    def first(x: torch.Tensor | None, dim: int | None) -> torch.Tensor | None:
        if x is None or dim is None:
            return x
        x = x.movedim(dim, 0)
        return x.reshape(x.shape[0], *(1,) * (rank + 1 - x.dim()), *x.shape[1:])

    return [first(x, dim) for x, dim in operands]


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    count = min(3, len(arguments))
    return _op(*batched(info.batch_size, in_dims[:count], arguments[:count]), *arguments[3:]), 0


_op, _library = operator(
    "gemm(Tensor a, Tensor b, Tensor? input=None, Scalar alpha=1.0, Scalar beta=1.0, str? activation=None, "
    "ScalarType? out_dtype=None, str? precision=None, bool? batch_invariant=None) -> Tensor",
    _kernel,
    _fake,
)
_library.impl("gemm", _autograd, "Autograd")
_by_cpp = NativeProducts({NAME: (NAME, Places(0, 1, 2, 3, 4))})
_by_cpp.register(KEYS, native.built())  # before anything can call the operator
before_withdrawal("gemm", _by_cpp.unregister)
torch.library.register_vmap("triton_gemm::gemm", _vmap, lib=_library)


@register_flop_formula(torch.ops.triton_gemm.gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, *_: Any, out_shape: torch.Size, **__: Any) -> int:
    return 2 * prod(out_shape) * a_shape[-1]
