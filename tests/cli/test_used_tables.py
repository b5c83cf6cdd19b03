"""`triton-gemm cache show`, `cache verify` and `doctor` count those entries of tables that calls run, and `warmup` the
kernels that kits have."""

from __future__ import annotations

from collections.abc import Hashable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from tests.cli.test_warmup_kit import forget, use
from tests.support.command_line import document, words_of
from tests.support.table_fakes import problem_of
from triton_gemm import compat, tables
from triton_gemm.hardware.gpus import named_device
from triton_gemm.reporting import storage
from triton_gemm.runtime import kit, kits, native_build, policies, precompile
from triton_gemm.tables import files

H200 = named_device("h200")


@pytest.fixture
def shipped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> files.Table:
    """Every 20th entry of the H200's shipped table, as the only table."""
    (path,) = (kit.PACKAGE / "tables").glob("*6016bit*")
    whole = files.contents_of(path).table
    assert whole is not None
    few = replace(whole, entries=dict([*whole.entries.items()][::20]))
    monkeypatch.setattr(tables.queries, "SHIPPED", tmp_path / "package")
    tables.queries.SHIPPED.mkdir()
    (tables.queries.SHIPPED / path.name).write_text(few.text())
    tables.reload()
    return few


@pytest.fixture(autouse=True)
def with_the_package_s_kit(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    use("1", monkeypatch)
    yield
    tables.reload(), forget()  # or later tests would find what these have read


def test_what_is_used_is_what_calls_run(shipped: files.Table) -> None:
    with policies.policy("cached"):
        run = [policies.choose(problem, H200) for problem in shipped.entries]
    by_table = [x.source == "shipped table" for x in run]
    assert any(by_table) and [x["used"] for x in document("cache", "show", "--device", "h200")["entries"]] == by_table
    (report,) = document("cache", "verify", "--device", "h200")["tables"]
    assert (report["entries"], report["used"], report["faults"]) == (len(run), sum(by_table), [])


@pytest.mark.skipif(compat.CLUSTERS, reason="is as new as the package's tables")
def test_an_older_triton_uses_what_a_kit_has(shipped: files.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    count, used = len(shipped.entries), document("cache", "verify", "--device", "h200")["tables"][0]["used"]
    assert 0 < used < count
    text = f"entries of Triton 3.9, as this is {files.TRITON}"
    for part in (f"used here: {used} of {count} {text}", f"not used here: {count - used} {text}: the model chooses"):
        assert part in words_of("cache", "show", "--device", "h200")
    assert f"{used} used here, though it is of Triton 3.9" in words_of("cache", "verify", "--device", "h200")
    (found,) = [text for _, text, *_ in storage.stored((H200,)) if "6016bit" in text]
    assert "used where a kit has its kernels" in found
    tables.reload(), use("0", monkeypatch)
    assert not any(x["used"] for x in document("cache", "show", "--device", "h200")["entries"])
    assert "not used here: it is of Triton 3.9" in words_of("cache", "verify", "--device", "h200")
    assert "are not used" in next(text for _, text, *_ in storage.stored((H200,)))


def test_warmup_counts_what_kits_have(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GEMM that the kit serves has nothing to compile, and one that it does not serve has nothing in kits."""
    monkeypatch.setattr(precompile, "build_driver_module", lambda _: None)
    monkeypatch.setattr(native_build, "ahead", lambda: None)
    served, other = problem_of(4096, 4096, 4096), problem_of(100, 60, 40)
    assert policies.choose(served, H200).kit and not kits.serves(other, H200, policies.choose(other, H200))
    call = ("warmup", "--device", "h200", "--out", tmp_path / "cache", "--shapes")
    found = document(*call, "4096x4096x4096")
    assert (found["kernels"], found["compiled"], found["in_kits"]) == (0, 0, 1)
    assert "kits have 1 kernel more, which need no compiling" in words_of(*call, "4096x4096x4096")
    left: set[Hashable] = set()
    assert len(precompile.gather([served, other], [H200], of_kits=False, left_out=left)[0][9, 0]) == len(left) == 1
