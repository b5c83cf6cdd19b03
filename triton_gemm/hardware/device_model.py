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

from ..arithmetic import ARITHMETICS
from .device import RESERVED, DeviceInfo
from .gpus import bandwidth, l2_bandwidth, named_device, rate

Costs = TypeVar("Costs")

FILE = Path(__file__).parent / "device_models.json"
BASE = "NVIDIA H100 80GB HBM3"  # what others are derived from
LINE = 128  # bytes


@dataclass(frozen=True, eq=False)
class DeviceModel:
    """The figures of one GPU. Bytes and elements are of a microsecond.

    Attributes:
        source: where they come from.
        capability: (major, minor).
        num_sms: multiprocessors.
        shared_memory_per_sm: in bytes.
        bandwidth: bytes of its memory, by its clock and bus.
        launch: microseconds of a kernel that does nothing.
        memory: bytes that come from memory.
        l2: lines of 128 bytes that L2 gives to all SMs.
        tensor: multiply-adds of 16 bits a microsecond, times their 2 bytes, that meet the board's power limit at the
            highest clock. Energy of operands is not in it.
        copy: microseconds of copying an operand first, a constant and what starting that on all SMs adds.
        copied: bytes that are read or written for that, by 16 bytes and by one element a thread.
        kernels: each kernel's own constants.
    """

    source: str
    capability: tuple[int, int]
    num_sms: int
    shared_memory_per_sm: int
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
        """The model of a GPU that was not measured. Memory is scaled by its clock and bus, arithmetic units by their
        peaks, and so is the power limit. Copies are scaled by the number of multiprocessors, and so is L2 where nothing
        is known of it. Each multiprocessor is otherwise as fast as here."""
        here = named_device(BASE)
        sms = device.num_sms / self.num_sms
        memory, l2 = bandwidth(device) / self.bandwidth, l2_bandwidth(device)
        return replace(
            self,
            source=f"scaled from {self.source}",
            capability=device.capability,
            num_sms=device.num_sms,
            shared_memory_per_sm=device.shared_memory + RESERVED,
            bandwidth=bandwidth(device),
            memory=self.memory * memory,
            l2=l2 / LINE if l2 else self.l2 * sms,
            tensor=self.tensor * sms * rate(device, "half") / rate(here, "half"),
            copied=(self.copied[0] * min(sms, memory), self.copied[1] * min(sms, memory)),
            kernels=_scaled(self.kernels, device, here),
        )

    def as_dict(self) -> dict[str, Any]:
        """What `DeviceModel(**...)` makes again, and JSON holds."""
        return {f.name: getattr(self, f.name) for f in fields(self) if f.init}


def _scaled(kernels: Mapping[str, Mapping[str, Any]], device: DeviceInfo, here: DeviceInfo) -> dict[str, Any]:
    """Kernels' constants with the rates of another GPU's arithmetic units.

    Rates that were fitted on `here` are scaled by its peaks to a GPU of the same architecture, and CUDA cores' to any.
    Those of other tensor cores are their peaks, of which a warp, on one of an SM's four, has a quarter.
    """
    found = {name: dict(figures) for name, figures in kernels.items()}
    fp32 = rate(device, "ieee") / rate(here, "ieee")
    for name, figure in (("fma", "fmas"), ("gemv", "fmas"), ("gemv", "fmas_n")):
        found[name][figure] *= fp32
    products = {}
    for name, fitted in kernels["portable"]["products"].items():
        unit = ARITHMETICS[name].unit
        peak, before = rate(device, unit), rate(here, unit)
        same = device.capability == here.capability
        products[name] = [x * peak / before for x in fitted] if same else [peak, peak / 4] if peak else fitted
    found["portable"]["products"] = products
    found["mma_fp64"]["products"] *= rate(device, "fp64") / rate(here, "fp64")
    return found


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
