"""Calls of the CUDA driver that torch does not make: kernels, tensor maps, contexts, numbers of captures, versions.

torch and the CUDA runtime make a device's context current in a thread at its first runtime call there. Driver calls do
not: in a thread that has made none yet, a launch fails with CUDA_ERROR_INVALID_CONTEXT.
"""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Sequence
from functools import cache
from typing import Any

TENSOR_MAP, ALIGNMENT = 128, 128  # bytes of a CUtensorMap, and what they are aligned to
TFLOAT32 = 11  # CU_TENSOR_MAP_DATA_TYPE_TFLOAT32: TMA rounds fp32 to tf32 on its way (as CUTLASS has it do)
INVALID_CONTEXT = 201  # CUDA_ERROR_INVALID_CONTEXT
STATIC_LIMIT = 48 * 1024  # bytes of shared memory that need not be asked for
# CUDA errors that mean: this GPU or driver cannot run this machine code.
INCOMPATIBLE = (1, 200, 209, 218, 222, 300, 301, 302, 303, 500)

_thread = threading.local()  # has `has_context` where this thread was seen to have one


class DriverError(RuntimeError):
    """What the driver has refused. error: its number (CUresult)."""

    def __init__(self, name: str, error: int) -> None:
        super().__init__(f"{name} failed with CUDA error {error}: {error_text(error)}")
        self.error = error


def ensure_context(device: int) -> None:
    """Makes the primary context of `device`, the thread's current device, current in this thread, if none is yet.

    Allowed while a stream is captured. RuntimeError where the driver refuses.
    """
    if hasattr(_thread, "has_context"):
        return
    context = ctypes.c_void_p()
    call("cuCtxGetCurrent", ctypes.byref(context))
    if not context.value:
        call("cuCtxSetCurrent", _primary_context(device))
    _thread.has_context = True


@cache
def _primary_context(device: int) -> ctypes.c_void_p:
    """Retained once, and for as long as the process lives, as the CUDA runtime retains it."""
    handle, context = ctypes.c_int(), ctypes.c_void_p()
    call("cuDeviceGet", ctypes.byref(handle), ctypes.c_int(device))
    call("cuDevicePrimaryCtxRetain", ctypes.byref(context), handle)
    return context


def capture_id(stream: int) -> int:
    """The number of the capture that `stream` takes part in, which no other capture of the process has (CUDA driver
    API, cuStreamGetCaptureInfo)."""
    status, number = ctypes.c_int(), ctypes.c_ulonglong()
    call(
        "cuStreamGetCaptureInfo_v2",
        *(ctypes.c_void_p(stream), ctypes.byref(status), ctypes.byref(number), None, None, None),
    )
    return number.value


def driver_version() -> tuple[int, int]:
    """The newest CUDA that the driver runs, as (major, minor) (cuDriverGetVersion). OSError where there is no driver,
    RuntimeError where it refuses."""
    version = ctypes.c_int()
    call("cuDriverGetVersion", ctypes.byref(version))
    return version.value // 1000, version.value % 1000 // 10


def address_of(name: str) -> int:
    """Of a function of the driver. OSError where there is no driver, AttributeError where it has no such function."""
    return ctypes.cast(getattr(_library(), name), ctypes.c_void_p).value or 0


def load(code: bytes, symbol: str, shared: int) -> tuple[int, int]:
    """The handles of a cubin's module and of its kernel of that name, loaded into the current context, with so many
    bytes of dynamic shared memory allowed. RuntimeError where the driver refuses."""
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    call("cuModuleLoadData", ctypes.byref(module), code)
    call("cuModuleGetFunction", ctypes.byref(function), module, symbol.encode())
    if shared > STATIC_LIMIT:
        call("cuFuncSetCacheConfig", function, ctypes.c_int(1))  # CU_FUNC_CACHE_PREFER_SHARED
        # CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
        call("cuFuncSetAttribute", function, ctypes.c_int(8), ctypes.c_int(shared))
    return module.value or 0, function.value or 0


class _Attribute(ctypes.Structure):
    """CUlaunchAttribute: its number, and the first bytes of its value."""

    _fields_ = (("id", ctypes.c_int), ("_", ctypes.c_int), ("value", ctypes.c_uint * 16))


