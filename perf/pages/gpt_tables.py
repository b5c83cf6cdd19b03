"""What examples/bench_gpt.py measured, as rows of cells: what it prints and what pages show."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from perf.common import formats
from perf.common.formats import Cell
from perf.measure import environment
from perf.measure.environment import Records

TORCH, OURS = "torch", "triton_gemm"
TORCH_COMPILED, OURS_COMPILED = "torch, compiled", "triton_gemm, compiled"
TRAINING, DECODE = 1.0, 1.05  # what the ratios are to reach
COLUMNS = ("tokens/s", TORCH, OURS, "ratio", TORCH_COMPILED, OURS_COMPILED, "ratio", "target", "")


def rows(record: dict[str, Any]) -> list[list[Cell]]:
    """A row of COLUMNS for each case; a variant that failed says so."""
    return [[name, *_row(case)] for name, case in record["cases"].items()]


def _row(case: dict[str, Any]) -> list[Cell]:
    variants, target = case["variants"], case["target"]
    speeds = {name: "FAILED" if "failed" in v else formats.number(v["tokens_per_s"], 4) for name, v in variants.items()}
    ratios = [variants[name]["ratio"]["median"] if "ratio" in variants[name] else 0.0 for name in (OURS, OURS_COMPILED)]
    eager, compiled = (f"{ratio:.3f}" if ratio else None for ratio in ratios)
    of_eager = [speeds[TORCH], speeds[OURS], eager]
    of_compiled = [speeds[TORCH_COMPILED], speeds[OURS_COMPILED], compiled]
    return [*of_eager, *of_compiled, f"{target:.2f}", "met" if min(ratios) >= target else "missed"]


def model(record: Mapping[str, Any]) -> str:
    """The model and what it ran on, in words."""
    config = record["config"]
    size = f"{config['layers']} layers {config['width']} wide, vocabulary {config['vocabulary']}, bf16"
    return f"{environment.named(record['environment'])}; {size}"


NOTHING = "No measurement is committed yet; `python -m examples.bench_gpt` on a GPU makes one."
RECORDS = Records(
    "examples/{triton}/gpt.json", "gpt", NOTHING, lambda record: formats.table(COLUMNS, rows(record)), model
)
