"""What the compiler makes of the GEMV, without a GPU: it spills nothing and reads weights 16 bytes wide."""

from __future__ import annotations

import re
from typing import Any

import pytest
import torch

from tests.ladder.test_compile_rungs import loads_of_c, stride_multiplications
from tests.support.compiled_kernels import CAPABILITIES, HOPPER, Capability, compiled, product
from tests.support.tiers import one
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import gemv
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import aot

ALIGNED = (4096, 8192)  # N, K: whole tiles, all strides divisible by 16
ODD = (4099, 8197)  # the compiler may assume nothing of any stride


def problem_of(M: int, layout: str, size: tuple[int, int] = ALIGNED, pitch: int = 0, **how: Any) -> GemmProblem:
    """The rows of A and B are `pitch` elements longer than a multiple of 16, if that is given."""
    N, K = size
    gaps = [-columns % 16 + pitch if pitch else 0 for columns in (K, K if layout == "nt" else N)]
    return product((M, N, K), f"{layout}n", gaps=(*gaps, 0), **how)


def kernel_of(
    problem: GemmProblem,
    config: TileConfig | None = None,
    split_k: int | None = None,
    capability: Capability = HOPPER,
    reads: int | None = None,
) -> aot.Compiled:
    """In the default configuration, or another. It spills nothing, and a thread reads so many bytes of B at once."""
    default, parts = gemv.default(problem, device_of_capability(capability))
    config = config or default
    kernel = compiled(problem, gemv.launches(problem, config, split_k or parts), capability)
    assert kernel.spills == 0, config
    assert reads is None or reads_of_weights(kernel) - {0} == {reads}, config
    return kernel


def reads_of_weights(kernel: aot.Compiled) -> set[int]:
    """The bytes that a thread reads of B at once: by loads that leave the caches first, or into shared memory."""
    staged = re.findall(r"cp\.async\.c[ag]\.shared\.global.*?, 0x([0-9a-f]+)", kernel.asm["ptx"])
    loads = re.findall(r"ld\.global\.\S*evict_first\S*?(?:\.v(\d))?\.b(\d+) ", kernel.asm["ptx"])
    return {int(words or 1) * int(bits) // 8 for words, bits in loads} | {
        max(int(size, 16) for size in staged or ["0"])
    }


def reads_of_a(kernel: aot.Compiled) -> set[int]:
    """The bytes that a thread reads at once of what is no weight, in bf16 or fp32: A, where nothing else is read."""
    loads = re.findall(
        r"ld\.global(?:\.\w+)*?(?:\.v(\d))?\.b(\d+) ", kernel.asm["ptx"].replace(".L1::evict_first", "?")
    )
    return {int(words or 1) * int(bits) // 8 for words, bits in loads}


def legal(problem: GemmProblem) -> list[TileConfig]:
    return [c for c in gemv.CONFIGS if gemv.illegal(problem, device_of_capability(HOPPER), c) is None]


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_every_tile_with_four_rows(layout: str) -> None:
    problem = problem_of(4, layout)
    configs = legal(problem)
    assert len(configs) >= 6
    for config in configs:
        kernel_of(problem, config, 1, reads=16)


# Sizes, pitches and dtypes, and the bytes that are read at once. Multiples of 16 bytes are enough, not of the 16
# elements that Triton looks for; also with no whole tiles along N or K.
WIDTHS: dict[str, tuple[dict[str, Any], int]] = {
    "fp16": ({"dtype": torch.float16}, 16),
    "fp32": ({"dtype": torch.float32}, 16),
    "rows of 16 bytes": ({"pitch": 8}, 16),
    "rows of 16 bytes, no whole tiles": ({"pitch": 8, "size": (4104, 8200)}, 16),
    "rows of 16 bytes, fp32": ({"pitch": 4, "dtype": torch.float32}, 16),
    "rows of 16 bytes, fp32, no whole tiles": ({"pitch": 4, "dtype": torch.float32, "size": (4100, 8196)}, 16),
    "rows of 8 bytes": ({"pitch": 4}, 8),
    "rows of 4 bytes": ({"pitch": 2}, 4),
}


@pytest.mark.few(shows=lambda name, layout: {name, layout})
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("name", WIDTHS)
def test_weights_are_read_as_wide_as_they_lie(name: str, layout: str) -> None:
    how, nbytes = WIDTHS[name]
    for M in (1, 4):
        problem = problem_of(M, layout, **how)
        assert "pitch" not in how or max(problem.b.strides) % 16 == how["pitch"]
        kernel = kernel_of(problem, reads=nbytes)
        if layout == "nt" and name.startswith("rows of 16 bytes"):
            assert reads_of_a(kernel) == {16}


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_default_with_all_of_the_epilogue(capability: Capability, layout: str) -> None:
    for M, split_k in ((1, 1), (3, 6)):
        problem = problem_of(M, layout, has_beta=True, bias="n", activation="gelu")
        kernel_of(problem, None, split_k, capability, reads=16)


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_odd_sizes_spill_nothing(layout: str) -> None:
    for M in (1, 4):
        problem = problem_of(M, layout, ODD)
        configs = legal(problem)
        for config in (None, configs[0], configs[-1]):
            kernel_of(problem, config, 1)


def main_loop(ptx: str) -> str:
    """From the one label to which code after it branches back, to that branch."""
    ((_, loop),) = re.findall(r"^(\$\w+):(.*?)\bbra(?:\.uni)?\s+\1;", ptx, re.MULTILINE | re.DOTALL)
    return loop


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_sums_stay_in_their_thread(layout: str) -> None:
    """In the loop no number passes between threads by a shuffle: LANES_K and VECTOR_K are the layout's."""
    for M in (1, 2):
        problem = problem_of(M, layout)
        for config in (None, legal(problem)[-1]):
            loop = main_loop(kernel_of(problem, config, 1).asm["ptx"])
            assert "fma.rn.f32" in loop
            assert "shfl" not in loop, config


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_offsets_multiply_in_64_bits(layout: str) -> None:
    problem = problem_of(3, layout, ODD, has_beta=True)
    types = stride_multiplications(kernel_of(problem, split_k=2).asm["ttir"])
    assert len(types) >= 5 and all("i64" in kind for kind in types), types


@pytest.mark.parametrize("has_beta", [False, True])
def test_c_is_read_only_for_beta(has_beta: bool) -> None:
    kernel = kernel_of(problem_of(2, "nt", has_beta=has_beta), split_k=1)
    assert loads_of_c(kernel.asm["ttir"]) == has_beta
