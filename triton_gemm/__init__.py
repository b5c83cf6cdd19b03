"""Matrix multiplication for PyTorch, written in Triton."""

from . import nn as nn
from .api import addmm, baddbmm, bmm, linear, matmul, mm, mv
from .arithmetic import Precision
from .calibration import calibrate
from .device import DeviceInfo
from .explanation import explain
from .fingerprint import check_ranks, selection_fingerprint
from .grouped import grouped_matmul
from .policies import batch_invariant, policy, set_policy
from .problem import Activation
from .routing import disable, enable, report_routing, use
from .scaled import scaled_matmul
from .select import Selection
from .tuning import record_shapes, tune

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
    "disable",
    "enable",
    "explain",
    "grouped_matmul",
    "linear",
    "matmul",
    "mm",
    "mv",
    "policy",
    "record_shapes",
    "report_routing",
    "scaled_matmul",
    "selection_fingerprint",
    "set_policy",
    "tune",
    "use",
]
