"""Calls like one before, launched by C++: the extension of `compat.native`, built in the background, and its entries.

Python finds what a call runs on, and keeps it (`functional.fast_path`). The extension does the same from then on in a
tenth of the time. What it does not have an entry for, Python takes, as where there is no extension: no compiler, a
cache that cannot be written, TRITON_GEMM_NATIVE=0.
"""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from .. import tables
from ..compat import (
    INTERPRETED,
    TENSOR_MAP,
    bytes_of,
    cxx_compiler,
    driver_launch,
    load_native,
    native_command,
    native_file,
    native_refused,
    takes,
)
from ..hardware.driver import address_of, ensure_context, parameter_sizes
from ..kernels.launch import Pointer, Scalar, TensorMap
from ..selection import generation
from . import policies
from .binaries import SCALARS
from .workspace import workspace

if TYPE_CHECKING:
    from .plan import GemmPlan, Step

TIMEOUT_S = 600.0  # for a build, by this process or another
# Of each type of a parameter, as Triton names it: how it is packed.
FORMATS = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "I", "u8": "B", "u16": "H", "u32": "I"}
FORMATS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
OVERSIZED = 228 * 1024  # bytes of shared memory from which newer versions of Triton launch otherwise
BUILDING = "it is being built"
Entry = tuple[object, ...]

log = logging.getLogger("triton_gemm")
_module: Any = None
_begun = False
_why = "no call was made twice"  # there is no module


@lru_cache(maxsize=1)
def enabled() -> bool:
    """Whether TRITON_GEMM_NATIVE asks for it, which is so unless it is 0. ValueError where it is neither 0 nor 1."""
    found = os.environ.get("TRITON_GEMM_NATIVE", "1")
    if found not in ("0", "1"):
        raise ValueError(f"TRITON_GEMM_NATIVE must be 0 or 1, not {found!r}")
    return found == "1"


def why_not() -> str | None:
    """Why calls are not launched by C++ in this process and none could be; None where they can be, once it is built."""
    if INTERPRETED:
        return "Triton's interpreter runs kernels"
    if not torch.cuda.is_available() or torch.version.hip:
        return "there is no NVIDIA GPU"
    return native_refused() if enabled() else "TRITON_GEMM_NATIVE is 0"


def module() -> Any:
    """The extension, or None. The first call begins to build it, in another thread."""
    global _begun, _why
    if _module is not None or _begun:
        return _module
    refused = why_not()
    if refused is None and torch.cuda.is_current_stream_capturing():
        return None
    _begun, _why = True, refused or BUILDING
    if refused is None:
        threading.Thread(target=_begin, name="triton_gemm native", daemon=True).start()
    return None


def built() -> Any:
    """The extension, if there is no need to wait for it: loaded before, or built before and loaded now."""
    global _begun
    if _module is None and not _begun and why_not() is None:
        compiler, where = cxx_compiler(), folder()
        try:
            found = compiler is not None and where is not None and (where / native_file(compiler)).exists()
        except (OSError, subprocess.SubprocessError):
            found = False
        if found:
            _begun = True
            _begin()
    return _module


def possible() -> bool:
    """Whether there is an extension, or may be one later."""
    return _module is not None or not _begun or _why == BUILDING


def state() -> str | None:
    """Why there is no extension yet, or None."""
    return None if _module is not None else _why


def _begin() -> None:
    global _module, _why
    try:
        of_driver = address_of("cuLaunchKernelEx"), address_of("cuGetErrorString")
        state = vars(generation), policies._context, policies.in_backward
        _module = load_native(build(), *of_driver, *state, ensure_context)
    except Exception as error:  # in no call's way
        words = getattr(error, "stderr", None) or str(error)
        _why = (words.strip() or type(error).__name__).splitlines()[-1]
        log.debug("calls are launched by Python: %s", _why)


def folder() -> Path | None:
    """Where the extension is kept: beside the user's tables."""
    found = tables.folder()
    return None if found is None else found.parent / "native"


def build() -> Path:
    """The extension's file, which is built unless it is there: by one process at a time, which the others wait for.
    RuntimeError where there is no compiler or no folder; OSError and CalledProcessError where building fails."""
    compiler, where = cxx_compiler(), folder()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: set CXX, or install g++")
    if where is None:
        raise RuntimeError("there is no folder for it: set TRITON_GEMM_CACHE_DIR")
    path, end = where / native_file(compiler), time.monotonic() + TIMEOUT_S
    while not path.exists():
        try:
            with tables.files.locked(where, wait=False):
                if not path.exists():
                    _compile(compiler, path)
        except TimeoutError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    return path


