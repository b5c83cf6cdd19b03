"""The report: what it records, resumes, draws and says, from made-up measurements; and one real run without a GPU."""

from __future__ import annotations

import importlib
import itertools
import json
import math
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf import (
    COMMANDS,
    bench_tables,
    counters,
    curves,
    draw,
    environment,
    interpret,
    numerics,
    operands,
    page,
    pages,
    prediction,
    roofline,
    seeds,
    static,
    style,
    suite,
    tables,
    targets,
    timer,
    views,
)
from perf import report as climb
from perf.operands import Problem
from perf.providers import CUBLAS
from perf.record import SECTIONS, Record
from reference_cuda import TWINS, LoadedTwin
from tests.fakes import take_gpu_away
from tests.test_rooms import imports
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER
from triton_gemm.problem import UnsupportedOperandError

ROOT = Path(__file__).parent.parent
SURROUNDINGS: dict[str, Any] = {
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
OPTIONS = suite.Options(LADDER, True, ("ieee", "tf32", "fp16", "bf16"), suite.SIZES, False, False)
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


def made_up_problem(problem: Problem, names: list[str]) -> dict[str, Any]:
    clocks = {"clocks_sm": 1755, "clocks_mem": 2619}
    results = {}
    for name in names:
        place = [rung.name for rung in LADDER].index(name) if name.startswith("k") else len(name) % 7
        share = 1.0 if name == CUBLAS else 0.02 * 1.4**place
        results[name] = made_up_result(problem, name, share)
    return {
        "M": problem.M,
        "N": problem.N,
        "K": problem.K,
        "mode": problem.mode,
        "hot": problem.hot,
        "seed": 0,
        "budget_s": suite.BUDGET_S,
        "clocks_before": clocks,
        "clocks_after": clocks,
        "providers": results,
    }


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    """A complete record of a GPU that does not exist."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr("perf.providers.device_info", lambda _: environment_device())
    made = Record(tmp_path, dict(SURROUNDINGS))
    twins = {stem: LoadedTwin(twin, sys) for stem, twin in TWINS.items()}
    for stem in TWINS:
        made["twins"][stem] = {"variants": {}}
    for mode, size in itertools.product(OPTIONS.modes, OPTIONS.sizes):
        problem = Problem(size, size, size, mode)
        names = [p.name for p in suite.sweep_providers(problem, OPTIONS, twins, made)]
        made.put_problem(problem.key, made_up_problem(problem, names))
    for problem, names in suite.experiment_problems():
        chosen = names if problem.mode == "int32" else [CUBLAS, *names]
        made.put_problem(problem.key, made_up_problem(problem, chosen))
    made.put("ceilings", "measured", {"copy_tbs": 2.9, "copy_bytes": 1 << 30, "sm_clock_mhz": 1755})
    row = {"norm": 3e-4, "componentwise": 4e-5, "bound": 0.1, "vs_torch": 1.0, "toward_zero": 1e-5}
    made.put("experiments", suite.TF32_ROUNDING, {"size": 4096, "cuBLAS": row, "k07, operands truncated": row})
    made.put("experiments", suite.COUNTERS, {"unavailable": "ncu (Nsight Compute) is not on PATH"})
    return made


def environment_device() -> Any:
    from triton_gemm.device import device_of_capability

    return device_of_capability((9, 0))


def test_everything_is_drawn_and_said(record: Record) -> None:
    pictures = draw.everything(record, record.folder)
    names = {path.name for path in pictures}
    assert {f"sweep-{mode}.png" for mode in OPTIONS.modes} <= names
    assert {"ladder.png", "roofline.png", "factors.png"} <= names
    assert {f"experiment-{source.id}.png" for source in seeds.EXPERIMENTS if len(source.kernels) > 1} <= names
    assert "experiment-S1.png" not in names  # one kernel has nothing to be drawn against
    assert all(path.stat().st_size > 5000 for path in pictures)
    written = page.write(record, pictures).read_text()
    assert all(f"]({name})" in written for name in names)
    assert "Made-up GPU" in written
    assert "nan" not in written.lower().split()
    for rung in LADDER:
        assert f"{rung.id} {rung.title}" in written
    for source in seeds.EXPERIMENTS:
        for kernel in source.kernels:
            assert f"{kernel.id} {kernel.title}" in written
    header, *rows = (record.folder / "sweep-ieee.csv").read_text().splitlines()
    assert header.startswith("size,provider,tflops,tflops_p20,tflops_p80")
    assert len(rows) >= len(OPTIONS.sizes)


OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What is drawn in the test, as figures instead of files."""
    found: dict[str, Any] = {}

    def keep(figure: Any, path: Path) -> Path:
        found[path.name] = figure
        style.plt.close(figure)
        return path

    monkeypatch.setattr(draw, "save", keep)
    monkeypatch.setattr(curves, "save", keep)
    return found


def add_static_facts(record: Record) -> None:
    for rung, target in itertools.product(LADDER, static.TARGETS):
        facts = {"rung": rung.name, "target": target, "config": "64x64x16", "default": True}
        facts |= {"registers": 96, "shared": 8192, "ceiling_share": 0.7}
        record["static"][f"{rung.name} {target}"] = facts


def made_up_points() -> list[bench_tables.Point]:
    """Modes whose speed and error are nearly the same, and one without an error."""
    modes = {"ieee": 50, "fp8": 970, "fp8-blocks": 960, "fp8-rows": 965, "fp8-fast": 1000, "int8": 1100}
    return [
        bench_tables.Point(provider, mode, speed, {"norm": 0.0 if mode == "int8" else 1.7e-3})
        for mode, speed in modes.items()
        for provider in ("triton_gemm", CUBLAS)
    ]


def texts_of(figure: Any) -> list[Any]:
    found = figure.findobj(lambda artist: hasattr(artist, "get_text") and hasattr(artist, "get_fontsize"))
    return [text for text in found if text.get_text() and text.get_visible()]


def overlapping(figure: Any) -> list[tuple[str, str]]:
    """The pairs of texts in a picture that lie on each other."""
    figure.draw_without_rendering()
    boxes = [(text.get_text(), text.get_window_extent().padded(-1)) for text in texts_of(figure)]
    return [(a, b) for (a, one), (b, other) in itertools.combinations(boxes, 2) if one.overlaps(other)]


def named_lines(figure: Any) -> list[Any]:
    """The lines of the first axes that a reader has to find by their name."""
    return [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]


def said(figure: Any) -> str:
    return " ".join(text.get_text() for text in texts_of(figure)).replace("\n", " ")


@pytest.mark.parametrize("of", ["made up", "committed"])
def test_no_text_lies_on_another_in_any_picture(
    of: str, record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    if of == "made up":
        add_static_facts(record)
        draw.everything(record, tmp_path)
        draw.precisions(made_up_points(), "Made-up GPU", tmp_path / "precision.png")
        assert {"static-resources.png", "static-ceilings.png", "precision.png"} <= figures.keys()
    else:
        committed = pages.Results.read(pages.RESULTS).main
        assert committed is not None
        draw.everything(committed, tmp_path)
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}


def test_precisions_without_any_error_are_drawn(tmp_path: Path) -> None:
    exact = [point for point in made_up_points() if point.mode == "int8"]
    assert draw.precisions(exact, "Made-up GPU", tmp_path / "precision.png").exists()


def test_every_line_can_be_told_from_the_others_whatever_the_colour_vision(
    record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    assert {colour.lower() for colour in style.PALETTE} < OKABE_ITO
    add_static_facts(record)
    draw.everything(record, tmp_path)
    for name in [*(f"sweep-{mode}.png" for mode in OPTIONS.modes), "roofline.png", "static-resources.png"]:
        lines = named_lines(figures[name])
        looks = {str(line.get_label()): (str(line.get_color()).lower(), line.get_marker()) for line in lines}
        assert {colour for colour, _ in looks.values()} <= OKABE_ITO, name
        others = {label: look for label, look in looks.items() if CUBLAS not in label and "FFMA" not in label}
        assert len(set(others.values())) == len(others) > 0, name
        assert {marker for _, marker in others.values()}.isdisjoint("D"), name
        assert {look for label, look in looks.items() if CUBLAS in label} <= {("#000000", "D")}, name
    assert len(named_lines(figures["sweep-ieee.png"])) == 14


def test_sizes_that_are_no_multiple_of_16_are_marks_apart_and_explained(
    record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    pictures = draw.everything(record, tmp_path)
    sweep = figures["sweep-fp16.png"]
    lines = named_lines(sweep)
    assert all(set(line.get_xdata()) == {512, 1024, 2048, 4096, 6144, 8192} for line in lines)
    marks = [line for line in sweep.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert sorted(line.get_xdata()[0] for line in marks) == [1400] * len(lines) + [3000] * len(lines)
    assert "multiple of 16" in said(sweep)
    assert "20th to the 80th percentile" in said(sweep)
    assert "1400, 3000" in page.write(record, pictures).read_text()

    for key in [key for key, problem in record["problems"].items() if problem["M"] % 16]:
        del record["problems"][key]
    pictures = draw.everything(record, tmp_path)
    assert "multiple of 16" not in said(figures["sweep-fp16.png"])
    assert "multiple of 16" not in page.write(record, pictures).read_text()


def test_the_ladder_shows_shares_of_what_it_draws(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    problem = record["problems"][Problem(4096, 4096, 4096, "fp16").key]
    step = next(step for step in views.ladder(record) if step.rung.id == "k08")
    assert step.twin_result is not None
    for result in (step.own, step.twin_result):
        result["ratio"] = {"median": 0.777, "p20": 0.777, "p80": 0.777}  # of other rounds
    shares = [
        tables.percent(problem["providers"][CUBLAS]["time_ms"]["median"] / result["time_ms"]["median"])
        for result in (step.own, step.twin_result)
    ]
    draw.everything(record, tmp_path)
    assert "78 %" not in said(figures["ladder.png"])
    assert all(f" {share} " in said(figures["ladder.png"]) for share in shares)
    row = next(line for line in tables.ladder(record).splitlines() if line.startswith("| k08"))
    assert f"| {shares[0]} |" in row


def test_a_twin_is_explained_before_it_is_compared(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    written = page.write(record, draw.everything(record, tmp_path)).read_text()
    assert written.index("does not show that Triton is faster than CUDA") < written.index("## Findings")
    assert "not CUDA at its best" in said(figures["ladder.png"])


@pytest.mark.parametrize("kept", ["no cuBLAS", "no twins", "one rung", "odd sizes only"])
def test_a_record_that_lacks_much_is_drawn(kept: str, record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    keeps = {
        "no cuBLAS": lambda name: name != CUBLAS,
        "no twins": lambda name: not name.startswith("c0") and not name.startswith("c1"),
        "one rung": lambda name: name == "k03_blocked",
    }.get(kept, lambda name: True)
    for key, problem in list(record["problems"].items()):
        problem["providers"] = {name: result for name, result in problem["providers"].items() if keeps(name)}
        if kept == "odd sizes only" and problem["M"] % 16 == 0 and not problem["hot"]:
            del record["problems"][key]
    pictures = draw.everything(record, tmp_path)
    assert {"ladder.png", "sweep-ieee.png"} <= figures.keys()
    assert ("sweep-fp16.png" in figures) == (kept != "one rung")
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}
    page.write(record, pictures)


@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=20).map(sorted))
def test_names_are_spread_apart_and_stay_near(wanted: list[float]) -> None:
    gap = 0.04
    places = style.spread(wanted, gap, 0, 1)
    assert all(after - before >= gap - 1e-9 for before, after in itertools.pairwise(places))
    assert places[0] >= -1e-9
    assert places[-1] <= 1 + 1e-9
    if all(after - before >= gap for before, after in itertools.pairwise(wanted)) and 0 <= wanted[0] <= wanted[-1] <= 1:
        assert places == pytest.approx(wanted)


def test_committed_records_are_drawn_again_without_a_gpu(
    record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    record.folder = tmp_path / "made-up"
    record.folder.mkdir()
    record.save()
    monkeypatch.setattr(pages, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ())
    pages.rewrite()
    written = (record.folder / "report.md").read_text()
    assert "](ladder.png)" in written
    assert (record.folder / "ladder.png").exists()


def test_what_failed_is_named_and_not_drawn(record: Record) -> None:
    problem = Problem(4096, 4096, 4096, "ieee")
    record["problems"][problem.key]["providers"]["k06_pipelined"] = {"failed": "a result is off"}
    for size in set(OPTIONS.sizes) - {4096}:
        del record["problems"][Problem(size, size, size, "ieee").key]["providers"]["k06_pipelined"]
    assert "k06_pipelined" not in views.lines(record, "ieee")
    assert record.failures() == [f"k06_pipelined on {problem.key}: a result is off"]
    assert "a result is off" in page.write(record, draw.everything(record, record.folder)).read_text()


def test_a_record_resumes_only_in_the_same_surroundings(record: Record) -> None:
    again, state = Record.open(record.folder, dict(SURROUNDINGS), fresh=False)
    assert again.data == record.data
    assert state.startswith("continuing")
    other, state = Record.open(record.folder, {**SURROUNDINGS, "triton": "3.7.1"}, fresh=False)
    assert all(not other[name] for name in SECTIONS)
    assert "triton changed" in state
    dropped, _ = Record.open(record.folder, dict(SURROUNDINGS), fresh=True)
    assert all(not dropped[name] for name in SECTIONS)


def test_a_problem_is_measured_again_for_a_new_provider_or_a_larger_budget(record: Record) -> None:
    key = Problem(4096, 4096, 4096, "ieee").key
    assert record.has_problem(key, [CUBLAS, "k03_blocked"], suite.BUDGET_S)
    assert record.has_problem(key, [CUBLAS], suite.QUICK_BUDGET_S)
    assert not record.has_problem(key, [CUBLAS], 2 * suite.BUDGET_S)
    assert not record.has_problem(key, [CUBLAS, "k99_new"], suite.BUDGET_S)
    before = set(record["problems"][key]["providers"])
    record.put_problem(key, {"budget_s": 1.0, "providers": {"k99_new": {}}})
    assert set(record["problems"][key]["providers"]) == before | {"k99_new"}


def test_an_unreadable_record_is_not_the_end(tmp_path: Path) -> None:
    (tmp_path / "results.json").write_text('{"environment": {"gp')
    _, state = Record.open(tmp_path, dict(SURROUNDINGS), fresh=False)
    assert "unreadable" in state


def test_every_published_kernel_has_a_twin() -> None:
    ids = {kernel.id for source in seeds.EXPERIMENTS for kernel in source.kernels}
    assert ids == {seed for twin in TWINS.values() for variant in twin.variants for seed in variant.seeds}
    expected = {"S0": (1, 2), "S2": (1, 6), "S3": (1, 4), "S4": (0, 5)}
    assert ids == {"S1"} | {f"{s}.{i}" for s, (a, z) in expected.items() for i in range(a, z + 1)}
    for kernel_id in ids:
        twin, variant = seeds.twin_of(kernel_id)
        assert variant in twin.variants
    published = {source.id: source for source in seeds.EXPERIMENTS}
    s3, s4 = published["S3"], published["S4"]
    assert s3.published_speedup(s3.kernels[1]) == pytest.approx(7.61, abs=0.01)
    assert s3.published_share(s3.kernels[3]) == pytest.approx(0.182, abs=0.001)
    assert s4.published_speedup(s4.kernels[5]) == pytest.approx(64.9, abs=0.1)


def test_targets_are_decided_from_the_record(record: Record) -> None:
    outcomes = {outcome.what: outcome for outcome in targets.outcomes(record)}
    assert any(what.startswith("k11_warp_specialised at 1.00 of cuBLAS") for what in outcomes)
    assert any(what.startswith("c11_wmma_fp16_warp_tiled at 2 times") for what in outcomes)
    problem = record["problems"][Problem(4096, 4096, 4096, "fp16").key]
    problem["providers"]["k11_warp_specialised"]["ratio"]["median"] = 1.2
    assert any("k11_warp_specialised" in line for line in targets.suspicious(record))


class FakeGpu:
    """A clock that only moves when a kernel runs."""

    def __init__(self) -> None:
        self.order: list[str] = []

    def kernel(self, name: str, times: list[float]) -> timer.Stopwatch:
        remaining = itertools.cycle(times)

        def start() -> Any:
            self.order.append(name)
            took = next(remaining)
            return lambda: took

        return start


def test_providers_take_turns_and_ratios_are_taken_round_by_round() -> None:
    gpu = FakeGpu()
    # The GPU slows down by half midway: ratios must not notice.
    starts = {"base": gpu.kernel("base", [2.0, 2.0, 4.0, 4.0]), "own": gpu.kernel("own", [1.0, 1.0, 2.0, 2.0])}
    times = timer.interleave(starts, 4)
    assert gpu.order == ["base", "own", "own", "base"] * 2
    assert timer.ratios(times, "own", "base") == [2.0] * 4
    spread = timer.percentiles([1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread["median"] == 3.0
    assert spread["p20"] < 3.0 < spread["p80"]


def test_slow_providers_get_few_rounds_and_every_operand_set_is_used() -> None:
    assert timer.round_count(round_ms=10.0, budget_s=0.2, bounds=(3, 40)) == 20
    assert timer.round_count(round_ms=5000.0, budget_s=0.2, bounds=(3, 40)) == 3
    assert timer.round_count(round_ms=0.0, budget_s=0.2, bounds=(3, 40)) == 40
    assert timer.repeats(estimate_ms=300.0, sets=1) == 1
    assert timer.repeats(estimate_ms=300.0, sets=4) == 4
    assert timer.repeats(estimate_ms=0.01, sets=4) == timer.MAX_REPEATS
    l2 = 50 << 20
    assert operands.set_count(size=3 << 20, l2=l2, free=80 << 30) * (3 << 20) >= 2 * l2
    assert operands.set_count(size=1 << 30, l2=l2, free=80 << 30) == 1
    assert operands.set_count(size=3 << 20, l2=l2, free=30 << 20) == 4


def test_the_check_accepts_torch_and_refuses_a_dropped_tail() -> None:
    generator = torch.Generator().manual_seed(0)
    a = operands.draw((65, 47), torch.float32, generator)
    b = operands.draw((47, 33), torch.float32, generator)
    check = operands.Check(Problem(65, 33, 47, "ieee"), a, b)
    error, complaint = check.verdict(a @ b)
    assert complaint is None
    assert error["vs_torch"] == pytest.approx(1.0)
    assert check.verdict(a[:, :46] @ b[:46])[1] is not None
    assert "not finite" in str(check.verdict(torch.full((65, 33), math.nan))[1])
    slightly_off = (a @ b) * (1 + 1e-6)
    assert "torch's own" in str(check.verdict(slightly_off)[1])
    assert check.verdict(slightly_off, torchs=True)[1] is None


def test_the_check_of_integers_is_exact() -> None:
    generator = torch.Generator().manual_seed(0)
    a, b = (operands.draw(shape, torch.int32, generator) for shape in ((9, 7), (7, 5)))
    check = operands.Check(Problem(9, 5, 7, "int32"), a, b)
    c = a @ b
    assert check.verdict(c)[1] is None
    c[3, 2] += 1
    assert check.verdict(c)[1] == "1 results differ"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the timer work on the CPU, where providers compute and nothing is timed."""
    take_gpu_away(monkeypatch, operands, timer)
    monkeypatch.setattr(environment, "clocks", dict)


def product(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c.copy_(a @ b)


def dropped_tail(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c.copy_(a[:, :-1] @ b[:-1])


def unwritten_row(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    c[1:] = (a @ b)[1:]


def not_taken(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    raise UnsupportedOperandError("rows are not aligned")


def broken(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    raise RuntimeError("PassManager::run failed")


@pytest.mark.usefixtures("no_gpu")
def test_only_what_passes_its_check_is_timed(tmp_path: Path) -> None:
    problem = Problem(48, 40, 72, "ieee")
    calls = {CUBLAS: product, "right": product, "tail": dropped_tail, "row": unwritten_row}
    subjects = [timer.Provider(name, call) for name, call in calls.items()]
    subjects += [timer.Provider("absent", not_taken), timer.Provider("broken", broken)]
    measured = timer.measure(problem, subjects, CUBLAS, budget_s=0.01)
    results = measured["providers"]
    assert {name for name, result in results.items() if "time_ms" in result} == {CUBLAS, "right"}
    assert results["right"]["ratio"]["median"] == 1.0
    assert results["right"]["error"]["bound"] < 1
    assert "bound" in results["tail"]["failed"]
    assert "not finite" in results["row"]["failed"]
    assert results["absent"] == {"absent": "rows are not aligned"}
    assert results["broken"]["failed"] == "RuntimeError: PassManager::run failed"
    made = Record(tmp_path, dict(SURROUNDINGS))
    made.put_problem(problem.key, measured)
    assert [line.partition(" ")[0] for line in made.failures()] == ["tail", "row", "broken"]


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("mode", ["fp16", "int32"])
def test_other_precisions_are_measured(mode: str) -> None:
    problem = Problem(16, 24, 40, mode)
    providers = [timer.Provider("right", product)]
    result = timer.measure(problem, providers, None, budget_s=0.01)["providers"]["right"]
    assert result["time_ms"]["median"] == 1.0
    assert result["ratio"] is None


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_the_bound_holds_for_torch_and_is_not_loose_beyond_the_rounding(mode: str) -> None:
    dtype = operands.MODE_DTYPES[mode]
    generator = torch.Generator().manual_seed(1)
    a, b = (operands.draw(shape, dtype, generator) for shape in ((40, 300), (300, 24)))
    c0 = operands.draw((40, 24), dtype, generator)
    expected = numerics.reference(a, b, c0, 0.5, -2.0)
    bound = numerics.error_bound(a, b, c0, 0.5, -2.0, mode, dtype)
    rounded = expected.to(dtype)
    assert bool(((rounded.double() - expected).abs() <= bound).all())
    assert bool(((rounded.double() - expected).abs().max() / bound.max()) > 0.2)


def test_blas_rules_of_the_reference() -> None:
    nan = torch.full((3, 3), math.nan)
    ones = torch.ones(3, 3)
    assert bool((numerics.reference(nan, nan, ones, 0.0, 2.0) == 2).all())
    assert bool((numerics.reference(ones, ones, nan, 1.0, 0.0) == 3).all())


def test_rooflines() -> None:
    assert roofline.intensity(4096, 4096, 4096, 4) == pytest.approx(4096 / 6)
    assert roofline.attainable_tflops(10.0, 60.0, 3.0) == 30.0
    assert roofline.attainable_tflops(100.0, 60.0, 3.0) == 60.0
    h100 = roofline.TYPICAL[9, 0]
    assert roofline.unit_peak_tflops((9, 0), "fp16", h100.num_sms, h100.clock_ghz) == pytest.approx(989, rel=0.01)
    assert roofline.unit_peak_tflops((9, 0), "tf32", h100.num_sms, h100.clock_ghz) == pytest.approx(495, rel=0.01)
    a100 = roofline.TYPICAL[8, 0]
    assert roofline.unit_peak_tflops((8, 0), "ieee", a100.num_sms, a100.clock_ghz) == pytest.approx(19.5, rel=0.01)


def test_predicted_ceilings_follow_the_tile() -> None:
    small = GemmConfig(BLOCK_M=128, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)
    large = GemmConfig(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)
    ours = [prediction.ceiling(config, "fp16", 2, (9, 0)) for config in (small, large)]
    assert ours[0].share < ours[1].share <= 1
    assert ours[0].limit == "L2"
    naive = prediction.ceiling(GemmConfig(BLOCK_M=256, num_warps=8), "ieee", 4, (9, 0))
    coalesced = prediction.ceiling(GemmConfig(BLOCK_N=256, num_warps=8), "ieee", 4, (9, 0))
    assert naive.limit == coalesced.limit == "L1"
    assert coalesced.tflops == pytest.approx(16.5 * naive.tflops)
    assert prediction.blocks_per_sm(registers=128, shared=0, num_warps=8, capability=(9, 0)) == 2
    assert prediction.blocks_per_sm(registers=32, shared=100 << 10, num_warps=4, capability=(9, 0)) == 2


def test_pages_show_the_results_that_are_committed() -> None:
    assert pages.stale() == []


NONE = pages.Results([], [], [])


def test_pages_are_filled_between_their_markers_only(record: Record, tmp_path: Path) -> None:
    text = "before\n<!-- results:ladder -->\nold\n<!-- /results -->\nafter\n"
    results = pages.Results([record], [], [])
    filled = pages.filled(text, results, tmp_path)
    assert filled.startswith("before\n<!-- results:ladder -->\n")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "old" not in filled
    assert "k11 " in filled
    assert pages.filled(filled, results, tmp_path) == filled
    with pytest.raises(ValueError, match="no block"):
        pages.filled(text.replace("ladder", "nonsense"), results, tmp_path)


@pytest.mark.parametrize("name", pages.BLOCKS)
def test_a_block_without_results_says_so(name: str, tmp_path: Path) -> None:
    text = f"<!-- results:{name} -->\n<!-- /results -->\n"
    assert "committed yet" in pages.filled(text, NONE, tmp_path)


def second_gpu(record: Record, folder: Path, factor: float) -> Record:
    """The same ladder on an H200, measured later, with all but cuBLAS `factor` times as fast."""
    made = {"gpu": "NVIDIA H200", "triton": "3.9.0", "date": "2026-06-01T00:00:00+00:00", "commit": None}
    data = json.loads(json.dumps(record.data))
    data["environment"] |= made
    data["ceilings"]["measured"]["copy_tbs"] = 4.3
    for problem in data["problems"].values():
        for name, result in problem["providers"].items():
            if name != CUBLAS:
                result["time_ms"] = {key: value / factor for key, value in result["time_ms"].items()}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(data))
    return Record.read(folder)


def block(name: str, results: pages.Results, folder: Path) -> str:
    return pages.filled(f"<!-- results:{name} -->\n<!-- /results -->", results, folder)


def test_two_gpus_stand_side_by_side(record: Record, tmp_path: Path) -> None:
    other = second_gpu(record, tmp_path / "h200", 2.0)
    alone, both = pages.Results([record], [], []), pages.Results([record, other], [], [])
    table = block("ladders", both, tmp_path)
    header = next(line for line in table.splitlines() if line.startswith("| rung"))
    per_gpu = "Made-up GPU, TFLOPS | of cuBLAS | rung / twin | H200, TFLOPS | of cuBLAS | rung / twin |"
    assert header == f"| rung | precision | {per_gpu}"
    k03 = next(line.split(" | ") for line in table.splitlines() if line.startswith("| k03"))
    assert float(k03[5]) == pytest.approx(2 * float(k03[2]), rel=0.01)
    assert f"[the whole report]({os.path.relpath(record.folder, tmp_path)}/report.md)" in table.replace("](r", "](./r")
    assert "[the whole report](h200/report.md). Commit not recorded, sources `000000000000`" in table
    assert "NVIDIA H200, torch 2.11.0, Triton 3.9.0, CUDA 13.0" in table
    # The newest picture, both GPUs' words and tables for a rung; what docs/ladder.md explains stays the first GPU's.
    assert "](h200/ladder.png)" in block("picture", both, tmp_path)
    assert "Made-up GPU" in block("picture", alone, tmp_path)
    for name in ("roofline", "factors", "targets", "sweep-ieee"):
        assert block(name, both, tmp_path) == block(name, alone, tmp_path)
        assert "Made-up GPU" in block(name, both, tmp_path)
    rung = block("k03", both, tmp_path)
    assert "**Measured** on Made-up GPU: " in rung
    assert "**Measured** on H200: " in rung
    assert block("ladder", both, tmp_path).count("| k03 blocked | ieee |") == 2


def test_what_differs_between_the_gpus_is_read_from_their_records(record: Record, tmp_path: Path) -> None:
    both = pages.Results([record, second_gpu(record, tmp_path / "h200", 1.0)], [], [])
    rows = [line.strip("| ").split(" | ") for line in block("gpus", both, tmp_path).splitlines() if "|" in line]
    table = {name: cells for name, *cells in rows}
    assert rows[0][-2:] == ["Made-up GPU", "H200"]
    assert table["copy, read and written, TB/s"] == ["2.9", "4.3"]
    assert table["SMs"] == ["132", "132"]
    assert float(table["best cuBLAS fp16, TFLOPS"][0]) > 600
    sweep = {"suite": "decode", "copy_tbs": 2.8, "shapes": {}, "environment": {**SURROUNDINGS, "gpu": "Third"}}
    only_bench = block("gpus", pages.Results([record], [sweep], []), tmp_path)
    assert "| copy, as suite `decode` measured it, TB/s |  | 2.8 |" in only_bench


@pytest.fixture
def page_of_two(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a folder of results of a project that does not exist; both GPUs' sources are today's."""
    results = tmp_path / "results"
    results.mkdir()
    record.folder = results / "made-up-gpu"
    record.folder.mkdir()
    record.environment["sources"] = "1" * 12
    record.save()
    second_gpu(record, results / "h200", 2.0)
    target = tmp_path / "README.md"
    target.write_text("<!-- results:ladders -->\n<!-- /results -->\n")
    monkeypatch.setattr(pages, "RESULTS", results)
    monkeypatch.setattr(pages, "PAGES", (target,))
    monkeypatch.setattr(environment, "source_hash", lambda _: "1" * 12)
    return target


def test_pages_say_when_the_sources_changed_and_are_not_stale_for_that(
    page_of_two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert set(pages.stale()) == {page_of_two, *(pages.RESULTS / gpu / "report.md" for gpu in ("made-up-gpu", "h200"))}
    assert pages.main(["--check"]) == 1
    assert "is stale: python perf/pages.py" in capsys.readouterr().err
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    assert "Commit `abc1234`, sources `111111111111`." in page_of_two.read_text()
    assert "Commit not recorded, sources `111111111111`." in page_of_two.read_text()
    report = pages.RESULTS / "made-up-gpu" / "report.md"
    assert "- Commit `abc1234`, sources `111111111111`\n" in report.read_text()

    monkeypatch.setattr(environment, "source_hash", lambda _: "2" * 12)
    assert pages.stale() == []
    pages.rewrite()
    assert page_of_two.read_text().count("sources `111111111111` (changed since).") == 2
    assert "- Commit `abc1234`, sources `111111111111` (changed since)\n" in report.read_text()
    assert pages.stale() == []
    report.unlink()
    assert pages.stale() == [report]


def test_each_commit_and_source_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "source_hash", {"bench": "today"}.__getitem__)
    made = [{"commit": "abc", "sources": "today"}, {"commit": None, "sources": "old"}, {}]
    expected = (
        "Commit `abc`, sources `today`; commit not recorded, sources `old` (changed since); "
        "commit not recorded, sources not recorded."
    )
    assert environment.origin([*made, *made], "bench") == expected


def git(folder: Path, *arguments: str) -> str:
    identity = ("-c", "user.name=nobody", "-c", "user.email=nobody@example.com")
    return subprocess.run(["git", *identity, *arguments], cwd=folder, check=True, capture_output=True, text=True).stdout


needs_git = pytest.mark.skipif(shutil.which("git") is None, reason="needs git")


@pytest.fixture
def checkout(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A project of one file in git, which `environment` takes for its own."""
    found = (tmp_path / "checkout").resolve()
    found.mkdir()
    (found / "kernel.py").write_text("fast = True\n")
    git(found, "init", "--quiet")
    git(found, "add", ".")
    git(found, "commit", "--quiet", "--message", "all")
    monkeypatch.setattr(environment, "ROOT", found)
    monkeypatch.delenv(environment.COMMIT, raising=False)
    return found


@needs_git
def test_a_record_names_the_commit_and_whether_files_differ_from_it(checkout: Path) -> None:
    commit = git(checkout, "rev-parse", "--short", "HEAD").strip()
    assert environment.commit() == commit
    (checkout / "perf" / "results").mkdir(parents=True)
    (checkout / "perf" / "results" / "new.json").write_text("{}")
    assert environment.commit() == commit
    (checkout / "kernel.py").write_text("fast = False\n")
    assert environment.commit() == f"{commit}+"


@needs_git
def test_a_copy_is_told_its_commit(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a repository of its own, of another commit, as without one or inside of another's."""
    inside = checkout / "copy"
    inside.mkdir()
    (tmp_path / "copy").mkdir()
    for root in (checkout, tmp_path / "copy", inside):
        monkeypatch.setattr(environment, "ROOT", root.resolve())
        monkeypatch.setenv(environment.COMMIT, "fedcba9")
        assert environment.commit() == "fedcba9"
        for nothing in ("", " "):
            monkeypatch.setenv(environment.COMMIT, nothing)
            assert (environment.commit() is None) is (root != checkout)


@pytest.mark.parametrize("measured", environment.SOURCES)
def test_the_hash_follows_what_is_measured(measured: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert environment.describe(measured)["sources"] == environment.source_hash(measured)
    for name in environment.SOURCES[measured]:
        source = ROOT / name
        assert source.exists()
        target = tmp_path / name
        if source.is_dir():
            shutil.copytree(source, target, ignore=shutil.ignore_patterns("__pycache__"), dirs_exist_ok=True)
        else:
            target.parent.mkdir(exist_ok=True)
            shutil.copy(source, target)
    monkeypatch.setattr(environment, "ROOT", tmp_path)
    hashed = environment.source_hash.__wrapped__
    before = environment.source_hash(measured)
    assert hashed(measured) == before
    (tmp_path / "README.md").write_text("other words")
    assert hashed(measured) == before
    for name in ("triton_gemm/ladder/k06_pipelined.py", "perf/timer.py"):
        with (tmp_path / name).open("a") as file:
            file.write("# changed\n")
        assert hashed(measured) != before
        before = hashed(measured)
    kernel = tmp_path / "triton_gemm" / "kernels" / "fma.py"
    assert kernel.exists() == (measured != "ladder")


def test_the_hash_of_the_ladder_holds_all_that_its_rungs_import() -> None:
    covered = environment.SOURCES["ladder"]
    waiting = [ROOT / "triton_gemm" / "ladder" / "__init__.py"]
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for _, module in imports(path, ROOT):
            target = ROOT.joinpath(*module.split("."))
            if module.startswith("triton_gemm.") and not target.is_dir():
                waiting.append(target.with_suffix(".py"))
    names = {path.relative_to(ROOT).as_posix() for path in seen if path.exists()}
    assert {"triton_gemm/ladder/k11_warp_specialised.py", "triton_gemm/config.py"} <= names
    assert [name for name in names if not name.startswith(covered)] == []


def report(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    surroundings = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    surroundings.pop("PYTHONPATH", None)
    return subprocess.run(
        [sys.executable, str(ROOT / "perf" / "report.py"), *arguments],
        cwd=cwd,
        env=surroundings,
        capture_output=True,
        text=True,
    )


def test_an_unwritable_folder_is_an_error_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = report("--out", str(tmp_path / "file" / "results"))
    assert done.returncode == 2
    assert "cannot write" in done.stderr
    assert "[  1/" not in done.stderr


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        ("--rungs k99", "--rungs: no rung 'k99'"),
        ("--sizes 1024,many", "--sizes"),
        ("--dtype fp8", "--dtype"),
        ("--out ''", "--out: an empty name"),
        ("--sizes 512 --dtype fp16 --counters", "--dtype, --sizes, --counters would be ignored: torch sees no GPU"),
    ],
)
def test_a_mistaken_call_is_refused(
    arguments: str, complaint: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as exit_:
        climb.main(shlex.split(arguments))
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_flags_that_choose_nothing_are_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options, _, _ = climb.parse(["--dtype", "fp16", "--sizes", "512", "--counters"])
    assert (options.modes, options.sizes, options.counters) == (("fp16",), (512,), True)
    with pytest.raises(SystemExit):
        climb.parse(["--rungs", "k01,k02", "--dtype", "fp16"])
    assert "none of the rungs of --rungs multiplies fp16" in capsys.readouterr().err


MODULES = sorted(path.stem for path in (ROOT / "perf").glob("*.py") if path.stem != "__init__")


def run_module(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", name, *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True)


def test_commands_are_what_can_be_run() -> None:
    assert [name for name in MODULES if "__main__" in (ROOT / "perf" / f"{name}.py").read_text()] == sorted(COMMANDS)
    listed = run_module("perf")
    assert listed.returncode == 0
    assert all(f"python -m perf.{name} " in listed.stdout for name in COMMANDS)


@pytest.mark.parametrize("name", COMMANDS)
def test_every_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as exit_:
        importlib.import_module(f"perf.{name}").main(["--help"])
    assert exit_.value.code == 0
    assert f"perf{'/' if name in ('report', 'pages') else '.'}{name}" in capsys.readouterr().out


def test_a_module_that_is_no_command_leads_to_those() -> None:
    for name in set(MODULES) - COMMANDS.keys():
        for arguments in ([], ["--help"]):
            done = run_module(f"perf.{name}", *arguments)
            assert done.returncode == 2
            assert f"perf.{name} does nothing by itself" in done.stderr
            assert "python -m perf.bench " in done.stderr
    assert "No module named perf.nonsense" in run_module("perf.nonsense").stderr


@pytest.mark.parametrize(
    ("main", "arguments", "complaint"),
    [
        (counters.main, "", "STEM"),
        (counters.main, "c99 a 64", "invalid choice: 'c99'"),
        (counters.main, "c03_shared_tiled nonsense 64", "no variant 'nonsense' of c03_shared_tiled; there are"),
        (counters.main, "c03_shared_tiled fp32_32 0", "SIZE: a whole number from 1 on, not '0'"),
        (interpret.main, "k01 k99", "no rung k99; there are k01"),
        (interpret.main, "k01", "set TRITON_INTERPRET=1"),
    ],
)
def test_mistaken_calls_of_other_commands_are_refused(
    main: Callable[[list[str]], Any], arguments: str, complaint: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as exit_:
        main(arguments.split())
    assert exit_.value.code == 2
    assert complaint in capsys.readouterr().err


def test_counting_needs_a_gpu(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert counters.main(["c03_shared_tiled", "fp32_32", "64"]) == 2
    assert "needs a CUDA GPU" in capsys.readouterr().err


@pytest.mark.full
@pytest.mark.slow
def test_without_a_gpu_and_from_any_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = report("--quick", "--rungs", "k01,k03", "--out", str(out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (out / "report.md").read_text()
    assert "not timings" in written
    assert "k03_blocked" in written
    assert (out / "static-resources.png").exists()

    data = json.loads((out / "results.json").read_text())
    assert {facts["target"] for facts in data["static"].values()} == {"sm_80", "sm_89", "sm_90", "sm_100", "sm_120"}
    assert all(row["bound"] <= 1 for row in data["interpreter"].values())

    # A second run finds nothing left to do; a wrong result among the kept ones decides its exit status.
    key = next(iter(data["interpreter"]))
    data["interpreter"][key]["failed"] = "a result is off by 3 times the bound"
    (out / "results.json").write_text(json.dumps(data))
    again = report("--quick", "--rungs", "k01,k03", "--out", str(out), cwd=tmp_path)
    assert again.returncode == 1
    assert f"FAILED {key}" in again.stderr
    assert "[  1/" not in again.stderr
    assert "a result is off" in (out / "report.md").read_text()
