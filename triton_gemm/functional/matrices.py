"""A multiplication of tensors as launches on matrices: shape, views, what is added, and what calls like it launch."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Sequence
from itertools import islice, product
from typing import NamedTuple

import torch

from ..arithmetic import HALF, default_arithmetic, result_dtype
from ..compat import differ, may_differ
from ..problem import GemmProblem, Request
from ..runtime import plan
from . import fast_path
from .activations import ACTIVATIONS


def shape_of(a: torch.Tensor, b: torch.Tensor) -> tuple[int, ...]:
    """The shape of a @ b. Raises RuntimeError if a and b cannot be multiplied."""
    if differ(a.shape[-1], b.shape[-2]):
        raise RuntimeError(f"gemm: {list(a.shape)} and {list(b.shape)} cannot be multiplied")
    if b.dim() == 2:
        return (*a.shape[:-1], b.shape[1])
    return (*batch_of(a.shape, b.shape), a.shape[-2], b.shape[-1])


def batch_of(a: Sequence[int], b: Sequence[int]) -> Sequence[int]:
    """Of the product of these shapes."""
    if len(a) == 2 or len(b) == 2:
        return b[:-2] if len(a) == 2 else a[:-2]
    same = len(a) == len(b) and not any(map(may_differ, a[:-2], b[:-2]))
    return a[:-2] if same else torch.broadcast_shapes(a[:-2], b[:-2])


class Operands(NamedTuple):
    """What a product is made of: activation(alpha a @ b + beta input) + residual, or with a gate, which lies as b does,
    activation(a @ gate + gate_bias) (a @ b + input) + residual.

    a [.., M, K], b [.., K, N]; the others broadcast to the result.
    """

    a: torch.Tensor
    b: torch.Tensor
    input: torch.Tensor | None = None
    residual: torch.Tensor | None = None
    gate: torch.Tensor | None = None
    gate_bias: torch.Tensor | None = None

    def is_product(self) -> bool:
        """Whether there is no more than alpha a @ b + beta input."""
        return self.residual is None and self.gate is None and self.gate_bias is None


def function_of(name: str, x: Operands) -> Hashable:
    """The operation of a call of `name`, for `FastPath.take`: the name, and if it has other operands which."""
    _, _, input, residual, gate, gate_bias = x
    if residual is None and gate is None and gate_bias is None:
        return name
    return name, input is None, residual is None, gate is None, gate_bias is None


def auxiliary_of(x: Operands, before: tuple[torch.Tensor, ...] = ()) -> tuple[torch.Tensor, ...]:
    """The operands but a and b, in the order of `FastPath.take`: that of a plan, and last what C is a copy of before
    the launch. before: where preactivations go."""
    _, _, input, residual, gate, gate_bias = x
    if residual is None and gate is None:
        if not before or input is None:
            return before if input is None else (input,)
        return (input, *before) if input.dim() < 2 else (*before, input)
    first = tuple(operand for operand in (input, gate, gate_bias) if operand is not None)
    return (*first, *before) if residual is None else (*first, *before, residual)


def compute(
    x: Operands, request: Request, before: tuple[torch.Tensor, ...] = ()
) -> tuple[torch.Tensor, fast_path.Known | None]:
    """gemm of plain tensors, without its derivatives, and what calls like it launch: None where that may change.

    before: of a request with preactivations, contiguous tensors of the result's shape and dtype that they are stored
    in: what the activation is applied to, and with a gate a @ b + input.
    """
    if x.gate is not None and x.residual is not None:
        c, _ = compute(x._replace(residual=None), request, before)
        return c + x.residual, fast_path.SLOW
    a, b, *_ = x
    shape = shape_of(a, b)
    if not _is_one_product(x, request, shape):
        into = iter(before)

        def multiply(product: Operands, how: Request) -> torch.Tensor:
            found = next(into, None)
            if found is None:
                return compute(product, how)[0]
            compute_into(found, product, how)
            return found

        return unfused(x, request, multiply), fast_path.SLOW
    c = torch.empty(shape, dtype=request.out_dtype or result_dtype(a.dtype), device=a.device)
    return c, compute_into(c, x, request, before)


def compute_into(
    c: torch.Tensor, x: Operands, request: Request, before: tuple[torch.Tensor, ...] = ()
) -> fast_path.Known | None:
    """As `compute`, into c, which shares no memory with the others, but may be `input` itself. x has a gate or a
    residual only if one launch can compute it (`_is_one_product`)."""
    if c.numel() == 0:
        return fast_path.SLOW
    beta, (a, b, input, residual, gate, gate_bias) = request.beta, x
    request, auxiliary = adding(c, input, request)
    if residual is not None:
        request = request._replace(beta=1.0, residual=True)
    copied = input if residual is None and request.beta else residual
    if copied is not None and copied is not c:
        c.copy_(copied)
    a, b = a.resolve_neg(), b.resolve_neg()
    if gate is not None:
        b, gate = _alike(b, gate.resolve_neg())
        request = request._replace(gate=True)
        if request.bias or gate_bias is not None:
            request, zeros = request._replace(bias="n"), a.new_zeros(b.shape[-1])
            gate_bias = zeros if gate_bias is None else vector_of(gate_bias, c.shape)[0]  # type: ignore[index]
            auxiliary = (*(auxiliary or (zeros,)), gate, gate_bias)
        else:
            auxiliary = (gate,)
    launched = [
        ((*matrices, *more), plan.multiply(*matrices, request, more))
        for matrices, more in _launches(a, b, c, gate, auxiliary, before, join_rows=request.bias != "m")
    ]
    given = *x[:2], c, *auxiliary_of(x, before)[: None if copied is None else -1]
    operands, found = launched[0]
    if input is c:  # which no key says
        return None
    scaled = input is not None and beta != 1
    if scaled or len(launched) > 1 or len(operands) != len(given) or request.bias == "m":
        return fast_path.SLOW
    return fast_path.known(found, c, *zip(given, operands, strict=True), copies=copied is not None)


def _launches(
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    gate: torch.Tensor | None,
    auxiliary: tuple[torch.Tensor, ...],
    before: tuple[torch.Tensor, ...],
    join_rows: bool,
) -> Iterator[tuple[tuple[torch.Tensor, torch.Tensor, torch.Tensor], tuple[torch.Tensor, ...]]]:
    """a, b and c of each launch, and its auxiliary operands: the gate and `before` are cut as b and c are."""
    of_gate = iter(()) if gate is None else views(a, gate, c, join_rows)
    for matrices in views(a, b, c, join_rows):
        into = matrices[2]
        more = auxiliary
        if gate is not None:
            _, second, _ = next(of_gate)
            more = tuple(second if x is gate else x for x in auxiliary)
        if before and into is c:
            more += before
        elif before:
            offset = into.storage_offset() - c.storage_offset()
            more += tuple(x.as_strided(into.shape, into.stride(), x.storage_offset() + offset) for x in before)
        yield matrices, more


def gates_in_one_kernel(dtype: torch.dtype, request: Request) -> bool:
    """Whether one kernel computes a gated product of operands of this dtype, whose biases are rows."""
    half = dtype in HALF.dtypes and request.out_dtype in (None, dtype)
    return half and not plan.remembering(request).batch_invariant


def _is_one_product(x: Operands, request: Request, shape: Sequence[int]) -> bool:
    """Whether one kernel computes it: of a gate one for 16 bits, and if rows may have other bits with other rows."""

    if x.gate is not None:
        are_rows = all(bias is None or bias.shape == shape[-1:] for bias in (x.input, x.gate_bias))
        return are_rows and gates_in_one_kernel(x.a.dtype, request)
    if x.residual is None or x.input is None:
        return True
    # There is no place for a matrix beside the residual.
    return vector_of(x.input, shape) is not None and not (
        x.input.shape == shape and plan.remembering(request).batch_invariant
    )


def unfused(x: Operands, request: Request, multiply: Callable[[Operands, Request], torch.Tensor]) -> torch.Tensor:
    """As `compute`, by one `multiply` for each product, the gate's first, and torch's functions for the rest."""
    a, b, input, residual, gate, gate_bias = x
    product = request._replace(activation=None, preactivation=False)
    c = multiply(Operands(a, b, input) if gate is None else Operands(a, gate, gate_bias), product)
    if request.activation is not None:
        c = ACTIVATIONS[request.activation](c)
    if gate is not None:
        c = c * multiply(Operands(a, b, input), product)
    return c if residual is None else c + residual


def _alike(b: torch.Tensor, gate: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Both with the same strides and alignment."""
    if b.stride() == gate.stride() and (b.data_ptr() % 16 == 0) == (gate.data_ptr() % 16 == 0):
        return b, gate
    b, gate = (x.contiguous() for x in (b, gate))
    return tuple(x if x.data_ptr() % 16 == 0 else x.clone() for x in (b, gate))  # type: ignore[return-value]  # two


