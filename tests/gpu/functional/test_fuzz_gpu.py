"""A few thousand products drawn at random on the GPU, the same every time, and each rule that only a GPU has.
`make gpu-fuzz` draws others, for as long as it is told."""

from __future__ import annotations

import os
import time
from collections.abc import Iterator

import pytest
import torch

from tests import fuzz
from tests.fuzz import Calls
from tests.support.random_products import VALUES, Problem

PROBLEMS = (
    Problem(operation="mm", size=(333, 520, 1064), dtype="bfloat16", orders="ntn"),
    Problem(operation="mm", size=(130, 264, 129), precision="bf16x6", offset=1),
    Problem(operation="addmm", size=(33, 64, 264), dtype="float16", out=True, added="out", beta=2),
    Problem(operation="grouped rows", size=(333, 264, 64), dtype="bfloat16", ends=(0.25, 0.25, 0.9)),
    Problem(operation="linear", size=(16, 264, 1064), dtype="bfloat16", added="row", activation="gelu"),
)


@pytest.fixture(autouse=True)
def nothing_stays_planned() -> Iterator[None]:
    yield
    fuzz.forget()


@pytest.mark.parametrize("share", range(8))
def test_products_drawn_at_random(share: int) -> None:
    fuzz.fuzz(1000 * share, 5, 30)


@pytest.mark.slow
@pytest.mark.skipif("BATTERY_DEADLINE" not in os.environ, reason="`make gpu-battery` draws others for minutes")
def test_products_drawn_for_minutes() -> None:
    """In processes of its own, for 0.4 of the time that the battery has."""
    left = float(os.environ["BATTERY_DEADLINE"]) - time.time()
    jobs = max(1, len(os.sched_getaffinity(0)) // 4)
    assert fuzz.main(["--jobs", str(jobs), "--minutes", f"{0.4 * left / 60:.2f}"]) == 0


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.operation)
def test_every_way_to_call(problem: Problem) -> None:
    """In a graph with other values, on another stream, through torch, with other strides, and planned anew."""
    calls = Calls()
    try:
        calls.begin(precision="tf32")
        calls.capture(problem=problem)
        calls.multiply(problem=problem, values="normal", seed=1)
        for seed, values in enumerate(VALUES):
            calls.replay(which=0, values=values, seed=seed)
            calls.on_a_stream(which=0, values=values, seed=seed)
            calls.again(which=0, values=values, seed=seed)
        calls.lying_otherwise(which=0, orders="ttn", gap=3, step=2, values="normal", seed=2)
        calls.forget()
        calls.in_precision(precision="ieee", which=0, values="normal", seed=3)
        if problem.operation in fuzz.ROUTED:
            calls.through_torch(which=0, values="normal", seed=4)
    finally:
        calls.teardown()
    torch.cuda.synchronize()


def test_a_wrong_result_on_the_gpu_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """As all of it waits on the GPU until an example ends."""
    run = fuzz.plan.GemmPlan.run

    def wrong(self: fuzz.plan.GemmPlan, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, *more: object) -> None:
        run(self, a, b, c, *more)  # type: ignore[arg-type]
        if c.is_floating_point() and c.numel():
            c[(-1,) * c.dim()] += 1

    monkeypatch.setattr(fuzz.plan.GemmPlan, "run", wrong)
    with pytest.raises(AssertionError) as caught:
        for number in range(5):
            fuzz.fuzz(number, 5, 10)
    assert "calls.multiply(problem=Problem(" in caught.value.found  # type: ignore[attr-defined]
