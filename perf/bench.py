"""The one timer. Every provider, cuBLAS included, is checked against fp64, then timed here and nowhere else.

Kernel time is the replay of a CUDA graph that walks over operand sets larger together than the L2 cache (cold), or
over one set (hot). Providers take turns, round by round, on a GPU whose clocks have settled; what is reported is the
median over rounds of a provider's time and of its ratio to the baseline in the same round, with p20 and p80. Call
time, what Python pays to ask for the product, is taken apart.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch

from perf import environment, numerics
from triton_gemm.problem import UnsupportedOperandError

DEVICE = "cuda"
REPLAY_MS = 8.0  # a replay repeats a kernel until it takes about this long
MAX_REPEATS = 512
COLD_FACTOR = 2.0  # operand sets together exceed the L2 cache by this factor
MEMORY_SHARE = 0.4  # of the free memory that operand sets may take
SLOW = 4.0  # times the baseline: from there on a provider is timed apart, so that the fast ones keep the GPU hot
ROUNDS = (5, 40)
SLOW_ROUNDS = (3, 10)
SETTLED = 0.01  # clocks have settled when two 0.25 s stretches of work differ by less
MODE_DTYPES = {
    "ieee": torch.float32,
    "tf32": torch.float32,
    "fp16": torch.float16,
    "bf16": torch.bfloat16,
    "int32": torch.int32,
}

Call = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], object]
Stopwatch = Callable[[], Callable[[], float]]


@dataclass(frozen=True)
class Problem:
    """C[M, N] = A[M, K] B[K, N], all row-major, in a precision: a key of MODE_DTYPES."""

    M: int
    N: int
    K: int
    mode: str
    hot: bool = False
    seed: int = 0

    @property
    def dtype(self) -> torch.dtype:
        return MODE_DTYPES[self.mode]

    @property
    def flop(self) -> int:
        return 2 * self.M * self.N * self.K

    @property
    def key(self) -> str:
        return f"{self.mode} {self.M}x{self.N}x{self.K}{' hot' if self.hot else ''}"


@dataclass(frozen=True)
class Provider:
    """A line in a plot: `call(a, b, c)` writes a @ b to c; `details` is asked after the first call.

    An UnsupportedOperandError or NotImplementedError from `call` means that it does not take the problem.
    """

    name: str
    call: Call
    out_dtype: torch.dtype | None = None
    details: Callable[[], dict[str, Any]] = dict


class Replay:
    """A CUDA graph of `repeats` calls, going round a list of them (one for each operand set)."""

    def __init__(self, calls: Sequence[Callable[[], object]], repeats: int) -> None:
        self.repeats = repeats
        self.graph = torch.cuda.CUDAGraph()
        calls[0]()  # libraries make their handles at the first call, which a capture forbids
        with torch.cuda.graph(self.graph):
            for i in range(repeats):
                calls[i % len(calls)]()
        self.graph.replay()
        torch.cuda.synchronize()

    def start(self) -> Callable[[], float]:
        """Queues one replay; what it returns gives the milliseconds of one call, once the GPU is done."""
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        self.graph.replay()
        end.record()

        def read() -> float:
            end.synchronize()
            return begin.elapsed_time(end) / self.repeats

        return read


@dataclass(frozen=True)
class Subject:
    """A provider that passed the check, ready to be timed."""

    provider: Provider
    result: dict[str, Any]
    estimate_ms: float
    replay: Replay


class DeviceLostError(RuntimeError):
    """The CUDA context is unusable after a provider's error; nothing more can be measured in this process."""


