"""Learning without a GPU: kernels take what a test says, samples are noisy, and the clock moves with each call."""

from __future__ import annotations

import ctypes
import random
import threading
from collections.abc import Callable
from contextlib import nullcontext
from math import exp
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import fake_compiler, table_fakes
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import tables
from triton_gemm.learning import block, trial, tuner
from triton_gemm.learning.candidates import TrialCandidate, candidates
from triton_gemm.problem import Request
from triton_gemm.runtime import background, plan, turns
from triton_gemm.runtime.worker import Question
from triton_gemm.selection.select import Selection

NOISE = 0.04
US = 20.0  # of a kernel that no test says more of


def copy(to: int, of: int, nbytes: int, stream: int) -> None:
    """In place of the driver's."""
    ctypes.memmove(to, of, nbytes)


class Service:
    """A service whose calls are launched by no GPU. Call `call` for one call.

    true: microseconds of a kernel; wrong: kernels with other bits; raises: those that fail to launch, by `error`;
    uncompiled: those that fail to compile; hung: whether no graph ends; graphs: those that were made and not given
    up; queued: launches beside those of graphs; launches: samples; free: whether torch has memory; stream, now: of
    calls; learns: whether a rule does.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.gpu = fake_compiler.Gpu(patch)
        self.true: Callable[[Selection], float] = lambda _: US
        self.wrong: set[Selection] = set()
        self.raises: set[Selection] = set()
        self.error, self.hung = 1, False
        self.uncompiled: set[Selection] = set()
        self.queued: list[Selection] = []
        self.slowed: tuple[str, ...] = ()
        self.graphs: list[Any] = []
        self.made: list[Any] = []
        self.free, self.stream, self.now, self.learns = True, 0, 0.0, True
        self.gpu_free = 40 << 30
        self.launches: list[tuple[Selection, float]] = []
        self.random = random.Random(1)
        self.folder = table_fakes.own_folder(folder, patch)
        replace_all(patch, plan, info_of=lambda _: HOPPER, current_stream=lambda _: self.stream)
        patch.setattr(plan.background, "enabled", lambda: True)
        patch.setattr(tuner, "device_info", lambda _: HOPPER)
        patch.setattr(trial.Trial, "_graph", lambda *x: self._graph(*x))
        patch.setattr(trial, "Mark", lambda: SimpleNamespace(set=lambda stream: None, passed=lambda: True))
        replace_all(patch, trial, own_stream=lambda _: 99, launch=self._launch, relaxed=nullcontext)
        patch.setattr(trial.nvml, "slowed", lambda _: self.slowed)
        replace_all(patch, block, copy=copy, synchronize=lambda _: None, is_free=lambda *_: self.free)
        replace_all(patch, turns, launch_graph=self._launch, active=lambda: self.learns, counts=turns.Counter())
        replace_all(patch, turns, job=turns.Job(-1, launched=-1), extension=None)
        replace_all(patch, turns.driver, address_of=lambda _: 0, error_text=lambda _: "invalid argument")
        cuda = {
            "mem_get_info": lambda _: (self.gpu_free, 80 << 30),
            "memory_reserved": lambda _: 0,
            "device": lambda _: nullcontext(),
            "is_available": lambda: False,
            "get_device_properties": lambda _: SimpleNamespace(L2_cache_size=1 << 20),
        }
        replace_all(patch, torch.cuda, **cuda)
        self.patch = patch
        self.begin_process()

    def begin_process(self) -> None:
        """What another process has: no plans, the user's tables and a learner that knows nothing."""
        self.patch.setattr(plan, "PLANS", {})
        self.tuner = tuner.Tuner(clock=lambda: self.now)
        self.tuner.thread = threading.current_thread()  # it looks between calls
        self.patch.setattr(turns, "_learner", self.tuner)
        tables.reload()

    def _graph(self, running: trial.Trial, entrant: TrialCandidate, launches: Any) -> Any:
        is_first, selection = entrant.graph is None and len(running.graphs) % 2 == 0, entrant.plan.selection
        assert entrant.plan.compiled

        def start() -> int:
            if is_first:
                if selection in self.raises:
                    return self.error
                self.queued.append(selection)
                into, nbytes = running.operands.place("expected" if entrant is running.candidates[0] else ("c", 0))
                of = bytearray(nbytes)
                if selection in self.wrong:
                    of[12345 % nbytes] ^= 4
                ctypes.memmove(into, bytes(of), nbytes)
            return 0

        def read() -> float | None:
            if self.hung:
                return None
            took = entrant.count * self.true(selection) * exp(self.random.gauss(0, NOISE))
            if not is_first:
                self.launches.append((selection, took))
            return took

        def close() -> None:
            self.graphs.remove(made)

        made: Any = SimpleNamespace(start=start, read=read, close=close, graph=len(self.made) + 1, ended=0)
        self.made.append(made)
        self.graphs.append(made)
        running.graphs.append(made)
        return made

    def _launch(self, graph: int, ended: int, stream: int) -> int:
        assert stream == self.stream and not self.gpu.capturing and self.made[graph - 1] in self.graphs
        return int(self.made[graph - 1].start())

    def operands(self, M: int = 64) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        a, b, c = (torch.zeros(sizes, dtype=torch.bfloat16) for sizes in ((M, 1024), (1024, 512), (M, 512)))
        return a, b, c

    def call(self, of: tuple[torch.Tensor, torch.Tensor, torch.Tensor], times: int = 1, **request: Any) -> Selection:
        """What the last of so many calls ran on. One comes each millisecond, and each tenth the learner looks."""
        for number in range(times):
            self.now += 0.001
            found = plan.multiply(*of, Request(**request))
            if number % 10 == 0 and self.tuner.thread is threading.current_thread() and turns._learner is self.tuner:
                self.tuner.poll()  # a forked child has no thread that looks
            for wanted in self.gpu.compiler.added:
                if isinstance(wanted, Question):
                    wanted.answer = wanted.function(*wanted.arguments)
                    background._ended(HOPPER, wanted, None)
                elif wanted not in self.gpu.compiler.ended:
                    why = "it spills" if wanted.job[1] in self.uncompiled else None
                    self.gpu.cached.update(() if why else wanted.binaries)
                    background._ended(HOPPER, wanted, why)
                    self.gpu.compiler.ended.add(wanted)
            self.gpu.compiler.added.clear()
        return found.selection


CALLS = 40_000  # more than a race needs


class World:
    """A product of a service, of which one candidate is a tenth faster than the others."""

    def __init__(self, service: Service, M: int = 64, **request: Any) -> None:
        self.service, self.of, self.request = service, service.operands(M), request
        self.incumbent = service.call(self.of, **request)
        self.problem = list(service.tuner.products.values())[-1].problem
        self.others = [x for _, x in candidates(self.problem, HOPPER, self.incumbent)[1:]]
        assert len(self.others) >= 3
        self.fastest = self.others[1]
        service.true = lambda x: US * (0.9 if x.algorithm == self.fastest.algorithm else 1.0)

    def call(self, times: int = CALLS) -> Selection:
        return self.service.call(self.of, times, **self.request)

    def until_it_races(self) -> None:
        while not self.service.launches:
            self.call(64)

    @property
    def replaced(self) -> bool:
        return self.call(1).algorithm == self.fastest.algorithm
