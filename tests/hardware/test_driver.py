"""CUDA driver calls, against a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any, ClassVar
from unittest.mock import Mock

import pytest

from triton_gemm.hardware import driver
from triton_gemm.runtime.step import DriverLaunch


class Library:
    """As much of libcuda as `driver` calls. current: this thread's context, where 100 + i is the primary one of device
    i; refuses: the function that fails, with error 222."""

    # What functions store in their first argument.
    STORES: ClassVar[dict[str, Callable[..., Any]]] = {
        "cuCtxGetCurrent": lambda self, _: self.current,
        "cuDeviceGet": lambda self, _, device: device.value,
        "cuDevicePrimaryCtxRetain": lambda self, _, device: 100 + device.value,
        "cuDriverGetVersion": lambda *_: 12090,
        "cuModuleLoadData": lambda *_: 11,
        "cuModuleGetFunction": lambda *_: 12,
    }

    def __init__(self) -> None:
        self.current: int | None = None
        self.refuses = ""
        self.calls: list[tuple[Any, ...]] = []
        self.parameters = [(0, 128), (128, 4), (136, 8)]  # of a kernel: where each begins, and its bytes

    def __getattr__(self, name: str) -> Any:
        def called(*given: Any) -> int:
            plain = [x.value if isinstance(x, (ctypes.c_int, ctypes.c_void_p)) else x for x in given]
            self.calls.append((name, *plain))
            if name in self.STORES and name != self.refuses:
                given[0]._obj.value = self.STORES[name](self, *given)
            answer = getattr(type(self), f"_{name}", lambda *_: 0)
            return 222 if name == self.refuses else answer(self, *given)

        return called

    @property
    def names(self) -> list[str]:
        return [name for name, *_ in self.calls]

    def _cuCtxSetCurrent(self, context: ctypes.c_void_p) -> int:  # noqa: N802
        self.current = context.value
        return 0

    def _cuGetErrorString(self, error: int, text: Any) -> int:  # noqa: N802
        text._obj.value = None if error == 99 else f"words of {error}".encode()
        return 0

    def _cuTensorMapEncodeTiled(self, at: ctypes.c_void_p, *_: object) -> int:  # noqa: N802
        assert at.value is not None and at.value % 64 == 0
        ctypes.memset(at.value, 0xFF, 128)
        return 0

    def _cuFuncGetParamInfo(self, _: object, i: ctypes.c_size_t, offset: Any, size: Any) -> int:  # noqa: N802
        if i.value >= len(self.parameters):
            return 1
        offset._obj.value, size._obj.value = self.parameters[i.value]
        return 0

    def _cuLaunchKernelEx(self, config: Any, *_: object) -> int:  # noqa: N802
        return 700 if config._obj.grid_x == 7 else 0


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    """In the driver's place, for a thread that has seen no context yet."""
    found = Library()
    monkeypatch.setattr(driver, "_library", lambda: found)
    driver._primary_context.cache_clear()
    driver._thread.__dict__.clear()
    yield found
    driver._thread.__dict__.clear()
    driver._primary_context.cache_clear()


def test_a_thread_without_a_context_gets_the_devices_own(library: Library) -> None:
    for names in (["cuDeviceGet", "cuDevicePrimaryCtxRetain"], []):  # two threads; one retains the context for both
        driver._thread.__dict__.clear()
        library.calls.clear()
        library.current = None
        for _ in range(2):  # what has been seen is not asked again
            driver.ensure_context(1)
        assert library.current == 101 and library.names == ["cuCtxGetCurrent", *names, "cuCtxSetCurrent"]


def test_a_context_that_is_there_stays(library: Library) -> None:
    library.current = 7
    driver.ensure_context(0)
    assert (library.current, library.names) == (7, ["cuCtxGetCurrent"])


def test_the_drivers_errors_are_raised(library: Library) -> None:
    library.refuses = "cuCtxGetCurrent"
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent failed with CUDA error 222: words of 222"):
        driver.ensure_context(0)


def test_the_drivers_version(library: Library) -> None:
    assert driver.driver_version() == (12, 9)


@pytest.mark.parametrize("shared", [0, 48 * 1024, 48 * 1024 + 1, 227 * 1024])
def test_a_kernel_is_loaded_with_the_shared_memory_that_it_wants(shared: int, library: Library) -> None:
    """More than 48 KB must be asked for."""
    assert driver.load(b"a cubin", "a_kernel", shared) == (11, 12)
    (load, _, code), (get, _, module, symbol), *others = library.calls
    assert (load, code) == ("cuModuleLoadData", b"a cubin")
    assert (get, module, symbol) == ("cuModuleGetFunction", 11, b"a_kernel")
    expected = [("cuFuncSetCacheConfig", 12, 1), ("cuFuncSetAttribute", 12, 8, shared)]
    assert others == (expected if shared > 49152 else [])


@pytest.mark.parametrize("refuses", ["cuModuleLoadData", "cuModuleGetFunction", "cuFuncSetAttribute"])
def test_a_kernel_that_the_driver_refuses(refuses: str, library: Library) -> None:
    library.refuses = refuses
    with pytest.raises(RuntimeError, match=f"{refuses} failed with CUDA error 222: words of 222"):
        driver.load(b"a cubin", "a_kernel", 1 << 17)
    assert driver.error_text(99) == "unknown error"


