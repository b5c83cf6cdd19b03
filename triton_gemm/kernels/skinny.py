"""Products of up to 16 rows, or columns, whose operands lie along K: read at the speed of memory, multiplied by `mma`.

A step takes each warp 128 elements along K, of all rows and columns of a tile. The warps of a program lie along K, and
their sums are added once, at the end. So no other warp needs what a warp multiplies, and operands go from memory
straight into the registers that `mma` reads. There is no shared memory and no barrier before the end, and the next
step's loads are under way while this one is multiplied.

`mma` wants of each thread pairs of neighbours along K, which would be loads of 4 bytes. But a sum does not care for the
order of its terms. With a k_width of 8 a thread takes 8 neighbours, 16 bytes, and both operands agree on which four
`mma`s they go into. (Triton made k_width for operands of two widths. Marlin lays quantised weights out like that,
Frantar et al., PPoPP 2025.)

Under programmatic launches a kernel must not read what the one before it may still write. But it may ask for it: a line
of L2 that is written later is written there. So the first step's lines come from DRAM while the kernel before runs out.
4 x 4096 x 4096 takes 12.2 us instead of 14.4 after one of its own kind, and 13.3 instead of 14.7 between other kernels
(an H100, bf16). Where all of it takes 3 us it spares nothing.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import triton.language as tl
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import mma_v2

from ..arithmetic import HALF
from ..compat import prefetch
from ..config import REGISTERS_PER_SM, TileConfig
from ..hardware.device import INTERPRETER, DeviceInfo
from ..hardware.device_model import DeviceModel
from ..problem import GemmProblem
from .candidate import FEW_ROWS, Algorithm, Candidate
from .cost_model import load_imbalance, on_busiest_sm, soft_maximum, traffic
from .launch import MAX_SIZE, Launch, Pointer, Scalar
from .programmatic import follow
from .tiles import Epilogue, Output, store_tile, vector, whole

MAX_ROWS = FEW_ROWS
# The most of a thread, by columns of a tile: 8, 4 or 2 programs of 2, 4 or 8 warps fit an SM, and 6 or 3 of 2 or 4.
# Without a limit a K that steps do not divide took up to 132, so that a single program of 8 warps ran on an SM.
REGISTERS = {8: 128, 16: 168}
VECTOR = gl.constexpr(8)  # elements in 16 bytes
FETCHED = gl.constexpr(32)  # elements that one prefetch brings
SHARE = 128  # elements along K that a warp takes in a step


@gluon.jit
def along(size: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr):
    """0 to size - 1 along dimension DIM of three."""
    if DIM == 0:
        return gl.arange(0, size, gl.SliceLayout(1, gl.SliceLayout(2, layout)))[:, None, None]
    elif DIM == 1:
        return gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(2, layout)))[None, :, None]
    else:
        return gl.arange(0, size, gl.SliceLayout(0, gl.SliceLayout(1, layout)))[None, None, :]


@gluon.jit
def places(
    x_ptr, x, extent, stride, ROWS: gl.constexpr, SHARE: gl.constexpr, DIM: gl.constexpr, layout: gl.constexpr,
    STREAMED: gl.constexpr,
):  # fmt: skip
    """(pointers, k, inside) of the first step of ROWS rows of X from x on. Rows lie along dimension DIM, warps along
    the first, and K along the other. k: the place along K. inside: which rows are in the matrix. If STREAMED, rows past
    the end are clamped to the last one instead of masked; their results are not stored."""
    rows = x + along(ROWS, DIM, layout)
    k = along(gl.num_warps(), 0, layout) * SHARE + along(SHARE, 3 - DIM, layout)
    inside = rows < extent
    if STREAMED:
        rows = gl.minimum(rows, extent - 1)
    return x_ptr + rows.to(gl.int64) * whole(stride, VECTOR) + k, k, inside


@gluon.jit
def load(places, step, K, WHOLE: gl.constexpr, STREAMED: gl.constexpr):
    """The block of an operand at K offset `step`, as `places` has laid it out. WHOLE: it ends within K, so it has no
    mask along K; else elements past K are 0, and K - step must be a multiple of VECTOR. STREAMED: the operand is read
    once, so it is loaded as evict_first, and rows are not masked, as `places` has clamped them; else rows past the end
    are 0."""
    pointers, k, inside = places
    if WHOLE and STREAMED:
        return gl.load(pointers + step, eviction_policy="evict_first")
    else:
        if not WHOLE:
            in_k = k < whole(K - step, VECTOR)
            inside = in_k if STREAMED else inside & in_k
        return gl.load(pointers + step, mask=inside, other=0.0, eviction_policy="evict_first" if STREAMED else "")


@gluon.jit
def prefetch_rows(x_ptr, x, extent, stride, K, ROWS: gl.constexpr, SHARE: gl.constexpr):
    """Prefetches the first step of ROWS rows of X from x on into L2."""
    layout: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 8, 4], [gl.num_warps(), 1, 1], [2, 1, 0])
    rows = gl.minimum(x + along(ROWS, 1, layout), extent - 1)
    k = along(gl.num_warps(), 0, layout) * SHARE + along(SHARE // FETCHED, 2, layout) * FETCHED
    prefetch(x_ptr + rows.to(gl.int64) * whole(stride, VECTOR) + gl.minimum(k, K - 1))


@gluon.jit(
    do_not_specialize=[
        *("bias_ptr", "M", "N", "K"),
        *("stride_az", "stride_am", "stride_bz", "stride_bn", "stride_cz", "stride_cm", "stride_cn"),
    ]
)
def skinny_kernel(
    a_ptr,
    b_ptr,
    c_ptr,
    bias_ptr,
    preactivation_ptr,
    M: tl.int32,
    N: tl.int32,
    K: tl.int32,
    stride_az: tl.int64,
    stride_am: tl.int64,
    stride_bz: tl.int64,
    stride_bn: tl.int64,
    stride_cz: tl.int64,
    stride_cm: tl.int64,
    stride_cn: tl.int64,
    alpha,
    beta,
    C_UNIT: gl.constexpr,
    C_VECTOR: gl.constexpr,
    EVEN_K: gl.constexpr,
    STREAMED: gl.constexpr,
    HAS_BETA: gl.constexpr,
    BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PDL: gl.constexpr,
):
    """c = activation(alpha a @ b + beta c + bias), a [batch, M, K], b [batch, K, N], c [batch, M, N].

    STREAMED: the operand that is read once, "a" or "b". EVEN_K: whether BLOCK_K divides K. C_UNIT: the dimension of C
    that has stride 1: 0, 1 or None. C_VECTOR: elements that may be moved at once along it.
    """
    SHARE: gl.constexpr = BLOCK_K // gl.num_warps()
    sums_layout: gl.constexpr = gl.NVMMADistributedLayout([2, 0], [gl.num_warps(), 1, 1], [1, 16, 8])
    a_layout: gl.constexpr = gl.DotOperandLayout(0, sums_layout, VECTOR)
    b_layout: gl.constexpr = gl.DotOperandLayout(1, sums_layout, VECTOR)
    A_STREAMED: gl.constexpr = STREAMED == "a"
    B_STREAMED: gl.constexpr = STREAMED == "b"

    # Locate the tile
    num_m = gl.cdiv(M, BLOCK_M)
    num_n = gl.cdiv(N, BLOCK_N)
    tile = gl.program_id(0)
    batch = (tile // (num_m * num_n)).to(gl.int64)
    m = tile // num_n % num_m * BLOCK_M
    n = tile % num_n * BLOCK_N
    a_ptr += batch * whole(stride_az, VECTOR)
    b_ptr += batch * whole(stride_bz, VECTOR)

    # Prologue
    if PDL:
        if A_STREAMED:
            prefetch_rows(a_ptr, m, M, stride_am, K, BLOCK_M, SHARE)
        else:
            prefetch_rows(b_ptr, n, N, stride_bn, K, BLOCK_N, SHARE)
    follow(PDL)
    a_places = places(a_ptr, m, M, stride_am, BLOCK_M, SHARE, 1, a_layout, A_STREAMED)
    b_places = places(b_ptr, n, N, stride_bn, BLOCK_N, SHARE, 2, b_layout, B_STREAMED)
    a = load(a_places, 0, K, EVEN_K, A_STREAMED)
    b = load(b_places, 0, K, EVEN_K, B_STREAMED)
    acc = gl.zeros([gl.num_warps(), BLOCK_M, BLOCK_N], gl.float32, sums_layout)

    # Main loop: whole steps, without masks along K, then a partial one
    for k in range(BLOCK_K, K - BLOCK_K + 1, BLOCK_K):
        next_a = load(a_places, k, K, True, A_STREAMED)
        next_b = load(b_places, k, K, True, B_STREAMED)
        acc = mma_v2(a, b, acc)
        a = next_a
        b = next_b
    if not EVEN_K:
        k = gl.maximum(K // BLOCK_K, 1) * BLOCK_K  # past K, all masked, if the first step was the partial one
        next_a = load(a_places, k, K, False, A_STREAMED)
        next_b = load(b_places, k, K, False, B_STREAMED)
        acc = mma_v2(a, b, acc)
        a = next_a
        b = next_b
    acc = mma_v2(a, b, acc)

    # Epilogue
    sums = gl.sum(acc, 0)
    rows = m + gl.arange(0, BLOCK_M, gl.SliceLayout(1, sums.type.layout))
    columns = n + gl.arange(0, BLOCK_N, gl.SliceLayout(0, sums.type.layout))
    start = batch * whole(stride_cz, C_VECTOR)
    c_ptr += start
    store_tile(
        sums,
        rows.to(gl.int64),
        columns.to(gl.int64),
        Output(c_ptr, M, N, stride_cm, stride_cn, bias_ptr, 1, None, None, alpha, beta, preactivation_ptr, start),
        Epilogue(C_UNIT, C_VECTOR, None, HAS_BETA, BIAS, ACTIVATION),
    )


@dataclass(frozen=True)
class Config(TileConfig):
    """BLOCK_K: SHARE for each warp."""


def _config(m: int, n: int, num_warps: int) -> Config:
    return Config(m, n, SHARE * num_warps, num_warps, num_stages=2)


# Other shares of a warp, and more columns, were nowhere faster on an H100.
CONFIGS = tuple(_config(16, n, num_warps) for n, num_warps in ((8, 2), (8, 4), (8, 8), (16, 2), (16, 4)))


@dataclass(frozen=True)
class Costs:
    """What the kernel takes on one GPU. us: microseconds. The names are those of files of figures."""

    KERNEL = "skinny"

    start: float  # us of a program's first loads and its stores
    adding: float  # us of adding a warp's sums, of an SM
    wait: float  # us of waiting for a step's loads
    bytes: float  # in a us that an SM takes in from L2
    piled: float  # of the programs that an SM has room for, how many come together though others have none
    memory: float  # share of memory's bandwidth that is reached
    imbalance: float  # weight of SMs' load imbalance where memory is the bound; 0 in figures fitted without it
    spread: float  # us of starting programs on all SMs at once; on fewer a share of it


def candidates(problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
    """Every tile, its 16 rows along the few rows of C or across them."""
    if min(problem.M, problem.N) > MAX_ROWS or problem.dtype.itemsize != 2 or problem.groups or not problem.K:
        return
    if problem.gate:
        return
    narrow_n = problem.N < problem.M  # first with the narrower side as rows
    for swap_ab in (narrow_n, not narrow_n):
        given = problem.swap_ab() if swap_ab else problem
        for config in CONFIGS:
            if given.M <= config.BLOCK_M or given.N <= config.BLOCK_N:
                yield Candidate(given, Algorithm("skinny", config, swap_ab=swap_ab))


def microseconds(problem: GemmProblem, config: Config, split_k: int, model: DeviceModel) -> float:
    """Predicted time of the busiest SM, whose programs wait for their loads, for memory, or for one another."""
    costs, programs, warps = model.costs(Costs), _tiles(problem, config), config.num_warps
    steps = -(-problem.K // config.BLOCK_K)
    rows = min(config.BLOCK_M, problem.M) + min(config.BLOCK_N, problem.N)
    work = rows * min(config.BLOCK_K, problem.K) * problem.dtype.itemsize / costs.bytes

    def together(count: float) -> float:
        finish = costs.start + count * (work + costs.adding * warps)
        return finish + (steps - 1) * soft_maximum(costs.wait, count * work)

    spread = costs.spread * min(1.0, programs / model.num_sms)
    grid = programs, model.num_sms, _at_once(config)
    busy = on_busiest_sm(*grid, together, costs.piled)
    # SMs share the bandwidth evenly, so when the average SM has finished, the busiest still has programs to run.
    memory = traffic(problem) / (costs.memory * model.memory)
    memory += costs.imbalance * load_imbalance(*grid, costs.piled) * busy
    return model.launch + spread + soft_maximum(busy, memory)


def order_of_sums(problem: GemmProblem, config: Config, split_k: int = 1) -> str:
    """Each warp sums 8 neighbours out of every 32, and these sums are added across warps, as lies with the tile."""
    return f"{config.num_warps} warps side by side along K, tiles {config.BLOCK_M}x{config.BLOCK_N}, skinny"


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: int = 1) -> str | None:
    """Why `device` cannot run `problem` in this configuration, or None if it can."""
    if device == INTERPRETER:
        return f"{device.name} runs no Gluon"
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, {device.name} has less"
    if problem.arithmetic is not HALF or problem.scales or problem.groups:
        return "multiplies whole matrices of 16 bits, without scales"
    if problem.gate:
        return "multiplies by one matrix, and a gate is a second one"
    if problem.K == 0:
        return "there is nothing to load"
    if split_k != 1:
        return "its programs share no sums"
    why = _shapeless(config)
    if why is not None:
        return why
    if problem.M > config.BLOCK_M and problem.N > config.BLOCK_N:
        return "its tiles share neither rows nor columns, so both operands would be read again and again"
    for name, layout, shape, k in (
        ("a", problem.a, (problem.M, problem.K), 1),
        ("b", problem.b, (problem.K, problem.N), 0),
    ):
        if vector(layout, shape, problem.dtype) != (k, VECTOR.value):
            return f"{name} cannot be read along k 16 bytes at a time"
    if max(problem.M, problem.N, problem.K + config.BLOCK_K, _tiles(problem, config)) > MAX_SIZE:
        return f"sizes, a step beyond K, and the number of tiles must not exceed {MAX_SIZE}"
    return None


def _shapeless(config: Config) -> str | None:
    """Why the kernel has no such tile, on any problem, or None."""
    m, n, k, num_warps = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps
    if m != MAX_ROWS or n not in REGISTERS:
        return f"its tiles are {MAX_ROWS}x{' or '.join(map(str, REGISTERS))}, not {m}x{n}"
    if k != SHARE * num_warps:
        return f"a step of {num_warps} warps is {SHARE * num_warps} elements along K, not {k}"
    if _at_once(config) == 0:
        return f"{num_warps} warps of {REGISTERS[n]} registers a thread are more than a multiprocessor has"
    return None


def launches(problem: GemmProblem, config: Config, split_k: int = 1) -> tuple[Launch, ...]:
    """The launch that computes `problem`, or none where C is empty."""
    tiles = _tiles(problem, config)
    if tiles == 0:
        return ()
    c_unit, c_vector = vector(problem.c, (problem.M, problem.N), problem.out_dtype)
    arguments = {
        "a_ptr": Pointer("a"),
        "b_ptr": Pointer("b"),
        "c_ptr": Pointer("c"),
        "bias_ptr": Pointer("bias") if problem.bias else None,
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "stride_az": problem.a.strides[0],
        "stride_am": problem.a.strides[1],
        "stride_bz": problem.b.strides[0],
        "stride_bn": problem.b.strides[2],
        **dict(zip(("stride_cz", "stride_cm", "stride_cn"), problem.c.strides, strict=True)),
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "C_UNIT": c_unit,
        "C_VECTOR": c_vector,
        "EVEN_K": problem.K % config.BLOCK_K == 0,
        "STREAMED": "a" if problem.M > problem.N else "b",
        "HAS_BETA": problem.added,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        **config.meta(),
        "PDL": False,
    }
    options = {"num_warps": config.num_warps, "maxnreg": REGISTERS[config.BLOCK_N]}
    return (Launch(skinny_kernel, (tiles, 1, 1), arguments, options),)


def _at_once(config: Config) -> int:
    """Programs that an SM has registers for."""
    return REGISTERS_PER_SM // (32 * config.num_warps * REGISTERS[config.BLOCK_N])


def _tiles(problem: GemmProblem, config: Config) -> int:
    return problem.batch * config.tiles(problem.M, problem.N)
