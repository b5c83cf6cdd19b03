"""The differences of the rungs in docs/ladder/, and the tables of every suite's speed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf.bench import scores
from perf.bench import tables as bench_tables
from perf.bench.scores import Sweep
from perf.common.files import write_json
from perf.ladder import autotuner, views
from perf.ladder import tables as ladder_tables
from perf.ladder.record import SECTIONS, Record
from perf.ladder.rungs_and_twins import rungs_of
from perf.measure import environment
from perf.pages import __main__ as pages
from perf.pages import rung_diff, speed_map, summary
from perf.pages.results import Results
from tests.support.kernel_mutants import RUNGS
from tests.support.report_records import SURROUNDINGS, block, keys, made_up_sweep
from triton_gemm.ladder import LADDER
from triton_gemm.suites import SUITES

RESULTS = Results.read(environment.RESULTS)


def test_the_first_rung_differs_from_nothing() -> None:
    assert rung_diff.difference(RUNGS["k01"]) == ""


def test_indentation_alone_is_no_change() -> None:
    """k09 puts k08's body into a loop."""
    found = rung_diff.difference(RUNGS["k09"]).splitlines()
    assert not any("acc = tl.dot" in line or "store_tile(" in line for line in found if line.startswith(("-", "+")))


def test_a_changed_rung_makes_its_page_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rung_diff, "CONTEXT", 1)
    # k11's page has no difference: its kernel is another
    assert [path.stem for path in pages.stale()] == [rung.id for rung in LADDER[1:-1]]


def test_a_page_has_the_whole_kernel_and_says_where_the_rest_is() -> None:
    k04 = rung_diff.whole(RUNGS["k04"], "here")
    for part in ("def grouped_kernel(", "def grouped_pid(", "calls k03's `operand_pointers`, `store_tile`."):
        assert part in k04
    assert "def grouped_kernel(" in rung_diff.whole(RUNGS["k05"], "here")  # whose kernel is k04's
    assert "has little of k10's" in rung_diff.whole(RUNGS["k11"], "here") and not rung_diff.difference(RUNGS["k11"])


def test_waves_are_those_of_the_drawing_and_ask_for_what_they_cover() -> None:
    """k04's trace at 16384, and a wave whose last group is not full."""
    assert ladder_tables._strips(660, 256, 256, 256) == (256, 3) and ladder_tables._strips(660, 256, 256, 8) == (8, 83)
    rows = block("grouping", RESULTS).splitlines()
    assert "| k04, 64x64 | 16384 | 256 + 3 | 8 + 83 | 0.48 | 0.17 |" in rows
    assert "| k08, 128x256 | 4096 | 32 + 5 | 12 + 16 |" in "".join(rows)


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
    best = {autotuner.tile(one.config): one.tflops for one in sorted(tuning.timed, key=lambda one: one.tflops)}
    assert best[64, 128, 64] > 0.8 * best[128, 256, 64]


def test_every_section_of_a_record_is_written_by_something() -> None:
    written = "".join(path.read_text() for path in (pages.ROOT / "perf" / "ladder").glob("*.py"))
    for section in SECTIONS:
        assert re.search(rf"(put(_added)?|keeper)\((record|self)\.{section},|record\.{section}\[\w+\] = ", written), (
            section
        )


# --- README's summary, and the tables of every suite ---


def made_up_sweeps() -> list[Sweep]:
    """mid, with two unseen draws, decode and int8 in both layouts."""
    unseen = [made_up_sweep("mid", {keys("mid", 1)[0]: ratio}, unseen=seed) for seed, ratio in ((5, 0.5), (6, 2.0))]
    ints = dict(zip(("1024x1024x1024 nn", "1024x1024x1024 nt"), (8.0, 2.0), strict=True))
    return [
        made_up_sweep("mid", dict(zip(keys("mid", 3), (1.5, 1.5, None), strict=True))),
        *unseen,
        made_up_sweep("decode", {keys("decode", 1)[0]: 1.25}),
        made_up_sweep("int8", ints, dtype="int8"),
        made_up_sweep("fp8-fast", {keys("fp8-fast", 1)[0]: 9.0}, dtype="fp8 fast"),
    ]


