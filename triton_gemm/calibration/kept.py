"""Calibrated models in the user's folder: a file for each GPU key, next to the folder of tables.

    models/sm_90-132sms-6016bit-700W.v1.json

Files are read, written and set aside as those of tables are (`tables.files`). A model whose figures are not those of
this version's kernels is left as it is and not used.
"""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from .. import tables
from ..compat import free_in_children
from ..hardware.device import DeviceInfo
from ..hardware.device_model import DeviceModel, model_without_calibration
from ..hardware.gpu_key import GpuKey, without_power
from ..selection import generation
from ..tables import files
from ..tables.files import say_once
from ..tables.records import WrongError, now, plain, read, text_of, versions
from .figures import rounded

FORMAT = 1
APART = 1e6  # times that no GPU's figure is away from that of another

_lock = free_in_children(threading.RLock())  # one thread reads files; what it calls, and handlers of signals, may too
_loaded: dict[tuple[Path, DeviceInfo, str], DeviceModel | None] = {}


@dataclass(frozen=True)
class Kept:
    """What a file holds."""

    gpu_key: GpuKey  # the GPU's
    measured: str  # when, in ISO 8601
    by: str  # versions that measured it
    entry: dict[str, Any]  # the figures, as `DeviceModel(**entry)` takes them

    def text(self) -> str:
        """The file."""
        head = {"format": FORMAT, "silicon": plain(self.gpu_key), "measured": self.measured, "by": self.by}
        lines = "".join(f' "{name}": {text_of(value)},\n' for name, value in head.items())
        entry = json.dumps(self.entry, indent=1).replace("\n", "\n ")
        return f'{{\n{lines} "model": {entry}\n}}\n'


@dataclass(frozen=True)
class Contents:
    """What was read from a file."""

    kept: Kept | None = None  # if it can be used
    # Why it is no such file: a word for the name that it is set aside under, and a sentence.
    wrong: tuple[str, str] | None = None
    elsewhere: str = ""  # why it may be such a file, but cannot be used by this version of the package or by this user


def folder() -> Path | None:
    """Where calibrated models are; None where there is no folder for what the user keeps."""
    where = tables.folder()
    return None if where is None else where.with_name("models")


def name_of(gpu_key: GpuKey) -> str:
    return f"{gpu_key}.v{FORMAT}.json"


def load(path: Path) -> Contents:
    """What a file holds. Nothing is raised, whatever that is."""
    try:
        text = files.contents(path)
        return Contents() if text is None else parse(text)
    except ValueError as error:
        return Contents(wrong=("no-model", f"{error}"[:200]))
    except OSError as error:
        return Contents(elsewhere=f"it cannot be read: {error.strerror or error}")


def parse(text: bytes) -> Contents:
    """What a file says. Nothing is raised, whatever it holds."""
    found, wrong = files.document(text, FORMAT, "no-model")
    if wrong is not None:
        return Contents(wrong=wrong)
    try:
        gpu_key: GpuKey = read(GpuKey, found.get("silicon"))
        measured, by, entry = found.get("measured"), found.get("by"), found.get("model")
        if not isinstance(measured, str) or not isinstance(by, str) or not isinstance(entry, dict):
            raise WrongError("it lacks a model, or when and by what that was measured")
    except (WrongError, TypeError, RecursionError) as error:
        return Contents(wrong=("no-model", f"{error}"[:200]))
    why = _unlike(entry, expected(gpu_key), "model")
    if why is None and entry["num_sms"] != gpu_key.sms:
        why = f"its model is of {entry['num_sms']} multiprocessors"
    if why is not None:
        return Contents(elsewhere=f"{why}: calibrate again")
    return Contents(Kept(gpu_key, measured[:100], by[:200], entry))


def expected(gpu_key: GpuKey) -> dict[str, Any]:
    """The entry of this version's model for a GPU key, whose figures a calibrated one must have."""
    device = DeviceInfo(gpu_key.name, gpu_key.capability, gpu_key.sms, 0)
    return model_without_calibration(device).as_dict()


