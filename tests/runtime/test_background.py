"""First calls while the compiler works in other processes: what stands in, what waits, and what takes over."""

from __future__ import annotations

import logging
import math
import os
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.compat import compiling_for
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import launch
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, plan, stand_ins
from triton_gemm.runtime.compiling import Compiler
from triton_gemm.runtime.worker import LostError
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, given, illegal, predicted, select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape

K, N = 4096, 4096
ROWS = (1814, 1408, 1088, 512)  # their choices are different kernels in the same bit class
SPLIT = (64, 1536, 7168)  # M, N, K of one that is cut along K


class FakeCompiler:
    """Workers that compile nothing: a test says when a job is done, and why it has failed."""

    def __init__(self) -> None:
        self.jobs: list[Any] = []
        self.ended: dict[Any, str | None] = {}
        self.forgotten: list[Any] = []
        self.joined: list[Any] = []

    def add(self, jobs: list[Any], first: bool = False) -> None:
        self.jobs += jobs

    def done(self, job: object) -> bool:
        return job in self.ended

    def failure(self, job: object) -> str | None:
        return self.ended[job]

    def join(self, job: object) -> None:
        self.joined.append(job)

    def forget(self, job: object) -> None:
        self.forgotten.append(job)

    def wait(self, timeout: float | None) -> bool:
        return all(job in self.ended for job in self.jobs)

    def abandon(self) -> None:
        self.jobs.clear()


class Gpu:
    """In the place of Triton's compiler and cache, its launcher and a Hopper GPU.

    quick: whether there is the tile that is compiled soonest; cached: binaries on disk; waited: those that a call has
    compiled; ran: those that were launched, one after another.
    """

    def __init__(self, patch: pytest.MonkeyPatch, quick: bool = False) -> None:
        self.cached: set[object] = set()
        self.waited: list[object] = []
        self.ran: list[object] = []
        self.capturing = False
        self.compiler = FakeCompiler()
        patch.setattr(background, "_available", {})
        patch.setattr(stand_ins, "AHEAD", ())
        patch.setattr(background, "WORTH_US", 0.0)
        if not quick:
            patch.setattr(kernels.warp_specialised, "quick", lambda *_: ())
        patch.setattr(background, "_compilers", {"fake": self.compiler})
        patch.setattr(background, "_compiler", lambda *_: self.compiler)
        patch.setattr(background, "_lost", False)
        patch.setattr(background, "_can_cache", lambda: True)
        patch.setattr(background, "counts", background.Counter())
        patch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
        patch.setattr(torch.cuda, "is_available", lambda: True)
        patch.setattr(torch.cuda, "is_current_stream_capturing", lambda: self.capturing)
        for name, value in {
            "device_info": lambda _: HOPPER,
            "current_device": lambda: 0,
            "current_stream": lambda _: 0,
            "ensure_context": lambda _: None,
            "tensor_maps": lambda _: [lambda address, **_: address] * 5,
            "left_out": lambda _: (),
            "launcher": lambda kernel, *_: lambda *_: self.ran.append(kernel),
            "compiled": self.compile,
            "compiled_before": self.load,
        }.items():
            patch.setattr(plan, name, value)
        patch.setattr(plan, "workspace", lambda *_: (torch.empty(4), torch.empty(4)))

    def load(self, launch: Any, operands: Any, _: object) -> object:
        binary = binaries.identity(launch, operands)
        return binary if binary in self.cached else None

    def compile(self, launch: Any, operands: Any, _: object) -> object:
        binary = binaries.identity(launch, operands)
        if binary not in self.cached:
            self.waited.append(binary)
        self.cached.add(binary)
        return binary

    def end(self, why: str | None = None) -> None:
        """Ends all jobs of the workers, which leave their binaries on disk."""
        for problem, selection in self.compiler.jobs:
            if why is None:
                self.cached.update(binaries.identities(HOPPER, problem, selection))
                background._left_in_cache(HOPPER, (problem, selection))
            self.compiler.ended[problem, selection] = why


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> Gpu:
    return Gpu(monkeypatch)


