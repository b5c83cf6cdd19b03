"""Tiles of matrices in memory: their vectors and pointers, and how sums go through the epilogue to C."""

from __future__ import annotations

from math import gcd
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from ..compat import number, round_to
from ..problem import Layout
from .epilogue import after_activation, before_activation, scaled, scaled_once


def vector(layout: Layout, shape: tuple[int, int], dtype: torch.dtype) -> tuple[int | None, int]:
    """(dimension with the unit stride, or None; elements that may be moved at once along it, up to 16 bytes).

    Such a vector starts on a multiple of its own size in every row of every matrix, and none crosses a row's end.
    """
    batch, row, column = layout.strides
    if column == 1:
        unit, pitch, extent = 1, row, shape[1]
    elif row == 1:
        unit, pitch, extent = 0, column, shape[0]
    else:
        return None, 1
    return unit, gcd(batch, pitch, extent, 16 // dtype.itemsize) if layout.aligned else 1


@triton.jit
def whole(x, VECTOR: tl.constexpr):
    """x, a multiple of VECTOR, written so that the compiler sees that it is one."""
    return x // VECTOR * VECTOR


@triton.jit
def tile_pointers(ptr, rows, columns, stride_row, stride_column, UNIT: tl.constexpr, VECTOR: tl.constexpr):
    """ptr[rows, columns] of a matrix whose dimension UNIT (0, 1 or None) has stride 1 and the other a multiple of
    VECTOR. All offsets are 64-bit: strides may span more than 2^31 elements."""
    if UNIT == 0:
        return ptr + rows[:, None] + columns[None, :] * whole(stride_column, VECTOR)
    elif UNIT == 1:
        return ptr + rows[:, None] * whole(stride_row, VECTOR) + columns[None, :]
    else:
        return ptr + rows[:, None] * stride_row + columns[None, :] * stride_column


class Output(NamedTuple):
    """Where a kernel's sums go: a matrix of C, inside [M, N]; and what its epilogue reads. What it does not read may be
    None. preactivation_ptr: None, or where what the activation is applied to goes, which lies as C does; start: of its
    matrix, in elements."""

    c_ptr: Any
    M: Any
    N: Any
    stride_m: Any
    stride_n: Any
    bias_ptr: Any
    stride_bias: Any
    a_scale_ptr: Any
    b_scale_ptr: Any
    alpha: Any
    beta: Any
    preactivation_ptr: Any
    start: Any


class Epilogue(NamedTuple):
    """Constants of `store_tile`. UNIT, VECTOR: of C, as for `tile_pointers`; C's size along UNIT must be a multiple of
    VECTOR, too, and 1 is always right. SCALES, BIAS, ACTIVATION: GemmProblem's words, or None."""

    UNIT: Any
    VECTOR: Any
    SCALES: Any
    HAS_BETA: Any
    BIAS: Any
    ACTIVATION: Any


@triton.jit
def in_c(offs_m, offs_n, out, UNIT: tl.constexpr, VECTOR: tl.constexpr):
    """Which of the rows, and which of the columns, are inside [M, N]."""
    mask_m = offs_m < whole(out.M, VECTOR if UNIT == 0 else 1)
    mask_n = offs_n < whole(out.N, VECTOR if UNIT == 1 else 1)
    return mask_m, mask_n


@triton.jit
def store_tile(acc, offs_m, offs_n, out, epi):
    """c[offs_m, offs_n] = activation(alpha acc + beta c + bias), inside [M, N] and rounded once; acc scaled before.

    out: Output; epi: Epilogue, to be made in the call, as a variable's constants would become tensors.
    """
    mask_m, mask_n = in_c(offs_m, offs_n, out, epi.UNIT, epi.VECTOR)
    mask = mask_m[:, None] & mask_n[None, :]
    c_ptrs = tile_pointers(out.c_ptr, offs_m, offs_n, out.stride_m, out.stride_n, epi.UNIT, epi.VECTOR)
    c = tl.load(c_ptrs, mask=mask, other=0.0) if epi.HAS_BETA else 0.0
    bias = 0.0
    if epi.BIAS == "m":
        bias = tl.load(out.bias_ptr + offs_m * out.stride_bias, mask=mask_m, other=0.0)[:, None]
    elif epi.BIAS == "n":
        bias = tl.load(out.bias_ptr + offs_n * out.stride_bias, mask=mask_n, other=0.0)[None, :]
    if epi.SCALES == "rows":
        a_scale = tl.load(out.a_scale_ptr + offs_m, mask=offs_m < out.M, other=0.0)
        b_scale = tl.load(out.b_scale_ptr + offs_n, mask=offs_n < out.N, other=0.0)
        acc = scaled(acc, a_scale[:, None], b_scale[None, :])
    elif epi.SCALES == "tensor":
        acc, power = scaled_once(acc, tl.load(out.a_scale_ptr), tl.load(out.b_scale_ptr))
    alpha, beta = number(out.alpha, acc.dtype), number(out.beta, acc.dtype)
    if epi.SCALES == "tensor":
        alpha = alpha * power
    acc = before_activation(acc, alpha, beta, c, bias, epi.HAS_BETA, epi.BIAS is not None)
    if out.preactivation_ptr is not None:
        store_beside(acc, out.preactivation_ptr, offs_m, offs_n, mask, out, epi.UNIT, epi.VECTOR)
    result = after_activation(acc, beta, c, epi.HAS_BETA, epi.ACTIVATION)
    tl.store(c_ptrs, round_to(result, out.c_ptr.dtype.element_ty), mask=mask)


@triton.jit
def store_beside(x, ptr, offs_m, offs_n, mask, out, UNIT: tl.constexpr, VECTOR: tl.constexpr):
    """Stores x where C has [offs_m, offs_n], rounded as C is, in the matrices at ptr, which lie as C does."""
    ptrs = tile_pointers(ptr + out.start, offs_m, offs_n, out.stride_m, out.stride_n, UNIT, VECTOR)
    tl.store(ptrs, round_to(x, out.c_ptr.dtype.element_ty), mask=mask)
