"""Fixtures that run the warp-specialised kernel on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.gluon_on_cpu import simulated


@pytest.fixture(scope="module")
def kernel() -> SimpleNamespace:
    return simulated("warp_specialised")
