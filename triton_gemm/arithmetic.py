"""What can be multiplied, and how: one table, `ARITHMETICS`, which checks, selection, kernels and error bounds use.

A new dtype, or a new way to multiply one, is a record here and the kernels that can multiply it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import torch

# How fp32 may be multiplied, for `precision=` (docs/precision.md).
Precision = Literal["ieee", "tf32", "bf16x3", "bf16x6", "bf16x9", "tf32x3"]
MODES: tuple[Precision, ...] = get_args(Precision)

# What scales may multiply: all of an operand, its rows (of B: columns), or blocks of 1 x 128 of A and 128 x 128 of B.
ScaleKind = Literal["tensor", "rows", "blocks"]

# "mma": tensor cores, by Hopper's wgmma and other architectures' mma; "dmma": tensor cores for fp64, where a GPU has
# them at more than FMA's speed; "fma": CUDA cores.
Instruction = Literal["mma", "dmma", "fma"]


@dataclass(frozen=True)
class Planes:
    """Operands as sums of planes."""

    dtype: torch.dtype  # of a plane; fp32 for tf32
    count: int  # planes of each operand
    # Of A and of B: planes that are multiplied, in the order in which the products are added.
    terms: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Arithmetic:
    """One way to multiply matrices."""

    name: str  # what `GemmProblem.precision` calls it; for fp32 one of MODES
    dtypes: tuple[torch.dtype, ...]  # of operands; a dtype's default is its first record in the table
    accumulator: torch.dtype = torch.float32  # dtype of sums
    instruction: Instruction = "mma"  # what multiplies
    capability: tuple[int, int] = (8, 0)  # the oldest compute capability that has it: (major, minor)
    plain: bool = True  # whether operands may come without scales
    scales: tuple[ScaleKind, ...] = ()  # kinds of scales that operands may have
    out_dtype: torch.dtype | None = None  # C's by default; None: the operands'
    out_dtypes: tuple[torch.dtype, ...] = ()  # others that C may have
    planes: Planes | None = None  # what each operand is split into; None: it is multiplied as it is
    # Bytes of an operand along K after which sums leave the tensor cores and are added in fp32, because tensor cores
    # cut off the last bits of a sum. None: they stay.
    promotion: int | None = None
    # K from which sums of integers may leave the accumulator, where `mma` saturates. From there on sums of k-tiles are
    # added outside of the tensor cores, which wraps.
    exact_below: int | None = None
    torch_setting: str | None = None  # value of torch's fp32_precision settings that means it
    # Relative error of an operand as it is multiplied, for the largest error of a product of planes.
    operand_error: float = 0.0
    cut: float = 0.0  # relative error of each product that tensor cores sum, beyond the accumulator's rounding

    def tensor_cores(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of this compute capability multiplies on tensor cores."""
        return capability in ((8, 0), (9, 0)) if self.instruction == "dmma" else self.instruction == "mma"

    @property
    def unit(self) -> str:
        """What multiplies, as data sheets tell their peaks apart: "ieee", "tf32", "half", "fp64", "fp8" or "int8"."""
        if self.planes:
            return "half" if self.planes.dtype == torch.bfloat16 else "tf32"
        return self.name.removesuffix(" fast")

    @property
    def k_major(self) -> bool:
        """Whether wgmma reads operands in shared memory K-major only: all but those of 16 bits."""
        dtype = self.planes.dtype if self.planes else self.dtypes[0]
        return self.instruction == "mma" and dtype.itemsize != 2

    @property
    def exact(self) -> bool:
        """Whether sums are not rounded."""
        return not self.accumulator.is_floating_point

    @property
    def unit_roundoff(self) -> float:
        """Half the spacing of the accumulator's numbers at 1; 0 where sums are exact."""
        return 0.0 if self.exact else torch.finfo(self.accumulator).eps / 2

    def promotes(self, K: int) -> bool:
        """Whether sums of k-tiles are promoted: added outside of the tensor cores."""
        return self.promotion is not None or (self.exact_below is not None and self.exact_below <= K)


def _planes(name: str, dtype: torch.dtype, count: int, smallest: int, operand_error: float) -> Arithmetic:
    """fp32 as sums of planes: matrices of few bits, every one what rounding leaves over from those before it, so that
    three planes of bf16's 8 bits hold fp32's 24. Products of planes i and j, which are as many times smaller as i + j
    says, are added up to `smallest`, the smallest first. The scheme is that of Henry, Tang and Heinecke (Leveraging the
    bfloat16 Artificial Intelligence Datatype For Higher-Precision Computations, ARITH 2019)."""
    terms = [(i, j) for i in range(count) for j in range(count) if i + j <= smallest]
    planes = Planes(dtype, count, tuple(sorted(terms, key=lambda term: (-sum(term), term))))
    return Arithmetic(name, (torch.float32,), planes=planes, promotion=128, operand_error=operand_error)


