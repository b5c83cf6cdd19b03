"""Tuning on a GPU: winners keep the bits and are fast, every kind of product can be tuned, what fails is left out."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from pathlib import Path
from statistics import median
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import triton

import triton_gemm
from tests.gpu.calls import captured
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.gpu.runtime.test_plan_gpu import assert_right, pair, random
from tests.gpu.sharing import shared_gpu
from tests.support import table_fakes
from tests.support.numerics import scale_shapes
from tests.support.processes import printed
from tests.support.threads import at_once
from triton_gemm import kernels, tables, tuning
from triton_gemm.hardware.device import current_device_info
from triton_gemm.problem import Request
from triton_gemm.runtime import plan, policies
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select
from triton_gemm.tuning import read_shapes, timing
from triton_gemm.tuning.report import TuningReport

BF16 = torch.bfloat16
SHAPES = [(16, 14336, 4096), (33, 4096, 4096), (800, 2392, 4472)]


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Tables of this test alone, and the package's own tuner."""
    with table_fakes.default_policy():
        policies.set_tuner(tuning._choose)
        tuning._chosen.cache_clear()
        yield table_fakes.own_folder(tmp_path, monkeypatch)
    tables.reload()


def assert_measured(report: TuningReport) -> None:
    assert all(shape.measured for shape in report.shapes), f"\n{report}"
    assert not any(shape.failed for shape in report.shapes), f"\n{report}"
    assert report.regret_after <= report.regret_before + 1e-9


def test_a_models_layers_are_served_for_the_rows_that_it_was_tuned_for() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(2048, 1024), torch.nn.Linear(1024, 2048)).cuda().bfloat16()
    x = random(100, 2048)
    with triton_gemm.use(), torch.no_grad():
        before = model(x)
        report = triton_gemm.tune(model, rows=range(1, 129), budget=40)
        print(f"\n{report}")
        assert_measured(report)
        assert {(x.problem.N, x.problem.bias) for x in report.shapes} == {(1024, "n"), (2048, "n")}
        assert torch.equal(model(x), before)
    assert report.served > 0 or not any(x.stored for x in report.shapes)


def test_winners_are_served_with_the_models_bits_and_are_as_fast_as_said() -> None:
    report = triton_gemm.tune(SHAPES, budget=40)
    print(f"\n{report}")
    assert_measured(report)
    assert report.seconds <= 50
    for size, shape in zip(
        SHAPES, sorted(report.shapes, key=lambda s: SHAPES.index((s.problem.M, s.problem.N, s.problem.K))), strict=True
    ):
        a, b = pair(size)
        with triton_gemm.policy("model"):
            expected = triton_gemm.matmul(a, b)
        assert torch.equal(triton_gemm.matmul(a, b), expected)
        source = triton_gemm.explain(a, b).source
        assert source == ("user's table" if shape.stored else "model")
        assert shape.us <= shape.choice_us and shape.fastest_us <= shape.us * 1.001
    again = triton_gemm.tune(SHAPES, budget=40, resume=True)
    assert {shape.outcome for shape in again.shapes} == {"known"} and again.seconds < 10


def test_any_bits_are_right() -> None:
    report = triton_gemm.tune(SHAPES, budget=40, bits="any")
    print(f"\n{report}")
    assert_measured(report)
    with triton_gemm.policy("cached", bits="any"):
        for size in SHAPES:
            a, b = pair(size)
            assert_right(a, b, triton_gemm.matmul(a, b))


def test_torch_is_timed_where_any_bits_are_asked_for() -> None:
    """And computes under use() what it is faster at by the table."""
    size = 512, 512, 512
    report = triton_gemm.tune([size], budget=20, bits="any")
    print(f"\n{report}")
    (shape,) = report.shapes
    assert shape.measured and shape.torch_us > 0 and f"torch {shape.torch_us / shape.us:.3g} of ours" in str(report)
    ratio = shape.torch_us / shape.us
    assert shape.torch_faster == (ratio < 1) or 0.8 < ratio < 1, "a little faster may be noise"
    a, b = pair(size)
    triton_gemm.report_routing(reset=True)
    with triton_gemm.policy("cached", bits="any"), triton_gemm.use():
        c = torch.mm(a, b)
    where = "torch: faster by table" if shape.torch_faster else "triton_gemm"
    assert triton_gemm.report_routing(reset=True) == {("mm", where): 1}
    assert_right(a, b, c)
    assert ", cuBLAS " in tables.torchs_versions()


