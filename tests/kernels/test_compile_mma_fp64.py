"""What the compiler makes of the kernel of fp64's `mma`, for a GPU that is not here."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch

from tests.ladder.test_compile_rungs import main_loop
from tests.support.compiled_kernels import compiled, product
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import mma_fp64
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import aot

DEVICE = device_of_capability((9, 0))
ORDERS = ("nn", "nt", "tn", "tt")


def problem(orders: str = "nn", odd: int = 0, step: int = 1) -> GemmProblem:
    """Sizes less `odd`, in rows with so much unused after them; step: distance of neighbours."""
    size = (1024 - odd, 2048 - odd, 4096 - odd)
    return product(size, orders + "n", steps=(step,) * 3, gaps=(odd,) * 3, dtype=torch.float64)


CIRCUMSTANCES = {
    **{orders: problem(orders) for orders in ORDERS},
    **{f"odd {orders}": problem(orders, 1) for orders in ORDERS},
    "steps": problem(step=2),
    "beta": replace(problem(), has_beta=True),
    "gelu": replace(problem("nt"), bias="n", activation="gelu"),
    "everything": replace(problem("tt"), has_beta=True, bias="m", activation="gelu_tanh"),
    "residual": replace(problem("nt"), has_beta=True, residual=True, bias="n", activation="silu"),
    "odd gelu": replace(problem("tn", 1), has_beta=True, bias="m", activation="gelu"),
    "odd everything": replace(problem("nn", 1), has_beta=True, bias="n", activation="silu"),
}


def compiled_of(name: str, config: TileConfig) -> aot.Compiled:
    return compiled(CIRCUMSTANCES[name], mma_fp64.launches(CIRCUMSTANCES[name], config))


@pytest.mark.few(shows=lambda name, config: {config, name})
@pytest.mark.parametrize(
    ("name", "config"),
    [
        pytest.param(name, config, id=f"{name}-{config}".replace(" ", "-"))
        for name, of in CIRCUMSTANCES.items()
        for config in mma_fp64.CONFIGS
        if mma_fp64.illegal(of, DEVICE, config) is None
    ],
)
def test_nothing_is_spilled(name: str, config: TileConfig) -> None:
    gemm = compiled_of(name, config)
    assert gemm.spills == 0
    assert gemm.shared <= config.shared_memory(8) <= DEVICE.shared_memory


def test_every_circumstance_has_a_configuration() -> None:
    for name, of in CIRCUMSTANCES.items():
        assert any(mma_fp64.illegal(of, DEVICE, config) is None for config in mma_fp64.CONFIGS), name


@pytest.mark.few
@pytest.mark.parametrize("orders", ORDERS)
@pytest.mark.parametrize("config", mma_fp64.CONFIGS, ids=lambda c: str(c).replace(" ", "-"))
def test_the_main_loop_is_the_largest_mma_and_moves_of_16_bytes(config: TileConfig, orders: str) -> None:
    """Of which a lane loads 8 bytes of each row and column of its warp, once."""
    m, n, k, warps = config.BLOCK_M, config.BLOCK_N, config.BLOCK_K, config.num_warps
    along_m = mma_fp64.warps_along_m(m, n, warps)
    loop = main_loop(compiled_of(orders, config).asm["sass"], "DMMA")
    opcodes = Counter(opcode for opcode, operands in loop if "[RZ]" not in operands)  # ptxas's own `LDS RZ, [RZ]`
    assert opcodes["DMMA.16x8x4"] == m * n * k // (16 * 8 * 4 * warps)
    loads = {opcode: count for opcode, count in opcodes.items() if opcode.startswith(("LDS", "LDL", "STL"))}
    assert loads == {"LDS.64": (m // along_m + n * along_m // warps) // 8 * k // 4}
    copies = {opcode: count for opcode, count in opcodes.items() if opcode.startswith("LDGSTS")}
    assert [*copies.values()] == [(m + n) * k * 8 // (16 * 32 * warps)]
    assert all(opcode.endswith(".128") for opcode in copies)
    assert opcodes["BAR.SYNC.DEFER_BLOCKING"] <= 2
