"""What tables say, as this process has read them: the user's before the shipped ones."""

from __future__ import annotations

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Literal

from .. import arguments
from ..compat import free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.gpu_key import GpuKey, without_power
from ..problem import GemmProblem
from ..selection import batch_invariance, generation
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, select
from . import files
from .files import BITS, KINDS, LEARNED, Bits, Kind, Table
from .records import Entry, illegal, plain, text_of, torchs_versions
from .weights import serving, weight_of

SHIPPED = Path(__file__).parent
Source = Literal["user's table", "shipped table"]
BitClass = Callable[[GemmProblem, DeviceInfo], str]

_lock = free_in_children(threading.RLock())  # one thread reads files; what it calls, and handlers of signals, may too
_loaded: dict[tuple[Path, DeviceInfo, str, str], dict[Kind, Table]] = {}
_ignored: Counter[str] = Counter()


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
    why = "there is no home folder"
    try:
        from platformdirs import user_cache_path

        found = user_cache_path("triton_gemm", appauthor=False) / "tables"
        if found.is_absolute():  # older ones give a folder named ~ without a home
            return found
    except ModuleNotFoundError:
        why = "platformdirs is not installed"
    except RuntimeError:
        pass
    files.say_once(f"{why}: a user's tables are looked for in TRITON_GEMM_CACHE_DIR only")
    return None


def folders() -> Iterator[tuple[Source, Path]]:
    users = folder()
    if users is not None:
        yield "user's table", users
    yield "shipped table", SHIPPED


# --- Reading, once ---


def tables_in(where: Path, device: DeviceInfo, triton: str = files.TRITON) -> dict[Kind, Table]:
    """The tables of a folder for a device and a minor version of Triton, by kind. Where it has none, all that costs is
    a look at the folder, once: NVML, which knows the power limit, is not asked."""
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
    empty = [Table(GpuKey.of(device), triton, bits) for bits in KINDS] if names else []
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


# --- Asking ---


def lookup(
    problem: GemmProblem,
    device: DeviceInfo,
    bits: Bits = "same",
    only: BitClass | None = None,
    triton: str = files.TRITON,
) -> Selection | None:
    """What a table says is fastest for `problem` on `device`, a user's before a shipped one, or None.

    bits: "same" asks the tables of that name alone, "any" those of the fastest, whatever their bits, first. only: says
    which class of bits (`bit_classes`) entries must have, and is called only if there is one. Entries of another class,
    and those that the device cannot run, are left out, and counted in `ignored()`. triton: whose tables are asked.
    """
    check("lookup", device, bits, problem)
    arguments.callback("lookup", "only", only)
    for source, entry in _held(problem, device, bits, triton):
        why = left_out(problem, device, entry, only)
        if why is None:
            return entry.selection(problem, source)
        _ignored[f"{source}: {why}"] += 1
    return None


def left_out(problem: GemmProblem, device: DeviceInfo, entry: Entry, only: BitClass | None) -> str | None:
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
    check("torch_is_faster", device, "any", problem)
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
    """The entries that answer for a problem, legal or not, in the order in which they are read. A table without one
    may have an entry for more rows of the problem's weight."""
    for source, where in folders():
        for table in _tables_for(where, device, bits, triton):
            entry = table.entries.get(problem)
            if entry is None and table.by_weight and (weight := weight_of(problem)) in table.by_weight:
                entry = serving(problem, device, table.entries, table.by_weight[weight])
            if entry is not None:
                yield source, entry


def _tables_for(where: Path, device: DeviceInfo, bits: Bits, triton: str = files.TRITON) -> list[Table]:
    """A folder's tables in the order in which they are read. What was learned has the bits of the model's choice of
    then, which "any" does not hold to."""
    tables = tables_in(where, device, triton)
    kinds: tuple[Kind, ...] = ("any", "same") if bits == "any" else (LEARNED, "same")
    return [tables[kind] for kind in kinds if kind in tables]


def entry(problem: GemmProblem, device: DeviceInfo, bits: Kind = "same", triton: str = files.TRITON) -> Entry | None:
    """What the user's table of that kind holds for `problem` on `device`, legal there or not, or None."""
    where = folder()
    table = None if where is None else tables_in(where, device, triton).get(bits)
    return None if table is None else table.entries.get(problem)


def known(problem: GemmProblem, device: DeviceInfo) -> list[tuple[Source, Entry]]:
    """All that tables of any bits hold for `problem` on `device`, legal there or not, and whose they are."""
    every = ((source, table) for source, where in folders() for table in tables_in(where, device).values())
    return [(source, table.entries[problem]) for source, table in every if problem in table.entries]


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


def check(function: str, device: DeviceInfo, bits: Bits, *problems: GemmProblem) -> None:
    """Whether these are what they are said to be."""
    for problem in problems:
        arguments.instance(function, "problem", problem, GemmProblem)
    arguments.instance(function, "device", device, DeviceInfo)
    arguments.one_of(function, "bits", bits, BITS)


def contents(device: DeviceInfo, bits: Bits = "same", triton: str = files.TRITON, learned: bool = False) -> str:
    """A hash of all that a product may be given from a table on `device`, batch-invariant or not: equal where answers
    are, whatever is always left out. triton: as in `lookup`; learned: of what was learned in service, or of all else.
    """
    found = hashlib.sha256()
    for source, where in folders():
        for table in (x for x in _tables_for(where, device, bits, triton) if (x.bits == LEARNED) == learned):
            chosen = sorted(
                text_of(
                    [plain(problem), plain(entry.algorithm), *[entry.least_rows] * bool(entry.least_rows)]
                    + ["torch"] * (entry.torch == torchs_versions())
                )
                for problem, entry in table.entries.items()
                if _answers(problem, device, entry, bits)
            )
            if chosen:
                found.update(text_of([source, table.bits, chosen]).encode())
    return found.hexdigest()


def _answers(problem: GemmProblem, device: DeviceInfo, entry: Entry, bits: Bits) -> bool:
    """Whether there may be a product that is given the entry where tables of these bits are asked: one of fewer rows,
    too, in whose class of bits and tiles the entry may run where it cannot for its own."""
    if entry.least_rows or serves(problem, device, entry, bits):
        return True
    with suppress(RuntimeError):  # there is no class
        return left_out(problem, device, entry, batch_invariance.class_of) is None
    return False
