"""What the compiler makes of the warp-specialised kernel, without a GPU: it fits, spills nothing, and moves by TMA."""

from __future__ import annotations

import re
from collections.abc import Hashable
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch

from tests.support import compiled_kernels
from tests.support.compiled_kernels import product
from tests.support.kernel_cases import ids
from triton_gemm.arithmetic import EMULATED
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.repack import repacked
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout
from triton_gemm.runtime import aot

CAPABILITY = (9, 0)
HOPPER = device_of_capability(CAPABILITY)
CONFIGS = warp_specialised.CONFIGS
M, N, K = 1024, 1280, 2048
SCHEDULES = {"whole": Schedule(HOPPER.num_sms), "split": Schedule(HOPPER.num_sms, split_tiles=5, split_k=3)}
PARTS_IN_TURN = Schedule(HOPPER.num_sms, split_k=4)


def of(orders: str = "nnn", gap: int = 0, **how: Any) -> GemmProblem:
    """A product as far as the compiled kernel depends on it. gap: unused elements after each row (or column) of c."""
    problem = product((M, N, K), orders, gaps=(0, 0, gap), **how)
    return repacked(problem, ("a", "b")) if problem.precision in EMULATED else problem


def legal(problem: GemmProblem) -> list[TileConfig]:
    return [c for c in CONFIGS if warp_specialised.illegal(problem, HOPPER, c) is None]


def compiled(problem: GemmProblem, config: TileConfig, schedule: str | Schedule) -> aot.Compiled:
    """What the launch, programmatic as plans make it, compiles to; fails unless it fits the GPU and spills nothing."""
    schedule = SCHEDULES[schedule] if isinstance(schedule, str) else schedule
    kernel = compiled_kernels.compiled(problem, warp_specialised.launches(problem, config, schedule))
    assert kernel.spills == 0, f"{kernel.spills} spills"
    assert kernel.registers <= MAX_REGISTERS_PER_THREAD
    assert kernel.shared <= warp_specialised.shared_memory(problem, config), "more shared memory than it says"
    assert kernel.shared <= SHARED_MEMORY[CAPABILITY], "does not fit the GPU"
    return kernel


def accesses(kernel: aot.Compiled, kind: str) -> set[str]:
    """The ways in which global memory is loaded (`ld`) or stored (`st`) past TMA: `cg.v4.b32`, ..."""
    return set(re.findall(rf"\b{kind}\.global\.([\w.:]+)", kernel.asm["ptx"]))


SPLITTING = {"ld": {"cg.v4.b32", "gpu.acquire.b32"}, "st": {"v4.b32", "b32"}}  # partial sums and counters


def assert_claims(kernel: aot.Compiled, problem: GemmProblem, schedule: str) -> None:
    """Tensor cores by `wgmma`, operands by TMA, registers moved to who multiplies; C by TMA where TMA can store it. The
    first k-tiles are prefetched, and memory is touched only once the grid before has ended."""
    for instruction in ("HGMMA", "UTMALDG", "USETMAXREG", "CCTL", "ACQBULK"):
        assert kernel.instructions[instruction], instruction
    assert bool(kernel.instructions["UTMASTG"]) == warp_specialised.c_by_tma(problem)
    loads, stores = accesses(kernel, "ld"), accesses(kernel, "st")
    if schedule == "split":
        assert SPLITTING["ld"] <= loads and SPLITTING["st"] <= stores, "partial sums move by less than 16 bytes"
        loads, stores = loads - SPLITTING["ld"], stores - SPLITTING["st"]
    past_tma = problem.has_beta and not warp_specialised.c_by_tma(problem)
    assert bool(loads) == bool(past_tma or problem.bias), loads
    if schedule != "split" or problem.out_dtype != torch.float32:  # whose stores look like those of counters
        assert bool(stores) != warp_specialised.c_by_tma(problem), stores


def in_turn(config: TileConfig, turn: int) -> str:
    return list(SCHEDULES)[turn % 2] if warp_specialised.can_split_k(config) else "whole"


def legal_cases(circumstances: dict[str, GemmProblem], configs: list[TileConfig]) -> list[Any]:
    """(name, config): every circumstance in all of its legal configurations."""
    return [
        pytest.param(name, config, id=f"{name}-{ids(config)}")
        for name, problem in circumstances.items()
        for config in configs
        if warp_specialised.illegal(problem, HOPPER, config) is None
    ]


def every_shape(name: str, config: TileConfig) -> set[Hashable]:
    """What the fast tier shows: every circumstance and every number of warps."""
    return {name, ("warps", config.num_warps)}


