"""Products of groups whose sizes only the GPU knows, as in mixtures of experts: torch's grouped_mm.

The operator `torch.ops.triton_gemm.grouped_gemm` multiplies a [M, K], its rows in groups, with b [G, K, N], or a [M, K]
with b [K, N], what they are summed over in groups. Its derivatives are products of the same two kinds.

With a gate, which is a second b for groups of rows, it is activation(a @ gate) * (a @ b). As of `gated` one kernel
computes that of 16 bits. With gradients, where weights lie differently, and for other dtypes and batch-invariant calls,
it is made of two products (`apart`).
"""

from __future__ import annotations

from math import prod
from typing import Any

import torch
from torch.utils.flop_counter import register_flop_formula

from .. import arguments
from ..arithmetic import FLOATING, HALF, Precision
from ..compat import below_autograd, single_level_autograd
from ..problem import GATES, Activation, Gate, Request
from ..runtime import plan
from . import api, fast_path, ops, rules
from .activations import ACTIVATIONS

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
    - mat_a [G, M, K] and mat_b [G, K, N], without offs: `bmm`.

    Rows and columns of the result after the last group's end are 0. Both operands can be differentiated backwards, any
    number of times, and not forwards (torch.func.jvp, jacfwd).

    With a gate the result is silu(mat_a @ gate) * (mat_a @ mat_b) in each group, or with gelu, gelu_tanh or relu in
    place of silu. In fp16 and bf16 one kernel computes it if both have the same strides and nothing needs a gradient.

    Args:
        mat_a: fp32, fp16, bf16 or fp64, on a GPU, of any strides.
        mat_b: Of the same dtype, on the same GPU, of any strides.
        offs: An int32 tensor [G] in the GPU's memory, for which the host does not wait: where each group ends,
            ascending.
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded.
        activation: As in `linear`; without gradients in the same kernel. With a gate "swiglu", "geglu", "geglu_tanh"
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
    key = None
    if offs is not None:
        said = "grouped_matmul", out_dtype, precision, batch_invariant, activation
        key, c = _fast.take(said, mat_a, mat_b, (offs,) if gate is None else (gate, offs))
        if c is not None:
            return c
    arguments.tensors("grouped_matmul", mat_a=mat_a, mat_b=mat_b, **({} if gate is None else {"gate": gate}))
    name: str | None = activation
    if gate is not None or (isinstance(activation, str) and activation in GATES):
        name = rules.gate("grouped_matmul", activation, gate, "[G, K, N] each: mat_b")
    else:
        rules.activation("grouped_matmul", activation)
    how = out_dtype, precision, batch_invariant
    if offs is None and mat_a.dim() == mat_b.dim() == 3:
        if gate is not None:
            rules.gate_of_groups(mat_a, mat_b, gate, 3)
            return api.gated_bmm(mat_a, mat_b, gate, str(name), *how)
        return api.activated_bmm(mat_a, mat_b, activation, *how)  # type: ignore[arg-type]  # no gate's
    rules.grouped(mat_a, mat_b, offs, gate)
    assert offs is not None
    rules.out_dtype(out_dtype, mat_a)
    rules.computable("grouped_matmul", mat_a, mat_b, dtypes=FLOATING, devices=("cuda", "cpu", "meta"))
    rules.precision("grouped_matmul", precision, mat_a.dtype)
    if batch_invariant is not None:
        arguments.flag("grouped_matmul", "batch_invariant", batch_invariant)
    if mat_a.dim() == 3:
        return grouped_gemm(mat_b.mT, mat_a.mT, offs, *how, name).mT
    if key is None or not ops.is_plain(mat_a, mat_b, offs, gate):
        return grouped_gemm(mat_a, mat_b, offs, *how, name, gate)
    c, found = launch(mat_a, mat_b, offs, *how, name, gate)
    _fast.keep(key, fast_path.known(found, c, (offs, offs.contiguous())))
    return c


