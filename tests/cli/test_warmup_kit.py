"""`triton-gemm warmup --kit`, from the command to the launches that find their machine code in its file."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import torch

from tests.support.command_line import document, words_of
from tests.support.table_fakes import problem_of, read_environment_again
from triton_gemm import cli, compat
from triton_gemm.hardware.gpus import named_device
from triton_gemm.layers import problems_of
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting import doctor, storage
from triton_gemm.runtime import kit, kit_build, kits, native_build, native_file, policies, precompile
from triton_gemm.selection import generation
from triton_gemm.selection.select import select
from triton_gemm.tables import files, records
from triton_gemm.tuning.candidates import candidates

H200 = named_device("h200")
PROBLEMS = [problem_of(1, 4096, 4096), problem_of(17, 33, 65)]
CALL = ("warmup", "--device", "h200", "--shapes", "1x4096x4096,17x33x65", "--kit")


@pytest.fixture(autouse=True)
def none_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    monkeypatch.setattr(kits, "SHIPPED", tmp_path / "shipped")
    monkeypatch.delenv("TRITON_GEMM_KIT", raising=False)
    yield
    forget()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    """What CALL writes."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kits, "SHIPPED", Path("/absent"))
        file = tmp_path_factory.mktemp("kit") / "fleet.kit"
        assert document(*CALL, file)["compiled"] == 2
        return file.read_bytes()


@pytest.fixture
def file(made: bytes, tmp_path: Path) -> Path:
    found = tmp_path / "fleet.kit"
    found.write_bytes(made)
    found.chmod(0o644)
    return found


