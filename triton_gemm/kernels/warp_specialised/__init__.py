"""Hopper's production kernel. `kernel` is what runs on the GPU, `configs` its tiles, `host` what it can run, and how it
is launched. `costs` is how long that takes, `choice` which candidates are worth comparing, and `bits` in which order it
sums."""

from .bits import order_of_sums
from .choice import candidates, given_as, lower_bounds, schedules, without_clusters
from .configs import CLUSTERED, CONFIGS, FOR_LONG_SUMS, Config, configs
from .costs import Costs, microseconds
from .host import c_by_tma, can_split_k, illegal, launches, shared_memory

__all__ = [
    "CLUSTERED",
    "CONFIGS",
    "FOR_LONG_SUMS",
    "Config",
    "Costs",
    "c_by_tma",
    "can_split_k",
    "candidates",
    "configs",
    "given_as",
    "illegal",
    "launches",
    "lower_bounds",
    "microseconds",
    "order_of_sums",
    "schedules",
    "shared_memory",
    "without_clusters",
]