def adding(c: torch.Tensor, input: torch.Tensor | None, request: Request) -> tuple[Request, tuple[torch.Tensor, ...]]:
    """The request of launches that add `input`, and their auxiliary operands: `input` is a bias, or where the request's
    beta is not 0 what c holds before."""
    if input is None or request.beta == 0:
        return request._replace(beta=0.0), ()
    vector = None if input is c else vector_of(input, c.shape)
    if vector is not None and input.shape == c.shape and plan.remembering(request).batch_invariant:
        vector = None  # of more rows it would be no vector
    if vector is None:
        return request, ()
    # The epilogue adds it as it is; a factor is applied in what the kernels accumulate in.
    bias, axis = vector
    if request.beta != 1:
        bias = bias.to(default_arithmetic(bias.dtype).accumulator) * request.beta
    return request._replace(beta=0.0, bias=axis), (bias,)


def problem_of(
    a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, out: torch.Tensor | None, request: Request
) -> GemmProblem | None:
    """The one multiplication that `compute` of these launches, or `compute_into` with `out`; None where it launches
    none or several."""
    c = torch.empty(shape_of(a, b), dtype=result_dtype(a.dtype), device="meta") if out is None else out
    if c.numel() == 0:
        return None
    request, _ = adding(c, input, request)
    first, *more = islice(views(a, b, c, join_rows=request.bias != "m"), 2)
    return None if more else request.problem(*first)


