"""The garbage collector and handlers of signals run code between any two steps of a thread, which may hold a lock then:
a block that is ended there waits for nothing, and an interruption leaves nothing half changed."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import triton

from tests.runtime.test_worker import stub
from tests.support import fake_driver, table_fakes
from tests.support.fake_compiler import ROWS, Gpu, call, planned
from tests.support.processes import printed
from tests.support.table_fakes import found, problem_of, store
from triton_gemm import inductor, tables
from triton_gemm.kernels.launch import Launch
from triton_gemm.runtime import step, worker

SECONDS = 60  # after which a script waits for ever

BEGIN = """
import gc, random, signal, sys, threading, time
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import tables
from triton_gemm.calibration import kept
from triton_gemm.runtime import background, plan
from triton_gemm.tuning import recording
from triton_gemm.selection import generation

def abandoned(begin, end):
    # A generator in a cycle, which the collector closes; it is suspended in a block.
    def block():
        try:
            begin()
            yield
        finally:
            end()
    made = block()
    next(made)
    cycle = [made]
    cycle.append(cycle)

def collecting(function):
    def collects(*given, **how):
        gc.collect()
        return function(*given, **how)
    return collects

def at_any_time(handler, work):
    # `work` again and again, and the handler in the midst of it.
    def handle(*_):
        handler()
        signal.setitimer(signal.ITIMER_REAL, 1e-4)
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, 1e-4)
    deadline = time.monotonic() + 1
    while time.monotonic() < deadline:
        work()
    signal.signal(signal.SIGALRM, signal.SIG_IGN)
"""
SCRIPTS = {
    "tables, by the collector": """
tables.queries._load = collecting(tables.queries._load)
gc.disable()
abandoned(lambda: None, tables.reload)
number = generation.number
tables.lookup(problem_of(), HOPPER)
assert generation.number > number
assert [where for where, *_ in tables.queries._loaded] == [tables.queries.SHIPPED], "what was read before is read again"
""",
    "tables, by a signal": """
def work():
    tables.reload()
    tables.lookup(problem_of(), HOPPER)
at_any_time(work, work)
""",
    "the generation, by a signal": """
seen = set()
def work():
    before = generation.number
    generation.advance()
    generation.advance_models()
    assert generation.number != before and generation.number not in seen
    seen.add(before)
at_any_time(generation.advance, work)
""",
    "models, by the collector": """
looked = kept._find
def find(*given):
    seen.append(kept._loaded)
    return looked(*given)
kept._find = collecting(find)
gc.disable()
seen = []
abandoned(lambda: None, kept.reload)
number = generation.models
assert kept.find(HOPPER) is None and generation.models > number
assert kept.find(HOPPER) is None and len(seen) == 2, "what was read before is read again"
""",
    "models, by a signal": """
def work():
    kept.reload()
    kept.find(HOPPER)
at_any_time(work, work)
""",
    "what is recorded, by a signal": """
class Launched:
    problem = problem_of()
launched, written, ran = Launched(), [], []
plan.InterpretedPlan.run = own = lambda *_: ran.append(None)
recording.write = lambda path, calls: written.append(sum(calls.values()))
def block(calls):
    before = len(ran)
    with recording.record_shapes("x"):
        within = len(ran)
        for _ in range(calls):
            plan.InterpretedPlan.run(launched)
        within = len(ran) - within
    assert within <= written.pop() <= len(ran) - before
at_any_time(lambda: block(1), lambda: block(50))
assert plan.InterpretedPlan.run is own and not recording.HOOKS and len(ran) > 1000
""",
    "the background, by the collector in a thread that is waited for": """
def made(*given, **how):
    collector = threading.Thread(target=gc.collect)
    collector.start()
    collector.join()
background.Compiler = made
background.torch.cuda.get_device_capability = lambda _: (9, 0)
gc.disable()
block = background.held()
abandoned(block.__enter__, lambda: block.__exit__(None, None, None))
assert background._held
class Plan:
    device = None
