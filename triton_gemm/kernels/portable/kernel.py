"""Portable: plain pointers and `tl.dot`, for every architecture from sm_80 on, every stride and every alignment.

It multiplies what TMA cannot read, everything where there is no TMA, and what is too small for a persistent kernel to
pay. It does so in every precision: by tensor cores where the architecture has them for it, else by FMAs. fp8 needs
sm_89 or newer.

What the compiler may assume comes from constexprs that `launches` derives from the problem, never from the values of
arguments. So a problem and a configuration name the one variant that is compiled. For each operand constexprs say which
dimension has the unit stride, and how many elements lie together on a 16-byte boundary. The kernel then reads and masks
whole vectors (`cp.async` of 4, 8 or 16 bytes), even with a ragged number of rows.
"""

from __future__ import annotations

import triton
import triton.language as tl

from ...compat import dot_operand, multiplies_block_scaled, round_tf32
from ..epilogue import biased, gated
from ..groups import listed, range_of
from ..planes import split
from ..programmatic import follow
from ..schedule import grouped_tile
from ..splitk import last_to_arrive
from ..tiles import Epilogue, Output, in_c, store_beside, store_tile, tile_pointers, whole

SCALED = tl.constexpr(128)  # elements along K, and of B's columns along N, that share a scale of "blocks"


