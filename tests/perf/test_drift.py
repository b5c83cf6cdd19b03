"""What other Tritons make of the kernels: which cases there are, records and how they are compared, which Triton is
taken, and the command on a few cases with the Triton that is here."""

from __future__ import annotations

import os
import subprocess
import sys
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import pytest
import triton

from perf.drift import __main__ as command
from perf.drift import cases, compiling, record, tritons
from perf.drift.record import Row
from triton_gemm import compat, kernels

ROOT = Path(__file__).parents[2]
# Tiles of gemv in so many rows as `illegal` takes them for no product.
NOWHERE = {"4x64x32 4 warps 5 stages", "4x128x32 4 warps 4 stages"}
FEW = "skinny half 16x8x512 2 warps"


# --- Cases ---


def test_every_configuration_of_every_kernel_is_compiled() -> None:
    """In the precisions that it is for."""
    found = {(name.split(",")[0], name.partition(": ")[2]) for name in cases.every()}
    shapes: dict[str, set[str]] = {}
    for kernel, config in found:
        shapes.setdefault(kernel.split()[0], set()).add(config)
    for kernel in kernels.KERNELS:
        listed = kernels.named(kernel).CONFIGS
        several = [one for many in listed.values() for one in many] if isinstance(listed, dict) else listed
        assert {str(config) for config in several} - shapes[kernel] <= NOWHERE, kernel
    warp_specialised = kernels.warp_specialised
    clustered = {str(config) for config in (*warp_specialised.CLUSTERED, *warp_specialised.FOR_LONG_SUMS)}
    assert clustered <= shapes["warp_specialised"] or not compat.CLUSTERS
    assert {name.split(",")[0].partition(" ")[2] for name in cases.every()} == {
        *("half", "ieee", "tf32", "bf16x3", "bf16x6", "bf16x9", "tf32x3", "fp64", "int8", "fp8", "fp8 fast")
    }


def test_a_second_launch_is_compiled_and_a_first_one_for_it() -> None:
    """With as many loads at once as few parts take, and as many do; clusters only where this Triton has them."""
    seconds = [case.launch for name, case in cases.every().items() if name.startswith("reduction ")]
    assert {launch.kernel.__name__ for launch in seconds} == {"reduction_kernel"}
    assert {launch.arguments["AT_ONCE"] for launch in seconds} == {16, 32}
    firsts = [case.launch for case in cases.every().values() if case.launch.arguments.get("REDUCTION")]
    assert len(firsts) >= len(kernels.warp_specialised.FOR_LONG_SUMS) * compat.CLUSTERS
    assert all(launch.cluster > 1 for launch in firsts)


def test_cases_are_chosen_by_their_names_alone() -> None:
    assert all(name == case.name for name, case in cases.every().items()) and len(cases.every()) > 300
    names = command.chosen(cases.every(), "portable half", 5)
    assert 0 < len(names) < 10 and all("portable half" in name for name in names)
    assert set(names) <= set(command.chosen(cases.every(), "", 5))


# --- Records ---

PLAIN = Row(128, 0, 98304, 1000, {"HGMMA": 8, "UTMALDG": 3}, "0123456789abcdef")
BEFORE = {"a": PLAIN, "b": replace(PLAIN, spills=2), "c": Row(error="RuntimeError: no"), "d": PLAIN, "e": PLAIN}


def test_a_record_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = record.path_of("3.9.0", tmp_path)
    record.write(path, BEFORE)
    assert record.read(path) == BEFORE and list(record.read(path)) == list(BEFORE)
    record.write(record.path_of("3.10.0", tmp_path), BEFORE)
    assert record.versions(tmp_path) == ["3.9.0", "3.10.0"]
    path.write_text(path.read_text().replace("HGMMA", "HMMMA", 1))
    with pytest.raises(ValueError, match="other columns"):
        record.read(path)


