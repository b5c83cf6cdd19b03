"""Tuning and measuring without a GPU. A `FakeLab` makes up all: its clock only moves when something is done. Or kernels
are torch's products on the CPU, and replays take no time (`no_gpu`, `take_gpu_away`)."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from dataclasses import replace
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest
import torch

from tests.support import table_fakes
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER, another
from triton_gemm import tuning
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection, select
from triton_gemm.tuning import candidates, gpu, timing
from triton_gemm.tuning.conditions import Conditions
from triton_gemm.tuning.gpu import TORCH, Gpu
from triton_gemm.tuning.journal import Journal
from triton_gemm.tuning.trials import FailedError

REPLAY_S = 0.004
REFERENCE_MS = 0.007
CPU = torch.device("cpu")
FULL = Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory"))


class Kernels:
    """Candidates of any kind that take `true(candidate)` milliseconds, but for noise: of every round, 1 % of which are
    disturbed, and of the GPU's clock, which wanders. compile_s: until each is compiled, one after another; has_torch:
    whether TORCH is a candidate."""

    incumbent: Any = None

    def __init__(
        self,
        true: Callable[[Any], float],
        seed: int = 0,
        *,
        noise: float = 0.005,
        compile_s: float = 0.0,
        broken: Callable[[Any], str | None] = lambda candidate: None,
        has_torch: bool = False,
    ) -> None:
        self.true, self.noise, self.compile_s, self.broken = true, noise, compile_s, broken
        self.has_torch = has_torch
        self.random = random.Random(seed)
        self.clock, self.wander = 0.0, 1.0
        self.slow: Callable[[float], float] = lambda now: 1.0  # by how much all is slower at a time
        self.compiled_at: dict[Any, float] = {}
        self.timed: list[Any] = []
        self.dropped: list[Any] = []

    def now(self) -> float:
        return self.clock

    def pause(self, seconds: float) -> None:
        self.clock += seconds

    def compile(self, candidates: Sequence[Any]) -> None:
        begin = max([self.clock, *self.compiled_at.values()])
        for i, candidate in enumerate(candidate for candidate in candidates if candidate not in self.compiled_at):
            self.compiled_at[candidate] = begin + (i + 1) * self.compile_s

    def ready(self, candidate: Any) -> bool:
        return self.compiled_at.get(candidate, 0.0) <= self.clock

    def prepare(self, candidate: Any) -> float:
        self.clock = max(self.clock, self.compiled_at.get(candidate, 0.0)) + 0.01
        why = "torch: it refuses" if candidate == TORCH and not self.has_torch else self.broken(candidate)
        if why is not None:
            raise FailedError(why)
        self.timed.append(candidate)
        return self.true(candidate) * exp(self.random.gauss(0, 0.02))

    def time(self, candidates: Sequence[Any], rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in candidates]
        for _ in range(rounds):
            self.wander *= exp(self.random.gauss(0, 0.002))
            for row, one in zip(times, candidates, strict=True):
                assert one not in self.dropped
                self.clock += REPLAY_S
                took = self.true(one) * self.wander * self.slow(self.clock) * exp(self.random.gauss(0, self.noise))
                row.append(took * (1 + self.random.random() if self.random.random() < 0.01 else 1))
        return times

    def round_s(self, candidates: Sequence[Any]) -> float:
        return REPLAY_S * len(candidates)

    def errors(self) -> tuple[float, float]:
        return 2e-3, 1e-3

    def drop(self, candidate: Any) -> None:
        self.dropped.append(candidate)

    def close(self) -> None:
        self.dropped.clear()


class FakeLab:
    """A GPU without a GPU, as a session has it: all of its benches are one set of kernels, and have one clock."""

    info: DeviceInfo = HOPPER
    full: Sequence[GemmProblem] = ()  # there is no memory for their operands

    def __init__(self, true: Callable[[Any], float], seed: int = 0, **how: Any) -> None:
        self.kernels = Kernels(true, seed, **how)
        self.mhz: Callable[[float], int] = lambda now: 1980
        self.slowed: Callable[[float], tuple[str, ...]] = lambda now: ()
        self.benches: list[tuple[GemmProblem, int]] = []
        self.fields: list[Sequence[Selection]] = []  # of these
        self.compiled: list[GemmProblem] = []

    def now(self) -> float:
        return self.kernels.now()

    def conditions(self) -> Conditions:
        self.kernels.clock += 0.15
        now = self.kernels.clock
        ms = REFERENCE_MS * self.kernels.slow(now) * exp(self.kernels.random.gauss(0, 0.005))
        return Conditions(ms, self.mhz(now), self.slowed(now))

    def prepare(self, problem: GemmProblem, selections: Sequence[Selection]) -> None:
        self.compiled.append(problem)
        self.kernels.compile(selections)

    def ready(self, problem: GemmProblem, selections: Sequence[Selection]) -> bool:
        return all(map(self.kernels.ready, selections))

    def pause(self, seconds: float) -> None:
        self.kernels.pause(seconds)

    def bench(self, problem: GemmProblem, selections: Sequence[Selection], seed: int) -> Kernels:
        if problem in self.full:
            raise torch.OutOfMemoryError("operands of 9 MiB are too much for 1 MiB of free memory\nand more")
        self.benches.append((problem, seed))
        self.fields.append(selections)
        self.kernels.incumbent = selections[0]
        return self.kernels

    def forget(self, problem: GemmProblem) -> None:
        """It forgets nothing."""


class FakeReplay:
    """Runs nothing and takes a millisecond."""

    def __init__(self, calls: Any, repeats: int) -> None:
        self.repeats = repeats

    def start(self) -> Any:
        return lambda: 1.0


def replays_take_no_time(patch: pytest.MonkeyPatch) -> None:
    replace_all(patch, timing, Replay=FakeReplay, once_ms=lambda call: (call(), 1.0)[1])


def take_gpu_away(patch: pytest.MonkeyPatch) -> None:
    """Lets `perf.measure.timer` time what `perf.measure.operands` lays on the CPU."""
    replays_take_no_time(patch)
    patch.setattr(timing, "settle", lambda *_, **__: None)
    patch.setattr("perf.measure.operands.DEVICE", "cpu")
    patch.setattr("perf.measure.timer.sets_of", lambda *_: 2)
    patch.setattr(torch.cuda, "synchronize", lambda *_: None)


class FakePlan:
    """Multiplies by torch; `wrong` says what each configuration does instead."""

    wrong: ClassVar[dict[Any, str]] = {}

    def __init__(self, problem: GemmProblem, selection: Selection, device: torch.device) -> None:
        self.problem, self.selection = problem, selection
        if self.wrong.get(selection) == "has no plan":
            raise KeyError(64)

    def compile(self) -> None:
        if self.wrong.get(self.selection) == "does not compile":
            raise RuntimeError("PassManager::run failed\nand more")

    def run(self, a: Any, b: Any, c: Any, auxiliary: Any = (), alpha: float = 1.0, beta: float = 0.0) -> None:
        wrong = self.wrong.get(self.selection)
        assert len(auxiliary) == len(self.problem.auxiliary)
        if wrong == "raises":
            raise ValueError("it cannot be launched")
        product = (a.float() @ b.float()) * (1.001 if wrong == "off" else 1.5 if wrong == "far off" else 1.0)
        c.copy_(product + beta * c.float() if beta else product)
        if wrong == "one is off":
            c[..., 0, 0] += 100
        if wrong == "leaves a row":
            c[3] = float("nan")


class Event:
    hangs = False

    def __init__(self, **_: Any) -> None:
        self.at = 0.0

    def record(self) -> None:
        self.at = time.perf_counter()

    def query(self) -> bool:
        return not self.hangs

    def synchronize(self) -> None: ...

    def elapsed_time(self, other: Event) -> float:
        return max(1e-3, 1000 * (other.at - self.at))


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch, default_policy: None) -> None:
    monkeypatch.setattr(FakePlan, "wrong", {})
    properties = SimpleNamespace(L2_cache_size=50_000)
    cuda = {
        "Event": Event,
        "synchronize": lambda *_: None,
        "set_device": lambda *_: None,
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "current_device": lambda: 0,
        "get_device_capability": lambda *_: (9, 0),
        "get_device_properties": lambda *_: properties,
        "mem_get_info": lambda *_: (2**30, 2**31),
        "is_current_stream_capturing": lambda: False,
    }
    replace_all(monkeypatch, torch.cuda, **cuda)
    replace_all(monkeypatch, gpu, GemmPlan=FakePlan, Worker=lambda _: None, device_info=lambda _: HOPPER)
    monkeypatch.setattr(timing, "occupy", lambda clocks: None)
    replays_take_no_time(monkeypatch)


@pytest.fixture
def tuned_on_the_cpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    folder = table_fakes.own_folder(tmp_path, monkeypatch)
    replace_all(monkeypatch, tuning, device_info=lambda _: HOPPER, gpu_of=lambda _: CPU)
    monkeypatch.setattr(torch.cuda, "device", lambda _: nullcontext())
    monkeypatch.setattr(gpu, "PATIENCE_S", 0.01)
    replace_all(monkeypatch, candidates, KEEP=5, LEAST=1)
    tuning._chosen.cache_clear()
    return folder


def small(**changes: Any) -> GemmProblem:
    return replace(table_fakes.problem_of(48, 64, 96), **changes)


def bench_of(problem: GemmProblem, tmp_path: Path, bits: Any = "same", measure: Any = "graph") -> tuple[Any, Selection]:
    journal = Journal(tmp_path / "x.tuning.jsonl", "1")
    lab = Gpu(CPU, journal, bits, measure)
    choice = select(problem, HOPPER)
    bench = lab.bench(problem, [choice, *others(problem)], seed=1)
    assert bench.prepare(choice) > 0
    return bench, choice


def others(problem: GemmProblem) -> list[Selection]:
    return [another(problem, nth) for nth in range(1, 4)]
