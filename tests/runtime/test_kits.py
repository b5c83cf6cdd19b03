"""Which kits a process uses, and what becomes of one that it may not use, or that is damaged or refused."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from tests.support import fake_driver, unsafe_files
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import compat, tables
from triton_gemm.compat import MachineCode
from triton_gemm.functional import routing
from triton_gemm.hardware import driver
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.learning.candidates import predicted_us
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting import fingerprint
from triton_gemm.reporting.explanation import explain
from triton_gemm.runtime import binaries, kit, kits, native_file, plan, policies, step
from triton_gemm.selection import generation
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, launches, ranked, select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables import files
from triton_gemm.tuning.candidates import candidates

PROBLEM = GemmProblem.of(*(torch.empty(64, 64, dtype=torch.bfloat16, device="meta") for _ in "abc"))
(LAUNCH,) = binaries.launches_on(HOPPER, PROBLEM, select(PROBLEM, HOPPER))
OPERANDS = binaries.operands_of(PROBLEM, [LAUNCH])
KEY = kit.key_of(binaries.identity(LAUNCH, OPERANDS))
MADE = MachineCode(LAUNCH.kernel.__name__, 8, 1, 1024, False, True, (), (), b"code")


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """No kit is used, and none is the package's own."""
    monkeypatch.setattr(kits, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv("TRITON_GEMM_KIT", raising=False)
    read_again()
    yield
    read_again()


def read_again() -> None:
    """What kits there are, and which are to be used."""
    kits.used.cache_clear()
    native_file.setting.cache_clear()
    generation.advance_models()


def write(
    file: Path, made: MachineCode = MADE, capability: tuple[int, int] = (9, 0), triton: str = kits.TRITON
) -> Path:
    file.parent.mkdir(mode=0o755, exist_ok=True)
    kit.write(file, capability, {KEY: kit.Kernel(made, kit.sources_of(LAUNCH.kernel))}, {"triton": triton})
    file.chmod(0o644)
    return file


@pytest.fixture
def shipped() -> Path:
    return write(kits.SHIPPED / "sm_90a.kit")


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's kit, which is to be used."""
    file = write(tmp_path / "own" / "mine.kit")
    monkeypatch.setenv("TRITON_GEMM_KIT", str(file))
    return file


def code(capability: tuple[int, int] = (9, 0)) -> bytes | None:
    found = kits.code_of(LAUNCH, OPERANDS, capability)
    return None if found is None else found[0].code


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    caplog.clear()
    return found


def test_the_package_s_own_is_used(shipped: Path, caplog: pytest.LogCaptureFixture) -> None:
    """On GPUs that it is for."""
    assert code() == b"code" and code((8, 0)) is None and code((10, 0)) is None
    assert kits.code_of(LAUNCH, OPERANDS | {"a": torch.empty(64, dtype=torch.float16)}, (9, 0)) is None
    assert warnings(caplog) == []


def test_without_a_file_or_with_one_of_another_gpu_all_is_compiled(caplog: pytest.LogCaptureFixture) -> None:
    assert code() is None and warnings(caplog) == []
    write(kits.SHIPPED / "sm_90a.kit", capability=(10, 0))
    read_again()
    assert code() is None


def test_the_setting(
    shipped: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A user's own comes first; a wrong value is warned of once."""
    own = write(tmp_path / "own" / "mine.kit", MADE._replace(code=b"mine"))
    for value, expected, warned in (
        *(("0", None, 0), ("", b"code", 0), ("1", b"code", 0), (str(own), b"mine", 0)),
        *(("2", b"code", 1), ("mine.kit", b"code", 1), (str(tmp_path / "none.kit"), b"code", 1)),
    ):
        monkeypatch.setenv("TRITON_GEMM_KIT", value)
        read_again()
        assert kits.used((8, 0)) == []
        assert (code(), code()) == (expected, expected)
        assert len(warnings(caplog)) == warned


NO_KITS: unsafe_files.Faults = {
    **unsafe_files.FOREIGN,
    **unsafe_files.IRREGULAR,
    "a script": (lambda file: file.write_bytes(b"#!/bin/sh"), "it is no kit"),
    "a device": (lambda _: os.environ.update(TRITON_GEMM_KIT="/dev/zero"), "others may write to /dev/zero"),
}


@pytest.mark.parametrize("name", NO_KITS)
def test_a_user_s_file_that_is_unsafe_is_not_used(name: str, own: Path, caplog: pytest.LogCaptureFixture) -> None:
    change, words = NO_KITS[name]
    change(own)
    assert code() is None and code() is None
    (warned,) = warnings(caplog)
    assert os.environ["TRITON_GEMM_KIT"] in warned and words in warned and "its kernels are compiled" in warned


def test_a_user_s_file_that_is_replaced_meanwhile_stays(own: Path) -> None:
    kits.used((9, 0))
    own.unlink()
    write(own, MADE._replace(code=b"another"))
    assert code() == b"code"


@pytest.mark.parametrize("whose", ["shipped", "own"])
def test_a_damaged_kit_is_warned_of_once(
    whose: str, request: pytest.FixtureRequest, caplog: pytest.LogCaptureFixture
) -> None:
    """By its name, though a user's is read by its descriptor."""
    file = request.getfixturevalue(whose)
    kits.used((9, 0))
    file.write_bytes(file.read_bytes()[:-20] + bytes(20))
    assert code() is None and code() is None
    (warned,) = warnings(caplog)
    assert warned.startswith(f"{file} is not used") and kits.used((9, 0)) == []


@pytest.mark.parametrize("setting", ["runtime.debug", "compilation.always_compile", "compilation.override"])
def test_where_triton_is_told_to_compile_it_compiles(shipped: Path, setting: str) -> None:
    of, name = setting.split(".")
    with getattr(triton.knobs, of).scope():
        setattr(getattr(triton.knobs, of), name, True)
        assert code() is None
    assert code() == b"code"


def made(compiled: list[Any], monkeypatch: pytest.MonkeyPatch) -> step.Step:
    """A step with a compiler that records its calls."""

    def compile(launch: Any, *_: object) -> MachineCode:
        compiled.append(launch)
        return MADE._replace(code=b"compiled")

    replace_all(monkeypatch, step, compiled=compile, compiled_before=lambda *_: None, machine_code=lambda found: found)
    return step.Step(LAUNCH, ("alpha", "beta", "a", "b", "c"), capability=(9, 0))


def test_a_step_is_a_kit_s(shipped: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is compiled for it, nor looked up in Triton's cache."""
    loaded: list[bytes] = []
    monkeypatch.setattr(step.Step, "_load", lambda self, made: (loaded.append(made.code), setattr(self, "call", print)))
    compiled: list[Any] = []
    first, second = made(compiled, monkeypatch), made(compiled, monkeypatch)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(first.compile, [OPERANDS] * 8))
    assert second.load(OPERANDS) and loaded == [b"code", b"code"] and compiled == []


def test_what_the_driver_refuses_is_compiled(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A kit of a newer CUDA than the driver's, which is warned of once."""
    monkeypatch.setattr(driver, "error_text", lambda _: "in words")
    too_old = driver.DriverError("cuModuleLoadData", 222)
    for error in (too_old, ValueError("the kernel's parameters"), StopIteration(), OverflowError("a number")):
        kits.used.cache_clear()
        loaded: list[bytes] = []

        def load(self: step.Step, made: MachineCode, error: Exception = error, loaded: list[bytes] = loaded) -> None:
            loaded.append(made.code)
            if made.code == b"code":
                raise error
            self.call = print

        monkeypatch.setattr(step.Step, "_load", load)
        compiled: list[Any] = []
        for _ in range(2):
            made(compiled, monkeypatch).compile(OPERANDS)
        assert loaded == [b"code", b"compiled", b"compiled"] and len(compiled) == 2
        assert len(warnings(caplog)) == 1


def test_other_errors_of_the_driver_are_the_call_s(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A GPU without memory, or a context that an earlier kernel has lost, says nothing of the kit."""
    monkeypatch.setattr(driver, "error_text", lambda _: "in words")
    for number in (2, 700):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=f"CUDA error {number}: in words"):
            patch.setattr(step.Step, "_load", Mock(side_effect=driver.DriverError("cuModuleLoadData", number)))
            made([], monkeypatch).compile(OPERANDS)
    assert code() == b"code" and warnings(caplog) == []


def test_what_a_kit_has_launches_as_what_is_compiled(
    shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same parameters, grid and attributes."""
    with compat.compiling_for((9, 0), tmp_path):
        found = compat.machine_code(step.compiled(LAUNCH, OPERANDS, binaries.SCALARS))
    write(shipped, found)
    replace_all(monkeypatch, driver, load=lambda *_: (1, 2), parameter_sizes=lambda _: None)
    replace_all(monkeypatch, driver, ensure_context=lambda _: None, tensor_map=fake_driver.tensor_map)
    monkeypatch.setattr(step, "_functions", {})
    of_kit, of_compiler = made([], monkeypatch), made([], monkeypatch)
    of_compiler._load(found)
    of_kit.compile(OPERANDS)
    assert of_kit.entry == of_compiler.entry and of_kit.entry is not None


@pytest.mark.parametrize("has", ["the package", "the user", "none"])
def test_triton_is_not_hashed_where_kits_are(
    has: str, shipped: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """`use()` has it hashed in the background where kernels are likely to be compiled."""
    hashed: list[bool] = []
    replace_all(monkeypatch, routing, hash_triton_in_background=lambda: hashed.append(True), INTERPRETED=False)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(routing._overrides, "register", lambda: True)
    monkeypatch.setattr(routing._by_cpp, "change", lambda *_: None)
    if has != "the package":
        shipped.unlink()
        monkeypatch.setenv("TRITON_GEMM_KIT", str(tmp_path / "own.kit") if has == "the user" else "1")
    read_again()
    routing._begin(SimpleNamespace(learn=False))
    assert hashed == [True] * (has == "none")


# --- Choices ---

SQUARE = gemm_problem(Shape(2048, 2048, 2048), "bf16")


def ties(problem: GemmProblem = SQUARE, device: DeviceInfo = HOPPER) -> list[tuple[float, Selection]]:
    """Legal candidates of the choice's class of bits in the forms of kits, the fastest first."""
    with forms.of_kits():
        wanted = bit_class(problem, select(problem, device))
        return [
            (us, replace(Selection.of(candidate, "made"), kit=True))
            for us, candidate in ranked(problem, device)
            if bit_class(problem, candidate) == wanted and illegal(problem, device, candidate) is None
        ]


def write_kit_of(*selections: Selection, problem: GemmProblem = SQUARE, device: DeviceInfo = HOPPER) -> None:
    made = {kit.key_of(x): x[0] for of in selections for x in binaries.identities(device, problem, of)}
    sources = kit.sources_of(LAUNCH.kernel)
    kits.SHIPPED.mkdir(exist_ok=True)
    kernels = {key: kit.Kernel(MADE._replace(symbol=name), sources) for key, name in made.items()}
    kit.write(kits.SHIPPED / "sm_90a.kit", (9, 0), kernels, {"triton": "3.9.0"})
    read_again()


def compiled_us(problem: GemmProblem = SQUARE, device: DeviceInfo = HOPPER) -> float:
    """What the choice is predicted to take in the forms of the installed Triton."""
    return predicted_us(problem, device, select(problem, device))


def test_of_ties_the_choice_is_what_a_kit_has(caplog: pytest.LogCaptureFixture) -> None:
    """A candidate of the same bits that is predicted to be about as fast, unless the kit has the model's choice."""
    (first_us, first), *others = ties()
    without = policies.choose(SQUARE, HOPPER)
    assert not without.kit
    near = [x for us, x in others if us <= kits.TIES * first_us]
    far = next(x for us, x in others if us > max(kits.TIES * first_us, kits.ANOTHER * compiled_us()))
    assert near, "an example without ties"
    with forms.of_kits():
        assert [x.algorithm for x in kits.ties(SQUARE, HOPPER, first)] == [x.algorithm for x in (first, *near)]
    for has, expected in (([near[-1]], near[-1]), ([first, near[0]], first), ([far, near[0]], near[0])):
        write_kit_of(*has)
        found = policies.choose(SQUARE, HOPPER)
        assert found.algorithm == expected.algorithm and found.source == "model" and found.kit
        assert bit_class(SQUARE, found) == bit_class(SQUARE, first)
    write_kit_of(far)
    assert policies.choose(SQUARE, HOPPER) == without
    write_kit_of(first)
    found = policies.choose(SQUARE, HOPPER, invariant=True)
    assert found.algorithm == policies._invariant_by_model(SQUARE, HOPPER).algorithm
    kits.refuse(kits.used((9, 0))[0], RuntimeError("the driver is too old"))
    assert policies.choose(SQUARE, HOPPER) == without and len(warnings(caplog)) == 1


def test_stale_kernels_are_not_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    without = policies.choose(SQUARE, HOPPER)
    (_, first), *_ = ties()
    write_kit_of(first)
    assert policies.choose(SQUARE, HOPPER).kit
    monkeypatch.setattr(kit, "source_hash", lambda _: "changed")
    generation.advance_models()
    assert policies.choose(SQUARE, HOPPER) == without


@pytest.fixture
def older_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with a Triton that compiles no clusters, and has no tables."""
    if compat.CLUSTERS:
        pytest.skip("is as new as the kit")
    monkeypatch.setattr(forms, "CLUSTERS", False)
    generation.advance_models()


H100 = named_device("h100")
CLUSTERED = gemm_problem(Shape(4096, 4096, 4096), "bf16")


def in_forms_of_kits(problem: GemmProblem) -> Selection:
    with forms.of_kits():
        return select(problem, H100)


def test_an_older_triton_runs_what_it_cannot_compile(older_triton: None) -> None:
    """The choice has clusters where a kit holds it, and its launches are those that the kit was made from."""
    without = policies.choose(CLUSTERED, H100)
    wanted = in_forms_of_kits(CLUSTERED)
    assert without.config.ctas == 1 < wanted.config.ctas
    with forms.of_kits():
        made = launches(CLUSTERED, wanted)
    write_kit_of(replace(wanted, kit=True), problem=CLUSTERED, device=H100)
    found = policies.choose(CLUSTERED, H100)
    assert found.algorithm == wanted.algorithm and found.kit and "from a kit" in str(replace(found, policy="cached"))
    assert launches(CLUSTERED, found) == made
    assert kits.holds(CLUSTERED, H100, found, foreign=True) and not kits.holds(CLUSTERED, H100, found)
    assert not kits.holds(CLUSTERED, H100, without, foreign=True)
    assert candidates(CLUSTERED, H100, policies.by_model(CLUSTERED, H100))[0] == found


def test_an_older_triton_runs_what_is_as_fast_as_its_own(older_triton: None) -> None:
    """A kit's kernel is chosen unless the installed Triton compiles one that is predicted to be 10 % faster."""
    problem = gemm_problem(Shape(712, 1264, 4976), "bf16")  # one wave, in which clusters share loads
    without = policies.choose(problem, H100)
    (first_us, _), *others = ties(problem, H100)
    own_us = kits.ANOTHER * compiled_us(problem, H100)
    between = [x for us, x in others if kits.TIES * first_us < us <= own_us]
    slower = next(x for us, x in others if us > max(kits.TIES * first_us, own_us))
    assert between, "an example in which clusters save nothing"
    write_kit_of(between[-1], problem=problem, device=H100)
    found = policies.choose(problem, H100)
    assert found.algorithm == between[-1].algorithm and found.kit
    write_kit_of(slower, problem=problem, device=H100)
    assert policies.choose(problem, H100) == without


@pytest.mark.parametrize("refused", [False, True])
def test_a_kit_that_is_refused_when_a_plan_is_made(
    refused: bool, older_triton: None, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """What the installed Triton cannot compile is loaded when it is planned, or something else is planned."""
    wanted = in_forms_of_kits(CLUSTERED)
    write_kit_of(replace(wanted, kit=True), problem=CLUSTERED, device=H100)

    def load(self: step.Step, made: MachineCode) -> None:
        if refused:
            raise driver.DriverError("cuModuleLoadData", 222)
        self.call = print

    monkeypatch.setattr(driver, "error_text", lambda _: "too old")
    monkeypatch.setattr(step.Step, "_load", load)
    monkeypatch.setattr(step, "compiled_before", lambda *_: None)
    monkeypatch.setattr(plan, "ensure_context", lambda _: None)
    replace_all(monkeypatch, plan, info_of=lambda _: H100, device_info=lambda _: H100)
    found = plan._new_plan(CLUSTERED, torch.device("cpu"), None)
    assert isinstance(found, plan.GemmPlan) and found.selection.kit is found.compiled is not refused
    assert (found.selection.algorithm == wanted.algorithm) is not refused
    write_kit_of(replace(wanted, kit=True), problem=CLUSTERED, device=H100)
    others = plan.GemmPlan(CLUSTERED, select(CLUSTERED, H100), torch.device("cpu"))
    assert not any(x.foreign for x in others.steps), "the installed Triton's bits, for whichever GEMM"
    assert len(warnings(caplog)) == refused


def test_an_older_triton_uses_tables_of_the_kits(older_triton: None) -> None:
    (path,) = tables.queries.SHIPPED.glob("*5120bit*")
    table = files.contents_of(path).table
    clustered = ((x, of) for x, of in table.entries.items() if getattr(of.algorithm.config, "ctas", 1) > 1)
    problem, entry = next(clustered)
    by_table = replace(entry.selection(problem, "shipped table"), kit=True)
    without = policies.left_out(problem, H100, entry, table)
    with policies.policy("cached"):
        assert policies.choose(problem, H100).source == "model"
        before = fingerprint.selection_fingerprint(H100, parts=True)
        write_kit_of(by_table, problem=problem, device=H100)
        found = policies.choose(problem, H100)
        after = fingerprint.selection_fingerprint(H100, parts=True)
    assert (found.algorithm, found.source, found.kit) == (by_table.algorithm, "shipped table", True)
    assert "of Triton 3.9" in (without or "") and policies.left_out(problem, H100, entry, table) is None
    with policies.policy("error"):
        assert policies.choose(problem, H100) == found
    with policies.policy("model"):
        assert policies.choose(problem, H100).source == "model"
    assert {part for part in before if before[part] != after[part]} == {"kits", "tables", fingerprint.MAY_DIFFER}


def test_a_user_s_kit_of_another_triton_replaces_no_kernels_of_the_package_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It is used where the package's kit is of another Triton, too, or there is none."""
    file = write(tmp_path / "own" / "own.kit", triton="3.1.0")
    monkeypatch.setenv("TRITON_GEMM_KIT", str(file))
    for by, kept in ((None, 1), ("3.2.0", 2), (kits.TRITON, 1)):
        if by is not None:
            write(kits.SHIPPED / "sm_90a.kit", triton=by)
        read_again()
        assert len(kits.used((9, 0))) == kept
        assert bool(kits.others((9, 0))) is (by != kits.TRITON)
    (warned,) = warnings(caplog)
    assert f"Triton 3.1 has built it, and this is {kits.TRITON}" in warned


def test_explain_says_what_is_of_a_kit() -> None:
    """Also of groups of columns, which are multiplied as groups of rows."""
    sizes = {"M": 2048, "N": 2048, "K": 2048, "dtype": torch.bfloat16, "device": HOPPER}
    assert not explain(**sizes).kit
    (_, first), *_ = ties()
    write_kit_of(first)
    assert explain(**sizes).kit
    assert not explain(**sizes, groups=4, group_dim="N").kit
