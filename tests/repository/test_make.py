"""The Makefile: which environment a command uses, with which versions; and that what the documents name is there.

Nothing is made: `make --dry-run` prints what would be run.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]

pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="needs make")


def make(*arguments: str, folder: Path = ROOT, **given: str) -> subprocess.CompletedProcess[str]:
    """`make` as in a new shell: the make that started this test hands down what it was called with."""
    environment = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
    command = ["make", "--no-print-directory", *arguments]
    return subprocess.run(command, cwd=folder, env=environment | given, capture_output=True, text=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A folder as make sees a checkout, with no environment yet."""
    for path in (ROOT / "Makefile", ROOT / "pyproject.toml", *ROOT.glob("constraints*.txt")):
        shutil.copy(path, tmp_path)
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "pins.v2.txt").write_text("torch==2.12.0\n")
    return tmp_path


@pytest.mark.parametrize(
    ("chosen", "versions", "environment"),
    [
        ((), "constraints.txt", ".venv"),
        (("CONSTRAINTS=newest",), "constraints-newest.txt", ".venv-newest"),
        (("CONSTRAINTS=oldest",), "constraints-oldest.txt", ".venv-oldest"),
        (("CONSTRAINTS=mine/pins.v2.txt",), "mine/pins.v2.txt", ".venv-pins.v2"),
        (("CONSTRAINTS=newest", "VENV=elsewhere/new"), "constraints-newest.txt", "elsewhere/new"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_versions_have_environments_of_their_own(
    chosen: tuple[str, ...], versions: str, environment: str, checkout: Path
) -> None:
    done = make("--dry-run", "test", *chosen, folder=checkout)
    assert done.returncode == 0, done.stderr
    assert re.findall(r" -c '(.*?)'", done.stdout)[-1:] == [versions]
    assert set(re.findall(r"'([^' ]*)/bin/python'", done.stdout)) == {environment}
    results = "build/test-results" + "".join(f"-{Path(option[12:]).stem}" for option in chosen if "CONS" in option)
    assert f"--junit-xml={results}/$name.xml" in done.stdout


def installs(folder: Path, *arguments: str) -> bool:
    return "pip install" in make("--dry-run", "check", *arguments, folder=folder).stdout


def test_an_environment_is_brought_up_to_date_when_its_versions_change(checkout: Path) -> None:
    environment = checkout / ".venv-newest"
    (environment / "bin").mkdir(parents=True)
    (environment / "bin" / "python").symlink_to(shutil.which("python3") or "")
    complete = environment / ".complete"
    complete.write_text("constraints-newest.txt\n")
    assert not installs(checkout, "CONSTRAINTS=newest")
    assert installs(checkout)  # .venv is another
    assert installs(checkout, "CONSTRAINTS=oldest", "VENV=.venv-newest")
    for name in ("pyproject.toml", "constraints-newest.txt", "constraints-tools.txt"):
        os.utime(checkout / name, (complete.stat().st_mtime + 1,) * 2)
        assert installs(checkout, "CONSTRAINTS=newest")
        os.utime(checkout / name, (complete.stat().st_mtime - 1,) * 2)
    os.utime(checkout / "constraints.txt", (complete.stat().st_mtime + 1,) * 2)
    assert not installs(checkout, "CONSTRAINTS=newest")


@pytest.mark.parametrize(
    ("arguments", "active", "used"),
    [
        (("explore",), "mine", True),
        (("explore",), "", False),
        (("explore",), ".venv", False),
        *[(("explore", given), "mine", False) for given in ("VENV=.venv", "CONSTRAINTS=newest", "PYTHON=python3")],
        *[(goals, "mine", False) for goals in (("explore", "report"), ("check",), ())],
    ],
)
def test_exploring_alone_uses_the_environment_that_is_active(
    arguments: tuple[str, ...], active: str, used: bool, checkout: Path
) -> None:
    (checkout / ".venv").mkdir()
    given = {"VIRTUAL_ENV": str(checkout / active)} if active else {}
    done = make("--dry-run", *arguments, folder=checkout, **given)
    assert done.returncode == 0, done.stderr
    assert (f"==> using the active environment, {checkout / active};" in done.stdout) == used
    assert ("pip install" in done.stdout) == (bool(arguments) and not used)
    if used:
        assert re.findall("^'python3' -m (.*)", done.stdout, re.MULTILINE)[0].startswith("perf.ladder.explorer")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("CONSTRAINTS=nonsense",), "neither constraints-nonsense.txt nor such a file"),
        (("CONSTRAINTS=newest", "VENV=none"), "CONSTRAINTS=newest would be ignored"),
    ],
)
def test_what_would_be_ignored_is_refused(arguments: tuple[str, ...], words: str) -> None:
    done = make("help", *arguments)
    assert done.returncode == 2 and words in done.stderr


