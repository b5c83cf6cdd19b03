"""What one meets first: the help, and calls that this GPU or this installation cannot serve."""

from __future__ import annotations

import sys
from pathlib import Path
from unittest.mock import Mock

import pytest

import triton_gemm
import triton_gemm_command
from tests.cli.test_cli import CACHE, COMMANDS, call, document, words_of
from triton_gemm import cli


@pytest.mark.parametrize("command", [(), *((x,) for x in COMMANDS[:-2]), *(("cache", x) for x in CACHE)], ids=" ".join)
def test_help_names_no_file_of_the_repository(command: tuple[str, ...]) -> None:
    """A wheel does not have them."""
    assert ".md" not in words_of(*command, "--help")


@pytest.mark.parametrize("words", [[], ["-h"], ["--help"]], ids=" ".join)
def test_help_needs_no_torch(
    words: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the words of the command itself."""
    monkeypatch.setattr(sys, "argv", ["triton-gemm", *words])
    monkeypatch.setitem(sys.modules, "triton_gemm", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        triton_gemm_command.main()
    alone = capsys.readouterr()
    assert call(*words).output == alone.out + alone.err and ended.value.code == call(*words).exit_code


def test_all_other_words_are_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Mock()
    monkeypatch.setattr(cli, "main", main)
    for words in (["--version"], ["doctor"], ["explain", "--help"]):
        monkeypatch.setattr(sys, "argv", ["triton-gemm", *words])
        triton_gemm_command.main()
    assert main.call_count == 3


@pytest.mark.parametrize("command", ["tune --dry-run", "warmup", "compare"])
def test_an_empty_recording_says_how_to_record(command: str, tmp_path: Path) -> None:
    with pytest.warns(RuntimeWarning, match="no GEMM"), triton_gemm.record_shapes(file := tmp_path / "shapes.json"):
        pass
    error = document(*command.split(), "--shapes-from", file, code=2)["error"]
    assert "shapes.json has no GEMM; this package's calls are recorded, and torch's own under use()" in error


def test_fp8_on_a_gpu_without_it_is_no_question_of_scales() -> None:
    for scales in ((), ("--scales", "rows")):
        error = document("explain", "16x64x64", "--dtype", "fp8", "--device", "a100", *scales, code=1)["error"]
        assert "fp8 needs compute capability 8.9 or newer" in error
