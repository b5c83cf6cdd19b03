"""A multiplication of tensors as launches on matrices: shape, views, what is added, and what calls like it launch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import islice, product

import torch

from ..arithmetic import default_arithmetic, result_dtype
from ..compat import differ, may_differ
from ..problem import GemmProblem, Request
from ..runtime import plan
from . import fast_path


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


def compute(a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, request: Request) -> torch.Tensor:
    """gemm of plain tensors, without its derivatives."""
    c = torch.empty(shape_of(a, b), dtype=request.out_dtype or result_dtype(a.dtype), device=a.device)
    compute_into(c, a, b, input, request)
    return c


def compute_into(
    c: torch.Tensor, a: torch.Tensor, b: torch.Tensor, input: torch.Tensor | None, request: Request
) -> None:
    """c = activation(alpha a @ b + beta input). c shares no memory with the others, but may be `input` itself."""
    if c.numel() == 0:
        return
    request, auxiliary = adding(c, input, request)
    if request.beta and input is not None and input is not c:
        c.copy_(input)
    for matrices in views(a.resolve_neg(), b.resolve_neg(), c, join_rows=request.bias != "m"):
        plan.multiply(*matrices, request, auxiliary)


def adding(c: torch.Tensor, input: torch.Tensor | None, request: Request) -> tuple[Request, tuple[torch.Tensor, ...]]:
    """The request of launches that add `input`, and their auxiliary operands: `input` is a bias, or where the request's
    beta is not 0 what c holds before."""
    if input is None or request.beta == 0:
        return request._replace(beta=0.0), ()
    vector = None if input is c else vector_of(input, c)
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


def known(
    a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, input: torch.Tensor | None, request: Request
) -> fast_path.Known | None:
    """What calls like the one that has computed c launch on the fast path: one launch, which adds nothing, a bias for
    each column, or a matrix. None where that may change."""
    if c.numel() == 0 or a.dim() == 1 or b.dim() == 1:
        return fast_path.SLOW
    auxiliary: tuple[torch.Tensor, ...] = ()
    if input is None:
        request = request._replace(beta=0.0)
    elif input is c:  # which no key says
        return None
    elif request.beta != 1:
        return fast_path.SLOW
    else:
        request, auxiliary = adding(c, input, request)
        if auxiliary and (request.bias != "n" or auxiliary[0].data_ptr() != input.data_ptr()):
            return fast_path.SLOW
    first, *more = islice(views(a, b, c), 2)
    if more:
        return fast_path.SLOW
    found = plan.PLANS.get(plan.key_of(request, *first, auxiliary))
    return fast_path.known(found, c, *zip((a, b, c), first, strict=True), copies=request.beta == 1)


def vector_of(input: torch.Tensor, c: torch.Tensor) -> tuple[torch.Tensor, str] | None:
    """(input as contiguous values, the axis along which each has its own), if it is one column's or one row's for all
    of c."""
    rows, columns = c.shape[-2:]
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
