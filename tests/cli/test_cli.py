"""The command `triton-gemm`: every command, for people and for programs, and what it says to a wrong call."""

from __future__ import annotations

import csv
import errno
import io
import json
import logging
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, get_type_hints
from unittest.mock import Mock

import pytest
import torch
import triton
from typer.models import CommandInfo, OptionInfo
from typer.testing import CliRunner, Result

import triton_gemm
from tests.support import table_fakes
from tests.support.table_fakes import another, problem_of
from triton_gemm import cli, tables
from triton_gemm.cli import output, products, source_tree, words
from triton_gemm.cli.app import app
from triton_gemm.hardware import nvml
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.hardware.gpus import named_device
from triton_gemm.layers import problems_of
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting import doctor
from triton_gemm.reporting.doctor import Finding
from triton_gemm.runtime import precompile
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, select
from triton_gemm.suites import SUITES
from triton_gemm.tables import files, records
from triton_gemm.tuning.candidates import candidates
from triton_gemm.tuning.report import Comparison, ProductComparison

H200 = named_device("h200")
PRODUCT = ["512", "1024", "2048"]  # problem_of()
COMMANDS = ("explain", "tune", "compare", "warmup", "build", "cache", "doctor", "calibrate", "bench", "ladder")
CACHE = ("ls", "show", "export", "import", "merge", "verify", "clear")


def call(*arguments: object, stdin: str | None = None) -> Result:
    return CliRunner().invoke(app, [str(x) for x in arguments], input=stdin, prog_name="triton-gemm")


def document(*arguments: object, code: int = 0) -> Any:
    """What a call with --json prints, all of it."""
    done = call(*arguments, "--json")
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def words_of(*arguments: object, code: int = 0) -> str:
    """What a call prints for people, on one line."""
    done = call(*arguments)
    assert done.exit_code == code, done.output
    return " ".join(re.sub(r"[│╭╰─╮╯]", " ", done.output).split())


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    return table_fakes.own_folder(tmp_path / "own", monkeypatch)


def store(problem: GemmProblem, nth: int = 1, us: float = 10.0) -> Selection:
    selection = table_fakes.another(problem, nth)
    assert tables.store(problem, selection, H200, us=us, default_us=12.0)
    return selection


# --- What it says of itself ---


