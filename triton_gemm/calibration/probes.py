"""Which products and candidates are timed: those whose times tell the figures of the model apart."""

from __future__ import annotations

import re
from collections.abc import Iterable

from ..hardware.device import DeviceInfo
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from ..selection.select import Selection, illegal, ranked
from ..suites.problems import gemm_problem
from ..suites.shapes import Shape
from .measuring import Probe

CANDIDATES = 6  # candidates of a product
# Those first that tell most, as `python -m perf.calibrate design` prints them: of all that was measured on the H200 and
# that cuBLAS takes less than 2.5 ms for.
TEXT = """
3072x9216x4096 tt bf16; 24x8192x28672 nn bf16; 9216x9216x9216 nn bf16; 8192x8192x8192 nn bf16;
4608x4608x4608 nn bf16; 12x28672x8192 nt bf16; 6144x6144x6144 nn bf16; 800x56x102 tt tf32x3;
714x1240x3128 nt bf16; 3072x9216x4096 nt bf16; 50x50257x768 nn bf16; 610x7448x5256 nt bf16;
8192x8192x8192 tn bf16; 1x8192x28672 nt bf16; 8832x8832x8832 nn bf16; 2880x2496x5632 nt bf16;
16x128256x4096 nt bf16; 7232x7232x7232 nn bf16; 356x7168x2048 nt bf16; 7168x7168x7168 nn bf16;
1x1536x7168 nt bf16; 3840x3840x3840 nn bf16; 5 x 64x64x368 nn bf16; 2048x2048x2048 nn bf16;
4x7168x16384 nt bf16; 2432x4224x11456 tt bf16; 32x6144x4096 nt bf16; 17 x 64x80x1936 nn bf16;
272x51200x5120 nt bf16; 9088x9088x9088 nn bf16; 376x1928x1280 nn bf16; 3x512x1024 tt bf16x6;
2x8192x28672 nt bf16; 680x7168x2048 nt bf16; 64 x 16x16x64 nt bf16; 2240x6144x4032 nn bf16;
758x1352x2008 nt bf16; 4096x4096x4096 tn bf16; 16x4096x14336 nt bf16; 512x512x16384 tn bf16;
4544x16x16 nn int8; 1x28672x8192 nt bf16; 818x4488x3664 nn bf16; 1500x1500x1500 nn ieee;
362x57344x8192 nt bf16; 128x1536x4096 nn bf16; 1536x1536x1536 nt bf16; 8x128256x4096 nn bf16;
4096x4096x4096 nn bf16; 4x7168x18432 nt bf16; 128x152x55104 tn bf16; 4032x4032x4032 nn bf16;
3392x3392x3392 nn bf16; 12x4096x4096 nt bf16; 1024x1024x1024 nn bf16; 3712x10688x7808 nn bf16;
277x6488x2000 nt bf16; 64 x 2x284x16 nt bias n bf16; 6144x6144x1024 nn bf16; 1x7168x18432 nt bf16;
4 x 80x672x1728 nt bf16; 32x4096x4096 nn bf16; 2944x2944x2944 nn bf16; 2432x3712x4992 nn bf16;
32x128256x4096 nn bf16; 128x4096x1000 nt bf16; 1001x1003x1007 nn bf16; 802x24576x1536 nt bf16;
2068x3x73 tn tf32x3; 621x5120x8192 nt bf16; 2x2496x768 nt bf16; 814x6144x4096 nt bf16
"""
WORDS = re.compile(r"(?:(\d+) x )?(\d+)x(\d+)x(\d+) (\w+)(?: bias (\w))? (\w+)")


def read(words: str) -> tuple[str, Shape]:
    """A mode, as `gemm_problem` has it, and a shape."""
    found = WORDS.fullmatch(words)
    assert found is not None, words
    batch, M, N, K, layout, bias, mode = found.groups()
    return mode, Shape(int(M), int(N), int(K), layout=layout, batch=int(batch) if batch else None, bias=bias)


SHAPES = [read(words.strip()) for words in TEXT.split(";")]


def probes(device: DeviceInfo) -> list[Probe]:
    """Those of SHAPES that `device` has several candidates for, best information first."""
    problems = (gemm_problem(shape, mode) for mode, shape in SHAPES)
    found = (Probe(problem, candidates_of(problem, device)) for problem in problems)
    return [probe for probe in found if len(probe.candidates) > 1]


def candidates_of(problem: GemmProblem, device: DeviceInfo) -> dict[Selection, Candidate]:
    """The fastest legal candidates as predicted, each in another configuration, the model's choice first."""
    legal = (candidate for _, candidate in ranked(problem, device) if illegal(problem, device, candidate) is None)
    return {Selection.of(candidate, "", "tuner"): candidate for candidate in of_each_config(legal)}


def of_each_config(candidates: Iterable[Candidate]) -> list[Candidate]:
    """The first WAYS of them that are of different configurations."""
    found: dict[object, Candidate] = {}
    for candidate in candidates:
        kernel, config, _, swap_ab, _ = candidate.algorithm
        found.setdefault((kernel, config, swap_ab), candidate)
        if len(found) == CANDIDATES:
            break
    return list(found.values())
