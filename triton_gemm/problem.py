"""GemmProblem: one multiplication as plain values, and what makes operands a problem or not."""

from __future__ import annotations

from dataclasses import dataclass

import torch


class UnsupportedOperandError(ValueError):
    """A kernel cannot take these operands as they lie in memory; the text says which and why."""


@dataclass(frozen=True)
class GemmProblem:
    """c [M, N] = a [M, K] @ b [K, N], as far as the choice of a kernel depends on it.

    dtype: the operands'; precision: "ieee", "tf32" or "half" (16-bit operands, fp32 accumulation);
    aligned: whether all three can be moved 16 bytes at a time; tma: why TMA cannot move them in place, or None if
    it can.
    """

    M: int
    N: int
    K: int
    dtype: torch.dtype
    precision: str
    aligned: bool
    tma: str | None

    @classmethod
    def of(cls, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> GemmProblem:
        """The problem of multiplying a and b into c; fp32's precision is the one set in torch."""
        (M, K), N = a.shape, b.shape[1]
        precision = fp32_precision() if a.dtype == torch.float32 else "half"
        return cls(M, N, K, a.dtype, precision, aligned(a, b, c), tma_operands_illegal(a, b, c))


def fp32_precision() -> str:
    """ "tf32" where torch allows it for CUDA's matmul, else "ieee".

    Only the new setting is read: once it is set, torch raises on reading `allow_tf32`.
    """
    return "tf32" if torch.backends.cuda.matmul.fp32_precision == "tf32" else "ieee"


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether Triton sees that every row of the tensors can be moved 16 bytes at a time.

    It looks whether addresses, sizes and strides are multiples of 16 (runtime/jit.py, `specialize_impl`).
    """
    return all(
        x.data_ptr() % 16 == 0
        and all(size % 16 == 0 for size in x.shape)
        and all(s == 1 or s % 16 == 0 for s in x.stride())
        for x in tensors
    )


def tma_illegal(x: torch.Tensor) -> str | None:
    """Why TMA cannot read x [rows, columns] in place, or None if it can.

    CUDA driver API, cuTensorMapEncodeTiled: a base on 16 bytes, a unit stride, the other stride a positive
    multiple of 16 bytes below 2^40.
    """
    if x.data_ptr() % 16:
        return "its first element is not aligned to 16 bytes"
    if 1 not in x.stride():
        return f"neither of its strides {tuple(x.stride())} is 1"
    pitch = x.stride(0 if x.stride(1) == 1 else 1) * x.element_size()
    if pitch % 16 or not 0 < pitch < 2**40:
        return f"its rows are {pitch} bytes apart, not a positive multiple of 16"
    return None


def column_major(x: torch.Tensor) -> bool:
    """Whether x's unit stride runs down the columns."""
    return x.stride(1) != 1


def tma_operands_illegal(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str | None:
    """Why TMA cannot take a product's operands and its row-major result in place, or None if it can."""
    for name, x in (("a", a), ("b", b), ("c", c)):
        why = tma_illegal(x)
        if why is None and name == "c" and column_major(x):
            why = "it is column-major"
        if why is None and name == "c" and x.shape[1] * x.element_size() % 16:
            why = "its rows end inside 16 bytes, and TMA stores no less (triton#11583)"
        if why is not None:
            return f"{name} {tuple(x.shape)}: {why}"
    return None
