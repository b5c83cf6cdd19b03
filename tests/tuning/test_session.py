"""A tuning from problem to problem, on a GPU that is made up: what is stored when, and what is done about faults."""

from __future__ import annotations

import json
import zlib
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.support import table_fakes
from tests.support.lab_fakes import FakeLab
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import tables
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, select
from triton_gemm.tables import records
from triton_gemm.tuning import session
from triton_gemm.tuning.candidates import candidates
from triton_gemm.tuning.conditions import Conditions, complaint
from triton_gemm.tuning.gpu import TORCH
from triton_gemm.tuning.journal import Journal
from triton_gemm.tuning.report import Again, Progress, ShapeReport, TuningReport
from triton_gemm.tuning.session import Session, Wishes

SMALL, LARGE = problem_of(64, 4096, 4096), problem_of(4096, 4096, 4096)


def chance(selection: Any) -> float:
    """Milliseconds from 1 to 1.5, that look like chance, and the model's choice's 1.2."""
    if selection.source == "model":
        return 1.2
    named = str(replace(selection, reason="", source="tuner"))
    return 1.0 + 0.5 * (zlib.crc32(named.encode()) % 1000) / 1000


def tuned(
    folder: Path,
    calls: dict[GemmProblem, int] | None = None,
    lab: FakeLab | None = None,
    *,
    versions: str | None = None,
    progress: Callable[[Progress], None] | None = None,
    ended: Callable[[ShapeReport], None] = lambda report: None,
    **wishes: Any,
) -> TuningReport:
    journal, wanted = Journal(folder / "x.tuning.jsonl", versions or tables.versions()), {"budget": 60.0, **wishes}
    return Session(lab or FakeLab(chance), journal, Wishes(**wanted), progress).run(calls or {SMALL: 1}, ended)


def fastest(problem: GemmProblem = SMALL, bits: Any = "same") -> Selection:
    return min(candidates(problem, HOPPER, select(problem, HOPPER), bits), key=chance)


@pytest.fixture(autouse=True)
def nothing_left(tmp_path: Path) -> Iterator[None]:
    yield
    assert not list(tmp_path.rglob("*.tmp"))


def test_reports_are_written_in_words() -> None:
    choice = select(SMALL, HOPPER)
    again = (Again(True, 0.0), Again(False, 0.01), Again(False, -0.011), Again(False, 0.02))
    won = ShapeReport(SMALL, 5, "tuned", choice, choice, 6.0, 4.0, 3.0, 0.015, 9, 7, again=again)
    stays = replace(won, problem=replace(SMALL, batch=3), calls=4, outcome="stays", selection=None, us=6.0, again=())
    failed = ShapeReport(LARGE, 3, "failed", why="it hangs", failed=(("a candidate", "its bits differ"),))
    words = "64x4096x4096 bfloat16: 6 us to 4 us, 50.0 % (noise 1.5 %) faster"
    assert str(won) == f"{words}, {choice.kernel} {choice.config}"
    assert str(stays) == "3x64x4096x4096 bfloat16: 6 us, the model's choice stays (7 of 9 timed)"
    assert str(failed) == "4096x4096x4096 bfloat16: failed: it hangs"
    assert str(replace(failed, why="")) == "4096x4096x4096 bfloat16: failed"
    report = TuningReport((won, stays, failed), "a GPU", "same", "graph", 60.0, 12.3)
    assert report.regret_before == pytest.approx(1.0) and report.regret_after == pytest.approx((4 / 3 * 2) ** 0.5 - 1)
    assert (report.same_again, report.within_1_percent) == (0.25, 0.5)
    assert str(report).splitlines()[3:] == [
        "  a candidate: its bits differ",
        "a GPU: 1 tuned, 1 stays, 1 failed; 12 of 60 s",
        "regret (slower than the fastest that was timed): 100.0 % before, 63.3 % after",
        "tuned again: 25 % had the same winner, 50 % a winner within 1 %",
    ]
    assert str(replace(report, shapes=())) == "a GPU: nothing to tune; 12 of 60 s"


