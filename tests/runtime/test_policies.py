"""Policies: who chooses, where and when; no plan is served that was chosen otherwise; ranks that differ are told."""

from __future__ import annotations

import asyncio
import warnings
from collections.abc import Generator, Iterator
from contextvars import copy_context
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.patches import replace_all
from tests.support.plan_fakes import FakePlan, take_plans_away
from tests.support.table_fakes import HOPPER, another, problem_of, store
from tests.support.threads import at_once
from tests.support.tiers import one
from triton_gemm import tables
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime import plan, policies
from triton_gemm.runtime.policies import Policy, choose
from triton_gemm.selection import batch_invariance
from triton_gemm.selection.batch_invariance import class_of
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, select

BF16 = torch.bfloat16

pytestmark = pytest.mark.usefixtures("default_policy", "folder")


def of(selection: Selection) -> tuple[object, ...]:
    return selection.kernel, selection.config, selection.work, selection.source


# --- Who chooses ---


def test_a_table_goes_before_the_model_unless_the_model_is_asked() -> None:
    known, unknown = problem_of(), problem_of(M=1024)
    store(known)
    assert policies.current_policy() == Policy("cached", "same")
    assert of(choose(known, HOPPER)) == of(replace(another(known), source="user's table"))
    assert choose(unknown, HOPPER) == select(unknown, HOPPER)
    with triton_gemm.policy("model"):
        assert choose(known, HOPPER) == select(known, HOPPER)
    with triton_gemm.policy("error"):
        assert choose(known, HOPPER).source == "user's table"
        with pytest.raises(RuntimeError, match=r'no table has 1024 x 1024 x 2048 in bfloat16 on sm_90, .* is "error"'):
            choose(unknown, HOPPER)


def test_an_entry_of_other_bits_than_the_models_choice_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one is that was tuned before the model changed; the model is only asked where there is an entry."""
    problem, unknown = problem_of(), problem_of(M=1024)
    other = another(problem, bits=False)
    tables.store(problem, other, HOPPER, us=1.0, default_us=2.0)
    assert choose(problem, HOPPER) == select(problem, HOPPER)
    ((why, count),) = tables.ignored().items()
    assert why == f"user's table: it gives other bits than {bit_class(problem, select(problem, HOPPER))}" and count == 1
    with triton_gemm.policy("error"):
        for missing in (problem, unknown):
            with pytest.raises(RuntimeError, match="no table has"):
                choose(missing, HOPPER)
    with triton_gemm.policy("cached", bits="any"):
        assert of(choose(problem, HOPPER)) == of(replace(other, source="user's table"))
    monkeypatch.setattr(policies, "by_model", lambda *_: pytest.fail("the model was asked"))
    with triton_gemm.policy("error"), pytest.raises(RuntimeError, match="no table has"):
        choose(problem_of(M=2048), HOPPER)


def test_a_policy_is_one_of_four() -> None:
    for call in (triton_gemm.set_policy, lambda *x, **how: triton_gemm.policy(*x, **how).__enter__()):
        with pytest.raises(ValueError, match="one of model, cached, tune, error, not 'fast'"):
            call("fast")
        with pytest.raises(ValueError, match="one of same, any, not 'all'"):
            call("model", bits="all")


def test_the_environment_counts_until_one_is_set(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_POLICY", "error")
    monkeypatch.setenv("TRITON_GEMM_BITS", "any")
    assert policies.current_policy() == Policy("error", "any")
    triton_gemm.set_policy("model")
    assert policies.current_policy() == Policy("model", "same")


WRONG = [
    ("POLICY", "one of model, cached, tune, error, not 'fast': it counts as cached"),
    ("BITS", "one of same, any, not 'fast': it counts as same"),
    ("BATCH_INVARIANT", "one of 0, 1, not 'fast': it counts as 0"),
]


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("name, message", WRONG)
@pytest.mark.parametrize("filtered", ["always", "error"])
def test_a_wrong_environment_is_warned_of_once(
    name: str, message: str, filtered: Any, planned: list[FakePlan], monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the default holds. Where warnings are errors, one product raises it, and none after it."""
    monkeypatch.setattr(policies, "_warned", set())
    monkeypatch.setenv(f"TRITON_GEMM_{name}", "fast")
    raised: list[str] = []
    with warnings.catch_warnings(record=True) as warned:
        warnings.simplefilter(filtered)
        for _ in range(3):
            try:
                triton_gemm.matmul(*operands())
            except UserWarning as error:
                raised.append(str(error))
            policies._of_environment.cache_clear()  # as if threads had read it at once
            policies._invariant_in_environment.cache_clear()
    assert [str(x.message) for x in warned] + raised == [f"TRITON_GEMM_{name} must be {message}"]
    assert {x.filename for x in warned} <= {__file__}, "not the caller's line"
    assert policies.current_policy() == Policy() and len(planned) == 1
    triton_gemm.set_policy("error")
    assert policies.current_policy() == Policy("error")


