"""The C++ extension, built once for all tests of a run."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support import fake_driver


@pytest.fixture(scope="session")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return fake_driver.build(tmp_path_factory.getbasetemp() / "native")
