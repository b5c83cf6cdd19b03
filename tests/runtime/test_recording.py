"""What is recorded of calls on a GPU: those that C++ would launch, and one launch of a product that a stand-in runs."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from tests.support import fake_compiler, fake_driver
from tests.support.native_calls import Call
from tests.support.table_fakes import problem_of
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


def test_a_record_of_shapes_that_cannot_be_written_leaves_nothing(tmp_path: Path) -> None:
    taken = tmp_path / "shapes.json"
    taken.mkdir()
    with pytest.raises(OSError):
        recording.write(taken, {problem_of(): 2})
    assert list(tmp_path.iterdir()) == [taken]


@pytest.mark.parametrize("path", ["", "."])
def test_where_nothing_can_be_recorded_no_block_runs(
    path: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(IsADirectoryError), recording.record_shapes(path):
        pytest.fail("the block runs")


def test_what_is_recorded_goes_where_the_path_led_when_the_block_began(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Behind a link, and from the folder that was the current one; so it is asked there whether it can be written."""
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir(), second.mkdir()
    link = tmp_path / "link.json"
    link.symlink_to("first/shapes.json")
    monkeypatch.chdir(tmp_path)
    with recording.record_shapes("link.json"):
        monkeypatch.chdir(second)
        link.unlink(), link.symlink_to("second/shapes.json")
    assert (first / "shapes.json").exists() and not link.exists()
    link.unlink(), link.symlink_to("nowhere/shapes.json")
    with pytest.raises(FileNotFoundError, match="nowhere"), recording.record_shapes(link):
        pytest.fail("the block runs")
    link.unlink(), link.symlink_to("first/shapes.json")
    probed = list[Path]()
    monkeypatch.setattr(os, "access", lambda path, _: probed.append(path))
    with pytest.raises(PermissionError, match="cannot be written"), recording.record_shapes(link):
        pytest.fail("the block runs")
    assert probed == [first]


def test_a_pipe_is_no_file_to_be_replaced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pipe, link = tmp_path / "pipe", tmp_path / "link"
    os.mkfifo(pipe)
    link.symlink_to(pipe)
    assert recording._target(link) == pipe
    monkeypatch.setattr(os, "access", lambda path, _: path == tmp_path)
    with pytest.raises(PermissionError), recording.record_shapes(link):
        pytest.fail("the block runs")
    link.unlink(), link.symlink_to(link)
    with pytest.raises(OSError, match="symbolic links"), recording.record_shapes(link):
        pytest.fail("the block runs")
