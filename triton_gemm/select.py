"""select: which kernel, tiles and splitting a problem gets, and why. Pure, and without tuning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from . import cost_model, kernels
from .arithmetic import HALF
from .config import GemmConfig
from .device import INTERPRETER, DeviceInfo
from .kernels.launch import Launch
from .kernels.schedule import Schedule
from .kernels.splitk import MAX_COUNTERS
from .problem import GemmProblem, Layout

# What a program of fp64 takes longer for that has an SM for itself, and nobody to hide its latencies: tiles of 64 x 128
# by eight warps against 128 x 64 by four, at 2048^3 and 4096^3 on an H100.
FP64_ALONE = 1.08
# From so many multiply-adds on, copying an operand to where TMA can read it may pay.
PACK_FROM = 2**29


@dataclass(frozen=True)
class Selection:
    """The kernel that a product runs on, its configuration, how the work is dealt out, and the reason in a sentence:
    what `triton_gemm.explain` answers. `str()` of it is one line for people.

    kernel: "warp_specialised" (Hopper's tensor cores, fed by TMA), "portable" (tensor cores, any operands), "fma" (IEEE
        fp32 on CUDA cores), "skinny" or "gemv" (a few rows or columns); docs/kernels.md has what they do.
    config: tile sizes in elements, warps of a program and stages of its pipeline.
    reason: why this one.
    schedule: how the persistent kernel "warp_specialised" deals tiles out; None for the others.
    split_k: how many programs share the sum of a tile, in the other kernels.
    swapped: whether c^T = b^T a^T is computed.
    packed: operands ("a", "b") that are copied first: to aligned rows, or split into planes of bf16 or tf32.
    precision: "half" for fp16 and bf16, "fp64", "int8", "fp8", "fp8 fast", or how fp32 is multiplied: "ieee", "tf32",
        "tf32x3", "bf16x3", "bf16x6" or "bf16x9".
    device: the name of the GPU that it was asked for, where `explain` was asked.
    """

    kernel: str
    config: GemmConfig
    reason: str
    schedule: Schedule | None = None
    split_k: int = 1
    swapped: bool = False
    packed: tuple[str, ...] = ()
    precision: str = "half"
    device: str | None = None

    def __str__(self) -> str:
        notes = [f"{self.kernel} {self.config}"] + [self.precision] * (self.precision != HALF.name)
        if self.schedule is not None and self.schedule.split:
            notes.append(f"{self.schedule.split} tiles in {self.schedule.parts} parts")
        if self.split_k > 1:
            notes.append(f"K in {self.split_k} parts")
        notes += ["transposed"] * self.swapped + [f"{x} repacked" for x in self.packed]
        where = "" if self.device is None else f", on {self.device}"
        return f"{', '.join(notes)}{where}: {self.reason}"


def select(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """The kernel and configuration for `problem` on `device`; RuntimeError where none runs."""
    if device.capability < (8, 0):
        raise RuntimeError(f"matmul needs compute capability 8.0 or newer, {device.name} has less")
    if problem.groups:
        return _grouped(problem, device)
    precision, arithmetic = problem.precision, problem.arithmetic
    hopper = device.capability == (9, 0) and device is not INTERPRETER
    if hopper and arithmetic.instruction == "mma" and arithmetic is not HALF:
        found = _warp_specialised(problem, device)
        if found is not None:
            return found
    if arithmetic.planes is None and problem.dtype in kernels.gemv.DTYPES:
        turned = problem.N < problem.M
        narrow = problem.swap_ab() if turned else problem
        rows = f"{narrow.M} row{'s' * (narrow.M > 1)} of products"
        if kernels.skinny.pays(narrow, device) and device is not INTERPRETER:
            config, again = kernels.skinny.default(narrow, device)
            if kernels.skinny.illegal(narrow.swap_ab() if again else narrow, device, config) is None:
                return Selection("skinny", config, f"{rows} along K", swapped=turned != again, precision=precision)
        if kernels.gemv.pays(narrow) or (not hopper and _few_rows(narrow)):
            config, split_k = kernels.gemv.default(narrow, device)
            if kernels.gemv.illegal(narrow, device, config, split_k) is None:
                return Selection("gemv", config, rows, None, split_k, turned, precision=precision)
    if hopper and not _tiny(problem) and arithmetic is HALF and problem.K > 0:
        found = _warp_specialised(problem, device)
        if found is not None:
            return found
    if arithmetic.instruction == "fma" and problem.K > 0 and device is not INTERPRETER:
        return _ieee(problem, device)
    return _portable(problem, device)


def _grouped(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """What a batch of products runs on that are as large as groups are on average, but whole tiles, and nothing
    turned or copied."""
    assert problem.groups is not None
    size = problem.groups.upper()
    average = replace(problem, groups=None, **{size: max(1, -(-getattr(problem, size) // problem.batch))})
    how = f"{problem.batch} groups along {problem.groups}"
    if device.capability == (9, 0) and device is not INTERPRETER and problem.arithmetic is HALF:
        configs = [
            c for c in kernels.warp_specialised.CONFIGS if kernels.warp_specialised.illegal(problem, device, c) is None
        ]
        whole = [(c, s) for c in configs for s in cost_model.schedules(average, c, device) if s.split == 0]
        if whole:
            config, schedule = min(whole, key=lambda found: cost_model.microseconds(average, *found))
            schedule = replace(schedule, programs=device.num_sms)
            return Selection("warp_specialised", config, how, schedule, precision=problem.precision)
    legal = [
        (_portable_work(average, device, config, 1), config)
        for config in kernels.portable.CONFIGS[problem.precision]
        if kernels.portable.illegal(problem, device, config) is None
    ]
    if not legal:
        raise RuntimeError(f"no kernel multiplies groups of {problem.dtype} on {device.name}")
    return Selection("portable", min(legal, key=lambda found: found[0])[1], how, precision=problem.precision)


def _ieee(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """Outer products on CUDA cores, over copies of what does not lie across K, or the portable kernel where it is
    faster: in small and narrow products."""
    packed, turned = kernels.fma.unreadable(problem), _turned(problem)
    readable = repacked(problem, packed)
    given = readable.swap_ab() if turned else readable
    copying = _copying(given, packed, turned)
    legal = [
        (cost_model.outer_products(given, config, split_k, device) + copying, config, split_k)
        for config in kernels.fma.CONFIGS
        for split_k in _splits(given, config, device)
        if kernels.fma.illegal(given, device, config, split_k) is None
    ]
    simple = _portable(problem, device)
    if not legal:
        return simple
    time, config, split_k = min(legal, key=lambda found: found[0])
    work = _portable_work(problem.swap_ab() if turned else problem, device, simple.config, simple.split_k)
    if time > cost_model.LAUNCH + work / cost_model.FMAS:
        return simple
    reason = f"IEEE fp32 has no tensor core; about {time:.3g} us"
    return Selection("fma", config, reason, None, split_k, turned, packed, problem.precision)


def _splits(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> list[int]:
    """Into how many parts K may be cut: as many as keep chains of sums short, or more, to occupy the GPU."""
    count = cost_model.tiles(problem, config)
    fewest = min(-(-problem.K // kernels.fma.LONGEST_CHAIN), kernels.fma.MAX_SPLIT) if count <= MAX_COUNTERS else 1
    more = [s for s in (2, 3, 4, 6, 8, 12, 16, 24, 32) if s > fewest and 64 * s <= problem.K]
    return [fewest, *(s for s in more if count * s <= 4 * device.num_sms)]


def _warp_specialised(problem: GemmProblem, device: DeviceInfo) -> Selection | None:
    """The persistent kernel in its fastest configuration by the cost model, over copies of what TMA reads badly."""
    configs = kernels.warp_specialised.configs(problem.planes.dtype)
    best = min(candidates(problem, device, configs), key=Candidate.microseconds, default=None)
    if best is None:
        return None
    waves = cost_model.tiles(best.problem, best.config) / device.num_sms
    return best.selection(f"{waves:.2f} waves of tiles, about {best.microseconds():.3g} us")


@dataclass(frozen=True)
class Candidate:
    """One way to compute a product with the persistent kernel.

    problem: what the kernel is given, over copies of the operands `packed`, and c^T = b^T a^T if swapped.
    """

    problem: GemmProblem
    config: GemmConfig
    schedule: Schedule
    swapped: bool = False
    packed: tuple[str, ...] = ()

    def microseconds(self) -> float:
        """Predicted by the cost model, copies included."""
        time = cost_model.microseconds(self.problem, self.config, self.schedule)
        return time + _copying(self.problem, self.packed, self.swapped)

    def selection(self, reason: str) -> Selection:
        how = (self.schedule, 1, self.swapped, self.packed, self.problem.precision)
        return Selection("warp_specialised", self.config, reason, *how)


def _copying(problem: GemmProblem, packed: tuple[str, ...], swapped: bool) -> float:
    """Predicted time of copying the operands `packed`; problem: over the copies, and c^T = b^T a^T if swapped."""
    time = 0.0
    for name in packed:
        rows = problem.M if (name == "a") != swapped else problem.N
        written = problem.dtype.itemsize * problem.planes.count
        read = 4 if problem.arithmetic.planes else written
        time += cost_model.copying(problem.batch * rows * problem.K * (read + written))
    return time


def candidates(problem: GemmProblem, device: DeviceInfo, configs: Sequence[GemmConfig]) -> Iterator[Candidate]:
    """The ways to compute `problem` with the persistent kernel that are worth comparing."""
    for packed in _packings(problem):
        readable = repacked(problem, packed)
        # A square is its own transpose, but for fp32 that wgmma reads from registers: that must be A.
        turns = problem.scales != "blocks" and (problem.M != problem.N or problem.dtype.itemsize != 2)
        for swapped in (False, True) if turns else (False,):
            turned = readable.swap_ab() if swapped else readable
            for config in configs:
                if _fits(turned, config) and kernels.warp_specialised.illegal(turned, device, config) is None:
                    for schedule in cost_model.schedules(turned, config, device):
                        yield Candidate(turned, config, schedule, swapped, packed)


def _packings(problem: GemmProblem) -> list[tuple[str, ...]]:
    """Which operands to copy first: both as planes; of fp32 those that TMA cannot read, and perhaps others, which then
    lie along K; else those that TMA cannot read, and beside them none, or one whose rows begin inside of L2's sectors,
    but in small products none at all."""
    if problem.arithmetic.planes:
        return [("a", "b")]
    itemsize = problem.dtype.itemsize
    layouts = {"a": problem.a, "b": problem.b}
    unreadable = {name for name, layout in layouts.items() if layout.tma_illegal(itemsize) is not None}
    if problem.arithmetic.k_major:
        found = [unreadable, unreadable | {"a"}, unreadable | {"b"}, {"a", "b"}]
        return [tuple(sorted(names)) for i, names in enumerate(found) if names not in found[:i]]
    if problem.batch * problem.M * problem.N * problem.K < PACK_FROM:
        return [] if unreadable else [()]
    found = [unreadable]
    for name, layout in layouts.items():
        if name not in unreadable and cost_model.pitch(layout, itemsize) % cost_model.SECTOR:
            found.append(unreadable | {name})
    return [tuple(sorted(names)) for names in found]


def _fits(problem: GemmProblem, config: GemmConfig) -> bool:
    """Whether less than half of a tile lies outside of C, where a smaller one would do."""
    m, n = config.BLOCK_M, config.BLOCK_N
    assert m is not None and n is not None
    return (m == 64 or m < 2 * problem.M) and (n == 16 or n < 2 * problem.N)


def _tiny(problem: GemmProblem) -> bool:
    """Whether matrices are so small that setting up TMA's ring for each costs more than their products."""
    return max(problem.M, problem.N) <= 64 and problem.K <= 128


