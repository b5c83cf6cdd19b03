"""The commands of perf: `python -m perf` lists them, each has help, and refuses what is mistaken."""

from __future__ import annotations

import importlib
import shlex
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from examples import bench_gpt
from perf import battery
from perf.__main__ import COMMANDS
from perf.accuracy import __main__ as accuracy
from perf.bench import __main__ as bench
from perf.calibrate import __main__ as calibrate
from perf.ladder import counters, interpret, report
from perf.models import __main__ as models
from tests.support.processes import python

ROOT = Path(__file__).parents[2]

MODULES = {
    ".".join(path.relative_to(ROOT / "perf").with_suffix("").parts).removesuffix(".__main__"): path
    for path in (ROOT / "perf").rglob("*.py")
    if path.stem != "__init__"
}
PACKAGES = [name for name, path in MODULES.items() if path.stem == "__main__"]


def test_commands_are_what_can_be_run() -> None:
    run = {name for name, path in MODULES.items() if '__name__ == "__main__"' in path.read_text()}
    assert run == {*COMMANDS, "__main__"}
    listed = python("-m", "perf")
    assert listed.returncode == 0
    assert all(f"python -m perf.{name} " in listed.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"perf.{name}{'.__main__' * (name in PACKAGES)}").main(["--help"])
    assert exit_.value.code == 0
    assert f"perf{'/' if name == 'report' else '.'}{name}" in capsys.readouterr().out


MISTAKES: dict[Callable[[list[str]], Any], list[tuple[str, str]]] = {
    accuracy.main: [("bf17", "no 'bf17'; there are bf16 to fp32;")],
    battery.main: [("", "there is no CUDA device here")],
    bench.main: [
        ("nonsense", "no suite 'nonsense'"),
        ("square --dtype fp8", "--dtype"),
        ("square mid --json a.json", "--json is for one suite"),
        ("square --json a.json --out b", "the same thing twice"),
        ("square --limit 0", "--limit: a whole number from 1 on"),
        ("square --budget 0", "--budget"),
        ("square --budget nan", "--budget"),
        ("square --providers cuBLAS,magic", "no 'magic'; there are triton_gemm"),
        ("", "name a SUITE, or --list them"),
        ("square --out ''", "--out: an empty name"),
        ("square --json ' '", "--json: an empty name"),
        ("square --list --warm --budget 2", "--budget, --warm would be ignored: --list measures nothing"),
        (
            "square --list --dtype bf16 --json a --out a --providers cuBLAS --peers",
            "--dtype, --json, --out, --providers, --peers would be ignored",
        ),
        ("--list --limit 2 --unseen 1", "--limit, --unseen would be ignored"),
        ("tf32 fp8 --dtype fp16", "--dtype would be ignored: tf32, fp8: the precision is the suite's own"),
        ("square --warm --providers cuBLAS", "--warm would be ignored: it compiles for triton_gemm"),
        ("square --fail-below 0.98", "--fail-below needs a --baseline"),
        (f"square llm --baseline {__file__}", "--baseline of several suites is a folder"),
        ("square", "needs a CUDA GPU"),
        ("square first-calls", "no suite 'first-calls'"),
        ("first-calls --orders 0", "--orders: a whole number from 1 on"),
        ("first-calls --orders 2 --json a", "--json would be ignored: --orders writes no record"),
        ("first-calls", "needs a CUDA GPU"),
    ],
    bench_gpt.main: [
        ("--tiny --layers 2 --quick", "--layers, --quick would be ignored: --tiny"),
        ("--tiny --decode 1 --out x", "--decode, --out would be ignored: --tiny"),
        ("--out ''", "--out: an empty name"),
        ("--rounds 0", "--rounds: a whole number from 1 on"),
        ("--width 100", "--width is a multiple of 64"),
        ("", "needs a CUDA GPU"),
    ],
    calibrate.main: [
        ("", "COMMAND"),
        ("guess", "guess"),
        ("fit", "FILE"),
        ("measure --limit 0", "--limit: a whole number from 1 on"),
        ("measure --out ''", "--out: an empty name"),
        ("measure", "sm_90"),
    ],
    counters.main: [
        ("", "LAUNCH"),
        ("c99/a:ieee:64", "no rung or twin 'c99'"),
        ("c03_shared_tiled/nonsense:ieee:64", "nonsense"),
        ("c03_shared_tiled/fp32_32:ieee", "is not PROVIDER:MODE:SIZE[:CONFIG]"),
        ("c03_shared_tiled/fp32_32:ieee:0", "no precision class 'ieee', or a size below 1"),
        ("k03_blocked:ieee:64:64x64", "k03 takes --config"),
        ("c03_shared_tiled/fp32_32:ieee:64", "needs a CUDA GPU"),
    ],
    interpret.main: [("k01 k99", "no rung k99; there are k01"), ("k01", "set TRITON_INTERPRET=1")],
    models.main: [
        ("llama-9b", "no 'llama-9b'; there are llama-1b"),
        ("--case nonsense", "no case with 'nonsense'; there are forward"),
        ("bert-base --case static", "no model of these has such a case"),
        ("--shard 3/2", "a shard is 1/4 to 4/4, not '3/2'"),
        ("--budget 0", "--budget is seconds"),
        ("--list --tiny --out a", "--tiny, --out would be ignored: --list measures nothing"),
        ("--merge a.json --shard 1/2", "--shard would be ignored: --merge measures nothing"),
        ("--out ''", "--out: an empty name"),
        ("--tiny", "--tiny needs TRITON_INTERPRET=1"),
        ("", "needs a CUDA GPU"),
    ],
    report.main: [
        ("--rungs k99", "--rungs: no rung 'k99'"),
        ("--sizes 1024,many", "--sizes"),
        ("--dtype fp8", "--dtype"),
        ("--out ''", "--out: an empty name"),
        (f"--out {__file__}/results", "cannot write"),
        ("--sizes 512 --dtype fp16 --counters", "--dtype, --sizes, --counters would be ignored: torch sees no GPU"),
        ("--tuning", "--tuning would be ignored: torch sees no GPU here, and nothing is timed"),
    ],
}
WITH_A_GPU: dict[Callable[[list[str]], Any], list[tuple[str, str]]] = {
    report.main: [
        ("--rungs k01,k02 --dtype fp16", "none of the rungs of --rungs multiplies fp16"),
        ("--tuning --fresh", "--tuning adds to the record that is there, and measures nothing else: leave out --fresh"),
        ("--counters --tuning", "leave out --counters"),
        ("--counters --sizes 512 --quick", "--sizes, --quick would be ignored: --counters counts each rung at 4096"),
        ("--counters", "ncu is not on PATH"),
    ]
}


@pytest.mark.parametrize(
    ("there", "main", "arguments", "complaint"),
    [
        pytest.param(there, main, *mistake, id=f"{main.__module__.removesuffix('.__main__')} {mistake[0]}")
        for there, mistakes in ((False, MISTAKES), (True, WITH_A_GPU))
        for main, of_it in mistakes.items()
        for mistake in of_it
    ],
)
def test_a_mistaken_call_is_refused_before_any_work(
    there: bool,
    main: Callable[[list[str]], int],
    arguments: str,
    complaint: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: there)
    try:
        status: object = main(shlex.split(arguments))
    except SystemExit as left:
        status = left.code
    printed = capsys.readouterr()
    assert status == 2 and complaint in printed.err and "[  1/" not in printed.err
