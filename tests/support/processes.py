"""Runs Python in a new process, in which nothing was imported, patched or launched before, or in a forked one."""

from __future__ import annotations

import multiprocessing
import os
import signal
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]


def environment(**variables: str | None) -> dict[str, str]:
    """This process's environment, with the repository in PYTHONPATH, and these variables. None unsets a variable."""
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    found = {**os.environ, "PYTHONPATH": paths, **variables}
    return {name: value for name, value in found.items() if value is not None}


def python(
    *arguments: object, timeout: float = 280, cwd: Path = ROOT, given: str | None = None, **variables: str | None
) -> subprocess.CompletedProcess[str]:
    """Runs `python` with these arguments and environment variables. given: its stdin."""
    how = {"env": environment(**variables), "cwd": cwd, "input": given, "timeout": timeout}
    return subprocess.run([sys.executable, *map(str, arguments)], capture_output=True, text=True, **how)


def printed(
    code: str, *arguments: object, timeout: float = 280, cwd: Path = ROOT, given: str | None = None, **how: str | None
) -> str:
    """Runs this code, and returns what it prints. Fails unless the process exits with status 0 in time."""
    done = python("-c", code, *arguments, timeout=timeout, cwd=cwd, given=given, **how)
    assert done.returncode == 0, done.stdout[-1000:] + done.stderr[-3000:]
    return done.stdout


def started(code: str, *arguments: object, **variables: str | None) -> subprocess.Popen[str]:
    """Starts a process that runs this code."""
    command, pipe = [sys.executable, "-c", code, *map(str, arguments)], subprocess.PIPE
    return subprocess.Popen(command, cwd=ROOT, env=environment(**variables), stdout=pipe, stderr=pipe, text=True)


def forked(work: Callable[[], object]) -> multiprocessing.process.BaseProcess:
    """Starts a child that has all that this process has, and does something."""
    child = multiprocessing.get_context("fork").Process(target=work)
    child.start()
    return child


def os_forked(work: Callable[[], object], seconds: int = 60) -> Callable[[], int]:
    """As `forked`, where locks may be held at the fork, and ended if it hangs. Call the result for its exit status."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            signal.alarm(seconds)
            work()
            status = 0
        except BaseException:
            traceback.print_exc()
        finally:
            os._exit(status)
    return lambda: os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def runs(pid: int) -> bool:
    """Whether there is such a process that has not ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def soon(happens: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether something happens within so many seconds."""
    deadline = time.monotonic() + seconds
    while not happens() and time.monotonic() < deadline:
        time.sleep(0.01)
    return happens()
