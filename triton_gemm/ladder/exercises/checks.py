"""Whether a hole is filled in rightly.

A check runs the file's kernels in Triton's interpreter or a simulation, and raises WrongError with a sentence that
teaches. Bits are compared with those of the solution.
"""

from __future__ import annotations

import importlib.util
import signal
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import torch

from . import EXERCISES, SOLUTIONS, Exercise, fp32, tensor_cores
from .compiled import refused
from .questions import RUNS, error_text
from .tensor_cores import RING
from .trace import Trace, WrongError

LIMIT_S = 20  # of CPU time, since other processes may have the machine; a check takes 2

CHECKS: dict[str, Callable[[Any, Any], None]] = {
    exercise.name: getattr(fp32 if exercise.number < 7 else tensor_cores, exercise.name.partition("_")[2])
    for exercise in EXERCISES
}


def check(exercise: Exercise, path: Path, *, compiles: bool = True) -> str | None:
    """What is wrong with an exercise's file, in a sentence, or None. A file that runs for LIMIT_S is ended. RUNS has
    what it did. compiles: whether Triton's compiler must accept it, too."""
    RUNS.clear()
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of NumPy's, by which the interpreter computes
            CHECKS[exercise.name](_module(path), _solution(exercise))
    except Exception as error:  # whatever the learner's code raises
        return error_text(error, path)
    if not compiles:
        return None
    if not isinstance(RUNS[0], Trace):
        return refused(path, RING, where="simulation")
    calls = {tuple(x == 0 for x in run.given if not isinstance(x, torch.Tensor)): run.given for run in RUNS[::-1]}
    return refused(path, *calls.values())  # numbers that are 0 may choose what is compiled


def _module(path: Path) -> Any:
    """A file as a module, read anew."""
    spec = importlib.util.spec_from_file_location(path.stem, path)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@cache
def _solution(exercise: Exercise) -> Any:
    return _module(SOLUTIONS / f"{exercise.name}.py")


@contextmanager
def _limited() -> Iterator[None]:
    def late(*_: Any) -> None:
        raise WrongError(f"it did not end within {LIMIT_S} seconds of CPU time: a loop may not come to an end.")

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, LIMIT_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
