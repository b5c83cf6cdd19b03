"""Finds the figures of a DeviceModel that are most likely after measured times, as `triton_gemm.calibrate` does."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

from perf.calibrate.times import Measured
from triton_gemm.calibration.figures import rounded
from triton_gemm.calibration.fit import Timed
from triton_gemm.calibration.fit import fit as most_likely
from triton_gemm.hardware.device_model import DeviceModel

WIDTH = 2.0  # of the prior, in units of its usual standard deviation: hundreds of products outweigh the present model


def fit(measured: Sequence[Measured], model: DeviceModel, figures: Sequence[str] = ()) -> DeviceModel:
    """The maximum a posteriori model for these times, with a prior around `model`. figures: prefixes of those that may
    change, as "l2" or "kernels.warp_specialised"; all may if there are none."""
    timed = [Timed(found.problem, {way.candidate: us for way, us in found.us.items()}) for found in measured]
    begins = tuple(f"{name}." for name in figures) or ("",)
    return most_likely(timed, model, WIDTH, lambda place: f"{'.'.join(place)}.".startswith(begins)).model


def save(name: str, model: DeviceModel, out: Path) -> None:
    """Writes the model of a GPU, and keeps those of others."""
    entries = json.loads(out.read_text()) if out.exists() else {}
    out.write_text(json.dumps({**entries, name: rounded(model.as_dict())}, indent=1) + "\n")
