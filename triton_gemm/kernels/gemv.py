"""Products with few rows: the weights B are read once, at the speed of memory.

With M rows every element of B takes part in M FMAs. For M <= 4 these are far fewer than an SM does while the element
arrives. So tensor cores would idle, and only bytes in flight count. A program owns BLOCK_N columns of C and a range of
K. Its threads read B 16 bytes at a time along whichever stride is 1. Each thread sums its share in fp32 without
communication; one reduction across threads ends the program. Sums are short chains under a tree, so their error grows
far slower than that of one chain.

Where columns are too few to occupy the GPU, K is split (`splitk`). B is marked to leave the caches first, because it is
read only once.

Sources: Little's law gives an H100 some 20 KiB in flight on each SM (3.35 TB/s, 132 SMs, 700 ns). Half as much again is
requested, because programs wait for all loads of a step before they issue the next. (Volkov, "Better performance at
lower occupancy", GTC 2010, is about few threads with many loads each.) Tiles and limits are from a sweep on an H100.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from ..arithmetic import HALF, IEEE, TF32
from ..compat import dot_operand, prefetch, round_to
from ..config import TileConfig
from ..hardware.device import DeviceInfo
from ..hardware.device_model import DeviceModel
from ..problem import GemmProblem, round_up
from .candidate import Algorithm, Candidate
from .cost_model import load_imbalance, on_busiest_sm, soft_maximum, traffic
from .epilogue import after_activation, before_activation
from .launch import MAX_SIZE, Launch, Pointer, Scalar
from .programmatic import follow
from .splitk import MAX_COUNTERS, last_to_arrive
from .tiles import Output, store_beside, vector, whole

MAX_ROWS = 4
WARPS_PER_SM = 32  # with some 64 registers a thread
BYTES_PER_SM = 30 << 10  # that all programs of an SM ask for in one step
SHORTEST_STREAM = 4  # steps along K that are worth a program
MAX_SPLIT = 32
FULL_ENOUGH = 0.8  # of what programs and lanes could do in the waves that they take
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
ARITHMETICS = (HALF, IEEE, TF32)
MAX_GRID_Z = 65_535  # and Y; CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"

# (BLOCK_N, BLOCK_K, num_warps, num_stages): what came within 1 % of the fastest somewhere, where no other did better
# throughout. Where B's unit stride runs along K, all threads lie along K.
K_MAJOR_TILES = (
    (4, 1024, 4, 1),
    (2, 1024, 4, 1),
    (2, 2048, 4, 1),
    (1, 2048, 4, 1),
    (1, 4096, 8, 1),
    (4, 512, 2, 1),
    (4, 2048, 4, 1),
    (4, 2048, 8, 1),
    (2, 2048, 4, 4),
    (4, 1024, 4, 5),
    (8, 512, 2, 4),
    (8, 1024, 4, 3),
)
# Where it runs along N, threads lie along N, and what is left of them along K.
N_MAJOR_TILES = (
    (64, 128, 4, 1),
    (64, 64, 4, 1),
    (64, 32, 2, 1),
    (32, 64, 2, 1),
    (128, 32, 4, 1),
    (32, 512, 16, 1),
    (64, 32, 4, 5),
    (128, 32, 4, 4),
)


@dataclass(frozen=True)
class Config(TileConfig):
    """BLOCK_M: all rows of C, as a power of two."""


CONFIGS = tuple(
    Config(rows, n, k, warps, stages) for rows in (1, 2, 4) for n, k, warps, stages in K_MAJOR_TILES + N_MAJOR_TILES
)


@triton.jit
def gemv_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    preactivation_ptr,
    workspace_ptr,
    counters_ptr,
    M,
    N,
    K,
    stride_ab,
    stride_am,
    stride_ak,
    stride_bb,
    stride_bk,
    stride_bn,
    stride_cb,
    stride_cm,
    stride_cn,
    alpha,
    beta,
    HAS_BETA: tl.constexpr,
    BIAS: tl.constexpr,
    ACTIVATION: tl.constexpr,
    A_UNIT: tl.constexpr,
    A_VECTOR: tl.constexpr,
    B_UNIT: tl.constexpr,
    B_VECTOR: tl.constexpr,
    EVEN_N: tl.constexpr,
    EVEN_K: tl.constexpr,
    SPLIT_K: tl.constexpr,
    LANES_K: tl.constexpr,
    VECTOR_K: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    NUM_STAGES: tl.constexpr,
    PDL: tl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias). Products within a thread are summed at once, LANES_K sums are kept
    to the end.

    Args:
        X_UNIT: The dimension of X with stride 1, 0 or 1, or None.
        X_VECTOR: Elements that may be read at once along it.
        EVEN_N, EVEN_K: Whether the blocks divide N and K.
        LANES_K: Threads side by side along K, each with VECTOR_K neighbouring elements.
    """
    # Locate the tile
    pid_n = tl.program_id(0)
    pid_k = tl.program_id(1)
    batch = tl.program_id(2).to(tl.int64)
    k_tiles = tl.cdiv(K, BLOCK_K)
    k_begin = k_tiles * pid_k // SPLIT_K
    k_end = k_tiles * (pid_k + 1) // SPLIT_K

    # Prologue
    offs_m = tl.arange(0, BLOCK_M)
    offs_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    offs_k = tl.arange(0, BLOCK_K).to(tl.int64)
    in_n = (offs_n < whole(N, B_VECTOR if B_UNIT == 1 else 1))[None, :, None]
    rows = tl.minimum(offs_m, M - 1).to(tl.int64)[:, None, None]  # instead of a mask; what they give is not stored
    columns = offs_n.to(tl.int64)[None, :, None]
    a_ptrs = a_ptr + batch * whole(stride_ab, A_VECTOR)
    if A_UNIT == 1:
        a_ptrs += rows * whole(stride_am, A_VECTOR) + offs_k
    else:
        a_ptrs += rows * stride_am + offs_k * whole(stride_ak, A_VECTOR)
    b_ptrs = b_ptr + batch * whole(stride_bb, B_VECTOR)
    if B_UNIT == 0:
        b_ptrs += columns * whole(stride_bn, B_VECTOR) + offs_k
    else:
        b_ptrs += columns * stride_bn + offs_k * whole(stride_bk, B_VECTOR)
    if PDL and B_UNIT is not None and K > 0:
        # What may not be read yet may be asked for: see `skinny`
        FETCHED: tl.constexpr = 512 // b_ptr.dtype.element_ty.primitive_bitwidth  # elements in 64 bytes
        if B_UNIT == 0:
            first_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
            first_k = tl.arange(0, BLOCK_K // FETCHED) * FETCHED
        else:
            first_n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N // FETCHED) * FETCHED
            first_k = tl.arange(0, BLOCK_K)
        first_n = tl.minimum(first_n, N - 1).to(tl.int64)[:, None]
        first_k = tl.minimum(k_begin * BLOCK_K + first_k, K - 1).to(tl.int64)[None, :]
        prefetch(b_ptr + batch * stride_bb + first_n * stride_bn + first_k * stride_bk)
    follow(PDL)
    acc = tl.zeros((BLOCK_M, BLOCK_N, LANES_K), dtype=tl.float32)

    # Main loop
    for kt in tl.range(k_begin, k_end, num_stages=NUM_STAGES):
        k = tl.cast(kt, tl.int64) * BLOCK_K
        # a [BLOCK_M, 1, BLOCK_K], again and again from L1; b [1, BLOCK_N, BLOCK_K], once from DRAM
        if EVEN_K:
            a = tl.load(a_ptrs + k * stride_ak)
        else:
            in_k = (offs_k < whole(K - k, A_VECTOR if A_UNIT == 1 else 1))[None, None, :]
            a = tl.load(a_ptrs + k * stride_ak, mask=in_k, other=0.0)
        if EVEN_N and EVEN_K:
            b = tl.load(b_ptrs + k * stride_bk, eviction_policy="evict_first")
        elif EVEN_K:
            b = tl.load(b_ptrs + k * stride_bk, mask=in_n, other=0.0, eviction_policy="evict_first")
        else:
            in_k = (offs_k < whole(K - k, B_VECTOR if B_UNIT == 0 else 1))[None, None, :]
            b = tl.load(b_ptrs + k * stride_bk, mask=in_n & in_k, other=0.0, eviction_policy="evict_first")
        products = dot_operand(a).to(tl.float32) * dot_operand(b).to(tl.float32)
        products = tl.reshape(products, (BLOCK_M, BLOCK_N, BLOCK_K // (LANES_K * VECTOR_K), LANES_K, VECTOR_K))
        acc += tl.sum(tl.sum(products, 4), 2)

    # Epilogue
    sums = tl.sum(acc, 2)  # [BLOCK_M, BLOCK_N]
    if SPLIT_K == 1:
        start = batch * stride_cb
        out = Output(
            c_ptr + start, M, N, stride_cm, stride_cn, bias_ptr, 1, None, None, alpha, beta, preactivation_ptr, start
        )  # fmt: skip
        store_sums(sums, offs_m, offs_n, out, HAS_BETA, BIAS, ACTIVATION)
    else:
        tile_id = batch * tl.num_programs(0) + pid_n
        partial = tl.arange(0, BLOCK_M)[:, None] * BLOCK_N + tl.arange(0, BLOCK_N)[None, :]
        partial_ptrs = workspace_ptr + tile_id * (SPLIT_K * BLOCK_M * BLOCK_N) + partial
        tl.store(partial_ptrs + pid_k * (BLOCK_M * BLOCK_N), sums)
        if last_to_arrive(counters_ptr + tile_id, SPLIT_K):
            total = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)
            for split in tl.static_range(SPLIT_K):
                # .cg: past L1, which other SMs' stores do not reach
                total += tl.load(partial_ptrs + split * (BLOCK_M * BLOCK_N), cache_modifier=".cg")
            start = batch * stride_cb
            out = Output(
                c_ptr + start, M, N, stride_cm, stride_cn, bias_ptr, 1, None, None, alpha, beta,
                preactivation_ptr, start,
            )  # fmt: skip
            store_sums(total, offs_m, offs_n, out, HAS_BETA, BIAS, ACTIVATION)


@triton.jit
def store_sums(
    sums, offs_m, offs_n, out, HAS_BETA: tl.constexpr, BIAS: tl.constexpr, ACTIVATION: tl.constexpr
):  # fmt: skip
    """Stores sums [BLOCK_M, BLOCK_N], through the epilogue, as rows offs_m and columns offs_n of C. out: Output."""
    mask = (offs_m < out.M)[:, None] & (offs_n < out.N)[None, :]
    c_ptrs = out.c_ptr + offs_m.to(tl.int64)[:, None] * out.stride_m + offs_n.to(tl.int64)[None, :] * out.stride_n
    c = sums
    if HAS_BETA:
        c = dot_operand(tl.load(c_ptrs, mask=mask, other=0.0))
    bias = sums
    if BIAS == "m":
        bias = dot_operand(tl.load(out.bias_ptr + offs_m, mask=offs_m < out.M, other=0.0))[:, None]
    elif BIAS == "n":
        bias = dot_operand(tl.load(out.bias_ptr + offs_n, mask=offs_n < out.N, other=0.0))[None, :]
    sums = before_activation(sums, out.alpha, out.beta, c, bias, HAS_BETA, BIAS is not None)
    if out.preactivation_ptr is not None:
        store_beside(sums, out.preactivation_ptr, offs_m.to(tl.int64), offs_n.to(tl.int64), mask, out, None, 1)
    result = after_activation(sums, out.beta, c, HAS_BETA, ACTIVATION)
    tl.store(c_ptrs, round_to(result, out.c_ptr.dtype.element_ty), mask=mask)


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: int = 1) -> str | None:
    """Why `config` with K in `split_k` parts cannot or should not compute `problem` on `device`, or None if it can."""
    rows, block_n, block_k = _blocks(config)
    if problem.M > MAX_ROWS:
        return f"{problem.M} rows are more than {MAX_ROWS}"
    if problem.gate:
        return "multiplies by one matrix, and a gate is a second one"
    if problem.dtype not in DTYPES:
        return f"it multiplies no {problem.dtype}"
    if problem.arithmetic not in ARITHMETICS or problem.scales or problem.groups:
        return f"multiplies whole matrices, without scales, and fp32 by FMAs, not in {problem.precision}"
    if max(problem.N, problem.K, -(-problem.K // block_k) * split_k) > MAX_SIZE:
        return f"sizes, and k-tiles times parts of K, must not exceed {MAX_SIZE}"
    if rows != _rows(problem):
        return f"its tile has {rows} rows for {problem.M}"
    threads, itemsize = 32 * config.num_warps, problem.dtype.itemsize
    if _along_k(problem) and block_k * itemsize < 16 * threads:
        return f"{block_k} elements along K are too few for {threads} threads"
    if not _along_k(problem) and block_n * itemsize < 64:
        return f"{block_n} columns are less than 64 bytes of a row"
    if config.num_stages > 1 and not _along_k(problem) and rows * block_k >= threads:
        return f"{rows} x {block_k} elements of A would decide which thread reads what of B"
    loads = (rows + block_n) * block_k // threads
    if not _wide(problem) and loads > 64:
        return f"{loads} elements read less than 16 bytes at a time leave too few registers"
    if problem.batch > MAX_GRID_Z:
        return f"{problem.batch} products are more than a grid's third axis takes"
    if not 1 <= split_k <= MAX_GRID_Z:
        return f"{split_k} parts of K are not what a grid's second axis takes"
    tiles = _tiles(problem, config)
    if split_k > 1 and tiles > MAX_COUNTERS:
        return f"{tiles} tiles of partial sums are more than there are counters"
    shared = config.num_stages * (rows + block_n) * block_k * itemsize if config.num_stages > 1 else 0
    if shared > device.shared_memory:
        return f"needs {shared} bytes of shared memory, {device.name} has {device.shared_memory}"
    return None


def default(problem: GemmProblem, device: DeviceInfo) -> tuple[Config, int]:
    """A configuration and a split of K for `problem` without tuning.

    A program along K asks for 4 or 8 KiB in a step, along N for 16 KiB. With one row, and along K always, loads are
    all there is to wait for: the fewest parts of K that ask for BYTES_PER_SM on every SM. With more rows along N the
    FMAs take as long as the loads, so as many programs as an SM holds. Programs beyond that come in waves, of which
    the last should not be nearly empty.
    """
    rows, sms = _rows(problem), device.num_sms
    unit = 2 / problem.dtype.itemsize  # tiles below are of 16-bit elements
    along_k = _along_k(problem)

    def tile(n: int, k: int, warps: int) -> Config:
        n, k = (n, int(k * unit)) if along_k else (int(n * unit), k)
        return Config(rows, n, k, warps)

    def use(config: Config, resident: int) -> float:
        """The useful part of what `resident` programs on each SM could do in the waves that they take."""
        waves = _tiles(problem, config) / (resident * sms)
        k = _blocks(config)[2]
        return waves / max(1, math.ceil(waves)) * problem.K / max(1, round_up(problem.K, k))

    resident = 0  # 0: as few programs as ask for enough
    if along_k and not _wide(problem):
        config = tile(4 if rows == 4 else 2, 1024, 4)
    elif along_k and rows == 4:
        # 72 registers, and 64: half of the loads of A for each of B, or programs that are half as large
        few, many = tile(4, 1024, 4), tile(2, 2048, 4)
        config = few if use(few, 7) >= min(FULL_ENOUGH, use(many, 8)) else many
    elif along_k:
        config = tile(rows, 2048, 4) if problem.K > 1024 * unit else tile(2 * rows, 1024, 4)
    elif not _wide(problem):
        config = tile(64, 32, 4)
    elif rows == 1:
        config = tile(64, 128, 4)
        if _tiles(problem, config) > 8 * sms and use(config, 8) < FULL_ENOUGH:
            config = tile(64, 64, 4)
    elif problem.batch * problem.N >= 60 * unit * sms:
        config, resident = tile(64, 128, 4), 4
    else:
        config, resident = tile(32, 64, 2), 8

    _, block_n, block_k = _blocks(config)
    tiles = max(1, _tiles(problem, config))
    if resident:
        parts = _power_of_two_below(resident * sms // tiles)
    else:
        wanted = -(-BYTES_PER_SM * sms // (block_n * block_k * problem.dtype.itemsize))
        parts = triton.next_power_of_2(-(-wanted // tiles))
    return config, max(1, min(parts, problem.K // (SHORTEST_STREAM * block_k), MAX_SPLIT))


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds. The names are those of files of figures."""

    KERNEL = "gemv"

    start: float  # us of a program's first loads and its stores
    finish: tuple[float, float]  # us of a program's end, of an SM: a constant, and for each sum across threads along K
    wait: tuple[float, float]  # us of waiting for a step's loads: a constant, and for each element that a thread loads
    fmas: float  # multiply-adds in a us of an SM, loads and conversions included, where threads lie along K
    fmas_n: float  # and where they lie along N
    share: float  # us of all parts of a sum together
    part: float  # us of adding one part
    piled: float  # of the programs that an SM has room for, how many come together though others have none
    memory: float  # share of memory's bandwidth that is reached where threads lie along K (K-major B)
    memory_n: float  # and where they lie along N (N-major B)
    # With two to four rows and a K-major B, the weight of what the busiest SM loads beyond the average; 0 in figures
    # fitted without it.
    imbalance: float
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """The narrower side as rows, in the tile of `default`, with K in about as many parts."""
    if min(problem.M, problem.N) > MAX_ROWS or problem.dtype not in DTYPES or problem.groups or problem.gate:
        return
    swap_ab = problem.N < problem.M
    given = problem.swap_ab() if swap_ab else problem
    config, split_k = default(given, device)
    for parts in sorted({1, max(1, split_k // 2), split_k, 2 * split_k}):
        yield Candidate(given, Algorithm("gemv", config, parts, swap_ab))


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, whose programs wait for their loads, for memory, or for one another."""
    costs, tiles = model.costs(Costs), _tiles(problem, config)
    steps = -(-problem.K // (split_k * config.BLOCK_K))
    loads = (config.BLOCK_M + config.BLOCK_N) * config.BLOCK_K // (32 * config.num_warps)
    wait = costs.wait[0] + costs.wait[1] * loads
    size = config.BLOCK_M * config.BLOCK_N * config.BLOCK_K
    along_k = _along_k(problem)
    work = size / (costs.fmas if along_k else costs.fmas_n)
    finish = costs.finish[0] + costs.finish[1] * config.BLOCK_M * config.BLOCK_N * along_k

    def together(programs: float) -> float:
        return costs.start + programs * finish + steps * soft_maximum(wait, programs * work)

    grid = tiles * split_k, model.num_sms, WARPS_PER_SM // config.num_warps
    busy = on_busiest_sm(*grid, together, costs.piled)
    shared = costs.share + split_k * costs.part if split_k > 1 else 0.0
    spread = costs.spread * min(1.0, tiles * split_k / model.num_sms)
    memory = traffic(problem) / ((costs.memory if along_k else costs.memory_n) * model.memory)
    if costs.imbalance and along_k and config.BLOCK_M > 1:  # of one row, and along N, the slower one alone fits better
        # SMs share the bandwidth evenly, so the busiest waits longer for memory than the average one.
        memory *= 1 + costs.imbalance * (1 / (1 - load_imbalance(*grid, costs.piled)) - 1)
        return model.launch + spread + shared + soft_maximum(busy, memory)
    return model.launch + spread + shared + max(busy, memory)


def order_of_sums(problem: GemmProblem, config: Config, split_k: int = 1) -> str:
    """The threads along K sum what falls to them, and one another's sums in a tree, which the compiler lays out."""
    threads, elements = _threads_along_k(problem, config)
    parts = "" if split_k == 1 else f" of {split_k} parts of K"
    return f"{threads} threads along K{parts}, {elements} elements at once, tiles {config}, gemv"


def launches(problem: GemmProblem, config: Config, split_k: int = 1) -> tuple[Launch, ...]:
    """The one launch that computes `problem`, its sums over K in `split_k` parts; none for an empty result.

    Operands: "a", "b", "c", the auxiliary ones, and if K is split "workspace" (fp32) and "counters" (int32).
    """
    rows, block_n, block_k = _blocks(config)
    tiles = _tiles(problem, config)
    if problem.M * tiles == 0:
        return ()
    assert problem.M <= rows and problem.batch <= MAX_GRID_Z and 1 <= split_k <= MAX_GRID_Z
    assert split_k == 1 or tiles <= MAX_COUNTERS
    a_unit, a_vector = vector(problem.a, (problem.M, problem.K), problem.dtype)
    b_unit, b_vector = vector(problem.b, (problem.K, problem.N), problem.dtype)
    lanes_k, vector_k = _threads_along_k(problem, config)
    arguments = {
        "a_ptr": Pointer("a"),
        "b_ptr": Pointer("b"),
        "c_ptr": Pointer("c"),
        "bias_ptr": None if problem.bias is None else Pointer("bias"),
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        "workspace_ptr": None if split_k == 1 else Pointer("workspace"),
        "counters_ptr": None if split_k == 1 else Pointer("counters"),
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        **{
            f"stride_{name}{dimension}": stride
            for name, layout, dimensions in (("a", problem.a, "bmk"), ("b", problem.b, "bkn"), ("c", problem.c, "bmn"))
            for dimension, stride in zip(dimensions, layout.strides, strict=True)
        },
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "HAS_BETA": problem.added,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        "A_UNIT": a_unit,
        "A_VECTOR": a_vector,
        "B_UNIT": b_unit,
        "B_VECTOR": b_vector,
        "EVEN_N": problem.N % block_n == 0,
        "EVEN_K": problem.K % block_k == 0,
        "SPLIT_K": split_k,
        "LANES_K": lanes_k,
        "VECTOR_K": vector_k,
        "BLOCK_M": rows,
        "BLOCK_N": block_n,
        "BLOCK_K": block_k,
        "NUM_STAGES": config.num_stages,
        "PDL": False,
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    grid = (tiles // problem.batch, split_k, problem.batch)
    if split_k == 1:
        return (Launch(gemv_kernel, grid, arguments, options),)
    workspace = 4 * split_k * tiles * rows * block_n
    return (Launch(gemv_kernel, grid, arguments, options, workspace=workspace, counters=tiles),)


def _blocks(config: Config) -> tuple[int, int, int]:
    return config.BLOCK_M, config.BLOCK_N, config.BLOCK_K


def _rows(problem: GemmProblem) -> int:
    """M, as the power of two that a tile has rows."""
    return int(triton.next_power_of_2(max(1, problem.M)))


def _tiles(problem: GemmProblem, config: Config) -> int:
    _, block_n, _ = _blocks(config)
    return problem.batch * -(-problem.N // block_n)


def _along_k(problem: GemmProblem) -> bool:
    """Whether threads that are neighbours read neighbours along K; where no stride is 1 they do too."""
    return vector(problem.b, (problem.K, problem.N), problem.dtype)[0] != 1


def _wide(problem: GemmProblem) -> bool:
    """Whether B can be read 16 bytes at a time."""
    return vector(problem.b, (problem.K, problem.N), problem.dtype)[1] * problem.dtype.itemsize == 16


def _threads_along_k(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """(threads side by side along K, elements of each) in the layout that Triton gives to loads of B.

    Only speed depends on it: in any other layout the sums in the loop would pass from thread to thread.
    """
    _, block_n, block_k = _blocks(config)
    threads = 32 * config.num_warps
    unit, elements = vector(problem.b, (problem.K, problem.N), problem.dtype)
    if unit != 1:
        return min(threads, block_k // elements), elements
    return min(block_k, max(1, threads * elements // block_n)), 1


def _power_of_two_below(value: int) -> int:
    """The largest power of two up to `value`, or 1."""
    return 1 << max(0, value.bit_length() - 1)
