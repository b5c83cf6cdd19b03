"""What the warp-specialised kernel can run, in which configurations, and its launches."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import torch

from ...arithmetic import HALF
from ...config import MAX_REGISTERS_PER_THREAD
from ...hardware.device import INTERPRETER, SHARED_MEMORY, DeviceInfo
from ...problem import GemmProblem
from .. import groups
from ..forms import clusters
from ..launch import MAX_SIZE, Launch, Pointer, Scalar
from ..reduction import launch as reduction
from ..reduction import parts_of, sums_of
from ..schedule import Schedule, clusters_at_once
from ..splitk import MAX_COUNTERS
from .cluster import MAX_CTAS
from .configs import Config
from .k_groups import launch as of_k_groups
from .kernel import warp_specialised_kernel
from .promotion import pieces, promotes, waves
from .tensor_maps import tensor_map
from .work import last_tiles

FEW = (8, 16, 32, 48)  # numbers of rows that may be copied of a larger tile: multiples of the swizzle's 8


def spans_widths(problem: GemmProblem) -> bool:
    """Whether one `wgmma`, in PTX, can span the width of any tile that is a multiple of 8."""
    return (
        clusters()
        and problem.dtype.itemsize == 2
        and problem.b.column_major
        and c_by_tma(problem)
        and not problem.has_beta
        and not promotes(problem)
    )


def wide_mma(problem: GemmProblem, config: Config) -> bool:
    """Whether one `wgmma` does span its width; else there is one for its main part and one for its tail."""
    return config.tail_n > 0 and config.BLOCK_N <= 256 and config.BLOCK_K in (64, 128) and spans_widths(problem)


def few_copied(problem: GemmProblem) -> tuple[int, int]:
    """The number of rows of A, and of columns of B, that are copied of tiles that have more: one of FEW, as each is
    compiled separately; 0 for all. K-major operands only, whose rows follow one another in shared memory."""
    if not clusters() or problem.groups:
        return 0, 0
    a, b = (next((rows for rows in FEW if rows >= extent), 0) for extent in (problem.M, problem.N))
    return 0 if problem.a.column_major else a, b if problem.b.column_major else 0


def copied(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """`few_copied` for tiles of `config`. (A warpgroup has at least 64 rows of A, more than any of FEW.)"""
    a, b = few_copied(problem)
    return a, b if b < config.BLOCK_N and not config.tail_n else 0


def part_columns(problem: GemmProblem, config: Config) -> tuple[int, int]:
    """Columns of C that a warpgroup stores at once, and those of narrower stores for the rest of the width, or 0. They
    take 32 registers of a thread: for 64 rows 128 bytes, which TMA's swizzle spans. They are half as many where
    pointers to C take registers, where C's elements do, or where that takes no more stores (`wide_columns`)."""
    if wide_mma(problem, config):
        return wide_columns(config)
    columns = max(_most_columns(config) >> (not c_by_tma(problem)) >> problem.has_beta, 8)
    return min(columns, config.tail_n or config.BLOCK_N), 0


def _most_columns(config: Config) -> int:
    return 32 * 128 // (config.BLOCK_M * 4 // config.num_warps)


