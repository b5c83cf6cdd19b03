"""Tables: the fastest selections that were measured, for each GPU key, minor version of Triton and kind of bits.

A user's tables are in the folder `folder()`, shipped ones beside this file. A process reads them once, when it first
plans a product, and again after it has changed one. docs/tables.md is about their use, `files` about what is on disk.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Literal

import torch
import triton

from .. import arguments
from ..compat import free_in_children
from ..hardware.device import SHARED_MEMORY, DeviceInfo, current_device_info, device_info
from ..hardware.driver import cublas_version
from ..hardware.silicon import Silicon as Silicon
from ..hardware.silicon import without_power
from ..problem import GemmProblem
from ..selection import batch_invariance, generation
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, select
from . import files as files
from . import records as records
from .files import BITS, KINDS, LEARNED, Bits, Kind, Table
from .records import Entry, illegal, plain, text_of
from .weights import serving, weight_of

__all__ = [
    "Report",
    "Silicon",
    "clear",
    "contents",
    "entry",
    "export_to",
    "folder",
    "ignored",
    "import_from",
    "known",
    "lookup",
    "merge",
    "reload",
    "serves",
    "store",
    "verify",
]

SHIPPED = Path(__file__).parent
JOURNAL = ".tuning.jsonl"  # ends the names of files in which a tuner notes what failed
Source = Literal["user's table", "shipped table"]

_lock = free_in_children(threading.RLock())  # one thread reads files; what it calls, and handlers of signals, may too
_loaded: dict[tuple[Path, DeviceInfo, str, str], dict[Kind, Table]] = {}
_ignored: Counter[str] = Counter()
cleared = 0  # how often this process has cleared the tables


def folder() -> Path | None:
    """The folder of the user's tables: in TRITON_GEMM_CACHE_DIR, or else in the user's cache folder.

    Returns:
        None if it is not known: platformdirs is missing, or the user has no home folder.
    """
    given = os.environ.get("TRITON_GEMM_CACHE_DIR")
    if not given:
        return _users_folder()
    try:
        return Path(given).expanduser() / "tables"
    except RuntimeError:
        files.say_once(
            f"TRITON_GEMM_CACHE_DIR is {given}, and that home folder is not known: no user's tables are used"
        )
        return None


@cache
def _users_folder() -> Path | None:
    try:
        from platformdirs import user_cache_path
    except ModuleNotFoundError:
        files.say_once("platformdirs is not installed: a user's tables are looked for in TRITON_GEMM_CACHE_DIR only")
        return None
    with suppress(RuntimeError):  # older ones give a folder named ~ instead
        found = user_cache_path("triton_gemm", appauthor=False) / "tables"
        if found.is_absolute():
            return found
    files.say_once("there is no home folder: a user's tables are looked for in TRITON_GEMM_CACHE_DIR only")
    return None


def _folders() -> Iterator[tuple[Source, Path]]:
    users = folder()
    if users is not None:
        yield "user's table", users
    yield "shipped table", SHIPPED


# --- Asking ---


def lookup(
    problem: GemmProblem,
    device: DeviceInfo,
    bits: Bits = "same",
    only: Callable[[GemmProblem, DeviceInfo], str] | None = None,
    triton: str = files.TRITON,
) -> Selection | None:
    """What a table says is fastest for `problem` on `device`, a user's before a shipped one, or None.

    bits: "same" asks the tables of that name alone, "any" those of the fastest, whatever their bits, first. only: says
    which class of bits (`bit_classes`) entries must have, and is called only if there is one. Entries of another class,
    and those that the device cannot run, are left out, and counted in `ignored()`. triton: whose tables are asked.
    """
    _check("lookup", device, bits, problem)
    arguments.callback("lookup", "only", only)
    for source, entry in _held(problem, device, bits, triton):
        why = left_out(problem, device, entry, only)
        if why is None:
            return entry.selection(problem, source)
        _ignored[f"{source}: {why}"] += 1
    return None


def left_out(
    problem: GemmProblem, device: DeviceInfo, entry: Entry, only: Callable[[GemmProblem, DeviceInfo], str] | None
) -> str | None:
    """Why `lookup` leaves an entry out, or None."""
    why = illegal(problem, device, entry.algorithm)
    wanted = None if why or only is None else only(problem, device)
    if wanted not in (None, bit_class(problem, entry.selection(problem, ""))):
        why = f"it gives other bits than {wanted}"
    return why


def torch_is_faster(problem: GemmProblem, device: DeviceInfo, invariant: bool = False) -> bool:
    """Whether what `lookup` finds for `problem` on `device` with bits="any" says that torch's product is faster. That
    is not followed where other versions of torch and cuBLAS were timed, nor where products are `invariant`,
    batch-invariant, and is counted in `ignored()` then."""
    _check("torch_is_faster", device, "any", problem)
    for source, entry in _held(problem, device, "any"):
        if illegal(problem, device, entry.algorithm) is None:
            if not entry.torch:
                return False
            why = "torch is faster, and its bits depend on the number of rows" * invariant
            if not why and entry.torch != torchs_versions():
                why = f"{entry.torch} is faster, and this is {torchs_versions()}"
            if why:
                _ignored[f"{source}: {why}"] += 1
            return not why
    return False


def _held(
    problem: GemmProblem, device: DeviceInfo, bits: Bits, triton: str = files.TRITON
) -> Iterator[tuple[Source, Entry]]:
    """The entries that answer for a problem, legal or not, in the order in which they are asked."""
    for source, where in _folders():
        for table in _asked(where, device, bits, triton):
            entry = table.entries.get(problem) or _of_more_rows(problem, device, table)
            if entry is not None:
                yield source, entry


def _of_more_rows(problem: GemmProblem, device: DeviceInfo, table: Table) -> Entry | None:
    """What a table has for more rows of the problem's weight, if it serves the problem."""
    weight = weight_of(problem) if table.by_weight else None
    of_weight = table.by_weight.get(weight) if weight is not None else None
    return None if of_weight is None else serving(problem, device, table.entries, of_weight)


