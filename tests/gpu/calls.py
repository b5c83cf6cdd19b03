"""Calls on a GPU: captured in a graph, and what the profiler sees of them."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import TypeVar

import torch

from triton_gemm import kernels

T = TypeVar("T")
OURS = "|".join(kernels.KERNELS)  # how the names of these kernels begin


def captured(call: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
    """A graph of the call, and what a replay writes to."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        result = call()
    return graph, result


def launched(call: Callable[[], object]) -> list[str]:
    """The names of the kernels that the call runs, launched by a graph or not."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        call()
        torch.cuda.synchronize()
    return [event.name for event in profile.events() if event.device_type == torch.autograd.DeviceType.CUDA]


def launches_ours(call: Callable[[], object]) -> bool:
    return any(re.match(OURS, name) for name in launched(call))
