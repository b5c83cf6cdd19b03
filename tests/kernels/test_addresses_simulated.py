"""Every address that Gluon kernels on pointers read or write is that of an element: as
interpreter/kernels/test_addresses.py has it of Triton's, with their source run as `gluon_on_cpu` does."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch

from tests.support import gluon_on_cpu
from tests.support.address_recorder import Draw, handed_on, operands_of, simulated
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import fma, mma_fp64, skinny
from triton_gemm.problem import GemmProblem

DEVICE = device_of_capability((9, 0))
FEW, MANY = 12, 200  # sets of shapes and strides


def run(module: SimpleNamespace, problem: GemmProblem, config: object, parts: int, *product: torch.Tensor) -> None:
    launches = module.launches(problem, config, parts)
    with simulated() as recorder:
        operands = operands_of(recorder, problem, *product)
        operands |= handed_on(recorder, launches)
        for turn, made in enumerate(launches):
            made = made.programmatic() if turn % 2 == 0 else made
            gluon_on_cpu.run(made, operands, {"alpha": 1.0, "beta": 1.0})
        recorder.check()


def of_skinny(module: SimpleNamespace, draw: Draw) -> None:
    """A few rows, or columns, and K in whole vectors."""
    config = draw.choice(skinny.CONFIGS[:2])
    sizes = [draw.randint(1, 8), draw.near(config.BLOCK_M)]
    draw.shuffle(sizes)
    a, b, c = draw.product(torch.float16, (*sizes, 8 * draw.near(config.BLOCK_K // 8)), orders="nt")
    problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
    assert skinny.illegal(problem, DEVICE, config) is None
    run(module, problem, config, 1, a, b, c)


def of_fma(module: SimpleNamespace, draw: Draw) -> None:
    """A along M and B along N, in whole vectors."""
    config = fma.CONFIGS[-1]
    sizes = 4 * draw.near(config.BLOCK_M // 4, 2), 4 * draw.near(config.BLOCK_N // 4, 2), draw.near(config.BLOCK_K, 4)
    a, b, c = draw.product(torch.float32, sizes, orders="tn")
    problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
    assert fma.illegal(problem, DEVICE, config) is None
    run(module, problem, config, draw.choice([1, 1, 2, 3]), a, b, c)


def of_mma_fp64(module: SimpleNamespace, draw: Draw) -> None:
    """Operands of any strides."""
    config = mma_fp64.CONFIGS[-1]
    sizes = draw.near(config.BLOCK_M, 2), draw.near(config.BLOCK_N, 2), draw.near(config.BLOCK_K, 4)
    a, b, c = draw.product(torch.float64, sizes)
    problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
    assert mma_fp64.illegal(problem, DEVICE, config) is None
    run(module, problem, config, 1, a, b, c)


KERNELS: dict[str, Callable[[SimpleNamespace, Draw], None]] = {"skinny": of_skinny, "fma": of_fma}
KERNELS["mma_fp64"] = of_mma_fp64


@pytest.mark.parametrize("name", KERNELS)
def test_every_address_is_an_element_s(name: str) -> None:
    module = gluon_on_cpu.simulated(name)
    for seed in range(FEW):
        KERNELS[name](module, Draw(seed))


@pytest.mark.full
@pytest.mark.parametrize("name", KERNELS)
def test_every_address_of_many_sets(name: str) -> None:
    module = gluon_on_cpu.simulated(name)
    for seed in range(FEW, MANY):
        KERNELS[name](module, Draw(seed))