def use(value: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_KIT", str(value))
    forget()


def forget() -> None:
    """Which kits are used."""
    kits.used.cache_clear()
    native_file.setting.cache_clear()
    generation.advance_models()


def served(problem: GemmProblem) -> list[bool]:
    """Of a product's launches, whether a kit has their machine code."""
    launches = precompile.compilables(H200, problem, policies.choose(problem, H200)).values()
    return [kits.code_of(*of, H200.capability) is not None for of in launches]


def findings() -> list[tuple[str, str, str]]:
    """What doctor says of kits."""
    return [(x.status, x.says, x.do) for x in doctor.examine().findings if x.about == "kits"]


def finding() -> tuple[str, str, str]:
    """What it says, where that is one sentence."""
    [found] = findings()
    return found


def test_what_was_requested_is_served_and_nothing_else(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    for value, expected in ((file, True), ("0", False)):
        use(value, monkeypatch)
        assert document("explain", "17x33x65", "--device", "h200")["chosen"]["kit"] is expected
        assert ("from a kit" in words_of("explain", "17x33x65", "--device", "h200")) is expected
        for problem in PROBLEMS:
            assert served(problem) == [expected]
        for other in (problem_of(), problem_of(17, 33, 65, torch.float16)):
            assert not any(served(other))
    assert caplog.records == []


@pytest.mark.parametrize("source", ["weights", "shapes-from", "candidates"])
def test_each_option_that_names_products(source: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """In a folder that is made, relative to this one or to one's home."""
    problems, options = [problem_of(100, 60, 40)], ["--shapes", "100x60x40", "--candidates", "same"]
    if source == "weights":
        options = ["--weights", "33x65,64x64", "--rows", "1-2,65", "--bias", "--dtype", "fp16"]
        problems = [*problems_of([(33, 65), (64, 64)], [1, 2, 65], torch.float16, True)]
    elif source == "shapes-from":
        problems = PROBLEMS
        lines = ",".join(records.text_of({"calls": 1, "problem": records.plain(x)}) for x in PROBLEMS)
        (tmp_path / "shapes.json").write_text(f'{{"format": 1, "products": [{lines}]}}')
        options = ["--shapes-from", str(tmp_path / "shapes.json")]
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    found = document("warmup", "--device", "h200", *options, "--kit", "~/" * (source == "weights") + "image/fleet.kit")
    assert found["failures"] == [] and found["problems"] == len(problems) and found["devices"] == ["NVIDIA H200"]
    use(tmp_path / "image" / "fleet.kit", monkeypatch)
    assert found["file"] == str(tmp_path / "image" / "fleet.kit")
    assert all(all(served(problem)) for problem in problems)
    if source == "candidates":
        (problem,) = problems
        selections = candidates(problem, H200, select(problem, H200), "same")
        keys = {kit.key_of(x) for selection in selections for x in precompile.compilables(H200, problem, selection)}
        (of,) = kits.used(H200.capability)
        assert of.kernels.keys() == keys and found["kernels"] == len(keys) > 2


def test_the_example_of_weights_adds_kernels(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the package's kit, which has all that bf16 without a bias needs on an older Triton."""
    monkeypatch.setattr(kits, "SHIPPED", kit.PACKAGE / "kits")
    adds = Mock(return_value=({}, ()))
    monkeypatch.setattr(kit_build, "_compiled", adds)
    page = (kit.PACKAGE.parent / "docs/cli.md").read_text()
    (example,) = re.findall(r"^ +triton-gemm (warmup --weights .* --kit) /opt", page, re.MULTILINE)
    assert "need no kit" not in words_of(*example.split(), tmp_path / "fleet.kit")
    missing, *_ = adds.call_args.args
    assert missing
    shown = words_of("warmup", "--device", "h200", "--shapes", "4096x4096x4096", "--kit", tmp_path / "fleet.kit")
    assert "1 kernel for 1 GEMM on NVIDIA H200, 1 of them in the package's own kit these GEMMs need no kit" in shown


@pytest.mark.skipif(compat.CLUSTERS, reason="is as new as the package's kit")
def test_it_is_used_beside_a_kit_of_another_triton(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It serves GEMMs that the package's kit does not serve, also batch-invariant ones. Choices do not change."""
    monkeypatch.setattr(kits, "SHIPPED", kit.PACKAGE / "kits")
    use("1", monkeypatch)
    problem = problem_of(100, 60, 40)
    cases = [(x, invariant) for x in (*PROBLEMS, problem) for invariant in (False, True)]
    before = [policies.choose(x, H200, invariant=invariant) for x, invariant in cases]
    lacking = [not kits.serves(x, H200, chosen) for (x, _), chosen in zip(cases, before, strict=True)]
    assert any(lacking) and not kits.made(H200.capability) and kits.made(H200.capability, foreign=True)
    file = tmp_path / "own.kit"
    for invariant in ("0", "1"):
        monkeypatch.setenv("TRITON_GEMM_BATCH_INVARIANT", invariant)
        read_environment_again()
        for call in (CALL, ("warmup", "--device", "h200", "--shapes", "100x60x40", "--kit")):
            document(*call, file)
    monkeypatch.delenv("TRITON_GEMM_BATCH_INVARIANT")
    read_environment_again()
    use(file, monkeypatch)
    after = [policies.choose(x, H200, invariant=invariant) for x, invariant in cases]
    assert after == before
    assert all(kits.serves(x, H200, chosen) for (x, _), chosen in zip(cases, after, strict=True))


def test_neither_a_compiler_nor_a_folder_of_caches_is_needed(
    file: Path, made: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Triton's driver module and the extension are not built."""
    for name, value in (("PATH", ""), ("CC", ""), ("HOME", "/dev/null"), ("TRITON_CACHE_DIR", "/dev/null")):
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(precompile, "build_driver_module", Mock(side_effect=AssertionError))
    monkeypatch.setattr(native_build, "ahead", Mock(side_effect=AssertionError))
    shown = words_of(*CALL, tmp_path / "other.kit")
    size = -(-(tmp_path / "other.kit").stat().st_size // 1000)
    assert f"2 kernels, {size} kB, in {tmp_path / 'other.kit'} 2 compiled in " in shown
    assert " s, 0 were there before 2 kernels for 2 GEMMs on NVIDIA H200, 0 of them in the package's own kit" in shown
    assert (tmp_path / "other.kit").read_bytes() == made
    assert " s, 2 were there before" in (shown := words_of(*CALL, file)) and "dropped" not in shown
    real = kit.source_hash
    monkeypatch.setattr(kit, "source_hash", lambda of: "changed" if of == "kernels/gemv.py" else real(of))
    shown = words_of(*CALL, file)
    assert "1 were there before" in shown and "1 dropped: their sources have changed" in shown


@pytest.mark.parametrize("fault", ["link", "mode", "relative", "damaged"])
def test_doctor_says_why_a_file_is_not_used(fault: str, file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    given: object = file
    if fault == "link":
        given = file.with_name("link.kit")
        file.with_name("link.kit").symlink_to(file.name)
    elif fault == "mode":
        file.chmod(0o664)
    elif fault == "damaged":
        file.write_bytes(file.read_bytes()[:-1])
    else:
        given = file.name
    use(given, monkeypatch)
    status, text, do = finding()
    if fault == "relative":
        assert text.startswith("there is no kit")  # and "policy" has what is wrong
        return
    assert status == "broken" and text.startswith(f"the kit {given} is not used: ")
    how = f"`triton-gemm warmup <GEMMs> --kit {given}` writes it anew once it is deleted; "
    if fault == "mode":  # which the error says how to change
        assert f"chmod go-w {given}" in text
        how = ""
    assert do == f"{how}or unset TRITON_GEMM_KIT"


def test_stale_kernels_are_not_served(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Others are, and doctor counts both."""
    use(file, monkeypatch)
    made_by = kit.read(file).made_by
    has = f"the kit {file} has 2 kernels for sm_90, made by ptxas {made_by['ptxas']} and triton {made_by['triton']}"
    has += f"; it is used on such GPUs with Triton {files.TRITON}"
    assert finding() == ("good", has, "")
    real = kit.source_hash
    monkeypatch.setattr(kit, "source_hash", lambda of: "changed" if of == "kernels/gemv.py" else real(of))
    assert list(map(served, PROBLEMS)) == [[False], [True]]
    status, text, do = finding()
    assert status == "note" and text == f"{has}, and 1 are compiled anyway: the sources are not those of the kit"
    assert do.startswith(f"`triton-gemm warmup <GEMMs> --kit {file}` writes it anew")


def test_doctor_says_whether_a_kit_is_used_on_the_gpus_here(
    file: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """By their compute capability, and by the versions of Triton that built it and the package's."""
    use(file, monkeypatch)
    a100 = named_device("a100")
    for devices, status, words in (
        ((H200, H200, a100), "good", f"; it is used on NVIDIA H200 with Triton {files.TRITON}"),
        ((a100,), "note", "; it is not used: no GPU here has that compute capability"),
    ):
        monkeypatch.setattr(doctor, "_devices", lambda devices=devices: devices)
        assert finding()[0] == status and finding()[1].endswith(words)
    kits.SHIPPED.mkdir()
    shipped = kits.SHIPPED / kits.NAMES[H200.capability]
    shipped.write_bytes(file.read_bytes())
    monkeypatch.setattr(doctor, "_devices", lambda: (H200,))
    for at, status, words in (
        (file, "note", f"not used: Triton 3.1 has built it, and this is {files.TRITON}, as is the package's kit"),
        (shipped, "good", f"used on NVIDIA H200 with Triton {files.TRITON}, for the GEMMs that it covers"),
    ):
        of = kit.read(at)
        kernels = kit_build._current(of, of.capability, of.made_by, of.kernels)
        kit.write(at, of.capability, kernels, of.made_by | {"triton": "3.1.0"})
        at.chmod(0o644)
        of_package, own = findings()
        assert own[0] == status and (own if at == file else of_package)[1].endswith(f"; it is {words}")
    assert caplog.records == []


def test_doctor_knows_the_package_s_kit(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside the user's, and where neither is used."""
    kits.SHIPPED.mkdir()
    shipped = kits.SHIPPED / kits.NAMES[H200.capability]
    shipped.write_bytes(file.read_bytes())
    shipped.chmod(0o666)  # nobody checks that of the package's own files
    assert finding()[1].startswith("the package's kit has 2 kernels for sm_90")
    use(file, monkeypatch)
    of_package, own = findings()
    assert own[1].startswith(f"the kit {file} has 2") and of_package[1].startswith("the package's kit has 2")
    missing = file.with_name("missing.kit")
    use(missing, monkeypatch)
    _, (status, _, do) = findings()
    assert status == "broken" and do.startswith(f"`triton-gemm warmup <GEMMs> --kit {missing}` writes it;")
    use("1", monkeypatch)
    shipped.write_bytes(b"damaged")
    text = "the package's kit is not used: it is no kit of this version's format"
    assert finding() == ("note", text, "install the package again")
    use("0", monkeypatch)
    assert finding() == ("good", "all kernels are compiled: TRITON_GEMM_KIT is 0", "")
    use("1", monkeypatch)
    monkeypatch.setattr(storage, "compiles_anew", lambda: True)
    assert finding() == ("good", "all kernels are compiled: Triton's settings say so", "")
    monkeypatch.setattr(storage, "INTERPRETED", True)
    assert finding() == ("good", "no kit is used: Triton's interpreter runs kernels", "")


@pytest.mark.parametrize(
    ("arguments", "code", "error"),
    [
        (["--device", "h200", "--out", "cache", "--kit", "x.kit"], 2, "give --out or --kit, not both"),
        (["--arch", "sm_80", "--kit", "x.kit"], 2, "a kit is for GPUs of one compute capability, 9.0, not for"),
        (["--device", "h200", "--kit", "a.json"], 2, "a.json: it is no kit of this version's format"),
        (["--device", "h200", "--kit", "a.json/x.kit"], 1, "File exists"),
        (["--device", "h200", "--kit", "open/x.kit"], 1, "others may write to"),
    ],
)
def test_what_cannot_be_written_is_one_error(
    arguments: list[str], code: int, error: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "a.json").write_text("{}")
    (tmp_path / "open").mkdir()
    (tmp_path / "open").chmod(0o777)
    assert error in document("warmup", "--shapes", "1x2x3", *arguments, code=code)["error"]
    assert error in words_of("warmup", "--shapes", "1x2x3", *arguments, code=code)
    assert {x.name for x in tmp_path.iterdir()} == {"a.json", "open"} and (tmp_path / "a.json").read_text() == "{}"


def test_a_kernel_that_fails_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cli.warmup.kit_build, "machine_code", Mock(side_effect=ValueError("it wants scratch memory")))
    call = ("warmup", "--device", "h200", "--shapes", "17x33x65", "--kit", tmp_path / "fleet.kit")
    assert "failed: portable_kernel: ValueError: it wants scratch memory" in words_of(*call, code=1)
    assert document(*call, code=1)["failures"] == ["portable_kernel: ValueError: it wants scratch memory"]
