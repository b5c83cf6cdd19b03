"""The commands of perf: `python -m perf` lists them, and each has help."""

from __future__ import annotations

import importlib
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import pytest
import torch

from perf import heuristics
from perf.__main__ import COMMANDS
from perf.ladder import counters, interpret

ROOT = Path(__file__).parents[2]

MODULES = {
    ".".join(path.relative_to(ROOT / "perf").with_suffix("").parts).removesuffix(".__main__"): path
    for path in (ROOT / "perf").rglob("*.py")
    if path.stem != "__init__"
}
PACKAGES = [name for name, path in MODULES.items() if path.stem == "__main__"]


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_commands_are_what_can_be_run() -> None:
    run = {name for name, path in MODULES.items() if '__name__ == "__main__"' in path.read_text()}
    assert run == {*COMMANDS, "__main__"}
    listed = run_module("perf")
    assert listed.returncode == 0
    assert all(f"python -m perf.{name} " in listed.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"perf.{name}{'.__main__' * (name in PACKAGES)}").main(["--help"])
    assert exit_.value.code == 0
    assert f"perf{'/' if name == 'report' else '.'}{name}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("main", "arguments", "complaint"),
    [
        (counters.main, "", "STEM"),
        (counters.main, "c99 a 64", "invalid choice: 'c99'"),
        (counters.main, "c03_shared_tiled nonsense 64", "no variant 'nonsense' of c03_shared_tiled; there are"),
        (counters.main, "c03_shared_tiled fp32_32 0", "SIZE: a whole number from 1 on, not '0'"),
        (interpret.main, "k01 k99", "no rung k99; there are k01"),
        (interpret.main, "k01", "set TRITON_INTERPRET=1"),
    ],
)
def test_mistaken_calls_of_other_commands_are_refused(
    main: Callable[[list[str]], Any], arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_nvidias_heuristic_stands_beside_our_choices(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a library that says the same of every product: tiles or parts of K that are far from it are named."""
    kernel = SimpleNamespace(cta_tile_m=128, cta_tile_n=128, cta_tile_k=64, split_k=1)
    asked = MagicMock()
    asked.NvMatmulHeuristicsInterface().get_with_mnk.return_value = [{"kernel": kernel, "runtime": 1e-3}]
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", asked)
    assert heuristics.main(["a100"]) == 0
    rows = {line.split(" |")[0]: line for line in capsys.readouterr().out.splitlines()}
    assert rows["| 512 x 14336 x 4096"].endswith(" / 1, 370 us | 128x128x64 / 1, 1,000 us |  |")
    assert rows["| 64 x 256 x 8192"].endswith("| tile, split |")
    with pytest.raises(SystemExit):
        heuristics.main(["h300"])
    monkeypatch.setitem(sys.modules, "nvMatmulHeuristics", None)
    with pytest.raises(SystemExit):
        heuristics.main(["a100"])
    assert "pip install nvidia-matmul-heuristics" in capsys.readouterr().err


def test_counting_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert counters.main(["c03_shared_tiled", "fp32_32", "64"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err
