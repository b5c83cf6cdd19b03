"""Fixtures: the C++ extension, built once for all tests, and a fake GPU. Tests decide when kernels are compiled."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fake_compiler, fake_driver
from triton_gemm.runtime import native_build


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return native_build.build(tmp_path_factory.getbasetemp() / "native")


@pytest.fixture
def driver(extension: Path, monkeypatch: pytest.MonkeyPatch) -> fake_driver.Driver:
    return fake_driver.install(monkeypatch, extension)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> fake_compiler.Gpu:
    return fake_compiler.Gpu(monkeypatch)
