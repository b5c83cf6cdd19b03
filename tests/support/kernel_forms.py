"""Every kernel in each of its forms, on products of every kind: what is watched for accesses outside of operands.

A form is what makes other code of a kernel: sums that programs share or not, or add up in parts, clusters, one `wgmma`
of any width, a second launch. Forms are taken from what `select` compares, so that a new kernel is among them; parts in
turn, which only batch invariance compares, are added.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from unittest.mock import patch

import torch

from tests.support.random_products import FLOATS, NAN_BYTE, Memory, Prepared, Problem
from triton_gemm.arithmetic import MODES
from triton_gemm.compat import INTERPRETED
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.kernels import fma, warp_specialised
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem
from triton_gemm.runtime.plan import GemmPlan, InterpretedPlan
from triton_gemm.selection.select import Selection, illegal, ranked

Size = tuple[int, int, int]
SKIPPED = 77  # exit status of a check that cannot run on this machine, by Automake's convention


@dataclass(frozen=True)
class Sizes:
    """M, N, K of products. many: ragged tiles, rows of whole 16 bytes; odd: of none; long: K much longer than the
    rest; few: of rows; waves: what tiles of odd widths are for."""

    many: Size = (144, 272, 1040)
    odd: Size = (131, 137, 1035)
    long: Size = (72, 136, 4112)
    few: Size = (3, 1040, 1040)
    waves: Size = (1216, 1264, 272)


SMALL = Sizes((20, 24, 48), (19, 17, 37), (5, 16, 64), (3, 32, 48), (20, 24, 48))  # for the interpreter


def circumstances(sizes: Sizes = Sizes()) -> dict[str, Problem]:
    """Products by the name of what is special about them."""
    bf16 = Problem("mm", sizes.many, "bfloat16", orders="ntn")
    odd, few = replace(bf16, size=sizes.odd, gap=2, offset=1), replace(bf16, size=sizes.few)
    fp32 = Problem("mm", sizes.many, orders="tnn")
    grouped = replace(bf16, operation="grouped rows", ends=(0.3, 0.3, 0.9))  # one is empty, and rows are in none
    found = {f"bf16 {orders}": replace(bf16, orders=orders) for orders in ("nnn", "ntn", "tnn", "ttn", "nnt")}
    found |= {
        "bf16 odd": odd,
        "bf16 odd, column-major": replace(odd, orders="tnt"),
        "bf16 with steps": replace(bf16, step=2),
        "bf16 long": replace(bf16, size=sizes.long),
        "bf16 few": few,
        "bf16 few, row-major": replace(few, orders="nnn"),
        "bf16 few columns": replace(few, size=(few.size[1], few.size[0], few.size[2]), orders="ntt"),
        "bf16 few, odd": replace(few, gap=3),
        "bf16 waves": replace(bf16, size=sizes.waves),
        "bf16 to fp32": replace(bf16, out_dtype="float32"),
        "bf16 beta": replace(bf16, operation="addmm", added="matrix", alpha=-0.5, beta=2),
        "bf16 beta, odd": replace(odd, operation="addmm", added="matrix", beta=2),
        "bf16 beta, few": replace(few, operation="addmm", added="matrix", beta=2),
        "bf16 bias of rows": replace(odd, operation="addmm", added="column"),
        "bf16 bias of columns": replace(bf16, operation="addmm", added="row"),
        "bf16 batch": replace(bf16, operation="bmm", batch=3),
        "bf16 batch between": replace(bf16, operation="bmm", batch=3, between=True),
        "bf16 groups of rows": grouped,
        "bf16 groups of rows, gate": replace(grouped, operation="gated rows", activation="silu"),
        "bf16 groups of products": replace(grouped, operation="grouped products"),
        "fp16": replace(bf16, dtype="float16"),
        "fp16 few to fp32": replace(few, dtype="float16", out_dtype="float32"),
        "fp32 few": replace(fp32, size=sizes.few),
        "fp32 groups of rows": replace(grouped, dtype="float32", precision="tf32"),
        "fp64": replace(fp32, dtype="float64"),
        "int8": replace(bf16, dtype="int8"),
        "int8 odd": replace(odd, dtype="int8"),
    }
    found |= {f"bf16 {name}": replace(bf16, operation="linear", added="row", activation=name) for name in ACTIVATIONS}
    for precision in MODES:
        found[f"fp32 {precision}"] = replace(fp32, precision=precision)
        found[f"fp32 {precision}, odd"] = replace(fp32, precision=precision, size=sizes.odd, gap=2, orders="ntn")
    found["fp32 ieee, beta"] = replace(fp32, operation="addmm", precision="ieee", added="matrix", beta=2)
    scaled = replace(bf16, operation="scaled", added="row")
    for scales in ("tensor", "rows"):
        found[f"int8 by {scales}"] = replace(scaled, dtype="int8", scales=scales)
    for scales, fast, dtype in (
        *(("tensor", False, "float8_e4m3fn"), ("rows", False, "float8_e5m2"), ("blocks", False, "float8_e4m3fn")),
        *(("tensor", True, "float8_e5m2"), ("rows", True, "float8_e4m3fn")),
    ):
        found[f"{dtype} by {scales}{' fast' * fast}"] = replace(scaled, dtype=dtype, scales=scales, fast=fast)
    assert {problem.dtype for problem in found.values()} >= {*FLOATS, "int8"}
    return found


@dataclass(frozen=True)
class Variant:
    """A problem, and a kernel in one of its forms that computes it. in_turn: whether `fma`'s programs add their sums
    one after the other."""

    circumstance: str
    problem: Problem
    selection: Selection
    form: str
    in_turn: bool = False

    def __str__(self) -> str:
        return f"{self.circumstance}: {self.form}"

    @property
    def inline_ptx(self) -> bool:
        """Whether loads, products or barriers are PTX of which Triton knows nothing."""
        return any(word in self.form for word in ("cluster", "wide", "few rows"))

    def plan(self, described: GemmProblem, device: str, *, by_triton: bool = False) -> GemmPlan | InterpretedPlan:
        """by_triton: whether Triton itself launches the kernels."""
        with ExitStack() as stack:
            if self.selection.kernel == "fma":
                stack.enter_context(patch.object(fma, "LARGEST_WORKSPACE", 0 if self.in_turn else 1 << 40))
            if INTERPRETED or by_triton:
                return InterpretedPlan(described, self.selection)
            return GemmPlan(described, self.selection, torch.device(device))


def form(candidate: Candidate) -> str:
    """In words."""
    given, (kernel, config, work, _, _) = candidate
    words = [kernel]
    if kernel == "warp_specialised":
        words += ["clusters"] * (config.ctas > 1)
        words += ["wide"] * warp_specialised.host.wide_mma(given, config)
        words += ["few rows"] * any(warp_specialised.host.copied(given, config))
        if work.split_tiles:
            words.append("second launch" if work.reduction else "split")
        words += ["parts in turn"] * work.in_turn
    elif work > 1:
        words.append("split")
    return ", ".join(words)


def with_parts_in_turn(found: list[tuple[float, Candidate]]) -> Iterator[Candidate]:
    """Candidates, each whole one of the warp-specialised kernel with three parts in turn, too."""
    for _, candidate in found:
        yield candidate
        given, algorithm = candidate
        if isinstance(algorithm.work, Schedule) and algorithm.work.split_k == 1:
            yield Candidate(given, algorithm._replace(work=replace(algorithm.work, split_k=3)))


def forms(circumstance: str, problem: Problem, described: GemmProblem, device: DeviceInfo) -> Iterator[Variant]:
    """The fastest legal candidate of each form, as predicted, for a problem as operands have it."""
    found: dict[str, Selection] = {}
    for candidate in with_parts_in_turn(ranked(described, device, any_bits=True)):
        name = form(candidate)
        if name not in found and illegal(described, device, candidate) is None:
            found[name] = Selection.of(candidate, "watched")
    for name, selection in found.items():
        yield Variant(circumstance, problem, selection, name)
        if selection.kernel == "fma" and selection.split_k > 1:
            yield Variant(circumstance, problem, selection, f"{name}, in turn", in_turn=True)


def variants(
    problems: dict[str, Problem], memory: Memory, device: DeviceInfo, most: int, *, inline_ptx: bool = True
) -> Iterator[tuple[Prepared, list[Variant]]]:
    """For each problem its operands in `memory`, and variants of it: at most so many, in the forms that were taken
    least for the problems before. inline_ptx: whether they may have that."""
    taken: Counter[str] = Counter()
    for name, problem in problems.items():
        prepared = Prepared(problem, memory, by_plan=True)
        described = prepared.request.problem(*prepared.operands)
        found = [variant for variant in forms(name, problem, described, device) if inline_ptx or not variant.inline_ptx]
        chosen = sorted(found, key=lambda variant: taken[variant.form])[:most]
        taken.update(variant.form for variant in chosen)
        yield prepared, chosen


def shared(problems: dict[str, Problem], share: str) -> dict[str, Problem]:
    """Of the problems a part: "2/5" is the second of five."""
    number, count = map(int, share.split("/"))
    return {name: problem for i, (name, problem) in enumerate(problems.items()) if i % count == number - 1}


# --- Memory ---


class Separate(Memory):
    """Whose operands stay as they are, while others are placed."""

    def take(self, name: str, size: int, byte: int) -> torch.Tensor:
        return torch.full((size,), byte, dtype=torch.uint8, device=self.device)


class Alone(Memory):
    """Each operand an allocation of its own, which ends with its last element. (Where torch caches none.)"""

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, problem: Problem, order: str, byte: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        strides = lying(shape, problem, order)
        size = problem.offset + 1 + sum((size - 1) * stride for size, stride in zip(shape, strides, strict=True))
        around = torch.full((size * dtype.itemsize,), byte, dtype=torch.uint8, device=self.device)
        return around, around.view(dtype).as_strided(tuple(shape), strides, problem.offset)


class Far(Separate):
    """One operand, `which`, has more than `elements` between its first and its last, amid NaN."""

    def __init__(self, device: str, which: str, elements: int = 2**31) -> None:
        super().__init__(device)
        self.which, self.elements = which, elements

    @property
    def size(self) -> int:
        """Bytes that the operand may span, of fp64 too."""
        return 9 * self.elements

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, problem: Problem, order: str, byte: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        if name != self.which:
            return super().place(name, shape, dtype, problem, order, byte)
        strides = list(lying(shape, problem, order))
        slowest = max((i for i, size in enumerate(shape) if size > 1), key=lambda i: strides[i])
        strides[slowest] = (self.elements // (shape[slowest] - 1) // 64 + 1) * 64
        if "far" not in self.buffers:
            self.buffers["far"] = super().take("far", self.size, NAN_BYTE)
        buffer = self.buffers["far"]
        return buffer[:0], buffer[: self.size // 8 * 8].view(dtype).as_strided(tuple(shape), strides)


def lying(shape: Sequence[int], problem: Problem, order: str) -> tuple[int, ...]:
    """The strides that a problem's operand has."""
    *_, window = Memory("meta").place("x", shape, torch.int8, problem, order, 0)
    return window.stride()
