"""Both ends of a process that compiles candidates into Triton's cache, so that the process which times need only load
them, a millisecond or two of Python for each. In threads of that process Triton's compiler takes its GIL, for 5 ms at a
time and more, and the GPU idles in the midst of what is timed while Python waits.

The worker is a new interpreter: what is forked from a process with a CUDA context cannot be relied on, and
`multiprocessing` would run the user's script again. Its stdin is a socket, through which `Connection`s pass pickled
objects both ways.
"""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache, partial
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from multiprocessing.spawn import get_executable
from queue import SimpleQueue
from typing import Any

from ..compat import MachineCode, cache_folder, compiling_for, hash_triton, machine_code, set_triton_hash
from ..hardware.device import DeviceInfo
from ..kernels.launch import compiled
from ..problem import GemmProblem
from ..selection.select import Selection
from .binaries import SCALARS, Key, identity, launches_on, operands_of

START_S = 120.0  # until it has imported torch and Triton, and read Triton's files, perhaps from a slow network
PROBE_S = 10.0  # until a program has printed which Python it is
GONE_S = 5.0  # until a process is gone whose end of the pipe is closed, or that is killed
KILLS = 2  # from outside, after which no other process is started
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}  # of the compiler itself
READY = "ready"
ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0", "TRITON_GEMM_BACKGROUND": "0"}
# What a worker runs. It finds the packages that the process finds which has started it, and none in a folder that is
# current by chance; where the current folder is gone, torch could not be imported.
START = f"""
import os, sys
sys.path[:] = filter(None, sys.path)
from multiprocessing.connection import Connection
pipe = Connection(os.dup(0))
sys.path[:], nice = pipe.recv()
if nice:
    os.nice(nice)
    try:
        with open("/proc/self/autogroup", "w") as session:  # beyond which a niceness has no effect, where there is one
            session.write(str(nice))
    except OSError:
        pass
try:
    os.getcwd()
except OSError:
    os.chdir("/")
    sys.path[:] = filter(None, sys.path)
from {__name__} import main
main(pipe)
"""


class LostError(RuntimeError):
    """There is no worker: it could not be started, or ended by itself or from outside."""


def error_line(error: BaseException) -> str:
    """An error's type and the first line of its text."""
    return f"{type(error).__name__}: {str(error).strip()}".splitlines()[0]


@lru_cache(maxsize=1)
def python() -> str | None:
    """The Python that workers run, which is what `multiprocessing` would run. None where that is an application, which
    would be started again: one that is frozen, or that embeds Python. What is not known to be a Python is asked, once.
    """
    found = os.fsdecode(get_executable() or "")
    if not found or getattr(sys, "frozen", False):
        return None
    try:
        if re.fullmatch(r"python[\d.]*", os.path.basename(found)) and os.path.samefile(found, "/proc/self/exe"):
            return found
        with subprocess.Popen(
            [found, "-c", "import sys; print(sys.hexversion)"],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            env={**os.environ, **ENVIRONMENT},
            start_new_session=True,
        ) as process:
            try:
                output, _ = process.communicate(timeout=PROBE_S)
            except BaseException:
                _kill(process)
                raise
    except (OSError, subprocess.TimeoutExpired):
        return None
    return found if output.strip() == b"%d" % sys.hexversion else None


class Question:
    """A job that is answered by what a function returns in the process, which finds it by its name."""

    calls = sys.maxsize  # as for a `Compiler`: before all that is compiled

    def __init__(self, function: Callable[..., Any], *arguments: object) -> None:
        self.function, self.arguments = function, arguments
        self.answer: Any = None  # None where there is none
        self.error: str | None = None  # why, or "" once it is answered

    def __reduce__(self) -> tuple[type, tuple[object, ...]]:
        return partial, (self.function, *self.arguments)  # which alone workers are sent


