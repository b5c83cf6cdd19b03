"""Launches that are timed on a stream amid others, without waiting: a CUDA graph of them between two events.

The graph is made node by node. Nothing is captured: while anything is, no thread of a process may wait for the GPU. It
may be made and run while other threads capture: what they forbid is allowed to this thread meanwhile
(cuThreadExchangeStreamCaptureMode).
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from .driver import call, ensure_context

RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
NO_TIMING = 2  # CU_EVENT_DISABLE_TIMING
NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered by the default stream
NOT_READY = 600  # CUDA_ERROR_NOT_READY
OF_STREAMS = 6  # CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION, which nodes have not


def rest() -> None:
    """Has other threads have Python for a moment, for a thread that has time. A call of the driver does not: it lets
    go of Python, and has it again before a thread that waits for it has woken up. Among such calls others waited for
    2 to 60 ms. Nor need `sleep(0)`."""
    time.sleep(2e-5)


def _call(name: str, *arguments: object, allowed: Sequence[int] | None = (0,)) -> int:
    """As `call`, and then a rest."""
    error = call(name, *arguments, allowed=allowed)
    rest()
    return error


class _KernelNode(ctypes.Structure):
    """CUDA_KERNEL_NODE_PARAMS_v2."""

    _fields_ = (
        ("function", ctypes.c_void_p),
        *((f"{what}_{axis}", ctypes.c_uint) for what in ("grid", "block") for axis in "xyz"),
        ("shared", ctypes.c_uint),
        ("parameters", ctypes.c_void_p),
        *((name, ctypes.c_void_p) for name in ("extra", "kernel", "context")),
    )


class TimedGraph:
    """Launches one after another, on the current device. They are run by the handle `graph`, one run at a time, after
    which the event `ended` is recorded, and read later.

    launches: of each a `driver.Config`, the kernel's handle and the addresses of its parameters, which are copied now.
    What they read and write must stay in memory until a run has ended. RuntimeError where the driver refuses. All is
    called by a thread that `relaxed` or `allow_during_captures` allows it to.
    """

    def __init__(self, device: int, launches: Iterable[tuple[Any, ctypes.c_void_p, Any]]) -> None:
        ensure_context(device)
        self._exec, graph = ctypes.c_void_p(), ctypes.c_void_p()
        self._begin, self._end, self._ended = (ctypes.c_void_p() for _ in range(3))
        try:
            for event in self._events:
                _call("cuEventCreate", ctypes.byref(event), ctypes.c_uint(0))
            _call("cuGraphCreate", ctypes.byref(graph), ctypes.c_uint(0))
            last = _record(graph, None, self._begin)
            for launch in launches:
                last = _kernel(graph, last, *launch)
            _record(graph, last, self._end)
            _call("cuGraphInstantiateWithFlags", ctypes.byref(self._exec), graph, ctypes.c_ulonglong(0))
        except BaseException:
            self.close()
            raise
        finally:
            if graph.value:
                _call("cuGraphDestroy", graph)

    @property
    def graph(self) -> int:
        return self._exec.value or 0

    @property
    def ended(self) -> int:
        return self._ended.value or 0

    def read(self) -> float | None:
        """Microseconds of the last run, or None while it has not ended. RuntimeError for what a kernel did."""
        if call("cuEventQuery", self._ended, allowed=(0, NOT_READY)):
            return None
        took = ctypes.c_float()
        call("cuEventElapsedTime", ctypes.byref(took), self._begin, self._end)
        return 1000 * took.value

    def close(self) -> None:
        """Gives up what the driver holds for it; a run that has not ended goes on."""
        for name, handle in (("cuGraphExecDestroy", self._exec), *(("cuEventDestroy_v2", x) for x in self._events)):
            if handle.value:
                _call(name, handle, allowed=None)
                handle.value = None

    @property
    def _events(self) -> tuple[ctypes.c_void_p, ...]:
        return self._begin, self._end, self._ended


def launch(graph: int, ended: int, stream: int) -> int:
    """Queues a run of a graph on a stream of the current device, and records the event; the driver's error, or 0."""
    with relaxed():
        of = ctypes.c_void_p(stream)
        return call("cuGraphLaunch", ctypes.c_void_p(graph), of, allowed=None) or call(
            "cuEventRecord", ctypes.c_void_p(ended), of, allowed=None
        )


class Mark:
    """A place in a stream, of which is known when the GPU has come there."""

    def __init__(self) -> None:
        self._event = ctypes.c_void_p()
        call("cuEventCreate", ctypes.byref(self._event), ctypes.c_uint(NO_TIMING))

    def set(self, stream: int) -> None:
        call("cuEventRecord", self._event, ctypes.c_void_p(stream))

    def passed(self) -> bool:
        return call("cuEventQuery", self._event, allowed=(0, NOT_READY)) == 0

    def __del__(self) -> None:
        if self._event.value:
            call("cuEventDestroy_v2", self._event, allowed=None)


def allow_during_captures() -> None:
    """Allows to this thread from now on what captures of other threads forbid, as loading kernels. Whoever calls it
    captures nothing itself."""
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(ctypes.c_int(RELAXED)))


@cache
def own_stream(device: int) -> int:
    """A stream of this package alone: one of torch's may be any thread's, which may capture on it."""
    made = ctypes.c_void_p()
    call("cuStreamCreate", ctypes.byref(made), ctypes.c_uint(NON_BLOCKING))
    return made.value or 0


def copy(to: int, of: int, nbytes: int, stream: int) -> None:
    """Queues a copy between addresses, of which either may be the host's. No kernel is loaded for it."""
    _call("cuMemcpyAsync", *(ctypes.c_uint64(x) for x in (to, of)), ctypes.c_size_t(nbytes), ctypes.c_void_p(stream))


def synchronize(stream: int) -> None:
    call("cuStreamSynchronize", ctypes.c_void_p(stream))


@contextmanager
def relaxed() -> Iterator[None]:
    """Inside, this thread may do what captures of other threads forbid."""
    mode = ctypes.c_int(RELAXED)
    call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))
    try:
        yield
    finally:
        call("cuThreadExchangeStreamCaptureMode", ctypes.byref(mode))


def _after(node: ctypes.c_void_p | None) -> tuple[Any, ctypes.c_size_t]:
    """The dependencies of what comes after a node, and their number."""
    return (None, ctypes.c_size_t(0)) if node is None else (ctypes.byref(node), ctypes.c_size_t(1))


def _record(graph: ctypes.c_void_p, last: ctypes.c_void_p | None, event: ctypes.c_void_p) -> ctypes.c_void_p:
    node = ctypes.c_void_p()
    _call("cuGraphAddEventRecordNode", ctypes.byref(node), graph, *_after(last), event)
    return node


def _kernel(
    graph: ctypes.c_void_p, last: ctypes.c_void_p, config: Any, function: ctypes.c_void_p, parameters: Any
) -> ctypes.c_void_p:
    sizes = (getattr(config, f"{what}_{axis}") for what in ("grid", "block") for axis in "xyz")
    given = _KernelNode(function, *sizes, config.shared, ctypes.addressof(parameters), None, None, None)
    node = ctypes.c_void_p()
    _call("cuGraphAddKernelNode_v2", ctypes.byref(node), graph, *_after(last), ctypes.byref(given))
    for attribute in config.attributes[: config.count]:
        if attribute.id != OF_STREAMS:
            value = ctypes.byref(attribute, type(attribute).value.offset)
            _call("cuGraphKernelNodeSetAttribute", node, ctypes.c_int(attribute.id), value)
    return node