def test_what_a_small_kernel_takes_is_told_from_its_launch() -> None:
    """Candidates that look slow at their first call are not timed again."""
    a, b = random(16, 1024), random(1024, 1024)
    problem = Request().problem(a, b, a @ b)
    chosen = plan.GemmPlan(problem, select(problem, current_device_info()), a.device)
    out = torch.empty(16, 1024, device="cuda", dtype=BF16)
    calls = [lambda: chosen.run(a, b, out)]
    replay = timing.Replay(calls, 100)
    timing.settle(replay.start, 1.0)
    in_graph = median(replay.start()() for _ in range(9))
    once = median(timing.once_ms(calls[0]) for _ in range(9))
    assert in_graph / 2 < once < 2 * in_graph + 0.003, f"{once} ms by itself, {in_graph} in a graph"


def fp8(*shape: int) -> torch.Tensor:
    return random(*shape, dtype=torch.float32).to(torch.float8_e4m3fn)


def scaled(kind: str) -> None:
    M, N, K = 256, 384, 512
    scales = [0.5 + torch.rand(shape, device="cuda") for shape in scale_shapes(kind, M, N, K)]
    triton_gemm.scaled_matmul(fp8(M, K), fp8(N, K).t(), *scales)


def grouped(groups: str) -> None:
    ends = torch.tensor([100, 100, 350, 512], device="cuda", dtype=torch.int32)
    b = random(4, 256, 384) if groups == "m" else random(512, 384)
    triton_gemm.grouped_matmul(random(512, 256) if groups == "m" else random(256, 512), b, ends)


PROGRAMS: dict[str, Callable[[], object]] = {
    "linear with gelu": lambda: triton_gemm.linear(random(256, 512), random(384, 512), random(384), "gelu"),
    "added to C": lambda: triton_gemm.addmm(random(256, 384), random(256, 512), random(512, 384), beta=0.5),
    "batch": lambda: triton_gemm.bmm(random(8, 256, 512), random(8, 512, 384)),
    "broadcast": lambda: triton_gemm.matmul(random(8, 256, 512), random(512, 384)),
    "vector": lambda: triton_gemm.mv(random(4096, 4096), random(4096)),
    "odd and unaligned": lambda: triton_gemm.matmul(random(255, 514)[:, 1:], random(513, 383)),
    "ieee": lambda: triton_gemm.matmul(random(256, 512, dtype=torch.float32), random(512, 384, dtype=torch.float32)),
    "bf16x6": lambda: triton_gemm.matmul(
        random(256, 512, dtype=torch.float32), random(512, 384, dtype=torch.float32), precision="bf16x6"
    ),
    "fp64": lambda: triton_gemm.matmul(random(256, 512, dtype=torch.float64), random(512, 384, dtype=torch.float64)),
    "int8": lambda: triton_gemm.matmul(
        torch.ones(256, 512, device="cuda", dtype=torch.int8), torch.ones(512, 384, device="cuda", dtype=torch.int8)
    ),
    "scales": lambda: scaled("rows"),
    "one scale": lambda: scaled("tensor"),
    "blocks of scales": lambda: scaled("blocks"),
    "groups of rows": lambda: grouped("m"),
    "groups of K": lambda: grouped("k"),
}


@pytest.mark.parametrize("bits", ["same", "any"])
@pytest.mark.parametrize("program", PROGRAMS)
def test_every_kind_of_product_is_recorded_and_tuned(program: str, bits: Any, tmp_path: Path) -> None:
    """No candidate fails, gives other bits than its class says, or results that rounding does not explain; and none
    leaves memory behind."""
    with triton_gemm.record_shapes(tmp_path / "shapes.json"):
        PROGRAMS[program]()
    assert read_shapes(tmp_path / "shapes.json")
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    report = triton_gemm.tune(tmp_path / "shapes.json", budget=20, bits=bits)
    print(f"\n{report}")
    assert_measured(report)
    assert torch.cuda.memory_allocated() - before < 64 << 20


