"""What the compiler makes of the kernel of few rows along K, for GPUs that are not here: it spills nothing, reads both
operands 16 bytes wide, and asks for them early where launches are programmatic."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace

import pytest
import torch

from tests.kernels.test_compile_portable import compile_launch
from tests.ladder.test_compile_rungs import stride_multiplications
from tests.support.kernel_cases import blocks, ids
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import skinny
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime import aot

Capability = tuple[int, int]

HOPPER = (9, 0)
CAPABILITIES = (HOPPER, (8, 0), (8, 9), (10, 0), (12, 0))


@dataclass(frozen=True)
class Circumstance:
    """A product as far as registers depend on it. order: of c, `n` row-major, `t` column-major; gap: unused elements
    after each row of c; step: distance of neighbours in it; swapped: whether its columns are few, not its rows."""

    K: int = 4096
    order: str = "n"
    gap: int = 0
    step: int = 1
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype = torch.bfloat16
    has_beta: bool = False
    bias: str | None = None
    activation: str | None = None
    swapped: bool = False

    def problem(self, config: TileConfig) -> GemmProblem:
        M, N = (4099, config.BLOCK_N - 1) if self.swapped else (skinny.MAX_ROWS - 1, 4099)
        row, column = (self.step * N + self.gap, self.step) if self.order == "n" else (self.step, M + self.gap)
        layouts = (Layout((0, self.K, 1)), Layout((0, 1, self.K)), Layout((0, row, column)))
        epilogue = (self.has_beta, self.bias, self.activation)
        return GemmProblem(1, M, N, self.K, self.dtype, self.out_dtype, "half", *layouts, *epilogue)


PLAIN = Circumstance()
UNEVEN = replace(PLAIN, K=4160)
EVERYTHING = Circumstance(4104, "n", 0, 2, has_beta=True, bias="n", activation="gelu")
CIRCUMSTANCES = {
    "plain": PLAIN,
    "uneven": UNEVEN,
    "uneven swapped": replace(UNEVEN, order="t", swapped=True),
    "swapped": replace(PLAIN, order="t", swapped=True),
    "everything": EVERYTHING,
    "everything swapped": replace(
        EVERYTHING, order="t", dtype=torch.float16, out_dtype=torch.float32, bias="m", swapped=True
    ),
}


def compiled(
    circumstance: Circumstance, config: TileConfig, capability: Capability, *, programmatic: bool | None = None
) -> aot.Compiled:
    problem = circumstance.problem(config)
    assert skinny.illegal(problem, device_of_capability(capability), config) is None
    (launch,) = skinny.launches(problem, config)
    dtypes = {"a": problem.dtype, "b": problem.dtype, "c": problem.out_dtype, "bias": problem.out_dtype}
    return compile_launch(launch, dtypes, capability, programmatic=programmatic)


LOAD = re.compile(r"ld\.global(\S*?)(?:\.v(\d))?\.b(\d+) ")


def loads(kernel: aot.Compiled) -> Counter[tuple[bool, int]]:
    """How many loads there are of so many bytes a thread, and whether these leave the caches first."""
    found = LOAD.findall(kernel.asm["ptx"])
    return Counter(("evict_first" in how, int(words or 1) * int(bits) // 8) for how, words, bits in found)


@pytest.mark.few
@pytest.mark.parametrize("config", skinny.CONFIGS, ids=ids)
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_config(name: str, config: TileConfig) -> None:
    """On one architecture in turn. There are two steps in the code, the first and one of the loop, and where steps do
    not divide K a third, the last."""
    circumstance, (m, n, k) = CIRCUMSTANCES[name], blocks(config)
    turn = list(CIRCUMSTANCES).index(name) + skinny.CONFIGS.index(config)
    capability = CAPABILITIES[turn % len(CAPABILITIES)]
    kernel = compiled(circumstance, config, capability)
    assert kernel.spills == 0
    assert kernel.registers <= skinny.REGISTERS[n], "as many programs fit an SM as the cost model says"
    assert kernel.shared <= 4 * config.num_warps * m * n, "shared memory is for the sums of warps"
    assert k == skinny.SHARE * config.num_warps
    steps = 2 if circumstance.K % k == 0 else 3
    assert kernel.instructions["HMMA"] == steps * (n // 8) * (skinny.SHARE // 16)
    assert bool(kernel.instructions["CCTL"]) == (capability >= HOPPER), "prefetches where they come early"
    found = loads(kernel)
    streamed, other = (m, n) if circumstance.swapped else (n, m)
    vectors = [steps * skinny.SHARE * rows // (8 * 32) for rows in (streamed, other)]  # a thread's
    assert [found.pop((True, 16)), found.pop((False, 16))] == vectors
    assert bool(found) == circumstance.has_beta and not any(first for first, _ in found), "loads of other widths"


def test_it_prefetches_only_where_it_waits_for_the_launch_before() -> None:
    kernel = compiled(PLAIN, skinny.CONFIGS[0], HOPPER, programmatic=False)
    assert "CCTL" not in kernel.instructions and "ACQBULK" not in kernel.instructions
    sass = compiled(PLAIN, skinny.CONFIGS[0], HOPPER).asm["sass"]
    assert sass.index("CCTL.E.PF2") < sass.index("ACQBULK") < sass.index("LDG")


def test_offsets_multiply_in_64_bits() -> None:
    types = stride_multiplications(compiled(EVERYTHING, skinny.CONFIGS[0], HOPPER).asm["ttgir"])
    assert len(types) >= 5 and all("i64" in kind for kind in types), types


def test_products_of_a_kind_share_a_variant() -> None:
    kernels = [compiled(replace(PLAIN, K=K), skinny.CONFIGS[0], HOPPER) for K in (4096, 10240)]
    assert kernels[0].asm["ptx"] == kernels[1].asm["ptx"]
