"""What the driver is shown of a launch, without a GPU: its parameters, and calls by Python."""

from __future__ import annotations

import ctypes
import struct
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from tests.runtime.test_plan_launches import LAUNCHED
from tests.support import fake_driver
from tests.support.patches import replace_all
from triton_gemm.compat import MachineCode
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.kernels.launch import Launch, Pointer, Scalar, TensorMap
from triton_gemm.runtime import binaries, step
from triton_gemm.selection.select import select

HALF = torch.bfloat16
NAMES = ("alpha", "beta", "a", "b", "c")  # of a call's values
WIDE, TF32 = (
    TensorMap("b", HALF, ((1 << 31) + 2, 40), (1 << 34, 1), (64, 32)),
    TensorMap("a", torch.float32, (3, 100, 40), (4000, 40, 1), (1, 64, 32), to_tf32=True, rows=16),
)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> fake_driver.Driver:
    return fake_driver.take_driver(monkeypatch)


def launch_of(arguments: dict[str, Any]) -> Launch:
    return Launch(None, (6, 4, 2), arguments, {})


def size_of(kind: str) -> int:
    """The bytes of a parameter, by its type's name."""
    return 128 if kind == "nvTmaDesc" else 8 if kind[0] == "*" else int(kind.lstrip("fpiu")) // 8 or 1


def decoded(kind: str, code: bytes) -> Any:
    """A parameter's value: of a tensor map its bytes."""
    if kind == "nvTmaDesc":
        return code
    if kind[0] == "f":
        return struct.unpack("f" if size_of(kind) == 4 else "d", code)[0]
    return int.from_bytes(code, "little", signed=kind[0] == "i" and kind != "i1")


def types_of(made: MachineCode, launch: Launch) -> list[str]:
    """Of a kernel's parameters as they are passed: a tensor map is followed by its shape and its strides."""
    found = []
    for part, kind in zip(launch.arguments.values(), made.types, strict=True):
        if isinstance(part, TensorMap):
            found += ["nvTmaDesc", *len(part.shape) * ["i32"], *len(part.strides) * ["i64"]]
        elif kind != "constexpr":
            found.append(kind)
    return [*found, "*i8", "*i8"]


def arguments_of(made: MachineCode, launch: Launch, values: dict[str, Any]) -> list[Any]:
    """What the driver is to be shown of a launch on a call's values, by name; the last two are scratch memory."""
    given: list[Any] = []
    boxes = iter(made.boxes)
    for part, kind in zip(launch.arguments.values(), made.types, strict=True):
        if isinstance(part, TensorMap):
            swizzle, nbytes, element, (*outer, rows, columns) = next(boxes)
            about = 11 if part.to_tf32 else element, nbytes, part.shape, part.strides
            box = (*outer, rows if part.rows is None else part.rows, columns)
            encoded = fake_driver.tensor_map(values[part.operand], *about, box, swizzle)
            given += [encoded, *[ctypes.c_int32(x).value for x in part.shape], *part.strides]
        elif isinstance(part, Pointer):
            given.append(values[part.operand])
        elif isinstance(part, Scalar):
            given.append(values[part.name])
        elif kind != "constexpr":
            given.append(part)
    return [*given, 0, 0]


# --- Parameters ---

# An argument of each kind, and its type.
EVERY: dict[str, tuple[Any, str]] = {
    "a": (TF32, "tensordesc"),
    "TILE": (64, "constexpr"),
    "flag": (True, "i1"),
    "c": (Pointer("c"), "*fp32"),
    "other_flag": (False, "u1"),
    "b": (WIDE, "tensordesc"),
    "alpha": (Scalar("alpha"), "fp32"),
    "small": (-3, "i8"),
    "exact_alpha": (Scalar("alpha"), "fp64"),
    "short": (-300, "i16"),
    "beta": (Scalar("beta"), "f32"),
    "M": (-70_000, "i32"),
    "pitch": (-(1 << 40), "i64"),
    "NAME": ("relu", "constexpr"),
    "bias": (None, "constexpr"),
    "u_small": (200, "u8"),
    "u_short": (60_000, "u16"),
    "u_size": ((1 << 32) - 1, "u32"),
    "u_pitch": ((1 << 64) - 1, "u64"),
    "b_again": (Pointer("b"), "*bf16"),
    "factor": (0.5, "fp64"),
    "one": (1, "constexpr"),
}
BOXES = ((3, 4, 7, (1, 64, 32)), (2, 2, 9, (64, 32)))  # of its tensor maps
MADE = MachineCode("made_up", 4, 1, 1024, False, False, tuple(kind for _, kind in EVERY.values()), BOXES, b"every")
LAUNCH = launch_of({name: argument for name, (argument, _) in EVERY.items()})


