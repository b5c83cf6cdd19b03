"""Memory in which programs of one launch share partial sums: one piece for each stream, and for each graph capture.

Launches on one stream follow one another, so they may share a piece; launches on two streams may not, nor may a
captured graph, which replays beside anything, share one with the stream it was captured on. The counters in it are
zero between launches.

The per-thread default stream has the same handle in every thread, and is another stream in each: its memory is kept by
thread.

Inductor's trees of CUDA graphs warm up and capture out of a pool of their own, in which nothing may stay but what their
graphs return: it is overwritten. There each launch has memory for itself.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from itertools import count

import torch

from ..compat import stream_of_graph_trees
from ..hardware.driver import capture_id

MAX_WORKSPACES = 16
COUNTERS = 16_384
MINIMUM = 4 << 20
PER_THREAD = 2  # the handle of CU_STREAM_PER_THREAD

_workspaces: dict[tuple[int, int, int, int], list[torch.Tensor]] = {}  # threads change it, in one step each
_threads = count(1)
_of_thread = threading.local()  # number: the thread's, which no other has, as a later one may have its ident
_followers: list[Callable[[], None]] = []  # called after each change of _workspaces


def release_captured() -> None:
    """Gives up the memory of captures that have ended. Graphs keep what they need until they are deleted."""
    for key in [key for key in list(_workspaces) if key[2]]:
        _workspaces.pop(key, None)


def workspace(device: int, stream: int, nbytes: int) -> list[torch.Tensor]:
    """Scratch memory of at least `nbytes` bytes and COUNTERS zeroed int32, for launches on `stream`, which must be the
    current stream of the current device `device`.

    Under capture the counters are zeroed in the graph, once; the next launch outside of one gives their memory up. At
    most MAX_WORKSPACES are kept. One that is given up goes back to torch's allocator, which hands it to no other stream
    while this one may use it. On the stream of Inductor's trees of CUDA graphs none is kept, and the counters are
    zeroed for each launch.
    """
    capture = capture_id(stream) if torch.cuda.is_current_stream_capturing() else 0
    if not capture and any(key[2] for key in list(_workspaces)):
        release_captured()
    key = (device, stream, capture, _thread() if stream == PER_THREAD else 0)
    found = _workspaces.get(key)
    if found is None or 4 * found[0].numel() < nbytes:
        size = max(nbytes, MINIMUM)
        memory = torch.empty(size // 4, dtype=torch.float32, device=torch.device("cuda", device))
        counters = found[1] if found else torch.zeros(COUNTERS, dtype=torch.int32, device=memory.device)
        if stream_of_graph_trees(device) == stream:
            return [memory, counters]
        before, found = found, [memory, counters]
        _workspaces[key] = found
        if before and stream == PER_THREAD and not capture:  # torch's allocator would give it to any thread's stream
            torch.cuda.current_stream().synchronize()
        while len(_workspaces) > MAX_WORKSPACES:
            oldest = next(iter(list(_workspaces)))
            if _workspaces.pop(oldest, None) is not None and oldest[1] == PER_THREAD and not capture:
                torch.cuda.synchronize(oldest[0])
        for changed in _followers:
            changed()
    return found


def is_of_stream(device: int, stream: int, memory: list[torch.Tensor]) -> bool:
    """Whether all launches on this stream have `memory` as their `workspace`, until the followers are called."""
    return _workspaces.get((device, stream, 0, 0)) is memory


def follow(changed: Callable[[], None]) -> None:
    """Registers `changed`, to be called after each change of the kept workspaces."""
    if changed not in _followers:
        _followers.append(changed)


def _thread() -> int:
    found: int | None = getattr(_of_thread, "number", None)
    if found is None:
        found = _of_thread.number = next(_threads)
    return found