class Config(ctypes.Structure):
    """CUlaunchConfig."""

    _fields_ = (
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_Attribute)),
        ("count", ctypes.c_uint),
    )


def launch_config(step: Any) -> Config:
    """Of a `runtime.step.DriverLaunch`, for `launch`."""
    attributes: list[tuple[int, tuple[int, ...]]] = []
    if step.pdl:
        attributes.append((6, (1,)))  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    if step.cooperative:
        attributes.append((2, (1,)))  # CU_LAUNCH_ATTRIBUTE_COOPERATIVE
    if step.cluster > 1:
        attributes.append((4, (step.cluster, 1, 1)))  # CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
        attributes.append((5, (1,)))  # _CLUSTER_SCHEDULING_POLICY_PREFERENCE: CU_CLUSTER_SCHEDULING_POLICY_SPREAD
    made = (_Attribute * 4)(*[_Attribute(number, 0, (ctypes.c_uint * 16)(*value)) for number, value in attributes])
    return Config(*step.grid, step.threads, 1, 1, step.shared, None, made, len(attributes))


def launch(config: Config, function: ctypes.c_void_p, parameters: Any) -> int:
    """The driver's error, or 0. parameters: an array of their addresses."""
    if not config.grid_x * config.grid_y * config.grid_z:
        return 0
    return int(_library().cuLaunchKernelEx(ctypes.byref(config), function, parameters, None))


def tensor_map(
    address: int,
    element: int,
    nbytes: int,
    shape: Sequence[int],
    strides: Sequence[int],
    box: Sequence[int],
    swizzle: int,
) -> bytes:
    """The bytes of a CUtensorMap, of elements of so many bytes and the driver's number of their type. Outside of the
    tensor it reads zeros. Strides are in elements, and the last is 1.

    Up to CUDA 13.1 the driver sets a bit for less than 128 KB that must not be set, or reads fail now and then (CUTLASS
    b7ecaa605dd7, Triton's fillTMADescriptorTiled)."""
    rank = len(shape)
    made = ctypes.create_string_buffer(TENSOR_MAP + ALIGNMENT)
    first = -ctypes.addressof(made) % ALIGNMENT
    sizes = (ctypes.c_uint64 * rank)(*reversed(shape))
    pitches = (ctypes.c_uint64 * rank)(*[nbytes * x for x in reversed(strides[:-1])])
    sides, steps = (ctypes.c_uint32 * rank)(*reversed(box)), (ctypes.c_uint32 * rank)(*[1] * rank)
    at = ctypes.c_void_p(ctypes.addressof(made) + first), element, rank, ctypes.c_void_p(address)
    # CU_TENSOR_MAP_INTERLEAVE_NONE, the swizzle, CU_TENSOR_MAP_L2_PROMOTION_L2_128B, CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE
    call("cuTensorMapEncodeTiled", *at, sizes, pitches, sides, steps, 0, swizzle, 2, 0)
    spanned = nbytes * (1 + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)))
    if spanned < 128 * 1024 and driver_version() <= (13, 1):
        (ctypes.c_uint64 * 2).from_buffer(made, first)[1] &= ~(1 << 21)
    return made.raw[first : first + TENSOR_MAP]


def replace_address(tensor_map: int, address: int) -> int:
    """Of a tensor map at an address; the driver's error, or 0."""
    return int(_library().cuTensorMapReplaceAddress(ctypes.c_void_p(tensor_map), ctypes.c_void_p(address)))


def error_text(error: int) -> str:
    text = ctypes.c_char_p()
    _library().cuGetErrorString(error, ctypes.byref(text))
    return (text.value or b"unknown error").decode()


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


def call(name: str, *arguments: object, allowed: Sequence[int] | None = (0,)) -> int:
    """Calls a function of the driver, and gives its error, or 0. DriverError for one that is not among `allowed`; None:
    all are."""
    error = int(getattr(_library(), name)(*arguments))
    if allowed is not None and error not in allowed:
        raise DriverError(name, error)
    return error


@cache
def _library() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")
