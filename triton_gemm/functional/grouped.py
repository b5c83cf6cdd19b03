"""Products of groups whose sizes only the GPU knows, as in mixtures of experts: torch's grouped_mm.

The operator `torch.ops.triton_gemm.grouped_gemm` multiplies a [M, K], its rows in groups, with b [G, K, N], or a [M, K]
with b [K, N], what they are summed over in groups. Its derivatives are products of the same two kinds.

With a gate, which is a second b for groups of rows, it is activation(a @ gate) * (a @ b). One kernel computes that of
16 bits, unless weights lie differently or it is batch-invariant. `grouped_gemm_for_backward` is as in `ops`.
"""

from __future__ import annotations

from functools import partial
from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import arguments
from ..arithmetic import FLOATING, HALF, Precision
from ..compat import below_autograd, single_level_autograd
from ..problem import GATES, Activation, Gate, Request
from ..runtime import plan
from . import fast_path, ops, rules
from .activations import ACTIVATIONS, for_gradients, through_activation
from .operators import Derivatives, Tensors, for_backward, is_plain, needs_grad, operator

_fast = fast_path.FastPath()


def grouped_matmul(
    mat_a: torch.Tensor,
    mat_b: torch.Tensor,
    offs: torch.Tensor | None = None,
    *,
    out_dtype: torch.dtype | None = None,
    activation: Activation | Gate | None = None,
    gate: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.grouped_mm`: one GEMM for each of G groups, as in mixtures of experts.

    - mat_a [M, K], its rows in groups, and mat_b [G, K, N], a matrix for each: [M, N].
    - mat_a [G, M, K], and mat_b [K, N], its columns in groups: [M, N].
    - mat_a [M, K] and mat_b [K, N], K in groups: [G, M, N], as in the gradient of the first.
    - mat_a [G, M, K] and mat_b [G, K, N], without offs: [G, M, N].

    Rows and columns of the result after the last group's end are 0. Both operands can be differentiated backwards, any
    number of times, and not forwards (torch.func.jvp, jacfwd).

    With a gate the result is silu(mat_a @ gate) * (mat_a @ mat_b) in each group, or with gelu, gelu_tanh or relu in
    place of silu. In fp16 and bf16 one kernel computes it if both have the same strides.

    Args:
        mat_a: fp32, fp16, bf16 or fp64, on a GPU, of any strides.
        mat_b: Of the same dtype, on the same GPU, of any strides.
        offs: An int32 tensor [G] in the GPU's memory, for which the host does not wait: where each group ends,
            ascending.
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded.
        activation: As in `linear`, in the same kernel. With a gate "swiglu", "geglu", "geglu_tanh"
            or "reglu".
        gate: A second mat_b [G, K, N], for a mat_a whose rows are in groups, or without offs a batch. Both may be views
            of one weight.
        precision: As in `matmul`.
        batch_invariant: As in `matmul`, for any number of what is in groups, rows or columns.

    Returns:
        A tensor of the operands' dtype, or of out_dtype.

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`; also RuntimeError for offs that do not
            fit, NotImplementedError for forward differentiation, ValueError for an unknown activation, or for a gate
            without its activation and the reverse.
    """
    operation = "grouped_matmul", out_dtype, precision, batch_invariant, activation
    key, c = _fast.take(operation, mat_a, mat_b, tuple([x for x in (gate, offs) if x is not None]))
    if c is not None:
        return c
    arguments.tensors("grouped_matmul", mat_a=mat_a, mat_b=mat_b)
    if gate is not None:
        arguments.tensor("grouped_matmul", "'gate'", gate)
    name: str | None = activation
    if gate is not None or (isinstance(activation, str) and activation in GATES):
        name = rules.gate("grouped_matmul", activation, gate, "[G, K, N] each: mat_b")
    else:
        rules.activation("grouped_matmul", activation)
    if offs is not None or not mat_a.dim() == mat_b.dim() == 3:
        rules.grouped(mat_a, mat_b, offs, gate)
    elif gate is None:
        rules.bmm(mat_a, mat_b)
    else:
        rules.gate_of_groups(mat_a, mat_b, gate, 3)
    rules.out_dtype(out_dtype, mat_a)
    rules.computable("grouped_matmul", mat_a, mat_b, dtypes=FLOATING, devices=("cuda", "cpu", "meta"))
    rules.precision("grouped_matmul", precision, mat_a.dtype)
    if batch_invariant is not None:
        arguments.flag("grouped_matmul", "batch_invariant", batch_invariant)
    request = Request(1, 0, name, out_dtype, precision, batch_invariant=batch_invariant)
    launched: list[fast_path.Known | None] | None = None if key is None else []
    if offs is None:
        c = ops.gemm(mat_a, mat_b, None, request._replace(beta=1), gate=gate, launched=launched)
    elif mat_a.dim() == 3:
        return grouped_gemm(mat_b.mT, mat_a.mT, offs, request).mT
    else:
        c = grouped_gemm(mat_a, mat_b, offs, request, gate, launched)
    if launched:
        _fast.keep(key, launched[0])
    return c


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    request: Request,
    gate: torch.Tensor | None = None,
    launched: list[fast_path.Known | None] | None = None,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do. launched: as in `ops.gemm`."""
    rules.no_tangents("grouped_matmul", a, b, gate)
    if is_plain(a, b, offs, gate):
        if not needs_grad(a, b, gate) and launched is None:
            return _computed(a, b, offs, gate, request)[0]
        if not needs_grad(a, b, gate):
            c, known = launch(a, b, offs, gate, request)
            launched.append(known)  # type: ignore[union-attr]
            return c
        request = plan.remembering(request)
    return _dispatched(a, b, offs, gate, request)[0]


def _dispatched(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, gate: torch.Tensor | None, request: Request
) -> Tensors:
    """The result, and preactivations if the request has them, by the dispatcher."""
    how = request.out_dtype, request.precision, request.batch_invariant, request.activation, gate
    if not request.preactivation:
        return (_op(a, b, offs, *how),)
    found = _op_for_backward(a, b, offs, *how)
    return found if gate is not None else found[:2]


def _computed(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, gate: torch.Tensor | None, request: Request
) -> Tensors:
    """As `_dispatched`, of plain tensors that go together."""
    before: Tensors = ()
    if request.preactivation:
        before = tuple(_empty(a, b, offs, request.out_dtype) for _ in range(1 if gate is None else 2))
    auxiliary = (*(() if gate is None else (gate,)), offs, *before)
    # The fast path takes auxiliary operands with beta = 1 only; beta is not used here.
    keyed_by = request._replace(beta=1)
    operation = "grouped_gemm", gate is None
    c = _fast.run(operation, a, b, auxiliary, lambda: launch(a, b, offs, gate, request, before), keyed_by)
    return c, *before


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    gate: torch.Tensor | None,
    request: Request,
    before: Tensors = (),
) -> tuple[torch.Tensor, fast_path.Known | None]:
    """The result, and what calls like it launch. Of 0 every activation makes 0. before: as in `matrices.compute`."""
    given = (*(() if gate is None else (gate,)), offs)
    a, b = a.resolve_neg(), b.resolve_neg()
    if gate is not None:
        gate = gate.resolve_neg()
        alike = b.stride() == gate.stride() and (b.data_ptr() % 16 == 0) == (gate.data_ptr() % 16 == 0)
        if not alike or a.dtype not in HALF.dtypes or plan.remembering(request).batch_invariant:
            return _by_two(a, b, offs, gate, request, before), fast_path.SLOW
    c = _empty(a, b, offs, request.out_dtype)
    if c.numel() == 0 or a.shape[1] == 0 or offs.shape[0] == 0:
        for x in (c, *before):
            x.zero_()
        return c, fast_path.SLOW
    auxiliary = (*(() if gate is None else (gate,)), offs.contiguous())
    request = request._replace(out_dtype=None, groups="m" if b.dim() == 3 else "k", gate=gate is not None)
    found = plan.multiply(a, b, c, request, (*auxiliary, *before))
    return c, fast_path.known(found, c, *zip(given, auxiliary, strict=True))


