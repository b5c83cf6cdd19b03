"""Draws the products that `triton_gemm.calibrate` times, and their order, from those of suites: with each the most is
learnt about what decides between candidates, by what the model says of how figures change its predictions."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

import torch

from perf.calibrate.shapes import OTHER, REGIMES
from triton_gemm.calibration import fit
from triton_gemm.calibration.fit import OWN, SHARED, Timed, covariance
from triton_gemm.calibration.figures import places
from triton_gemm.calibration.probes import ways
from triton_gemm.device import DeviceInfo
from triton_gemm.device_model import model_of
