"""What doctor says of folders and files: Triton's cache, the folder of tables, kits, tables, calibrated models, and
what was quarantined."""

from __future__ import annotations

import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Literal

import triton

from .. import tables
from ..calibration import kept
from ..compat import INTERPRETED, cache_folder, compiles_anew
from ..hardware.device import DeviceInfo, architecture
from ..runtime import kit, kit_build, kits, native_file

Status = Literal["good", "set", "note", "broken"]
Found = Iterator[tuple[Status, str] | tuple[Status, str, str]]

# As `df` calls file systems that lie on a network.
NETWORK = re.compile(r"nfs\d?|cifs|smb\d?|lustre|gpfs|beegfs|ceph|glusterfs|afs|fuse\.(sshfs|s3fs|gcsfuse|goofys)|9p")


def caches() -> Found:
    """Where compiled kernels and tables are kept, and whether files can be written there."""
    yield from _folder("Triton's cache", cache_folder(), "TRITON_CACHE_DIR", "broken")
    where = tables.folder()
    if where is None:
        how = "set TRITON_GEMM_CACHE_DIR, or HOME, or install platformdirs"
        yield "note", "there is no folder for tables: nothing that is tuned is kept", how
    else:
        yield from _folder("the folder of tables", where, "TRITON_GEMM_CACHE_DIR", "note")


def machine_code(devices: tuple[DeviceInfo, ...]) -> Found:
    """Kits, which need no compiler, and whether these GPUs use them; without a GPU those that kits are for."""
    if INTERPRETED:
        yield "good", "no kit is used: Triton's interpreter runs kernels"
        return
    if (given := native_file.setting(kits.VARIABLE)) == "0" or compiles_anew():
        why = f"{kits.VARIABLE} is 0" if given == "0" else "Triton's settings say so"
        yield "good", f"all kernels are compiled: {why}"
        return
    files = [file for file in map(kits.SHIPPED.joinpath, kits.NAMES.values()) if file.exists()]
    own = None if given == "1" else Path(given)
    package: list[kit.Kit] = []
    for file in files if own is None else [*files, own]:
        what, do = "the package's kit", "install the package again"
        if file == own:
            anew = " anew once it is deleted" * file.exists()
            what, do = f"the kit {file}", f"`triton-gemm warmup <GEMMs> --kit {file}` writes it{anew}"
            do += f"; or unset {kits.VARIABLE}"
        try:
            with kit_build.opened(file) if file == own else nullcontext(kit.read(file)) as found:
                found.check()
                stale = sum(not found.is_current(key) for key in found.kernels)
        except (OSError, ValueError, kit.DamagedError) as error:
            do = f"or unset {kits.VARIABLE}" if file == own and says_what_to_do(error) else do
            yield ("broken" if file == own else "note"), f"{what} is not used: {error}", do
            continue
        used, where = _used(found, devices, package)
        package += [found] * (file != own)
        by = " and ".join(f"{name} {version}" for name, version in found.made_by.items())
        count = f"{len(found.kernels)} kernel{'s' * (len(found.kernels) != 1)}"
        text = f"{what} has {count} for {architecture(found.capability)}, made by {by}; {where}"
        if stale:
            yield "note", f"{text}, and {stale} are compiled anyway: the sources are not those of the kit", do
        else:
            yield "good" if used else "note", text
    if own is None and not files:
        yield "good", "there is no kit, and all kernels are compiled"


def says_what_to_do(error: Exception) -> bool:
    """Whether it is `native_file`'s, that others may write to a file or its folder."""
    return isinstance(error, PermissionError) and error.errno is None


def _used(of: kit.Kit, devices: tuple[DeviceInfo, ...], package: list[kit.Kit]) -> tuple[bool, str]:
    """Whether a kit is used beside those of the package, and where."""
    if why := kits.left_out(of, package):
        return False, f"it is not used: {why}"
    names = [device.name for device in devices if device.capability == of.capability]
    if devices and not names:
        return False, "it is not used: no GPU here has that compute capability"
    where = " and ".join(dict.fromkeys(names)) or "such GPUs"
    covered = ", for the GEMMs that it covers" * (kits.triton_of(of) != tables.files.TRITON)
    return True, f"it is used on {where} with Triton {tables.files.TRITON}{covered}"


