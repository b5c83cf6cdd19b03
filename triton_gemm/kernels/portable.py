"""Portable: plain pointers and `tl.dot`, for every architecture from sm_80 on, every stride and every alignment.

It multiplies what TMA cannot read and where there is none, and what is too small for a persistent kernel to pay, in
every precision: by tensor cores where the architecture has them for it, else by FMAs, and fp8 not before sm_89.

What the compiler may assume comes from constexprs that `launches` derives from the problem, never from the values
of arguments, so a problem and a configuration name the one variant that is compiled. Of each operand it is told
which dimension has the unit stride and how many elements lie together on a 16-byte boundary; the kernel then reads
and masks whole vectors (`cp.async` of 4, 8 or 16 bytes), even with a ragged number of rows.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from math import gcd, sqrt
from typing import Any

import torch
import triton
import triton.language as tl

from ..arithmetic import EMULATED
from ..compat import dot_operand
from ..config import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, TileConfig
from ..cost_model import Remembered, average, on_busiest_sm, soft_maximum, swap_for_c, traffic
from ..device import DeviceInfo
from ..device_model import DeviceModel
from ..ladder.k04_grouped import grouped_pid
from ..ladder.k07_tf32 import round_tf32
from ..problem import GemmProblem, Layout
from . import groups
from .candidate import Candidate
from .groups import listed, range_of
from .launch import Launch, Pointer, Scalar
from .planes import split
from .programmatic import follow
from .splitk import last_to_arrive
from .tiles import Epilogue, Output, store_tile, tile_pointers, whole

MAX_SIZE = 2**31 - 512  # of M, N, K and of the grid: their tiles are counted in 32 bits
SCALED = tl.constexpr(128)  # elements along K, and of B's columns along N, that share a scale of "blocks"


@triton.jit(
    do_not_specialize=[
        *("bias_ptr", "a_scale_ptr", "b_scale_ptr", "counters_ptr", "ends_ptr", "tiles_ptr", "M", "N", "K"),
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
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
    PDL: tl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias), a [batch, M, K], b [batch, K, N], c [batch, M, N].

    X_UNIT: the dimension of X with stride 1, 0 or 1, or None; X_VECTOR: elements that may be moved at once along it;
    PLANES and TERMS: `Planes.count` and `terms` of the precision; PROMOTE: whether the sums of each k-tile are added
    to the others apart; GROUPED: the dimension that groups cut, if one does.
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
        pid_m, pid_n = grouped_pid(tile % (num_m * num_n), num_m, num_n, GROUP_M)
        m = pid_m.to(tl.int64) * BLOCK_M
        if GROUPED == "k":
            begin_k, end_k = range_of(ends_ptr, batch, K)
    batch = batch.to(tl.int64)
    pid_k = tl.program_id(1)
    k_tiles = tl.cdiv(end_k - begin_k, BLOCK_K)
    share = tl.cdiv(k_tiles, SPLIT_K)
    first = pid_k * share

    # Prologue. The unit stride's dimension is masked, by whole vectors. Rows of vectors past the edge are clamped to
    # the last one instead, which costs nothing in the loop; what they compute is not stored.
    offs_m = m + tl.arange(0, BLOCK_M).to(tl.int64)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K)
    everywhere_m = tl.full((BLOCK_M,), True, tl.int1)
    everywhere_n = tl.full((BLOCK_N,), True, tl.int1)
    everywhere_k = tl.full((BLOCK_K,), True, tl.int1)
    a_m = offs_m if A_UNIT == 0 else tl.minimum(offs_m, M - 1)
    b_n = offs_n if B_UNIT == 1 else tl.minimum(offs_n, N - 1)
    a_mask_m = offs_m < whole(M, A_VECTOR) if A_UNIT == 0 else everywhere_m
    b_mask_n = offs_n < whole(N, B_VECTOR) if B_UNIT == 1 else everywhere_n
    k = begin_k + first.to(tl.int64) * BLOCK_K + offs_k
    a_ptrs = tile_pointers(a_ptr + batch * whole(stride_az, A_VECTOR), a_m, k, stride_am, stride_ak, A_UNIT, A_VECTOR)
    b_ptrs = tile_pointers(b_ptr + batch * whole(stride_bz, B_VECTOR), k, b_n, stride_bk, stride_bn, B_UNIT, B_VECTOR)
    SUM: tl.constexpr = tl.int32 if PRECISION == "int8" else tl.float64 if PRECISION == "fp64" else tl.float32
    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=SUM)

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
        a_ptrs += BLOCK_K if A_UNIT == 1 else BLOCK_K * whole(stride_ak, A_VECTOR)
        b_ptrs += BLOCK_K if B_UNIT == 0 else BLOCK_K * whole(stride_bk, B_VECTOR)
    if PROMOTE:
        acc = 0 - acc

    # Epilogue
    c_ptr += batch * whole(stride_cz, C_VECTOR)
    out = Output(
        c_ptr, end_m, N, stride_cm, stride_cn, bias_ptr, stride_bias, a_scale_ptr, b_scale_ptr, alpha, beta
    )  # fmt: skip
    if SPLIT_K == 1:
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


@triton.jit
def multiply(a, b, acc, PRECISION: tl.constexpr, PLANES: tl.constexpr, TERMS: tl.constexpr):
    """acc + a @ b, a and b as sums of PLANES where those are several, whose products TERMS are added in their order.

    "tf32" rounds operands to nearest; the tensor core would truncate them.
    """
    if PLANES > 1:
        PLANE: tl.constexpr = tl.float32 if PRECISION == "tf32x3" else tl.bfloat16
        a_planes = split(a, PLANE, PLANES)
        b_planes = split(b, PLANE, PLANES)
        for i in tl.static_range(len(TERMS)):
            a_plane = dot_operand(a_planes[TERMS[i][0]])
            b_plane = dot_operand(b_planes[TERMS[i][1]])
            acc = tl.dot(a_plane, b_plane, acc, input_precision="tf32")
        return acc
    elif PRECISION == "tf32":
        return tl.dot(round_tf32(a), round_tf32(b), acc, input_precision="tf32")
    else:
        return tl.dot(dot_operand(a), dot_operand(b), acc, input_precision="ieee", out_dtype=acc.dtype)


@dataclass(frozen=True)
class Config(TileConfig):
    """GROUP_M: rows of tiles that follow one another, for the sake of L2."""

    GROUP_M: int = 8


def _configs(tiles: list[tuple[int, int, int, int, int]]) -> tuple[Config, ...]:
    return tuple(Config(*figures) for figures in tiles)


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages; by precision, from the largest tiles to the smallest. Those with
# less BLOCK_K or more warps leave room for the addresses of elements that are moved one by one.
_8_BITS = _configs(
    [
        (128, 256, 128, 8, 3),
        (256, 128, 128, 8, 3),
        (128, 128, 128, 8, 3),
        (128, 128, 64, 4, 4),
        (64, 128, 128, 4, 3),
        (128, 64, 128, 8, 3),
        (64, 64, 128, 4, 4),
        (64, 128, 32, 8, 6),
        (64, 64, 32, 4, 6),
        (32, 128, 128, 4, 4),
        (64, 32, 128, 4, 4),
        (32, 64, 128, 4, 5),
        (16, 64, 128, 4, 5),
        (64, 16, 128, 4, 5),
        (32, 32, 64, 4, 5),
    ]
)
_PLANES = _configs(
    [
        (128, 64, 16, 8, 4),
        (64, 64, 16, 4, 4),
        (32, 64, 16, 4, 5),
        (64, 32, 16, 4, 5),
        (16, 64, 32, 4, 5),
        (64, 16, 32, 4, 5),
        (32, 32, 32, 4, 5),
    ]
)
CONFIGS: dict[str, tuple[Config, ...]] = {
    "half": _configs(
        [
            (128, 256, 64, 8, 3),
            (256, 128, 64, 8, 3),
            (128, 128, 64, 8, 3),
            (128, 128, 64, 4, 3),
            (128, 128, 32, 4, 4),
            (128, 128, 32, 8, 4),
            (64, 256, 64, 8, 3),
            (128, 64, 64, 4, 4),
            (64, 128, 64, 4, 4),
            (64, 128, 32, 8, 4),
            (64, 64, 64, 4, 4),
            (64, 64, 32, 4, 4),
            (32, 128, 64, 4, 4),
            (128, 32, 64, 4, 4),
            (32, 64, 64, 4, 5),
            (64, 32, 64, 4, 5),
            (16, 128, 64, 4, 5),
            (128, 16, 64, 4, 5),
            (16, 64, 128, 4, 4),
            (64, 16, 128, 4, 4),
            (16, 64, 64, 4, 5),
            (64, 16, 64, 4, 5),
            (32, 32, 64, 2, 5),
            (16, 32, 64, 2, 5),
        ]
    ),
    "tf32": _configs(
        [
            (128, 128, 32, 8, 3),
            (64, 128, 32, 4, 4),
            (64, 64, 32, 4, 4),
            (32, 64, 32, 4, 5),
            (64, 32, 32, 4, 5),
            (16, 64, 64, 4, 4),
            (64, 16, 64, 4, 4),
            (32, 32, 32, 2, 5),
        ]
    ),
    "fp64": _configs(
        [
            (128, 64, 16, 4, 4),
            (64, 128, 16, 8, 4),
            (64, 64, 16, 4, 4),
            (32, 64, 16, 4, 4),
            (64, 32, 16, 4, 4),
            (32, 32, 16, 4, 5),
            (16, 64, 16, 4, 5),
            (64, 16, 16, 4, 5),
        ]
    ),
    **dict.fromkeys(("int8", "fp8 fast"), _8_BITS),
    "fp8": tuple(config for config in _8_BITS if config.accumulators() <= 64),  # beside as many sums of pieces
    **dict.fromkeys(EMULATED, _PLANES),
    "ieee": _configs(
        [
            (64, 128, 16, 4, 3),
            (64, 64, 16, 4, 3),
            (32, 64, 32, 4, 2),
            (64, 32, 16, 4, 4),
            (32, 32, 32, 4, 3),
            (16, 64, 32, 4, 3),
            (64, 16, 32, 4, 3),
        ]
    ),
}

TENSOR_MEMORY = 2**18  # bytes, on sm_100

# ptxas by itself lowers a thread's registers until one more block fits an SM, and spills for it; what limits blocks
# here is shared memory.
MAX_REGISTERS = MAX_REGISTERS_PER_THREAD


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: int = 1) -> str | None:
    """Why `device` cannot run `config` on `problem`, or None if it can.

    Within `TileConfig.illegal`'s limits ptxas still spills where a thread keeps too many addresses of vectors of A and
    B in the main loop, or in the epilogue too much beside each accumulator: C's value, its address unless it goes by
    16 bytes, and the temporaries of activation, bias or partial sums. The limits were found by compiling every
    configuration for every architecture.
    """
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, {device.name} has less"
    if max(problem.M, problem.N, problem.K) > MAX_SIZE or _num_tiles(problem, config) > MAX_SIZE:
        return f"sizes and the number of tiles must not exceed {MAX_SIZE}"
    arithmetic, capability = problem.arithmetic, device.capability
    if capability < arithmetic.capability:
        needed = ".".join(map(str, arithmetic.capability))
        return f"{arithmetic.name} needs compute capability {needed} or newer, {device.name} has less"
    if problem.scales == "blocks" and arithmetic.promotion is None:
        return f"blocks of scales need promotion, {arithmetic.name} has none"
    if problem.scales == "blocks" and config.BLOCK_N > SCALED.value:
        return f"{config.BLOCK_N} columns of a tile would be of several blocks of scales"
    if problem.groups and split_k > 1:
        return "programs that share a tile must know how long its sum is"
    tile_sums = len(problem.planes.terms) * config.BLOCK_M * config.BLOCK_N
    if capability[0] == 10 and 4 * tile_sums > TENSOR_MEMORY * 7 // 8:  # A's planes lie there too
        return f"Triton 3.6 keeps {tile_sums} sums in tensor memory, one of the tile for each term"
    itemsize, out_itemsize, sum_itemsize = problem.dtype.itemsize, problem.out_dtype.itemsize, _sum_itemsize(problem)
    tensor_cores = arithmetic.tensor_cores(capability)
    in_loop = sum_itemsize * (2 if promotes(problem) else 1)
    why = config.illegal(device, itemsize, out_itemsize, sum_itemsize=in_loop, tensor_cores=tensor_cores)
    if why is not None:
        return why

    accumulators = config.accumulators(in_loop)
    a_vector, b_vector, c_vector = (vector for _, vector in _vectors(problem))
    a_tile, b_tile = config.BLOCK_M * config.BLOCK_K, config.BLOCK_K * config.BLOCK_N
    addresses = (a_tile // a_vector + b_tile // b_vector) // (32 * config.num_warps)
    others = 0 if tensor_cores else accumulators  # FMAs read operands from registers
    others += accumulators // 2 if problem.scales == "blocks" else 0  # scales of rows, and where they are
    if accumulators + others + 5 * addresses > 210:
        return f"{accumulators} accumulators and {addresses} addresses leave too few of a thread's registers"
    beside = sum_itemsize * bool(problem.bias or problem.activation not in (None, "relu") or split_k > 1)
    beside += sum_itemsize * (problem.activation == "gelu")  # a polynomial and two transcendentals
    beside += sum_itemsize * (problem.scales == "rows" or (problem.scales == "tensor" and arithmetic.exact))
    beside += out_itemsize * problem.has_beta + 4 * (c_vector * out_itemsize < 16)
    if config.accumulators(sum_itemsize + beside) > 160:
        sums = config.accumulators(sum_itemsize)
        return f"{sums} accumulators and {beside} bytes beside each leave too few registers to the epilogue"
    return None


@dataclass(frozen=True)
class Pace:
    """What a program takes on one GPU beside its products, in microseconds.

    move: one copy to shared memory, of an SM, of 16 bytes and of fewer; read: an element of an operand that a thread
    reads from there, but of 16 bits, where B is row-major and where it is K-major; latency: from a load to its
    arrival, which the stages of a pipeline share; step: the barriers of a k-tile; start: a program's first loads and
    its stores, a constant, and for each TILE elements of its tile; program: what each of an SM's programs adds to
    that; share: of all parts of a sum, likewise; part: adding one, likewise; piled: of the programs that an SM has
    room for, how many come together though others have none; memory: how much of its bandwidth is reached; spread:
    what starting programs on all SMs at once adds, on fewer a share of it.
    """

    move: tuple[float, float]
    latency: float
    step: float
    start: tuple[float, float]
    program: float
    share: tuple[float, float]
    part: tuple[float, float]
    piled: float
    memory: float
    spread: float
    read: tuple[float, float]


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. products: multiply-adds in a microsecond of an SM, and of a warp, by precision;
    tensor, ieee, fp64: the rest, by what multiplies."""

    KERNEL = "portable"

    products: Mapping[str, tuple[float, float]]
    tensor: Pace
    ieee: Pace
    fp64: Pace

    def __post_init__(self) -> None:
        for name in ("tensor", "ieee", "fp64"):
            object.__setattr__(self, name, Pace(**getattr(self, name)))


