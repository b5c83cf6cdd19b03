"""Files of tables: one for each GPU key, minor version of Triton and class of bits.

    sm_90-132sms-6016bit-700W-triton3.7-same.v1.json

A file is written whole under another name and then takes the place of the old one, by who holds the folder's lock; so a
reader needs no lock, and a process that is killed leaves the old file. What no record can be read from is set aside: it
stays in the folder under a name that says why (`...json.future-format.1`), and the entries that can be read go on.
Files that came with the package are left where they are.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import re
import secrets
import shutil
import stat
import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from pathlib import Path
from typing import Any, Literal, TypeVar, get_args

import triton

from ..hardware.gpu_key import GpuKey
from ..problem import GemmProblem
from .records import Entry, WrongError, plain, read, read_entry, text_of
from .weights import by_weight

log = logging.getLogger("triton_gemm.tables")

FORMAT = 1
LARGEST_FILE = 64 * 2**20  # bytes
WAIT = 30.0  # seconds that a writer waits for others
TRITON: str = ".".join(triton.__version__.split(".")[:2])

# Which entries a table holds: of the class of bits that the model's choice gives, or the fastest of all.
Bits = Literal["same", "any"]
BITS: tuple[Bits, ...] = get_args(Bits)
# Or those that were learned in service, which have the bits of what they were timed against.
Kind = Literal["same", "any", "learned"]
KINDS: tuple[Kind, ...] = get_args(Kind)
LEARNED: Kind = "learned"

_Found = TypeVar("_Found")


@dataclass(frozen=True)
class Table:
    """Entries by problem, of one GPU key, minor version of Triton ("3.7") and class of bits."""

    gpu_key: GpuKey
    triton: str = TRITON
    bits: Kind = "same"
    entries: dict[GemmProblem, Entry] = field(default_factory=dict)

    @property
    def name(self) -> str:
        """The file's name. Made of numbers and of one of KINDS, whatever text a file holds."""
        return f"{self.gpu_key}-triton{self.triton}-{self.bits}.v{FORMAT}.json"

    @cached_property
    def by_weight(self) -> dict[GemmProblem, list[GemmProblem]]:
        return by_weight(self.entries)

    @property
    def kind(self) -> tuple[GpuKey, str, Kind]:
        """What tables must share to be merged."""
        return self.gpu_key, self.triton, self.bits

    def text(self) -> str:
        """The file: a line for each entry, always in the same order."""
        lines = [
            text_of({"problem": plain(problem)} | plain(entry))
            for problem, entry in sorted(self.entries.items(), key=lambda item: _order(item[0]))
        ]
        head = {"format": FORMAT, "silicon": plain(self.gpu_key), "triton": self.triton, "bits": self.bits}
        parts = [f' "{name}": {text_of(value)},\n' for name, value in head.items()]
        return "{\n" + "".join(parts) + ' "entries": [' + ",".join(f"\n  {line}" for line in lines) + "\n ]\n}\n"


def _order(problem: GemmProblem) -> tuple[object, ...]:
    return str(problem.dtype), problem.N, problem.K, problem.M, problem.batch, text_of(plain(problem))


def merge(tables: Iterable[Table], used: Callable[[GemmProblem, Entry], bool] | None = None) -> Table:
    """One table of all entries; of those for one problem one that is `used`, where that is asked, and of these the
    least by `Entry.order`, so the same whatever the order of the tables. ValueError for none, and where they are of
    several kinds."""
    given = list(tables)
    if len({table.kind for table in given}) != 1:
        raise ValueError(f"tables must be of one kind to be merged, not {sorted({table.name for table in given})}")
    merged: dict[GemmProblem, Entry] = {}
    for table in given:
        for problem, entry in table.entries.items():
            before = merged.setdefault(problem, entry)
            if before is entry:
                continue
            if used is None or before.algorithm == entry.algorithm:
                first = entry.order() < before.order()
            else:
                first = (not used(problem, entry), entry.order()) < (not used(problem, before), before.order())
            if first:
                merged[problem] = entry
    # Of names that people gave one GPU key the first by the alphabet.
    gpu_key = min((table.gpu_key for table in given), key=lambda gpu_key: gpu_key.name)
    return Table(gpu_key, given[0].triton, given[0].bits, merged)


@dataclass(frozen=True)
class Contents:
    """What was read from a file: its table, if it has one, and why not all of it, as a word for the name that it is set
    aside under, and a sentence."""

    table: Table | None = None
    wrong: tuple[str, str] | None = None


