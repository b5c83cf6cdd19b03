"""What faults do to races, and to the calls of a service."""

from __future__ import annotations

import logging
import os

import pytest

from tests.support.learning_fakes import CALLS, Service, World
from tests.support.table_fakes import HOPPER
from triton_gemm.learning import race, tuner
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, turns
from triton_gemm.selection.select import Selection
from triton_gemm.tables import learned
from triton_gemm.tuning import journal_of


def failure(problem: GemmProblem, selection: Selection) -> str | None:
    return journal_of(HOPPER).failure(problem, selection)


def test_a_wrong_candidate_is_dropped_for_good(world: World) -> None:
    world.service.wrong = {x for x in world.others if x.algorithm == world.fastest.algorithm}
    assert world.call().algorithm != world.fastest.algorithm
    assert failure(world.problem, world.fastest) == "its bits are not those of the incumbent"
    assert world.fastest.algorithm not in {x.algorithm for x, _ in world.service.launches}


def test_a_candidate_that_fails_is_dropped_for_good(world: World) -> None:
    world.service.raises = {world.fastest}
    world.service.uncompiled = {world.others[0]}
    assert world.call(3 * CALLS).algorithm != world.fastest.algorithm
    assert failure(world.problem, world.fastest) == "cuGraphLaunch failed with CUDA error 1: invalid argument"
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
    assert not service.graphs and not service.tuner.races and turns.job.until < 0
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


@pytest.mark.parametrize("where", ["at first", "at a call", "at the end"])
def test_an_error_ends_learning_and_no_call(
    where: str, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    what = {"at first": (race.Race, "_ranked"), "at a call": (race, "Mark"), "at the end": (race.Race, "close")}
    monkeypatch.setattr(*what[where], lambda *_: 1 // 0)
    assert world.call().algorithm == world.incumbent.algorithm
    assert world.service.tuner.broken and caplog.text.count("nothing is learned any more") == 1


def test_what_cannot_be_stored_is_said(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "store", lambda *_, **__: [][0])
    assert world.call().algorithm == world.fastest.algorithm
    assert "what was learned is not stored: IndexError" in caplog.text


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


def test_two_processes_that_race_at_once_keep_what_both_learn(service: Service) -> None:
    pid = os.fork()
    if not pid:
        status = 1
        try:
            service.begin_process()
            other = World(service, 48)
            status = int(other.call(2 * CALLS).algorithm != other.fastest.algorithm)
        finally:
            os._exit(status)
    world = World(service)
    assert world.call(2 * CALLS).algorithm == world.fastest.algorithm
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert not list(service.folder.glob("*.tuning.jsonl.*"))
    service.begin_process()
    other = World(service, 48)
    assert other.incumbent.source == "user's table" and learned.entry(world.problem, HOPPER)
    assert not [x for of in (world, other) for x in of.others if failure(of.problem, x)]


def test_what_measures_withdraws_a_launch_that_no_call_has_begun(world: World) -> None:
    world.until_it_races()
    service = world.service
    while turns.job.until <= 0:
        world.call(1)
    launches = len(service.launches)
    with background.held():
        assert turns.job.until < 0
        world.call(2000)
        assert len(service.launches) <= launches + 1, "what has begun may end"
    world.call()
    assert world.replaced
