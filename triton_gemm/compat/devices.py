"""torch's devices and streams: the current ones, without the Python around them, the stream of Inductor's CUDA graphs,
and a kernel that only waits."""

from __future__ import annotations

import sys
from collections.abc import Callable
from inspect import signature
from typing import Any

import torch

# The current device's index, and the handle of its current stream; missing where torch was built without CUDA.
current_device: Callable[[], int] = getattr(torch._C, "_cuda_getDevice", None)  # type: ignore[assignment]
current_stream: Callable[[int], int] = getattr(torch._C, "_cuda_getCurrentRawStream", None)  # type: ignore[assignment]


# Keeps the current stream busy for so many clocks of a multiprocessor.
occupy: Callable[[int], None] = torch.cuda._sleep


_WITHOUT_TRACES: Any = (
    {"include_traces": False} if "include_traces" in signature(torch.cuda.memory_snapshot).parameters else {}
)


def stream_of_graph_trees(device: int) -> int | None:
    """The handle of the stream on which Inductor's trees of CUDA graphs (`mode="reduce-overhead"`) warm up and capture
    what this thread compiles; None where there are none."""
    trees: Any = sys.modules.get("torch._inductor.cudagraph_trees")
    key = "tree_manager_containers"  # it is there once for each thread, and handed to those of a backward
    if trees is None or not (hasattr(trees.local, key) or torch._C._is_key_in_tls(key)):
        return None
    manager = trees.get_manager(device, create_if_none_exists=False)
    return None if manager is None else int(manager.stream.cuda_stream)


def is_profiling() -> bool:
    """Whether torch's profiler runs, begun by any thread."""
    return bool(torch.autograd.profiler._is_profiler_enabled)


def fills_what_is_empty() -> bool:
    """Whether `torch.empty` launches a kernel that fills what it gives."""
    deterministic: Any = torch.utils.deterministic
    return torch.are_deterministic_algorithms_enabled() and deterministic.fill_uninitialized_memory


def memory_segments() -> list[Any]:
    """What the allocator of CUDA's memory has. Nothing while it records a history, which it would copy, too."""
    if getattr(torch._C, "_cuda_isHistoryEnabled", bool)():
        return []
    return list(torch.cuda.memory_snapshot(**_WITHOUT_TRACES))
