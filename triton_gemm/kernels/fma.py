"""IEEE fp32 on CUDA cores: outer products out of shared memory, of operands that lie across K.

Tensor cores have no IEEE fp32. What counts is that an SM issues an FFMA in every clock. A thread owns 8 x 8 elements of
C. In each step along K it reads 8 elements of A and 8 of B from shared memory, 16 bytes at a time, and issues 64 FFMAs
on them. Within 128 registers 16 warps are on an SM, which hide one another's latencies.

An FFMA reads three registers from two banks. Taken in serpentine order, one row of the thread's elements forwards and
the next backwards, each shares an operand with the FFMA before it, which the reuse cache holds. The two others then
clash once in seven FFMAs instead of nearly always. Only inline assembly keeps that order. So that stores, which want
neighbours in neighbouring registers, have no say in where sums are accumulated, sums leave through the multiplication
by alpha, and the epilogue follows in quarters. (S. Gray, maxas, "SGEMM", on the same for Maxwell.)

Both operands must have their unit stride across K, as an outer product reads them: `repack` turns those that have not.
Turning them on their way into shared memory takes copies of 4 bytes, one for every 16 FFMAs, and was up to 1.5 times
slower.

Rounding errors grow with the length of a chain of sums: K is cut into parts of LONGEST_CHAIN at most, also where there
are tiles enough to occupy the GPU.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group

from ..arithmetic import IEEE
from ..compat import async_load, reinterpret
from ..config import REGISTERS_PER_SM, TileConfig
from ..hardware.device import INTERPRETER, DeviceInfo
from ..hardware.device_model import DeviceModel
from ..problem import GemmProblem, round_up
from . import repack
from .candidate import Algorithm, Candidate
from .cost_model import on_busiest_sm, soft_maximum, swap_for_c
from .launch import MAX_SIZE, Launch, Pointer, Scalar, Temporary
from .order import in_parts
from .programmatic import follow
from .schedule import tile_coordinates
from .splitk import MAX_COUNTERS, arrive, last_to_arrive, wait_turn
from .tiles import Epilogue, Output, store_tile, vector, whole

SIDE = 8  # of a thread's elements of C
VECTOR = gl.constexpr(4)  # elements in 16 bytes
HEIGHTS, WIDTHS = (32, 64, 128, 256), (64, 128, 256)  # of tiles, as `sums_layout` has them
WARPS_PER_SM = 16
LONGEST_CHAIN = 4096
MAX_SPLIT = 64
LARGEST_WORKSPACE = 64 << 20  # bytes that stay allocated


def _serpentine() -> str:
    """A thread's FMAs of one step along K in PTX. Operands are, for each element, the new sum, a, b, and the old sum,
    in the order of registers of `sums_layout`."""
    count = SIDE * SIDE

    def fma(i: int, j: int) -> str:
        element = (j & 3) | (i & 3) << 2 | (j >> 2) << 4 | (i >> 2) << 5
        return "fma.rn.f32 ${}, ${}, ${}, ${};".format(*range(element, 4 * count, count))

    return "\n".join(fma(i, j) for i in range(SIDE) for j in range(SIDE)[:: 1 - 2 * (i % 2)])


SERPENTINE = gl.constexpr(_serpentine())
OPERANDS = gl.constexpr(",".join([*["=f"] * 64, *["f"] * 128, *map(str, range(64))]))  # a new sum replaces the old one


@constexpr_function
def sums_layout(block_m, block_n):
    """How threads hold a tile of C: each 2 x 2 squares of 4 x 4, a warp 4 x 8 threads whose squares are neighbours. So
    its reads of shared memory are without conflicts, and 8 of them store a whole line of C."""
    return gl.DistributedLinearLayout(
        reg_bases=[[0, 1], [0, 2], [1, 0], [2, 0], [0, 32], [16, 0]],
        lane_bases=[[4, 0], [0, 4], [0, 8], [0, 16], [8, 0]],
        warp_bases=[[0, n] for n in (64, 128) if n < block_n] + [[m, 0] for m in (32, 64, 128) if m < block_m],
        block_bases=[],
        shape=[block_m, block_n],
    )


@constexpr_function
def copy_layout(block_x, num_warps):
    """How threads copy a tile [BLOCK_K, block_x]: 16 bytes each, side by side along a row."""
    across = min(32, block_x // 4)
    return gl.BlockedLayout([1, 4], [32 // across, across], [num_warps, 1], [1, 0])


@gluon.jit
def outer_product(a, b, acc):
    """acc + a b^T, of a [BLOCK_M] and b [BLOCK_N]."""
    return gl.inline_asm_elementwise(
        SERPENTINE, OPERANDS, [a[:, None], b[None, :], acc], dtype=gl.float32, is_pure=True, pack=64
    )


@gluon.jit
def times(alpha, acc):
    """alpha acc, in other registers than acc: what Triton sees it would fuse with an addition, or do in pairs."""
    return gl.inline_asm_elementwise(
        "mul.rn.f32 $0, $1, $2;", "=f,f,f", [acc, alpha], dtype=gl.float32, is_pure=True, pack=1
    )


@gluon.jit
def places(x, extent, stride, BLOCK_K: gl.constexpr, BLOCK_X: gl.constexpr):
    """(offsets, rows, inside) of a tile [BLOCK_K, BLOCK_X] whose columns begin at x: inside says which columns are in
    the matrix, by whole vectors. What a row's last vector has beyond it goes into columns that are not stored."""
    layout: gl.constexpr = copy_layout(BLOCK_X, gl.num_warps())
    rows = gl.arange(0, BLOCK_K, gl.SliceLayout(1, layout))
    columns = x + gl.arange(0, BLOCK_X, gl.SliceLayout(0, layout))
    offsets = rows[:, None] * whole(stride, VECTOR).to(gl.int32) + columns[None, :]
    return offsets, rows, columns < whole(extent + VECTOR - 1, VECTOR)


