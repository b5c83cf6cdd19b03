"""Which kernel runs until a product's own kernel is compiled."""

from __future__ import annotations

import pickle
from dataclasses import replace

import pytest
import torch

from tests.support.fake_compiler import ROWS, Gpu, K, N, available, call, operands, own, own_jobs, planned
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.learning.candidates import predicted_us
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import background, binaries, kits, plan, stand_ins
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, given, illegal


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


def test_what_is_much_slower_does_not_stand_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Than 1.5 times and 5 ms; of less time than that a wait for the compiler would lose more."""
    call(planned(ROWS[0]))
    second = planned(ROWS[3])
    other = available().nearest(second.problem, second.selection, HOPPER)
    times = [predicted_us(second.problem, HOPPER, x) for x in (second.selection, other)]
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
    made, alone = planned(ROWS[3]), []
    call(made)
    for M in ROWS[:3]:
        one = stand_ins.Available()
        one.add(HOPPER, planned(M).problem, planned(M).selection)
        alone.append(one.nearest(made.problem, made.selection, HOPPER))
    assert made.first_calls.stand_in.selection == min(alone, key=lambda x: predicted_us(made.problem, HOPPER, x))


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


def kit_of(patch: pytest.MonkeyPatch, *held: object, others: tuple[str, ...] = ()) -> None:
    """A kit of these binaries is used, which the installed Triton compiled, or another version."""
    replace_all(patch, kits, made=lambda _: [] if others else ["a kit"], others=lambda _: [*others])
    patch.setattr(kits, "holds", lambda problem, device, x: {*held}.issuperset(binaries.identities(device, problem, x)))


def a_slower_one(made: plan.GemmPlan) -> Selection:
    """In the class of bits of a plan's choice."""
    *_, found = stand_ins.alike(made.problem, made.selection, HOPPER, (), True)
    assert found.algorithm != made.selection.algorithm
    return found


@pytest.mark.parametrize("invariant", [False, True])
def test_a_kit_s_kernel_stands_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch, invariant: bool) -> None:
    """Nothing waits: neither for the compiler nor for Triton's first look into its cache, which has the kernel."""
    made = planned(ROWS[0])
    if invariant:
        made.selection = plan.policies.choose(made.problem, HOPPER, invariant=True)
        made = plan.GemmPlan(made.problem, made.selection, torch.device("cpu"), background.FirstCalls(HOPPER))
    held = binaries.identities(HOPPER, made.problem, a_slower_one(made))
    kit_of(monkeypatch, *held)
    gpu.warm = False
    gpu.cached.update(own(made))
    call(made)
    assert gpu.ran == [*held] and not gpu.compiler.jobs
    call(made)
    assert gpu.ran == [*held] * 2 and own_jobs(gpu, made) and not gpu.waited[1:]
    gpu.end()
    call(made)
    assert gpu.ran[2:] == own(made) and background.counts == {"stand-in": 1}


def test_without_a_stand_in_a_call_looks_into_the_cache(gpu: Gpu) -> None:
    """It waits for that, and not for the compiler. A call that must not wait waits for neither."""
    first, second = planned(ROWS[0]), planned(ROWS[1])
    gpu.warm = False
    gpu.cached.update([*own(first), *own(second)])
    with background.first_calls("raise"), pytest.raises(background.WouldWaitError):
        call(first)
    assert not gpu.ran
    call(second)
    assert gpu.ran == own(second) and not gpu.waited and background.counts == {"raised": 1, "loaded": 1}


def test_another_triton_s_kit_does_not_stand_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its bits were never compared with those of what the installed one compiles."""
    made = planned(ROWS[0])
    kit_of(monkeypatch, *binaries.identities(HOPPER, made.problem, a_slower_one(made)), others=("3.8",))
    call(made)
    assert gpu.ran == gpu.waited == own(made)


def test_few_configurations_are_compared() -> None:
    """The last that were loaded."""
    found, made = stand_ins.Available(), planned(ROWS[0])
    configs = [replace(made.selection.config, num_stages=stages) for stages in range(2, 102)]
    for config in [*configs, configs[99], configs[70]]:
        algorithm = made.selection.algorithm._replace(config=config)
        found.add(HOPPER, made.problem, replace(made.selection, algorithm=algorithm))
    kept = [config for _, config in found.configs]
    assert kept[-2:] == [configs[99], configs[70]] and set(kept) == set(configs[-stand_ins.COMPARED :])


def test_what_no_plan_waits_for_is_forgotten(gpu: Gpu) -> None:
    """So that problems that come once take no memory for ever."""
    call(planned(ROWS[0]))
    plans = [planned(M) for M in ROWS[1:]]
    for made in plans:
        call(made)
    assert len(available().wanted) == len(plans)
    kept = plans[0]
    plans.clear()
    del made
    assert [*available().wanted] == [tuple(own(kept))]


def test_a_worker_is_sent_the_job_alone(gpu: Gpu) -> None:
    made = planned(ROWS[0])
    wanted = available().want(tuple(own(made)), gpu.compiler, (made.problem, made.selection))
    assert pickle.loads(pickle.dumps(wanted)) == (made.problem, made.selection)
