"""Digests of random calls are the same in each pass, and a wrong bit changes them."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support.call_digests import FUNCTIONS, Run, difference, drawn, run_passes
from tests.support.random_products import SMALL, Problem
from triton_gemm.runtime import plan


def of_calls(passes: int) -> Run:
    return run_passes(drawn(0, len(FUNCTIONS), SMALL, ()), passes, "cpu")


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_calls_have_the_same_digests_again() -> None:
    calls = drawn(0, len(FUNCTIONS), SMALL, ())
    assert calls == drawn(0, len(FUNCTIONS), SMALL, ()) != drawn(1, len(FUNCTIONS), SMALL, ())
    run = of_calls(2)
    assert difference({"one": run, "other": of_calls(1)}) is None
    assert len(set(run["digests"][0])) == len(FUNCTIONS) and sum(run["launches"][1]) > len(FUNCTIONS)
    assert {call.trained for call in drawn(0, 100)} == {"", "all", "a", "b"}
    routed = {call.what.operation for call in drawn(0, 500) if isinstance(call.what, Problem) and call.routed}
    assert routed == {"mm", "matmul", "addmm", "linear", "bmm", "baddbmm"}


@pytest.mark.filterwarnings("ignore:invalid value", "ignore:overflow")
def test_a_wrong_element_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is planted in one product of a second run. `difference` names that product's call."""
    before = of_calls(1)
    which = next(i for i, launches in enumerate(before["launches"][0]) if launches and i > 3)
    launched, compute = 0, plan.InterpretedPlan.run

    def wrong(self: Any, a: Any, b: Any, c: Any, *more: Any) -> None:
        nonlocal launched
        launched += 1
        compute(self, a, b, c, *more)
        if launched == sum(before["launches"][0][: which + 1]):
            c.view(-1)[-1:] += 1

    monkeypatch.setattr(plan.InterpretedPlan, "run", wrong)
    assert (
        difference({"before": before, "after": of_calls(1)}) == f"after, pass 1: other bits in {before['calls'][which]}"
    )
