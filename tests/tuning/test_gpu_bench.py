"""The GPU as a bench, without one: kernels are torch's products on the CPU, and what CUDA does is made up."""

from __future__ import annotations

import gc
import threading
import weakref
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.support import table_fakes
from tests.support.lab_fakes import CPU, FULL, Event, FakePlan, bench_of, others, small
from tests.support.patches import noted, replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import calibration, tables, tuning
from triton_gemm.calibration import probes
from triton_gemm.hardware import device_model, nvml
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.gpu_key import GpuKey
from triton_gemm.runtime import policies
from triton_gemm.runtime.compiling import Compiler
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select
from triton_gemm.suites.shapes import Shape
from triton_gemm.tuning import gpu, operands, timing, truth
from triton_gemm.tuning.gpu import Gpu
from triton_gemm.tuning.journal import Journal
from triton_gemm.tuning.timing import DeviceLostError
from triton_gemm.tuning.trials import FailedError

BF16 = torch.bfloat16
pytestmark = pytest.mark.usefixtures("no_gpu")


def test_candidates_are_compiled_checked_and_timed_in_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is named on disk while it runs first."""
    bench, choice = bench_of(small(), tmp_path)
    first, second, _ = others(small())
    named = noted(monkeypatch, FakePlan, "run", lambda *_: len(list(tmp_path.iterdir())))
    assert bench.prepare(first) > 0 and bench.prepare(second) > 0 and set(named) == {1}
    assert bench.time([choice, second, first], 5) == [[1.0] * 5] * 3
    assert len(bench.sets) > 1, "operands larger together than the L2 cache"
    bench.drop(second)
    bench.round_ms = {choice: 2.0, first: 3.0}
    assert bench.round_s([choice, first, first]) == 0.008 and bench.ready(first)
    assert not list(tmp_path.iterdir()), "nothing is under way, and nothing failed"
    bench.gpu.close()
    assert not any(thread.is_alive() for thread in bench.gpu.compiler.threads)


@pytest.mark.parametrize(
    ("wrong", "bits", "why"),
    [
        ("has no plan", "same", "KeyError: 64"),
        ("does not compile", "same", "RuntimeError: PassManager::run failed"),
        ("raises", "same", "ValueError: it cannot be launched"),
        ("off", "same", "its bits are not those of the model's choice"),
        ("off", "any", None),
        ("far off", "any", "its result is off by 0.5"),
        ("leaves a row", "any", "its result is off by inf"),
    ],
)
def test_what_is_wrong_is_not_timed_and_not_tried_again(wrong: str, bits: str, why: str | None, tmp_path: Path) -> None:
    selection = others(small())[0]
    FakePlan.wrong = {selection: wrong}
    bench, _ = bench_of(small(), tmp_path, bits)
    if why is None:
        bench.prepare(selection)
        assert selection in bench.starts
        return
    with pytest.raises(FailedError, match=why):
        bench.prepare(selection)
    assert selection not in bench.starts
    again = Journal(tmp_path / "x.tuning.jsonl", "1")
    assert why in str(again.failure(small(), selection))


def test_a_wrong_incumbent_is_not_blamed_on_anyone(tmp_path: Path) -> None:
    FakePlan.wrong = {select(small(), HOPPER): "leaves a row"}
    with pytest.raises(FailedError, match="not finite"):
        bench_of(small(), tmp_path)
    assert not list(tmp_path.iterdir())


def test_what_hangs_is_noted_and_ends_the_tuning(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = bench_of(small(), tmp_path)
    monkeypatch.setattr(gpu, "LIMIT_S", 0.05)
    monkeypatch.setattr(Event, "hangs", True)
    selection = others(small())[0]
    with pytest.raises(DeviceLostError, match=r"runs for more than 0.05 s.*resume=True"):
        bench.prepare(selection)
    assert "runs for more than" in str(Journal(tmp_path / "x.tuning.jsonl", "1").failure(small(), selection))


def test_what_takes_a_while_is_waited_for(tmp_path: Path) -> None:
    bench, choice = bench_of(small(), tmp_path)
    answers = iter([False, False, False, True])
    bench._wait([(choice, SimpleNamespace(query=lambda: next(answers)))], 30.0)
    assert list(answers) == []


def test_what_hangs_later_is_noted_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of all that is launched in turns the first that does not end."""
    bench, choice = bench_of(small(), tmp_path)
    first, second, _ = others(small())
    bench.prepare(first), bench.prepare(second)
    monkeypatch.setattr(gpu, "LIMIT_S", 0.05)
    bench.round_ms = dict.fromkeys(bench.round_ms, 0.0)
    made: list[Event] = []

    class Hanging(Event):
        def __init__(self) -> None:
            super().__init__()
            made.append(self)

        def query(self) -> bool:
            return self not in made[4:]  # from the second launch on of the round that runs backwards: `first`'s

    monkeypatch.setattr(torch.cuda, "Event", Hanging)
    with pytest.raises(DeviceLostError, match="runs for more than"):
        bench.time([choice, first, second], 3)
    again = Journal(tmp_path / "x.tuning.jsonl", "1")
    assert again.failure(small(), first) is not None and again.failure(small(), second) is None


