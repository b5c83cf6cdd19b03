"""What other Tritons make of the kernels: which cases there are, records and what is reported of them, which Triton is
taken, and the command on a case with the Triton that is here."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import triton

from perf import drift
from perf.drift import Row
from triton_gemm import compat, kernels
from triton_gemm.arithmetic import ARITHMETICS

ROOT = Path(__file__).parents[2]
# Tiles of gemv in so many rows as `illegal` takes them for no product.
NOWHERE = {"4x64x32 4 warps 5 stages", "4x128x32 4 warps 4 stages"}
PLAIN = dict.fromkeys(drift.COLUMNS, "0") | {"registers": "128", "HGMMA": "8", "sass": "0123456789abcdef", "error": ""}
FAILED = drift.failed("", "RuntimeError: no")


# --- Cases ---


def test_every_configuration_of_every_kernel_is_compiled() -> None:
    """In the precisions that it is for."""
    shapes: dict[str, set[str]] = {}
    for name in drift.every():
        shapes.setdefault(name.split()[0], set()).add(name.partition(": ")[2])
    for kernel in kernels.KERNELS:
        listed = kernels.named(kernel).CONFIGS
        several = [one for many in listed.values() for one in many] if isinstance(listed, dict) else listed
        assert {str(config) for config in several} - shapes[kernel] <= NOWHERE, kernel
    warp_specialised = kernels.warp_specialised
    clustered = {str(config) for config in (*warp_specialised.CLUSTERED, *warp_specialised.FOR_LONG_SUMS)}
    assert clustered <= shapes["warp_specialised"] or not compat.CLUSTERS
    assert {name.split(",")[0].partition(" ")[2] for name in drift.every()} == {*ARITHMETICS}


def test_a_second_launch_is_compiled_and_a_first_one_for_it() -> None:
    """With as many loads at once as few parts take, and as many do; clusters only where this Triton has them."""
    seconds = [case.launch for name, case in drift.every().items() if name.startswith("reduction ")]
    assert {launch.kernel.__name__ for launch in seconds} == {"reduction_kernel"}
    assert {launch.arguments["AT_ONCE"] for launch in seconds} == {16, 32}
    firsts = [case.launch for case in drift.every().values() if case.launch.arguments.get("REDUCTION")]
    assert len(firsts) >= len(kernels.warp_specialised.FOR_LONG_SUMS) * compat.CLUSTERS
    assert all(launch.cluster > 1 for launch in firsts)


@pytest.mark.parametrize("gpu", drift.GPUS)
def test_every_gpu_has_cases_and_only_hopper_warp_specialised_ones(gpu: str) -> None:
    """Launched programmatically from Hopper on, as plans do."""
    found = drift.every(gpu)
    specialised = any(name.startswith("warp_specialised") for name in found)
    assert len(found) > 250 and specialised == (gpu == "sm_90")
    programmatic = any(case.launch.arguments.get("PDL") for case in found.values())
    assert programmatic == (gpu not in ("sm_80", "sm_89"))


# --- Records ---


@pytest.mark.parametrize(
    ("before", "after", "status", "reported"),
    [
        (PLAIN, PLAIN, 0, "0 differ, 0 worse"),
        (PLAIN, PLAIN | {"registers": "120", "HGMMA": "4"}, 0, "\na: registers 128 -> 120, HGMMA 8 -> 4\n"),
        (PLAIN, PLAIN | {"sass": "0"}, 0, "\na: other machine code of the same figures\n"),
        (PLAIN, PLAIN | {"spills": "1"}, 1, "WORSE: a: spills 0 -> 1"),
        (PLAIN | {"spills": "2"}, PLAIN, 0, "\na: spills 2 -> 0\n"),
        (PLAIN, FAILED, 1, "WORSE: a: compiled -> RuntimeError: no"),
        (FAILED, PLAIN, 0, "\na: RuntimeError: no -> compiles\n"),
        (FAILED, FAILED | {"error": "another"}, 0, "\na: RuntimeError: no -> another\n"),
    ],
)
def test_the_report_names_what_differs_and_what_is_worse(
    before: Row,
    after: Row,
    status: int,
    reported: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    def run(*options: str, **rows: Row) -> tuple[int, str]:
        monkeypatch.setattr(drift, "every", lambda gpu: rows)
        monkeypatch.setattr(drift, "compile_all", lambda *_: {name: rows[name] | {"case": name} for name in rows})
        return drift.main(["--triton", "here", *options]), "\n" + capsys.readouterr().out

    monkeypatch.setattr(drift, "FOLDER", tmp_path)
    assert "2 kernels, without a record" in run(a=PLAIN, b=PLAIN)[1]
    assert ("a: only here RuntimeError: no\n" in run("--update", a=before, b=PLAIN)[1]) == (before is FAILED)
    found, out = run(a=after, c=PLAIN)
    assert found == status and reported in out
    assert "\nc: only here\nb: only in the record\n" in out
    assert run("--update", a=after, b=PLAIN)[0] == 0 and "0 differ" in run(a=after, b=PLAIN)[1]


def test_every_supported_version_has_a_record() -> None:
    """Of the present cases: `python -m perf.drift --update` writes them."""
    oldest, newest = compat.TESTED["Triton"]
    minors = [f"3.{minor}" for minor in range(oldest[1], newest[1] + 1)]
    assert [version.rpartition(".")[0] for version in drift.VERSIONS] == minors
    pinned = "".join(path.read_text() for path in ROOT.glob("constraints*.txt"))
    assert all(f"triton=={version}" in pinned for version in drift.VERSIONS)
    for gpu in drift.GPUS:
        for version in drift.VERSIONS if gpu == "sm_90" else ("3.7.1", "3.9.0"):
            path = drift.FOLDER / f"{gpu}-triton-{version}.csv"
            assert path.read_text().startswith(",".join(drift.COLUMNS) + "\n")
            assert version != triton.__version__ or set(drift.read(path)) == set(drift.every(gpu))


def test_nothing_fails_in_a_record_and_what_computes_on_tensor_cores_does_not_spill() -> None:
    for path in drift.FOLDER.glob("*.csv"):
        rows = drift.read(path)
        assert {name: row["error"] for name, row in rows.items() if row["error"]} == {}, path
        assert {name.split()[0] for name, row in rows.items() if row["spills"] != "0"} <= {"gemv"}, path


@pytest.mark.parametrize(
    ("version", "before"),
    [("3.9.0", "3.9.0"), ("3.9.1", "3.9.0"), ("3.10.0+git1234", "3.9.0"), ("3.7.0", "3.6.0"), ("3.5.0", None)],
)
def test_a_version_without_a_record_is_compared_with_the_last_before_it(version: str, before: str | None) -> None:
    assert drift.base(version, "sm_90") == (before and drift.FOLDER / f"sm_90-triton-{before}.csv")


# --- Which Triton ---


def test_a_triton_is_a_version_an_interpreter_or_a_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[list[str]] = []

    def install(words: list[str], check: bool) -> None:
        ran.append(words)
        folder = Path(words[words.index("--target") + 1], "triton")
        folder.mkdir(parents=True)
        (folder / "__init__.py").touch()

    monkeypatch.setattr(drift, "INSTALLED", tmp_path)
    monkeypatch.setattr(subprocess, "run", install)
    assert drift.toolchain(sys.executable) == (sys.executable, None) and not ran
    made = drift.toolchain("3.99.0")
    assert made == (sys.executable, tmp_path / "3.99.0") and ran[0][-1] == "triton==3.99.0" and "--no-deps" in ran[0]
    assert drift.toolchain("3.99.0") == drift.toolchain(str(tmp_path / "3.99.0")) == made and len(ran) == 1


@pytest.mark.parametrize(("status", "found"), [(0, 0), (1, 1), (2, 2), (-11, 2)])
def test_another_triton_runs_the_same_command(status: int, found: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(command: list[str], env: dict[str, str]) -> Any:
        assert command[1:5] == ["-m", "perf.drift", "--triton", "here"] and "--gpu=sm_80" in command
        assert env["PYTHONPATH"].startswith(f"elsewhere:{ROOT}") and "TRITON_INTERPRET" not in env
        return subprocess.CompletedProcess(command, status)

    monkeypatch.setattr(drift, "toolchain", lambda what: (sys.executable, Path(what)))
    monkeypatch.setattr(subprocess, "run", run)
    assert drift.main(["--triton", "elsewhere", "--gpu", "sm_80"]) == found


# --- Compiling ---


def test_machine_code_is_known_by_its_instructions_and_not_by_its_name() -> None:
    code = "\tFunction : {}\n /*0000*/ LDC R1, c[0x0][0x28] ; /* 0x00 */\n /* 0x01 */\n /*0010*/ {} ; /* 0x02 */\n"
    first = drift.machine_code(code.format("a", "EXIT"))
    assert first == drift.machine_code(code.format("b", "EXIT")) != drift.machine_code(code.format("a", "NOP"))


def test_a_compiler_that_dies_costs_its_case_alone() -> None:
    names = ["{'a': '1'}", "__import__('os')._exit(11)", "{'b': '2'}", "__import__('os').abort()", "{'c': '3'}"]
    found = drift.compile_all(names, 2, eval)
    assert [row.get("error") for row in found.values()] == [None, drift.ENDED, None, drift.ENDED, None]
    assert list(found) == names and all(found[name] == eval(name) for name in names[::2])
    assert drift.compile_case("none of that name")["error"].startswith("KeyError")


@pytest.mark.full
@pytest.mark.skipif(triton.__version__ not in drift.VERSIONS, reason="this Triton has no record")
def test_the_command_compiles_what_is_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    assert drift.main(["--triton", triton.__version__, "--only", "skinny half 16x8x512", "--jobs", "1"]) == 0
    assert f"1 kernels, against sm_90-triton-{triton.__version__}.csv: 0 differ" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--update --only portable", "would leave cases out"),
        ("--jobs 0", "a whole number from 1 on"),
        ("--triton here --only nonsense", "no kernel has 'nonsense' in its name"),
        (f"--triton {ROOT / 'docs'}", "has no folder triton"),
    ],
)
def test_mistaken_calls_are_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        sys.exit(drift.main(arguments.split()))
    assert exit_.value.code == 2 and words in capsys.readouterr().err
