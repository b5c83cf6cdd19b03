"""Turns: C++ leaves one call in so many to Python, and launches another plan once one is named."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_driver
from tests.support.table_fakes import HOPPER
from triton_gemm.functional import fast_path
from triton_gemm.problem import PRODUCT, Request
from triton_gemm.runtime import native, plan, turns
from triton_gemm.selection.select import Selection, ranked, select

pytestmark = pytest.mark.slow
A, B, C = (torch.empty(shape, dtype=torch.bfloat16) for shape in ((256, 512), (512, 768), (256, 768)))


class Learner:
    """Notes turns. wants: whether plans get some."""

    def __init__(self) -> None:
        self.wants, self.turns = True, 0

    def new(self, made: plan.GemmPlan) -> Any:
        return "product" if self.wants else None

    def turn(self, made: plan.GemmPlan, operands: tuple[Any, ...], stream: int) -> None:
        assert made.turn is not None and operands[:2] == (A, B)
        self.turns += 1
        self.calls = made.turn.again(10)

    def stop(self) -> None:
        self.turns = -1


@pytest.fixture
def learner(monkeypatch: pytest.MonkeyPatch) -> Learner:
    found = Learner()
    monkeypatch.setattr(turns, "_learner", found)
    monkeypatch.setattr(turns, "active", lambda: True)
    return found


class Calls:
    """Of one product, as Python has planned it and C++ launches it."""

    def __init__(self, driver: fake_driver.Driver) -> None:
        self.driver, self.fast = driver, fast_path.FastPath()
        problem = Request().problem(A, B, C)
        self.plan = plan.GemmPlan(problem, select(problem, HOPPER), A.device)
        turns.give(self.plan)
        self.plan.compile(A, B, C)
        key, _ = self.take()
        self.fast.keep(key, fast_path.known(self.plan, C, (A, A), (B, B)))
        self.take()

    def take(self) -> Any:
        return self.fast.take("matmul", A, B, (), PRODUCT)

    def by_cpp(self, count: int) -> list[bool]:
        """Of so many calls, whether C++ launches each."""
        found = []
        for _ in range(count):
            self.driver.seen.clear(), self.driver.by_python.clear()
            assert self.take()[1] is not None
            assert len(self.driver.seen) + len(self.driver.by_python) == 1
            found.append(bool(self.driver.seen))
        return found


@pytest.fixture
def calls(extension: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> Iterator[Calls]:
    yield Calls(fake_driver.install(monkeypatch, extension))


def test_python_takes_one_call_in_so_many(calls: Calls, learner: Learner) -> None:
    assert calls.plan.turn is not None
    calls.plan.turn.again(10)
    assert calls.by_cpp(10) == [True] * 10 and learner.turns == 0
    assert calls.by_cpp(1) == [False] and learner.turns == 1
    assert 10 <= learner.calls <= 14, "a call that C++ leaves is asked for more than once"
    assert calls.by_cpp(22) == [*[True] * 10, False] * 2 and learner.turns == 3


def test_calls_go_on_by_the_plan_that_is_named(calls: Calls, learner: Learner) -> None:
    problem = calls.plan.problem
    others = (Selection.of(x, "") for _, x in ranked(problem, HOPPER))
    other = calls.plan.like(next(x for x in others if x.algorithm != calls.plan.selection.algorithm))
    other.compile(A, B, C)
    calls.plan.instead = other
    calls.plan.turn.left.value = 0  # type: ignore[union-attr]
    assert calls.by_cpp(1) == [False], "Python has C++ launch the other from now on"
    assert calls.by_cpp(1000) == [True] * 1000
    assert calls.driver.seen[0].function == other.steps[0].entry.function  # type: ignore[union-attr]


def test_a_plan_without_a_turn_is_never_left_to_python(
    extension: Path, learner: Learner, monkeypatch: pytest.MonkeyPatch
) -> None:
    learner.wants = False
    calls = Calls(fake_driver.install(monkeypatch, extension))
    assert calls.plan.turn is None and native.entry_of(calls.plan, (256, 768), (768, 1), torch.bfloat16).left == 0
    assert calls.by_cpp(5000) == [True] * 5000 and learner.turns == 0


def test_python_s_own_calls_count_too(calls: Calls, learner: Learner) -> None:
    assert calls.plan.turn is not None
    calls.plan.turn.again(10)
    for _ in range(35):
        calls.plan.run(A, B, C)
    assert learner.turns == 3 and learner.calls == 10


def test_nothing_is_told_while_no_rule_learns(calls: Calls, learner: Learner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(turns, "active", lambda: False)
    calls.by_cpp(1000)
    assert learner.turns == 0
    turns.end()
    assert learner.turns == -1
