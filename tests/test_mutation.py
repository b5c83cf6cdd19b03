"""Mutants of the package (`tests/mutation`): what is changed, that a weak test lets one survive, and that only the copy
is ever changed."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation import report, runner
from tests.mutation.__main__ import SAMPLE, WANTED, Journal, main
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runner import GROUPS, NO_TEST, ROOT, Group, Map, Verdict, Worker

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


def test_the_tests_of_a_group_are_there_and_those_of_tuning_are_all_named() -> None:
    for group in GROUPS:
        assert all((ROOT / name).exists() for name in group.files()), group.name
    (tuning,) = [group for group in GROUPS if group.name == "tuning"]
    assert {f"tests/{path.name}" for path in (ROOT / "tests").glob("test_tuning_*.py")} <= set(tuning.files())


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
        assert all(one["outcome"] != NO_TEST for one in of_group["drawn"]), name
    page = report.PAGE.read_text()
    found, since = report.written(page, made), " (changed since)"  # today's sources may be others
    assert found.replace(since, "") == page.replace(since, ""), "python -m tests.mutation --update"
    assert f"Commit `{made['commit']}`, sources `{made['sources']}`" in page


def test_the_page_says_where_sources_have_changed_since() -> None:
    made = {"commit": "abc", "sources": runner.package_digest()}
    assert report.origin(made) == f"Commit `abc`, sources `{runner.package_digest()}`."
    assert report.origin(made | {"sources": "0"}) == "Commit `abc`, sources `0` (changed since)."
    assert report.origin(made | {"commit": None}).startswith("Commit not recorded, ")


@pytest.mark.parametrize("part", [["select"], ["--only", "x"], ["--sample", str(SAMPLE - 1)]])
def test_only_a_whole_run_is_written(part: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["--update", "--list", *part])
    assert "--update writes a run of all groups" in capsys.readouterr().err


def test_a_table_counts_equivalents_as_no_survivors() -> None:
    outcomes = {"a": "caught", "b": "survived", "c": "survived", "d": "timed out", "e": NO_TEST}
    verdicts = {"x": [Verdict(name, outcome, by="t") for name, outcome in outcomes.items()]}
    known = {"b": {"kind": "equivalent", "why": "It is."}, "c": {"kind": "left", "why": "It is hard."}}
    made = report.record(verdicts, {"x": 1000}, 5, 60.0, known, {"commit": "abc", "sources": "0"})
    assert (made["commit"], made["sources"]) == ("abc", "0")
    assert "| x | 1,000 | 5 | 1 | 1 | 1 | 1 | 1 | 50.0 % |" in report.table(made)
    assert report.survivors(made) == "- `c`: It is hard.\n"


def test_the_rate_of_equivalents_alone_is_one() -> None:
    assert report.rate(report.counts([{"outcome": "survived", "kind": "equivalent"}])) == report.rate(Counter()) == 1.0


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
    if outcome == "timed out":  # elsewhere a test that is slow today has to end
        monkeypatch.setattr(runner, "LEAST_S", 1.0)
    before = contents(checkout)
    tree, workers = worker
    found = runner.judged(mutant_of(checkout, words), tree, workers, lines, 60.0)
    assert found.outcome == outcome, found
    assert contents(checkout) == before
    assert (tree / "triton_gemm" / "select.py").read_bytes() == before[str(checkout / "triton_gemm" / "select.py")]


def test_a_mutant_that_no_test_runs_has_not_survived(checkout: Path, worker: tuple[Path, dict[bool, Worker]]) -> None:
    found = runner.judged(mutant_of(checkout, "return 7 -> return 8"), *worker, Map(), 60.0)
    assert (found.outcome, found.tests) == (NO_TEST, 0)


@pytest.mark.parametrize("way", ["interrupted", "closed"])
def test_no_fork_outlives_its_worker(way: str, checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "CLOSE_S", 1.0 if way == "closed" else 10.0)
    tree, note = tmp_path / "tree", tmp_path / "note"
    runner.copy(tree, checkout)
    name = "tests/test_sleeps.py"
    (tree / name).write_text(
        "import os, pathlib, time\n\n\ndef test_sleeps():\n"
        f"    pathlib.Path({str(note)!r}).write_text(f'{{os.getpid()}}.')\n    time.sleep(100)\n"
    )
    worker = Worker(tree, tmp_path / "scratch", interpreting=False, imported=("pytest", "hypothesis"))
    monkeypatch.setattr(worker, "answer", dict)
    worker.ask([[f"{name}::test_sleeps"]])
    until = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith(".")) and time.monotonic() < until:
        time.sleep(0.02)
    child = int(note.read_text().rstrip("."))
    try:
        if way == "interrupted":
            worker.process.send_signal(signal.SIGINT)
        worker.close()
        with pytest.raises(ProcessLookupError):
            os.kill(child, 0)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


def test_the_tests_that_reach_the_line_run_first(checkout: Path, lines: Map) -> None:
    mutant = mutant_of(checkout, "return x > 5 -> return None")
    chosen = lines.tests_of(mutant, runner.scope_of(mutant, PACKAGE["triton_gemm/select.py"]), 60.0)
    assert chosen[0] == "tests/test_select.py::test_weak" and len(chosen) == 3


def test_the_record_is_of_the_tree_that_was_run(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copied = runner.copy
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setattr(command, "workers", lambda *_: contextlib.nullcontext({}))
    monkeypatch.setattr(runner, "copy", lambda tree: copied(tree, checkout))
    monkeypatch.setattr(runner, "measured", lambda *_: Map())
    monkeypatch.setenv("TRITON_GEMM_COMMIT", "abc")
    found, made = command.run([PLANTED], 2, 17, 60.0)
    assert [one.outcome for one in found["select"]] == [NO_TEST] * 2
    assert (made["commit"], made["sources"]) == ("abc", runner.package_digest(checkout))
    assert made["mutants"]["select"]["all"] == len(PLANTED.mutants(checkout))


def test_a_run_goes_on_where_it_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
    with monkeypatch.context() as other:
        other.setattr(runner, "helpers_digest", lambda root: "other helpers")
        assert Journal(tmp_path / "journal", ROOT, names, 20.0)[caught] is None
    journal.tests = "others"  # what survived may be caught by new ones
    assert journal[caught] is not None and journal[survived] is None
    journal.digests["tests/test_select.py"] = "another"
    assert journal[caught] is None
