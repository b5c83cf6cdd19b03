"""Stand-ins that C++ launches: until Python must decide again, and counted."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.support import fake_compiler, fake_driver
from tests.support.fake_compiler import available
from tests.support.native_calls import Call
from tests.support.processes import printed
from tests.support.table_fakes import HOPPER
from triton_gemm.functional import fast_path
from triton_gemm.problem import PRODUCT
from triton_gemm.runtime import background, binaries, native, native_build, plan, stand_ins, step
from triton_gemm.runtime.worker import LostError
from triton_gemm.selection.select import Selection, ranked, select

pytestmark = pytest.mark.slow


class Waiting(Call):
    """Calls that wait for a kernel of their own, while another with the same bits is loaded."""

    def __init__(self, patch: pytest.MonkeyPatch, driver: fake_driver.Driver, **grad: bool) -> None:
        a, b = torch.empty(256, 512, dtype=torch.bfloat16, **grad), torch.empty(512, 768, dtype=torch.bfloat16)
        super().__init__(driver, a, b, request=PRODUCT, operation="matmul", dispatched=False)
        self.compiler = fake_compiler.take_workers(patch)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: driver.capturing)
        patch.setattr(native_build, "possible", lambda: True)
        self.cached: set[object] = set()
        patch.setattr(step, "compiled_before", self._compiled_before)
        problem = PRODUCT.problem(a, b, self.made)
        selection = select(problem, HOPPER)
        others = [x for x in ranked(problem, HOPPER) if x[1].algorithm != selection.algorithm]
        self.first_calls = background.FirstCalls(HOPPER)
        self.own = plan.GemmPlan(problem, selection, a.device, self.first_calls)
        for _, other in others:
            available().add(HOPPER, problem, Selection.of(other, ""))
            if available().nearest(problem, selection, HOPPER) is not None:
                break
        (key, _), c = self.fast.take(**self.given()), self.made
        self.own.run(a, b, c)
        self.fast.keep(key, fast_path.known(self.own, c, (a, a), (b, b)))

    def _compiled_before(self, launch: Any, operands: Any, scalars: Any) -> Any:
        there = binaries.identity(launch, operands) in self.cached
        return step.compiled(launch, operands, scalars) if there else None

    def call(self) -> tuple[str, int]:
        """Who launches a call, and which of the loaded kernels."""
        self.driver.seen.clear(), self.driver.by_python.clear()
        assert self.take() is not None
        [seen] = self.driver.seen or self.driver.by_python
        return "C++" if self.driver.seen else "Python", seen.function

    @property
    def stand_in(self) -> plan.GemmPlan:
        return self.first_calls.stand_in

    def end(self, error: str | None = None) -> None:
        [wanted] = self.compiler.added
        if error is None:
            self.cached.update(wanted.binaries)
        background._ended(HOPPER, wanted, error)


STAND_IN, OWN = fake_driver.FUNCTION, fake_driver.FUNCTION + 1  # in the order in which they are loaded


@pytest.fixture
def waiting(driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch) -> Waiting:
    return Waiting(monkeypatch, driver)


def test_a_stand_in_is_launched_by_cpp_until_its_kernel_is_compiled(waiting: Waiting) -> None:
    wanted = waiting.first_calls.wanted
    assert wanted is not None and waiting.compiler.jobs == []
    assert waiting.call() == ("Python", STAND_IN) and len(waiting.compiler.jobs) == 1, "the second call orders it"
    assert [waiting.call() for _ in range(5)] == [("C++", STAND_IN)] * 5
    assert (wanted.by_python, wanted.by_cpp.value) == (2, 5) and wanted.calls == 7
    waiting.end()
    assert waiting.call() == ("Python", OWN) and waiting.own.compiled
    assert [waiting.call() for _ in range(2)] == [("C++", OWN)] * 2 and wanted.calls == 7


def test_what_has_ended_for_another_call_has_python_decide_once(waiting: Waiting) -> None:
    waiting.call()
    for _ in range(3):
        assert waiting.call() == ("C++", STAND_IN)
        stand_ins.change()
        assert waiting.call() == ("Python", STAND_IN)
    assert waiting.call() == ("C++", STAND_IN)


def test_a_failure_leaves_the_stand_in_to_cpp(waiting: Waiting, caplog: pytest.LogCaptureFixture) -> None:
    waiting.call()
    waiting.end("PassManager::run failed")
    assert waiting.call() == ("Python", STAND_IN) and waiting.call() == ("C++", STAND_IN)
    (message,) = caplog.messages
    assert "PassManager::run failed" in message
    waiting.driver.capturing = True  # a graph may keep it
    assert waiting.call() == ("Python", STAND_IN)


@pytest.mark.parametrize("why", ["captured", "held", "no workers", "compiled by another call"])
def test_python_decides_again(waiting: Waiting, why: str) -> None:
    """Where the plan's own kernel must run, or can."""
    waiting.call()
    assert waiting.call() == ("C++", STAND_IN)
    waiting.driver.capturing = why == "captured"
    if why == "no workers":
        background._give_up(LostError("no processes"))
    elif why == "compiled by another call":
        waiting.own.compile()
    with background.held() if why == "held" else nullcontext():
        assert waiting.call() == ("Python", OWN)
    waiting.driver.capturing = False
    assert waiting.call() == ("C++", OWN)


