"""What was learned in service: tables of a kind of their own in the user's folder, which are asked before the others.

An entry has the bits of the kernel that it was timed against. So it changes no result, and ranks may differ in it.
Where nothing was faster the entry is that kernel itself, so that it is not timed again.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from ..hardware.device import DeviceInfo
from ..hardware.gpu_key import GpuKey
from ..problem import GemmProblem
from ..selection.bit_classes import bit_class
from ..selection.select import Selection
from . import files, queries
from .files import LEARNED, Table
from .records import Entry, named, now, plain, read_entry, versions


def entry(problem: GemmProblem, device: DeviceInfo, triton: str = files.TRITON) -> Entry | None:
    """What was learned of a problem, by this process or an earlier one."""
    return queries.entry(problem, device, LEARNED, triton)


def store(
    problem: GemmProblem,
    selection: Selection,
    device: DeviceInfo,
    *,
    before: Selection,
    us: float,
    before_us: float,
    samples: int,
    triton: str = files.TRITON,
    by: Callable[..., bool] | None = None,
) -> bool:
    """Stores what was learned, in the user's folder and for this process, whose plans stay; whether it is in the
    folder. An entry of another class of bits, as of a batch-invariant product, stays.

    before: the incumbent, which took `before_us` in the same places; samples: of each of both. by: calls `write` with
    the arguments that it is given.
    """
    where, known = queries.folder(), entry(problem, device, triton)
    if where is None:
        return False
    if known is not None and bit_class(problem, known.selection(problem, "")) != bit_class(problem, selection):
        return False
    given = Entry(
        algorithm=selection.algorithm,
        us=us,
        default_us=before_us,
        measured=now(),
        by=versions(),
        default=named(before),
        samples=samples,
    )
    found = {problem: read_entry(plain(given))}
    loaded = queries.tables_in(where, device, triton)
    empty = Table(GpuKey.of(device), triton, LEARNED)
    table = loaded.get(LEARNED, empty)
    loaded[LEARNED] = Table(*table.kind, table.entries | found)  # in one step: other threads may be asking
    return (by or write)(where.absolute(), empty, found)


def write(where: Path, empty: Table, found: dict[GemmProblem, Entry]) -> bool:
    """Adds entries to the folder's table of the kind of `empty`; whether they or later ones are there. It takes Python
    for 3 ms, and 0.3 ms for each entry that is there."""

    def changed(table: Table) -> Table:
        there = table.entries
        new = {x: found[x] for x in found if x not in there or there[x].measured <= found[x].measured}
        return Table(*table.kind, there | new)

    try:
        files.change(where, empty, changed)
    except OSError as error:
        files.say_once(f"what was learned is not kept in {where}: {error.strerror or error}")
        return False
    return True


def names() -> list[str]:
    """The files of what was learned, on all GPUs. OSError where the folder may not be read."""
    where = queries.folder()
    return [] if where is None else [x for x in files.names(where, "") if f"-{LEARNED}." in x]


def clear() -> int:
    """Forgets all that was learned, on all GPUs; the number of tables. OSError where the folder is not writable."""
    where, found = queries.folder(), names()
    try:
        if where is not None:
            files.delete(where, found)
    finally:
        queries.reload()
    return len(found)
