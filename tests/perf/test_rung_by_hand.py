"""A rung by hand without a GPU: the command's mistakes, its lists, and what it says of compiled kernels."""

from __future__ import annotations

import re
import shutil
import subprocess
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from perf.ladder import by_hand
from perf.ladder.record import Error, Spread, Timed
from tests.support.kernel_mutants import RUNGS
from tests.support.processes import python
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, command

ROOT = Path(__file__).parents[2]


def typed(*arguments: str, path: Path = ROOT, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs the command as one types it, where torch sees no GPU."""
    where = {"PYTHONPATH": str(path), "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": None, **variables}
    return python("-m", "triton_gemm.ladder", *arguments, cwd=path, **where)  # type: ignore[arg-type]  # variables


def test_what_a_configuration_leaves_out_comes_from_the_list() -> None:
    k06, k08 = RUNGS["k06"], RUNGS["k08"]
    assert command.config_of(k06, "128x64x16,4,3") == GemmConfig(128, 64, 16, 8, 4, 3)
    assert command.config_of(k08, "64x64x64") == GemmConfig(64, 64, 64, 8, 8, 4)  # as it is on the list
    assert command.config_of(k08, "32x64x64,2") == GemmConfig(32, 64, 64, 8, 2, 3)  # of no tile there
    assert command.config_of(RUNGS["k03"], "64x32x32") == GemmConfig(64, 32, 32, None, 4, 1)
    assert command.config_of(RUNGS["k02"], "256,2") == GemmConfig(BLOCK_N=256, num_warps=2)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ("k12", "no rung 'k12'; there are k01, k02, k03, k04, k05, k06, k07, k08, k09, k10, k11"),
        ("k06 --config 128x64", "k06 takes --config BLOCK_MxBLOCK_NxBLOCK_K[,warps[,stages[,group]]], as "),
        ("k06 --config 128x64x16,4,3,8,1", "k06 takes --config"),
        ("k06 --config 128x64xsome", "k06 takes --config"),
        ("k03 --config 64x64x16,4,1,8", "k03 takes --config BLOCK_MxBLOCK_NxBLOCK_K[,warps[,stages]], as "),
        ("k01 --config 64x64", "k01 takes --config BLOCK_M[,warps[,stages]], as 256,4,1, not '64x64'"),
        ("k06 --config 128x256x64,4,4", "k06 cannot take 128x256x64,4,4,8 on sm_90: needs 295168 bytes of shared mem"),
        ("k06 --config 256x256x16,4,2", "k06 does not take 256x256x16,4,2,8 on sm_90: would spill: 512 accum"),
        ("k06 --config 48x64x16", "k06 cannot take 48x64x16,4,3,8 on sm_90: BLOCK_M is 48, not a power of two"),
        ("k11 --config 128x128x64,8,1", "num_stages is 1, not a whole number from 2 on"),
        ("k06 --dtype fp16", "k06 takes fp32, not fp16"),
        ("k08 --dtype fp32", "k08 takes fp16 and bf16, not fp32"),
        ("k06 --dtype fp8", "argument --dtype: invalid choice: 'fp8'"),
        ("k06 --layout xy", "argument --layout: invalid choice: 'xy'"),
        ("k11 --arch sm_80", "k11 compiles for sm_90, not 'sm_80'"),
        ("k10 --size 100", "k10: TMA cannot take a (100, 100): its rows are 200 bytes apart"),
        ("k06 --size 0", "argument --size: a size is a whole number from 1 to 999999, not '0'"),
        ("k06 --size 1e3", "argument --size: a size is a whole number"),
        ("k06 --shape 64x64", "--shape: a shape is three whole numbers from 1 on, as 4096x2048x1024, not '64x64'"),
        ("k06 --size 64 --shape 64x64x64", "argument --shape: not allowed with argument --size"),
        ("k06 --budget no", "argument --budget: a number of seconds above 0, not 'no'"),
        ("k06 --arch sm_90 --budget 1", "--budget is for timing, and nothing is timed here"),
        ("--size 64", "--size is for running a rung: name a rung"),
        ("k06 --list --layout nt", "--layout is for running a rung: leave out --list"),
        ("k06 k07", "unrecognized arguments: k07"),
    ],
)
def test_a_mistake_is_answered_by_a_sentence(
    arguments: str, sentence: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    try:
        status = command.main(arguments.split())
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    assert status == 2 and printed.out == ""
    assert printed.err.startswith("error: ") and printed.err.count("\n") == 1
    assert sentence in printed.err


def test_without_an_argument_it_lists_the_rungs_and_says_how_to_go_on(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main([]) == 0
    out = capsys.readouterr().out
    for rung in LADDER:
        assert re.search(rf"^{rung.id} {re.escape(rung.title)} .*{len(rung.configs)} configuration", out, re.MULTILINE)
    assert "python -m triton_gemm.ladder k06 --config 128x64x16,4,3" in out and "--help" in out


def test_a_list_can_be_typed_in_again(capsys: pytest.CaptureFixture[str]) -> None:
    for rung in LADDER:
        assert command.main([rung.name, "--list"]) == 0
        _, *configs = capsys.readouterr().out.splitlines()
        assert tuple(command.config_of(rung, line.strip()) for line in configs) == rung.configs
    assert command.main(["--list"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == sum(1 + len(rung.configs) for rung in LADDER)


@pytest.mark.slow
def test_the_command_interprets_and_compiles() -> None:
    done = typed("k06", "--config", "64x64x16,4,3", "--shape", "64x96x80", "--layout", "tt")
    assert done.returncode == 0, done.stderr
    title, _, interpreted, compiled, heading, line = done.stdout.splitlines()
    assert title == "k06 pipelined, fp32 tt, M x N x K = 64 x 96 x 80"
    assert "interpreter at 64 x 96 x 80" in interpreted and "compiled for sm_90" in compiled
    assert heading.split() == ["tile,warps,stages,group", "error", "registers", "shared", "KiB", "spills"]
    name, error, registers, shared, spills = line.split()
    assert name == "64x64x16,4,3,8"
    assert 0 < float(error) < 1e-6
    assert 32 <= int(registers) <= 255 and 0 < float(shared) < 227 and spills == "0"
    assert "[  1/2]" in done.stderr and "[  2/2]" in done.stderr  # progress, line by line where there is no terminal


@pytest.mark.parametrize(
    ("arguments", "config", "home", "error", "message"),
    [
        ("k04 --arch sm_80 --size 1024", "64x64x16,4,1,4", None, True, "interpreter at 96 x 128 x 64"),
        ("k11 --arch sm_90 --dtype bf16", "128x128x64,8,5,8", None, False, "does not know Gluon"),
        # No Python starts, as with Triton 3.6 and NumPy 2.4, where a child says why as it ends.
        ("k04 --arch sm_90 --size 64", "64x64x16,4,1,4", "/nowhere", False, "the interpreter does not run here ("),
    ],
    ids=["a large shape", "Gluon", "no interpreter"],
)
def test_what_is_not_interpreted_as_it_is_is_compiled(
    arguments: str,
    config: str,
    home: str | None,
    error: bool,
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    if home:
        monkeypatch.setenv("PYTHONHOME", home)
    assert command.main([*arguments.split(), "--config", config]) == 0
    out = capsys.readouterr().out
    assert message in out and f"compiled for {arguments.split()[2]}" in out
    name, *norm, registers, _, spills = out.splitlines()[-1].split()
    assert name == config and 32 <= int(registers) <= 255 and spills == "0"
    assert all(float(text) < 1e-6 for text in norm) and bool(norm) is error


@pytest.mark.full
def test_all_that_are_legal_are_tried_and_the_rest_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    """At odd sizes large tiles are out, unless one is named."""
    assert command.main(["k08", "--arch", "sm_90", "--shape", "72x88x56"]) == 0
    out = capsys.readouterr().out
    assert "12 of 14 configurations are left out" in out
    assert {line.split()[0] for line in out.splitlines()[-2:]} == {"64x64x64,8,4,8", "64x64x32,4,4,8"}
    assert command.main(["k08", "--arch", "sm_90", "--shape", "72x88x56", "--config", "128x128x64"]) == 0
    out = capsys.readouterr().out
    assert "left out" not in out and out.splitlines()[-1].startswith("128x128x64,4,3,8 ")


def test_a_kernel_that_does_not_compile_is_a_failure(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = RuntimeError("PassManager::run failed\nand more")
    monkeypatch.setattr(by_hand.aot, "compile_launch", Mock(side_effect=broken))
    assert command.main(["k11", "--arch", "sm_90", "--config", "128x128x64,8,5"]) == 1
    out = capsys.readouterr().out
    assert re.search("^128x128x64,8,5,8 +failed: RuntimeError: PassManager::run failed$", out, re.MULTILINE)


def test_a_rung_is_shown_where_cublas_was_wrong(capsys: pytest.CaptureFixture[str]) -> None:
    time_ms = Spread(median=2.0, p20=2.0, p80=2.0)
    result = Timed(error=Error(norm=1e-7), registers=64, spills=0, time_ms=time_ms, ratio=None, rounds=5, repeats=5)
    lines = by_hand.Lines(by_hand.Console(), by_hand.TIMED)
    by_hand._show_timed(lines, "64x64x16,4,3", result, by_hand.Problem(64, 64, 64, "ieee"))
    assert "64x64x16,4,3" in capsys.readouterr().out


@pytest.mark.parametrize("other", [False, True], ids=["no perf", "another perf"])
def test_without_the_repository_one_sentence_says_so(other: bool, tmp_path: Path) -> None:
    """As in an environment with the wheel, where some other package may be called perf."""
    shutil.copytree(ROOT / "triton_gemm", tmp_path / "triton_gemm", ignore=shutil.ignore_patterns("__pycache__"))
    if other:
        (tmp_path / "perf").mkdir()
        (tmp_path / "perf" / "__init__.py").write_text("")
    else:  # an editable installation may put a clone on the path
        (tmp_path / "sitecustomize.py").write_text("import sys\nsys.modules['perf'] = None\n")
    done = typed("k06", path=tmp_path)
    assert done.returncode == 1 and done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert "error: rungs are run and measured by the repository's `perf`, which is not installed" in done.stderr


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    error = ModuleNotFoundError("No module named 'rich'", name="rich")
    monkeypatch.setattr(command.importlib, "import_module", Mock(side_effect=error))
    assert command.main(["k06", "--config", "128x64x16,4,3"]) == 1
    assert capsys.readouterr().err == "error: No module named 'rich': pip install rich\n"