def measure(problem: Problem, providers: Sequence[Provider], baseline: str | None, budget_s: float) -> dict[str, Any]:
    """Checks and times `providers` on `problem`; `budget_s` is for the timing alone.

    Under `providers` each name has `time_ms`, `ratio` (baseline's time over its own; 1 is as fast), `call_us`,
    `error` and the provider's details, or else `absent` (does not take the problem) or `failed` with the reason.
    """
    record: dict[str, Any] = {
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "mode": problem.mode,
        "hot": problem.hot,
        "seed": problem.seed,
        "budget_s": budget_s,
        "clocks_before": environment.clocks(),
    }
    with fp32_precision("tf32" if problem.mode == "tf32" else "ieee"):
        out_dtypes = {p.out_dtype or problem.dtype for p in providers}
        operands = Operands(problem, out_dtypes, sets_of(problem, out_dtypes))
        check = Check(problem, *operands.sets[0])
        record["sets"] = len(operands.sets)
        record["providers"] = {p.name: {} for p in providers}
        subjects = []
        for provider in providers:
            result = record["providers"][provider.name]
            subject = _prepare(provider, operands, check, result)
            if subject is not None:
                subjects.append(subject)
        del check
        _time(subjects, baseline, budget_s)
        for subject in subjects:
            subject.result["call_us"] = call_time_us(subject, operands)
    record["clocks_after"] = environment.clocks()
    return record


@contextmanager
def fp32_precision(precision: str) -> Iterator[None]:
    """What torch multiplies fp32 matrices with: "ieee" or "tf32"."""
    before = torch.backends.cuda.matmul.fp32_precision
    torch.backends.cuda.matmul.fp32_precision = precision
    try:
        yield
    finally:
        torch.backends.cuda.matmul.fp32_precision = before


class Operands:
    """`count` sets of random A and B, and of C for each output type."""

    def __init__(self, problem: Problem, out_dtypes: set[torch.dtype], count: int) -> None:
        M, N, K = problem.M, problem.N, problem.K
        generator = torch.Generator(device=DEVICE).manual_seed(problem.seed)
        self.sets = [
            (draw((M, K), problem.dtype, generator), draw((K, N), problem.dtype, generator)) for _ in range(count)
        ]
        self.outputs = {
            dtype: [torch.empty(M, N, dtype=dtype, device=DEVICE) for _ in range(count)] for dtype in out_dtypes
        }

    def calls(self, provider: Provider) -> list[Callable[[], object]]:
        """The provider's call on each set."""
        outputs = self.outputs[provider.out_dtype or self.sets[0][0].dtype]
        return [partial(provider.call, a, b, c) for (a, b), c in zip(self.sets, outputs, strict=True)]


def sets_of(problem: Problem, out_dtypes: set[torch.dtype]) -> int:
    """Operand sets for a problem on the current GPU; one if L2 is to be hot."""
    if problem.hot:
        return 1
    M, N, K = problem.M, problem.N, problem.K
    size = problem.dtype.itemsize * (M * K + K * N) + sum(dtype.itemsize for dtype in out_dtypes) * M * N
    l2 = torch.cuda.get_device_properties(torch.cuda.current_device()).L2_cache_size
    return set_count(size, l2, free=torch.cuda.mem_get_info()[0])


def set_count(size: int, l2: int, free: int) -> int:
    """How many operand sets of `size` bytes are larger than L2 together and still leave memory."""
    return max(1, min(math.ceil(COLD_FACTOR * l2 / size), int(MEMORY_SHARE * free / size)))


def draw(shape: tuple[int, int], dtype: torch.dtype, generator: torch.Generator) -> torch.Tensor:
    """Normal numbers; integers from -8 to 8. Zeros would run faster than real data."""
    if dtype == torch.int32:
        return torch.randint(-8, 9, shape, dtype=dtype, device=generator.device, generator=generator)
    return torch.randn(shape, dtype=torch.float32, device=generator.device, generator=generator).to(dtype)


