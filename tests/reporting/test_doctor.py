"""doctor: what is broken is found and said, whatever else is; and nothing is raised. Of the extension, too, to who has
never heard of it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from tests.support import fake_cxx, table_fakes
from tests.support.patches import replace_all
from tests.support.table_fakes import problem_of
from triton_gemm import tables
from triton_gemm.hardware.gpus import named_device
from triton_gemm.reporting import doctor, storage
from triton_gemm.reporting.doctor import Diagnosis, Finding
from triton_gemm.runtime import native_build, native_file
from triton_gemm.tables import files

H200 = named_device("h200")
PACKAGE = Path(doctor.__file__).parents[1]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "cache"))
    return table_fakes.own_folder(tmp_path / "own", monkeypatch)


def findings(about: str) -> list[Finding]:
    return [finding for finding in doctor.examine().findings if finding.about == about]


def the_one(about: str, words: str) -> Finding:
    (found,) = [finding for finding in findings(about) if words in finding.says]
    return found


def with_gpu(monkeypatch: pytest.MonkeyPatch, *devices: Any) -> None:
    """torch sees GPUs, as far as doctor looks without launching anything."""
    replace_all(monkeypatch, doctor, has_gpu=lambda: True, _devices=lambda: devices, driver_version=lambda: (13, 2))
    monkeypatch.setattr(torch.version, "cuda", "13.2")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(devices))
    monkeypatch.setitem(doctor.EXAMINATIONS, "product", lambda: iter(()))


def test_a_good_machine_has_nothing_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, H200)
    found = doctor.examine()
    assert not found.broken, [finding for finding in found.findings if finding.status == "broken"]
    assert {finding.about for finding in found.findings} == {*doctor.EXAMINATIONS} - {"product"}
    assert "sm_90, 132 SMs, 700 W" in the_one("GPU", "cuda:0 is NVIDIA H200").says
    assert "wgmma, TMA" in findings("kernels")[0].says


def test_a_machine_without_a_gpu_is_not_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for interpreted in (False, True):
        monkeypatch.setattr(doctor, "INTERPRETED", interpreted)
        found = the_one("GPU", "no NVIDIA GPU")
        assert found.status == "note" and ("TRITON_INTERPRET=1" in found.do) is not interpreted
    assert not doctor.examine().broken and doctor.examine().devices == ()


@pytest.mark.parametrize(
    ("change", "about", "text"),
    [
        ({}, "GPU", "torch cannot use it"),
        ({"hip": "7.0"}, "GPU", "AMD"),
        ({"cuda": None}, "GPU", "built without CUDA"),
        ({"cuda": "14.0"}, "driver", "torch is built for CUDA 14.0"),
    ],
)
def test_torch_that_does_not_fit(
    change: dict[str, Any], about: str, text: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with_gpu(monkeypatch)
    replace_all(monkeypatch, torch.version, **change)
    assert the_one(about, text).status == "broken"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert change or "CUDA_VISIBLE_DEVICES hides it" in the_one("GPU", text).says


def test_an_old_gpu_and_one_without_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, named_device("sm_75"), named_device("sm_80"))
    assert the_one("GPU", "sm_75").status == "broken" and the_one("GPU", "sm_80").status == "good"
    assert the_one("kernels", "predicted times for sm_80").status == "note"


@pytest.mark.parametrize(("version", "status"), [("2.9.1", "broken"), ("2.99.0", "note")])
def test_versions_that_were_not_tested(version: str, status: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "__version__", version)
    assert the_one("versions", f"torch {version} is").status == status


def test_a_triton_that_is_not_torchs(monkeypatch: pytest.MonkeyPatch) -> None:
    for own in (triton.__version__, None):
        required = ["filelock", *([f'triton=={own}; platform_system == "Linux"'] if own else [])]
        monkeypatch.setattr(metadata, "requires", lambda name, required=required: required)
        assert not [found for found in findings("versions") if "comes with" in found.says]
    monkeypatch.setattr(metadata, "requires", lambda name: ['triton==2.9.1; platform_system == "Linux"'])
    assert the_one("versions", "comes with Triton 2.9, and this is").status == "note"
    monkeypatch.setattr(metadata, "requires", Mock(side_effect=metadata.PackageNotFoundError("torch")))
    assert {found.status for found in findings("versions")} <= {"good", "note"}


def test_shipped_tables_of_another_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tables.queries, "SHIPPED", PACKAGE / "tables")
    shipped = {contents.table.triton for *_, contents in tables.listed() if contents.table}
    for devices in ((), (H200,)):
        with_gpu(monkeypatch, *devices)
        monkeypatch.setattr(files, "TRITON", "0.1")
        assert the_one("tables", f"shipped tables are for Triton {', '.join(sorted(shipped))}").status == "note"
        for version in shipped:
            monkeypatch.setattr(files, "TRITON", version)
            assert not [found for found in findings("tables") if "shipped tables are for" in found.says]


@pytest.mark.parametrize(("here", "status"), [(True, "broken"), (False, "note")])
def test_no_c_compiler(here: bool, status: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if here:
        with_gpu(monkeypatch, H200)
    else:
        monkeypatch.setattr(doctor, "has_gpu", lambda: False)
    monkeypatch.setattr(doctor, "c_compiler", lambda: None)
    found = the_one("compiler", "no C compiler")
    assert found.status == status and "warmup" in found.do
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(doctor.kits, "exist", lambda: True)
        assert the_one("compiler", "no C compiler").status == "note", "kits have most kernels"
    built = tmp_path / "cache" / "KEY" / "cuda_utils.so"
    built.parent.mkdir(parents=True)
    built.touch()
    assert "driver module is in its cache" in the_one("compiler", "no C compiler").says
    monkeypatch.setattr(doctor, "c_compiler", lambda: "/absent/cc")
    assert "/absent/cc: No such file" in findings("compiler")[0].says


def test_folders_that_cannot_be_written_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed = tmp_path / "file"
    closed.touch()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(closed / "cache"))
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", str(closed))
    cache, where = findings("caches")
    assert (cache.status, where.status) == ("broken", "note") and "set TRITON_CACHE_DIR" in cache.do


def test_folders_that_follow_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton expands no ~."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("TRITON_CACHE_DIR", "~/triton")
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "kept")
    cache, where = findings("caches")
    assert "is ~/triton, " in cache.says and "is kept/tables, " in where.says
    assert all("follows the working directory" in found.says and "absolute" in found.do for found in (cache, where))
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "~nobody-of-that-name/x")
    assert findings("caches")[1].says.startswith("there is no folder for tables")


def test_a_networks_file_system(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    df = tmp_path / "df"
    df.write_text("#!/bin/sh\nprintf 'Type\\nnfs4\\n'\n"), df.chmod(0o755)
    with monkeypatch.context() as patch:
        patch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
        assert all("on nfs4, not there yet: a network's" in found.says for found in findings("caches"))
    assert storage._filesystem(Path("/proc/self")) == "proc"
    monkeypatch.setenv("PATH", str(tmp_path / "empty"))
    assert all(found.status == "good" and ", on " not in found.says for found in findings("caches"))


def test_tables_and_their_faults(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu(monkeypatch, H200)
    assert "the cost model chooses" in findings("tables")[0].says
    assert tables.store(problem_of(), table_fakes.another(problem_of()), H200, us=1.0, default_us=2.0)
    assert "1 entry," in the_one("tables", "700W").says
    with_gpu(monkeypatch, named_device("h100"))
    assert "is not used here" in the_one("tables", "700W").says
    path = table_fakes.table_in(folder)
    path.write_text("{")
    assert the_one("tables", "it is not JSON").do
    with_gpu(monkeypatch)
    assert the_one("tables", "it is not JSON").status == "note" and "move" in the_one("tables", "it is not JSON").do
    path.write_text('{"format": 99}')
    assert the_one("tables", "its format is 99").status == "note", "no more than where there is a GPU"
    path.write_text("{")
    path.with_name(f"{path.name}.not-json.1").touch()
    assert the_one("tables", "is quarantined").status == "note"
    assert findings("tables")[-1].says.startswith("0 tables")
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert the_one("tables", "it is not JSON").do.startswith("change its permissions")
    with_gpu(monkeypatch, H200)
    assert the_one("tables", "it is not JSON").do.startswith("change its permissions")


def test_all_variables_are_known() -> None:
    sources = [path for path in PACKAGE.rglob("*.py") if path.name != "doctor.py"]
    sources.append(PACKAGE.parent / "triton_gemm_autoload.py")
    read = {name for path in sources for name in re.findall(r"TRITON_GEMM_[A-Z_]*[A-Z]", path.read_text())}
    assert read | {"TRITON_GEMM_COMMIT"} == set(doctor.VARIABLES)


def test_words_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_GEMM_POLICY", "fastest")
    monkeypatch.setenv("TRITON_GEMM_POLCY", "model")
    with table_fakes.default_policy():
        assert findings("policy")[0].status == "broken" and "fastest" in findings("policy")[0].says
        assert doctor.examine().broken
        for name, value in (("BITS", "most"), ("BATCH_INVARIANT", "yes")):
            monkeypatch.setenv("TRITON_GEMM_POLICY", "model")
            monkeypatch.setenv(f"TRITON_GEMM_{name}", value)
            table_fakes.read_environment_again()
            found, used = findings("policy")
            assert (found.status, used.status) == ("broken", "good") and used.says.startswith("model, bits same")
            assert found.says.startswith(f"TRITON_GEMM_{name} must be ") and value in found.says
            assert found.do == f"set TRITON_GEMM_{name} to a right value, or unset it"
            monkeypatch.delenv(f"TRITON_GEMM_{name}")
        monkeypatch.setenv("TRITON_GEMM_KIT", "mine.kit")
        assert findings("policy")[0].says.startswith("TRITON_GEMM_KIT must be 0, 1 or the absolute path")
    assert the_one("environment", "TRITON_GEMM_POLCY is unknown").status == "note"
    assert the_one("environment", "TRITON_CACHE_DIR=").status == "set"
    monkeypatch.setenv("TRITON_GEMM_USE", "1")
    installed = [SimpleNamespace(name="triton_gemm")]
    monkeypatch.setattr(doctor, "entry_points", lambda **_: installed)
    assert the_one("environment", "TRITON_GEMM_USE=1").status == "set"
    monkeypatch.setenv("TORCH_DEVICE_BACKEND_AUTOLOAD", "0")
    assert the_one("environment", "TRITON_GEMM_USE=1 has no effect").status == "note"
    monkeypatch.delenv("TORCH_DEVICE_BACKEND_AUTOLOAD")
    installed.clear()
    assert "is not installed" in the_one("environment", "TRITON_GEMM_USE=1 has no effect").says


def test_an_examination_that_fails_says_so_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.EXAMINATIONS, "GPU", Mock(side_effect=OSError("the disk\nis gone")))
    found = doctor.examine()
    assert found.broken and Finding("GPU", "broken", "OSError: the disk") in found.findings
    assert findings("policy")
    assert not Diagnosis((), ()).broken


def test_ptxas_that_does_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    assert the_one("ptxas", "ptxas ").status == "good"
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/bin/false")
    assert the_one("ptxas", "TRITON_PTXAS_PATH is /bin/false").status == "note"
    monkeypatch.setattr(type(triton.knobs.nvidia).__dict__["ptxas"], "default_path", "/absent")
    assert the_one("ptxas", "Cannot find ptxas").status == "broken"


def test_ptxas_that_is_too_old_for_the_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    old = tmp_path / "ptxas"
    old.write_text("#!/bin/sh\necho \"release 11.4, 'sm_86','sm_90'\"\n"), old.chmod(0o755)
    monkeypatch.setenv("TRITON_PTXAS_PATH", str(old))
    with_gpu(monkeypatch, H200, named_device("sm_86"))
    found = the_one("ptxas", f"ptxas 11.4, {old}, does not know sm_90a")
    assert found.status == "broken" and found.do.startswith("unset TRITON_PTXAS_PATH")
    with_gpu(monkeypatch, named_device("sm_86"), named_device("sm_100"))
    assert [one.status for one in findings("ptxas")] == ["good", "good"]
    monkeypatch.setenv("TRITON_PTXAS_BLACKWELL_PATH", str(old))
    assert the_one("ptxas", "does not know sm_100a").do.startswith("unset TRITON_PTXAS_BLACKWELL_PATH")


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[fake_cxx.Compiler]:
    """There is a GPU, and nothing is built."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_GEMM_NATIVE")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.setattr(native_build, "native_refused", lambda: None)
    made = fake_cxx.make(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    native_file.setting.cache_clear()
    yield made
    native_file.setting.cache_clear()


def of_calls() -> tuple[str, str, str]:
    """Status, sentence and advice."""
    [found] = findings("calls")
    return found.status, found.says, found.do


def test_each_state_has_a_sentence(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    text = f"C++ launches repeated calls once {compiler.path} has built an extension, in the background"
    assert of_calls() == ("good", text, "`triton-gemm build` builds it now")
    assert not compiler.calls(), "doctor builds nothing"
    file = native_build.build()
    assert of_calls() == ("good", f"C++ launches repeated calls, by {file}", "")
    file.chmod(0o666)
    status, text, _ = of_calls()
    assert status == "note" and text.startswith("Python launches repeated calls, not C++: others may write to")
    assert f"chmod go-w {file}" in text
    file.unlink()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", os.devnull)
    assert of_calls()[:2] == ("note", "Python launches repeated calls, not C++: there is no C++ compiler")
    monkeypatch.setenv("CXX", "g++ 'x")
    assert "No closing quotation" in of_calls()[1]
    monkeypatch.setattr(native_file, "folder", lambda: None)
    assert "there is no cache folder" in of_calls()[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert of_calls() == ("good", "C++ for repeated calls is off: there is no NVIDIA GPU", "")


@pytest.mark.parametrize("value", ["0", "file", "off"])
def test_its_variable(value: str, compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "into" / "triton_gemm_native.so"
    monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file) if value == "file" else value)
    native_file.setting.cache_clear()
    if value == "0":
        assert of_calls() == ("good", "C++ for repeated calls is off: TRITON_GEMM_NATIVE is 0", "")
    elif value == "file":
        status, text, do = of_calls()
        assert status == "broken" and str(file) in text and f"triton-gemm build --into {file.parent}" in do
        monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file.with_name("nope.so")))
        native_file.setting.cache_clear()
        assert of_calls()[2].startswith("set it to the file that `triton-gemm build --into DIR` writes")
        monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file))
        native_file.setting.cache_clear()
        native_build.build(file.parent)
        assert of_calls() == ("good", f"C++ launches repeated calls, by {file}", "")
        file.parent.chmod(0o777)
        status, text, do = of_calls()
        assert status == "broken" and "others may write to" in text and f"chmod go-w {file.parent}" in text
        assert do == "or delete the file, if you do not know it, or unset TRITON_GEMM_NATIVE"
    else:
        found = findings("calls")
        assert found[0].status == "broken" and "TRITON_GEMM_NATIVE must be 0, 1 or the absolute path" in found[0].says
        assert found[1].says.startswith("C++ launches repeated calls once"), "it counts as 1"


def test_without_a_gpu_the_extension_that_an_image_names_is_judged(
    compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """So are variables that have no effect there; a wrong value is named in any case."""
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", "off")
    first, *_ = doctor._policy()
    assert first[:2] == ("broken", "TRITON_GEMM_BACKGROUND must be 0 or 1, not 'off': it counts as 1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("BACKGROUND", "CAPABILITY", "NATIVE", "USE"):
        monkeypatch.setenv(f"TRITON_GEMM_{name}", "off")
    assert [status for status, *_ in doctor._policy()] == ["broken"] * 3 + ["good"]
    for _, says, *_ in list(doctor._policy())[:3]:
        assert "not 'off': it counts as" in says and says.endswith("; without a GPU it has no effect")
    assert [x.status for x in findings("calls")] == ["broken", "good"]
    file = tmp_path / "into" / "triton_gemm_native.so"
    monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file))
    native_file.setting.cache_clear()
    [found] = findings("calls")
    assert found.status == "broken" and str(file) in found.says
    native_build.build(file.parent)
    says = f"{file} can be loaded; C++ for repeated calls is off: there is no NVIDIA GPU"
    assert of_calls() == ("good", says, "")
