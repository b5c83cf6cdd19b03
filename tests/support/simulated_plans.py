"""Products by the warp-specialised kernel whose source runs on the CPU (`gluon_on_cpu`), in a plan's place."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace

import torch
from torch import Tensor

from tests.support.gluon_on_cpu import run, to_tf32
from tests.support.kernel_cases import Case, Operands
from triton_gemm.arithmetic import Planes
from triton_gemm.config import TileConfig
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem

CPU = torch.device("cpu")


@dataclass
class Simulation:
    """The kernel in one configuration and schedule, in a plan's place."""

    problem: GemmProblem
    config: TileConfig
    schedule: Schedule
    module: SimpleNamespace

    def run(self, a: Tensor, b: Tensor, c: Tensor, auxiliary: tuple[Tensor, ...], alpha: float, beta: float) -> None:
        problem, planes = self.problem, self.problem.planes
        if planes.count > 1:
            problem = repacked(problem, ("a", "b"))
            a, b = split(a, planes, problem.a.strides[1]), split(b.mT, planes, problem.b.strides[2])
        launches = self.module.launches(problem, self.config, self.schedule)
        counters = torch.zeros(launches[0].counters, dtype=torch.int32)
        operands = {"a": a, "b": b, "c": c, "counters": counters}
        operands |= zip(problem.auxiliary, auxiliary, strict=True)
        operands["workspace"] = torch.full((launches[0].workspace // 4,), torch.nan)
        for temporary in launches[0].temporaries:
            operands[temporary.name] = torch.full(temporary.shape, torch.nan, dtype=temporary.dtype)
        for launch in launches:
            run(launch.programmatic(), operands, {"alpha": alpha, "beta": beta})
        assert not counters.any(), "counters are not zero afterwards"


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
    operands.check(Simulation(operands.problem, config, schedule, module), schedule.split_k, times)
