"""The guards: choices, public names, options and schemas are those of the record, and what ranks compare sees a changed
kernel."""

from __future__ import annotations

import json
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest

from perf.accuracy import tables as accuracy
from perf.accuracy.judge import failures
from tests import guards
from tests.support.processes import printed
from triton_gemm import tables
from triton_gemm.tables import files

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", guards.STATIC)
def test_names_options_and_schemas_are_those_of_the_record(name: str) -> None:
    assert guards.STATIC[name]() == guards.read()[name]


@pytest.mark.parametrize(
    "rule", [pytest.param(rule, marks=[pytest.mark.full] * (rule == "batch-invariant")) for rule in guards.RULES]
)
@pytest.mark.parametrize("device", guards.DEVICES)
def test_choices_and_their_bits_are_those_of_the_record(device: str, rule: str) -> None:
    known = guards.read()["choices"].get(guards.key())
    if known is None:
        pytest.skip(f"no choices are recorded for Triton {guards.key()}")
    assert guards.digests(device, rule) == known[f"{device}, {rule}"]


@pytest.mark.parametrize("path", sorted(tables.queries.SHIPPED.glob("*.json")), ids=lambda path: path.name)
def test_a_shipped_table_is_written_as_it_was_read(path: Path) -> None:
    """Byte for byte, whatever is refactored between the two."""
    table = files.load(path).table
    assert table is not None and table.name == path.name and table.text() == path.read_text()


def test_a_table_and_a_record_of_today_are_read() -> None:
    """Whatever the code calls what they hold."""
    head: dict[str, Any] = {"capability": [9, 0], "sms": 132, "bus_width": 5120, "power_limit": 700, "name": "a GPU"}
    text = json.dumps({"format": 1, "silicon": head, "triton": "3.9", "bits": "same", "entries": []})
    table = files.parse(text.encode()).table
    assert table is not None and json.loads(table.text()) == json.loads(text)
    assert asdict(table.gpu_key) == {**head, "capability": (9, 0)}
    row = {"kind": "bf16", "M": 2, "N": 3, "K": 4, "kernel": "gemv", "bits": "one", "way": "gemv 16x64"}
    row |= {"of_bound": {"normal": 0.5}, "wrong": {"normal": 0, "NaN": 1}}
    assert "\n| bf16 | gemv | 1 | 0.5 |" in accuracy.text({"ways": [row], "long": [], "ends": [], "failed": []})
    assert failures([row]) == ["bf16 2x3x4, NaN: 1 elements are wrong: gemv 16x64"]


def test_a_changed_byte_of_a_kernel_changes_the_fingerprint(tmp_path: Path) -> None:
    """Wherever the module lies that hashes the sources: ranks with different kernels must not agree."""
    shutil.copytree(ROOT / "triton_gemm", tmp_path / "triton_gemm", ignore=shutil.ignore_patterns("__pycache__"))

    def fingerprint() -> str:
        code = "import triton_gemm; print(triton_gemm.selection_fingerprint(parts=True)['sources'])"
        return printed(code, cwd=tmp_path)

    before = fingerprint()
    changed = tmp_path / "triton_gemm" / "kernels" / "portable" / "kernel.py"
    changed.write_text(changed.read_text() + "\n")
    assert fingerprint() != before
