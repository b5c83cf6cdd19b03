"""The thread for what would delay calls."""

from __future__ import annotations

import threading
from contextlib import nullcontext

import pytest
import torch

from triton_gemm.learning import aside


def test_jobs_are_done_in_order_by_one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed: list[threading.Thread] = []
    monkeypatch.setattr(aside, "allow_during_captures", lambda: allowed.append(threading.current_thread()))
    monkeypatch.setattr(torch.cuda, "device", lambda index: nullcontext())
    made, done = aside.Aside(), []

    def job(number: int) -> int:
        done.append((number, threading.current_thread()))
        return number

    found = [made.ask(lambda number=number: job(number), 0) for number in range(5)]  # type: ignore[misc]
    failed = made.ask(lambda: 1 // 0, 0)
    assert [x.result(10) for x in found] == [0, 1, 2, 3, 4]
    with pytest.raises(ZeroDivisionError):
        failed.result(10)
    assert [number for number, _ in done] == [0, 1, 2, 3, 4]
    [thread] = {x for _, x in done}
    assert thread.daemon and allowed == [thread], "it may load kernels while others capture"
