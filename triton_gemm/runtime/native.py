"""Calls like one before, launched by C++: entries of the extension, which `native_build` builds and loads.

Python finds what a call runs on, and keeps it (`functional.fast_path`). The extension does the same from then on in a
tenth of the time. What it does not have an entry for, Python takes, as where there is no extension.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from ctypes import addressof
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from ..hardware.driver import address_of
from . import stand_ins, turns
from .native_build import built as built
from .native_build import module as module
from .native_build import possible as possible
from .native_build import state as state
from .native_build import why_not as why_not
from .step import DriverLaunch
from .workspace import follow as follow_workspaces
from .workspace import is_of_stream, workspace

if TYPE_CHECKING:
    from .plan import GemmPlan


class Shape(NamedTuple):
    """Of memory that C++ allocates: elements, strides in elements, and the dtype."""

    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    dtype: torch.dtype


class Entry(NamedTuple):
    """What the extension's table keeps of a plan. C++ reads these fields by their names (`compat/cpp/parse.h`)."""

    plan: GemmPlan
    # Stream -> ([partial sums, counters], whether all launches of that stream may use them), or None.
    workspace: Callable[[int], tuple[list[torch.Tensor], bool]] | None
    workspace_bytes: int  # of partial sums
    result: Shape
    temporaries: tuple[Shape, ...]
    extents: tuple[int, ...]  # bytes from the first element of a, b and c to the end of the last
    copies: bool  # as in `fast_path.Known`
    preactivations: int  # as in `fast_path.Known`
    derivative: int  # of `fast_path.DERIVATIVES`, or 0
    activation: int  # of `fast_path.ACTIVATED`, or 0
    calls: int  # address where launches of a stand-in are counted, or 0
    turns: tuple[int, int]  # addresses of the plan's own numbers and of `turns.job`, or zeros
    steps: tuple[DriverLaunch, ...]


def table(extension: Any, capacity: int) -> Any:
    """A new table of the extension, which launches by the driver's functions."""
    extension.connect(*_launching())
    follow_workspaces(extension.forget_workspaces)
    stand_ins.follow(extension.forget_stand_ins)
    turns.extension = extension
    return extension.Table(capacity)


def _launching() -> tuple[int, ...]:
    functions = "cuLaunchKernelEx", "cuGetErrorString", "cuTensorMapReplaceAddress", "cuStreamIsCapturing"
    return tuple(address_of(name) for name in functions)


def entry_of(
    plan: GemmPlan,
    shape: Sequence[int],
    strides: Sequence[int],
    dtype: torch.dtype,
    derivative: int = 0,
    copies: bool = False,
    preactivations: int = 0,
    activation: int = 0,
) -> Entry:
    """What the extension's table keeps of a compiled plan, and of the results that its calls make."""
    shares = partial(_workspace, plan.index, plan.workspace) if plan.shares else None
    temporaries = tuple(
        Shape(tuple(x.shape), torch.empty(x.shape, device="meta").stride(), x.dtype)
        for step in plan.steps
        for x in step.launch.temporaries
    )
    entries = [step.entry for step in plan.steps]
    if None in entries:
        raise RuntimeError("a launch is not compiled")
    steps = tuple(entry.with_beta(float(copies)) for entry in entries if entry is not None)
    result = Shape(tuple(shape), tuple(strides), dtype)
    calls = 0 if plan.calls is None else addressof(plan.calls)
    of_turns = (0, 0) if plan.turn is None else (addressof(plan.turn.own), addressof(turns.job))
    how = plan.extents, copies, preactivations, derivative, activation, calls, of_turns
    return Entry(plan, shares, plan.workspace, result, temporaries, *how, steps)


def _workspace(index: int, nbytes: int, stream: int) -> tuple[list[torch.Tensor], bool]:
    found = workspace(index, stream, nbytes)
    return found, is_of_stream(index, stream, found)