@triton.jit(
    do_not_specialize=[
        *(
            "gate_bias_ptr",
            "bias_ptr",
            "a_scale_ptr",
            "b_scale_ptr",
            "counters_ptr",
            "ends_ptr",
            "tiles_ptr",
            "M",
            "N",
            "K",
        ),
        *("stride_az", "stride_am", "stride_ak", "stride_bz", "stride_bk", "stride_bn"),
        *("stride_cz", "stride_cm", "stride_cn", "stride_bias"),
    ]
)
def portable_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    a_scale_ptr,
    b_scale_ptr,
    workspace_ptr,
    counters_ptr,
    ends_ptr,
    tiles_ptr,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    stride_az: tl.int64,
    stride_am: tl.int64,
    stride_ak: tl.int64,
    stride_bz: tl.int64,
    stride_bk: tl.int64,
    stride_bn: tl.int64,
    stride_cz: tl.int64,
    stride_cm: tl.int64,
    stride_cn: tl.int64,
    stride_bias: tl.int64,
    alpha: tl.float64,
    beta: tl.float64,
    gate_ptr,
    gate_bias_ptr,
    preactivation_ptr,
    ungated_ptr,
    A_UNIT: tl.constexpr,
    A_VECTOR: tl.constexpr,
    B_UNIT: tl.constexpr,
    B_VECTOR: tl.constexpr,
    C_UNIT: tl.constexpr,
    C_VECTOR: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    PRECISION: tl.constexpr,
    PLANES: tl.constexpr,
    TERMS: tl.constexpr,
    PROMOTE: tl.constexpr,
    SCALES: tl.constexpr,
    GROUPED: tl.constexpr,
    HAS_BETA: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    GATE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias), a [batch, M, K], b [batch, K, N], c [batch, M, N].

    X_UNIT: the dimension of X that has stride 1: 0, 1 or None. X_VECTOR: elements that may be moved at once along it.
    PLANES and TERMS: `Planes.count` and `terms` of the precision. PROMOTE: whether the sums of each k-tile are added to
    the others apart. GROUPED: the dimension that groups cut, if one does. GATE: whether c is instead
    activation(a @ gate + gate_bias) (a @ b + bias). Such a gate lies in memory as b does.
    """
    follow(PDL)

    # Locate the tile, and this program's share of its k-tiles
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0)
    begin_k, end_k, end_m = 0, K, M
    if GROUPED == "m":
        if tile >= tl.load(tiles_ptr):
            return
        batch, m, end_m, pid_n, end_k = listed(tiles_ptr, tile, K)
    else:
        batch = tile // (num_m * num_n)
        pid_m, pid_n = grouped_tile(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        m = pid_m.to(tl.int64) * BLOCK_M
        if GROUPED == "k":
            begin_k, end_k = range_of(ends_ptr, batch, K)
    batch = batch.to(tl.int64)
    pid_k = tl.program_id(1)
    k_tiles = tl.cdiv(end_k - begin_k, BLOCK_K)
    share = tl.cdiv(k_tiles, SPLIT_K)
    first = pid_k * share

    # Prologue. The unit stride's dimension is masked, by whole vectors. Instead of rows of vectors past the edge others
    # are loaded, which costs nothing in the loop; what they compute is not stored.
    offs_m = m + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    everywhere_m = tl.full((BLOCK_M,), True, tl.int1)
    everywhere_n = tl.full((BLOCK_N,), True, tl.int1)
    everywhere_k = tl.full((BLOCK_K,), True, tl.int1)
    a_m = offs_m if A_UNIT == 0 else inside(offs_m, M, BLOCK_M)
    b_n = offs_n if B_UNIT == 1 else inside(offs_n, N, BLOCK_N)
    a_mask_m = offs_m < whole(M, A_VECTOR) if A_UNIT == 0 else everywhere_m
    b_mask_n = offs_n < whole(N, B_VECTOR) if B_UNIT == 1 else everywhere_n
    k = begin_k + first.to(tl.int64) * BLOCK_K + offs_k
    a_ptrs = tile_pointers(a_ptr + batch * whole(stride_az, A_VECTOR), a_m, k, stride_am, stride_ak, A_UNIT, A_VECTOR)
    b_ptrs = tile_pointers(b_ptr + batch * whole(stride_bz, B_VECTOR), k, b_n, stride_bk, stride_bn, B_UNIT, B_VECTOR)
    SUM: tl.constexpr = tl.int32 if PRECISION == "int8" else tl.float64 if PRECISION == "fp64" else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM)
    if GATE:
        gate_start = gate_ptr + batch * whole(stride_bz, B_VECTOR)
        gate_ptrs = tile_pointers(gate_start, k, b_n, stride_bk, stride_bn, B_UNIT, B_VECTOR)
        gate_acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM)

    # Main loop
    for k_tile in range(first, tl.minimum(first + share, k_tiles)):
        left = end_k - begin_k - k_tile * BLOCK_K
        a_mask_k = everywhere_k if EVEN_K else offs_k < whole(left, A_VECTOR if A_UNIT == 1 else 1)
        b_mask_k = everywhere_k if EVEN_K else offs_k < whole(left, B_VECTOR if B_UNIT == 0 else 1)
        a = tl.load(a_ptrs, mask=a_mask_m[:, None] & a_mask_k[None, :], other=0.0)  # [BLOCK_M, BLOCK_K]
        b = tl.load(b_ptrs, mask=b_mask_k[:, None] & b_mask_n[None, :], other=0.0)  # [BLOCK_K, BLOCK_N]
        if PROMOTE:
            piece = multiply(a, b, tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM), PRECISION, PLANES, TERMS)
            if SCALES == "blocks":
                block = k_tile * BLOCK_K // SCALED
                a_scale = tl.load(a_scale_ptr + block.to(tl.int64) * M + offs_m, mask=offs_m < M, other=0.0)
                b_scale = tl.load(b_scale_ptr + (pid_n * BLOCK_N // SCALED).to(tl.int64) * tl.cdiv(K, SCALED) + block)
                piece *= (a_scale * b_scale)[:, None]
            acc -= piece  # an addition Triton would merge with the product, for the tensor core to make
        else:
            acc = multiply(a, b, acc, PRECISION, PLANES, TERMS)
        if GATE:
            gate = tl.load(gate_ptrs, mask=b_mask_k[:, None] & b_mask_n[None, :], other=0.0)
            gate_acc = multiply(a, gate, gate_acc, PRECISION, PLANES, TERMS)
            gate_ptrs += BLOCK_K if B_UNIT == 0 else BLOCK_K * whole(stride_bk, B_VECTOR)
        a_ptrs += BLOCK_K if A_UNIT == 1 else BLOCK_K * whole(stride_ak, A_VECTOR)
        b_ptrs += BLOCK_K if B_UNIT == 0 else BLOCK_K * whole(stride_bk, B_VECTOR)
    if PROMOTE:
        acc = 0 - acc

    # Epilogue
    start = batch * whole(stride_cz, C_VECTOR)
    c_ptr += start
    out = Output(
        c_ptr, end_m, N, stride_cm, stride_cn, bias_ptr, stride_bias, a_scale_ptr, b_scale_ptr, alpha, beta,
        None if GATE else preactivation_ptr, start,
    )  # fmt: skip
    if GATE:
        bias = 0.0
        gate_bias = 0.0
        if BIAS is not None:
            bias = tl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
            gate_bias = tl.load(gate_bias_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
        acc = biased(acc, bias, BIAS is not None)
        gate_acc = biased(gate_acc, gate_bias, BIAS is not None)
        if preactivation_ptr is not None:
            mask_m, mask_n = in_c(offs_m, offs_n, out, C_UNIT, C_VECTOR)
            mask = mask_m[:, None] & mask_n[None, :]
            store_beside(acc, ungated_ptr, offs_m, offs_n, mask, out, C_UNIT, C_VECTOR)
            store_beside(gate_acc, preactivation_ptr, offs_m, offs_n, mask, out, C_UNIT, C_VECTOR)
        acc = gated(acc, gate_acc, ACTIVATION)
        store_tile(acc, offs_m, offs_n, out, Epilogue(C_UNIT, C_VECTOR, None, False, None, None))
    elif SPLIT_K == 1:
        store_tile(acc, offs_m, offs_n, out, Epilogue(C_UNIT, C_VECTOR, SCALES, HAS_BETA, BIAS, ACTIVATION))
    else:
        # Partial sums [SPLIT_K, BLOCK_M, BLOCK_N] of this tile. They pass through L2: no SM's L1 holds an old one.
        offs = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_ptrs = workspace_ptr.to(tl.pointer_type(SUM)) + tile.to(tl.int64) * (SPLIT_K * BLOCK_M * BLOCK_N) + offs
        tl.store(partial_ptrs + pid_k * (BLOCK_M * BLOCK_N), acc, cache_modifier=".cg")
        if last_to_arrive(counters_ptr + tile, SPLIT_K):
            acc = tl.load(partial_ptrs, cache_modifier=".cg")
            for _ in range(1, SPLIT_K):
                partial_ptrs += BLOCK_M * BLOCK_N
                acc += tl.load(partial_ptrs, cache_modifier=".cg")
            store_tile(acc, offs_m, offs_n, out, Epilogue(C_UNIT, C_VECTOR, SCALES, HAS_BETA, BIAS, ACTIVATION))


@triton.jit(do_not_specialize=["bias_ptr", "M", "N", "K", "stride_cm"])
def portable_tma_kernel(
    a_desc, b_desc, c_ptr, bias_ptr, preactivation_ptr,
    M: tl.int32, N: tl.int32, K: tl.int32, stride_cm: tl.int64, alpha: tl.float64, beta: tl.float64,
    A_COLUMN_MAJOR: tl.constexpr, B_COLUMN_MAJOR: tl.constexpr, C_VECTOR: tl.constexpr,
    HAS_BETA: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
):  # fmt: skip
    """The same sums of operands that TMA loads; a_desc, b_desc: of a column-major one's transpose; c is row-major.

    On Blackwell Triton specialises warps: while some load and some multiply, others store the tile before.
    """
    num_m = tl.cdiv(M, BLOCK_M)
    num_n = tl.cdiv(N, BLOCK_N)
    for tile in tl.range(tl.program_id(0), num_m * num_n, tl.num_programs(0), flatten=True, warp_specialize=True):
        pid_m, pid_n = grouped_tile(tile, num_m, num_n, GROUP_M)
        m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
        for k in range(0, K, BLOCK_K):
            a = a_desc.load([k, m]).T if A_COLUMN_MAJOR else a_desc.load([m, k])
            b = b_desc.load([n, k]).T if B_COLUMN_MAJOR else b_desc.load([k, n])
            acc = tl.dot(dot_operand(a), dot_operand(b), acc)
        offs_m = m.to(tl.int64) + tl.arange(0, BLOCK_M)
        offs_n = n.to(tl.int64) + tl.arange(0, BLOCK_N)
        out = Output(c_ptr, M, N, stride_cm, 1, bias_ptr, 1, None, None, alpha, beta, preactivation_ptr, 0)
        store_tile(acc, offs_m, offs_n, out, Epilogue(1, C_VECTOR, None, HAS_BETA, BIAS, ACTIVATION))


@triton.jit
def inside(offs, extent, BLOCK: tl.constexpr):
    """offs, for those past the end the rows of the tile before: if all loaded the last row, its lines would become a
    bottleneck in L2 (docs/log/edge-tiles.md)."""
    return tl.maximum(tl.where(offs < extent, offs, offs - BLOCK), 0)


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, PLANES: tl.constexpr, TERMS: tl.constexpr):
    """acc + a @ b, a and b as sums of PLANES where those are several, whose products TERMS are added in their order.

    "tf32" rounds operands to nearest; the tensor core would truncate them.
    """
    BLOCK_SCALED: tl.constexpr = multiplies_block_scaled()
    if PLANES > 1:
        PLANE: tl.constexpr = tl.float32 if PRECISION == "tf32x3" else tl.bfloat16
        a_planes = split(a, PLANE, PLANES)
        b_planes = split(b, PLANE, PLANES)
        for i in tl.static_range(len(TERMS)):
            a_plane = dot_operand(a_planes[TERMS[i][0]])
            b_plane = dot_operand(b_planes[TERMS[i][1]])
            acc = tl.dot(a_plane, b_plane, acc, input_precision="tf32")
        return acc
    elif BLOCK_SCALED and (PRECISION == "fp8" or PRECISION == "fp8 fast"):
        return multiply_block_scaled(a, b, acc)
    elif PRECISION == "tf32":
        return tl.dot(round_tf32(a), round_tf32(b), acc, input_precision="tf32")
    else:
        return tl.dot(dot_operand(a), dot_operand(b), acc, input_precision="ieee", out_dtype=acc.dtype)


@triton.jit
def multiply_block_scaled(a, b, acc):
    """acc + a @ b of fp8 by `mma` with scales of blocks of 32 along K, all of them 1: the same bits as without scales.

    GeForce of compute capability 12.0 multiplies fp8 at half rate without them: 507 and 1005 TFLOPS on an RTX 5090
    (triton#11320; quack, gemm_sm120.py).
    """
    BLOCK_M: tl.constexpr = acc.shape[0]
    BLOCK_N: tl.constexpr = acc.shape[1]
    BLOCKS: tl.constexpr = a.shape[1] // 32
    A_FORMAT: tl.constexpr = "e4m3" if a.dtype == tl.float8e4nv else "e5m2"
    B_FORMAT: tl.constexpr = "e4m3" if b.dtype == tl.float8e4nv else "e5m2"
    a_scale = tl.full((BLOCK_M, BLOCKS), 127, tl.uint8)  # E8M0: exponents, with a bias of 127
    b_scale = tl.full((BLOCK_N, BLOCKS), 127, tl.uint8)
    return tl.dot_scaled(a, a_scale, A_FORMAT, b, b_scale, B_FORMAT, acc)
