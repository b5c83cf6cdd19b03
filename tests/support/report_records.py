"""A complete record of a GPU that does not exist, and the figures that are drawn of it."""

from __future__ import annotations

import itertools
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from perf.common import style
from perf.common.dataclass_json import from_json
from perf.ladder import tasks
from perf.ladder.record import (
    COUNTERS,
    TF32_ROUNDING,
    Ceilings,
    Counters,
    Error,
    ProblemResult,
    Record,
    TF32Rounding,
    TunedRung,
    TwinBuild,
)
from perf.measure.environment import Environment
from perf.measure.numerics import mode_of
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS, LoadedTwin
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import spelled

SURROUNDINGS: Environment = {
    "date": "2026-01-01T00:00:00+00:00",
    "python": "3.12.0",
    "torch": "2.11.0",
    "triton": "3.6.0",
    "cuda": "13.0",
    "commit": "abc1234",
    "sources": "0" * 12,
    "gpu": "Made-up GPU",
    "capability": [9, 0],
    "num_sms": 132,
    "l2_bytes": 50 << 20,
    "memory_bytes": 80 << 30,
    "driver": "580.0",
    "power_limit_w": 700.0,
}
OPTIONS = tasks.Options(LADDER, True, ("ieee", "tf32", "fp16", "bf16"), tasks.SIZES, False, False)
PEAK = {"ieee": 50.0, "tf32": 380.0, "fp16": 700.0, "bf16": 700.0, "int32": 5.0}


def made_up_result(problem: Problem, name: str, share: float) -> dict[str, Any]:
    size = problem.M
    tflops = PEAK[problem.mode] * share * size**2 / (size**2 + 1500**2)
    median = problem.flop / tflops / 1e9
    spread = {"median": median, "p20": 0.98 * median, "p80": 1.03 * median}
    ratio = {"median": share, "p20": share, "p80": share} if problem.mode != "int32" else None
    facts = {"config": "128x128x32 group 8 8 warps 3 stages", "registers": 128, "shared": 98304, "spills": 0}
    error = {"norm": 2.7e-4, "componentwise": 4e-7, "bound": 0.01, "vs_torch": 1.0}
    return {"time_ms": spread, "ratio": ratio, "call_us": 15.0, "error": error, "rounds": 5, "repeats": 5, **facts}


def made_up_problem(problem: Problem, names: list[str]) -> ProblemResult:
    clocks = {"clocks_sm": 1755, "clocks_mem": 2619, "temperature_gpu": 50, "power_draw": 300.0}
    clocks["clocks_event_reasons_active"] = 0
    results = {}
    for name in names:
        place = [rung.name for rung in LADDER].index(name) if name.startswith("k") else len(name) % 7
        share = 1.0 if name == CUBLAS else 0.02 * 1.4**place
        results[name] = made_up_result(problem, name, share)
    measured = {
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "mode": problem.mode,
        "hot": problem.hot,
        "seed": 0,
        "budget_s": tasks.BUDGET_S,
        "clocks_before": clocks,
        "clocks_after": clocks,
        "sets": 4,
        "providers": results,
    }
    return from_json(ProblemResult, measured)


def made_up_tuning(rung: Rung) -> TunedRung:
    """Large tiles are fast, more stages and fewer warps faster, and the last of several configurations fails."""
    mode = mode_of(rung.precision, rung.dtypes[0])
    problem = Problem(4096, 4096, 4096, mode)

    def facts(config: GemmConfig) -> dict[str, Any]:
        share = 0.9 - 20 / (config.tile.BLOCK_M + config.tile.BLOCK_N) + 0.01 * config.num_stages
        median = problem.flop / (PEAK[mode] * (share - 0.005 * config.num_warps - 0.001 * (config.GROUP_M or 0))) / 1e9
        spread = {"median": median, "p20": 0.98 * median, "p80": 1.03 * median}
        return {"time_ms": spread, "registers": 128, "shared": 98304, "spills": 0, "blocks_per_sm": 2}

    configs = {spelled(config): facts(config) for config in rung.configs}
    configs[spelled(rung.configs[-1])] = {}
    about = {"rung": rung.name, "mode": mode, "M": 4096, "N": 4096, "K": 4096}
    return from_json(TunedRung, {**about, "configs": configs})


def made_up_record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A complete record of a GPU that does not exist."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("perf.ladder.rungs_and_twins.device_info", lambda _: environment_device())
    made = Record(tmp_path, SURROUNDINGS.copy())
    twins = {stem: LoadedTwin(twin, sys) for stem, twin in TWINS.items()}
    for stem in TWINS:
        made.twins[stem] = TwinBuild(variants={})
    for mode, size in itertools.product(OPTIONS.modes, OPTIONS.sizes):
        problem = Problem(size, size, size, mode)
        names = [p.name for p in tasks.sweep_providers(problem, OPTIONS, twins, made)]
        made.put_problem(problem.key, made_up_problem(problem, names))
    for problem, names in tasks.experiment_problems():
        chosen = names if problem.mode == "int32" else [CUBLAS, *names]
        made.put_problem(problem.key, made_up_problem(problem, chosen))
    made.put(made.ceilings, "measured", Ceilings(copy_tbs=2.9, copy_bytes=1 << 30, sm_clock_mhz=1755))
    error = Error(norm=3e-4, componentwise=4e-5, bound=0.1, vs_torch=1.0, toward_zero=1e-5)
    errors = {CUBLAS: error, "k07, operands truncated": error}
    made.put(made.experiments, TF32_ROUNDING, TF32Rounding(size=4096, errors=errors))
    made.put(made.experiments, COUNTERS, Counters(unavailable="ncu (Nsight Compute) is not on PATH"))
    for rung in LADDER:
        if len(rung.configs) > 1:
            tuning = made_up_tuning(rung)
            made.put_tuning(tasks.tuning_key(rung, Problem(4096, 4096, 4096, tuning.mode)), tuning)
    return made


def environment_device() -> Any:
    from triton_gemm.hardware.device import device_of_capability

    return device_of_capability((9, 0))


def figures_of(monkeypatch: pytest.MonkeyPatch, *modules: ModuleType) -> dict[str, Any]:
    """What these modules draw in the test, as figures instead of files."""
    figures: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        figures[path.name] = figure
        style.plt.close(figure)
        return path

    for module in modules:
        monkeypatch.setattr(module, "save", keep)
    return figures


def texts_of(figure: Any) -> list[Any]:
    found = figure.findobj(lambda artist: hasattr(artist, "get_text") and hasattr(artist, "get_fontsize"))
    return [text for text in found if text.get_text() and text.get_visible()]


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """The pairs of texts in a picture that lie on each other."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts_of(figure)]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
