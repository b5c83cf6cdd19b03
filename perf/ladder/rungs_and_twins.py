"""The ladder's rungs and their CUDA twins, as providers that the timer can time."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, replace
from typing import Any

import torch

from perf.ladder import static
from perf.ladder.record import Resources, Spread, StaticFacts, TunedConfig
from perf.measure.operands import MODE_DTYPES
from perf.measure.timer import Provider
from reference_cuda import TWINS, LoadedTwin, TwinUnavailable, Variant, resources
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import architecture, device_info
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.record import TUNERS, gemm_config
from triton_gemm.problem import UnsupportedOperandError, aligned
from triton_gemm.runtime import aot

MODES = ("ieee", "tf32", "fp16", "bf16")
MODE_TITLES = {
    "ieee": "fp32 (IEEE)",
    "tf32": "TF32",
    "fp16": "fp16, fp32 sums",
    "bf16": "bf16, fp32 sums",
    "int32": "int32",
}


def rungs_of(mode: str, rungs: Iterable[Rung] = LADDER) -> list[Rung]:
    """The rungs that multiply in a precision class."""
    precision = "half" if mode in ("fp16", "bf16") else mode
    return [rung for rung in rungs if rung.precision == precision and MODE_DTYPES[mode] in rung.dtypes]


def rung_provider(rung: Rung, size: tuple[int, int, int], dtype: torch.dtype, *, inspect: bool) -> Provider:
    """A rung with its tuned configuration, and what tuning timed; `inspect` adds what both were compiled to."""
    capability = device_info(torch.device("cuda")).capability

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        rung.launch(a, b, c)

    def refuse(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        claims = ", ".join(map(architecture, rung.capabilities))
        raise NotImplementedError(f"claims {claims}; this GPU is {architecture(capability)}")

    def details(*_: torch.Tensor) -> dict[str, Any]:
        config = tuned_config(rung)
        details = {"config": str(config), "tuning": timings(rung)}
        if inspect:
            details |= asdict(compiled(rung, config, size, dtype, capability))
            details["tuning"] = inspected(rung, timings(rung), size, dtype, capability)
        return details

    return Provider(rung.name, call if runs_on(rung, capability) else refuse, details=details)


def runs_on(rung: Rung, capability: tuple[int, int]) -> bool:
    """Whether a rung claims this compute capability, or another of the same generation."""
    return any(major == capability[0] for major, _ in rung.capabilities)


def tuned_config(rung: Rung) -> GemmConfig:
    """The configuration that the rung's autotuner used last; its only one where nothing is tuned."""
    if rung.id not in TUNERS:
        return rung.configs[0]
    return gemm_config(TUNERS[rung.id].best_config)


def timings(rung: Rung) -> dict[GemmConfig, TunedConfig]:
    """Milliseconds of every configuration in the last tuning of a rung, as `triton.autotune` took them (`do_bench`:
    median, p20, p80), in the order of the list; no time of what failed, no configuration where nothing was tuned."""
    if rung.id not in TUNERS:
        return {}
    timed = {}
    for config, (median, p20, p80) in TUNERS[rung.id].configs_timings.items():
        time_ms = Spread(median=median, p20=p20, p80=p80) if math.isfinite(median) else None
        timed[gemm_config(config)] = TunedConfig(time_ms=time_ms)
    return timed


def inspected(
    rung: Rung,
    tuning: dict[GemmConfig, TunedConfig],
    size: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
) -> dict[GemmConfig, TunedConfig]:
    """With registers, shared memory, spills and blocks an SM of each configuration, compiled on all cores."""
    jobs = {job.key: job for config in tuning for job in [static.Job(rung, config, capability, False, size, dtype)]}
    compiled = dict(tuning)

    def done(key: str, facts: StaticFacts) -> None:
        compiled[jobs[key].config] = replace(
            tuning[jobs[key].config],
            registers=facts.registers,
            shared=facts.shared,
            spills=facts.spills,
            blocks_per_sm=facts.blocks_per_sm,
        )

    static.compile_all(jobs.values(), done)
    return compiled