def test_parameters_are_packed_one_after_another(driver: fake_driver.Driver) -> None:
    """Each aligned to its size. What a call gives is 0 until then, but of a tensor map, which has an address."""
    found = step.parameters_of(MADE, LAUNCH, {"a": 0, "b": 1, "c": 2})
    kinds = types_of(MADE, LAUNCH)
    assert list(found.types) == kinds and len(found.offsets) == len(kinds)
    assert found.sizes == [size_of(x) for x in kinds]
    ends = (*found.offsets[1:], len(found.packed))
    for kind, begin, end in zip(kinds, found.offsets, ends, strict=True):
        assert begin % size_of(kind) == 0 and begin + size_of(kind) <= end
    shown = [decoded(x, found.packed[at : at + size_of(x)]) for x, at in zip(kinds, found.offsets, strict=True)]
    before = {"alpha": 0.0, "beta": 0.0, "a": step.ANY_ADDRESS, "b": step.ANY_ADDRESS, "c": 0}
    expected = arguments_of(MADE, LAUNCH, before)
    place = kinds.index("*bf16")
    assert expected[place] == step.ANY_ADDRESS  # of `b` as a pointer
    assert shown == [*expected[:place], 0, *expected[place + 1 :]]


@pytest.mark.parametrize("kind", ["fp16", "bf16", "i128", "tuple"])
def test_a_type_that_cannot_be_passed_is_refused(kind: str, driver: fake_driver.Driver) -> None:
    for part in (1, Scalar("alpha")):
        made = MADE._replace(types=(kind,), boxes=())
        with pytest.raises(ValueError, match=f"a parameter of type {kind} cannot be passed"):
            step.parameters_of(made, launch_of({"x": part}), {})


def test_machine_code_of_other_arguments_is_refused(driver: fake_driver.Driver) -> None:
    for types in (MADE.types[:-1], (*MADE.types, "i32")):
        with pytest.raises(ValueError, match=r"zip\(\)"):
            step.parameters_of(MADE._replace(types=types), LAUNCH, {"a": 0, "b": 1, "c": 2})


# --- Launches by Python ---


class Launched:
    """A step that is loaded. `call` launches it on a stream and values; `shown` is what the driver was shown."""

    def __init__(self, driver: fake_driver.Driver, launch: Launch, made: MachineCode, names: Sequence[str] = NAMES):
        self.driver, self.made, self.names = driver, made, names
        self.step = step.Step(launch, names, 3)
        self.step._load(made)
        assert self.step.entry is not None and self.step.call is not None
        self.entry, self.call = self.step.entry, self.step.call
        self.types = types_of(made, launch)
        driver.sizes[self.entry.function] = [size_of(x) for x in self.types]

    @property
    def shown(self) -> list[list[Any]]:
        return [list(map(decoded, self.types, seen.parameters)) for seen in self.driver.by_python]

    def expected(self, *values: Any) -> list[Any]:
        return arguments_of(self.made, self.step.launch, dict(zip(self.names, values, strict=True)))


@pytest.fixture
def every(driver: fake_driver.Driver) -> Launched:
    """Of an argument of each kind."""
    return Launched(driver, LAUNCH, MADE)


def test_a_launch_is_of_the_values_of_its_call(every: Launched) -> None:
    calls = [(0.5, 0.25, 4096, 8192, 12288), (-2, 3, 16, 32, 48), (0.5, 0.25, 4096, 8192, 12288), (1, 0, 0, 0, 0)]
    for i, values in enumerate(calls):
        every.call(70 + i, values)
    assert every.shown == [every.expected(*values) for values in calls]
    assert [x.stream for x in every.driver.by_python] == [70, 71, 72, 73]


@pytest.mark.parametrize("name", LAUNCHED)
def test_launches_of_plans_are_of_the_values_of_their_calls(name: str, driver: fake_driver.Driver) -> None:
    (M, N, K), dtype, request = LAUNCHED[name]
    a, b, c = (torch.empty(shape, dtype=dtype, device="meta") for shape in ((M, K), (K, N), (M, N)))
    problem, hopper = request.problem(a, b, c), device_of_capability((9, 0))
    launches = binaries.launches_on(hopper, problem, select(problem, hopper))
    temporaries = [x.name for launch in launches for x in launch.temporaries]
    names = (*NAMES, *problem.auxiliary, "workspace", "counters", *temporaries)
    for number, launch in enumerate(launches):
        driver.by_python.clear()
        made = fake_driver.made_up(launch, f"code {number}".encode())
        found = Launched(driver, launch, made, names)
        for values in ((3.0, 0.5, *range(4096, 4096 + len(names) - 2)), (1, 0, *range(16, 14 + len(names)))):
            driver.by_python.clear()
            found.call(7, values)
            [seen] = driver.by_python
            assert found.shown == [found.expected(*values)]
            assert (seen.grid, seen.block, seen.shared, seen.stream) == (launch.grid, (128, 1, 1), 1024, 7)


