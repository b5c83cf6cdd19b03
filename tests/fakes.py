"""perf without a GPU: providers compute on the CPU, and replays take no time."""

from __future__ import annotations

from types import ModuleType
from typing import Any

import pytest
import torch


class FakeReplay:
    """Runs nothing and takes a millisecond."""

    def __init__(self, calls: Any, repeats: int) -> None:
        self.repeats = repeats

    def start(self) -> Any:
        return lambda: 1.0


def take_gpu_away(patch: pytest.MonkeyPatch, operands: ModuleType, timer: ModuleType) -> None:
    """Lets `perf.measure.timer` time what `perf.measure.operands` lays on the CPU."""
    patch.setattr(operands, "DEVICE", "cpu")
    patch.setattr(timer, "Replay", FakeReplay)
    patch.setattr(timer, "sets_of", lambda *_: 2)
    patch.setattr(timer, "settle", lambda *_, **__: None)
    patch.setattr(timer, "once_ms", lambda call: (call(), 1.0)[1])
    patch.setattr(torch.cuda, "synchronize", lambda: None)
