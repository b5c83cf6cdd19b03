"""`triton-gemm build`, and what other commands do with the extension that it builds."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from tests.support import fake_cxx, table_fakes
from tests.support.command_line import document, words_of
from triton_gemm import compat
from triton_gemm.runtime import native_build, native_file


@pytest.fixture
def compiler(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> fake_cxx.Compiler:
    """The only one, with an empty cache."""
    table_fakes.own_folder(tmp_path / "own", monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(native_build, "native_refused", lambda: None)
    monkeypatch.setattr(native_build.checked, "__defaults__", (None, lambda name: Path(name).read_bytes()))
    made = fake_cxx.make(tmp_path)
    monkeypatch.setenv("CXX", str(made.path))
    return made


def test_it_says_where_the_extension_is(compiler: fake_cxx.Compiler, tmp_path: Path) -> None:
    own = words_of("build")
    assert Path(own).parent == native_file.folder() and native_file.usable(Path(own))
    assert document("build") == {"file": own} and compiler.links() == 1
    given = words_of("build", "--into", tmp_path / "image")
    assert given == str(tmp_path / "image" / "triton_gemm_native.so") and native_file.usable(Path(given))
    assert [x.name for x in (tmp_path / "image").iterdir()] == ["triton_gemm_native.so"], "and nothing else is there"


@pytest.mark.parametrize(
    ("variable", "value", "words"),
    [
        ("CXX", "false", "false failed, with status 1"),
        ("CXX", "nowhere -O1", "CXX is 'nowhere -O1', and there is no such command"),
        ("TRITON_GEMM_NATIVE", "/image.so", "TRITON_GEMM_NATIVE is /image.so, so what is built in the cache folder"),
        ("XDG_CACHE_HOME", "/dev/null", "Not a directory"),
    ],
)
def test_it_says_why_it_cannot_be_built(
    variable: str, value: str, words: str, compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_file, "setting", native_file.setting.__wrapped__)  # not kept for later tests
    monkeypatch.setenv(variable, value)
    assert words in words_of("build", code=1)
    assert words in document("build", code=1)["error"]


def test_what_cannot_be_loaded_is_no_extension(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(native_build.checked, "__defaults__", (None, compat.import_native))
    assert f"{native_file.NAME}-" in words_of("build", code=1) and compiler.links() == 1


def test_a_folder_that_others_may_write_is_refused(compiler: fake_cxx.Compiler, tmp_path: Path) -> None:
    (tmp_path / "image").mkdir()
    (tmp_path / "image").chmod(0o777)
    assert "others may write to" in words_of("build", "--into", tmp_path / "image", code=1) and not compiler.calls()


def test_clear_deletes_extensions(compiler: fake_cxx.Compiler) -> None:
    file = Path(words_of("build"))
    assert f"Delete 0 tables and 1 built extension in {file.parent}?" in words_of("cache", "clear", code=1, stdin="n\n")
    assert "deleted 0 models" in words_of("cache", "clear", "--models") and file.exists()
    assert "deleted 0 tables and 1 built extension" in words_of("cache", "clear", stdin="y\n") and not file.exists()
    assert document("cache", "clear")["extensions"] == 0


def test_warmup_builds_it(compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from triton_gemm.cli import warmup
    from triton_gemm.runtime.precompile import Precompiled

    made: Any = Precompiled(1, 1, 1, tmp_path, 0.1, ())
    monkeypatch.setattr(warmup, "precompile", lambda *_, **__: made)
    monkeypatch.delenv("TRITON_GEMM_NATIVE")
    native_file.setting.cache_clear()
    command = ("warmup", "--shapes", "1x2x3", "--device", "h200")
    assert "launches repeated calls: built" in words_of(*command) and compiler.links() == 1
    assert document(*command)["extension"] is None
    shutil.rmtree(tmp_path / "cache")
    monkeypatch.setenv("CXX", "false")
    assert "launches repeated calls: false failed" in words_of(*command)
    native_file.setting.cache_clear()