@pytest.mark.parametrize(
    ("case", "row", "worse", "said"),
    [
        ("a", replace(PLAIN, registers=120, instructions=900), False, "registers 128 -> 120, instructions 1000 -> 900"),
        ("a", replace(PLAIN, main={"HGMMA": 4, "UTMALDG": 3}), False, "a: HGMMA 8 -> 4"),
        ("a", replace(PLAIN, spills=1), True, "a: spills 0 -> 1"),
        ("a", replace(PLAIN, sass="0"), False, "a: other machine code of the same figures"),
        ("b", PLAIN, False, "b: spills 2 -> 0"),
        ("a", Row(error=compiling.ENDED), True, f"a: {compiling.ENDED}"),
        ("c", PLAIN, False, "c: compiles, and did not: RuntimeError: no"),
        ("c", Row(error="RuntimeError: another"), False, "c: RuntimeError: another"),
    ],
)
def test_what_differs_is_told_and_what_is_worse(case: str, row: Row, worse: bool, said: str) -> None:
    drift = record.compare(BEFORE, BEFORE | {case: row})
    (change,) = drift.changes
    assert change.worse == worse and said in str(change) and drift.worse() == [change] * worse


def test_the_worst_comes_first_and_cases_that_come_and_go_are_named() -> None:
    after = {"a": replace(PLAIN, spills=4), "d": replace(PLAIN, registers=129), "e": PLAIN, "f": PLAIN}
    after["b"] = replace(PLAIN, spills=2, instructions=1500)
    drift = record.compare(BEFORE, after)
    assert [change.case for change in drift.changes] == ["a", "b", "d"]
    assert (drift.new, drift.gone, drift.cases) == (["f"], ["c"], 5)
    assert drift.moved("spills") == (1, 0) and drift.moved("registers") == (1, 0) and drift.moved("shared") == (0, 0)


def test_every_supported_version_has_a_record() -> None:
    """Of the present cases: `python -m perf.drift --update` writes them."""
    assert {record.order(version)[:2] for version in tritons.VERSIONS} == {
        (3, minor) for minor in range(compat.TESTED["Triton"][0][1], compat.TESTED["Triton"][1][1] + 1)
    }
    assert set(tritons.VERSIONS) <= set(record.versions())
    pinned = "".join(path.read_text() for path in ROOT.glob("constraints*.txt"))
    assert all(f"triton=={version}" in pinned for version in tritons.VERSIONS)
    known = record.read(record.path_of(triton.__version__)) if triton.__version__ in tritons.VERSIONS else None
    assert known is None or set(known) == set(cases.every())


def test_nothing_fails_in_a_record_and_what_computes_on_tensor_cores_does_not_spill() -> None:
    for version in tritons.VERSIONS:
        rows = record.read(record.path_of(version))
        assert {name: row.error for name, row in rows.items() if row.error} == {}, version
        assert {name.split()[0] for name, row in rows.items() if row.spills} <= {"gemv"}, version


@pytest.mark.parametrize(
    ("version", "before"),
    [("3.9.0", "3.9.0"), ("3.9.1", "3.9.0"), ("3.10.0+git1234", "3.9.0"), ("3.7.0", "3.6.0"), ("3.5.0", None)],
)
def test_a_version_without_a_record_is_compared_with_the_last_before_it(
    version: str, before: str | None, tmp_path: Path
) -> None:
    for known in ("3.6.0", "3.7.1", "3.9.0"):
        record.write(record.path_of(known, tmp_path), {})
    assert command.base(version, tmp_path) == before


# --- Which Triton ---