def entry(problem: GemmProblem, device: DeviceInfo, bits: Bits = "same") -> Entry | None:
    """What the user's table of that class of bits holds for `problem` on `device`, legal there or not, or None."""
    where = folder()
    table = None if where is None else _tables(where, device).get(bits)
    return None if table is None else table.entries.get(problem)


def serves(problem: GemmProblem, device: DeviceInfo, entry: Entry, bits: Kind = "same") -> bool:
    """Whether an entry of a table of those bits is used on `device` with the model of now: it can run there, and in
    "same" gives the bits of the model's choice."""

    def by_model(problem: GemmProblem, device: DeviceInfo) -> str:
        return bit_class(problem, select(problem, device))

    try:
        return left_out(problem, device, entry, None if bits == "any" else by_model) is None
    except RuntimeError:  # the model has no choice
        return False


def ignored() -> dict[str, int]:
    """How often an entry was found and not used, by the kind of its table and the reason."""
    return dict(_ignored)


def known(problem: GemmProblem, device: DeviceInfo) -> list[tuple[Source, Entry]]:
    """All that tables of any bits hold for `problem` on `device`, legal there or not, and whose they are."""
    every = ((source, table) for source, where in _folders() for table in _tables(where, device).values())
    return [(source, table.entries[problem]) for source, table in every if problem in table.entries]


def _check(function: str, device: DeviceInfo, bits: Bits, *problems: GemmProblem) -> None:
    """Whether these are what they are said to be."""
    for problem in problems:
        arguments.instance(function, "problem", problem, GemmProblem)
    arguments.instance(function, "device", device, DeviceInfo)
    arguments.one_of(function, "bits", bits, BITS)


def _asked(where: Path, device: DeviceInfo, bits: Bits, triton: str = files.TRITON) -> list[Table]:
    """A folder's tables in the order in which they are asked. What was learned has the bits of the model's choice of
    then, which "any" does not hold to."""
    tables = _tables(where, device, triton)
    kinds: tuple[Kind, ...] = ("any", "same") if bits == "any" else (LEARNED, "same")
    return [tables[kind] for kind in kinds if kind in tables]


def _tables(where: Path, device: DeviceInfo, triton: str = files.TRITON) -> dict[Kind, Table]:
    """The tables of a folder for a device and a minor version of Triton, by class of bits. Where it has none, all that
    costs is a look at the folder, once: NVML, which knows the power limit, is not asked."""
    loaded, key = _loaded, (where, device, device.uuid, triton)
    found = loaded.get(key)
    if found is None:
        with _lock:
            found = loaded.get(key)
            if found is None:
                found = loaded[key] = _load(where, device, triton)
    return found


def _load(where: Path, device: DeviceInfo, triton: str) -> dict[Kind, Table]:
    names = files.names_read(where, without_power(device.capability, device.num_sms, device.bus_width))
    empty = [Table(Silicon.of(device), triton, bits) for bits in KINDS] if names else []
    return {table.bits: _read_or_empty(where, table) for table in empty if table.name in names}


def _read_or_empty(where: Path, empty: Table) -> Table:
    try:
        return files.current(where, empty, repair=where != SHIPPED)
    except OSError as error:
        path = where / empty.name
        files.say_once(f"{path} cannot be read, and is left as it is: {error.strerror or error}")
        return empty


