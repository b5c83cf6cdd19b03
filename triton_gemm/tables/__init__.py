"""Tables: the fastest selections that were measured, for each GPU key, minor version of Triton and kind of bits.

A user's tables are in the folder `folder()`, shipped ones beside this file. A process reads them once, when it first
plans a product, and again after it has changed one. docs/tables.md is about their use, `files` about what is on disk,
`queries` about what a process reads, `changes` about what it writes, `checks` about what is reported to a user.
"""

from __future__ import annotations

from ..hardware.gpu_key import GpuKey
from . import changes, checks, files, queries, records
from .changes import clear, device_of, export_to, import_from, merge, store
from .checks import Report, listed, notes, set_aside, verify
from .queries import contents, entry, folder, ignored, known, left_out, lookup, reload, serves, torch_is_faster
from .records import torchs_versions, versions

__all__ = [
    "GpuKey",
    "Report",
    "changes",
    "checks",
    "clear",
    "contents",
    "device_of",
    "entry",
    "export_to",
    "files",
    "folder",
    "ignored",
    "import_from",
    "known",
    "left_out",
    "listed",
    "lookup",
    "merge",
    "notes",
    "queries",
    "records",
    "reload",
    "serves",
    "set_aside",
    "store",
    "torch_is_faster",
    "torchs_versions",
    "verify",
    "versions",
]
