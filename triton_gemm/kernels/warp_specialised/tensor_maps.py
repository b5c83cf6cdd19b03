"""Tensor maps of the operands, and the boxes of them that one copy moves."""

from __future__ import annotations

import torch

from ...problem import Layout
from ..launch import TensorMap
from .cluster import slice_rows


def tensor_map(
    operand: str,
    layout: Layout,
    dtype: torch.dtype,
    batch: int,
    rows: int,
    columns: int,
    block_rows: int,
    block_columns: int,
    planes: int = 1,
    to_tf32: bool = False,
    copied_rows: int = 0,
    sharing: int = 1,
) -> TensorMap:
    """The map of [batch, rows, columns] matrices; of their transposes where the unit stride runs down the columns.
    Each matrix may be several, its planes. copied_rows: of a copy in place of the block's; sharing: how many CTAs of a
    cluster share them, and load a slice each."""
    step, row, column = layout.strides
    if layout.column_major:
        rows, columns, row, block_rows, block_columns = columns, rows, column, block_columns, block_rows
    count = planes * batch if step else planes
    step = step // planes or rows * row
    return TensorMap(
        operand=operand,
        dtype=dtype,
        shape=(count, rows, columns),
        strides=(step, row, 1),
        block=(1, block_rows, block_columns),
        to_tf32=to_tf32,
        rows=slice_rows(copied_rows or block_rows, sharing) if copied_rows or sharing > 1 else None,
    )
