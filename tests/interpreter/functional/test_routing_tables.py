"""What stays torch's because records or a table show that it is faster."""

from __future__ import annotations

import contextlib
import warnings
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import triton_gemm
from tests.interpreter.functional.test_routing import draw, forget_calls, went
from tests.interpreter.functional.test_routing import fresh as fresh
from tests.support import table_fakes
from tests.support.patches import replace_all
from tests.support.product_checks import fp32_precision
from triton_gemm import tables
from triton_gemm.functional import left_to_torch, routing
from triton_gemm.hardware.device import INTERPRETER
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem, Request
from triton_gemm.runtime import policies
from triton_gemm.selection.select import select


def test_what_records_show_slower_stays_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Small batches of fp32, in IEEE arithmetic alone, and no single matrix. But not where it is named, a predicate
    decides, rows must not matter, or a table has the product."""
    replace_all(monkeypatch, left_to_torch, device_info=lambda _: named_device("h200"), SMALL=8)

    def of(*shape: int, precision: str = "ieee", **rule: Any) -> str:
        x = draw(*shape)
        with fp32_precision(precision), triton_gemm.use(**rule):
            x @ x.mT
        return went()

    slower = "torch: a batch of small float32 takes 1.2 times as long here, untuned"
    assert of(2, 7, 7) == of(2, 3, 7) == of(2, 7, 7, exclude="mm") == slower
    ours = [of(2, 7, 7, **rule) for rule in ({"only": torch.float32}, {"predicate": lambda op, a, b: True})]
    ours += [of(2, 8, 7), of(2, 7, 8), of(7, 7), of(2, 7, 7, precision="tf32")]
    with triton_gemm.batch_invariant():
        ours.append(of(2, 7, 7))
    tuned = SimpleNamespace(source="user's table")
    monkeypatch.setattr(routing.plan, "selection_of", lambda *_: tuned)
    forget_calls()
    assert {*ours, of(2, 7, 7)} == {routing.OURS}


@pytest.fixture
def stored(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Stores that torch is faster at a product of these operands, in a table of this test."""

    def store(*operands: torch.Tensor, faster: bool = True, **request: Any) -> None:
        *_, a, b = operands
        c = torch.empty(*a.shape[:-1], b.shape[-1], dtype=a.dtype)
        problem = Request(**request).problem(a, b, c)
        how = {"us": 2.0, "default_us": 2.0, "torch_us": 1.0 if faster else None}
        assert tables.store(problem, select(problem, INTERPRETER), INTERPRETER, bits="any", **how)

    with table_fakes.default_policy():
        table_fakes.own_folder(tmp_path, monkeypatch)
        yield store
    tables.reload()


BY_TABLE = "torch: faster by table"


