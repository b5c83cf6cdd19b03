"""Entries for a range of rows: which M they serve, and with which tiles dealt out."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings
from hypothesis import strategies as st

from tests.support import table_fakes
from tests.support.table_fakes import HOPPER, another, problem_of
from triton_gemm import tables
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import policies
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import given, illegal, predicted, select
from triton_gemm.tables import files, weights
from triton_gemm.tables.files import Table
from triton_gemm.tables.weights import dealt_out_for

MOST, FEWEST = 512, 385
N, K = 6144, 4096


def store(gain: float = 2.0, problem: GemmProblem | None = None, **how: Any) -> None:
    problem = problem or problem_of(MOST, N, K)
    how = {"us": 1.0, "default_us": gain, "least_rows": FEWEST, **how}
    assert tables.store(problem, another(problem), HOPPER, **how)


def lookup(M: int, **how: Any) -> Any:
    return tables.lookup(problem_of(M, N, K), HOPPER, **how)


def test_an_entry_serves_its_range_alone(folder: Path) -> None:
    store()
    assert [M for M in range(300, 600) if lookup(M)] == [*range(FEWEST, MOST + 1)]
    assert tables.lookup(problem_of(450, N, K, torch.float16), HOPPER) is None
    assert tables.lookup(problem_of(450, N, K + 64), HOPPER) is None
    found = lookup(450)
    assert found.source == "user's table" and "for 385 rows and more" in found.reason
    tables.clear(), store(least_rows=0)
    assert [M for M in range(300, 600) if lookup(M)] == [MOST], "its own rows, without a range"


def test_an_exact_entry_goes_first(folder: Path) -> None:
    store()
    exact = problem_of(450, N, K)
    assert tables.store(exact, another(exact, 3), HOPPER, us=1.0, default_us=1.5)
    assert lookup(450).config == another(exact, 3).config and lookup(449) and lookup(451)


def test_tiles_are_dealt_out_for_the_rows_of_the_call(folder: Path) -> None:
    """Every selection can run, and has the algorithm of the entry but for that."""
    store()
    entry = another(problem_of(MOST, N, K)).algorithm
    for M in range(FEWEST, MOST + 1):
        found, problem = lookup(M), problem_of(M, N, K)
        assert found.algorithm._replace(work=entry.work) == entry
        assert found.work.items(found.config.tiles(M, N)) >= found.work.programs
        assert illegal(problem, HOPPER, Candidate(given(problem, found.algorithm), found.algorithm)) is None


def test_bits_are_those_of_the_models_choice_for_these_rows(folder: Path) -> None:
    store()
    with table_fakes.default_policy():
        served = 0
        for M in range(FEWEST, MOST + 1, 3):
            problem = problem_of(M, N, K)
            found = policies.choose(problem, HOPPER)
            assert bit_class(problem, found) == bit_class(problem, select(problem, HOPPER))
            served += found.source == "user's table"
    assert served


def test_what_is_predicted_to_have_lost_its_gain_is_left_to_the_model(folder: Path) -> None:
    store(gain=1.001)
    own = lost(MOST)
    for M in range(FEWEST, MOST):
        assert (lookup(M) is not None) == (lost(M) <= own * 1.001), M
    assert any(lookup(M) for M in range(FEWEST, MOST)) and not all(lookup(M) for M in range(FEWEST, MOST))


def lost(M: int) -> float:
    """The predicted time of the entry's algorithm for M rows, by that of the model's choice."""
    problem = problem_of(M, N, K)
    algorithm = dealt_out_for(problem, another(problem_of(MOST, N, K)).algorithm, HOPPER)
    algorithms = algorithm, select(problem, HOPPER).algorithm
    own, choice = (predicted(problem, Candidate(given(problem, x), x), model_of(HOPPER)) for x in algorithms)
    return own / choice


@settings(max_examples=40, deadline=None)
@drawn(st.integers(1, 3000), st.integers(1, 3000))
def test_k_is_cut_alike_for_other_rows(M: int, other: int) -> None:
    """So that no bit depends on which number of rows was measured, where both are cut into as many parts."""
    problem, requested = problem_of(M, 1536, 7168), problem_of(other, 1536, 7168)
    algorithm = select(problem, HOPPER).algorithm
    found = dealt_out_for(requested, algorithm, HOPPER)
    if found is not None and not isinstance(found.work, int):
        assert (found.work.split_k, found.work.reduction) == (algorithm.work.split_k, algorithm.work.reduction)


def test_only_rows_of_single_row_major_matrices_are_of_a_weight() -> None:
    problem = problem_of(MOST, N, K)
    assert weights.weight_of(problem) == weights.weight_of(replace(problem, M=7))
    assert weights.weight_of(replace(problem, batch=2)) is None
    assert weights.weight_of(problem.swap_ab()) is None


def test_files_hold_ranges_and_older_ones_none(folder: Path) -> None:
    store()
    table = Table(tables.GpuKey.of(HOPPER))
    text = (folder / table.name).read_text()
    assert '"least_rows": 385' in text
    read = files.parse(text.encode()).table
    assert read is not None and read.text() == text
    older = files.parse(text.replace(', "least_rows": 385', "").encode()).table
    assert older is not None and "least_rows" not in older.text() and not older.by_weight
    wrong = files.parse(text.replace("385", "-1").encode())
    assert wrong.wrong is not None and "it serves -1 rows" in wrong.wrong[1]


def test_torch_is_faster_only_for_the_rows_it_was_timed_with(folder: Path) -> None:
    store(bits="any", torch_us=0.5)
    assert tables.torch_is_faster(problem_of(MOST, N, K), HOPPER)
    fewer = problem_of(MOST - 1, N, K)
    assert tables.lookup(fewer, HOPPER, "any") is not None and not tables.torch_is_faster(fewer, HOPPER)


def test_the_fingerprint_of_tables_knows_ranges(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where an entry does not serve the M that was measured: it may serve fewer rows."""
    empty = tables.contents(HOPPER)
    store(least_rows=0)
    before = tables.contents(HOPPER)
    store()
    assert tables.contents(HOPPER) != before
    monkeypatch.setattr(tables.queries, "serves", lambda *_: False)
    tables.reload()
    assert tables.contents(HOPPER) != empty