def operands(M: int, N: int = N, K: int = K) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Of `linear`, without memory."""
    a, b, c = (torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((M, K), (N, K), (M, N)))
    return a, b.t(), c


def planned(M: int, N: int = N, K: int = K, **changes: Any) -> plan.GemmPlan:
    """As `plan_for` plans it, without that cache."""
    problem = GemmProblem.of(*operands(M, N, K))
    selection = replace(select(problem, HOPPER), **changes)
    return plan.GemmPlan(problem, selection, torch.device("cpu"), background.FirstCalls(HOPPER))


def available() -> stand_ins.Available:
    return background._available[HOPPER.capability]


def call(made: plan.GemmPlan) -> None:
    made.run(*operands(made.problem.M, made.problem.N, made.problem.K))


def own(made: plan.GemmPlan) -> list[object]:
    return [*binaries.identities(HOPPER, made.problem, made.selection)]


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
    assert gpu.waited == own(first) and gpu.compiler.forgotten == gpu.compiler.jobs
    assert background.counts == {"waited": 1, "stand-in": 3}


def own_jobs(gpu: Gpu, *plans: plan.GemmPlan) -> list[Any]:
    return [job for job in gpu.compiler.jobs if job in [(x.problem, x.selection) for x in plans]]


def test_what_is_called_once_is_not_compiled(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """But once calls of all that runs on its kernel have lost as much as that is worth."""
    monkeypatch.setattr(background, "WORTH_US", 300.0)
    call(planned(ROWS[0]))
    rows = [M for M in range(65, 128) if own(planned(M)) == own(planned(65))]
    assert len(rows) > 3
    once, *others = map(planned, rows)
    call(once)
    assert own_jobs(gpu, once) == [] and once.first_calls is not None
    assert background.BY_PYTHON_US <= once.first_calls.lost_us < 300
    calls = 1
    while not own_jobs(gpu, *others):
        call(others[calls % len(others)])
        calls += 1
    assert available().lost[once.first_calls.number] >= 300 and 1 < calls <= 1 + 300 / background.BY_PYTHON_US
    assert own_jobs(gpu, once) == [] and len(own_jobs(gpu, *others)) == 1
    gpu.end()
    gpu.ran.clear()
    call(once)
    assert gpu.ran == own(once) and once.compiled, "others had its kernel compiled"


def test_who_waits_has_everything_compiled(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """That was called before, however little was lost. Whatever times products waits for what is under way alone."""
    monkeypatch.setattr(background, "WORTH_US", 1e9)
    first, *others = map(planned, ROWS)
    for made in (first, *others):
        call(made)
    with background.held():
        assert own_jobs(gpu, *others) == []
    assert not triton_gemm.wait_until_compiled(0)
    assert len(own_jobs(gpu, *others)) == len({tuple(own(x)) for x in others}) and not available().wanted
    gpu.end()
    assert triton_gemm.wait_until_compiled(0)
    gpu.ran.clear()
    for made in others:
        call(made)
    assert gpu.ran == [binary for made in others for binary in own(made)]


def test_what_the_cache_has_lost_is_compiled_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it was available before the plan's first call."""
    first, second, *_ = map(planned, ROWS)
    call(first)
    available().add(HOPPER, second.problem, second.selection)
    monkeypatch.setattr(background, "WORTH_US", 1e9)
    call(second)
    call(second)
    assert own_jobs(gpu, second) == []
    triton_gemm.wait_until_compiled(0)
    assert len(own_jobs(gpu, second)) == 1
    gpu.end()
    call(second)
    assert second.compiled and not available().ordered


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
    assert len(own_jobs(gpu, *plans)) == 1 and not available().ordered


