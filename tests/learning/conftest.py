"""Fixtures: a service that calls products, on a GPU that is made up."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.learning_fakes import Service, World


@pytest.fixture
def service(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, default_policy: None) -> Service:
    return Service(monkeypatch, tmp_path)


@pytest.fixture
def world(service: Service) -> World:
    return World(service)
