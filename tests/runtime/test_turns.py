"""Turns: C++ counts calls, tells the learner of those it asks for, and launches another plan once one is named."""

from __future__ import annotations

from ctypes import CFUNCTYPE, c_int, c_void_p, cast
from dataclasses import dataclass, field
from functools import partial

import pytest
import torch

from tests.support import fake_driver
from tests.support.native_calls import Call
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm.problem import PRODUCT
from triton_gemm.runtime import native, plan, turns
from triton_gemm.selection.select import Selection, ranked

pytestmark = pytest.mark.slow
A, B, C = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((256, 512), (512, 768), (256, 768)))


class Learner:
    """Notes turns. wants: whether plans get some; raises: at a turn."""

    def __init__(self) -> None:
        self.wants, self.turns, self.raises = True, 0, False

    def new(self, made: plan.GemmPlan) -> None:
        if self.wants:
            made.turn = turns.Turn("product")

    def turn(self, made: plan.GemmPlan, b: torch.Tensor, stream: int) -> None:
        assert made.turn is not None and b.data_ptr() == B.data_ptr() and b.shape == B.shape and stream == 0
        self.turns += 1
        if self.raises:
            raise KeyboardInterrupt

    def stop(self) -> None:
        self.turns = -1


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Learner:
    found = Learner()
    replace_all(monkeypatch, turns, _learner=found, active=lambda: True, job=turns.Job(-1, launched=-1))
    monkeypatch.setattr(turns, "extension", None)  # what a test before has loaded
    return found


class Calls(Call):
    """Of one product, as Python has planned it and C++ launches it."""

    def __init__(self, driver: fake_driver.Driver) -> None:
        super().__init__(driver, A, B, request=PRODUCT, operation="matmul", dispatched=False)
        self.made_plan = self.new_plan()
        turns.give(self.made_plan)
        self.plan(self.made_plan)

    def are_by_cpp(self, count: int) -> list[bool]:
        """Of so many calls, whether C++ launches each."""
        found = []
        for _ in range(count):
            self.driver.seen.clear(), self.driver.by_python.clear()
            assert self.take() is not None
            assert len(self.driver.seen) + len(self.driver.by_python) == 1
            found.append(bool(self.driver.seen))
        return found


@pytest.fixture
def calls(driver: fake_driver.Driver, learner: Learner) -> Calls:
    return Calls(driver)


@dataclass
class Graphs:
    """In place of the driver's: begun, the graphs that were launched and the events that were recorded, by C++ and by
    Python; error: what launching one returns."""

    begun: list[tuple[str, int, int]] = field(default_factory=list)
    error: int = 0

    def __post_init__(self) -> None:
        kind = CFUNCTYPE(c_int, c_void_p, c_void_p)
        self.callbacks = {name: kind(partial(self._note, name)) for name in ("cuGraphLaunch", "cuEventRecord")}

    def _note(self, name: str, what: int, stream: int | None) -> int:
        self.begun.append((name, what, stream or 0))
        return self.error

    def address_of(self, name: str) -> int:
        return cast(self.callbacks[name], c_void_p).value or 0


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    found = Graphs()
    monkeypatch.setattr(turns.driver, "address_of", found.address_of)
    return found


CPU = -1  # as C++ has the number of that device
BEGUN = [("cuGraphLaunch", 11, 0), ("cuEventRecord", 22, 0)]


def test_calls_are_counted_and_reported(calls: Calls, learner: Learner) -> None:
    turn = calls.made_plan.turn
    turn.calls()
    assert calls.are_by_cpp(1000) == [True] * 1000 and learner.turns == 0 and turn.calls() == 1000
    turn.request_call(True)
    assert calls.are_by_cpp(3) == [True] * 3 and learner.turns == 3, "C++ launches what it tells of"
    turn.request_call(False)
    calls.are_by_cpp(3)
    assert learner.turns == 3 and turn.calls() == 6


