"""Tuning without a GPU: a clock that only moves when something is done, and kernels whose times are made up."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from math import exp
from typing import Any

from tests.support.table_fakes import HOPPER
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection
from triton_gemm.tuning.conditions import Conditions
from triton_gemm.tuning.gpu import TORCH
from triton_gemm.tuning.race import FailedError

REPLAY_S = 0.004
REFERENCE_MS = 0.007


class Kernels:
    """Candidates of any kind that take `true(way)` milliseconds, but for noise: of every round, 1 % of which are
    disturbed, and of the GPU's clock, which wanders. compile_s: until each is compiled, one after another; has_torch:
    whether TORCH is a candidate."""

    has_torch = False

    def __init__(
        self,
        true: Callable[[Any], float],
        seed: int = 0,
        *,
        noise: float = 0.005,
        compile_s: float = 0.0,
        broken: Callable[[Any], str | None] = lambda way: None,
    ) -> None:
        self.true, self.noise, self.compile_s, self.broken = true, noise, compile_s, broken
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

    def compile(self, ways: Sequence[Any]) -> None:
        begin = max([self.clock, *self.compiled_at.values()])
        for i, way in enumerate(way for way in ways if way not in self.compiled_at):
            self.compiled_at[way] = begin + (i + 1) * self.compile_s

    def ready(self, way: Any) -> bool:
        return self.compiled_at.get(way, 0.0) <= self.clock

    def prepare(self, way: Any) -> float:
        self.clock = max(self.clock, self.compiled_at.get(way, 0.0)) + 0.01
        why = "torch: it refuses" if way == TORCH and not self.has_torch else self.broken(way)
        if why is not None:
            raise FailedError(why)
        self.timed.append(way)
        return self.true(way) * exp(self.random.gauss(0, 0.02))

    def time(self, ways: Sequence[Any], rounds: int) -> list[list[float]]:
        times: list[list[float]] = [[] for _ in ways]
        for _ in range(rounds):
            self.wander *= exp(self.random.gauss(0, 0.002))
            for row, way in zip(times, ways, strict=True):
                assert way not in self.dropped
                self.clock += REPLAY_S
                took = self.true(way) * self.wander * self.slow(self.clock) * exp(self.random.gauss(0, self.noise))
                row.append(took * (1 + self.random.random() if self.random.random() < 0.01 else 1))
        return times

    def round_s(self, ways: Sequence[Any]) -> float:
        return REPLAY_S * len(ways)

    def drop(self, way: Any) -> None:
        self.dropped.append(way)

    def close(self) -> None:
        self.dropped.clear()


class FakeLab:
    """A GPU without a GPU, as a session has it: all of its benches are one set of kernels, and have one clock."""

    info: DeviceInfo = HOPPER

    def __init__(self, true: Callable[[Any], float], seed: int = 0, **how: Any) -> None:
        self.kernels = Kernels(true, seed, **how)
        self.mhz: Callable[[float], int] = lambda now: 1980
        self.slowed: Callable[[float], tuple[str, ...]] = lambda now: ()
        self.benches: list[tuple[GemmProblem, int]] = []
        self.compiled: list[GemmProblem] = []

    def now(self) -> float:
        return self.kernels.now()

    def look(self) -> Conditions:
        self.kernels.clock += 0.15
        now = self.kernels.clock
        ms = REFERENCE_MS * self.kernels.slow(now) * exp(self.kernels.random.gauss(0, 0.005))
        return Conditions(ms, self.mhz(now), self.slowed(now))

    def prepare(self, problem: GemmProblem, ways: Sequence[Selection]) -> None:
        self.compiled.append(problem)
        self.kernels.compile(ways)

    def ready(self, problem: GemmProblem, ways: Sequence[Selection]) -> bool:
        return all(map(self.kernels.ready, ways))

    def pause(self, seconds: float) -> None:
        self.kernels.pause(seconds)

    def bench(self, problem: GemmProblem, ways: Sequence[Selection], seed: int) -> Kernels:
        self.benches.append((problem, seed))
        return self.kernels

    def forget(self, problem: GemmProblem) -> None:
        """It forgets nothing."""