def test_suites_are_sorted_by_speed_in_tables_of_unseen_and_listed_shapes() -> None:
    """int8 by layout. README has the first table alone, without dates."""
    mid, decode = summary.SUITES["mid"], summary.SUITES["decode"]
    made = "Made-up GPU, torch 2.11.0, Triton 3.6.0, CUDA 13.0: [every suite and shape]"
    made += "(made-up-gpu/bench/3.6.0/README.md)."
    unseen = [
        "",
        f"| torch's time over ours; the mean is of unseen shapes | {' | '.join(summary.COLUMNS)} |",
        "| :-- | --: | --: | --: | --: |",
        f"| `mid`: {mid} (1 not timed) | 1.00 | 0.50 | {keys('mid', 1)[0]} | 1 of 4 |",
    ]
    assert block("summary", Results([], made_up_sweeps())).splitlines()[1:-1] == [made, *unseen]
    assert block("bench", Results([], made_up_sweeps())).splitlines()[1:-1] == [
        f"{made} Commit `abc1234`{environment.CHANGED}.",
        *unseen,
        "",
        f"| torch's time over ours; the mean is of listed shapes | {' | '.join(summary.COLUMNS)} |",
        "| :-- | --: | --: | --: | --: |",
        f"| `fp8-fast`: {summary.VARIANTS['fp8-fast']} | 9.00 | 9.00 | {keys('fp8-fast', 1)[0]} | 0 of 1 |",
        f"| `int8 nn`: {summary.SUITES['int8 nn']} | 8.00 | 8.00 | 1024x1024x1024 nn | 0 of 1 |",
        f"| `int8 nt`: {summary.SUITES['int8 nt']} | 2.00 | 2.00 | 1024x1024x1024 nt | 0 of 1 |",
        f"| `decode`: {decode} | 1.25 | 1.25 | {keys('decode', 1)[0]} | 0 of 1 |",
    ]


def test_the_first_figures_are_faster_even_or_slower_as_they_are_measured() -> None:
    sweeps = [
        *made_up_sweeps(),
        made_up_sweep("fp64", {keys("fp64", 1)[0]: 0.952}),
        made_up_sweep("fp8", {keys("fp8", 1)[0]: 0.953}),
    ]
    cases = {"llama-1b, first minute": {"ratio": {"median": 0.8}}, "llama-1b, forward": {"ratio": {"median": 1.0}}}
    cases |= {f"{i}, training step": {"ratio": {"median": ratio}} for i, ratio in enumerate((0.8, 1.0, 1.0, 1.0, 1.25))}
    cases["mixtral-8x7b, first minute"] = {"failed": "no memory"}  # type: ignore[dict-item]
    ratios = "inference 1.00, median 1.00, 1.00 at worst; training 1.00, median 1.00, 0.80 at worst"
    models = [{"environment": {**SURROUNDINGS, "triton": triton}, "cases": cases} for triton in ("3.9.0", "3.6.0")]
    found = block("glance", Results([], sweeps, {"models": models})).splitlines()
    assert found[5:-1] == [
        "| faster | none | int8 linear layers 2.00, up to 64 rows 1.25 |",
        "| even, to 5 % | medium sizes 1.00 | fp8 (scales of operands) 0.95 |",
        "| slower | none | fp64 0.95 |",
        "| the slowest single shape | 0.50 | 0.95 |",
        "",
        *(
            f"- Whole models and `examples/gpt.py`, torch's time over ours (Made-up GPU, {triton}): {ratios}."
            for triton in ("Triton 3.9.0, installed separately: torch 2.11 brings 3.6", "Triton 3.6.0")
        ),
        "- Tokens in the first minute of a process, ours over torch's (Triton 3.6.0): llama-1b 0.80.",
    ]
    minutes = {name: case for name, case in cases.items() if name.endswith("first minute")}
    alone = block("glance", Results([], sweeps, {"models": [models[0], models[1] | {"cases": minutes}]})).splitlines()
    *_, last = found[:-1]
    assert (
        alone[-2] == last.replace("3.6.0)", "3.6.0, with which no other model was measured)") and found[-4] == alone[-3]
    )
    assert summary.GLANCE.keys() <= summary.SUITES.keys()
    assert len((pages.ROOT / "README.md").read_text().splitlines()) <= 130


def test_other_dtypes_have_a_row_of_their_own() -> None:
    sweeps = [made_up_sweep("square", {keys("square", 1)[0]: 1.5}, dtype=dtype) for dtype in ("bf16", "fp16")]
    found = block("summary", Results([], sweeps))
    words = f"| `square`: {summary.SUITES['square']}"
    assert f"{words} | 1.50 |" in found and f"{words}, fp16 | 1.50 |" in found


