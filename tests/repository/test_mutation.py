"""Mutants of the package (`tests/mutation`): what is changed, that a weak test lets one survive, and that only the copy
is ever changed."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path

import pytest

from tests.mutation import __main__ as command
from tests.mutation import report, runner
from tests.mutation.operators import Mutant, mutants_of
from tests.mutation.runner import GROUPS, NO_TEST, ROOT, Group, Map

CHANGES = {
    "x = a < b": ["x = a <= b"],
    "x = a is not (b)": ["x = a is (b)"],
    "x = a  not in b": ["x = a  in b"],
    "x = (a) - (b)": ["x = (a) + (b)"],
    "x = (a  # is\n  and b)": ["x = (a  # is\n  or b)"],
    "x = a and b or c": ["x = a or b or c", "x = a and b and c"],
    "x = not a": ["x = a"],
    "x = not (a)": ["x = (a)"],
    "x = 2": ["x = 1", "x = 3"],
    "x = True": ["x = False"],
    "x = y if f(z) else w": ["x = y if not f(z) else w"],
    "f(1.5, y, k=z)": ["f(1.5, y)", "f(3.0, y, k=z)", "pass"],
    "f(k=y, m=z)": ["f(k=y)", "f(m=z)", "pass"],
    "x = min(y, z)": ["x = max(y, z)"],
    "x: int | None = y": [],
    "def f(x: A | B = y) -> A | B:\n    return x": ["def f(x: A | B = y) -> A | B:\n    return None"],
    "def f():\n    '''Words.'''\n    raise E(f'{1 + 1}', 1)": ["def f():\n    '''Words.'''\n    pass"],
    "x.y += (\n    z  # why\n)": ["pass"],
    "x.y = z": ["pass"],
    "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return stride_ak": [
        "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return None",
        "@jit(k=1)\ndef f(stride_am, stride_ak, stride_bk, M):\n    return stride_am",
    ],
    "@jit\ndef f(BLOCK_M):\n    x = g.Layout([1], k=2)\n    y = BLOCK_M": [
        "@jit\ndef f(BLOCK_M):\n    x = g.Layout([1], k=2)\n    y = BLOCK_N"
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


def test_each_has_a_name_of_its_own_and_can_be_compiled(mutants: dict[str, list[Mutant]]) -> None:
    sources = {path: (ROOT / path).read_text() for path in {one.path for found in mutants.values() for one in found}}
    for found in mutants.values():
        assert len({mutant.name for mutant in found}) == len(found) > 50
        for mutant in found[::10]:
            compile(mutant.applied(sources[mutant.path]), mutant.name, "exec", dont_inherit=True)


def test_a_sample_is_that_of_its_seed() -> None:
    group = GROUPS[0]
    assert group.sample(20, 5) == group.sample(20, 5) != group.sample(20, 6)
    assert group.sample(20, 5) == group.sample(30, 5)[:20]
    assert sorted(one.name for one in group.sample(None, 5)) == sorted(one.name for one in group.mutants())


def test_the_tests_of_a_group_are_there_and_those_of_tuning_are_all_named() -> None:
    for group in GROUPS:
        assert all((ROOT / name).exists() for name in group.files()), group.name
    (tuning,) = [group for group in GROUPS if group.name == "tuning"]
    assert {f"tests/tuning/{path.name}" for path in (ROOT / "tests" / "tuning").glob("test_*.py")} <= set(
        tuning.files()
    )


# ---- survivors, and the record ----


def test_every_known_survivor_is_still_a_mutant_and_has_a_reason(mutants: dict[str, list[Mutant]]) -> None:
    known, names = json.loads(report.KNOWN.read_text()), {one.name for found in mutants.values() for one in found}
    listed = {one["mutant"] for one in known}
    assert listed <= names, sorted(listed - names)
    assert len(listed) == len(known)
    for one in known:
        assert set(one) == {"mutant", "kind", "why"} and one["why"].endswith(".")
        assert one["kind"] in ("equivalent", "left")


def test_the_committed_run_caught_enough_and_says_why_the_rest_survived() -> None:
    made = json.loads(report.RECORD.read_text())
    assert set(made["mutants"]) == {group.name for group in GROUPS}
    for name, group in made["mutants"].items():
        assert len(group["drawn"]) >= min(25, group["all"])
        assert report.rate(report.counts(group["drawn"])) >= command.WANTED, name
        assert all(one.get("why") for one in group["drawn"] if one["outcome"] == "survived"), name
        assert all(one["outcome"] != NO_TEST for one in group["drawn"]), name
    page, since = report.PAGE.read_text(), " (changed since)"  # today's sources may be others
    assert report.written(page, made).replace(since, "") == page.replace(since, ""), "python -m tests.mutation --update"
    assert f"Commit `{made['commit']}`, sources `{made['sources']}`" in page
    assert f"sources `0`{since}." in report.written(page, made | {"sources": "0"})
    today = runner.digest(ROOT)
    assert f"sources `{today}`." in report.written(page, made | {"sources": today})


@pytest.mark.parametrize("part", [["select"], ["--only", "x"], ["--sample", str(command.SAMPLE - 1)]])
def test_only_a_whole_run_is_written(part: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        command.main(["--update", *part])
    assert "--update writes a run of all groups" in capsys.readouterr().err


def test_a_table_counts_equivalents_as_no_survivors(tmp_path: Path) -> None:
    outcomes = {"a": "caught", "b": "survived", "c": "survived", "d": "timed out", "e": NO_TEST}
    known = {"a": ("left", "It was."), "b": ("equivalent", "It is."), "c": ("left", "It is hard.")}
    reasons = [{"mutant": name, "kind": kind, "why": why} for name, (kind, why) in known.items()]
    (tmp_path / "known").write_text(json.dumps(reasons))
    verdicts = [{"mutant": name, "outcome": outcome} for name, outcome in reversed(outcomes.items())]
    drawn = report.with_reasons(verdicts, tmp_path / "known")
    assert [one["mutant"] for one in drawn] == list(outcomes) and "why" not in drawn[0]
    groups = {"x": {"all": 1000, "drawn": drawn}}
    assert "| x | 1,000 | 5 | 1 | 1 | 1 | 1 | 1 | 50.0 % |" in report.table(groups)
    assert report.survivors(groups) == "- `c`: It is hard.\n"
    assert report.rate(report.counts([drawn[1]])) == report.rate(Counter()) == 1.0


# ---- a package with a good test and a weak one ----

FILES = {
    "triton_gemm/__init__.py": "",
    "triton_gemm/selection/select.py": (
        "def good(x):\n    return x < 3\n\n\ndef weak(x):\n    return x > 5\n\n\n"
        "def ends(x):\n    while x:\n        x -= 1\n    return 7\n"
    ),
    "tests/conftest.py": "def pytest_addoption(parser):\n    parser.addoption('--tier')\n",
    "tests/selection/test_select.py": (
        "import os\nfrom triton_gemm.selection.select import ends, good, weak\n\n\n"
        "def test_good():\n    assert good(2) and not good(3)\n\n\n"
        "def test_weak():\n    assert weak(9) or os._exit(3)\n\n\n"
        "def test_ends():\n    assert ends(2) == 7\n"
    ),
    "tests/selection/test_broken.py": (
        "from triton_gemm.selection.select import good\n\n\ndef test_fails():\n    assert good(9)\n"
    ),
}
PLANTED = Group("select", ("selection/select.py",), ("selection/select", "selection/broken"))


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("build") / "checkout"
    for path, text in FILES.items():
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(text)
    shutil.copytree(ROOT / "tests" / "mutation", root / "tests" / "mutation", ignore=runner.LEFT_OUT)
    return root


@pytest.fixture(scope="module")
def lines(checkout: Path) -> list[Map]:
    return runner.measured(checkout, checkout.parent, PLANTED.files())


def mutant_of(checkout: Path, words: str) -> Mutant:
    (found,) = [mutant for mutant in PLANTED.mutants(checkout) if words in mutant.name]
    return found


@pytest.mark.parametrize(
    ("words", "outcome", "by"),
    [
        ("return x < 3 -> return x <= 3", "caught", "tests/selection/test_select.py::test_good"),
        ("return x > 5 -> return x >= 5", "survived", None),
        ("return x > 5 -> return None", "caught", "pytest ended with 3"),
        ("return 7 -> return 8", "caught", "tests/selection/test_select.py::test_ends"),
        ("x -= 1 -> x -= 0", "timed out", "tests/selection/test_select.py::test_ends"),
    ],
)
def test_a_mutant_is_caught_where_a_test_can_tell(
    words: str, outcome: str, by: str | None, checkout: Path, lines: list[Map], monkeypatch: pytest.MonkeyPatch
) -> None:
    if outcome == "timed out":  # elsewhere a test that is slow today has to end
        monkeypatch.setattr(runner, "LEAST_S", 1.0)
    found = runner.judged(mutant_of(checkout, words), checkout, lines, 60.0)
    assert (found["outcome"], found.get("by")) == (outcome, by)
    assert (checkout / "triton_gemm" / "selection" / "select.py").read_text() == FILES[
        "triton_gemm/selection/select.py"
    ]


def test_what_does_not_end_is_ended(checkout: Path, lines: list[Map], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runner, "START_S", 5.0)
    found = runner.judged(mutant_of(checkout, "x -= 1 -> x -= 0"), checkout, lines, 60.0)
    assert (found["outcome"], found["by"]) == ("timed out", "pytest ended with None")


def test_the_tests_that_reach_the_line_run_first(checkout: Path, lines: list[Map]) -> None:
    chosen = list(runner.tests_of(mutant_of(checkout, "return x > 5 -> return None"), lines, 60.0))
    assert chosen[0] == "tests/selection/test_select.py::test_weak" and len(chosen) == 3
    assert runner.judged(mutant_of(checkout, "return 7 -> return 8"), checkout, [], 60.0)["outcome"] == NO_TEST


def test_a_run_changes_only_its_copy_and_goes_on_where_it_stopped(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(command, "FOLDER", tmp_path)
    monkeypatch.setenv("TRITON_GEMM_COMMIT", "abc")
    before = {str(path): path.read_bytes() for path in checkout.rglob("*.py")}
    made = command.run([PLANTED], 2, 17, 60.0, root=checkout)
    assert before == {str(path): path.read_bytes() for path in checkout.rglob("*.py")}
    assert (made["commit"], made["sources"]) == ("abc", runner.digest(checkout))
    assert made["mutants"]["select"]["all"] == len(PLANTED.mutants(checkout))
    drawn = {one.name for one in PLANTED.sample(2, 17, checkout)}
    assert {one["mutant"] for one in made["mutants"]["select"]["drawn"]} == drawn
    with monkeypatch.context() as other:
        other.setattr(runner, "judged", None)
        assert command.run([PLANTED], 2, 17, 60.0, root=checkout) == made
        with pytest.raises(TypeError):  # with more time what survived may be caught
            command.run([PLANTED], 2, 17, 70.0, root=checkout)
    (checkout / "tests" / "test_broken.py").write_text("def test_nothing():\n    import triton_gemm.selection.select\n")
    with pytest.raises(TypeError), monkeypatch.context() as other:  # and by other tests
        other.setattr(runner, "judged", None)
        command.run([PLANTED], 2, 17, 60.0, root=checkout)