class Check:
    """The fp64 truth of one problem, and the verdict on a result of it."""

    def __init__(self, problem: Problem, a: torch.Tensor, b: torch.Tensor) -> None:
        self.problem, self.a, self.b = problem, a, b
        self.expected = numerics.reference(a, b)
        self.magnitude = numerics.magnitude(a, b)
        self._torch_norm: dict[torch.dtype, float] = {}

    def verdict(self, c: torch.Tensor) -> tuple[dict[str, float | None], str | None]:
        """The error of c (norm; componentwise, of |A||B|; share of the bound) and why it is too large, or None."""
        difference = (c.double() - self.expected).abs_()
        if self.problem.mode == "int32":
            wrong = int((difference != 0).sum())
            return {"norm": _norm(difference, self.expected)}, f"{wrong} results differ" if wrong else None
        if not bool(torch.isfinite(difference).all()):
            count = int((~torch.isfinite(difference)).sum())
            return {"norm": None}, f"{count} results are not finite (outputs hold NaN before the call)"
        bound = numerics.accumulation_error(self.problem.K, self.problem.mode) * self.magnitude
        bound = numerics.rounded(bound, self.expected, c.dtype)
        norm, torch_norm = _norm(difference, self.expected), self.torch_norm(c.dtype)
        of_bound = float((difference / bound).max())
        vs_torch = norm / torch_norm if torch_norm else 1.0
        error: dict[str, float | None] = {
            "norm": norm,
            "componentwise": float((difference / self.magnitude.clamp(min=1e-300)).max()),
            "bound": of_bound,
            "vs_torch": vs_torch,
        }
        if of_bound > 1:
            return error, f"a result is off by {of_bound:.3g} times the bound"
        if vs_torch > 2:
            return error, f"the error is {vs_torch:.3g} times torch's own"
        return error, None

    def torch_norm(self, out_dtype: torch.dtype) -> float:
        """The error of torch's own product in this precision, stored as `out_dtype`."""
        if out_dtype not in self._torch_norm:
            same = out_dtype == self.a.dtype
            c = torch.mm(self.a, self.b) if same else torch.mm(self.a, self.b, out_dtype=out_dtype)
            self._torch_norm[out_dtype] = _norm(c.double() - self.expected, self.expected)
        return self._torch_norm[out_dtype]


def _norm(difference: torch.Tensor, expected: torch.Tensor) -> float:
    scale = float(expected.norm())
    return float(difference.norm()) / scale if scale else float(difference.norm())


