"""Hopper's production kernel. `kernel` is what runs on the GPU; `host` what it can run, and how it is launched."""

from .host import (
    CONFIGS,
    c_by_tma,
    configs,
    illegal,
    launches,
    rest_columns,
    shared_memory,
    splits,
)

__all__ = ["CONFIGS", "c_by_tma", "configs", "illegal", "launches", "rest_columns", "shared_memory", "splits"]
