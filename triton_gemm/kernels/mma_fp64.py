"""fp64 on Hopper's tensor cores, by `mma` of 16 x 8 x 4.

`tl.dot` leaves the instruction to Triton, which takes 8 x 8 x 4 from 3.8 on, at half the rate. Here PTX names it. Of
what puts PTX into a kernel all Tritons have `inline_asm_elementwise` alone, whose operands have one shape. So a tile's
sums are [rows / 8, 8, columns / 8, 4, 2] here: a lane is one of 8 in a row's dimension and one of 4 in a column's. In
fragments of A and B the same lane is one of 8 rows, or columns, and has one of 4 elements along K. So both broadcast
to the sums' shape, and no value moves (PTX ISA, "Matrix Fragments for mma.m16n8k4").

Asynchronous copies bring operands to shared memory, a quarter of a warp out of one line of memory or two, as each takes
time. Groups of 4 elements are permuted there, so that half a warp, which reads four of them, finds them in different
banks. Fragments are read a step of 4 along K ahead of their products.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

import triton.language as tl
from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere.async_copy import commit_group, wait_group

from ..arithmetic import FP64
from ..compat import async_load
from ..config import REGISTERS_PER_SM, TileConfig
from ..hardware.device import INTERPRETER, DeviceInfo
from ..hardware.device_model import DeviceModel
from ..problem import GemmProblem
from .candidate import Algorithm, Candidate
from .cost_model import on_busiest_sm, soft_maximum, swap_for_c, traffic
from .launch import MAX_SIZE, Launch, Pointer, Scalar
from .order import ONE
from .schedule import tile_coordinates
from .tiles import Epilogue, Output, store_tile, vector, whole

CAPABILITY = (9, 0)  # PTX has this `mma` from here on, and no other GPU's was timed
QUARTERS = gl.constexpr(4)  # of a warp's rows, in the epilogue


@constexpr_function
def bits_of(size):
    """The bases of that many places: 1, 2, 4 .."""
    return [1 << i for i in range(size.bit_length() - 1)]


@constexpr_function
def warps_along_m(block_m, block_n, num_warps):
    """How many warps share a tile's rows, so that each reads least."""
    return min((m for m in (1, 2, 4, 8) if num_warps % m == 0), key=lambda m: block_m // m + block_n * m // num_warps)


@constexpr_function
def sums_layout(block_m, block_n, num_warps):
    """How lanes hold a tile's sums [block_m / 8, 8, block_n / 8, 4, 2]. A register's number has first the column of
    two, then a warp's rows by 8, then its columns by 8."""
    along_m = warps_along_m(block_m, block_n, num_warps)
    rows, columns = block_m // 8 // along_m, block_n // 8 * along_m // num_warps
    registers = [[0, 0, 0, 0, 1], *([i, 0, 0, 0, 0] for i in bits_of(rows))]
    registers += [[0, 0, j, 0, 0] for j in bits_of(columns)]
    lanes = [[0, 0, 0, 1, 0], [0, 0, 0, 2, 0], [0, 1, 0, 0, 0], [0, 2, 0, 0, 0], [0, 4, 0, 0, 0]]
    warps = [[0, 0, columns * j, 0, 0] for j in bits_of(num_warps // along_m)]
    warps += [[rows * i, 0, 0, 0, 0] for i in bits_of(along_m)]
    return gl.DistributedLinearLayout(registers, lanes, warps, [], [block_m // 8, 8, block_n // 8, 4, 2])


@constexpr_function
def fragment_layout(block_x, inner, warps, outer):
    """How lanes hold fragments [block_x, 4] of A or B. `warps` share the rows; inner, outer: how many before and after
    them have the same."""
    rows = block_x // 8 // warps
    registers = [[8 * i, 0] for i in bits_of(rows)]
    shared = [[8 * rows * i, 0] for i in bits_of(warps)]
    of_warps = [[0, 0]] * len(bits_of(inner)) + shared + [[0, 0]] * len(bits_of(outer))
    return gl.DistributedLinearLayout(registers, [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]], of_warps, [], [block_x, 4])


@constexpr_function
def copy_layout(block_x, block_k, num_warps, along_k, vector):
    """How threads copy a k-tile [block_x, block_k], `vector` elements each, side by side along K, or else along X."""
    of_x, of_k = [[i, 0] for i in bits_of(block_x)], [[0, i] for i in bits_of(block_k)]
    bases = of_k + of_x if along_k else of_x + of_k
    lanes = len(bits_of(vector))
    warps = lanes + 5
    others = warps + len(bits_of(num_warps))
    registers = bases[:lanes] + bases[others:]
    return gl.DistributedLinearLayout(registers, bases[lanes:warps], bases[warps:others], [], [block_x, block_k])


@constexpr_function
def shared_layout(along_k, block_k):
    """Of k-tiles [block_x, block_k] in shared memory: each 4 elements of a row, along K or along X, are where others of
    three neighbouring rows are not. Along K two rows of 8 fill the banks."""
    if not along_k:
        return gl.SwizzledSharedLayout(4, 1, 4, [0, 1])
    return gl.SwizzledSharedLayout(4, 2, 2, [1, 0]) if block_k == 8 else gl.SwizzledSharedLayout(4, 1, 4, [1, 0])


@constexpr_function
def mma_asm(block_m, block_n, num_warps):
    """PTX of a warp's products of 4 along K. $0 and on are new sums, in the order of `sums_layout`. Then come, for each
    sum, what is broadcast to it of A, and of B, and the old sum. Every other column of instructions goes upwards, so
    that an instruction shares an operand with the one before."""
    along_m = warps_along_m(block_m, block_n, num_warps)
    count = sums_of(block_m, block_n, num_warps)
    tiles_m, tiles_n = block_m // 16 // along_m, block_n // 8 * along_m // num_warps
    lines = []
    for j in range(tiles_n):
        for i in range(tiles_m)[:: 1 - 2 * (j % 2)]:
            first = 4 * (i + tiles_m * j)
            c, old = (", ".join(f"${start + first + e}" for e in range(4)) for start in (0, 3 * count))
            a, b = f"${count + first}, ${count + first + 2}", f"${2 * count + first}"
            lines.append(f"mma.sync.aligned.m16n8k4.row.col.f64.f64.f64.f64 {{{c}}}, {{{a}}}, {{{b}}}, {{{old}}};")
    return "\n".join(lines)


@constexpr_function
def sums_of(block_m, block_n, num_warps):
    """How many sums a lane holds."""
    return block_m * block_n // (32 * num_warps)


@constexpr_function
def constraints_of(sums):  # of which a new one replaces the old
    return ",".join(["=d"] * sums + ["d"] * (2 * sums) + [str(i) for i in range(sums)])


@gluon.jit
def pitches(stride_x, stride_k, UNIT: gl.constexpr, VECTOR: gl.constexpr):
    """The strides of rows and along K, the one that is 1 as a constant."""
    if UNIT == 0:
        return 1, whole(stride_k, VECTOR)
    elif UNIT == 1:
        return whole(stride_x, VECTOR), 1
    else:
        return stride_x, stride_k


@gluon.jit
def places(
    pitch_x, pitch_k, extent, UNIT: gl.constexpr, VECTOR: gl.constexpr, BLOCK_X: gl.constexpr, BLOCK_K: gl.constexpr
):  # fmt: skip
    """(offsets, k, inside) of a k-tile: from its first element on, along K, and which rows are in the matrix."""
    layout: gl.constexpr = copy_layout(BLOCK_X, BLOCK_K, gl.num_warps(), UNIT != 0, VECTOR)
    rows = gl.arange(0, BLOCK_X, gl.SliceLayout(1, layout))[:, None]
    k = gl.arange(0, BLOCK_K, gl.SliceLayout(0, layout))[None, :]
    return rows * pitch_x + k * pitch_k, k, rows < whole(extent, VECTOR if UNIT == 0 else 1)


@gluon.jit
def load(tile, x_ptr, places, left, UNIT: gl.constexpr, VECTOR: gl.constexpr):
    """Starts to copy a k-tile; what lies outside of the matrix, or after the `left` elements along K, becomes 0."""
    offsets, k, inside = places
    async_load(tile, x_ptr + offsets, mask=(k < whole(left, VECTOR if UNIT == 1 else 1)) & inside)


@gluon.jit
def fragments(a_tile, b_tile, step: gl.constexpr, layouts: gl.constexpr):
    """Fragments of A and B of a step of 4 along K, as they broadcast to the sums. layouts: A's, B's, and the sums'."""
    a = a_tile.slice(4 * step, 4, dim=1).load(layouts[0])
    b = b_tile.slice(4 * step, 4, dim=1).load(layouts[1])
    a = a.reshape((a.shape[0] // 8, 8, 4))
    b = b.reshape((b.shape[0] // 8, 8, 4)).permute((1, 0, 2))
    a = gl.convert_layout(a, gl.SliceLayout(2, gl.SliceLayout(4, layouts[2])), assert_trivial=True)
    b = gl.convert_layout(b, gl.SliceLayout(0, gl.SliceLayout(4, layouts[2])), assert_trivial=True)
    return a[:, :, None, :, None], b[None, :, :, :, None]


@gluon.jit
def quarters(acc, WARPS_M: gl.constexpr):
    """acc in four [BLOCK_M / 4, BLOCK_N], each a quarter of every warp's rows."""
    ROWS: gl.constexpr = acc.shape[0] // WARPS_M // 4
    N8: gl.constexpr = acc.shape[2]
    x = acc.reshape((WARPS_M, 2, 2, ROWS, 8, N8, 4, 2)).permute((0, 3, 4, 5, 6, 7, 2, 1))
    lower, upper = x.split()
    first, second = lower.split()
    third, fourth = upper.split()
    shape: gl.constexpr = (WARPS_M * ROWS * 8, N8 * 8)
    return first.reshape(shape), second.reshape(shape), third.reshape(shape), fourth.reshape(shape)


@gluon.jit(
    do_not_specialize=[
        *("bias_ptr", "M", "N", "K", "stride_az", "stride_am", "stride_ak", "stride_bz", "stride_bk", "stride_bn"),
        *("stride_cz", "stride_cm", "stride_cn"),
    ]
)
def mma_fp64_kernel(
    a_ptr, b_ptr, c_ptr, bias_ptr, preactivation_ptr, M: tl.int32, N: tl.int32, K: tl.int32,
    stride_az: tl.int64, stride_am: tl.int64, stride_ak: tl.int64,
    stride_bz: tl.int64, stride_bk: tl.int64, stride_bn: tl.int64,
    stride_cz: tl.int64, stride_cm: tl.int64, stride_cn: tl.int64, alpha: tl.float64, beta: tl.float64,
    A_UNIT: gl.constexpr, A_VECTOR: gl.constexpr, B_UNIT: gl.constexpr, B_VECTOR: gl.constexpr,
    C_UNIT: gl.constexpr, C_VECTOR: gl.constexpr,
    HAS_BETA: gl.constexpr, BIAS: gl.constexpr, ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, GROUP_M: gl.constexpr,
    num_stages: gl.constexpr,
):  # fmt: skip
    """c = activation(alpha a @ b + beta c + bias), a [batch, M, K], b [batch, K, N], c [batch, M, N].

    A_UNIT, B_UNIT: the dimension of A, and of B's transpose, that has stride 1: 0, 1 or None. C_UNIT: likewise of C.
    X_VECTOR: elements that may be moved at once along it.
    """
    # Locate the tile
    num_m, num_n = gl.cdiv(M, BLOCK_M), gl.cdiv(N, BLOCK_N)
    batch, pid_m, pid_n = tile_coordinates(gl.program_id(0), num_m, GROUP_M, GROUP_M * num_n, num_m * num_n)
    batch = batch.to(gl.int64)
    m, n = pid_m * BLOCK_M, pid_n * BLOCK_N

    # Prologue
    WARPS_M: gl.constexpr = warps_along_m(BLOCK_M, BLOCK_N, gl.num_warps())
    WARPS_N: gl.constexpr = gl.num_warps() // WARPS_M
    STEPS: gl.constexpr = BLOCK_K // 4
    a_ring = gl.allocate_shared_memory(gl.float64, [num_stages, BLOCK_M, BLOCK_K], shared_layout(A_UNIT != 0, BLOCK_K))
    b_ring = gl.allocate_shared_memory(gl.float64, [num_stages, BLOCK_N, BLOCK_K], shared_layout(B_UNIT != 0, BLOCK_K))
    a_m, a_k = pitches(stride_am, stride_ak, A_UNIT, A_VECTOR)
    b_n, b_k = pitches(stride_bn, stride_bk, B_UNIT, B_VECTOR)
    a_ptr += batch * whole(stride_az, A_VECTOR) + m.to(gl.int64) * a_m
    b_ptr += batch * whole(stride_bz, B_VECTOR) + n.to(gl.int64) * b_n
    a_places = places(a_m, a_k, M - m, A_UNIT, A_VECTOR, BLOCK_M, BLOCK_K)
    b_places = places(b_n, b_k, N - n, B_UNIT, B_VECTOR, BLOCK_N, BLOCK_K)
    for stage in gl.static_range(num_stages):
        load(a_ring.index(stage), a_ptr, a_places, K - stage * BLOCK_K, A_UNIT, A_VECTOR)
        load(b_ring.index(stage), b_ptr, b_places, K - stage * BLOCK_K, B_UNIT, B_VECTOR)
        commit_group()
        a_ptr += BLOCK_K * a_k
        b_ptr += BLOCK_K * b_k
    of_a: gl.constexpr = fragment_layout(BLOCK_M, WARPS_N, WARPS_M, 1)
    of_b: gl.constexpr = fragment_layout(BLOCK_N, 1, WARPS_N, WARPS_M)
    sums: gl.constexpr = sums_layout(BLOCK_M, BLOCK_N, gl.num_warps())
    layouts: gl.constexpr = (of_a, of_b, sums)
    asm: gl.constexpr = mma_asm(BLOCK_M, BLOCK_N, gl.num_warps())
    pack: gl.constexpr = sums_of(BLOCK_M, BLOCK_N, gl.num_warps())
    constraints: gl.constexpr = constraints_of(pack)
    acc = gl.zeros([BLOCK_M // 8, 8, BLOCK_N // 8, 4, 2], gl.float64, sums)
    wait_group(num_stages - 1)
    tl.debug_barrier()
    a, b = fragments(a_ring.index(0), b_ring.index(0), 0, layouts)

    # Main loop
    slot = 0
    left = K
    while left > 0:
        for step in gl.static_range(STEPS):
            if step < STEPS - 1:
                next_a, next_b = fragments(a_ring.index(slot), b_ring.index(slot), step + 1, layouts)
            else:
                wait_group(num_stages - 2)
                tl.debug_barrier()  # the next k-tile has come for all threads, and all have read this one
                load(a_ring.index(slot), a_ptr, a_places, left - num_stages * BLOCK_K, A_UNIT, A_VECTOR)
                load(b_ring.index(slot), b_ptr, b_places, left - num_stages * BLOCK_K, B_UNIT, B_VECTOR)
                commit_group()
                a_ptr += BLOCK_K * a_k
                b_ptr += BLOCK_K * b_k
                slot = gl.where(slot == num_stages - 1, 0, slot + 1)
                next_a, next_b = fragments(a_ring.index(slot), b_ring.index(slot), 0, layouts)
            acc = gl.inline_asm_elementwise(asm, constraints, [a, b, acc], dtype=gl.float64, is_pure=True, pack=pack)
            a = next_a
            b = next_b
        left -= BLOCK_K
    wait_group(0)  # the last copies are of nothing, but fill the ring with zeros

    # Epilogue, by quarters: all addresses of C, or activations, would not fit beside the sums.
    start = batch * whole(stride_cz, C_VECTOR)
    c_ptr += start
    first, second, third, fourth = quarters(acc, WARPS_M)
    ROWS: gl.constexpr = BLOCK_M // WARPS_M // QUARTERS
    for quarter in range(QUARTERS):
        rows = gl.arange(0, BLOCK_M // QUARTERS, gl.SliceLayout(1, first.type.layout))
        rows = (m + rows // ROWS * (QUARTERS * ROWS) + quarter * ROWS + rows % ROWS).to(gl.int64)
        columns = (n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, first.type.layout))).to(gl.int64)
        store_tile(
            first,
            rows,
            columns,
            Output(c_ptr, M, N, stride_cm, stride_cn, bias_ptr, 1, None, None, alpha, beta, preactivation_ptr, start),
            Epilogue(C_UNIT, C_VECTOR, None, HAS_BETA, BIAS, ACTIVATION),
        )
        first, second, third, fourth = second, third, fourth, first


@dataclass(frozen=True)
class Config(TileConfig):
    """GROUP_M: rows of tiles that follow one another, for the sake of L2."""

    GROUP_M: int = 8


# BLOCK_M, BLOCK_N, BLOCK_K, num_warps, num_stages; the second for what takes registers, and for few tiles.
CONFIGS = Config(64, 64, 8, 2, 4), Config(64, 64, 16, 4, 3)


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds. The names are those of files of figures."""

    KERNEL = "mma_fp64"

    products: float  # multiply-adds in a us of an SM
    side: float  # multiply-adds that an element of a fragment costs
    warps: float  # with which an SM reaches `products`
    step: float  # us that a program alone waits for a k-tile
    start: float  # us of filling the ring and storing a tile
    piled: float  # of the programs that an SM has room for, how many come together though others have none
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Every tile."""
    takes = problem.arithmetic is FP64 and problem.K and not (problem.groups or problem.gate)
    if takes and device.capability == CAPABILITY and device != INTERPRETER:
        swap_ab = swap_for_c(problem)
        given = problem.swap_ab() if swap_ab else problem
        for config in CONFIGS:
            yield Candidate(given, Algorithm("mma_fp64", config, 1, swap_ab))


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, or of memory."""
    costs, steps = model.costs(Costs), -(-problem.K // config.BLOCK_K)
    m, n, warps = config.BLOCK_M, config.BLOCK_N, config.num_warps
    along_m = warps_along_m(m, n, warps)
    work = config.BLOCK_K * m * n * (1 + costs.side * (along_m / m + warps / along_m / n)) / costs.products
    alone = costs.step + work * costs.warps / warps

    def together(programs: float) -> float:
        return steps * max(alone, programs * work) + costs.start

    tiles, registers = _num_tiles(problem, config), 32 * warps * (256 if config.accumulators(8) > 64 else 168)
    at_once = min(model.shared_memory_per_sm // config.shared_memory(8), REGISTERS_PER_SM // registers)
    busy = on_busiest_sm(tiles, model.num_sms, max(1, at_once), together, costs.piled)
    starting = model.launch + costs.spread * min(1.0, tiles / model.num_sms)
    return starting + soft_maximum(busy, traffic(problem) / model.memory)


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: int = 1) -> str | None:
    """Why `device` cannot run `problem` in this configuration, or None if it can."""
    if problem.arithmetic is not FP64:
        return f"multiplies fp64, not {problem.precision}"
    if device.capability != CAPABILITY or device == INTERPRETER:
        return f"needs Gluon and the fp64 tensor cores of compute capability 9.0, which {device.name} has not"
    if problem.K == 0:
        return "there is nothing to load"
    if problem.groups or problem.gate or split_k != 1:
        return "multiplies one matrix by another, without groups, gates and parts of K"
    if all(replace(config, num_stages=x.num_stages, GROUP_M=x.GROUP_M) != x for x in CONFIGS):
        return f"has no tile {config}"
    if config.num_stages < 2:  # a slot is filled while another is read
        return "a ring has two stages at least"
    if max(problem.M, problem.N, problem.K, _num_tiles(problem, config)) > MAX_SIZE:
        return f"sizes and the number of tiles must not exceed {MAX_SIZE}"
    added = problem.has_beta and problem.activation not in (None, "relu")
    if config.accumulators(8) > 64 and (added or problem.activation == "gelu"):
        return "what its epilogue computes leaves sums too few of a thread's registers"
    if config.shared_memory(8) > device.shared_memory:
        return f"needs {config.shared_memory(8)} bytes of shared memory, {device.name} has {device.shared_memory}"
    return None


def launches(problem: GemmProblem, config: Config, split_k: int = 1) -> tuple[Launch, ...]:
    """The launch that computes `problem`."""
    M, N, K, dtype = problem.M, problem.N, problem.K, problem.dtype
    a_unit, a_vector = vector(problem.a, (M, K), dtype)
    b_unit, b_vector = vector(problem.b.transposed, (N, K), dtype)
    c_unit, c_vector = vector(problem.c, (M, N), dtype)
    arguments = {
        **{"a_ptr": Pointer("a"), "b_ptr": Pointer("b"), "c_ptr": Pointer("c")},
        "bias_ptr": Pointer("bias") if problem.bias else None,
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        **{"M": M, "N": N, "K": K},
        **dict(zip(("stride_az", "stride_am", "stride_ak"), problem.a.strides, strict=True)),
        **dict(zip(("stride_bz", "stride_bk", "stride_bn"), problem.b.strides, strict=True)),
        **dict(zip(("stride_cz", "stride_cm", "stride_cn"), problem.c.strides, strict=True)),
        **{"alpha": Scalar("alpha"), "beta": Scalar("beta")},
        **{"A_UNIT": a_unit, "A_VECTOR": a_vector, "B_UNIT": b_unit, "B_VECTOR": b_vector},
        **{"C_UNIT": c_unit, "C_VECTOR": c_vector, "HAS_BETA": problem.added},
        **{"BIAS": problem.bias, "ACTIVATION": problem.activation, **config.meta()},
        "num_stages": config.num_stages,
    }
    return (Launch(mma_fp64_kernel, (_num_tiles(problem, config), 1, 1), arguments, {"num_warps": config.num_warps}),)


def order_of_sums(problem: GemmProblem, config: Config, split_k: int = 1) -> str:
    """4 of K after the other: all tiles, and operands in any order, give the same bits."""
    return f"mma_fp64, {ONE}"


def _num_tiles(problem: GemmProblem, config: Config) -> int:
    return problem.batch * config.tiles(problem.M, problem.N)
