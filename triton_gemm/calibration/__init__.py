"""Calibration: the figures of a GPU's model, fitted to a minute of measurements.

`probes` says what is timed, `measuring` when, on the bench that tuning uses, `figures` names what a fit may change,
`fit` fits, `kept` has the user's calibrated models as files, `report` says what came of it. docs/choosing.md is about its
use. What only a calibration needs is imported when there is one.
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
    """Fits the cost model to a GPU, by timing candidates of fixed products for about a minute. What no table has is
    chosen by it from then on: in this process from the next call on, and in later ones.

        print(triton_gemm.calibrate())

    budget: seconds for all of it; what is under way then may end later. A shorter one times fewer products, those first
        that tell most about the model.
    keep: whether the model is stored for GPUs of this silicon (compute capability, multiprocessors, memory bus, power
        limit), in place of an earlier calibration; False measures and reports only.
    progress: is called with a `Progress` before every product; the logger `triton_gemm.calibration` has the result.
    device: the GPU, by default the current one.

    The fit begins with the GPU's shipped model, or one derived from another's, whatever was calibrated before, and is
    drawn to it: figures that were not measured change with those like them. It is kept if it predicts products that it
    was not fitted to better than the model it began with. Nothing counts that was measured while a reference product,
    the clock or the driver said that the GPU was throttled or shared: it is timed again, and if half of all cannot
    count, nothing is fitted. Another model chooses other kernels, so results may differ in their last bits;
    `check_ranks` and `selection_fingerprint` notice.

    Raises ValueError for a budget that is not positive, or a device that is no GPU; RuntimeError where there is no GPU,
    or a graph is captured; `triton_gemm.tuning.timing.DeviceLostError`, a RuntimeError, where a candidate hangs or
    breaks the GPU's context, which no process survives: the next calibration leaves it out.
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
