"""The report: what it records, resumes, draws and says, from made-up measurements; and one real run without a GPU."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from perf.ladder import clock_model, published, rungs_and_twins, static, tasks, views
from perf.ladder import report as climb
from perf.ladder.record import FILE, SECTIONS, Record, Result, Spread
from perf.measure import environment
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from reference_cuda import TWINS, LoadedTwin
from tests.support.processes import python
from tests.support.report_records import OPTIONS, SURROUNDINGS, add_static_facts, committed_record
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import device_of_capability
from triton_gemm.ladder import LADDER
from triton_gemm.ladder.command import config_of

ROOT = Path(__file__).parents[2]
RECORDS = sorted(path.parent.name for path in environment.RESULTS.glob(f"*/{FILE}"))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return committed_record(tmp_path)


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
    [('"time_ms"', '"time_s"'), ('"hot": false', '"hot": "no"'), ('"budget_s"', '"budget"'), ('"mode"', '"class"')],
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


def test_ceilings_follow_the_tile() -> None:
    small = GemmConfig(BLOCK_M=64, BLOCK_N=128, BLOCK_K=64, num_warps=8, num_stages=3)
    large = GemmConfig(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=3)
    ours = [clock_model.ceiling(config, "fp16", 2, (9, 0)) for config in (small, large)]
    assert ours[0].share < ours[1].share <= 1
    assert ours[0].limit == "L2"
    for mode, itemsize in (("tf32", 4), ("fp16", 2)):  # what k07 says of `wgmma`'s 64 x 256
        limits = clock_model.limits(large, mode, itemsize, (9, 0))
        assert limits["shared memory"] == 128 / 80 * limits["units"]
    naive = clock_model.ceiling(GemmConfig(BLOCK_M=256, num_warps=8), "ieee", 4, (9, 0))
    coalesced = clock_model.ceiling(GemmConfig(BLOCK_N=256, num_warps=8), "ieee", 4, (9, 0))
    assert naive.limit == coalesced.limit == "L1"
    assert coalesced.tflops == pytest.approx(16.5 * naive.tflops)
    for rung in LADDER[:6]:  # "L1", "shared-memory bandwidth", "issue slots"
        limit = clock_model.ceiling(rung.configs[0], "ieee", 4, (9, 0)).limit
        assert limit in rung.header["Bound by"].replace("-", " ").partition(",")[0], rung.id
    assert clock_model.strip_wavefronts(LADDER[0].configs[0]) == 65 / 2  # two rows a thread
    assert clock_model.strip_wavefronts(LADDER[1].configs[0]) == 5 / 4  # four columns a thread


def test_one_peak_of_a_gpu(record: Record) -> None:
    """fp32's units reach theirs at 1980 MHz, tensor cores at 1830: NVIDIA's 67 and 989 TFLOPS of an H100."""
    peak = {mode: clock_model.ceiling(GemmConfig(64, 64, 16), mode, 4, (9, 0)) for mode in ("ieee", "fp16")}
    found = {mode: best.tflops / best.share for mode, best in peak.items()}
    assert found == pytest.approx({"ieee": 66.9, "fp16": 989}, rel=1e-3)
    (ffma,) = [roof.tflops for roof in views.roofs(record)[1] if "FFMA" in roof.label]
    assert ffma == pytest.approx(found["ieee"])


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
    assert clock_model.blocks_per_sm(registers, shared, num_warps, capability) == blocks


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
        limits = clock_model.limits(config, mode, rung.dtypes[0].itemsize, (9, 0))
        assert tflops <= 132 * 1.98e-3 * min(limits.values()), (name, text)
        seen[name] += 1
    assert set(seen) == set(rungs), "a rung was not seen"


def report(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    return python(ROOT / "perf" / "report.py", *arguments, cwd=cwd, CUDA_VISIBLE_DEVICES="", PYTHONPATH=None)


def test_what_is_chosen_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(shutil, "which", lambda name: f"/usr/bin/{name}")
    options, _, _ = climb.parse(["--dtype", "fp16", "--sizes", "512"])
    assert (options.modes, options.sizes, options.counters) == (("fp16",), (512,), False)
    options, _, _ = climb.parse(["--rungs", "k03", "--counters"])
    assert options.counters and not options.every_rung


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