def test_the_fastest_is_stored_and_served(folder: Path) -> None:
    report = tuned(folder)
    (shape,) = report.shapes
    assert shape.outcome == "tuned" and shape.stored and shape.selection is not None
    assert chance(shape.selection) <= 1.01 * chance(fastest())
    assert shape.us == pytest.approx(1000 * chance(shape.selection), rel=0.05) and shape.choice_us > shape.us
    timed = {named: us for us, named in shape.times}
    assert len(timed) == shape.timed and list(timed.values()) == sorted(timed.values())
    assert timed[records.named(shape.selection)] == shape.us and timed[records.named(shape.choice)] == shape.choice_us
    served = tables.lookup(SMALL, HOPPER)
    assert served is not None and served.source == "user's table" and served.algorithm == shape.selection.algorithm
    assert report.regret_before > 0.1 > 0.01 > report.regret_after >= 0
    assert "faster" in str(report) and json.dumps(report.as_dict(), allow_nan=False)


def test_bits_stay_the_same_unless_others_are_asked_for(folder: Path) -> None:
    choice = select(SMALL, HOPPER)
    every = candidates(SMALL, HOPPER, choice, "any")
    split = next(selection for selection in every if bit_class(SMALL, selection) != bit_class(SMALL, choice))
    lab = FakeLab(lambda selection: 0.5 if selection == split else chance(selection))
    (shape,) = tuned(folder, lab=lab).shapes
    assert shape.selection is not None and bit_class(SMALL, shape.selection) == bit_class(SMALL, choice)
    (shape,) = tuned(folder, lab=FakeLab(lab.kernels.true), bits="any").shapes
    assert shape.selection == split
    assert tables.lookup(SMALL, HOPPER) != tables.lookup(SMALL, HOPPER, "any")


def test_a_winner_within_noise_is_not_stored(folder: Path) -> None:
    report = tuned(folder, lab=FakeLab(lambda selection: 1.0 if selection.source == "model" else 0.998))
    assert report.shapes[0].outcome == "stays" and not report.shapes[0].stored
    assert tables.lookup(SMALL, HOPPER) is None
    assert report.regret_before == report.regret_after


