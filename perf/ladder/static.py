"""What the compiler makes of every rung for GPUs that are not here: registers, shared memory, spills, instructions."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, replace

import torch

from perf.ladder import clock_model
from perf.ladder.record import StaticFacts
from perf.measure.numerics import mode_of
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import architecture, device_of_capability
from triton_gemm.ladder import Rung
from triton_gemm.runtime import aot

SIZE = (4096, 4096, 4096)
GPUS = {(8, 0): "A100", (8, 9): "L40S, RTX 40", (9, 0): "H100, H200", (10, 0): "B200", (12, 0): "RTX 50"}
TUNED_CAPABILITY = (9, 0)  # the one whose every configuration is listed


ARCHITECTURES = {architecture(capability): gpus for capability, gpus in GPUS.items()}
TUNED_ARCHITECTURE = architecture(TUNED_CAPABILITY)

# What to count of a kernel's SASS, by what it does.
KINDS = {
    "FFMA": ("FFMA", "FFMA2"),
    "tensor": ("HMMA", "HGMMA", "UTCHMMA", "UTCQMMA"),
    "LDS": ("LDS", "LDSM"),
    "STS": ("STS", "STSM"),
    "LDG": ("LDG",),
    "cp.async": ("LDGSTS",),
    "TMA": ("UTMALDG", "UTMASTG"),
    "barrier": ("BAR", "SYNCS", "WARPSYNC", "WARPGROUP"),
}


@dataclass(frozen=True)
class Job:
    """One rung in one configuration for one compute capability, on operands of (M, N, K) `size` in the rung's first
    dtype, or in the one given; layout: A's and B's, n row-major, t column-major."""

    rung: Rung
    config: GemmConfig
    capability: tuple[int, int]
    default: bool
    size: tuple[int, int, int] = SIZE
    given_dtype: torch.dtype | None = None
    layout: str = "nn"

    @property
    def dtype(self) -> torch.dtype:
        return self.given_dtype or self.rung.dtypes[0]

    @property
    def target(self) -> str:
        return architecture(self.capability)

    @property
    def key(self) -> str:
        return f"{self.rung.name} {self.target} {self.config}"


def jobs(rungs: Iterable[Rung], *, every_config: bool) -> list[Job]:
    """The default configuration for every architecture, and all of them for TUNED_CAPABILITY if asked."""
    found: list[Job] = []
    for rung in rungs:
        for capability in GPUS:
            if capability not in rung.capabilities:
                continue
            legal = rung.legal_configs(device_of_capability(capability), rung.dtypes[0])
            chosen = legal if every_config and capability == TUNED_CAPABILITY else legal[:1]
            found += [Job(rung, config, capability, config == legal[0]) for config in chosen]
    return found


def capture(
    rung: Rung, config: GemmConfig, size: tuple[int, int, int], dtype: torch.dtype, layout: str = "nn"
) -> aot.CapturedLaunch:
    """The launch of the kernel that multiplies, the last that a rung makes."""
    with aot.capture() as launches:
        rung.launch(*aot.operands(size, dtype, layout), config=config)
    return launches[-1]


def compile_all(pending: Iterable[Job], done: Callable[[str, StaticFacts], None]) -> None:
    """Compiles on all cores; `done` hears of each job in this thread.

    Threads do: Triton's passes and ptxas leave the interpreter free. Launches are captured one after another,
    because capturing replaces a method of Triton's for a moment.
    """
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        futures: dict[Future[StaticFacts], Job] = {}
        for job in pending:
            try:
                launch = capture(job.rung, job.config, job.size, job.dtype, job.layout)
            except Exception as error:
                done(job.key, replace(identity(job), failed=one_line(error)))
            else:
                futures[pool.submit(facts, job, launch)] = job
        try:
            for future in as_completed(futures):
                done(futures[future].key, future.result())
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise


def identity(job: Job) -> StaticFacts:
    """Which job it is, and no facts."""
    return StaticFacts(
        rung=job.rung.name,
        target=job.target,
        config=str(job.config),
        dtype=str(job.dtype).removeprefix("torch."),
        default=job.default,
    )


def facts(job: Job, launch: aot.CapturedLaunch) -> StaticFacts:
    """The facts of one job; `failed` with the compiler's words where it does not compile."""
    try:
        kernel = aot.compile_launch(launch, job.capability)
    except Exception as error:
        return replace(identity(job), failed=one_line(error))
    threads = re.search(r"\.reqntid (\d+)", kernel.asm["ptx"])  # k11 has more warps than its configuration says
    warps = int(threads[1]) // 32 if threads else job.config.num_warps
    mode = mode_of(job.rung.precision, job.dtype)
    best = clock_model.ceiling(job.config, mode, job.dtype.itemsize, job.capability)
    return replace(
        identity(job),
        registers=kernel.registers,
        shared=kernel.shared,
        spills=kernel.spills,
        blocks_per_sm=clock_model.blocks_per_sm(kernel.registers, kernel.shared, warps, job.capability),
        instructions=sum(kernel.instructions.values()),
        mix={kind: sum(kernel.instructions[opcode] for opcode in opcodes) for kind, opcodes in KINDS.items()},
        ceiling_tflops=best.tflops,
        ceiling_share=best.share,
        ceiling_limit=best.limit,
    )


def one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0]
