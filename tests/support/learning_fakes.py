"""Learning without a GPU: kernels take what a test says, samples are noisy, and the clock moves with each call."""

from __future__ import annotations

import random
from collections.abc import Callable
from concurrent.futures import Future
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import fake_compiler, table_fakes
from tests.support.table_fakes import HOPPER
from triton_gemm import tables
from triton_gemm.learning import block, race, tuner
from triton_gemm.problem import Request
from triton_gemm.runtime import background, plan, turns
from triton_gemm.selection.select import Selection

NOISE = 0.04
US = 20.0  # of a kernel that no test says more of


class Aside:
    """Does jobs at once. failing: what a job of that name raises."""

    def __init__(self) -> None:
        self.failing: dict[str, Exception] = {}

    def ask(self, job: Callable[[], Any], index: int) -> Future[Any]:
        found: Future[Any] = Future()
        name = getattr(getattr(job, "func", job), "__name__", "")
        if name in self.failing:
            found.set_exception(self.failing[name])
        else:
            found.set_result(job())
        return found


def filled(running: race.Race) -> list[Callable[[], object]]:
    """In place of `Race._fill`: zeros, whatever the memory had."""
    running.operands.memory.zero_()
    return running.operands.comparison(running.flag)


class Service:
    """A service whose calls are launched by no GPU. Call `call` for one call.

    true: microseconds of a kernel; wrong: kernels with other bits; raises: those that fail to launch; uncompiled: those
    that fail to compile; graphs: those that were made and not given up; queued: launches beside those of graphs;
    launches: samples; free: whether torch has memory; stream, now: of calls; learns: whether a rule does.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.gpu = fake_compiler.Gpu(patch)
        self.true: Callable[[Selection], float] = lambda _: US
        self.wrong: set[Selection] = set()
        self.raises: set[Selection] = set()
        self.uncompiled: set[Selection] = set()
        self.queued: list[Selection] = []
        self.slowed: tuple[str, ...] = ()
        self.graphs: list[Any] = []
        self.free, self.stream, self.now, self.learns = True, 0, 0.0, True
        self.launches: list[tuple[Selection, float]] = []
        self.random = random.Random(1)
        self.folder = table_fakes.own_folder(folder, patch)
        patch.setattr(plan, "info_of", lambda _: HOPPER)
        patch.setattr(plan, "current_stream", lambda _: self.stream)
        patch.setattr(plan.background, "enabled", lambda: True)
        patch.setattr(tuner, "device_info", lambda _: HOPPER)
        patch.setattr(race.Race, "_graph", lambda *x: self._graph(*x))
        patch.setattr(race, "Mark", lambda: SimpleNamespace(set=lambda stream: None, passed=lambda: True))
        patch.setattr(race.nvml, "slowed", lambda _: self.slowed)
        patch.setattr(block, "is_free", lambda *_: self.free)
        patch.setattr(race.Race, "_fill", filled)
        patch.setattr(torch.cuda, "is_available", lambda: False)
        patch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(L2_cache_size=1 << 20))
        patch.setattr(race, "launch", self._launch)
        patch.setattr(turns, "active", lambda: self.learns)
        patch.setattr(turns, "counts", turns.Counter())
        self.patch = patch
        self.begin_process()

    def begin_process(self) -> None:
        """What another process has: no plans, the user's tables and a learner that knows nothing."""
        self.patch.setattr(plan, "PLANS", {})
        self.tuner = tuner.Tuner(clock=lambda: self.now)
        self.tuner.aside = Aside()  # type: ignore[assignment]
        self.patch.setattr(turns, "_learner", self.tuner)
        tables.reload()

    def _launch(self, made: Any, values: Any, stream: int) -> None:
        if made.selection in self.raises:
            raise RuntimeError("Triton Error [CUDA]: invalid argument")
        if stream == self.stream:
            self.queued.append(made.selection)
            for running in self.tuner.races.values():
                if any(made is x.plan for x in running.entrants[1:]):
                    into = running.operands.part(("c", 0))
                    into.copy_(running.operands.part("expected"))
                    if made.selection in self.wrong:
                        into[12345 % len(into)] ^= 4

    def _graph(self, running: race.Race, entrant: race.Entrant, into: Any) -> Any:
        entrant.values, entrant.count = running.operands.values(entrant.plan, 0, into), race.launches_of(entrant.us)

        def read() -> float:
            took = entrant.count * self.true(entrant.plan.selection) * exp(self.random.gauss(0, NOISE))
            self.launches.append((entrant.plan.selection, took))
            return took

        made: Any = SimpleNamespace(start=lambda stream: None, read=read, close=lambda: self.graphs.remove(made))
        self.graphs.append(made)
        running.graphs.append(made)
        return made

    def operands(self, M: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b, c = (torch.zeros(sizes, dtype=torch.bfloat16) for sizes in ((M, 1024), (1024, 512), (M, 512)))
        return a, b, c

    def call(self, of: tuple[torch.Tensor, torch.Tensor, torch.Tensor], times: int = 1, **request: Any) -> Selection:
        """What the last of so many calls ran on. One comes each millisecond."""
        for _ in range(times):
            self.now += 0.001
            found = plan.multiply(*of, Request(**request))
            for wanted in self.gpu.compiler.added:
                if wanted not in self.gpu.compiler.ended:
                    why = "it spills" if wanted.job[1] in self.uncompiled else None
                    self.gpu.cached.update(() if why else wanted.binaries)
                    background._ended(HOPPER, wanted, why)
                    self.gpu.compiler.ended.add(wanted)
            self.gpu.compiler.added.clear()
        return found.selection