def test_every_version_is_pinned_for_every_python() -> None:
    for path in ROOT.glob("constraints*.txt"):
        lines = [line for line in path.read_text().splitlines() if line and not line.startswith(("#", "-c "))]
        pinned = [re.fullmatch(r"([a-z0-9-]+)==[\w.]+(?: ; python_version (<|>=) \"3\.11\")?", line) for line in lines]
        assert all(pinned), path.name
        names = [match[1] for match in pinned if match]
        assert names and max(map(names.count, names)) <= 2


@pytest.mark.parametrize(
    ("arguments", "tier"),
    [(("test",), "fast"), (("test-all",), "full"), (("test-all", "ARGS=--tier=rest"), "rest")],
    ids=["test", "test-all", "rest"],
)
def test_each_command_runs_its_tier(arguments: tuple[str, ...], tier: str) -> None:
    """In both groups; ARGS has the last word."""
    done = make("--dry-run", *arguments, "VENV=none")
    assert re.findall(r"--tier=(\w+)", done.stdout)[-1:] == [tier]
    assert len(re.findall(r"^group ", done.stdout, re.MULTILINE)) == 2


def test_continuous_integration_runs_every_test_once_and_the_checks() -> None:
    commands = re.findall(r"^make .*", (ROOT / ".ci" / "run").read_text(), re.MULTILINE)
    assert commands == ["make test", "make check", "make docs", "make test-all ARGS=--tier=rest"]


def test_documents_name_commands_that_are_there() -> None:
    """CONTRIBUTING all that `make help` shows."""
    shown = re.findall(r"^  ([a-z-]+) +\S", make("help").stdout, re.MULTILINE)
    table = re.findall(r"^\| `make ([a-z-]+)` \|", (ROOT / "CONTRIBUTING.md").read_text(), re.MULTILINE)
    assert sorted({*table, "help"}) == sorted(shown)
    commands = set(re.findall(r"^([a-z-]+):.*##", (ROOT / "Makefile").read_text(), re.MULTILINE))
    for folder in (".", "docs", "docs/ladder", "docs/log", "tests"):
        for path in (ROOT / folder).glob("*.md"):
            assert set(re.findall(r"`make ([a-z-]+)", path.read_text())) <= commands, path.name


def test_the_readme_of_tests_names_those_of_every_kernel() -> None:
    kernels = {
        path.relative_to(ROOT / "triton_gemm" / "kernels").parts[0].removesuffix(".py")
        for path in (ROOT / "triton_gemm" / "kernels").rglob("*.py")
        if re.search(r"^def launches\(", path.read_text(), re.MULTILINE)
    }
    table = re.findall(r"^\| .*test_compile.*", (ROOT / "tests" / "README.md").read_text(), re.MULTILINE)
    rows = [line.split("|")[1:-1] for line in table]
    tests = {name: " ".join(cells) for first, *cells in rows for name in re.findall(r"`(\w+)`", first)}
    assert "portable" in kernels and kernels <= set(tests)
    for kernel in kernels:
        assert f"test_{kernel}.py" in tests[kernel] and f"test_compile_{kernel}.py" in tests[kernel]
    for path in re.findall(r"`(\S+\.py)`", " ".join(tests.values())):
        assert (ROOT / "tests" / path).exists(), path


def test_the_readme_installs_what_exploring_needs() -> None:
    """Beside torch, which brings Triton, and NumPy, which the interpreter needs."""
    (needed,) = re.findall(r"^explore: .*\n\t\$\(call need,(.*)\)", (ROOT / "Makefile").read_text(), re.MULTILINE)
    (named,) = re.findall(r"^pip install '\.\[interpreter\]' (.*?) *#", (ROOT / "README.md").read_text(), re.MULTILINE)
    assert {*needed.split()} - {"torch", "triton", "numpy"} <= {*named.split()}
