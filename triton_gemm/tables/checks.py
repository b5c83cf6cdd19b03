"""Which files of tables there are, and whether they can be used."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from ..hardware.device import DeviceInfo
from ..hardware.gpu_key import GpuKey
from ..hardware.gpus import given_device
from . import files, queries
from .files import Table
from .queries import Source
from .records import illegal, plain, text_of

JOURNAL = ".tuning.jsonl"  # ends the names of files in which a tuner notes what failed


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
    return [
        (source, *one) for source, where in queries.folders() for one in files.contents_in(where, files.contents_of)
    ]


def set_aside() -> list[Path]:
    """The files that could not be read whole, and that were set aside in the user's folder."""
    where = queries.folder()
    return files.set_aside(where) if where else []


def notes() -> list[Path]:
    """The files in which tuning noted what failed, and where the model's choice stayed."""
    where = queries.folder()
    return sorted(where.glob(f"*{JOURNAL}*")) if where else []


def verify(device: DeviceInfo | str | None = None) -> list[Report]:
    """Checks every table file, the user's and the shipped ones, and lists quarantined files. Nothing is changed.

    In a table of `device`'s GPU key and this version of Triton each entry must be one that its kernel can run there.
    The entries of other tables are not checked; of another Triton's, a kit may still use some. Whether an entry has the
    bits of the cost model's choice is not checked either: `triton-gemm cache verify` says how many are used.

    Args:
        device: The GPU, or its name, as "h200"; None: the current one, or without a GPU the interpreter.

    Returns:
        A `Report` of each file.

    Raises:
        ValueError, TypeError: device names no GPU, or is neither a name nor a DeviceInfo.
    """
    device = given_device("verify", device)
    reports = [Report(path, "user's table", 0, ("it is quarantined",)) for path in set_aside()]
    gpu_key = GpuKey.of(device)
    for source, path, found in listed():
        faults, elsewhere = [found.wrong[1]] if found.wrong else [], ""
        table = found.table
        if table is not None and (table.gpu_key, table.triton) != (gpu_key, files.TRITON):
            differ = [str(table.gpu_key)] * (table.gpu_key != gpu_key)
            differ += [f"Triton {table.triton}"] * (table.triton != files.TRITON)
            elsewhere = f"it is of {' and '.join(differ)}"
            faults.append(elsewhere)
        elif table is not None:
            whys = ((problem, illegal(problem, device, entry.algorithm)) for problem, entry in table.entries.items())
            faults += [f"{text_of(plain(problem))}: {why}" for problem, why in whys if why]
        reports.append(Report(path, source, len(table.entries) if table else 0, tuple(faults), elsewhere, table))
    return reports
