"""The CUDA C++ twins of the ladder's rungs: plain kernels, compiled on first use.

Importing this package compiles nothing and touches no GPU.
"""

from .loader import LoadedTwin, load, load_all
from .ptxas import Resources, resources
from .toolchain import TwinUnavailable
from .twins import TWINS, Twin, Variant

__all__ = [
    "TWINS",
    "LoadedTwin",
    "Resources",
    "Twin",
    "TwinUnavailable",
    "Variant",
    "load",
    "load_all",
    "resources",
]
