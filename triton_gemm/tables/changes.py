"""Changing a user's tables: storing what was measured, merging files, deleting."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from pathlib import Path

import torch

from .. import arguments
from ..hardware.device import SHARED_MEMORY, DeviceInfo, device_info
from ..hardware.gpu_key import GpuKey
from ..hardware.gpus import given_device, named_device
from ..problem import GemmProblem
from ..selection.select import Selection, select
from . import checks, files, queries
from .files import Bits, Table
from .records import Entry, named, now, plain, read_entry, torchs_versions, versions

cleared = 0  # how often this process has cleared the tables


def store(
    problem: GemmProblem,
    selection: Selection,
    device: DeviceInfo | str,
    *,
    us: float,
    default_us: float,
    bits: Bits = "same",
    measured: str | None = None,
    by: str | None = None,
    least_rows: int = 0,
    torch_us: float | None = None,
) -> bool:
    """Stores `selection` as the fastest for `problem` on `device`, in place of the user's table's entry.

    Args:
        problem: The GEMM problem.
        selection: The fastest one.
        device: The GPU, or its name, as "h200".
        us: Its time in microseconds.
        default_us: The time of the model's choice, measured together with it.
        bits: The kind of table: "same" or "any".
        measured: When, in ISO 8601; None: now.
        by: What measured it; None: the versions of this package, Triton and torch.
        least_rows: The fewest rows M that the entry serves, if fewer than the problem's, else 0.
        torch_us: Microseconds that this process's torch took, if it was faster; with bits="any" only.

    Returns:
        Whether it was stored. If the folder is not writable, or locked for too long, it is False, and logged once.

    Raises:
        TypeError, ValueError: No table could hold it; nothing is written.
    """
    device = named_device(device) if isinstance(device, str) else device
    queries.check("store", device, bits, problem)
    arguments.instance("store", "selection", selection, Selection)
    us, default_us = arguments.positive("store", "us", us), arguments.positive("store", "default_us", default_us)
    arguments.instance("store", "measured", measured, str, or_none=True)
    arguments.instance("store", "by", by, str, or_none=True)
    arguments.count("least_rows", least_rows, 0)
    torch_us = 0.0 if torch_us is None else arguments.positive("store", "torch_us", torch_us)
    if torch_us and bits != "any":
        raise ValueError('store(): torch\'s product is in tables of bits="any" alone')
    try:
        default = named(select(problem, device))  # which `default_us` is of
    except RuntimeError:  # the model has no choice
        default = ""
    given = Entry(
        algorithm=selection.algorithm,
        us=float(us),
        default_us=float(default_us),
        measured=measured or now(),
        by=by or versions(),
        default=default,
        least_rows=least_rows,
        torch_us=float(torch_us),
        torch=torchs_versions() if torch_us else "",
    )
    return _put(Table(GpuKey.of(device), bits=bits), {problem: read_entry(plain(given))})  # as who reads the file will


def _put(empty: Table, entries: dict[GemmProblem, Entry]) -> bool:
    where = queries.folder()
    try:
        if where is None:
            raise OSError("there is no folder for it: set TRITON_GEMM_CACHE_DIR")
        files.change(where, empty, lambda table: Table(*table.kind, table.entries | entries))
    except OSError as error:
        files.say_once(f"nothing is kept{f' in {where}' if where else ''}: {error.strerror or error}")
        return False
    queries.reload()
    return True


def merge(paths: Sequence[str | os.PathLike[str]], out: str | os.PathLike[str]) -> int:
    """Merges files of one kind into the file `out`, the same in any order of `paths`.

    Of two entries for a GEMM a usable one takes precedence over an unusable one, then the faster one. For tables of
    another version of Triton the faster one wins, because only that version can tell which are usable.

    Args:
        paths: Files of tables.
        out: The file to write.

    Returns:
        The number of its entries.

    Raises:
        ValueError: A file cannot be read whole, or is of another kind. Nothing is changed.
        OSError: `out` cannot be written. Nothing is changed.
    """
    arguments.several("merge", "paths", paths)
    given = [_read(Path(path)) for path in paths]
    table = files.merge(given, _used(given[0]) if given else None)
    files.write_for_user(Path(out), table.text())
    return len(table.entries)


def export_to(path: str | os.PathLike[str], device: DeviceInfo | str | None = None, bits: Bits = "same") -> int:
    """Writes the user's table for a GPU into a file that `import_from` takes, here or elsewhere.

    Args:
        path: The file to write.
        device: The GPU, or its name, as "h200"; None: the current one.
        bits: The kind of table: "same" or "any".

    Returns:
        The number of entries.

    Raises:
        OSError: The table cannot be read, or the file not written. Nothing is changed.
    """
    device = given_device("export_to", device)
    queries.check("export_to", device, bits)
    table, where = Table(GpuKey.of(device), bits=bits), queries.folder()
    table = table if where is None else files.current(where, table)
    files.write_for_user(Path(path), table.text())
    return len(table.entries)


def import_from(path: str | os.PathLike[str]) -> int:
    """Merges a file into the user's table of the GPU key that it names, this GPU's or not, as `merge` does.

    Args:
        path: A file of `export_to` or `merge`.

    Returns:
        The number of the file's entries.

    Raises:
        ValueError: The file cannot be read whole. Nothing is changed.
        OSError: The folder is not writable. Nothing is changed.
    """
    given, where = _read(Path(path)), queries.folder()
    if where is None:
        raise OSError("there is no folder for tables: set TRITON_GEMM_CACHE_DIR")
    files.change(where, Table(*given.kind), lambda table: files.merge([table, given], _used(given)))
    queries.reload()
    return len(given.entries)


def _read(path: Path) -> Table:
    found = files.contents_of(path)
    if found.table is None or found.wrong:
        raise ValueError(f"{path}: {found.wrong[1] if found.wrong else 'there is no such file'}")
    return found.table


def _used(table: Table) -> Callable[[GemmProblem, Entry], bool] | None:
    """Whether an entry is used on a GPU of a table's GPU key; None for a table of another Triton, with which kernels
    may run what they cannot run here, and the model may choose otherwise."""
    if table.triton != files.TRITON:
        return None
    device = device_of(table.gpu_key)
    return lambda problem, entry: queries.serves(problem, device, entry, table.bits)


def device_of(gpu_key: GpuKey) -> DeviceInfo:
    """A GPU of that GPU key: one that is here, or else as much as a table says of it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = (device_info(torch.device("cuda", index)) for index in range(count))
    described = DeviceInfo(
        name=gpu_key.name,
        capability=gpu_key.capability,
        num_sms=gpu_key.sms,
        shared_memory=SHARED_MEMORY.get(gpu_key.capability, 0),
        bus_width=gpu_key.bus_width,
        power_limit=gpu_key.power_limit,
    )
    return next((device for device in here if GpuKey.of(device) == gpu_key), described)


def clear() -> int:
    """Deletes the user's tables, of all GPUs, and tuning's notes, in files and in this process.

    Quarantined files stay.

    Returns:
        The number of tables.

    Raises:
        OSError: The folder cannot be read or written.
    """
    global cleared
    where = queries.folder()
    names = [] if where is None else files.names(where, "")
    try:
        if where is not None:
            files.delete(where, [*names, *(path.name for path in checks.notes())])
    finally:  # of an interruption, too
        cleared += 1
        queries.reload()
    return len(names)