def vector_of(input: torch.Tensor, of: Sequence[int]) -> tuple[torch.Tensor, str] | None:
    """(input as contiguous values, the axis along which each has its own), if it is one column's or one row's for all
    of a result of that shape."""
    rows, columns = of[-2:]
    count, shape = input.numel(), (1, 1, *input.shape)
    if count == shape[-1] == columns:
        axis = "n"
    elif count == shape[-2] == rows:
        axis = "m"
    elif count == 1:
        axis, input = "n", input.reshape(1).expand(columns)
    else:
        return None
    return input.reshape(-1).resolve_neg().contiguous(), axis


def views(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, join_rows: bool = True
) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
    """Views of a, b and c that together are c = a @ b, each for one launch: matrices, or batches of them one stride
    apart. Nothing is copied: as many dimensions as lie so are joined, and the shorter ones counted through.

    join_rows: whether matrices that share B may become rows of one, which a bias for each row does not allow.
    """
    if c.dim() == a.dim() == b.dim() == 2:
        yield a, b, c
        return
    *batch, M, N = c.shape
    K = a.shape[-1]
    a, b = a.expand(*batch, M, K), b.expand(*batch, K, N)
    dims: list[tuple[int, ...]] = []  # size, and strides of a, b and c
    for size, *strides in zip(batch, a.stride(), b.stride(), c.stride(), strict=False):
        if size == 1:
            continue
        if dims and all(outer == size * inner for outer, inner in zip(dims[-1][1:], strides, strict=True)):
            dims[-1] = (size * dims[-1][0], *strides)
        else:
            dims.append((size, *strides))
    row_a, row_c = a.stride(-2), c.stride(-2)
    if dims and join_rows:
        size, batch_a, batch_b, batch_c = dims[-1]
        if batch_b == 0 and (M == 1 or (batch_a, batch_c) == (M * row_a, M * row_c)):
            dims.pop()
            row_a, row_c = (batch_a, batch_c) if M == 1 else (row_a, row_c)
            M *= size
    longest = max(range(len(dims)), key=lambda i: dims[i][0], default=0)
    together, counted = dims[longest : longest + 1], dims[:longest] + dims[longest + 1 :]
    matrices = ((a, (M, K), (row_a, a.stride(-1))), (b, (K, N), b.stride()[-2:]), (c, (M, N), (row_c, c.stride(-1))))
    for index in product(*(range(dim[0]) for dim in counted)):
        offsets = [sum(i * dim[which] for i, dim in zip(index, counted, strict=True)) for which in (1, 2, 3)]
        first, second, third = (
            x.as_strided(
                (*(dim[0] for dim in together), *shape),
                (*(dim[which] for dim in together), *strides),
                x.storage_offset() + offset,
            )
            for which, (x, shape, strides), offset in zip((1, 2, 3), matrices, offsets, strict=True)
        )
        yield first, second, third