@gluon.jit
def load(tile, x_ptr, offsets, rows, inside, left):
    """Starts to copy a tile; what lies outside, or after the `left` rows, becomes 0."""
    async_load(tile, x_ptr + offsets, mask=(rows < left)[:, None] & inside[None, :])


@gluon.jit
def multiply(a_ptr, b_ptr, m, n, k, end, M, N, stride_ak, stride_bk, a_ring, b_ring):
    """The tile at (m, n), summed from k to `end`: [BLOCK_M, BLOCK_N]."""
    STAGES: gl.constexpr = a_ring.shape[0]
    BLOCK_K: gl.constexpr = a_ring.shape[1]
    BLOCK_M: gl.constexpr = a_ring.shape[2]
    BLOCK_N: gl.constexpr = b_ring.shape[2]
    layout: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N)
    acc = gl.zeros([BLOCK_M, BLOCK_N], gl.float32, layout)

    # Prologue
    a_offs, a_k, a_inside = places(m, M, stride_ak, BLOCK_K, BLOCK_M)
    b_offs, b_k, b_inside = places(n, N, stride_bk, BLOCK_K, BLOCK_N)
    a_ptr += k * whole(stride_ak, VECTOR)
    b_ptr += k * whole(stride_bk, VECTOR)
    for stage in gl.static_range(STAGES - 1):
        load(a_ring.index(stage), a_ptr, a_offs, a_k, a_inside, end - k - stage * BLOCK_K)
        load(b_ring.index(stage), b_ptr, b_offs, b_k, b_inside, end - k - stage * BLOCK_K)
        commit_group()
        a_ptr += BLOCK_K * whole(stride_ak, VECTOR)
        b_ptr += BLOCK_K * whole(stride_bk, VECTOR)

    # Main loop
    flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
    a_columns = reinterpret(a_ring, gl.float32, [STAGES * BLOCK_K, BLOCK_M], flat)
    b_rows = reinterpret(b_ring, gl.float32, [STAGES * BLOCK_K, BLOCK_N], flat)
    slot = 0
    left = end - k
    while left > 0:
        wait_group(STAGES - 2)
        tl.debug_barrier()  # the k-tile has come for all threads, and all are done with the one before
        free = gl.where(slot == 0, STAGES - 1, slot - 1)
        load(a_ring.index(free), a_ptr, a_offs, a_k, a_inside, left - (STAGES - 1) * BLOCK_K)
        load(b_ring.index(free), b_ptr, b_offs, b_k, b_inside, left - (STAGES - 1) * BLOCK_K)
        commit_group()
        a_ptr += BLOCK_K * whole(stride_ak, VECTOR)
        b_ptr += BLOCK_K * whole(stride_bk, VECTOR)
        for i in gl.static_range(BLOCK_K):
            a = a_columns.index(slot * BLOCK_K + i).load(gl.SliceLayout(1, layout))
            b = b_rows.index(slot * BLOCK_K + i).load(gl.SliceLayout(0, layout))
            acc = outer_product(a, b, acc)
        slot = gl.where(slot == STAGES - 1, 0, slot + 1)
        left -= BLOCK_K
    wait_group(0)  # the last copies are of nothing, but fill the ring with zeros
    return acc


