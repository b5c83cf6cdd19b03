"""What a kernel's choice depends on: the silicon, read once and lazily."""

from __future__ import annotations

import os
import re
import warnings
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path

import torch

# Shared memory one block may ask for (bytes), by compute capability.
# CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
SHARED_MEMORY = {
    (7, 5): 65_536,
    (8, 0): 166_912,
    (8, 6): 101_376,
    (8, 7): 166_912,
    (8, 9): 101_376,
    (9, 0): 232_448,
    (10, 0): 232_448,
    (10, 3): 232_448,
    (11, 0): 232_448,
    (12, 0): 101_376,
    (12, 1): 101_376,
}
RESERVED = 1024  # bytes of an SM's shared memory that no block may ask for, on 8.0 and newer; same table


def has_gpu() -> bool:
    """Whether the machine has an NVIDIA GPU, whatever torch says."""
    return Path("/proc/driver/nvidia/version").exists() or any(Path("/dev").glob("nvidia[0-9]*"))


@dataclass(frozen=True)
class DeviceInfo:
    """One GPU's properties, on which the choice of a kernel depends. 0 if a number is not known.

    Attributes:
        name: The marketing name.
        capability: The compute capability (major, minor).
        num_sms: Multiprocessors.
        shared_memory: Bytes that one block may use.
        bandwidth: Bytes in a microsecond that memory's clock and bus allow.
        bus_width: Of its memory, in bits.
        power_limit: Watts, for a GPU that is not here. Of a GPU here it is read when a table is looked up.
        clock: The maximum clock of its multiprocessors, in MHz.
        uuid: The name of this very GPU in NVIDIA's tools.
    """

    name: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory: int
    bandwidth: float = 0.0
    bus_width: int = 0
    power_limit: int = 0
    clock: float = 0.0
    uuid: str = field(default="", compare=False, repr=False)


def architecture(capability: tuple[int, int]) -> str:
    """A compute capability as the compiler names it: `sm_90`."""
    return "sm_{}{}".format(*capability)


def device_of_capability(capability: tuple[int, int]) -> DeviceInfo:
    """A stand-in for a GPU of that compute capability, for work that needs none (132 SMs assumed)."""
    return DeviceInfo(architecture(capability), capability, 132, SHARED_MEMORY[capability])


# The interpreter runs programs one after another; four of them make a persistent loop go round.
INTERPRETER = DeviceInfo("Triton's interpreter", (9, 0), 4, SHARED_MEMORY[9, 0])


# This environment variable caps the compute capability used for selection: "8.0" disables `warp_specialised` on Hopper.
CAPABILITY = "TRITON_GEMM_CAPABILITY"


def wrong_capability(own: tuple[int, int] | None = None) -> str | None:
    """What is wrong with CAPABILITY on a GPU of that compute capability, or on a machine without one; or None."""
    given = os.environ.get(CAPABILITY, "")
    found = re.fullmatch(r"(\d{1,2})\.(\d)", given, re.ASCII)
    if not given or (found is not None and (own is None or (int(found[1]), int(found[2])) <= own)):
        return None
    up_to, counts = ("", "the GPU's own") if own is None else (f" up to {own[0]}.{own[1]}", f"{own[0]}.{own[1]}")
    return f"{CAPABILITY} must be a compute capability{up_to}, not {given!r}: it counts as {counts}"


def treated_as(capability: tuple[int, int]) -> tuple[int, int]:
    """The compute capability that choices are made for on a GPU of this one. What CAPABILITY holds that is none, or is
    newer, is warned of: it is read amid a user's call."""
    given = os.environ.get(CAPABILITY, "")
    if not given:
        return capability
    if (words := wrong_capability(capability)) is not None:
        warnings.warn(words, stacklevel=2)
        return capability
    major, minor = given.split(".")
    return int(major), int(minor)


@cache
def _cuda_device(index: int) -> DeviceInfo:
    properties = torch.cuda.get_device_properties(index)
    return DeviceInfo(
        name=properties.name,
        capability=treated_as((properties.major, properties.minor)),
        num_sms=properties.multi_processor_count,
        shared_memory=properties.shared_memory_per_block_optin,  # type: ignore[attr-defined]
        # Both edges of a clock in kHz move a bit on every wire.
        bandwidth=2 * properties.memory_clock_rate * properties.memory_bus_width / 8e3,
        bus_width=properties.memory_bus_width,
        clock=getattr(properties, "clock_rate", 0) / 1e3,
        uuid=str(getattr(properties, "uuid", "")),
    )


def current_device_info() -> DeviceInfo:
    """The DeviceInfo of the current GPU; where there is none, that of the interpreter."""
    return device_info(torch.device("cuda" if torch.cuda.is_available() else "cpu"))


def device_info(device: torch.device) -> DeviceInfo:
    """The DeviceInfo of a tensor's device; for the CPU, that of the interpreter."""
    if device.type != "cuda":
        return INTERPRETER
    return _cuda_device(torch.cuda.current_device() if device.index is None else device.index)