def _compile(compiler: str, path: Path) -> None:
    written = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    command = [*native_command(compiler), "-o", str(written)]
    with subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True) as process:
        atexit.register(process.kill)  # nothing is left behind by a process that ends before
        try:
            _, words = process.communicate(timeout=TIMEOUT_S)
            if process.returncode:
                raise subprocess.CalledProcessError(process.returncode, compiler, stderr=words)
            os.replace(written, path)
        finally:
            process.kill()
            atexit.unregister(process.kill)
            written.unlink(missing_ok=True)


def entry_of(
    plan: GemmPlan,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    derivative: int = 0,
    copies: bool = False,
) -> Entry:
    """What the extension's table keeps of a compiled plan and of the results that its calls make. derivative: of
    `fast_path.DERIVATIVES`, or 0: C++ has none. copies: as in `fast_path.Known`. ValueError where that is not what
    Triton's launcher would do."""
    shares = partial(_workspace, plan.index, plan.workspace) if plan.shares else None
    temporaries = tuple(
        (tuple(x.shape), torch.empty(x.shape, device="meta").stride(), x.dtype)
        for step in plan.steps
        for x in step.launch.temporaries
    )
    return (
        *(plan, shares, (tuple(shape), tuple(strides), dtype), temporaries, plan.extents, copies, derivative),
        tuple(_step(step, float(copies)) for step in plan.steps),
    )


def _workspace(index: int, nbytes: int, stream: int) -> list[torch.Tensor]:
    return workspace(index, stream, nbytes)


class Parameters:
    """A kernel's parameters, one after another, as the driver is shown them: those that calls have in common, and
    where others go."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.bytes = bytearray()
        self.offsets: list[int] = []

    def add(self, kind: str, value: Any = 0) -> int:
        """Where a parameter of that type begins: aligned to its size."""
        pointer = kind.startswith("*")
        if kind != "nvTmaDesc" and not pointer and kind not in FORMATS:
            raise ValueError(f"{kind} is passed by Python only")
        packed = bytes(TENSOR_MAP) if kind == "nvTmaDesc" else struct.pack("Q" if pointer else FORMATS[kind], value)
        self.bytes += bytes(-len(self.bytes) % len(packed))
        self.types.append(kind)
        self.offsets.append(len(self.bytes))
        self.bytes += packed
        return self.offsets[-1]

    @property
    def sizes(self) -> list[int]:
        return [
            8 if x.startswith("*") else TENSOR_MAP if x == "nvTmaDesc" else struct.calcsize(FORMATS[x])
            for x in self.types
        ]


def _step(step: Step, beta: float) -> Entry:
    kernel, launch = step.kernel, step.launch
    found = driver_launch(kernel, launch.grid, launch.cluster)
    parameters = Parameters()
    addresses, alphas, maps = [], [], []
    encoders = iter(step.maps)
    first = len(SCALARS)  # of a call's values that is an operand's address
    for part, kind in zip(launch.arguments.values(), kernel.src.signature.values(), strict=True):
        if isinstance(part, TensorMap):
            _, place, _, encode = next(encoders)
            maps.append((parameters.add("nvTmaDesc"), place - first, partial(_encode, step.device, encode)))
            for width, values in (("i32", part.shape), ("i64", part.strides)):
                for value in values:
                    parameters.add(width, value)
        elif kind == "constexpr":
            continue
        elif isinstance(part, Pointer):
            addresses.append((parameters.add(kind), step.places[part.operand] - first))
        elif part == Scalar("alpha"):
            alphas.append((parameters.add(kind, 0.0), struct.calcsize(FORMATS[kind])))
        else:
            parameters.add(kind, beta if part == Scalar("beta") else part)
    if not takes(kernel, parameters.types):
        raise ValueError(f"{parameters.types} is not what Triton passes")
    for _ in range(2):  # Triton's scratch memory, of which kernels here have none
        parameters.add("*i8")
    sizes = parameter_sizes(found.function)
    if sizes not in (None, parameters.sizes):
        raise ValueError(f"the kernel's parameters have {sizes} bytes, not {parameters.sizes}")
    if found.shared > OVERSIZED or found.cluster > 8:
        raise ValueError("Triton launches it otherwise")
    return (
        *(*found, bytes(parameters.bytes), tuple(parameters.offsets)),
        *(tuple(addresses), tuple(alphas), tuple(maps)),
    )


def _encode(device: int, encode: Callable[[int], Any], address: int) -> bytes:
    ensure_context(device)
    return bytes_of(encode(address))


def _forget() -> None:
    """In a forked child: the thread that builds lives in the parent alone."""
    global _begun
    _begun = _module is not None


os.register_at_fork(after_in_child=_forget)
