"""Triton's tuner, `triton.autotune`: what it tries, and each of its measurements, become methods that a subclass may
override. Triton has them in private ones, whose arguments may change."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import triton


class Autotuner(triton.runtime.Autotuner):
    """`triton.autotune`'s tuner, with a method around each of its measurements, and one that says what is tried."""

    configs_timings: dict[triton.Config, list[float]]  # of the last tuning: median, p20 and p80 in milliseconds

    def legal(self, arguments: dict[str, Any]) -> list[triton.Config]:
        """What a tuning tries, given the kernel's arguments by name."""
        return list(self.configs)

    def prune_configs(self, kwargs: dict[str, Any]) -> list[triton.Config]:
        self.configs_timings = {}  # Triton 3.9 leaves those of another shape there if it has one configuration to try
        return self.legal(kwargs)

    def trial(self, measure: Callable[[], list[float]], config: triton.Config, meta: dict[str, Any]) -> list[float]:
        """What `measure()` gives: milliseconds, the median and two quantiles. meta: the kernel's arguments by name."""
        return measure()

    def _bench(self, *args: Any, config: triton.Config, **meta: Any) -> list[float]:
        measure = super()._bench
        return self.trial(lambda: measure(*args, config=config, **meta), config, meta)
