"""How products of fp32 matrices may be computed: the modes of `matmul(precision=)`, as plain values.

A mode with several planes writes each operand as a sum of matrices of few bits, every one what rounding leaves over
from those before it, and adds the products of planes that count, the smallest first: with bf16's 8 bits three planes
hold fp32's 24. The scheme is that of the bf16x3, x6 and x9 modes of Henry, Tang and Heinecke (Leveraging the bfloat16
Artificial Intelligence Datatype For Higher-Precision Computations, ARITH 2019).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

# How fp32 may be multiplied, for `precision=` (docs/precision.md).
Precision = Literal["ieee", "tf32", "bf16x3", "bf16x6", "bf16x9", "tf32x3"]
MODES: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class Planes:
    """Operands as sums of planes. dtype: theirs, fp32 for tf32; count: of each operand; terms: the planes of A and of
    B that are multiplied, in the order in which the products are added."""

    dtype: torch.dtype
    count: int
    terms: tuple[tuple[int, int], ...]


def _terms(count: int, smallest: int) -> tuple[tuple[int, int], ...]:
    """Products of planes i and j, as many times smaller than the whole as i + j says, up to `smallest`."""
    found = [(i, j) for i in range(count) for j in range(count) if i + j <= smallest]
    return tuple(sorted(found, key=lambda term: (-sum(term), term)))


SPLIT = {
    "bf16x3": Planes(torch.bfloat16, 2, _terms(2, 1)),
    "bf16x6": Planes(torch.bfloat16, 3, _terms(3, 2)),
    "bf16x9": Planes(torch.bfloat16, 3, _terms(3, 4)),
    "tf32x3": Planes(torch.float32, 2, _terms(2, 1)),
}
FP8_DTYPES = (torch.float8_e4m3fn, torch.float8_e5m2)


def default_precision(dtype: torch.dtype) -> str:
    """How operands of `dtype` are multiplied where nothing else is asked for: fp32 as torch is set; "fp8", summed in
    fp32 every 128 of K ("fp8 fast" leaves sums to the tensor cores); "int8", summed in int32; "fp64"; "half"."""
    if dtype == torch.float32:
        return fp32_precision()
    if dtype in FP8_DTYPES:
        return "fp8"
    return {torch.int8: "int8", torch.float64: "fp64"}.get(dtype, "half")


def fp32_precision() -> str:
    """ "tf32" where torch allows it for CUDA's matmul, else "ieee".

    Only the new setting is read: once it is set, torch raises on reading `allow_tf32`.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
