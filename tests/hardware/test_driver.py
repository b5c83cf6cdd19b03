"""CUDA driver calls, against a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from triton_gemm.hardware import driver
from triton_gemm.runtime.step import DriverLaunch


class FakeDriver:
    """As much of libcuda as `driver` calls: `current` is this thread's context, 100 + i the primary one of device i."""

    def __init__(self, current: int | None) -> None:
        self.current, self.calls, self.error = current, [], 0

    def cuCtxGetCurrent(self, context: object) -> int:  # noqa: N802
        self.calls.append("get")
        context._obj.value = self.current  # type: ignore[attr-defined]
        return self.error

    def cuDeviceGet(self, handle: object, device: ctypes.c_int) -> int:  # noqa: N802
        handle._obj.value = device.value  # type: ignore[attr-defined]
        return 0

    def cuDevicePrimaryCtxRetain(self, context: object, handle: ctypes.c_int) -> int:  # noqa: N802
        self.calls.append(f"retain {handle.value}")
        context._obj.value = 100 + handle.value  # type: ignore[attr-defined]
        return 0

    def cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.current = context.value
        return 0

    def cuGetErrorString(self, error: int, text: object) -> int:  # noqa: N802
        text._obj.value = f"words of {error}".encode()  # type: ignore[attr-defined]
        return 0

    def cuDriverGetVersion(self, version: object) -> int:  # noqa: N802
        version._obj.value = 12090  # type: ignore[attr-defined]
        return self.error


@pytest.fixture
def fresh() -> Iterator[None]:
    driver._primary_context.cache_clear()
    driver._thread.__dict__.clear()
    yield
    driver._thread.__dict__.clear()
    driver._primary_context.cache_clear()


