"""First calls while the compiler works in other processes: what runs, what waits, and what takes over."""

from __future__ import annotations

import logging
import threading
from contextlib import nullcontext
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.support.fake_compiler import ROWS, SPLIT, Gpu, N, available, call, operands, own, own_jobs, planned
from tests.support.patches import replace_all
from tests.support.processes import os_forked
from tests.support.table_fakes import HOPPER
from tests.support.threads import at_once
from triton_gemm.compat import compiling_for
from triton_gemm.kernels import launch
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, plan, step
from triton_gemm.runtime.worker import LostError
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select


def test_calls_run_on_what_is_loaded_until_their_own_is(gpu: Gpu) -> None:
    """The first of all waits for the compiler, the others for nothing; and each takes over at the call after."""
    first, *others = map(planned, ROWS)
    call(first)
    assert gpu.ran == gpu.waited == own(first) and not gpu.compiler.jobs
    for made in others:
        gpu.ran.clear()
        call(made)
        call(made)
        assert gpu.ran == own(first) * 2 != own(made) * 2
    assert gpu.waited == own(first) and gpu.compiler.jobs == [(x.problem, x.selection) for x in others]
    assert not triton_gemm.wait_until_compiled(0)
    gpu.end()
    assert triton_gemm.wait_until_compiled(0)
    for made in others:
        gpu.ran.clear()
        call(made)
        call(made)
        assert gpu.ran == own(made) * 2 and made.first_calls is None
    assert gpu.waited == own(first)
    assert background.counts == {"waited": 1, "stand-in": 3}


def test_what_is_called_once_is_not_compiled(gpu: Gpu) -> None:
    """Its kernel is when a second call needs it, of the same plan or of another."""
    call(planned(ROWS[0]))
    rows = [M for M in range(65, 128) if own(planned(M)) == own(planned(65))]
    again, once, other, alone = (planned(M) for M in (ROWS[1], *rows[:2], ROWS[2]))
    for made in (again, once, alone):
        call(made)
    assert not gpu.compiler.jobs
    call(again)
    assert gpu.compiler.jobs == [(again.problem, again.selection)]
    call(other)
    call(other)
    assert gpu.compiler.jobs[1:] == [(once.problem, once.selection)], "one for a binary"
    gpu.end()
    gpu.ran.clear()
    call(once)
    call(other)
    assert gpu.ran == own(once) * 2 and once.compiled and other.compiled


def test_most_called_is_compiled_first(gpu: Gpu) -> None:
    """Calls that C++ has launched count as well."""
    call(planned(ROWS[0]))
    few, many, by_cpp = map(planned, ROWS[1:])
    for made, count in ((few, 2), (many, 4), (by_cpp, 2)):
        for _ in range(count):
            call(made)
    counter = by_cpp.first_calls.stand_in.calls
    counter.value += 9
    assert [wanted.calls for wanted in gpu.compiler.added] == [2, 4, 11]


def test_who_waits_has_everything_compiled(gpu: Gpu) -> None:
    """That was called before, even once. Whatever times products waits for what is under way alone."""
    first, *others = map(planned, ROWS)
    for made in (first, *others):
        call(made)
    with background.held():
        assert own_jobs(gpu, *others) == []
    assert not triton_gemm.wait_until_compiled(0)
    assert len(own_jobs(gpu, *others)) == len({tuple(own(x)) for x in others})
    gpu.end()
    assert triton_gemm.wait_until_compiled(0)
    gpu.ran.clear()
    for made in others:
        call(made)
    assert gpu.ran == [binary for made in others for binary in own(made)]


def test_what_the_cache_has_lost_is_compiled_again(gpu: Gpu) -> None:
    """Though it was available before the plan's first call."""
    first, second, *_ = map(planned, ROWS)
    call(first)
    available().add(HOPPER, second.problem, second.selection)
    call(second)
    assert own_jobs(gpu, second) == []
    call(second)
    assert len(own_jobs(gpu, second)) == 1
    gpu.end()
    call(second)
    assert second.compiled


def test_plans_of_one_binary_have_it_compiled_once(gpu: Gpu) -> None:
    """And all learn that it failed, of which one warns."""
    call(planned(ROWS[0]))
    plans = [planned(M) for M in range(65, 128) if own(planned(M)) == own(planned(65))]
    for made in plans:
        call(made)
    assert len(own_jobs(gpu, *plans)) == 1
    gpu.end("it crashed")
    for made in plans:
        call(made)
        call(made)
        assert made.first_calls is not None and made.first_calls.failed
    assert len(own_jobs(gpu, *plans)) == 1


def test_a_stand_in_takes_over_from_torch(gpu: Gpu) -> None:
    """Once there is one, before the product's own kernel."""
    first, second, *_ = map(planned, ROWS)
    with background.first_calls("raise"):
        with pytest.raises(background.WouldWaitError):
            call(second)
        with background.first_calls("wait"):
            call(first)
        call(second)
    assert gpu.ran[-1:] == own(first) != own(second)