def test_help_shows_every_command_in_plain_words() -> None:
    shown = words_of("--help")
    assert all(f" {name} " in shown for name in COMMANDS)
    assert all(f" {name} " in words_of("cache", "--help") for name in CACHE)
    for name in (*COMMANDS[:3], "doctor"):
        assert words_of(name, "-h").startswith(f"Usage: triton-gemm {name}")
    for name in CACHE:
        assert "--json" in words_of("cache", name, "--help")
    assert words_of("--version") == f"triton_gemm {triton_gemm.__version__}"


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("explain 16 14336", "Missing argument 'K'"),
        ("explain 16 14336 0 --device h200", "Invalid value for 'K'"),
        ("explain 16 x 4096 --device h200", "Invalid value for 'N'"),
        ("explain 1 2 3 --layout qq --device h200", "'qq' is not one of"),
        ("explain 1 2 3 --dtype fp4 --device h200", "--dtype: 'fp4' is not one of fp32, fp16, bf16"),
        ("explain 1 2 3 --device h300", "--device: 'h300' is not one of a100, a10, l4"),
        ("explain 1 2 3 --device cuda:7", "there is no cuda:7: torch sees"),
        ("explain 1 2 3 --device absent.json", "absent.json cannot be read: No such file"),
        ("explain 1 2 3 --device h200 --precision tf32", "precision"),
        ("explain 1 2 3 --device h200 --scales rows", "scaled_matmul is not implemented for torch.bfloat16"),
        ("explain 1 2 3 --device h200 --beta 1 --bias n", "beta and bias do not go together"),
        ("explain 1 2 3 --device h200 --out-dtype int32", "out_dtype must be the same as input dtype or fp32"),
        ("explain 1 2 3 --device h200 --dtype fp8 --batch 2 --scales tensor", "a must be 2D"),
        ("explain 7 1048576 281474976710656 --device h200", "Storage size calculation overflowed"),
        ("warmup --device h200 --shapes 7x1048576x281474976710656", "Storage size calculation overflowed"),
        ("warmup --device h200", "give one of --shapes, --suite, --shapes-from"),
        ("warmup --device h200", "--shapes-from, --weights"),
        ("warmup --device h200 --weights 8x8 --shapes 1x2x3", "not --shapes and --weights"),
        ("warmup --device h200 --weights 8x8", "--weights: give --rows, too"),
        ("warmup --device h200 --rows 8", "give one of"),
        ("warmup --device h200 --shapes 1x2x3 --rows 8", "--rows goes with --weights"),
        ("warmup --device h200 --suite llm --bias", "--bias goes with --weights"),
        ("warmup --device h200 --weights 8x8x8 --rows 8", "--weights: '8x8x8' is not NxK with numbers from 1 to 2814"),
        ("warmup --device h200 --weights 8x8, --rows 8", "--weights: '' is not NxK"),
        ("warmup --device h200 --weights 0x8 --rows 8", "--weights: '0x8' is not NxK"),
        ("warmup --device h200 --weights 8x8 --rows 0-8", "--rows: '0-8' is neither a number from 1 to 1048576"),
        ("warmup --device h200 --weights 8x8 --rows 1,8-4", "--rows: '8-4' is neither a number"),
        ("warmup --device h200 --weights 8x8 --rows 1-1048577", "--rows: '1-1048577' is neither a number"),
        ("warmup --device h200 --weights 8x8 --rows few", "nor a range of them, as in 1-512,2048"),
        (
            "warmup --device h200 --weights 8x8 --rows 8 --layout nn",
            "--layout: --weights are linear layers, whose layout is nt",
        ),
        ("warmup --device h200 --weights 8x8 --rows 8 --dtype fp8", "linear layers cannot be torch.float8_e4m3"),
        (
            "warmup --device h200 --weights 8x8 --rows 8 --dtype int8 --bias",
            "linear layers with a bias cannot be torch.int8",
        ),
        ("explain 16 64 64 --dtype fp8 --device h200", "--dtype fp8 goes with --scales tensor, rows or blocks"),
        ("tune --suite llm --rows 8", "--rows goes with --weights"),
        ("warmup --device h200 --arch sm_90 --shapes 1x2x3", "give --arch or --device, not both"),
        ("warmup --arch hopper --shapes 1x2x3", "--arch: 'hopper' is not one of sm_80"),
        ("warmup --device h200 --shapes 1x2", "--shapes: '1x2' is not MxNxK"),
        ("warmup --device h200 --shapes 1x2x0", "is not MxNxK"),
        ("warmup --device h200 --shapes 99999999999999999999x16x16", "with numbers from 1 to 281474976710656"),
        ("warmup --device h200 --shapes-from empty.json --dtype fp16", "--dtype: the GEMMs of --shapes-from have"),
        ("warmup --device h200 --shapes-from empty.json --layout nt", "--layout: the GEMMs of --shapes-from have"),
        ("tune --suite llm --layout nt", "--layout: the GEMMs of --suite have their own"),
        ("tune --suite fp8 --dtype bf16", "--dtype: the GEMMs of --suite fp8 have their own"),
        ("explain 1 2 3 --device h200 --group-dim K", "--group-dim goes with --groups"),
        ("warmup --device h200 --shapes-from absent.json", "there is no file absent.json"),
        ("tune --shapes 1x2x3 --suite llm", "not --shapes and --suite"),
        ("tune --suite nonsense", "--suite: 'nonsense' is not one of square, llm"),
        ("tune --suite llm --dtype fp64", "--dtype bf16 or fp16"),
        ("tune --shapes 1x2x3 --budget soon", "--budget: 'soon' is not a duration"),
        ("tune --shapes 1x2x3 --budget 0", "is not a duration above 0"),
        ("tune --shapes 1x2x3 --bits some", "'some' is not one of"),
        ("tune --shapes 1x2x3 --measure wall", "'wall' is not one of"),
        ("tune --shapes 1x2x3 --device foo", "--device: 'foo' is not a GPU of this machine"),
        ("tune --shapes 1x2x3 --device h200", "--device: 'h200' is not a GPU of this machine"),
        ("compare", "give one of --shapes, --suite, --shapes-from, --weights"),
        ("compare --shapes 1x2x3 --device h200", "--device: 'h200' is not a GPU of this machine"),
        ("compare --shapes 1x2x3 --budget 0", "is not a duration above 0"),
        ("compare --weights 8x8", "--weights: give --rows, too"),
        ("compare --weights 8x8 --rows 8-4", "--rows: '8-4' is neither a number"),
        ("compare --shapes 1x2x3 --csv absent/x.csv", "there is no folder absent"),
        ("compare --shapes 1x2x3 --plot absent/x.png", "there is no folder absent"),
        ("compare --shapes 1x2x3 --plot x.xyz", "--plot: 'x.xyz' must end with one of .eps"),
        ("calibrate --device 0", "--device: '0' is not a GPU of this machine"),
        ("warmup --device h200 --shapes 1x2x3 --dtype fp8", "torch.float8_e4m3fn needs scales"),
        ("warmup --device h200 --shapes-from empty.json", "is not a file of record_shapes"),
        ("explain 99999999999999999999 16 16 --device h200", "Invalid value for 'M'"),
        ("cache nonsense", "No such command 'nonsense'"),
        ("cache show absent.json", "absent.json"),
        ("cache import absent.json", "does not exist"),
    ],
)
def test_a_wrong_call_has_a_message(
    arguments: str, complaint: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = records.text_of({"calls": 1, "problem": records.plain(replace(problem_of(), batch=0))})
    Path("empty.json").write_text(f'{{"format": 1, "products": [{line}]}}')
    code = 1 if arguments.startswith("cache show") else 2
    assert complaint in words_of(*arguments.split(), code=code)


@pytest.mark.parametrize(
    "arguments",
    ["nonsense", "--nonsense", "explain 16 16", "explain 0 1 1", "cache import absent.json", "cache nonsense"],
)
def test_programs_read_why_words_are_no_call(arguments: str) -> None:
    printed = call(*arguments.split()).output
    error = document(*arguments.split(), code=2)["error"]
    assert error.split()[-1].strip(".'") in printed


BACKTRACE = "it is too large\nException raised from sizes at sizes.cpp:79\nframe #0: .."


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(RuntimeError(BACKTRACE), 1, "it is too large"), (KeyboardInterrupt(), 130, "interrupted")],
)
def test_errors_are_one_line(error: BaseException, code: int, message: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's backtrace is left out. An interruption has its own exit code."""
    monkeypatch.setattr(cli.doctor, "examine", Mock(side_effect=error))
    assert document("doctor", code=code) == {"error": message}


def test_an_interruption_of_importing_has_its_own_code(monkeypatch: pytest.MonkeyPatch) -> None:
    class Interrupted:
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "triton_gemm.cli.app":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "triton_gemm.cli.app")
    monkeypatch.setattr(sys, "meta_path", [Interrupted(), *sys.meta_path])
    with pytest.raises(SystemExit) as ended:
        cli.main(["--help"])
    assert ended.value.code == 130


