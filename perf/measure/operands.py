"""What is multiplied: a problem, its random operands as they lie in memory, and the check of a result against fp64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import KW_ONLY, dataclass
from functools import partial
from typing import Any

import torch

from perf.measure import numerics
from triton_gemm.arithmetic import ARITHMETICS, HALF
from triton_gemm.functional.activations import ACTIVATIONS
from triton_gemm.operands import matrix
from triton_gemm.suites.shapes import Shape
from triton_gemm.tuning.timing import COLD_FACTOR, draw, set_count

DEVICE = "cuda"
CHECK_FLOP = 2.0**38  # of an fp64 product of some rows
CHECK_RESULTS = 2**26  # elements of C that are held in fp64
MIN_CHECK_ROWS = 16
MODE_DTYPES = {name: found.dtypes[0] for name, found in ARITHMETICS.items() if found is not HALF}
MODE_DTYPES |= {"fp16": torch.float16, "bf16": torch.bfloat16, "int32": torch.int32}
# What a product is stored as, where that is not the operands' type.
OUT_DTYPES = {torch.int8: torch.int32, torch.float8_e4m3fn: torch.bfloat16}
LESS_THAN_FP32 = ("bf16x3",)  # torch has nothing like it: only the bound counts
STEEPEST = 1.13  # the largest slope among the activations: gelu's, at sqrt(2)


@dataclass(frozen=True)
class Problem(Shape):
    """C = activation(A B + bias), C row-major, of a shape in a precision, a key of MODE_DTYPES.

    hot: whether L2 holds the operands; cold: by how much operand sets exceed L2 otherwise.
    """

    mode: str
    _: KW_ONLY
    hot: bool = False
    seed: int = 0
    cold: float = COLD_FACTOR

    @property
    def dtype(self) -> torch.dtype:
        return MODE_DTYPES[self.mode]

    @property
    def out_dtype(self) -> torch.dtype:
        return OUT_DTYPES.get(self.dtype, self.dtype)

    @property
    def flop(self) -> int:
        return 2 * (self.batch or 1) * self.M * self.N * self.K

    @property
    def key(self) -> str:
        return f"{self.mode} {self.M}x{self.N}x{self.K}{' hot' if self.hot else ''}"

    @property
    def plain(self) -> bool:
        """Whether it is a product and nothing else."""
        return self.bias is None and self.activation is None and self.scales is None

    def bytes(self, out_dtypes: set[torch.dtype] | None = None) -> int:
        """A, B and C once; C in each of `out_dtypes`, else in the problem's own."""
        M, N, K, itemsize = self.M, self.N, self.K, self.dtype.itemsize
        out = sum(dtype.itemsize for dtype in out_dtypes or {self.out_dtype})
        return (self.batch or 1) * (itemsize * (M * K + K * N) + out * M * N)