def test_a_context_is_its_threads_or_tasks_alone() -> None:
    triton_gemm.set_policy("error")
    with triton_gemm.policy("model"):
        with triton_gemm.policy("tune", bits="any"):
            assert policies.current_policy() == Policy("tune", "any")
        assert policies.current_policy().name == "model" and at_once(policies.current_policy) == [Policy("error")]
    assert policies.current_policy() == Policy("error")

    async def task(name: policies.PolicyName) -> str:
        with triton_gemm.policy(name):
            await asyncio.sleep(0)
            return policies.current_policy().name

    async def both() -> list[str]:
        return list(await asyncio.gather(*map(task, policies.NAMES)))

    assert asyncio.run(both()) == list(policies.NAMES)


@pytest.mark.parametrize("end", [list, Generator.close], ids=["stepped", "closed"])
@pytest.mark.parametrize("block", [partial(triton_gemm.policy, "error"), triton_gemm.batch_invariant])
def test_a_block_around_a_yield_counts_in_the_context_of_its_first_step(block: Any, end: Any) -> None:
    """Ended in another one, it changes nothing there; in a copy of the first one it ends."""

    def steps() -> Iterator[None]:
        with block():
            yield
            yield

    for copied in (False, True):
        running, first = steps(), copy_context()
        first.run(next, running)
        assert first.run(policies.current_policy) not in (Policy(), Policy("model"))
        with triton_gemm.policy("model"):
            elsewhere = first.run(copy_context) if copied else copy_context()
        elsewhere.run(end, running)
        assert elsewhere.run(policies.current_policy) == (Policy() if copied else Policy("model"))
    assert policies.current_policy() == Policy()


def test_explain_says_who_chose() -> None:
    sizes = {"M": 512, "N": 1024, "K": 2048, "dtype": BF16, "device": "sm_90"}
    assert str(triton_gemm.explain(**sizes)).endswith("; chosen by the model, policy cached")
    store(problem := problem_of())
    answer = triton_gemm.explain(**sizes)
    assert (answer.source, answer.policy) == ("user's table", "cached") and answer.config == another(problem).config
    assert "1 us measured on" in str(answer) and str(answer).endswith("; chosen by the user's table, policy cached")
    with triton_gemm.policy("model"):
        assert str(triton_gemm.explain(**sizes)).endswith("; chosen by the model, policy model")
    triton_gemm.set_policy("tune")
    policies.set_tuner(lambda *_: pytest.fail("explaining is no reason to tune"))
    assert triton_gemm.explain(**sizes | {"M": 1024}).source == "model"


# --- Tuning ---


class Tuner:
    """Notes what it is asked, and answers the second best; multiplies, as one that compares results does."""

    def __init__(self) -> None:
        self.requests: list[tuple[GemmProblem, DeviceInfo]] = []

    def __call__(self, problem: GemmProblem, device: DeviceInfo) -> Selection:
        self.requests.append((problem, device))
        assert choose(problem, device, may_tune=True) == select(problem, device), "it is not asked by itself"
        return another(problem)