def test_nothing_in_a_file_reaches_the_terminal_as_a_command(folder: Path) -> None:
    hostile = "\x1b[2J\x07"
    assert tables.store(problem_of(), another(problem_of()), H200, us=1.0, default_us=2.0, measured=hostile)
    for arguments in (["cache", "show"], ["explain", *PRODUCT]):
        assert "\x1b" not in (shown := words_of(*arguments, "--device", "h200")) and "\\x1b[2J\\x07" in shown


def test_words_are_not_broken_where_lines_can_be(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(output, "console", lambda: SimpleNamespace(width=80))
    names = (
        "warp_specialised 64x16x128 4 warps 8 stages, 9 tiles in 7 parts, swap_ab",
        "bf16, tensor cores, 128-deep tiles",
    )
    columns = ["", "kernel and configuration", "bits", "predicted us", "measured us", "registers", "shared memory"]
    made = output.table(columns, [["->", *names, 5.23, "10 (a table)", 255, 168212]], left=3)
    console = output.Console(width=80, file=io.StringIO())
    with console.capture() as shown:
        console.print(made)
    for word in [*" ".join((*names, *columns)).split(), "10 (a table)", "168212"]:
        assert word in shown.get()
    assert max(map(len, shown.get().splitlines())) <= 80


def test_without_a_gpu_the_message_asks_to_name_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(words.torch.cuda, "is_available", lambda: False)
    assert "--device h200" in words_of("explain", *PRODUCT, code=2)
    assert "--device h200" in document("cache", "verify", code=2)["error"]


def test_what_cannot_be_done_is_no_wrong_call(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert "needs compute capability 8.0" in document("explain", *PRODUCT, "--device", "sm_75", code=1)["error"]
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "/dev/null")
    file = folder.parent / "given.json"
    file.parent.mkdir(parents=True)
    file.write_text(tables.files.Table(GpuKey.of(H200)).text())
    assert "error" in document("cache", "import", file, code=1)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="only Linux has a disk that is always full")
@pytest.mark.parametrize("unbuffered", ["", "1"])
@pytest.mark.parametrize("arguments", ["cache ls", "cache ls --json", "--version"])
def test_where_nothing_can_be_printed_one_line_says_so(arguments: str, unbuffered: str, folder: Path) -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "triton_gemm", *arguments.split()]
        environment = os.environ | {"PYTHONUNBUFFERED": unbuffered}
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, env=environment, check=False)
    assert done.returncode == 1 and done.stderr == "error: [Errno 28] No space left on device\n"


# --- explain ---


def test_explain_shows_candidates_and_the_choice(folder: Path) -> None:
    found = document("explain", *PRODUCT, "--device", "h200", "--limit", "4")
    assert document("explain", "512x1024x2048", "--device", "h200", "--limit", "4") == found
    batched = document("explain", "3x512x1024x2048", "--device", "h200", "--limit", "1")
    assert batched["problem"]["batch"] == 3 and batched["problem"]["M"] == 512
    chosen = select(problem_of(), H200)
    assert found["device"]["name"] == "NVIDIA H200" and found["problem"]["N"] == 1024
    assert (found["chosen"]["by"], found["chosen"]["kernel"]) == ("model", chosen.kernel)
    predicted = [candidate["predicted_us"] for candidate in found["candidates"]]
    assert len(predicted) == 4 and predicted == sorted(predicted)
    assert [candidate["chosen"] for candidate in found["candidates"]] == [True, False, False, False]
    assert found["candidates"][0]["config"]["BLOCK_M"] == chosen.config.BLOCK_M
    shown = words_of("explain", *PRODUCT, "--device", "h200")
    assert f"-> {chosen.kernel}" in shown and "chosen by the model, policy cached" in shown


def test_explain_knows_what_was_measured_and_who_chose(folder: Path) -> None:
    stored = store(problem_of(), nth=25)
    found = document("explain", *PRODUCT, "--device", "h200", "--limit", "2")
    models, candidate = (candidate for candidate in found["candidates"] if candidate["known_us"])
    assert models["known_us"] == 12.0 and not models["chosen"], "the model's choice, measured at the same time"
    assert candidate["known_us"] == 10.0 and candidate["chosen"] and candidate["table"] == "user's table"
    assert candidate["config"]["BLOCK_M"] == stored.config.BLOCK_M and len(found["candidates"]) == 3
    assert found["chosen"]["by"] == "user's table"
    assert "10 (user's table)" in words_of("explain", *PRODUCT, "--device", "h200")
    with triton_gemm.policy("model"):
        assert document("explain", *PRODUCT, "--device", "h200")["chosen"]["by"] == "model"


