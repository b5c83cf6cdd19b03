"""The report: what it records, resumes, draws and says, from made-up measurements; and one real run without a GPU."""

from __future__ import annotations

import itertools
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from perf import (
    draw,
    environment,
    numerics,
    operands,
    page,
    pages,
    prediction,
    roofline,
    seeds,
    suite,
    targets,
    timer,
    views,
)
from perf.operands import Problem
from perf.providers import CUBLAS
from perf.record import SECTIONS, Record
from reference_cuda import TWINS, LoadedTwin
from tests.fakes import take_gpu_away
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
    assert {f"experiment-{source.id}.png" for source in seeds.EXPERIMENTS} <= names
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


def test_pages_are_filled_between_their_markers_only(record: Record, tmp_path: Path) -> None:
    text = "before\n<!-- results:ladder -->\nold\n<!-- /results -->\nafter\n"
    filled = pages.filled(text, record, tmp_path)
    assert filled.startswith("before\n<!-- results:ladder -->\n")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "old" not in filled
    assert "k11 " in filled
    assert pages.filled(filled, record, tmp_path) == filled
    assert pages.NOTHING in pages.filled(text, None, tmp_path)
    with pytest.raises(ValueError, match="no block"):
        pages.filled(text.replace("ladder", "nonsense"), record, tmp_path)


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


@pytest.mark.parametrize("arguments", [("--rungs", "k99"), ("--sizes", "1024,many"), ("--dtype", "fp8")])
def test_a_mistaken_call_is_refused(arguments: tuple[str, str]) -> None:
    done = report(*arguments)
    assert done.returncode == 2
    assert arguments[0] in done.stderr


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
