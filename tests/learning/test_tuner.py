"""Races in a service: what runs afterwards, what is spent, what is stored, and what faults do to them."""

from __future__ import annotations

import threading
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.learning_fakes import CALLS, US, Service, World
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import tables
from triton_gemm.functional import routing
from triton_gemm.learning import statistics, trial, tuner
from triton_gemm.learning.candidates import ranked
from triton_gemm.learning.statistics import SHARE
from triton_gemm.runtime import background, plan, turns
from triton_gemm.selection import batch_invariance, generation
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.tables import learned
from triton_gemm.tables.records import named


def test_calls_run_on_the_fastest_and_the_next_process_starts_with_it(world: World) -> None:
    service = world.service
    assert world.call(2 * CALLS).algorithm == world.fastest.algorithm
    assert not service.graphs and not service.tuner.trials, "what a race holds is given up"
    entry = learned.entry(world.problem, HOPPER)
    assert entry is not None and entry.algorithm == world.fastest.algorithm and entry.samples >= 12
    assert entry.default_us / entry.us == pytest.approx(1 / 0.9, rel=0.03)
    found = triton_gemm.explain(*(x.to("meta") for x in world.of[:2]), device=HOPPER)
    assert found.algorithm == world.fastest.algorithm
    assert "us in service on 20" in found.reason and "before" in found.reason
    counts = {name: count for (of, name), count in triton_gemm.report_routing().items() if of == "learning"}
    assert counts["GEMMs raced"] == counts["kernels replaced"] == 1 and counts["microseconds saved"] > 1000
    launches = len(service.launches)
    service.begin_process()
    assert world.replaced and world.call().algorithm == world.fastest.algorithm
    assert len(service.launches) == launches, "it is not raced again"


def test_few_are_raced_first_and_the_others_later_against_the_winner(world: World) -> None:
    service, best = world.service, world.others[4]
    first, faster = service.true, {best.algorithm: 0.8}
    service.true = lambda x: US * faster[x.algorithm] if x.algorithm in faster else first(x)
    while world.call(64).algorithm == world.incumbent.algorithm:
        assert {x.algorithm for x, _ in service.launches} <= {x.algorithm for x in (world.incumbent, *world.others[:2])}
    assert world.call(1).algorithm == world.fastest.algorithm
    entry = learned.entry(world.problem, HOPPER)
    assert entry is not None and entry.algorithm == world.fastest.algorithm
    assert world.call(2 * CALLS).algorithm == best.algorithm and not service.tuner.trials
    entry = learned.entry(world.problem, HOPPER)
    assert entry is not None and entry.algorithm == best.algorithm and entry.default == named(world.incumbent)
    assert entry.default_us / entry.us == pytest.approx(1 / 0.8, rel=0.05)
    counts = triton_gemm.report_routing()
    assert counts["learning", "GEMMs raced"] == 1 and counts["learning", "kernels replaced"] == 2


def test_what_no_table_keeps_is_learned_again_by_plans_that_are_made_anew(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tables.queries, "folder", lambda: None)
    assert world.call().algorithm == world.fastest.algorithm
    generation.advance()
    assert not world.replaced and world.call(2 * CALLS).algorithm == world.fastest.algorithm


def test_where_nothing_is_faster_the_incumbent_stays(world: World) -> None:
    world.service.true = lambda x: US * (1.0 if x.algorithm == world.incumbent.algorithm else 1.03)
    assert world.call(2 * CALLS).algorithm == world.incumbent.algorithm
    entry = learned.entry(world.problem, HOPPER)
    assert entry is not None and entry.algorithm == world.incumbent.algorithm and entry.us == entry.default_us
    launches = len(world.service.launches)
    assert launches
    world.service.begin_process()
    world.call()
    assert len(world.service.launches) == launches