def reload() -> None:
    """Has tables read again at their next use: another process may have changed them."""
    global _loaded
    _loaded = {}  # another: what is being read now goes into the one before
    generation.advance()


def contents(device: DeviceInfo, bits: Bits = "same", triton: str = files.TRITON, learned: bool = False) -> str:
    """A hash of all that a product may be given from a table on `device`, batch-invariant or not: equal where answers
    are, whatever is always left out. triton: as in `lookup`; learned: of what was learned in service, or of all else.
    """
    found = hashlib.sha256()
    for source, where in _folders():
        for table in (x for x in _asked(where, device, bits, triton) if (x.bits == LEARNED) == learned):
            given = (one for one in table.entries.items() if _answers(one[0], device, one[1], bits))
            chosen = sorted(
                text_of(
                    [plain(problem), plain(entry.algorithm), *[entry.least_rows] * bool(entry.least_rows)]
                    + ["torch"] * (entry.torch == torchs_versions())
                )
                for problem, entry in given
            )
            if chosen:
                found.update(text_of([source, table.bits, chosen]).encode())
    return found.hexdigest()


def _answers(problem: GemmProblem, device: DeviceInfo, entry: Entry, bits: Bits) -> bool:
    """Whether there may be a product that is given the entry where tables of these bits are asked: one of fewer rows,
    too, in whose class of bits and tiles the entry may run where it cannot for its own."""
    if entry.least_rows or serves(problem, device, entry, bits):
        return True
    if illegal(problem, device, entry.algorithm) is not None:
        return False
    try:
        invariant = batch_invariance.class_of(problem, device)
    except RuntimeError:  # there is none
        return False
    return bit_class(problem, entry.selection(problem, "")) == invariant


# --- Changing a user's tables ---


