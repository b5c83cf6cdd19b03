"""Every address that Gluon kernels on pointers read or write is that of an element: as
interpreter/kernels/test_addresses.py has it of Triton's, with their source run as `gluon_on_cpu` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support import gluon_on_cpu
from tests.support.address_recorder import Draw, handed_on, operands_of, simulated
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import fma, mma_fp64, skinny
from triton_gemm.problem import GemmProblem

DEVICE = device_of_capability((9, 0))
FEW, MANY = 12, 200  # sets of shapes and strides
Drawn = tuple[TileConfig, tuple[torch.Tensor, torch.Tensor, torch.Tensor]]


def check(
    draws: Callable[[Draw], Drawn], kernel: Any, splits: Sequence[int], module: SimpleNamespace, draw: Draw
) -> None:
    config, (a, b, c) = draws(draw)
    problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
    assert kernel.illegal(problem, DEVICE, config) is None
    launches = module.launches(problem, config, draw.choice(splits))
    with simulated() as recorder:
        operands = operands_of(recorder, problem, a, b, c)
        operands |= handed_on(recorder, launches)
        for turn, made in enumerate(launches):
            made = made.programmatic() if turn % 2 == 0 else made
            gluon_on_cpu.run(made, operands, {"alpha": 1.0, "beta": 1.0})
        recorder.check()


def of_skinny(draw: Draw) -> Drawn:
    """A few rows, or columns, and K in whole vectors."""
    config = draw.choice(skinny.CONFIGS[:2])
    sizes = [draw.randint(1, 8), draw.near(config.BLOCK_M)]
    draw.shuffle(sizes)
    return config, draw.product(torch.float16, (*sizes, 8 * draw.near(config.BLOCK_K // 8)), orders="nt")


def of_fma(draw: Draw) -> Drawn:
    """A along M and B along N, in whole vectors."""
    config = fma.CONFIGS[-1]
    sizes = 4 * draw.near(config.BLOCK_M // 4, 2), 4 * draw.near(config.BLOCK_N // 4, 2), draw.near(config.BLOCK_K, 4)
    return config, draw.product(torch.float32, sizes, orders="tn")


def of_mma_fp64(draw: Draw) -> Drawn:
    """Operands of any strides."""
    config = mma_fp64.CONFIGS[-1]
    sizes = draw.near(config.BLOCK_M, 2), draw.near(config.BLOCK_N, 2), draw.near(config.BLOCK_K, 4)
    return config, draw.product(torch.float64, sizes)


KERNELS: dict[str, Callable[[SimpleNamespace, Draw], None]] = {
    "skinny": partial(check, of_skinny, skinny, [1]),
    "fma": partial(check, of_fma, fma, [1, 1, 2, 3]),
    "mma_fp64": partial(check, of_mma_fp64, mma_fp64, [1]),
}


@pytest.mark.parametrize("seeds", [range(FEW), pytest.param(range(FEW, MANY), marks=pytest.mark.full)], ids=str)
@pytest.mark.parametrize("name", KERNELS)
def test_every_address_is_an_element_s(name: str, seeds: range) -> None:
    module = gluon_on_cpu.simulated(name)
    for seed in seeds:
        KERNELS[name](module, Draw(seed))