def parse(text: bytes) -> Contents:
    """What a file says. Nothing is raised, whatever it holds."""
    found, wrong_file = document(text, FORMAT, "no-table")
    if wrong_file is not None and wrong_file[0] == "not-json":
        # What is cut off has whole lines, of an entry each; the list may have its end
        whole = text[: text.rfind(b"\n")].removesuffix(b"\n ]").rstrip(b",")
        found, _ = document(whole + b"]}", FORMAT, "no-table")
    if wrong_file is not None and not found.get("entries"):
        return Contents(wrong=wrong_file)
    try:
        table = Table(read(GpuKey, found.get("silicon")), found.get("triton", ""), found.get("bits", "same"))
        if not isinstance(table.triton, str) or not re.fullmatch(r"\d{1,3}\.\d{1,3}", table.triton, re.ASCII):
            raise WrongError("it names no version of Triton")
        if table.bits not in KINDS or not isinstance(found.get("entries"), list):
            raise WrongError(f"it has no list of entries, of bits {' or '.join(KINDS)}")
        gpu_key = table.gpu_key
        if min(*gpu_key.capability, gpu_key.sms - 1, gpu_key.bus_width, gpu_key.power_limit) < 0:
            raise WrongError("its GPU key is not valid")
    except (WrongError, TypeError) as error:
        return Contents(wrong=wrong_file or ("no-table", str(error)[:200]))
    wrong: list[str] = []
    parts = []
    for line in found["entries"]:
        try:
            rest = dict(line) if isinstance(line, dict) else {}
            problem: GemmProblem = read(GemmProblem, rest.pop("problem", None))
            entry = read_entry(rest)
            if entry.torch and table.bits != "any":
                raise WrongError("torch's product has other bits than the model's choice")
            parts.append(Table(*table.kind, {problem: entry}))
        except WrongError as error:
            wrong.append(str(error))
    if wrong and wrong_file is None:
        wrong_file = "wrong-entries", f"{len(wrong)} entries are invalid, the first because {wrong[0][:200]}"
    return Contents(merge([table, *parts]), wrong_file)


def document(text: bytes, number: int, otherwise: str) -> tuple[dict[str, Any], tuple[str, str] | None]:
    """A JSON document of the format `number`, and why it is none, as in Contents.wrong; `otherwise` is the word for
    what is JSON and no such document."""
    try:
        found = json.loads(text.decode(), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        return {}, ("not-json", f"it is not JSON: {str(error)[:100]}")
    if not isinstance(found, dict) or type(found.get("format")) is not int:
        return {}, (otherwise, "it has no number of a format")
    if found["format"] != number:
        which = "future-format" if found["format"] > number else otherwise
        return {}, (which, f"its format is {str(found['format'])[:20]}, this version reads {number}")
    return found, None


def _no_number(name: str) -> None:
    raise ValueError(f"{name} is not a number of JSON")


def load(path: Path) -> Contents:
    """A file's `contents`, parsed; Contents() where there is no file. OSError where it may not be read."""
    try:
        text = contents(path)
    except ValueError as error:
        return Contents(wrong=("no-table", f"{error}"))
    return Contents() if text is None else parse(text)


def contents_of(path: Path) -> Contents:
    """`load`, for who will not write: a file that may not be read is wrong, too."""
    try:
        return load(path)
    except OSError as error:
        return Contents(wrong=("unreadable", f"it cannot be read: {error.strerror or error}"))


def contents(path: Path) -> bytes | None:
    """Of a regular file that is not too large; None where there is none. ValueError for what is no such file, OSError
    where it may not be read."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | os.O_NONBLOCK)) as file:
            about = os.fstat(file.fileno())
            if not stat.S_ISREG(about.st_mode) or about.st_size > LARGEST_FILE:
                raise ValueError(f"it is not a regular file of at most {LARGEST_FILE} bytes")
            return file.read()
    except FileNotFoundError:
        return None


def load_as(path: Path, table: Table) -> Contents:
    """`load`, where the file must hold a table of the same kind as `table`, as its name says."""
    found = load(path)
    if found.table is not None and found.table.kind != table.kind:
        return Contents(wrong=("other-kind", f"it is of {found.table.name[:100]}"))
    return found


def save(folder: Path, table: Table) -> None:
    """Writes the table's file, as `write`; the folder must be `locked`."""
    write(folder / table.name, table.text())


def write(path: Path, data: str | bytes, mark: str = "tmp") -> None:
    """Writes a file whole, first under another name, which ends with `mark`: nobody else may do so with that name, as
    in a folder that is `locked`. It keeps its permissions. OSError, which names `path`, where that fails: the old file
    is there still."""
    written = path.with_name(f"{path.name}.{mark}")
    try:
        with open(written, "wb") as file:
            with suppress(OSError):  # there is no old file, or its file system has no permissions
                shutil.copymode(path, written)
            file.write(data.encode() if isinstance(data, str) else data)
            file.flush()
            os.fsync(file.fileno())
        os.replace(written, path)
    except OSError as error:
        written.unlink(missing_ok=True)
        raise OSError(error.errno, error.strerror, str(path)) from None


def write_for_user(path: Path, text: str) -> None:
    """Writes a file that a user has named, whole or not at all, and behind a link the file that is meant. A pipe, a
    device and what this process prints to, as /dev/stdout, get the text after what they got before."""
    try:
        about = path.stat()
        appended = not stat.S_ISREG(about.st_mode) or _is_output(about)
    except FileNotFoundError:
        appended = False
    if appended:
        with open(path, "a") as file:
            file.write(text)
    else:  # another thread has this process's number, and another container may have it
        write(path.resolve(), text, f"{secrets.token_hex(8)}.tmp")


def _is_output(file: os.stat_result) -> bool:
    """Whether this process prints to it."""
    for descriptor in (1, 2):
        with suppress(OSError):  # it is closed
            if os.path.samestat(file, os.fstat(descriptor)):
                return True
    return False


@contextmanager
def locked(folder: Path, wait: bool = True) -> Iterator[None]:
    """Alone among all threads and processes that write to this folder, which is made. OSError where the folder cannot
    be written to, TimeoutError (an OSError) where others do not finish, or with wait=False have not."""
    from filelock import FileLock, SoftFileLock  # imported by the first who writes

    folder.mkdir(parents=True, exist_ok=True)
    # Another name, for `.lock` stays when flock is done, and would be taken for a soft lock that is held.
    lock = FileLock(folder / ".lock") if has_flock(folder) else SoftFileLock(folder / ".soft-lock")
    lock.acquire(timeout=WAIT if wait else 0, poll_interval=0.01)
    try:
        yield
    finally:
        lock.release()


def delete(folder: Path, names: list[str]) -> None:
    """Deletes files of a folder. OSError as `locked`."""
    with locked(folder) if names else nullcontext():
        for name in names:
            (folder / name).unlink(missing_ok=True)


@cache
def has_flock(folder: Path) -> bool:
    """Whether the folder's file system has locks. Versions of filelock differ in what they do where it has none."""
    with tempfile.TemporaryFile(dir=folder) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX)
        except OSError:
            return False
    return True


