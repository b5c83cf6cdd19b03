"""Other processes that use the GPU."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

from triton_gemm.tuning.conditions import complaint
from triton_gemm.tuning.gpu import Gpu
from triton_gemm.tuning.journal import Journal

LONGEST_S = 60.0


def _multiply(begun: Any) -> None:
    a = torch.randn(8192, 8192, device="cuda", dtype=torch.bfloat16)
    a @ a
    torch.cuda.synchronize()
    begun.set()
    end = time.monotonic() + LONGEST_S
    while time.monotonic() < end:
        for _ in range(20):
            a @ a
        torch.cuda.synchronize()


def skip_if_shared() -> None:
    """Skips a test that times, on a GPU that is not fit for it now."""
    found = Gpu(torch.device("cuda", torch.cuda.current_device()), Journal(None, ""), "same", "graph")
    now = found.conditions()
    found.close()
    if (why := complaint(now, now, now.ms)) is not None:
        pytest.skip(f"it needs the GPU for itself: {why}")


@contextmanager
def shared_gpu() -> Iterator[None]:
    """Inside another process multiplies large matrices, one after another, for a minute at most."""
    context = multiprocessing.get_context("spawn")
    begun = context.Event()
    other = context.Process(target=_multiply, args=(begun,))
    other.start()
    try:
        assert begun.wait(60)
        yield
    finally:
        other.kill()
        other.join()
