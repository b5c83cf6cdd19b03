"""What was learned in service: stored beside tuned entries, asked before them, and forgotten alone."""

from __future__ import annotations

import logging
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import triton_gemm
from tests.support import table_fakes
from tests.support.processes import printed
from tests.support.table_fakes import HOPPER, another, problem_of
from triton_gemm import tables
from triton_gemm.reporting import fingerprint
from triton_gemm.runtime import policies
from triton_gemm.selection import generation
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, select
from triton_gemm.tables import learned

pytestmark = pytest.mark.usefixtures("default_policy")
PROBLEM = problem_of()


def learn(nth: int = 1, **how: Any) -> bool:
    selection: Selection = how.pop("selection", None) or another(PROBLEM, nth)
    how = {"before": select(PROBLEM, HOPPER), "us": 9.0, "before_us": 10.0, "samples": 12} | how
    return learned.store(PROBLEM, selection, HOPPER, **how)


def chosen() -> Selection:
    return policies.choose(PROBLEM, HOPPER)


def test_it_is_asked_before_what_was_tuned_and_forgotten_alone(folder: Path) -> None:
    table_fakes.store(PROBLEM, 2)
    number = generation.number
    assert learn() and chosen().algorithm == another(PROBLEM).algorithm
    assert generation.number == number, "plans stay as they are"
    tables.reload()
    assert chosen().algorithm == another(PROBLEM).algorithm, "as another process finds it"
    assert "9 us in service on 20" in chosen().reason and "12 samples, before 10 us" in chosen().reason
    assert chosen().source == "user's table" and not tables.ignored()
    assert len(tables.verify(HOPPER)) == 2 and not any(x.faults for x in tables.verify(HOPPER))
    assert learned.names() and learned.clear() == 1 and learned.clear() == 0
    assert chosen().algorithm == another(PROBLEM, 2).algorithm, "what was tuned is there still"
    assert learn() and tables.clear() == 2 and chosen().source == "model"
    assert learn(selection=select(PROBLEM, HOPPER), us=10.0) and "nothing was faster" in chosen().reason
    assert chosen().algorithm == select(PROBLEM, HOPPER).algorithm


def test_bits_decide_whether_it_is_used(folder: Path) -> None:
    assert learn()
    with triton_gemm.policy("cached", bits="any"):
        assert chosen().source == "model", "which has the bits of no class"
    with triton_gemm.policy("model"):
        assert chosen().source == "model"
    assert not learn(selection=another(PROBLEM, 1, bits=False)), "an entry of another class stays"
    learned.clear()
    assert learn(selection=another(PROBLEM, 1, bits=False))
    assert chosen().source == "model"
    assert [*tables.ignored()] == [f"user's table: it gives other bits than {bit_class(PROBLEM, chosen())}"]


def test_what_is_written_late_replaces_nothing_that_was_learned_since(folder: Path) -> None:
    late: list[Any] = []
    assert learn(1, by=lambda *of: late.append(of) or True)
    (where, empty, found), *_ = late
    found = {x: replace(entry, measured="2001-01-01T00:00:00+00:00") for x, entry in found.items()}
    assert learn(3) and learned.write(where, empty, found)
    tables.reload()
    assert chosen().algorithm == another(PROBLEM, 3).algorithm


def test_who_writes_in_another_process_gets_the_whole_path(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "here")
    assert learn(by=lambda where, *_: where == tmp_path / "here" / "tables")


def test_a_folder_that_cannot_be_written_keeps_it_for_this_process(
    folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.parent.joinpath("tables").write_text("a file in the folder's place")
    with caplog.at_level(logging.WARNING):
        assert not learn() and not learn(3)
    assert chosen().algorithm == another(PROBLEM, 3).algorithm
    assert caplog.text.count("what was learned is not kept") == 1
    tables.reload()
    assert chosen().source == "model"


SCRIPT = """
from tests.support.table_fakes import HOPPER, another, problem_of
from triton_gemm.selection.select import select
from triton_gemm.tables import learned
how = dict(us=1.0, before_us=2.0, samples=9)
for rows in range({first}, 33, 2):
    problem = problem_of(rows)
    assert learned.store(problem, another(problem), HOPPER, before=select(problem, HOPPER), **how)
"""


def test_two_processes_lose_nothing(folder: Path) -> None:
    with ThreadPoolExecutor(2) as pool:
        scripts = [SCRIPT.format(first=first) for first in (1, 2)]
        list(pool.map(lambda x: printed(x, TRITON_GEMM_CACHE_DIR=str(folder.parent)), scripts))
    tables.reload()
    assert all(learned.entry(problem_of(rows), HOPPER) is not None for rows in range(1, 33))


def test_ranks_may_differ_in_it_alone(folder: Path) -> None:
    before, short = triton_gemm.selection_fingerprint(HOPPER, parts=True), triton_gemm.selection_fingerprint(HOPPER)
    assert learn()
    after = triton_gemm.selection_fingerprint(HOPPER, parts=True)
    assert {name for name in before if before[name] != after[name]} == {fingerprint.MAY_DIFFER}
    assert triton_gemm.selection_fingerprint(HOPPER) == short
    table_fakes.store(PROBLEM)
    assert triton_gemm.selection_fingerprint(HOPPER) != short
