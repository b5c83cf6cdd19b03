"""What the compiler makes of the kernel of few rows along K, for GPUs that are not here: it spills nothing, reads both
operands 16 bytes wide, and asks for them early where launches are programmatic."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

from tests.ladder.test_compile_rungs import stride_multiplications
from tests.support.compiled_kernels import CAPABILITIES, HOPPER, Capability, compiled, product
from tests.support.kernel_cases import blocks, ids
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import skinny
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import aot

PLAIN: dict[str, object] = {"K": 4096}
EVERYTHING: dict[str, object] = {"K": 4104, "step": 2, "has_beta": True, "bias": "n", "activation": "gelu"}
FP16_TO_FP32 = {"dtype": torch.float16, "out_dtype": torch.float32}
# K, the distance of neighbours in C, the epilogue, and whether columns are few, not rows.
CIRCUMSTANCES: dict[str, dict[str, object]] = {
    "plain": PLAIN,
    "uneven": {"K": 4160},
    "uneven swapped": {"K": 4160, "swapped": True},
    "swapped": {**PLAIN, "swapped": True},
    "everything": EVERYTHING,
    "everything swapped": {**EVERYTHING, **FP16_TO_FP32, "bias": "m", "swapped": True},
}


def problem_of(config: TileConfig, *, K: int, step: int = 1, swapped: bool = False, **how: object) -> GemmProblem:
    size = (4099, config.BLOCK_N - 1, K) if swapped else (skinny.MAX_ROWS - 1, 4099, K)
    return product(size, "ntt" if swapped else "ntn", steps=(1, 1, step), **how)


def compiled_of(
    how: dict[str, object], config: TileConfig, capability: Capability, *, programmatic: bool | None = None
) -> aot.Compiled:
    problem = problem_of(config, **how)
    assert skinny.illegal(problem, device_of_capability(capability), config) is None
    return compiled(problem, skinny.launches(problem, config), capability, programmatic=programmatic)


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
    kernel = compiled_of(circumstance, config, capability)
    assert kernel.spills == 0
    assert kernel.registers <= skinny.REGISTERS[n], "as many programs fit an SM as the cost model says"
    assert kernel.shared <= 4 * config.num_warps * m * n, "shared memory is for the sums of warps"
    assert k == skinny.SHARE * config.num_warps
    steps = 2 if circumstance["K"] % k == 0 else 3
    assert kernel.instructions["HMMA"] == steps * (n // 8) * (skinny.SHARE // 16)
    assert bool(kernel.instructions["CCTL"]) == (capability >= HOPPER), "prefetches where they come early"
    found = loads(kernel)
    streamed, other = (m, n) if "swapped" in circumstance else (n, m)
    vectors = [steps * skinny.SHARE * rows // (8 * 32) for rows in (streamed, other)]  # a thread's
    assert [found.pop((True, 16)), found.pop((False, 16))] == vectors
    assert bool(found) == ("has_beta" in circumstance) and not any(first for first, _ in found), "loads of other widths"


def test_it_prefetches_only_where_it_waits_for_the_launch_before() -> None:
    kernel = compiled_of(PLAIN, skinny.CONFIGS[0], HOPPER, programmatic=False)
    assert "CCTL" not in kernel.instructions and "ACQBULK" not in kernel.instructions
    sass = compiled_of(PLAIN, skinny.CONFIGS[0], HOPPER).asm["sass"]
    assert sass.index("CCTL.E.PF2") < sass.index("ACQBULK") < sass.index("LDG")


def test_offsets_multiply_in_64_bits() -> None:
    types = stride_multiplications(compiled_of(EVERYTHING, skinny.CONFIGS[0], HOPPER).asm["ttgir"])
    assert len(types) >= 5 and all("i64" in kind for kind in types), types


def test_products_of_a_kind_share_a_variant() -> None:
    kernels = [compiled_of({"K": K}, skinny.CONFIGS[0], HOPPER) for K in (4096, 10240)]
    assert kernels[0].asm["ptx"] == kernels[1].asm["ptx"]
