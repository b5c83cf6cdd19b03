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
# Modes, as `gemm_problem` has them, and shapes, those first that tell most: what `python -m perf.calibrate design`
# makes of all that was measured on the H200 and that cuBLAS takes less than 2.5 ms for.
SHAPES = (
    ("bf16", Shape(1024, 57344, 8192, layout="nt")),
    ("bf16", Shape(9216, 9216, 9216)),
    ("tf32x3", Shape(800, 56, 102, layout="tt")),
    ("ieee", Shape(1, 8192, 8192, layout="nt")),
    ("bf16", Shape(6144, 6144, 6144)),
    ("tf32", Shape(16, 454, 2048, batch=8)),
    ("bf16", Shape(8192, 8192, 8192)),
    ("bf16", Shape(7232, 7232, 7232)),
    ("bf16x6", Shape(8192, 32, 8192, layout="nt")),
    ("bf16", Shape(12, 28672, 8192, layout="nt")),
    ("bf16", Shape(3072, 9216, 4096, layout="nt")),
    ("bf16x6", Shape(3, 512, 1024, layout="tt")),
    ("bf16", Shape(610, 7448, 5256, layout="nt")),
    ("ieee", Shape(4236, 240, 336, batch=8)),
    ("bf16", Shape(8192, 8192, 8192, layout="tn")),
    ("bf16", Shape(8832, 8832, 8832)),
    ("bf16", Shape(714, 1240, 3128, layout="nt")),
    ("int8", Shape(4544, 16, 16)),
    ("bf16", Shape(50, 50257, 768)),
    ("bf16", Shape(1, 8192, 28672, layout="nt")),
    ("bf16", Shape(4608, 4608, 4608)),
    ("tf32", Shape(128, 8, 8, layout="nt")),
    ("bf16", Shape(2880, 2496, 5632, layout="nt")),
    ("tf32x3", Shape(2068, 3, 73, layout="tn")),
    ("bf16", Shape(7168, 7168, 7168)),
    ("bf16", Shape(16, 128256, 4096, layout="nt")),
    ("bf16", Shape(3840, 3840, 3840)),
    ("ieee", Shape(1024, 6144, 4096)),
    ("int8", Shape(512, 128, 256)),
    ("bf16", Shape(356, 7168, 2048, layout="nt")),
    ("bf16", Shape(4, 7168, 16384, layout="nt")),
    ("bf16", Shape(2048, 2048, 2048)),
    ("bf16", Shape(9088, 9088, 9088)),
    ("bf16", Shape(16, 7168, 18432, layout="nt")),
    ("bf16x6", Shape(64, 8, 1024, batch=8)),
    ("bf16", Shape(4096, 4096, 4096, layout="tn")),
    ("bf16", Shape(67, 4161, 2624, layout="nt", bias="n", activation="gelu")),
    ("bf16", Shape(3072, 9216, 4096, layout="tt")),
    ("bf16", Shape(1024, 1024, 1024)),
    ("ieee", Shape(16, 4096, 4096, layout="nt")),
    ("tf32x3", Shape(6304, 50, 64, layout="tt")),
    ("bf16", Shape(1, 1536, 7168, layout="nt")),
    ("bf16", Shape(272, 51200, 5120, layout="nt")),
    ("bf16", Shape(680, 7168, 2048, layout="nt")),
    ("fp16", Shape(8192, 2, 4238, layout="tn", bias="n")),
    ("bf16", Shape(3, 63, 16, layout="nt")),
    ("bf16", Shape(4032, 4032, 4032)),
    ("bf16", Shape(32, 6144, 4096, layout="nt")),
    ("bf16x6", Shape(16, 50, 255, layout="nt", batch=64)),
    ("bf16", Shape(4096, 4096, 4096)),
    ("bf16", Shape(4, 7168, 18432, layout="nt")),
    ("bf16", Shape(16, 64, 16, layout="tt", batch=300)),
    ("bf16", Shape(376, 1928, 1280)),
    ("fp16", Shape(14, 8918, 8574, layout="nt")),
    ("bf16", Shape(2432, 4224, 11456, layout="tt")),
    ("bf16", Shape(128, 1536, 4096)),
    ("bf16", Shape(2, 8192, 28672, layout="nt")),
    ("tf32x3", Shape(3, 64, 8, layout="nt")),
    ("fp8 fast", Shape(7552, 1664, 8064, layout="nt", scales="tensor")),
    ("bf16", Shape(758, 1352, 2008, layout="nt")),
    ("bf16", Shape(8, 128256, 4096)),
    ("tf32x3", Shape(1435, 288, 256, layout="nt", batch=64)),
    ("bf16", Shape(64, 80, 1936, batch=17)),
    ("bf16", Shape(2, 284, 16, layout="nt", batch=64, bias="n")),
    ("bf16", Shape(802, 24576, 1536, layout="nt")),
    ("ieee", Shape(256, 1824, 3, layout="tt")),
    ("bf16", Shape(64, 8192, 28672, layout="nt")),
    ("tf32", Shape(2, 5760, 2464)),
    ("bf16", Shape(3392, 3392, 3392)),
    ("int8", Shape(2048, 2048, 2048, layout="nt")),
    ("bf16", Shape(3200, 3200, 3200)),
    ("bf16", Shape(12, 4096, 4096, layout="nt")),
)


def probes(device: DeviceInfo) -> list[Probe]:
    """Those of SHAPES that `device` has several candidates for, best information first."""
    problems = (gemm_problem(shape, mode) for mode, shape in SHAPES)
    found = (Probe(problem, ways(problem, device)) for problem in problems)
    return [probe for probe in found if len(probe.ways) > 1]


def ways(problem: GemmProblem, device: DeviceInfo) -> dict[Selection, Candidate]:
    """The WAYS fastest legal candidates as predicted, each in another configuration, the model's choice first."""
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