def test_the_time_of_another_choice_is_not_shown_for_this_one(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An entry has the time of the model's choice as it was when the product was tuned."""
    store(problem_of(), nth=25)
    path = table_fakes.table_in(folder)
    text = path.read_text()
    for default in ("portable 64x64x32 4 warps 3 stages", ""):
        path.write_text(text.replace(records.named(select(problem_of(), H200)), default))
        tables.reload()
        (one,) = (one for one in document("explain", *PRODUCT, "--device", "h200")["candidates"] if one["known_us"])
        assert one["known_us"] == 10.0 and one["table"] == "user's table"


def test_a_tuned_configuration_that_the_model_knows_nothing_of_is_shown(folder: Path) -> None:
    """As a user's own may be."""
    problem, choice = problem_of(dtype=torch.float16), select(problem_of(dtype=torch.float16), H200)
    own = [triton.Config({"BLOCK_M": 64, "BLOCK_N": 64, "BLOCK_K": 64, "GROUP_M": 8}, num_warps=4, num_stages=1)]
    selection = next(one for one in candidates(problem, H200, choice, "any", own) if one.config.num_stages == 1)
    assert tables.store(problem, selection, H200, us=1.0, default_us=2.0, bits="any")
    found = document("explain", *PRODUCT, "--dtype", "fp16", "--device", "h200")
    last = found["candidates"][-1]
    assert (last["predicted_us"], last["known_us"], last["config"]["num_stages"]) == (None, 1.0, 1)
    assert "1 (user's table)" in words_of("explain", *PRODUCT, "--dtype", "fp16", "--device", "h200")


def test_explain_marks_what_runs_under_batch_invariance(folder: Path) -> None:
    """Parts in turn are no candidate of everyone's."""
    with triton_gemm.batch_invariant():
        found = document("explain", "4096", "576", "7168", "--layout", "nt", "--device", "h200")
        shown = words_of("explain", "4096", "576", "7168", "--layout", "nt", "--device", "h200")
    (candidate,) = (candidate for candidate in found["candidates"] if candidate["chosen"])
    assert candidate["schedule"] == found["chosen"]["schedule"] and candidate["predicted_us"] > 0
    assert "-> warp_specialised" in shown and "bits same, for any number of rows" in shown
    assert "for any number of rows" not in words_of(
        "explain", "4096", "576", "7168", "--layout", "nt", "--device", "h200"
    )


def test_explain_shows_classes_of_bits(folder: Path) -> None:
    first = document("explain", *PRODUCT, "--device", "h200")["candidates"][0]
    assert first["bits"] == triton_gemm.explain(M=512, N=1024, K=2048, dtype=torch.bfloat16, device="h200").bits
    assert first["bits"] in words_of("explain", *PRODUCT, "--device", "h200", "--bits")
    assert first["bits"] not in words_of("explain", *PRODUCT, "--device", "h200")


@pytest.mark.parametrize(("device", "model"), [("h200", "shipped"), ("a100", "derived")])
def test_explain_names_the_origin_of_the_model(folder: Path, device: str, model: str) -> None:
    """In a word, and not with the history of its fit."""
    assert document("explain", *PRODUCT, "--device", device)["model"] == model
    assert f"predicted times: {model} model" in words_of("explain", *PRODUCT, "--device", device)


def test_sizes_may_have_a_capital_x() -> None:
    assert cli.words.shapes("64X128X256,2x3x4x5") == [(1, 64, 128, 256), (2, 3, 4, 5)]
    assert cli.words.weights("64X128") == [(64, 128)]


@pytest.mark.parametrize("text", ['{"devices": []}', "{}"])
def test_a_description_without_a_gpu_is_called_so(folder: Path, tmp_path: Path, text: str) -> None:
    path = tmp_path / "doc.json"
    path.write_text(text)
    printed = words_of("explain", "64", "64", "64", "--device", path, code=2)
    assert "describes no GPU" in printed and "on a machine with one" in printed


@pytest.mark.parametrize(("count", "words"), [(0, "0 entries"), (1, "1 entry"), (2, "2 entries")])
def test_counts_agree_with_their_nouns(count: int, words: str) -> None:
    assert cli.output.counted(count, "entry", "entries") == words
    assert cli.output.counted(1, "kernel") == "1 kernel" and cli.output.counted(0, "kernel") == "0 kernels"


def test_explain_compiles_on_request(folder: Path) -> None:
    found = document("explain", "16", "32", "64", "--device", "sm_90", "--limit", "2", "--compile", "1")
    (launch,) = found["candidates"][0]["launches"]
    assert 0 < launch["registers"] <= 255 and launch["spills"] == 0 and launch["shared_memory"] >= 0
    assert found["candidates"][1]["launches"] == []
    assert "registers" in words_of("explain", "16", "32", "64", "--device", "sm_90", "--limit", "2", "--compile", "1")


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.name)
def test_options_are_named_whatever_typer_makes_of_a_metavar(command: CommandInfo) -> None:
    """typer 0.27 takes one that is the parameter's name in capitals for the option's name, unless that is given."""
    assert command.callback is not None
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                assert f"--{name}" in (option.default, *(option.param_decls or ()))  # where typer keeps it