def test_a_stand_in_takes_over_from_torch(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once there is one, before the product's own kernel."""
    monkeypatch.setattr(background, "WORTH_US", 1e9)
    first, second, *_ = map(planned, ROWS)
    with background.first_calls("raise"):
        with pytest.raises(background.WouldWaitError):
            call(second)
        with background.first_calls("wait"):
            call(first)
        call(second)
    assert gpu.ran[-1:] == own(first) != own(second)


def test_what_torch_computes_loses_its_time(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """So that it is compiled in the end."""
    monkeypatch.setattr(background, "WORTH_US", 200.0)
    made = planned(ROWS[0])
    calls = 0
    while not own_jobs(gpu, made):
        with background.first_calls("raise"), pytest.raises(background.WouldWaitError):
            call(made)
        calls += 1
    assert made.first_calls is not None and made.first_calls.lost_us > background.BY_PYTHON_US
    assert calls == math.ceil(200 / made.first_calls.lost_us) > 1


def test_what_the_cache_on_disk_has_is_loaded_at_once(gpu: Gpu) -> None:
    first, second, *_ = map(planned, ROWS)
    gpu.cached.update(own(second))
    call(first)
    call(second)
    assert gpu.ran == own(first) + own(second) and not gpu.compiler.jobs
    assert background.counts == {"waited": 1, "loaded": 1}


def test_what_stands_in_gives_the_same_bits(gpu: Gpu) -> None:
    """For every choice that is stood in for, whatever was loaded before."""
    pairs = 0
    for M in (*ROWS, 17, 64, 128, 137, 200, 512, 2048):
        for sizes in ((N, K), (4096, 14336), (1536, 7168)):
            made = planned(M, *sizes)
            call(made)
            if made.first_calls is None or made.first_calls.stand_in is None:
                continue
            other = made.first_calls.stand_in.selection
            assert bit_class(made.problem, other) == bit_class(made.problem, made.selection)
            candidate = Candidate(given(made.problem, other.algorithm), other.algorithm)
            assert illegal(made.problem, HOPPER, candidate) is None
            pairs += 1
    assert pairs > 20


def test_a_class_that_nothing_loaded_gives_waits(gpu: Gpu) -> None:
    call(planned(ROWS[0]))
    cut = planned(*SPLIT)
    assert "parts" in bit_class(cut.problem, cut.selection)
    gpu.ran.clear()
    call(cut)
    assert gpu.ran == own(cut) and gpu.waited[1:] == own(cut) and not gpu.compiler.jobs


def test_what_is_much_slower_does_not_stand_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than 1.5 times and 5 ms; of less time than that a wait for the compiler would lose more."""
    call(planned(ROWS[0]))
    second = planned(ROWS[3])
    other = available().nearest(second.problem, second.selection, HOPPER)
    assert other is not None
    times = [
        predicted(x.problem, Candidate(given(x.problem, way.algorithm), way.algorithm), model_of(HOPPER))
        for x, way in ((second, second.selection), (second, other))
    ]
    monkeypatch.setattr(stand_ins, "LOST_US", 0.0)
    for slower, stands_in in ((times[1] / times[0] * 1.001, True), (times[1] / times[0] * 0.999, False)):
        monkeypatch.setattr(stand_ins, "SLOWER", slower)
        found = available().nearest(second.problem, second.selection, HOPPER)
        assert (found is not None) == stands_in


def test_of_all_that_is_loaded_the_fastest_stands_in(gpu: Gpu) -> None:
    for M in ROWS[:3]:
        call(planned(M))
    gpu.end()
    for M in ROWS[:3]:
        call(planned(M))
    made = planned(ROWS[3])
    call(made)
    assert made.first_calls is not None and made.first_calls.stand_in is not None
    times = {}
    for M in ROWS[:3]:
        one = stand_ins.Available()
        one.add(HOPPER, planned(M).problem, planned(M).selection)
        way = one.nearest(made.problem, made.selection, HOPPER)
        assert way is not None
        candidate = Candidate(given(made.problem, way.algorithm), way.algorithm)
        times[predicted(made.problem, candidate, model_of(HOPPER))] = way
    assert made.first_calls.stand_in.selection == times[min(times)]


def test_a_faster_stand_in_is_taken_when_there_is_one(gpu: Gpu) -> None:
    first, second, *others = map(planned, ROWS)
    call(first)
    call(made := others.pop())
    assert gpu.ran[-1:] == own(first)
    fastest = available().nearest(made.problem, made.selection, HOPPER)
    for other in (second, *others, planned(600), planned(430)):
        gpu.cached.update(own(other))
        available().add(HOPPER, other.problem, other.selection)
    found = available().nearest(made.problem, made.selection, HOPPER)
    assert found is not None and fastest is not None and found.algorithm != fastest.algorithm
    call(made)
    assert gpu.ran[-1:] == [*binaries.identities(HOPPER, made.problem, found)]


@pytest.mark.parametrize("why", ["PassManager::run failed", "compiling takes more than 60 s"])
def test_a_failure_leaves_what_stands_in_and_is_said_once(gpu: Gpu, caplog: pytest.LogCaptureFixture, why: str) -> None:
    """Under a capture, too, which would compile it in this process."""
    first, second, *_ = map(planned, ROWS)
    call(first)
    call(second)
    gpu.end(why)
    gpu.ran.clear()
    with caplog.at_level(logging.WARNING, "triton_gemm"):
        call(second)
        gpu.capturing = True
        call(second)
        call(second)
    (said,) = caplog.messages
    assert why in said and gpu.ran == own(first) * 3 and gpu.waited == own(first)
    jobs = [*gpu.compiler.jobs]
    gpu.capturing = False
    call(again := planned(ROWS[1]))  # another plan of the same binary
    assert gpu.ran[3:] == own(first) and again.first_calls is not None and again.first_calls.failed
    assert gpu.compiler.jobs == jobs and len(caplog.messages) == 1
    with background.held():
        call(second)
    assert gpu.ran[4:] == own(second), "what is timed is its own kernel, or an error"


def test_a_capture_waits_for_its_own_kernel(gpu: Gpu) -> None:
    """A graph would keep what stands in."""
    first, second, third, _ = map(planned, ROWS)
    call(first)
    call(third)
    gpu.capturing = True
    gpu.ran.clear()
    call(second)
    call(third)
    assert gpu.ran == own(second) + own(third) and gpu.waited == own(first) + own(second) + own(third)


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
    call(cut)
    assert gpu.ran == own(first) * 2 + own(cut) and gpu.waited == own(cut)
    assert background.counts == {"raised": 2, "stand-in": 1}


def test_a_failure_leaves_torchs_product(gpu: Gpu, caplog: pytest.LogCaptureFixture) -> None:
    first = planned(ROWS[0])
    with background.first_calls("raise"):
        with pytest.raises(background.WouldWaitError):
            call(first)
        gpu.end("PassManager::run failed")
        for _ in range(2):
            with pytest.raises(background.WouldWaitError):
                call(first)
    (said,) = caplog.messages
    assert "torch's product" in said and not gpu.waited


def test_the_classes_of_a_weight_are_compiled_ahead(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first call, one product for each class: others of that class then run on its kernel, without a wait."""
    monkeypatch.setattr(stand_ins, "AHEAD", (512, 256, 128, 64))
    first = planned(1024, 2048, 8192)
    call(first)
    ahead = [(problem.M, bit_class(problem, selection)) for problem, selection in gpu.compiler.jobs]
    assert len(ahead) == len({name for _, name in ahead}) > 1
    assert bit_class(first.problem, first.selection) not in {name for _, name in ahead}
    jobs = [*gpu.compiler.jobs]
    call(planned(900, 2048, 8192))
    assert [job for job in gpu.compiler.jobs if job not in jobs][1:] == [], "once for a weight"
    gpu.end()
    for M, _ in ahead:
        call(planned(M, 2048, 8192))
    assert gpu.waited == own(first) and background.counts["waited"] == 1
    name, rows = ahead[0][1], {M for M, _ in ahead}
    others = (planned(M, 2048, 8192) for M in range(64, 600) if M not in rows)
    uncompiled = (x for x in others if not gpu.cached.issuperset(own(x)))
    other = next(x for x in uncompiled if bit_class(x.problem, x.selection) == name)
    call(other)
    assert gpu.waited == own(first) and other.first_calls is not None and other.first_calls.stand_in is not None


def test_classes_that_stand_ins_of_all_sizes_give_are_not_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """What few rows run on is."""
    gpu = Gpu(monkeypatch, quick=True)
    monkeypatch.setattr(stand_ins, "AHEAD", (512, 256, 128, 64, 1))
    call(planned(1024, 2048, 8192))
    *of_all_sizes, few, _ = gpu.compiler.jobs
    assert len(of_all_sizes) == 3 and few[0].M == 1
    gpu.end()
    waited = [*gpu.waited]
    others = [planned(M, 2048, 8192) for M in stand_ins.AHEAD]
    for made in others:
        call(made)
    assert gpu.waited == waited and len({bit_class(x.problem, x.selection) for x in others}) > 2


def test_a_call_joins_the_worker_that_compiles_its_kernel(gpu: Gpu) -> None:
    """And compiles what none has begun."""
    made = planned(ROWS[0])
    call(made)
    assert gpu.compiler.joined == [(made.problem, made.selection)] and gpu.waited == own(made)


def test_nothing_is_compiled_ahead_of_batches_and_transposed_results(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose layouts depend on the number of rows."""
    monkeypatch.setattr(stand_ins, "AHEAD", (64, 128, 256))
    a, b, c = (
        torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((99, 7168), (7168, 640), (640, 99))
    )
    for operands in ((a, b, c.t()), (a.expand(2, 99, 7168), b.expand(2, 7168, 640), c.new_empty(2, 99, 640))):
        problem = GemmProblem.of(*operands)
        selection = select(problem, HOPPER)
        made = plan.GemmPlan(problem, selection, torch.device("cpu"), background.FirstCalls(HOPPER))
        gpu.waited.clear()
        made.run(*operands)
        assert not gpu.compiler.jobs and gpu.waited == own(made)


def test_whatever_times_products_holds_the_background(gpu: Gpu) -> None:
    first, second, third, _ = map(planned, ROWS)
    call(first)
    call(second)
    gpu.end()
    with background.held():
        gpu.ran.clear()
        call(second)
        call(third)
        assert gpu.ran == own(second) + own(third)
    assert [x[0] for x in gpu.compiler.jobs] == [second.problem]
    assert background._held == 0


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
    together = threading.Barrier(8)

    def run() -> None:
        together.wait()
        for _ in range(10):
            call(second)

    threads = [threading.Thread(target=run) for _ in range(8)]
    for thread in threads:
        thread.start()
    gpu.end()
    for thread in threads:
        thread.join()
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

    monkeypatch.setattr(plan, "compiled", compile_slowly)
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


def test_own_kernels_are_waited_for_where_inductor_times_them(gpu: Gpu) -> None:
    first, second, *_ = map(planned, ROWS)
    call(first)
    with background.first_calls("own kernel"):
        call(second)
    assert gpu.waited == own(first) + own(second)


def test_a_takeover_that_fails_is_tried_again(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    first, second, *_ = map(planned, ROWS)
    call(first)
    call(second)
    gpu.end()

    def fail(*_: object) -> None:
        raise RuntimeError("out of memory")

    with monkeypatch.context() as patch:
        patch.setattr(plan, "compiled", fail)
        patch.setattr(plan, "compiled_before", lambda *_: None)
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

    monkeypatch.setattr(plan, "compiled_before", load)
    a, b, c = operands(ROWS[0])
    problem = GemmProblem.of(a, b, c, bias="n")
    for bias in (torch.empty(N, dtype=torch.bfloat16), torch.empty(N + 1, dtype=torch.bfloat16)[1:]):
        made = plan.GemmPlan(problem, select(problem, HOPPER), torch.device("cpu"), background.FirstCalls(HOPPER))
        made.run(a, b, c, (bias,))
    assert seen == [True, False]


def test_what_is_compiled_soonest_gives_the_bits_of_most_choices(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first call of all compiles it, and other weights of that layout do not wait, of any number of rows."""
    gpu = Gpu(monkeypatch, quick=True)
    first = planned(ROWS[0])
    call(first)
    assert first.first_calls is not None and first.first_calls.stand_in is not None
    stand_in = first.first_calls.stand_in
    assert bit_class(first.problem, stand_in.selection) == bit_class(first.problem, first.selection)
    assert gpu.waited == own(stand_in) == gpu.ran
    *ahead, job = gpu.compiler.jobs
    assert len(ahead) == 3 and job == (first.problem, first.selection)
    call(planned(ROWS[0], 2048, 4096))
    assert gpu.compiler.jobs[:3] == ahead and len(gpu.compiler.jobs) == 4, "one for a binary"
    gpu.end()
    for sizes in ((4096, 14336), (1536, 7168), (2112, 7168)):
        for M in (32, 64, 137, 200, 256, 300, 425, 483, 512, 627, 1024):
            call(planned(M, *sizes))
    assert gpu.waited == own(stand_in) and background.counts["waited"] == 1
    call(first)
    assert gpu.ran[-1:] == own(first)


@pytest.mark.parametrize("precision", ["bf16", "fp8", "int8", "tf32", "tf32x3"])
def test_what_is_compiled_soonest_exists_for_all_that_tensor_cores_multiply(precision: str) -> None:
    problem = gemm_problem(Shape(300, N, K, layout="nt"), precision)
    found = select(problem, HOPPER)
    candidates = stand_ins.quick(problem, found, HOPPER)
    (stand_in, *_) = stand_ins.of_its_class(problem, found, HOPPER, candidates)
    quick = kernels.warp_specialised.QUICK
    assert stand_in.config == replace(quick, BLOCK_K=stand_in.config.BLOCK_K)
    assert bit_class(problem, stand_in) == bit_class(problem, found)


def test_what_cannot_be_compiled_soonest_is_compiled_as_chosen(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    gpu, made, compiled = Gpu(monkeypatch, quick=True), planned(ROWS[0]), plan.compiled

    def fail_once(*arguments: Any) -> object:
        monkeypatch.setattr(plan, "compiled", compiled)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(plan, "compiled", fail_once)
    call(made)
    (said,) = caplog.messages
    assert "PassManager::run failed" in said and gpu.waited == own(made) == gpu.ran


def test_a_batch_takes_nothing_that_is_compiled_ahead_from_a_layer(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose problems are of the same kind but for the batch."""
    seen: list[int] = []
    monkeypatch.setattr(kernels.warp_specialised, "quick", lambda problem, *_: seen.append(problem.batch) or ())
    a, b, c = operands(ROWS[0])
    several = GemmProblem.of(a.expand(2, *a.shape), b, c.expand(2, *c.shape))
    for problem in (several, planned(ROWS[0]).problem):
        stand_ins.Available().ahead(problem, select(problem, HOPPER), HOPPER)
    kept = stand_ins.Available()
    for problem in (several, planned(ROWS[0]).problem, planned(ROWS[1]).problem, planned(64, 2048).problem):
        kept.ahead(problem, select(problem, HOPPER), HOPPER)
    assert seen == [1] * 4 and len(kept.classes) == 1 and len(kept.weights) == 2


def test_a_forked_child_waits_and_has_none_of_the_workers(gpu: Gpu) -> None:
    call(planned(ROWS[0]))
    child = os.fork()
    if child == 0:
        os._exit(bool(background._available or background._compilers or gpu.compiler.jobs))
    assert os.waitpid(child, 0)[1] == 0 and background._available


@pytest.mark.parametrize(("value", "enabled"), [("0", False), ("1", True)])
def test_one_switch_turns_it_off(monkeypatch: pytest.MonkeyPatch, value: str, enabled: bool) -> None:
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", value)
    assert background.enabled.__wrapped__() == enabled
    monkeypatch.setattr(background.sys, "frozen", True, raising=False)
    assert not background.enabled.__wrapped__()
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", "yes")
    with pytest.raises(ValueError, match="must be 0 or 1, not 'yes'"):
        background.enabled.__wrapped__()


def test_whether_workers_can_leave_binaries(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(background, "cache_folder", lambda: tmp_path / "not" / "made")
    assert background._can_cache.__wrapped__()
    monkeypatch.setattr(os, "access", lambda folder, _: folder != tmp_path)
    assert not background._can_cache.__wrapped__()


def test_waiting_takes_no_negative_time() -> None:
    with pytest.raises(ValueError, match="timeout"):
        triton_gemm.wait_until_compiled(-1)
    with pytest.raises(TypeError, match="timeout"):
        triton_gemm.wait_until_compiled("long")  # type: ignore[arg-type]


def test_a_batch_invariant_product_stands_in_within_its_class(gpu: Gpu) -> None:
    def invariant(M: int) -> plan.GemmPlan:
        problem = GemmProblem.of(*operands(M))
        chosen = plan.policies.choose(problem, HOPPER, invariant=True)
        return plan.GemmPlan(problem, chosen, torch.device("cpu"), background.FirstCalls(HOPPER))

    made: list[Selection] = []
    for M in (1024, 1100, 2000, 3000):
        one = invariant(M)
        call(one)
        if one.first_calls is not None and one.first_calls.stand_in is not None:
            made.append(one.first_calls.stand_in.selection)
            assert bit_class(one.problem, made[-1]) == bit_class(one.problem, one.selection)
    assert made


# --- The compiler of the background ---


def test_few_configurations_are_compared() -> None:
    """The last that were loaded."""
    found, made = stand_ins.Available(), planned(ROWS[0])
    configs = [replace(made.selection.config, num_stages=stages) for stages in range(2, 102)]
    for config in [*configs, configs[99], configs[70]]:
        algorithm = made.selection.algorithm._replace(config=config)
        found.add(HOPPER, made.problem, replace(made.selection, algorithm=algorithm))
    kept = [config for _, config in found.configs]
    assert kept[-2:] == [configs[99], configs[70]] and set(kept) == set(configs[-stand_ins.COMPARED :])


def one_that_waits() -> tuple[Compiler, threading.Event, list[object]]:
    """A compiler that compiles nothing before the event, and what it has compiled."""
    begin, compiled = threading.Event(), []

    def compile(job: object) -> None:
        begin.wait()
        compiled.append(job)

    return Compiler(compile, threads=1), begin, compiled


def test_a_compiler_is_joined_where_a_thread_has_the_job() -> None:
    compiler, begin, compiled = one_that_waits()
    try:
        compiler.join("not added")
        compiler.add([1, 2])
        while not compiler.begun:
            pass
        compiler.join(2)  # which no thread has begun
        threading.Timer(0.05, begin.set).start()
        compiler.join(1)
        assert compiled == [1] and compiler.wait(10) and compiled == [1]
    finally:
        compiler.close()


def test_a_compiler_says_when_all_is_done() -> None:
    compiler, begin, compiled = one_that_waits()
    try:
        assert compiler.wait(0)
        compiler.add([1, 2])
        assert not compiler.wait(0.05)
        compiler.add([3, 4], first=True)
        begin.set()
        assert compiler.wait(10) and compiled == [1, 3, 4, 2]
        for job in compiled:
            compiler.forget(job)
        assert not compiler.begun and not compiler.ended
    finally:
        compiler.close()


class IdleWorker:
    """Notes when a process is started and ended."""

    def __init__(self) -> None:
        self.said: list[str] = []
        self.process: object = None
        self.ended = threading.Event()

    def start(self) -> None:
        self.process = object()
        self.said.append("start")

    def compile(self, job: object, limit_s: float) -> None:
        self.said.append(f"compile {job}")

    def end(self, patience_s: float = 0.0) -> int:
        self.process = None
        self.said.append("end")
        self.ended.set()
        return 0

    def close(self) -> None:
        pass


def test_a_worker_without_a_job_ends_and_another_starts() -> None:
    worker = IdleWorker()
    compiler = Compiler(lambda _: None, lambda: worker, 1, idle_s=0.05)  # type: ignore[arg-type,return-value]
    try:
        for job in (1, 2):
            worker.ended.clear()
            compiler.add([job])
            assert compiler.wait(10) and worker.ended.wait(10)
        assert worker.said == ["start", "compile 1", "end", "start", "compile 2", "end"]
    finally:
        compiler.close()


def test_who_has_no_workers_is_told_once() -> None:
    def lost() -> None:
        raise LostError("no processes")

    worker, said = IdleWorker(), []
    worker.start = lost  # type: ignore[method-assign]
    compiler = Compiler(lambda _: None, lambda: worker, 2, on_lost=said.append)  # type: ignore[arg-type,return-value]
    try:
        compiler.add([1, 2, 3])
        assert compiler.wait(10) and [str(x) for x in said] == ["no processes"]
    finally:
        compiler.close()


def test_workers_compile_what_takes_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """With Triton's compiler and cache and a real process; but for launches all is as on a GPU."""
    made = background._compiler
    gpu = Gpu(monkeypatch)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(background, "_compilers", {})
    monkeypatch.setattr(background, "_compiler", made)
    monkeypatch.setattr(background, "WORKERS", 1)
    monkeypatch.setattr(plan, "compiled", launch.compiled)
    monkeypatch.setattr(plan, "compiled_before", launch.compiled_before)
    first, second, *_ = map(planned, ROWS)
    first.steps[0].launch.kernel.device_caches.pop("sm_90", None)
    try:
        with compiling_for((9, 0)):
            call(first)
            call(second)
            assert gpu.ran[0] is gpu.ran[1]
            assert triton_gemm.wait_until_compiled(60)
            call(second)
    finally:
        for compiler in background._compilers.values():
            compiler.close()
    assert gpu.ran[2] is not gpu.ran[0] and second.compiled and len(background._compilers) == 1
