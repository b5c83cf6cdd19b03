"""Matrices that tell a true product from a clever one; with random normal numbers alone most mistakes go unseen.

N. J. Higham, Accuracy and Stability of Numerical Algorithms (2002), chapter 3, has the bounds that they are held to.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from perf.measure.numerics import ARITHMETIC

Draw = Callable[["Drawing"], tuple[torch.Tensor, torch.Tensor]]

# Powers of two by which numbers are spread, so that neither they nor sums of their products leave the dtype's range.
SPREAD = {
    torch.float64: 100,
    torch.float32: 20,
    torch.bfloat16: 20,
    torch.float16: 4,
    torch.float8_e4m3fn: 3,
    torch.float8_e5m2: 6,
}


@dataclass(frozen=True)
class Drawing:
    """What a pair of matrices is drawn for: A [M, K] and B [K, N] of `dtype`, to be multiplied in `mode`."""

    M: int
    N: int
    K: int
    dtype: torch.dtype
    mode: str
    generator: torch.Generator

    def normal(self, rows: int, columns: int) -> torch.Tensor:
        device = self.generator.device
        return torch.randn(rows, columns, generator=self.generator, device=device, dtype=torch.float64)

    def integers(self, least: int, most: int, rows: int, columns: int) -> torch.Tensor:
        """From least to most."""
        device = self.generator.device
        return torch.randint(least, most + 1, (rows, columns), generator=self.generator, device=device).double()

    def ones(self, rows: int, columns: int, *, in_rows: bool) -> torch.Tensor:
        """A one in each row, or in each column, in a random place, and zeros."""
        if not in_rows:
            return self.ones(columns, rows, in_rows=True).mT
        where = self.integers(0, columns - 1, rows, 1).long()
        return torch.zeros(rows, columns, dtype=torch.float64, device=where.device).scatter_(1, where, 1.0)


@dataclass(frozen=True)
class Input:
    """draw: the matrices, in fp64, to be rounded to the operands' dtype; exact: whether the result is the true one,
    rounded once; floating: whether integers have no such matrices; infinite: whether the dtype must have infinities;
    few_bits: whether values must be those that the mode keeps whole."""

    draw: Draw
    exact: bool = False
    floating: bool = True
    infinite: bool = False
    few_bits: bool = False

    def fits(self, dtype: torch.dtype) -> bool:
        if not dtype.is_floating_point:
            return not self.floating
        return not (self.infinite and dtype == torch.float8_e4m3fn)

    def matrices(self, drawing: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
        """A and B in the operands' dtype."""
        a, b = (_to(x, drawing.dtype) for x in self.draw(drawing))
        return (_kept_whole(a, drawing.mode), _kept_whole(b, drawing.mode)) if self.few_bits else (a, b)


