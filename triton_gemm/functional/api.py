"""What users call: torch's products, with torch's semantics and torch's errors, as views around one operator.

A call goes from checks to views, a plan and its launch. One that is like a call before takes the fast path at its
start (`fast_path`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.autograd.graph import increment_version

from .. import arguments
from ..arithmetic import DTYPES, FLOATING, Precision, result_dtype
from ..compat import override_functions
from ..problem import GATES, PRODUCT, SUM, Activation, Gate, Request
from ..runtime import plan
from . import fast_path, gated, ops, residual_gemm, rules
from .activations import ACTIVATIONS

_ACTIVATED: dict[str | None, Request] = {
    activation: Request(beta=1, activation=activation) for activation in ACTIVATIONS
}
_fast = fast_path.FastPath()


def matmul(
    input: torch.Tensor,
    other: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.matmul`: the product of input [.., M, K] and other [.., K, N], a tensor [.., M, N]. Leading dimensions are
    batches and broadcast. A vector [K] counts as one row on the left or one column on the right, and the result has no
    dimension for it. `out`, where given, is filled with the result and returned.

    Both operands are of one dtype and on one GPU, of any strides and any size, 0 and 1 included. The dtypes and their
    results: fp16 and bf16, summed in fp32, fp32 and fp64 give their own; int8 gives int32, summed exactly (modulo
    2^32), as in `torch._int_mm` but unlike `torch.matmul`, which gives int8. Nothing is copied that a kernel can read
    where it lies; batches that no single stride steps through, as heads of [B, S, H, D], take several launches.

    precision: how fp32 is multiplied. "ieee"; "tf32", operands rounded to nearest; "bf16x3", "bf16x6", "bf16x9" or
    "tf32x3", emulated by splitting operands into 2 or 3 parts and summing 3, 6 or 9 products (docs/precision.md); or
    None, "ieee" unless torch's setting `torch.backends.cuda.matmul.fp32_precision` is "tf32". Other dtypes take none.

    batch_invariant: whether a row of the result has the same bits whatever other rows are multiplied with it, in the
    backward too; None as the block or the environment says (`triton_gemm.batch_invariant`).

    The kernel is chosen by a model, or a table of what was measured, and never tuned at run time unless `set_policy`
    says so (`explain` says which and why). The same choice on the same GPU gives the same bits every time. It can be
    differentiated any number of times, forwards and backwards, in the same precision, and works in torch.func,
    torch.compile and torch.export. Under autocast operands are cast as torch casts them, and a precision is then an
    error. With TRITON_INTERPRET=1 set before the import CPU tensors are taken too, and are slow.

    Raises what torch raises, in its words: RuntimeError for shapes, dtypes or devices that do not go together, and for
    an `out` where an argument requires grad; TypeError for what is no tensor. NotImplementedError for other dtypes,
    nested or sparse tensors; ValueError for a precision that is none, or of another dtype than fp32; RuntimeError for
    one that the GPU does not have.
    """
    plain = precision is None and batch_invariant is None
    request = PRODUCT if plain else Request(precision=precision, batch_invariant=batch_invariant)
    key, c = _fast.take("matmul", input, other, (), request, out)
    if c is not None:
        return c
    arguments.tensors("matmul", input=input, other=other)
    a, b = _autocast(input, other) if out is None else (input, other)
    rules.matmul(a, b)
    c = _product("matmul", request, a, b, None, out)
    return _keep_fast_path(key, request, a, b, None, out, c)


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.mm`: the product of two matrices, input [M, K] and mat2 [K, N], a matrix [M, N].

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides; the result has their dtype, of int8 int32 (sums
    are exact). out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded. The rest is as in
    `matmul`: out, precision, batch_invariant, derivatives. Raises as `matmul`: RuntimeError, TypeError,
    NotImplementedError or ValueError.
    """
    return _of_one_rank("mm", rules.mm, input, mat2, out_dtype, out, precision, batch_invariant)


def bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.bmm`: the products of two batches of matrices, input [B, M, K] and mat2 [B, K, N], a tensor [B, M, N].
    Nothing broadcasts (`matmul` does).

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides; the result has their dtype, of int8 int32 (sums
    are exact). out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded. The rest is as in
    `matmul`: out, precision, batch_invariant, derivatives. Raises as `matmul`: RuntimeError, TypeError,
    NotImplementedError or ValueError.
    """
    return _of_one_rank("bmm", rules.bmm, input, mat2, out_dtype, out, precision, batch_invariant)


def activated_bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    activation: Activation | None,
    out_dtype: torch.dtype | None,
    precision: Precision | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """`bmm`, and what is applied to it."""
    return _of_one_rank("bmm", rules.bmm, input, mat2, out_dtype, None, precision, batch_invariant, activation)


def gated_bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    gate: torch.Tensor,
    activation: str,
    out_dtype: torch.dtype | None,
    precision: Precision | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """activation(bmm(input, gate)) * bmm(input, mat2) of shapes that go together; with an out_dtype by two products."""
    if out_dtype is not None:
        before, up = (activated_bmm(input, x, None, out_dtype, precision, batch_invariant) for x in (gate, mat2))
        return ACTIVATIONS[activation](before) * up
    a, b, gate = _autocast(input, mat2, gate)
    rules.computable("bmm", a, b, dtypes=FLOATING, devices=("cuda", "cpu", "meta"))
    rules.precision("bmm", precision, a.dtype)
    if batch_invariant is not None:
        arguments.flag("bmm", "batch_invariant", batch_invariant)
    return gated.gated_gemm(a, b, gate, None, None, activation, precision, batch_invariant)


def _of_one_rank(
    function: str,
    check: Callable[[torch.Tensor, torch.Tensor], None],
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    precision: Precision | None,
    batch_invariant: bool | None,
    activation: Activation | None = None,
) -> torch.Tensor:
    """mm, or bmm."""
    request = PRODUCT
    if not (out_dtype is None and precision is None and batch_invariant is None and activation is None):
        request = Request(1, 0, activation, out_dtype, precision, batch_invariant=batch_invariant)
    key, c = _fast.take(function, input, mat2, (), request, out)
    if c is not None:
        return c
    arguments.tensors(function, input=input, mat2=mat2)
    if out is None and out_dtype is None:
        input, mat2 = _autocast(input, mat2)
    check(input, mat2)
    rules.out_dtype(out_dtype, input)
    c = _product(function, request, input, mat2, None, out)
    return _keep_fast_path(key, request, input, mat2, None, out, c)


def mv(
    input: torch.Tensor,
    vec: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.mv`: the product of a matrix and a vector, input [M, K] and vec [K], a vector [M].

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides; the result has their dtype, of int8 int32 (sums
    are exact). The rest is as in `matmul`: out, precision, batch_invariant, derivatives. Raises as `matmul`:
    RuntimeError, TypeError, NotImplementedError or ValueError; and IndexError for 0-D operands.
    """
    arguments.tensors("mv", input=input, vec=vec)
    if out is None:
        input, vec = _autocast(input, vec)
    rules.mv(input, vec)
    request = Request(precision=precision, batch_invariant=batch_invariant)
    return _product("mv", request, input, vec, None, out)


