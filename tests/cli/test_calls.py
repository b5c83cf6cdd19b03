"""The command `triton-gemm`: its help, what it says to a wrong call, and where it cannot print or work."""

from __future__ import annotations

import io
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, get_type_hints
from unittest.mock import Mock

import pytest
from typer.models import CommandInfo, OptionInfo

import triton_gemm
import triton_gemm_command
from tests.support.command_line import call, document, words_of
from tests.support.processes import python
from tests.support.table_fakes import another, problem_of
from triton_gemm import cli, tables
from triton_gemm.cli import output, source_tree, words
from triton_gemm.cli.app import app
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.hardware.gpus import named_device
from triton_gemm.tables import records

H200 = named_device("h200")
PRODUCT = ["512", "1024", "2048"]  # problem_of()
COMMANDS = ("explain", "tune", "compare", "warmup", "build", "cache", "doctor", "calibrate", "bench", "ladder")
CACHE = ("ls", "show", "export", "import", "merge", "verify", "clear")


def test_help_shows_every_command_in_plain_words() -> None:
    shown = words_of("--help")
    assert all(f" {name} " in shown for name in COMMANDS)
    assert all(f" {name} " in words_of("cache", "--help") for name in CACHE)
    assert words_of("--version") == f"triton_gemm {triton_gemm.__version__}"


@pytest.mark.parametrize("command", [(), *((x,) for x in COMMANDS[:-2]), *(("cache", x) for x in CACHE)], ids=" ".join)
def test_each_has_help_which_names_no_file_of_the_repository(command: tuple[str, ...]) -> None:
    """A wheel does not have them."""
    shown = words_of(*command, "-h")
    assert shown.startswith(" ".join(("Usage: triton-gemm", *command))) and ".md" not in shown
    assert "--json" in shown or "Commands" in shown


