"""One launch of a plan: machine code that the CUDA driver has loaded, and its parameters.

The machine code is a kit's, or Triton compiles it. It is loaded and launched here, as Triton's driver does
(backends/nvidia/driver.c). So it launches alike whatever made it, and a kit's needs no C compiler.
"""

from __future__ import annotations

import ctypes
import hashlib
import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from ..compat import MachineCode, compiles_anew, launch_hooks, load_hook, loading, machine_code
from ..hardware import driver
from ..kernels.launch import Launch, Pointer, Scalar, TensorMap, compiled, compiled_before
from . import kit, kits
from .binaries import SCALARS, received

# Of each type of a parameter, as Triton names it: how it is packed.
FORMATS = {"i1": "b", "i8": "b", "i16": "h", "i32": "i", "i64": "q", "u1": "B", "u8": "B", "u16": "H", "u32": "I"}
FORMATS |= {"u64": "Q", "fp32": "f", "f32": "f", "fp64": "d"}
LARGEST_CLUSTER = 8  # of more the driver wants to be told that they are not portable
ANY_ADDRESS = 1 << 20  # of a tensor map until a call gives its own

_functions: dict[tuple[int, bytes], int] = {}  # by device and hash of the code; never unloaded, as threads may run them


class Parameters(NamedTuple):
    """A kernel's parameters, one after another, as the driver is shown them. Offsets are in bytes from the first."""

    packed: bytes  # those that calls have in common, and zeros for others
    offsets: tuple[int, ...]  # of each parameter
    types: tuple[str, ...]  # of each, as Triton names them
    addresses: tuple[tuple[int, int], ...]  # (offset, which of a call's addresses)
    alphas: tuple[tuple[int, int], ...]  # (offset, bytes)
    betas: tuple[tuple[int, int], ...]  # (offset, bytes)
    maps: tuple[tuple[int, int], ...]  # (offset, which address) of tensor maps, which are packed with another address

    @property
    def sizes(self) -> list[int]:
        return [_size(x) for x in self.types]


def parameters_of(made: MachineCode, launch: Launch, places: Mapping[str, int]) -> Parameters:
    """Of a launch. places: which of a call's addresses an operand's is. ValueError for a type that cannot be passed."""
    packed, offsets, types = bytearray(), [], []
    addresses, maps = [], []
    factors: dict[str, list[tuple[int, int]]] = {name: [] for name in SCALARS}

    def add(kind: str, value: Any = 0) -> int:
        """Where it begins, aligned to its size. value: of a tensor map its bytes."""
        code = value if kind == "nvTmaDesc" else struct.pack(_format(kind), value)
        packed.extend(bytes(-len(packed) % len(code)))
        offsets.append(len(packed))
        types.append(kind)
        packed.extend(code)
        return offsets[-1]

    boxes = iter(made.boxes)
    for part, kind in zip(launch.arguments.values(), made.types, strict=True):
        if isinstance(part, TensorMap):
            maps.append((add("nvTmaDesc", _tensor_map(part, next(boxes))), places[part.operand]))
            for size in part.shape:
                add("i32", ctypes.c_int32(size).value)
            for stride in part.strides:
                add("i64", stride)
        elif kind == "constexpr":  # the compiler knew it
            continue
        elif isinstance(part, Pointer):
            addresses.append((add(kind), places[part.operand]))
        elif isinstance(part, Scalar):
            factors[part.name].append((add(kind, 0.0), _size(kind)))
        else:
            add(kind, part)
    for _ in range(2):  # Triton's scratch memory, of which kernels here have none
        add("*i8")
    of_calls = tuple(addresses), *(tuple(factors[name]) for name in ("alpha", "beta")), tuple(maps)
    return Parameters(bytes(packed), tuple(offsets), tuple(types), *of_calls)


def _format(kind: str) -> str:
    if kind.startswith("*"):
        return "Q"
    if kind not in FORMATS:
        raise ValueError(f"a parameter of type {kind} cannot be passed")
    return FORMATS[kind]


def _size(kind: str) -> int:
    return driver.TENSOR_MAP if kind == "nvTmaDesc" else struct.calcsize(_format(kind))


