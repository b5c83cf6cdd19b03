"""What operators of `torch.ops.triton_gemm` have in common: how they are defined, who has to see their calls, and how
vmap gives them a dimension."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ..compat import SingleLevelFunction, grad_enabled, is_wrapper, library_of, must_dispatch
from .fast_path import PLAIN

Tensors = tuple[torch.Tensor, ...]


def operator(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> tuple[Any, torch.library.Library]:
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


def for_backward(found: Tensors) -> Tensors:
    """What an operator for the backward returns of (result, preactivation, and with a gate the other product): three
    tensors, of which the last may be empty."""
    return found if len(found) == 3 else (*found, found[0].new_empty(0))


def is_plain(*tensors: torch.Tensor | None) -> bool:
    """Whether these tensors are nothing but data, and no mode, tracer or profiler is active. Gradients apart."""
    if must_dispatch():
        return False
    return all([x is None or (type(x) in PLAIN and not x.is_meta and not is_wrapper(x)) for x in tensors])


def needs_grad(*tensors: torch.Tensor | None) -> bool:
    return grad_enabled() and any([x is not None and x.requires_grad for x in tensors])


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