@cache
def wide_columns(config: Config) -> tuple[int, int]:
    """(EPI_N, REST_N) where one `wgmma` spans BLOCK_N: the columns of a wide TMA store of C, and those of a narrow one
    for the rest of BLOCK_N, or 0. A wide one takes 32 registers of a thread, or 16 if that needs no more stores."""
    candidates = []
    for most in (_most_columns(config), _most_columns(config) // 2):
        columns = min(most, config.main_n)
        rest = config.BLOCK_N % columns
        narrow = rest & -rest
        candidates.append((config.BLOCK_N // columns + (rest // narrow if rest else 0), columns, narrow))
    return min(candidates)[1:]


def c_buffers(problem: GemmProblem, config: Config) -> int:
    """Buffers through which a warpgroup stores its parts of C: four where they fit, else two."""
    enough = config.BLOCK_N // part_columns(problem, config)[0] >= 4
    return 4 if enough and _shared_memory(problem, config, 4) <= SHARED_MEMORY[9, 0] else 2


def shared_memory(problem: GemmProblem, config: Config) -> int:
    """Bytes of shared memory: the ring, each warpgroup's parts of C, and barriers. An upper bound."""
    return _shared_memory(problem, config, c_buffers(problem, config))


def _shared_memory(problem: GemmProblem, config: Config, buffers: int) -> int:
    if wide_mma(problem, config):
        return wide_memory(config, problem.out_dtype.itemsize, buffers)
    m, n, k = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    n += n * problem.gate
    ring = config.num_stages * ((m + n) * k * problem.dtype.itemsize + (problem.scales == "blocks") * 4 * (m + 32))
    # A part of C before TMA stores it, or of the sums while they change threads.
    part = m * part_columns(problem, config)[0]
    parts = buffers * part * problem.out_dtype.itemsize if c_by_tma(problem) else part * 4
    return ring + parts + 1024


@cache
def wide_memory(config: Config, out_itemsize: int, buffers: int = 2) -> int:
    """`shared_memory` where one `wgmma` spans the width, with so many buffers for wide stores."""
    columns, narrow = wide_columns(config)
    rows = config.BLOCK_M + config.BLOCK_N
    staged = buffers * columns + (config.BLOCK_N % columns if narrow else 0)
    return config.num_stages * rows * config.BLOCK_K * 2 + config.BLOCK_M * staged * out_itemsize + 1024


def c_by_tma(problem: GemmProblem) -> bool:
    """Whether TMA can store C. As for operands, its rows must not end inside 16 bytes, of which TMA would store all
    (triton#11583). Its tiles must end where C does, not where a group does."""
    c, itemsize = problem.c, problem.out_dtype.itemsize
    row = problem.M if c.column_major else problem.N
    return c.tma_illegal(itemsize) is None and row * itemsize % 16 == 0 and problem.groups != "m"


def unsuited(problem: GemmProblem, device: DeviceInfo) -> str | None:
    """Why `device` cannot run `problem` in any configuration, or None."""
    if device.capability != (9, 0) or device == INTERPRETER:
        return f"needs Hopper's wgmma, {device.name} has none"
    if problem.arithmetic.instruction != "mma":
        return f"multiplies by tensor cores, whose wgmma has no {problem.precision}"
    if problem.arithmetic.k_major and not problem.b.column_major:
        return "wgmma reads all but 16 bits along K only, from which B's rows turn away"
    if problem.dtype.itemsize == 1 and problem.a.column_major:
        return "wgmma reads 8 bits along K only, from which A's columns turn away"
    if problem.K == 0:
        return "TMA has nothing to load"
    if max(problem.M, problem.N, problem.K) > MAX_SIZE:
        return f"sizes must not exceed {MAX_SIZE}, as TMA's coordinates are of 32 bits"
    of_k = problem.groups == "k"
    if problem.gate and (problem.arithmetic is not HALF or of_k or problem.has_beta):
        return "a gate is of 16 bits and of whole sums, to which nothing is added"
    if problem.groups and problem.planes.count > 1:
        return "groups' operands are not split into planes"
    if problem.groups and (problem.a.column_major, of_k and problem.b.column_major) != (of_k, False):
        return "TMA's boxes begin on 16 bytes, and groups anywhere along a unit stride"
    if of_k and (problem.activation or not c_by_tma(problem)):
        return "sums over groups leave by TMA, as they are"
    why = problem.tma_illegal()
    return None if why is None else f"TMA cannot take {why}"


def illegal(problem: GemmProblem, device: DeviceInfo, config: Config, schedule: Schedule | None = None) -> str | None:
    """Why `device` cannot run `problem` in this configuration, or None if it can."""
    if (why := unsuited(problem, device) or _shapeless(config)) is not None:
        return why
    if problem.gate:
        if config.tail_n or config.BLOCK_N > 128:
            return f"a gate's tiles are a power of two wide, up to 128, not {config.BLOCK_N}"
        if schedule is not None and (schedule.split_tiles or schedule.split_k > 1):
            return "tiles with a gate are not cut"
        if problem.activation == "gelu" and config.with_gate.accumulators() > 64 and not c_by_tma(problem):
            return "accumulators of a gate leave a thread too few registers for its gelu and pointers to C"
        return illegal(replace(problem, gate=False), device, config.with_gate)
    sums = config.accumulators()
    if schedule is not None and schedule.split_k * -(-problem.K // config.BLOCK_K) > MAX_SIZE:
        return f"k-tiles times parts of K must not exceed {MAX_SIZE}"
    if schedule is not None and schedule.reduction:
        if problem.groups or problem.arithmetic.exact:
            return "a second launch adds up no groups' sums, and no integers"
        if schedule.split_tiles != problem.batch * config.tiles(problem.M, problem.N) or schedule.split_k < 2:
            return f"a second launch adds up the parts of all tiles, and {schedule} does not cut all"
        problem = parts_of(problem)
    elif schedule is not None and schedule.in_turn and (problem.groups or problem.arithmetic.exact):
        return "no group's sums, and no integers, have parts in turn"
    elif schedule is not None and schedule.split_tiles:
        if not can_split_k(config):
            return f"{sums} accumulators leave a thread too few registers for partial sums"
        counters = _counters(config, schedule)
        if counters > MAX_COUNTERS:
            return f"tiles that are cut take {counters} counters, a stream has {MAX_COUNTERS}"
    if problem.dtype == torch.int8 and config.BLOCK_N == 256:
        return "Triton 3.6 to 3.9 cannot lower wgmma of int8 that is 256 columns wide"
    if config.tail_n and config.main_n + config.tail_n != config.BLOCK_N and not wide_mma(problem, config):
        return f"tiles {config.BLOCK_N} wide need one wgmma, as Triton 3.9 has it for K-major operands of 16 bits"
    if sums > MAX_REGISTERS_PER_THREAD:
        return f"{sums} accumulators are more registers than a thread has"
    room = _room(config)
    nested = promotes(problem) + (schedule is not None and schedule.in_turn)  # sums that others are added to
    parts = pieces(problem, config)
    if nested and sums * (waves(problem, config) + nested + parts - 1) // waves(problem, config) > room * 3 // 2:
        return f"{sums} accumulators leave a thread too few registers for sums of pieces"
    if parts > 2 or (parts == 2 and (len(problem.planes.terms) > 1 or problem.scales == "blocks" or config.tail_n)):
        return f"a step of {config.BLOCK_K} along K is more than a piece"
    if problem.scales == "blocks" and config.BLOCK_N not in (16, 32, 64, 128, 192, 256):
        return f"tiles {config.BLOCK_N} wide lie across more than two blocks of scales, or begin inside of a half"
    if problem.scales == "blocks" and config.BLOCK_M > 192:
        return f"the warp that loads has too few registers for the scales of {config.BLOCK_M} rows"
    full = sums > room or waves(problem, config) > 1
    if full and (problem.has_beta or not c_by_tma(problem)):
        return f"{sums} accumulators leave a thread too few registers for pointers to C"
    if full and problem.scales and (problem.bias or problem.activation):
        return f"{sums} accumulators leave a thread too few registers for more than scales"
    if config.ctas > 1 and (why := _cluster_illegal(problem, device, config)) is not None:
        return why
    needed = shared_memory(problem, config)
    if needed > device.shared_memory:
        return f"needs {needed} bytes of shared memory, {device.name} has {device.shared_memory}"
    return None


def _shapeless(config: Config) -> str | None:
    """Why the kernel has no such tile, on any problem, or None."""
    consumers, odd = divmod(config.num_warps, 4)
    if odd or not 1 <= consumers <= 3:
        return f"one to three warpgroups multiply, not {config.num_warps} warps"
    if config.BLOCK_M not in (64 * consumers, 128 * consumers):
        return f"each of {consumers} warpgroups has 64 or 128 rows, not a part of {config.BLOCK_M}"
    if config.BLOCK_K & config.BLOCK_K - 1:
        return f"BLOCK_K = {config.BLOCK_K} is not a power of two"
    if config.num_stages < 2:  # consumers give a slot back while the next one's products run
        return "a ring has two stages at least"
    return None


def _counters(config: Config, schedule: Schedule) -> int:
    """One for each warpgroup of each tile that is cut."""
    return schedule.split_tiles * config.ctas * config.num_warps // 4


def _cluster_illegal(problem: GemmProblem, device: DeviceInfo, config: Config) -> str | None:
    """Why its CTAs cannot be clusters, or None."""
    if not clusters():
        return "clusters need Triton 3.9 or newer"
    if problem.groups:
        return "a cluster's tiles are of one matrix, and groups end inside of them"
    form = f"{config.CLUSTER_M}x{config.CLUSTER_N}"
    if config.ctas > MAX_CTAS or any(side & side - 1 for side in (config.CLUSTER_M, config.CLUSTER_N)):
        return f"a cluster's sides are powers of two, for {MAX_CTAS} CTAs at most, not {form}"
    if clusters_at_once(config.ctas, device.num_sms) == 0:
        return f"no cluster of {form} fits on {device.num_sms} multiprocessors"
    return None


def _room(config: Config) -> int:
    """Accumulators beside which a thread has registers for everything else."""
    return 64 if config.num_warps == 12 else 128


def early_bias(problem: GemmProblem, config: Config) -> bool:
    """Whether a thread has registers for the bias of a tile beside its sums, of columns for every fourth. Beside C's
    own values, or the preactivation, it has none, nor beside scales and the most sums."""
    values = config.BLOCK_N // 4 * problem.out_dtype.itemsize // 4 if problem.bias == "n" else 2
    if problem.gate or problem.preactivation or problem.has_beta or promotes(problem) or not c_by_tma(problem):
        return False
    if part_columns(problem, config)[1] or (problem.scales and 4 * config.accumulators() >= 3 * _room(config)):
        return False
    return config.accumulators() + values <= _room(config) * 5 // 4


def can_split_k(config: Config) -> bool:
    """Whether its tiles can be cut along K: beside more accumulators than these pointers to partial sums spill."""
    return config.accumulators() <= 128


def launches(problem: GemmProblem, config: Config, schedule: Schedule) -> tuple[Launch, ...]:
    """The launch that computes `problem`; where groups are cut, after one that lists tiles; where parts of K are added
    up by a second one, before it."""
    if schedule.reduction:
        (first,) = _launches(parts_of(problem), config, schedule)
        arguments = {**first.arguments, "alpha": 1.0, "beta": 0.0}
        first = replace(first, arguments=arguments, temporaries=(sums_of(problem, schedule.split_k),))
        return first.renamed({"c": "sums"}), reduction(problem, schedule.split_k)
    return _launches(problem, config, schedule)


def _launches(problem: GemmProblem, config: Config, schedule: Schedule) -> tuple[Launch, ...]:
    if problem.groups == "k":
        return (of_k_groups(problem, config, schedule, part_columns(problem, config)[0], c_buffers(problem, config)),)
    planes, m, n, k = problem.planes, config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    num_m, num_n = -(-problem.M // (m * config.CLUSTER_M)), -(-problem.N // (n * config.CLUSTER_N))
    num_tiles = problem.batch * num_m * num_n
    consumers, wide, gate = config.num_warps // 4, wide_mma(problem, config), problem.gate
    (part, rest), by_tma = part_columns(problem, config), c_by_tma(problem)
    split = schedule.split_tiles > 0 and not schedule.reduction
    copies = problem.batch * schedule.split_k if schedule.reduction else problem.batch  # of C
    assert not (split and problem.groups), "how many tiles there are, only the GPU knows"
    assert schedule.split_tiles <= num_tiles and (can_split_k(config) or not split)
    assert schedule.split_tiles == num_tiles or not schedule.reduction
    shared_parts = schedule.split_tiles * (schedule.split_k - 1) if split else 0
    loaded = (planes.count, problem.dtype == torch.float32)
    of_a = ("a", problem.a, problem.dtype, problem.batch, problem.M, problem.K, m // consumers, k)
    a_copied, b_copied = copied(problem, config)
    b_copied = 0 if gate else b_copied
    a = tensor_map(*of_a, *loaded, copied_rows=a_copied, sharing=config.CLUSTER_N)
    of_b = ("b", problem.b, problem.dtype, problem.batch, problem.K, problem.N, k)
    if wide:
        b = b_tail = tensor_map(*of_b, 8, copied_rows=n, sharing=config.CLUSTER_M)
    else:
        b = tensor_map(*of_b, config.main_n, *loaded, copied_rows=b_copied, sharing=config.CLUSTER_M)
        b_tail = tensor_map(*of_b, config.tail_n, *loaded, sharing=config.CLUSTER_M) if config.tail_n else b
        b_tail = replace(b, operand="gate") if gate else b_tail
    of_c = ("c", problem.c, problem.out_dtype, copies, problem.M, problem.N, m // consumers)
    c, c_rest = tensor_map(*of_c, part), tensor_map(*of_c, rest) if rest else b
    names = [x for x in problem.auxiliary if x in ("preactivation", "ungated")]
    stores = 1 + len(names) * (by_tma and not problem.added)
    beside = {x: replace(c, operand=x) if stores > 1 else Pointer(x) for x in names}
    # What TMA stores takes none. So the same binary serves strides that are multiples of 16 and others.
    strides = [int(x == 1) for x in problem.c.strides] if by_tma and stores > len(names) else problem.c.strides
    arguments = {
        "a_desc": a,
        "b_desc": b,
        "b_tail_desc": b_tail,
        "c_desc": c if by_tma else b,  # what is not used is something else, as for partitions
        "c_rest_desc": c_rest,
        "a_ptr": Pointer("a"),
        "b_ptr": Pointer("b"),
        "tiles_ptr": Pointer("tiles" if problem.groups else "c"),
        "c_ptr": Pointer("c"),
        "bias_ptr": Pointer("bias" if problem.bias else "c"),
        "workspace_ptr": Pointer("workspace" if split else "c"),
        "counters_ptr": Pointer("counters" if split else "c"),
        "a_scale_ptr": Pointer("a_scale" if problem.scales else "c"),
        "b_scale_ptr": Pointer("b_scale" if problem.scales else "c"),
        "M": problem.M,
        "N": problem.N,
        **dict(zip(("stride_cb", "stride_cm", "stride_cn"), strides, strict=True)),
        "alpha": Scalar("alpha"),
        "beta": Scalar("beta"),
        "num_m": num_m,
        "num_items": schedule.items(num_tiles) * config.ctas,
        "k_tiles": -(-problem.K // k),
        "group_m": schedule.group_m,
        "per_group": schedule.group_m * num_n,
        "per_batch": num_m * num_n,
        "split_tiles": schedule.split_tiles,
        "split_k": schedule.split_k,
        **dict(zip(("last_m", "last_n"), last_tiles(problem, config, schedule), strict=True)),
        "a_batches": planes.count * (problem.a.strides[0] > 0),
        "b_batches": planes.count * (problem.b.strides[0] > 0),
        "gate_bias_ptr": Pointer("gate_bias" if gate and problem.bias else "c"),
        "preactivation": beside.get("preactivation"),
        "preactivation_rest": replace(c_rest, operand="preactivation") if rest and stores > 1 else None,
        "ungated": beside.get("ungated"),
        "A_COLUMN_MAJOR": problem.a.column_major,
        "B_COLUMN_MAJOR": problem.b.column_major,
        "C_COLUMN_MAJOR": problem.c.column_major,
        "C_TMA": by_tma,
        "HAS_BETA": problem.added,
        "BIAS": problem.bias or "",
        "EARLY_BIAS": (problem.bias or "") if early_bias(problem, config) and not (split or schedule.in_turn) else "",
        "ACTIVATION": problem.activation or "",
        "SCALES": problem.scales or "",
        "GROUPED": problem.groups is not None,
        "SPLIT_K": split,
        "REDUCTION": schedule.reduction,
        "IN_TURN": schedule.in_turn,
        "UNIT": schedule.unit,
        "CONSUMERS": consumers,
        "BLOCK_M": m,
        "BLOCK_N": n,
        "MAIN_N": config.main_n,
        "TAIL_N": config.main_n if gate else config.tail_n,
        "BLOCK_K": k,
        "EPI_N": part,
        "REST_N": rest,
        "C_BUFFERS": c_buffers(problem, config),
        "STORES": stores,
        "TERMS": len(planes.terms),
        "A_PLANES": sum(i << 2 * term for term, (i, _) in enumerate(planes.terms)),
        "B_PLANES": sum(j << 2 * term for term, (_, j) in enumerate(planes.terms)),
        "PROMOTE": promotes(problem),
        "WAVES": waves(problem, config),
        "PIECES": pieces(problem, config),
        "WIDE_MMA": wide,
        "A_COPIED": a_copied,
        "B_COPIED": b_copied,
        "CLUSTER_M": config.CLUSTER_M,
        "CLUSTER_N": config.CLUSTER_N,
        "GATE": gate,
        "num_stages": config.num_stages,
        "PDL": False,
    }
    return (
        *([groups.launch(problem, config, schedule.group_m)] if problem.groups else []),
        Launch(
            warp_specialised_kernel,
            (schedule.programs * config.ctas, 1, 1),
            arguments,
            {"num_warps": 4},
            workspace=shared_parts * config.ctas * m * (config.main_n + config.tail_n) * 4,
            counters=_counters(config, schedule) if split else 0,
            cluster=config.ctas,
        ),
    )
