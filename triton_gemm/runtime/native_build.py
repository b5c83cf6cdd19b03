"""The extension of `compat.native`, which launches calls like one before: built in the background, and loaded."""

from __future__ import annotations

import atexit
import logging
import os
import secrets
import shutil
import signal
import subprocess
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from .. import tables
from ..compat import (
    INTERPRETED,
    cxx_compiler,
    free_in_children,
    import_native,
    native_commands,
    native_key,
    native_refused,
    set_up_native,
)
from ..hardware.driver import ensure_context
from ..selection import generation
from . import policies
from .native_file import DAY_S, NAME, digest, folder, load, open_checked, opened, path, setting, usable

TIMEOUT_S = 600.0  # for a build, by this process or another
UNUSED_S = 30 * DAY_S  # after which another version's extension is deleted
NOT_YET = "no call was made twice"
BUILDING = "it is being built"
LOST = (
    "Python launches repeated calls, and each costs the host about 25 us instead of 10: %s. `triton-gemm doctor` says "
    "what to do. To have Python launch them without this warning, set TRITON_GEMM_NATIVE=0."
)
# The compiler, in a process group of its own that is killed when the pipe to this process closes, however that ends.
WATCHED = 'exec 3<&0 </dev/null; (read -r _ <&3; kill -KILL 0) & nice -n 10 "$@"; status=$?; kill $!; exit $status'

log = logging.getLogger("triton_gemm")
_lock = free_in_children(threading.RLock())
_module: Any = None
_begun = False
_why = NOT_YET  # there is no module
_running: list[subprocess.Popen[bytes]] = []
_temporary: list[Path] = []
_ending = False


# --- Whether there is one ---


def why_not() -> str | None:
    """Why calls are not launched by C++ in this process and none could be; None where they can be, once it is built."""
    return _never() or (None if torch.cuda.is_available() else "there is no NVIDIA GPU")


def _never() -> str | None:
    """As `why_not`, without a look at the machine."""
    if INTERPRETED:
        return "Triton's interpreter runs kernels"
    if not torch.version.cuda:
        return "there is no NVIDIA GPU, or torch was built without CUDA"
    return "TRITON_GEMM_NATIVE is 0" if setting() == "0" else native_refused()


def module() -> Any:
    """The extension, or None. The first call begins to build it, in another thread."""
    global _begun, _why
    if _module is not None or _begun:
        return _module
    refused = why_not()
    if refused is None and torch.cuda.is_current_stream_capturing():
        return None
    with _lock:
        if _begun:
            return _module
        _begun, _why = True, refused or BUILDING
    if refused is None:
        try:
            threading.Thread(target=_begin, name="triton_gemm native", daemon=True).start()
        except RuntimeError as error:  # there are too many, or Python ends
            _why = str(error)
    return None


def built() -> Any:
    """The extension, if there is no need to wait for it: loaded before, or built before and loaded now. No driver is
    asked for anything."""
    global _module, _begun, _why
    if _module is not None or _begun or _never() is not None or (where := path()) is None:
        return _module
    with _lock:
        if _begun:
            return _module
        _begun, _why = True, BUILDING
    try:
        _module = load(where, _set_up)
    except (ImportError, NotImplementedError, PermissionError):  # `module` builds it, or says why there is none
        pass
    except OSError as error:
        if error.errno is None:  # not the system's: a signal's handler has raised it, as TimeoutError
            raise
    finally:
        _begun, _why = _module is not None, NOT_YET
    return _module


def possible() -> bool:
    """Whether there is an extension, or may be one later."""
    return _module is not None or not _begun or _why == BUILDING


def state() -> str | None:
    """Why there is no extension yet, or None."""
    return None if _module is not None else _why


def _begin() -> None:
    global _module, _why
    try:
        given = setting()
        _module = load(Path(given), _set_up) if given != "1" else checked(by=_set_up)[1]
    except Exception as error:  # in no call's way
        _why = str(error) or type(error).__name__
        if not _ending:
            log.warning(LOST, _why)


def _set_up(name: str) -> Any:
    found = import_native(name)
    set_up_native(found, policies._context, policies.in_backward, ensure_context)
    generation.follow(found.follow)
    return found


def _forget() -> None:
    """In a forked child: the thread that builds, and what it has started, are the parent's alone."""
    global _begun
    _begun = _module is not None
    _running.clear()
    _temporary.clear()


os.register_at_fork(after_in_child=_forget)


# --- Building it ---


def checked(into: Path | None = None, by: Callable[[str], Any] = import_native) -> tuple[Path, Any]:
    """The extension's file, which is built unless it is there, and what `by` loads from it. One that is whole and
    cannot be loaded, as one of another compiler, is built once more; not where it was built within a day, since another
    would be no better. Errors as `build`, and ImportError."""
    file = build(into)
    try:
        return file, load(file, by)
    except ImportError:
        return file, load(build(into, time.time() - DAY_S), by)


