"""Recording which products a program runs, for tuning them later, on this GPU or another."""

from __future__ import annotations

import json
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ..compat import current_device, free_in_children
from ..problem import GemmProblem
from ..runtime import plan
from ..tables.files import write_for_user
from ..tables.records import WrongError, plain, read, text_of

FORMAT = 1
LARGEST_FILE = 64 * 2**20  # bytes

AT_MOST = 1 << 16  # launches that are noted before they are counted

_recorders: list[Counter[Any]] = []
_launched: list[Any] = []  # plans, once for each launch: appending is what calls cost, and needs no lock
_lock = free_in_children(threading.Lock())
_runs: dict[Any, Any] = {}  # of each kind of plan, its own method


@contextmanager
def record_shapes(path: str | os.PathLike[str]) -> Iterator[None]:
    """Records which GEMMs run in the block, and how often, in a file for `tune` and `compare`::

        with triton_gemm.record_shapes("shapes.json"):
            model(x)

    Every launch is counted, in all threads of the process: of this package's functions and modules, of torch's where
    they are routed (`use`), of backwards and of compiled functions. A CUDA graph counts once, when it is captured. The
    file holds shapes, strides, dtypes and epilogues, and no data. It is written when the block ends, also by an
    exception, and replaces an existing file. Calls take under a microsecond longer meanwhile.

    Args:
        path: The file. A relative path, or a link, is resolved when the block begins.

    Raises:
        OSError: Before the block: path is a folder, or the file's folder does not exist or is not writable. After it:
            the file cannot be written.
    """
    target = _target(Path(path))
    counts: Counter[Any] = Counter()
    _begin(counts)
    try:
        yield
    finally:
        _end(counts)
        write(target, by_problem(counts))


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


def by_problem(counts: Counter[Any]) -> dict[GemmProblem, int]:
    """Calls by problem, of calls by plan; the most called first."""
    found: Counter[GemmProblem] = Counter()
    for one, calls in counts.items():
        found[one.problem] += calls
    return dict(found.most_common())


def _begin(counts: Counter[Any]) -> None:
    with _lock:
        _count()
        _recorders.append(counts)
        if len(_recorders) == 1:  # calls go through the plans' own methods again once no one records
            for kind, noting in ((plan.GemmPlan, _noting_on_a_gpu), (plan.InterpretedPlan, _noting)):
                _runs[kind] = kind.run
                kind.run = noting(kind.run)  # type: ignore[method-assign]


def _end(counts: Counter[Any]) -> None:
    with _lock:
        _count()
        _recorders[:] = [one for one in _recorders if one is not counts]
        if not _recorders:
            for kind, run in _runs.items():
                kind.run = run
            _runs.clear()


def _noting(run: Any) -> Any:
    def noted(self: Any, *arguments: Any) -> None:
        _note(self)
        run(self, *arguments)

    return noted


def _noting_on_a_gpu(run: Any) -> Any:
    def noted(self: Any, *arguments: Any) -> None:
        if self.index == current_device():  # else it calls itself again on that device
            _note(self)
        run(self, *arguments)

    return noted


def _note(launched: Any) -> None:
    _launched.append(launched)
    if len(_launched) > AT_MOST:
        with _lock:
            _count()


def _count() -> None:
    """Counts what is noted; others may note more meanwhile."""
    count = len(_launched)
    noted = _launched[:count]
    del _launched[:count]
    for counts in _recorders:
        counts.update(noted)


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