@pytest.mark.few(shows=lambda orders, config: {orders, config.num_warps, ("tail", config.tail_n > 0)})
@pytest.mark.parametrize("config", CONFIGS, ids=ids)
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
def test_every_config_and_layout(orders: str, config: TileConfig) -> None:
    """Whole and split in turn."""
    schedule = in_turn(config, CONFIGS.index(config) + ("nn", "nt", "tn", "tt").index(orders))
    problem = of(orders + "n")
    assert config in legal(problem), "no config may be there for nothing"
    assert_claims(compiled(problem, config, schedule), problem, schedule)


FP32_CIRCUMSTANCES = {
    "tf32": of("ntn", dtype=torch.float32, precision="tf32"),
    "tf32-a-by-registers": of("ttt", dtype=torch.float32, precision="tf32"),
    **{mode: of("nnn", dtype=torch.float32, precision=mode) for mode in ("tf32x3", "bf16x6")},
}


@pytest.mark.few(shows=every_shape)
@pytest.mark.parametrize(("name", "config"), legal_cases(FP32_CIRCUMSTANCES, warp_specialised.configs(torch.float32)))
def test_every_config_for_fp32(name: str, config: TileConfig) -> None:
    """Whole and split in turn. No product waits for the one before: ptxas puts waits where it finds registers written
    under one."""
    problem = FP32_CIRCUMSTANCES[name]
    turn = warp_specialised.configs(torch.float32).index(config) + list(FP32_CIRCUMSTANCES).index(name)
    schedule = in_turn(config, turn)
    kernel = compiled(problem, config, schedule)
    assert_claims(kernel, problem, schedule)
    consumers = config.num_warps // 4
    waits = re.findall(r"WARPGROUP\.DEPBAR", kernel.asm["sass"])
    assert len(waits) <= consumers * (2 if "tf32" in name and "x3" not in name else 4)
    assert f".f32.{'bf16.bf16' if 'bf16' in name else 'tf32.tf32'}" in kernel.asm["ptx"]


GELU = partial(of, "ntn", out_dtype=torch.bfloat16, bias="n", activation="gelu")
BYTE_CIRCUMSTANCES = {
    "fp8": of("ntn", dtype=torch.float8_e4m3fn, out_dtype=torch.bfloat16, precision="fp8", scales="rows"),
    "fp8-blocks": of("ntn", dtype=torch.float8_e5m2, out_dtype=torch.float16, precision="fp8", scales="blocks"),
    "fp8-fast": of(
        "ntt", dtype=torch.float8_e4m3fn, out_dtype=torch.float32, bias="n", precision="fp8 fast", scales="tensor"
    ),
    "int8": of("ntn", dtype=torch.int8, out_dtype=torch.int32, precision="int8"),
    "int8-scaled": of(
        "ntn", dtype=torch.int8, out_dtype=torch.bfloat16, has_beta=True, precision="int8", scales="rows"
    ),
    "fp8-gelu": GELU(dtype=torch.float8_e4m3fn, precision="fp8", scales="rows"),
    "fp8-fast-gelu": GELU(dtype=torch.float8_e4m3fn, precision="fp8 fast", scales="rows"),
    "fp8-blocks-gelu": GELU(dtype=torch.float8_e5m2, precision="fp8", scales="blocks"),
    "int8-gelu": GELU(dtype=torch.int8, precision="int8", scales="rows"),
}


@pytest.mark.few(shows=every_shape)
@pytest.mark.parametrize(("name", "config"), legal_cases(BYTE_CIRCUMSTANCES, warp_specialised.configs(torch.int8)))
def test_every_config_for_bytes(name: str, config: TileConfig) -> None:
    """Whole and split in turn. Sums of fp8 are added up in fp32 after each k-tile of 128, but for fast ones."""
    problem, names = BYTE_CIRCUMSTANCES[name], list(BYTE_CIRCUMSTANCES)
    kernel = compiled(problem, config, in_turn(config, CONFIGS.index(config_of_16_bits(config)) + names.index(name)))
    multiplies = "IGMMA" if problem.dtype == torch.int8 else "QGMMA"
    assert kernel.instructions[multiplies] and not kernel.instructions["HGMMA"]
    added = kernel.instructions["FADD"] + kernel.instructions["FFMA"]
    assert problem.precision != "fp8" or added >= config.accumulators() * config.num_warps // 4
    consumers = config.num_warps // 4
    assert len(re.findall(r"WARPGROUP\.DEPBAR", kernel.asm["sass"])) <= 3 * consumers


