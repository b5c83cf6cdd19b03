"""What torch runs for a problem: what computes the same in the same precision, as a user would call it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F

from .. import arithmetic
from ..compat import int_mm, scaled_mm
from ..functional.activations import ACTIVATIONS
from ..problem import GemmProblem

Product = Callable[..., torch.Tensor]  # of a, b, c and the auxiliary operands; `beta` is C's factor, 0 where not given


def torchs_product(problem: GemmProblem) -> tuple[Product | None, str]:
    """The function that computes a problem by torch, of operands as `operands` makes them; or None, and why torch has
    no operation that computes the same in the same precision.

    It writes the product into C and returns it. A grouped product, and what an activation gives, are other tensors.
    What torch has and refuses for these dtypes, strides or sizes is torch's error when it is called.
    """
    adds = problem.has_beta or problem.activation is not None
    why = ""
    if problem.dtype == torch.float32 and problem.arithmetic.torch_setting is None:
        why = f"torch has no fp32 product in {problem.precision}"
    elif problem.scales is not None and (adds or problem.dtype == torch.int8):
        why = "torch has products with scales of fp8 alone, without beta and activation"
    elif problem.gate:
        why = "torch has no product with a gate"
    elif problem.residual:
        why = "torch has no product with an activation before what is added to it"
    elif problem.groups is not None and (adds or problem.bias is not None):
        why = "torch's grouped product has no epilogue"
    elif problem.dtype == torch.int8 and (adds or problem.bias is not None or problem.batch > 1):
        why = "torch's product of int8 has no batch and no epilogue"
    return None if why else partial(_product, problem), why


def _product(
    problem: GemmProblem, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *auxiliary: torch.Tensor, beta: float = 0.0
) -> torch.Tensor:
    named = dict(zip(problem.auxiliary, auxiliary, strict=True))
    how: dict[str, Any] = {} if c.dtype == a.dtype else {"out_dtype": c.dtype}
    bias = named.get("bias")
    if problem.scales is not None:
        scales = scales_of(auxiliary)
        fast = problem.arithmetic.promotion is None
        return scaled_mm(a, b, *scales, bias=bias, out_dtype=c.dtype, use_fast_accum=fast, out=c)
    if problem.dtype == torch.int8:
        return int_mm(a, b, out=c)
    with fp32_precision(problem.arithmetic.torch_setting):
        if problem.groups is not None:
            return F.grouped_mm(a, b, offs=named["ends"], **how)
        multiply, add_to = (torch.bmm, torch.baddbmm) if c.dim() == 3 else (torch.mm, torch.addmm)
        if bias is not None and problem.bias == "m":
            bias = bias[:, None]
        if problem.has_beta:
            add_to(c, a, b, beta=beta, out=c, **how)
            if bias is not None:
                c += bias
        elif bias is not None:
            add_to(bias, a, b, out=c, **how)
        else:
            multiply(a, b, out=c, **how)
    return c if problem.activation is None else ACTIVATIONS[problem.activation](c)


def scales_of(auxiliary: Sequence[torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """A's scales, [1, 1], [M, 1] or [M, K / 128], and B's likewise, as `torch._scaled_mm` takes them."""
    a_scale, b_scale = auxiliary[-2:]
    return (a_scale.mT, b_scale.mT) if a_scale.dim() == 2 else (a_scale[:, None], b_scale[None])


@contextmanager
def fp32_precision(setting: str | None) -> Iterator[None]:
    """What torch multiplies fp32 matrices with: "ieee" or "tf32"; None as it is set. It is not set where it is so: once
    it is, torch raises on reading `allow_tf32`."""
    if setting in (None, arithmetic.fp32_precision()):
        yield
        return
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = setting
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before
