"""What faults do to races, and to the calls of a service."""

from __future__ import annotations

import logging
import os
import threading
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support.learning_fakes import CALLS, Service, World
from tests.support.processes import os_forked
from tests.support.table_fakes import HOPPER
from triton_gemm.hardware.driver import DriverError
from triton_gemm.learning import trial, tuner
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, plan, turns
from triton_gemm.runtime.worker import Question
from triton_gemm.selection import generation
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


@pytest.mark.parametrize("error", [2, 900])
def test_no_candidate_is_blamed_for_memory_or_a_capture_of_others(error: int, world: World) -> None:
    world.service.raises, world.service.error = {world.fastest}, error
    world.call()
    assert not world.service.launches and not world.service.tuner.broken
    assert not any(failure(world.problem, x) for x in world.others)
    world.service.raises = set()
    world.service.now += tuner.AGAIN_S
    assert world.call().algorithm == world.fastest.algorithm


@pytest.mark.parametrize("what", ["hangs", "has ended since", "is late"])
def test_what_hangs_the_gpu_is_blamed_though_its_race_is_given_up(what: str, world: World) -> None:
    """Calls wait for it, so a race ends in which nothing comes any more. Python has not ended then."""
    service = world.service
    while not service.queued:
        world.call(1)
    service.queued.clear()
    while not service.queued:  # the incumbent's came first
        service.hung = bool(service.tuner.trials) and any(x.begun for x in service.tuner.trials.values())
        world.call(1)
    service.hung = what != "has ended since"
    service.learns = what == "hangs"  # or its rule ends
    for _ in range(2):  # the first look counts the last calls
        service.now += 1.0 if what == "is late" else tuner.STALE_S + 1
        service.tuner.poll()
    assert not service.tuner.trials and not service.graphs
    assert len(list(service.folder.glob("*.tuning.jsonl.*"))) == (what == "hangs")


def test_a_race_is_of_a_plan_whose_kernels_are_loaded(service: Service) -> None:
    """The first plan of a product may have run on its stand-in only, before plans were made anew."""
    of = service.operands()
    plan.plan_for(*of)
    generation.advance()
    world = World(service)
    (product,) = service.tuner.products.values()
    assert [x.compiled for x in product.plans] == [False, True]
    assert world.call().algorithm == world.fastest.algorithm and not service.tuner.failures


def test_what_measures_for_long_leaves_a_race_no_memory(world: World) -> None:
    world.until_it_races()
    with background.held():
        world.service.tuner.poll()
        assert world.service.graphs
        world.service.now += tuner.HELD_S
        world.service.tuner.poll()
        assert not world.service.graphs and not any(x.has_turn for x in world.service.tuner.trials.values())


def test_a_table_that_cannot_be_written_costs_the_next_process_alone(
    world: World, caplog: pytest.LogCaptureFixture
) -> None:
    world.service.folder.parent.joinpath("tables").write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert world.call().algorithm == world.fastest.algorithm
    assert "what was learned is not kept" in caplog.text
    world.service.begin_process()
    assert world.call(1).algorithm == world.incumbent.algorithm


@pytest.mark.parametrize("worker", ["writes", "cannot", "is late"])
def test_a_worker_writes_what_was_learned_or_the_thread_does(worker: str, world: World) -> None:
    written: list[Any] = []
    write = learned.write

    def write_by(*of: Any) -> bool:
        written.append(of)
        return (worker != "cannot" or len(written) > 1) and write(*of)

    world.service.patch.setattr(learned, "write", write_by)
    if worker == "is late":  # who is to write never ends
        submit, late = background.submit, lambda _plan, _device, *of: Question(*of)
        world.service.patch.setattr(background, "submit", lambda *of: (late if of[2] is write_by else submit)(*of))
    world.call(2 * CALLS)
    assert world.service.tuner.unwritten == [] or worker == "is late"
    world.service.tuner._write(at_end=True)
    assert not world.service.tuner.unwritten and written
    world.service.begin_process()
    assert world.replaced


def test_an_error_of_who_writes_costs_the_entry_alone(world: World, caplog: pytest.LogCaptureFixture) -> None:
    learner = world.service.tuner
    learner.unwritten = [Question(lambda: [][0])]
    learner.unwritten[0].error = "it is gone"
    world.call(1000)
    assert not learner.unwritten and not learner.broken
    assert "what was learned is not stored: IndexError" in caplog.text


def test_the_end_of_a_process_waits_for_a_folder_once(world: World) -> None:
    waited: list[Any] = []
    world.service.tuner.unwritten = [Question(lambda number: waited.append(number), x) for x in range(3)]
    world.service.tuner._write(at_end=True)
    assert waited == [0]