def test_a_models_forward_and_backward_are_recorded(tmp_path: Path) -> None:
    layer = torch.nn.Linear(512, 384, device="cuda", dtype=BF16)
    compiled = torch.compile(layer)
    x = random(256, 512).requires_grad_()
    with triton_gemm.use():
        compiled(x).sum().backward()
        with triton_gemm.record_shapes(tmp_path / "shapes.json"):
            for _ in range(3):
                layer(x).sum().backward()
        with triton_gemm.record_shapes(tmp_path / "compiled.json"):
            compiled(x).sum().backward()
    sizes: dict[tuple[int, int, int], int] = {}
    for problem, calls in read_shapes(tmp_path / "shapes.json").items():
        sizes[problem.M, problem.N, problem.K] = calls
    assert sizes[256, 384, 512] == 3 and sizes[256, 512, 384] == 3 and len(sizes) >= 3
    compiled_sizes = {(problem.M, problem.N, problem.K) for problem in read_shapes(tmp_path / "compiled.json")}
    assert {(256, 384, 512), (256, 512, 384)} <= compiled_sizes


def test_calls_from_python_are_tuned() -> None:
    report = triton_gemm.tune([(4096, 4096, 4096)], budget=20, measure="eager")
    print(f"\n{report}")
    assert_measured(report)


def test_users_configurations_join_and_those_that_fail_are_named() -> None:
    figures = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    good = triton.Config({**figures, "GROUP_M": 4}, num_warps=8, num_stages=3)
    bad = kernels.portable.Config(64, 64, 8, 4, 3)  # tensor cores multiply 16 along K at once
    report = triton_gemm.tune([(2048, 2048, 2048)], budget=30, bits="any", configs=[good, bad])
    (shape,) = report.shapes
    assert shape.measured and any("64x64x8" in what for what, _ in shape.failed), f"\n{report}"
    (shape,) = triton_gemm.tune([(2048, 2048, 2048)], budget=30, bits="any", configs=[good, bad]).shapes
    assert all(why.startswith("skipped") for _, why in shape.failed)


@hopper
def test_every_candidate_of_the_class_has_its_bits() -> None:
    """What tuning relies on, for a size of each regime: none was left out because its bits differ."""
    report = triton_gemm.tune([(64, 4096, 4096), (512, 2048, 4096), (3000, 4096, 1024)], budget=60, layout="nt")
    assert_measured(report)
    for shape in report.shapes:
        assert shape.timed == shape.candidates > 5
        assert shape.selection is not None
        classes = {
            bit_class(shape.problem, one) for one in (shape.selection, select(shape.problem, current_device_info()))
        }
        assert len(classes) == 1


def test_a_second_race_is_won_by_one_that_is_as_fast() -> None:
    sizes = [(M, N, K) for M in (16, 256, 2048) for N, K in ((4096, 4096), (1024, 8192))]
    report = triton_gemm.tune(sizes, budget=120, repeat=2)
    print(f"\n{report}")
    assert_measured(report)
    assert report.within_1_percent >= 0.99 and report.same_again >= 0.8


COLD = """
import torch, triton_gemm
report = triton_gemm.tune([(16, 4096, 4096), (512, 2048, 4096)], budget=90, bits="any")
print(report)
assert all(shape.measured and not shape.failed for shape in report.shapes)
print("timed", [shape.timed for shape in report.shapes])
"""


def test_compiling_does_not_disturb_what_is_captured_meanwhile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing has been compiled before, so binaries are loaded while graphs are captured."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path / "triton"))
    assert "timed" in printed(COLD)


