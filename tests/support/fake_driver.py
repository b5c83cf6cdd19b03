"""What launches kernels, without a GPU: a driver that notes what it is shown, and plans that compile for Hopper."""

from __future__ import annotations

import ctypes
import inspect
import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from triton.backends.nvidia import driver as triton_driver

from tests.support.table_fakes import HOPPER
from triton_gemm import compat
from triton_gemm.functional import fast_path
from triton_gemm.runtime import native, native_build, plan, policies, workspace
from triton_gemm.selection import generation

FUNCTION = 0xF00D  # the handle of the first kernel
# Of each of Triton's types of parameters, as its driver.c has them: how Python's value is packed.
PACKED = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "fp32": "f", "f32": "f", "fp64": "d"}


class Config(ctypes.Structure):
    """CUlaunchConfig of the CUDA driver API."""

    _fields_ = (
        *((f"{what}{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.c_void_p),
        ("count", ctypes.c_uint),
    )


LAUNCH = ctypes.CFUNCTYPE(
    ctypes.c_int, ctypes.POINTER(Config), ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p), ctypes.c_void_p
)
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


@dataclass
class Driver:
    """Records what `cuLaunchKernelEx` is called with. sizes: of the parameters of a call's launches; answers: results
    of its next calls, then 0; refused: results of the next replacements of a tensor map's address, then 0; capturing:
    whether streams are captured."""

    sizes: Sequence[Sequence[int]] = ()
    seen: list[Seen] = field(default_factory=list)
    by_python: list[tuple[Any, list[Any]]] = field(default_factory=list)  # kernel and Triton's arguments
    answers: list[int] = field(default_factory=list)
    refused: list[int] = field(default_factory=list)
    capturing: bool = False
    contexts: list[int] = field(default_factory=list)  # devices whose context was made current
    functions: dict[int, list[int]] = field(default_factory=dict)  # the bytes of each parameter of a kernel, by handle

    def __post_init__(self) -> None:
        functions = (LAUNCH, self._launch), (WORDS, self._words), (REPLACE, self._replace), (CAPTURING, self._capturing)
        self.callbacks = [kind(function) for kind, function in functions]  # kept, for the extension calls them

    @property
    def addresses(self) -> tuple[int, ...]:
        return tuple(ctypes.cast(x, ctypes.c_void_p).value or 0 for x in self.callbacks)

    def _launch(self, config: Any, function: int, parameters: Any, _: object) -> int:
        assert function in self.functions
        shown, sizes = config.contents, self.sizes[len(self.seen) % len(self.sizes)]
        attributes = []
        for i in range(shown.count):
            raw = ctypes.string_at(shown.attributes + 72 * i, 72)
            attributes.append((struct.unpack_from("i", raw)[0], raw[8:20]))
        self.seen.append(
            Seen(
                (shown.gridx, shown.gridy, shown.gridz),
                (shown.blockx, shown.blocky, shown.blockz),
                shown.shared,
                tuple(attributes),
                tuple(ctypes.string_at(parameters[i], size) for i, size in enumerate(sizes)),
            )
        )
        return self.answers.pop(0) if self.answers else 0

    def _words(self, error: int, words: Any) -> int:
        words[0] = b"an illegal address"
        return 0

    def _replace(self, found: int, address: int | None) -> int:
        """The address is where `tensor_map` puts it."""
        assert found % 64 == 0
        ctypes.memmove(found, struct.pack("Q", address or 0), 8)
        return self.refused.pop(0) if self.refused else 0

    def _capturing(self, _: int, status: Any) -> int:
        status[0] = int(self.capturing)
        return 0


def types_of(kernel: Any) -> list[str]:
    """Of what Triton's launcher passes, in its words."""
    expand = triton_driver.expand_signature
    of_nvidia = ["nvTmaDesc"][: len(inspect.signature(expand).parameters) - 2]  # from Triton 3.9 on
    flat = expand(kernel.src.signature.values(), kernel.metadata.tensordesc_meta, *of_nvidia)
    return [x for x in flat if x != "constexpr"]


def packed(kernel: Any, arguments: Sequence[Any]) -> tuple[bytes, ...]:
    """The parameters that Triton's launcher makes of what Python gives it, its two null pointers included."""
    kinds = types_of(kernel)
    values = [
        x if kind == "nvTmaDesc" else struct.pack("Q" if kind[0] == "*" else PACKED[kind], x)
        for x, kind in zip(arguments, kinds, strict=True)
    ]
    return (*values, bytes(8), bytes(8))


def launched(kernel: Any, grid: tuple[int, int, int], cluster: int) -> tuple[Any, ...]:
    """Grid, block, shared memory and attributes that Triton's `_launch` gives the driver (backends/nvidia/driver.c),
    with clusters as `compat.launcher` asks for them."""
    warps, ctas, shared = kernel.packed_metadata
    if cluster > 1:
        grid, ctas = (grid[0] // cluster, *grid[1:]), cluster
    attributes: list[tuple[int, bytes]] = []
    if kernel.run.launch_pdl:
        attributes.append((6, struct.pack("i8x", 1)))
    if kernel.run.launch_cooperative_grid:
        attributes.append((2, struct.pack("i8x", 1)))
    if ctas != 1:
        attributes += [(4, struct.pack("III", ctas, 1, 1)), (5, struct.pack("i8x", 1))]
    return (grid[0] * ctas, *grid[1:]), (32 * warps, 1, 1), shared, tuple(attributes)


def sizes_in(ptx: str) -> list[int]:
    """The bytes of each parameter of the kernel that PTX has."""
    [parameters] = re.findall(r"\.visible \.entry \w+\((.*?)\)", ptx, re.DOTALL)
    found = re.findall(r"\.param (?:\.align \d+ )?\.[a-z](\d+)[^,\[]*(?:\[(\d+)\])?", parameters)
    return [int(bits) // 8 * int(count or 1) for bits, count in found]


def tensor_map(address: int, **about: Any) -> bytes:
    """As the driver would encode it: other bytes for every address and layout."""
    return (struct.pack("Q", address) + repr(sorted(about.items())).encode()).ljust(128, b".")[:128]


def build(folder: Path) -> Path:
    """The extension, built in that folder."""
    return native_build.build(folder)


def install(patch: pytest.MonkeyPatch, path: Path) -> Driver:
    """Has plans of CPU tensors compile for Hopper, and launch by a driver that notes it; the extension is loaded."""
    driver = Driver()
    extension = compat.import_native(str(path))
    compat.set_up_native(extension, policies._context, policies.in_backward, driver.contexts.append)
    for followed in (generation, workspace):
        patch.setattr(followed, "_followers", [])
    generation.follow(extension.follow)
    patch.setattr(native_build, "_module", extension)
    patch.setattr(native, "_launching", lambda: driver.addresses)
    patch.setattr(native, "parameter_sizes", driver.functions.get)
    patch.setattr(native, "bytes_of", lambda found: found)
    patch.setattr(native, "takes", lambda kernel, types: list(types) == types_of(kernel))
    sums = [torch.empty(1 << 20), torch.zeros(1 << 14, dtype=torch.int32)]
    for module in (plan, native):
        patch.setattr(module, "workspace", lambda *_: sums)
    patch.setattr(plan, "device_info", lambda _: HOPPER)
    patch.setattr(plan, "ensure_context", lambda _: None)
    patch.setattr(plan, "current_stream", lambda _: 0)
    patch.setattr(plan, "tensor_maps", _encoders)
    patch.setattr(plan, "launcher", lambda kernel, grid, cluster: _by_python(driver, kernel))
    for module in (plan, fast_path):
        patch.setattr(module, "current_device", lambda: 0)
    compile_step = plan.compiled

    def compiled(launch: Any, operands: Any, scalars: Any) -> Any:
        with compat.compiling_for((9, 0)):
            found = compile_step(launch, {name: x.to("meta") for name, x in operands.items()}, scalars)
        run = SimpleNamespace(
            launch_cooperative_grid=found.metadata.launch_cooperative_grid, launch_pdl=found.metadata.launch_pdl
        )
        about = {"src": found.src, "metadata": found.metadata, "packed_metadata": found.packed_metadata}
        function = FUNCTION + len(driver.functions)
        driver.functions[function] = sizes_in(found.asm["ptx"])
        return SimpleNamespace(**about, function=function, run=run)

    patch.setattr(plan, "compiled", compiled)
    return driver


def plan_for_hopper(patch: pytest.MonkeyPatch) -> None:
    """Plans calls on CPU tensors for Hopper, too. Compiles nothing in the background, and starts without plans."""
    patch.setattr(plan, "PLANS", {})
    patch.setattr(plan, "info_of", lambda _: HOPPER)
    patch.setattr(plan.background, "enabled", lambda: False)


def _encoders(kernel: Any) -> list[Callable[..., bytes]]:
    return [tensor_map for _ in kernel.metadata.tensordesc_meta or ()]


def _by_python(driver: Driver, kernel: Any) -> Callable[[int, Sequence[Any]], None]:
    return lambda stream, arguments: driver.by_python.append((kernel, list(arguments)))
