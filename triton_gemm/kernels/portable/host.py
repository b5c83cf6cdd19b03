"""What the portable kernel can run, in which configurations, and its launches."""

from __future__ import annotations

from dataclasses import dataclass, replace

from ...arithmetic import EMULATED, HALF
from ...config import ASYNCHRONOUS, MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, TileConfig
from ...hardware.device import DeviceInfo
from ...problem import GemmProblem, Layout
from .. import groups
from ..candidate import Work
from ..launch import MAX_SIZE, Launch, Pointer, Scalar, TensorMap
from ..order import by_tensor_cores, exactly, in_parts, promoted
from ..schedule import Schedule
from ..tiles import vector
from .kernel import SCALED, portable_kernel, portable_tma_kernel


@dataclass(frozen=True)
class Config(TileConfig):
    """GROUP_M: rows of tiles that follow one another, for the sake of L2."""

    GROUP_M: int = 8


def _configs(tiles: list[tuple[int, int, int, int, int]]) -> tuple[Config, ...]:
    return tuple([Config(*figures) for figures in tiles])


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
    "fp8": tuple(config for config in _8_BITS if config.accumulators() <= 64),  # a k-tile's sums take as many again
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

# For tensor cores that have only `mma`: those with four stages take 144 KiB of a block's 163, and 72 of 99.
_FOR_MMA = {
    "half": _configs(
        [(128, 256, 64, 8, 4), (256, 128, 64, 8, 4), (128, 256, 32, 8, 4), (256, 128, 32, 8, 4)],
    ),
}

# For gates, of operands whose elements are moved one by one.
GATED = _configs([(64, 32, 32, 4, 4), (32, 32, 32, 4, 4), (16, 32, 32, 4, 4)])

# For TMA, by major compute capability: with two accumulators in tensor memory, or for 99 KiB of shared memory.
_LARGE = [(128, 256, 64, 8, 4), (256, 128, 64, 8, 4), (128, 128, 64, 8, 6), (128, 64, 64, 4, 6), (64, 128, 64, 4, 6)]
_SMALL = [(128, 256, 32, 8, 3), (256, 128, 32, 8, 3), (128, 128, 64, 8, 2), (128, 64, 64, 4, 3), (64, 64, 64, 4, 4)]
TMA_CONFIGS = {9: _configs(_SMALL), 10: _configs(_LARGE), 12: _configs(_SMALL)}

TENSOR_MEMORY = 2**18  # bytes, on sm_100

# ptxas by itself lowers a thread's registers until one more block fits an SM, and spills for it; what limits blocks
# here is shared memory.
MAX_REGISTERS = MAX_REGISTERS_PER_THREAD


