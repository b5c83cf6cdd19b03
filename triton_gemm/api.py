"""What users call: torch's products, with torch's semantics and torch's errors, as views around one operator."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from . import checks, ops, plan
from .compat import is_watched
from .precision import fp32_precision
from .select import Selection

ACTIVATIONS: dict[str, Any] = {
    "relu": torch.nn.functional.relu,
    "gelu": torch.nn.functional.gelu,
    "gelu_tanh": lambda x: torch.nn.functional.gelu(x, approximate="tanh"),
    "silu": torch.nn.functional.silu,
}


# By everything that the checks and the choice depend on but the addresses.
_ready: dict[tuple[object, ...], ops.Ready] = {}


def matmul(
    input: torch.Tensor, other: torch.Tensor, *, out: torch.Tensor | None = None, precision: str | None = None
) -> torch.Tensor:
    """`torch.matmul`: the product of input [.., M, K] and other [.., K, N], batches broadcast: [.., M, N]; or of
    vectors, [K] in the place of either, whose dimension the result has not. `out` is filled with it and returned.

    Both are fp32, fp16, bf16, fp64 or int8 on one GPU, of any strides, batches' included, and any size, 0 and 1
    included: views are multiplied where they lie. Batches that no one stride steps through, like those of heads inside
    of rows, are several launches. fp16 and bf16 accumulate in fp32; int8 gives int32, exactly (modulo 2^32), as
    `torch._int_mm`. precision says how fp32 is multiplied: "ieee"; "tf32", rounded to nearest; "tf32x3", "bf16x3",
    "bf16x6" or "bf16x9", as sums of planes on the tensor cores (docs/precision.md); or None, "ieee" unless torch's
    setting `torch.backends.cuda.matmul.fp32_precision` is "tf32". Nothing is tuned at run time. The same product on the
    same GPU gives the same bits every time. With TRITON_INTERPRET=1 set before the import, tensors on the CPU are taken
    too.

    Differentiable any number of times, forwards and backwards, in the same precision; at home in torch.func,
    torch.compile and torch.export. Under autocast operands are cast as torch casts them, and a precision is then an
    error like that of any operands but fp32.

    Raises what torch raises: RuntimeError for shapes, dtypes or devices that do not go together, and for an `out` where
    an argument requires grad; NotImplementedError for other dtypes, TypeError for other things than tensors. Beyond it
    RuntimeError for a precision that the GPU does not have, and ValueError for one that is none, or of other operands
    than fp32.
    """
    key = _key("matmul", input, other, None, out, precision)
    c = _repeat(key, input, other, None, out)
    if c is not None:
        return c
    checks.tensors("matmul", input=input, other=other)
    a, b = _autocast(input, other) if out is None else (input, other)
    checks.matmul(a, b)
    checks.same_dtype(_words(a, b), a, b)
    c = _product("matmul", a, b, out=out, precision=precision)
    return _remember(key, c, a, b, None, out, None, precision)


def mm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.mm`: input [M, K] times mat2 [K, N]: [M, N]. out_dtype: fp32 of fp16 and bf16, which are then not rounded;
    by default the operands'. Everything else as `matmul`."""
    return _of_one_rank("mm", checks.mm, input, mat2, out_dtype, out, precision)


