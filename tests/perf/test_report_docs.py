"""The differences of the rungs in docs/ladder.md, and README's summary."""

from __future__ import annotations

import re

import pytest

from perf.bench.scores import Sweep
from perf.ladder import autotuner, views
from perf.ladder.record import SECTIONS, Record
from perf.ladder.rungs_and_twins import rungs_of
from perf.measure import environment
from perf.measure.providers import CUBLAS, OURS
from perf.pages import __main__ as pages
from perf.pages import rung_diff, summary
from perf.pages.results import Results
from triton_gemm.ladder import LADDER

RUNGS = {rung.id: rung for rung in LADDER}
RESULTS = Results.read(environment.RESULTS)


def test_the_first_rung_differs_from_nothing() -> None:
    assert rung_diff.difference(RUNGS["k01"]) == ""


@pytest.mark.parametrize(
    ("rung", "lines"),
    [
        ("k02", ["-    offs_m = (pid_m * BLOCK_M + tl.arange(0, BLOCK_M)).to(tl.int64)  # lanes along M: uncoalesced"]),
        ("k03", ["@@ store_tile, new @@", "-    for k in range(K):", "+    for k in range(0, K, BLOCK_K):"]),
        ("k04", ["+    GROUP_M: tl.constexpr,", "-    pid_n = tl.program_id(1)"]),
        ("k05", ["# The kernel is k04's.", "@@ CONFIGS @@", "@@ repack_kernel, new @@"]),
        ("k06", ["# The kernel is k05's.", "+    for stages in depths"]),
        ("k07", ['-        acc = tl.dot(a, b, acc, input_precision="ieee")', "@@ round_tf32, new @@"]),
        ("k08", ['-        acc = tl.dot(a, b, acc, input_precision="tf32")']),
        ("k09", ["         # Locate the tile", "-    run(RUNG, kernel, tiles(*c.shape), arguments, config)"]),
        ("k10", ["-    a_ptr,", "+    a_desc,"]),
        ("k11", ["@@ load_partition, new @@", "@@ mma_partition, new @@", "@@ warp_specialised_kernel, new @@"]),
    ],
)
def test_a_rung_shows_what_it_changes(rung: str, lines: list[str]) -> None:
    found = rung_diff.difference(RUNGS[rung])
    assert set(lines) <= set(found.splitlines())
    assert "fmt:" not in found and '"""' not in found
    title = found.partition("</summary>")[0]
    assert ("little of k10" in title) if rung == "k11" else title.endswith(f"from k{int(rung[1:]) - 1:02}")


def test_indentation_alone_is_no_change() -> None:
    """k09 puts k08's body into a loop."""
    found = rung_diff.difference(RUNGS["k09"]).splitlines()
    assert not any("acc = tl.dot" in line or "store_tile(" in line for line in found if line.startswith(("-", "+")))


def test_the_ladders_page_has_every_difference() -> None:
    page = (pages.ROOT / "docs" / "ladder.md").read_text()
    assert all(rung_diff.difference(rung) in page for rung in LADDER)


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


def sweep(suite: str, ratio: float) -> Sweep:
    results = {
        name: {"time_ms": {"median": time}, "ratio": {"median": ratio}} for name, time in ((OURS, 1.0), (CUBLAS, ratio))
    }
    shape = {"M": 4096, "N": 4096, "K": 4096, "providers": results}
    environment = {"gpu": "NVIDIA A", "triton": "3.9.0"}
    return {"suite": suite, "dtype": "bf16", "environment": environment, "shapes": {"4096x4096x4096": shape}}


def test_the_plain_sweep_of_a_suite_counts_and_models_do() -> None:
    variants = {"torch": {}, OURS: {"ratio": {"median": 2.0}}, "compiled": {"ratio": {"median": 0.5}}}
    model = {
        "environment": {"gpu": "NVIDIA A", "triton": "3.9.0"},
        "cases": {"training, 8 x 1024": {"variants": variants}},
    }
    found = summary.speed([sweep("square", 1.5), sweep("square", 0.5), sweep("fp8-fast", 9.0)], [model])
    assert "squares (1.50)" in found and "9.00" not in found
    assert f"{summary.MODELS['training']} (1.00)" in found


def test_every_suite_in_the_summary_is_there_and_committed() -> None:
    found = summary.speed(RESULTS.sweeps, RESULTS.models)
    assert all(f"{words} (" in found for words in (*summary.SUITES.values(), *summary.MODELS.values()))


def test_the_ends_of_the_ladder_are_named() -> None:
    assert RESULTS.latest is not None
    found = summary.climb(RESULTS.latest)
    assert "k01 reaches" in found and "k11 reaches" in found and found.endswith("in the same precision.")