def _by_two(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, gate: torch.Tensor, request: Request, before: Tensors
) -> torch.Tensor:
    """A gate's result, by two products and by torch."""
    product = request._replace(activation=None, preactivation=False)
    found = tuple(launch(a, right, offs, None, product)[0] for right in (gate, b))
    for x, y in zip(before, found, strict=False):
        x.copy_(y)
    return ACTIVATIONS[request.activation](found[0]) * found[1]


def _empty(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    groups = () if b.dim() == 3 else (offs.shape[0],)
    return a.new_empty((*groups, a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype)


def _parsed(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor | None, Request]:
    """The operators' arguments, with their defaults: torch leaves out trailing ones."""
    rules.grouped(a, b, offs, gate)
    if gate is not None and activation is None:
        raise RuntimeError("grouped_gemm: a gate needs an activation")
    return a, b, offs, gate, Request(1, 0, activation, out_dtype, precision, batch_invariant=batch_invariant)


def _kernel(*arguments: Any) -> torch.Tensor:
    return _computed(*_parsed(*arguments))[0]


def _kernel_for_backward(*arguments: Any) -> Tensors:
    a, b, offs, gate, request = _parsed(*arguments)
    return for_backward(_computed(a, b, offs, gate, request._replace(preactivation=True)))


def _fake(*arguments: Any, **named: Any) -> torch.Tensor:
    a, b, offs, _, request = _parsed(*arguments, **named)
    return _empty(a, b, offs, request.out_dtype)


def _fake_for_backward(*arguments: Any, **named: Any) -> Tensors:
    a, b, offs, gate, request = _parsed(*arguments, **named)
    return for_backward(tuple(_empty(a, b, offs, request.out_dtype) for _ in range(2 if gate is None else 3)))


class _Grouped(Derivatives):
    """As `ops._Gemm`."""

    @staticmethod
    def forward(
        a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, gate: torch.Tensor | None, request: Request
    ) -> torch.Tensor | Tensors:
        if is_plain(a, b, offs, gate):
            found = _computed(a, b, offs, gate, request)
        else:
            with below_autograd(), torch.enable_grad():  # the levels below this one go on
                found = _dispatched(a, b, offs, gate, request)
        return found if len(found) > 1 else found[0]

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor | Tensors) -> None:
        a, b, offs, gate, ctx.request = inputs
        c, *before = (output,) if isinstance(output, torch.Tensor) else output
        ctx.set_materialize_grads(False)
        needs = ctx.needs_input_grad
        result = c if ctx.request.activation == "relu" and not before else None
        of_weights = (x if needs[0] else None for x in (b, gate))
        saved = a if needs[1] or needs[3] else None, *of_weights, offs, result, *before
        ctx.save_for_backward(*saved, *[None] * (2 - len(before)))
        ctx.dtype, ctx.of_rows, ctx.gated = a.dtype, b.dim() == 3, gate is not None

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor | None, *of_before: torch.Tensor | None) -> tuple[Any, ...]:
        grads: list[torch.Tensor | None] = [None] * 5
        if grad is None and all(x is None for x in of_before):
            return tuple(grads)
        a, b, gate, offs, result, *before = ctx.saved_tensors
        request, needs = ctx.request, ctx.needs_input_grad
        product = Request(precision=request.precision, batch_invariant=request.batch_invariant)
        through = through_activation(request.activation, grad, result, before, of_before, ctx.gated)
        for by, right, place in zip(through, (b, gate), (1, 3), strict=True):
            if by is None:
                continue
            by = by.to(ctx.dtype)
            if needs[0]:
                if ctx.of_rows:
                    of_a = grouped_gemm(by, right.mT, offs, product)
                else:
                    of_a = grouped_gemm(right, by.mT, offs, product).mT
                grads[0] = of_a if grads[0] is None else grads[0] + of_a
            if needs[place]:
                grads[place] = grouped_gemm(a.mT, by, offs, product)
        return tuple(grads)