@pytest.mark.parametrize("where", ["between calls", "a call", "a launch by Python"])
def test_a_rule_that_ends_ends_a_race(where: str, world: World) -> None:
    """Amid a call, as a signal's handler or the garbage collector may end it, the race's end is left to the thread."""
    world.until_it_races()
    service, locks = world.service, {"between calls": nullcontext(), "a launch by Python": turns._launching}
    with locks.get(where, service.tuner.here):
        service.learns = False
        turns.end()
        assert bool(service.graphs) == (where != "between calls") and turns.job.until < 0
    service.tuner.poll()
    assert not service.graphs and not service.tuner.trials
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
    assert not [x for x in service.tuner.trials if x.problem.activation], "it makes way"


@pytest.mark.parametrize("where", ["at first", "at a call", "at the end"])
def test_errors_end_learning_and_no_call(
    where: str, world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One ends a race, three all of it, as one does amid the end of a race."""
    what = {"at first": (trial.Trial, "_ranked"), "at a call": (trial, "Mark"), "at the end": (trial.Trial, "close")}
    with monkeypatch.context() as patch:
        patch.setattr(*what[where], lambda *_: 1 // 0)
        for number in range(tuner.FAILURES):
            assert world.service.tuner.broken == (number > 0 and where == "at the end")
            assert world.call().algorithm == world.incumbent.algorithm
            world.service.now += tuner.AGAIN_S
    assert world.service.tuner.broken and caplog.text.count("nothing is learned any more") == 1


@pytest.mark.parametrize(("name", "error"), [("Mark", IndexError), ("fills_what_is_empty", torch.OutOfMemoryError)])
def test_one_error_costs_one_race(
    name: str, error: type[Exception], world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch's memory that is gone is no error."""
    with monkeypatch.context() as patch:
        patch.setattr(trial, name, Mock(side_effect=error))
        world.call()
    assert world.service.tuner.failures == (error is IndexError)
    world.service.now += tuner.AGAIN_S
    assert world.call().algorithm == world.fastest.algorithm


def test_a_gpu_that_is_lost_ends_learning(world: World) -> None:
    world.until_it_races()
    for graph in world.service.graphs:
        graph.read = Mock(side_effect=DriverError("cuEventQuery", 700))
    world.call()
    assert world.service.tuner.broken and not world.service.graphs


def test_a_thread_that_cannot_start_costs_no_call(
    service: Service, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    service.tuner.thread = None
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda _: [][0])
        service.call(service.operands())
    assert service.tuner.thread is None and "a GEMM is not timed: IndexError" in caplog.text


def test_the_gpus_memory_is_not_held_for_long(world: World) -> None:
    """Nor where others have use for it."""
    world.until_it_races()
    world.service.gpu_free = 1 << 20
    world.service.now += 1
    world.call(10)
    assert not any(x.has_turn for x in world.service.tuner.trials.values())
    world.service.gpu_free, world.service.now = 40 << 30, world.service.now + tuner.AGAIN_S
    assert world.call().algorithm == world.fastest.algorithm


def test_a_process_ends_where_the_thread_has_ended(world: World) -> None:
    world.until_it_races()
    learner = world.service.tuner
    learner.thread = threading.Thread(target=learner._run)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tuner, "allow_during_captures", lambda: None)
        patch.setattr(learner, "poll", lambda poll=learner.poll: (poll(), 60.0)[1])  # it does not sleep at the end
        learner.thread.start()
        learner.finish()
    assert not learner.thread.is_alive() and not world.service.graphs
    assert not any(plan.turn.own[1] for x in learner.products.values() for plan in x.plans)


def test_a_weight_of_the_call_is_read_beside_calls_of_it(service: Service, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its memory is theirs: a graph that any call launches would read what may have been freed."""
    l2 = SimpleNamespace(L2_cache_size=1 << 18)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: l2)
    world = World(service)
    monkeypatch.setattr(turns.Job, "begin", lambda *_: 1 // 0)
    world.until_it_races()
    (running,) = [x for x in service.tuner.trials.values() if x.has_turn]
    assert running.has_own_b
    launches, (a, b, c) = len(service.launches), world.of
    world.of = a, b.clone(), c
    world.call(1000)
    assert len(service.launches) <= launches + 1 and not service.graphs, "its weight is elsewhere"


def test_what_cannot_be_stored_is_logged(
    world: World, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(learned, "store", lambda *_, **__: [][0])
    assert world.call().algorithm == world.fastest.algorithm
    assert "what was learned is not stored: IndexError" in caplog.text


def test_a_forked_child_learns_nothing_of_its_parents(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    world.until_it_races()

    def child() -> None:
        launches = len(world.service.launches)
        world.call(3000)
        assert turns._learner is None and len(world.service.launches) == launches

    assert os_forked(child)() == 0
    world.call()
    assert world.replaced


def test_two_processes_that_race_at_once_keep_what_both_learn(service: Service) -> None:

    def child() -> None:
        service.begin_process()
        other = World(service, 48)
        assert other.call(2 * CALLS).algorithm == other.fastest.algorithm

    ended = os_forked(child, 300)
    world = World(service)
    assert world.call(2 * CALLS).algorithm == world.fastest.algorithm
    assert ended() == 0
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