class Operands:
    """`count` sets of random A and B, left undrawn if `empty`, and of C for each output type; one bias and one pair of
    scales for all."""

    def __init__(self, problem: Problem, out_dtypes: set[torch.dtype], count: int, *, empty: bool = False) -> None:
        self.problem = problem
        M, N, K, dtype = problem.M, problem.N, problem.K, problem.dtype
        generator = torch.Generator(device=DEVICE).manual_seed(problem.seed)
        batch = () if problem.batch is None else (problem.batch,)

        def lay(storage: Callable[[int], torch.Tensor], rows: int, columns: int, order: str) -> torch.Tensor:
            return matrix(storage, (*batch, rows, columns), order, problem.pad, problem.offset)

        def drawn(count: int) -> torch.Tensor:
            return draw((count,), dtype, generator)

        undrawn = partial(torch.empty, device=DEVICE)
        storage = partial(undrawn, dtype=dtype) if empty else drawn
        orders = problem.layout
        self.sets = [(lay(storage, M, K, orders[0]), lay(storage, K, N, orders[1])) for _ in range(count)]
        self.outputs = {
            out_dtype: [lay(partial(undrawn, dtype=out_dtype), M, N, "n") for _ in range(count)]
            for out_dtype in out_dtypes
        }
        sizes = {"m": M, "n": N}
        self.bias = draw((sizes[problem.bias],), dtype, generator) if problem.bias else None
        self.scales: tuple[torch.Tensor, ...] = ()
        if problem.scales is not None:  # as `torch._scaled_mm` wants them laid out
            shapes = numerics.scale_shapes(problem.scales, M, N, K)
            self.scales = tuple(0.5 + torch.rand(x[::-1], device=DEVICE, generator=generator).T for x in shapes)

    def arguments(self, out_dtype: torch.dtype | None = None) -> list[tuple[torch.Tensor, ...]]:
        """What a provider is called with on each set: a, b, c and, where there are any, the bias and the scales."""
        more = (*(() if self.bias is None else (self.bias,)), *self.scales)
        outputs = self.outputs[out_dtype or self.problem.out_dtype]
        if self.problem.grouped:
            a = self.sets[0][0]
            ends = torch.arange(1, len(a) + 1, device=DEVICE, dtype=torch.int32) * a.shape[1]
            return [(a.flatten(0, 1), b, c, ends) for (a, b), c in zip(self.sets, outputs, strict=True)]
        sets = [(a, b.requires_grad_(self.problem.trained)) for a, b in self.sets]
        return [(a, b, c, *more) for (a, b), c in zip(sets, outputs, strict=True)]


def sets_of(problem: Problem, out_dtypes: set[torch.dtype]) -> int:
    """Operand sets for a problem on the current GPU; one if L2 is to be hot."""
    if problem.hot:
        return 1
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    free = torch.cuda.mem_get_info()[0]
    return set_count(problem.bytes(out_dtypes), l2, free, problem.cold)


def scaled_by_torch(
    problem: Problem, a: torch.Tensor, b: torch.Tensor, scale_a: torch.Tensor, scale_b: torch.Tensor
) -> torch.Tensor:
    """torch's own scaled product."""
    fast = problem.mode == "fp8 fast"
    return torch._scaled_mm(a, b, scale_a, scale_b, out_dtype=problem.out_dtype, use_fast_accum=fast)