def _differentiable(*arguments: Any) -> Tensors:
    *operands, gate, request = arguments
    found = _Grouped.apply(*operands, gate, for_gradients(request, gate is None))  # type: ignore[attr-defined]
    return (found,) if isinstance(found, torch.Tensor) else found


def _autograd(*arguments: Any) -> torch.Tensor:
    a, b, offs, gate, request = _parsed(*arguments)
    if needs_grad(a, b, gate):
        with single_level_autograd():
            return _differentiable(a, b, offs, gate, request)[0]
    with below_autograd():
        return _op(*arguments)


def _autograd_for_backward(*arguments: Any) -> Tensors:
    a, b, offs, gate, request = _parsed(*arguments)
    if needs_grad(a, b, gate):
        with single_level_autograd():
            return for_backward(_differentiable(a, b, offs, gate, request))
    with below_autograd():
        return _op_for_backward(*arguments)


def _one_by_one(operator: Any, info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[Any, Any]:
    """One after the other, as torch would, which warns of it: whose groups begin elsewhere is no batch."""
    operands = list(zip(arguments, in_dims, strict=True))
    each = ([x if dim is None else x.select(dim, i) for x, dim in operands] for i in range(info.batch_size))
    found = [operator(*those) for those in each]
    if isinstance(found[0], torch.Tensor):
        return torch.stack(found), 0
    return tuple(map(torch.stack, zip(*found, strict=True))), (0,) * len(found[0])


ARGUMENTS = (
    "(Tensor a, Tensor b, Tensor offs, ScalarType? out_dtype=None, str? precision=None, "
    "bool? batch_invariant=None, str? activation=None, Tensor? gate=None)"
)
_op, _library = operator(f"grouped_gemm{ARGUMENTS} -> Tensor", _kernel, _fake)
_library.impl("grouped_gemm", _autograd, "Autograd")
torch.library.register_vmap("triton_gemm::grouped_gemm", partial(_one_by_one, _op), lib=_library)
_op_for_backward, _library_for_backward = operator(
    f"grouped_gemm_for_backward{ARGUMENTS} -> (Tensor, Tensor, Tensor)", _kernel_for_backward, _fake_for_backward
)
_library_for_backward.impl("grouped_gemm_for_backward", _autograd_for_backward, "Autograd")
torch.library.register_vmap(
    "triton_gemm::grouped_gemm_for_backward", partial(_one_by_one, _op_for_backward), lib=_library_for_backward
)


@register_flop_formula([torch.ops.triton_gemm.grouped_gemm, torch.ops.triton_gemm.grouped_gemm_for_backward])
def _flops(a_shape: torch.Size, b_shape: torch.Size, _: Any, *how: Any, gate: Any = None, **__: Any) -> int:
    """As many as if groups were no smaller together than what they are cut from."""
    products = 2 if gate is not None or (len(how) == 5 and how[-1] is not None) else 1
    return 2 * products * prod(a_shape) * b_shape[-1]
