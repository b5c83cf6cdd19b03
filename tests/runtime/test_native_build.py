"""The extension that launches repeated calls: how it is built, and that nothing waits for it or is left behind."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from tests.support import fake_cxx, fake_driver
from tests.support.native_calls import Call
from tests.support.patches import replace_all
from tests.support.processes import runs, soon, started
from tests.support.threads import at_once
from tests.support.unsafe_files import umask
from triton_gemm import compat
from triton_gemm.runtime import native_build, native_file

SLOWLY = 'sleep 1; echo slowly > "$output"'
FOREVER = 'echo $$ >> "$log.pids"; sleep 600 & echo $! >> "$log.pids"; wait'.replace("$log", "{log}")


def contents(name: str) -> bytes:
    """In the place of what loads: no fake is an extension."""
    return Path(name).read_bytes()


@pytest.fixture
def new(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    """A process that has a GPU and an empty cache, and has begun nothing."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.delenv("TRITON_GEMM_NATIVE")
    replace_all(monkeypatch, native_build, _begun=False, _module=None, _why=native_build.NOT_YET)
    for name in ("why_not", "_never"):
        monkeypatch.setattr(native_build, name, lambda: None)
    replace_all(monkeypatch, native_build, _set_up=contents, native_refused=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    native_file.setting.cache_clear()
    yield tmp_path / "cache" / "triton_gemm" / "native"
    native_file.setting.cache_clear()


Makes = Callable[..., fake_cxx.Compiler]


@pytest.fixture
def cxx(new: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Makes:
    """Makes a compiler that runs these commands, which CXX names from then on."""

    def make(*does: str) -> fake_cxx.Compiler:
        made = fake_cxx.make(tmp_path, *does)
        monkeypatch.setenv("CXX", str(made.path))
        return made

    return make


@pytest.fixture
def compiler(cxx: Makes) -> fake_cxx.Compiler:
    return cxx()


def begun() -> str | None:
    """Why there is no extension once the thread has ended that builds it."""
    assert native_build.module() is None
    for thread in threading.enumerate():
        if thread.name == "triton_gemm native":
            thread.join(60)
            assert not thread.is_alive()
    return native_build.state()


# --- Building ---


def test_sources_are_compiled_at_once_and_linked(
    cxx: Makes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    both = 'touch {0}/began-$$; while [ $(ls {0}/began-* | wc -l) -lt 2 ]; do sleep 0.05; done; echo x > "$output"'
    compiler = cxx(both.format(tmp_path))
    commands = [[str(compiler.path), "-c", name, "-o", f"{name}.o"] for name in "ab"]
    linking = [str(compiler.path), "-shared", "a.o", "b.o", "-o"]
    monkeypatch.setattr(native_build, "native_commands", lambda _, file: (commands, [*linking, file]))
    with caplog.at_level(logging.INFO, logger="triton_gemm"):
        assert begun() is None
    assert native_build.module()[: -native_file.MARK] == b"x\n"
    assert sorted(compiler.calls())[:2] == ["-c a -o a.o", "-c b -o b.o"] and compiler.links() == 1
    [record] = [x for x in caplog.records if x.name == "triton_gemm"]
    assert record.levelname == "INFO" and str(compiler.path) in record.getMessage()


def test_a_second_process_needs_no_compiler(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert begun() is None
    calls = compiler.calls()
    assert all("-o" in call for call in calls), "nothing else is asked of a compiler"
    replace_all(monkeypatch, native_build, _module=None, _begun=False)
    monkeypatch.setenv("CXX", "/nowhere/c++")
    assert native_build.built() is native_build.module() is not None
    assert compiler.calls() == calls


def test_what_was_built_is_loaded_at_once(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    assert native_build.built() is None and not native_build._begun and native_build.possible()
    native_build.build()
    with monkeypatch.context() as patch:
        patch.setattr(native_build, "_never", lambda: "TRITON_GEMM_NATIVE is 0")
        assert native_build.built() is None
    assert native_build.built() is native_build.module() is not None
    monkeypatch.setattr(native_build, "load", None)
    assert native_build.built() is native_build.module()


def test_files_are_the_user_s_alone_whatever_the_umask(
    compiler: fake_cxx.Compiler, new: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", str(tmp_path / "shared"))
    monkeypatch.chdir(tmp_path)
    with umask(0):
        path = native_build.build()
    assert path.parent == new and not (tmp_path / "shared").exists()
    for folder in (new, new.parent, new.parent.parent):
        assert folder.stat().st_mode & 0o7777 == 0o700
    assert path.stat().st_mode & 0o7777 == 0o644
    assert {x.name for x in new.iterdir()} <= {path.name, ".lock"}
    for relative in ("", "relative"):
        monkeypatch.setenv("XDG_CACHE_HOME", relative)
        assert native_file.folder() is None or native_file.folder().is_absolute()


def test_the_compiler_disturbs_nobody(cxx: Makes, new: Path, tmp_path: Path) -> None:
    cxx(f'echo "$(nice) $(ps -o sid= -p $$) $TMPDIR $(pwd -P)" >> {tmp_path}/about; echo x > "$output"')
    native_build.build()
    for line in (tmp_path / "about").read_text().splitlines():
        nice, session, temporary, inside = line.split()
        assert int(nice) >= 10 and int(session) != os.getsid(0)
        folder = Path(inside, temporary).resolve()
        assert folder.is_relative_to(new) and not folder.exists()


def test_a_compiler_may_have_arguments(compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", f"env WITH='a b' {compiler.path} --driver-mode=g++")
    assert begun() is None
    assert all(call.startswith("--driver-mode=g++ ") for call in compiler.calls())


FAILURES = {
    "a compiler that fails": ("false", "false failed, with status 1"),
    "no such compiler": ("/nowhere/c++", "/nowhere/c++"),
    "no command": ("g++ 'it", "No closing quotation"),
    "an error": ("fake", "a.cpp:1: fatal error: no such header"),
}


@pytest.mark.parametrize(("command", "words"), FAILURES.values(), ids=FAILURES)
def test_without_it_python_goes_on(
    command: str, words: str, cxx: Makes, new: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    made = cxx("echo 'a.cpp:1: fatal error: no such header' >&2; echo done. >&2; exit 1")
    monkeypatch.setenv("CXX", str(made.path) if command == "fake" else command)
    assert words in (begun() or "")
    assert native_build.module() is None and not native_build.possible()
    assert not new.exists() or {x.name for x in new.iterdir()} <= {".lock"}
    [warning] = caplog.messages
    assert words in warning and "25 us instead of 10" in warning


WITHOUT: dict[str, tuple[dict[str, object], str]] = {
    "Python ends": ({"_ending": True}, "Python ends"),
    "no compiler": ({"cxx_compiler": lambda: None}, "there is no C++ compiler: set CXX, or install g++"),
    "no cache": ({"folder": lambda: None}, "XDG_CACHE_HOME"),
    "a cache that is no folder": ({"folder": lambda: Path(os.devnull, "native")}, "Not a directory"),
}


@pytest.mark.parametrize("name", WITHOUT)
def test_where_nothing_can_be_built_no_compiler_starts(
    name: str, compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    values, words = WITHOUT[name]
    replace_all(monkeypatch, native_build, **values)
    assert words in (begun() or "") and not compiler.calls()
    assert len(caplog.messages) == (name != "Python ends")


def test_a_compiler_that_hangs_is_killed(cxx: Makes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = cxx(FOREVER.format(log=tmp_path / "calls"))
    monkeypatch.setattr(native_build, "TIMEOUT_S", 1.0)
    start = time.monotonic()
    assert native_build.module() is None and time.monotonic() - start < 0.5, "nobody waits for it"
    monkeypatch.setattr(native_build, "_begun", False)
    assert "has not ended in 1 s" in (begun() or "")
    assert len(compiler.calls()) >= 1 and have_ended(tmp_path / "calls.pids")


def test_two_threads_begin_once(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    began: list[int] = []
    monkeypatch.setattr(native_build, "_begin", lambda: began.append(1))
    barrier = threading.Barrier(8)

    def why_not() -> str | None:
        barrier.wait(30)  # all have seen that nothing has begun
        return None

    monkeypatch.setattr(native_build, "why_not", why_not)
    at_once(*8 * [native_build.module])
    assert began == [1]


def test_no_thread_is_no_error(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threading.Thread, "start", Mock(side_effect=RuntimeError("can't start new thread")))
    assert native_build.module() is None and native_build.state() == "can't start new thread"


def test_nothing_begins_while_a_graph_is_captured(new: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    monkeypatch.setattr(native_build, "_begin", None)
    assert native_build.module() is None and not native_build._begun


@pytest.mark.slow
def test_calls_ask_for_it_until_there_is_none(driver: fake_driver.Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    call = Call(driver, *(torch.empty(shape, dtype=torch.bfloat16) for shape in ((256, 512), (512, 768))))
    replace_all(monkeypatch, native_build, _module=None, _begun=False, why_not=lambda: None, _begin=lambda: None)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    call.plan()
    [known] = call.fast.calls.values()
    assert native_build._begun and not known.offered
    monkeypatch.setattr(native_build, "_why", "there is no C++ compiler")
    call.take()
    assert known.offered and call.fast.table is None


@pytest.mark.slow
def test_what_g_plus_plus_builds_is_loaded(extension: Path) -> None:
    assert extension.name == "triton_gemm_native.so" and native_file.usable(extension)
    assert native_file.load(extension, compat.import_native).Table
    assert native_build.build(extension.parent) == extension, "it is there"


# --- What is old, or was left ---


def test_what_nobody_has_used_for_a_month_is_deleted(compiler: fake_cxx.Compiler, new: Path) -> None:
    new.mkdir(parents=True, mode=0o700)
    now = time.time()
    for age in (1, 29, 31):
        file = new / f"triton_gemm_native-{age}.so"
        file.touch()
        os.utime(file, (now, now - age * native_file.DAY_S))
    left = new / ".build-of-a-process-that-was-killed"
    left.mkdir()
    (left / "a.o").touch()
    path = native_build.build()
    assert {x.name for x in new.glob("*.so")} == {path.name, "triton_gemm_native-1.so", "triton_gemm_native-29.so"}
    assert not left.exists()
    os.utime(path, (now, now - 20 * native_file.DAY_S))
    assert native_build.built() is not None and path.stat().st_mtime > now - native_file.DAY_S, "it is used"


def test_one_of_another_compiler_that_cannot_be_loaded_is_built_once_more(
    compiler: fake_cxx.Compiler, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    loads: list[str] = []

    def fails(name: str) -> Any:
        loads.append(name)
        raise ImportError(f"{name}: undefined symbol")

    monkeypatch.setattr(native_build, "_set_up", fails)
    path = native_build.build()
    old = time.time() - 2 * native_file.DAY_S
    os.utime(path, (old, old))
    assert begun() == f"{path}: undefined symbol"
    assert compiler.links() == 2 and len(loads) == len(set(loads)) == 2, "once, and by another name"
    assert len(caplog.messages) == 1
    for _ in range(2):  # of processes
        monkeypatch.setattr(native_build, "_begun", False)
        assert "undefined symbol" in (begun() or "")
    assert compiler.links() == 2, "another would be no better"


# --- Processes ---

PROCESS = """
import os, sys, time
from pathlib import Path
from triton_gemm.runtime import native_build
native_build.why_not = native_build._never = native_build.native_refused = lambda: None
native_build.torch.cuda.is_current_stream_capturing = lambda: False
native_build._set_up = lambda name: Path(name).read_bytes()
def until(what):
    end = time.monotonic() + 60
    while not what() and time.monotonic() < end:
        time.sleep(0.02)
    assert what()
"""
BEGINS = PROCESS + "native_build.module()\nuntil(Path(sys.argv[1]).exists)\n"
FORKS = (
    BEGINS
    + """
child = os.fork()
if child == 0:
    assert not native_build._begun and not native_build._running and not native_build._temporary
    sys.exit(3)
assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 3
until(lambda: native_build._module is not None)
"""
)


def have_ended(pids: Path) -> bool:
    """Whether these processes end soon."""
    return soon(lambda: not any(map(runs, map(int, pids.read_text().split()))), 5)


# A child that lives on has the pipe, too, whose end else kills the compiler.
CHILD = "if os.fork() == 0: os.closerange(0, 3); time.sleep(15); os._exit(0)"


ENDS = {"it ends": "", "an exception": "raise KeyError('mine')", "it ends before a child": CHILD}
ENDS |= {name: f"import signal; os.kill(os.getpid(), signal.{name})" for name in ("SIGTERM", "SIGKILL")}


@pytest.mark.parametrize("how", ENDS)
def test_no_compiler_outlives_a_process(how: str, cxx: Makes, new: Path, tmp_path: Path) -> None:
    cxx(FOREVER.format(log=tmp_path / "calls"))
    running = started(BEGINS + ENDS[how], tmp_path / "calls.pids")
    _, errors = running.communicate(timeout=60)
    assert how.startswith("SIG") or running.returncode == (how == "an exception")
    assert have_ended(tmp_path / "calls.pids")
    left = [x.name for x in new.iterdir() if x.name != ".lock"]
    if how.startswith("SIG"):
        assert running.returncode == -getattr(signal, how)
        cxx()
        assert native_build.build().parent == new
        left = [x.name for x in new.iterdir() if x.name.startswith(".build")]
    assert not left and ("mine" in errors if how == "an exception" else errors == "")


def test_a_forked_child_leaves_the_build_alone(cxx: Makes, tmp_path: Path) -> None:
    cxx(f"touch {tmp_path}/began; {SLOWLY}")
    running = started(FORKS, tmp_path / "began")
    assert running.communicate(timeout=90) == ("", "") and running.returncode == 0


def test_two_processes_build_once(cxx: Makes, new: Path) -> None:
    compiler = cxx(SLOWLY)
    both = [started(PROCESS + "print(native_build.checked(by=native_build._set_up)[0])") for _ in range(2)]
    for running in both:
        out, errors = running.communicate(timeout=90)
        assert (running.returncode, errors) == (0, "") and Path(out.strip()).parent == new
    assert compiler.links() == 1