def _unlike(entry: Any, known: Any, where: str) -> str | None:
    """Why an entry does not have the figures that a known one has, or None."""
    if isinstance(known, Mapping):
        if not isinstance(entry, dict) or entry.keys() != known.keys():
            return f"{where} has other figures than this version's kernels"
        pairs = [(entry[name], known[name], f"{where}.{name}") for name in known]
    elif isinstance(known, list | tuple):
        if not isinstance(entry, list) or len(entry) != len(known):
            return f"{where} has other figures than this version's kernels"
        pairs = [(*both, f"{where}.{i}") for i, both in enumerate(zip(entry, known, strict=True))]
    elif isinstance(known, str):
        return None if isinstance(entry, str) else f"{where} is not text"
    else:
        number = isinstance(entry, int | float) and not isinstance(entry, bool)
        legal = number and (known / APART < entry < known * APART if known else 0 <= entry < APART)
        return None if legal else f"{where} is not a valid value"
    return next((why for one in pairs if (why := _unlike(*one)) is not None), None)


# --- Which is used ---


def find(device: DeviceInfo) -> DeviceModel | None:
    """The model that the user has had calibrated for a device's GPU key, or None. A file is read once; where there is
    none, all that costs is a look at the folder, once: NVML, which knows the power limit, is not asked."""
    where = folder()
    if where is None:
        return None
    loaded, key = _loaded, (where, device, device.uuid)
    if key not in loaded:
        with _lock:
            if key not in loaded:
                loaded[key] = _find(where, device)
    return loaded[key]


def _find(where: Path, device: DeviceInfo) -> DeviceModel | None:
    names = files.names_read(where, without_power(device.capability, device.num_sms, device.bus_width))
    gpu_key = GpuKey.of(device) if names else None
    if gpu_key is None or name_of(gpu_key) not in names:
        return None
    found = _current(where / name_of(gpu_key), gpu_key)
    if found.elsewhere:
        say_once(f"{where / name_of(gpu_key)} is not used: {found.elsewhere}")
    return None if found.kept is None else model_in(found.kept)


def model_in(kept: Kept) -> DeviceModel:
    """The model that a file holds."""
    return DeviceModel(**kept.entry | {"source": f"calibrated {kept.measured}, by {kept.by}"})


def _current(path: Path, gpu_key: GpuKey) -> Contents:
    """What a file holds, which is set aside where it is none, if that can be at once."""
    found = _load_as(path, gpu_key)
    if found.wrong is None:
        return found
    try:
        with files.locked(path.parent, wait=False):
            found = _load_as(path, gpu_key)  # read again: a writer may have been here
            if found.wrong is not None:
                files.put_aside(path, *found.wrong)
                return Contents()
    except OSError:
        say_once(f"{path}: {found.wrong[1] if found.wrong else ''}; it cannot be quarantined")
        return Contents()
    return found


def _load_as(path: Path, gpu_key: GpuKey) -> Contents:
    found = load(path)
    if found.kept is not None and found.kept.gpu_key != gpu_key:
        return Contents(wrong=("other-silicon", f"it is of {name_of(found.kept.gpu_key)}"))
    return found


def reload() -> None:
    """Has models read again when they are next asked for, and products planned again."""
    global _loaded
    _loaded = {}  # another: what is being read now goes into the one before
    generation.advance_models()


# --- Changing it ---


def store(model: DeviceModel, device: DeviceInfo) -> Path | None:
    """Keeps a model for a device's GPU key, in place of the one before, and uses it from the next plan on; the file.
    Where the folder cannot be written to, that is logged once and None."""
    where, gpu_key = folder(), GpuKey.of(device)
    kept = Kept(gpu_key, now(), versions(), rounded(replace(model, source="calibrated").as_dict()))
    try:
        if where is None:
            raise OSError("there is no folder: set TRITON_GEMM_CACHE_DIR")
        path = where / name_of(gpu_key)
        with files.locked(where):
            files.write(path, kept.text())
    except OSError as error:
        say_once(f"no model is kept in {where}: {error.strerror or error}")
        return None
    reload()
    return path


def listed() -> list[tuple[Path, Contents]]:
    """Every calibrated model of the user's, of any GPU key."""
    where = folder()
    return [] if where is None else files.contents_in(where, load)


def set_aside() -> list[Path]:
    """The files that were none, and that were set aside."""
    where = folder()
    return files.set_aside(where) if where else []


def clear() -> int:
    """Deletes them, but not what was set aside; how many there were. OSError where the folder cannot be read or written
    to."""
    where = folder()
    names = [] if where is None else files.names(where, "")
    if where is not None and names:
        files.delete(where, names)
        reload()
    return len(names)
