"""The kernels that `matmul` launches, a module for each. `kernels.portable` and the others are imported at their first
use: Triton reads the source of each function that it decorates, which takes longer than the rest of importing this.

`select` compares the candidates of all kernels in KERNELS by predicted time, and tests, benches and calibration follow
that list. A new kernel is a module with what `Kernel` says, and its name in KERNELS, in `__all__`, and in the import
and tuple below for type checkers.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any, Protocol

from ..compat import decorating

if TYPE_CHECKING:
    from ..hardware.device import DeviceInfo
    from ..hardware.device_model import DeviceModel
    from ..problem import GemmProblem
    from . import fma, gemv, mma_fp64, portable, repack, skinny, warp_specialised
    from .candidate import Candidate
    from .launch import Launch

# Of candidates that are predicted to take the same time the first is chosen.
KERNELS = ("warp_specialised", "skinny", "gemv", "fma", "mma_fp64", "portable")

__all__ = ["KERNELS", "Kernel", "fma", "gemv", "mma_fp64", "named", "portable", "repack", "skinny", "warp_specialised"]


class Kernel(Protocol):
    """What the module of a kernel offers. Its functions take as `config` a Config, and as `work` split_k, or for a
    persistent kernel a Schedule."""

    Config: Any  # its own subclass of TileConfig
    Costs: Any  # the constants of its predicted times
    CONFIGS: Any  # all that it is tested in

    def candidates(self, problem: GemmProblem, device: DeviceInfo) -> Iterator[Candidate]:
        """The candidates for `problem` that are worth comparing, none where there is no point in asking `illegal`."""

    def illegal(self, problem: GemmProblem, device: DeviceInfo, config: Any, work: Any, /) -> str | None:
        """Why `device` cannot run `problem`, as it lies in memory, in this configuration; None if it can."""

    def launches(self, problem: GemmProblem, config: Any, work: Any, /) -> tuple[Launch, ...]:
        """What computes `problem`, as descriptions without tensors."""

    def microseconds(self, problem: GemmProblem, config: Any, work: Any, model: DeviceModel, /) -> float:
        """Predicted time of `launches`, operands in memory and not in L2."""

    def order_of_sums(self, problem: GemmProblem, config: Any, work: Any, /) -> str:
        """In which order `launches` sum along K, in the words of `order`: equal only where bits are (`bit_classes`)."""


def named(name: str) -> Kernel:
    """The module of a kernel in KERNELS."""
    assert name in KERNELS, name
    found: Kernel = getattr(sys.modules[__name__], name)
    return found


@cache  # a choice asks for modules many times
def __getattr__(name: str) -> ModuleType:
    if name in (*KERNELS, "repack"):
        with decorating():
            return import_module(f".{name}", __name__)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


if TYPE_CHECKING:  # a module that lacks something is a type error here
    _KERNELS: tuple[Kernel, ...] = (fma, gemv, mma_fp64, portable, skinny, warp_specialised)
