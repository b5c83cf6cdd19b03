"""Ceilings: what a GPU's units and memory allow, from published rates per SM and from measurements on the GPU."""

from __future__ import annotations

from typing import Any

import torch

from perf.measure import environment, timer
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.gpus import named_device, per_clock, rate
from triton_gemm.tuning import timing
from triton_gemm.tuning.of_torch import fp32_precision

Capability = tuple[int, int]

SHARED_BYTES_PER_CLOCK = 128  # 32 banks of 4 bytes an SM; Programming Guide, "Shared Memory"
L2_BYTES_PER_CLOCK = 64  # the width of an SM's port
L2_SHARE_PER_CLOCK = 5120 / 108  # an SM's share of L2's read bandwidth; NVIDIA A100 whitepaper, taken for most
HOPPERS_L2_SHARE = 60  # measured where loads bind: an H200's kernel without clusters, 233 ns in docs/log/pipeline.md

# Above these a measurement is wrong until shown otherwise: ratio to cuBLAS for half precision, TFLOPS on HOPPERS.
SUSPICIOUS_RATIO = 1.10
SUSPICIOUS_TFLOPS = 900
HOPPERS = ("H100", "H200")  # in their names; of one speed, but for the memory


# The GPU that each architecture is predicted for.
TYPICAL = {gpu.capability: gpu for gpu in map(named_device, ("a100", "rtx4090", "h100", "b200", "rtx5090"))}


def l2_share(capability: Capability) -> float:
    """Bytes a clock that L2 sends to an SM where all SMs read at once."""
    return HOPPERS_L2_SHARE if capability == (9, 0) else L2_SHARE_PER_CLOCK


def flop_per_clock(gpu: DeviceInfo, mode: str) -> float:
    """Of an SM's arithmetic units, dense, in a precision of the ladder."""
    return 2 * per_clock(gpu, _unit(mode))


def clock(gpu: DeviceInfo, mode: str) -> float:
    """MHz with which the data sheet's peak in a precision is reached: fp32's units and tensor cores may differ."""
    return rate(gpu, _unit(mode)) / per_clock(gpu, _unit(mode))


def _unit(mode: str) -> str:
    return {"fp16": "half", "bf16": "half"}.get(mode, mode)


def intensity(M: int, N: int, K: int, itemsize: int, out_itemsize: int | None = None) -> float:
    """FLOP for each byte that must cross DRAM: A and B read once, C written once."""
    traffic = itemsize * (M * K + K * N) + (out_itemsize or itemsize) * M * N
    return 2 * M * N * K / traffic


def too_fast(tflops: float, gpu: str) -> bool:
    """Whether no kernel does that on random data of 16 bits, as far as is known of the GPU."""
    return tflops > SUSPICIOUS_TFLOPS and any(name in gpu for name in HOPPERS)


def measure(budget_s: float) -> dict[str, Any]:
    """Copy bandwidth (read and written), and the SM clock while an fp32 product keeps the GPU busy."""
    found = copy_bandwidth(budget_s, patience_s=3.0)
    clock = clocks_under_load(2.0, torch.float32, 4096, 64)["clocks_sm"]
    return {**found, "sm_clock_mhz": None if clock is None else float(clock)}


def copy_bandwidth(budget_s: float, patience_s: float) -> dict[str, Any]:
    """`copy_tbs`, TB/s read and written when `copy_bytes` bytes are copied; `patience_s` for the clocks to settle."""
    free = torch.cuda.mem_get_info()[0]
    source = torch.randn(min(2**28, free // 32), device="cuda")
    target = torch.empty_like(source)
    # Not copy_: in a graph that is a memcpy node, which the copy engine runs below the memory's rate.
    copy_ms = timer.time_alone(lambda: torch.neg(source, out=target), budget_s, patience_s)["median"]
    return {"copy_tbs": 2 * source.nbytes / copy_ms / 1e9, "copy_bytes": source.nbytes}


def clocks_under_load(
    patience_s: float, dtype: torch.dtype = torch.bfloat16, size: int = 8192, calls: int = 16
) -> dict[str, Any]:
    """What nvidia-smi says of the GPU while it multiplies, after at most `patience_s` for its clocks to settle."""
    a, b = torch.randn(2, size, size, device="cuda", dtype=dtype)
    c = torch.empty_like(a)
    with fp32_precision("ieee"):
        replay = timing.Replay([lambda: torch.mm(a, b, out=c)], calls)
        timing.settle(replay.start, patience_s)
        reads = [replay.start() for _ in range(16)]
        found = environment.clocks()
        for read in reads:
            read()
    return found