def change(folder: Path, empty: Table, what: Callable[[Table], Table], wait: bool = True) -> None:
    """Replaces the folder's file of the kind of `empty` by what `what` makes of the table that is there now. wait: for
    others who write. OSError as `locked`, `load` and `save`."""
    with locked(folder, wait):
        path = folder / empty.name
        found = load_as(path, empty)
        if found.wrong:
            put_aside(path, *found.wrong)
        table = what(found.table or empty)
        if table.entries:
            save(folder, table)


def current(folder: Path, empty: Table, *, repair: bool = True) -> Table:
    """The folder's table of the kind of `empty`. repair: sets a file aside that cannot be read whole, where that can be
    at once: who reads waits for no writer. OSError where it may not be read."""
    path = folder / empty.name
    found = load_as(path, empty)
    if found.wrong is None:
        return found.table or empty
    if not repair:
        say_once(f"{path}: {found.wrong[1]}")
        return found.table or empty
    try:
        change(folder, empty, lambda table: table, wait=False)  # read again: a writer may have been here
        return load_as(path, empty).table or empty
    except OSError:
        say_once(f"{path}: {found.wrong[1]}; it cannot be quarantined")
        return found.table or empty


def set_aside(folder: Path) -> list[Path]:
    """The files that `put_aside` has set aside in a folder, and none that a killed writer has left."""
    return sorted(folder.glob(f"*.v{FORMAT}.json.*.[0-9]*"))


def put_aside(path: Path, word: str, why: str) -> None:
    """Sets a file aside, under the first number that is free."""
    number = 1
    while (aside := path.with_name(f"{path.name}.{word}.{number}")).exists():
        number += 1
    os.rename(path, aside)
    log.warning("%s: %s; it is quarantined as %s", path, why, aside.name)


@lru_cache(maxsize=1000)
def say_once(message: str) -> None:
    log.warning("%s", message)


def names(folder: Path, beginning: str) -> list[str]:
    """Of the files of tables in a folder that begin so; none where there is no folder. OSError where it may not be
    read."""
    try:
        found: list[Any] = os.listdir(folder)
    except (FileNotFoundError, NotADirectoryError):
        return []
    return sorted(name for name in found if name.startswith(beginning) and name.endswith(f".v{FORMAT}.json"))


def names_read(folder: Path, beginning: str) -> list[str]:
    """`names`; none where the folder may not be read, which is logged once."""
    try:
        return names(folder, beginning)
    except OSError as error:
        say_once(f"{folder} cannot be read: {error.strerror or error}")
        return []


def contents_in(folder: Path, read_file: Callable[[Path], _Found]) -> list[tuple[Path, _Found]]:
    """What `read_file` gives for each file of tables in a folder; in the folder itself, where that may not be read."""
    try:
        paths = [folder / name for name in names(folder, "")]
    except OSError:
        paths = [folder]
    return [(path, read_file(path)) for path in paths]
