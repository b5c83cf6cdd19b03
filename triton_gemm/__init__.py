"""Matrix multiplication for PyTorch, written in Triton."""

from . import nn as nn
from .api import addmm, baddbmm, bmm, explain, linear, matmul, mm, mv
from .scaled import scaled_matmul

__version__ = "0.1.0"

__all__ = ["addmm", "baddbmm", "bmm", "explain", "linear", "matmul", "mm", "mv", "scaled_matmul"]