def test_a_change_meanwhile_keeps_no_stand_in(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does another thread's, which has kept the plan's own kernel, lose that for good."""
    entry_of = native.entry_of

    def meanwhile(made: plan.GemmPlan, *arguments: Any) -> Any:
        entry = entry_of(made, *arguments)
        if made is waiting.stand_in:
            waiting.own.compile()
            assert waiting.call()[1] == OWN
        return entry

    monkeypatch.setattr(native, "entry_of", meanwhile)
    assert waiting.take() is not None
    assert waiting.call() == ("Python", OWN) and waiting.call() == ("C++", OWN)


def test_a_call_that_cpp_does_not_read_is_offered_once(waiting: Waiting, monkeypatch: pytest.MonkeyPatch) -> None:
    offered = []
    monkeypatch.setattr(native, "entry_of", lambda *_: offered.append(1) or [][0])
    for _ in range(3):
        assert waiting.call() == ("Python", STAND_IN)
    assert len(offered) == 1
    stand_ins.change()
    waiting.call(), waiting.call()
    assert len(offered) == 2


def test_with_gradients(driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose calls Python launches in a node of its own."""
    waiting = Waiting(monkeypatch, driver, requires_grad=True)
    waiting.driver.by_python.clear()
    for _ in range(2):
        waiting.take()
    c = waiting.take()
    assert c is not None and c.grad_fn is not None and not waiting.driver.by_python
    assert [x.function for x in waiting.driver.seen] == [STAND_IN] * len(waiting.driver.seen) != []
    stand_ins.change()
    assert waiting.take() is None


THREADS = """
import sys, time
import pytest, torch, triton_gemm
from tests.runtime import test_native_products as products
from tests.runtime.test_native_stand_ins import Waiting
from triton_gemm.functional import routing
from triton_gemm.problem import SUM
from triton_gemm.runtime import stand_ins

patch = pytest.MonkeyPatch()
waiting = Waiting(patch, products.route(patch, sys.argv[1]))
scripted = torch.jit.CompilationUnit('''
def multiply(a, b, count: int):
    rows = 0
    for _ in range(count):
        rows += torch.mm(a, b).size(0)
    return rows
def start(a, b, count: int):
    return torch.jit.fork(multiply, a, b, count)
''')
wanted, [known] = waiting.first_calls.wanted, waiting.fast.calls.values()
with triton_gemm.use():
    fast = routing._rules[-1].fast
    key, _ = fast.take("mm", waiting.a, waiting.b, (), SUM, None, dispatched=True)
    fast.keep(key, known)
    before = wanted.calls
    running = [scripted.start(waiting.a, waiting.b, 4000) for _ in range(3)]
    while not all(x.done() for x in running):
        stand_ins.change()
        time.sleep(0.002)
    assert [x.wait() for x in running] == [4000 * 256] * 3
print(wanted.calls - before, wanted.by_cpp.value)
"""


def test_threads_that_python_did_not_start_are_counted(extension: Path) -> None:
    """While entries are forgotten and kept again."""
    calls, by_cpp = map(int, printed(THREADS, extension).split())
    assert calls == 12_000 and 0 < by_cpp < calls
