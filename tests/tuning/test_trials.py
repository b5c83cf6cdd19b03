"""Which candidate wins: against noise, ties, drift and failures; and within its time."""

from __future__ import annotations

import random
from collections.abc import Callable
from itertools import pairwise
from math import exp
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.lab_fakes import REPLAY_S, Kernels
from tests.support.patches import noted
from triton_gemm.tuning import trials
from triton_gemm.tuning.trials import FailedError, TrialResult

BUDGET_S = 4.0


def world(seed: int, count: int = 20, spread: float = 0.15) -> list[float]:
    """Times of candidates in the order of a model that is off by 10 %: the more, the rarer, as in measurements."""
    rng = random.Random(seed)
    times = [exp(rng.expovariate(1 / spread)) for _ in range(count)]
    return sorted(times, key=lambda time: time * exp(rng.gauss(0, 0.1)))


def run(times: list[float], seed: int = 0, budget_s: float = BUDGET_S, **how: Any) -> TrialResult[int]:
    before = how.pop("before", None)
    kernels = Kernels(times.__getitem__, seed, **how)
    kernels.compile(range(len(times)))
    return trials.run_trials(range(len(times)), kernels, budget_s, before=before)


@pytest.mark.parametrize("spread", [0.15, 0.3])
def test_a_second_run_picks_the_same_and_what_is_picked_is_fast(spread: float) -> None:
    """In 95 of 100 worlds the same, and in 99 within 1 % of the fastest."""
    same = near = within = 0
    worlds = 300
    for seed in range(worlds):
        times = world(seed, spread=spread)
        first, second = (run(times, 2 * seed + i).winner for i in range(2))
        same += first == second
        near += abs(times[first] / times[second] - 1) <= 0.01
        within += times[first] <= 1.01 * min(times)
    assert same >= 0.95 * worlds and near >= 0.99 * worlds and within >= 0.99 * worlds, (same, near, within)


def test_who_won_before_wins_again() -> None:
    """Ties are then decided for it, so that tuning again changes next to nothing."""
    same = 0
    worlds = 200
    for seed in range(worlds):
        times = world(seed, spread=0.05)
        first = run(times, 2 * seed).winner
        same += run(times, 2 * seed + 1, before=first).winner == first
    assert same >= 0.96 * worlds, same


def test_equal_candidates_leave_the_model_its_choice() -> None:
    assert all(run([1.0] * 12, seed).winner == 0 for seed in range(100))


@pytest.mark.parametrize(("gain", "wins"), [(0.002, False), (0.03, True)])
def test_a_winner_is_faster_by_more_than_noise(gain: float, wins: bool) -> None:
    found = [run([1.0, 1 - gain], seed) for seed in range(100)]
    assert sum(one.winner == 1 for one in found) == (100 if wins else 0)
    assert all(0 <= one.noise < 0.01 for one in found)


def test_what_is_too_noisy_to_tell_changes_nothing() -> None:
    found = [run([1.0, 1.0], seed, noise=0.3, budget_s=0.5).winner for seed in range(400)]
    assert sum(found) <= 4


def test_a_clock_that_falls_during_the_race_misleads_no_one() -> None:
    times = [1.0, 0.9, 1.1]
    for seed in range(20):
        kernels = Kernels(times.__getitem__, seed)
        kernels.slow = lambda now: 1.0 if now < 0.3 else 1.5
        found = trials.run_trials(range(3), kernels, BUDGET_S)
        assert found.winner == 1
        assert found.ms / found.incumbent_ms == pytest.approx(0.9, rel=0.01)


def test_times_are_those_of_one_clock() -> None:
    """Those of candidates that left the race before the clock fell, too."""
    times = [1.0, *(1.02 + 0.01 * i for i in range(20))]
    for seed in range(1, 6):  # in 0 the incumbent is disturbed in two of six rounds
        kernels = Kernels(times.__getitem__, seed, noise=0.002)
        kernels.compile(range(len(times)))
        kernels.slow = lambda now: 1.0 + 0.1 * now
        found = trials.run_trials(range(len(times)), kernels, BUDGET_S)
        ratios = {candidate: ms / found.times[0] for candidate, ms in found.times.items()}
        assert len(ratios) == len(times) > len(kernels.dropped) > 10
        assert ratios == {candidate: pytest.approx(time, rel=0.01) for candidate, time in enumerate(times)}


def test_of_equally_fast_ones_the_first_wins() -> None:
    times = [1.2, 1.0, 1.001, 1.0, 1.3]
    assert {run(times, seed).winner for seed in range(50)} == {1}


def test_the_slow_are_left_out_and_the_broken_named() -> None:
    times = [1.0, 5.0, 0.9, 0.95, 0.5]
    kernels = Kernels(times.__getitem__, broken=lambda candidate: "it is broken" if candidate == 4 else None)
    found = trials.run_trials(range(5), kernels, BUDGET_S)
    assert found.winner == 2 and found.failed == {4: "it is broken"}
    assert 1 in kernels.dropped and 4 not in kernels.timed
    assert found.timed == 4 and not found.untried
    assert found.once == {1: pytest.approx(times[1] * found.times[0], rel=0.2)}
    timed = {candidate: ms / found.times[0] for candidate, ms in found.times.items()}
    assert timed == {candidate: pytest.approx(times[candidate], rel=0.01) for candidate in (0, 2, 3)}


def test_without_the_incumbent_there_is_no_race() -> None:
    with pytest.raises(FailedError, match="broken"):
        trials.run_trials(range(2), Kernels([1.0, 1.0].__getitem__, broken=lambda candidate: "broken"), BUDGET_S)


