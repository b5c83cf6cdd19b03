"""Which files the extension is loaded from: none that is damaged, or that somebody else could have written; and which
errors are left to the thread that builds it."""

from __future__ import annotations

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import triton

from tests.runtime.test_native_build import begun, compiler, contents, cxx, new
from tests.support import fake_cxx
from tests.support.patches import replace_all
from tests.support.unsafe_files import FOREIGN, IRREGULAR, umask
from triton_gemm import compat
from triton_gemm.runtime import native_build, native_file

__all__ = ["compiler", "cxx", "new"]  # fixtures

NOBODY = 65534


@pytest.fixture
def file(compiler: fake_cxx.Compiler) -> Path:
    """An extension that was built before."""
    return native_build.build()


# --- Whose they are ---


@pytest.mark.parametrize("name", FOREIGN)
def test_what_others_could_write_is_not_loaded(
    name: str, file: Path, compiler: fake_cxx.Compiler, caplog: pytest.LogCaptureFixture
) -> None:
    change, words = FOREIGN[name]
    change(file)
    assert native_build.built() is None
    assert words in (begun() or "") and native_build.module() is None
    [warning] = caplog.messages
    assert str(file.parent) in warning and words in warning
    assert compiler.links() == 1 and file.exists(), "nothing is built in its place"


def test_one_that_another_user_has_put_there_first_is_not_loaded(new: Path, compiler: fake_cxx.Compiler) -> None:
    new.mkdir(parents=True)
    new.chmod(0o777)
    assert "others may write to" in (begun() or "") and not compiler.calls()


def test_root_s_extension_is_loaded_by_others_and_theirs_by_nobody_else(compiler: fake_cxx.Compiler) -> None:
    """As in an image: root builds it, and another user runs it."""
    if os.geteuid() != 0:
        pytest.skip("only root may become another user")
    with tempfile.TemporaryDirectory() as place:
        os.chmod(place, 0o755)
        with umask(0o077):
            file = native_build.build(Path(place, "made", "into"))
        os.seteuid(NOBODY)
        try:
            assert fake_cxx.BUILT.encode() in native_file.load(file, contents)
        finally:
            os.seteuid(0)
        os.chown(file, NOBODY, NOBODY)
        with pytest.raises(PermissionError, match=f"belongs to user {NOBODY}"):
            native_file.load(file, contents)


def test_a_folder_may_lie_in_one_that_all_write(file: Path) -> None:
    """As in /tmp: what is renamed there is another folder, and the one that was opened stays."""
    file.parent.parent.chmod(0o777)
    with native_file.opened(file.parent) as opened:
        file.parent.rename(file.parent.with_name("mine"))
        file.parent.mkdir()
        assert (opened / file.name).exists() and not file.exists()


