"""What the kernel of outer products computes, without a GPU: its source runs on the CPU (`gluon_on_cpu`)."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor

from tests.support.kernel_cases import CIRCUMSTANCES, Case, Operands, blocks, circumstance, ids
from tests.support.simulated_plans import CPU, Launched
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import fma
from triton_gemm.kernels.launch import Launch
from triton_gemm.kernels.repack import repacked
from triton_gemm.problem import GemmProblem, Layout

KERNEL = "fma"
DEVICE = device_of_capability((8, 0))
FP32 = {"dtype": torch.float32, "precision": "ieee"}
ORDERS = ("nn", "nt", "tn", "tt")
SPLITS = (1, 3, -3)  # parts of K; negative: whose programs take turns


def simulation(
    problem: GemmProblem, config: TileConfig, split_k: int, module: SimpleNamespace, swapped: bool = False
) -> Launched:
    """Over copies of what the kernel cannot read."""

    def launches(problem: GemmProblem) -> tuple[Launch, ...]:
        assert fma.illegal(problem, DEVICE, config, split_k) is None
        module.launches.__globals__["LARGEST_WORKSPACE"] = 0 if split_k < 0 else 1 << 40
        (launch,) = module.launches(problem, config, abs(split_k))
        assert launch.arguments["IN_TURN"] is (split_k < 0)
        return (launch,)

    def readable(problem: GemmProblem, a: Tensor, b: Tensor) -> tuple[GemmProblem, Tensor, Tensor]:
        names = fma.unreadable(problem)
        problem = repacked(problem, names)
        return problem, copied(a, problem.a) if "a" in names else a, copied(b, problem.b) if "b" in names else b

    return Launched(problem, launches, swapped, readable)


def copied(x: Tensor, layout: Layout) -> Tensor:
    """x [(batch,) rows, columns] as `repack` lays it."""
    step, row, column = layout.strides
    batch, rows, columns = (1,) * (3 - x.dim()) + tuple(x.shape)
    batch = batch if step else 1
    buffer = torch.full((batch * (step or max(row * rows, column * columns)),), torch.nan)
    buffer.as_strided((batch, rows, columns), (step, row, column)).copy_(x if step else x[:1] if x.dim() == 3 else x)
    return buffer


def check(
    case: Case, config: TileConfig, split_k: int, module: SimpleNamespace, times: int = 1, *, swapped: bool = False
) -> None:
    operands = Operands(case, CPU)
    if operands.problem.has_beta and operands.problem.activation == "gelu":
        return  # illegal
    operands.check(simulation(operands.problem, config, split_k, module, swapped), abs(split_k), times)


@pytest.mark.few
@pytest.mark.parametrize("config", fma.CONFIGS, ids=ids)
@pytest.mark.parametrize("split_k", SPLITS)
def test_every_config_and_split(kernel: SimpleNamespace, split_k: int, config: TileConfig) -> None:
    """Layouts in turn, partial and whole tiles, less than a tile, and parts without a k-tile."""
    m, n, k = blocks(config)
    sizes = [(m + 9, 2 * n + 7, 5 * k + 3), (2 * m, n, 6 * k), (3, 5, 2 * k), (1, 1, 1), (m + 4, n + 4, k)]
    for turn, size in enumerate(sizes):
        orders = ORDERS[turn % 4]
        check(Case(size, orders + "n", integers=True, **FP32), config, split_k, kernel, times=2)
        check(Case(size, orders + "n", pad=1, **FP32), config, split_k, kernel, swapped=turn % 2 == 1)


@pytest.mark.few
@pytest.mark.parametrize("name", [name for name, change in CIRCUMSTANCES.items() if "dtype" not in change])
@pytest.mark.parametrize("split_k", SPLITS)
def test_every_circumstance(kernel: SimpleNamespace, split_k: int, name: str) -> None:
    config = fma.CONFIGS[list(CIRCUMSTANCES).index(name) % len(fma.CONFIGS)]
    m, n, k = blocks(config)
    case = circumstance(name, (m + 5, n + 8, 4 * k + 3), **FP32)
    check(case, config, split_k, kernel, swapped=case.orders[2] == "t")


def test_a_pitch_that_no_tile_spans_in_32_bits_is_refused() -> None:
    far = Layout((0, 1, 2**28))
    square = GemmProblem(1, 64, 64, 64, torch.float32, torch.float32, "ieee", far, far.transposed, far.transposed)
    assert "spans more than" in str(fma.illegal(square, DEVICE, fma.CONFIGS[0]))