def _few_rows(problem: GemmProblem) -> bool:
    """Whether the tensor cores have too little to do with so few rows: B is streamed, and each element used M times.

    Along N a program reads whole columns of B, and adds across threads only at the end; along K it needs registers for
    every row.
    """
    along_k = problem.b.strides[1] == 1
    return (4 if along_k else 1) >= problem.M or (problem.arithmetic.instruction == "fma" and problem.M <= 2)


def _portable(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """The kernel that takes everything, in the configuration with the least work on the busiest SM; RuntimeError where
    none is legal."""
    turned = _turned(problem)
    turned_problem = problem.swap_ab() if turned else problem
    best: tuple[float, GemmConfig, int] | None = None
    why: str | None = None
    for config in kernels.portable.CONFIGS[problem.precision]:
        m, n, k = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
        assert m is not None and n is not None and k is not None
        count, k_tiles = cost_model.tiles(turned_problem, config), max(1, -(-problem.K // k))
        for split_k in (1, 2, 3, 4, 6, 8, 12, 16):
            if split_k > 1 and (count * split_k > 2 * device.num_sms or k_tiles < 4 * split_k):
                break
            why = kernels.portable.illegal(turned_problem, device, config, split_k)
            if why is not None:
                continue
            time = _portable_work(turned_problem, device, config, split_k)
            if best is None or time < best[0]:
                best = time, config, split_k
    if best is None:  # even of the smallest tiles
        raise RuntimeError(f"no kernel multiplies {problem.dtype} in {problem.precision} on {device.name}: {why}")
    _, config, split_k = best
    why = problem.tma_illegal() if device.capability == (9, 0) and problem.arithmetic is HALF else None
    reason = f"TMA cannot take {why}" if why and problem.K else f"any operands on {device.name}"
    return Selection("portable", config, reason, None, split_k, turned, precision=problem.precision)


def _portable_work(problem: GemmProblem, device: DeviceInfo, config: GemmConfig, split_k: int) -> float:
    """How long the busiest SM takes, in multiply-adds of large tiles."""
    m, n, k = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K
    assert m is not None and n is not None and k is not None
    # Programs at once on an SM: DMMAs of fewer than eight warps would leave it idle.
    together = 8 // config.num_warps if problem.arithmetic.instruction == "dmma" else 1
    waves = -(-cost_model.tiles(problem, config) * split_k // (together * device.num_sms))
    # A tile's operands are read once for each of its elements of C: the smaller, the slower.
    step = together * (m * n * k * (1 + 32 / m + 32 / n) + 3e4)
    if problem.arithmetic.instruction == "dmma" and together == 1:
        step *= FP64_ALONE
    return waves * (-(-max(1, -(-problem.K // k)) // split_k) * step + 2e5) + (split_k > 1) * 1e6


def _turned(problem: GemmProblem) -> bool:
    """Whether c^T is computed: where its rows lie together in memory, or where it is wider and neither's rows do; never
    with blocks of scales, of which A's are not B's."""
    if problem.scales == "blocks":
        return False
    row, column = problem.c.strides[1:]
    return row == 1 if (row == 1) != (column == 1) else problem.M > problem.N


def _copy(problem: GemmProblem, name: str) -> tuple[Launch, Layout]:
    """The launch that copies operand "a" or "b" to where the kernel can read it, and the copy's layout."""
    rows, columns = (problem.M, problem.K) if name == "a" else (problem.K, problem.N)
    layout: Layout = getattr(problem, name)
    # Tensor cores want all but 16 bits along K, outer products both operands across it.
    arithmetic = problem.arithmetic
    column_major = None if arithmetic is HALF else name == ("a" if arithmetic.instruction == "fma" else "b")
    shape = (problem.batch, rows, columns)
    return kernels.repack.launch(
        *(name, f"packed_{name}", layout, shape, problem.dtype),
        column_major=column_major,
        planes=arithmetic.planes,
    )


def repacked(problem: GemmProblem, packed: tuple[str, ...]) -> GemmProblem:
    """The problem after its `packed` operands were copied."""
    a = _copy(problem, "a")[1] if "a" in packed else problem.a
    b = _copy(problem, "b")[1] if "b" in packed else problem.b
    return replace(problem, a=a, b=b, dtype=problem.planes.dtype)


def launches(problem: GemmProblem, selection: Selection) -> tuple[Launch, ...]:
    """What a selection launches for a problem, copies of operands first."""
    copies = [_copy(problem, name)[0] for name in selection.packed]
    names = {name: f"packed_{name}" for name in selection.packed}
    problem = repacked(problem, selection.packed)
    if selection.swapped:
        problem = problem.swap_ab()
        names = {"a": names.get("b", "b"), "b": names.get("a", "a"), "a_scale": "b_scale", "b_scale": "a_scale"}
    if selection.kernel == "warp_specialised":
        assert selection.schedule is not None
        made = kernels.warp_specialised.launches(problem, selection.config, selection.schedule)
    elif selection.kernel == "gemv":
        made = kernels.gemv.launches(problem, selection.config, selection.split_k)
    elif selection.kernel == "skinny":
        made = kernels.skinny.launches(problem, selection.config)
    elif selection.kernel == "fma":
        made = kernels.fma.launches(problem, selection.config, selection.split_k)
    else:
        assert selection.kernel == "portable"
        made = kernels.portable.launches(problem, selection.config, selection.split_k)
    return (*copies, *(launch.renamed(names) for launch in made))