def _tensor_map(part: TensorMap, box: tuple[int, int, int, tuple[int, ...]]) -> bytes:
    swizzle, nbytes, element, (*outer, rows, columns) = box
    sides = *outer, part.rows or rows, columns
    element = driver.TFLOAT32 if part.to_tf32 else element
    return driver.tensor_map(ANY_ADDRESS, element, nbytes, part.shape, part.strides, sides, swizzle)


class DriverLaunch(NamedTuple):
    """What the driver launches, by Python or by C++, which reads these fields by their names (`compat/cpp/parse.h`)."""

    function: int
    grid: tuple[int, int, int]  # in CTAs, of which `cluster` are a cluster
    threads: int  # of a CTA
    shared: int  # bytes of a CTA
    cluster: int
    cooperative: bool
    pdl: bool
    parameters: bytes  # this and what follows as `Parameters` has them
    offsets: tuple[int, ...]
    addresses: tuple[tuple[int, int], ...]
    alphas: tuple[tuple[int, int], ...]
    betas: tuple[tuple[int, int], ...]
    maps: tuple[tuple[int, int], ...]

    def with_beta(self, beta: float) -> DriverLaunch:
        """The same with a beta that calls do not change."""
        packed = bytearray(self.parameters)
        for offset, size in self.betas:
            struct.pack_into("f" if size == 4 else "d", packed, offset, beta)
        return self._replace(parameters=bytes(packed))


class Step:
    """One launch of a plan on one device: compiled and loaded once, then launched on the values of a call.

    Args:
        names: Of these values: alpha and beta, then the operands, of which a value is the address.
        capability: The compute capability that it is planned for.
        foreign: Whether kits of another Triton may have its machine code, or else those of the installed one. None:
            none may.
    """

    def __init__(
        self,
        launch: Launch,
        names: Sequence[str],
        device: int = 0,
        capability: tuple[int, int] = (0, 0),
        foreign: bool | None = False,
    ) -> None:
        self.launch, self.device, self.capability, self.foreign = launch, device, capability, foreign
        self.places = {name: place for place, name in enumerate(names[len(SCALARS) :])}
        self.call: Callable[[int, Sequence[Any]], None] | None = None
        self.entry: DriverLaunch | None = None
        self.compiling = threading.RLock()  # threads that call a new plan at once wait for one of them

    def compile(self, operands: Mapping[str, torch.Tensor]) -> None:
        """Loads machine code for operands like these on the current device, from a kit or compiled, unless another
        thread has done so."""
        with self.compiling:
            if self.call is None and not self._without_compiler(operands):
                self._load(machine_code(compiled(self.launch, operands, SCALARS)))

    def load(self, operands: Mapping[str, torch.Tensor], cached: bool = True) -> bool:
        """As `compile`, where a kit or Triton's cache has the kernel and no thread compiles it; whether that is so.
        cached: look into Triton's cache, too, which takes a second the first time."""
        if self.call is None and self.compiling.acquire(blocking=False):
            try:
                if self.call is None and not self._without_compiler(operands) and cached:
                    kernel = compiled_before(self.launch, operands, SCALARS)
                    if kernel is not None:
                        self._load(machine_code(kernel))
            finally:
                self.compiling.release()
        return self.call is not None

    def _without_compiler(self, operands: Mapping[str, torch.Tensor]) -> bool:
        """Whether a kit had the machine code, and the driver took it, or a worker has compiled it."""
        found = None
        if self.foreign is not None:
            found = kits.code_of(self.launch, operands, self.capability, self.foreign)
        if found is not None:
            try:
                self._load(found[0])
            except Exception as error:  # a driver may be too old for it, or what it says be no launch
                if isinstance(error, driver.DriverError) and error.error not in driver.INCOMPATIBLE:
                    raise  # out of memory, for example, or what an earlier kernel did
                kits.refuse(found[1], error)
        made = None if self.call is not None else received(self.launch, operands, self.capability)
        if made is not None and kit.is_unchanged() and not compiles_anew():
            self._load(made)
        return self.call is not None

    def _load(self, made: MachineCode) -> None:
        """ValueError where the machine code takes other parameters than the launch has."""
        (x, y, z), cluster = self.launch.grid, max(self.launch.cluster, made.ctas)
        if cluster > LARGEST_CLUSTER:
            raise ValueError(f"a cluster of {cluster} is not portable")
        parameters = parameters_of(made, self.launch, self.places)
        function = function_of(made, self.device)
        sizes = driver.parameter_sizes(function)
        if sizes not in (None, parameters.sizes):
            raise ValueError(f"the kernel's parameters have {sizes} bytes, not {parameters.sizes}")
        packed, offsets, _, *of_calls = parameters
        how = 32 * made.warps, made.shared, cluster, made.cooperative, made.pdl
        self.entry = DriverLaunch(function, (x * made.ctas, y, z), *how, packed, offsets, *of_calls)
        self.call = Launcher(self.entry, made.symbol, self.device)


