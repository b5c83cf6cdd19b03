"""What `enable` has compiled before the first call."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import pytest
import torch

from tests.runtime.test_background import Gpu, call, planned
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.runtime import background, binaries, head_start
from triton_gemm.selection.bit_classes import bit_class

HOPPER = device_of_capability((9, 0))


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    """Where CUDA is initialised, on a Hopper GPU."""
    found = Gpu(monkeypatch, quick=True)
    monkeypatch.setattr(background, "AHEAD", (512, 64, 1))
    monkeypatch.setattr(background, "compiled_before", found.load)
    monkeypatch.setattr(background, "enabled", lambda: True)
    monkeypatch.setattr(head_start, "device_info", lambda _: HOPPER)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(head_start, "_begun", False)
    monkeypatch.setattr(head_start, "when_cuda_begins", lambda begin: begin())
    return found


def begin(gpu: Gpu) -> list[Any]:
    """The jobs that it gives workers, once its thread has ended."""
    head_start.begin()
    _ended(lambda: "triton_gemm head start" not in [x.name for x in background.threading.enumerate()])
    return gpu.compiler.jobs


def _ended(is_so: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_first_calls_find_what_workers_compiled_before(gpu: Gpu) -> None:
    """Of other weights too, wide ones and narrow ones; nothing waits."""
    jobs = begin(gpu)
    assert len({bit_class(*job) for job in jobs}) > 2 and {problem.dtype for problem, _ in jobs} == {torch.bfloat16}
    gpu.end()
    call(planned(300, 1024, 2048))
    narrow = planned(536, 8, 4096)
    assert narrow.selection.schedule is not None and narrow.selection.schedule.split_k > 1
    call(narrow)
    assert not gpu.waited and background.counts == {"stand-in": 2}


def test_what_the_cache_has_is_not_compiled_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    jobs = [*begin(gpu)]
    gpu.end()
    gpu.compiler.jobs.clear()
    for name, value in (("_available", {}), ("_compiler", lambda *_: pytest.fail("workers are started"))):
        monkeypatch.setattr(background, name, value)
    monkeypatch.setattr(head_start, "_begun", False)
    assert not begin(gpu)
    found = background._available_on(HOPPER)
    assert all(found.binaries.issuperset(binaries.identities(HOPPER, *job)) for job in jobs)


def test_it_begins_once_and_not_while_products_are_timed(gpu: Gpu) -> None:
    with background.held():
        assert not begin(gpu)
    assert not begin(gpu), "once in a process"


def test_nothing_is_compiled_where_nothing_is_in_the_background(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(background, "enabled", lambda: False)
    assert not begin(gpu) and not head_start._begun


@pytest.mark.parametrize("default", [torch.float16, torch.float32])
def test_the_dtype_is_torchs_default_of_16_bits(gpu: Gpu, default: torch.dtype) -> None:
    before = torch.get_default_dtype()
    torch.set_default_dtype(default)
    try:
        jobs = begin(gpu)
    finally:
        torch.set_default_dtype(before)
    assert {problem.dtype for problem, _ in jobs} == {default if default.itemsize == 2 else torch.bfloat16}


def test_a_failure_is_in_no_calls_way(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head_start, "device_info", lambda _: 1 / 0)
    assert not begin(gpu)
