"""Matrix multiplication for PyTorch, written in Triton."""

from . import nn as nn
from .api import addmm, baddbmm, bmm, explain, linear, matmul, mm, mv
from .grouped import grouped_matmul
from .routing import disable, enable, report_routing, use
from .scaled import scaled_matmul

__version__ = "0.1.0"

__all__ = [
    "addmm",
    "baddbmm",
    "bmm",
    "disable",
    "enable",
    "explain",
    "grouped_matmul",
    "linear",
    "matmul",
    "mm",
    "mv",
    "report_routing",
    "scaled_matmul",
    "use",
]