def test_too_little_memory_is_no_candidates_fault(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, _ = bench_of(small(), tmp_path)
    with monkeypatch.context() as patch, pytest.raises(FailedError, match="out of memory"):
        patch.setattr(timing, "Replay", FULL)
        bench.prepare(others(small())[0])
    assert Journal(tmp_path / "x.tuning.jsonl", "1").failures == {}
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (10_000, 2**31))
    with pytest.raises(torch.OutOfMemoryError, match="free memory"):
        bench_of(small(), tmp_path)


def test_eager_calls_are_timed_when_nothing_is_compiled_any_more(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda *_: SimpleNamespace(L2_cache_size=50 << 20))
    bench, choice = bench_of(small(), tmp_path, measure="eager")
    assert len(bench.sets) == timing.MAX_SETS
    while not bench.ready(others(small())[0]):
        bench.pause(0.01)
    assert all(bench.gpu.compiler.done((small(), selection)) for selection in others(small()))
    bench.prepare(others(small())[0])
    times = bench.time([choice, others(small())[0]], 3)
    assert all(0 < time < 1000 for row in times for time in row)


def test_what_is_added_is_added_once(tmp_path: Path) -> None:
    """C is as it was before each candidate's check."""
    bench, choice = bench_of(small(has_beta=True), tmp_path)
    expected = bench.expected.clone()
    bench.prepare(others(small(has_beta=True))[0])
    assert torch.equal(bench.expected, expected)
    for _ in range(100):
        bench.gpu.plans[small(has_beta=True), choice].run(*bench.sets[0], (), 1.0, operands.BETA)
    assert bool(torch.isfinite(bench.sets[0][2]).all())


def test_rounding_is_no_mistake_and_a_lost_tile_is() -> None:
    """The bound on results of other sums: torch's own in another order are within it, one without a k-tile is not."""
    generator = torch.Generator().manual_seed(0)
    fp16, fp32 = torch.float16, torch.float32
    for dtype, out_dtype, precision in ((BF16, BF16, "half"), (fp16, fp32, "half"), (fp32, fp32, "ieee")):
        problem = small(M=64, N=64, K=8192, dtype=dtype, out_dtype=out_dtype, precision=precision)
        a, b = (timing.draw(shape, dtype, generator).float() for shape in ((64, 8192), (8192, 64)))
        whole = (a @ b).to(out_dtype)
        parts = sum(a[:, k : k + 512] @ b[k : k + 512] for k in range(0, 8192, 512)).to(out_dtype)
        lost = (a[:, :-64] @ b[:-64]).to(out_dtype)
        assert truth.distance(parts, whole) <= gpu.tolerance(problem) < truth.distance(lost, whole) / 2
    as_tf32 = small(M=64, N=64, K=8192, dtype=fp32, out_dtype=fp32, precision="tf32")  # both operands are rounded alike
    assert gpu.tolerance(as_tf32) < 0.01


