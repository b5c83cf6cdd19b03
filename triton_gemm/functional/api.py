"""What users call: torch's products, with torch's semantics and torch's errors, as views around one operator.

A call goes from checks to views, a plan and its launch. One that is like a call before takes the fast path at its
start (`fast_path`).
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import arguments
from ..arithmetic import Precision
from ..compat import override_functions
from ..problem import GATES, PRODUCT, SUM, Activation, Gate, Request
from . import fast_path, matrices, rules
from .activations import ACTIVATIONS
from .calls import autocast, product
from .matrices import Operands

_ACTIVATED: dict[str | None, Request] = {
    activation: Request(beta=1, activation=activation) for activation in (*ACTIVATIONS, *GATES)
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
    """`torch.matmul`: the matrix product of input and other, with broadcast batches.

    A vector [K] counts as one row on the left or one column on the right, and the result has no dimension for it. fp16
    and bf16 are summed in fp32. fp16, bf16, fp32 and fp64 give their own dtype. int8 gives int32, summed exactly
    (modulo 2^32), as in `torch._int_mm` but unlike `torch.matmul`, which gives int8.

    A cost model or a table of measured choices selects the kernel. Nothing is tuned at run time unless `set_policy`
    asks for it; `explain` says what was chosen and why. The same choice on the same GPU gives the same bits every time.
    An operand is not copied if a kernel can read it in place. Batches without a single stride, as heads of [B, S, H,
    D], take several launches.

    It can be differentiated any number of times, forwards and backwards, in the same precision, and works in
    torch.func, torch.compile and torch.export. Under autocast operands are cast as torch casts them, and a precision is
    then an error. With TRITON_INTERPRET=1 set before the import CPU tensors are accepted, too, and are slow.

    Args:
        input: [.., M, K] or [K], on a GPU, of any strides and any size, 0 and 1 included.
        other: [.., K, N] or [K], of the same dtype and on the same GPU.
        out: The tensor [.., M, N] that is filled with the result and returned.
        precision: How fp32 is multiplied; other dtypes take none. "ieee"; "tf32", operands rounded to nearest;
            "bf16x3", "bf16x6", "bf16x9" or "tf32x3", emulated by splitting operands into 2 or 3 terms and summing 3, 6
            or 9 products (docs/precision.md). None: "tf32" if `torch.backends.cuda.matmul.fp32_precision` is, else
            "ieee".
        batch_invariant: Whether a row of the result has the same bits whatever other rows are multiplied with it, in
            the backward, too. None: as the block or the environment says (`triton_gemm.batch_invariant`).

    Returns:
        A tensor [.., M, N].

    Raises:
        RuntimeError: Shapes, dtypes or devices do not match, in torch's words; `out` is given and an argument requires
            grad; or the GPU does not have the precision.
        TypeError: An operand is not a tensor.
        NotImplementedError: Another dtype, a nested or a sparse tensor.
        ValueError: An unknown precision, or one for another dtype than fp32.
    """
    plain = precision is None and batch_invariant is None
    request = PRODUCT if plain else Request(precision=precision, batch_invariant=batch_invariant)
    key, c = _fast.take("matmul", input, other, (), request, out)
    if c is not None:
        return c
    arguments.tensors("matmul", input=input, other=other)
    a, b = autocast(input, other) if out is None else (input, other)
    rules.matmul(a, b)
    return _product("matmul", request, Operands(a, b), out, key)


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.mm`: the product of two matrices.

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides. The result has their dtype; of int8 it is int32,
    and exact. Derivatives are as in `matmul`.

    Args:
        input: [M, K].
        mat2: [K, N].
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded.
        out, precision, batch_invariant: As in `matmul`.

    Returns:
        A matrix [M, N].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`.
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
    """`torch.bmm`: the products of two batches of matrices, without broadcasting (`matmul` broadcasts).

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides. The result has their dtype; of int8 it is int32,
    and exact. Derivatives are as in `matmul`.

    Args:
        input: [B, M, K].
        mat2: [B, K, N].
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded.
        out, precision, batch_invariant: As in `matmul`.

    Returns:
        A tensor [B, M, N].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`.
    """
    return _of_one_rank("bmm", rules.bmm, input, mat2, out_dtype, out, precision, batch_invariant)


def _of_one_rank(
    function: str,
    check: Callable[[torch.Tensor, torch.Tensor], None],
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    precision: Precision | None,
    batch_invariant: bool | None,
) -> torch.Tensor:
    """mm, or bmm."""
    request = PRODUCT
    if not (out_dtype is None and precision is None and batch_invariant is None):
        request = Request(1, 0, None, out_dtype, precision, batch_invariant=batch_invariant)
    key, c = _fast.take(function, input, mat2, (), request, out)
    if c is not None:
        return c
    arguments.tensors(function, input=input, mat2=mat2)
    if out is None and out_dtype is None:
        input, mat2 = autocast(input, mat2)
    check(input, mat2)
    rules.out_dtype(out_dtype, input)
    return _product(function, request, Operands(input, mat2), out, key)


def mv(
    input: torch.Tensor,
    vec: torch.Tensor,
    *,
    out: torch.Tensor | None = None,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
) -> torch.Tensor:
    """`torch.mv`: the product of a matrix and a vector.

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides. The result has their dtype; of int8 it is int32,
    and exact. Derivatives are as in `matmul`.

    Args:
        input: [M, K].
        vec: [K].
        out, precision, batch_invariant: As in `matmul`.

    Returns:
        A vector [M].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`.
        IndexError: An operand has no dimensions.
    """
    arguments.tensors("mv", input=input, vec=vec)
    if out is None:
        input, vec = autocast(input, vec)
    rules.mv(input, vec)
    request = Request(precision=precision, batch_invariant=batch_invariant)
    return _product("mv", request, Operands(input, vec), out)


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
    """`torch.addmm` with an activation: activation(beta * input + alpha * (mat1 @ mat2)).

    A row [N] or a column [M, 1] is added as a bias, in the same kernel. A larger input is copied into the result first,
    unless it is `out` itself. With beta = 0 input is not read, with alpha = 0 neither matrix is. All three are fp32,
    fp16, bf16 or fp64, of one dtype, on one GPU, of any strides. Derivatives in all three are as in `matmul`.

    Args:
        input: Any shape that broadcasts to [M, N].
        mat1: [M, K].
        mat2: [K, N].
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded; input may be fp32 then.
        beta, alpha: Numbers, or 0-D tensors that do not require grad. Reading these waits for the GPU.
        activation: As in `linear`; applied to the sum.
        out, precision, batch_invariant: As in `matmul`.

    Returns:
        A matrix [M, N].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`; also TypeError for a beta or alpha that
            is not a number, NotImplementedError for int8, ValueError for an unknown activation.
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
        input, mat1, mat2 = autocast(input, mat1, mat2)
    rules.addmm(input, mat1, mat2, out_dtype)
    return _product("addmm", request, Operands(mat1, mat2, input), out, key)


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
    """`torch.baddbmm` with an activation: activation(beta * input + alpha * (batch1 @ batch2)).

    With beta = 0 input is not read, with alpha = 0 neither batch is. All three are fp32, fp16, bf16 or fp64, of one
    dtype, on one GPU, of any strides. Derivatives in all three are as in `matmul`.

    Args:
        input: Any shape that broadcasts to [B, M, N].
        batch1: [B, M, K].
        batch2: [B, K, N].
        out_dtype: torch.float32 for fp16 and bf16, whose fp32 sums are then not rounded; input may be fp32 then.
        beta, alpha: Numbers, or 0-D tensors that do not require grad. Reading these waits for the GPU.
        activation: As in `linear`; applied to the sum.
        out, precision, batch_invariant: As in `matmul`.

    Returns:
        A tensor [B, M, N].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`; also TypeError for a beta or alpha that
            is not a number, NotImplementedError for int8, ValueError for an unknown activation.
        IndexError: An operand has no dimensions.
    """
    arguments.tensors("baddbmm", input=input, batch1=batch1, batch2=batch2)
    rules.activation("baddbmm", activation)
    beta, alpha = arguments.number("baddbmm", "beta", beta), arguments.number("baddbmm", "alpha", alpha)
    if out is None and out_dtype is None:
        input, batch1, batch2 = autocast(input, batch1, batch2)
    rules.baddbmm(input, batch1, batch2, out_dtype)
    request = Request(alpha, beta, activation, out_dtype, precision, batch_invariant=batch_invariant)
    return _product("baddbmm", request, Operands(batch1, batch2, input), out)


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
    """`torch.nn.functional.linear` with more: activation(input @ weight.T + bias) + residual, or a gated layer.

    One kernel computes it, with one rounding. With gradients it also stores what an activation is applied to, for the
    backward; the result has the same bits.

    With a gate the result is silu(input @ gate.T + gate_bias) * (input @ weight.T + bias) + residual, or with gelu,
    gelu_tanh or relu instead of silu. In fp16 and bf16 one kernel computes the gated product, unless it is
    batch-invariant; torch adds the residual. With gradients both products are stored for the backward.

    All tensors are fp32, fp16, bf16 or fp64, of one dtype, on one GPU, of any strides; so is the result. If a tensor's
    subclass has a `__torch_function__` of its own, as quantized weights have, torch's linear is called. Derivatives in
    all tensors are as in `matmul`.

    Args:
        input: [.., K].
        weight: [N, K], or [K] for a result [..].
        bias: [N], or what else broadcasts as in torch; 0-D for a weight [K].
        activation: None, "relu", "gelu" (with erf), "gelu_tanh" or "silu"; with a gate "swiglu", "geglu", "geglu_tanh"
            or "reglu".
        residual: Added last, after the activation. It broadcasts to the result.
        gate: A second weight [N, K].
        gate_bias: [N].
        precision: As in `matmul`.
        batch_invariant: As in `matmul`. Rows are all leading dimensions of input together.

    Returns:
        A tensor [.., N].

    Raises:
        RuntimeError, TypeError, NotImplementedError, ValueError: As `matmul`. Also RuntimeError for a residual or a
            gate that does not fit, and NotImplementedError for int8 with anything but a weight. ValueError for an
            unknown activation, or for a gate without its activation and the reverse.
    """
    request = SUM
    if not (activation is None and precision is None and batch_invariant is None):
        plain = isinstance(activation, str) and precision is None and batch_invariant is None
        request = (_ACTIVATED.get(activation) if plain else None) or Request(
            1, 1, activation, None, precision, batch_invariant=batch_invariant
        )
    if residual is None and gate is None and gate_bias is None:
        key, c = _fast.take("linear", input, weight, () if bias is None else (bias,), request)
        x = None
    else:
        x = Operands(input, weight, bias, residual, gate, gate_bias)
        key, c = _fast.take(matrices.function_of("linear", x), input, weight, matrices.auxiliary_of(x), request)
    if c is not None:
        return c
    return _linear(x or Operands(input, weight, bias), request, key)


def _linear(x: Operands, request: Request, key: fast_path.Key | None) -> torch.Tensor:
    """`linear` of a call like none before."""
    a, weight, bias, residual, gate, gate_bias = x
    more = {"bias": bias, "gate": gate, "gate_bias": gate_bias, "residual": residual}
    gated = isinstance(request.activation, str) and request.activation in GATES
    if gated or gate is not None or gate_bias is not None:
        if gate is None and gate_bias is not None:
            raise ValueError("linear(): gate_bias is given without gate")
        request = request._replace(activation=rules.gate("linear", request.activation, gate, "[N, K] each: weight"))
    arguments.tensors("linear", input=a, weight=weight)
    for name, y in more.items():
        if y is not None:
            arguments.tensor("linear", f"'{name}' (position 3)" if name == "bias" else f"'{name}'", y)
    rules.activation("linear", request.activation)
    torchs = request.precision is None and request.batch_invariant is None
    if torchs and override_functions(a, weight, bias, gate, gate_bias):
        # Tensor subclasses override torch's functions, and quantized weights override no others.
        return matrices.unfused(x, request, lambda product, _: torch.nn.functional.linear(*product[:3]))
    operands = [y for y in x if y is not None]
    cast = list(autocast(*operands))
    x = Operands(*[None if y is None else cast.pop(0) for y in x])  # type: ignore[arg-type]  # as they were
    a, weight = x.a, x.b
    if x.gate is not None:
        rules.gated("linear", a, weight, x.gate, x.input, x.gate_bias)
    else:
        rules.linear(a, weight, x.input)
    if x.residual is not None:
        rules.residual("linear", a, weight, x.residual)
        if weight.dim() == 1 and x.residual.dim() > 0:
            x = x._replace(residual=x.residual.unsqueeze(-1))
    x = x._replace(b=weight.t(), gate=None if x.gate is None else x.gate.t())
    return _product("linear", request, x, None, key)


def _product(
    function: str, request: Request, x: Operands, out: torch.Tensor | None = None, key: fast_path.Key | None = None
) -> torch.Tensor:
    return product(function, request, x, out, key, _fast)