def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float | torch.Tensor = 1,
    alpha: float | torch.Tensor = 1,
    out: torch.Tensor | None = None,
    activation: Activation | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.addmm`: beta * input + alpha * (mat1 @ mat2), of mat1 [M, K] and mat2 [K, N], a matrix [M, N]. input is of
    any shape that broadcasts to it. activation: what is applied to that, as in `linear`.

    A row [N] or a column [M, 1] is added as a bias, in the same kernel; what has more values is copied into the result
    first, unless it is `out` itself. With beta = 0 input is not read, with alpha = 0 neither matrix is. beta and alpha
    are numbers, or 0-D tensors that do not require grad, which are read (and waited for).

    All three are fp32, fp16, bf16 or fp64, of one dtype, on one GPU, of any strides. out_dtype: torch.float32 for fp16
    and bf16, whose fp32 sums are then not rounded; input may be fp32 then. The rest is as in `matmul`: out, precision,
    batch_invariant, derivatives in all three tensors. Raises as `matmul`: RuntimeError, TypeError (also for a beta that
    is no number), NotImplementedError (also for int8) or ValueError (also for an activation that is none).
    """
    numbers = type(alpha) in (int, float) and type(beta) in (int, float)
    plain = numbers and alpha == beta == 1 and out_dtype is None and precision is None and batch_invariant is None
    request = SUM
    if not plain or activation is not None:
        request = Request(alpha, beta, activation, out_dtype, precision, batch_invariant=batch_invariant)  # type: ignore[arg-type]  # see below
    key, c = _fast.take("addmm", mat1, mat2, (input,), request, out) if numbers else (None, None)
    if c is not None:
        return c
    arguments.tensors("addmm", input=input, mat1=mat1, mat2=mat2)
    rules.activation("addmm", activation)
    beta, alpha = arguments.number("addmm", "beta", beta), arguments.number("addmm", "alpha", alpha)
    request = request._replace(alpha=alpha, beta=beta)
    if out is None and out_dtype is None:
        input, mat1, mat2 = _autocast(input, mat1, mat2)
    rules.addmm(input, mat1, mat2, out_dtype)
    c = _product("addmm", request, mat1, mat2, input, out)
    return _keep_fast_path(key, request, mat1, mat2, input, out, c)


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float | torch.Tensor = 1,
    alpha: float | torch.Tensor = 1,
    out: torch.Tensor | None = None,
    activation: Activation | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.baddbmm`: beta * input + alpha * (batch1 @ batch2), of batch1 [B, M, K] and batch2 [B, K, N], a tensor
    [B, M, N]. input is of any shape that broadcasts to it. activation: what is applied to that, as in `linear`.

    With beta = 0 input is not read, with alpha = 0 neither batch is. beta and alpha are numbers, or 0-D tensors that do
    not require grad, which are read (and waited for).

    All three are fp32, fp16, bf16 or fp64, of one dtype, on one GPU, of any strides. out_dtype: torch.float32 for fp16
    and bf16, whose fp32 sums are then not rounded; input may be fp32 then. The rest is as in `matmul`: out, precision,
    batch_invariant, derivatives in all three tensors. Raises as `matmul`: RuntimeError, TypeError (also for a beta that
    is no number), NotImplementedError (also for int8) or ValueError (also for an activation that is none); and
    IndexError for 0-D operands.
    """
    arguments.tensors("baddbmm", input=input, batch1=batch1, batch2=batch2)
    rules.activation("baddbmm", activation)
    beta, alpha = arguments.number("baddbmm", "beta", beta), arguments.number("baddbmm", "alpha", alpha)
    if out is None and out_dtype is None:
        input, batch1, batch2 = _autocast(input, batch1, batch2)
    rules.baddbmm(input, batch1, batch2, out_dtype)
    request = Request(alpha, beta, activation, out_dtype, precision, batch_invariant=batch_invariant)
    return _product("baddbmm", request, batch1, batch2, input, out)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: Activation | Gate | None = None,
    *,
    residual: torch.Tensor | None = None,
    gate: torch.Tensor | None = None,
    gate_bias: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear` with an activation and a residual: activation(input @ weight.T + bias) + residual,
    of input [.., K] and weight [N, K], a tensor [.., N]. Of a weight [K] it is [..].

    bias: [N], or what else broadcasts as in torch; of a weight [K] it is 0-D. activation: None, "relu", "gelu" (with
    erf), "gelu_tanh" or "silu". residual: what is added last, after the activation; it broadcasts to the result.
    Without gradients all are computed in the same kernel, before the one rounding; with gradients the activation is
    torch's own, which keeps what it needs for the backward, and so is the addition of a residual after a bias or an
    activation.

    gate: a second weight [N, K], for an activation "swiglu", "geglu", "geglu_tanh" or "reglu": the result is
    silu(input @ gate.T + gate_bias) * (input @ weight.T + bias), or so with gelu, gelu_tanh or relu; biases are [N]. Of
    16 bits one kernel computes it, and nothing else is kept: the backward computes both products again.

    All are fp32, fp16, bf16 or fp64, of one dtype, on one GPU, of any strides; so is the result. Of a subclass that has
    a `__torch_function__` of its own, as quantized weights have, torch's linear is called. The rest is as in `matmul`:
    precision, derivatives in all tensors, and batch_invariant, whose rows are all leading dimensions of input
    together. Raises as `matmul`: RuntimeError (also for a residual or a gate that does not fit), TypeError,
    NotImplementedError (also for int8 with a bias, an activation, a residual or a gate) or ValueError (also for an
    activation that is none, or one of a gate without the other).
    """
    if gate is not None or gate_bias is not None or (isinstance(activation, str) and activation in GATES):
        gated_product = _gated(input, weight, bias, activation, gate, gate_bias, residual, precision, batch_invariant)
        return gated_product if residual is None else gated_product + _autocast(residual)[0]
    if residual is not None:
        return _residual(input, weight, bias, activation, residual, precision, batch_invariant)  # type: ignore[arg-type]  # no gate's
    request = SUM
    if not (activation is None and precision is None and batch_invariant is None):
        plain = isinstance(activation, str) and precision is None and batch_invariant is None
        request = (_ACTIVATED.get(activation) if plain else None) or Request(
            1, 1, activation, None, precision, batch_invariant=batch_invariant
        )
    key, c = _fast.take("linear", input, weight, () if bias is None else (bias,), request)
    if c is not None:
        return c
    arguments.tensors("linear", input=input, weight=weight, **({} if bias is None else {"bias": bias}))
    rules.activation("linear", activation)
    if precision is None and batch_invariant is None and override_functions(input, weight, bias):
        c = torch.nn.functional.linear(input, weight, bias)  # all that quantized weights know
        return c if activation is None else ACTIVATIONS[activation](c)
    if bias is None:
        a, b = _autocast(input, weight)
    else:
        a, b, bias = _autocast(input, weight, bias)
    rules.linear(a, b, bias)
    b = b.t()
    c = _product("linear", request, a, b, bias, None)
    return _keep_fast_path(key, request, a, b, bias, None, c)