def configured_provider(
    rung: Rung, config: GemmConfig, size: tuple[int, int, int], dtype: torch.dtype, layout: str = "nn"
) -> Provider:
    """A rung in one configuration, and what that was compiled to; the GPU must be one that it runs on."""
    capability = device_info(torch.device("cuda")).capability

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        rung.launch(a, b, c, config=config)

    where = (size, dtype, capability, layout)
    return Provider(str(config), call, details=lambda *_: asdict(compiled(rung, config, *where)))


def compiled(
    rung: Rung,
    config: GemmConfig,
    size: tuple[int, int, int],
    dtype: torch.dtype,
    capability: tuple[int, int],
    layout: str = "nn",
) -> Resources:
    """Those of the kernel that multiplies."""
    kernel = aot.compile_launch(static.capture(rung, config, size, dtype, layout), capability)
    return Resources(registers=kernel.registers, shared=kernel.shared, spills=kernel.spills)


def precompile(rungs: Iterable[Rung], size: tuple[int, int, int], dtype: torch.dtype) -> None:
    """Compiles every configuration that tuning will try, on all cores at once; tuning itself has only one."""
    M, N, K = size
    a = torch.empty(M, K, dtype=dtype, device="cuda")
    b = torch.empty(K, N, dtype=dtype, device="cuda")
    c = torch.empty(M, N, dtype=dtype, device="cuda")
    device = device_info(a.device)
    chosen = [
        (rung, config)
        for rung in rungs
        if runs_on(rung, device.capability)
        for config in rung.legal_configs(device, dtype, aligned=aligned(a, b, c))
    ]
    compile_together(chosen, a, b, c)


def compile_together(
    chosen: Iterable[tuple[Rung, GemmConfig]], a: torch.Tensor, b: torch.Tensor, c: torch.Tensor
) -> None:
    """Compiles what the rungs launch in these configurations, on all cores at once; who fails is left to fail later."""
    launches: list[aot.CapturedLaunch] = []
    for rung, config in chosen:
        try:
            with aot.capture() as captured:
                rung.launch(a, b, c, config=config)
        except UnsupportedOperandError:
            continue  # the rung does not take the operands: said when it is measured
        launches += captured
    index = torch.cuda.current_device()

    def compile_one(launch: aot.CapturedLaunch) -> None:
        torch.cuda.set_device(index)  # the current device is a thread's own
        try:
            launch.kernel.warmup(grid=(1,), **launch.arguments)
        except Exception:  # the autotuner meets the same error and logs it
            return

    with ThreadPoolExecutor(os.cpu_count()) as pool:
        list(pool.map(compile_one, launches))


def twin_provider(loaded: LoadedTwin, variant: Variant, resources: Resources) -> Provider:
    """A CUDA twin in one of its variants; `resources` is what its kernel takes, if known."""
    return Provider(
        twin_name(loaded.twin.stem, variant),
        lambda a, b, c: loaded.launch(a, b, c, variant=variant.name),
        out_dtype=variant.out_dtype,
        details=lambda *_: {"config": variant.params, **asdict(resources)},
    )


def twin_name(stem: str, variant: Variant) -> str:
    """The provider's name; `stem_of` gives the stem back."""
    return f"{stem}/{variant.name}"


def stem_of(provider: str) -> str:
    return provider.partition("/")[0]


def twin_resources(stem: str, arch: str) -> dict[str, Resources]:
    """Those of each variant of a twin, as ptxas tells; empty without nvcc."""
    try:
        kernels = resources(stem, arch)
    except TwinUnavailable:
        return {}
    by_variant = {}
    for variant in TWINS[stem].variants:
        kernel = kernels[variant.kernel]
        spills = kernel.spill_stores + kernel.spill_loads
        by_variant[variant.name] = Resources(registers=kernel.registers, shared=kernel.shared, spills=spills)
    return by_variant
