"""What doctor says of the extension that launches repeated calls, to who has never heard of it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from tests.support import fake_cxx
from triton_gemm.reporting import doctor
from triton_gemm.runtime import native_build, native_file


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


def calls() -> tuple[str, str, str]:
    """Status, sentence and advice."""
    [found] = [x for x in doctor.examine().findings if x.about == "calls"]
    return found.status, found.says, found.do


def test_each_state_has_a_sentence(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    says = f"C++ launches repeated calls once {compiler.path} has built an extension, in the background"
    assert calls() == ("good", says, "`triton-gemm build` builds it now")
    assert not compiler.calls(), "doctor builds nothing"
    file = native_build.build()
    assert calls() == ("good", f"C++ launches repeated calls, by {file}", "")
    file.chmod(0o666)
    status, says, _ = calls()
    assert status == "note" and says.startswith("Python launches repeated calls, not C++: others may write to")
    assert f"chmod go-w {file}" in says
    file.unlink()
    monkeypatch.setenv("CXX", "")
    monkeypatch.setenv("PATH", os.devnull)
    assert calls()[:2] == ("note", "Python launches repeated calls, not C++: there is no C++ compiler")
    monkeypatch.setenv("CXX", "g++ 'x")
    assert "No closing quotation" in calls()[1]
    monkeypatch.setattr(native_file, "folder", lambda: None)
    assert "there is no cache folder" in calls()[1]
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert calls() == ("good", "C++ for repeated calls is off: there is no NVIDIA GPU", "")


@pytest.mark.parametrize("value", ["0", "file", "off"])
def test_its_variable(value: str, compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = tmp_path / "into" / "triton_gemm_native.so"
    monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file) if value == "file" else value)
    native_file.setting.cache_clear()
    if value == "0":
        assert calls() == ("good", "C++ for repeated calls is off: TRITON_GEMM_NATIVE is 0", "")
    elif value == "file":
        status, says, do = calls()
        assert status == "note" and str(file) in says and f"triton-gemm build --into {file.parent}" in do
        native_build.build(file.parent)
        assert calls() == ("good", f"C++ launches repeated calls, by {file}", "")
    else:
        found = [x for x in doctor.examine().findings if x.about == "calls"]
        assert found[0].status == "broken" and "TRITON_GEMM_NATIVE must be 0, 1 or the absolute path" in found[0].says
        assert found[1].says.startswith("C++ launches repeated calls once"), "it counts as 1"


def test_a_wrong_switch_of_the_background_is_named(
    compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_GEMM_BACKGROUND", "off")
    first, *_ = doctor._policy()
    assert first[:2] == ("broken", "TRITON_GEMM_BACKGROUND must be 0 or 1, not 'off': it counts as 1")


def test_without_a_gpu_the_extension_that_an_image_names_is_judged(
    compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing reads TRITON_GEMM_BACKGROUND there."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("BACKGROUND", "NATIVE"):
        monkeypatch.setenv(f"TRITON_GEMM_{name}", "off")
    assert [status for status, *_ in doctor._policy()] == ["good"]
    assert [x.status for x in doctor.examine().findings if x.about == "calls"] == ["broken", "good"]
    file = tmp_path / "into" / "triton_gemm_native.so"
    monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file))
    native_file.setting.cache_clear()
    found = [x for x in doctor.examine().findings if x.about == "calls"]
    assert [x.status for x in found] == ["good", "note"] and str(file) in found[1].says
    native_build.build(file.parent)
    assert [x.says for x in doctor.examine().findings if x.about == "calls"][1] == f"{file} can be loaded"
