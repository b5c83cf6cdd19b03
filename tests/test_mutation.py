"""Mutants of the package (`tests/mutation`): what is changed, that a weak test lets one survive, and that only the copy
is ever changed."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation import report, runner
from tests.mutation.__main__ import WANTED, Journal
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runner import GROUPS, ROOT, Group, Map, Verdict, Worker

CHANGES = {
    "x = a < b": ["x = a <= b"],
    "x = a is not (b)": ["x = a is (b)"],
    "x = a  not in b": ["x = a  in b"],
    "x = (a) - (b)": ["x = (a) + (b)"],
    "x = a and b or c": ["x = a or b or c", "x = a and b and c"],
    "x = not a": ["x = a"],
    "x = 2": ["x = 1", "x = 3"],
    "x = True": ["x = False"],
    "x = y if f(z) else w": ["x = y if not f(z) else w"],
    "f(1.5, y, k=z)": ["f(1.5, y)", "f(3.0, y, k=z)", "pass"],
    "f(k=y, m=z)": ["f(k=y)", "f(m=z)", "pass"],
    "x = min(y, z)": ["x = max(y, z)"],
    "x: int | None = y": [],
    "def f(x: A | B = y) -> A | B:\n    return x": ["def f(x: A | B = y) -> A | B:\n    return None"],
    "def f():\n    '''Words.'''\n    raise E(f'{1 + 1}', 1)": ["def f():\n    '''Words.'''\n    pass"],
    "x.y += (\n    z  # why\n)": ["pass\\\n\\\n", "x.y -= (\n    z  # why\n)"][:1],
    "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return stride_ak": [
        "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return None",
        "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return stride_am",
    ],
    "@jit\ndef f(BLOCK_M):\n    x = g.Layout([1], 2)\n    y = BLOCK_M": [
        "@jit\ndef f(BLOCK_M):\n    x = g.Layout([1], 2)\n    y = BLOCK_N"
    ],
}


@pytest.mark.parametrize("source", CHANGES)
def test_what_becomes_of_a_source(source: str) -> None:
    assert sorted(mutant.applied(source) for mutant in mutants_of(source, "x.py")) == sorted(CHANGES[source])


def test_only_kernels_where_these_are_wanted() -> None:
    source = "A = 1\n@triton.jit\ndef f():\n    return 2\ndef g():\n    return 3\n"
    found = mutants_of(source, "x.py", only_jit=True)
    assert {mutant.scope for mutant in found} == {"f"} and len(found) == 3


@pytest.fixture(scope="module")
def mutants() -> dict[str, list[Mutant]]:
    return {group.name: group.mutants() for group in GROUPS}


def test_each_has_a_name_of_its_own_and_leaves_lines_where_they_are(mutants: dict[str, list[Mutant]]) -> None:
    for found in mutants.values():
        assert len({mutant.name for mutant in found}) == len(found) > 50
    sources = {path: (ROOT / path).read_text() for path in {one.path for found in mutants.values() for one in found}}
    for found in mutants.values():
        for mutant in found[::10]:
            assert mutant.applied(sources[mutant.path]).count("\n") == sources[mutant.path].count("\n"), mutant.name


def test_a_sample_is_that_of_its_seed() -> None:
    group = GROUPS[0]
    assert group.sample(20, 5) == group.sample(20, 5) != group.sample(20, 6)
    assert group.sample(20, 5) == group.sample(30, 5)[:20]
    assert sorted(one.name for one in group.sample(None, 5)) == sorted(one.name for one in group.mutants())


# ---- survivors, and the record ----


def test_every_known_survivor_is_still_a_mutant_and_has_a_reason(mutants: dict[str, list[Mutant]]) -> None:
    known, names = report.known_survivors(), {mutant.name for found in mutants.values() for mutant in found}
    assert set(known) <= names, sorted(set(known) - names)
    for one in known.values():
        assert set(one) == {"mutant", "kind", "why"} and one["kind"] in report.KINDS and one["why"].endswith(".")
    assert len(known) == len(json.loads(report.KNOWN.read_text()))


def test_the_committed_run_caught_enough_and_says_why_the_rest_survived() -> None:
    made = json.loads(report.RECORD.read_text())
    assert set(made["mutants"]) == {group.name for group in GROUPS}
    for name, of_group in made["mutants"].items():
        assert len(of_group["drawn"]) >= min(25, of_group["all"])
        assert report.rate(report.counts(of_group["drawn"])) >= WANTED, name
        assert all(one.get("why") for one in of_group["drawn"] if one["outcome"] == "survived"), name
    page = report.PAGE.read_text()
    assert report.written(page, made) == page, "python -m tests.mutation --update"


def test_a_table_counts_equivalents_as_no_survivors() -> None:
    outcomes = {"a": "caught", "b": "survived", "c": "survived", "d": "timed out"}
    verdicts = {"x": [Verdict(name, outcome, by="t") for name, outcome in outcomes.items()]}
    known = {"b": {"kind": "equivalent", "why": "It is."}, "c": {"kind": "left", "why": "It is hard."}}
    made = report.record(verdicts, {"x": 1000}, 5, 60.0, known)
    assert "| x | 1,000 | 4 | 1 | 1 | 1 | 1 | 66.7 % |" in report.table(made)
    assert report.survivors(made) == "- `c`: It is hard.\n"


# ---- a package with a good test and a weak one ----

PACKAGE = {
    "triton_gemm/__init__.py": "",
    "triton_gemm/select.py": (
        "def good(x):\n    return x < 3\n\n\ndef weak(x):\n    return x > 5\n\n\n"
        "def ends(x):\n    while x:\n        x -= 1\n    return 7\n"
    ),
    "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--tier')\n",
    "tests/test_select.py": (
        "from triton_gemm.select import ends, good, weak\n\n\n"
        "def test_good():\n    assert good(2) and not good(3)\n\n\n"
        "def test_weak():\n    assert weak(9)\n\n\n"
        "def test_ends():\n    assert ends(2) == 7\n"
    ),
}
NAMES = ["tests/test_select.py"]
PLANTED = Group("select", ("select.py",), ("select",))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("checkout")
    for path, text in PACKAGE.items():
        (root / path).parent.mkdir(exist_ok=True)
        (root / path).write_text(text)
    shutil.copytree(ROOT / "tests" / "mutation", root / "tests" / "mutation", ignore=runner.LEFT_OUT)
    return root


@pytest.fixture(scope="module")
def worker(checkout: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Path, dict[bool, Worker]]]:
    tree = tmp_path_factory.mktemp("build") / "tree"
    runner.copy(tree, checkout)
    found = Worker(tree, tree.parent / "scratch", interpreting=False, imported=("pytest", "hypothesis", "coverage"))
    yield tree, {False: found}
    found.close()


@pytest.fixture(scope="module")
def lines(checkout: Path, worker: tuple[Path, dict[bool, Worker]]) -> Map:
    return runner.measured(worker[1], worker[0].parent / "map", NAMES, checkout)


def contents(root: Path) -> dict[str, bytes]:
    return {str(path): path.read_bytes() for path in root.rglob("*") if path.is_file()}


def mutant_of(checkout: Path, words: str) -> Mutant:
    (found,) = [mutant for mutant in PLANTED.mutants(checkout) if words in mutant.name]
    return found


@pytest.mark.parametrize(
    ("words", "outcome"),
    [
        ("return x < 3 -> return x <= 3", "caught"),
        ("return x > 5 -> return x >= 5", "survived"),
        ("return x > 5 -> return None", "caught"),
        ("return 7 -> return 8", "caught"),
        ("x -= 1 -> x -= 0", "timed out"),
    ],
)
def test_a_mutant_is_caught_where_a_test_can_tell(
    words: str,
    outcome: str,
    checkout: Path,
    worker: tuple[Path, dict[bool, Worker]],
    lines: Map,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(runner, "LEAST_S", 1.0)
    before = contents(checkout)
    tree, workers = worker
    found = runner.judged(mutant_of(checkout, words), tree, workers, lines, 60.0)
    assert found.outcome == outcome, found
    assert contents(checkout) == before
    assert (tree / "triton_gemm" / "select.py").read_bytes() == before[str(checkout / "triton_gemm" / "select.py")]


def test_the_tests_that_reach_the_line_run_first(checkout: Path, lines: Map) -> None:
    mutant = mutant_of(checkout, "return x > 5 -> return None")
    chosen = lines.tests_of(mutant, runner.scope_of(mutant, PACKAGE["triton_gemm/select.py"]), 60.0)
    assert chosen[0] == "tests/test_select.py::test_weak" and len(chosen) == 3


def test_a_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    (caught, survived), names = GROUPS[0].mutants()[:2], ["tests/test_select.py", "tests/test_plan.py"]
    journal = Journal(tmp_path / "journal", ROOT, names, 20.0)
    journal.add(Verdict(caught.name, "caught", "tests/test_select.py::test_a"))
    journal.add(Verdict(survived.name, "survived"))
    journal = Journal(tmp_path / "journal", ROOT, names, 20.0)
    assert (journal[caught], journal[survived]) == (
        Verdict(caught.name, "caught", "tests/test_select.py::test_a"),
        Verdict(survived.name, "survived"),
    )
    assert Journal(tmp_path / "journal", ROOT, names, 40.0)[survived] is None
    journal.tests = "others"  # what survived may be caught by new ones
    assert journal[caught] is not None and journal[survived] is None
    journal.digests["tests/test_select.py"] = "another"
    assert journal[caught] is None
