"""Ceilings: what a GPU's units and memory allow, from published rates per SM and from measurements on the GPU."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from perf.measure import environment, timer

Capability = tuple[int, int]

# Dense FLOP a clock and SM, by compute capability and precision class; fp32 sums throughout. "ieee" is FFMA: 64 or
# 128 lanes of 2. CUDA C++ Programming Guide, "Arithmetic Instructions" (FFMA), and NVIDIA's architecture papers,
# peak rate / (SMs x boost clock): A100, RTX 4090, H100 SXM, B200, RTX 5090.
FLOP_PER_CLOCK: dict[Capability, dict[str, int]] = {
    (8, 0): {"ieee": 128, "tf32": 1024, "fp16": 2048, "bf16": 2048},
    (8, 6): {"ieee": 256, "tf32": 256, "fp16": 512, "bf16": 512},
    (8, 9): {"ieee": 256, "tf32": 256, "fp16": 512, "bf16": 512},
    (9, 0): {"ieee": 256, "tf32": 2048, "fp16": 4096, "bf16": 4096},
    (10, 0): {"ieee": 256, "tf32": 4096, "fp16": 8192, "bf16": 8192},
    (12, 0): {"ieee": 256, "tf32": 256, "fp16": 512, "bf16": 512},
}
SHARED_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes an SM; Programming Guide, "Shared Memory"
L2_BYTES_PER_CLOCK = 64  # the width of an SM's port
L2_SHARE_PER_CLOCK = 5120 / 108  # an SM's share of L2's read bandwidth; NVIDIA A100 whitepaper, taken for all

# Above these a measurement is wrong until shown otherwise: ratio to cuBLAS for half precision, TFLOPS on HOPPERS.
SUSPICIOUS_RATIO = 1.10
SUSPICIOUS_TFLOPS = 900
HOPPERS = ("H100", "H200")  # in their names; of one speed, but for the memory


@dataclass(frozen=True)
class TypicalGpu:
    """A GPU of an architecture, for predictions where there is none: datasheet SMs, boost clock (GHz)."""

    name: str
    num_sms: int
    clock_ghz: float


TYPICAL: dict[Capability, TypicalGpu] = {
    (8, 0): TypicalGpu("A100 SXM", 108, 1.41),
    (8, 9): TypicalGpu("RTX 4090", 128, 2.52),
    (9, 0): TypicalGpu("H100 SXM", 132, 1.83),
    (10, 0): TypicalGpu("B200", 148, 1.85),
    (12, 0): TypicalGpu("RTX 5090", 170, 2.41),
}


def unit_peak_tflops(capability: Capability, mode: str, num_sms: int, clock_ghz: float) -> float:
    """The arithmetic units' peak: SMs x FLOP a clock x clock."""
    return num_sms * FLOP_PER_CLOCK[capability][mode] * clock_ghz / 1e3


def intensity(M: int, N: int, K: int, itemsize: int, out_itemsize: int | None = None) -> float:
    """FLOP for each byte that must cross DRAM: A and B read once, C written once."""
    traffic = itemsize * (M * K + K * N) + (out_itemsize or itemsize) * M * N
    return 2 * M * N * K / traffic


def too_fast(tflops: float, gpu: str) -> bool:
    """Whether no kernel does that on random data of 16 bits, as far as is known of the GPU."""
    return tflops > SUSPICIOUS_TFLOPS and any(name in gpu for name in HOPPERS)


def measure(budget_s: float) -> dict[str, Any]:
    """Copy bandwidth (read and written), and the SM clock while an fp32 product keeps the GPU busy."""
    return {**copy_bandwidth(budget_s, patience_s=3.0), "sm_clock_mhz": clock_under_load()}


def copy_bandwidth(budget_s: float, patience_s: float) -> dict[str, Any]:
    """`copy_tbs`, TB/s read and written when `copy_bytes` bytes are copied; `patience_s` for the clocks to settle."""
    free = torch.cuda.mem_get_info()[0]
    source = torch.randn(min(2**28, free // 32), device="cuda")
    target = torch.empty_like(source)
    # Not copy_: in a graph that is a memcpy node, which the copy engine runs below the memory's rate.
    copy_ms = timer.time_alone(lambda: torch.neg(source, out=target), budget_s, patience_s)["median"]
    return {"copy_tbs": 2 * source.nbytes / copy_ms / 1e9, "copy_bytes": source.nbytes}


def clock_under_load() -> float | None:
    """The SM clock (MHz) that nvidia-smi tells while IEEE fp32 products run."""
    a, b = torch.randn(2, 4096, 4096, device="cuda")
    c = torch.empty_like(a)
    with timer.fp32_precision("ieee"):
        replay = timer.Replay([lambda: torch.mm(a, b, out=c)], 64)
        timer.settle(replay.start, patience_s=2.0)
        reads = [replay.start() for _ in range(8)]
        clock = environment.clocks()["clocks_sm"]
        for read in reads:
            read()
    return None if clock is None else float(clock)
