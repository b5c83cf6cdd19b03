"""select: which rung and which tiles a problem gets, and why. Pure, and without tuning."""

from __future__ import annotations

from dataclasses import dataclass

from .config import GemmConfig
from .device import INTERPRETER, DeviceInfo
from .ladder import LADDER, Rung
from .problem import GemmProblem

RUNGS = {rung.id: rung for rung in LADDER}

# An estimate of how fast an SM works on a tile of each size, the best being 1: large tiles read less for each FMA.
# It follows one tuning of every configuration on an H100, at 8192^3 with tensor cores and 4096^3 with FFMA.
TILE_RATE = {
    "half": {(128, 256): 1.0, (256, 128): 0.97, (128, 128): 0.97, (64, 256): 0.92, (64, 128): 0.8, (64, 64): 0.5},
    "tf32": {(128, 256): 1.0, (256, 128): 0.87, (128, 128): 0.92, (64, 128): 0.8, (64, 64): 0.5},
    "ieee": {(64, 128): 0.97, (128, 64): 1.0, (256, 64): 0.98, (64, 256): 0.98, (64, 64): 0.9, (32, 64): 0.7},
}


@dataclass(frozen=True)
class Selection:
    """What a problem runs on: the rung's id, its configuration, and the reason for both in a sentence."""

    kernel: str
    config: GemmConfig
    reason: str

    def __str__(self) -> str:
        return f"{RUNGS[self.kernel].name} {self.config}: {self.reason}"


def select(problem: GemmProblem, device: DeviceInfo) -> Selection:
    """The rung and configuration for `problem` on `device`; RuntimeError where no rung runs."""
    rung, why_rung = _rung(problem, device)
    legal = rung.legal_configs(device, problem.dtype, aligned=problem.aligned)
    config = min(legal, key=lambda config: _time(problem, config, device))
    waves = _tiles(problem, config) / device.num_sms
    return Selection(rung.id, config, f"{why_rung}; {waves:.2f} waves of tiles on {device.num_sms} SMs")


def _rung(problem: GemmProblem, device: DeviceInfo) -> tuple[Rung, str]:
    if device.capability < (8, 0):
        raise RuntimeError(f"matmul needs compute capability 8.0 or newer, {device.name} has less")
    if problem.precision == "ieee":
        return RUNGS["k06"], "IEEE fp32 has no tensor core"
    if problem.precision == "tf32":
        return RUNGS["k07"], "torch allows TF32"
    if problem.tma is not None:
        return RUNGS["k08"], f"TMA cannot take {problem.tma}"
    if device.capability[0] == 9 and device is not INTERPRETER:
        return RUNGS["k11"], "Hopper, and TMA takes all operands"
    if device.capability >= (9, 0):
        return RUNGS["k10"], "TMA takes all operands"
    return RUNGS["k08"], f"{device.name} has no TMA"


def _tiles(problem: GemmProblem, config: GemmConfig) -> int:
    assert config.BLOCK_M is not None and config.BLOCK_N is not None
    return -(-problem.M // config.BLOCK_M) * -(-problem.N // config.BLOCK_N)


def _time(problem: GemmProblem, config: GemmConfig, device: DeviceInfo) -> float:
    """Whole waves of tiles, times the work of a tile over the rate at which an SM does it."""
    assert config.BLOCK_M is not None and config.BLOCK_N is not None
    waves = -(-_tiles(problem, config) // device.num_sms)
    rate = TILE_RATE[problem.precision].get((config.BLOCK_M, config.BLOCK_N), 0.5)
    return waves * config.BLOCK_M * config.BLOCK_N / rate