def test_races_take_their_share_in_small_pieces(world: World) -> None:
    tempo = world.service.tuner.tempo
    for _ in range(CALLS // 64):
        world.call(64)
        assert tempo.spent <= SHARE * tempo.of_calls
    assert world.replaced
    count = trial.launches_of(US)
    assert max(us for _, us in world.service.launches) < 1.5 * count * US
    assert (trial.launches_of(20), trial.launches_of(300), trial.launches_of(999)) == (4, 3, 1)


def test_a_race_is_within_the_class_of_bits(service: Service) -> None:
    world = World(service, batch_invariant=True)
    wanted = batch_invariance.class_of(world.problem, HOPPER)
    assert {bit_class(world.problem, x) for x in (world.incumbent, *world.others)} == {wanted}
    assert world.call().algorithm == world.fastest.algorithm


# --- What is not raced ---


@pytest.mark.parametrize("what", ["captured", "held", "no memory", "slowed", "watched", "a thread's stream"])
def test_nothing_is_launched_amid(what: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a race goes on afterwards."""
    service = world.service
    with monkeypatch.context() as patch:
        if what == "held":
            patch.setattr(background, "_held", {object()})
        if what == "watched":
            patch.setattr(turns, "launch_hooks", lambda: True)
        service.gpu.capturing = what == "captured"
        service.free = what != "no memory"
        service.slowed = ("too hot",) if what == "slowed" else ()
        service.stream = trial.PER_THREAD if what == "a thread's stream" else 0
        world.call()
        assert not service.launches and not service.queued
    service.gpu.capturing, service.free, service.slowed, service.stream = False, True, (), 0
    service.now += tuner.AGAIN_S
    world.call()
    assert world.replaced


@pytest.mark.parametrize("captured", [False, True])
def test_a_race_waits_for_its_stream(captured: bool, world: World) -> None:
    world.until_it_races()
    service, launches = world.service, len(world.service.launches)
    service.gpu.capturing, service.stream = captured, int(not captured)
    world.call(2000)
    assert len(service.launches) == launches
    service.gpu.capturing, service.stream = False, 0
    world.call()
    assert world.replaced


def test_long_launches_are_not_raced(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "LONGEST_US", 0.1)
    service.call(service.operands(), CALLS)
    assert not service.launches and not service.tuner.trials


def test_one_member_of_a_class_is_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(trial, "ranked", lambda problem, device, x: ranked(problem, device, x)[:1])
    world.call()
    assert not world.service.launches and learned.entry(world.problem, HOPPER) is None
    assert world.service.tuner.products and all(x.over for x in world.service.tuner.products.values())


# --- Rules ---


def test_rules_that_learn(monkeypatch: pytest.MonkeyPatch, default_policy: None) -> None:
    begun: list[Any] = []
    replace_all(monkeypatch, turns, begin=lambda: begun.append("begin"), end=lambda: begun.append(turns.active()))
    monkeypatch.setattr(routing._overrides, "register", lambda: False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    with triton_gemm.use():
        assert not turns.active() and not begun
    with triton_gemm.use(learn=True):
        assert turns.active()
        with triton_gemm.use():
            assert turns.active(), "a rule around it learns"
    assert begun[0] == "begin" and begun[-1] is False
    monkeypatch.setenv("TRITON_GEMM_LEARN", "1")
    table_fakes.read_environment_again()
    with triton_gemm.use():
        assert turns.active()
    with triton_gemm.use(learn=False):
        assert not turns.active()
    triton_gemm.enable()
    assert turns.active()
    triton_gemm.disable()
    assert not turns.active()


def test_without_a_rule_that_learns_plans_have_no_turns(
    service: Service, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(turns, "_learner", None)
    service.call(service.operands(), 1000)
    assert {x.turn for x in plan.PLANS.values() if isinstance(x, plan.GemmPlan)} == {None}
    assert not tables.folder() or not list(tables.folder().glob("*"))  # type: ignore[union-attr]


def test_the_thread_that_polls_may_do_what_captures_forbid(monkeypatch: pytest.MonkeyPatch) -> None:
    allowed, polls, made, ended = list[Any](), list[Any](), tuner.Tuner(), threading.Event()
    monkeypatch.setattr(tuner, "allow_during_captures", lambda: allowed.append(threading.current_thread()))

    def poll() -> float:
        polls.append(threading.current_thread())
        if len(polls) == 5:
            ended.set()
            threading.Event().wait()
        return 0.001

    made.poll = poll  # type: ignore[method-assign]
    thread = threading.Thread(target=made._run, daemon=True)
    thread.start()
    assert ended.wait(10) and allowed == [thread] and polls == [thread] * 5


def test_a_thread_learns_while_calls_go_on(
    service: Service, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Of plans that are made meanwhile, too."""
    replace_all(monkeypatch, tuner, POLL_S=0.0, SOON_S=0.0, allow_during_captures=lambda: None)
    monkeypatch.setattr(trial, "LOADED_S", 0.0)
    replace_all(monkeypatch, statistics, LEAST_CALLS=1, SHARE=1.0)
    found = service.tuner
    found.clock, found.thread = time.monotonic, None  # it starts with the first plan
    many = [service.operands(M) for M in range(16, 80)]
    end = time.monotonic() + 60
    for of in many * 20:
        service.call(of)
    while len([x for x in list(found.products.values()) if x.over and x.calls]) < 3 and not found.broken:
        assert time.monotonic() < end
        for of in many[:8]:
            service.call(of, 20)
            time.sleep(0)  # as calls that C++ launches let others have Python
    assert not found.broken, caplog.text
    found.finish()
    found.broken = True
    assert not service.graphs