def modules() -> int:
    """How many this process has loaded."""
    return len(_functions)


def function_of(made: MachineCode, device: int) -> int:
    """The driver's handle of machine code on the current device, which it is loaded on once."""
    digest = hashlib.sha256(made.code).digest()
    found = _functions.get((device, digest))
    if found is None:
        driver.ensure_context(device)
        with loading:
            found = _functions.get((device, digest))
            if found is None:
                load_hook("start", None, None, made.symbol, digest.hex())
                module, found = driver.load(made.code, made.symbol, made.shared)
                _functions[device, digest] = found
                load_hook("end", module, found, made.symbol, digest.hex())
    return found


class Launcher:
    """`launch(stream, values)` of a step, by Python. Threads may launch at once. Hooks on Triton's launches, which
    profilers set, are called."""

    def __init__(self, entry: DriverLaunch, symbol: str, device: int) -> None:
        self.entry, self.symbol, self.device = entry, symbol, device
        self.free: list[Frame] = []  # that no thread is using

    def __call__(self, stream: int, values: Sequence[Any]) -> None:
        try:
            frame = self.free.pop()
        except IndexError:
            frame = Frame(self.entry)
        hooks = launch_hooks()
        about = hooks and hooks.about(self.symbol, self.entry.function, stream)
        if hooks:
            hooks.enter(about)
        error = frame.launch(stream, values)
        if error == driver.INVALID_CONTEXT:  # a thread that has used no CUDA before
            driver.ensure_context(self.device)
            error = frame.launch(stream, values)
        self.free.append(frame)
        if error:
            raise RuntimeError(f"Triton Error [CUDA]: {driver.error_text(error)}")
        if hooks:
            hooks.leave(about)


class Frame:
    """What one launch at a time shows the driver: memory for its parameters, filled in place."""

    def __init__(self, entry: DriverLaunch) -> None:
        size = len(entry.parameters)
        self.memory = ctypes.create_string_buffer(size + driver.ALIGNMENT)
        first = -ctypes.addressof(self.memory) % driver.ALIGNMENT
        base = ctypes.addressof(self.memory) + first
        ctypes.memmove(base, entry.parameters, size)
        self.pointers = (ctypes.c_void_p * len(entry.offsets))(*[base + x for x in entry.offsets])

        def numbers(places: Sequence[tuple[int, int]]) -> list[Any]:
            kinds = {4: ctypes.c_float, 8: ctypes.c_double}
            return [kinds[nbytes].from_buffer(self.memory, first + at) for at, nbytes in places]

        self.alphas, self.betas = numbers(entry.alphas), numbers(entry.betas)
        skipped = len(SCALARS)
        self.addresses = [
            (ctypes.c_uint64.from_buffer(self.memory, first + at), skipped + which) for at, which in entry.addresses
        ]
        self.maps = [(base + at, skipped + which) for at, which in entry.maps]
        self.mapped = [ANY_ADDRESS] * len(self.maps)  # the address that each has
        self.config = driver.launch_config(entry)
        self.function = ctypes.c_void_p(entry.function)

    def launch(self, stream: int, values: Sequence[Any]) -> int:
        """The driver's error, or 0."""
        if error := self.fill(values):
            return error
        self.config.stream = stream
        return driver.launch(self.config, self.function, self.pointers)

    def fill(self, values: Sequence[Any]) -> int:
        """Has the parameters be those of a call; the driver's error, or 0."""
        for factors, value in ((self.alphas, values[0]), (self.betas, values[1])):
            for factor in factors:
                factor.value = value
        for place, which in self.addresses:
            place.value = values[which]
        for i, (at, which) in enumerate(self.maps):
            address = values[which]
            if self.mapped[i] != address:
                if error := driver.replace_address(at, address):
                    return error
                self.mapped[i] = address
        return 0
