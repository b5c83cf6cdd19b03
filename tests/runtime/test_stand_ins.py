"""Which kernel runs until a product's own kernel is compiled, and which kernels are compiled ahead of time."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from tests.support.fake_compiler import ROWS, SPLIT, Gpu, K, N, available, call, operands, own, planned
from tests.support.table_fakes import HOPPER
from triton_gemm import kernels
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, plan, stand_ins, step
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, given, illegal, predicted, select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape


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


def test_nothing_is_compiled_ahead_of_batches_and_transposed_results(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whose layouts depend on the number of rows."""
    monkeypatch.setattr(stand_ins, "AHEAD", (64, 128, 256))
    a, b, c = (
        torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((99, 7168), (7168, 640), (640, 99))
    )
    for views in ((a, b, c.t()), (a.expand(2, 99, 7168), b.expand(2, 7168, 640), c.new_empty(2, 99, 640))):
        problem = GemmProblem.of(*views)
        selection = select(problem, HOPPER)
        made = plan.GemmPlan(problem, selection, torch.device("cpu"), background.FirstCalls(HOPPER))
        gpu.waited.clear()
        made.run(*views)
        assert not gpu.compiler.jobs and gpu.waited == own(made)


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
    gpu, made, compiled = Gpu(monkeypatch, quick=True), planned(ROWS[0]), step.compiled

    def fail_once(*arguments: Any) -> object:
        monkeypatch.setattr(step, "compiled", compiled)
        raise RuntimeError("PassManager::run failed")

    monkeypatch.setattr(step, "compiled", fail_once)
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


def test_few_configurations_are_compared() -> None:
    """The last that were loaded."""
    found, made = stand_ins.Available(), planned(ROWS[0])
    configs = [replace(made.selection.config, num_stages=stages) for stages in range(2, 102)]
    for config in [*configs, configs[99], configs[70]]:
        algorithm = made.selection.algorithm._replace(config=config)
        found.add(HOPPER, made.problem, replace(made.selection, algorithm=algorithm))
    kept = [config for _, config in found.configs]
    assert kept[-2:] == [configs[99], configs[70]] and set(kept) == set(configs[-stand_ins.COMPARED :])


def test_more_may_be_wanted_while_what_is_wanted_is_ordered() -> None:
    """By a call in a handler of signals."""
    made, ordered = stand_ins.Available(), []

    class Interrupted:
        def add(self, jobs: list[Any]) -> None:
            ordered.extend(jobs)
            made.wait_for(f"after {jobs[0]}", self, jobs[0] + 1)  # type: ignore[arg-type]

    made.wait_for("first", Interrupted(), 0)  # type: ignore[arg-type]
    made.order_all()
    assert ordered == [0]
    made.order_all()
    assert ordered == [0, 1]
