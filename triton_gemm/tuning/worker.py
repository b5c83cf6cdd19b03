"""Both ends of a process that compiles candidates into Triton's cache, so that the process which times need only load
them, a millisecond or two of Python for each. In threads of that process Triton's compiler takes its GIL, for 5 ms at a
time and more, and the GPU idles in the midst of what is timed while Python waits.

The worker is a new interpreter: what is forked from a process with a CUDA context cannot be relied on, and
`multiprocessing` would run the user's script again. Its stdin is a socket, through which `Connection`s pass pickled
objects both ways.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing import Pipe
from multiprocessing.connection import Connection
from queue import SimpleQueue
from typing import Any

from ..compat import compiling_for
from ..device import DeviceInfo
from ..kernels.launch import compiled
from ..plan import launches_on
from ..precompile import SCALARS, operands_of
from ..problem import GemmProblem
from ..select import Selection

START_S = 60.0  # until it has imported torch and Triton
CRASHES = {signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE}  # of the compiler itself
READY = "ready"


class LostError(RuntimeError):
    """There is no worker: it could not be started, or ended by itself or from outside."""


def told(error: BaseException) -> str:
    """An error, in a line."""
    return f"{type(error).__name__}: {error}".splitlines()[0]


def python() -> list[str]:
    """The command of a worker, which finds the packages that this process finds."""
    start = f"import sys; sys.path[:] = {sys.path!r}; from {__name__} import main; main()"
    return [sys.executable, "-c", start]


class Worker:
    """One process after another, for one thread. target: what the process is told first: for `main` the DeviceInfo that
    plans are made for, and the compute capability that the GPU has."""

    def __init__(self, target: object, command: Sequence[str] | None = None) -> None:
        self.target, self.command = target, command
        self.process: subprocess.Popen[bytes] | None = None
        self.pipe: Connection[Any, Any] | None = None
        self.closed = False
        self.changing = threading.Lock()

    def start(self) -> None:
        """Starts a process if there is none, and waits until it is ready. LostError where that fails."""
        if self.process is not None:
            return
        try:
            with self.changing:
                if self.closed:
                    raise RuntimeError("no more is compiled")
                self.pipe, self.process = _launched(self.command or python())
            self.pipe.send(self.target)
            said = self._receive(START_S)
            if said != READY:
                raise RuntimeError(f"it says {said!r}")
        except (EOFError, ConnectionError):
            raise LostError(f"it ended with {self.end()}") from None
        except Exception as error:  # no such command, no memory, too slow
            self.end()
            raise LostError(told(error)) from None

    def compile(self, job: object, limit_s: float) -> str | None:
        """Has the process, which is started, compile; why that has failed, or None. LostError where it has ended, but
        not by a crash of the compiler, which is the job's failure."""
        assert self.pipe is not None
        try:
            self.pipe.send(job)
            why: str | None = self._receive(limit_s)
        except TimeoutError:
            self.end()
            return f"compiling takes more than {limit_s:g} s"
        except Exception:
            code = self.end()
            if -code in CRASHES:
                return f"the compiler crashed with {signal.Signals(-code).name}"
            raise LostError(f"it ended with {code}") from None
        return why

    def close(self) -> None:
        """From another thread: kills the process, and lets no other start. The worker's own thread calls `end`."""
        with self.changing:
            self.closed = True
            self._kill()

    def end(self) -> int:
        """Kills the process if there is one, and waits until it is gone; its exit status, as subprocess has it."""
        with self.changing:
            self._kill()
            code = 0 if self.process is None else self.process.wait()
            if self.pipe is not None:
                self.pipe.close()
            self.process = self.pipe = None
        return code

    def _kill(self) -> None:
        if self.process is not None and self.process.poll() is None:
            with suppress(ProcessLookupError):
                os.killpg(self.process.pid, signal.SIGKILL)  # it leads a group, in which ptxas may run

    def _receive(self, limit_s: float) -> Any:
        assert self.pipe is not None
        if not self.pipe.poll(limit_s):
            raise TimeoutError(f"no answer within {limit_s:g} s")
        return self.pipe.recv()


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
                env={**os.environ, "CUDA_VISIBLE_DEVICES": "", "TRITON_INTERPRET": "0"},
                start_new_session=True,
            )
        except BaseException:
            ours.close()
            raise
    return ours, process


def main() -> None:
    """The worker: takes a target and then jobs, problems with a selection each, and answers why each could not be
    compiled, or None. It ends when the other end is closed, as it is when the process there has been killed."""
    pipe: Connection[Any, Any] = Connection(os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)  # what runs here, ptxas too, finds nothing to read
    asked: SimpleQueue[Any] = SimpleQueue()
    threading.Thread(target=_listen, args=(pipe, asked), daemon=True).start()
    device, capability = asked.get()
    with suppress(BrokenPipeError), compiling_for(capability):
        pipe.send(READY)
        while True:
            pipe.send(_failure(device, *asked.get()))


def _listen(pipe: Connection[Any, Any], asked: SimpleQueue[Any]) -> None:
    """In a thread of its own, so that the end is heard while something is compiled."""
    try:
        while True:
            asked.put(pipe.recv())
    except (EOFError, OSError):
        pass
    finally:
        os.killpg(os.getpgid(0), signal.SIGKILL)


def _failure(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> str | None:
    try:
        made = launches_on(device, problem, selection)
        operands = operands_of(problem, made)
        for launch in made:
            compiled(launch, operands, SCALARS)
    except Exception as error:
        return told(error)
    return None
