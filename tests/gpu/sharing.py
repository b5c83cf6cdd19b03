"""Another process that keeps the GPU busy."""

from __future__ import annotations

import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

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
