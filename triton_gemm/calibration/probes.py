"""Which products and candidates are timed: those whose times tell the figures of the model apart."""

from __future__ import annotations

from ..device import DeviceInfo
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..select import Selection, illegal, ranked
from ..suites.problems import gemm_problem
from ..suites.shapes import Shape
from .measuring import Probe

WAYS = 6  # candidates of a product
SHAPES: tuple[tuple[str, Shape], ...] = ()


def probes(device: DeviceInfo) -> list[Probe]:
    """Those of SHAPES that `device` has several candidates for, best information first."""
    problems = (gemm_problem(shape, mode) for mode, shape in SHAPES)
    found = (Probe(problem, ways(problem, device)) for problem in problems)
    return [probe for probe in found if len(probe.ways) > 1]


def ways(problem: GemmProblem, device: DeviceInfo) -> dict[Selection, Candidate]:
    """The WAYS fastest legal candidates as predicted, each in another configuration; the first is the model's choice."""
    found: dict[Selection, Candidate] = {}
    configs = set()
    for _, kernel, candidate in ranked(problem, device):
        config = (kernel, candidate.config, candidate.swap_ab)
        if config not in configs and illegal(problem, device, kernel, candidate) is None:
            configs.add(config)
            found[Selection.of(kernel, candidate, "", "tuner")] = candidate
            if len(found) == WAYS:
                break
    return found
