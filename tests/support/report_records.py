"""Records and sweeps for tests of reports and pages, the blocks that show them, and the figures drawn of them."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from perf.bench.scores import COMPILED, Sweep
from perf.common import style
from perf.common.dataclass_json import from_json
from perf.ladder import static, tasks
from perf.ladder.record import Record, StaticFacts
from perf.measure import environment, operands
from perf.measure.environment import Environment
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS, OURS
from perf.pages import blocks
from perf.pages.results import Results
from triton_gemm.ladder import LADDER
from triton_gemm.suites import SUITES

SURROUNDINGS: Environment = {
    **{"date": "2026-01-01T00:00:00+00:00", "python": "3.12.0", "torch": "2.11.0", "triton": "3.6.0"},
    **{"cuda": "13.0", "commit": "abc1234", "sources": "0" * 12, "gpu": "Made-up GPU", "capability": [9, 0]},
    **{"num_sms": 132, "l2_bytes": 50 << 20, "memory_bytes": 80 << 30, "driver": "580.0", "power_limit_w": 700.0},
}
OPTIONS = tasks.Options(LADDER, True, ("ieee", "tf32", "fp16", "bf16"), tasks.SIZES, False, False)
NO_RESULTS = Results([], [])


def committed_record(folder: Path) -> Record:
    """A whole record, of the H200, in a folder of its own."""
    record = Record.read(environment.RESULTS / "h200")
    record.folder = folder
    record.save()
    return record


def add_static_facts(record: Record) -> None:
    for rung, target in itertools.product(LADDER, static.ARCHITECTURES):
        facts = {"rung": rung.name, "target": target, "config": "64x64x16", "dtype": "float16", "default": True}
        facts |= {"registers": 96, "shared": 8192, "ceiling_share": 0.7}
        record.static[f"{rung.name} {target}"] = from_json(StaticFacts, facts)


def spread(median: float) -> dict[str, float]:
    return {"median": median, "p20": 0.99 * median, "p80": 1.01 * median}


def made_up_sweep(suite: str, ratios: Mapping[str, float | None], **more: Any) -> Sweep:
    """A sweep with our ratio to cuBLAS for each shape; None where ours failed."""
    listed = {shape.key: shape for shape in SUITES[suite].shapes}
    shapes = {}
    for seed, (key, ratio) in enumerate(ratios.items()):
        shape = listed[key]
        problem = Problem(shape.M, shape.N, shape.K, "bf16", seed=seed, batch=shape.batch, layout=shape.layout)
        own: dict[str, Any] = {"failed": "a result is off"}
        error = {"norm": 1.5e-3}
        if ratio is not None:
            own = {"time_ms": spread(2 / ratio), "least_ms": 1 / ratio, "ratio": spread(ratio), "error": error}
            own |= {"config": "k11 128x256x64: the reason", "ratio_to": {COMPILED: spread(0.9 * ratio)}}
        base = {"time_ms": spread(2.0), "least_ms": 1.0, "ratio": spread(1.0), "error": error}
        shapes[key] = {**operands.describe(problem), "providers": {OURS: own, CUBLAS: base}}
    found = {"suite": suite, "unit": SUITES[suite].unit, "dtype": "bf16", "unseen": None, "shapes": shapes}
    return {**found, "listed": len(SUITES[suite].shapes), "environment": dict(SURROUNDINGS), **more}


def keys(suite: str, count: int) -> list[str]:
    """Of a suite's first shapes."""
    return [shape.key for shape in SUITES[suite].shapes[:count]]


def block(name: str, results: Results, folder: Path = environment.RESULTS) -> str:
    """A page in `folder` that has nothing but this block."""
    return blocks.filled(f"<!-- results:{name} -->\n<!-- /results -->\n", results, folder)


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
    """Those that are drawn. Labels of ticks beyond the ends of their axis are kept by matplotlib, and not drawn."""
    found = figure.findobj(lambda artist: hasattr(artist, "get_text") and hasattr(artist, "get_fontsize"))
    beyond = [
        label
        for axes in figure.axes
        for axis in (axes.xaxis, axes.yaxis)
        for tick in (*axis.get_major_ticks(), *axis.get_minor_ticks())
        for label in (tick.label1, tick.label2)
        if not min(axis.get_view_interval()) <= tick.get_loc() <= max(axis.get_view_interval())
    ]
    return [text for text in found if text.get_text() and text.get_visible() and text not in beyond]


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """The pairs of texts in a picture that lie on each other."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts_of(figure)]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]
