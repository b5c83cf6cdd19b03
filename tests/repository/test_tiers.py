"""What the fast tier of tests leaves out, and that it leaves out nothing that a test is about."""

from __future__ import annotations

import re
from collections import Counter
from itertools import product
from pathlib import Path

import pytest

from tests.support.processes import python
from tests.support.tiers import cover, each, pairs

CASES = [{"kernel": kernel, "tile": tile, "gpu": gpu} for kernel, tile, gpu in product("abc", range(6), ("8.0", "9.0"))]


@pytest.mark.parametrize(("shows", "most"), [(each, 6), (pairs, 20)])
def test_a_few_cases_show_what_all_of_them_do(shows, most: int) -> None:
    shown = [frozenset(shows(**case)) for case in CASES]
    chosen = cover(shown)
    assert set().union(*(shown[i] for i in chosen)) == set().union(*shown)
    assert len(set(chosen)) == len(chosen) <= most
    assert cover(shown) == chosen, "processes must agree on it"


def test_a_few_cases_are_of_all_kinds() -> None:
    """Not of one kernel and GPU but for the rest of them. What is no key of a set is told apart, too."""
    chosen = [CASES[i] for i in cover([each(**case) for case in CASES])]
    counts = {name: sorted(Counter(case[name] for case in chosen).values()) for name in ("kernel", "gpu")}
    assert counts == {"kernel": [2, 2, 2], "gpu": [3, 3]}
    assert len(cover([each(size=[1]), each(size=[2]), each(size=[1])])) == 2


TESTS = """
import pytest

def test_plain(): pass

@pytest.mark.full
def test_long(): pass

@pytest.mark.few
@pytest.mark.parametrize("x", range(3))
@pytest.mark.parametrize("y", range(2))
def test_product(x, y): pass

@pytest.mark.few(shows=lambda x: {x > 1})
@pytest.mark.parametrize("x", range(4))
def test_kinds(x): pass
"""


def collected(folder: Path, tests: str, *options: str, name: str = "") -> tuple[list[str], str]:
    path = folder / "test_made_up.py"
    path.write_text(tests)
    command = ["-m", "pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "-p", "tests.conftest"]
    done = python(*command, "-c", "pyproject.toml", *options, f"{path}{name}")
    return re.findall(r"::(\S+)", done.stdout), done.stdout + done.stderr


def test_tiers(tmp_path: Path) -> None:
    fast, _ = collected(tmp_path, TESTS)
    rest, _ = collected(tmp_path, TESTS, "--tier=rest")
    full, _ = collected(tmp_path, TESTS, "--tier=full")
    assert len(full) == 12 and sorted(fast + rest) == sorted(full)
    assert len(fast) == 6 and "test_long" in rest and "test_plain" in fast
    assert {"test_kinds[0]", "test_kinds[2]"} <= set(fast)


def test_what_is_named_by_itself_runs(tmp_path: Path) -> None:
    assert collected(tmp_path, TESTS, name="::test_long")[0] == ["test_long"]
    assert len(collected(tmp_path, TESTS, name="::test_product")[0]) == 6


@pytest.mark.parametrize("tier", ["fast", "full"])
def test_tests_of_planted_bugs_are_in_both(tmp_path: Path, tier: str) -> None:
    tests = TESTS.replace("test_kinds", "test_planted_bugs_are_caught")
    assert "the fast tier must find every planted bug" in collected(tmp_path, tests, f"--tier={tier}")[1]
