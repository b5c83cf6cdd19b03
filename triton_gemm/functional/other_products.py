"""torch's products that are none of mm, bmm, addmm and baddbmm: how `use()` computes those of 8 bits and of groups, and
which others it counts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from ..arithmetic import FLOATING, SCALED, ScaleKind
from ..compat import overlaps_itself
from ..hardware.device import INTERPRETER, DeviceInfo
from ..problem import PRODUCT
from ..runtime import policies
from . import grouped, matrices, rules, scaled
from .fast_path import Known, same_storage

# Of torch._scaled_mm, by compute capability: kinds of scales, and whether sums are fast, for which committed records of
# every GPU show at least NOT_SLOWER times torch's speed.
SCALES: dict[tuple[int, int], frozenset[tuple[ScaleKind, bool]]] = {
    (9, 0): frozenset({("tensor", True)}),
}
NOT_SLOWER = 0.99
# Our speed over torch's in bf16 where groups, and an operand's unit stride, are along K (grouped.csv). In gradients of
# experts' weights neither operand's is.
K_IN_GROUPS = {(9, 0): 0.83}
# Other overloads that multiply. A torch or a device may lack some.
COUNTED = (
    *("addmv", "addmv.out", "addmv_", "addmm_", "baddbmm_", "addbmm", "_addmm_activation", "_addmm_activation.out"),
    *(f"{name}.dtype{out}" for name in ("mm", "bmm", "addmm", "baddbmm") for out in ("", "_out")),
    *("_scaled_mm_v2", "_scaled_mm_v2.out", "_scaled_grouped_mm", "_scaled_grouped_mm_v2"),
    *("_weight_int8pack_mm", "_weight_int4pack_mm", "_cslt_sparse_mm", "_sparse_semi_structured_linear"),
)

Made = tuple[torch.Tensor, Known | None]  # a result, and what later calls like this one launch


@dataclass(frozen=True)
class Product:
    """A torch operator. Arguments are positional, in the order of its schema; trailing defaults may be missing.

    dtypes: of a where it may be computed.

    auxiliary(*arguments): the tensors after a and b, in the order in which plans take them; stays(device, out,
    *arguments): why torch computes such a call, or None; compute(out, *arguments): the result, in `out` where that is
    given.
    """

    overloads: tuple[str, ...]
    dtypes: tuple[torch.dtype, ...]
    auxiliary: Callable[..., tuple[torch.Tensor, ...]]
    stays: Callable[..., str | None]
    compute: Callable[..., Made]


def _int_mm_stays(device: DeviceInfo, out: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> str | None:
    if a.dtype != torch.int8 or b.dtype != torch.int8 or a.device != b.device:
        return "dtypes or devices differ"
    if a.dim() != 2 or b.dim() != 2 or a.shape[1] != b.shape[0]:
        return "shapes do not go together"
    if a.shape[0] <= 16 or a.shape[1] % 8 or b.shape[1] % 8:
        return "torch._int_mm takes more than 16 rows, and multiples of 8"
    return _out_stays(out, (a.shape[0], b.shape[1]), torch.int32, a, b)


def _int_mm(out: torch.Tensor | None, a: torch.Tensor, b: torch.Tensor) -> Made:
    x = matrices.Operands(a, b)
    return matrices.compute(x, PRODUCT) if out is None else (out, matrices.compute_into(out, x, PRODUCT))


def _scaled_auxiliary(
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    *_: Any,
) -> tuple[torch.Tensor, ...]:
    return scaled.auxiliary_of(scale_a, scale_b, bias)


def _scaled_mm_stays(
    device: DeviceInfo,
    out: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    use_fast_accum: bool = False,
) -> str | None:
    if scale_result is not None:
        return "the result has a scale"
    if a.dtype not in SCALED or out_dtype not in scaled.SCALED_OUT_DTYPES:
        return f"{a.dtype} to {out_dtype} is not computed"
    try:
        kind, _ = scaled.check(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum)
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return _reason(error)
    if (kind, use_fast_accum) not in SCALES.get(device.capability, ()):
        return f"no record shows scales of {kind}{' with fast sums' * use_fast_accum} as fast as torch's here"
    return _out_stays(out, (a.shape[0], b.shape[1]), out_dtype, a, b, *scaled.auxiliary_of(scale_a, scale_b, bias))


def _scaled_mm(
    out: torch.Tensor | None,
    a: torch.Tensor,
    b: torch.Tensor,
    scale_a: torch.Tensor,
    scale_b: torch.Tensor,
    bias: torch.Tensor | None = None,
    scale_result: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    use_fast_accum: bool = False,
) -> Made:
    return scaled.launch(a, b, scale_a, scale_b, bias, out_dtype, use_fast_accum, out=out)


def _grouped_mm_stays(
    device: DeviceInfo,
    out: None,
    a: torch.Tensor,
    b: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> str | None:
    if bias is not None:
        return "groups have a bias"
    if a.dtype not in FLOATING or out_dtype not in (None, a.dtype):
        return f"{a.dtype} to {out_dtype} is not computed"
    try:
        rules.grouped(a, b, offs)
    except (RuntimeError, TypeError) as error:
        return _reason(error)
    speed = K_IN_GROUPS.get(device.capability)
    along_k = a.dim() == b.dim() == 2 and a.dtype is torch.bfloat16 and not a.stride(0) == b.stride(1) == 1
    if along_k and speed is not None and device != INTERPRETER and not policies.current_policy().batch_invariant:
        return f"groups along K take {1 / speed:.1f} times as long here"
    return None


def _grouped_mm(out: None, a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, *_: Any) -> Made:
    if a.dim() == 3:
        return grouped.launch(b.mT, a.mT, offs, None, PRODUCT)[0].mT, None
    return grouped.launch(a, b, offs, None, PRODUCT)


def _out_stays(
    out: torch.Tensor | None, shape: tuple[int, ...], dtype: torch.dtype | None, *operands: torch.Tensor
) -> str | None:
    if out is None:
        return None
    if out.shape != shape or out.dtype != dtype or out.is_neg():
        return "out has another shape or dtype, or is a negative view"
    if any(same_storage(x, out) for x in operands) or overlaps_itself(out):
        return "out may overlap an operand, or itself"
    return None


def _reason(error: Exception) -> str:
    """Without the name of the function."""
    return f"{error}".rpartition("(): ")[2]


PRODUCTS = {
    "_int_mm": Product(("_int_mm", "_int_mm.out"), (torch.int8,), lambda a, b: (), _int_mm_stays, _int_mm),
    "_scaled_mm": Product(("_scaled_mm", "_scaled_mm.out"), SCALED, _scaled_auxiliary, _scaled_mm_stays, _scaled_mm),
    "_grouped_mm": Product(
        ("_grouped_mm",),
        FLOATING,
        lambda a, b, offs=None, *_: () if offs is None else (offs,),
        _grouped_mm_stays,
        _grouped_mm,
    ),
}