def test_a_thread_without_a_context_gets_the_devices_own(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second = FakeDriver(None), FakeDriver(None)
    for fake in (first, second):  # two threads: the context is retained once, and made current in each
        driver._thread.__dict__.clear()
        monkeypatch.setattr(driver, "_library", lambda fake=fake: fake)
        for _ in range(2):  # what has been seen is not asked again
            driver.ensure_context(1)
    assert (first.current, first.calls) == (101, ["get", "retain 1"])
    assert (second.current, second.calls) == (101, ["get"])


def test_a_context_that_is_there_stays(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(7)
    monkeypatch.setattr(driver, "_library", lambda: fake)
    driver.ensure_context(0)
    assert (fake.current, fake.calls) == (7, ["get"])


def test_the_drivers_errors_are_raised(fresh: None, monkeypatch: pytest.MonkeyPatch) -> None:
    fake = FakeDriver(None)
    fake.error = 3
    monkeypatch.setattr(driver, "_library", lambda: fake)
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent failed with CUDA error 3: words of 3"):
        driver.ensure_context(0)


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", lambda: FakeDriver(None))
    assert driver.driver_version() == (12, 9)


class Loading:
    """As much of libcuda as loads and launches kernels. refuses: the function that fails, with error 222."""

    def __init__(self, refuses: str = "") -> None:
        self.refuses = refuses
        self.calls: list[tuple[Any, ...]] = []
        self.parameters = [(0, 128), (128, 4), (136, 8)]  # of a kernel: where each begins, and its bytes

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any) -> int:
            plain = [x.value if isinstance(x, (ctypes.c_int, ctypes.c_void_p)) else x for x in given]
            self.calls.append((name, *plain))
            answer = getattr(type(self), f"_{name}", lambda *_: 0)
            return 222 if name == self.refuses else answer(self, *given)

        return called

    def _cuModuleLoadData(self, module: Any, _: bytes) -> int:  # noqa: N802
        module._obj.value = 11
        return 0

    def _cuModuleGetFunction(self, function: Any, *_: object) -> int:  # noqa: N802
        function._obj.value = 12
        return 0

    def _cuGetErrorString(self, error: int, text: Any) -> int:  # noqa: N802
        text._obj.value = None if error == 99 else b"no kernel image"
        return 0

    def _cuTensorMapEncodeTiled(self, at: ctypes.c_void_p, *_: object) -> int:  # noqa: N802
        assert at.value is not None and at.value % 64 == 0
        ctypes.memmove(at.value, bytes(range(128)), 128)
        return 0

    def _cuFuncGetParamInfo(self, _: object, i: ctypes.c_size_t, offset: Any, size: Any) -> int:  # noqa: N802
        if i.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[i.value]
        return 0

    def _cuLaunchKernelEx(self, config: Any, *_: object) -> int:  # noqa: N802
        return 700 if config._obj.grid_x == 7 else 0


@pytest.mark.parametrize("shared", [0, 48 * 1024, 48 * 1024 + 1, 227 * 1024])
def test_a_kernel_is_loaded_with_the_shared_memory_that_it_wants(shared: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """More than 48 KB must be asked for."""
    fake = Loading()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    assert driver.load(b"a cubin", "a_kernel", shared) == (11, 12)
    (load, _, code), (get, _, module, symbol), *others = fake.calls
    assert (load, code) == ("cuModuleLoadData", b"a cubin")
    assert (get, module, symbol) == ("cuModuleGetFunction", 11, b"a_kernel")
    expected = [("cuFuncSetCacheConfig", 12, 1), ("cuFuncSetAttribute", 12, 8, shared)]
    assert others == (expected if shared > 49152 else [])


@pytest.mark.parametrize("refuses", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_kernel_that_the_driver_refuses(refuses: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", lambda: Loading(refuses))
    with pytest.raises(RuntimeError, match=f"{refuses} failed with CUDA error 222: no kernel image"):
        driver.load(b"a cubin", "a_kernel", 1 << 17)
    assert driver.error_text(99) == "unknown error"


@pytest.mark.parametrize(
    ("shape", "strides", "box"),
    [((3, 100, 40), (4000, 40, 1), (1, 64, 32)), ((1 << 33, 8), (1 << 35, 1), (256, 8)), ((40,), (1,), (8,))],
    ids=["a batch", "large", "one dimension"],
)
def test_a_tensor_map_is_encoded_from_the_last_dimension_on(
    shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitches in bytes, but for the last dimension's."""
    fake = Loading()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 2))
    assert driver.tensor_map(4096, 9, 2, shape, strides, box, 3) == bytes(range(128))
    [(name, _, element, rank, address, sizes, pitches, sides, steps, *how)] = fake.calls
    assert (name, element, rank, address) == ("cuTensorMapEncodeTiled", 9, len(shape), 4096)
    assert tuple(sizes) == shape[::-1] and tuple(sides) == box[::-1] and tuple(steps) == (1,) * rank
    assert tuple(pitches)[: rank - 1] == tuple(2 * x for x in strides[-2::-1])
    kinds = [type(x)._type_ for x in (sizes, pitches, sides, steps)]
    assert kinds == [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
    assert how == [0, 3, 2, 0]  # the third: swizzle; 128 bytes of L2; zeros outside
    fake.refuses = "cuTensorMapEncodeTiled"
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with CUDA error 222"):
        driver.tensor_map(4096, 9, 2, shape, strides, box, 3)


@pytest.mark.parametrize(
    ("shape", "strides", "version", "cleared"),
    [
        ((256, 255), (256, 1), (13, 1), True),  # 131,070 bytes
        ((256, 256), (256, 1), (13, 1), False),
        ((256, 255), (256, 1), (12, 8), True),
        ((256, 255), (256, 1), (13, 2), False),
        ((2, 8), (1 << 20, 1), (13, 1), False),
    ],
)
def test_a_small_tensor_map_is_without_a_bit_of_older_drivers(
    shape: tuple[int, ...],
    strides: tuple[int, ...],
    version: tuple[int, int],
    cleared: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As in Triton's driver.c."""

    def encode(made: Any, *_: object) -> int:
        ctypes.memset(made, 0xFF, driver.TENSOR_MAP)
        return 0

    monkeypatch.setattr(driver, "_library", lambda: SimpleNamespace(cuTensorMapEncodeTiled=encode))
    monkeypatch.setattr(driver, "driver_version", lambda: version)
    found = driver.tensor_map(4096, 9, 2, shape, strides, (64, 8), 3)
    expected = bytearray(b"\xff" * 128)
    expected[10] -= 0x20 * cleared
    assert found == expected


def test_a_tensor_map_s_address_is_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    for fake, error in ((Loading(), 0), (Loading("cuTensorMapReplaceAddress"), 222)):
        monkeypatch.setattr(driver, "_library", lambda fake=fake: fake)
        assert driver.replace_address(128, 4096) == error
        assert fake.calls == [("cuTensorMapReplaceAddress", 128, 4096)]


def test_parameters_have_the_bytes_that_the_driver_says(monkeypatch: pytest.MonkeyPatch) -> None:
    fake: Any = Loading()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    assert driver.parameter_sizes(12) == [128, 4, 8]
    assert [call[:2] for call in fake.calls] == 4 * [("cuFuncGetParamInfo", 12)]
    fake = SimpleNamespace()  # a driver before CUDA 12.4
    assert driver.parameter_sizes(12) is None


def entry(**changes: Any) -> DriverLaunch:
    plain = DriverLaunch(12, (8, 4, 2), 128, 50_000, 1, False, False, b"", (), (), (), (), ())
    return plain._replace(**changes)


@pytest.mark.parametrize(
    ("changes", "attributes"),
    [
        ({}, []),
        ({"pdl": True}, [(6, (1, 0, 0))]),
        ({"cooperative": True}, [(2, (1, 0, 0))]),
        ({"cluster": 4}, [(4, (4, 1, 1)), (5, (1, 0, 0))]),
        (
            {"pdl": True, "cooperative": True, "cluster": 2},
            [(6, (1, 0, 0)), (2, (1, 0, 0)), (4, (2, 1, 1)), (5, (1, 0, 0))],
        ),
    ],
    ids=["plain", "programmatic", "cooperative", "clusters", "all"],
)
def test_how_a_step_is_launched(changes: dict[str, Any], attributes: list[Any]) -> None:
    """As the structures of CUDA's headers have it: 56 bytes, and 72 for each attribute."""
    found = driver.launch_config(entry(**changes))
    raw = ctypes.string_at(ctypes.addressof(found), 56)
    *sizes, stream, at, count = struct.unpack("7I4xQQI4x", raw)
    assert sizes == [8, 4, 2, 128, 1, 1, 50_000] and stream == 0 and ctypes.sizeof(found) == 56
    given = [struct.unpack("i4x3I", ctypes.string_at(at + 72 * i, 20)) for i in range(count)]
    assert [(number, tuple(value)) for number, *value in given] == attributes


def test_a_launch_returns_the_driver_s_error(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of an empty grid, which the driver refuses, nothing is launched."""
    fake = Loading()
    monkeypatch.setattr(driver, "_library", lambda: fake)
    for grid in ((0, 4, 2), (8, 0, 2), (8, 4, 0)):
        assert driver.launch(driver.launch_config(entry(grid=grid)), ctypes.c_void_p(12), None) == 0
    assert fake.calls == []
    for grid, error in (((8, 4, 2), 0), ((7, 1, 1), 700)):
        config, parameters = driver.launch_config(entry(grid=grid)), (ctypes.c_void_p * 1)(5)
        assert driver.launch(config, ctypes.c_void_p(12), parameters) == error
        name, shown, function, given, extra = fake.calls.pop()
        assert (name, function, given, extra) == ("cuLaunchKernelEx", 12, parameters, None) and shown._obj is config


def test_the_version_of_cublas_is_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is loaded for it, and what has no such function is no error."""

    def property(which: int, value: Any) -> int:
        value._obj.value = (13, 1, 2)[which]
        return 0

    opened: list[tuple[str, int]] = []

    def opens(name: str, mode: int) -> Any:
        opened.append((name, mode))
        return SimpleNamespace(cublasGetProperty=property)

    monkeypatch.setattr(driver.ctypes, "CDLL", opens)
    version = driver.cublas_version.__wrapped__
    assert version("13.0") == "13.1.2" and opened == [("libcublas.so.13", os.RTLD_NOLOAD)]
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name, mode: SimpleNamespace(cublasGetProperty=lambda *_: 1))
    assert version("13.0") is None
    monkeypatch.setattr(driver.ctypes, "CDLL", lambda name, mode: SimpleNamespace())
    assert version("13.0") is None
    monkeypatch.undo()
    assert version(None) is None