def store(
    problem: GemmProblem,
    selection: Selection,
    device: DeviceInfo,
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
        device: The GPU.
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
    _check("store", device, bits, problem)
    arguments.instance("store", "selection", selection, Selection)
    us, default_us = arguments.positive("store", "us", us), arguments.positive("store", "default_us", default_us)
    arguments.instance("store", "measured", measured, str, or_none=True)
    arguments.instance("store", "by", by, str, or_none=True)
    arguments.count("least_rows", least_rows, 0)
    torch_us = 0.0 if torch_us is None else arguments.positive("store", "torch_us", torch_us)
    if torch_us and bits != "any":
        raise ValueError('store(): torch\'s product is in tables of bits="any" alone')
    measured = measured or datetime.now(timezone.utc).isoformat(timespec="seconds")
    given = Entry(
        algorithm=selection.algorithm,
        us=float(us),
        default_us=float(default_us),
        measured=measured,
        by=by or versions(),
        default=_named_choice(problem, device),
        least_rows=least_rows,
        torch_us=float(torch_us),
        torch=torchs_versions() if torch_us else "",
    )
    entry = records.read_entry(plain(given))  # as who reads the file will
    return _put(Table(Silicon.of(device), bits=bits), {problem: entry})


def _named_choice(problem: GemmProblem, device: DeviceInfo) -> str:
    """Which choice of the model's `default_us` is of."""
    try:
        return records.named(select(problem, device))
    except RuntimeError:  # it has none
        return ""


def _put(empty: Table, entries: dict[GemmProblem, Entry]) -> bool:
    where = folder()
    try:
        if where is None:
            raise OSError("there is no folder for it: set TRITON_GEMM_CACHE_DIR")
        files.change(where, empty, lambda table: Table(*table.kind, table.entries | entries))
    except OSError as error:
        files.say_once(f"nothing is kept{f' in {where}' if where else ''}: {error.strerror or error}")
        return False
    reload()
    return True


def versions() -> str:
    """Of this package and what it runs on."""
    package = sys.modules[__name__.partition(".")[0]]
    return f"triton_gemm {package.__version__}, Triton {triton.__version__}, torch {torch.__version__}"


def torchs_versions() -> str:
    """Of torch, and of the cuBLAS that it loaded or else the CUDA that it was built for."""
    cuda = torch.version.cuda
    cublas = cublas_version(cuda)
    return f"torch {torch.__version__}" + (f", cuBLAS {cublas}" if cublas else f", CUDA {cuda}" if cuda else "")


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


def export_to(path: str | os.PathLike[str], device: DeviceInfo | None = None, bits: Bits = "same") -> int:
    """Writes the user's table for a GPU into a file that `import_from` takes, here or elsewhere.

    Args:
        path: The file to write.
        device: The GPU; None: the current one.
        bits: The kind of table: "same" or "any".

    Returns:
        The number of entries.

    Raises:
        OSError: The table cannot be read, or the file not written. Nothing is changed.
    """
    device = device if device is not None else current_device_info()
    _check("export_to", device, bits)
    empty = Table(Silicon.of(device), bits=bits)
    where = folder()
    table = empty if where is None else files.current(where, empty)
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
    given, where = _read(Path(path)), folder()
    if where is None:
        raise OSError("there is no folder for tables: set TRITON_GEMM_CACHE_DIR")
    files.change(where, Table(*given.kind), lambda table: files.merge([table, given], _used(given)))
    reload()
    return len(given.entries)


def _used(table: Table) -> Callable[[GemmProblem, Entry], bool] | None:
    """Whether an entry is used on a GPU of a table's silicon; None for a table of another Triton, with which kernels
    may run what they cannot run here, and the model may choose otherwise."""
    if table.triton != files.TRITON:
        return None
    device = device_of(table.silicon)
    return lambda problem, entry: serves(problem, device, entry, table.bits)


def device_of(silicon: Silicon) -> DeviceInfo:
    """A GPU of that silicon: one that is here, or else as much as a table says of it."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    here = (device_info(torch.device("cuda", index)) for index in range(count))
    shared = SHARED_MEMORY.get(silicon.capability, 0)
    described = DeviceInfo(
        name=silicon.name,
        capability=silicon.capability,
        num_sms=silicon.sms,
        shared_memory=shared,
        bus_width=silicon.bus_width,
        power_limit=silicon.power_limit,
    )
    return next((device for device in here if Silicon.of(device) == silicon), described)


def _read(path: Path) -> Table:
    found = files.look(path)
    if found.table is None or found.wrong:
        raise ValueError(f"{path}: {found.wrong[1] if found.wrong else 'there is no such file'}")
    return found.table


def notes() -> list[Path]:
    """The files in which tuning noted what failed, and where the model's choice stayed."""
    where = folder()
    return sorted(where.glob(f"*{JOURNAL}*")) if where else []


def clear() -> int:
    """Deletes the user's tables, of all GPUs, and tuning's notes, in files and in this process.

    Quarantined files stay.

    Returns:
        The number of tables.

    Raises:
        OSError: The folder cannot be read or written.
    """
    global cleared
    where = folder()
    names = [] if where is None else files.names(where, "")
    try:
        if where is not None and (names or notes()):
            with files.locked(where):
                for path in (*(where / name for name in names), *notes()):
                    path.unlink(missing_ok=True)
    finally:  # of an interruption, too
        cleared += 1
        reload()
    return len(names)


# --- Checking them ---


@dataclass(frozen=True)
class Report:
    """What `verify` found in a file.

    Attributes:
        path: The file.
        source: Whether it is a user's or a shipped table.
        entries: How many it has.
        faults: Why it is not used, or which of its entries are not, a sentence each.
        elsewhere: Which other GPU key or version of Triton it belongs to, if any.
        table: Its entries, or None if it cannot be read.
    """

    path: Path
    source: Source
    entries: int
    faults: tuple[str, ...] = ()
    elsewhere: str = ""
    table: Table | None = field(default=None, repr=False)


def listed() -> list[tuple[Source, Path, files.Contents]]:
    """Every file of tables, whose it is, and what it holds; a folder that may not be read as a file that may not."""
    return [(source, *one) for source, where in _folders() for one in files.looked(where, files.look)]


def set_aside() -> list[Path]:
    """The files that could not be read whole, and that were set aside in the user's folder."""
    where = folder()
    return files.set_aside(where) if where else []


def verify(device: DeviceInfo | None = None) -> list[Report]:
    """Checks every file of tables, quarantined ones included, and each entry. Nothing is changed.

    A table must have the GPU key of `device` and this version of Triton, and each entry must be legal there.

    Args:
        device: The GPU; None: the current one.

    Returns:
        A `Report` of each file.
    """
    arguments.instance("verify", "device", device, DeviceInfo, or_none=True)
    reports = [Report(path, "user's table", 0, ("it is quarantined",)) for path in set_aside()]
    device = device or current_device_info()
    for source, path, found in listed():
        faults, elsewhere = [found.wrong[1]] if found.wrong else [], ""
        table = found.table
        if table is not None and (table.silicon, table.triton) != (Silicon.of(device), files.TRITON):
            differ = [str(table.silicon)] * (table.silicon != Silicon.of(device))
            differ += [f"Triton {table.triton}"] * (table.triton != files.TRITON)
            elsewhere = f"it is of {' and '.join(differ)}"
            faults.append(elsewhere)
        elif table is not None:
            whys = ((problem, illegal(problem, device, entry.algorithm)) for problem, entry in table.entries.items())
            faults += [f"{text_of(plain(problem))}: {why}" for problem, why in whys if why]
        reports.append(Report(path, source, len(table.entries) if table else 0, tuple(faults), elsewhere, table))
    return reports
