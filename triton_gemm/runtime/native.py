"""Calls like one before, launched by C++: entries of the extension, which `native_build` builds and loads.

Python finds what a call runs on, and keeps it (`functional.fast_path`). The extension does the same from then on in a
tenth of the time. What it does not have an entry for, Python takes, as where there is no extension.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..compat import TENSOR_MAP, bytes_of, driver_launch, takes
from ..hardware.driver import address_of, parameter_sizes
from ..kernels.launch import Pointer, Scalar, TensorMap
from .binaries import SCALARS
from .native_build import built as built
from .native_build import module as module
from .native_build import possible as possible
from .native_build import state as state
from .native_build import why_not as why_not
from .workspace import follow as follow_workspaces
from .workspace import is_of_stream, workspace

if TYPE_CHECKING:
    from .plan import GemmPlan, Step

# Of each type of a parameter, as Triton names it: how it is packed.
FORMATS = {"i1": "i", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "I", "u8": "B", "u16": "H", "u32": "I"}
FORMATS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
OVERSIZED = 228 * 1024  # bytes of shared memory from which newer versions of Triton launch otherwise


class Shape(NamedTuple):
    """Of memory that C++ allocates: elements, strides in elements, and the dtype."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class StepOfEntry(NamedTuple):
    """A launch. Offsets are in bytes from the first parameter, operands indices among a call's addresses.

    parameters: their bytes; addresses: (offset, operand); alphas: (offset, bytes); maps: (offset, operand) of tensor
    maps, which are among the bytes, of another address. threads: of a CTA; shared: bytes.
    """

    function: int
    grid: tuple[int, int, int]
    threads: int
    shared: int
    cluster: int
    cooperative: bool
    pdl: bool
    parameters: bytes
    offsets: tuple[int, ...]
    addresses: tuple[tuple[int, int], ...]
    alphas: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int], ...]


class Entry(NamedTuple):
    """What the extension's table keeps of a plan. C++ reads these fields by their names (`compat/cpp/parse.h`).

    workspace: stream -> ([partial sums, counters], whether all launches of that stream may use them), or None;
    workspace_bytes: of partial sums; extents: bytes from the first element of a, b and c to the end of the last;
    copies, preactivations: as in `fast_path.Known`; derivative, activation: of `fast_path.DERIVATIVES` and
    `fast_path.ACTIVATED`, or 0.
    """

    plan: GemmPlan
    workspace: Callable[[int], tuple[list[torch.Tensor], bool]] | None
    workspace_bytes: int
    result: Shape
    temporaries: tuple[Shape, ...]
    extents: tuple[int, ...]
    copies: bool
    preactivations: int
    derivative: int
    activation: int
    steps: tuple[StepOfEntry, ...]


def table(extension: Any, capacity: int) -> Any:
    """A new table of the extension, which launches by the driver's functions."""
    extension.connect(*_launching())
    follow_workspaces(extension.forget_workspaces)
    return extension.Table(capacity)


def _launching() -> tuple[int, ...]:
    functions = "cuLaunchKernelEx", "cuGetErrorString", "cuTensorMapReplaceAddress", "cuStreamIsCapturing"
    return tuple(address_of(name) for name in functions)


def entry_of(
    plan: GemmPlan,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    derivative: int = 0,
    copies: bool = False,
    preactivations: int = 0,
    activation: int = 0,
) -> Entry:
    """What the extension's table keeps of a compiled plan, and of the results that its calls make. ValueError where
    that is not what Triton's launcher would do."""
    shares = partial(_workspace, plan.index, plan.workspace) if plan.shares else None
    temporaries = tuple(
        Shape(tuple(x.shape), torch.empty(x.shape, device="meta").stride(), x.dtype)
        for step in plan.steps
        for x in step.launch.temporaries
    )
    steps = tuple(_step(step, float(copies)) for step in plan.steps)
    result = Shape(tuple(shape), tuple(strides), dtype)
    how = plan.extents, copies, preactivations, derivative, activation
    return Entry(plan, shares, plan.workspace, result, temporaries, *how, steps)


def _workspace(index: int, nbytes: int, stream: int) -> tuple[list[torch.Tensor], bool]:
    found = workspace(index, stream, nbytes)
    return found, is_of_stream(index, stream, found)


class Parameters:
    """A kernel's parameters, one after another, as the driver is shown them: those that calls have in common, and
    where others go."""

    def __init__(self) -> None:
        self.types: list[str] = []
        self.bytes = bytearray()
        self.offsets: list[int] = []

    def add(self, kind: str, value: Any = 0) -> int:
        """Where a parameter of that type begins: aligned to its size. value: of a tensor map its bytes."""
        pointer = kind.startswith("*")
        if kind != "nvTmaDesc" and not pointer and kind not in FORMATS:
            raise ValueError(f"{kind} is passed by Python only")
        packed = value if kind == "nvTmaDesc" else struct.pack("Q" if pointer else FORMATS[kind], value)
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


def _step(step: Step, beta: float) -> StepOfEntry:
    kernel, launch = step.kernel, step.launch
    found = driver_launch(kernel, launch.grid, launch.cluster)
    parameters = Parameters()
    addresses, alphas, maps = [], [], []
    encoders = iter(step.maps)
    first = len(SCALARS)  # of a call's values that is an operand's address
    for part, kind in zip(launch.arguments.values(), kernel.src.signature.values(), strict=True):
        if isinstance(part, TensorMap):
            _, place, number, _ = next(encoders)
            maps.append((parameters.add("nvTmaDesc", bytes_of(step.encoded[number])), place - first))
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
    return StepOfEntry(
        *found, bytes(parameters.bytes), tuple(parameters.offsets), tuple(addresses), tuple(alphas), tuple(maps)
    )
