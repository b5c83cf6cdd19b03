"""Products by kernels whose source runs on the CPU (`gluon_on_cpu`), in a plan's place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.support.gluon_memory import to_tf32
from tests.support.gluon_on_cpu import run
from tests.support.kernel_cases import Case, Operands, bits
from triton_gemm.arithmetic import Planes
from triton_gemm.config import TileConfig
from triton_gemm.kernels.launch import Launch
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem

CPU = torch.device("cpu")


@dataclass
class Launched:
    """Launches of a simulated kernel, in a plan's place, perhaps of the turned product. launches: of a problem; copied:
    the problem and operands as the kernel reads them."""

    problem: GemmProblem
    launches: Callable[[GemmProblem], Sequence[Launch]]
    swapped: bool = False
    copied: Callable[[GemmProblem, Tensor, Tensor], tuple[GemmProblem, Tensor, Tensor]] = lambda *given: given

    def run(self, a: Tensor, b: Tensor, c: Tensor, auxiliary: tuple[Tensor, ...], alpha: float, beta: float) -> None:
        problem, a, b = self.copied(self.problem, a, b)
        if self.swapped:
            problem, a, b = problem.swap_ab(), b, a
        launches = self.launches(problem)
        counters = torch.zeros(launches[0].counters, dtype=torch.int32)
        operands = {"a": a, "b": b, "c": c, "counters": counters}
        operands |= zip(problem.auxiliary, auxiliary, strict=True)
        operands["workspace"] = torch.full((launches[0].workspace // 4,), torch.nan)
        for temporary in launches[0].temporaries:
            operands[temporary.name] = torch.full(temporary.shape, torch.nan, dtype=temporary.dtype)
        for launch in launches:
            run(launch, operands, {"alpha": alpha, "beta": beta})
        assert not counters.any(), "counters are not zero afterwards"


def simulation(problem: GemmProblem, config: TileConfig, schedule: Schedule, module: SimpleNamespace) -> Launched:
    """Of the warp-specialised kernel."""

    def launches(problem: GemmProblem) -> list[Launch]:
        return [launch.programmatic() for launch in module.launches(problem, config, schedule)]

    return Launched(problem, launches, copied=in_planes)


def readable(case: Case) -> GemmProblem:
    """A case's problem, as kernels read it."""
    problem = Operands(case, CPU).problem
    return repacked(problem, ("a", "b")) if problem.planes.count > 1 else problem


def in_planes(problem: GemmProblem, a: Tensor, b: Tensor) -> tuple[GemmProblem, Tensor, Tensor]:
    planes = problem.planes
    if planes.count == 1:
        return problem, a, b
    problem = repacked(problem, ("a", "b"))
    return problem, split(a, planes, problem.a.strides[1]), split(b.mT, planes, problem.b.strides[2])


def split(x: torch.Tensor, planes: Planes, pitch: int) -> torch.Tensor:
    """x [(batch,) rows, columns] as [(batch,) count, rows, pitch]."""
    pieces = torch.full((*x.shape[:-2], planes.count, x.shape[-2], pitch), torch.nan, dtype=planes.dtype)
    for i in range(planes.count):
        piece = to_tf32(x) if planes.dtype == torch.float32 else x.to(planes.dtype)
        pieces[..., i, :, : x.shape[-1]] = piece
        x = x - piece
    return pieces


def check(case: Case, config: TileConfig, schedule: Schedule, module: SimpleNamespace, times: int = 1) -> None:
    operands = Operands(case, CPU)
    operands.check(simulation(operands.problem, config, schedule, module), schedule.split_k, times)


def summed(operands: Operands, config: TileConfig, schedule: Schedule, module: SimpleNamespace) -> Tensor:
    """The bits of C."""
    case = operands.case
    operands.c.copy_(operands.c0)
    plan = simulation(operands.problem, config, schedule, module)
    plan.run(operands.a, operands.b, operands.c, operands.auxiliary, case.alpha, case.beta)
    return bits(operands.c).clone()
