"""Matrix multiplication for PyTorch, written in Triton."""

from . import learning as learning
from . import nn as nn
from .arithmetic import Precision
from .calibration import calibrate
from .functional.api import addmm, baddbmm, bmm, linear, matmul, mm, mv
from .functional.grouped import grouped_matmul
from .functional.routing import disable, enable, report_routing, use
from .functional.scaled import scaled_matmul
from .hardware.device import DeviceInfo
from .preparation import prepare
from .problem import Activation
from .reporting.explanation import explain
from .reporting.fingerprint import check_ranks, selection_fingerprint
from .runtime.background import wait_until_compiled
from .runtime.policies import batch_invariant, current_policy, policy, set_policy
from .selection.select import Selection
from .tuning import compare, record_shapes, tune

__version__ = "0.1.0"

__all__ = [
    "Activation",
    "DeviceInfo",
    "Precision",
    "Selection",
    "addmm",
    "baddbmm",
    "batch_invariant",
    "bmm",
    "calibrate",
    "check_ranks",
    "compare",
    "current_policy",
    "disable",
    "enable",
    "explain",
    "grouped_matmul",
    "linear",
    "matmul",
    "mm",
    "mv",
    "policy",
    "prepare",
    "record_shapes",
    "report_routing",
    "scaled_matmul",
    "selection_fingerprint",
    "set_policy",
    "tune",
    "use",
    "wait_until_compiled",
]