def test_what_python_does_before_a_replay_is_not_in_its_time() -> None:
    """On an idle GPU a small product takes as long when Python is 50 us late."""
    a = torch.ones(64, 64, device="cuda", dtype=BF16)
    c = torch.empty_like(a)
    replay = timing.Replay([lambda: torch.mm(a, a, out=c)], 1)
    graph = replay.graph

    def late() -> None:
        until = time.perf_counter() + 50e-6
        while time.perf_counter() < until:
            pass
        graph.replay()

    def milliseconds() -> float:
        torch.cuda.synchronize()
        return replay.start()()

    prompt = median(milliseconds() for _ in range(21))
    replay.graph = SimpleNamespace(replay=late)  # type: ignore[assignment]
    assert median(milliseconds() for _ in range(21)) < prompt + 0.02


THIRD = """
import os, signal, torch, triton_gemm
from triton_gemm.tuning import gpu
from triton_gemm.tuning.timing import DeviceLostError
gpu.LIMIT_S = 0.5
run, seen = gpu.Bench._run, set()

def of_third(self, plan, of):
    seen.add(plan.selection)
    if len(seen) == 3:  # of the incumbent and others the third
        DOES
    run(self, plan, of)

gpu.Bench._run = of_third
try:
    triton_gemm.tune([(512, 2048, 4096)], budget=60)
except DeviceLostError as error:
    print("lost", error, flush=True)
os._exit(0)
"""
HANGS = THIRD.replace("DOES", "torch.cuda._sleep(int(1e10)), print('hangs', plan.selection, flush=True)")
KILLED = THIRD.replace("DOES", "os.kill(os.getpid(), signal.SIGKILL)")


def test_what_hangs_is_left_out_the_next_time(folder: Path) -> None:
    output = printed(HANGS)
    assert "hangs" in output and "lost" in output and "runs for more than 0.5 s" in output
    time.sleep(10)  # until the GPU is free again
    (shape,) = triton_gemm.tune([(512, 2048, 4096)], budget=30, resume=True).shapes
    assert shape.measured and any("runs for more than" in why for _, why in shape.failed)


def test_what_ends_the_process_is_left_out_the_next_time() -> None:
    with pytest.raises(AssertionError):  # the process was killed
        printed(KILLED)
    (shape,) = triton_gemm.tune([(512, 2048, 4096)], budget=30, resume=True).shapes
    assert shape.measured and any("the process ended" in why for _, why in shape.failed)


def test_nothing_is_stored_while_another_process_uses_the_gpu() -> None:
    with shared_gpu():
        report = triton_gemm.tune([(512, 2048, 4096)], budget=15)
        print(f"\n{report}")
        assert report.shapes[0].outcome == "refused"
    assert tables.lookup(report.shapes[0].problem, current_device_info()) is None


def test_the_policy_tune_tunes_at_the_first_call_and_not_under_capture() -> None:
    a, b = pair((72, 4096, 4096))
    c = torch.empty(72, 4096, device="cuda", dtype=BF16)
    with triton_gemm.policy("model"):
        expected = triton_gemm.matmul(a, b)
    with triton_gemm.policy("tune"):
        triton_gemm.matmul(a[:64], b, out=c[:64])  # this one is tuned before the capture
        graph, _ = captured(lambda: triton_gemm.matmul(a, b, out=c))
        graph.replay()
        assert torch.equal(c, expected)
        begin = time.monotonic()
        assert torch.equal(triton_gemm.matmul(a, b), expected)
        tuned_s = time.monotonic() - begin
        begin = time.monotonic()
        triton_gemm.matmul(a, b)
        assert time.monotonic() - begin < 0.1 * tuned_s and tuned_s < tuning.BUDGET_OF_A_CALL + 15
        sources = {made.selection.source for made in plan.PLANS.values() if made.problem.M == 72}
        assert sources & {"tuner", "user's table"}


def test_threads_wait_for_the_one_that_tunes() -> None:
    a, b = pair((88, 4096, 4096))
    with triton_gemm.policy("model"):
        expected = triton_gemm.matmul(a, b)
    triton_gemm.set_policy("tune")
    begin = time.monotonic()
    found = at_once(*4 * [lambda: triton_gemm.matmul(a, b)])
    torch.cuda.synchronize()
    assert all(torch.equal(one, expected) for one in found)
    assert time.monotonic() - begin < tuning.BUDGET_OF_A_CALL + 15
