"""Races by noisy samples, and what they make of committed records of all candidates."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import cache
from math import exp
from pathlib import Path
from statistics import fmean

import pytest

from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.learning.block import LAUNCHES
from triton_gemm.learning.halving import MOST, Halving
from triton_gemm.learning.statistics import SHARE
from triton_gemm.problem import GemmProblem, problem_text
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, ranked
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named

RESULTS = Path(__file__).parents[2] / "perf/results"
NOISE = 0.04  # of a sample: as was measured inside a model
CHECK = 2.0  # launches that comparing a candidate's result costs


def race(times: Sequence[float], predicted: Sequence[float], seed: int = 0, budget: float = 1e9) -> Halving:
    """Of kernels that take so long, until it is over or `budget` launches of the incumbent are spent."""
    found, rng = Halving(predicted), random.Random(seed)
    budget -= CHECK * len(times)
    while found.winner is None:
        which = found.next()
        budget -= LAUNCHES * times[which] / times[0]
        if budget < 0:
            break
        found.add(which, times[which] * exp(rng.gauss(0, NOISE)))
    return found


def test_the_fastest_wins_and_equals_do_not() -> None:
    fast = [race([20, 21, 22, 18, 23, 24, 21, 20], [1.0] * 8, seed).winner for seed in range(200)]
    assert fast.count(3) >= 190
    equal = [race([20] * 8, [1.0] * 8, seed).winner for seed in range(400)]
    assert equal.count(0) >= 380
    slower = [race([20, *[20.4] * 7], [1.0, *[0.9] * 7], seed).winner for seed in range(200)]
    assert slower.count(0) == 200, "whatever the model says"


def test_candidates_are_dropped_and_few_are_enough() -> None:
    assert Halving([1.0]).winner == 0
    found = Halving([1.0, 1.0, 1.0])
    assert found.next() == 0
    found.add(0, 20.0)
    found.add(1, 31.0)
    assert found.left == [0, 2], "it is too slow at once"
    found.drop(0)
    assert found.left == [0, 2], "the incumbent stays"
    found.drop(2)
    assert found.winner == 0


def test_turns_alternate() -> None:
    found, order = Halving([1.0] * 3), []
    while found.winner is None and len(order) < 6:
        order.append(found.next())
        found.add(order[-1], 20.0)
    assert order == [0, 1, 2, 2, 1, 0]


def problem_named(text: str) -> GemmProblem | None:
    """The problem of a record, which has its sizes and layout; None for what says more."""
    sizes, _, layout, *_ = text.split()
    *batch, M, N, K = map(int, sizes.split("x"))
    shape = Shape(M, N, K, layout=layout, batch=batch[0] if batch else None)  # type: ignore[arg-type]
    found = gemm_problem(shape, "bf16")
    return found if problem_text(found) == text else None


@cache
def recorded(gpu: str, device: str, seed: int) -> list[list[tuple[float, float]]]:
    """Of products that were drawn and tuned: (predicted, measured) microseconds of each candidate in the bit class of
    the choice, which is first, in the model's order."""
    record = json.loads((RESULTS / gpu / f"tuning/3.9.0/unseen-{seed}.json").read_text())
    found = []
    with forms.of_kits():
        for product in record["products"]:
            us = {name: us for us, name in product["times"]}
            problem = problem_named(product["product"])
            candidates: dict[str, tuple[float, str]] = {}
            for predicted, candidate in [] if problem is None else ranked(problem, named_device(device), True):
                name = named(Selection.of(candidate, ""))
                if name in us:
                    candidates.setdefault(name, (predicted, bit_class(problem, candidate)))  # type: ignore[arg-type]
            first = next(iter(candidates), None)
            if first is not None:
                found.append([(x, us[name]) for name, (x, of) in candidates.items() if of == candidates[first][1]])
    return found


@pytest.mark.parametrize(
    ("gpu", "device", "seed"), [("h200", "h200", 11), ("h100-80gb-hbm3", "h100", 11), ("h100-80gb-hbm3", "h100", 12)]
)
def test_regret_after_26000_calls(gpu: str, device: str, seed: int) -> None:
    """Of what is learned in the share of the time that races may take, over the fastest of the class."""
    products = recorded(gpu, device, seed)
    assert len(products) > 150
    picks, learned = [], []
    for number, candidates in enumerate(products):
        least = min(us for _, us in candidates)
        raced = candidates[:MOST]
        found = race([us for _, us in raced], [x / raced[0][0] for x, _ in raced], number, SHARE * 26_000)
        picks.append(raced[0][1] / least - 1)
        learned.append(raced[found.winner or 0][1] / least - 1)
    assert fmean(picks) > 0.015
    assert fmean(learned) < 0.014 and fmean(learned) < fmean(picks) / 2