def _to(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if dtype.itemsize > 1 else x.float().to(dtype)


def _kept_whole(x: torch.Tensor, mode: str) -> torch.Tensor:
    """x without the bits that the mode's operands lose: tf32's ten of the mantissa, bf16x3's sixteen of all."""
    mask = {"tf32": ~0x1FFF, "tf32x3": ~0x1FFF, "bf16x3": ~0xFF}.get(mode)
    return x if mask is None else (x.contiguous().view(torch.int32) & mask).view(torch.float32)


def _normal(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    return x.normal(x.M, x.K), x.normal(x.K, x.N)


def _positive(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _normal(x)
    too_long = (x.K - 1).bit_length() - 14 if x.dtype == torch.float16 else 0  # for sums below fp16's 65504
    return a.abs(), b.abs() * 2.0 ** -max(0, too_long)


def _wide(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    (a, b), most = _normal(x), SPREAD[x.dtype]
    return a * 2 ** x.integers(-most, most, x.M, x.K), b * 2 ** x.integers(-most, most, x.K, x.N)


def _graded(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    a, b = _normal(x)
    grades = torch.linspace(-1, 1, x.K, dtype=torch.float64, device=a.device) * SPREAD[x.dtype]
    return a * 2**-grades, b * 2 ** grades[:, None]


def _cancelling(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """[X, -X] and [Y; Y and its last bit]: what is left is as small as rounding."""
    half = -(-x.K // 2)
    left, right = x.normal(x.M, half), x.normal(half, x.N)
    right = _to(right, x.dtype).double()
    a = torch.cat([left, -left], 1)[:, : x.K]
    return a, torch.cat([right, right * (1 + torch.finfo(x.dtype).eps)])[: x.K]


def _denormal(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """Numbers below the smallest normal one, each multiplied by one."""
    a = x.normal(x.M, x.K).clamp(-1, 1) * torch.finfo(x.dtype).smallest_normal
    return a, x.ones(x.K, x.N, in_rows=False)


def _integers(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """So small that no partial sum leaves the accumulator's bits: 14 of fp8's, 24 of fp32's."""
    if not x.dtype.is_floating_point:
        return x.integers(-128, 127, x.M, x.K), x.integers(-128, 127, x.K, x.N)
    most = 3 if x.dtype.itemsize == 1 or x.K > 10_000 else 6
    return x.integers(-most, most, x.M, x.K), x.integers(-most, most, x.K, x.N)


def _bits(x: Drawing, rows: int, columns: int) -> torch.Tensor:
    """Random numbers, and in every row and column the largest, the smallest normal one negated, and one below; of
    integers all there are."""
    if not x.dtype.is_floating_point:
        return x.integers(-128, 127, rows, columns)
    found, limits = _to(x.normal(rows, columns), x.dtype).double(), torch.finfo(x.dtype)
    device = found.device
    diagonal = (torch.arange(rows, device=device)[:, None] + torch.arange(columns, device=device)) % 7
    if x.mode not in ("tf32x3", "bf16x3", "tf32"):  # whose planes are larger than the largest
        found[diagonal == 0] = limits.max
    found[diagonal == 2] = -limits.tiny
    if not _flushed(x):
        found[diagonal == 4] = limits.smallest_normal / 4
    return found


def _flushed(x: Drawing) -> bool:
    """Whether numbers below the smallest normal one are lost: only by NumPy's casts to bf16, in the interpreter."""
    planes = ARITHMETIC[x.mode].planes
    return x.generator.device.type == "cpu" and torch.bfloat16 in (x.dtype, planes and planes.dtype)


def _one_hot_rows(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    return x.ones(x.M, x.K, in_rows=True), _bits(x, x.K, x.N)


def _one_hot_columns(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    return _bits(x, x.M, x.K), x.ones(x.K, x.N, in_rows=False)


def _nan(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """In the first k of a row, the last of another, and amid a column of B."""
    a, b = _normal(x)
    a[x.M // 2, 0] = a[x.M - 1, x.K - 1] = torch.nan
    if x.N > 2:
        b[x.K // 2, x.N // 3] = torch.nan
    return a, b


def _infinite(x: Drawing) -> tuple[torch.Tensor, torch.Tensor]:
    """Infinities times finite numbers and times zero, and two of opposite signs in one sum."""
    a, b = _normal(x)
    a[x.M // 2, 0], a[0, x.K - 1] = torch.inf, -torch.inf
    if x.M > 2:
        a[x.M - 1, 1 % x.K], a[x.M - 1, x.K // 2] = torch.inf, -torch.inf
    b[0, x.N // 2] = 0
    if x.N > 2:
        b[x.K // 2, x.N - 1] = -torch.inf
    return a, b


INPUTS: dict[str, Input] = {
    "normal": Input(_normal),
    "positive": Input(_positive),  # errors add up
    "wide": Input(_wide),  # powers of two
    "graded": Input(_graded),  # columns of A get smaller as rows of B get larger
    "cancelling": Input(_cancelling),  # the last bits of sums are left
    "denormal": Input(_denormal),
    "integers": Input(_integers, exact=True, floating=False),
    "one-hot A": Input(_one_hot_rows, exact=True, floating=False, few_bits=True),  # copies of B's rows, bit for bit
    "one-hot B": Input(_one_hot_columns, exact=True, floating=False, few_bits=True),  # copies of A's columns
    "NaN": Input(_nan),  # in A's rows and a column of B, and nowhere else
    "infinity": Input(_infinite, infinite=True),  # and NaN, where IEEE arithmetic puts them
}
ERRORS = ("normal", "positive", "wide", "graded", "cancelling", "denormal")
LONG = ("normal", "positive", "integers", "NaN")  # of very long sums


def drawn(name: str, drawing: Drawing) -> tuple[torch.Tensor, torch.Tensor] | None:
    """The matrices INPUTS[name], or None where the dtype has none, or the interpreter would lose them."""
    found = INPUTS[name]
    if not found.fits(drawing.dtype) or (name == "denormal" and _flushed(drawing)):
        return None
    return found.matrices(drawing)