def test_what_the_cache_on_disk_has_is_loaded_at_once(gpu: Gpu) -> None:
    first, second, *_ = map(planned, ROWS)
    gpu.cached.update(own(second))
    call(first)
    call(second)
    assert gpu.ran == own(first) + own(second) and not gpu.compiler.jobs
    assert background.counts == {"waited": 1, "loaded": 1}


@pytest.mark.parametrize("why", ["PassManager::run failed", "compiling takes more than 60 s"])
def test_a_failure_leaves_what_stands_in_and_warns_once(gpu: Gpu, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Under a capture, too, which would compile it in this process."""
    first, second, *_ = map(planned, ROWS)
    call(first)
    call(second)
    call(second)
    gpu.ran.clear()
    with caplog.at_level(logging.WARNING, "triton_gemm"):
        gpu.end(why)
        call(second)
        gpu.capturing = True
        call(second)
        call(second)
    (message,) = caplog.messages
    assert why in message and gpu.ran == own(first) * 3 and gpu.waited == own(first)
    jobs = [*gpu.compiler.jobs]
    gpu.capturing = False
    call(again := planned(ROWS[1]))  # another plan of the same binary
    assert gpu.ran[3:] == own(first) and again.first_calls is not None and again.first_calls.failed
    assert gpu.compiler.jobs == jobs and len(caplog.messages) == 1
    with background.held():
        call(second)
    assert gpu.ran[4:] == own(second), "what is timed is its own kernel, or an error"


def test_what_a_worker_has_sent_is_loaded_without_triton(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """On GPUs that it was compiled for."""
    first, second, third, _ = map(planned, ROWS)
    call(first)
    for made in (second, third):
        call(made)
        call(made)
    binaries.receive({((9, 0), binary): binary for binary in own(second)})
    binaries.receive({((8, 0), binary): binary for binary in own(third)})
    for name in ("compiled", "compiled_before"):
        monkeypatch.setattr(step, name, lambda *_: {}["asked of Triton"])
    gpu.end()
    gpu.ran.clear()
    for why in ((step.kit, "is_unchanged", False), (step, "compiles_anew", True)):
        with monkeypatch.context() as patch, pytest.raises(KeyError):
            patch.setattr(*why[:2], lambda why=why: why[2])
            call(second)
    call(second)
    assert second.compiled and gpu.ran == own(second)
    with pytest.raises(KeyError):
        call(third)


def test_few_of_what_workers_have_sent_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    replace_all(monkeypatch, binaries, _received={}, MAX_RECEIVED=3)
    for i in (1, 2, 3, 1, 4):
        binaries.receive({((9, 0), i): i})
    assert [*binaries._received.values()] == [3, 1, 4]


@pytest.mark.parametrize("why", ["a capture", "Inductor times it", "something times it"])
def test_own_kernels_are_waited_for(why: str, gpu: Gpu) -> None:
    """A graph would keep what stands in."""
    first, second, third, _ = map(planned, ROWS)
    call(first)
    call(third)
    gpu.capturing = why == "a capture"
    gpu.ran.clear()
    blocks = {"Inductor times it": background.first_calls("own kernel"), "something times it": background.held()}
    with blocks.get(why, nullcontext()):
        call(second)
        call(third)
    assert gpu.ran == own(second) + own(third) and gpu.waited == own(first) + own(second) + own(third)
    assert not gpu.compiler.jobs and not background._held


def test_a_call_that_does_not_wait_launches_nothing(gpu: Gpu) -> None:
    """Until its kernel is there; others of the same plan wait and compile it."""
    first, second, cut = planned(ROWS[0]), planned(ROWS[1]), planned(*SPLIT)
    for _ in range(2):
        with background.first_calls("raise"), pytest.raises(background.WouldWaitError):
            call(first)
    assert not gpu.ran and not gpu.waited and gpu.compiler.jobs == [(first.problem, first.selection)]
    gpu.end()
    with background.first_calls("raise"):
        call(first)
        call(second)
        with pytest.raises(background.WouldWaitError):
            call(cut)
    assert "parts" in bit_class(cut.problem, cut.selection), "a class that nothing loaded gives"
    call(cut)
    assert gpu.ran == own(first) * 2 + own(cut) and gpu.waited == own(cut)
    assert background.counts == {"raised": 2, "stand-in": 1}


def test_a_failure_leaves_torchs_product(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    first = planned(ROWS[0])
    with background.first_calls("raise"):
        with pytest.raises(background.WouldWaitError):
            call(first)
        with pytest.raises(background.WouldWaitError):
            call(first)
        gpu.end("PassManager::run failed")
        for _ in range(2):
            with pytest.raises(background.WouldWaitError):
                call(first)
    (message,) = caplog.messages
    assert "torch's product" in message and not gpu.waited


def test_a_call_joins_the_worker_that_compiles_its_kernel(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where that was ordered by another plan. It compiles what none has begun, and what was not ordered."""
    first, ordering, *others = (planned(M) for M in (ROWS[0], 65, 66, 67))
    assert all(own(made) == own(ordering) != own(first) for made in others)
    call(first)
    assert not gpu.compiler.joined and gpu.waited == own(first)
    available().configs.clear()  # nothing stands in
    with background.first_calls("raise"):
        for _ in range(2):
            with pytest.raises(background.WouldWaitError):
                call(ordering)
    (wanted,) = gpu.compiler.added
    call(others[0])
    assert gpu.compiler.joined == [wanted] and wanted.ordered and gpu.waited == own(first) + own(ordering)
    monkeypatch.setattr(gpu.compiler, "join", lambda _: True)  # none had begun
    wanted.join()
    assert not wanted.ordered


def test_without_a_cache_or_workers_calls_wait(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    call(planned(ROWS[0]))
    monkeypatch.setattr(background, "_can_cache", lambda: False)
    call(planned(ROWS[1]))
    monkeypatch.setattr(background, "_can_cache", lambda: True)
    background._give_up(LostError("no processes"))
    call(planned(ROWS[2]))
    assert len(gpu.waited) == 3 and not gpu.compiler.jobs


def test_threads_that_call_at_once_ask_for_one_compilation(gpu: Gpu) -> None:
    call(planned(ROWS[0]))
    second = planned(ROWS[1])
    at_once(gpu.end, *8 * [lambda: [call(second) for _ in range(10)]])
    gpu.end()
    call(second)
    assert gpu.compiler.jobs == [(second.problem, second.selection)] and len(gpu.ran) == 82
    assert gpu.ran[-1:] == own(second) and second.first_calls is None


def test_whoever_must_not_wait_waits_for_no_thread(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """That compiles the kernel itself, or has joined a worker."""
    made, compiling, done = planned(ROWS[0]), threading.Event(), threading.Event()

    def compile_slowly(*arguments: Any) -> object:
        compiling.set()
        assert done.wait(10)
        return gpu.compile(*arguments)

    monkeypatch.setattr(step, "compiled", compile_slowly)
    thread = threading.Thread(target=call, args=(made,))
    thread.start()
    assert compiling.wait(10)
    with background.first_calls("raise"), pytest.raises(background.WouldWaitError):
        call(made)
    done.set()
    thread.join()
    with background.first_calls("raise"):
        call(made)
    assert gpu.ran == own(made) * 2


def test_a_takeover_that_fails_is_tried_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = map(planned, ROWS)
    for made in (first, second, second):
        call(made)
    gpu.end()
    with monkeypatch.context() as patch:
        fails = Mock(side_effect=RuntimeError("out of memory"))
        replace_all(patch, step, compiled=fails, compiled_before=lambda *_: None)
        with pytest.raises(RuntimeError, match="out of memory"):
            call(second)
    call(second)
    assert gpu.ran[-1:] == own(second) and second.compiled


def test_the_binary_is_that_of_the_operands_of_the_call(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """A bias that is not aligned has none of an aligned one's."""
    seen: list[bool] = []

    def load(launch: Any, operands: Any, scalars: object) -> object:
        seen.append(operands["bias"].data_ptr() % 16 == 0)
        return gpu.load(launch, operands, scalars)

    monkeypatch.setattr(step, "compiled_before", load)
    a, b, c = operands(ROWS[0])
    problem = GemmProblem.of(a, b, c, bias="n")
    for bias in (torch.empty(N, dtype=torch.bfloat16), torch.empty(N + 1, dtype=torch.bfloat16)[1:]):
        made = plan.GemmPlan(problem, select(problem, HOPPER), torch.device("cpu"), background.FirstCalls(HOPPER))
        made.run(a, b, c, (bias,))
    assert seen == [True, False]


def test_a_forked_child_waits_and_has_none_of_the_workers(gpu: Gpu) -> None:
    call(planned(ROWS[0]))

    def child() -> None:
        assert not (background._available or background._compilers or gpu.compiler.jobs)

    assert os_forked(child)() == 0 and background._available


def test_workers_compile_what_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Triton's compiler and cache and a real process; but for launches all is as on a GPU."""
    made = background._compiler
    gpu = Gpu(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    replace_all(monkeypatch, background, _compilers={}, _compiler=made, WORKERS=1)
    replace_all(monkeypatch, step, compiled=launch.compiled, compiled_before=launch.compiled_before)
    first, second, *_ = map(planned, ROWS)
    first.steps[0].launch.kernel.device_caches.pop("sm_90", None)
    try:
        with compiling_for((9, 0)):
            call(first)
            call(second)
            assert gpu.ran[0] is gpu.ran[1]
            assert [x.nice for of in background._compilers.values() for x in of.workers] == [background.NICE]
            assert triton_gemm.wait_until_compiled(240)
            call(second)
    finally:
        for compiler in background._compilers.values():
            compiler.close()
    assert gpu.ran[2] is not gpu.ran[0] and second.compiled and len(background._compilers) == 1
