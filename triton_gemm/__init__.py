"""Matrix multiplication for PyTorch, written in Triton."""

from .api import explain, matmul, scaled_matmul

__version__ = "0.1.0"

__all__ = ["explain", "matmul", "scaled_matmul"]
