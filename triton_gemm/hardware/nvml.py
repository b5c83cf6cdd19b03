"""What NVIDIA's management library says of a GPU; torch's own questions to it need a Python package of its own."""

from __future__ import annotations

import ctypes
from functools import cache
from typing import Any

# NVML API Reference, nvmlClocksEventReasons: what slows a GPU down that something is wrong with. The power limit, which
# long products of large matrices meet on every GPU, is none of them.
SLOWED = {
    0x08: "slowed down by hardware",
    0x20: "too hot, as its driver says",
    0x40: "too hot",
    0x80: "short of external power",
}
_SM_CLOCK = 1


@cache
def gpu(uuid: str) -> tuple[Any, Any] | None:
    """The library and its handle of the GPU of that UUID; None where there is none."""
    if not uuid:
        return None
    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
    except OSError:
        return None
    handle = ctypes.c_void_p()
    failed = nvml.nvmlInit_v2() or nvml.nvmlDeviceGetHandleByUUID(f"GPU-{uuid}".encode(), ctypes.byref(handle))
    return None if failed else (nvml, handle)


@cache
def power_limit(uuid: str) -> int:
    """Watts that it may take, as it was set when that was first asked; 0 where NVML does not say."""
    found, milliwatts = gpu(uuid), ctypes.c_uint()
    if found is None or found[0].nvmlDeviceGetPowerManagementLimit(found[1], ctypes.byref(milliwatts)):
        return 0
    return round(milliwatts.value / 1000)


def sm_clock(uuid: str) -> int:
    """Of its multiprocessors now, in MHz; 0 where NVML does not say."""
    found, mhz = gpu(uuid), ctypes.c_uint()
    if found is None or found[0].nvmlDeviceGetClockInfo(found[1], _SM_CLOCK, ctypes.byref(mhz)):
        return 0
    return mhz.value


def slowed(uuid: str) -> tuple[str, ...]:
    """Why its clocks are lower now than they should be: of SLOWED; () where NVML does not say."""
    found, reasons = gpu(uuid), ctypes.c_ulonglong()
    if found is None or found[0].nvmlDeviceGetCurrentClocksThrottleReasons(found[1], ctypes.byref(reasons)):
        return ()
    return tuple(why for bit, why in SLOWED.items() if reasons.value & bit)