@pytest.mark.parametrize(
    ("shape", "strides", "box"),
    [((3, 100, 40), (4000, 40, 1), (1, 64, 32)), ((1 << 33, 8), (1 << 35, 1), (256, 8)), ((40,), (1,), (8,))],
    ids=["a batch", "large", "one dimension"],
)
def test_a_tensor_map_is_encoded_from_the_last_dimension_on(
    shape: tuple[int, ...], strides: tuple[int, ...], box: tuple[int, ...], library: Library, monkeypatch: Any
) -> None:
    """Pitches in bytes, but for the last dimension's."""
    monkeypatch.setattr(driver, "driver_version", lambda: (13, 2))
    assert driver.tensor_map(4096, 9, 2, shape, strides, box, 3) == b"\xff" * 128
    [(name, _, element, rank, address, sizes, pitches, sides, steps, *how)] = library.calls
    assert (name, element, rank, address) == ("cuTensorMapEncodeTiled", 9, len(shape), 4096)
    assert tuple(sizes) == shape[::-1] and tuple(sides) == box[::-1] and tuple(steps) == (1,) * rank
    assert tuple(pitches)[: rank - 1] == tuple(2 * x for x in strides[-2::-1])
    kinds = [type(x)._type_ for x in (sizes, pitches, sides, steps)]
    assert kinds == [ctypes.c_uint64, ctypes.c_uint64, ctypes.c_uint32, ctypes.c_uint32]
    assert how == [0, 3, 2, 0]  # the third: swizzle; 128 bytes of L2; zeros outside
    library.refuses = "cuTensorMapEncodeTiled"
    with pytest.raises(RuntimeError, match="cuTensorMapEncodeTiled failed with CUDA error 222"):
        driver.tensor_map(4096, 9, 2, shape, strides, box, 3)


@pytest.mark.parametrize(
    ("shape", "pitch", "version", "cleared"),
    [
        ((256, 255), 256, (13, 1), True),  # 131,070 bytes
        ((256, 256), 256, (13, 1), False),
        ((256, 255), 256, (12, 8), True),
        ((256, 255), 256, (13, 2), False),
        ((2, 8), 1 << 20, (13, 1), False),
    ],
)
def test_a_small_tensor_map_is_without_a_bit_of_older_drivers(
    shape: tuple[int, int], pitch: int, version: tuple[int, int], cleared: bool, library: Library, monkeypatch: Any
) -> None:
    """As in Triton's driver.c."""
    monkeypatch.setattr(driver, "driver_version", lambda: version)
    found = driver.tensor_map(4096, 9, 2, shape, (pitch, 1), (64, 8), 3)
    expected = bytearray(b"\xff" * 128)
    expected[10] -= 0x20 * cleared
    assert found == expected


def test_a_tensor_map_s_address_is_replaced(library: Library) -> None:
    for library.refuses, error in (("", 0), ("cuTensorMapReplaceAddress", 222)):
        assert driver.replace_address(128, 4096) == error
        assert library.calls.pop() == ("cuTensorMapReplaceAddress", 128, 4096)


def test_parameters_have_the_bytes_that_the_driver_says(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    assert driver.parameter_sizes(12) == [128, 4, 8]
    assert [call[:2] for call in library.calls] == 4 * [("cuFuncGetParamInfo", 12)]
    monkeypatch.setattr(driver, "_library", SimpleNamespace)  # a driver before CUDA 12.4
    assert driver.parameter_sizes(12) is None


def test_a_launch_returns_the_driver_s_error(library: Library) -> None:
    """Of an empty grid, which the driver refuses, nothing is launched. tests/runtime/test_step.py has what is shown."""
    launch = DriverLaunch(12, (8, 4, 2), 128, 50_000, 1, False, False, b"", (), (), (), (), ())
    for grid in ((0, 4, 2), (8, 0, 2), (8, 4, 0)):
        config = driver.launch_config(launch._replace(grid=grid))
        assert driver.launch(config, ctypes.c_void_p(12), None) == 0 and library.calls == []
    for grid, error in (((8, 4, 2), 0), ((7, 1, 1), 700)):
        config, parameters = driver.launch_config(launch._replace(grid=grid)), (ctypes.c_void_p * 1)(5)
        assert driver.launch(config, ctypes.c_void_p(12), parameters) == error
        name, shown, function, given, extra = library.calls.pop()
        assert (name, function, given, extra) == ("cuLaunchKernelEx", 12, parameters, None) and shown._obj is config


def test_the_version_of_cublas_is_of_the_library_that_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    """None is loaded for it, and what has no such function is no error."""

    def property(which: int, value: Any) -> int:
        value._obj.value = (13, 1, 2)[which]
        return 0

    version, opens = driver.cublas_version.__wrapped__, Mock(return_value=SimpleNamespace(cublasGetProperty=property))
    monkeypatch.setattr(driver.ctypes, "CDLL", opens)
    assert version("13.0") == "13.1.2"
    opens.assert_called_once_with("libcublas.so.13", mode=os.RTLD_NOLOAD)
    for opens.return_value in (SimpleNamespace(cublasGetProperty=lambda *_: 1), SimpleNamespace()):
        assert version("13.0") is None
    monkeypatch.undo()
    assert version(None) is None
