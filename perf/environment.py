"""What a measurement was made on: GPU, driver, clocks, versions, and the sources of what was measured."""

from __future__ import annotations

import hashlib
import platform
import re
import subprocess
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

import torch
import triton

ROOT = Path(__file__).resolve().parent.parent
MEASURED_SOURCES = (
    *("triton_gemm", "reference_cuda", "perf/timer.py", "perf/operands.py", "perf/numerics.py"),
    *("perf/providers.py", "perf/roofline.py", "perf/prediction.py", "perf/suite.py"),
    *("perf/peers.py", "perf/shapes.py", "perf/sweep.py"),
)
CLOCK_FIELDS = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw", "clocks_event_reasons.active")
# What must be equal for two measurements to stand in one record.
IDENTITY = ("gpu", "driver", "power_limit_w", "torch", "triton", "cuda", "sources")


def describe() -> dict[str, Any]:
    """The environment of this process, with or without a GPU."""
    found: dict[str, Any] = {
        "date": datetime.now(timezone.utc).isoformat(timespec="seconds"),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "commit": commit(),
        "sources": source_hash(),
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
    values = [value.strip() for value in text.splitlines()[0].split(",")]
    return [_number(value) for value in values] if len(values) == len(fields) else [None] * len(fields)


def _number(text: str) -> Any:
    if re.fullmatch(r"\d+(\.\d+)?", text) and text.count(".") < 2:
        return float(text) if "." in text else int(text)
    return None if text.startswith("[") else text


def commit() -> str | None:
    """The git commit of this checkout, with `+` where files differ from it; None outside git."""

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True)
        return done.stdout.strip()

    try:
        return git("rev-parse", "--short", "HEAD") + ("+" if git("status", "--porcelain") else "")
    except (OSError, subprocess.SubprocessError):
        return None


def source_hash() -> str:
    """Of the kernels and the timer, so that a record is not continued with other code."""
    digest = hashlib.sha256()
    for name in MEASURED_SOURCES:
        path = ROOT / name
        files = sorted(p for p in path.rglob("*") if p.suffix in (".py", ".cu", ".cuh", ".h", ".cpp"))
        for file in files or [path]:
            digest.update(file.relative_to(ROOT).as_posix().encode() + file.read_bytes())
    return digest.hexdigest()[:12]


def slug(gpu: str | None) -> str:
    """A folder's name: `NVIDIA H100 80GB HBM3` becomes `h100-80gb-hbm3`."""
    words = re.findall(r"[a-z0-9]+", (gpu or "no GPU").lower())
    return "-".join(word for word in words if word != "nvidia")