def grouped_gemm(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    """The operator, past the dispatcher where that has nothing to do."""
    rules.no_tangents("grouped_matmul", a, b, gate)
    if ops.is_plain(a, b, offs, gate):
        if not ops.needs_grad(a, b, gate):
            return _compute(a, b, offs, out_dtype, precision, batch_invariant, activation, gate)
        batch_invariant = plan.remembering(Request(batch_invariant=batch_invariant)).batch_invariant
    return _op(a, b, offs, out_dtype, precision, batch_invariant, activation, gate)


def apart(a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, offs: torch.Tensor, activation: str, *how: Any) -> Any:
    """grouped_gemm with a gate, by several operators."""
    return ACTIVATIONS[activation](grouped_gemm(a, gate, offs, *how)) * grouped_gemm(a, b, offs, *how)


def _compute(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *how: Any) -> torch.Tensor:
    """grouped_gemm of plain tensors that go together, without its derivatives."""
    *_, gate = complete = _complete(*how)

    def first() -> tuple[torch.Tensor, fast_path.Known | None]:
        c, found = launch(a, b, offs, *complete)
        return c, fast_path.known(found, c, (offs, offs.contiguous()))

    return _fast.run(("grouped_gemm", *complete[:-1]), a, b, (offs,) if gate is None else (gate, offs), first)


def launch(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> tuple[torch.Tensor, plan.Plan | None]:
    """The product, and what has computed it, if anything had to and it is one launch. Of 0 every activation makes 0."""
    request = Request(
        activation=activation,
        precision=precision,
        groups="m" if b.dim() == 3 else "k",
        batch_invariant=batch_invariant,
        gate=gate is not None,
    )
    a, b = a.resolve_neg(), b.resolve_neg()
    auxiliary: tuple[torch.Tensor, ...] = (offs.contiguous(),)
    if gate is not None:
        gate = gate.resolve_neg()
        alike = b.stride() == gate.stride() and (b.data_ptr() % 16 == 0) == (gate.data_ptr() % 16 == 0)
        if not alike or a.dtype not in HALF.dtypes or plan.remembering(request).batch_invariant:
            return apart(a, b, gate, offs, str(activation), out_dtype, precision, batch_invariant), None
        auxiliary = (gate, *auxiliary)
    c = _empty(a, b, offs, out_dtype)
    if c.numel() == 0 or a.shape[1] == 0 or offs.shape[0] == 0:
        return c.zero_(), None
    return c, plan.multiply(a, b, c, request, auxiliary)


def _empty(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, out_dtype: torch.dtype | None) -> torch.Tensor:
    groups = () if b.dim() == 3 else (offs.shape[0],)
    return a.new_empty((*groups, a.shape[0], b.shape[-1]), dtype=out_dtype or a.dtype)


def _kernel(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *how: Any) -> torch.Tensor:
    """`_compute` for the dispatcher, whose callers may have checked nothing."""
    rules.grouped(a, b, offs, _complete(*how)[-1])
    return _compute(a, b, offs, *how)


def _complete(*how: Any) -> tuple[Any, ...]:
    """What follows the operator's `offs`, of which torch leaves out trailing defaults."""
    *_, activation, gate = how = (*how, *(None,) * (5 - len(how)))
    if gate is not None and activation is None:
        raise RuntimeError("grouped_gemm: a gate needs an activation")
    return how


def _fake(
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    activation: str | None = None,
    gate: torch.Tensor | None = None,
) -> torch.Tensor:
    rules.grouped(a, b, offs, gate)
    return _empty(a, b, offs, out_dtype)


class _Grouped(ops.Derivatives):
    @staticmethod
    def forward(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *how: Any) -> torch.Tensor:
        if ops.is_plain(a, b, offs):
            return _compute(a, b, offs, *how)
        with below_autograd(), torch.enable_grad():  # the levels below this one go on
            return _op(a, b, offs, *how)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Any, ...], output: torch.Tensor) -> None:
        a, b, offs, _, *ctx.how = inputs
        need_a, need_b, *_ = ctx.needs_input_grad
        ctx.save_for_backward(a if need_b else None, b if need_a else None, offs)
        ctx.dtype, ctx.of_rows = a.dtype, b.dim() == 3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        a, b, offs = ctx.saved_tensors
        grad = grad.to(ctx.dtype)
        by_a = by_b = None
        if b is not None and ctx.of_rows:
            by_a = grouped_gemm(grad, b.mT, offs, None, *ctx.how)
        elif b is not None:
            by_a = grouped_gemm(b, grad.mT, offs, None, *ctx.how).mT
        if a is not None:
            by_b = grouped_gemm(a.mT, grad, offs, None, *ctx.how)
        return by_a, by_b, *[None] * 4


def _autograd(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *how: Any) -> torch.Tensor:
    *plain, activation, gate = how = _complete(*how)
    rules.grouped(a, b, offs, gate)
    if ops.needs_grad(a, b, gate):
        if gate is not None:
            return apart(a, b, gate, offs, activation, *plain)
        if activation is not None:  # torch's own, which keeps what it needs for the backward
            return ACTIVATIONS[activation](_op(a, b, offs, *plain))
        with single_level_autograd():
            found: torch.Tensor = _Grouped.apply(a, b, offs, *plain)  # type: ignore[attr-defined]
            return found
    with below_autograd():
        return _op(a, b, offs, *how)


def _vmap(info: Any, in_dims: tuple[int | None, ...], *arguments: Any) -> tuple[torch.Tensor, int]:
    """One after the other, as torch would, which warns of it: whose groups begin elsewhere is no batch."""
    operands = list(zip(arguments, in_dims, strict=True))
    each = ([x if dim is None else x.select(dim, i) for x, dim in operands] for i in range(info.batch_size))
    return torch.stack([_op(*those) for those in each]), 0


_op, _library = ops.operator(
    "grouped_gemm(Tensor a, Tensor b, Tensor offs, ScalarType? out_dtype=None, str? precision=None, "
    "bool? batch_invariant=None, str? activation=None, Tensor? gate=None) -> Tensor",
    _kernel,
    _fake,
)
_library.impl("grouped_gemm", _autograd, "Autograd")
torch.library.register_vmap("triton_gemm::grouped_gemm", _vmap, lib=_library)


@register_flop_formula(torch.ops.triton_gemm.grouped_gemm)
def _flops(a_shape: torch.Size, b_shape: torch.Size, _: Any, *how: Any, gate: Any = None, **__: Any) -> int:
    """As many as if groups were no smaller together than what they are cut from."""
    products = 2 if gate is not None or (len(how) == 5 and how[-1] is not None) else 1
    return 2 * products * prod(a_shape) * b_shape[-1]