def _folder(what: str, path: Path, variable: str, if_not_writable: Status) -> Found:
    """One finding on a folder: it cannot be written to, is a relative path, is on a network's file system, or is good.

    It need not exist: its nearest parent that does is examined, by `df` and a temporary file. variable: the environment
    variable that moves the folder. if_not_writable: the status then, but "note" for a Triton cache with kernels."""
    there = next(place for place in (path, *path.parents) if place.exists())
    kind = _filesystem(there)
    text = f"{what} is {path}{f', on {kind}' if kind else ''}{'' if there == path else ', not there yet'}"
    if not _writable(there):
        if what == "Triton's cache" and any(path.glob("*/*.cubin")):
            yield "note", f"{text}; it cannot be written to: what is not in it cannot be compiled"
        else:
            yield if_not_writable, f"{text}; it cannot be written to", f"set {variable} to a folder of yours"
    elif not path.is_absolute():
        yield "note", f"{text}, and follows the working directory", f"set {variable} to an absolute path"
    elif NETWORK.fullmatch(kind):
        yield "note", f"{text}: a network's file system is slow, and its locks may not hold", f"set {variable}"
    else:
        yield "good", text


def _writable(folder: Path) -> bool:
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def _filesystem(path: Path) -> str:
    """The type of a path's file system, as Linux calls it; empty where `df` does not say."""
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(["df", "--output=fstype", path], capture_output=True, text=True, timeout=10)
        return "" if done.returncode else done.stdout.split()[-1]
    return ""


def stored(devices: tuple[DeviceInfo, ...]) -> Found:
    """Tables and models that these GPUs use, or do not and why. Without a GPU the faults of files, and their number."""
    listed = tables.listed()
    shipped = {contents.table.triton for source, _, contents in listed if source == "shipped table" and contents.table}
    capabilities = {device.capability for device in devices} or {*kits.NAMES}
    used = {tables.files.TRITON, *(triton for capability in capabilities for triton in kits.others(capability))}
    if shipped and not used & shipped:
        text = f"shipped tables are for Triton {', '.join(sorted(shipped))}, and this is {triton.__version__}"
        yield "note", f"{text}: they are not used", "tune your shapes, with `triton-gemm tune`"
    away = "move the file away, or delete it"
    for path, contents in [] if devices else [x[1:] for x in listed]:
        if contents.wrong:
            yield "note", f"{path}: {contents.wrong[1]}", _advice(path, away)
    reports = [x for report in tables.verify(devices[0]) for x in _of_table(report, devices[0])] if devices else []
    yield from reports
    for path, held in kept.listed():
        why = held.elsewhere or (held.wrong and held.wrong[1])
        if why:
            again = "calibrate again, with `triton-gemm calibrate`"
            yield "note", f"the model in {path} is not used: {why}", _advice(path, again)
    for path in (*([] if devices else tables.set_aside()), *kept.set_aside()):  # with a GPU, tables have their report
        yield "note", f"{path} is quarantined: it could not be used", _advice(path, away)
    if not reports:
        count = 0 if devices else sum(contents.table is not None for _, _, contents in listed)
        yield "good", f"{count} table{'s' * (count != 1)}" + (": the cost model chooses, or tune" if not count else "")


def _of_table(report: tables.Report, device: DeviceInfo) -> Found:
    """Findings of a table on a machine with a GPU: nothing of a shipped one of another GPU or Triton."""
    of, faults = report.table, [fault for fault in report.faults if fault != report.elsewhere]
    has = f"{report.path.name}: {report.entries} {'entry' if report.entries == 1 else 'entries'}, {report.source}"
    if (
        report.elsewhere
        and of
        and of.gpu_key == tables.GpuKey.of(device)
        and of.triton in kits.others(device.capability)
    ):
        yield "good", f"{has}; {report.elsewhere}: an entry is used where a kit has its kernels"
    elif report.elsewhere:
        if report.source == "user's table":
            yield "note", f"{report.path.name} is not used here: {report.elsewhere}"
    elif faults:
        text = f"{report.path.name}: {faults[0][:200]}{f', and {len(faults) - 1} more' if faults[1:] else ''}"
        yield "note", text, _advice(report.path, "see `triton-gemm cache verify`; tune again, or move the file away")
    else:
        yield "good", has


def _advice(path: Path, advice: str) -> str:
    """`advice`, unless this user may not read the file."""
    may_read = os.access(path, os.R_OK)
    return advice if may_read else "change its permissions or its folder's, or set TRITON_GEMM_CACHE_DIR"
