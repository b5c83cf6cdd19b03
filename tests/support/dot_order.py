"""In which order a `tl.dot` adds, in Triton's interpreter."""

from __future__ import annotations

import numpy as np
import pytest
from triton.runtime.interpreter import InterpreterBuilder, TensorHandle


def add_at_once(monkeypatch: pytest.MonkeyPatch, count: int) -> None:
    """The interpreter multiplies tiles by BLAS, in an order that depends on their shapes. From now on a `tl.dot` adds
    `count` products at once to what was summed before, cut off below the last bits of the largest, as tensor cores do;
    one after the other, as FMAs do."""

    def create_dot(
        self: InterpreterBuilder, a: TensorHandle, b: TensorHandle, d: TensorHandle, *_: object
    ) -> TensorHandle:
        total = d.data
        for k in range(0, a.data.shape[-1], count):
            together = slice(k, k + count)
            products = a.data[:, together, None].astype(np.float64) * b.data[None, together].astype(np.float64)
            terms = np.concatenate([total[:, None], products], 1)
            if count > 1:
                unit = np.ldexp(1.0, np.frexp(np.abs(terms).max(1, keepdims=True))[1] - 25)
                terms = np.trunc(terms / unit) * unit
            total = terms.sum(1).astype(d.data.dtype)
        return TensorHandle(total, d.dtype.scalar)

    monkeypatch.setattr(InterpreterBuilder, "create_dot", create_dot)
