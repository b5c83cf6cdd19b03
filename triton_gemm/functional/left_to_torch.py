"""Which calls of torch's products stay torch's, whatever is routed, and why."""

from __future__ import annotations

from functools import cache
from typing import Any

import torch

from .. import arguments
from ..arithmetic import FLOATING, IEEE, default_arithmetic
from ..compat import INTERPRETED, overlaps_itself
from ..hardware.device import INTERPRETER, device_info
from ..hardware.device_model import origin
from ..problem import Request
from ..runtime import plan, policies
from . import matrices
from .fast_path import same_storage
from .rules import expands

BY_TABLE = "faster by table"  # why torch computes what a table says it is faster at
OVERLAP, NEGATIVE = OF_OUT = "out may overlap an operand", "out is a negative view"  # no other call need be so
# Our speed over torch's where committed records show less than 0.9 (attention-ieee.csv), by compute capability: of
# batches in IEEE fp32 with M, N and K below SMALL.
SLOWER = {(9, 0): {torch.float32: 0.81}}
SMALL = 256
_faster: dict[tuple[object, ...], str] = {}  # why torch is, under any rule, by the key of calls; "" where it is not


def stays(
    name: str,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor | None,
    scalars: dict[str, Any],
) -> str | None:
    """Why torch computes this call itself, or None: it is not ours to compute, or a mistake that torch words itself."""
    if a.dtype not in FLOATING:
        return f"{a.dtype} is not computed"
    capability = device_info(a.device).capability
    if capability < (8, 0):
        return "the GPU is older than compute capability 8.0"
    rank = 3 if "bmm" in name else 2
    operands = [x for x in (a, b, input, out) if x is not None]
    if any(x.dtype != a.dtype or x.device != a.device for x in operands):
        return "dtypes or devices differ"
    if a.dim() != rank or b.dim() != rank or a.shape[-1] != b.shape[-2] or a.shape[:-2] != b.shape[:-2]:
        return "shapes do not go together"
    shape = matrices.shape_of(a, b)
    if input is not None and input.shape != shape and not expands(input, shape):
        return "shapes do not go together"
    if any(isinstance(value, complex) for value in scalars.values()):
        return "a factor is complex"
    if out is not None:
        if out.is_neg():
            return NEGATIVE
        if out.shape != shape:
            return "out has another shape"
        if _overlaps(out, a, b, input):
            return OVERLAP
        if overlaps_itself(out):
            return "out overlaps itself"
    return None


def faster_by_torch(
    overload: str,
    a: torch.Tensor,
    b: torch.Tensor,
    input: torch.Tensor | None,
    out: torch.Tensor | None,
    request: Request,
) -> str | None:
    """That torch is faster, by the records or by a table of bits="any". Both are asked once about calls whose plan
    would be the same."""
    key = overload, plan.key_of(request, a, b, out, () if input is None else (input,))
    why = _faster.get(key)
    if why is None:
        why = _slower(a, b) or ""
        if not why and policies.current_policy().bits == "any":
            problem = matrices.problem_of(a, b, input, out, request)
            if problem is not None and policies.torch_is_faster(problem, plan.info_of(a.device)):
                why = BY_TABLE
        plan.keep(_faster, key, why, plan.MAX_PLANS)
    return why or None


def _slower(a: torch.Tensor, b: torch.Tensor) -> str | None:
    """That torch is faster by the records, unless a table has the product, or torch's bits would depend on its rows."""
    device = device_info(a.device)
    speed = SLOWER.get(device.capability, {}).get(a.dtype)
    if speed is None or device == INTERPRETER or policies.current_policy().batch_invariant:
        return None
    if a.dim() != 3 or max(*a.shape[1:], b.shape[-1]) >= SMALL or default_arithmetic(a.dtype) is not IEEE:
        return None
    c = torch.empty(matrices.shape_of(a, b), dtype=a.dtype, device="meta")
    if plan.selection_of(a, b, c).source != "model":
        return None
    return f"a batch of small float32 takes {1 / speed:.1f} times as long here, untuned"


@cache
def warn_of_a_guess(device: torch.device) -> None:
    """Says once that nobody has timed products on this GPU."""
    if not INTERPRETED and origin(device_info(device)) == "derived":
        arguments.warn_caller(
            f"triton_gemm was not timed on {device_info(device).name}: products under use() may be slower than "
            "torch's. `triton-gemm calibrate` and `triton-gemm tune` measure it"
        )


def _overlaps(out: torch.Tensor, *operands: torch.Tensor | None) -> bool:
    return any(x is not None and same_storage(x, out) for x in operands)
