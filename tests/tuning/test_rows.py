"""Tuning weights for ranges of rows: what is measured, what is timed, and what is served then."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.lab_fakes import FakeLab
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import tables, tuning
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select
from triton_gemm.tables.records import illegal
from triton_gemm.tuning import rows
from triton_gemm.tuning.candidates import candidates
from triton_gemm.tuning.journal import Journal
from triton_gemm.tuning.session import Session, Wishes

WEIGHT = problem_of(1, 4096, 4096)


@given(st.sets(st.integers(1, 5000), min_size=1, max_size=60))
def test_every_number_of_rows_is_in_one_range(numbers: set[int]) -> None:
    grid = rows.grid(numbers)
    assert grid.keys() <= numbers
    for M in numbers:
        assert sum((fewest or most) <= M <= most for most, fewest in grid.items()) == 1


def test_ranges_of_all_rows() -> None:
    grid = rows.grid(range(1, 4097))
    eights = [1, 2, 4, 8, *range(16, 256, 16), *range(256, 512, 32), *range(512, 1024, 64), *range(1024, 2048, 128)]
    assert list(grid) == [*eights, *range(2048, 4097, 256)]
    assert grid[1] == grid[2] == 0 and grid[4] == 3 and grid[48] == 33 and grid[4096] == 3841


def test_weights_are_tuned_whatever_rows_their_products_have() -> None:
    """The most called first; as a recorded file has many products of a weight."""
    other = problem_of(1, 1024, 2048)
    calls = {replace(WEIGHT, M=7): 2, replace(other, M=3): 3, replace(WEIGHT, M=900): 2}
    found = [(x.N, x.M, *one) for x, one in rows.of_weights(calls, [4, 3, 512]).items()]
    assert found == [(4096, 4, 4, 3), (4096, 512, 4, 0), (1024, 4, 3, 3), (1024, 512, 3, 0)]
    with pytest.raises(ValueError, match="single row-major matrices"):
        rows.of_weights({replace(WEIGHT, batch=2): 1}, [1])


@pytest.mark.parametrize("bits", ["same", "any"])
def test_few_candidates_are_timed_for_a_range(bits: str) -> None:
    problem = replace(WEIGHT, M=512)
    ranked = candidates(problem, HOPPER, select(problem, HOPPER), bits)
    known = {x.config for x in ranked[: rows.FEW]}
    choices = (select(replace(WEIGHT, M=M), HOPPER).algorithm for M in range(1024, 0, -64))
    winner = next(x for x in choices if x.config not in known)
    found = rows.candidates_of_rows(problem, HOPPER, bits, 385, [winner], ranked)
    assert found[0] == ranked[0] and set(ranked[: rows.FEW]) <= set(found) and len(found) <= rows.FEW + 3
    assert len({x.algorithm for x in found}) == len(found)
    assert all(illegal(problem, HOPPER, x.algorithm) is None for x in found)
    assert bits == "any" or {bit_class(problem, x) for x in found} == {bit_class(problem, found[0])}
    assert winner.config in {x.config for x in found} - known


def test_winners_are_stored_with_their_ranges_and_serve(folder: Path) -> None:
    numbers = range(257, 1025)
    ranges = rows.of_weights({WEIGHT: 1}, numbers)
    fewest = {problem: least for problem, (_, least) in ranges.items()}
    seen: list[GemmProblem] = []
    lab = FakeLab(lambda selection: 1.2 if selection.source == "model" else 1.0)
    wishes = Wishes(120.0, fewest_rows=fewest)
    report = Session(lab, Journal(folder / "x.tuning.jsonl", "1"), wishes).run(
        dict.fromkeys(ranges, 1), lambda one: seen.append(one.problem)
    )
    assert [x.outcome for x in report.shapes] == ["tuned"] * 16 and seen == list(ranges)
    assert [x.problem.M for x in report.shapes] == [*range(288, 513, 32), *range(576, 1025, 64)]
    entries = [tables.entry(problem, HOPPER) for problem in ranges]
    assert [x and x.least_rows for x in entries] == [*range(257, 513, 32), *range(513, 1025, 64)]
    share = rows.served([WEIGHT], numbers, HOPPER, "same")
    assert share > 0.8
    assert "numbers of rows" in str(replace(report, served=share)) and report.as_dict()["served"] is None


def test_what_would_be_timed_is_reported_without_a_gpu() -> None:
    found = tuning.planned([WEIGHT], HOPPER, rows=range(1, 257))
    assert [x.M for x in found] == list(rows.grid(range(1, 257)))
    assert all(selections[0].algorithm == select(problem, HOPPER).algorithm for problem, selections in found.items())
    (selections,) = tuning.planned([(512, 1024, 2048)], HOPPER).values()
    assert len(selections) > rows.FEW