def test_the_reference_product_is_probed_under_load(monkeypatch: pytest.MonkeyPatch) -> None:
    lab = Gpu(CPU, Journal(None, "1"), "same", "graph")
    monkeypatch.setattr(gpu, "PATIENCE_S", 0.01)
    replace_all(monkeypatch, nvml, sm_clock=lambda uuid: 1980, slowed=lambda uuid: ("too hot",))
    made: list[weakref.ref[torch.Tensor]] = []
    drawn = operands.operands
    monkeypatch.setattr(gpu, "operands", lambda *of: (sets := drawn(*of), made.extend(map(weakref.ref, sets[0])))[0])
    lab.prepare(small(), [])
    assert len(made) == 3, "the reference product is made in the first product's own time"
    found = lab.conditions()
    gc.collect()
    assert len(made) == 3 and all(x() is not None for x in made), "a graph does not keep what it reads and writes"
    assert (found.ms, found.mhz, found.slowed) == (1.0, 1980, ("too hot",))


def test_what_a_finished_race_has_not_timed_is_not_compiled(tmp_path: Path) -> None:
    """One candidate is being compiled and keeps its plan; the others are cancelled, and the next problem's compiled."""
    taken, go_on = threading.Event(), threading.Event()

    def compile(job: object) -> None:
        taken.set()
        assert go_on.wait(10)

    lab = Gpu(CPU, Journal(tmp_path / "x.tuning.jsonl", "1"), "same", "graph")
    lab.compiler.close()
    lab.compiler = Compiler(compile, threads=1)
    selections, other = others(small())[:3], small(bias="n")
    lab.prepare(small(), selections)
    lab.prepare(other, [select(other, HOPPER)])
    assert taken.wait(10)
    lab.forget(small())
    assert [key for key in lab.plans if key[0] == small()] == [(small(), selections[0])]
    go_on.set()
    while not lab.compiler.done((other, select(other, HOPPER))):
        lab.compiler.pause(0.01)
    assert not any(lab.compiler.done((small(), selection)) for selection in selections[1:])
    lab.compiler.close()


def test_workers_compile_for_the_gpu_that_is_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is treated as an older one, whose kernels it has."""
    older, targets = replace(HOPPER, capability=(8, 0)), list[Any]()
    replace_all(monkeypatch, gpu, device_info=lambda _: older, Worker=targets.append)
    lab = Gpu(CPU, Journal(tmp_path / "x.tuning.jsonl", "1"), "same", "graph")
    assert targets and all(target == (older, (9, 0)) for target in targets)
    lab.close()


@pytest.mark.parametrize("name", ["tune", "compare"])
def test_it_says_what_it_does_not_take(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    call, shapes = getattr(triton_gemm, name), [(64, 64, 64)]
    more = {"bits": "some", "measure": "cpu", "repeat": 0, "configs": [object()]} if name == "tune" else {}
    for option, value in {"budget": 0, "device": "cpu", "layout": "xx", **more}.items():
        with pytest.raises(ValueError):
            call(shapes, **{option: value})
    for wrong in ([(64, 64)], [(64, 64, 0)], [64]):
        with pytest.raises(ValueError, match=rf"{name}\(\): shapes are"):
            call(wrong)
    with pytest.raises(ValueError, match="GemmProblems"):
        call(shapes, dtype=torch.float8_e4m3fn)
    with pytest.raises(FileNotFoundError):
        call(tmp_path / "none.json")
    for owner, attribute, value, why in (
        (torch.cuda, "is_current_stream_capturing", lambda: True, "nothing can be timed while"),
        (tuning, "INTERPRETED", True, "under TRITON_INTERPRET=1"),
        (torch.cuda, "is_available", lambda: False, "torch .* sees no GPU"),
    ):
        with monkeypatch.context() as patch, pytest.raises(RuntimeError, match=rf"{name}\(\): {why}"):
            patch.setattr(owner, attribute, value)
            call(shapes)


def test_shapes_are_problems() -> None:
    made = tuning.problems_of([(512, 1024, 2048), (512, 1024, 2048)], BF16, "nn")
    assert made == {table_fakes.problem_of(): 2}
    (problem,) = tuning.problems_of([(512, 1024, 2048)], BF16, "nt")
    assert problem.b.column_major and not problem.a.column_major
    assert tuning.problems_of([table_fakes.problem_of()], BF16, "nn") == {table_fakes.problem_of(): 1}
    assert tuning.problems_of({table_fakes.problem_of(): 9}, BF16, "nn") == {table_fakes.problem_of(): 9}
    for wrong in ({(1, 2, 3): 4}, {table_fakes.problem_of(): "9"}, {table_fakes.problem_of(): 0}):
        with pytest.raises((TypeError, ValueError), match="shapes"):
            tuning.problems_of(wrong, BF16, "nn")
    assert next(iter(tuning.problems_of([(8, 8, 8)], torch.int8, "nn"))).out_dtype == torch.int32


def test_a_whole_tuning(tuned_on_the_cpu: Path) -> None:
    """Every kernel takes a millisecond, so the model's choice stays, and is known the next time."""
    report = triton_gemm.tune([small()], budget=20)
    (shape,) = report.shapes
    assert shape.outcome == "stays" and shape.timed == shape.candidates > 3 and not shape.failed
    assert report.device == HOPPER.name and report.regret_after == 0.0
    assert triton_gemm.tune([small()], resume=True).shapes[0].outcome == "known"
    steps: list[Any] = []
    (shape,) = triton_gemm.tune([small()], budget=20, bits="any", progress=steps.append).shapes
    assert steps and steps[-1].problem == small()
    assert shape.torch_us == shape.us == 1000.0 and not shape.torch_faster and str(shape).endswith("; torch 1 of ours")


