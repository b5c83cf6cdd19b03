"""GPU keys: what a GPU must share with another for times measured on one to hold on the other."""

from __future__ import annotations

from dataclasses import dataclass, field

from . import nvml
from .device import DeviceInfo


@dataclass(frozen=True)
class GpuKey:
    """What tells GPUs apart. A number is 0 where it is not known."""

    capability: tuple[int, int]  # (major, minor)
    sms: int  # multiprocessors
    bus_width: int  # of memory, in bits
    power_limit: int  # watts that the board may take
    name: str = field(default="", compare=False)  # the product's, for people: H100s of one name differ in the others

    @classmethod
    def of(cls, device: DeviceInfo) -> GpuKey:
        """That of a GPU, whose power limit is asked of NVML where DeviceInfo does not say it."""
        power_limit = device.power_limit or nvml.power_limit(device.uuid)
        return cls(device.capability, device.num_sms, device.bus_width, power_limit, device.name)

    def __str__(self) -> str:
        return f"{without_power(self.capability, self.sms, self.bus_width)}{self.power_limit}W"


def without_power(capability: tuple[int, int], sms: int, bus_width: int) -> str:
    """How the text of such a GpuKey begins. It is known without NVML, which takes a while to start."""
    major, minor = capability
    return f"sm_{major}{minor}-{sms}sms-{bus_width}bit-"