@pytest.mark.parametrize(
    ("options", "printed"),
    [
        ("--bias n --activation gelu --dtype fp16 --layout nt", "512x1024x2048 fp16 nt bias n gelu on"),
        ("--dtype fp32 --precision bf16x6", "fp32 nn bf16x6 on"),
        ("--batch 8 --dtype float64", "8x512x1024x2048 fp64 nn on"),
        ("--dtype fp8 --layout nt --scales rows --fast-accum", "fp8 nt fp8 fast scales rows to bfloat16 on"),
        ("--groups 4 --out-dtype fp32", "4x512x1024x2048 bf16 nn groups of m to float32 on"),
        ("--beta 0.5 --dtype fp16", "fp16 nn + beta C on"),
    ],
)
def test_explain_takes_all_that_a_product_has(options: str, printed: str, folder: Path) -> None:
    assert printed in words_of("explain", *PRODUCT, "--device", "h200", *options.split())


def test_a_gpu_is_described_by_a_file(tmp_path: Path, folder: Path) -> None:
    file = tmp_path / "half.json"
    device = {"name": "half a Hopper", "capability": [9, 0], "num_sms": 66, "shared_memory": 232448}
    file.write_text(json.dumps({"devices": [device]}))
    assert document("explain", *PRODUCT, "--device", file)["device"]["num_sms"] == 66


@pytest.mark.parametrize(
    "wrong",
    [
        *({"num_sms": "132"}, {"num_sms": 0}, {"num_sms": True}, {"bus_width": "6016"}, {"power_limit": -700}),
        *({"capability": [9]}, {"capability": "90"}, {"bandwidth": "fast"}, {"name": 5}, {"cores": 5}),
    ],
    ids=str,
)
def test_a_file_that_describes_no_gpu_is_refused_and_changes_nothing(
    wrong: dict[str, Any], tmp_path: Path, folder: Path
) -> None:
    store(problem_of())
    before = table_fakes.table_in(folder)
    device = {"name": "a GPU", "capability": [9, 0], "num_sms": 132, "shared_memory": 232448, "bus_width": 6016}
    file = tmp_path / "gpu.json"
    file.write_text(json.dumps({"devices": [device | {"power_limit": 700} | wrong]}))
    for command in (["explain", *PRODUCT], ["cache", "show"]):
        assert "describes no GPU" in document(*command, "--device", file, code=2)["error"]
    assert table_fakes.table_in(folder) == before and not tables.set_aside()


# --- cache ---


def test_tables_are_listed_shown_and_verified(folder: Path) -> None:
    assert document("cache", "ls") == {"folder": str(folder), "tables": [], "set_aside": [], "models": []}
    assert "there is no table yet" in words_of("cache", "ls")
    assert document("cache", "verify", "--device", "h200")["tables"] == []
    stored = store(problem_of())
    (one,) = document("cache", "ls")["tables"]
    assert (one["entries"], one["silicon"], one["whose"]) == (1, str(GpuKey.of(H200)), "user's table")
    assert "sm_90-132sms-6016bit-700W" in words_of("cache", "ls")
    for where in ([one["file"]], ["--device", "h200"]):
        (entry,) = document("cache", "show", *where)["entries"]
        assert entry["text"] == "512x1024x2048 bf16 nn" and entry["gain"] == pytest.approx(0.2)
        assert str(stored.config) in words_of("cache", "show", *where)
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
    assert f"not used here: 1 entry of Triton {entry['triton']}, as this is 9.9" in words_of(
        "cache", "show", "--device", "h200"
    )


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


def test_clear_asks_first(folder: Path) -> None:
    store(problem_of())
    refused = call("cache", "clear", stdin="n\n")
    assert refused.exit_code == 1 and "Delete 1 table in" in refused.output and tables.listed()
    assert "add --yes" in document("cache", "clear", code=2)["error"] and tables.listed()
    assert call("cache", "clear", stdin="y\n").exit_code == 0 and not tables.listed()
    assert document("cache", "clear") == {"deleted": 0, "notes": 0, "extensions": 0}


def test_clear_asks_before_it_deletes_what_tuning_noted(folder: Path) -> None:
    folder.mkdir(parents=True)
    note = folder / f"{GpuKey.of(H200)}{tables.checks.JOURNAL}"
    note.touch()
    refused = call("cache", "clear", stdin="n\n")
    assert refused.exit_code == 1 and "Delete 0 tables and 1 note of tuning" in refused.output and note.exists()
    assert "add --yes" in document("cache", "clear", code=2)["error"] and note.exists()
    assert words_of("cache", "clear", "--yes") == "deleted 0 tables and 1 note of tuning" and not note.exists()
    note.touch()
    assert document("cache", "clear", "--yes") == {"deleted": 0, "notes": 1, "extensions": 0}


