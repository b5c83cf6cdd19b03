"""perf.models.learning: how a service is called, and what its records say."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import triton_gemm
from perf.models import learning
from perf.models.tables import LEARNING, OURS
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape


def product(runs: tuple[str, str], **us: float) -> dict[str, Any]:
    times = [[us, name] for name, us in us.items()]
    return {"product": "a GEMM", "times": times, "runs": dict(zip(("0", "100"), runs, strict=True))}


RECORD = {
    **{"seed": 3, "rate": 500.0, "load": 0.25},
    "host_us": {"before": [7.0, 40.0, 200.0], "learning": [7.1, 50.0, 900.0]},
    "products": [product(("a", "b"), a=12.0, b=10.0, c=11.0), product(("a", "z"), a=10.0, b=20.0)],
}
MODELS = {"minute": 20.0, "models": {"llama": {OURS: [100.0, 200.0, 300.0], LEARNING: [90.0, 195.0, 303.0]}}}


def test_regrets_are_over_the_fastest_and_what_was_not_timed_is_left_out() -> None:
    assert learning.regrets(RECORD["products"], "0") == pytest.approx([0.2, 0.0])  # type: ignore[arg-type]
    assert learning.regrets(RECORD["products"], "100") == [0.0]  # type: ignore[arg-type]


def test_tables_have_what_is_recorded() -> None:
    text = learning.text(RECORD, MODELS)
    assert "| 2, seed 3 | 500 | 0.25 | 0 | 10.00 % | 20.0 % | 2 |" in text
    assert "| 2, seed 3 | 500 | learning | 7.1 | 50 | 900 |" in text
    assert "| llama | 20 | 108 | 100 | 1.200 | 1.080 |" in text
    assert learning.text(MODELS).count("\n") == 2


def test_a_service_calls_all_alike_mixed_and_with_gaps(monkeypatch: pytest.MonkeyPatch) -> None:
    called: list[int] = []
    slept: list[float] = []
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    made = [torch.empty(M, 8) for M in (1, 2, 3)]
    monkeypatch.setattr(learning, "operands", lambda x, *_: [(made[x.M - 1], made[0], made[0])])
    monkeypatch.setattr(triton_gemm, "matmul", lambda a, b: called.append(len(a)))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr("time.sleep", slept.append)
    service = learning.Service([gemm_problem(Shape(M, 8, 8), "bf16") for M in (1, 2, 3)], 1000.0, 0)
    assert service.run(80, end=0.0) == [] and len(service.run(80)) == 240 and service.run(80) == []
    assert [called.count(M) for M in (1, 2, 3)] == [80, 80, 80] and called[:24] != sorted(called[:24])
    assert 0.12 < sum(slept) < 0.36 and len({*slept}) > 5


def test_quantiles_are_in_microseconds() -> None:
    assert learning.quantiles([i / 1e6 for i in range(2000)]) == [1000.0, 1998.0, 1999.0]
