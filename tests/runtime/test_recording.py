"""What is recorded of calls on a GPU: those that C++ would launch, and one launch of a product that a stand-in runs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support import fake_compiler, fake_driver
from tests.support.native_calls import Call
from triton_gemm import record_shapes
from triton_gemm.problem import PRODUCT
from triton_gemm.runtime import plan
from triton_gemm.tuning import read_shapes, recording


def calls(path: Path) -> list[int]:
    return list(read_shapes(path).values())


@pytest.mark.slow
def test_what_cpp_would_launch_counts(
    driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setattr(recording, "current_device", lambda: 0)
    a, b = (torch.empty(256, 256, dtype=torch.bfloat16) for _ in range(2))
    call = Call(driver, a, b, request=PRODUCT, dispatched=False).planned()
    call.take()
    launches = len(driver.seen)
    assert launches
    with record_shapes(tmp_path / "shapes.json"):
        for _ in range(3):
            call.take()
    assert calls(tmp_path / "shapes.json") == [3] and len(driver.seen) == launches
    call.take()
    assert len(driver.seen) == 2 * launches, "C++ launches again"


def test_a_stand_in_counts_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gpu = fake_compiler.Gpu(monkeypatch)
    monkeypatch.setattr(recording, "current_device", lambda: 0)
    first, second = map(fake_compiler.planned, fake_compiler.ROWS[:2])
    for made in (first, second):
        fake_compiler.call(made)
    run = plan.GemmPlan.run
    for number in (1, 2):
        with record_shapes(tmp_path / "shapes.json"):
            assert plan.GemmPlan.run is not run
            fake_compiler.call(second)
            fake_compiler.call(first)
        assert plan.GemmPlan.run is run, "the method is as it was"
        stands_in = second.first_calls is not None and second.first_calls.stand_in is not None
        assert stands_in == (number == 1) and calls(tmp_path / "shapes.json") == [1, 1]
        gpu.end()
