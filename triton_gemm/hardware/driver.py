"""Calls of the CUDA driver that neither torch nor Triton makes: contexts, numbers of captures, its version, cuBLAS's.

torch and the CUDA runtime make a device's context current in a thread at its first runtime call there. Driver calls do
not: in a thread that has made none yet, encoding a tensor map fails with CUDA_ERROR_INVALID_CONTEXT, and Triton's
launcher takes device 0 (backends/nvidia/driver.c, `ensureCudaContext`).
"""

from __future__ import annotations

import ctypes
import os
import threading
from functools import cache

_thread = threading.local()  # has `has_context` where this thread was seen to have one


def ensure_context(device: int) -> None:
    """Makes the primary context of `device`, the thread's current device, current in this thread, if none is yet.

    Allowed while a stream is captured. RuntimeError where the driver refuses.
    """
    if hasattr(_thread, "has_context"):
        return
    context = ctypes.c_void_p()
    _call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        _call("cuCtxSetCurrent", _primary_context(device))
    _thread.has_context = True


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Retained once, and for as long as the process lives, as the CUDA runtime retains it."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    _call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    _call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def capture_id(stream: int) -> int:
    """The number of the capture that `stream` takes part in, which no other capture of the process has (CUDA driver
    API, cuStreamGetCaptureInfo)."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    _call(
        "cuStreamGetCaptureInfo_v2",
        *(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None),
    )
    return number.value


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver runs, as (major, minor) (cuDriverGetVersion). OSError where there is no driver,
    RuntimeError where it refuses."""
    version = ctypes.c_int()
    _call("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def address_of(name: str) -> int:
    """Of a function of the driver. OSError where there is no driver, AttributeError where it has no such function."""
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0


def parameter_sizes(function: int) -> list[int] | None:
    """The bytes of each of a kernel's parameters (cuFuncGetParamInfo); None where the driver does not say."""
    if not hasattr(_library(), "cuFuncGetParamInfo"):
        return None
    sizes: list[int] = []
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    while not _library().cuFuncGetParamInfo(
        *(ctypes.c_void_p(function), ctypes.c_size_t(len(sizes)), ctypes.byref(offset), ctypes.byref(size))
    ):
        sizes.append(size.value)
    return sizes


@cache
def cublas_version(cuda: str | None) -> str | None:
    """The version of the cuBLAS that this process has loaded, as "13.1.0" (cublasGetProperty), by the version of CUDA
    that torch was built for; None where there is none."""
    part = ctypes.c_int()
    try:
        library = ctypes.CDLL(f"libcublas.so.{str(cuda).partition('.')[0]}", mode=os.RTLD_NOLOAD)
        parts = [str(part.value) for of in range(3) if library.cublasGetProperty(of, ctypes.byref(part)) == 0]
    except (OSError, AttributeError):
        return None
    return ".".join(parts) if len(parts) == 3 else None


def _call(name: str, *arguments: object) -> None:
    error = getattr(_library(), name)(*arguments)
    if error:
        raise RuntimeError(f"{name} failed with CUDA error {error}")


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
