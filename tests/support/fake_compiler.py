"""Fakes of a Hopper GPU, Triton's compiler and cache, and the workers. A test decides when a kernel is compiled."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, plan, stand_ins, step
from triton_gemm.selection.select import select

K, N = 4096, 4096
ROWS = (1814, 1408, 1088, 512)  # their choices are different kernels in the same bit class
SPLIT = (64, 1536, 7168)  # M, N, K of one that is cut along K


class FakeCompiler:
    """Workers that compile nothing: a test says when a job is done, and why it has failed."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.ended: dict[Any, str | None] = {}
        self.forgotten: list[Any] = []
        self.joined: list[Any] = []

    def add(self, jobs: list[Any], first: bool = False) -> None:
        self.jobs += jobs

    def done(self, job: object) -> bool:
        return job in self.ended

    def failure(self, job: object) -> str | None:
        return self.ended[job]

    def join(self, job: object) -> None:
        self.joined.append(job)

    def forget(self, job: object) -> None:
        self.forgotten.append(job)

    def wait(self, timeout: float | None) -> bool:
        return all(job in self.ended for job in self.jobs)

    def abandon(self) -> None:
        self.jobs.clear()


class Gpu:
    """In the place of Triton's compiler and cache, kits, the driver and a Hopper GPU.

    quick: whether there is the tile that is compiled soonest; cached: binaries on disk; waited: those that a call has
    compiled; ran: those that were launched, one after another.
    """

    def __init__(self, patch: pytest.MonkeyPatch, quick: bool = False) -> None:
        self.cached: set[object] = set()
        self.waited: list[object] = []
        self.ran: list[object] = []
        self.capturing = False
        self.compiler = FakeCompiler()
        patch.setattr(background, "_available", {})
        patch.setattr(stand_ins, "AHEAD", ())
        patch.setattr(background, "WORTH_US", 0.0)
        if not quick:
            patch.setattr(kernels.warp_specialised, "quick", lambda *_: ())
        patch.setattr(background, "_compilers", {"fake": self.compiler})
        patch.setattr(background, "_compiler", lambda *_: self.compiler)
        patch.setattr(background, "_lost", False)
        patch.setattr(background, "_can_cache", lambda: True)
        patch.setattr(background, "counts", background.Counter())
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        for name, value in {
            "device_info": lambda _: HOPPER,
            "current_device": lambda: 0,
            "current_stream": lambda _: 0,
            "ensure_context": lambda _: None,
        }.items():
            patch.setattr(plan, name, value)
        patch.setattr(step.kits, "code_of", lambda *_: None)
        patch.setattr(step, "compiled", self.compile)
        patch.setattr(step, "compiled_before", self.load)
        patch.setattr(step, "machine_code", lambda binary: binary)
        ran = self.ran.append
        patch.setattr(step.Step, "_load", lambda made, binary: setattr(made, "call", lambda *_: ran(binary)))
        patch.setattr(plan, "workspace", lambda *_: (torch.empty(4), torch.empty(4)))

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
        for problem, selection in self.compiler.jobs:
            if why is None:
                self.cached.update(binaries.identities(HOPPER, problem, selection))
                background._left_in_cache(HOPPER, (problem, selection))
            self.compiler.ended[problem, selection] = why


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