@gluon.jit
def squares(acc):
    """acc in four [BLOCK_M / 2, BLOCK_N / 2], each one square of every thread."""
    BLOCK_M: gl.constexpr = acc.shape[0]
    BLOCK_N: gl.constexpr = acc.shape[1]
    x = acc.reshape((BLOCK_M // 32, 2, 16, BLOCK_N // 64, 2, 32)).permute((0, 2, 3, 5, 1, 4))
    left, right = x.split()
    first, third = left.split()
    second, fourth = right.split()
    shape: gl.constexpr = (BLOCK_M // 2, BLOCK_N // 2)
    return first.reshape(shape), second.reshape(shape), third.reshape(shape), fourth.reshape(shape)


@gluon.jit
def sums_pointers(sums_ptr, block, rows, columns, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr):
    """Where sums wait in memory, [blocks, BLOCK_M, BLOCK_N]."""
    size: gl.constexpr = BLOCK_M * BLOCK_N
    return sums_ptr + block.to(gl.int64) * size + rows[:, None] * BLOCK_N + columns[None, :]


@gluon.jit
def finish_square(
    sums, square, sums_ptr, tile, part, last, m, n, out, epi, SPLIT_K: gl.constexpr, IN_TURN: gl.constexpr
):  # fmt: skip
    """Adds other programs' sums to one square of every thread, and stores it. square: 0 to 3 for upper left, upper
    right, lower left and lower right. The square is stored in C, or in memory for partial sums until the last program's
    turn. out, epi: as for `store_tile`."""
    i = square // 2
    j = square % 2
    BLOCK_M: gl.constexpr = 2 * sums.shape[0]
    BLOCK_N: gl.constexpr = 2 * sums.shape[1]
    rows = gl.arange(0, BLOCK_M // 2, gl.SliceLayout(1, sums.type.layout))
    columns = gl.arange(0, BLOCK_N // 2, gl.SliceLayout(0, sums.type.layout))
    rows = rows // 16 * 32 + rows % 16 + 16 * i
    columns = columns // 32 * 64 + columns % 32 + 32 * j
    if IN_TURN:
        waiting = sums_pointers(sums_ptr, tile, rows, columns, BLOCK_M, BLOCK_N)
        if part > 0:
            sums += gl.load(waiting, cache_modifier=".cg")
        if not last:
            gl.store(waiting, sums, cache_modifier=".cg")
    elif SPLIT_K > 1:
        waiting = sums_pointers(sums_ptr, tile * SPLIT_K, rows, columns, BLOCK_M, BLOCK_N)
        sums = gl.load(waiting, cache_modifier=".cg")
        for _ in gl.static_range(1, SPLIT_K):
            waiting += BLOCK_M * BLOCK_N
            sums += gl.load(waiting, cache_modifier=".cg")
    if last:
        store_tile(sums, m + rows.to(gl.int64), n + columns.to(gl.int64), out, epi)


@gluon.jit(
    do_not_specialize=[
        *("bias_ptr", "counters_ptr", "M", "N", "K", "share"),
        *("stride_az", "stride_ak", "stride_bz", "stride_bk", "stride_cz", "stride_cm", "stride_cn"),
    ]
)
def fma_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    preactivation_ptr,
    sums_ptr,
    counters_ptr,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    share: tl.int32,
    stride_az: tl.int64,
    stride_ak: tl.int64,
    stride_bz: tl.int64,
    stride_bk: tl.int64,
    stride_cz: tl.int64,
    stride_cm: tl.int64,
    stride_cn: tl.int64,
    alpha,
    beta,
    C_UNIT: gl.constexpr,
    C_VECTOR: gl.constexpr,
    SPLIT_K: gl.constexpr,
    IN_TURN: gl.constexpr,
    HAS_BETA: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    GROUP_M: gl.constexpr,
    num_stages: gl.constexpr,
    PDL: gl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias), a [batch, M, K], b [batch, K, N], c [batch, M, N].

    Args:
        share: Elements along K that each of a tile's SPLIT_K programs sums.
        IN_TURN: Whether one program after the other adds its sum, or the last to arrive all of them.
        C_UNIT: The dimension of C with stride 1, 0 or 1, or None.
        C_VECTOR: Elements that may be moved at once along it.
    """
    follow(PDL)

    # Locate the tile, and this program's share of K
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    batch, pid_m, pid_n = tile_coordinates(tile, num_m, GROUP_M, GROUP_M * num_n, num_m * num_n)
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    part = gl.program_id(1)
    begin = part * share
    end = gl.minimum(begin + share, K)

    # Prologue
    ring_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    a_ring = gl.allocate_shared_memory(gl.float32, [num_stages, BLOCK_K, BLOCK_M], ring_layout)
    b_ring = gl.allocate_shared_memory(gl.float32, [num_stages, BLOCK_K, BLOCK_N], ring_layout)
    a_ptr += batch.to(gl.int64) * whole(stride_az, VECTOR)
    b_ptr += batch.to(gl.int64) * whole(stride_bz, VECTOR)

    # Main loop
    acc = multiply(a_ptr, b_ptr, m, n, begin, end, M, N, stride_ak, stride_bk, a_ring, b_ring)

    # Epilogue
    acc = times(alpha, acc)
    last = part == SPLIT_K - 1
    if IN_TURN:
        if part > 0:
            wait_turn(counters_ptr + tile, part, last)
    elif SPLIT_K > 1:
        layout: gl.constexpr = acc.type.layout
        rows = gl.arange(0, BLOCK_M, gl.SliceLayout(1, layout))
        columns = gl.arange(0, BLOCK_N, gl.SliceLayout(0, layout))
        waiting = sums_pointers(sums_ptr, tile * SPLIT_K + part, rows, columns, BLOCK_M, BLOCK_N)
        gl.store(waiting, acc, cache_modifier=".cg")
        last = last_to_arrive(counters_ptr + tile, SPLIT_K)
    if last or IN_TURN:
        # One square after the other: all addresses of C, or activations, would not fit beside 64 sums.
        start = batch.to(gl.int64) * whole(stride_cz, C_VECTOR)
        c_ptr += start
        first, second, third, fourth = squares(acc)
        for square in range(4):
            finish_square(
                first,
                square,
                sums_ptr,
                tile,
                part,
                last,
                m,
                n,
                Output(
                    c_ptr, M, N, stride_cm, stride_cn, bias_ptr, 1, None, None, 1.0, beta, preactivation_ptr, start
                ),  # alpha is in the sums
                Epilogue(C_UNIT, C_VECTOR, None, HAS_BETA, BIAS, ACTIVATION),
                SPLIT_K,
                IN_TURN,
            )
            first, second, third, fourth = second, third, fourth, first
    if IN_TURN:
        if not last:
            arrive(counters_ptr + tile)


@dataclass(frozen=True)
class Config(TileConfig):
    """GROUP_M: rows of tiles that follow one another, for the sake of L2."""

    GROUP_M: int = 8


CONFIGS = tuple(Config(m, n, 16, m * n // (32 * SIDE**2), 3) for m, n in ((128, 128), (64, 128), (64, 64)))


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds. The names are those of files of figures."""

    KERNEL = "fma"

    fmas: float  # multiply-adds in a us of an SM with many warps
    side: float  # multiply-adds that a loaded element costs
    warps: float  # that are at least busy where an SM is
    step: float  # us of waiting for a k-tile
    piled: float  # of the programs that an SM has room for, how many come together though others have none
    program: float  # us of filling the ring and storing a tile
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it
    handed_on: tuple[float, float]  # us of partial sums: a constant, and for TILE elements that are written or read


TILE = 16_384  # elements of the largest tile


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Over copies of what is not read across K, every tile, and K cut into as many parts as keep chains of sums short,
    or more, to occupy the GPU."""
    if problem.dtype != torch.float32 or problem.planes.count > 1 or problem.scales or problem.groups or not problem.K:
        return
    if problem.gate:
        return
    packed, swap_ab = unreadable(problem), swap_for_c(problem)
    readable = repack.repacked(problem, packed)
    given = readable.swap_ab() if swap_ab else readable
    for config in CONFIGS:
        count = _num_tiles(given, config)
        fewest = min(-(-given.K // LONGEST_CHAIN), MAX_SPLIT) if count <= MAX_COUNTERS else 1
        yield Candidate(given, Algorithm("fma", config, fewest, swap_ab, packed))
        for split_k in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            if fewest < split_k <= given.K // 64 and count * split_k <= 4 * device.num_sms:
                yield Candidate(given, Algorithm("fma", config, split_k, swap_ab, packed))


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM."""
    costs = model.costs(Costs)
    size = config.BLOCK_M * config.BLOCK_N
    pace = (1 + costs.side / config.BLOCK_M + costs.side / config.BLOCK_N) / costs.fmas
    steps, work = -(-problem.K // (split_k * config.BLOCK_K)), config.BLOCK_K * size * pace
    least = soft_maximum(costs.step, work * costs.warps / config.num_warps)
    handed_on = costs.handed_on[1] * size / TILE if split_k > 1 else 0.0

    def together(programs: float) -> float:
        return steps * soft_maximum(least, programs * work) + programs * handed_on + costs.program

    tiles = _num_tiles(problem, config)
    busy = on_busiest_sm(tiles * split_k, model.num_sms, WARPS_PER_SM // config.num_warps, together, costs.piled)
    adding = costs.handed_on[0] + handed_on * split_k if split_k > 1 else 0.0
    return model.launch + costs.spread * min(1.0, tiles * split_k / model.num_sms) + busy + adding


def unreadable(problem: GemmProblem) -> tuple[str, ...]:
    """The operands that must be copied first: those whose rows along M or N are not made of whole vectors."""
    sides = {"a": (problem.a.transposed, problem.M), "b": (problem.b, problem.N)}
    return tuple(
        name
        for name, (layout, extent) in sides.items()
        if vector(layout, (problem.K, extent), problem.dtype) != (1, 16 // problem.dtype.itemsize)
    )


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: int = 1) -> str | None:
    """Why `device` cannot run `problem`, its `unreadable` operands copied, in this configuration, or None if it can."""
    if problem.arithmetic is not IEEE:
        return f"multiplies IEEE fp32 on CUDA cores, not {problem.precision}"
    if device == INTERPRETER:
        return f"{device.name} runs no Gluon"
    if device.capability < (8, 0):
        return f"needs the asynchronous copies of compute capability 8.0, {device.name} has less"
    if problem.K == 0:
        return "there is nothing to load"
    if problem.scales or problem.groups:
        return "multiplies whole matrices, without scales"
    if problem.gate:
        return "multiplies by one matrix, and a gate is a second one"
    why = _shapeless(config)
    if why is not None:
        return why
    num_tiles, sizes = _num_tiles(problem, config), (problem.M, problem.N, problem.K)
    if max(*sizes, num_tiles) > MAX_SIZE:
        return f"sizes and the number of tiles must not exceed {MAX_SIZE}"
    if split_k > 1 and num_tiles > MAX_COUNTERS:
        return f"{num_tiles} tiles that programs share need more counters than {MAX_COUNTERS}"
    for name, layout, extent in (("a", problem.a.transposed, problem.M), ("b", problem.b, problem.N)):
        why = "its unit stride is along k" if layout.strides[2] != 1 else layout.tma_illegal(problem.dtype.itemsize)
        if why is not None:
            return f"16 bytes at a time of {name}: {why}"
        if config.BLOCK_K * layout.strides[1] + extent > MAX_SIZE:
            return f"a k-tile of {name} spans more than {MAX_SIZE} elements"
    if problem.has_beta and problem.activation == "gelu":
        return "beta C and gelu's polynomial leave sums too few of a thread's registers"
    if (
        problem.activation
        and _in_turn(problem, config, split_k)
        and config.num_warps == 8
        and device.capability[0] == 12
    ):
        return "an activation after others' sums leaves sums too few of a thread's registers"
    needed = config.shared_memory(problem.dtype.itemsize)
    if needed > device.shared_memory:
        return f"needs {needed} bytes of shared memory, {device.name} has {device.shared_memory}"
    return None


def _shapeless(config: Config) -> str | None:
    """Why the kernel has no such tile, on any problem, or None."""
    m, n, num_warps = config.BLOCK_M, config.BLOCK_N, config.num_warps
    if m not in HEIGHTS or n not in WIDTHS or m * n != 32 * SIDE**2 * num_warps or num_warps > WARPS_PER_SM:
        return f"a thread has {SIDE}x{SIDE} elements, which makes no tile {m}x{n} of {num_warps} warps"
    if config.num_stages < 2:  # a slot is filled while another is read
        return "a ring has two stages at least"
    return None


def launches(problem: GemmProblem, config: Config, split_k: int = 1) -> tuple[Launch, ...]:
    """The launch that computes `problem`. split_k: programs that share a tile's sum."""
    num_tiles = _num_tiles(problem, config)
    split, in_turn, size = split_k > 1, _in_turn(problem, config, split_k), config.BLOCK_M * config.BLOCK_N
    c_unit, c_vector = vector(problem.c, (problem.M, problem.N), problem.out_dtype)
    sums = Temporary("sums", (num_tiles, size), torch.float32)
    arguments = {
        "a_ptr": Pointer("a"),
        "b_ptr": Pointer("b"),
        "c_ptr": Pointer("c"),
        "bias_ptr": Pointer("bias") if problem.bias else None,
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        "sums_ptr": Pointer("sums") if in_turn else Pointer("workspace") if split else None,
        "counters_ptr": Pointer("counters") if split else None,
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "share": _share(problem, config, split_k),
        "stride_az": problem.a.strides[0],
        "stride_ak": problem.a.strides[2],
        "stride_bz": problem.b.strides[0],
        "stride_bk": problem.b.strides[1],
        **dict(zip(("stride_cz", "stride_cm", "stride_cn"), problem.c.strides, strict=True)),
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "C_UNIT": c_unit,
        "C_VECTOR": c_vector,
        "SPLIT_K": split_k,
        "IN_TURN": in_turn,
        "HAS_BETA": problem.added,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        **config.meta(),
        "num_stages": config.num_stages,
        "PDL": False,
    }
    return (
        Launch(
            fma_kernel,
            (num_tiles, split_k, 1),
            arguments,
            {"num_warps": config.num_warps, "maxnreg": REGISTERS_PER_SM // (32 * WARPS_PER_SM)},
            temporaries=(sums,) if in_turn else (),
            workspace=4 * split_k * num_tiles * size if split and not in_turn else 0,
            counters=num_tiles if split else 0,
        ),
    )


def order_of_sums(problem: GemmProblem, config: Config, split_k: int = 1) -> str:
    """One FMA after the other, in all tiles, and in parts, times alpha, one part after the other."""
    return f"FMAs, fma, {in_parts(split_k, _share(problem, config, split_k))}"


def _num_tiles(problem: GemmProblem, config: Config) -> int:
    return problem.batch * config.tiles(problem.M, problem.N)


def _share(problem: GemmProblem, config: Config, split_k: int) -> int:
    """Elements along K that each of a tile's programs sums."""
    return round_up(-(-problem.K // split_k), config.BLOCK_K)


def _in_turn(problem: GemmProblem, config: Config, split_k: int) -> bool:
    """Whether programs add their sums of a tile one after the other: where those of all would not fit a workspace."""
    size = config.BLOCK_M * config.BLOCK_N
    return split_k > 1 and 4 * split_k * _num_tiles(problem, config) * size > LARGEST_WORKSPACE