def ahead() -> str | None:
    """Builds the extension, unless it is there, as for an image. Returns why there is none, or None."""
    try:
        if setting() == "1":
            build()
        elif setting() == "0":
            return "TRITON_GEMM_NATIVE is 0"
        else:
            os.close(open_checked(Path(setting())))
    except (OSError, RuntimeError, ImportError) as error:
        return str(error)
    return None


def build(into: Path | None = None, since: float = 0.0) -> Path:
    """The extension's file, in the user's cache folder or in `into`, which is built unless it is there: by one process
    at a time, which others wait for. since: what is older is built again. RuntimeError where that is not possible, or
    fails; OSError, as where others may write to the folder."""
    refused = native_refused()
    if refused is not None:
        raise RuntimeError(refused)
    where = into or folder()
    if where is None:
        raise RuntimeError("there is no folder for it: set HOME or XDG_CACHE_HOME, and install platformdirs")
    file = where / (f"{NAME}.so" if into else f"{NAME}-{native_key()}.so")
    end = time.monotonic() + TIMEOUT_S
    _make(where, 0o755 if into else 0o700)
    while not usable(file, since):
        try:
            with nullcontext() if into else tables.files.locked(where, wait=False):
                if not usable(file, since):
                    _build(file)
                return file
        except TimeoutError:
            if time.monotonic() > end:
                raise
            time.sleep(0.5)
    return file


def _make(where: Path, mode: int) -> None:
    for one in (*reversed(where.parents), where):
        if not one.is_dir():
            with suppress(FileExistsError):
                one.mkdir(mode)
                one.chmod(mode)  # whatever the umask is


def _build(file: Path) -> None:
    compiler = cxx_compiler()
    if compiler is None:
        raise RuntimeError("there is no C++ compiler: set CXX, or install g++")
    log.info("%s builds %s, an extension that launches repeated calls", compiler[0], file)
    compiling, linking = native_commands(compiler, file.name)
    end = time.monotonic() + TIMEOUT_S
    with opened(file.parent) as where, _working_in(where) as inside:
        for commands in (compiling, [linking]):
            _run(commands, inside, end)
        made = inside / file.name
        with open(made, "r+b") as whole:
            key = native_key().encode()
            whole.write(key + digest(whole.read() + key))
            os.fchmod(whole.fileno(), 0o644)
            whole.flush()
            os.fsync(whole.fileno())
        if (where / file.name).is_dir():
            shutil.rmtree(where / file.name)
        os.replace(made, where / file.name)
        descriptor = os.open(where, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
        for other in where.glob(f"{NAME}-*.so"):
            with suppress(OSError):
                if time.time() - other.stat().st_mtime > UNUSED_S:
                    other.unlink()


@contextmanager
def _working_in(where: Path) -> Iterator[Path]:
    """A folder there for a build. Those of processes that were killed are deleted: their lock is held here."""
    for left in where.glob(".build-*"):
        shutil.rmtree(left, ignore_errors=True)
    inside = where / f".build-{secrets.token_hex(8)}"
    _temporary.append(inside)
    try:
        inside.mkdir(0o700)
        yield inside
    finally:
        shutil.rmtree(inside, ignore_errors=True)
        with suppress(ValueError):  # in a forked child
            _temporary.remove(inside)


def _run(commands: Sequence[Sequence[str]], inside: Path, end: float) -> None:
    """Runs them at once, in that folder. RuntimeError where one fails, or has not ended at `end`."""
    started: list[subprocess.Popen[bytes]] = []
    try:
        for number, command in enumerate(commands):
            started.append(_start(command, inside, inside / f"{number}.log"))
        for number, command in enumerate(commands):
            status = started[number].wait(max(0.0, end - time.monotonic()))
            if status:
                lines = (inside / f"{number}.log").read_text(errors="replace").split("\n")
                words = [x for x in lines if "error" in x] + [x for x in reversed(lines) if x.strip()]
                raise RuntimeError(words[0].strip() if words else f"{command[0]} failed, with status {status}")
    except subprocess.TimeoutExpired:
        raise RuntimeError(f"{commands[0][0]} has not ended in {TIMEOUT_S:.0f} s") from None
    finally:
        for process in started:
            _stop(process)


def _start(command: Sequence[str], inside: Path, words: Path) -> subprocess.Popen[bytes]:
    with _lock, open(words, "wb") as file:
        if _ending:
            raise RuntimeError("Python ends")
        process = subprocess.Popen(
            ["/bin/sh", "-c", WATCHED, "sh", *command],
            cwd=inside,
            env={**os.environ, "TMPDIR": "."},
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=file,
            start_new_session=True,
        )
        _running.append(process)
        return process


def _stop(process: subprocess.Popen[bytes]) -> None:
    """Kills the process and those that it has started, unless it has ended."""
    if process.poll() is None:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    assert process.stdin is not None
    process.stdin.close()
    with suppress(ValueError):  # in a forked child
        _running.remove(process)


@atexit.register
def _end() -> None:
    """Leaves nothing that runs, and no file."""
    global _ending
    with _lock:
        _ending = True
    for process in list(_running):
        _stop(process)
    for inside in list(_temporary):
        shutil.rmtree(inside, ignore_errors=True)