def test_a_block_shows_the_gpu_that_it_names_or_all_each_by_its_newest_triton(tmp_path: Path) -> None:
    """README's table has one, of whichever Triton."""
    gpus = ("NVIDIA A100", "NVIDIA H100 80GB HBM3")
    for gpu, triton in ((gpus[0], "3.9.0"), (gpus[1], "3.7.1"), (gpus[1], "3.9.0")):
        for sweep in made_up_sweeps():
            sweep["environment"] |= {"gpu": gpu, "triton": triton}
            folder = bench_tables.folder_of(tmp_path, sweep["environment"])
            write_json(folder / f"{scores.label(sweep).replace(' ', '-')}.json", sweep)
    results = Results.read(tmp_path)
    assert block("summary", results).count("torch 2") == 1
    every = block("bench", results)
    assert [every.count(gpu) for gpu in gpus] == [1, 1] and "3.7.1" not in every
    for name in ("bench", "summary"):
        assert [block(f"{name} on h100-80gb-hbm3", results).count(gpu) for gpu in gpus] == [0, 1]
    assert "committed yet" in block("bench on h200", results)
    assert every.count(f": {summary.VARIANTS['fp8-fast']} | 9.00 |") == 2


def test_every_suite_has_words() -> None:
    names = {f"{name} {layout}" for name in summary.BY_LAYOUT for layout in ("nn", "nt")}
    assert summary.SUITES.keys() | summary.VARIANTS.keys() == SUITES.keys() - set(summary.BY_LAYOUT) | names
    every = block("bench", RESULTS)
    assert all(f"| `{name}`: {words} | " in every for name, words in summary.SUITES.items())


def test_the_map_has_each_ratio_once_for_each_weight_that_models_have(tmp_path: Path) -> None:
    """In the colour of the faster one; what was not timed is an empty cell, and unseen shapes are not on it."""
    ratios = {"1x4096x4096 nt": 1.3, "4x4096x4096 nt": 0.5, "16x4096x4096 nt": 1.01, "1x576x7168 nt": None}
    shown = made_up_sweep("llm", ratios)
    sweeps = [made_up_sweep("llm", {"1x4096x4096 nt": 9.0}, unseen=5), made_up_sweep("mid", {}), shown]
    assert speed_map.listed(sweeps) == shown and speed_map.listed(sweeps[:2]) is None
    cells = re.findall(r'width="53"[^/]*fill="([^"]*)"[^>]*>(?:<text[^>]*>([^<]*))?', speed_map.picture(shown))
    weights = [("#1f5f99", "1.30"), ("#b35806", "0.50"), ("#eeeeee", "1.01")]
    assert cells == [*weights, *weights, ("none", ""), ("none", ""), ("none", "")]  # of two models, and DeepSeek's
    found = block("maps", Results([], sweeps))
    assert "(made-up-gpu/bench/3.6.0/map.svg)" in found
    versions = f"torch {SURROUNDINGS['torch']}, Triton 3.6.0, CUDA {SURROUNDINGS['cuda']}"
    each = "GEMMs triton_gemm is faster on 1, torch on"
    assert f"{versions}: of 3 listed {each} 1; of 1 unseen {each} 0. The others are within 2 %" in found


def test_readmes_map_is_of_the_versions_of_its_table() -> None:
    of = re.compile(r"^NVIDIA .*?, CUDA [\d.]+", re.MULTILINE)
    found = [of.findall(block(name, RESULTS)) for name in ("summary", "map")]
    assert found[0] == found[1] and len(found[0]) == 1


def test_products_in_fp64_show_no_error() -> None:
    """Since they are the truth of it."""
    sweeps = [made_up_sweep(name, {"4096x4096x4096 nn": 1.0}, dtype=name) for name in ("fp64", "ieee")]
    truth, other = (bench_tables.suite(sweeps, name) for name in ("fp64", "ieee"))
    assert "the truth that errors are measured against" in truth and "| error |" not in truth
    assert "the truth that errors" not in other and "| error |" in other


def test_maps_are_made_again_where_a_figure_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(speed_map, "EQUAL", 1.5)
    monkeypatch.setattr(speed_map, "COLOURS", speed_map.COLOURS[2:])
    assert {path.name for path in pages.stale()} == {"map.svg", "performance.md", "performance-h100.md", "README.md"}


def test_the_picture_of_precisions_is_of_a_gpu_that_has_one() -> None:
    precisions = [
        made_up_sweep(name, {"4096x4096x4096 nn": 1.0}, dtype=name, environment={**SURROUNDINGS, "gpu": "Second"})
        for name in ("tf32", "ieee")
    ]
    found = block("precision-picture", Results([], [*made_up_sweeps(), *precisions]))
    assert "(second/bench/3.6.0/precision.png)" in found