def test_a_folder_that_may_not_be_read_is_not_cleared(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store(problem_of())

    def refused(path: Any) -> list[str]:
        raise PermissionError(errno.EACCES, "Permission denied")

    with monkeypatch.context() as patch:
        patch.setattr(os, "listdir", refused)
        for arguments in ((), ("--yes",), ("--models",)):
            assert "Permission denied" in document("cache", "clear", *arguments, code=1)["error"]
    assert tables.listed()


# --- warmup ---


@pytest.fixture
def jobs(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """What was to be compiled, and the failures of it."""
    jobs: dict[str, Any] = {"failures": ()}

    def fake(problems: Any, devices: Any, **how: Any) -> precompile.Precompiled:
        jobs.update(how, problems=problems, devices=[device.name for device in devices])
        how["progress"](1, 2), how["selecting"](1, 2)
        none = "there is no C compiler"
        return precompile.Precompiled(3, 1, len(problems), tmp_path, 4.2, jobs["failures"], driver_module=none)

    monkeypatch.setattr(cli.warmup, "precompile", fake)
    return jobs


def test_warmup_says_what_was_compiled(jobs: dict[str, Any], tmp_path: Path) -> None:
    shapes = ("--shapes", "512x1024x2048,2x16x32x64", "--dtype", "fp16")
    shown = words_of("warmup", *shapes, "--arch", "sm_90", "--out", tmp_path)
    assert "3 kernels for 2 GEMMs" in shown and "1 compiled in 4 s, 2 were compiled before" in shown
    assert "Triton's driver module: there is no C compiler" in shown
    assert "launches repeated calls: TRITON_GEMM_NATIVE is 0" in shown
    hoppers = ["NVIDIA H20", "NVIDIA H100 PCIe", "NVIDIA H100 80GB HBM3", "NVIDIA H200", "sm_90"]
    assert jobs["devices"] == hoppers and jobs["cache"] == tmp_path
    assert [problem.batch for problem in jobs["problems"]] == [1, 2]
    assert call("warmup", "--suite", "square", "--device", "h200").exit_code == 0
    assert len(jobs["problems"]) == len(SUITES["square"].shapes)
    jobs["failures"] = ("gemv_kernel: it broke",)
    assert document("warmup", *shapes, "--device", "h200", code=1)["failures"] == ["gemv_kernel: it broke"]
    assert jobs["devices"] == ["NVIDIA H200"]


def test_warmup_of_weights_is_what_prepare_compiles(jobs: dict[str, Any]) -> None:
    given = ("warmup", "--device", "h200", "--weights", "96x64, 64x96,96x64", "--rows", "1-3, 9,2 - 4")
    for options, dtype, bias in (
        ((), torch.bfloat16, False),
        (("--dtype", "fp16", "--bias", "--layout", "nt"), torch.float16, True),
    ):
        assert "3 kernels for 10 GEMMs" in words_of(*given, *options)
        wanted = problems_of([(96, 64), (64, 96)], [1, 2, 3, 9, 4], dtype, bias)
        assert jobs["problems"] == list(wanted)


@pytest.mark.parametrize(("options", "least", "most"), [([], 0, 0), (["same"], 2, 30), (["any"], 20, 40)])
def test_warmup_compiles_what_tune_would_time(options: list[str], least: int, most: int, jobs: dict[str, Any]) -> None:
    given = [f"--candidates={bits}" for bits in options]
    assert call("warmup", "--shapes", "512x1024x2048", "--device", "h200", *given).exit_code == 0
    problem = problem_of(512, 1024, 2048)
    found = jobs["also"](problem, H200)
    assert least <= len(found) <= most
    classes = {bit_class(problem, selection) for selection in found}
    assert len(classes) > 1 if options == ["any"] else len(classes) == len(options)
    assert call("warmup", "--shapes", "1x2x3", "--device", "h200", "--candidates", "fast").exit_code == 2


# --- tune ---


class FakeTuning(ModuleType):
    """`triton_gemm.tuning` as far as the command knows it. It compares two products, and ends with `error`."""

    outcome = "tuned"
    error: BaseException | None = None

    def __init__(self) -> None:
        super().__init__("triton_gemm.tuning")
        self.requested: dict[str, Any] = {}
        self.reports = [compared(**FIGURES), compared(**FIGURES)]
        self.read_shapes = lambda path: {problem_of(8): 3, problem_of(): 1}

    def tune(self, shapes: Any, **how: Any) -> Any:
        self.requested = {"shapes": shapes, **how}
        logging.getLogger("triton_gemm.tuning").info("one product is done")
        report = SimpleNamespace(
            as_dict=lambda *_: {"regret_after": 0.0}, shapes=[SimpleNamespace(outcome=self.outcome)]
        )
        return type("Report", (), {"__str__": lambda _: "all was tuned", **vars(report)})()

    def compare(self, shapes: Any, *, progress: Any, **how: Any) -> Any:
        self.requested = {"shapes": shapes, **how}
        for report in self.reports:
            progress(report)
        if self.error is not None:
            raise self.error
        return report


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch) -> FakeTuning:
    fake = FakeTuning()
    monkeypatch.setitem(sys.modules, "triton_gemm.tuning", fake)
    monkeypatch.setattr(logging.getLogger("triton_gemm.tuning"), "handlers", [])
    return fake


def test_tune_passes_its_options_on(tuning: FakeTuning, tmp_path: Path) -> None:
    shapes = "4096x4096x4096,16x14336x4096"
    done = words_of("tune", "--shapes", shapes, "--layout", "nt", "--budget", "1.5m", "--bits", "any", "--resume")
    assert "one product is done" in done and "all was tuned" in done
    how = {"budget": 90.0, "bits": "any", "measure": "graph", "resume": True, "repeat": 1, "device": None}
    assert {name: tuning.requested[name] for name in how} == how
    assert [words.problem_text(problem) for problem in tuning.requested["shapes"]] == [
        "4096x4096x4096 bf16 nt",
        "16x14336x4096 bf16 nt",
    ]
    assert document("tune", "--suite", "decode", "--measure", "eager") == {"regret_after": 0.0}
    assert tuning.requested["measure"] == "eager" and len(tuning.requested["shapes"]) == len(SUITES["decode"].shapes)
    file = tmp_path / "shapes.json"
    file.touch()
    assert call("tune", "--shapes-from", file).exit_code == 0
    assert tuning.requested["shapes"] == file, "with how often each was called"
    for tuning.outcome in ("refused", "failed", "not stored"):
        assert document("tune", "--shapes", "1x2x3", code=1)


def test_tune_takes_weights_with_rows(tuning: FakeTuning, tmp_path: Path) -> None:
    words_of("tune", "--weights", "4096x1024,512x64", "--rows", "1-8,64", "--bias")
    assert tuning.requested["rows"] == [1, 2, 3, 4, 5, 6, 7, 8, 64]
    texts = [words.problem_text(problem) for problem in tuning.requested["shapes"]]
    assert texts == ["1x4096x1024 bf16 nt bias n", "1x512x64 bf16 nt bias n"]
    file = tmp_path / "shapes.json"
    file.touch()
    words_of("tune", "--shapes-from", file, "--rows", "1-4096")
    assert tuning.requested["shapes"] == file and tuning.requested["rows"] == [*range(1, 4097)]
    for wrong in (["--weights", "64x64"], ["--shapes", "1x2x3", "--rows", "4"], ["--suite", "llm", "--bias"]):
        assert call("tune", *wrong).exit_code == 2


def test_a_dry_run_times_nothing() -> None:
    printed = words_of("tune", "--weights", "4096x4096", "--rows", "1-64", "--dry-run", "--device", "h200")
    assert "64x4096x4096 bf16 nt warp_specialised " in printed and "for 8 GEMMs; nothing was timed" in printed
    found = document("tune", "--shapes", "64x64x64", "--dry-run", "--device", "h200")
    assert len(found["shapes"][0]["candidates"]) > 1 and "torch" not in found["shapes"][0]["candidates"]
    any_bits = "tune", "--shapes", "64x64x64", "--dry-run", "--device", "h200", "--bits", "any"
    assert document(*any_bits)["shapes"][0]["candidates"][-1] == "torch" and " torch " in words_of(*any_bits)


# --- compare ---


def compared(outcome: str = "measured", **figures: float) -> Comparison:
    one = ProductComparison(problem_of(8), outcome, "", 2, **figures)  # type: ignore[arg-type]
    return Comparison("a GPU", True, (one,), 3.0)


FIGURES = {"torch_us": 12.0, "ours_us": 10.0, "ratio": 1.2, "noise": 0.01, "torch_error": 1e-3, "ours_error": 2e-3}


def test_compare_passes_its_options_on(tuning: FakeTuning, tmp_path: Path) -> None:
    done = words_of(
        "compare", "--shapes", "16x32x64,8x16x32x64", "--layout", "nt", "--budget", "9s", "--device", "cuda:0"
    )
    assert "a step of your model, as recorded (2 calls): 0.024 ms with torch, 0.02 with triton_gemm, on a GPU" in done
    assert {name: tuning.requested[name] for name in ("budget", "device")} == {"budget": 9.0, "device": "cuda:0"}
    texts = [words.problem_text(problem) for problem in tuning.requested["shapes"]]
    assert texts == ["16x32x64 bf16 nt", "8x16x32x64 bf16 nt"]
    found = document("compare", "--suite", "decode")
    assert found["torch_ms"] == 0.024 and found["products"][0]["ratio"] == 1.2
    file = tmp_path / "shapes.json"
    file.touch()
    assert call("compare", "--shapes-from", file).exit_code == 0
    assert tuning.requested["shapes"] == file, "with how often each was called"


def test_compare_takes_layers_at_powers_of_two(tuning: FakeTuning) -> None:
    assert call("compare", "--weights", "32x64", "--rows", "3-20,7,100-103", "--bias").exit_code == 0
    assert [problem.M for problem in tuning.requested["shapes"]] == [3, 4, 8, 16, 20, 7, 100, 103]
    assert all(problem.bias == "n" and problem.b.column_major for problem in tuning.requested["shapes"])


def test_compare_writes_a_table_and_a_plot(tuning: FakeTuning, tmp_path: Path) -> None:
    products = (*compared(**FIGURES).products, *compared("no time").products)
    tuning.reports = [replace(compared(), products=products)]
    drawn = tmp_path / "ratios.svg"
    document("compare", "--shapes", "1x2x3", "--csv", tmp_path / "x.csv", "--plot", drawn, code=1)
    first, second = csv.DictReader((tmp_path / "x.csv").open())
    assert first["product"] == "8x1024x2048 bf16 nn" and first["calls"] == "2" and "problem" not in first
    assert {name: float(first[name]) for name in FIGURES} == FIGURES
    assert second["outcome"] == "no time" and second["ratio"] == ""
    assert drawn.read_text().lstrip().startswith("<?xml")


def test_compare_draws_nothing_where_nothing_was_measured(tuning: FakeTuning, tmp_path: Path) -> None:
    tuning.reports = [compared("failed")]
    assert "8x1024x2048 bf16 nn: failed nothing was measured" in words_of(
        "compare", "--shapes", "1x2x3", "--plot", tmp_path / "x.png", code=1
    )
    tuning.reports = [Comparison("a GPU", True)]
    assert "nothing was measured" in words_of("compare", "--shapes", "1x2x3", "--csv", tmp_path / "x.csv")


def test_compare_says_that_matplotlib_is_missing(tuning: FakeTuning, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "error: --plot needs matplotlib: pip install matplotlib" in words_of(
        "compare", "--shapes", "1x2x3", "--plot", "x.png", code=1
    )
    assert not tuning.requested, "before anything is measured"


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [(KeyboardInterrupt(), 130, "interrupted"), (RuntimeError("the GPU cannot be used any more"), 1, "any more")],
)
def test_compare_shows_what_it_has_found_until_then(
    tuning: FakeTuning, error: BaseException, code: int, message: str
) -> None:
    tuning.error = error
    done = call("compare", "--shapes", "1x2x3", "--json")
    assert done.exit_code == code and message in done.stderr and json.loads(done.stdout)["torch_ms"] == 0.024
    tuning.reports = []
    assert message in document("compare", "--shapes", "1x2x3", code=code)["error"]


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_compare_needs_a_gpu() -> None:
    assert "sees no GPU to time anything on" in words_of("compare", "--shapes", "1x2x3", code=1)


def test_recorded_shapes_are_compiled(tuning: FakeTuning, tmp_path: Path) -> None:
    file = tmp_path / "shapes.json"
    file.touch()
    assert products.recorded(file) == [problem_of(8), problem_of()]


@pytest.mark.parametrize("name", SUITES)
def test_every_suite_can_be_tuned(name: str) -> None:
    dtype = None if SUITES[name].mode else words.dtype("fp16")
    problems = products.of_suite(name, dtype)
    assert len(problems) <= len(SUITES[name].shapes)
    assert {problem.dtype for problem in problems} == {dtype} or SUITES[name].mode
    assert any(not problem.a.aligned for problem in problems) is (name == "odd")


@pytest.mark.parametrize(("text", "seconds"), [("90", 90), ("90s", 90), ("2m", 120), ("1.5h", 5400), (".5 m", 30)])
def test_durations(text: str, seconds: float) -> None:
    assert words.seconds(text) == seconds


@pytest.mark.parametrize("out", [False, True], ids=["variable", "out"])
def test_folders_that_the_locale_cannot_spell(out: bool, tmp_path: Path) -> None:
    cache = tmp_path / "ü"
    paths = {"PYTHONPATH": os.pathsep.join(sys.path), "TRITON_CACHE_DIR": str(tmp_path / "ö" if out else cache)}
    ascii_only = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import contextlib, sys; from triton_gemm.cli import main\n"
    code += "with contextlib.suppress(SystemExit): main(sys.argv[1:])\nmain(['doctor'])"
    warmup = ["warmup", "--shapes", "64x64x64", "--device", "sm_80", *(["--out", str(cache)] if out else [])]
    command = [sys.executable, "-c", code, *warmup]
    done = subprocess.run(command, env=os.environ | paths | ascii_only, capture_output=True, text=True)
    assert "codec" not in done.stderr and "Error" not in done.stdout and "Triton's cache is" in done.stdout
    assert list(cache.rglob("*.cubin")) and not list((tmp_path / "ö").rglob("*.cubin"))


# --- doctor ---


def test_doctor_shows_what_it_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(folder))
    found = document("doctor", code=int(doctor.examine().broken))
    assert {one["about"] for one in found["findings"]} >= {"versions", "GPU", "compiler", "caches", "policy"}
    findings = (Finding("GPU", "good", "there is one"), Finding("GPU", "broken", "it is on fire", "put it out"))
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis(findings, (H200,)))
    shown = words_of("doctor", code=1)
    assert "GPU good there is one BROKEN it is on fire put it out 1 broken" in shown
    assert document("doctor", code=1)["devices"][0]["num_sms"] == 132


