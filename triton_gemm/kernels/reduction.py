"""The second launch of a product whose K is split: adds up the partial sums that the first left in memory, and has the
epilogue (CUTLASS's parallel split-K; cuBLAS's `splitKreduce`).

Where a few tiles have many parts, as with a long K, adding them up is slow for the program that owns a tile. It alone
reads what all others stored, as fast as one SM does. Here all SMs add. That costs a launch, whose start programmatic
launches hide under the end of the one before. It also costs a store of each tile's first part, which an owner keeps in
registers.

Parts are added from the lowest k to the highest, as an owner adds them, so that both give the same bits.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..problem import GemmProblem, Layout, round_up
from .launch import Launch, Pointer, Scalar, Temporary
from .programmatic import follow
from .tiles import Epilogue, Output, store_tile, tile_pointers, vector, whole

VECTOR = 4  # partial sums that a thread reads at once: 16 bytes
NUM_WARPS = 1
MOST_AT_ONCE = 32  # parts that a thread reads before it adds them, which take half of its registers
ELEMENTS = VECTOR * 32 * NUM_WARPS  # of a program: so few that C of a single tile keeps many SMs busy


@triton.jit(do_not_specialize=["M", "N", "parts", "stride_part", "alpha", "beta"])
def reduction_kernel(
    sums_ptr,
    c_ptr,
    bias_ptr,
    preactivation_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M: tl.int32,
    N: tl.int32,
    parts: tl.int32,
    stride_part: tl.int64,
    stride_sb: tl.int64,
    stride_sm: tl.int64,
    stride_sn: tl.int64,
    stride_cb: tl.int64,
    stride_cm: tl.int64,
    stride_cn: tl.int64,
    alpha,
    beta,
    SUMS_UNIT: tl.constexpr,
    SUMS_VECTOR: tl.constexpr,
    AT_ONCE: tl.constexpr,
    C_UNIT: tl.constexpr,
    C_VECTOR: tl.constexpr,
    SCALES: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """c [batch, M, N] = activation(alpha s + beta c + bias), where s is the sum of sums [parts, batch, M, N] over its
    parts. A thread loads AT_ONCE of them before it adds them. SUMS_UNIT, C_UNIT: 0 or 1, the dimension of a matrix
    with stride 1 (C's may be None); SUMS_VECTOR: what the rows of sums have room for a multiple of."""
    # Locate the tile
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (num_m * num_n)).to(tl.int64)
    offs_m = (pid % (num_m * num_n) // num_n).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = (pid % num_n).to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    rows = tl.cdiv(M, SUMS_VECTOR) * SUMS_VECTOR if SUMS_UNIT == 0 else M
    columns = tl.cdiv(N, SUMS_VECTOR) * SUMS_VECTOR if SUMS_UNIT == 1 else N
    mask = (offs_m < rows)[:, None] & (offs_n < columns)[None, :]
    sums_ptr += batch * whole(stride_sb, SUMS_VECTOR)
    pointers = tile_pointers(sums_ptr, offs_m, offs_n, stride_sm, stride_sn, SUMS_UNIT, SUMS_VECTOR)
    stride_part = whole(stride_part, SUMS_VECTOR)
    follow(PDL)

    # Add the parts
    acc = tl.load(pointers, mask=mask, other=0.0, cache_modifier=".cg")
    for first in range(1, parts, AT_ONCE):
        for i in tl.static_range(AT_ONCE):
            more = tl.load(
                pointers + (first + i) * stride_part,
                mask=mask & (first + i < parts),
                other=0.0,
                cache_modifier=".cg",
            )
            acc += more

    # Epilogue
    start = batch * stride_cb
    out = Output(
        c_ptr + start, M, N, stride_cm, stride_cn, bias_ptr, 1, a_scale_ptr, b_scale_ptr, alpha, beta,
        preactivation_ptr, start,
    )  # fmt: skip
    store_tile(acc, offs_m, offs_n, out, Epilogue(C_UNIT, C_VECTOR, SCALES, HAS_BETA, BIAS, ACTIVATION))


def parts_of(problem: GemmProblem) -> GemmProblem:
    """The first launch's problem. Its C are fp32 sums, a matrix for each part and product of a batch. Their rows, or
    columns where C is column-major, begin on 16 bytes. Scales of blocks are of the sums, all else comes later."""
    M, N = problem.M, problem.N
    if problem.c.column_major:
        pitch = round_up(M, VECTOR)
        c = Layout((N * pitch, 1, pitch))
    else:
        pitch = round_up(N, VECTOR)
        c = Layout((M * pitch, pitch, 1))
    scales = problem.scales if problem.scales == "blocks" else None
    alone = replace(problem, has_beta=False, residual=False, bias=None, activation=None, preactivation=False)
    return replace(alone, scales=scales, c=c, out_dtype=torch.float32)


def sums_of(problem: GemmProblem, parts: int) -> Temporary:
    """What the first launch writes and the second reads: a call's own memory, as another thread's first launch on the
    same stream may come between them."""
    return Temporary("sums", (parts, problem.batch, parts_of(problem).c.strides[0]), torch.float32)


def launch(problem: GemmProblem, parts: int) -> Launch:
    """The launch that adds up the parts of `problem` that are in `sums_of` it."""
    sums = parts_of(problem).c
    unit = 0 if problem.c.column_major else 1
    c_unit, c_vector = vector(problem.c, (problem.M, problem.N), problem.out_dtype)
    along = min(ELEMENTS, triton.next_power_of_2((problem.M, problem.N)[unit]))
    block = (along, ELEMENTS // along) if unit == 0 else (ELEMENTS // along, along)
    arguments = {
        "sums_ptr": Pointer("sums"),
        "c_ptr": Pointer("c"),
        "bias_ptr": Pointer("bias" if problem.bias else "c"),
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        "a_scale_ptr": Pointer("a_scale" if problem.scales else "c"),
        "b_scale_ptr": Pointer("b_scale" if problem.scales else "c"),
        "M": problem.M,
        "N": problem.N,
        "parts": parts,
        "stride_part": problem.batch * sums.strides[0],
        **dict(zip(("stride_sb", "stride_sm", "stride_sn"), sums.strides, strict=True)),
        **dict(zip(("stride_cb", "stride_cm", "stride_cn"), problem.c.strides, strict=True)),
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "SUMS_UNIT": unit,
        "SUMS_VECTOR": VECTOR,
        "AT_ONCE": MOST_AT_ONCE if parts > MOST_AT_ONCE // 2 + 1 else MOST_AT_ONCE // 2,
        "C_UNIT": c_unit,
        "C_VECTOR": c_vector,
        "SCALES": problem.scales if problem.scales != "blocks" else None,
        "HAS_BETA": problem.added,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        "BLOCK_M": block[0],
        "BLOCK_N": block[1],
        "PDL": False,
    }
    tiles = triton.cdiv(problem.M, block[0]) * triton.cdiv(problem.N, block[1])
    return Launch(reduction_kernel, (problem.batch * tiles, 1, 1), arguments, {"num_warps": NUM_WARPS})