@pytest.mark.parametrize("known", [False, True])
def test_what_cannot_be_stored_is_reported(known: bool, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A winner, and the model's choice where a table has a slower one; not a choice that needs no table."""
    if known:
        table_fakes.store(SMALL)
    monkeypatch.setattr(tables.changes, "_put", lambda *_: False)
    (shape,) = tuned(folder).shapes
    assert (shape.outcome, shape.stored, shape.measured) == ("not stored", False, True)
    assert "faster" in str(shape) and str(shape).endswith("; not stored")
    report = tuned(folder, lab=FakeLab(lambda selection: 1.0 if selection.source == "model" else 1.3))
    assert report.shapes[0].outcome == ("not stored" if known else "stays")
    assert str(report.shapes[0]).endswith(" timed); not stored" if known else " timed)")
    assert f"1 {'not stored' if known else 'stays'};" in str(report)


def with_torch(torch_ms: float, choice_ms: float = 1.0, other_ms: float = 1.2) -> FakeLab:
    return FakeLab(
        lambda one: torch_ms if one == TORCH else choice_ms if one.source == "model" else other_ms, has_torch=True
    )


@pytest.mark.parametrize(("torch_ms", "faster"), [(0.8, True), (0.998, False), (1.3, False), (3.0, False)])
@pytest.mark.parametrize("choice_ms", [1.0, 2.0], ids=["the model's choice stays", "another wins"])
def test_torchs_product_is_timed_against_the_winner(
    torch_ms: float, faster: bool, choice_ms: float, folder: Path
) -> None:
    """That torch is faster is stored, whatever is the fastest of ours; not where it is by less than noise."""
    report = tuned(folder, lab=with_torch(torch_ms, choice_ms, 3 - choice_ms), bits="any")
    (shape,) = report.shapes
    assert shape.outcome == ("stays" if choice_ms == 1.0 else "tuned")
    assert (shape.torch_faster, report.torch_faster) == (faster, faster)
    assert shape.stored == (faster or choice_ms == 2.0)
    assert shape.torch_us / shape.us == pytest.approx(torch_ms, rel=0.1 if torch_ms > 2 else 0.005)
    assert f"; torch {shape.torch_us / shape.us:.3g} of ours{', faster' * faster}" in str(shape)
    assert ("torch is faster for 1 of them" in str(report)) == faster
    (plain,) = report.as_dict()["shapes"]
    assert (plain["torch_us"], plain["torch_faster"]) == (shape.torch_us, faster)
    entry = tables.entry(SMALL, HOPPER, "any")
    assert (entry is not None) == shape.stored and tables.torch_is_faster(SMALL, HOPPER) == faster
    if entry is not None:
        assert shape.selection is not None and entry.algorithm == shape.selection.algorithm and entry.us == shape.us
        assert entry.torch_us == (shape.torch_us if faster else 0.0)


def test_an_entry_where_torch_was_faster_is_replaced_when_it_is_no_more(folder: Path, monkeypatch: Any) -> None:
    tuned(folder, lab=with_torch(0.8), bits="any")
    (known,) = tuned(folder, lab=with_torch(1.3), bits="any", resume=True).shapes
    assert known.outcome == "known" and known.torch_faster and known.torch_us < known.us
    with monkeypatch.context() as patch:
        patch.setattr(tables, "torchs_versions", lambda: "another cuBLAS")
        (shape,) = tuned(folder, lab=with_torch(0.7), bits="any", resume=True).shapes
    assert shape.outcome == "stays" and shape.stored and tables.torch_is_faster(SMALL, HOPPER)
    tuned(folder, lab=with_torch(1.3), bits="any")
    assert not tables.torch_is_faster(SMALL, HOPPER) and tables.entry(SMALL, HOPPER, "any") is not None


@pytest.mark.parametrize("why", ["same bits", "it refuses", "no such product"])
def test_where_torchs_product_is_not_timed(why: str, folder: Path) -> None:
    lab = with_torch(0.8)
    lab.kernels.has_torch = why != "it refuses"
    problem = replace(SMALL, activation="relu", scales="tensor") if why == "no such product" else SMALL
    (shape,) = tuned(folder, {problem: 1}, lab, bits="same" if why == "same bits" else "any").shapes
    assert shape.measured and shape.torch_us != shape.torch_us and not shape.torch_faster and "torch" not in str(shape)
    assert TORCH not in lab.kernels.timed


def test_a_second_race_leaves_torch_out(folder: Path) -> None:
    lab = with_torch(0.8)
    (shape,) = tuned(folder, lab=lab, bits="any", repeat=3).shapes
    assert lab.kernels.timed.count(TORCH) == 1 and len(shape.again) == 2 and shape.torch_faster


def test_what_a_table_has_is_replaced_where_the_model_is_faster_now(folder: Path) -> None:
    table_fakes.store(SMALL)
    report = tuned(folder, lab=FakeLab(lambda selection: 1.0 if selection.source == "model" else 1.3))
    assert report.shapes[0].outcome == "stays" and report.shapes[0].stored
    served = tables.lookup(SMALL, HOPPER)
    assert served is not None and served.algorithm == select(SMALL, HOPPER).algorithm


@pytest.mark.parametrize("choice_ms", [1.2, 0.9], ids=["another wins", "the model's choice stays"])
@pytest.mark.parametrize("offered", [True, False])
def test_what_a_table_has_is_not_replaced_unless_it_was_timed(choice_ms: float, offered: bool, folder: Path) -> None:
    """It is compiled before others; where there is not even time for that, it stays."""
    choice = select(SMALL, HOPPER)
    known = candidates(SMALL, HOPPER, choice)[-1]
    if not offered:
        config = replace(known.config, num_stages=known.config.num_stages - 1)
        known = replace(known, algorithm=known.algorithm._replace(config=config))
    assert tables.store(SMALL, known, HOPPER, us=500.0, default_us=1000.0)

    def true(selection: Any) -> float:
        best = replace(selection, source="tuner", reason="") == replace(known, source="tuner", reason="")
        return 0.5 if best else choice_ms if selection.source == "model" else 1.0

    before = tables.lookup(SMALL, HOPPER)
    for budget in (1.0, 4.0):
        (shape,) = tuned(folder, lab=FakeLab(true, compile_s=0.8), budget=budget).shapes
        served = tables.lookup(SMALL, HOPPER)
        assert before is not None and served is not None and served.config == before.config, budget
        assert (shape.outcome == "tuned" and shape.stored) == (budget == 4.0)
        assert shape.outcome != "not stored" and ("the table's entry stays" in str(shape)) == (budget == 1.0)


def test_a_second_tuning_keeps_what_the_first_found(folder: Path) -> None:
    (first,) = tuned(folder, lab=FakeLab(chance, 1)).shapes
    for seed in range(2, 8):
        (shape,) = tuned(folder, lab=FakeLab(chance, seed)).shapes
        assert shape.selection == first.selection


def test_how_often_a_second_race_is_won_by_the_same(folder: Path) -> None:
    problems = {problem_of(M, 4096, 4096): 1 for M in (8, 64, 256, 1024)}
    report = tuned(folder, problems, repeat=3, budget=200.0)
    assert [len(shape.again) for shape in report.shapes] == [2] * 4
    assert report.same_again == 1.0 and report.within_1_percent == 1.0


def test_a_second_race_has_the_first_ones_field(folder: Path) -> None:
    """Candidates that were compiled too late for the first would win the second, and say nothing of noise."""
    lab = FakeLab(chance, compile_s=0.5)
    (shape,) = tuned(folder, lab=lab, repeat=2, budget=12.0).shapes
    first, second = map(set, lab.fields)
    assert len(shape.again) == 1 and second < first and len(second) == shape.timed < shape.candidates


@pytest.mark.parametrize(("start_s", "waits"), [(0.0, 0.0), (12.0, 12.0), (1e9, 50.0)])
def test_the_first_race_waits_for_the_compiler(start_s: float, waits: float, folder: Path) -> None:
    """Or the first products would be tuned while nothing but the model's choice is compiled. It waits for a quarter of
    the budget at most."""
    lab, begun = FakeLab(chance), list[float]()
    bench = lab.bench
    lab.ready = lambda *_: lab.now() >= start_s
    lab.bench = lambda *of: (begun.append(lab.now()), bench(*of))[1]
    problems = {problem_of(M, 4096, 4096): 1 for M in (8, 64, 256)}
    report = tuned(folder, problems, lab, budget=200.0)
    assert begun[0] == pytest.approx(waits, abs=0.1)
    assert all(shape.measured for shape in report.shapes)


def test_a_race_waits_for_a_few_candidates(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where there is less time for each product than its candidates take to compile."""
    problems = {problem_of(M, 4096, 4096): 1 for M in range(8, 88, 8)}

    def timed() -> list[int]:
        report = tuned(folder, problems, lab=FakeLab(chance, compile_s=0.8), budget=20.0)
        assert report.seconds < 21.0
        return [shape.timed for shape in report.shapes[:2]]

    assert min(timed()) > session.FEW
    monkeypatch.setattr(session, "FEW", 0)
    tables.clear()
    assert max(timed()) < 5


def test_the_most_called_come_first_and_all_have_their_share(folder: Path) -> None:
    problems = {problem_of(M, 1024, 1024): calls for M, calls in ((64, 1), (128, 7), (256, 3))}
    lab, ended = FakeLab(chance, compile_s=0.1), []
    report = tuned(folder, problems, lab, budget=15.0, ended=ended.append)
    assert [problem.M for problem, _ in lab.benches] == [128, 256, 64]
    assert [shape.calls for shape in report.shapes] == [7, 3, 1] and ended == list(report.shapes)
    assert all(shape.measured for shape in report.shapes)
    assert [problem.M for problem in lab.compiled] == [128, 256, 64]
    assert report.seconds <= 15.0 + 0.5


@pytest.mark.parametrize("budget", [0.5, 3.0, 10.0])
def test_it_ends_within_the_budget_and_one_candidate(budget: float, folder: Path) -> None:
    problems = {problem_of(M, 1024, 1024): 1 for M in range(64, 64 + 12 * 16, 16)}
    lab = FakeLab(chance, compile_s=0.05)
    report = tuned(folder, problems, lab, budget=budget)
    assert report.seconds <= budget + 1.0
    assert report.count("no time") > 0 and report.count("no time") + sum(s.measured for s in report.shapes) == 12


def test_progress_is_reported(folder: Path) -> None:
    steps: list[Progress] = []
    tuned(folder, {SMALL: 1, LARGE: 2}, progress=steps.append)
    assert steps[0].problem == LARGE and steps[-1].problem == SMALL and steps[-1].number == steps[-1].count == 2
    assert steps[-1].best_us < steps[-1].choice_us and steps[-1].timed == steps[-1].candidates
    left = [step.seconds_left for step in steps]
    assert left == sorted(left, reverse=True)


@pytest.mark.parametrize("fault", ["slowed", "shared", "clock", "throttled half-way"])
def test_nothing_is_stored_that_was_measured_on_an_unfit_gpu(fault: str, folder: Path) -> None:
    lab = FakeLab(chance)
    if fault == "slowed":
        lab.slowed = lambda now: ("too hot",)
    elif fault == "clock":
        lab.mhz = lambda now: 1980 - int(100 * now)
    elif fault == "shared":  # from some time on, for good
        lab.kernels.slow = lambda now: 1.0 if now < 0.2 else 1.3
    else:
        lab.kernels.slow = lambda now: 1.0 + now
    report = tuned(folder, lab=lab)
    assert report.shapes[0].outcome == "refused" and report.shapes[0].why
    assert len(lab.benches) == 2, "once more, and then no longer"
    assert tables.lookup(SMALL, HOPPER) is None and report.shapes[0].why in str(report)
    # Not known: asked again, it is tuned.
    assert tuned(folder, resume=True).shapes[0].outcome == "tuned"


def test_a_clock_that_is_read_late_is_read_again(folder: Path) -> None:
    """At the power limit the driver may still give the race's clock when the reference product runs."""
    lab, read = FakeLab(chance), list[float]()
    lab.mhz = lambda now: (read.append(now), 1700 if len(read) == 2 else 1980)[1]
    assert tuned(folder, lab=lab).shapes[0].outcome == "tuned" and len(read) == 3 and len(lab.benches) == 1


def test_what_was_disturbed_once_is_measured_again(folder: Path) -> None:
    lab = FakeLab(chance)
    lab.kernels.slow = lambda now: 1.4 if now > 0.5 and len(lab.benches) == 1 else 1.0
    report = tuned(folder, lab=lab)
    assert report.shapes[0].outcome == "tuned" and [seed for _, seed in lab.benches] == [0, 1]


@pytest.mark.parametrize(
    ("before", "after", "best", "word"),
    [
        (Conditions(1.0, 1980), Conditions(1.01, 1965), 1.0, None),
        (Conditions(1.0), Conditions(1.1), 1.0, "before and"),
        (Conditions(1.1), Conditions(1.1), 1.0, "shared"),
        (Conditions(1.0, 1980), Conditions(1.0, 1500), 1.0, "MHz"),
        (Conditions(1.0, 1980), Conditions(1.0, 0), 1.0, None),
        (Conditions(1.0, 1980, ("too hot",)), Conditions(1.0, 1980), 1.0, "too hot"),
        (Conditions(1.0, 1980), Conditions(1.0, 1980, (), 1.4), 1.0, "sometimes takes 1.40 times as long"),
    ],
)
def test_conditions(before: Conditions, after: Conditions, best: float, word: str | None) -> None:
    why = complaint(before, after, best)
    assert why is None if word is None else word in str(why)


def test_a_race_has_two_seconds_and_the_last_problems_none(folder: Path) -> None:
    """Where there is less for each, those that are called least are left out."""
    calls = {problem_of(64, 4096, 512 * i): 9 - i for i in range(1, 9)}
    report = tuned(folder, calls, budget=8.0)
    outcomes = [shape.outcome for shape in report.shapes]
    assert all(shape.measured for shape in report.shapes[:4]) and outcomes[5:] == ["no time"] * 3
    assert all(shape.timed == shape.candidates for shape in report.shapes[:4])


def test_conditions_after_one_race_are_those_before_the_next(folder: Path) -> None:
    lab, times = FakeLab(chance), list[float]()
    conditions = lab.conditions
    lab.conditions = lambda: (times.append(lab.now()), conditions())[1]
    tuned(folder, {problem_of(64, 4096, 512 * i): 1 for i in range(1, 5)}, lab)
    assert len(times) == 5
    lab.prepare = lambda problem, selections: lab.kernels.pause(1.1)
    tuned(folder, {problem_of(64, 4096, 512 * i): 1 for i in range(5, 8)}, lab)
    assert len(times) == 5 + 6 - 1, "the GPU idled before two of three races, as the third was prepared with the second"
