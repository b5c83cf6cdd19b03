"""Finds the figures of a DeviceModel that are most likely after measured times, as `triton_gemm.calibrate` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from perf.calibrate.times import Measured
from triton_gemm.calibration.figures import rounded
from triton_gemm.calibration.fit import SHIPPED, Timed
from triton_gemm.calibration.fit import fit as most_likely
from triton_gemm.hardware import device_model
from triton_gemm.hardware.device_model import DeviceModel


def fit(measured: Sequence[Measured], model: DeviceModel) -> DeviceModel:
    """The model that is most likely after these times, near `model`: nearer where that was itself measured."""
    timed = [Timed(found.problem, {way.candidate: us for way, us in found.us.items()}) for found in measured]
    return most_likely(timed, model, SHIPPED if model in device_model.measured().values() else 1.0).model


def save(name: str, model: DeviceModel, out: Path) -> None:
    """Writes the model of a GPU, and keeps those of others."""
    entries = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**entries, name: rounded(model.as_dict())}, indent=1) + "\n")
