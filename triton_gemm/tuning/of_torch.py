"""What torch runs for a problem: what computes the same in the same precision, as a user would call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from ..arithmetic import fp32_precision
from ..compat import int_mm, scaled_mm
from ..problem import GemmProblem

Product = Callable[..., torch.Tensor]  # of a, b, c and the auxiliary operands; `beta` is C's factor, 0 where not given

ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "relu": torch.relu_,
    "gelu": torch.ops.aten.gelu_,
    "gelu_tanh": partial(torch.ops.aten.gelu_, approximate="tanh"),
    "silu": partial(F.silu, inplace=True),
}


def torchs_product(problem: GemmProblem) -> tuple[Product | None, str]:
    """The function that computes a problem by torch, of a GPU's operands as `operands` makes them; or None, and why
    torch has no operation that computes the same in the same precision.

    It writes the product into C and returns it; a grouped product is a tensor of its own, since torch takes no `out`.
    What torch has and refuses these operands, by their dtypes, strides or sizes, is torch's error when it is called.
    """
    why = _lacks(problem)
    if why is not None:
        return None, why
    if problem.scales is not None:
        return partial(_scaled, problem), ""
    if problem.groups is not None:
        return partial(_grouped, problem), ""
    return partial(_product, problem), ""


def _lacks(problem: GemmProblem) -> str | None:
    """Why torch has no such product, or None."""
    if problem.dtype == torch.float32 and problem.arithmetic.torch_setting is None:
        return f"torch has no fp32 product in {problem.precision}"
    if problem.scales is not None:
        if not problem.dtype.is_floating_point:
            return "torch has no int8 product with scales"
        return "torch adds nothing to a product with scales, and applies no activation" if _adds(problem) else None
    if problem.groups is not None:
        if problem.bias is not None or _adds(problem):
            return "torch's grouped_mm has no epilogue"
        return None
    if problem.dtype == torch.int8 and (problem.batch > 1 or problem.bias is not None or _adds(problem)):
        return "torch multiplies int8 in matrices only, without a batch or an epilogue"
    return None


def _adds(problem: GemmProblem) -> bool:
    return problem.has_beta or problem.activation is not None


def _product(
    problem: GemmProblem,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    bias: torch.Tensor | None = None,
    *,
    beta: float = 0.0,
) -> torch.Tensor:
    if problem.dtype == torch.int8:
        return int_mm(a, b, out=c)
    how: dict[str, Any] = {"out": c} if c.dtype == a.dtype else {"out": c, "out_dtype": c.dtype}
    multiply, add_to = (torch.bmm, torch.baddbmm) if c.dim() == 3 else (torch.mm, torch.addmm)
    if bias is not None and problem.bias == "m":
        bias = bias[:, None]
    with _fp32_precision(problem):
        if problem.has_beta:
            add_to(c, a, b, beta=beta, **how)
            if bias is not None:
                c.add_(bias)
        elif bias is not None:
            add_to(bias, a, b, **how)
        else:
            multiply(a, b, **how)
    return c if problem.activation is None else ACTIVATIONS[problem.activation](c)


def _scaled(
    problem: GemmProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *auxiliary: torch.Tensor, beta: float = 0.0
) -> torch.Tensor:
    *bias, a_scale, b_scale = auxiliary
    if problem.scales == "rows":
        a_scale, b_scale = a_scale[:, None], b_scale[None]
    elif problem.scales == "blocks":
        a_scale, b_scale = a_scale.mT, b_scale.mT
    fast = problem.precision == "fp8 fast"
    how: dict[str, Any] = {"out_dtype": c.dtype, "use_fast_accum": fast, "out": c}
    return scaled_mm(a, b, a_scale, b_scale, *bias, **how)


def _grouped(
    problem: GemmProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, ends: torch.Tensor, *, beta: float = 0.0
) -> torch.Tensor:
    how: dict[str, Any] = {} if c.dtype == a.dtype else {"out_dtype": c.dtype}
    with _fp32_precision(problem):
        return F.grouped_mm(a, b, offs=ends, **how)


@contextmanager
def _fp32_precision(problem: GemmProblem) -> Iterator[None]:
    """In which torch multiplies fp32 as the problem says. It is not set where it is so: once it is, torch raises on
    reading `allow_tf32`."""
    setting = problem.arithmetic.torch_setting
    if setting in (None, fp32_precision()):
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
