"""`triton-gemm cache`: tables are listed, shown, verified, sent and deleted."""

from __future__ import annotations

import errno
import os
from functools import partial
from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.support import table_fakes
from tests.support.command_line import document, words_of
from tests.support.table_fakes import another, problem_of
from triton_gemm import tables
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.hardware.gpus import named_device
from triton_gemm.selection.select import select
from triton_gemm.tables import files, learned

H200 = named_device("h200")
store = partial(table_fakes.store, device=H200, us=10.0, default_us=12.0)


def test_tables_are_listed_shown_and_verified(folder: Path) -> None:
    assert document("cache", "ls") == {"folder": str(folder), "tables": [], "set_aside": [], "models": []}
    assert "there is no table yet" in words_of("cache", "ls")
    assert document("cache", "verify", "--device", "h200")["tables"] == []
    store(problem_of())
    (one,) = document("cache", "ls")["tables"]
    assert (one["entries"], one["silicon"], one["whose"]) == (1, str(GpuKey.of(H200)), "user's table")
    assert "sm_90-132sms-6016bit-700W" in words_of("cache", "ls")
    for where in ([one["file"]], ["--device", "h200"]):
        (entry,) = document("cache", "show", *where)["entries"]
        assert entry["text"] == "512x1024x2048 bf16 nn" and entry["gain"] == pytest.approx(0.2)
        assert str(another(problem_of()).config) in words_of("cache", "show", *where)
        assert (entry["triton"], entry["used"]) == (files.TRITON, True)
        assert "not used here" not in words_of("cache", "show", *where)
    assert document("cache", "show", "--device", "h100")["entries"] == []
    (report,) = document("cache", "verify", "--device", "h200")["tables"]
    assert report["faults"] == [] and report["elsewhere"] is None
    (report,) = document("cache", "verify", "--device", "h100")["tables"]
    assert report["faults"] == [] and "6016bit" in report["elsewhere"]
    assert "not used here" in words_of("cache", "verify", "--device", "h100")


def test_where_torch_is_faster_is_shown(folder: Path) -> None:
    problem = problem_of()
    store(problem)
    selection = select(problem, H200)
    assert tables.store(problem, selection, H200, us=14.0, default_us=14.0, bits="any", torch_us=12.3)
    faster = f"512x1024x2048 bf16 nn: torch is faster: 12.3 us of ours 14 ({tables.torchs_versions()})"
    assert words_of("cache", "show", "--device", "h200").count("torch is faster") == 1
    assert faster in words_of("cache", "show", "--device", "h200")
    found = document("cache", "show", "--device", "h200")["entries"]
    assert [(x["bits"], x.get("torch_us")) for x in found] == [("any", 12.3), ("same", None)]


