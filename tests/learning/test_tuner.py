"""Races in a service: what runs afterwards, what is spent, what is stored, and what faults do to them."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.learning_fakes import US, Service
from tests.support.table_fakes import HOPPER
from triton_gemm import tables
from triton_gemm.functional import routing
from triton_gemm.learning import race, tuner
from triton_gemm.learning.candidates import candidates
from triton_gemm.learning.statistics import SHARE
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, plan, turns
from triton_gemm.selection import batch_invariance
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection
from triton_gemm.tables import learned
from triton_gemm.tuning import journal_of

CALLS = 40_000  # more than a race needs


class World:
    """A product of a service, of which one candidate is a tenth faster than the others."""

    def __init__(self, service: Service, **request: Any) -> None:
        self.service, self.of, self.request = service, service.operands(), request
        self.incumbent = service.call(self.of, **request)
        self.problem = list(service.tuner.products.values())[-1].problem
        self.others = [x for _, x in candidates(self.problem, HOPPER, self.incumbent)[1:]]
        assert len(self.others) >= 3
        self.fastest = self.others[2]
        service.true = lambda x: US * (0.9 if x.algorithm == self.fastest.algorithm else 1.0)

    def call(self, times: int = CALLS) -> Selection:
        return self.service.call(self.of, times, **self.request)

    def until_it_races(self) -> None:
        while not self.service.launches:
            self.call(64)

    @property
    def replaced(self) -> bool:
        return self.call(1).algorithm == self.fastest.algorithm


@pytest.fixture
def world(service: Service) -> World:
    return World(service)


def failure(problem: GemmProblem, selection: Selection) -> str | None:
    return journal_of(HOPPER).failure(problem, selection)


def test_calls_run_on_the_fastest_and_the_next_process_starts_with_it(world: World) -> None:
    service = world.service
    assert world.call().algorithm == world.fastest.algorithm
    assert not service.graphs and not service.tuner.races, "what a race holds is given up"
    entry = learned.entry(world.problem, HOPPER)
    assert entry is not None and entry.algorithm == world.fastest.algorithm and entry.samples >= 12
    assert entry.default_us / entry.us == pytest.approx(1 / 0.9, rel=0.03)
    found = triton_gemm.explain(*(x.to("meta") for x in world.of[:2]), device=HOPPER)
    assert (
        found.algorithm == world.fastest.algorithm
        and "us in service on 20" in found.reason
        and "before" in found.reason
    )
    counts = {name: count for (of, name), count in triton_gemm.report_routing().items() if of == "learning"}
    assert counts["GEMMs raced"] == counts["kernels replaced"] == 1 and counts["microseconds saved"] > 1000
    launches = len(service.launches)
    service.begin_process()
    assert world.replaced and world.call().algorithm == world.fastest.algorithm
    assert len(service.launches) == launches, "it is not raced again"


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
    count = race.launches_of(US)
    assert max(us for _, us in world.service.launches) < 1.5 * count * US
    assert (race.launches_of(20), race.launches_of(300), race.launches_of(999)) == (4, 3, 1)


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
            patch.setattr(tuner, "launch_hooks", lambda: True)
        service.gpu.capturing = what == "captured"
        service.free = what != "no memory"
        service.slowed = ("too hot",) if what == "slowed" else ()
        service.stream = tuner.PER_THREAD if what == "a thread's stream" else 0
        world.call()
        assert not service.launches and not service.queued
    service.gpu.capturing, service.free, service.slowed, service.stream = False, True, (), 0
    service.now += tuner.AGAIN_S
    world.call()
    assert world.replaced


@pytest.mark.parametrize("what", ["captured", "another stream"])
def test_a_race_waits_for_its_stream(what: str, world: World) -> None:
    world.until_it_races()
    service, launches = world.service, len(world.service.launches)
    service.gpu.capturing, service.stream = what == "captured", int(what == "another stream")
    world.call(2000)
    assert len(service.launches) == launches
    service.gpu.capturing, service.stream = False, 0
    world.call()
    assert world.replaced


def test_long_launches_and_lone_kernels_are_not_raced(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "LONGEST_US", 0.1)
    of = service.operands()
    service.call(of, CALLS)
    assert not service.launches and not service.tuner.races
    monkeypatch.undo()


def test_one_member_of_a_class_is_alone(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(race, "candidates", lambda problem, device, x: candidates(problem, device, x)[:1])
    world.call()
    assert not world.service.launches and learned.entry(world.problem, HOPPER) is None
    assert world.service.tuner.products and all(x.over for x in world.service.tuner.products.values())


# --- Faults ---


def test_a_wrong_candidate_is_dropped_for_good(world: World) -> None:
    world.service.wrong = {x for x in world.others if x.algorithm == world.fastest.algorithm}
    assert world.call().algorithm != world.fastest.algorithm
    assert failure(world.problem, world.fastest) == "its bits are not those of the incumbent"
    assert world.fastest.algorithm not in {x.algorithm for x, _ in world.service.launches}


def test_a_candidate_that_fails_is_dropped_for_good(world: World) -> None:
    world.service.raises = {world.fastest}
    world.service.uncompiled = {world.others[0]}
    assert world.call(3 * CALLS).algorithm != world.fastest.algorithm
    assert failure(world.problem, world.fastest) == "Triton Error [CUDA]: invalid argument"
    assert {x.algorithm for x, _ in world.service.launches} == {
        x.algorithm for x in (world.incumbent, *world.others) if x not in (world.fastest, world.others[0])
    }


def test_what_ended_a_process_is_not_tried_again(world: World) -> None:
    """A marker names what is launched for the first time, and stays where the process ends."""
    journal = journal_of(HOPPER)
    journal.me = f"{os.uname().nodename}~999999999~0"
    journal.begin(world.problem, world.fastest)
    assert world.call().algorithm != world.fastest.algorithm
    assert "the process ended" in str(failure(world.problem, world.fastest))


def test_a_table_that_cannot_be_written_costs_the_next_process_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.service.folder.parent.joinpath("tables").write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert world.call().algorithm == world.fastest.algorithm
    assert "what was learned is not kept" in caplog.text
    world.service.begin_process()
    assert world.call(1).algorithm == world.incumbent.algorithm


def test_a_rule_that_ends_amid_a_race_ends_it(world: World) -> None:
    world.until_it_races()
    service = world.service
    assert service.graphs
    service.learns = False
    turns.end()
    assert not service.graphs and not service.tuner.races
    launches = len(service.launches)
    world.call(5000)
    assert len(service.launches) == launches
    service.learns = True
    service.now += tuner.AGAIN_S
    world.call()
    assert world.replaced


def test_a_race_that_ends_amid_a_first_launch_blames_nobody(world: World) -> None:
    """As at the end of a process."""
    folder = world.service.folder
    while not list(folder.glob("*.tuning.jsonl.*")):
        world.call(1)
    world.service.tuner.stop()
    assert not list(folder.glob("*.tuning.jsonl.*"))


def test_calls_of_other_products_drive_a_race_for_a_while(world: World) -> None:
    world.until_it_races()
    service, launches = world.service, len(world.service.launches)
    other = service.operands(48)
    service.call(other, 256 * 40)
    assert len(service.launches) > launches + 5
    assert world.call(20_000).algorithm == world.fastest.algorithm
    world = World(service, activation="relu")
    world.until_it_races()
    service.call(other, 31_000)
    assert not [x for x in service.tuner.races if x.problem.activation], "it makes way"


def test_an_error_ends_learning_and_no_call(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.service.tuner.aside.failing["_enter"] = ZeroDivisionError("planted")  # type: ignore[attr-defined]
    assert world.call().algorithm == world.incumbent.algorithm
    assert world.service.tuner.broken and caplog.text.count("nothing is learned any more") == 1


def test_what_cannot_be_stored_is_said(world: World, caplog: pytest.LogCaptureFixture) -> None:
    world.service.tuner.aside.failing["store"] = ValueError("planted")  # type: ignore[attr-defined]
    assert world.call().algorithm == world.fastest.algorithm
    assert "what was learned is not stored: ValueError: planted" in caplog.text


def test_a_forked_child_learns_nothing_of_its_parents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.until_it_races()
    pid = os.fork()
    if not pid:
        status = 1
        try:
            launches = len(world.service.launches)
            world.call(3000)
            status = int(turns._learner is not None or len(world.service.launches) != launches)
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    world.call()
    assert world.replaced


# --- Rules ---


def test_rules_that_learn(monkeypatch: pytest.MonkeyPatch, default_policy: None) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(routing.turns, "begin", lambda: begun.append("begin"))
    monkeypatch.setattr(routing.turns, "end", lambda: begun.append(turns.active()))
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
