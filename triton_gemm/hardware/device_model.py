"""DeviceModel: how fast a GPU is, as the figures that predicted times are made of.

`device_models.json` holds one for each GPU that was measured: `perf.calibrate fit` writes it. Others are derived. Times
are microseconds; a choice depends on their relations only.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields, replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar

from .device import SHARED_MEMORY, DeviceInfo, device_of_capability

Costs = TypeVar("Costs")

FILE = Path(__file__).parent / "device_models.json"
BASE = "NVIDIA H100 80GB HBM3"  # what others are derived from

# Bytes in a microsecond, of GPUs that do not say it, by major compute capability: A100's, L4's to RTX 4090's middle
# (minor 6 and 9 are below), H100's, B200's, Thor's, RTX PRO 6000's and 5090's. NVIDIA's data sheets.
BANDWIDTHS = {(8, 0): 1.9e6, (8, 6): 0.7e6, (8, 7): 0.2e6, (8, 9): 0.9e6, (9, 0): 3.35e6, (10, 0): 8e6, (10, 3): 8e6}
BANDWIDTHS |= {(11, 0): 0.27e6, (12, 0): 1.79e6, (12, 1): 0.27e6}


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """The figures of one GPU.

    source: where they come from; num_sms: its multiprocessors; bandwidth: bytes in a microsecond by its memory's clock
    and bus; launch: of a kernel that does nothing; memory: bytes in a microsecond from memory; l2: lines of 128
    bytes in a microsecond that L2 gives to all SMs; tensor: products of 16 bits in a microsecond that the board's power
    limit allows, times their 2 bytes; copy: copying an operand first, a constant and what starting that on all SMs
    adds, and copied: bytes in a microsecond that are read or written for it, by 16 bytes and one element a thread;
    kernels: each kernel's own constants.
    """

    source: str
    num_sms: int
    bandwidth: float
    launch: float
    memory: float
    l2: float
    tensor: float
    copy: tuple[float, float]
    copied: tuple[float, float]
    kernels: Mapping[str, Mapping[str, Any]]
    _costs: dict[type, Any] = field(default_factory=dict, init=False, repr=False)

    def costs(self, kind: type[Costs]) -> Costs:
        """A kernel's constants as its own record, whose KERNEL says which kernel's."""
        found = self._costs.get(kind)
        if found is None:
            found = self._costs[kind] = kind(**self.kernels[kind.KERNEL])  # type: ignore[attr-defined]
        return found

    def scaled_to(self, device: DeviceInfo) -> DeviceModel:
        """The model of a GPU that was not measured: each multiprocessor as fast as here; L2, tensor cores and copies by
        their number, and memory by its clock and bus."""
        sms = device.num_sms / self.num_sms
        bandwidth = device.bandwidth or BANDWIDTHS.get(device.capability, self.bandwidth)
        memory = bandwidth / self.bandwidth
        return replace(
            self,
            source=f"scaled from {self.source}",
            num_sms=device.num_sms,
            bandwidth=bandwidth,
            memory=self.memory * memory,
            l2=self.l2 * sms,
            tensor=self.tensor * sms,
            copied=(self.copied[0] * min(sms, memory), self.copied[1] * min(sms, memory)),
        )

    def as_dict(self) -> dict[str, Any]:
        """What `DeviceModel(**...)` makes again, and JSON holds."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


@lru_cache(maxsize=1)
def measured() -> dict[str, DeviceModel]:
    """The models of GPUs that were measured, by name."""
    return {name: DeviceModel(**entry) for name, entry in json.loads(FILE.read_text()).items()}


Origin = Literal["calibrated", "shipped", "derived"]

_calibrated: Callable[[DeviceInfo], DeviceModel | None] | None = None


def set_calibrated(find: Callable[[DeviceInfo], DeviceModel | None]) -> None:
    """Has `model_of` ask `find` for the model that a user's calibration has found for a GPU."""
    global _calibrated
    _calibrated = find


def model_of(device: DeviceInfo) -> DeviceModel:
    """The model of a GPU: that of the user's calibration, or else a shipped one, or one derived from these."""
    found = None if _calibrated is None else _calibrated(device)
    return found or model_without_calibration(device)


def origin(device: DeviceInfo) -> Origin:
    """Where `model_of(device)` comes from."""
    if _calibrated is not None and _calibrated(device) is not None:
        return "calibrated"
    return "shipped" if model_without_calibration(device) in measured().values() else "derived"


@lru_cache(maxsize=64)
def model_without_calibration(device: DeviceInfo) -> DeviceModel:
    """The shipped model of a GPU, or one that is derived from another's."""
    found = measured().get(device.name)
    if found is not None and found.num_sms == device.num_sms:
        return found
    return measured()[BASE].scaled_to(device)


# GPUs that were measured, by the word that people have for them: width of the memory's bus in bits and the board's
# power limit in watts, by which tables are found: the H200's as its driver says, the H100's from NVIDIA's data sheet.
_HOPPERS = {"h100": ("NVIDIA H100 80GB HBM3", 5120, 700), "h200": ("NVIDIA H200", 6016, 700)}
NAMES = (*_HOPPERS, *(f"sm_{major}{minor}" for major, minor in SHARED_MEMORY))


def named_device(name: str) -> DeviceInfo:
    """A GPU that need not be here: "h100" and "h200" in SXM form, or "sm_90" and the like, any GPU of that compute
    capability, with 132 multiprocessors. ValueError for others."""
    if name in _HOPPERS:
        product, bus_width, power_limit = _HOPPERS[name]
        model = measured()[product]
        return DeviceInfo(
            name=product,
            capability=(9, 0),
            num_sms=model.num_sms,
            shared_memory=SHARED_MEMORY[9, 0],
            bandwidth=model.bandwidth,
            bus_width=bus_width,
            power_limit=power_limit,
        )
    capabilities = {f"sm_{major}{minor}": (major, minor) for major, minor in SHARED_MEMORY}
    if name not in capabilities:
        raise ValueError(f"device must be one of {', '.join((*capabilities, *_HOPPERS))}, not {name!r}")
    return device_of_capability(capabilities[name])
