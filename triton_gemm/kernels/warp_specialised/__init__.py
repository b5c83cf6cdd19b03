"""Hopper's production kernel. `kernel` is what runs on the GPU, `host` what it can run, and how it is launched, and
`choice` which ways are worth comparing, and how long they take."""

from .choice import Costs, candidates, microseconds, schedules, without_clusters
from .host import (
    CLUSTERED,
    CONFIGS,
    Config,
    c_by_tma,
    can_split_k,
    configs,
    illegal,
    launches,
    order_of_sums,
    rest_columns,
    shared_memory,
)

__all__ = [
    "CLUSTERED",
    "CONFIGS",
    "Config",
    "Costs",
    "c_by_tma",
    "can_split_k",
    "candidates",
    "configs",
    "illegal",
    "launches",
    "microseconds",
    "order_of_sums",
    "rest_columns",
    "schedules",
    "shared_memory",
    "without_clusters",
]
