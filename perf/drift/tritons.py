"""Versions of Triton to compile with: this one, one that is installed elsewhere, or one that pip brings."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import triton

from perf.measure.environment import ROOT

# What is compiled for where nothing is named: the last of each minor version that is supported.
VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")
INSTALLED = ROOT / "build" / "drift"
PIP = ("--no-deps", "--quiet", "--disable-pip-version-check", "--no-input")


@dataclass(frozen=True)
class Toolchain:
    """A Python, and the folder that goes before all others where it looks for Triton, or None."""

    python: str
    folder: Path | None = None

    def environment(self) -> dict[str, str]:
        """What the command is run with: the checkout, and that Triton before the one that is installed."""
        variables = {name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"}
        first = [] if self.folder is None else [str(self.folder)]
        rest = filter(None, [variables.get("PYTHONPATH")])
        return {**variables, "PYTHONPATH": os.pathsep.join([*first, str(ROOT), *rest])}


def toolchain(what: str, installed: Path = INSTALLED) -> Toolchain:
    """The Triton that is named: a version, a Python interpreter, a folder that has `triton` in it, or whatever else pip
    can install: a wheel, an address, "triton>=3.10.dev0". What pip installs is kept in `installed`, without torch: that
    of this interpreter is imported. Where from is pip's to know: PIP_PRE=1 and PIP_EXTRA_INDEX_URL name nightly builds.

    subprocess.CalledProcessError where pip fails; ValueError for a folder without triton.
    """
    path = Path(what)
    if path.is_file() and os.access(path, os.X_OK):
        return Toolchain(what)
    if path.is_dir():
        if not (path / "triton" / "__init__.py").exists():
            raise ValueError(f"{what} has no folder triton with an __init__.py")
        return Toolchain(sys.executable, path.resolve())
    if what == triton.__version__:
        return Toolchain(sys.executable)
    version = re.fullmatch(r"\d+\.\d+(\.\d+)?\S*", what) and not path.exists()
    folder = installed / re.sub(r"[^\w.+-]+", "-", path.stem if path.exists() else what)
    if not (folder / "triton" / "__init__.py").exists():
        requirement = f"triton=={what}" if version else what
        subprocess.run([sys.executable, "-m", "pip", "install", *PIP, "--target", folder, requirement], check=True)
    return Toolchain(sys.executable, folder)
