"""How things are measured: the timer, the check against fp64, ceilings, and what a record says of its sources."""

from __future__ import annotations

import gc
import itertools
import math
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from perf.common.dataclass_json import from_json
from perf.ladder.record import ProblemResult, Record
from perf.measure import environment, numerics, operands, roofline, timer
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from tests.support.lab_fakes import take_gpu_away
from tests.support.report_records import SURROUNDINGS
from triton_gemm.problem import UnsupportedOperandError
from triton_gemm.tuning import timing


def test_providers_take_turns_and_ratios_are_taken_round_by_round() -> None:
    order: list[str] = []

    def kernel(name: str, *times: float) -> timing.Stopwatch:
        remaining = itertools.cycle(times)

        def start() -> Any:
            order.append(name)
            took = next(remaining)
            return lambda: took

        return start

    # The GPU slows down by half midway: ratios must not notice.
    starts = {"base": kernel("base", 2.0, 2.0, 4.0, 4.0), "own": kernel("own", 1.0, 1.0, 2.0, 2.0)}
    times = timing.interleave(starts, 4)
    assert order == ["base", "own", "own", "base"] * 2
    assert timing.ratios(times, "own", "base") == [2.0] * 4
    spread = timer.percentiles([1.0, 2.0, 3.0, 4.0, 100.0])
    assert spread["p20"] < spread["median"] == 3.0 < spread["p80"]


@pytest.mark.parametrize("idle", [True, False])
def test_what_python_does_before_a_replay_is_not_in_its_time(idle: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """An idle GPU would begin at once, and wait for Python."""
    order: list[str] = []
    event = SimpleNamespace(record=lambda: order.append("event"))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: SimpleNamespace(query=lambda: idle))
    monkeypatch.setattr(timing, "occupy", lambda clocks: order.append("busy"))
    replay = object.__new__(timing.Replay)
    replay.graph = SimpleNamespace(replay=lambda: order.append("replay"))  # type: ignore[assignment]
    replay.start()
    assert order == (["busy"] if idle else []) + ["event", "replay", "event"]


def test_a_call_is_estimated_behind_work_that_hides_its_launch(monkeypatch: pytest.MonkeyPatch) -> None:
    order: list[str] = []
    event = SimpleNamespace(
        record=lambda: order.append("event"), synchronize=lambda: order.append("wait"), elapsed_time=lambda end: 0.004
    )
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(timing, "occupy", lambda clocks: order.append("busy"))
    assert timing.once_ms(lambda: order.append("call")) == 0.004
    assert order == ["call"] + ["busy", "event", "call", "event", "wait"] * timing.TRIES[0]