def config_of_16_bits(config: TileConfig) -> TileConfig:
    return replace(config, BLOCK_K=(config.BLOCK_K or 0) // 2)


CIRCUMSTANCES = {
    "c-column-major": of("tnt"),
    "c-odd": of("ntn", gap=1),
    "c-column-major-odd": of("nnt", gap=1),
    "c-half-aligned": of("nnn", gap=4),  # its pointers still are multiples of 8 bytes
    "beta": of("nnn", has_beta=True),
    "beta-c-odd": of("ntn", gap=1, has_beta=True),
    "beta-c-column-major": of("ttt", has_beta=True),
    "bias-m": of("tnn", bias="m"),
    "bias-n": of("ntn", bias="n"),
    **{name: of("ntn", activation=name) for name in ACTIVATIONS},
    "float32": of("nnn", out_dtype=torch.float32),
    "float32-c-odd": of("ntt", gap=1, out_dtype=torch.float32, has_beta=True),
    "float16": of("ttn", dtype=torch.float16),
    "batch": of("tnn", batch=3),
    "residual": of("ntn", has_beta=True, bias="n", activation="gelu", residual=True),
    "everything": of("ntn", has_beta=True, bias="n", activation="gelu"),
    "everything-odd": of(
        "tnt", 1, batch=3, dtype=torch.float16, out_dtype=torch.float32, has_beta=True, bias="m", activation="gelu_tanh"
    ),
}


def tight(problem: GemmProblem) -> list[TileConfig]:
    """Where accumulators, or a third warpgroup, leave a thread the fewest registers."""
    found = legal(problem)
    most = max(config.accumulators() for config in found)
    return [config for config in found if config.accumulators() == most or config.num_warps == 12]


def in_all_tight_ones(name: str) -> list[tuple[TileConfig, str]]:
    """The tight configurations and another in turn, whole and split in turn; of the heaviest epilogues both."""
    problem, turn = CIRCUMSTANCES[name], list(CIRCUMSTANCES).index(name)
    configs = tight(problem)
    others = [config for config in legal(problem) if config not in configs]
    chosen = [*configs, others[turn % len(others)]]
    turns = (0, 1) if name in ("gelu", "everything", "everything-odd") else (turn,)
    return [*dict.fromkeys((config, in_turn(config, i + turn)) for i, config in enumerate(chosen) for turn in turns)]


def column_major(name: str) -> tuple[bool, ...]:
    problem = CIRCUMSTANCES[name]
    return tuple(x.column_major for x in (problem.a, problem.b, problem.c))


@pytest.mark.few(shows=lambda name, config, schedule: {column_major(name), config.num_warps, schedule})
@pytest.mark.parametrize(
    ("name", "config", "schedule"),
    [
        pytest.param(name, config, schedule, id=f"{name}-{ids(config)}-{schedule}")
        for name in CIRCUMSTANCES
        for config, schedule in in_all_tight_ones(name)
    ],
)
def test_every_circumstance(name: str, config: TileConfig, schedule: str) -> None:
    problem = CIRCUMSTANCES[name]
    assert_claims(compiled(problem, config, schedule), problem, schedule)


# --- The predicate ---


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        pytest.param({"K": 0}, "TMA has nothing to load", id="nothing to multiply"),
        pytest.param({"precision": "ieee", "dtype": torch.float32}, "multiplies by tensor cores", id="fp32"),
        pytest.param(
            {"precision": "tf32", "dtype": torch.float32}, "wgmma reads all but 16 bits along K", id="fp32 across"
        ),
        pytest.param({"a": Layout((0, K + 1, 1))}, "TMA cannot take a (1024, 2048): its rows", id="odd rows"),
        pytest.param({"b": Layout((0, N, 1), aligned=False)}, "TMA cannot take b (2048, 1280): its first", id="base"),
        pytest.param({"b": Layout((0, 0, 1))}, "TMA cannot take b", id="expanded rows"),
    ],
)
def test_what_it_cannot_multiply_is_named(change: dict[str, object], reason: str) -> None:
    problem = replace(of(), **change)
    for config in CONFIGS:
        why = warp_specialised.illegal(problem, HOPPER, config)
        assert why is not None and why.startswith(reason)


def test_other_gpus_are_refused() -> None:
    for capability in SHARED_MEMORY:
        device = device_of_capability(capability)
        refused = [warp_specialised.illegal(of(), device, config) for config in CONFIGS]
        assert all((why is None) == (capability == CAPABILITY) for why in refused)
