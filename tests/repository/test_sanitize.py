"""What watches kernels on a GPU, without one: the tools' absence and findings are told apart from passing."""

from __future__ import annotations

from pathlib import Path
from unittest.mock import Mock

import pytest

from tests.gpu import sanitize
from tests.gpu.sanitize import FOUND, SKIPPED
from tests.support import kernel_forms
from tests.support.kernel_mutants import K11_RACE
from tests.support.table_fakes import HOPPER


def program(folder: Path, name: str, script: str) -> str:
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return str(path)


@pytest.fixture
def tool(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A compute-sanitizer that says how it was called, and ends with the status in `status`."""
    (tmp_path / "bin").mkdir()
    script = f'echo "$PYTORCH_NO_CUDA_MEMORY_CACHING $@" > {tmp_path}/called; exit $(cat {tmp_path}/status)'
    program(tmp_path / "bin", "compute-sanitizer", script)
    monkeypatch.setenv("CUDA_HOME", str(tmp_path))
    monkeypatch.setenv("PATH", "/usr/bin:/bin")
    return tmp_path


@pytest.mark.parametrize("status", [0, FOUND, SKIPPED])
@pytest.mark.parametrize("name", ["memcheck", "synccheck"])
def test_compute_sanitizer_watches_what_is_asked(name: str, status: int, tool: Path) -> None:
    """Without torch's cache of memory; what it finds is the status."""
    (tool / "status").write_text(str(status))
    assert sanitize.watch(name, [*sanitize.LAUNCH, "kernels", "--share", "2/6"]).returncode == status
    caching, *called = (tool / "called").read_text().split()
    assert caching == "1" and called[:2] == ["--tool", name]
    assert called[called.index("--error-exitcode") + 1] == str(FOUND)
    assert called[called.index("-m") :] == ["-m", "tests.gpu.sanitize", "kernels", "--share", "2/6"]
    (tool / "bin" / "compute-sanitizer").unlink()
    assert sanitize.sanitizer() is None


def test_missing_twins_are_no_failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "twins", Mock(side_effect=sanitize.TwinUnavailable("nvcc not found")))
    assert sanitize.main(["twins"]) == SKIPPED
    assert "nvcc not found" in capsys.readouterr().out
    monkeypatch.setattr(sanitize, "twins", lambda share: [])
    assert sanitize.main(["twins"]) == 1  # which tries nothing
    monkeypatch.setattr(sanitize, "twins", lambda share: [share, "b"])
    assert sanitize.main(["twins", "--share", "1/3"]) == 0
    assert capsys.readouterr().out.endswith("1/3\nb\n2 launches\n")


MESSAGE = 'echo "a.py:3: block: [0,0,0] Assertion \\`Buffer being accessed has outstanding writes\\` failed."; exit 1'


def consan(script: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> str | None:
    monkeypatch.setattr(sanitize, "LAUNCH", (program(folder, "python", script),))
    return sanitize.consan(["one", "--name", "x"])


def test_what_consan_finds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert consan("exit 0", tmp_path, monkeypatch) is None
    found = consan(MESSAGE, tmp_path, monkeypatch)
    assert found is not None and "Buffer being accessed has outstanding writes" in found
    assert consan("kill -9 $$", tmp_path, monkeypatch) == "exit status -9"
    assert consan('test "$TRITON_INSTRUMENTATION_MODE" = consan', tmp_path, monkeypatch) is None
    monkeypatch.setattr(sanitize, "LIMIT_S", 0.5)
    assert consan("exec sleep 20", tmp_path, monkeypatch) == "did not end within 0 s"


def test_every_failure_is_printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sanitize, "gpu", lambda: HOPPER)
    monkeypatch.setattr(sanitize, "watched_by_consan", lambda device: ["a", "b: c", "d"])
    monkeypatch.setattr(sanitize, "consan", lambda command: "a race" if command[-1] == "b: c" else None)
    assert sanitize.watch_by_consan("1/1", 2) == 1
    assert capsys.readouterr().out == "a\nFAILED: b: c: a race\nd\n3 launches; 1 failures\n"
    assert sanitize.watch_by_consan("3/3", 2) == 0
    assert sanitize.watch_by_consan("4/4", 2) == 1


def test_consan_watches_every_kernel_and_rung(tmp_path: Path) -> None:
    """And k11 with one wait less."""
    names = sanitize.watched_by_consan(HOPPER)
    assert len(set(names)) == len(names)
    forms = {name.partition(": ")[2].partition(",")[0] for name in names if ": " in name}
    assert forms == {"fma", "gemv", "mma_fp64", "portable", "skinny", "warp_specialised"}
    assert {"k01_naive", "k10_tma", "k11_warp_specialised"} <= set(names)
    assert {name.partition(": ")[0] for name in names if ": " in name} == set(kernel_forms.circumstances())
    assert K11_RACE.load(tmp_path).RUNG.id == "k11"