@pytest.mark.parametrize(
    ("took", "head_starts"),
    [
        ([6.3, 0.022, 0.024], [2, 2, 2]),
        ([6.3, 1.8, 0.9, 0.022, 0.024], [2, 2, 2, 8, 32]),  # no two of the first agree
        ([6.4, 3.2, 1.6, 0.8, 0.4, 0.2, 0.1], [2, 2, 2, 8, 32, 128, 512]),  # nor do any
    ],
)
def test_a_call_that_was_queued_late_is_not_taken_for_slow(
    took: list[float], head_starts: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    remaining, occupied = iter(took), []
    event = SimpleNamespace(record=int, synchronize=int, elapsed_time=lambda end: next(remaining))
    monkeypatch.setattr(torch.cuda, "Event", lambda enable_timing: event)
    monkeypatch.setattr(timing, "occupy", lambda clocks: occupied.append(clocks // timing.HEAD_START))
    assert timing.once_ms(int) == min(took)
    assert occupied == head_starts


@pytest.mark.parametrize("enabled", [True, False])
def test_the_collector_is_as_it_was_after_what_is_timed(enabled: bool) -> None:
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with timing.no_garbage():
            assert not gc.isenabled()
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_slow_providers_get_few_rounds_and_every_operand_set_is_used() -> None:
    assert timing.round_count(round_ms=10.0, budget_s=0.2, bounds=(3, 40)) == 20
    assert timing.round_count(round_ms=5000.0, budget_s=0.2, bounds=(3, 40)) == 3
    assert timing.round_count(round_ms=0.0, budget_s=0.2, bounds=(3, 40)) == 40
    assert timing.repeats(estimate_ms=300.0, sets=1) == 1
    assert timing.repeats(estimate_ms=300.0, sets=4) == 4
    assert timing.repeats(estimate_ms=0.01, sets=4) == timing.MAX_REPEATS


@pytest.mark.usefixtures("no_gpu")
def test_the_check_refuses_what_is_less_exact_than_torch() -> None:
    """test_bench has what is wrong."""
    laid = operands.Operands(Problem(65, 33, 47, "ieee"), set(), 1)
    (a, b), check = laid.sets[0], operands.Check(laid)
    assert check.verdict(a @ b)[1] is None
    slightly_off = (a @ b) * (1 + 1e-6)
    assert "torch's own" in str(check.verdict(slightly_off)[1])
    assert check.verdict(slightly_off, torchs=True)[1] is None


@pytest.mark.usefixtures("no_gpu")
def test_the_check_of_integers_is_exact() -> None:
    laid = operands.Operands(Problem(9, 5, 7, "int32"), set(), 1)
    (a, b), check = laid.sets[0], operands.Check(laid)
    c = a @ b
    assert check.verdict(c)[1] is None
    c[3, 2] += 1
    assert check.verdict(c)[1] == "1 results differ"


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the timer work on the CPU, where providers compute and nothing is timed."""
    take_gpu_away(monkeypatch)
    monkeypatch.setattr(environment, "query", lambda *fields: [None] * len(fields))


@pytest.mark.usefixtures("no_gpu")
def test_only_what_passes_its_check_is_timed(tmp_path: Path) -> None:
    def unwritten_row(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
        c[1:] = (a @ b)[1:]

    problem = Problem(48, 40, 72, "ieee")
    calls: dict[str, Any] = {name: lambda a, b, c: c.copy_(a @ b) for name in (CUBLAS, "right")}
    calls |= {"tail": lambda a, b, c: c.copy_(a[:, :-1] @ b[:-1]), "row": unwritten_row}
    calls["absent"] = Mock(side_effect=UnsupportedOperandError("rows are not aligned"))
    calls["broken"] = Mock(side_effect=RuntimeError("PassManager::run failed"))
    subjects = [timer.Provider(name, call) for name, call in calls.items()]
    measured = timer.measure(problem, subjects, CUBLAS, budget_s=0.01)
    results = measured["providers"]
    assert {name for name, result in results.items() if "time_ms" in result} == {CUBLAS, "right"}
    assert results["right"]["ratio"]["median"] == 1.0
    assert results["right"]["error"]["bound"] < 1
    assert "bound" in results["tail"]["failed"]
    assert "not finite" in results["row"]["failed"]
    assert results["absent"] == {"absent": "rows are not aligned"}
    assert results["broken"]["failed"] == "RuntimeError: PassManager::run failed"
    assert timer.measure(problem, subjects[1:2], None, budget_s=0.01)["providers"]["right"]["ratio"] is None
    made = Record(tmp_path, SURROUNDINGS)
    made.put_problem(problem.key, from_json(ProblemResult, measured))
    assert [line.partition(" ")[0] for line in made.failures()] == ["tail", "row", "broken"]


@pytest.mark.parametrize("mode", ["fp16", "bf16"])
def test_the_bound_holds_for_torch_and_is_not_loose_beyond_the_rounding(mode: str) -> None:
    dtype = operands.MODE_DTYPES[mode]
    generator = torch.Generator().manual_seed(1)
    a, b = (timing.draw(shape, dtype, generator) for shape in ((40, 300), (300, 24)))
    c0 = timing.draw((40, 24), dtype, generator)
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
    for mode, flop in {"ieee": 256, "tf32": 2048, "bf16": 4096}.items():
        assert roofline.flop_per_clock(roofline.TYPICAL[9, 0], mode) == flop


def test_each_commit_and_source_is_named_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "source_hash", {"bench": "today"}.__getitem__)
    made = [{"commit": "abc", "sources": "today"}, {"commit": "def", "sources": "old"}, {}]
    expected = "Commit `abc`; commit `def` (changed since); commit not recorded."
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
def test_a_copy_is_given_its_commit(checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
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
