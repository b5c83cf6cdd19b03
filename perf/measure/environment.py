"""What a measurement was made on: GPU, driver, clocks, versions, commit, and a hash of the sources that decide it.

A page names commit and hash (`origin`), and says where the sources have changed since. That is found out when the page
is written, and the test that pages are up to date looks past it (`pages.stale`): an edit of a kernel does not make
every page stale, and the next `python -m perf.pages` tells readers that the figures are older than the kernels.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
from collections.abc import Callable, Iterable, Mapping
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "perf" / "results"  # a folder for each GPU
COMMIT = "TRITON_GEMM_COMMIT"  # names the commit of a tree that was copied


def _modules(package: str, names: str) -> tuple[str, ...]:
    return tuple(f"{package}/{name}.py" for name in names.split())


_TIMED = _modules("perf/measure", "timer operands numerics providers roofline")
_BENCH = ("triton_gemm", *_TIMED, *_modules("perf/bench", "peers sweep"))
# The files and folders that decide the figures of a record, by what it holds.
SOURCES: dict[str, tuple[str, ...]] = {
    "ladder": (
        *("triton_gemm/ladder", "triton_gemm/compat", "reference_cuda", *_TIMED),
        *_modules("triton_gemm", "aot arithmetic config device driver problem timing"),
        *_modules("perf/ladder", "tasks rungs_and_twins published prediction static interpret counters"),
    ),
    "bench": _BENCH,
    "accuracy": ("triton_gemm", "perf/accuracy", "perf/measure/numerics.py"),
    "battery": ("triton_gemm", "reference_cuda", "tests", "perf/accuracy", "perf/measure/numerics.py"),
    "calibration": (*_BENCH, "perf/calibrate"),
    "tuning": ("triton_gemm", "perf/tuning/runs.py"),
    "gpt": ("triton_gemm", "examples", "perf/measure/timer.py"),
}
CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
# What must be equal for two measurements to stand in one record.
IDENTITY = ("gpu", "driver", "power_limit_w", "torch", "triton", "cuda", "sources")


def describe(measured: str) -> dict[str, Any]:
    """The environment of this process, with or without a GPU; `measured` is a key of SOURCES."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "sources": source_hash(measured),
    }
    if not torch.cuda.is_available():
        return {**found, "gpu": None}
    device = torch.cuda.get_device_properties(torch.cuda.current_device())
    driver, limit = query("driver_version", "power.limit")
    return {
        **found,
        "gpu": device.name,
        "capability": [device.major, device.minor],
        "num_sms": device.multi_processor_count,
        "l2_bytes": device.L2_cache_size,
        "memory_bytes": device.total_memory,
        "driver": driver,
        "power_limit_w": limit,
    }


def clocks() -> dict[str, Any]:
    """Clocks (MHz), temperature, power and throttle reasons now; values are None where nvidia-smi is missing."""
    names = [field.replace(".", "_") for field in CLOCK_FIELDS]
    return dict(zip(names, query(*CLOCK_FIELDS), strict=True))


def query(*fields: str) -> list[Any]:
    """nvidia-smi's values of `fields` for the current GPU, numbers as numbers, None for what it does not say."""
    uuid = getattr(torch.cuda.get_device_properties(torch.cuda.current_device()), "uuid", None)
    command = ["nvidia-smi", f"--query-gpu={','.join(fields)}", "--format=csv,noheader,nounits"]
    if uuid is not None:
        command.append(f"--id=GPU-{uuid}")
    try:
        text = subprocess.run(command, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return [None] * len(fields)
    values = [value.strip() for value in text.partition("\n")[0].split(",")]
    return [_number(value) for value in values] if len(values) == len(fields) else [None] * len(fields)


def _number(text: str) -> Any:
    if re.fullmatch(r"\d+(\.\d+)?", text) and text.count(".") < 2:
        return float(text) if "." in text else int(text)
    return None if text.startswith("[") else text


def commit() -> str | None:
    """What the environment variable TRITON_GEMM_COMMIT says, for a copy of the tree on the machine with the GPU, which
    may have no repository, or that of another commit. Else the git commit of this checkout, with `+` where files other
    than results differ from it; None where it is no checkout.
    """
    given = os.environ.get(COMMIT, "").strip()
    if given:
        return given

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        if Path(git("rev-parse", "--show-toplevel")).resolve() == ROOT:  # and not a repository around a copy
            changed = git("status", "--porcelain", "--", ".", ":(exclude)perf/results")
            return git("rev-parse", "--short", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        pass
    return None


@cache
def source_hash(measured: str) -> str:
    """Of what the files under SOURCES[measured] hold, whatever their names: 12 hexadecimal digits.

    A record is not continued where it differs, and a page says so. A file that was only moved has not changed.
    """
    contents = []
    for name in SOURCES[measured]:
        path = ROOT / name
        files = [p for p in path.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp", ".json")]
        contents += [hashlib.sha256(file.read_bytes()).digest() for file in files or [path]]
    return hashlib.sha256(b"".join(sorted(contents))).hexdigest()[:12]


CHANGED = " (changed since)"


def named(made: Mapping[str, Any]) -> str:
    """GPU and versions of an environment that `describe` gave, in words."""
    return f"{made['gpu']}, torch {made['torch']}, Triton {made['triton']}, CUDA {made['cuda']}"


def origin(made: Iterable[Mapping[str, Any]], measured: str) -> str:
    """Which commits and sources records of these environments were measured at, each pair once, in a sentence.

    CHANGED stands after the hash of sources that are not today's.
    """
    pairs = dict.fromkeys((found.get("commit"), found.get("sources")) for found in made)
    words = []
    for commit, sources in pairs:
        at = f"commit `{commit}`" if commit else "commit not recorded"
        old = "" if sources == source_hash(measured) else CHANGED
        words.append(f"{at}, sources `{sources}`{old}" if sources else f"{at}, sources not recorded")
    found = "; ".join(words)
    return f"{found[:1].upper()}{found[1:]}."


def short(gpu: str) -> str:
    """A GPU's name without its maker's, for a column's head."""
    return gpu.removeprefix("NVIDIA ")


def under_origins(records: Iterable[Mapping[str, Any]], measured: str, text: Callable[[Mapping[str, Any]], str]) -> str:
    """The text of each record, below what it was measured on and at."""
    made = ((record, record["environment"]) for record in records)
    return "\n\n".join(f"{named(of)}. {origin([of], measured)}\n\n{text(record)}" for record, of in made)


def order(made: Mapping[str, Any]) -> tuple[str, list[int]]:
    """By GPU, then by the number of Triton's version."""
    return made["gpu"] or "", [int(part) if part.isdigit() else -1 for part in str(made["triton"]).split(".")]


def newest(records: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Of the records of each GPU, which have their `environment`, those with its newest Triton, in their order."""
    records = list(records)
    latest: dict[str, list[int]] = {}
    for gpu, version in (order(record["environment"]) for record in records):
        latest[gpu] = max(latest.get(gpu, []), version)
    return [record for record in records if order(record["environment"]) in latest.items()]


def slug(gpu: str | None) -> str:
    """A folder's name: `NVIDIA H100 80GB HBM3` becomes `h100-80gb-hbm3`."""
    words = re.findall(r"[a-z0-9]+", (gpu or "no GPU").lower())
    return "-".join(word for word in words if word != "nvidia")