@pytest.mark.parametrize("process", [False, True])
def test_torch_computes_what_it_is_faster_at_by_a_table(
    process: bool, stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where tables of any bits are asked, and until the table changes; what a rule names by its dtype is ours."""
    a, b, other = draw(8, 16), draw(16, 8), draw(4, 16)
    stored(a, b)
    expected = torch.mm(a, b)

    def of(x: torch.Tensor, **rule: Any) -> str:
        with triton_gemm.use(**rule):
            torch.mm(x, b)
        return went()

    assert of(a) == routing.OURS, 'bits="same"'
    if process:
        triton_gemm.set_policy("cached", bits="any")
    with contextlib.nullcontext() if process else triton_gemm.policy("cached", bits="any"):
        with monkeypatch.context() as patch:
            patch.setattr(routing.matrices, "compute", None)
            with triton_gemm.use():
                assert torch.equal(torch.mm(a, b), expected) and went() == BY_TABLE
                patch.setattr(routing, "_stays", None)
                patch.setattr(routing.matrices, "problem_of", None)
                assert torch.equal(torch.mm(a, b), expected) and went() == BY_TABLE, "nothing is asked again"
        assert of(other) == of(a, only=torch.float32) == of(a, predicate=lambda op, a, b: True) == routing.OURS
        assert of(a, only="mm") == BY_TABLE
        with triton_gemm.policy("model", bits="any"):
            assert of(a) == routing.OURS
        with triton_gemm.use():
            for faster in (True, False, True):
                stored(a, b, faster=faster)
                for _ in range(2):
                    torch.mm(a, b)
                    assert went() == (BY_TABLE if faster else routing.OURS)


def test_a_table_is_asked_once_about_what_is_ours(stored: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Under any rule, and where each call takes the slow path."""
    a, b, c = draw(8, 16), draw(16, 8), draw(8, 8)
    queries: list[GemmProblem] = []
    monkeypatch.setattr(policies, "torch_is_faster", lambda problem, device: bool(queries.append(problem)))
    with triton_gemm.policy("cached", bits="any"):
        for _ in range(2):
            with triton_gemm.use():
                for _ in range(2):
                    torch.addmm(c, a, b, beta=0.5)
    assert went() == routing.OURS and [problem.has_beta for problem in queries] == [True]


@pytest.mark.parametrize(
    ("call", "request_"),
    [
        (lambda a, b: torch.addmm(torch.ones(8), a, b), {"bias": "n"}),
        (lambda a, b: torch.addmm(torch.ones(8), a, b, beta=2, alpha=3), {"bias": "n"}),
        (lambda a, b: torch.addmm(torch.ones(8, 1), a, b), {"bias": "m"}),
        (lambda a, b: torch.addmm(torch.ones(8, 8), a, b), {"beta": 1.0}),
        (lambda a, b: torch.mm(a, b, out=torch.empty(8, 8)), {}),
        (lambda a, b: a.mT.mT @ b, {}),
    ],
    ids=["bias", "factors", "column", "matrix", "out", "matmul"],
)
def test_a_table_is_asked_about_the_product_that_is_launched(call: Any, request_: dict[str, Any], stored: Any) -> None:
    a, b = draw(8, 16), draw(16, 8)
    expected = call(a, b)
    with triton_gemm.policy("cached", bits="any"), triton_gemm.use():
        call(a, b)
        assert went() == routing.OURS
        stored(a, b, **request_)
        for _ in range(2):
            assert torch.equal(call(a, b), expected) and went() == BY_TABLE


def test_batches_are_asked_about_too(stored: Any) -> None:
    a, b = draw(3, 8, 16), draw(3, 16, 8)
    stored(a, b)
    with triton_gemm.policy("cached", bits="any"), triton_gemm.use():
        torch.bmm(a, b)
        assert went() == BY_TABLE
        torch.baddbmm(draw(3, 8, 8), a, b)
        assert went() == routing.OURS
        torch.mm(torch.empty(0, 16), b[0]), torch.mm(a[0], draw(16, 0))
        assert went() == routing.OURS


def test_torch_is_never_faster_under_batch_invariance_nor_as_another_version(
    stored: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The table's entry is counted as ignored, with the reason."""
    a, b = draw(8, 16), draw(16, 8)
    stored(a, b)
    with triton_gemm.policy("cached", bits="any"), triton_gemm.use():
        with triton_gemm.batch_invariant():
            torch.mm(a, b)
            assert went() == routing.OURS
        assert "user's table: torch is faster, and its bits depend on the number of rows" in tables.ignored()
        torch.mm(a, b)
        assert went() == BY_TABLE
        before = tables.torchs_versions()
        monkeypatch.setattr(tables.queries, "torchs_versions", lambda: "torch 9.9")
        tables.reload()
        torch.mm(a, b)
        assert went() == routing.OURS
        assert f"user's table: {before} is faster, and this is torch 9.9" in tables.ignored()


def test_a_gpu_that_nobody_timed_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(left_to_torch, "INTERPRETED", False)
    for name, count in (("h100", 0), ("a100", 1)):
        monkeypatch.setattr(left_to_torch, "device_info", lambda _, name=name: named_device(name))
        left_to_torch.warn_of_a_guess.cache_clear()
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            for _ in range(2):
                left_to_torch.warn_of_a_guess(torch.device("cuda", 0))
        assert len(seen) == count and all("was not timed on" in str(one.message) for one in seen)
    left_to_torch.warn_of_a_guess.cache_clear()
