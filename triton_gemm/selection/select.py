"""select: which kernel, tiles and splitting a problem gets, and why: the candidate of all kernels that is predicted to
take the least time. Pure, and without tuning."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass, replace
from operator import itemgetter

import torch

from .. import kernels
from ..arithmetic import HALF
from ..config import TileConfig
from ..hardware.device import INTERPRETER, DeviceInfo
from ..hardware.device_model import DeviceModel, model_of, origin
from ..kernels import forms
from ..kernels.candidate import FEW_ROWS, Algorithm, Bounded, Candidate, Work
from ..kernels.cost_model import ROUNDING, roofline
from ..kernels.launch import Launch
from ..kernels.schedule import Schedule
from ..problem import GemmProblem
from . import generation


@dataclass(frozen=True)
class Selection:
    """The kernel that a GEMM runs on, its configuration, how the work is split, and the reason in a sentence.

    `triton_gemm.explain` returns it, and sets `device`, `policy`, `bits` and `model`. `str()` of it is one line.

    Attributes:
        algorithm: What is launched, a record of `kernel`, `config`, `work`, `swap_ab` and `packed`.
        reason: The predicted time; from `explain` also that of the next best kernel.
        precision: "half" for fp16 and bf16, "fp64", "int8", "fp8", "fp8 fast", or how fp32 is multiplied: "ieee",
            "tf32", "tf32x3", "bf16x3", "bf16x6" or "bf16x9".
        source: What chose it: "model", "user's table", "shipped table" or "tuner" (docs/choosing.md).
        device: The name of the GPU.
        policy: The caller's: "model", "cached", "tune" or "error".
        bits: The bit class: on one GPU equal classes give equal bits (docs/bits.md).
        batch_invariant: Whether the class is the same for any number of rows.
        model: Where the cost model's parameters come from: "calibrated", "shipped" or "derived".
        kit: Whether its machine code is a kit's, and not compiled by the installed Triton.
    """

    algorithm: Algorithm
    reason: str
    precision: str = "half"
    source: str = "model"
    device: str | None = None
    policy: str | None = None
    bits: str | None = None
    batch_invariant: bool = False
    model: str | None = None
    kit: bool = False

    @classmethod
    def of(cls, candidate: Candidate, reason: str, source: str = "model") -> Selection:
        return cls(candidate.algorithm, reason, candidate.problem.precision, source)

    @property
    def kernel(self) -> str:
        """ "warp_specialised" (Hopper's tensor cores, fed by TMA), "portable" (tensor cores, any operands), "fma" (IEEE
        fp32 on CUDA cores), "mma_fp64" (fp64 on Hopper's tensor cores), "skinny" or "gemv" (a few rows or columns);
        docs/kernels.md has what they do."""
        return self.algorithm.kernel

    @property
    def config(self) -> TileConfig:
        """Tile sizes in elements, warps of a program and stages of its pipeline; "cluster 4x2": of programs in clusters
        of four along M and two along N."""
        return self.algorithm.config

    @property
    def work(self) -> Work:
        """How the work is dealt out, as the kernel takes it: `schedule`, or else `split_k`."""
        return self.algorithm.work

    @property
    def schedule(self) -> Schedule | None:
        """How "warp_specialised" deals tiles out, and "portable" where TMA loads operands; None for the others."""
        return self.work if isinstance(self.work, Schedule) else None

    @property
    def split_k(self) -> int:
        """How many programs share the sum of a tile, in the other kernels."""
        return 1 if isinstance(self.work, Schedule) else self.work

    @property
    def swap_ab(self) -> bool:
        """Whether c^T = b^T a^T is computed."""
        return self.algorithm.swap_ab

    @property
    def packed(self) -> tuple[str, ...]:
        """Operands ("a", "b") that are copied first: to aligned rows, or split into planes of bf16 or tf32."""
        return self.algorithm.packed

    @property
    def chooser(self) -> str:
        """`source`, for people: whether the model was calibrated, where `model` says it."""
        return "calibrated model" if (self.source, self.model) == ("model", "calibrated") else self.source

    def __str__(self) -> str:
        notes = [f"{self.kernel} {self.config}"] + [self.precision] * (self.precision != HALF.name)
        notes += ["TMA"] * (self.kernel == "portable" and self.schedule is not None)
        if self.schedule is not None and self.schedule.split_tiles:
            notes.append(f"{self.schedule.split_tiles} tiles in {self.schedule.split_k} parts")
            notes += ["reduced by a second launch"] * self.schedule.reduction
        if self.schedule is not None and self.schedule.in_turn:
            notes.append(f"{self.schedule.split_k} parts in turn")
        if self.split_k > 1:
            notes.append(f"K in {self.split_k} parts")
        notes += ["swap_ab"] * self.swap_ab + [f"{x} repacked" for x in self.packed]
        where = "" if self.device is None else f", on {self.device}"
        chosen = "" if self.policy is None else f"; chosen by the {self.chooser}, policy {self.policy}"
        chosen += ", from a kit" * self.kit
        bits = "" if self.bits is None else f"; bits: {self.bits}" + ", for any number of rows" * self.batch_invariant
        return f"{', '.join(notes)}{where}: {self.reason}{bits}{chosen}"


def ranked(problem: GemmProblem, device: DeviceInfo, any_bits: bool = False) -> list[tuple[float, Candidate]]:
    """(predicted microseconds, candidate), the fastest first: all that are worth comparing, legal or not. any_bits:
    those too whose bits depend on C's size, which `select` does not choose."""
    model = model_of(device)
    found: list[tuple[float, Candidate]] = []
    for name in kernels.KERNELS:
        kernel = kernels.named(name)
        copying: dict[tuple[str, ...], float] = {(): 0.0}
        more = {"in_part": True} if any_bits and kernel is kernels.warp_specialised else {}
        for candidate in kernel.candidates(problem, device, **more):
            given, (_, config, work, _, packed) = candidate
            if packed not in copying:
                copying[packed] = kernels.repack.microseconds(problem, packed, model)
            found.append((kernel.microseconds(given, config, work, model) + copying[packed], candidate))
    return sorted(found, key=lambda one: one[0])  # and of equals the first


def predicted(problem: GemmProblem, candidate: Candidate, model: DeviceModel) -> float:
    """Predicted microseconds of a problem's candidate, copies of operands included."""
    given, how = candidate
    time = kernels.named(how.kernel).microseconds(given, how.config, how.work, model)
    return time + kernels.repack.microseconds(problem, how.packed, model) if how.packed else time


def within(problem: GemmProblem, device: DeviceInfo, limit_us: float) -> list[tuple[float, Candidate]]:
    """(predicted microseconds, candidate) of legal candidates that are predicted to take at most so long, the fastest
    first."""
    return sorted(each_within(problem, device, limit_us), key=itemgetter(0))


def each_within(problem: GemmProblem, device: DeviceInfo, limit_us: float) -> Iterator[tuple[float, Candidate]]:
    """The same in any order, as they are found."""
    model = model_of(device)
    for name in kernels.KERNELS:
        for bound, _, candidates in _bounded(name, problem, device, model):
            for candidate in candidates if bound <= limit_us * ROUNDING else ():
                time = predicted(problem, candidate, model)
                if time <= limit_us and illegal(problem, device, candidate) is None:
                    yield time, candidate


def predicted_or_inf(problem: GemmProblem, candidate: Candidate, model: DeviceModel) -> float:
    """`predicted`, and infinity for what the model knows nothing of: no kernel may propose a table's or a user's
    configuration."""
    try:
        return predicted(problem, candidate, model)
    except Exception:  # whatever a kernel's formula raises for figures that it was not made for
        return math.inf


def credible(time: float, problem: GemmProblem, device: DeviceInfo) -> float:
    """A predicted time, or the roofline's where the model, which is fitted for its order, is faster than that."""
    return max(time, roofline(problem, device))


def about(time: float, problem: GemmProblem, device: DeviceInfo) -> str:
    """A predicted time, for people: of a GPU that nobody measured with that word, and of none for the interpreter."""
    caveat = ", not measured on this GPU" if origin(device) == "derived" else ""
    if device == INTERPRETER:
        caveat = " on a made-up GPU"
    return f"about {credible(time, problem, device):.3g} us{caveat}"


def illegal(problem: GemmProblem, device: DeviceInfo, candidate: Candidate) -> str | None:
    """Why `device` cannot run a problem's candidate, or None if it can."""
    given, how = candidate
    why = kernels.named(how.kernel).illegal(given, device, how.config, how.work)
    return why or kernels.repack.illegal(problem, how.packed)


def _is_hopper(device: DeviceInfo) -> bool:
    return device.capability == (9, 0) and device != INTERPRETER


# Kernels that are legal for some problems or GPUs alone: the others need not import them.
_LEGAL: dict[str, Callable[[GemmProblem, DeviceInfo], bool]] = {
    "warp_specialised": lambda _, device: _is_hopper(device),
    "skinny": lambda problem, _: min(problem.M, problem.N) <= FEW_ROWS,
    "gemv": lambda problem, _: min(problem.M, problem.N) <= FEW_ROWS,
    "fma": lambda problem, _: problem.dtype == torch.float32,
    "mma_fp64": lambda problem, device: problem.dtype == torch.float64 and _is_hopper(device),
}


def _bounded(name: str, problem: GemmProblem, device: DeviceInfo, model: DeviceModel) -> Iterable[Bounded]:
    """What a kernel offers. Where it gives no bounds, for groups, and for gates, there are few candidates."""
    if name in _LEGAL and not _LEGAL[name](problem, device):
        return ()
    kernel = kernels.named(name)
    if hasattr(kernel, "lower_bounds") and not (problem.groups or problem.gate):
        found: Iterable[Bounded] = kernel.lower_bounds(problem, device, model)
        return found
    return ((0.0, (0, place), (candidate,)) for place, candidate in enumerate(kernel.candidates(problem, device)))


def select(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """The legal candidate for `problem` on `device` of least predicted time; RuntimeError where none is legal. The same
    as the first legal one of `ranked`."""
    if device.capability < (8, 0):
        raise RuntimeError(f"matmul needs compute capability 8.0 or newer, {device.name} has less")
    model, why = model_of(device), None
    best: tuple[float, int, tuple[int, int]] = (math.inf, 0, (0, 0))
    found: Candidate | None = None

    for rank, name in enumerate(kernels.KERNELS):
        for bound, place, candidates in sorted(_bounded(name, problem, device, model), key=itemgetter(0)):
            if bound > best[0] * ROUNDING:
                break
            timed = [(predicted(problem, candidate, model), candidate) for candidate in candidates]
            for time, candidate in sorted(timed, key=itemgetter(0)):
                if (time, rank, place) >= best:
                    break
                why_not = illegal(problem, device, candidate)
                if why_not is None:
                    best, found = (time, rank, place), candidate
                else:
                    why = why_not
    if found is None:
        raise RuntimeError(f"no kernel multiplies {problem.dtype} in {problem.precision} on {device.name}: {why}")
    name, reason = found.algorithm.kernel, about(best[0], problem, device)
    if name == "gemv" and device == INTERPRETER:
        found = _in_wide_tiles(found)
    if name == "portable" and device.capability == (9, 0) and problem.K:
        tma = problem.tma_illegal()
        reason += f"; TMA cannot take {tma}" if tma else ""
    if name == "warp_specialised":
        reason += kernels.warp_specialised.without_clusters(problem)
    return Selection.of(found, reason)


def _in_wide_tiles(candidate: Candidate) -> Candidate:
    """The same with up to 128 columns in a tile: a program takes the interpreter 10 ms, however wide its tile is."""
    given, algorithm = candidate
    columns = min(128, 1 << (given.N - 1).bit_length())
    config = replace(algorithm.config, BLOCK_N=max(algorithm.config.BLOCK_N, columns))
    return candidate._replace(algorithm=algorithm._replace(config=config))


@generation.of_models(4096)
def remembered(problem: GemmProblem, device: DeviceInfo, of_kits: bool = False) -> Selection:
    """`select`, of earlier calls the result again. of_kits: in the forms of kits (`forms`)."""
    if not of_kits:
        return select(problem, device)
    with forms.of_kits():
        return select(problem, device)


def next_best(problem: GemmProblem, device: DeviceInfo, selection: Selection) -> Selection:
    """What `select` gave, whose reason names the next best kernel, too."""
    for time, candidate in ranked(problem, device):
        name = candidate.algorithm.kernel
        if name != selection.kernel and illegal(problem, device, candidate) is None:
            first, us, others = selection.reason.partition(" us")
            second = f"{name} about {credible(time, problem, device):.3g} us"
            return replace(selection, reason=f"{first}{us}, {second}{others}")
    return selection


def given(problem: GemmProblem, algorithm: Algorithm) -> GemmProblem:
    """The problem as the kernel of an algorithm is given it, as in a Candidate."""
    repacked = kernels.repack.repacked(problem, algorithm.packed)
    return repacked.swap_ab() if algorithm.swap_ab else repacked


def launches(problem: GemmProblem, selection: Selection) -> tuple[Launch, ...]:
    """What a selection launches for a problem, copies of operands first."""
    copies = [kernels.repack.copy_of(problem, name)[0] for name in selection.packed]
    names = {name: f"packed_{name}" for name in selection.packed}
    problem = given(problem, selection.algorithm)
    if selection.swap_ab:
        names = {"a": names.get("b", "b"), "b": names.get("a", "a"), "a_scale": "b_scale", "b_scale": "a_scale"}
    with forms.of_kits() if selection.kit else nullcontext():
        made = kernels.named(selection.kernel).launches(problem, selection.config, selection.work)
    return (*copies, *(launch.renamed(names) for launch in made))
