"""Kernels compiled for GPUs that are not here, of products that have no memory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from triton_gemm.arithmetic import default_arithmetic
from triton_gemm.kernels.launch import Launch, materialise
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime import aot, binaries

Capability = tuple[int, int]
Three = tuple[int, int, int]

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (8, 0), (8, 9), (10, 0), (12, 0))


def product(
    size: Three,
    orders: str = "nnn",
    *,
    steps: Three = (1, 1, 1),
    gaps: Three = (0, 0, 0),
    batch: int = 1,
    dtype: torch.dtype = torch.bfloat16,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    **epilogue: object,
) -> GemmProblem:
    """Of a, b and c: `n` row-major, `t` column-major; the distance of neighbours in memory; unused elements after each
    row, or column."""
    M, N, K = size

    def layout(rows: int, columns: int, order: str, step: int, gap: int) -> Layout:
        pitch = (columns if order == "n" else rows) * step + gap
        return Layout((2 * rows * columns if batch > 1 else 0, *((pitch, step) if order == "n" else (step, pitch))))

    layouts = map(layout, (M, K, M), (K, N, N), orders, steps, gaps)
    precision = precision or default_arithmetic(dtype).name
    return GemmProblem(batch, M, N, K, dtype, out_dtype or dtype, precision, *layouts, **epilogue)  # type: ignore[arg-type]


def compile_launch(
    launch: Launch, dtypes: dict[str, torch.dtype], capability: Capability = HOPPER, *, programmatic: bool | None = None
) -> aot.Compiled:
    """As a plan launches it, programmatically from Hopper on, unless told otherwise."""
    return _compiled(
        launch,
        {name: torch.empty(1, dtype=dtype, device="meta") for name, dtype in dtypes.items()},
        capability,
        capability >= HOPPER if programmatic is None else programmatic,
    )


def compiled(
    problem: GemmProblem, made: Sequence[Launch], capability: Capability = HOPPER, *, programmatic: bool | None = None
) -> aot.Compiled:
    """The last of a problem's launches."""
    operands = binaries.operands_of(problem, made)
    return _compiled(made[-1], operands, capability, capability >= HOPPER if programmatic is None else programmatic)


def _compiled(
    launch: Launch, operands: dict[str, torch.Tensor], capability: Capability, programmatic: bool
) -> aot.Compiled:
    launch = launch.programmatic() if programmatic else launch
    arguments = materialise(launch, operands, binaries.SCALARS)
    return aot.compile_launch(aot.CapturedLaunch(launch.kernel, {**arguments, **launch.options}), capability)
