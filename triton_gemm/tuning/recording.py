"""Recording which products a program runs, for tuning them later, on this GPU or another."""

from __future__ import annotations

import json
import os
import threading
import warnings
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import wraps
from itertools import count
from pathlib import Path
from typing import Any

import triton

from ..compat import current_device, free_in_children
from ..problem import GemmProblem
from ..runtime import plan
from ..tables.files import write_for_user
from ..tables.records import WrongError, plain, read, text_of

FORMAT = 1
LARGEST_FILE = 64 * 2**20  # bytes
HOW = "this package's calls are recorded, and torch's own under use() or enable()"
# Triton's on launches: while there is one, C++, which does not note launches, leaves them to Python.
HOOKS: list[Any] = type(triton.knobs.runtime).launch_enter_hook.calls

# Of each block by its id: how often each plan was launched. Each step that changes them is one: the garbage collector
# and handlers of signals may begin and end blocks, and launch, between any two.
_recorders: dict[int, dict[Any, count[int]]] = {}
_lock = free_in_children(threading.RLock())


@contextmanager
def record_shapes(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records which GEMMs run in the block, and how often, in a file for `tune` and `compare`::

        with triton_gemm.record_shapes("shapes.json"), triton_gemm.use():
            model(x)

    Every launch is counted, in all threads of the process: of this package's functions and modules, of torch's where
    they are routed (`use`), of backwards and of compiled functions. A CUDA graph counts once, when it is captured. The
    file holds shapes, strides, dtypes and epilogues, and no data. It is written when the block ends, also by an
    exception, and replaces an existing file. A block without a GEMM warns. Meanwhile Python launches all calls, which
    C++ would launch faster.

    Args:
        path: The file. A relative path, or a link, is resolved when the block begins.

    Raises:
        OSError: Before the block: path is a folder, or the file's folder does not exist or is not writable. After it:
            the file cannot be written.
    """
    target = _target(Path(path))
    counts: dict[Any, count[int]] = {}
    try:
        _recorders[id(counts)] = counts
        _follow()
        yield
    finally:
        _recorders.pop(id(counts), None)
        _follow()
        write(target, by_problem(counts))
    if not counts:
        warnings.warn(f"record_shapes(): no GEMM was recorded in {target}; {HOW}", RuntimeWarning, stacklevel=3)


def _target(path: Path) -> Path:
    """The file itself, whatever folder is the current one later and wherever links lead then."""
    if path.is_dir():  # as "" is, too
        raise IsADirectoryError(f"record_shapes(): {path} is a folder, and not a file")
    with suppress(FileNotFoundError):
        path.stat()  # raises where links lead round in a circle
    target = Path(os.path.realpath(path))
    if path.exists() and not target.exists():
        target = path.absolute()  # a pipe of this process, as /dev/stdout may be, has no other name
    if not target.parent.is_dir():
        raise FileNotFoundError(f"record_shapes(): there is no folder {target.parent}")
    replaced = target.is_file() or not target.exists()
    if not os.access(target.parent if replaced else target, os.W_OK):
        raise PermissionError(f"record_shapes(): {target} cannot be written to")
    return target


def by_problem(counts: dict[Any, count[int]]) -> dict[GemmProblem, int]:
    """Calls by problem, of those by plan; the most called first."""
    found: Counter[GemmProblem] = Counter()
    for one, calls in list(counts.items()):  # a launch in another thread may be noted still
        found[one.problem] += next(calls)
    return dict(found.most_common())


def _follow() -> None:
    """Has launches noted while anyone records; else calls go through the plans' own methods, and C++. Looks again after
    each step, for whoever interrupts this thread may do the same."""
    with _lock:
        for kind, noting in ((plan.GemmPlan, _noting_on_a_gpu), (plan.InterpretedPlan, _noting)):
            while bool(_recorders) != hasattr(run := kind.run, "__wrapped__"):
                own = getattr(run, "__wrapped__", run)
                kind.run = noting(own) if _recorders else own  # type: ignore[method-assign]
        while bool(_recorders) != (_not_by_cpp in HOOKS):
            if _recorders:
                HOOKS.append(_not_by_cpp)
            else:
                with suppress(ValueError):
                    HOOKS.remove(_not_by_cpp)


def _not_by_cpp(_: object) -> None:
    """A hook that does nothing."""


def _noting(run: Any) -> Any:
    @wraps(run)
    def noted(self: Any, *arguments: Any) -> None:
        _note(self)
        run(self, *arguments)

    return noted


def _noting_on_a_gpu(run: Any) -> Any:
    @wraps(run)
    def noted(self: Any, *arguments: Any) -> None:
        try:
            run(self, *arguments)
        finally:  # but for a call that goes on to another device, or to a stand-in, which is noted itself
            if self.index == current_device() and getattr(self.first_calls, "stand_in", None) is None:
                _note(self)

    return noted


def _note(launched: Any) -> None:
    for counts in list(_recorders.values()):
        next(counts.get(launched) or counts.setdefault(launched, count()))


def write(path: Path, calls: dict[GemmProblem, int]) -> None:
    """A line for each product, the most called first."""
    lines = [text_of({"calls": count, "problem": plain(problem)}) for problem, count in calls.items()]
    text = f'{{\n "format": {FORMAT},\n "products": [' + ",".join(f"\n  {line}" for line in lines) + "\n ]\n}\n"
    write_for_user(path, text)


def read_shapes(path: str | os.PathLike[str]) -> dict[GemmProblem, int]:
    """What `record_shapes` wrote: calls by problem. Nothing in the file is executed. ValueError where it holds anything
    else, OSError where it cannot be read."""
    source = Path(path)
    if source.stat().st_size > LARGEST_FILE:
        raise ValueError(f"{source} has more than {LARGEST_FILE} bytes")
    try:
        found = json.loads(source.read_text())
        if found["format"] != FORMAT:
            raise WrongError(f"its format is {str(found['format'])[:20]}, this version reads {FORMAT}")
        calls: Counter[GemmProblem] = Counter()
        for line in found["products"]:
            count = read(int, line["calls"])
            if count < 1:
                raise WrongError(f"a product has {count} calls")
            calls[read(GemmProblem, line["problem"])] += count
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise ValueError(f"{source} is not a file of record_shapes: {type(error).__name__}: {error}"[:300]) from None
    return dict(calls.most_common())
