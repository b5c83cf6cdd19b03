"""Prefetches into L2, of lines that a TMA load or store will want soon."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from ...compat import prefetch
from .cluster import rank
from .ring import instruction_k
from .work import item_of


@gluon.jit
def prefetch_tile(
    x_ptr, desc, batch, row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COLUMN_MAJOR: gl.constexpr
):
    """Prefetches ROWS x COLUMNS of X at (row, column)."""
    first = column if COLUMN_MAJOR else row
    second = row if COLUMN_MAJOR else column
    fetched: gl.constexpr = 2 * instruction_k(desc.dtype)  # elements in 64 bytes
    count: gl.constexpr = max((ROWS if COLUMN_MAJOR else COLUMNS) // fetched, 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    rows = first + gl.arange(0, COLUMNS if COLUMN_MAJOR else ROWS, gl.SliceLayout(1, layout))
    columns = second + gl.arange(0, count, gl.SliceLayout(0, layout)) * fetched
    x_ptr += batch.to(gl.int64) * desc.strides[0]
    offsets = gl.minimum(rows, desc.shape[1] - 1).to(gl.int64)[:, None] * desc.strides[1]
    prefetch(x_ptr + offsets + gl.minimum(columns, desc.shape[2] - 1)[None, :])


@gluon.jit
def prefetch_first_k_tiles(inputs, work, config):
    """Prefetches this program's first two k-tiles, of those that a cluster shares a part. That reads nothing the grid
    before may still write: a line of L2 that is written later is written there."""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    MAIN_N: gl.constexpr = config.MAIN_N
    ROWS_HERE: gl.constexpr = ROWS // config.CLUSTER_N
    MAIN_HERE: gl.constexpr = MAIN_N // config.CLUSTER_M
    TAIL_HERE: gl.constexpr = config.TAIL_N // config.CLUSTER_M
    TWO_K: gl.constexpr = 2 * config.BLOCK_K
    item = item_of(work, gl.program_id(0), inputs.M, config)
    k = item.k_begin * config.BLOCK_K
    batch_a = item.batch * inputs.a_batches + (config.A_PLANES & 3)
    batch_b = item.batch * inputs.b_batches + (config.B_PLANES & 3)
    row = item.m
    n = item.n
    if config.CLUSTER_N > 1:
        row += rank(config) // config.CLUSTER_M * ROWS_HERE
    if config.CLUSTER_M > 1:
        n += rank(config) % config.CLUSTER_M * MAIN_HERE
    for w in gl.static_range(config.CONSUMERS):
        prefetch_tile(inputs.a_ptr, inputs.a_desc, batch_a, row + w * ROWS, k, ROWS_HERE, TWO_K, config.A_COLUMN_MAJOR)
    prefetch_tile(inputs.b_ptr, inputs.b_desc, batch_b, k, n, TWO_K, MAIN_HERE, config.B_COLUMN_MAJOR)
    if config.TAIL_N and not config.GATE:
        tail = item.n + MAIN_N
        if config.CLUSTER_M > 1:
            tail += rank(config) % config.CLUSTER_M * TAIL_HERE
        prefetch_tile(inputs.b_ptr, inputs.b_desc, batch_b, k, tail, TWO_K, TAIL_HERE, config.B_COLUMN_MAJOR)
