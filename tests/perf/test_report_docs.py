"""The differences of the rungs in docs/ladder.md, and README's summary."""

from __future__ import annotations

import re

import pytest

from perf.ladder import autotuner, views
from perf.ladder.record import SECTIONS, Record
from perf.ladder.rungs_and_twins import rungs_of
from perf.measure import environment
from perf.measure.providers import OURS
from perf.pages import __main__ as pages
from perf.pages import rung_diff, summary
from perf.pages.results import Results
from tests.support.report_records import SURROUNDINGS, keys, made_up_sweep
from triton_gemm.ladder import LADDER

RUNGS = {rung.id: rung for rung in LADDER}
RESULTS = Results.read(environment.RESULTS)


def test_the_first_rung_differs_from_nothing() -> None:
    assert rung_diff.difference(RUNGS["k01"]) == ""


def test_indentation_alone_is_no_change() -> None:
    """k09 puts k08's body into a loop."""
    found = rung_diff.difference(RUNGS["k09"]).splitlines()
    assert not any("acc = tl.dot" in line or "store_tile(" in line for line in found if line.startswith(("-", "+")))


def test_a_changed_rung_makes_its_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rung_diff, "CONTEXT", 1)
    assert [path.name for path in pages.stale()] == ["ladder.md"]


def beside_its_neighbours(record: Record, mode: str, rung: str, size: int) -> float:
    """The rung's speed at `size` over the mean of those at the next sizes that are multiples of 16."""
    known = {size: tflops for size, problem in views.squares(record, mode).items() if (tflops := problem.tflops(rung))}
    below, above = max(s for s in known if s < size and s % 16 == 0), min(s for s in known if s > size and s % 16 == 0)
    return 2 * known[size] / (known[below] + known[above])


@pytest.mark.parametrize("record", RESULTS.records, ids=lambda record: record.folder.name)
def test_what_the_page_says_of_sizes_that_are_no_multiples_of_16(record: Record) -> None:
    for size in (1400, 3000):
        found = {
            rung.id: beside_its_neighbours(record, mode, rung.name, size)
            for mode in ("ieee", "tf32", "fp16")
            for rung in rungs_of(mode)
        }
        assert found.pop("k01") > 1.2 and all(ratio < 0.9 for ratio in found.values())
        assert {"k08", "k09"} == set(sorted(found, key=lambda number: found[number])[:2])
        assert min(found["k10"], found["k11"]) > 2.5 * max(found["k08"], found["k09"])
        assert len({24 * row % 32 for row in range(32)}) == 4 and size % 32 == 24  # banks of a warp's words
    assert -(-3000 // 128) * -(-3000 // 256) == 288 == 2 * 132 + 24


@pytest.mark.parametrize("record", RESULTS.records, ids=lambda record: record.folder.name)
def test_records_have_what_the_report_says(record: Record) -> None:
    for problem in record.problems.values():
        for reading in (problem.clocks_before, problem.clocks_after):
            assert None not in (reading.clocks_sm, reading.clocks_mem, reading.temperature_gpu, reading.power_draw)
        for result in filter(None, map(problem.timed, problem.providers)):
            error = result.error
            assert error is not None and error.norm is not None
            assert problem.mode == "int32" or None not in (error.componentwise, error.bound, error.vs_torch)


def test_what_k11_says_of_its_tiles() -> None:
    """Those of 64 x 128 read twice as much for each FLOP, and are more than half as fast."""
    (tuning,) = (t for record in RESULTS.records for t in autotuner.shown(record) if t.rung.id == "k11")
    best = {autotuner.tile(together[0].config): together[0].tflops for together in tuning.by_tile()}
    assert best[64, 128, 64] > 0.8 * best[128, 256, 64]


def test_every_section_of_a_record_is_written_by_something() -> None:
    written = "".join(path.read_text() for path in (pages.ROOT / "perf" / "ladder").glob("*.py"))
    for section in SECTIONS:
        assert re.search(rf"(put|keeper)\((record|self)\.{section},|record\.{section}\[\w+\] = ", written), section


# --- README's summary ---


def test_the_slowest_gpu_decides_where_a_suite_stands() -> None:
    found = {
        "fast": {"NVIDIA A": 1.5, "NVIDIA B": 1.1},
        "mixed": {"NVIDIA A": 2.0, "NVIDIA B": 1.0},
        "slow": {"NVIDIA A": 1.2, "NVIDIA B": 0.9},
        "faster": {"NVIDIA B": 3.0},
    }
    head, _, *rows = summary.table(found).splitlines()
    assert "on A / B" in head
    assert rows == [
        f"| {summary.FASTER} | faster (– / 3.00); fast (1.50 / 1.10) |",
        f"| {summary.SAME} | mixed (2.00 / 1.00) |",
        f"| {summary.SLOWER} | slow (1.20 / 0.90) |",
    ]


def test_the_plain_sweep_of_a_suite_counts_and_models_do() -> None:
    variants = {"torch": {}, OURS: {"ratio": {"median": 2.0}}, "compiled": {"ratio": {"median": 0.5}}}
    model = {"environment": SURROUNDINGS, "cases": {"training, 8 x 1024": {"variants": variants}}}
    ratios = (("square", 1.5), ("square", 0.5), ("fp8-fast", 9.0))
    found = summary.speed([made_up_sweep(suite, {keys(suite, 1)[0]: ratio}) for suite, ratio in ratios], [model])
    assert "squares (1.50)" in found and "9.00" not in found
    assert f"{summary.MODELS['training']} (1.00)" in found


def test_every_suite_in_the_summary_is_there_and_committed() -> None:
    found = summary.speed(RESULTS.sweeps, RESULTS.models)
    assert all(f"{words} (" in found for words in (*summary.SUITES.values(), *summary.MODELS.values()))