def test_what_was_checked_is_what_is_loaded(file: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.so"
    other.write_bytes(b"another's")

    def replaced(name: str) -> bytes:
        os.replace(other, file)
        return contents(name)

    assert fake_cxx.BUILT.encode() in native_file.load(file, replaced)


@pytest.mark.slow
def test_two_files_are_two_modules(extension: Path, tmp_path: Path) -> None:
    """Though the loader knows files by their names, too."""
    copy = Path(shutil.copy(extension, tmp_path / "copy.so"))
    first, second = (native_file.load(x, compat.import_native) for x in (extension, copy))
    assert first is not second and first.Table is not second.Table


# --- Whether they are whole ---


def another_key(file: Path) -> None:
    content = file.read_bytes()[: -native_file.MARK] + b"0" * 32
    file.write_bytes(content + native_file.digest(content))


DAMAGES: dict[str, Callable[[Path], Any]] = {
    "truncated": lambda file: os.truncate(file, file.stat().st_size // 2),
    "empty": lambda file: os.truncate(file, 0),
    "zeroed": lambda file: file.write_bytes(bytes(file.stat().st_size)),
    "a byte": lambda file: file.write_bytes(b"W" + file.read_bytes()[1:]),
    "of another torch": another_key,
    **{name: make for name, (make, _) in IRREGULAR.items()},
}


@pytest.mark.parametrize("name", DAMAGES)
def test_what_is_damaged_is_built_once_more(name: str, file: Path, compiler: fake_cxx.Compiler) -> None:
    DAMAGES[name](file)
    start = time.monotonic()
    assert native_build.built() is None and not native_build._begun, "which waits for nothing"
    assert begun() is None and fake_cxx.BUILT.encode() in native_build.module()
    assert compiler.links() == 2 and time.monotonic() - start < 10
    assert file.is_file() and not file.is_symlink()


def test_a_file_stays_whole_when_its_replacement_fails(
    file: Path, compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = file.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", Mock(side_effect=OSError(28, "No space left on device")))
        with pytest.raises(OSError, match="No space left"):
            native_build.build(since=time.time() + 60)
    assert file.read_bytes() == content and not list(file.parent.glob(".build*"))


def test_all_is_written_before_it_has_its_name(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    for name in ("fsync", "replace"):
        function = getattr(os, name)
        noted = lambda *given, function=function, name=name: (order.append(name), function(*given))  # noqa: E731
        monkeypatch.setattr(os, name, noted)
    native_build.build()
    assert order == ["fsync", "replace", "fsync"]


# --- TRITON_GEMM_NATIVE ---


def test_a_file_may_be_named(
    compiler: fake_cxx.Compiler, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    file = native_build.build(tmp_path / "into")
    monkeypatch.setenv("TRITON_GEMM_NATIVE", str(file))
    native_file.setting.cache_clear()
    assert native_build.ahead() is None
    assert fake_cxx.BUILT.encode() in native_build.built()
    for change, words in (
        (lambda: file.write_bytes(b""), "is damaged"),
        (lambda: file.chmod(0o666), "others may write to"),
        (file.unlink, "No such file"),
    ):
        change()
        replace_all(monkeypatch, native_build, _begun=False, _module=None)
        caplog.clear()
        assert native_build.built() is None and words in (begun() or "")
        assert words in (native_build.ahead() or "")
        [warning] = caplog.messages
        assert str(file) in warning
    assert compiler.links() == 1, "another is not built in its place"


def with_cuda(patch: pytest.MonkeyPatch) -> None:
    """Undoes all patches, and has torch report a GPU with CUDA 12.8."""
    patch.undo()
    patch.setattr(torch.cuda, "is_available", lambda: True)
    patch.setattr(torch.version, "cuda", "12.8")


@pytest.mark.parametrize("value", ["off", "2", "true", "here/native.so", "native.so", "~/native.so"])
def test_a_wrong_value_is_warned_of_once(
    value: str, new: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with_cuda(monkeypatch)
    monkeypatch.setenv("TRITON_GEMM_NATIVE", value)
    native_file.setting.cache_clear()
    for _ in range(3):
        assert native_build.why_not() == compat.native_refused()
        assert native_file.setting() == "1"
    [warning] = caplog.messages
    assert repr(value) in warning and "must be 0, 1 or the absolute path of a file" in warning


def test_it_can_be_turned_off(new: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    with_cuda(monkeypatch)
    for value, why in (("0", "TRITON_GEMM_NATIVE is 0"), ("1", None), ("", None)):
        native_file.setting.cache_clear()
        monkeypatch.setenv("TRITON_GEMM_NATIVE", value)
        assert native_build.why_not() == (why or compat.native_refused())
        assert (native_build.ahead() == why) if why else True
    assert not caplog.messages


@pytest.mark.parametrize("error", [RuntimeError("late"), TimeoutError("late"), OSError("late"), KeyboardInterrupt()])
def test_what_a_signal_s_handler_raises_while_it_is_loaded_is_the_caller_s(
    error: BaseException, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = signal.signal(signal.SIGUSR1, Mock(side_effect=error))
    try:
        with monkeypatch.context() as patch, pytest.raises(type(error)):
            patch.setattr(native_build, "_set_up", lambda _: signal.raise_signal(signal.SIGUSR1))
            native_build.built()
    finally:
        signal.signal(signal.SIGUSR1, before)
    assert native_build.built() is not None, "the next call loads it"


@pytest.mark.parametrize(
    "fails",
    [
        lambda _: compat.set_up_native(Mock(setup=Mock(side_effect=AttributeError("no 'calls'"))), None, None, None),
        lambda name: compat.import_native(name),
        lambda name: os.stat(f"{name}/x"),
    ],
)
def test_what_cannot_be_loaded_at_once_is_left_to_the_thread(
    fails: Any, file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(native_build, "_set_up", fails)
    assert native_build.built() is None and not native_build._begun and native_build.possible()


@pytest.mark.slow
def test_hooks_in_the_place_of_triton_s_chain_are_named(extension: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(triton.knobs.runtime, "launch_enter_hook", print)
    with pytest.raises(NotImplementedError, match=r"Triton's hooks on launches are others: .*'calls'"):
        compat.set_up_native(compat.import_native(str(extension)), None, None, None)
