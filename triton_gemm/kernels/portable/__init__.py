"""The kernel that takes everything. `kernel` is what runs on the GPU, `host` what it can run, and how it is launched,
and `choice` which candidates are worth comparing, and how long they take."""

from .choice import Costs, candidates, lower_bounds, microseconds, unpredicted
from .host import CONFIGS, MAX_REGISTERS, TMA_CONFIGS, Config, configs, illegal, launches, order_of_sums
from .kernel import portable_kernel

__all__ = [
    "CONFIGS",
    "MAX_REGISTERS",
    "TMA_CONFIGS",
    "Config",
    "Costs",
    "candidates",
    "configs",
    "illegal",
    "launches",
    "lower_bounds",
    "microseconds",
    "order_of_sums",
    "portable_kernel",
    "unpredicted",
]
