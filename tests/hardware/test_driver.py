"""CUDA driver calls, against a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest

from triton_gemm.hardware import driver


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
    with pytest.raises(RuntimeError, match="cuCtxGetCurrent failed with CUDA error 3"):
        driver.ensure_context(0)


def test_the_drivers_version(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "_library", lambda: FakeDriver(None))
    assert driver.driver_version() == (12, 9)


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