def test_doctors_device_can_be_asked_about(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis((Finding("GPU", "good", ""),), (H200,)))
    file = tmp_path / "here.json"
    file.write_text(json.dumps(document("doctor")))
    assert words.device(str(file)) == H200
    # A GPU that is there has no power limit of its own: NVML is asked, here and not where the file is read.
    here = replace(H200, power_limit=0, uuid="known")
    monkeypatch.setattr(nvml, "power_limit", lambda uuid: 700 if uuid == "known" else 0)
    monkeypatch.setattr(cli.doctor, "examine", lambda: doctor.Diagnosis((Finding("GPU", "good", ""),), (here,)))
    file.write_text(json.dumps(document("doctor")))
    monkeypatch.setattr(nvml, "power_limit", lambda uuid: 0)
    store(problem_of())
    assert document("explain", *PRODUCT, "--device", file)["chosen"]["by"] == "user's table"


# --- What is passed on ---


@pytest.mark.parametrize(("name", "module"), [("bench", "perf.bench"), ("ladder", "triton_gemm.ladder")])
def test_other_commands_take_all_words(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(source_tree.os, "execve", lambda *how: started.append(how))
    assert call(name, "square", "--limit", "5", "--help").exit_code == 0
    ((program, arguments, environment),) = started
    assert program == sys.executable and arguments[1:] == ["-m", module, "square", "--limit", "5", "--help"]
    assert environment["PYTHONPATH"].startswith(str(source_tree.ROOT))


def test_what_a_wheel_cannot_run_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(source_tree, "ROOT", tmp_path)
    assert "bench needs a clone of the repository" in words_of("bench", code=1)
