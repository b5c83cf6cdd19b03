"""`make release`: what it cuts and builds of a small project that is laid out as this one, and what it refuses."""

from __future__ import annotations

import hashlib
import os
import re
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
CHANGES = "# Changelog\n\n## [Unreleased]\n\n### Added\n\n- A thing.\n\n## [0.1.0] - 2026-01-02\n\n- The first.\n"
UNCHANGED = "# Changelog\n\n## [Unreleased]\n\n## [0.0.1] - 2026-01-02\n"


def git(folder: Path, *arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=folder, capture_output=True, text=True, check=True).stdout


def release(folder: Path, *arguments: str, umask: int = 0o022, **variables: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, folder / ".ci" / "release.py", *arguments]
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | variables
    return subprocess.run(command, cwd=folder, env=environment, umask=umask, capture_output=True, text=True)


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A commit with this project's pyproject.toml and little else."""
    for role in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{role}_NAME", "someone")
        monkeypatch.setenv(f"GIT_{role}_EMAIL", "someone@example.org")
    monkeypatch.setenv("GIT_CONFIG_GLOBAL", os.devnull)
    folder = tmp_path / "project"
    for name in ("pyproject.toml", "LICENSE", "NOTICE", ".gitignore", ".ci/release.py", "docs/package.md"):
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, folder / name)
    (folder / "triton_gemm").mkdir()
    (folder / "triton_gemm" / "__init__.py").write_text('"""A package."""\n\n__version__ = "0.1.0"\n')
    (folder / "CHANGELOG.md").write_text(CHANGES)
    (folder / "perf").mkdir()
    (folder / "perf" / "__init__.py").write_text("")
    (folder / "perf" / "kit.py").write_text("")  # checks that the kit is this commit's
    git(folder, "init", "--quiet")
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "--message", "All of it")
    return folder


def built(folder: Path, version: str = "0.2.0") -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in (folder / "dist" / version).iterdir()}


def test_a_release_is_cut_and_built_twice_to_the_same_bytes(project: Path, tmp_path: Path) -> None:
    done = release(project, "0.2.0", TZ="UTC")
    assert done.returncode == 0, done.stderr
    first = built(project)
    assert set(first) == {"triton_gemm-0.2.0.tar.gz", "triton_gemm-0.2.0-py3-none-any.whl", "SHA256SUMS"}
    for line in first["SHA256SUMS"].decode().splitlines():
        digest, name = line.split()
        assert hashlib.sha256(first[name]).hexdigest() == digest and line in done.stdout
    assert "Nothing was tagged, pushed or uploaded" in done.stdout and git(project, "tag") == ""

    text = (project / "CHANGELOG.md").read_text()
    cut = re.search(
        r"## \[Unreleased\]\n\n## \[0\.2\.0\] - \d{4}-\d\d-\d\d\n\n### Added\n\n- A thing\.\n\n## \[0\.1\.0\]", text
    )
    assert cut, text
    assert git(project, "log", "-1", "--format=%s") == "Release 0.2.0\n" and git(project, "status", "--porcelain") == ""
    assert '__version__ = "0.2.0"' in (project / "triton_gemm" / "__init__.py").read_text()

    # Elsewhere, later, by someone with other rights and another clock; from the commit alone.
    other = tmp_path / "elsewhere" / "clone"
    git(tmp_path, "clone", "--quiet", str(project), str(other))
    for path in other.rglob("*.md"):
        os.utime(path, (1, 1))
    (other / "docs" / "left.log").write_text("ignored by git")
    done = release(other, umask=0o077, TZ="Asia/Tokyo")
    assert done.returncode == 0, done.stderr
    assert built(other) == first
    with tarfile.open(other / "dist" / "0.2.0" / "triton_gemm-0.2.0.tar.gz") as sdist:
        assert not [name for name in sdist.getnames() if name.endswith("left.log") or "dist" in name.split("/")[1:2]]


@pytest.mark.parametrize(
    ("version", "file", "text", "words"),
    [
        ("0.1.0", "", "", ["0.1.0 is not later"]),
        ("0.0.9", "", "", ["0.0.9 is not later"]),
        ("next", "", "", ["Invalid version: 'next'"]),
        ("0.2.0", "new.txt", "", ["not clean", "new.txt"]),
        ("0.2.0", "perf/kit.py", "import sys; sys.exit('7 of them stale')", ["7 of them stale"]),
        ("0.2.0", "CHANGELOG.md", UNCHANGED, ["nothing under Unreleased"]),
        ("", "CHANGELOG.md", UNCHANGED, ["no section for 0.1.0: make release VERSION=0.1.0"]),
    ],
    ids=["the last one", "an older one", "no version", "an unclean tree", "a stale kit", "no changes", "not cut"],
)
def test_what_cannot_be_released_is_refused(
    version: str, file: str, text: str, words: list[str], project: Path
) -> None:
    if file:
        (project / file).write_text(text)
        git(project, "commit", "--quiet", "--all", "--allow-empty", "--message", "A change")
    before = git(project, "status", "--porcelain")
    done = release(project, *filter(None, [version]))
    assert done.returncode == 1 and all(word in done.stderr for word in words)
    assert git(project, "status", "--porcelain") == before and not (project / "dist").exists()
