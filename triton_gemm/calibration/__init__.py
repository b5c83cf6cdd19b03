"""Calibration: the parameters of a GPU's cost model, fitted to a minute of measurements.

`probes` says what is timed. `measuring` says when, on the bench that tuning uses. `figures` names what a fit may
change, and `fit` fits. `kept` has the user's calibrated models as files. `report` says what came of it.
docs/choosing.md is about its use. What only a calibration needs is imported when there is one.
"""

from __future__ import annotations

from collections.abc import Callable

import torch

from .. import arguments, tuning
from ..hardware import device_model
from ..tuning.timing import DeviceLostError
from . import kept
from .kept import clear as clear
from .kept import folder as folder
from .kept import reload as reload
from .report import CalibrationReport, Progress

__all__ = ["CalibrationReport", "Progress", "calibrate", "clear", "folder", "reload"]

device_model.set_calibrated(kept.find)


def calibrate(
    budget: float = 60.0,
    *,
    keep: bool = True,
    progress: Callable[[Progress], None] | None = None,
    device: torch.device | str | int | None = None,
) -> CalibrationReport:
    """Fits the cost model to a GPU, by timing candidates of fixed GEMMs for about a minute.

    The fitted model then chooses for every GEMM without a table entry: in this process from the next call on, and in
    later ones. It may choose other kernels, so results may differ in their last bits; `check_ranks` and
    `selection_fingerprint` notice.

    The fit starts from the GPU's shipped or derived model and is regularised toward it. The result is kept if it
    predicts held-out GEMMs better. What was timed while the GPU was throttled or shared is timed again. If half of all
    times cannot be used, nothing is fitted.

    Args:
        budget: Seconds for all of it; the step under way may end later. A shorter one times fewer GEMMs.
        keep: Whether the model is stored for this GPU key (compute capability, multiprocessors, memory bus, power
            limit), in place of an earlier calibration. False measures and reports only.
        progress: Called with a `Progress` before every GEMM. The logger `triton_gemm.calibration` has the result.
        device: The GPU; None: the current one.

    Returns:
        A `CalibrationReport`; `str()` of it is a text.

    Raises:
        ValueError: The budget is not positive, or the device is not a GPU.
        RuntimeError: There is no GPU, or a CUDA graph is captured. A subclass,
            `triton_gemm.tuning.timing.DeviceLostError`: a candidate hangs or breaks the GPU's context, which no process
            survives; the next calibration skips it.
    """
    budget = arguments.positive("calibrate", "budget", budget)
    arguments.flag("calibrate", "keep", keep)
    arguments.callback("calibrate", "progress", progress)
    from .session import Session

    with tuning.measuring("calibrate", device, "any") as gpu:
        try:
            return Session(gpu, budget, keep, gpu.journal.failure, progress).run()
        except DeviceLostError as lost:
            raise DeviceLostError(f"calibrate(): {lost}") from None
