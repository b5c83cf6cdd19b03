"""The record of a GPU and a Triton: cases by name, each with its commit. Several processes may add to one file."""

from __future__ import annotations

import hashlib
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from filelock import FileLock

from perf.common.files import read_json, write_json
from perf.measure import environment

PACKAGES = ("transformers", "peft", "accelerate")
# What all cases of a record have in common; OF_A_CASE may differ, when some were measured again.
IDENTITY = ("gpu", "torch", "triton", "cuda", "packages")
OF_A_CASE = ("commit", "sources", "driver", "date")


def described() -> dict[str, Any]:
    """The environment of this process, with the versions of PACKAGES."""
    return {**environment.describe("models"), "packages": {name: _version(name) for name in PACKAGES}}


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def add(file: Path, made: Mapping[str, Any], cases: Mapping[str, Mapping[str, Any]]) -> list[str]:
    """Puts cases that were measured in one environment into the record, each in the place of what it had of that name.
    Cases that were measured with other versions are dropped: their names.

    A case that failed does not replace one that did not.
    """
    with _locked(file):
        record = read_json(file) if file.exists() else {"environment": dict(made), "cases": {}}
        before, dropped = record["cases"], []
        if any(record["environment"].get(name) != made.get(name) for name in IDENTITY):
            before, dropped = {}, list(before)
        of_run = {name: made.get(name) for name in OF_A_CASE}
        for name, case in cases.items():
            if "failed" in case and name in before and "failed" not in before[name]:
                continue
            before = {**before, name: {**of_run, **case}}
        write_json(file, {"environment": dict(made), "cases": before})
    return dropped


def _locked(file: Path) -> FileLock:
    """Held by one process at a time; the lock is not beside the file, where it would stay."""
    name = hashlib.sha256(str(file.resolve()).encode()).hexdigest()[:16]
    return FileLock(Path(tempfile.gettempdir()) / f"triton-gemm-record-{name}.lock")
