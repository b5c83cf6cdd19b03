"""Fixtures that run a kernel on the CPU."""

from __future__ import annotations

from types import SimpleNamespace

import pytest

from tests.support.gluon_on_cpu import simulated


@pytest.fixture(scope="module")
def kernel(request: pytest.FixtureRequest) -> SimpleNamespace:
    """The one that the module's KERNEL names, else the warp-specialised one."""
    return simulated(getattr(request.module, "KERNEL", "warp_specialised"))
