"""The report: what it records, resumes, draws and says, from made-up measurements; and one real run without a GPU."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from perf.bench import plots as bench_plots
from perf.bench import tables as bench_tables
from perf.common import formats, style
from perf.common.dataclass_json import from_json
from perf.ladder import (
    autotuner,
    curves,
    plots,
    prediction,
    published,
    report_page,
    rungs_and_twins,
    static,
    tables,
    tasks,
    views,
)
from perf.ladder import report as climb
from perf.ladder.record import COUNTERS, FILE, SECTIONS, Counters, Record, Result, Spread, StaticFacts
from perf.measure import environment
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS, LoadedTwin
from tests.support.report_records import OPTIONS, SURROUNDINGS, committed_record, figures_of, overlapping, texts_of
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.ladder import LADDER
from triton_gemm.ladder.command import config_of

ROOT = Path(__file__).parents[2]
RECORDS = sorted(path.parent.name for path in environment.RESULTS.glob(f"*/{FILE}"))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return committed_record(tmp_path)


OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return figures_of(monkeypatch, plots, curves, bench_plots, autotuner)


def add_static_facts(record: Record) -> None:
    for rung, target in itertools.product(LADDER, static.ARCHITECTURES):
        facts = {"rung": rung.name, "target": target, "config": "64x64x16", "dtype": "float16", "default": True}
        facts |= {"registers": 96, "shared": 8192, "ceiling_share": 0.7}
        record.static[f"{rung.name} {target}"] = from_json(StaticFacts, facts)


def made_up_points() -> list[bench_tables.Point]:
    """Modes whose speed and error are nearly the same, and one without an error."""
    modes = {"ieee": 50, "fp8": 970, "fp8-blocks": 960, "fp8-rows": 965, "fp8-fast": 1000, "int8": 1100}
    return [
        bench_tables.Point(provider, mode, layout, speed, {"norm": 0.0 if mode == "int8" else 1.7e-3})
        for mode, speed in modes.items()
        for layout in ("nn", "nt")
        for provider in ("triton_gemm", CUBLAS)
    ]


def named_lines(figure: Any) -> list[Any]:
    """The lines of the first axes that a reader has to find by their name."""
    return [line for line in figure.axes[0].lines if not str(line.get_label()).startswith("_")]


def said(figure: Any) -> str:
    return " ".join(text.get_text() for text in texts_of(figure)).replace("\n", " ")


@pytest.mark.parametrize("gpu", RECORDS)
def test_everything_is_drawn_and_no_text_lies_on_another(gpu: str, figures: dict[str, Any], tmp_path: Path) -> None:
    record = Record.read(environment.RESULTS / gpu)
    add_static_facts(record)
    plots.everything(record, tmp_path)
    bench_plots.precisions(made_up_points(), "Made-up GPU", tmp_path / "precision.png")
    expected = {"ladder", "roofline", "factors", "static-resources", "static-ceilings", "precision"}
    expected |= {f"sweep-{mode}" for mode in OPTIONS.modes}
    expected |= {f"experiment-{source.id}" for source in published.EXPERIMENTS if len(source.kernels) > 1}
    expected |= {f"tuning-{tuning.rung.id}" for tuning in autotuner.shown(record)}
    assert figures.keys() == {f"{name}.png" for name in expected}
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}
    header, *rows = (tmp_path / "sweep-ieee.csv").read_text().splitlines()
    assert header.startswith("size,provider,tflops,tflops_p20,tflops_p80")
    assert len(rows) >= len(OPTIONS.sizes)


def test_precisions_without_any_error_are_drawn(tmp_path: Path) -> None:
    exact = [point for point in made_up_points() if point.mode == "int8"]
    assert bench_plots.precisions(exact, "Made-up GPU", tmp_path / "precision.png").exists()


@pytest.mark.full
def test_every_line_can_be_told_from_the_others_whatever_the_colour_vision(
    record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    assert {colour.lower() for colour in style.PALETTE} < OKABE_ITO
    add_static_facts(record)
    plots.everything(record, tmp_path)
    for name in [*(f"sweep-{mode}.png" for mode in OPTIONS.modes), "roofline.png", "static-resources.png"]:
        lines = named_lines(figures[name])
        looks = {str(line.get_label()): (str(line.get_color()).lower(), line.get_marker()) for line in lines}
        assert {colour for colour, _ in looks.values()} <= OKABE_ITO, name
        others = {label: look for label, look in looks.items() if CUBLAS not in label and "FFMA" not in label}
        assert len(set(others.values())) == len(others) > 0, name
        assert {marker for _, marker in others.values()}.isdisjoint("D"), name
        assert {look for label, look in looks.items() if CUBLAS in label} <= {("#000000", "D")}, name
    assert len(named_lines(figures["sweep-ieee.png"])) == 14


@pytest.mark.full
def test_sizes_that_are_no_multiple_of_16_are_marks_apart_and_explained(
    record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    plots.everything(record, tmp_path)
    sweep = figures["sweep-fp16.png"]
    lines = named_lines(sweep)
    assert all(set(line.get_xdata()) == {512, 1024, 2048, 4096, 6144, 8192} for line in lines)
    marks = [line for line in sweep.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert sorted(line.get_xdata()[0] for line in marks) == [1400] * len(lines) + [3000] * len(lines)
    assert "multiple of 16" in said(sweep)
    record.problems = {key: problem for key, problem in record.problems.items() if problem.M % 16 == 0}
    pictures = plots.everything(record, tmp_path)
    assert "multiple of 16" not in said(figures["sweep-fp16.png"])
    assert "multiple of 16" not in report_page.write(record, pictures).read_text()


@pytest.mark.full
def test_the_ladder_shows_shares_of_what_it_draws(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    problem = record.problems[Problem(4096, 4096, 4096, "fp16").key]
    step = next(step for step in views.ladder(record) if step.rung.id == "k08")
    assert step.twin is not None
    shares = []
    for name in (step.rung.name, step.twin):
        result, cublas = problem.timed(name), problem.timed(CUBLAS)
        assert result is not None and cublas is not None
        of_other_rounds = Spread(median=3.21, p20=3.21, p80=3.21)
        problem.providers[name] = replace(result, ratio=of_other_rounds)
        shares.append(formats.percent(cublas.time_ms.median / result.time_ms.median))
    plots.everything(record, tmp_path)
    assert "321 %" not in said(figures["ladder.png"])
    assert all(f" {share} " in said(figures["ladder.png"]) for share in shares)
    row = next(line for line in tables.ladder(record).splitlines() if line.startswith("| k08"))
    assert f"| {shares[0]} |" in row


@pytest.mark.full
@pytest.mark.parametrize("kept", ["no cuBLAS", "no twins", "one rung", "odd sizes only"])
def test_a_record_that_lacks_much_is_drawn(kept: str, record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    keeps = {
        "no cuBLAS": lambda name: name != CUBLAS,
        "no twins": lambda name: not name.startswith("c0") and not name.startswith("c1"),
        "one rung": lambda name: name == "k03_blocked",
    }.get(kept, lambda name: True)
    for key, problem in list(record.problems.items()):
        providers = {name: result for name, result in problem.providers.items() if keeps(name)}
        record.problems[key] = replace(problem, providers=providers)
        if kept == "odd sizes only" and problem.M % 16 == 0 and not problem.hot:
            del record.problems[key]
    pictures = plots.everything(record, tmp_path)
    assert {"ladder.png", "sweep-ieee.png"} <= figures.keys()
    assert ("sweep-fp16.png" in figures) == (kept != "one rung")
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}
    report_page.write(record, pictures)


@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=20).map(sorted))
def test_names_are_spread_apart_and_stay_near(wanted: list[float]) -> None:
    gap = 0.04
    places = style.spread(wanted, gap, 0, 1)
    assert all(after - before >= gap - 1e-9 for before, after in itertools.pairwise(places))
    assert places[0] >= -1e-9
    assert places[-1] <= 1 + 1e-9
    if all(after - before >= gap for before, after in itertools.pairwise(wanted)) and 0 <= wanted[0] <= wanted[-1] <= 1:
        assert places == pytest.approx(wanted)


def test_what_failed_or_is_absent_is_said(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    problem = Problem(4096, 4096, 4096, "ieee")
    record.problems[problem.key].providers["k06_pipelined"] = Result(failed="a result is off")
    for size in set(OPTIONS.sizes) - {4096}:
        del record.problems[Problem(size, size, size, "ieee").key].providers["k06_pipelined"]
    record.experiments[COUNTERS] = Counters(unavailable="there is no ncu")
    assert "k06_pipelined" not in views.lines(record, "ieee")
    assert record.failures() == [f"k06_pipelined on {problem.key}: a result is off"]
    written = report_page.write(record, [plots.ladder(record, tmp_path)]).read_text()
    assert "a result is off" in written and "Not counted: there is no ncu." in written
    assert "failed its check" in said(figures["ladder.png"])


def test_a_record_resumes_only_in_the_same_surroundings(record: Record) -> None:
    again, state = Record.open(record.folder, record.environment, fresh=False)
    assert again == record
    assert state.startswith("continuing")
    other, state = Record.open(record.folder, {**record.environment, "triton": "3.7.1"}, fresh=False)
    assert other == Record(record.folder, other.environment)
    assert "triton changed" in state
    dropped, _ = Record.open(record.folder, record.environment, fresh=True)
    assert dropped == Record(record.folder, record.environment)


def test_a_problem_is_measured_again_for_a_new_provider_or_a_larger_budget(record: Record) -> None:
    key = Problem(4096, 4096, 4096, "ieee").key
    assert record.has_problem(key, [CUBLAS, "k03_blocked"], tasks.BUDGET_S)
    assert record.has_problem(key, [CUBLAS], tasks.QUICK_BUDGET_S)
    assert not record.has_problem(key, [CUBLAS], 2 * tasks.BUDGET_S)
    assert not record.has_problem(key, [CUBLAS, "k99_new"], tasks.BUDGET_S)
    before = set(record.problems[key].providers)
    record.put_problem(key, replace(record.problems[key], providers={"k99_new": Result(absent="not taken")}))
    assert set(record.problems[key].providers) == before | {"k99_new"}


def test_an_unreadable_record_is_not_the_end(tmp_path: Path) -> None:
    (tmp_path / FILE).write_text('{"environment": {"gp')
    _, state = Record.open(tmp_path, SURROUNDINGS, fresh=False)
    assert "unreadable" in state


@pytest.mark.parametrize("gpu", RECORDS)
def test_a_committed_record_is_written_as_it_was_read(gpu: str, tmp_path: Path) -> None:
    """But for empty sections, which came and went."""
    committed = environment.RESULTS / gpu
    record = Record.read(committed)
    record.folder = tmp_path
    record.save()
    before, after = (json.loads((folder / FILE).read_text()) for folder in (committed, tmp_path))
    assert list(after) == ["environment", *SECTIONS]
    filled = [{name: section for name, section in each.items() if section} for each in (before, after)]
    assert filled[0] == filled[1]


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ('"time_ms"', '"time_s"'),
        ('"hot": false', '"hot": "no"'),
        ('"budget_s"', '"budget"'),
        ('"mode"', '"class"'),
    ],
)
def test_what_is_no_record_is_not_read(old: str, new: str, record: Record) -> None:
    add_static_facts(record)
    record.save()
    text = (record.folder / FILE).read_text()
    (record.folder / FILE).write_text(text.replace(old, new, 1))
    with pytest.raises(ValueError, match=r"ProblemResult|Timed|bool"):
        Record.read(record.folder)
    _, state = Record.open(record.folder, record.environment, fresh=False)
    assert "unreadable" in state


def test_every_published_kernel_has_a_twin() -> None:
    ids = {kernel.id for source in published.EXPERIMENTS for kernel in source.kernels}
    assert ids == {seed for twin in TWINS.values() for variant in twin.variants for seed in variant.retells}
    for kernel_id in ids:
        twin, variant = published.twin_of(kernel_id)
        assert variant in twin.variants
    sources = {source.id: source for source in published.EXPERIMENTS}
    s3, s4 = sources["S3"], sources["S4"]
    assert s3.published_speedup(s3.kernels[1]) == pytest.approx(7.61, abs=0.01)
    assert s3.published_share(s3.kernels[3]) == pytest.approx(0.182, abs=0.001)
    assert s4.published_speedup(s4.kernels[5]) == pytest.approx(64.9, abs=0.1)


def test_what_is_too_fast_is_suspicious(record: Record) -> None:
    problem, name = record.problems[Problem(4096, 4096, 4096, "fp16").key], "k11_warp_specialised"
    assert not any(name in line for line in views.suspicious(record))
    result = problem.timed(name)
    assert result is not None
    problem.providers[name] = replace(result, ratio=Spread(median=1.2, p20=1.2, p80=1.2))
    assert any(name in line for line in views.suspicious(record))


def test_the_report_times_what_committed_records_have(record: Record, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(rungs_and_twins, "device_info", lambda _: device_of_capability((9, 0)))
    twins: tasks.Twins = {stem: LoadedTwin(twin, sys) for stem, twin in TWINS.items()}
    cubes = [Problem(size, size, size, mode) for mode in OPTIONS.modes for size in OPTIONS.sizes]
    timed = {cube: [subject.name for subject in tasks.sweep_providers(cube, OPTIONS, twins, record)] for cube in cubes}
    timed |= {problem: [CUBLAS, *names] for problem, names in tasks.experiment_problems()}
    for problem, names in timed.items():
        assert record.problems[problem.key].providers.keys() <= set(names)


def test_predicted_ceilings_follow_the_tile() -> None:
    small = GemmConfig(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)
    large = GemmConfig(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)
    ours = [prediction.ceiling(config, "fp16", 2, (9, 0)) for config in (small, large)]
    assert ours[0].share < ours[1].share <= 1
    assert ours[0].limit == "L2"
    for mode, itemsize in (("tf32", 4), ("fp16", 2)):  # what k07 says of `wgmma`'s 64 x 256
        limits = prediction.limits(large, mode, itemsize, (9, 0))
        assert limits["shared memory"] == 128 / 80 * limits["units"]
    naive = prediction.ceiling(GemmConfig(BLOCK_M=256, num_warps=8), "ieee", 4, (9, 0))
    coalesced = prediction.ceiling(GemmConfig(BLOCK_N=256, num_warps=8), "ieee", 4, (9, 0))
    assert naive.limit == coalesced.limit == "L1"
    assert coalesced.tflops == pytest.approx(16.5 * naive.tflops)
    assert prediction.strip_wavefronts(LADDER[0].configs[0]) == 65 / 2  # two rows a thread
    assert prediction.strip_wavefronts(LADDER[1].configs[0]) == 5 / 4  # four columns a thread


@pytest.mark.parametrize(
    ("registers", "shared", "num_warps", "capability", "blocks"),
    [
        (128, 0, 8, (9, 0), 2),
        (32, 100 << 10, 4, (9, 0), 2),
        (85, 0, 4, (9, 0), 5),  # given as 88
        (96, 0, 4, (9, 0), 5),
        (16, 0, 1, (9, 0), 32),
        (16, 0, 1, (12, 0), 24),
        (32, 0, 4, (8, 9), 12),  # 1536 threads
    ],
)
def test_blocks_of_an_sm(registers: int, shared: int, num_warps: int, capability, blocks: int) -> None:
    assert prediction.blocks_per_sm(registers, shared, num_warps, capability) == blocks


def test_all_warps_of_k11_count() -> None:
    """The load partition is a second warpgroup: with 255 registers for each of 256 threads one block fits an SM."""
    config = GemmConfig(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, GROUP_M=8, num_warps=4, num_stages=2)
    job = static.Job(LADDER[10], config, (9, 0), default=False, size=(512, 512, 512))
    facts = static.facts(job, static.capture(job.rung, config, job.size, job.dtype))
    assert facts.shared is not None and facts.shared < 64 << 10 and facts.blocks_per_sm == 1


def committed_times() -> Iterator[tuple[str, str, str, float]]:
    """(rung, precision, configuration as text, TFLOPS) of every committed time at a size that is a multiple of 16."""
    for path in environment.RESULTS.glob("*/results.json"):
        record = Record.read(path.parent)
        for entry in record.tuning.values():
            for text, tuned in entry.configs.items():
                if tuned.time_ms:
                    yield entry.rung, entry.mode, text, entry.tflops_in(tuned.time_ms.median)
        for problem in record.problems.values():
            for name in problem.providers if problem.M % 16 == 0 else ():
                result = problem.timed(name)
                if result and result.config and name.startswith("k"):
                    yield name, problem.mode, result.config, problem.tflops_in(result.time_ms.median)


def test_no_committed_time_beats_its_ceiling() -> None:
    """At 1.98 GHz, the most that these GPUs run at."""
    rungs = {rung.name: rung for rung in LADDER}
    seen = Counter[str]()
    for name, mode, text, tflops in committed_times():
        rung = rungs[name]
        config = config_of(rung, text) if "," in text else next((c for c in rung.configs if str(c) == text), None)
        if config is None:
            continue
        limits = prediction.limits(config, mode, rung.dtypes[0].itemsize, (9, 0))
        assert tflops <= 132 * 1.98e-3 * min(limits.values()), (name, text)
        seen[name] += 1
    assert set(seen) == set(rungs), "a rung was not seen"


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


def test_what_is_chosen_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    options, _, _ = climb.parse(["--dtype", "fp16", "--sizes", "512", "--counters"])
    assert (options.modes, options.sizes, options.counters) == (("fp16",), (512,), True)


@pytest.mark.full
@pytest.mark.slow
def test_without_a_gpu_and_from_any_folder(tmp_path: Path) -> None:
    out = tmp_path / "out"
    done = report("--quick", "--rungs", "k01,k03", "--out", str(out), cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    written = (out / "report.md").read_text()
    assert "not timings" in written
    assert "k03_blocked" in written
    assert "drawings/k03.svg)" in written and "drawings/k04.svg)" not in written
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
