"""Products as kernels meet them, on any device: how operands lie, what happens to the result, and whether it is right.

Operands are windows in buffers of NaN and C a window in a buffer of sentinels, so that what is read or written
outside shows.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from tests.support.epilogue_truth import expected
from tests.support.numerics import mode_of, scale_shapes, scaled
from tests.support.product_checks import SENTINEL, drawn_as, nothing
from triton_gemm.arithmetic import FP8
from triton_gemm.config import TileConfig
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem

Size = tuple[int, int, int]
Runnable = Any  # a plan, or what stands for one: its `run` takes a, b, c, auxiliary operands, alpha and beta
# Of operands, by precision; of fp32 in the others.
DTYPES = {
    **{"half": torch.bfloat16, "fp64": torch.float64, "int8": torch.int8},
    **{"fp8": torch.float8_e4m3fn, "fp8 fast": torch.float8_e5m2},
}


@dataclass(frozen=True)
class Case:
    """A product, and how it lies in memory. size: M, N, K; orders: of a, b and c, `n` row-major, `t` column-major;
    pad: the pitch of a and b is a multiple of it; gap: unused elements after each row (or column) of c, beyond
    multiples of 16; offset, c_offset: of each first element, of c's besides, from a 16-byte boundary; step: distance of
    neighbours in a and b.

    batch: how many, or None; between: matrices lie between one another's rows; shared: all take a's first; precision:
    of fp32 or fp8; scales: GemmProblem's word for them.
    """

    size: Size
    orders: str = "nnn"
    pad: int = 8
    gap: int = 0
    offset: int = 0
    c_offset: int = 0
    step: int = 1
    batch: int | None = None
    between: bool = False
    shared: bool = False
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    alpha: float = 1.0
    beta: float = 0.0
    bias: str | None = None
    activation: str | None = None
    residual: bool = False
    precision: str | None = None
    scales: str | None = None
    integers: bool = False


class Operands:
    """A case's tensors on a device, and the truth about it."""

    def __init__(self, case: Case, device: torch.device) -> None:
        self.case, self.device = case, device
        M, N, K = case.size
        self.generator = torch.Generator(device).manual_seed(hash(case.size))
        out_dtype = case.out_dtype or case.dtype
        a, b = self.draw(M, K, case.dtype), self.draw(K, N, case.dtype)
        self.c0 = self.draw(M, N, out_dtype) if case.beta else self.draw(M, N, out_dtype).fill_(nothing(out_dtype))
        self.bias = None
        if case.bias is not None:
            self.bias = self.draw(1, M if case.bias == "m" else N, out_dtype).flatten()[: M if case.bias == "m" else N]
        self.a_buffer, self.a = self.place(a[:1] if case.shared else a, case.orders[0], nothing(case.dtype))
        self.a = self.a.expand_as(a)
        self.b_buffer, self.b = self.place(b, case.orders[1], nothing(case.dtype))
        self.c_buffer, self.c = self.place(self.c0, case.orders[2], SENTINEL, output=True)
        axis = {} if self.bias is None else {"bias": case.bias}
        self.problem = GemmProblem.of(
            self.a,
            self.b,
            self.c,
            has_beta=case.beta != 0,
            activation=case.activation,
            residual=case.residual,
            precision=case.precision,
            scales=case.scales,
            **axis,
        )
        self.scales: tuple[Tensor, ...] = ()  # as kernels read them
        self.scaled = self.a, self.b
        if case.scales is not None:
            turned = case.scales == "blocks"
            shapes = [x[::-1] if turned else x for x in scale_shapes(case.scales, M, N, K)]
            self.scales = tuple(0.5 + torch.rand(x, generator=self.generator, device=device) for x in shapes)
            a_scale, b_scale = (x.mT if turned else x for x in self.scales)
            self.scaled = scaled(self.a, a_scale), scaled(self.b, b_scale)

    @property
    def auxiliary(self) -> tuple[Tensor, ...]:
        return (*([] if self.bias is None else [self.bias]), *self.scales)

    def truth(self, parts: int, **changes: Any) -> tuple[Tensor, Tensor]:
        """(the result, or that of a changed case, in fp64, the largest error of a kernel that sums K in `parts`)."""
        case = replace(self.case, **changes)
        return expected(
            *(*self.scaled, self.c0 if case.beta else None, case.alpha, case.beta, self.bias, case.bias or "n"),
            activation=case.activation,
            mode=mode_of(self.problem.precision, case.dtype),
            out_dtype=self.c.dtype,
            parts=parts,
            residual=case.residual,
        )

    def draw(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (rows, columns) if self.case.batch is None else (self.case.batch, rows, columns)
        if self.case.integers:
            drawn = torch.randint(-6, 7, shape, generator=self.generator, device=self.device).float()
        else:
            drawn = torch.randn(shape, generator=self.generator, device=self.device, dtype=drawn_as(dtype))
            drawn = drawn if dtype.is_floating_point else (40 * drawn).clamp(-128, 127)
        return drawn.to(dtype)

    def place(
        self, x: torch.Tensor, order: str, fill: float, *, output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer full of `fill`, copy of x in the midst of it)."""
        case, (rows, columns) = self.case, x.shape[-2:]
        batch = 1 if x.dim() == 2 else x.shape[0]
        outer, inner = (rows, columns) if order == "n" else (columns, rows)
        step = 1 if output else case.step
        pad = 16 if output else case.pad  # Triton compiles once for strides that are multiples of 16
        pitch = -(-inner * step // pad) * pad + (case.gap if output else 0)
        row, matrix = (batch * pitch, pitch) if case.between else (pitch, outer * pitch + 64)
        margin = (300 * row + 300) // 64 * 64
        buffer = torch.full((2 * margin + batch * (outer * pitch + 64),), fill, dtype=x.dtype, device=self.device)
        strides = (row, step) if order == "n" else (step, row)
        shape = (rows, columns) if x.dim() == 2 else (batch, rows, columns)
        window = buffer.as_strided(shape, (matrix, *strides)[-x.dim() :], margin + case.offset + output * case.c_offset)
        return buffer, window.copy_(x)

    def check(self, plan: Runnable, parts: int = 1, times: int = 1) -> None:
        """Runs the plan; fails unless C is right and the same each time, and nothing else was written."""
        case = self.case
        kept = [x.clone() for x in (self.a_buffer, self.b_buffer)]
        results = []
        for _ in range(times):
            self.c.copy_(self.c0)
            plan.run(self.a, self.b, self.c, self.auxiliary, case.alpha, case.beta)
            results.append(self.c.clone())
        assert all(torch.equal(bits(results[0]), bits(result)) for result in results[1:]), "other bits"
        self.c.fill_(SENTINEL)
        assert (self.c_buffer == SENTINEL).all(), "wrote outside c"
        for buffer, was in zip((self.a_buffer, self.b_buffer), kept, strict=True):
            assert torch.equal(bits(buffer), bits(was)), "changed an operand"
        truth, bound = self.truth(parts)
        if case.integers:
            assert torch.equal(results[0], truth.to(self.c.dtype)), "integers are not exact"
        wrong = ~((results[0].double() - truth).abs() <= bound)  # NaN is wrong
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.itemsize])


def ids(value: object) -> str | None:
    return str(value).replace(" ", "-") if isinstance(value, TileConfig | str) else None


# --- Sizes and schedules of the warp-specialised kernel ---


def blocks(config: TileConfig) -> Size:
    return config.BLOCK_M, config.BLOCK_N, config.BLOCK_K


def wholes(config: TileConfig, programs: int) -> list[tuple[Size, Schedule]]:
    """Sizes and schedules without a split. Rows of C are whole 16 bytes, for TMA."""
    m, n, k = blocks(config)
    return [
        ((m + 9, 2 * n + 8, 3 * k + 8), Schedule(6)),  # every edge is partial
        ((2 * m, n, 5 * k), Schedule(2)),  # every tile is whole
        ((3, 8, 5), Schedule(1)),  # far less than a tile, and a k-tile
        ((1, 8, 1), Schedule(1)),  # strides that mean nothing
        ((7 * m - 1, 3 * n - 8, k), Schedule(2, group_m=3)),  # programs go round more often than the ring
        ((12 * m, 13 * n, 2 * k + 1), Schedule(programs)),  # more tiles than multiprocessors
    ]


def splits(config: TileConfig, programs: int) -> list[tuple[Size, Schedule]]:
    m, n, k = blocks(config)
    return [
        ((m + 9, 2 * n + 8, 7 * k + 8), Schedule(18, split_tiles=6, split_k=3)),  # all tiles, in uneven parts
        ((3, 8, 40 * k + 3), Schedule(20, split_tiles=1, split_k=20)),  # one tile: its owner adds nineteen others
        (
            (3 * m, 2 * n, 9 * k),
            Schedule(9, split_tiles=2, split_k=4),
        ),  # some programs have a part, others a whole tile
        ((2 * m, 2 * n, 8 * k), Schedule(24, split_tiles=3, split_k=8)),  # a k-tile each, and one whole tile
        ((12 * m, 12 * n, 6 * k), Schedule(programs, split_tiles=12, split_k=3)),  # as a last wave is cut
    ]


def reduced(case: Case, config: TileConfig, parts: int) -> Schedule:
    """All of a product's tiles, each in so many parts."""
    M, N, _ = case.size
    tiles = (case.batch or 1) * config.tiles(M, N)
    return Schedule(tiles * parts, tiles, parts, reduction=True)


def of_bytes(config: TileConfig, turn: int) -> list[Case]:
    """Products of both fp8 types, summed either way, with every kind of scales, and of int8, for a tile; whole and
    split they fill 6 tiles of 6 k-tiles."""
    m, n, k = blocks(config)
    fp8 = {"dtype": FP8.dtypes[turn % 2], "out_dtype": torch.bfloat16}
    kinds: list[dict[str, object]] = [
        {**fp8, "precision": "fp8", "scales": "blocks"},
        {**fp8, "precision": "fp8", "scales": "rows", "bias": "n"},
        {**fp8, "precision": "fp8 fast", "scales": "tensor", "out_dtype": torch.float32},
        {"dtype": torch.int8, "out_dtype": torch.int32},
        {"dtype": torch.int8, "out_dtype": torch.bfloat16, "scales": "rows", "beta": 0.5},
    ]
    size = (m + 9, 2 * n + 8, 5 * k + 16)
    return [Case(size, ("ntn", "ntt")[(turn + i) % 2], pad=16, **kind) for i, kind in enumerate(kinds)]


# --- Products of few rows along K ---


def few_rows(rows: int, config: TileConfig) -> list[tuple[Case, bool]]:
    """Products of so many rows, and of as many columns, for a tile; and whether to turn them, both ways where it has
    room. Ragged tiles, whole ones, less than a tile and than a step, one step, and its tail; in pitches that K fills,
    and in longer ones, the rest of which is NaN."""
    m, n, k = blocks(config)
    sizes = [(3 * n + 5, 2 * k + 24), (2 * m, 3 * k), (5, 8), (n + 1, k - 8), (n + 4, k), (1, k + 8)]
    found = []
    for turn, (others, K) in enumerate(sizes, rows):
        how: dict[str, object] = {"pad": (8, 64, 2048)[turn % 3], "integers": turn % 2 == 0}
        found += [(Case((rows, others, K), "ntn", **how), False), (Case((others, rows, K), "ntt", **how), True)]
        if rows <= n:
            found += [(Case((others, rows, K), "ntn", **how), False), (Case((rows, others, K), "ntt", **how), True)]
    return found


CIRCUMSTANCES = {
    "c-column-major": {"orders": "tnt"},
    "c-odd": {"orders": "ntn", "gap": 1},
    "c-column-major-odd": {"orders": "nnt", "gap": 3},
    "c-rows-on-8-bytes": {"gap": 4},
    "c-unaligned": {"c_offset": 1},
    "c-rows-end-inside-16-bytes": {"ragged": 1},
    "beta": {"beta": -2.0, "alpha": 0.5},
    "beta-c-column-major": {"orders": "ttt", "beta": 1.0},
    "beta-c-odd": {"orders": "tnn", "gap": 1, "beta": 1.0},
    "bias-m": {"bias": "m"},
    "bias-n": {"bias": "n", "orders": "ntn"},
    **{name: {"activation": name, "alpha": 0.25} for name in ACTIVATIONS},
    "residual": {"bias": "n", "activation": "silu", "beta": 1.0, "residual": True, "orders": "ntn"},
    "residual-c-odd": {"activation": "gelu", "beta": 1.0, "residual": True, "gap": 1},
    "everything": {"bias": "n", "activation": "gelu", "beta": 0.5, "alpha": -0.5, "orders": "ntt"},
    "float32": {"out_dtype": torch.float32},
    "float16": {"dtype": torch.float16, "orders": "tnn"},
    "float16-to-float32-odd": {"dtype": torch.float16, "out_dtype": torch.float32, "gap": 1, "beta": 1.0, "bias": "m"},
    "batch": {"batch": 5},
    "batch-between": {"batch": 3, "between": True, "orders": "ntn"},
    "batch-of-one-a": {"batch": 4, "shared": True, "orders": "tnn"},
    "batch-column-major-odd": {"batch": 3, "orders": "ttt", "gap": 1, "bias": "m", "activation": "silu"},
}


def circumstance(name: str, size: Size, **defaults: object) -> Case:
    change = {**defaults, **CIRCUMSTANCES[name]}
    ragged = change.pop("ragged", 0)
    return Case((size[0], size[1] + ragged, size[2]), **change)


def circumstance_along_k(name: str, size: Size) -> Case:
    """But both operands lie along K."""
    case = circumstance(name, size)
    return replace(case, orders="nt" + case.orders[2])
