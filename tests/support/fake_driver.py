"""What launches kernels, without a GPU: a driver that notes what it is shown, and plans that compile for Hopper."""

from __future__ import annotations

import ctypes
import inspect
import re
import struct
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver as triton_driver

from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import compat
from triton_gemm.functional import fast_path
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.kernels.launch import Launch, Pointer, Scalar, TensorMap
from triton_gemm.runtime import native, native_build, plan, policies, stand_ins, step, workspace
from triton_gemm.selection import generation

FUNCTION, MODULE = 0xF00D, 0xD00F  # the handle of the first kernel, and that of all modules


class Config(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver API."""

    _fields_ = (
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_void_p] * 4)
WORDS = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_int, ctypes.POINTER(ctypes.c_char_p))
REPLACE = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p)
CAPTURING = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.POINTER(ctypes.c_int))


@dataclass(frozen=True)
class Seen:
    """A launch. attributes: the number of each and the first twelve bytes of its value."""

    grid: tuple[int, ...]
    block: tuple[int, ...]
    shared: int
    attributes: tuple[tuple[int, bytes], ...]
    parameters: tuple[bytes, ...]
    stream: int
    function: int


@dataclass
class Driver:
    """Records what `cuLaunchKernelEx` is called with: `seen` by C++, `by_python` by Python.

    answers: results of its next calls, then 0; refused: results of the next replacements of a tensor map's address,
    then 0; replaced: their addresses; capturing: whether streams are captured.
    """

    seen: list[Seen] = field(default_factory=list)
    by_python: list[Seen] = field(default_factory=list)
    answers: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    replaced: list[int] = field(default_factory=list)
    capturing: bool = False
    contexts: list[int] = field(default_factory=list)  # devices whose context was made current
    kernels: dict[int, Any] = field(default_factory=dict)  # Triton's compiled ones, by handle; None where it has none
    compiled: dict[bytes, Any] = field(default_factory=dict)  # the same by their code
    sizes: dict[int, list[int]] = field(default_factory=dict)  # bytes of each parameter of a kernel, by handle

    def __post_init__(self) -> None:
        by_cpp, by_python = (LAUNCH(partial(self._launch, x)) for x in (self.seen, self.by_python))
        functions = (WORDS, self._words), (REPLACE, self._replace), (CAPTURING, self._capturing)
        words, replace, capturing = (kind(function) for kind, function in functions)
        self.callbacks = [by_cpp, words, replace, capturing]  # kept, for the extension calls them
        self.library = SimpleNamespace(
            cuLaunchKernelEx=by_python, cuGetErrorString=words, cuTensorMapReplaceAddress=replace
        )

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(x, ctypes.c_void_p).value or 0 for x in self.callbacks)

    def load(self, code: bytes, symbol: str, shared: int) -> tuple[int, int]:
        handle = FUNCTION + len(self.kernels)
        self.kernels[handle] = kernel = self.compiled.get(code)
        if kernel is not None:
            self.sizes[handle] = sizes_in(kernel.asm["ptx"])
        return MODULE, handle

    def _launch(self, seen: list[Seen], config: int, function: int, parameters: int, _: object) -> int:
        shown = ctypes.cast(config, ctypes.POINTER(Config)).contents
        given = ctypes.cast(parameters, ctypes.POINTER(ctypes.c_void_p))
        attributes = []
        for i in range(shown.count):
            raw = ctypes.string_at(shown.attributes + 72 * i, 72)
            attributes.append((struct.unpack_from("i", raw)[0], raw[8:20]))
        seen.append(
            Seen(
                (shown.gridx, shown.gridy, shown.gridz),
                (shown.blockx, shown.blocky, shown.blockz),
                shown.shared,
                tuple(attributes),
                tuple(ctypes.string_at(given[i], size) for i, size in enumerate(self.sizes.get(function, ()))),
                shown.stream or 0,
                function,
            )
        )
        return self.answers.pop(0) if self.answers else 0

    def _words(self, error: int, words: Any) -> int:
        words[0] = b"an illegal address"
        return 0

    def _replace(self, found: int, address: int | None) -> int:
        """The address is where `tensor_map` puts it."""
        assert found % 64 == 0
        self.replaced.append(address or 0)
        if refused := self.refused.pop(0) if self.refused else 0:
            return refused
        ctypes.memmove(found, struct.pack("Q", address or 0), 8)
        return 0

    def _capturing(self, _: int, status: Any) -> int:
        status[0] = int(self.capturing)
        return 0


def types_of(kernel: Any) -> list[str]:
    """Of what Triton's launcher passes, in its words."""
    expand = triton_driver.expand_signature
    of_nvidia = ["nvTmaDesc"][: len(inspect.signature(expand).parameters) - 2]  # from Triton 3.9 on
    flat = expand(kernel.src.signature.values(), kernel.metadata.tensordesc_meta, *of_nvidia)
    return [x for x in flat if x != "constexpr"]


def launched(kernel: Any, grid: tuple[int, int, int], cluster: int) -> tuple[Any, ...]:
    """Grid, block, shared memory and attributes that Triton's `_launch` gives the driver (backends/nvidia/driver.c) for
    a compiled kernel, or clusters of so many."""
    warps, ctas, shared = kernel.packed_metadata
    if cluster > 1:
        grid, ctas = (grid[0] // cluster, *grid[1:]), cluster
    attributes: list[tuple[int, bytes]] = []
    if kernel.metadata.launch_pdl:
        attributes.append((6, struct.pack("i8x", 1)))
    if kernel.metadata.launch_cooperative_grid:
        attributes.append((2, struct.pack("i8x", 1)))
    if ctas != 1:
        attributes += [(4, struct.pack("III", ctas, 1, 1)), (5, struct.pack("i8x", 1))]
    return (grid[0] * ctas, *grid[1:]), (32 * warps, 1, 1), shared, tuple(attributes)


def sizes_in(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel that PTX has."""
    [parameters] = re.findall(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", parameters)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def tensor_map(address: int, *about: Any) -> bytes:
    """As the driver would encode it: other bytes for every address and layout."""
    return (struct.pack("Q", address) + repr(about).encode()).ljust(128, b".")[:128]


def launch_on_device_0(patch: pytest.MonkeyPatch) -> None:
    """Has plans of CPU tensors launch on its default stream, in a context that is there."""
    for module in (plan, fast_path):
        patch.setattr(module, "current_device", lambda: 0)
    replace_all(patch, plan, current_stream=lambda _: 0, ensure_context=lambda _: None)


def take_driver(patch: pytest.MonkeyPatch) -> Driver:
    """In the place of the CUDA driver, for launches by Python. No kit is used."""
    driver = Driver()
    replace_all(patch, hardware_driver, load=driver.load, parameter_sizes=driver.sizes.get, tensor_map=tensor_map)
    replace_all(patch, hardware_driver, ensure_context=lambda _: None, _library=lambda: driver.library)
    patch.setattr(step, "_functions", {})
    patch.setattr(step.kits, "code_of", lambda *_: None)
    return driver


def made_up(launch: Launch, code: bytes = b"code") -> compat.MachineCode:
    """What a compiler might make of a launch: all that is no integer, it knew."""
    types, boxes = [], []
    for part in launch.arguments.values():
        if isinstance(part, TensorMap):
            boxes.append((3, part.dtype.itemsize, 7, part.block))
        integer = isinstance(part, int) and not isinstance(part, bool)
        kinds = {TensorMap: "tensordesc", Pointer: "*bf16", Scalar: "fp32"}
        types.append(kinds.get(type(part), ("i64" if part >> 31 else "i32") if integer else "constexpr"))
    return compat.MachineCode("made_up", 4, 1, 1024, False, False, tuple(types), tuple(boxes), code)


def install(patch: pytest.MonkeyPatch, path: Path) -> Driver:
    """Has plans of CPU tensors compile for Hopper, and launch by a driver that notes it; the extension is loaded."""
    driver = take_driver(patch)
    extension = compat.import_native(str(path))
    compat.set_up_native(extension, policies._context, policies.in_backward, driver.contexts.append)
    for followed in (generation, stand_ins, workspace):
        patch.setattr(followed, "_followers", [])
    generation.follow(extension.follow)
    patch.setattr(native_build, "_module", extension)
    patch.setattr(native, "_launching", lambda: driver.addresses)
    sums = [torch.empty(1 << 20), torch.zeros(1 << 14, dtype=torch.int32)]
    for module in (plan, native):
        patch.setattr(module, "workspace", lambda *_: sums)
    launch_on_device_0(patch)
    patch.setattr(plan, "device_info", lambda _: HOPPER)
    compile_step = step.compiled

    def compiled(launch: Any, operands: Any, scalars: Any) -> Any:
        with compat.compiling_for((9, 0)):
            found = compile_step(launch, {name: x.to("meta") for name, x in operands.items()}, scalars)
        driver.compiled[found.asm["cubin"]] = found
        return found

    patch.setattr(step, "compiled", compiled)
    return driver


def plan_for_hopper(patch: pytest.MonkeyPatch) -> None:
    """Plans calls on CPU tensors for Hopper, too. Compiles nothing in the background, and starts without plans."""
    replace_all(patch, plan, PLANS={}, info_of=lambda _: HOPPER)
    patch.setattr(plan.background, "enabled", lambda: False)
