"""Hopper's production kernel. `kernel` is what runs on the GPU, `configs` its tiles, `host` what it can
run, and how it is launched, `costs` how long that takes, and `choice` which ways are worth comparing."""

from .choice import candidates, lower_bounds, quick, schedules, without_clusters
from .configs import CLUSTERED, CONFIGS, FOR_LONG_SUMS, QUICK, Config, configs
from .costs import Costs, microseconds
from .host import c_by_tma, can_split_k, illegal, launches, order_of_sums, shared_memory

__all__ = [
    "CLUSTERED",
    "CONFIGS",
    "FOR_LONG_SUMS",
    "QUICK",
    "Config",
    "Costs",
    "c_by_tma",
    "can_split_k",
    "candidates",
    "configs",
    "illegal",
    "launches",
    "lower_bounds",
    "microseconds",
    "order_of_sums",
    "quick",
    "schedules",
    "shared_memory",
    "without_clusters",
]
