#!/usr/bin/env python3
"""Builds a release: `make release VERSION=0.2.0` cuts it first, `make release` builds the one that HEAD is.

Cutting: in CHANGELOG.md what is under Unreleased becomes the version's, with today's date (UTC), __version__ becomes
the version, and both are committed, here and nowhere else. Building: the sdist and, from that, the wheel are made of
HEAD's files alone, with the commit's time for all times, by the hatchling of this environment, so that the same commit
gives the same bytes on every machine. They are put into dist/VERSION with SHA256SUMS. Nothing is tagged, pushed or
uploaded: docs/release.md says what comes before and after.

The tree must be clean. Exit status: 1 where it is not, or the version cannot be; 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from datetime import datetime, timezone
from pathlib import Path

from packaging.version import InvalidVersion, Version

ROOT = Path(__file__).resolve().parents[1]
CHANGELOG, SOURCE = ROOT / "CHANGELOG.md", ROOT / "triton_gemm" / "__init__.py"
UNRELEASED = "## [Unreleased]\n"
VERSION = re.compile(r'^__version__ = "(.*)"$', re.MULTILINE)


class Refused(Exception):  # noqa: N818 (it is no error of the program)
    """Why there is no release, in a sentence."""


def main(arguments: Sequence[str] | None = None) -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="make release", description=summary, epilog=more, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("version", nargs="?", help="cut this version first")
    given = parser.parse_args(arguments)
    try:
        changed = git("status", "--porcelain")
        if changed:
            raise Refused(f"the tree is not clean; commit or remove what is changed:\n{changed}")
        stale = subprocess.run([sys.executable, "-m", "perf.kit", "--check"], cwd=ROOT, capture_output=True, text=True)
        if stale.returncode:
            raise Refused(f"the kit is not this commit's: {stale.stdout}{stale.stderr}make kit builds it")
        if given.version is not None:
            cut(given.version)
        version = current()
        if f"\n## [{version}]" not in CHANGELOG.read_text():
            raise Refused(f"CHANGELOG.md has no section for {version}: make release VERSION={version} cuts it")
        folder = ROOT / "dist" / version
        build(folder)
    except Refused as refused:
        print(f"error: {refused}", file=sys.stderr)
        return 1
    print(f"\n{folder.relative_to(ROOT)}, of {git('rev-parse', '--short', 'HEAD')}:\n{sums(folder)}")
    print(f"Nothing was tagged, pushed or uploaded. What is next for {version}: docs/release.md")
    return 0


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout.strip()


def current() -> str:
    found = VERSION.search(SOURCE.read_text())
    assert found is not None
    return found[1]


def cut(version: str) -> None:
    """Makes what is unreleased that version, and commits it."""
    text = CHANGELOG.read_text()
    try:
        is_later = all(
            Version(version) > Version(other) for other in re.findall(r"^## \[(\d.*?)\]", text, re.MULTILINE)
        )
    except InvalidVersion as error:
        raise Refused(f"{error}: versions are as in PEP 440") from error
    if not is_later or Version(version) < Version(current()):
        raise Refused(f"{version} is not later than what CHANGELOG.md and __version__ ({current()}) have")
    before, _, rest = text.partition(UNRELEASED)
    if not re.match(r"\s*\S", rest) or re.match(r"\s*## ", rest):
        raise Refused("CHANGELOG.md has nothing under Unreleased")
    today = datetime.now(timezone.utc).date().isoformat()
    CHANGELOG.write_text(f"{before}{UNRELEASED}\n## [{version}] - {today}\n{rest}")
    SOURCE.write_text(VERSION.sub(f'__version__ = "{version}"', SOURCE.read_text()))
    git("commit", "--quiet", "--message", f"Release {version}", "--", str(CHANGELOG), str(SOURCE))


def build(folder: Path) -> None:
    """The sdist and the wheel of HEAD, and their hashes."""
    files = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True).stdout
    environment = {**os.environ, "SOURCE_DATE_EPOCH": git("log", "-1", "--format=%ct")}
    with tempfile.TemporaryDirectory() as source:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(source, filter="data")
        command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(folder), source]
        if subprocess.run(command, env=environment, cwd=source).returncode:
            raise Refused("`python -m build` failed; what it said is above")
    (folder / "SHA256SUMS").write_text(sums(folder))


def sums(folder: Path) -> str:
    """As sha256sum writes and checks them."""
    files = sorted(path for path in folder.iterdir() if path.name != "SHA256SUMS")
    return "".join(f"{hashlib.sha256(path.read_bytes()).hexdigest()}  {path.name}\n" for path in files)


if __name__ == "__main__":
    sys.exit(main())