# What Hopper's tensor cores cut off, for each product of fp8 that they add: they keep 13 bits of a sum's fraction.
_FP8_CUT = 1.07 * 2.0**-13
_FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)

IEEE = Arithmetic("ieee", (torch.float32,), instruction="fma", torch_setting="ieee")
TF32 = Arithmetic(
    "tf32", (torch.float32,), torch_setting="tf32", operand_error=2.0**-11
)  # operands are rounded to nearest
HALF = Arithmetic("half", (torch.float16, torch.bfloat16), out_dtypes=(torch.float32,))
FP64 = Arithmetic("fp64", (torch.float64,), torch.float64, instruction="dmma")
FP8 = Arithmetic(
    "fp8", _FP8, capability=(8, 9), plain=False, scales=("tensor", "rows", "blocks"), promotion=128, cut=_FP8_CUT
)
FP8_FAST = Arithmetic("fp8 fast", _FP8, capability=(8, 9), plain=False, scales=("tensor", "rows"), cut=_FP8_CUT)
INT8 = Arithmetic(
    "int8", (torch.int8,), torch.int32, scales=("tensor", "rows"), out_dtype=torch.int32, exact_below=2**17
)

ARITHMETICS: dict[str, Arithmetic] = {
    arithmetic.name: arithmetic
    for arithmetic in (
        *(IEEE, TF32),
        # Half of what the planes leave out of both operands, and the products of planes that are not taken.
        _planes("bf16x3", torch.bfloat16, 2, 1, 1.5 * 2.0**-16),
        _planes("bf16x6", torch.bfloat16, 3, 2, 2.1 * 2.0**-24),
        _planes("bf16x9", torch.bfloat16, 3, 4, 2.0**-24),
        _planes("tf32x3", torch.float32, 2, 1, 1.5 * 2.0**-22),
        *(HALF, FP64, FP8, FP8_FAST, INT8),
    )
}
EMULATED = {name: found.planes for name, found in ARITHMETICS.items() if found.planes}


def _dtypes(plain: bool = False, scaled: bool = False) -> tuple[torch.dtype, ...]:
    """Those of all operands that may come without scales, or with."""
    found = [x for x in ARITHMETICS.values() if (plain and x.plain) or (scaled and x.scales)]
    return tuple(dict.fromkeys(dtype for x in found for dtype in x.dtypes))


DTYPES = _dtypes(plain=True)
FLOATING = tuple(dtype for dtype in DTYPES if dtype.is_floating_point)  # that have an epilogue and derivatives
SCALED = _dtypes(scaled=True)

_DEFAULTS = {dtype: found for found in reversed(ARITHMETICS.values()) for dtype in found.dtypes}


def default_arithmetic(dtype: torch.dtype) -> Arithmetic:
    """What operands of `dtype` are multiplied in by default: fp32 as torch is set, fp8 with promotion.
    KeyError for others."""
    return ARITHMETICS[fp32_precision()] if dtype == torch.float32 else _DEFAULTS[dtype]


def scaled_arithmetic(dtype: torch.dtype, use_fast_accum: bool) -> Arithmetic:
    """The same of operands with scales. use_fast_accum: without promotion, where there is a way without."""
    found = (x for x in ARITHMETICS.values() if dtype in x.dtypes and x.scales and x.promotion is None)
    return (next(found, None) if use_fast_accum else None) or default_arithmetic(dtype)


def result_dtype(dtype: torch.dtype) -> torch.dtype:
    """C's dtype of operands of `dtype` by default."""
    found = _DEFAULTS.get(dtype)
    return (found and found.out_dtype) or dtype


SHORT_NAMES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.float64: "fp64"}
SHORT_NAMES |= {torch.int8: "int8", torch.float8_e4m3fn: "fp8", torch.float8_e5m2: "fp8-e5m2"}


def name_of(dtype: torch.dtype) -> str:
    """As "bfloat16"."""
    return str(dtype).removeprefix("torch.")


def fp32_precision() -> str:
    """ "tf32" where torch allows it for CUDA's matmul, else "ieee".

    Only the new setting is read: once it is set, torch raises on reading `allow_tf32`.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"