def test_a_triton_is_a_version_an_interpreter_a_folder_or_what_pip_installs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ran: list[list[str]] = []

    def install(words: list[Any], check: bool) -> None:
        ran.append([str(word) for word in words])
        (Path(words[words.index("--target") + 1]) / "triton").mkdir(parents=True)
        (Path(words[words.index("--target") + 1]) / "triton" / "__init__.py").write_text("")

    monkeypatch.setattr(subprocess, "run", install)
    here = tritons.toolchain(triton.__version__, tmp_path)
    assert here == tritons.Toolchain(sys.executable) and not ran
    assert tritons.toolchain(sys.executable, tmp_path) == tritons.Toolchain(sys.executable)

    made = tritons.toolchain("3.99.0", tmp_path)
    assert made == tritons.Toolchain(sys.executable, tmp_path / "3.99.0") and ran[0][-1] == "triton==3.99.0"
    assert "--no-deps" in ran[0]
    assert tritons.toolchain("3.99.0", tmp_path) == made and len(ran) == 1
    assert tritons.toolchain(str(tmp_path / "3.99.0"), tmp_path) == made
    (tmp_path / "wheels").mkdir()
    wheel = tmp_path / "wheels" / "triton-3.100.0+git0123-cp311.whl"
    wheel.write_text("")
    assert tritons.toolchain(str(wheel), tmp_path).folder == tmp_path / wheel.stem
    assert ran[1][-1] == str(wheel)
    tritons.toolchain("triton>=3.10.dev0", tmp_path)
    assert ran[2][-1] == "triton>=3.10.dev0"
    with pytest.raises(ValueError, match="no folder triton"):
        tritons.toolchain(str(ROOT / "docs"), tmp_path)

    monkeypatch.setenv("PYTHONPATH", "elsewhere")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    environment = made.environment()
    assert environment["PYTHONPATH"].split(os.pathsep) == [str(tmp_path / "3.99.0"), str(ROOT), "elsewhere"]
    assert "TRITON_INTERPRET" not in environment


# --- Compiling ---


def test_machine_code_is_known_by_its_instructions_and_not_by_its_name() -> None:
    code = "\tFunction : {}\n /*0000*/ LDC R1, c[0x0][0x28] ; /* 0x00 */\n /* 0x01 */\n /*0010*/ {} ; /* 0x02 */\n"
    first = compiling.machine_code(code.format("a", "EXIT"))
    assert first == compiling.machine_code(code.format("b", "EXIT")) != compiling.machine_code(code.format("a", "NOP"))


@pytest.mark.parametrize("gpu", record.GPUS)
def test_every_gpu_has_cases_and_only_hopper_warp_specialised_ones(gpu: str) -> None:
    """Launched programmatically from Hopper on, as plans do."""
    found = cases.every(gpu)
    specialised = any(name.startswith("warp_specialised") for name in found)
    assert len(found) > 250 and specialised == (gpu == "sm_90")
    programmatic = any(case.launch.arguments.get("PDL") for case in found.values())
    assert programmatic == (gpu not in ("sm_80", "sm_89"))


def pretend(name: str) -> Row:
    """A compiler that some cases end: in a process of its own."""
    if name.startswith("dies"):
        os._exit(11)
    return replace(PLAIN, registers=len(name))


def test_a_compiler_that_dies_costs_its_case_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Forked, for speed: nothing is compiled here."""
    monkeypatch.setattr(compiling, "get_context", lambda _: get_context("fork"))
    names = ["a", "dies", "bb", "dies too", "ccc"]
    found = dict(compiling.compile_all(names, 2, pretend))
    assert {name: row.error for name, row in found.items() if row.error} == dict.fromkeys(
        ("dies", "dies too"), compiling.ENDED
    )
    assert [found[name].registers for name in ("a", "bb", "ccc")] == [1, 2, 3]


@pytest.mark.full
def test_the_command_compiles_and_compares(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--triton", triton.__version__, "--only", FEW, "--jobs", "1", "--records", str(tmp_path)]
    assert command.main(options) == 0
    assert "there is no record to compare with" in capsys.readouterr().out
    (name,) = command.chosen(cases.every(), FEW, 1)
    committed = record.read(record.path_of(triton.__version__))[name]
    fewer = replace(committed, registers=committed.registers - 1, spills=-1)
    record.write(
        record.path_of(triton.__version__, tmp_path), {name: fewer, "gone skinny half 16x8x512 2 warps": PLAIN}
    )
    assert command.main(options) == 1
    said = capsys.readouterr().out
    assert f"registers {committed.registers - 1} -> {committed.registers}" in said and "WORSE" in said
    assert "1 only in the record: gone" in said


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--update --only portable", "would leave cases out"),
        ("--write x.csv --against 3.9.0", "--against would be ignored"),
        ("--jobs 0", "a whole number from 1 on"),
    ],
)
def test_mistaken_calls_are_refused(arguments: str, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        command.main(arguments.split())
    assert exit_.value.code == 2 and words in capsys.readouterr().err


def test_a_triton_that_cannot_be_had_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--triton", str(ROOT / "docs")]) == 2
    assert "has no folder triton" in capsys.readouterr().err
