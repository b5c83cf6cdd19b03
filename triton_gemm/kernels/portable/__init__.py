"""The kernel that takes everything. `kernel` is what runs on the GPU, `host` what it can run, and how it is launched,
and `choice` which ways are worth comparing, and how long they take."""

from .choice import Costs, candidates, microseconds
from .host import CONFIGS, MAX_REGISTERS, MAX_SIZE, Config, illegal, launches, order_of_sums, vector
from .kernel import portable_kernel

__all__ = [
    "CONFIGS",
    "MAX_REGISTERS",
    "MAX_SIZE",
    "Config",
    "Costs",
    "candidates",
    "illegal",
    "launches",
    "microseconds",
    "order_of_sums",
    "portable_kernel",
    "vector",
]
