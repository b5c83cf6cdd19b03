"""What is measured: kinds of products, operands of theirs in memory, and of each problem one candidate for every kernel
and class of bits."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from perf.measure.numerics import mode_of, scale_shapes, scaled
from triton_gemm.arithmetic import ARITHMETICS, EMULATED, FP8
from triton_gemm.compat import INTERPRETED
from triton_gemm.hardware.device import device_info
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime.plan import GemmPlan, InterpretedPlan
from triton_gemm.runtime.policies import choose
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, ranked

Size = tuple[int, int, int]  # M, N, K

FLOAT32, BF16, FP16 = torch.float32, torch.bfloat16, torch.float16
# k-tiles 64 deep end elsewhere than those 128 deep, the last of either is not full, and no size is whole tiles.
MANY, FEW, ROW, COLUMN = (333, 520, 1064), (13, 264, 1064), (1, 264, 1064), (264, 1, 1064)
SIZES = (MANY, FEW, ROW, COLUMN)
SMALL = ((20, 17, 40), (1, 17, 40))  # in the interpreter
LONG, SMALL_LONG = (64, 48, 1_000_000), (3, 5, 600)
ENDS = (0.3, 0.3, 0.9)  # of groups, as shares: one is empty, and not all is in a group


@dataclass(frozen=True)
class Kind:
    """Products that are alike. name: as tables have it; precision: of GemmProblem; groups, scales: its words.

    every: whether each class of bits is measured, or of each kernel one; odd: whether operands begin and end within 16
    bytes, so that they are copied, or read one by one, and C is column-major.
    """

    name: str
    dtype: torch.dtype
    precision: str = "half"
    out_dtype: torch.dtype | None = None
    scales: str | None = None
    groups: str | None = None
    every: bool = True
    odd: bool = False

    @property
    def mode(self) -> str:
        return mode_of(self.precision, self.dtype)

    @property
    def result(self) -> torch.dtype:
        """C's dtype."""
        return self.out_dtype or self.dtype


FP8_SCALES = (
    *(("fp8", "blocks", True), ("fp8", "rows", False), ("fp8", "tensor", True)),
    ("fp8 fast", "tensor", True),
)
KINDS = {
    kind.name: kind
    for kind in (
        Kind("bf16 to fp32", BF16, out_dtype=FLOAT32),
        Kind("bf16", BF16, every=False),
        Kind("bf16, odd", BF16, out_dtype=FLOAT32, every=False, odd=True),
        Kind("bf16, groups of rows", BF16, out_dtype=FLOAT32, groups="m", every=False),
        Kind("bf16, groups of products", BF16, out_dtype=FLOAT32, groups="k", every=False),
        Kind("fp16 to fp32", FP16, out_dtype=FLOAT32, every=False),
        Kind("fp16", FP16, every=False),
        *(Kind(precision, FLOAT32, precision) for precision in ("ieee", "tf32", *EMULATED)),
        *(Kind(f"{x}, odd", FLOAT32, x, every=False, odd=True) for x in ("ieee", "tf32", "bf16x6")),
        *(
            Kind(f"{x}, groups of rows", FLOAT32, x, groups="m", every=False)
            for x in ("ieee", "tf32", "tf32x3", "bf16x6")
        ),
        Kind("fp64", torch.float64, "fp64"),
        *(
            Kind(f"{precision} {name}, {scales}", dtype, precision, FLOAT32, scales, every=every and name == "e4m3")
            for dtype, name in zip(FP8.dtypes, ("e4m3", "e5m2"), strict=True)
            for precision, scales, every in FP8_SCALES
        ),
        Kind("int8", torch.int8, "int8", torch.int32),
        Kind("int8, rows", torch.int8, "int8", FLOAT32, "rows"),
    )
}


def possible(kind: Kind, device: torch.device) -> bool:
    """Whether the device multiplies such operands."""
    return device_info(device).capability >= ARITHMETICS[kind.precision].capability