def check_rows(problem: Problem, at_most: int | None) -> torch.Tensor | None:
    """Which rows of C to check, sorted, the first and the last among them, a multiple of 16 (as torch._scaled_mm wants
    them); None for all."""
    if at_most is None:
        return None
    batch = problem.batch or 1
    by_work = int(CHECK_FLOP / (2 * batch * problem.N * problem.K))
    count = max(MIN_CHECK_ROWS, min(at_most, by_work, CHECK_RESULTS // (batch * problem.N)) // 16 * 16)
    if count >= problem.M:
        return None
    drawn = 1 + torch.randperm(problem.M - 2, generator=torch.Generator().manual_seed(problem.seed))[: count - 2]
    return torch.cat([drawn, torch.tensor([0, problem.M - 1])]).sort().values.to(DEVICE)


class Check:
    """The fp64 truth of a problem's first operands, or of some rows of it, and the verdict on a result."""

    def __init__(self, operands: Operands, rows: torch.Tensor | None = None) -> None:
        problem = self.problem = operands.problem
        self.rows = rows
        (a, b), bias, scales = operands.sets[0], operands.bias, operands.scales
        self.a, self.b, self.scales = self._of_rows(a), b, scales
        if problem.scales in ("rows", "blocks"):
            self.scales = (self._of_rows(scales[0]).mT.contiguous().mT, scales[1])
        if bias is not None and problem.bias == "m":
            bias = bias[:, None] if rows is None else bias[rows, None]
        self.bias = bias
        factors = (
            [numerics.scaled(x, scale) for x, scale in zip((self.a, b), self.scales, strict=True)]
            if scales
            else (self.a, b)
        )
        self.before = numerics.reference(*factors)
        self.magnitude = numerics.magnitude(*factors)
        if bias is not None:
            self.before += bias.double()
            self.magnitude += bias.double().abs()
        self.expected = self._activated(self.before)
        self._torch_norm: dict[torch.dtype, float] = {}

    def verdict(self, c: torch.Tensor, *, torchs: bool = False) -> tuple[dict[str, float | None], str | None]:
        """The error of c (norm; componentwise, of |A||B|; share of the bound) and why it is too large, or None.

        torchs: whether c is torch's own result. It is the opponent as its users meet it, so its error is told and does
        not keep it from being timed: by default cuBLAS may add the parts of a split sum in bf16 or fp16
        (`allow_bf16_reduced_precision_reduction`), several times beyond the bound.
        """
        finite = torch.isfinite(c) if c.is_floating_point() else torch.ones((), dtype=torch.bool)
        if not bool(finite.all()):
            count = int((~finite).sum())
            return {"norm": None}, f"{count} results are not finite (outputs hold NaN before the call)"
        difference = (self._of_rows(c).double() - self.expected).abs_()
        if not c.is_floating_point():
            wrong = int((difference != 0).sum())
            return {"norm": _norm(difference, self.expected)}, f"{wrong} results differ" if wrong else None
        bound = numerics.accumulation_error(self.problem.K, self.problem.mode) * self.magnitude
        # Whoever adds the bias and applies the activation after storing rounds each time.
        if self.bias is not None:
            bound = numerics.rounded(bound, self.before.abs() + self.bias.double().abs(), c.dtype)
        bound = numerics.rounded(bound, self.before, c.dtype)
        if self.problem.activation is not None:
            bound = numerics.rounded(STEEPEST * bound, self.expected, c.dtype)
        norm, torch_norm = _norm(difference, self.expected), self.torch_norm(c.dtype)
        of_bound = float((difference / bound).max())
        vs_torch = norm / torch_norm if torch_norm else 1.0
        error: dict[str, float | None] = {
            "norm": norm,
            "componentwise": float((difference / self.magnitude.clamp(min=1e-300)).max()),
            "bound": of_bound,
            "vs_torch": vs_torch,
        }
        if torchs:
            return error, None
        if of_bound > 1:
            return error, f"a result is off by {of_bound:.3g} times the bound"
        if vs_torch > 2 and self.problem.mode not in LESS_THAN_FP32:
            return error, f"the error is {vs_torch:.3g} times torch's own"
        return error, None

    def torch_norm(self, out_dtype: torch.dtype) -> float:
        """The error of torch's own product in this precision, stored as `out_dtype`."""
        if out_dtype not in self._torch_norm:
            if self.scales:
                c = scaled_by_torch(self.problem, self.a, self.b, *self.scales)
            elif out_dtype == self.a.dtype:
                c = self.a @ self.b
            else:
                c = torch.mm(self.a, self.b, out_dtype=out_dtype)
            if self.bias is not None:
                c = c + self.bias
            self._torch_norm[out_dtype] = _norm(self._activated(c).double() - self.expected, self.expected)
        return self._torch_norm[out_dtype]

    def _activated(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.problem.activation is None else ACTIVATIONS[self.problem.activation](x)

    def _of_rows(self, x: torch.Tensor) -> torch.Tensor:
        return x if self.rows is None else x.index_select(-2, self.rows)


def _norm(difference: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.norm())
    return float(difference.norm()) / scale if scale else float(difference.norm())


def describe(problem: Problem) -> dict[str, Any]:
    """The problem's own fields that a record keeps, those at their default left out."""
    defaults = Problem(0, 0, 0, "")
    names = ("batch", "layout", "pad", "offset", "bias", "activation", "scales", "given_out")
    changed = {name: value for name in names if (value := getattr(problem, name)) != getattr(defaults, name)}
    return {"M": problem.M, "N": problem.N, "K": problem.K, "mode": problem.mode, "seed": problem.seed, **changed}