def configs(precision: str, capability: tuple[int, int]) -> tuple[Config, ...]:
    """Those that are worth comparing on a GPU: CONFIGS, and what is for its tensor cores."""
    more = () if capability[0] in ASYNCHRONOUS else _FOR_MMA.get(precision, ())
    return (*more, *CONFIGS[precision])


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, split_k: Work = 1) -> str | None:
    """Why `device` cannot run `config` on `problem`, or None if it can.

    Within `TileConfig.illegal`'s limits ptxas still spills where a thread keeps too many addresses of vectors of A and
    B in the main loop. It also spills where the epilogue keeps too much in addition to each accumulator. That is C's
    value, its address unless it goes by 16 bytes, and the temporaries of activation, bias or partial sums. The limits
    were found by compiling every configuration for every architecture.
    """
    if device.capability < (8, 0):
        return f"needs compute capability 8.0 or newer, {device.name} has less"
    if max(problem.M, problem.N, problem.K) > MAX_SIZE or tiles_of(problem, config) > MAX_SIZE:
        return f"sizes and the number of tiles must not exceed {MAX_SIZE}"
    if isinstance(split_k, Schedule):
        return _tma_illegal(problem, device, config, split_k)
    if problem.gate:
        if problem.arithmetic is not HALF or problem.groups == "k" or problem.has_beta or split_k > 1:
            return "a gate is of 16 bits and of whole sums, to which nothing is added"
        if problem.groups and problem.activation == "gelu" and config.BLOCK_N >= 8 * config.BLOCK_M:
            return "both products of tiles so wide leave a thread too few registers for a gelu of groups"
        return illegal(replace(problem, gate=False), device, with_gate(config))
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
    itemsize, out_itemsize, sum_itemsize = problem.dtype.itemsize, problem.out_dtype.itemsize, itemsize_of_sums(problem)
    tensor_cores = arithmetic.tensor_cores(capability)
    in_loop = sum_itemsize * (2 if promotes(problem) else 1)
    buffers = config.buffers(capability)
    why = config.illegal(
        device, itemsize, out_itemsize, sum_itemsize=in_loop, tensor_cores=tensor_cores, buffers=buffers
    )
    if why is not None:
        return why

    accumulators = config.accumulators(in_loop)
    if itemsize == 1 and capability[0] not in ASYNCHRONOUS and accumulators > 64:
        if capability[0] == 8:
            return f"Triton 3.8 and newer prefetch 8-bit operands here, and {accumulators} accumulators spill"
        if along_k(problem) != ("a", "b"):
            return f"8-bit operands that are read by elements, and {accumulators} accumulators spill"
    a_vector, b_vector, c_vector = (vector for _, vector in vectors(problem))
    a_tile, b_tile = config.BLOCK_M * config.BLOCK_K, config.BLOCK_K * config.BLOCK_N
    addresses = (a_tile // a_vector + b_tile // b_vector) // (32 * config.num_warps)
    others = 0 if tensor_cores else accumulators  # FMAs read operands from registers
    others += accumulators // 2 if problem.scales == "blocks" else 0  # scales of rows, and where they are
    most = 180 if capability in ((8, 6), (8, 9)) and accumulators >= 128 else 210  # of Triton 3.7
    if accumulators + others + 5 * addresses > most:
        return f"{accumulators} accumulators and {addresses} addresses leave too few of a thread's registers"
    extra = sum_itemsize * bool(problem.bias or problem.activation not in (None, "relu") or split_k > 1)
    extra += sum_itemsize * (problem.activation == "gelu")  # a polynomial and two transcendentals
    extra += sum_itemsize * (problem.scales == "rows" or (problem.scales == "tensor" and arithmetic.exact))
    extra += out_itemsize * problem.has_beta + 4 * (c_vector * out_itemsize < 16)
    if config.accumulators(sum_itemsize + extra) > 160:
        sums = config.accumulators(sum_itemsize)
        return f"{sums} accumulators and {extra} more bytes for each leave too few registers to the epilogue"
    return None


def with_gate(config: Config) -> Config:
    """The tile of both products, where one of `config` has a gate."""
    return replace(config, BLOCK_N=2 * config.BLOCK_N)


def _tma_illegal(problem: GemmProblem, device: DeviceInfo, config: Config, schedule: Schedule) -> str | None:
    """`illegal` where TMA loads A and B. Other tiles, and more of an epilogue, were not compiled, or spill."""
    if config not in TMA_CONFIGS.get(device.capability[0], ()):
        return f"TMA loads no such tiles on {device.name}"
    if schedule != Schedule(schedule.programs):
        return "programs compute whole tiles"
    if problem.arithmetic is not HALF or problem.batch > 1 or problem.groups or problem.gate or problem.K == 0:
        return "TMA loads single matrices of 16 bits"
    if vectors(problem)[2] != (1, 16 // problem.out_dtype.itemsize):
        return "C's rows do not lie together on 16 bytes"
    more = problem.has_beta or problem.bias or problem.out_dtype.itemsize > 2
    if problem.activation not in (None, "relu") or (more and config.accumulators() > 64):
        return f"{config.accumulators()} accumulators leave too few registers to the epilogue"
    return problem.tma_illegal()


def launches(problem: GemmProblem, config: Config, split_k: Work = 1, *, stride_bias: int = 1) -> tuple[Launch, ...]:
    """The launches that solve `problem`: one, or none where C is empty.

    split_k: programs that share a tile's sum, or for TMA a Schedule; stride_bias: elements between the bias's values.
    """
    if 0 in (problem.batch, problem.M, problem.N):
        return ()
    if isinstance(split_k, Schedule):
        return (_tma_launch(problem, config, split_k),)
    of_rows = problem.groups == "m"
    num_tiles = groups.max_tiles(problem, config) if of_rows else tiles_of(problem, config)
    split = split_k > 1
    (a_unit, a_vector), (b_unit, b_vector), (c_unit, c_vector) = vectors(problem)
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
        "gate_ptr": Pointer("gate") if problem.gate else None,
        "gate_bias_ptr": Pointer("gate_bias") if problem.gate and problem.bias else None,
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        "ungated_ptr": Pointer("ungated") if problem.preactivation and problem.gate else None,
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
        "HAS_BETA": problem.added,
        "BIAS": problem.bias,
        "ACTIVATION": problem.activation,
        "GATE": problem.gate,
        **config.meta(),
        "PDL": False,
    }
    registers = min(MAX_REGISTERS, REGISTERS_PER_SM // (32 * config.num_warps))
    return (
        *([groups.launch(problem, config, config.GROUP_M)] if of_rows else []),
        Launch(
            portable_kernel,
            (num_tiles, split_k, 1),
            arguments,
            {"num_warps": config.num_warps, "num_stages": config.num_stages, "maxnreg": registers},
            workspace=itemsize_of_sums(problem) * split_k * num_tiles * config.BLOCK_M * config.BLOCK_N if split else 0,
            counters=num_tiles if split else 0,
        ),
    )


def _tma_launch(problem: GemmProblem, config: Config, schedule: Schedule) -> Launch:
    def tensor_map(name: str, layout: Layout, shape: tuple[int, int], block: tuple[int, int]) -> TensorMap:
        turn = -1 if layout.column_major else 1
        return TensorMap(name, problem.dtype, shape[::turn], layout.strides[1:][::turn], block[::turn])

    arguments = {
        "a_desc": tensor_map("a", problem.a, (problem.M, problem.K), (config.BLOCK_M, config.BLOCK_K)),
        "b_desc": tensor_map("b", problem.b, (problem.K, problem.N), (config.BLOCK_K, config.BLOCK_N)),
        **{"c_ptr": Pointer("c"), "bias_ptr": Pointer("bias") if problem.bias else None},
        "preactivation_ptr": Pointer("preactivation") if problem.preactivation else None,
        **{"M": problem.M, "N": problem.N, "K": problem.K, "stride_cm": problem.c.strides[1]},
        **{"alpha": Scalar("alpha"), "beta": Scalar("beta")},
        **{"A_COLUMN_MAJOR": problem.a.column_major, "B_COLUMN_MAJOR": problem.b.column_major},
        **{"C_VECTOR": 16 // problem.out_dtype.itemsize, "HAS_BETA": problem.added},
        **{"BIAS": problem.bias, "ACTIVATION": problem.activation, **config.meta()},
    }
    options = {"num_warps": config.num_warps, "num_stages": config.num_stages}
    return Launch(portable_tma_kernel, (schedule.programs, 1, 1), arguments, options)


def along_k(problem: GemmProblem) -> tuple[str, ...]:
    """The operands that lie along K in memory."""
    return ("a",) * (not problem.a.column_major) + ("b",) * problem.b.column_major


def promotes(problem: GemmProblem) -> bool:
    """Whether k-tiles are summed apart and these sums added. Planes and fp8 need it, because tensor cores cut them off
    below the last bits of a sum. int8 needs it where sums may leave int32, because `mma` saturates."""
    return problem.arithmetic.promotes(problem.K)


def order_of_sums(problem: GemmProblem, config: Config, split_k: Work = 1) -> str:
    """Products of instructions are added one after the other in all tiles, and in parts one part after the other. All
    parts but the last ones have equally many k-tiles."""
    if problem.arithmetic.exact:
        return exactly(problem, "portable")
    how = {"fma": "FMAs, portable", "dmma": "portable"}.get(problem.arithmetic.instruction) or by_tensor_cores(
        problem, "portable", warpgroups=config.BLOCK_M % 64 == 0 and config.num_warps % 4 == 0
    )
    split_k = 1 if isinstance(split_k, Schedule) else split_k
    step = config.BLOCK_K * split_k
    longest = (problem.K + step - 1) // step * config.BLOCK_K
    return f"{how}, {in_parts(split_k, longest)}{promoted(problem, config.BLOCK_K)}"


def itemsize_of_sums(problem: GemmProblem) -> int:
    return problem.arithmetic.accumulator.itemsize


def tiles_of(problem: GemmProblem, config: Config) -> int:
    return problem.batch * config.tiles(problem.M, problem.N)


def vectors(problem: GemmProblem) -> tuple[tuple[int | None, int], ...]:
    """`vector` of A, B and C."""
    # Where groups begin at any row, or anywhere along K, no more is known of it than that it is one.
    M = 1 if problem.groups == "m" else problem.M
    K = 1 if problem.groups == "k" else problem.K
    return (
        vector(problem.a, (M, K), problem.dtype),
        vector(problem.b, (K, problem.N), problem.dtype),
        vector(problem.c, (M, problem.N), problem.out_dtype),
    )
