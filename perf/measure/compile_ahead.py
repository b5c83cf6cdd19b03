"""Compiles candidates before anything is timed, in as many processes as `tune` uses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import Selection
from triton_gemm.tuning import measuring

PAUSE_S = 0.1


def compile_ahead(candidates: Mapping[GemmProblem, Sequence[Selection]]) -> None:
    """Fills Triton's cache with the kernels of all candidates. A failure is left to the measurement, which meets it
    again."""
    with measuring("compile_ahead", None, "any") as gpu:
        for problem, of_problem in candidates.items():
            gpu.prepare(problem, of_problem)
        while not all(gpu.ready(problem, of_problem) for problem, of_problem in candidates.items()):
            gpu.pause(PAUSE_S)