def _prepare(provider: Provider, operands: Operands, check: Check, result: dict[str, Any]) -> Subject | None:
    """Tunes, compiles and checks a provider and captures its graph; None, and why in `result`, if it cannot."""
    calls = operands.calls(provider)
    c = operands.outputs[provider.out_dtype or check.problem.dtype][0]
    try:
        c.fill_(math.nan if c.is_floating_point() else -(2**31))
        calls[0]()
        torch.cuda.synchronize()
        result["error"], complaint = check.verdict(c)
        if complaint:
            result["failed"] = complaint
            return None
        result.update(provider.details())
        estimate_ms = _once_ms(calls[-1])
        return Subject(provider, result, estimate_ms, Replay(calls, repeats(estimate_ms, len(calls))))
    except (UnsupportedOperandError, NotImplementedError) as error:
        result["absent"] = str(error)
    except Exception as error:
        result["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
        _require_device(provider)
    return None


def _require_device(provider: Provider) -> None:
    try:
        torch.cuda.synchronize()
    except RuntimeError as error:
        raise DeviceLostError(f"after {provider.name}: {error}") from error


def _once_ms(call: Callable[[], object]) -> float:
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    call()
    begin.record()
    call()
    end.record()
    end.synchronize()
    return begin.elapsed_time(end)


def repeats(estimate_ms: float, sets: int) -> int:
    """Calls in one replay: enough for the clock, few enough to take turns, and every set at least once."""
    return max(sets, min(MAX_REPEATS, round(REPLAY_MS / estimate_ms)), 1)


def _time(subjects: list[Subject], baseline: str | None, budget_s: float) -> None:
    """Fills in each subject's `time_ms`, `ratio`, `rounds` and `repeats`."""
    base = next((s for s in subjects if s.provider.name == baseline), None)
    limit = SLOW * (base or min(subjects, key=lambda s: s.estimate_ms)).estimate_ms if subjects else 0.0
    fast = [s for s in subjects if s.estimate_ms <= limit]
    slow = [s for s in subjects if s.estimate_ms > limit]
    for group, bounds in ((fast, ROUNDS), (slow, SLOW_ROUNDS)):
        if not group:
            continue
        running = group if base is None or base in group else [base, *group]
        if group is fast:
            settle((base or running[0]).replay.start, patience_s=1.0)
        round_ms = sum(s.estimate_ms * s.replay.repeats for s in running)
        times = interleave({s.provider.name: s.replay.start for s in running}, round_count(round_ms, budget_s, bounds))
        for subject in group:
            own = times[subject.provider.name]
            subject.result.update(
                time_ms=percentiles(own),
                ratio=percentiles(ratios(times, subject.provider.name, base.provider.name)) if base else None,
                rounds=len(own),
                repeats=subject.replay.repeats,
            )


def time_alone(call: Callable[[], object], budget_s: float) -> dict[str, float]:
    """Percentiles of the milliseconds of one call, on settled clocks, with nothing to take turns with."""
    estimate_ms = _once_ms(call)
    replay = Replay([call], repeats(estimate_ms, 1))
    settle(replay.start, patience_s=3.0)
    rounds = round_count(estimate_ms * replay.repeats, budget_s, ROUNDS)
    return percentiles(interleave({"": replay.start}, rounds)[""])


def settle(start: Stopwatch, patience_s: float) -> None:
    """Keeps the GPU busy until two successive stretches of work take the same time, at most `patience_s`."""
    before = math.inf
    deadline = time.perf_counter() + patience_s
    while time.perf_counter() < deadline:
        stretch = time.perf_counter() + 0.25
        reads = []
        while time.perf_counter() < stretch:
            reads.append(start())
            if len(reads) % 4 == 0:
                reads[-1]()
        now = float(np.median([read() for read in reads]))
        if abs(now - before) <= SETTLED * before:
            return
        before = now


def round_count(round_ms: float, budget_s: float, bounds: tuple[int, int]) -> int:
    """Rounds that fit the budget, within `bounds`."""
    return max(bounds[0], min(bounds[1], int(1000 * budget_s / max(round_ms, 1e-6))))


def interleave(starts: Mapping[str, Stopwatch], rounds: int) -> dict[str, list[float]]:
    """Times of each provider, one a round. Every other round runs backwards, so none always follows another."""
    names = list(starts)
    pending: dict[str, list[Callable[[], float]]] = {name: [] for name in names}
    for r in range(rounds):
        for name in names if r % 2 == 0 else reversed(names):
            pending[name].append(starts[name]())
    return {name: [read() for read in reads] for name, reads in pending.items()}


def ratios(times: Mapping[str, Sequence[float]], name: str, baseline: str) -> list[float]:
    """The baseline's time over the provider's in the same round: 1 is as fast, more is faster."""
    return [base / own for base, own in zip(times[baseline], times[name], strict=True)]


def percentiles(values: Sequence[float]) -> dict[str, float]:
    """Median, p20 and p80."""
    p20, median, p80 = np.percentile(values, [20, 50, 80])
    return {"median": float(median), "p20": float(p20), "p80": float(p80)}


def call_time_us(subject: Subject, operands: Operands) -> float:
    """Microseconds that Python spends in one call, the GPU's work aside: the least of a few batches."""
    call = operands.calls(subject.provider)[0]
    batch = max(1, min(50, int(10 / subject.estimate_ms)))
    least = math.inf
    for _ in range(5):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for _ in range(batch):
            call()
        least = min(least, (time.perf_counter() - begin) / batch)
    torch.cuda.synchronize()
    return 1e6 * least
