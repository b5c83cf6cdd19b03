"""What the compiler makes of each rung, for GPUs that are not here: that it fits, spills nothing, keeps its claims."""

import pytest
import torch

from triton_gemm import aot
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, GemmConfig
from triton_gemm.device import SHARED_MEMORY, device_of_capability
from triton_gemm.ladder import LADDER, Rung

Capability = tuple[int, int]

RUNGS = {rung.id: rung for rung in LADDER}
ALIGNED = (512, 768, 1024)  # all strides divisible by 16: wide loads, TMA
ODD = (509, 767, 1021)  # the compiler may assume nothing of any stride


def arch(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def default(rung: Rung, capability: Capability) -> GemmConfig:
    return rung.legal_configs(device_of_capability(capability), rung.dtypes[0])[0]


def compiled(
    rung: Rung, capability: Capability, config: GemmConfig, *, dtype=None, size=ALIGNED, **options
) -> list[aot.Compiled]:
    """What a launch of `rung` compiles to; the kernel that multiplies is the last."""
    return aot.compile_call(rung.launch, size, dtype or rung.dtypes[0], capability, config=config, **options)


def assert_fits(rung: Rung, capability: Capability, config: GemmConfig, **options: object) -> aot.Compiled:
    """Within the registers and shared memory of the GPU and of the legality predicate; returns the GEMM's kernel."""
    kernels = compiled(rung, capability, config, **options)
    for kernel in kernels:
        assert kernel.spills == 0, f"{kernel.name} spills"
        assert kernel.registers <= MAX_REGISTERS_PER_THREAD
    gemm = kernels[-1]
    dtype = options.get("dtype") or rung.dtypes[0]
    out_dtype = options.get("out_dtype") or dtype
    promised = config.shared_memory(dtype.itemsize, out_dtype.itemsize if rung.stages_output else 0)
    assert gemm.shared <= SHARED_MEMORY[capability], "does not fit the GPU"
    assert gemm.shared <= promised, "needs more shared memory than GemmConfig.shared_memory says"
    return gemm


@pytest.mark.parametrize(
    ("rung", "capability", "config"),
    [
        pytest.param(rung, capability, config, id=f"{rung.id}-{arch(capability)}-{config}".replace(" ", "-"))
        for rung in LADDER
        for capability in rung.capabilities
        for config in rung.legal_configs(device_of_capability(capability), rung.dtypes[0])
    ],
)
def test_every_config(rung: Rung, capability: Capability, config: GemmConfig) -> None:
    gemm = assert_fits(rung, capability, config)
    missing = [text for text in rung.instructions[capability] if text not in gemm.asm["sass"]]
    assert not missing, f"claimed and not in the SASS: {missing}"


DEFAULTS = [
    pytest.param(rung, capability, id=f"{rung.id}-{arch(capability)}")
    for rung in LADDER
    for capability in rung.capabilities
]
ON_HOPPER = [pytest.param(rung, (9, 0), id=rung.id) for rung in LADDER]


@pytest.mark.parametrize(("rung", "capability"), DEFAULTS)
def test_beta(rung: Rung, capability: Capability) -> None:
    assert_fits(rung, capability, default(rung, capability), alpha=0.5, beta=2.0)


@pytest.mark.parametrize(("rung", "capability"), [p for p in DEFAULTS if "tma" not in p.values[0].launch.__module__])
def test_odd_sizes(rung: Rung, capability: Capability) -> None:
    assert_fits(rung, capability, default(rung, capability), size=ODD)