def test_a_tuner_is_asked_for_what_no_table_has() -> None:
    known, unknown, tuner = problem_of(), problem_of(M=1024), Tuner()
    store(known)
    with triton_gemm.policy("tune"):
        words = '1024 x 1024 x 2048 in bfloat16, the policy is "tune", and there is no tuner'
        with pytest.raises(RuntimeError, match=words):
            choose(unknown, HOPPER, may_tune=True)
        policies.set_tuner(tuner)
        assert choose(known, HOPPER, may_tune=True).source == "user's table" and tuner.requests == []
        assert of(choose(unknown, HOPPER, may_tune=True)) == of(replace(another(unknown), source="tuner"))
        assert tuner.requests == [(unknown, HOPPER)]
    assert choose(unknown, HOPPER, may_tune=True).source == "model", "under no other policy"


@pytest.mark.parametrize("where", ["a capture", "a compiler", "a mode", "the interpreter"])
def test_nothing_is_timed_where_launches_are_recorded(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    policies.set_tuner(lambda *_: pytest.fail("it was asked"))
    store(problem_of())
    context: Any = triton_gemm.policy("tune")
    if where == "a capture":
        replace_all(monkeypatch, torch.cuda, is_available=lambda: True, is_current_stream_capturing=lambda: True)
    elif where == "a compiler":
        monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    elif where == "the interpreter":
        monkeypatch.setattr(policies, "INTERPRETED", True)
    else:
        triton_gemm.set_policy("tune")
        context = torch.utils.flop_counter.FlopCounterMode(display=False)
    with context:
        assert choose(problem_of(), HOPPER, may_tune=True).source == "user's table"
        assert choose(problem_of(M=1024), HOPPER, may_tune=True).source == "model"


# --- What is served ---


@pytest.fixture
def planned(monkeypatch: pytest.MonkeyPatch) -> list[FakePlan]:
    return take_plans_away(monkeypatch)


def operands(M: int = 512, N: int = 1024, K: int = 2048) -> tuple[torch.Tensor, torch.Tensor]:
    return torch.ones(M, K, dtype=BF16), torch.ones(K, N, dtype=BF16)


@pytest.mark.full
def test_no_plan_is_served_that_was_chosen_otherwise(planned: list[FakePlan], tmp_path: Path) -> None:
    a, b = operands()

    def source() -> str:
        """Of the plan that a call takes, the second like it too."""
        for _ in range(2):
            triton_gemm.matmul(a, b)
        key = plan.key_of(Request(), a, b, torch.empty(512, 1024, dtype=BF16))
        return plan.PLANS[key].selection.source

    assert source() == source() == "model" and len(planned) == 1
    store(planned[0].problem)
    assert source() == "user's table" and len(planned) == 2
    with triton_gemm.policy("model"):
        assert source() == "model" and len(planned) == 3
    assert source() == "user's table" and len(planned) == 3, "the policy of before has its plan still"
    with triton_gemm.policy("model"):
        assert source() == "model" and len(planned) == 3
    triton_gemm.set_policy("model")
    assert source() == "model" and len(planned) == 4
    triton_gemm.set_policy("cached")
    tables.export_to(tmp_path / "out.json", HOPPER)
    assert source() == "user's table"
    tables.clear()
    assert source() == "model"
    tables.import_from(tmp_path / "out.json")
    assert source() == "user's table"


def test_a_tuner_may_multiply(planned: list[FakePlan]) -> None:
    """While its own product is planned, under the lock of all planning; others wait for it and do not tune too."""
    requested: list[GemmProblem] = []

    def tuner(problem: GemmProblem, device: DeviceInfo) -> Selection:
        requested.append(problem)
        triton_gemm.matmul(*operands(16, 16, 16))
        return another(problem)

    policies.set_tuner(tuner)
    triton_gemm.set_policy("tune")
    at_once(*4 * [lambda: triton_gemm.matmul(*operands())])
    assert [problem.M for problem in requested] == [512]
    assert sorted((made.problem.M, made.selection.source) for made in planned) == [(16, "model"), (512, "tuner")]


def test_what_is_chosen_while_a_graph_is_captured_is_not_kept(planned: list[FakePlan], monkeypatch: Any) -> None:
    policies.set_tuner(Tuner())
    triton_gemm.set_policy("tune")
    with monkeypatch.context() as capturing:
        capturing.setattr(policies, "_may_time", lambda: False)
        triton_gemm.matmul(*operands())
    for _ in range(3):
        triton_gemm.matmul(*operands())
    assert [made.selection.source for made in planned] == ["model", "tuner"]


def test_a_compiled_call_asks_for_the_sizes_that_it_runs(planned: list[FakePlan]) -> None:
    """One graph for any M, and every M has its own entry, by the policy under which it runs."""
    policies.set_tuner(lambda *_: pytest.fail("it was asked while a compiler traced"))
    compiled = torch.compile(lambda a, b: triton_gemm.matmul(a, b) + 1, fullgraph=True, backend="eager", dynamic=True)
    (_, b), sizes = operands(), (48, 512, 1024)
    a = {M: operands(M)[0] for M in sizes}
    with triton_gemm.policy("cached"):
        compiled(a[48], b)
    (first,) = planned
    assert first.selection.source == "model" and first.problem.M == 48
    store(replace(first.problem, M=512))
    with torch.compiler.set_stance("fail_on_recompile"):
        for M in sizes:
            assert compiled(a[M], b)[0, 0] == 2049
        with triton_gemm.policy("model"):
            compiled(a[512], b)
    made = [(one.problem.M, one.selection.source) for one in planned[1:]]
    assert made == [(48, "model"), (512, "user's table"), (1024, "model"), (512, "model")]


def test_entries_of_another_class_are_left_out(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(16, 576, 7168)
    best = batch_invariance.select(problem, HOPPER)
    other = another(problem)
    assert bit_class(problem, other) != class_of(problem, HOPPER)
    times = {"us": 1.0, "default_us": 2.0}
    tables.store(problem, other, HOPPER, **times)
    assert choose(problem, HOPPER).source == "user's table"
    found = choose(problem, HOPPER, invariant=True)
    assert found == replace(best, batch_invariant=True) and found.source == "model"
    assert any("other bits" in why for why in tables.ignored())
    with triton_gemm.policy("error"), pytest.raises(RuntimeError, match="no table has 16 x 576"):
        choose(problem, HOPPER, invariant=True)
    slower = replace(best, algorithm=best.algorithm._replace(config=replace(best.config, num_stages=3)))
    tables.store(problem, slower, HOPPER, **times)
    found = choose(problem, HOPPER, invariant=True)
    assert (found.config, found.source) == (slower.config, "user's table")
    # A shipped table is asked where the user's has another class.
    monkeypatch.setattr(tables.queries, "SHIPPED", folder)
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", str(tmp_path / "another"))
    tables.reload()
    tables.store(problem, other, HOPPER, **times)
    assert choose(problem, HOPPER, invariant=True).source == "shipped table"


def test_a_tuner_is_held_to_the_class() -> None:
    problem, answers = problem_of(16, 576, 7168), []
    best = batch_invariance.select(problem, HOPPER)

    def tuner(problem: GemmProblem, device: DeviceInfo) -> Selection:
        assert policies.current_policy() == Policy("model", "same", True)
        assert choose(problem, device) == replace(best, batch_invariant=True)
        return answers.pop()

    policies.set_tuner(tuner)
    triton_gemm.set_policy("tune")
    slower = best.algorithm._replace(config=replace(best.config, num_stages=3))
    answers += [another(problem), replace(best, algorithm=slower)]
    assert choose(problem, HOPPER, may_tune=True, invariant=True).config.num_stages == 3
    with pytest.raises(RuntimeError, match="the tuner's answer for 16 x 576 x 7168 in bfloat16 gives"):
        choose(problem, HOPPER, may_tune=True, invariant=True)
    policies.set_tuner(lambda *_: None)
    with pytest.raises(RuntimeError, match=r"the tuner's answer for .* must be a Selection, not NoneType"):
        choose(problem, HOPPER, may_tune=True, invariant=True)
