"""What `matmul` launches, one module a kernel. `kernels.portable` and the others are imported when they are first used:
Triton reads the source of each function that it decorates, which takes longer than the rest of `import triton_gemm`."""

from __future__ import annotations

from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING

from ..compat import decorating

if TYPE_CHECKING:
    from . import fma, gemv, portable, repack, skinny, warp_specialised

__all__ = ["fma", "gemv", "portable", "repack", "skinny", "warp_specialised"]


def __getattr__(name: str) -> ModuleType:
    if name in __all__:
        with decorating():
            return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