def test_what_is_compiled_is_timed_while_others_are_compiled() -> None:
    times = [1.0] + [1.5] * 8 + [0.8]
    kernels = Kernels(times.__getitem__, compile_s=0.2)
    kernels.compile(range(10))
    steps: list[tuple[int, int]] = []
    found = trials.run_trials(range(10), kernels, 10.0, progress=lambda timed, count, *_: steps.append((timed, count)))
    assert found.winner == 9 and steps[0] == (2, 10) and len(steps) > 5
    # Who is compiled too late is not waited for, and counted.
    kernels = Kernels(times.__getitem__, compile_s=1.0)
    kernels.compile(range(10))
    found = trials.run_trials(range(10), kernels, 5.0)
    assert found.winner == 0 and len(found.untried) == 8 and kernels.clock < 5.5


@settings(max_examples=100, deadline=None)
@given(st.integers(0, 2**31), st.integers(1, 40), st.floats(0.01, 8.0), st.floats(0.0, 0.2), st.floats(0.001, 0.05))
def test_it_ends_in_time(seed: int, count: int, budget_s: float, compile_s: float, noise: float) -> None:
    """But for one compilation, the rounds of a heat, and the few that a final has at least."""
    kernels = Kernels(world(seed, count).__getitem__, seed, noise=noise, compile_s=compile_s)
    kernels.compile(range(count))
    found = trials.run_trials(range(count), kernels, budget_s)
    rounds = trials.FIRST_ROUNDS * trials.AT_ONCE + trials.LEAST_ROUNDS * trials.FINALISTS
    assert kernels.clock <= budget_s + compile_s + rounds * REPLAY_S + trials.AT_ONCE * 0.01 + trials.PAUSE_S + 1e-9
    assert found.timed + len(found.untried) == count
    assert found.fastest_ms <= found.ms * (1 + 1e-9) or found.winner == 0


def test_a_mistake_would_be_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted: the fastest of a few rounds is taken, whatever the noise."""

    def naive(logs: Any, incumbent: int, defends: bool) -> Any:
        found = judge(logs, incumbent, False)
        return trials._Verdict(found.fastest, found.fastest, True, found.out, 0.0, found.fastest != incumbent)

    judge: Callable[..., Any] = trials._judge
    monkeypatch.setattr(trials, "_judge", naive)
    assert any(run([1.0] * 12, seed).winner != 0 for seed in range(20))
    same = sum(run(world(seed), 2 * seed).winner == run(world(seed), 2 * seed + 1).winner for seed in range(100))
    assert same < 95


def test_who_enters_is_timed_against_the_incumbent_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """And who is far too slow is not."""
    kernels = Kernels([1.0, 1.1, 9.0, 0.9, 1.05, 1.2, 0.95].__getitem__)
    heats = noted(monkeypatch, kernels, "time", lambda candidates, rounds: (list(candidates), rounds))
    field = trials._Trials(range(7), kernels, None, None)
    field.add(0)
    field.run_first_rounds(BUDGET_S)
    assert all(
        some[0] == 0 and 1 < len(some) <= trials.AT_ONCE and rounds == trials.FIRST_ROUNDS for some, rounds in heats
    )
    assert sorted(candidate for some, _ in heats for candidate in some[1:]) == [1, 3, 4, 5, 6]
    assert sorted(field.ms) == [0, 1, 3, 4, 5, 6] and kernels.dropped == [2] and field.timed == 7


def test_rounds_double_as_the_field_halves(monkeypatch: pytest.MonkeyPatch) -> None:
    """So that each halving takes as long as the one before."""
    kernels = Kernels([1 + 0.01 * i for i in range(40)].__getitem__)
    field = trials._Trials(range(40), kernels, None, None)
    field.add(0)
    field.run_first_rounds(1000.0)
    halves = noted(monkeypatch, kernels, "time", lambda candidates, rounds: (len(candidates), rounds))
    field.run_halving_rounds(1000.0)
    assert len(halves) >= 3 and halves[0][1] == 2 * trials.FIRST_ROUNDS
    for (before, some), (after, more) in pairwise(halves):
        assert after <= max(trials.FINALISTS, -(-before // 2)) and more == 2 * some


def test_the_deviation_is_that_of_the_middle_half() -> None:
    """By hand: of 0 to 7, clipped to 2 and 5, the variance is 14 / 7, and half of the rounds are kept."""
    assert trials.deviation([3.0, 0.0, 1.0, 7.0, 6.0, 2.0, 4.0, 5.0]) == pytest.approx((2 / 8) ** 0.5 / (4 / 8))
    assert trials.deviation([1.0, 4.0, 2.0]) == 3.0, "of few rounds it is their range"
    assert trials.deviation([1.0, 2.0, 2.0, 3.0]) == pytest.approx(0.0, abs=1e-8)
    assert trials.deviation([2.0]) == trials.deviation([2.0] * 9) == 1e-9


def test_a_final_goes_on_until_the_chosen_one_is_surely_on_its_side() -> None:
    slow, fastest = [0.5] * 8, [-0.001] * 8
    noisy = [0.1, -0.1] * 4
    verdict = trials._judge([slow, noisy, fastest], incumbent=0, defends=False)
    assert (verdict.chosen, verdict.fastest, verdict.clear) == (1, 2, False)
    quiet = trials._judge([slow, [0.0] * 8, fastest], incumbent=0, defends=False)
    assert (quiet.chosen, quiet.clear, quiet.beaten, quiet.out) == (1, True, False, (True, False, False))
