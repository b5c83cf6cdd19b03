"""Bit classes: which candidates of a GEMM give the same bits for the same operands.

The bits of a result depend on the order in which products are added and rounded along K, and on no more. That order is
which instruction adds how many of them, where partial sums end and how those are added, and which of C's elements that
is so for. How large tiles are, which program computes them and when, how operands come to it, and whether they are
copied first, does not matter. Nor do swapped operands, unless they have planes or scales, which are multiplied A's
first. Each kernel's module says in which order it sums (`order_of_sums`).

Equal classes of two candidates for one problem mean equal bits. Unequal ones need not mean unequal bits: where equality
was not measured (`tests/gpu/selection/test_bit_classes_gpu.py`), classes are told apart.
"""

from __future__ import annotations

import torch

from .. import kernels
from ..arithmetic import HALF
from ..kernels.candidate import Candidate
from ..problem import GemmProblem
from .select import Selection, given


def bit_class(problem: GemmProblem, candidate: Selection | Candidate) -> str:
    """The bit class of a candidate of `problem`, as the call has it: a short description. Two candidates have equal
    ones only where they give the same bits on the same GPU, on the same versions of this package and Triton.

        bf16, tensor cores, one sum along K
        bf16, tensor cores, K in 4 parts of 1024
        fp32 bf16x3, tensor cores, warp_specialised, one sum along K, promoted every 64
    """
    kernel, config, work, swap_ab, _ = candidate.algorithm
    words = _NAMES[problem.dtype].split()
    words += [word for word in problem.precision.split() if word != HALF.name and word not in words]
    order = "nothing to sum"
    if problem.K:
        order = kernels.named(kernel).order_of_sums(given(problem, candidate.algorithm), config, work)
        if swap_ab and (problem.planes.count > 1 or problem.scales):
            order += ", of C^T"  # whose terms come in another order, as do A's and B's scales
    return f"{' '.join(words)}, {order}"


_NAMES = {
    torch.bfloat16: "bf16",
    torch.float16: "fp16",
    torch.float32: "fp32",
    torch.float64: "fp64",
    torch.float8_e4m3fn: "fp8 e4m3",
    torch.float8_e5m2: "fp8 e5m2",
    torch.int8: "int8",
}