def test_tables_of_other_tritons_are_shown_as_not_used(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(problem_of())
    monkeypatch.setattr(files, "TRITON", "9.9")
    (entry,) = document("cache", "show", "--device", "h200")["entries"]
    assert entry["triton"] != "9.9" and not entry["used"]
    shown = words_of("cache", "show", "--device", "h200")
    assert f"not used here: 1 entry of Triton {entry['triton']}, as this is 9.9" in shown


def test_entries_that_are_left_out_are_shown_as_not_used(folder: Path) -> None:
    used, other = problem_of(), problem_of(64)
    store(used)
    assert tables.store(other, another(other, bits=False), H200, us=1.0, default_us=2.0)
    for where in ([table_fakes.table_in(folder)], ["--device", "h200"]):
        entries = document("cache", "show", *where)["entries"]
        assert {entry["problem"]["M"]: entry["used"] for entry in entries} == {512: True, 64: False}
        shown = words_of("cache", "show", *where)
        assert "not used here: 64x1024x2048 bf16 nn, " in shown and "it gives other bits than" in shown
        assert "not used here: 512" not in shown and "of Triton" not in shown
    (report,) = document("cache", "verify", "--device", "h200")["tables"]
    assert (report["used"], report["entries"], report["faults"]) == (1, 2, [])
    assert "2 entries, 1 used here" in words_of("cache", "verify", "--device", "h200")


def test_a_fault_fails_verify(folder: Path) -> None:
    store(problem_of())
    path, cut = table_fakes.table_in(folder), folder.parent / "cut.json"
    cut.write_text(path.read_text()[:-2])
    path.write_text(path.read_text()[:-40])
    (report,) = document("cache", "verify", "--device", "h200", code=1)["tables"]
    assert "it is not JSON" in report["faults"][0]
    assert "it is not JSON" in words_of("cache", "ls")
    assert "it is not JSON" in document("cache", "show", path, code=1)["error"]
    assert "it is not JSON" in document("cache", "import", path, code=1)["error"]
    assert "it is not JSON" in words_of("cache", "show", cut)
    shown = document("cache", "show", cut)
    assert len(shown["entries"]) == 1 and "it is not JSON" in shown["wrong"][str(cut)]
    os.replace(cut, path)
    shown = document("cache", "show", "--device", "h200")
    assert len(shown["entries"]) == 1 and "it is not JSON" in shown["wrong"][str(path)]
    assert "it is not JSON" in words_of("cache", "show", "--device", "h200")


def test_tables_travel(folder: Path, tmp_path: Path) -> None:
    first, second, both = (tmp_path / f"{name}.json" for name in ("first", "second", "both"))
    store(problem_of())
    assert document("cache", "export", first, "--device", "h200")["entries"] == 1
    assert document("cache", "clear", "--yes") == {"deleted": 1, "notes": 0, "extensions": 0}
    store(problem_of(64))
    assert "1 entry ->" in words_of("cache", "export", second, "--device", "h200")
    assert document("cache", "merge", first, second, "--out", both)["entries"] == 2
    none = document("cache", "export", tmp_path / "any.json", "--device", "h200", "--bits", "any", code=1)
    assert "you have no table" in none["error"] and not (tmp_path / "any.json").exists()
    assert document("cache", "import", both)["entries"] == 2
    assert len(document("cache", "show", "--device", "h200")["entries"]) == 2


@pytest.mark.parametrize(
    ("what", "deleted"),
    [("1 table", {"deleted": 1, "notes": 0}), ("0 tables and 1 note of tuning", {"deleted": 0, "notes": 1})],
    ids=["a table", "what tuning noted"],
)
def test_clear_asks_first(what: str, deleted: dict[str, int], folder: Path) -> None:
    def fill() -> None:
        if deleted["notes"]:
            folder.mkdir(parents=True, exist_ok=True)
            (folder / f"{GpuKey.of(H200)}{tables.checks.JOURNAL}").touch()
        else:
            store(problem_of())

    fill()
    left = os.listdir(folder)
    assert f"Delete {what} in" in words_of("cache", "clear", code=1, stdin="n\n")
    assert "add --yes" in document("cache", "clear", code=2)["error"] and os.listdir(folder) == left
    assert f"deleted {what}" in words_of("cache", "clear", stdin="y\n") and not tables.listed()
    fill()
    assert words_of("cache", "clear", "--yes") == f"deleted {what}"
    fill()
    assert document("cache", "clear", "--yes") == {**deleted, "extensions": 0}
    assert document("cache", "clear") == {"deleted": 0, "notes": 0, "extensions": 0}


def test_a_folder_that_may_not_be_read_is_not_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(problem_of())
    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", Mock(side_effect=PermissionError(errno.EACCES, "Permission denied")))
        for arguments in ((), ("--yes",), ("--models",)):
            assert "Permission denied" in document("cache", "clear", *arguments, code=1)["error"]
    assert tables.listed()


@pytest.mark.usefixtures("default_policy")
def test_what_was_learned_is_shown_and_forgotten_alone(folder: Path) -> None:
    problem = problem_of()
    table_fakes.store(problem_of(64))
    incumbent, how = select(problem, H200), {"us": 10.0, "before_us": 12.5, "samples": 18}
    assert learned.store(problem, another(problem), H200, before=incumbent, **how)  # type: ignore[arg-type]
    shown = words_of("cache", "show", "--device", "h200")
    assert "learned in service from 18 samples: in place of " in shown and "25.0 %" in shown
    assert learned.store(problem, incumbent, H200, before=incumbent, us=9.0, before_us=9.0, samples=30)
    assert "from 30 samples: nothing was faster" in words_of("cache", "show", "--device", "h200")
    assert "learned" in words_of("cache", "ls")
    assert "Delete 1 table in" in words_of("cache", "clear", "--learned", code=1, stdin="n\n")
    assert len(tables.listed()) == 2
    assert words_of("cache", "clear", "--learned", "--yes") and len(tables.listed()) == 1
    words_of("cache", "clear", "--learned", "--models", code=2)