@dataclass
class Operands:
    """A kind's tensors of one size, in memory whose rest is NaN; `put` gives them values."""

    kind: Kind
    size: Size
    device: torch.device
    a: torch.Tensor = field(init=False)
    b: torch.Tensor = field(init=False)
    c: torch.Tensor = field(init=False)
    auxiliary: tuple[torch.Tensor, ...] = ()

    def __post_init__(self) -> None:
        (M, N, K), kind, groups = self.size, self.kind, len(ENDS)
        odd = kind.odd
        self.a = _placed((M, K), kind.dtype, self.device, column_major=False, odd=odd)
        shape = (groups, K, N) if kind.groups == "m" else (K, N)
        self.b = _placed(shape, kind.dtype, self.device, column_major=True, odd=odd)
        shape = (groups, M, N) if kind.groups == "k" else (M, N)
        self.c = _placed(shape, kind.result, self.device, column_major=odd, odd=odd)
        if kind.scales is not None:
            shapes = scale_shapes(kind.scales, M, N, K)
            self.scales = [torch.ones(shape, device=self.device) for shape in shapes]
        if kind.groups is not None:
            self.ends = [int(share * (M if kind.groups == "m" else K)) for share in ENDS]
            self.auxiliary = (torch.tensor(self.ends, dtype=torch.int32, device=self.device),)

    @property
    def problem(self) -> GemmProblem:
        kind = self.kind
        request = Request(precision=kind.precision, scales=kind.scales, groups=kind.groups)
        return request.problem(self.a, self.b, self.c)

    def put(self, a: torch.Tensor, b: torch.Tensor, generator: torch.Generator, *, exact: bool) -> None:
        """The values of A [M, K] and B [K, N], the latter for each group another way round; and random scales, where
        results are to be exact powers of two."""
        self.a.copy_(a)
        self.b.copy_(torch.stack([b, b.flip(-1), b.flip(-1)]) if self.kind.groups == "m" else b)
        if self.kind.scales is None:
            return
        for scale in self.scales:
            steps = torch.randint(-1, 2, scale.shape, generator=generator, device=self.device)
            drawn = 0.5 + torch.rand(scale.shape, generator=generator, device=self.device)
            scale.copy_(2.0**steps if exact else drawn)
        blocks = self.kind.scales == "blocks"
        self.auxiliary = tuple((x.mT if blocks else x).contiguous() for x in self.scales)

    def products(self) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """What is multiplied, as matrices (A, B, C), scaled; and what no group has as a product of nothing."""
        a, b, c = self.a, self.b, self.c
        if self.kind.scales is not None:
            return [(scaled(a, self.scales[0]), scaled(b, self.scales[1]), c)]
        if self.kind.groups is None:
            return [(a, b, c)]
        slices = [slice(begin, end) for begin, end in zip([0, *self.ends[:-1]], self.ends, strict=True)]
        if self.kind.groups == "k":
            return [(a[:, part], b[part], c[i]) for i, part in enumerate(slices)]
        rest = slice(self.ends[-1], None)
        return [(a[part], b[i], c[part]) for i, part in enumerate(slices)] + [(a[rest, :0], b[0, :0], c[rest])]


def _placed(
    shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, column_major: bool, odd: bool
) -> torch.Tensor:
    """A tensor [.., rows, columns] amid NaN: from a multiple of 16 bytes on, with rows of such a pitch, or `odd`."""
    *batch, rows, columns = shape
    outer, inner = (columns, rows) if column_major else (rows, columns)
    pitch = inner + 1 + inner % 2 if odd else -(-inner // 16) * 16
    matrix, first = outer * pitch, 64 + odd
    count = batch[0] if batch else 1
    size = (first + count * matrix + 64) * dtype.itemsize
    buffer = torch.full((size,), 0xFF, dtype=torch.uint8, device=device).view(dtype)
    strides = (1, pitch) if column_major else (pitch, 1)
    return buffer.as_strided(shape, (matrix, *strides)[-len(shape) :], first)


@dataclass(frozen=True)
class AccuracyCandidate:
    """One kernel in one class of bits."""

    selection: Selection
    bits: str


def candidates(problem: GemmProblem, kind: Kind, device: torch.device) -> list[AccuracyCandidate]:
    """Of every kernel and class that can multiply `problem` the fastest, as predicted; or of every kernel, with and
    without copies of operands."""
    info = device_info(device)
    found: dict[object, AccuracyCandidate] = {}
    for _, candidate in ranked(problem, info, any_bits=True):
        if illegal(problem, info, candidate) is not None:
            continue
        selection = Selection.of(candidate, "to be measured")
        bits = bit_class(problem, selection)
        key = (selection.kernel, bits if kind.every else selection.packed)
        found.setdefault(key, AccuracyCandidate(selection, bits))
    return list(found.values())


def chosen_candidates(problem: GemmProblem, device: torch.device) -> list[AccuracyCandidate]:
    """What `matmul` runs, with and without batch invariance."""
    selections = [choose(problem, device_info(device), invariant=invariant) for invariant in (False, True)]
    return [AccuracyCandidate(selection, bit_class(problem, selection)) for selection in selections]


def planned(problem: GemmProblem, candidate: AccuracyCandidate, device: torch.device) -> GemmPlan | InterpretedPlan:
    if INTERPRETED:
        return InterpretedPlan(problem, candidate.selection)
    return GemmPlan(problem, candidate.selection, device)