background._compiler(Plan, HOPPER)
assert not background._held
""",
    "the background, interrupted": """
def interrupt(*_):
    raise KeyboardInterrupt
signal.signal(signal.SIGALRM, interrupt)
def until_interrupted():
    try:
        signal.setitimer(signal.ITIMER_REAL, random.uniform(1e-6, 2e-4), 0.05)
        while True:
            with background.held():
                pass
    except KeyboardInterrupt:
        signal.setitimer(signal.ITIMER_REAL, 0)
for _ in range(3000):
    until_interrupted()
    assert not background._held
""",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_block_ends_anywhere(name: str, tmp_path: Path) -> None:
    printed(BEGIN + SCRIPTS[name], timeout=SECONDS, TRITON_GEMM_CACHE_DIR=str(tmp_path))


def in_a_thread(work: Callable[[], object]) -> None:
    """Which does not keep pytest from ending where it waits for ever."""
    ended: list[object] = []
    thread = threading.Thread(target=lambda: ended.append(work()), daemon=True)
    thread.start()
    thread.join(SECONDS)
    assert ended and not thread.is_alive()


def test_a_product_may_interrupt_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    """As one in a handler of signals."""
    gpu, made, again = Gpu(monkeypatch), planned(ROWS[0]), [True]
    load = made.load

    def interrupted(*operands: Any, **how: Any) -> bool:
        if again.pop() if again else False:
            call(made)
        return load(*operands, **how)

    monkeypatch.setattr(type(made), "load", lambda _, *operands, **how: interrupted(*operands, **how))
    in_a_thread(lambda: call(made))
    assert not again and gpu.ran


def test_a_worker_may_be_closed_while_it_starts(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the thread that starts it."""
    made, launched = stub(), worker._launched

    def closed(command: Any) -> Any:
        made.close()
        return launched(command)

    monkeypatch.setattr(worker, "_launched", closed)
    in_a_thread(made.start)
    assert made.closed
    made.end()


def test_a_binary_may_be_loaded_while_one_is(monkeypatch: pytest.MonkeyPatch) -> None:
    """By a hook of Triton's on that, or a handler of signals: another, or the same."""
    driver, codes = fake_driver.take_driver(monkeypatch), [b"another", b"one"]
    launch = Launch(None, (1, 1, 1), {}, {})

    def load(code: bytes) -> int:
        return step.function_of(fake_driver.made_up(launch, code), 0)

    def hook(*_: object) -> None:
        if codes:
            load(codes.pop(0))

    monkeypatch.setattr(triton.knobs.runtime, "kernel_load_start_hook", hook)
    in_a_thread(lambda: load(b"one"))
    assert not codes and len(step._functions) == 2 and load(b"one") in driver.kernels


def test_who_registers_with_inductor_may_be_interrupted_by_another(monkeypatch: pytest.MonkeyPatch) -> None:
    """That is offered once, and taken back once."""
    offers: list[object] = []
    again = [inductor.register]

    def offer(*_: object) -> Callable[[], None]:
        if again:
            again.pop()()
        made = object()
        offers.append(made)
        return lambda: offers.remove(made) if offers[-1:] == [made] else None

    monkeypatch.setattr(inductor, "offer_to_inductor", offer)

    def both() -> None:
        inductor.register()
        assert len(offers) == 1
        inductor.unregister()

    in_a_thread(both)
    assert not offers and not again


def test_tables_that_an_interruption_leaves_are_those_of_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folder = table_fakes.own_folder(tmp_path, monkeypatch)
    assert store(problem_of()) and found(problem_of()) is not None
    unlink, deleted = Path.unlink, []

    def interrupted(path: Path, **how: Any) -> None:
        if deleted:
            raise KeyboardInterrupt
        unlink(path, **how)
        deleted.append(path)

    (folder / f"x{tables.checks.JOURNAL}").write_text("")
    with monkeypatch.context() as now:
        now.setattr(Path, "unlink", interrupted)
        with pytest.raises(KeyboardInterrupt):
            tables.clear()
    assert deleted and found(problem_of()) is None