@pytest.mark.parametrize("arguments", [[], ["-h"], ["--help"]], ids=" ".join)
def test_help_needs_no_torch(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """It has the words of the command itself."""
    monkeypatch.setattr(sys, "argv", ["triton-gemm", *arguments])
    monkeypatch.setitem(sys.modules, "triton_gemm", None)
    monkeypatch.setitem(sys.modules, "torch", None)
    with pytest.raises(SystemExit) as ended:
        triton_gemm_command.main()
    alone = capsys.readouterr()
    done = call(*arguments)
    assert done.output == alone.out + alone.err and ended.value.code == done.exit_code


def test_all_other_words_are_for_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    main = Mock()
    monkeypatch.setattr(cli, "main", main)
    for arguments in (["--version"], ["doctor"], ["explain", "--help"]):
        monkeypatch.setattr(sys, "argv", ["triton-gemm", *arguments])
        triton_gemm_command.main()
    assert main.call_count == 3


@pytest.mark.parametrize("command", app.registered_commands, ids=lambda command: command.name)
def test_options_are_named_whatever_typer_makes_of_a_metavar(command: CommandInfo) -> None:
    """typer 0.27 takes one that is the parameter's name in capitals for the option's name, unless that is given."""
    assert command.callback is not None
    for name, hint in get_type_hints(command.callback, include_extras=True).items():
        for option in getattr(hint, "__metadata__", ()):
            if isinstance(option, OptionInfo) and (option.metavar or "").lower() == name:
                assert f"--{name}" in (option.default, *(option.param_decls or ()))  # where typer keeps it


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("nonsense", "No such command 'nonsense'"),
        ("--nonsense", "No such option: --nonsense"),
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
        ("explain 1 2 3 --device h200 --dtype fp8 --batch 2 --scales tensor", "a must be 2D"),
        ("explain 7 1048576 281474976710656 --device h200", "Storage size calculation overflowed"),
        ("warmup --device h200 --shapes 7x1048576x281474976710656", "Storage size calculation overflowed"),
        ("warmup --device h200", "give one of --shapes, --suite, --shapes-from, --weights"),
        ("warmup --device h200 --weights 8x8 --shapes 1x2x3", "not --shapes and --weights"),
        ("warmup --device h200 --weights 8x8", "--weights: give --rows, too"),
        ("warmup --device h200 --rows 8", "give one of"),
        ("warmup --device h200 --shapes 1x2x3 --rows 8", "--rows goes with --weights"),
        ("warmup --device h200 --suite llm --bias", "--bias goes with --weights"),
        ("warmup --device h200 --weights 8x8x8 --rows 8", "--weights: '8x8x8' is not NxK with numbers from 1 to 2814"),
        ("warmup --device h200 --weights 0x8 --rows 8", "--weights: '0x8' is not NxK"),
        ("warmup --device h200 --weights 8x8 --rows 0-8", "--rows: '0-8' is neither a number from 1 to 1048576"),
        ("warmup --device h200 --weights 8x8 --rows 1,8-4", "--rows: '8-4' is neither a number"),
        ("warmup --device h200 --weights 8x8 --rows 1-1048577", "--rows: '1-1048577' is neither a number"),
        ("warmup --device h200 --weights 8x8 --rows few", "nor a range of them, as in 1-512,2048"),
        ("warmup --device h200 --weights 8x8 --rows 8 --layout nn", "--weights are linear layers, whose layout is nt"),
        ("warmup --device h200 --weights 8x8 --rows 8 --dtype fp8", "linear layers cannot be torch.float8_e4m3"),
        ("warmup --device h200 --weights 8x8 --rows 8 --dtype int8 --bias", "layers with a bias cannot be torch.int8"),
        ("explain 16 64 64 --dtype fp8 --device h200", "--dtype fp8 goes with --scales tensor, rows or blocks"),
        ("warmup --device h200 --shapes 1x2x3 --candidates fast", "'fast' is not one of"),
        ("tune --suite llm --rows 8", "--rows goes with --weights"),
        ("tune --suite llm --bias", "--bias goes with --weights"),
        ("tune --weights 64x64", "--weights: give --rows, too"),
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
        ("compare", "give one of --shapes, --suite, --shapes-from, --weights"),
        ("compare --shapes 1x2x3 --device h200", "--device: 'h200' is not a GPU of this machine"),
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
def test_a_wrong_call_has_a_message_for_people_and_programs(
    arguments: str, complaint: str, folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    line = records.text_of({"calls": 1, "problem": records.plain(replace(problem_of(), batch=0))})
    Path("empty.json").write_text(f'{{"format": 1, "products": [{line}]}}')
    code = 1 if arguments.startswith("cache show") else 2
    assert complaint in words_of(*arguments.split(), code=code)
    assert complaint in " ".join(document(*arguments.split(), code=code)["error"].split())


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


@pytest.mark.parametrize("out", [False, True], ids=["variable", "out"])
def test_folders_that_the_locale_cannot_spell(out: bool, tmp_path: Path) -> None:
    cache = tmp_path / "ü"
    variables = {"LC_ALL": "C", "PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0"}
    code = "import contextlib, sys; from triton_gemm.cli import main\n"
    code += "with contextlib.suppress(SystemExit): main(sys.argv[1:])\nmain(['doctor'])"
    warmup = ["warmup", "--shapes", "64x64x64", "--device", "sm_80", *(["--out", str(cache)] if out else [])]
    done = python("-c", code, *warmup, TRITON_CACHE_DIR=str(tmp_path / "ö" if out else cache), **variables)
    assert "codec" not in done.stderr and "Error" not in done.stdout and "Triton's cache is" in done.stdout
    assert list(cache.rglob("*.cubin")) and not list((tmp_path / "ö").rglob("*.cubin"))


@pytest.mark.parametrize(
    ("read", "given", "found"),
    [
        (words.shapes, "64X128X256,2x3x4x5", [(1, 64, 128, 256), (2, 3, 4, 5)]),
        (words.weights, "64X128", [(64, 128)]),
        *((words.seconds, text, s) for text, s in {"90": 90, "90s": 90, "2m": 120, "1.5h": 5400, ".5 m": 30}.items()),
        (lambda n: output.counted(n, "entry", "entries"), 2, "2 entries"),
        (lambda n: output.counted(n, "entry", "entries"), 1, "1 entry"),
        (lambda n: output.counted(n, "kernel"), 0, "0 kernels"),
        (lambda n: output.counted(n, "kernel"), 1, "1 kernel"),
    ],
)
def test_sizes_durations_and_counts(read: Callable[..., object], given: object, found: object) -> None:
    assert read(given) == found


@pytest.mark.parametrize(("name", "module"), [("bench", "perf.bench"), ("ladder", "triton_gemm.ladder")])
def test_other_commands_take_all_words(name: str, module: str, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr(source_tree.os, "execve", lambda *how: started.append(how))
    assert call(name, "square", "--limit", "5", "--help").exit_code == 0
    ((program, arguments, environment),) = started
    assert program == sys.executable and arguments[1:] == ["-m", module, "square", "--limit", "5", "--help"]
    assert environment["PYTHONPATH"].startswith(str(source_tree.ROOT))
