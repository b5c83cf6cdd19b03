"""GPUs by name, and the peak rates of their arithmetic units, from NVIDIA's data sheets.

A peak is SMs x clock x multiply-adds of an SM in a clock. All are dense, with sums in fp32, or int32 for int8.

Sources: CUDA Programming Guide, "Compute Capabilities" (lanes of fp32 and fp64); NVIDIA's specifications of A100, H100,
L40S, HGX B200 and HGX B300; its white papers on GA102 (RTX 3090), Ada (RTX 4090) and RTX Blackwell (RTX 5090, RTX PRO
6000). Peaks that are printed for sparse matrices are halved. Of some GPUs no sheet of NVIDIA's was at hand. A10, L4,
H20 and H200 are from resellers' copies. RTX 3060 and 5060 have vendors' SMs, clock and memory, and the rates of their
architecture. Orin, Thor and GB10 have product pages' SMs and memory, and rates by inference.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from functools import lru_cache
from types import MappingProxyType
from typing import NamedTuple

from .. import arguments
from .device import SHARED_MEMORY, DeviceInfo, architecture, current_device_info, device_of_capability

Rates = Mapping[str, float]  # by `Arithmetic.unit`
CUDA_CORES = frozenset({"ieee", "fp64"})  # units that run at their clock, which may be another than tensor cores'

# Multiply-adds of an SM in a clock.
RATES: dict[tuple[int, int], Rates] = {
    (8, 0): {"ieee": 64, "fp64": 64, "tf32": 512, "half": 1024, "int8": 2048},
    (8, 6): {"ieee": 128, "fp64": 2, "tf32": 256, "half": 512, "int8": 1024},
    (8, 7): {"ieee": 128, "fp64": 2, "tf32": 512, "half": 1024, "int8": 2048},
    (8, 9): {"ieee": 128, "fp64": 2, "tf32": 256, "half": 512, "int8": 1024, "fp8": 1024},
    (9, 0): {"ieee": 128, "fp64": 128, "tf32": 1024, "half": 2048, "int8": 4096, "fp8": 4096},
    (10, 0): {"ieee": 128, "fp64": 64, "tf32": 2048, "half": 4096, "int8": 8192, "fp8": 8192},
    (10, 3): {"ieee": 128, "fp64": 2, "tf32": 2048, "half": 4096, "int8": 256, "fp8": 8192},
    (11, 0): {"ieee": 128, "fp64": 2, "tf32": 2048, "half": 4096, "int8": 8192, "fp8": 8192},
    (12, 0): {"ieee": 128, "fp64": 2, "tf32": 256, "half": 512, "int8": 1024, "fp8": 1024},
    (12, 1): {"ieee": 128, "fp64": 2, "tf32": 256, "half": 512, "int8": 1024, "fp8": 1024},
}
# GeForce adds in fp32 at half the rate of a workstation's or server's GPU of the same architecture. Blackwell does so
# for fp8 by plain `mma` only. With scales of blocks, which may all be 1, it has the full rate (triton#11320).
HALVED = {(8, 6): ("tf32", "half"), (8, 9): ("tf32", "half", "fp8"), (12, 0): ("tf32", "half")}

# Bytes that L2 gives to all SMs in a clock by `cp.async`, for each bit of the memory's bus. Measured on an A100 (3840)
# and an RTX 4090 (1946) by smallscientist1/cuda_microbenchmark; RTX 30 and 50 are taken to be as RTX 40.
L2 = {(8, 0): 3840 / 5120, (8, 6): 1946 / 384, (8, 9): 1946 / 384, (12, 0): 1946 / 384}


class Sheet(NamedTuple):
    """What is published of a GPU.

    Attributes:
        product: its name in torch.
        capability: (major, minor).
        num_sms: multiprocessors.
        bus_width: of its memory, in bits.
        bandwidth: of its memory, in GB/s.
        power_limit: of the board, in watts.
        clock: with which the peaks of its tensor cores are reached, in MHz.
        cuda_clock: with which those of fp32 and fp64 are reached, in MHz, where that is another.
        rates: multiply-adds of an SM in a clock, where they are not RATES'.
    """

    product: str
    capability: tuple[int, int]
    num_sms: int
    bus_width: int
    bandwidth: float
    power_limit: int
    clock: float
    cuda_clock: float = 0.0
    rates: Rates = MappingProxyType({})


# By the word that people have for them. H100's and H200's bandwidth and H200's bus are as their drivers say.
SHEETS = {
    "a100": Sheet("NVIDIA A100-SXM4-80GB", (8, 0), 108, 5120, 2039, 400, 1410),
    "a10": Sheet("NVIDIA A10", (8, 6), 72, 384, 600, 150, 1695),
    "l4": Sheet("NVIDIA L4", (8, 9), 58, 192, 300, 72, 2040),
    "l40s": Sheet("NVIDIA L40S", (8, 9), 142, 384, 864, 350, 2520),
    "h20": Sheet(
        *("NVIDIA H20", (9, 0), 78, 6144, 4000, 400, 1855, 1980),
        rates={"fp64": 3.25, "tf32": 256, "half": 512, "int8": 1024, "fp8": 1024},
    ),
    "h100-pcie": Sheet("NVIDIA H100 PCIe", (9, 0), 114, 5120, 2000, 350, 1620, 1755),
    "h100": Sheet("NVIDIA H100 80GB HBM3", (9, 0), 132, 5120, 3352, 700, 1830, 1980),
    "h200": Sheet("NVIDIA H200", (9, 0), 132, 6016, 4917, 700, 1830, 1980),
    "rtx3060": Sheet("NVIDIA GeForce RTX 3060", (8, 6), 28, 192, 360, 170, 1777),
    "rtx3090": Sheet("NVIDIA GeForce RTX 3090", (8, 6), 82, 384, 936, 350, 1695),
    "rtx4090": Sheet("NVIDIA GeForce RTX 4090", (8, 9), 128, 384, 1008, 450, 2520),
    "rtx5060": Sheet("NVIDIA GeForce RTX 5060", (12, 0), 30, 128, 448, 145, 2497),
    "rtx5090": Sheet("NVIDIA GeForce RTX 5090", (12, 0), 170, 512, 1792, 575, 2407),
    "rtx-pro-6000": Sheet("NVIDIA RTX PRO 6000 Blackwell Workstation Edition", (12, 0), 188, 512, 1792, 600, 2617),
    "b200": Sheet("NVIDIA B200", (10, 0), 148, 7680, 7700, 1000, 1856, 1965),
    "b300": Sheet("NVIDIA B300 SXM6 AC", (10, 3), 148, 7680, 7700, 1100, 1856, 1965, {"fp64": 2.15}),
    "orin": Sheet("Orin", (8, 7), 16, 256, 205, 60, 1300),
    "thor": Sheet("NVIDIA Thor", (11, 0), 20, 256, 273, 130, 1575),
    "gb10": Sheet("NVIDIA GB10", (12, 1), 48, 256, 273, 140, 2500),
}
# Whose clock and bandwidth a GPU has that does not say its own, by compute capability.
TYPICAL = {(8, 0): "a100", (8, 6): "a10", (8, 7): "orin", (8, 9): "l40s", (9, 0): "h100", (10, 0): "b200"}
TYPICAL |= {(10, 3): "b300", (11, 0): "thor", (12, 0): "rtx-pro-6000", (12, 1): "gb10"}
_BY_PRODUCT = {sheet.product: sheet for sheet in SHEETS.values()}
_CAPABILITIES = {architecture(capability): capability for capability in SHARED_MEMORY}
NAMES = (*SHEETS, *(name for name in _CAPABILITIES if name != "sm_75"))  # which no kernel runs on
_ALIASES = {"4090": "rtx4090", "3060": "rtx3060", "3090": "rtx3090", "5060": "rtx5060", "5090": "rtx5090"}
_ALIASES |= {"h100sxm": "h100", "h100sxm5": "h100", "h200sxm": "h200", "a100sxm": "a100", "a10080gb": "a100"}
_ALIASES |= {"pro6000": "rtx-pro-6000", "rtxpro6000blackwell": "rtx-pro-6000", "a100sxm4": "a100"}


def _plain(name: str) -> str:
    """A name without case, spaces, punctuation and the words NVIDIA and GeForce."""
    return re.sub(r"[^a-z0-9]|nvidia|geforce", "", name.lower())


_BY_WORD = {_plain(name): name for name in (*SHEETS, *_CAPABILITIES)}
_BY_WORD |= {_plain(sheet.product): name for name, sheet in SHEETS.items()} | _ALIASES


def named_device(name: str) -> DeviceInfo:
    """A GPU that need not be here, by a name of NAMES, an alias or its product name, in any case: "a100", "RTX 4090".

    "sm_90" and the like are any GPU of that compute capability, with 132 multiprocessors. ValueError for others.
    """
    word = _BY_WORD.get(_plain(name))
    if word is None:
        raise ValueError(f"device must be one of {', '.join(NAMES)}, not {name!r}")
    if word in _CAPABILITIES:
        return device_of_capability(_CAPABILITIES[word])
    sheet = SHEETS[word]
    return DeviceInfo(
        name=sheet.product,
        capability=sheet.capability,
        num_sms=sheet.num_sms,
        shared_memory=SHARED_MEMORY[sheet.capability],
        bandwidth=sheet.bandwidth * 1e3,
        bus_width=sheet.bus_width,
        power_limit=sheet.power_limit,
        clock=sheet.clock,
    )


def given_device(function: str, device: DeviceInfo | str | None) -> DeviceInfo:
    """The GPU of a function's argument `device`: itself, the one of a name as `named_device` takes it, None's the
    current one. TypeError for others."""
    if isinstance(device, str):
        return named_device(device)
    arguments.instance(function, "device", device, DeviceInfo, or_none=True)
    return device or current_device_info()


def per_clock(device: DeviceInfo, unit: str) -> float:
    """Multiply-adds of an SM in a clock. 0 for what the GPU's tensor cores do not multiply.

    unit: an `Arithmetic.unit`.
    """
    sheet = _sheet(device)
    found = RATES[sheet.capability].get(unit, 0.0)
    if device.name == sheet.product:
        found = sheet.rates.get(unit, found)
    return found / 2 if "GeForce" in device.name and unit in HALVED.get(device.capability, ()) else found


@lru_cache(maxsize=256)
def rate(device: DeviceInfo, unit: str) -> float:
    """Multiply-adds of an SM in a microsecond at the peak of the GPU's data sheet; of a GPU that has none here, at the
    rates of its architecture and its own clock."""
    sheet = _sheet(device)
    clock = _clock(device)
    if clock == sheet.clock and unit in CUDA_CORES:
        clock = sheet.cuda_clock or clock
    return per_clock(device, unit) * clock


def bandwidth(device: DeviceInfo) -> float:
    """Bytes in a microsecond of a GPU's memory, as it says, or else of one of its architecture."""
    return device.bandwidth or _sheet(device).bandwidth * 1e3


def l2_bandwidth(device: DeviceInfo) -> float | None:
    """Bytes in a microsecond that a GPU's L2 gives to all SMs; None where nothing is known of its architecture."""
    if device.capability not in L2:
        return None
    return L2[device.capability] * (device.bus_width or _sheet(device).bus_width) * _clock(device)


def _clock(device: DeviceInfo) -> float:
    """Of a GPU's tensor cores, in MHz: its data sheet's, or else its own."""
    sheet = _sheet(device)
    return sheet.clock if device.name == sheet.product else device.clock or sheet.clock


@lru_cache(maxsize=64)
def _sheet(device: DeviceInfo) -> Sheet:
    """Of this product, or else one of its compute capability, or of the last before that."""
    known = max((c for c in TYPICAL if c <= device.capability), default=min(TYPICAL))
    return _BY_PRODUCT.get(device.name) or SHEETS[TYPICAL[known]]