TILE = 16_384  # elements
_KNOWN = Remembered()
SHARED_MEMORY_PER_SM = 228 << 10
REGISTERS = 80  # of a thread, beside its sums


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Every tile, K whole or cut into parts while that gives more SMs something to do."""
    swap_ab = swap_for_c(problem)
    given = problem.swap_ab() if swap_ab else problem
    m, n = max(64, 2 * given.M), max(64, 2 * given.N)  # of larger tiles more than half would be empty
    configs = [config for config in CONFIGS[problem.precision] if config.BLOCK_M <= m and config.BLOCK_N <= n]
    for config in configs:
        yield Candidate(given, config, 1, swap_ab)
        count = _num_tiles(given, config)
        most = 0 if problem.groups else min(problem.K // (4 * config.BLOCK_K), 2 * device.num_sms // max(1, count))
        for split_k in (2, 3, 4, 6, 8, 12, 16):
            if split_k <= most:
                yield Candidate(given, config, split_k, swap_ab)


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, whose programs wait for their loads, for memory, or for one another."""
    if problem.groups:
        problem = average(problem)
    known = _KNOWN.for_problem(problem, model)
    if config not in known:
        known[config] = _of_tile(problem, config, model)
    pace, tiles, at_once, work, alone, start, memory, share, part, ahead, copies = known[config]
    steps, programs = -(-problem.K // (split_k * config.BLOCK_K)), tiles * split_k
    filling = max(0, ahead - steps) * copies  # beyond K's end too

    def together(count: float) -> float:
        return start + count * (pace.program + filling) + steps * soft_maximum(alone, count * work)

    busy = on_busiest_sm(programs, model.num_sms, at_once, together, pace.piled)
    time = model.launch + pace.spread * min(1.0, programs / model.num_sms) + soft_maximum(busy, memory)
    return time + share + split_k * part if split_k > 1 else time


def _of_tile(problem: GemmProblem, config: Config, model: DeviceModel) -> tuple[Any, ...]:
    """Of a problem in tiles: (pace, how many, how many at once on an SM, time of a k-tile on a busy SM, and of one
    program alone, of its start, of memory, of sharing sums, of adding one, k-tiles that
    are loaded ahead, and time of the copies of one)."""
    costs, arithmetic = model.costs(Costs), problem.arithmetic
    pace: Pace = {"fma": costs.ieee, "dmma": costs.fp64}.get(arithmetic.instruction, costs.tensor)
    of_sm, of_warp = costs.products[arithmetic.name]
    m, n, k, warps = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps
    a_vector, b_vector, _ = (elements for _, elements in _vectors(problem))
    products = len(problem.planes.terms) * m * n * k
    itemsize = problem.dtype.itemsize
    copies = k * m / a_vector * pace.move[a_vector * itemsize < 16]
    copies += k * n / b_vector * pace.move[b_vector * itemsize < 16]
    shared = copies
    if itemsize != 2:  # of 16 bits ldmatrix reads either way
        shared += k * pace.read[problem.b.column_major] * sqrt(32 * warps * m * n)
    # Elements of less than 4 bytes that are moved one by one go through registers, ahead of which no load is issued.
    ahead = config.num_stages - 1 if min(a_vector, b_vector) * itemsize >= 4 else 1
    alone = soft_maximum(pace.step + pace.latency / ahead, products / (of_warp * warps) + shared)
    size = m * n / TILE
    return (
        *(pace, _num_tiles(problem, config)),
        _at_once(config, itemsize, _sum_itemsize(problem)),
        *(products / of_sm + shared, alone, pace.start[0] + pace.start[1] * size),
        traffic(problem) / (pace.memory * model.memory),
        *(constant + slope * size for constant, slope in (pace.share, pace.part)),
        *(ahead, copies),
    )


@cache
def _at_once(config: Config, itemsize: int, sum_itemsize: int) -> int:
    """Programs that an SM has room for."""
    threads = 32 * config.num_warps
    registers = min(config.accumulators(sum_itemsize) + REGISTERS, MAX_REGISTERS)
    return max(
        1, min(SHARED_MEMORY_PER_SM // config.shared_memory(itemsize), REGISTERS_PER_SM // (registers * threads))
    )


def launches(problem: GemmProblem, config: Config, split_k: int = 1, *, stride_bias: int = 1) -> tuple[Launch, ...]:
    """The launches that solve `problem`: one, or none where C is empty.

    split_k: programs that share a tile's sum; stride_bias: elements between the bias's values.
    """
    if 0 in (problem.batch, problem.M, problem.N):
        return ()
    of_rows = problem.groups == "m"
    num_tiles = groups.max_tiles(problem, config) if of_rows else _num_tiles(problem, config)
    split = split_k > 1
    (a_unit, a_vector), (b_unit, b_vector), (c_unit, c_vector) = _vectors(problem)
    arguments = {
        "a_ptr": Pointer("a"),
        "b_ptr": Pointer("b"),
        "c_ptr": Pointer("c"),
        "bias_ptr": Pointer("bias") if problem.bias else None,
        "a_scale_ptr": Pointer("a_scale") if problem.scales else None,
        "b_scale_ptr": Pointer("b_scale") if problem.scales else None,
        "workspace_ptr": Pointer("workspace") if split else None,
        "counters_ptr": Pointer("counters") if split else None,
        "ends_ptr": Pointer("ends") if problem.groups == "k" else None,
        "tiles_ptr": Pointer("tiles") if of_rows else None,
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        **dict(zip(("stride_az", "stride_am", "stride_ak"), problem.a.strides, strict=True)),
        **dict(zip(("stride_bz", "stride_bk", "stride_bn"), problem.b.strides, strict=True)),
        **dict(zip(("stride_cz", "stride_cm", "stride_cn"), problem.c.strides, strict=True)),
        "stride_bias": stride_bias,
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "A_UNIT": a_unit,
        "A_VECTOR": a_vector,
        "B_UNIT": b_unit,
        "B_VECTOR": b_vector,
        "C_UNIT": c_unit,
        "C_VECTOR": c_vector,
        "EVEN_K": problem.K % config.BLOCK_K == 0 and problem.groups != "k",
        "SPLIT_K": split_k,
        "PRECISION": problem.precision,
        "PLANES": problem.planes.count,
        "TERMS": problem.planes.terms,
        "PROMOTE": promotes(problem),
        "SCALES": problem.scales,
        "GROUPED": problem.groups,
        "HAS_BETA": problem.has_beta,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        **config.meta(),
        "PDL": False,
    }
    return (
        *([groups.launch(problem, config, config.GROUP_M)] if of_rows else []),
        Launch(
            portable_kernel,
            (num_tiles, split_k, 1),
            arguments,
            {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": MAX_REGISTERS},
            workspace=_sum_itemsize(problem) * split_k * num_tiles * config.BLOCK_M * config.BLOCK_N if split else 0,
            counters=num_tiles if split else 0,
        ),
    )


def promotes(problem: GemmProblem) -> bool:
    """Whether k-tiles are summed apart and these sums added: those of planes and fp8, which tensor cores cut off below
    the last bits of a sum, and those of int8 that may leave int32, where `mma` saturates."""
    return problem.arithmetic.promotes(problem.K)


def _sum_itemsize(problem: GemmProblem) -> int:
    return problem.arithmetic.accumulator.itemsize


def _num_tiles(problem: GemmProblem, config: Config) -> int:
    return problem.batch * config.tiles(problem.M, problem.N)


def _vectors(problem: GemmProblem) -> tuple[tuple[int | None, int], ...]:
    """`vector` of A, B and C."""
    # Where groups begin at any row, or anywhere along K, no more is known of it than that it is one.
    M = 1 if problem.groups == "m" else problem.M
    K = 1 if problem.groups == "k" else problem.K
    return (
        vector(problem.a, (M, K), problem.dtype),
        vector(problem.b, (K, problem.N), problem.dtype),
        vector(problem.c, (M, problem.N), problem.out_dtype),
    )


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