def _gated(
    input: torch.Tensor,
    up: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str | None,
    gate: torch.Tensor | None,
    gate_bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    precision: Precision | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """`linear` with a gate, without the residual that follows."""
    of_gate = rules.gate("linear", activation, gate, "[N, K] each: weight")
    assert gate is not None
    more = {"bias": bias, "gate": gate, "gate_bias": gate_bias, "residual": residual}
    arguments.tensors("linear", input=input, weight=up, **{name: x for name, x in more.items() if x is not None})
    if precision is None and batch_invariant is None and override_functions(input, up, gate, bias, gate_bias):
        product = torch.nn.functional.linear
        return ACTIVATIONS[of_gate](product(input, gate, gate_bias)) * product(input, up, bias)
    a, up, gate = _autocast(input, up, gate)
    bias, gate_bias = (None if x is None else _autocast(x)[0] for x in (bias, gate_bias))
    rules.gated("linear", a, up, gate, bias, gate_bias)
    if residual is not None:
        rules.residual("linear", a, up, _autocast(residual)[0])
    rules.precision("linear", precision, a.dtype)
    if batch_invariant is not None:
        arguments.flag("linear", "batch_invariant", batch_invariant)
    a, b, vectors = _matrices(a, up.t())
    return _without(gated.gated_gemm(a, b, gate.t(), bias, gate_bias, of_gate, precision, batch_invariant), vectors)


def _residual(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    activation: Activation | None,
    residual: torch.Tensor,
    precision: Precision | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """`linear` with a residual."""
    more = {name: x for name, x in (("bias", bias), ("residual", residual)) if x is not None}
    arguments.tensors("linear", input=input, weight=weight, **more)
    rules.activation("linear", activation)
    if precision is None and batch_invariant is None and override_functions(input, weight, bias):
        return linear(input, weight, bias, activation) + residual
    added = [x for x in (bias, residual) if x is not None]
    a, weight, *added = _autocast(input, weight, *added)
    bias, residual = (added[0] if bias is not None else None), added[-1]
    rules.linear(a, weight, bias)
    rules.computable("linear", a, weight, bias, dtypes=FLOATING, devices=("cuda", "cpu", "meta"))
    rules.residual("linear", a, weight, residual)
    rules.precision("linear", precision, a.dtype)
    if batch_invariant is not None:
        arguments.flag("linear", "batch_invariant", batch_invariant)
    a, b, vectors = _matrices(a, weight.t())
    if weight.dim() == 1 and residual.dim() > 0:
        residual = residual.unsqueeze(-1)
    return _without(residual_gemm.residual_gemm(a, b, residual, bias, activation, precision, batch_invariant), vectors)


# --- What every call goes through ---


def _product(
    function: str,
    request: Request,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """activation(alpha a @ b + beta input) of operands whose shapes and dtypes go together, in `out` where given."""
    dtypes = DTYPES if input is None and request.activation is None else FLOATING
    rules.computable(function, a, b, input, dtypes=dtypes, devices=("cuda", "cpu", "meta"))
    rules.precision(function, request.precision, a.dtype)
    if request.batch_invariant is not None:
        arguments.flag(function, "batch_invariant", request.batch_invariant)
    a, b, vectors = _matrices(a, b)
    if out is not None:
        return _product_into(function, request, out, a, b, input, vectors)
    if request.activation is not None and ops.needs_grad(a, b, input):
        # Fused, the backward would have to multiply again to know what the activation was applied to.
        c = ACTIVATIONS[request.activation](ops.gemm(a, b, input, request._replace(activation=None)))
    else:
        c = ops.gemm(a, b, input, request)
    return _without(c, vectors)


def _product_into(
    function: str,
    request: Request,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    vectors: tuple[int, ...],
) -> torch.Tensor:
    """out, filled with `_product` without the dimensions `vectors`."""
    arguments.tensor(function, "'out'", out)
    if ops.needs_grad(a, b, input, out):
        raise rules.no_grad_into_out(function)
    shape = list(ops.shape_of(a, b))
    for dim in vectors:
        del shape[dim]
    in_place = ops.is_plain(a, b, input, out) and not out.is_neg()
    if in_place:  # out may share memory with what is read, and be resized
        a, b = (x.clone() if rules.may_alias(out, x) else x for x in (a, b))
        if input is not None and (input is not out or list(out.shape) != shape) and rules.may_alias(out, input):
            input = input.clone()
    dtype = request.out_dtype or result_dtype(a.dtype)
    rules.out(out, shape, dtype, a.device, request.out_dtype is not None)
    if not in_place:
        return out.copy_(_without(ops.gemm(a, b, input, request), vectors))
    c = out
    for dim in reversed(vectors):
        c = c.unsqueeze(dim)
    ops.compute_into(c, a, b, c if input is out else input, request)
    increment_version(out)
    return out


def _without(c: torch.Tensor, vectors: tuple[int, ...]) -> torch.Tensor:
    """c without these dimensions: one by one, as DTensor's rules for it are (torch 2.11)."""
    for dim in vectors:
        c = c.squeeze(dim)
    return c


def _matrices(a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, tuple[int, ...]]:
    """a [.., M, K] and b [.., K, N], and which dimensions of the product only stand for those that vectors lack."""
    vectors = (-2,) * (a.dim() == 1) + (-1,) * (b.dim() == 1)
    return (a.unsqueeze(0) if a.dim() == 1 else a), (b.unsqueeze(1) if b.dim() == 1 else b), vectors


def _autocast(*operands: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """The operands as torch.autocast has torch.mm take them. As there, calls with `out` or `out_dtype` are exempt."""
    device = operands[0].device.type
    if device not in ("cuda", "cpu") or not torch.is_autocast_enabled(device):
        return operands
    dtype = torch.get_autocast_dtype(device)
    return tuple(
        x.to(dtype) if x.is_floating_point() and x.dtype != torch.float64 and x.device.type == device else x
        for x in operands
    )


# --- The fast path of a call like one before ---


def _keep_fast_path(
    key: fast_path.Key | None,
    request: Request,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    c: torch.Tensor,
) -> torch.Tensor:
    """c; and what computed it is kept, unless `out` was resized, and is not what the key says."""
    if key is not None and (out is None or key[1] == plan.key_of(request, a, b, out, () if bias is None else (bias,))):
        _fast.keep(key, ops.known(a, b, c, bias, request))
    return c
