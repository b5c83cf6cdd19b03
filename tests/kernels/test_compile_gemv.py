"""What the compiler makes of the GEMV, without a GPU: it spills nothing and reads weights 16 bytes wide."""

import re

import pytest
import torch

from tests.ladder.test_compile_rungs import loads_of_c, stride_multiplications
from tests.support.compiled_kernels import CAPABILITIES, HOPPER, Capability, compile_launch
from tests.support.tiers import one
from triton_gemm.config import TileConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels import gemv
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import aot

ALIGNED = (4096, 8192)  # N, K: whole tiles, all strides divisible by 16
ODD = (4099, 8197)  # the compiler may assume nothing of any stride


def arch(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def planned(
    M: int, size: tuple[int, int], layout: str, dtype: torch.dtype = torch.bfloat16, pitch: int = 0, **options: object
) -> tuple[GemmProblem, dict[str, torch.Tensor]]:
    """A problem, and operands for it that do not exist, the rows of A and B `pitch` elements longer than a multiple of
    16 if that is given; N bias values if there is a bias."""
    N, K = size

    def matrix(rows: int, columns: int) -> torch.Tensor:
        length = -(-columns // 16) * 16 + pitch if pitch else columns
        return torch.empty(rows, length, dtype=dtype, device="meta")[:, :columns]

    a = matrix(M, K)
    b = matrix(N, K).T if layout == "nt" else matrix(K, N)
    c = a.new_empty(M, N)
    bias = torch.empty(N, device="meta")
    return GemmProblem.of(a, b, c, **options), {"a": a, "b": b, "c": c, "bias": bias}


def compiled(
    problem: GemmProblem,
    operands: dict[str, torch.Tensor],
    config: TileConfig,
    split_k: int = 1,
    capability: Capability = HOPPER,
) -> aot.Compiled:
    """As a plan launches it, programmatically from Hopper on."""
    (launch,) = gemv.launches(problem, config, split_k)
    dtypes = {name: x.dtype for name, x in operands.items()}
    return compile_launch(launch, {**dtypes, "workspace": torch.float32, "counters": torch.int32}, capability)


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


def legal(problem: GemmProblem, capability: Capability) -> list[TileConfig]:
    device = device_of_capability(capability)
    return [config for config in gemv.CONFIGS if gemv.illegal(problem, device, config) is None]


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_every_tile_with_four_rows(layout: str) -> None:
    problem, operands = planned(4, ALIGNED, layout)
    configs = legal(problem, HOPPER)
    assert len(configs) >= 6
    for config in configs:
        kernel = compiled(problem, operands, config)
        assert kernel.spills == 0, config
        assert reads_of_weights(kernel) - {0} == {16}, config


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_pitches_and_row_starts_of_16_bytes_are_enough(layout: str, dtype: torch.dtype) -> None:
    """Multiples of 16 bytes, not of the 16 elements that Triton looks for; also with no whole tiles along N or K."""
    vector = 16 // dtype.itemsize
    for M in (1, 4):
        for sizes in (ALIGNED, (4096 + vector, 8192 + vector)):
            problem, operands = planned(M, sizes, layout, dtype, pitch=vector)
            assert all(layout.strides[1:].count(1) == 1 for layout in (problem.a, problem.b))
            assert max(problem.b.strides) % 16 == vector
            config, split_k = gemv.default(problem, device_of_capability(HOPPER))
            kernel = compiled(problem, operands, config, split_k)
            assert kernel.spills == 0, config
            assert reads_of_weights(kernel) - {0} == {16}, config
            if layout == "nt":
                assert reads_of_a(kernel) == {16}, config


@pytest.mark.few
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("pitch", [4, 2])
def test_narrower_vectors(pitch: int, layout: str) -> None:
    for M in (1, 4):
        problem, operands = planned(M, ALIGNED, layout, pitch=pitch)
        config, split_k = gemv.default(problem, device_of_capability(HOPPER))
        kernel = compiled(problem, operands, config, split_k)
        assert kernel.spills == 0, config
        assert reads_of_weights(kernel) - {0} == {2 * pitch}, config


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("capability", CAPABILITIES, ids=arch)
def test_the_default_with_all_of_the_epilogue(capability: Capability, layout: str) -> None:
    for M, split_k in ((1, 1), (3, 6)):
        problem, operands = planned(M, ALIGNED, layout, has_beta=True, bias="n", activation="gelu")
        config, _ = gemv.default(problem, device_of_capability(capability))
        kernel = compiled(problem, operands, config, split_k, capability)
        assert kernel.spills == 0, config
        assert reads_of_weights(kernel) - {0} == {16}, config


@pytest.mark.few
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32], ids=["float16", "float32"])
def test_other_dtypes(dtype: torch.dtype, layout: str) -> None:
    for M in (1, 4):
        problem, operands = planned(M, ALIGNED, layout, dtype)
        config, _ = gemv.default(problem, device_of_capability(HOPPER))
        kernel = compiled(problem, operands, config)
        assert kernel.spills == 0, config
        assert reads_of_weights(kernel) - {0} == {16}, config


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_odd_sizes_spill_nothing(layout: str) -> None:
    for M in (1, 4):
        problem, operands = planned(M, ODD, layout)
        configs = legal(problem, HOPPER)
        for config in (gemv.default(problem, device_of_capability(HOPPER))[0], configs[0], configs[-1]):
            assert compiled(problem, operands, config).spills == 0, config


def main_loop(ptx: str) -> str:
    """From the one label to which code after it branches back, to that branch."""
    ((_, loop),) = re.findall(r"^(\$\w+):(.*?)\bbra(?:\.uni)?\s+\1;", ptx, re.MULTILINE | re.DOTALL)
    return loop


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_sums_stay_in_their_thread(layout: str) -> None:
    """In the loop no number passes between threads by a shuffle: LANES_K and VECTOR_K are the layout's."""
    for M in (1, 2):
        problem, operands = planned(M, ALIGNED, layout)
        for config in (gemv.default(problem, device_of_capability(HOPPER))[0], legal(problem, HOPPER)[-1]):
            loop = main_loop(compiled(problem, operands, config).asm["ptx"])
            assert "fma.rn.f32" in loop
            assert "shfl" not in loop, config


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_offsets_multiply_in_64_bits(layout: str) -> None:
    problem, operands = planned(3, ODD, layout, has_beta=True)
    config, _ = gemv.default(problem, device_of_capability(HOPPER))
    types = stride_multiplications(compiled(problem, operands, config, split_k=2).asm["ttir"])
    assert len(types) >= 5 and all("i64" in kind for kind in types), types


@pytest.mark.parametrize("has_beta", [False, True])
def test_c_is_read_only_for_beta(has_beta: bool) -> None:
    problem, operands = planned(2, ALIGNED, "nt", has_beta=has_beta)
    config, _ = gemv.default(problem, device_of_capability(HOPPER))
    assert loads_of_c(compiled(problem, operands, config).asm["ttir"]) == has_beta