def test_a_call_says_its_stream_to_no_one(calls: Calls, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    turn = calls.made_plan.turn
    assert turn is not None and turn.stream is None
    turn.request_stream()
    calls.driver.capturing = True
    calls.are_by_cpp(2)
    assert turn.stream is None
    calls.driver.capturing = False
    assert calls.are_by_cpp(2) == [True] * 2 and turn.stream == 0 and not turn.own[1]
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    turn.request_stream()
    assert turn.stream is None
    with monkeypatch.context() as patch:
        patch.setattr(turns, "is_watched", lambda: True)
        calls.made_plan.run(A, B, C)
    assert turn.stream is None
    calls.made_plan.run(A, B, C)
    assert turn.stream == 0 and learner.turns == 0


def test_what_python_raises_at_a_report_comes_through(calls: Calls, learner: Learner) -> None:
    """As of a signal's handler."""
    calls.made_plan.turn.request_call(True)
    learner.raises = True
    with pytest.raises(KeyboardInterrupt):
        calls.take()
    calls.made_plan.turn.request_call(False)
    assert calls.are_by_cpp(5) == [True] * 5


def test_a_job_is_launched_once_after_a_call_of_its_stream(calls: Calls, graphs: Graphs) -> None:
    """Unless it was withdrawn; not while the stream is captured, or somebody watches. native/launch.cpp has threads."""
    job = turns.job
    for device, stream in ((1, 0), (CPU, 5)):
        job.begin(device, stream, 11, 22)
        calls.are_by_cpp(3)
        assert not graphs.begun and job.launched < 0
        job.end()
    calls.are_by_cpp(3)
    job.begin(CPU, 0, 11, 22)
    calls.driver.capturing = True
    calls.are_by_cpp(3)
    assert not graphs.begun and job.until > 0
    calls.driver.capturing = False
    with torch.profiler.profile():
        assert calls.fast.table.take("matmul", A, B, (), PRODUCT, None, True) is not None
    assert not graphs.begun
    calls.are_by_cpp(1)
    assert graphs.begun == BEGUN and (job.until, job.launched, job.inside) == (0, 0, 0)
    calls.are_by_cpp(10)
    assert graphs.begun == BEGUN
    graphs.error = 700
    job.begin(CPU, 0, 11, 22)
    calls.are_by_cpp(1)
    assert job.launched == 700 and graphs.begun == [*BEGUN, BEGUN[0]]
    job.begin(CPU, 0, 11, 22)
    job.end()
    calls.are_by_cpp(3)
    assert len(graphs.begun) == 3 and job.launched < 0


def test_calls_go_on_by_the_plan_that_is_named(calls: Calls, learner: Learner) -> None:
    problem = calls.made_plan.problem
    others = (Selection.of(x, "") for _, x in ranked(problem, HOPPER))
    other = calls.made_plan.like(next(x for x in others if x.algorithm != calls.made_plan.selection.algorithm))
    other.compile(A, B, C)
    calls.made_plan.instead = other
    calls.made_plan.turn.hand_over()
    assert calls.are_by_cpp(1) == [False], "Python has C++ launch the other from now on"
    assert calls.are_by_cpp(1000) == [True] * 1000
    assert calls.driver.seen[0].function == other.steps[0].entry.function


def test_a_plan_without_a_turn_is_never_left_to_python(driver: fake_driver.Driver, learner: Learner) -> None:
    learner.wants = False
    calls = Calls(driver)
    entry = native.entry_of(calls.made_plan, (256, 768), (768, 1), torch.bfloat16)
    assert calls.made_plan.turn is None and entry.turns == (0, 0)
    assert calls.are_by_cpp(5000) == [True] * 5000 and learner.turns == 0


@pytest.mark.parametrize("by_cpp", [True, False])
def test_python_s_own_calls_count_too(
    by_cpp: bool, calls: Calls, learner: Learner, graphs: Graphs, monkeypatch: pytest.MonkeyPatch
) -> None:
    turn, begun = calls.made_plan.turn, graphs.begun
    if not by_cpp:  # as without the extension
        replace_all(monkeypatch, turns, extension=None, launch_graph=lambda *of: begun.extend(BEGUN) or 3)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", bool)
    turn.calls()
    for _ in range(35):
        calls.made_plan.run(A, B, C)
    assert learner.turns == 0 and turn.calls() == 35
    turn.request_call(True)
    turns.job.begin(0, 0, 11, 22)
    with monkeypatch.context() as patch:
        patch.setattr(turns, "is_watched", lambda: True)
        calls.made_plan.run(A, B, C)
    assert not begun
    calls.made_plan.run(A, B, C), calls.made_plan.run(A, B, C)
    assert learner.turns == 3 and begun == BEGUN and turns.job.launched == (0 if by_cpp else 3)


def test_no_turn_comes_while_no_rule_learns(calls: Calls, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "active", lambda: False)
    calls.made_plan.turn.request_call(True)
    calls.are_by_cpp(1000)
    assert learner.turns == 0 and not calls.made_plan.turn.own[1]
    turns.end()
    assert learner.turns == -1
