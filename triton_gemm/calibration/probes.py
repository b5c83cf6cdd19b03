"""Which products and candidates are timed: those whose times tell the figures of the model apart."""

from __future__ import annotations

from collections.abc import Iterable

from ..hardware.device import DeviceInfo
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..selection.select import Selection, illegal, ranked
from ..suites.problems import gemm_problem
from ..suites.shapes import Shape
from .measuring import Probe

WAYS = 6  # candidates of a product
# Modes, as `gemm_problem` has them, and shapes, those first that tell most: what `python -m perf.calibrate design`
# makes of all that was measured on the H200 and that cuBLAS takes less than 2.5 ms for.
SHAPES = (
    ("bf16", Shape(3072, 9216, 4096, layout="tt")),
    ("bf16", Shape(24, 8192, 28672)),
    ("bf16", Shape(9216, 9216, 9216)),
    ("bf16", Shape(8192, 8192, 8192)),
    ("bf16", Shape(4608, 4608, 4608)),
    ("bf16", Shape(12, 28672, 8192, layout="nt")),
    ("bf16", Shape(6144, 6144, 6144)),
    ("tf32x3", Shape(800, 56, 102, layout="tt")),
    ("bf16", Shape(714, 1240, 3128, layout="nt")),
    ("bf16", Shape(3072, 9216, 4096, layout="nt")),
    ("bf16", Shape(50, 50257, 768)),
    ("bf16", Shape(610, 7448, 5256, layout="nt")),
    ("bf16", Shape(8192, 8192, 8192, layout="tn")),
    ("bf16", Shape(1, 8192, 28672, layout="nt")),
    ("bf16", Shape(8832, 8832, 8832)),
    ("bf16", Shape(2880, 2496, 5632, layout="nt")),
    ("bf16", Shape(16, 128256, 4096, layout="nt")),
    ("bf16", Shape(7232, 7232, 7232)),
    ("bf16", Shape(356, 7168, 2048, layout="nt")),
    ("bf16", Shape(7168, 7168, 7168)),
    ("bf16", Shape(1, 1536, 7168, layout="nt")),
    ("bf16", Shape(3840, 3840, 3840)),
    ("bf16", Shape(64, 64, 368, batch=5)),
    ("bf16", Shape(2048, 2048, 2048)),
    ("bf16", Shape(4, 7168, 16384, layout="nt")),
    ("bf16", Shape(2432, 4224, 11456, layout="tt")),
    ("bf16", Shape(32, 6144, 4096, layout="nt")),
    ("bf16", Shape(64, 80, 1936, batch=17)),
    ("bf16", Shape(272, 51200, 5120, layout="nt")),
    ("bf16", Shape(9088, 9088, 9088)),
    ("bf16", Shape(376, 1928, 1280)),
    ("bf16x6", Shape(3, 512, 1024, layout="tt")),
    ("bf16", Shape(2, 8192, 28672, layout="nt")),
    ("bf16", Shape(680, 7168, 2048, layout="nt")),
    ("bf16", Shape(16, 16, 64, layout="nt", batch=64)),
    ("bf16", Shape(2240, 6144, 4032)),
    ("bf16", Shape(758, 1352, 2008, layout="nt")),
    ("bf16", Shape(4096, 4096, 4096, layout="tn")),
    ("bf16", Shape(16, 4096, 14336, layout="nt")),
    ("bf16", Shape(512, 512, 16384, layout="tn")),
    ("int8", Shape(4544, 16, 16)),
    ("bf16", Shape(1, 28672, 8192, layout="nt")),
    ("bf16", Shape(818, 4488, 3664)),
    ("ieee", Shape(1500, 1500, 1500)),
    ("bf16", Shape(362, 57344, 8192, layout="nt")),
    ("bf16", Shape(128, 1536, 4096)),
    ("bf16", Shape(1536, 1536, 1536, layout="nt")),
    ("bf16", Shape(8, 128256, 4096)),
    ("bf16", Shape(4096, 4096, 4096)),
    ("bf16", Shape(4, 7168, 18432, layout="nt")),
    ("bf16", Shape(128, 152, 55104, layout="tn")),
    ("bf16", Shape(4032, 4032, 4032)),
    ("bf16", Shape(3392, 3392, 3392)),
    ("bf16", Shape(12, 4096, 4096, layout="nt")),
    ("bf16", Shape(1024, 1024, 1024)),
    ("bf16", Shape(3712, 10688, 7808)),
    ("bf16", Shape(277, 6488, 2000, layout="nt")),
    ("bf16", Shape(2, 284, 16, layout="nt", batch=64, bias="n")),
    ("bf16", Shape(6144, 6144, 1024)),
    ("bf16", Shape(1, 7168, 18432, layout="nt")),
    ("bf16", Shape(80, 672, 1728, layout="nt", batch=4)),
    ("bf16", Shape(32, 4096, 4096)),
    ("bf16", Shape(2944, 2944, 2944)),
    ("bf16", Shape(2432, 3712, 4992)),
    ("bf16", Shape(32, 128256, 4096)),
    ("bf16", Shape(128, 4096, 1000, layout="nt")),
    ("bf16", Shape(1001, 1003, 1007)),
    ("bf16", Shape(802, 24576, 1536, layout="nt")),
    ("tf32x3", Shape(2068, 3, 73, layout="tn")),
    ("bf16", Shape(621, 5120, 8192, layout="nt")),
    ("bf16", Shape(2, 2496, 768, layout="nt")),
    ("bf16", Shape(814, 6144, 4096, layout="nt")),
)


def probes(device: DeviceInfo) -> list[Probe]:
    """Those of SHAPES that `device` has several candidates for, best information first."""
    problems = (gemm_problem(shape, mode) for mode, shape in SHAPES)
    found = (Probe(problem, ways(problem, device)) for problem in problems)
    return [probe for probe in found if len(probe.ways) > 1]


def ways(problem: GemmProblem, device: DeviceInfo) -> dict[Selection, Candidate]:
    """The fastest legal candidates as predicted, each in another configuration, the model's choice first."""
    legal = (candidate for _, candidate in ranked(problem, device) if illegal(problem, device, candidate) is None)
    return {Selection.of(candidate, "", "tuner"): candidate for candidate in of_each_config(legal)}


def of_each_config(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first WAYS of them that are of different configurations."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        kernel, config, _, swap_ab, _ = candidate.algorithm
        found.setdefault((kernel, config, swap_ab), candidate)
        if len(found) == WAYS:
            break
    return list(found.values())