def bmm(
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.bmm`: a batch of products, input [B, M, K] times mat2 [B, K, N]: [B, M, N]. out_dtype as in `mm`;
    everything else as `matmul`."""
    return _of_one_rank("bmm", checks.bmm, input, mat2, out_dtype, out, precision)


def _of_one_rank(
    function: str,
    check: Callable[[torch.Tensor, torch.Tensor], None],
    input: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    precision: str | None,
) -> torch.Tensor:
    """mm, or bmm."""
    key = _key((function, out_dtype), input, mat2, None, out, precision)
    c = _repeat(key, input, mat2, None, out)
    if c is not None:
        return c
    checks.tensors(function, input=input, mat2=mat2)
    if out is None and out_dtype is None:
        input, mat2 = _autocast(input, mat2)
    check(input, mat2)
    checks.same_dtype(function, input, mat2)
    checks.out_dtype(out_dtype, input)
    c = _product(function, input, mat2, out_dtype=out_dtype, out=out, precision=precision)
    return _remember(key, c, input, mat2, None, out, None, precision)


def mv(
    input: torch.Tensor, vec: torch.Tensor, *, out: torch.Tensor | None = None, precision: str | None = None
) -> torch.Tensor:
    """`torch.mv`: input [M, K] times vec [K]: [M]. Everything else as `matmul`."""
    checks.tensors("mv", input=input, vec=vec)
    if out is None:
        input, vec = _autocast(input, vec)
    checks.mv(input, vec)
    checks.same_dtype("mv", input, vec)
    return _product("mv", input, vec, out=out, precision=precision)


def addmm(
    input: torch.Tensor,
    mat1: torch.Tensor,
    mat2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.addmm`: beta input + alpha mat1 @ mat2 of mat1 [M, K] and mat2 [K, N]: [M, N], to which input broadcasts.

    A row [N] or column [M, 1] is added as a bias; what has more values is copied into the result first, unless it is
    `out` itself. With beta = 0 input is not read, with alpha = 0 neither matrix is. All are of one floating dtype;
    out_dtype is as in `mm`, and input may then be of it. Everything else as `matmul`.
    """
    once = type(alpha) in (int, float) and type(beta) in (int, float) and alpha == 1 == beta
    key = _key(("addmm", out_dtype), mat1, mat2, input, out, precision) if once else None
    c = _repeat(key, mat1, mat2, input, out)
    if c is not None:
        return c
    checks.tensors("addmm", input=input, mat1=mat1, mat2=mat2)
    checks.numbers("addmm", beta=beta, alpha=alpha)
    if out is None and out_dtype is None:
        input, mat1, mat2 = _autocast(input, mat1, mat2)
    checks.addmm(mat1, mat2)
    _check_added("addmm", "mat1", input, mat1, mat2, out_dtype)
    checks.expandable(input, (mat1.shape[0], mat2.shape[1]))
    how: dict[str, Any] = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype, "out": out, "precision": precision}
    c = _product("addmm", mat1, mat2, input, **how)
    return _remember(key, c, mat1, mat2, input, out, None, precision)


def baddbmm(
    input: torch.Tensor,
    batch1: torch.Tensor,
    batch2: torch.Tensor,
    out_dtype: torch.dtype | None = None,
    *,
    beta: float = 1,
    alpha: float = 1,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.baddbmm`: beta input + alpha batch1 @ batch2 of batch1 [B, M, K] and batch2 [B, K, N]: [B, M, N], to which
    input broadcasts. Everything else as `addmm`."""
    checks.tensors("baddbmm", input=input, batch1=batch1, batch2=batch2)
    checks.numbers("baddbmm", beta=beta, alpha=alpha)
    if out is None and out_dtype is None:
        input, batch1, batch2 = _autocast(input, batch1, batch2)
    checks.bmm(batch1, batch2)
    checks.expandable(input, (*batch1.shape[:2], batch2.shape[2]))
    _check_added("baddbmm", "batch1", input, batch1, batch2, out_dtype)
    how: dict[str, Any] = {"alpha": alpha, "beta": beta, "out_dtype": out_dtype, "out": out, "precision": precision}
    return _product("baddbmm", batch1, batch2, input, **how)


def linear(
    input: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    activation: str | None = None,
    *,
    precision: str | None = None,
) -> torch.Tensor:
    """`torch.nn.functional.linear`, and an activation: activation(input @ weight^T + bias) of input [.., K], weight
    [N, K] and bias [N]: [.., N]; of a weight [K] and a bias [] the result is [..].

    activation: "relu", "gelu" (erf), "gelu_tanh" or "silu". Without gradients bias and activation are computed on the
    accumulators, before the one rounding. With them the activation is torch's own, which keeps what it needs for the
    backward. All are of one floating dtype; everything else, precision included, as `matmul`.

    Raises what `matmul` raises, and ValueError for an activation that is none.
    """
    key = _key(("linear", activation), input, weight, bias, None, precision)
    c = _repeat(key, input, weight, bias, None)
    if c is not None:
        return c
    checks.tensors("linear", input=input, weight=weight, **({} if bias is None else {"bias": bias}))
    checks.activation("linear", activation)
    if bias is None:
        a, b = _autocast(input, weight)
    else:
        a, b, bias = _autocast(input, weight, bias)
    b = b.t()  # raises in torch's words where it has more than two dimensions
    checks.linear(a, b, bias)
    c = _product("linear", a, b, bias, activation=activation, precision=precision)
    return _remember(key, c, a, b, bias, None, activation, precision)


def explain(input: torch.Tensor, other: torch.Tensor, *, precision: str | None = None) -> Selection:
    """Which kernel and configuration `matmul(input, other, precision=...)` runs, and why; nothing is launched. Where
    strides make it several launches, of the first. Raises as `matmul`."""
    checks.tensors("matmul", input=input, other=other)
    checks.matmul(input, other)
    checks.same_dtype(_words(input, other), input, other)
    checks.computable("matmul", input, other)
    checks.precision("matmul", precision, input.dtype)
    a, b, _ = _matrices(input, other)
    c = torch.empty(ops.shape_of(a, b), dtype=ops.out_dtype_of(a.dtype), device="meta")
    for matrices in ops.launches(a, b, c):
        return plan.plan(*matrices, precision=precision)
    raise RuntimeError(f"matmul launches nothing for {list(a.shape)} and {list(b.shape)}")


# --- The way of every call ---


def _product(
    function: str,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None = None,
    *,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """activation(alpha a @ b + beta input) of operands whose shapes and dtypes go together."""
    dtypes = checks.DTYPES if input is None and activation is None else checks.FLOATING
    checks.computable(function, a, b, input, dtypes=dtypes, devices=("cuda", "cpu", "meta"))
    checks.precision(function, precision, a.dtype)
    a, b, vectors = _matrices(a, b)
    if out is not None:
        return _product_into(function, out, a, b, input, alpha, beta, activation, out_dtype, precision, vectors)
    if activation is not None and ops.needs_grad(a, b, input):
        # Fused, the backward would have to multiply again to know what the activation was applied to.
        c = ACTIVATIONS[activation](ops.gemm(a, b, input, alpha, beta, None, out_dtype, precision))
    else:
        c = ops.gemm(a, b, input, alpha, beta, activation, out_dtype, precision)
    return _without(c, vectors)


def _product_into(
    function: str,
    out: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    alpha: float,
    beta: float,
    activation: str | None,
    out_dtype: torch.dtype | None,
    precision: str | None,
    vectors: tuple[int, ...],
) -> torch.Tensor:
    """out, filled with `_product` without the dimensions `vectors`."""
    if not isinstance(out, torch.Tensor):
        raise TypeError(f"{function}(): argument 'out' must be Tensor, not {type(out).__name__}")
    if ops.needs_grad(a, b, input, out):
        raise checks.no_grad_into_out(function)
    shape = list(ops.shape_of(a, b))
    for dim in vectors:
        del shape[dim]
    in_place = ops.is_plain(a, b, input, out) and not out.is_neg()
    if in_place:  # out may share memory with what is read, and be resized
        a, b = (x.clone() if checks.may_alias(out, x) else x for x in (a, b))
        if input is not None and (input is not out or list(out.shape) != shape) and checks.may_alias(out, input):
            input = input.clone()
    checks.out(out, shape, out_dtype or ops.out_dtype_of(a.dtype), a.device, out_dtype is not None)
    if not in_place:
        c = ops.gemm(a, b, input, alpha, beta, activation, out_dtype, precision)
        return out.copy_(_without(c, vectors))
    c = out
    for dim in reversed(vectors):
        c = c.unsqueeze(dim)
    ops.compute_into(c, a, b, c if input is out else input, alpha, beta, activation, precision)
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


def _words(a: torch.Tensor, b: torch.Tensor) -> str:
    """Which of torch's products torch.matmul makes of these."""
    if b.dim() == 1:
        return "dot" if a.dim() == 1 else "mv"
    return "mm" if b.dim() == 2 else "bmm"


def _check_added(
    function: str,
    name: str,
    input: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    out_dtype: torch.dtype | None,
) -> None:
    """The dtypes of addmm and baddbmm; name: what torch calls a."""
    if out_dtype is None:
        checks.same_dtype(function, a, b, input)
    else:
        checks.same_dtype("mm" if a.dim() == 2 else "bmm", a, b)
        checks.out_dtype(out_dtype, a, input, name)


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


# --- The short way of a call like one before ---


def _key(
    how: object,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    precision: str | None,
) -> tuple[object, ...] | None:
    """What a call's checks and choice depend on, `how` it begins and ends included; None where that is more than can be
    said in short."""
    if is_watched() or torch.is_autocast_enabled() or type(a) not in ops.PLAIN or type(b) not in ops.PLAIN:
        return None
    if (a.requires_grad or b.requires_grad) and torch.is_grad_enabled():
        return None
    dtype = a.dtype
    if dtype is torch.float32:
        precision = precision or fp32_precision()
    try:
        key: tuple[object, ...] = (
            a.shape, b.shape, a.stride(), b.stride(), dtype, b.dtype, a.get_device(), b.get_device(),
            a.data_ptr() & 15, b.data_ptr() & 15, a.is_neg(), b.is_neg(), precision, how,
        )  # fmt: skip
        if bias is not None:
            key += _lies(bias)
        if out is not None:
            key += _lies(out)
        return key
    except RuntimeError:  # a layout without strides, or without storage
        return None


def _lies(x: torch.Tensor) -> tuple[object, ...]:
    """The same of a bias or an `out`; RuntimeError where it is more."""
    if type(x) not in ops.PLAIN or x.is_neg() or (x.requires_grad and torch.is_grad_enabled()):
        raise RuntimeError
    return x.shape, x.stride(), x.dtype, x.get_device(), x.data_ptr() & 15


def _repeat(
    key: tuple[object, ...] | None,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
) -> torch.Tensor | None:
    """The result, if there was a call of that key before."""
    ready = _ready.get(key) if key is not None else None
    if ready is None:
        return None
    if out is None:
        out = a.new_empty(ready.shape, dtype=ready.plan.out_dtype)
    elif ready.plan.overlap(a, b, out) or (bias is not None and ops.same_storage(bias, out)):
        return None
    ready.plan.run(a, b, out, bias)
    return out


def _remember(
    key: tuple[object, ...] | None,
    c: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    activation: str | None,
    precision: str | None,
) -> torch.Tensor:
    """c; and what computed it is kept, unless `out` was resized, and is not what the key says."""
    if key is not None and (out is None or key[-len(_lies(out)) :] == _lies(out)):
        found = ops.ready(a, b, c, bias, activation, precision)
        if found is not None:
            plan.keep(_ready, key, found, plan.MAX_PLANS)
    return c
