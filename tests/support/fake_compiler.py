"""Fakes of a Hopper GPU, Triton's compiler and cache, and the workers. A test decides when a kernel is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fake_driver import launch_on_device_0
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, plan, stand_ins, step
from triton_gemm.selection.select import select

K, N = 4096, 4096
ROWS = (1814, 1408, 1088, 512)  # their choices are different kernels in the same bit class
SPLIT = (64, 1536, 7168)  # M, N, K of one that is cut along K


class FakeCompiler:
    """Workers that compile nothing: a test says when a job is done, and why it has failed."""

    def __init__(self) -> None:
        self.added: list[stand_ins.Wanted] = []
        self.ended: set[stand_ins.Wanted] = set()
        self.joined: list[stand_ins.Wanted] = []

    @property
    def jobs(self) -> list[Any]:
        return [wanted.job for wanted in self.added]

    def add(self, added: list[stand_ins.Wanted]) -> None:
        self.added += added

    def join(self, wanted: stand_ins.Wanted) -> bool:
        self.joined.append(wanted)
        return False

    def wait(self, timeout: float | None) -> bool:
        return self.ended.issuperset(self.added)

    def abandon(self) -> None:
        self.added.clear()


def take_workers(patch: pytest.MonkeyPatch) -> FakeCompiler:
    """In the place of the workers of a process that has loaded nothing yet."""
    compiler = FakeCompiler()
    replace_all(patch, background, _available={}, _compilers={"fake": compiler}, _compiler=lambda *_: compiler)
    replace_all(patch, background, _lost=False, _can_cache=lambda: True, counts=background.Counter())
    replace_all(patch, torch.cuda, get_device_capability=lambda _: (9, 0), is_available=lambda: True)
    return compiler


class Gpu:
    """In the place of Triton's compiler and cache, kits, the driver and a Hopper GPU.

    cached: binaries on disk; waited: those that a call has compiled; ran: those that were launched, one after another;
    warm: whether Triton was asked for a kernel before.
    """

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.cached: set[object] = set()
        self.waited: list[object] = []
        self.ran: list[object] = []
        self.capturing = False
        self.warm = True
        self.compiler = take_workers(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        launch_on_device_0(patch)
        replace_all(patch, plan, device_info=lambda _: HOPPER, workspace=lambda *_: (torch.empty(4), torch.empty(4)))
        patch.setattr(step.kits, "code_of", lambda *_: None)
        replace_all(patch, step, compiled=self.compile, compiled_before=self.load, machine_code=lambda binary: binary)
        patch.setattr(background, "is_warm", lambda: self.warm)
        patch.setattr(binaries, "_received", {})
        ran = self.ran.append
        patch.setattr(step.Step, "_load", lambda made, binary: setattr(made, "call", lambda *_: ran(binary)))

    def load(self, launch: Any, operands: Any, _: object) -> object:
        binary = binaries.identity(launch, operands)
        return binary if binary in self.cached else None

    def compile(self, launch: Any, operands: Any, _: object) -> object:
        binary = binaries.identity(launch, operands)
        if binary not in self.cached:
            self.waited.append(binary)
        self.cached.add(binary)
        return binary

    def end(self, why: str | None = None) -> None:
        """Ends all jobs of the workers, which leave their binaries on disk."""
        for wanted in set(self.compiler.added) - self.compiler.ended:
            if why is None:
                self.cached.update(wanted.binaries)
            background._ended(HOPPER, wanted, why)
            self.compiler.ended.add(wanted)


def operands(M: int, N: int = N, K: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `linear`, without memory."""
    a, b, c = (torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((M, K), (N, K), (M, N)))
    return a, b.t(), c


def planned(M: int, N: int = N, K: int = K, **changes: Any) -> plan.GemmPlan:
    """As `plan_for` plans it, without that cache."""
    problem = GemmProblem.of(*operands(M, N, K))
    selection = replace(select(problem, HOPPER), **changes)
    return plan.GemmPlan(problem, selection, torch.device("cpu"), background.FirstCalls(HOPPER))


def available() -> stand_ins.Available:
    return background._available[HOPPER.capability]


def call(made: plan.GemmPlan) -> None:
    made.run(*operands(made.problem.M, made.problem.N, made.problem.K))


def own(made: plan.GemmPlan) -> list[object]:
    return [*binaries.identities(HOPPER, made.problem, made.selection)]


def own_jobs(gpu: Gpu, *plans: plan.GemmPlan) -> list[Any]:
    return [job for job in gpu.compiler.jobs if job in [(x.problem, x.selection) for x in plans]]
