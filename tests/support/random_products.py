"""Products as users may call them, drawn at random, and the fp64 oracle that they are held to, for tests/fuzz.py.

Operands lie in memory that is used again by every product, among bytes that are NaN in every dtype, and a given `out`
among bytes that must stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from math import prod
from typing import Any, TypeVar

import torch

import triton_gemm
from perf.measure.numerics import rounded
from tests.support.epilogue_truth import expected
from tests.support.group_truth import matrices_of
from tests.support.numerics import mode_of, scale_shapes, scaled
from tests.support.product_views import BATCHES
from triton_gemm.arithmetic import EMULATED, FP8, MODES, default_arithmetic, result_dtype, scaled_arithmetic
from triton_gemm.compat import INTERPRETED
from triton_gemm.hardware.device import device_info
from triton_gemm.problem import ACTIVATIONS, GATES, GemmProblem, Request
from triton_gemm.runtime.plan import GemmPlan, InterpretedPlan
from triton_gemm.selection.select import Selection, illegal, ranked

T = TypeVar("T")
Choose = Callable[[Sequence[Any]], Any]

PARTS = 34  # partial sums of a product cut along K, at most
NAN_BYTE, OTHER_BYTE = 0xFF, 0x5A  # NaN in every dtype that has it; in all a number that no test computes
ORDERS, GAPS, STEPS = ("nnn", "ntn", "tnn", "ttn", "nnt"), (0, 8, 3), (1, 2)
VALUES = ("integers", "normal", "wide", "nan", "inf")
FLOATS = ("float32", "bfloat16", "float16", "float64")
ADDING = {"addmm", "baddbmm", "linear"}
ROUTED = {"matmul", "mm", "bmm", "addmm", "baddbmm", "linear"}  # under `use()`
GROUPED = {"grouped rows": "rows", "gated rows": "rows", "grouped columns": "columns", "grouped products": "products"}
OF_ROWS = ("grouped rows", "gated rows")
GATE_OF = {activation: gate for gate, activation in GATES.items()}
OPERATIONS = ("mm", "matmul", "addmm", "linear", "bmm", "baddbmm", "mv", "scaled", *GROUPED)
ACTIVATED = (*ADDING, "scaled", *GROUPED)
BY_CANDIDATE = ("mm", "bmm", "addmm", "scaled", "grouped rows", "grouped products")


@dataclass(frozen=True, repr=False)
class Problem:
    """One product. Fields at their defaults are not shown.

    operation: of OPERATIONS; size: M, N, K; dtype, out_dtype: torch's names; batch: of product_views.BATCHES, for
    matmul, and for bmm and baddbmm a number of matrices; orders: how a, b and out lie, `n` row-major, `t` column-major;
    gap: unused elements after each row (or column); step: distance of neighbours in a row; offset: of each first
    element from a 16-byte boundary; between: matrices of a batch lie between one another's rows; out: whether it is
    given; added: what is added, a "row", a "column", a "matrix", or "out" itself; ends: where groups end, as shares of
    what is grouped; fast: `use_fast_accum`; candidate: which of the legal candidates computes it, not the chosen one.
    """

    operation: str = "mm"
    size: tuple[int, int, int] = (1, 1, 1)
    dtype: str = "float32"
    precision: str | None = None
    out_dtype: str | None = None
    batch: str | int = "none"
    orders: str = "nnn"
    gap: int = 0
    step: int = 1
    offset: int = 0
    between: bool = False
    out: bool = False
    added: str | None = None
    alpha: float = 1
    beta: float = 1
    activation: str | None = None
    scales: str = "tensor"
    fast: bool = False
    ends: tuple[float, ...] = ()
    batch_invariant: bool | None = None
    candidate: int | None = None

    def __repr__(self) -> str:
        shown = [f"{x.name}={value!r}" for x in fields(self) if (value := getattr(self, x.name)) != x.default]
        return f"Problem({', '.join(shown)})"

    @property
    def cost(self) -> float:
        """How much there is to read in it, for shortest first."""
        return len(repr(self)) + sum(self.size) / 100


@dataclass(frozen=True)
class Limits:
    """What is drawn from. sizes: of M and of N; depths: of K; both the simplest first."""

    sizes: tuple[int, ...]
    depths: tuple[int, ...]
    fp8: bool = True


SMALL = Limits((1, 2, 3, 5, 8, 17, 20), (1, 2, 5, 8, 17, 33, 0))
LARGE = Limits((1, 2, 3, 8, 16, 33, 64, 130, 264, 333, 520), (1, 5, 8, 16, 64, 129, 264, 1064, 4100, 0))


def draw_problem(choose: Choose, limits: Limits) -> Problem:
    """A problem; `choose` takes one of a sequence, whose first is the simplest."""
    operation = choose(OPERATIONS)
    size = choose(limits.sizes), choose(limits.sizes), choose(limits.depths)
    given: dict[str, Any] = {"operation": operation, "size": size}
    if operation == "scaled":
        given["dtype"] = choose(("int8", "float8_e4m3fn", "float8_e5m2") if limits.fp8 else ("int8",))
        eight_bits = given["dtype"] == "int8"
        given["scales"] = choose(("tensor", "rows") if eight_bits else ("tensor", "rows", "blocks"))
        given["fast"] = not eight_bits and given["scales"] != "blocks" and choose((False, True))
        given["out_dtype"] = choose(("float32", "bfloat16", "float16"))
        given["added"] = choose((None, "row"))
    else:
        whole = operation in ("mm", "matmul", "bmm", "mv")
        given["dtype"] = choose((*FLOATS, "int8") if whole else FLOATS)
        if operation == "gated rows" and given["dtype"] == "float16":  # products of two sums leave its range
            given["dtype"] = "bfloat16"
    if given["dtype"] == "float32":
        given["precision"] = choose((None, None, None, *MODES))
    if given["dtype"] in ("bfloat16", "float16") and operation in ("mm", "bmm", "addmm", "baddbmm", *GROUPED):
        given["out_dtype"] = choose((None, "float32"))
    if operation == "matmul":
        given["batch"] = choose(tuple(BATCHES))
    elif operation in ("bmm", "baddbmm"):
        given["batch"] = choose((1, 2, 3))
    given["orders"] = choose(ORDERS)
    given["gap"], given["offset"] = choose((0, *GAPS)), choose((0, 0, 0, 1))
    given["step"] = choose((1, 1, *STEPS))
    given["between"] = given.get("batch", "none") != "none" and choose((False, False, True))
    if operation in ADDING:
        given["added"] = choose(("row", "column", "matrix", None) if operation != "linear" else (None, "row"))
        if operation != "linear":
            given["added"] = given["added"] or "out"
            given["alpha"], given["beta"] = choose((1, 1, -0.5, 0)), choose((1, 1, 2, 0))
    if operation not in ("linear", "scaled", *GROUPED):
        given["out"] = given.get("added") == "out" or choose((False, True))
    if operation in GROUPED:
        given["ends"] = tuple(sorted(choose((0, 0.25, 0.5, 0.9, 1)) for _ in range(choose((1, 2, 3)))))
    if operation in ACTIVATED:
        given["activation"] = choose(ACTIVATIONS if operation == "gated rows" else (None, *ACTIVATIONS))
    given["batch_invariant"] = choose((None, None, None, True))
    if operation in BY_CANDIDATE and given.get("added") in (None, "row", "matrix") and given["size"][2] > 0:
        given["candidate"] = choose((*[None] * 24, *range(12)))
        if given["candidate"] is not None:
            given |= {"out": False, "batch_invariant": None}
    return meant(Problem(**given))


OF_OPERATIONS: dict[str, Collection[str]] = {
    "alpha": ("addmm", "baddbmm"),
    "beta": ("addmm", "baddbmm"),
    "activation": ACTIVATED,
    "added": (*ADDING, "scaled"),
    "scales": ("scaled",),
    "fast": ("scaled",),
    "ends": tuple(GROUPED),
    "batch": ("matmul", "bmm", "baddbmm"),
    "out": ("mm", "matmul", "bmm", "mv", "addmm", "baddbmm"),
    "out_dtype": ("mm", "bmm", "addmm", "baddbmm", "scaled", *GROUPED),
    "candidate": BY_CANDIDATE,
}


def meant(problem: Problem) -> Problem:
    """The problem without fields that its operation does not have."""
    defaults = {x.name: x.default for x in fields(problem)}
    unused = {name: defaults[name] for name, those in OF_OPERATIONS.items() if problem.operation not in those}
    return replace(problem, **unused)


# --- Memory ---


class Memory:
    """A buffer for each operand, that all products share: the next one's operands lie at the same addresses."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.buffers: dict[str, torch.Tensor] = {}

    def take(self, name: str, size: int, byte: int) -> torch.Tensor:
        """That many bytes of the buffer `name`, all of one value."""
        if name not in self.buffers or len(self.buffers[name]) < size:
            self.buffers[name] = torch.empty(max(size, 1 << 16), dtype=torch.uint8, device=self.device)
        return self.buffers[name][:size].fill_(byte)

    def place(
        self, name: str, shape: Sequence[int], dtype: torch.dtype, problem: Problem, order: str, byte: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(the bytes around, a window of `shape` [.., rows, columns] in their midst that lies as `problem` says)."""
        *batch, rows, columns = shape
        outer, inner = (rows, columns) if order == "n" else (columns, rows)
        count = prod(batch)
        pitch = inner * problem.step + problem.gap
        row, matrix = (count * pitch, pitch) if problem.between else (pitch, outer * pitch)
        strides = [row, problem.step] if order == "n" else [problem.step, row]
        for i in reversed(range(len(batch))):
            strides.insert(0, matrix * prod(batch[i + 1 :]))
        margin = (max(rows, columns) + 64) // 16 * 16
        elements = 2 * margin + problem.offset + count * outer * pitch
        around = self.take(name, elements * dtype.itemsize, byte)
        return around, around.view(dtype).as_strided(tuple(shape), strides, margin + problem.offset)


# --- A product, ready to be called ---


class Prepared:
    """A problem's tensors, the call, and the verdict on what it gives. by_plan: whether `call_by` is to be called."""

    def __init__(self, problem: Problem, memory: Memory, *, by_plan: bool = False) -> None:
        self.problem, self.memory = problem, memory
        self.dtype = getattr(torch, problem.dtype)
        default = torch.bfloat16 if problem.operation == "scaled" else result_dtype(self.dtype)
        self.out_dtype = getattr(torch, problem.out_dtype) if problem.out_dtype else default
        (M, N, K), device = problem.size, memory.device
        shape_a, shape_b = self._shapes()
        around_a, self.a = memory.place("a", shape_a, self.dtype, problem, problem.orders[0], NAN_BYTE)
        around_b, self.b = memory.place("b", shape_b, self.dtype, problem, problem.orders[1], NAN_BYTE)
        self.read = [around_a, around_b]
        self.gate: torch.Tensor | None = None
        if problem.operation == "gated rows":
            around, self.gate = memory.place("gate", shape_b, self.dtype, problem, problem.orders[1], NAN_BYTE)
            self.read.append(around)
        self.out: torch.Tensor | None = None
        self.window: torch.Tensor | None = None
        if problem.out or problem.candidate is not None or by_plan:
            shape = (*torch.broadcast_shapes(shape_a[:-2], shape_b[:-2]), M, N)
            if problem.operation == "mv":
                shape = (M, 1)
            elif problem.operation in GROUPED:
                shape = (*([len(problem.ends)] if problem.operation == "grouped products" else []), M, N)
            self.around, self.window = memory.place("c", shape, self.out_dtype, problem, problem.orders[2], OTHER_BYTE)
        if problem.out and self.window is not None:
            self.out = self.window[:, 0] if problem.operation == "mv" else self.window
        added = {"row": (N,), "column": (M, 1), "matrix": (*shape_a[:-2], M, N), "out": (), None: ()}[problem.added]
        dtype = self.out_dtype if problem.operation == "scaled" else self.dtype
        self.added = torch.empty(added, dtype=dtype, device=device) if added else None
        self.scales = self.ends = None
        if problem.operation == "scaled":
            shapes = scale_shapes(problem.scales, M, N, K)
            self.scales = [torch.empty(shape[::-1], device=device).T for shape in shapes]
        if problem.ends:
            total = {"rows": M, "columns": N, "products": K}[GROUPED[problem.operation]]
            self.host_ends = torch.tensor([int(share * total) for share in problem.ends], dtype=torch.int32)
            self.ends = self.host_ends.to(device)

    def _shapes(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        problem, (M, N, K), groups = self.problem, self.problem.size, len(self.problem.ends)
        if isinstance(problem.batch, int):
            return (problem.batch, M, K), (problem.batch, K, N)
        before_a, before_b = BATCHES[problem.batch]
        before_a = (groups,) if problem.operation == "grouped columns" else before_a
        before_b = (groups,) if problem.operation in OF_ROWS else before_b
        return (*before_a, M, K), (*before_b, K, 1 if problem.operation == "mv" else N)

    def fill(self, values: str, seed: int) -> None:
        """Draws what is read, and what `out` holds before."""
        generator = torch.Generator(self.memory.device).manual_seed(seed)
        self.values = values

        def draw(x: torch.Tensor) -> None:
            device = x.device
            if x.dtype == torch.int8:
                drawn = torch.randint(-128, 128, x.shape, generator=generator, device=device)
            elif values == "integers":
                drawn = torch.randint(-3, 4, x.shape, generator=generator, device=device)
            else:
                drawn = torch.randn(x.shape, generator=generator, device=device, dtype=torch.float64)
                if values == "wide" and x.dim() > 1:
                    drawn *= 2.0 ** torch.randint(-3, 4, (*x.shape[:-1], 1), generator=generator, device=device)
            x.copy_(drawn.float() if drawn.dtype != torch.float64 or x.dtype.itemsize < 8 else drawn)

        draw(self.a), draw(self.b)
        for x in (self.added, self.gate):
            if x is not None:
                draw(x)
        for scale in self.scales or ():
            steps = torch.randint(-1, 2, scale.shape, generator=generator, device=scale.device)
            scale.copy_(
                2.0**steps
                if values == "integers"
                else 0.5 + torch.rand(scale.shape, generator=generator, device=scale.device)
            )
            if self.dtype == torch.int8:
                scale.mul_(2.0**-6)
        if values in ("nan", "inf") and self.dtype.is_floating_point and self.a.numel() and self.b.numel():
            self._plant(values, seed)
        if self.window is not None:
            self.window.fill_(torch.nan if self.out_dtype.is_floating_point else 77)
        if self.problem.added == "out" and self.out is not None:
            draw(self.out)
        self.before = self.out.clone() if self.problem.added == "out" and self.out is not None else None
        self.kept = [x.clone() for x in self.read]

    def _plant(self, values: str, seed: int) -> None:
        """One NaN, or infinities and what they meet, in a row of a; and in a column of b. No infinities before a gate,
        where two products are made: torch's own gelu of inf is NaN in fp32 on CPUs."""
        nan = values == "nan" or self.dtype == FP8.dtypes[0] or self.gate is not None
        value = torch.nan if nan else torch.inf
        rows, K = self.a.shape[-2:]
        self.a[..., seed % rows, seed // 7 % K] = value
        if seed % 3 == 0:
            self.a[..., seed // 5 % rows, K - 1] = -value
        if seed % 2:
            self.b[..., seed // 11 % K, seed // 13 % self.b.shape[-1]] = 0 if values == "inf" else value

    # --- The call ---

    def call(self) -> None:
        """By this package's function, or on one candidate."""
        problem, how, self.ours = self.problem, self._how(), True
        self.arithmetic = self._arithmetic  # in torch's present setting of fp32, and so for replays of a graph
        if problem.candidate is not None:
            self.result = self._by_candidate(problem.candidate)
        elif problem.operation in GROUPED:
            self.result = triton_gemm.grouped_matmul(self.a, self.b, self.ends, **how)
        elif problem.operation == "scaled":
            assert self.scales is not None
            more = {"bias": self.added, "use_fast_accum": problem.fast}
            self.result = triton_gemm.scaled_matmul(self.a, self.b, *self.scales, **more, **how)
        else:
            self.result = self._as_torch(triton_gemm, how)

    def call_through_torch(self) -> None:
        """By torch's function of the same name, under `use()`, in torch's setting of fp32. Twice, for the second call
        goes a shorter way, unless it would add to what the first has left. What stays torch's is not judged."""
        triton_gemm.report_routing(reset=True)
        how = {} if self.out is None else {"out": self.out}
        module = torch.nn.functional if self.problem.operation == "linear" else torch
        with triton_gemm.use():  # and not around the verdict, whose own products are torch's
            for _ in range(1 if self.before is not None else 2):
                self.result = self._as_torch(module, how)
        self.arithmetic = default_arithmetic(self.dtype).name
        self.ours = all(where == "triton_gemm" for _, where in triton_gemm.report_routing(reset=True))

    def _as_torch(self, module: Any, how: dict[str, Any]) -> torch.Tensor:
        problem, function = self.problem, getattr(module, self.problem.operation)
        if problem.operation == "mv":
            return function(self.a, self.b[:, 0], **how)
        if problem.operation == "linear":
            return function(self.a, self.b.mT, self.added, **how)
        if problem.operation in ADDING:
            added = self.out if problem.added == "out" else self.added
            return function(added, self.a, self.b, alpha=problem.alpha, beta=problem.beta, **how)
        return function(self.a, self.b, **how)

    def _how(self) -> dict[str, Any]:
        problem = self.problem
        how: dict[str, Any] = {"batch_invariant": problem.batch_invariant}
        if problem.operation != "scaled":
            how["precision"] = problem.precision
        if problem.out_dtype is not None:
            how["out_dtype"] = self.out_dtype
        if problem.operation in ACTIVATED:
            how["activation"] = problem.activation
        if self.gate is not None:
            how |= {"activation": GATE_OF[str(problem.activation)], "gate": self.gate}
        if self.out is not None:
            how["out"] = self.out
        return how

    def _by_candidate(self, which: int) -> torch.Tensor:
        return self.call_by(_planned(self.request.problem(*self.operands), which, str(self.a.device)))

    def call_by(self, plan: Any) -> torch.Tensor:
        """By a plan of `request`, into the window."""
        self.ours, self.arithmetic = True, self._arithmetic
        if self.problem.added == "matrix":
            self.operands[2].copy_(self.added)
        plan.run(*self.operands, self.auxiliary, self.request.alpha, self.request.beta)
        self.result = self.operands[2]
        return self.result

    @property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """a, b and the result as plans take them."""
        assert self.window is not None
        return self.a, self.b, self.window

    @property
    def request(self) -> Request:
        """What a plan is to compute."""
        problem, scales = self.problem, {}
        if self.scales is not None:
            scales = {"scales": problem.scales}
        groups = {"rows": "m", "products": "k"}.get(GROUPED.get(problem.operation, ""))
        bias = {"row": "n", "column": "m"}.get(problem.added or "")
        beta = problem.beta if problem.added == "matrix" else 0.0
        epilogue = (problem.activation, None, self._arithmetic, bias)
        return Request(problem.alpha, beta, *epilogue, groups=groups, gate=self.gate is not None, **scales)

    @property
    def auxiliary(self) -> tuple[torch.Tensor, ...]:
        """The operands that plans of `request` take in addition, which it says in what order."""
        found: tuple[torch.Tensor, ...] = ()
        if self.added is not None and self.problem.added in ("row", "column"):
            found = ((self.added * self.problem.beta).flatten(),)
        if self.scales is not None:
            blocks = self.problem.scales == "blocks"
            found += tuple((x.mT if blocks else x).contiguous() for x in self.scales)
        found += () if self.gate is None else (self.gate,)
        return found if self.ends is None else (*found, self.ends)

    # --- The verdict ---

    @property
    def _arithmetic(self) -> str:
        if self.problem.operation == "scaled":
            return scaled_arithmetic(self.dtype, self.problem.fast).name
        return self.problem.precision or default_arithmetic(self.dtype).name

    def verdict(self) -> torch.Tensor:
        """Three numbers, still on the device: wrong elements of the result, the largest share of its bound that an
        error takes, and bytes that were written although they belong to no result."""
        problem = self.problem
        precision = self.arithmetic
        truth, bound = self._truth()
        c = self.result
        assert c.shape == truth.shape and c.dtype == self.out_dtype, f"{c.dtype} {c.shape}, not {truth.shape}"
        finite = truth.isfinite()
        alike = (c.double() == truth) | (c.isnan() & (truth.isnan() | (precision in EMULATED)))
        share = torch.where(finite, (c.double() - truth).abs() / bound.clamp(min=1e-300), 0.0)
        right = torch.where(finite, (c.double() - truth).abs() <= bound, alike)
        exact = self.values == "integers" and problem.activation in (None, "relu") and not problem.fast
        exact &= self.gate is None or problem.batch_invariant is None
        if exact or not self.out_dtype.is_floating_point:
            right &= c == truth.to(c.dtype)
        outside = sum((x != y).sum() for x, y in zip(self.read, self.kept, strict=True))
        if self.window is not None:
            assert c.data_ptr() == self.window.data_ptr(), "another result than out"
            self.window.copy_(torch.full((c.itemsize,), OTHER_BYTE, dtype=torch.uint8, device=c.device).view(c.dtype))
            outside = outside + (self.around != OTHER_BYTE).sum()
        worst = share.nan_to_num(torch.inf).max() if share.numel() else share.sum()
        return torch.stack([(~right).sum().double(), worst, outside.double()])

    def _truth(self) -> tuple[torch.Tensor, torch.Tensor]:
        """(the result in fp64, the largest error of an honest one)."""
        problem, a, b = self.problem, self.a, self.b
        mode = mode_of(self.arithmetic, self.dtype)
        how: dict[str, Any] = {"mode": mode, "out_dtype": self.out_dtype, "parts": PARTS}
        if self.ends is not None:
            return self._truth_of_groups(how)
        if self.scales is not None:
            a, b = scaled(a, self.scales[0]), scaled(b, self.scales[1])
        if problem.operation == "mv":
            truth, bound = expected(a, b, None, **how)
            return truth[:, 0], bound[:, 0]
        alpha, added = problem.alpha, self.before if problem.added == "out" else self.added
        if alpha == 0:  # which reads neither a nor b
            a, b, alpha = a[..., :0], b[..., :0, :], 1
        beta = problem.beta if added is not None else 0.0
        added = added.expand(a[..., :1].shape[:-1] + b.shape[-1:]) if added is not None and beta else None
        return expected(a, b, added, alpha, beta, activation=problem.activation, **how)

    def _truth_of_groups(self, how: dict[str, Any]) -> tuple[torch.Tensor, torch.Tensor]:
        pairs = matrices_of(self.a, self.b, self.host_ends)
        if self.gate is None:
            made = [expected(x, y, None, activation=self.problem.activation, **how) for x, y in pairs]
        else:
            gates = matrices_of(self.a, self.gate, self.host_ends)
            made = [self._gated(*pair, before, how) for pair, (_, before) in zip(pairs, gates, strict=True)]
        kind = GROUPED[self.problem.operation]
        if kind == "products":
            truth, bound = (torch.stack(parts) for parts in zip(*made, strict=True))
            return truth, bound
        dim, total = (0, self.a.shape[0]) if kind == "rows" else (1, self.b.shape[1])
        found = []
        for parts in zip(*made, strict=True):
            x = torch.cat(parts, dim)
            shape = list(x.shape)
            shape[dim] = total - x.shape[dim]
            found.append(torch.cat([x, x.new_zeros(shape)], dim))
        return found[0], found[1]

    def _gated(
        self, a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, how: dict[str, Any]
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Of one group; its products may be rounded before."""
        up, of_up = expected(a, b, None, **how)
        _, before = expected(a, gate, None, **how)  # no activation is steeper than 1.13
        activated, of_gate = expected(a, gate, None, activation=self.problem.activation, **how)
        of_gate += 1.13 * before
        bound = activated.abs() * of_up + up.abs() * of_gate + of_up * of_gate
        return activated * up, rounded(bound, activated * up, self.out_dtype)


@lru_cache(maxsize=4096)
def _planned(problem: GemmProblem, which: int, device: str) -> GemmPlan | InterpretedPlan:
    """On one of the legal candidates, of each kernel as many as of the others."""
    info = device_info(torch.device(device))
    by_kernel: dict[str, list[Selection]] = {}
    for _, candidate in ranked(problem, info, any_bits=True):
        if illegal(problem, info, candidate) is None:
            selection = Selection.of(candidate, "drawn at random")
            by_kernel.setdefault(selection.kernel, []).append(selection)
    kernels = list(by_kernel.values())
    found = kernels[which % len(kernels)]
    selection = found[which * len(found) // 12 % len(found)]
    return InterpretedPlan(problem, selection) if INTERPRETED else GemmPlan(problem, selection, torch.device(device))


def on_stream(device: str) -> AbstractContextManager[Any]:
    """Another stream than the current one, which waits for that; nothing where there are none."""
    if device == "cpu":
        return nullcontext()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    return torch.cuda.stream(stream)
