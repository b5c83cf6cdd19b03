"""Timed graphs, against a driver that only notes what it is asked."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from typing import Any

import pytest

from triton_gemm.hardware import driver, graphs
from triton_gemm.hardware.graphs import RELAXED, Mark, TimedGraph
from triton_gemm.runtime.step import DriverLaunch, Frame

MAKES = ("cuEventCreate", "cuGraphCreate", "cuGraphInstantiateWithFlags")
LAUNCH = DriverLaunch(
    *(0xF00D, (6, 1, 1), 128, 70_000, 2, True, True, struct.pack("<QI4x", 0, 7)), *((0, 8), ((0, 0),), (), (), ())
)


class Library:
    """libcuda. calls: names and the integers that they were given; errors: what a function returns; mode: of captures,
    for this thread; kernels: parameters of the nodes; alive: handles that are not given up."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, list[int]]] = []
        self.errors: dict[str, int] = {}
        self.mode, self.handles = 0, 100
        self.kernels: list[Any] = []
        self.alive: set[int] = set()

    def __getattr__(self, name: str) -> Any:
        def called(*arguments: Any) -> int:
            values = [x.value if hasattr(x, "value") else x for x in arguments if not hasattr(x, "_obj")]
            self.calls.append((name, values))
            if name == "cuThreadExchangeStreamCaptureMode":
                mode = arguments[0]._obj
                self.mode, mode.value = mode.value, self.mode
                return 0
            assert self.mode == RELAXED or name == "cuEventDestroy_v2", f"{name} breaks captures"
            assert "Capture" not in name, "while anything is captured no thread may wait for the GPU"
            if error := self.errors.get(name, 0):
                return error
            if name in MAKES or name.startswith("cuGraphAdd"):
                self.handles += 1
                arguments[0]._obj.value = self.handles
                self.alive |= {self.handles} if name in MAKES else set()
            if name.startswith("cuGraphAdd"):
                after = arguments[2]._obj.value if arguments[2] is not None else None
                values.insert(0, after)
            if name == "cuGraphAddKernelNode_v2":
                self.kernels.append(arguments[4]._obj)
            if "Destroy" in name:
                self.alive.remove(values[0])
            if name == "cuEventElapsedTime":
                arguments[0]._obj.value = 0.125
            return 0

        return called

    def cuGetErrorString(self, error: int, text: Any) -> int:  # noqa: N802
        text._obj.value = b"an error"
        return 0

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls if name != "cuThreadExchangeStreamCaptureMode"]


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Iterator[Library]:
    found = Library()
    monkeypatch.setattr(driver, "_library", lambda: found)
    monkeypatch.setattr(graphs, "ensure_context", lambda device: None)
    with graphs.relaxed():
        yield found
    assert found.mode == 0, "the thread's mode is as before"


def made_of(*addresses: int) -> tuple[TimedGraph, list[Frame]]:
    frames = [Frame(LAUNCH) for _ in addresses]
    assert not any(frame.fill((1.0, 0.0, address)) for frame, address in zip(frames, addresses, strict=True))
    return TimedGraph(0, [(x.config, x.function, x.pointers) for x in frames]), frames


def test_launches_are_nodes_between_two_events(library: Library) -> None:
    made, _ = made_of(0x1000, 0x2000)
    attributes = ["cuGraphKernelNodeSetAttribute"] * 3
    kernel = ["cuGraphAddKernelNode_v2", *attributes]
    assert library.names[3:] == [
        *("cuGraphCreate", "cuGraphAddEventRecordNode", *kernel, *kernel, "cuGraphAddEventRecordNode"),
        *("cuGraphInstantiateWithFlags", "cuGraphDestroy"),
    ]
    afters = [values[0] for name, values in library.calls if name.startswith("cuGraphAdd")]
    assert afters == [None, 105, 106, 107], "one after another"
    events = [values[-1] for name, values in library.calls if name == "cuGraphAddEventRecordNode"]
    assert events == [101, 102]
    for node, address in zip(library.kernels, (0x1000, 0x2000), strict=True):
        assert (node.function, node.grid_x, node.grid_y, node.grid_z) == (0xF00D, 6, 1, 1)
        assert (node.block_x, node.block_y, node.block_z, node.shared) == (128, 1, 1, 70_000)
        assert (node.extra, node.kernel, node.context) == (None, None, None)
        pointers = ctypes.cast(node.parameters, ctypes.POINTER(ctypes.c_void_p))
        assert ctypes.string_at(pointers[0], 8) == struct.pack("Q", address)
        assert ctypes.string_at(pointers[1], 4) == struct.pack("I", 7)
    ids = [values[1] for name, values in library.calls if name == "cuGraphKernelNodeSetAttribute"]
    assert ids == [2, 4, 5] * 2, "cooperative, and in clusters; programmatic launches are of streams alone"
    made.close()
    assert not library.alive


def test_runs_are_read_later(library: Library) -> None:
    made, _ = made_of(0x1000)
    library.calls.clear()
    assert graphs.launch(made.graph, made.ended, 77) == 0
    assert [x for x in library.calls if x[0] in library.names] == [
        ("cuGraphLaunch", [made.graph, 77]),
        ("cuEventRecord", [made.ended, 77]),
    ]
    library.errors["cuGraphLaunch"] = 1
    assert graphs.launch(made.graph, made.ended, 77) == 1 and library.names[-1] == "cuGraphLaunch"
    library.errors["cuEventQuery"] = graphs.NOT_READY
    assert made.read() is None
    library.errors["cuEventQuery"] = 700
    with pytest.raises(driver.DriverError, match="an error"):
        made.read()
    library.errors.clear()
    assert made.read() == 125.0
    made.close()
    made.close()
    assert not library.alive


@pytest.mark.parametrize(
    "name", ["cuEventCreate", "cuGraphCreate", "cuGraphAddKernelNode_v2", "cuGraphInstantiateWithFlags"]
)
def test_what_the_driver_refuses_leaves_nothing(library: Library, name: str) -> None:
    library.errors[name] = 1
    with pytest.raises(driver.DriverError, match=name):
        made_of(0x1000)
    assert not library.alive


def test_a_mark_is_passed_when_the_gpu_has_come_there(library: Library) -> None:
    mark = Mark()
    mark.set(5)
    library.errors["cuEventQuery"] = graphs.NOT_READY
    assert not mark.passed()
    library.errors.clear()
    assert mark.passed()
    assert ("cuEventRecord", [101, 5]) in library.calls


def test_a_thread_may_do_what_captures_forbid(library: Library) -> None:
    library.mode = 0
    graphs.allow_during_captures()
    assert library.mode == RELAXED


def test_copies_are_queued(library: Library) -> None:
    graphs.copy(0x2000, 0x1000, 123, 7)
    graphs.synchronize(7)
    assert library.calls[1:] == [("cuMemcpyAsync", [0x2000, 0x1000, 123, 7]), ("cuStreamSynchronize", [7])]