def test_a_model_is_tuned_for_numbers_of_rows(tuned_on_the_cpu: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each weight for all of them, that of most layers first; what no kernel takes is logged."""
    sizes = (64, 32), (96, 64), (96, 64)
    layers = [torch.nn.Linear(K, N, dtype=BF16, device="meta") for N, K in sizes]
    strange = torch.nn.Linear(8, 8, dtype=torch.complex64, device="meta")
    report = triton_gemm.tune(torch.nn.Sequential(*layers, strange), rows=[1, 30, 32], budget=60)
    found = [(x.problem.M, x.problem.N, x.calls) for x in report.shapes]
    assert found == [(1, 96, 2), (32, 96, 2), (1, 64, 1), (32, 64, 1)]
    assert all(x.problem.bias == "n" and x.measured for x in report.shapes)
    assert "'3' is left out: its weight is torch.complex64" in caplog.text
    with pytest.raises(ValueError, match="rows=range"):
        triton_gemm.tune(layers[0])
    with pytest.raises(ValueError, match="no linear layer"):
        triton_gemm.tune(torch.nn.ReLU(), rows=1)


@pytest.mark.usefixtures("tuned_on_the_cpu")
def test_without_memory_for_its_operands_a_product_fails(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu, "operands", FULL)
    (shape,) = triton_gemm.tune([small()], budget=20).shapes
    assert (shape.outcome, shape.why) == ("failed", "CUDA out of memory")


def test_a_whole_calibration(tuned_on_the_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the same bench. Every kernel takes a millisecond, so small products take longer than any model says."""
    shapes = [("bf16", Shape(M, 64, K)) for M in (32, 64, 96) for K in (64, 128, 192)]
    monkeypatch.setattr(probes, "SHAPES", shapes)
    steps: list[Any] = []
    report = triton_gemm.calibrate(60, progress=steps.append)
    assert report.outcome in ("kept", "unchanged") and report.shapes == len(shapes) == len(steps), report
    assert report.timed > 3 * report.shapes and not report.failed and report.device == HOPPER.name
    kept = device_model.model_of(HOPPER)
    assert (report.path is None) == (kept is device_model.model_without_calibration(HOPPER))
    selection = next(iter(probes.probes(HOPPER)[0].candidates))
    FakePlan.wrong = {selection: "raises"}
    report = triton_gemm.calibrate(60, keep=False)
    assert any("cannot be launched" in why for _, why in report.failed) and report.path is None
    calibration.clear()


def test_the_policy_tune_tunes_by_itself(tuned_on_the_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Once for a problem; what won is served, and the model's choice where nothing did."""
    policies.set_tuner(tuning._choose)
    requested = noted(monkeypatch, tuning, "tune", lambda shapes, bits, budget, **_: (shapes, bits, budget))
    with triton_gemm.policy("tune", bits="any"):
        first = policies.choose(small(), HOPPER, may_tune=True)
        assert policies.choose(small(), HOPPER, may_tune=True) == first
    assert requested == [([small()], "any", tuning.BUDGET_OF_A_CALL)]
    choice = select(small(), HOPPER)
    assert (first.kernel, first.config, first.source) == (choice.kernel, choice.config, "tuner")
    with triton_gemm.policy("tune"):
        assert policies.choose(small(), HOPPER).source == "model", "nothing runs yet"
        policies.choose(small(), HOPPER, may_tune=True)
    assert [bits for _, bits, _ in requested] == ["any", "same"]
    # Another process knows that it stays.
    tuning._chosen.cache_clear()
    with triton_gemm.policy("tune"):
        policies.choose(small(), HOPPER, may_tune=True)
    assert len(requested) == 2
    # What is cleared is forgotten in this process, too.
    tables.clear()
    with triton_gemm.policy("tune"):
        policies.choose(small(), HOPPER, may_tune=True)
        policies.choose(small(), HOPPER, may_tune=True)
    assert len(requested) == 3


def test_under_batch_invariance_its_class_is_kept(tuned_on_the_cpu: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's choice for one row is of another class than that of any number of rows."""
    policies.set_tuner(tuning._choose)
    requested: list[Any] = []
    monkeypatch.setattr(tuning, "_chosen", lambda problem, *_: requested.append(problem) or select(problem, HOPPER))
    few, many = table_fakes.problem_of(1, 4096, 4096), table_fakes.problem_of(4096, 4096, 4096)
    with triton_gemm.policy("tune"), triton_gemm.batch_invariant():
        found = [policies.choose(problem, HOPPER, may_tune=True) for problem in (few, many)]
    assert bit_class(few, found[0]) == bit_class(many, found[1]) != bit_class(few, select(few, HOPPER))
    assert requested == [many]


def test_nvml_says_what_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """And what power limit tables are for."""

    def answer(value: int) -> Any:
        return lambda *given: setattr(given[-1]._obj, "value", value)

    library = SimpleNamespace(
        nvmlInit_v2=lambda: 0,
        nvmlDeviceGetHandleByUUID=lambda uuid, _: uuid != b"GPU-known",
        nvmlDeviceGetPowerManagementLimit=answer(699_800),
        nvmlDeviceGetClockInfo=answer(1980),
        nvmlDeviceGetCurrentClocksThrottleReasons=answer(0x4 | 0x40),
    )
    monkeypatch.setattr(nvml.ctypes, "CDLL", {"libnvidia-ml.so.1": library}.__getitem__)
    monkeypatch.setattr(nvml, "gpu", nvml.gpu.__wrapped__)
    for uuid, watts, mhz, why in (("known", 700, 1980, ("too hot",)), ("other", 0, 0, ()), ("", 0, 0, ())):
        assert nvml.power_limit.__wrapped__(uuid) == watts
        assert (nvml.sm_clock(uuid), nvml.slowed(uuid)) == (mhz, why)
    assert str(GpuKey.of(replace(HOPPER, bus_width=6016, power_limit=600))) == "sm_90-132sms-6016bit-600W"


def test_devices_are_found_by_their_uuid(monkeypatch: pytest.MonkeyPatch) -> None:
    """The policy tunes on the GPU whose product is planned."""
    infos = [replace(HOPPER, uuid="first"), replace(HOPPER, uuid="second")]
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(tuning, "device_info", lambda device: infos[device.index])
    tune = Mock(return_value=SimpleNamespace(shapes=[SimpleNamespace(selection=None)]))
    replace_all(monkeypatch, tuning, tune=tune, journal_of=lambda _: Journal(None, "1"))
    tuning._chosen.cache_clear()
    second: DeviceInfo = infos[1]
    assert tuning._choose(small(), second) == policies.by_model(small(), second)
    assert [call.kwargs["device"] for call in tune.mock_calls] == [1] and tables.lookup(small(), second) is None
    tuning._chosen.cache_clear()