def test_threads_share_a_step(driver: fake_driver.Driver) -> None:
    """Each launches on its own values, whenever another takes over."""
    arguments = {"a": TF32, "b": Pointer("b"), "alpha": Scalar("alpha"), "c": Pointer("c"), "beta": Scalar("beta")}
    launch = launch_of(arguments)
    found = Launched(driver, launch, fake_driver.made_up(launch))
    calls = {i: (i, -i, 16 * (i // 3), i + 1, i + 2) for i in range(1, 4000)}
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(8) as pool:
            assert [*pool.map(found.call, calls, calls.values())] == len(calls) * [None]
    finally:
        sys.setswitchinterval(interval)
    shown = {seen.stream: x for seen, x in zip(driver.by_python, found.shown, strict=True)}
    assert len(driver.by_python) == len(calls)
    assert shown == {i: found.expected(*values) for i, values in calls.items()}
    assert isinstance(found.call, step.Launcher) and len(found.call.free) <= 8


def test_an_address_of_a_tensor_map_is_replaced_where_it_has_changed(every: Launched) -> None:
    """Of each by itself."""
    calls = [(4096, 8192), (4096, 8192), (4096, 16), (32, 16), (4096, 8192), (step.ANY_ADDRESS, step.ANY_ADDRESS)]
    for a, b in calls:
        every.call(0, (1, 0, a, b, 64))
    assert every.driver.replaced == [4096, 8192, 16, 32, 4096, 8192, *2 * [step.ANY_ADDRESS]]
    assert every.shown == [every.expected(1, 0, a, b, 64) for a, b in calls]


@pytest.mark.parametrize("what", ["answers", "refused"])
def test_errors_of_a_launch(what: str, every: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """Or of a tensor map, without which nothing is launched. A thread without a context gets that of the step's device;
    other errors are raised in Triton's words, and the next launch works."""
    contexts, errors, calls = list[int](), getattr(every.driver, what), [(1, 0, 16, 32, 48), (2, 0, 64, 80, 96)]
    monkeypatch.setattr(hardware_driver, "ensure_context", contexts.append)
    every.call(0, calls[0])
    for refused, wanted in (([201, 201], [3]), ([700], [])):
        every.driver.by_python.clear(), contexts.clear()
        errors.extend(refused)
        with pytest.raises(RuntimeError, match=r"^Triton Error \[CUDA\]: an illegal address$"):
            every.call(0, calls[1])
        assert contexts == wanted and len(every.shown) == len(refused) * (what == "answers")
        for values in calls[::-1]:
            every.call(0, values)
            assert contexts == wanted and every.shown[-1] == every.expected(*values)
    errors.append(201)
    every.call(0, calls[1])
    assert contexts == [3] and every.shown[-1] == every.expected(*calls[1])


def test_an_interruption_leaves_the_next_launch_right(every: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    every.call(0, (1, 0, 16, 32, 48))
    for name in ("replace_address", "launch"):
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(hardware_driver, name, Mock(side_effect=KeyboardInterrupt))
            every.call(0, (2, 0, 64, 80, 96))
        every.call(0, (1, 0, 16, 32, 48))
    assert every.shown == 3 * [every.expected(1, 0, 16, 32, 48)]


def test_hooks_on_launches_are_called_around_each(every: Launched, monkeypatch: pytest.MonkeyPatch) -> None:
    """With what profilers ask for; also those that are set between calls."""
    seen: list[tuple[str, Any, int]] = []

    def noting(name: str) -> Callable[[Any], None]:
        return lambda about: seen.append((name, about.get(), len(every.driver.by_python)))

    runtime = triton.knobs.runtime
    every.call(5, (1, 0, 16, 32, 48))
    with monkeypatch.context() as patch:
        chain = triton.knobs.HookChain()
        chain.add(noting("first"))
        chain.add(noting("second"))
        replace_all(patch, runtime, launch_enter_hook=chain, launch_exit_hook=noting("after"))
        every.call(7, (1, 0, 16, 32, 48))
    every.call(9, (1, 0, 16, 32, 48))
    about = {"name": "made_up", "function": every.entry.function, "stream": 7}
    assert seen == [("first", about, 1), ("second", about, 1), ("after", about, 2)]
    assert [x.stream for x in every.driver.by_python] == [5, 7, 9]


PDL, COOPERATIVE = (6, struct.pack("i8x", 1)), (2, struct.pack("i8x", 1))
BOTH: dict[str, Any] = {"pdl": True, "cooperative": True}
# What machine code says, the programs of a cluster; the CTAs of a grid, of a cluster, and the other attributes.
CONFIGURATIONS: dict[str, tuple[dict[str, Any], int, tuple[int, ...], int, list[Any]]] = {
    "plain": ({}, 1, (6, 4, 2), 1, []),
    "programmatic": ({"pdl": True}, 1, (6, 4, 2), 1, [PDL]),
    "cooperative": ({"cooperative": True}, 1, (6, 4, 2), 1, [COOPERATIVE]),
    "two CTAs a program": ({**BOTH, "ctas": 2}, 1, (12, 4, 2), 2, [PDL, COOPERATIVE]),
    "clusters of two programs": (BOTH, 2, (6, 4, 2), 2, [PDL, COOPERATIVE]),
    "the largest clusters": ({}, 8, (6, 4, 2), 8, []),
}


@pytest.mark.parametrize("name", CONFIGURATIONS)
def test_how_a_step_is_launched(name: str, driver: fake_driver.Driver) -> None:
    """As the structures of CUDA's headers have it. A grid is in CTAs."""
    changes, cluster, grid, ctas, attributes = CONFIGURATIONS[name]
    found = Launched(driver, replace(LAUNCH, cluster=cluster), MADE._replace(warps=8, shared=5000, **changes))
    found.call(0, (1, 0, 16, 32, 48))
    [seen] = driver.by_python
    assert (seen.grid, seen.block, seen.shared) == (grid, (256, 1, 1), 5000)
    clusters = [(4, struct.pack("III", ctas, 1, 1)), (5, struct.pack("i8x", 1))]
    assert [*seen.attributes] == attributes + (clusters if ctas > 1 else [])


@pytest.mark.parametrize(("cluster", "ctas"), [(16, 1), (1, 16), (9, 1)])
def test_a_cluster_that_is_not_portable_is_refused(cluster: int, ctas: int, driver: fake_driver.Driver) -> None:
    made = step.Step(replace(LAUNCH, cluster=cluster), NAMES)
    with pytest.raises(ValueError, match="is not portable"):
        made._load(MADE._replace(ctas=ctas))
    assert made.call is None and made.entry is None and driver.kernels == {}


def test_the_driver_is_asked_what_the_parameters_are(driver: fake_driver.Driver) -> None:
    """So that machine code of other parameters is not launched."""
    arguments = {"a": TF32, "c": Pointer("c"), "K": 32}
    launch, right = launch_of(arguments), [128, 4, 4, 4, 8, 8, 8, 8, 4, 8, 8]
    for sizes in (right, right[:-1], [*right, 8], [128, 4, 4, 4, 8, 8, 8, 4, 8, 8, 8]):
        step._functions.clear()
        driver.sizes[fake_driver.FUNCTION + len(driver.kernels)] = sizes
        made = step.Step(launch, NAMES)
        if sizes is right:
            made._load(fake_driver.made_up(launch))
            assert made.call is not None
        else:
            with pytest.raises(ValueError, match="the kernel's parameters have"):
                made._load(fake_driver.made_up(launch))
            assert made.call is None and made.entry is None


def test_a_beta_that_calls_do_not_change(driver: fake_driver.Driver) -> None:
    """In each of its parameters, and nothing else is changed."""
    arguments = {"beta": Scalar("beta"), "K": 32, "exact": Scalar("beta"), "alpha": Scalar("alpha"), "c": Pointer("c")}
    launch, types = launch_of(arguments), ("fp32", "i32", "fp64", "fp32", "*bf16")
    entry = Launched(driver, launch, MADE._replace(types=types, boxes=())).entry
    found = entry.with_beta(0.3)
    assert found._replace(parameters=entry.parameters) == entry

    def decode(of: step.DriverLaunch) -> list[Any]:
        kinds = zip((*types, "*i8", "*i8"), of.offsets, strict=True)
        return [decoded(x, of.parameters[at : at + size_of(x)]) for x, at in kinds]

    assert decode(entry) == [0.0, 32, 0.0, 0.0, 0, 0, 0]
    assert decode(found) == [ctypes.c_float(0.3).value, 32, 0.3, 0.0, 0, 0, 0]