class Worker:
    """One process after another, for one thread.

    Args:
        target: The first message to the process, with the hash of Triton's files. For `main` that is the DeviceInfo
            that plans are made for, and the compute capability that the GPU has.
        nice: Added to the niceness of processes; nothing for a tuner, which waits for them.
        on_made: Called with the machine code of each job.
    """

    def __init__(
        self,
        target: object,
        command: Sequence[str] | None = None,
        nice: int = 0,
        on_made: Callable[[Mapping[Key, MachineCode]], None] = lambda made: None,
    ) -> None:
        self.target, self.command, self.nice, self.on_made = target, command, nice, on_made
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection[Any, Any] | None = None
        self.closed = False
        self.kills = 0
        self.changing = threading.RLock()

    def start(self) -> None:
        """Starts a process if there is none, and waits until it is ready. LostError where that fails, or KILLS of
        them were killed from outside."""
        if self.process is not None:
            return
        if self.kills == KILLS:
            raise LostError(f"SIGKILL ended {KILLS} of them")
        try:
            executable = python()
            if not (self.command or executable):
                raise RuntimeError(f"{get_executable()!r} is not this Python")
            with self.changing:
                if self.closed:
                    raise RuntimeError("no more is compiled")
                self.pipe, self.process = _launched(self.command or [str(executable), "-c", START])
            self.pipe.send(([str.__str__(x) for x in sys.path if isinstance(x, str)], self.nice))  # Python skips others
            self.pipe.send((self.target, hash_triton()))
            reply = self._receive(START_S)
            if reply != READY:
                raise RuntimeError(f"it says {reply!r}")
        except (EOFError, ConnectionError):
            raise LostError(f"it ended with {self.end(GONE_S)}") from None
        except Exception as error:  # no such command, no memory, too slow
            self.end()
            raise LostError(error_line(error)) from None

    def compile(self, job: object, limit_s: float) -> str | None:
        """Has the process, which is started, compile; why that has failed, or None. A crash of the compiler is the
        job's failure, and so is SIGKILL from outside: what takes too much memory is not to be compiled in the user's
        process. LostError where the process has ended otherwise, or does not understand the job or is not understood.
        """
        assert self.pipe is not None
        try:
            self.pipe.send(job)
            reply: Any = self._receive(limit_s)
        except TimeoutError:
            self.end()
            return f"compiling takes more than {limit_s:g} s"
        except (EOFError, ConnectionError):
            code = self.end(GONE_S)
            if -code in CRASHES:
                return f"the compiler crashed with {signal.Signals(-code).name}"
            if -code == signal.SIGKILL and not self.closed:
                self.kills += 1
                return "the process that compiled it was killed with SIGKILL, as when memory runs out"
            raise LostError(f"it ended with {code}") from None
        except Exception as error:
            self.end()
            raise LostError(error_line(error)) from None
        if isinstance(reply, str):
            return reply
        if isinstance(job, Question):
            job.answer = reply
        else:
            self.on_made(reply)
        return None

    def close(self) -> None:
        """From another thread: kills the process, and lets no other start. The worker's own thread calls `end`."""
        with self.changing:
            self.closed = True
            if self.process is not None:
                _kill(self.process)

    def end(self, patience_s: float = 0.0) -> int:
        """Kills the process if there is one and it has not ended by itself after so long, and what it has started. Its
        exit status, as subprocess has it; 0 where there is none, or the kernel does not let it end."""
        with self.changing:
            process, pipe = self.process, self.pipe
            self.process = self.pipe = None
        if process is None or pipe is None:
            return 0
        _wait(process, patience_s)
        _kill(process)
        with pipe, suppress(subprocess.TimeoutExpired):
            return process.wait(GONE_S)
        return 0

    def _receive(self, limit_s: float) -> Any:
        assert self.pipe is not None
        if not self.pipe.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return self.pipe.recv()


def _wait(process: subprocess.Popen[bytes], seconds: float) -> None:
    """Until it has ended, at most so long. It stays a zombie: its pid, which is its group's too, is no other's yet."""
    deadline = time.monotonic() + seconds
    with suppress(ChildProcessError):  # no zombies, where SIGCHLD is ignored
        while time.monotonic() < deadline:
            if os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT | os.WNOHANG) is not None:
                return
            time.sleep(0.005)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """With its group, which it leads: ptxas may run there, even when the leader itself has crashed. Before `wait`."""
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)


def _launched(command: Sequence[str]) -> tuple[Connection[Any, Any], subprocess.Popen[bytes]]:
    """The process sees no GPU, on which a context would take memory. What it prints is thrown away, but for errors. It
    gets no Ctrl-C, which is for this process to handle, as it is in a session of its own."""
    ours, theirs = Pipe()
    with theirs:
        try:
            process = subprocess.Popen(
                command,
                stdin=theirs.fileno(),
                stdout=subprocess.DEVNULL,
                env={**os.environ, **ENVIRONMENT, "TRITON_CACHE_DIR": os.path.abspath(cache_folder())},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def main(pipe: Connection[Any, Any]) -> None:
    """The worker: takes a target and then jobs, problems with a selection each or functions to call, and answers with
    the machine code or the result of each, or why there is none. It ends when the other end is closed, as it is when
    the process there has been killed."""
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what runs here, ptxas too, finds nothing to read
    requests: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, requests), daemon=True).start()
    (device, capability), found = requests.get()
    set_triton_hash(found)
    hash_triton()  # not in the time of a job, which the tuner may wait for
    with suppress(BrokenPipeError), compiling_for(capability):
        pipe.send(READY)
        while True:
            pipe.send(_done(device, requests.get()))


def _listen(pipe: Connection[Any, Any], requests: SimpleQueue[Any]) -> None:
    """In a thread of its own, so that the end is heard while something is compiled."""
    try:
        while True:
            requests.put(pipe.recv())
    except (EOFError, OSError):
        pass
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _done(device: DeviceInfo, job: Any) -> Any:
    try:
        return job() if callable(job) else _compiled(device, *job)
    except Exception as error:
        return error_line(error)


def _compiled(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> dict[Key, MachineCode]:
    made = launches_on(device, problem, selection)
    operands = operands_of(problem, made)
    return {
        (device.capability, identity(launch, operands)): machine_code(compiled(launch, operands, SCALARS))
        for launch in made
    }
