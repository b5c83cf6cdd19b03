"""The bench: its shapes, its arithmetic, its tables and its command, measured on a made-up GPU that takes no time."""

from __future__ import annotations

import csv
import math
import statistics
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from triton.tools.tensor_descriptor import TensorDescriptor

from perf.bench import __main__ as bench
from perf.bench import peers, scores, sweep
from perf.bench import tables as bench_tables
from perf.bench.scores import COMPILED, COPY, Score
from perf.common.files import read_json, write_json
from perf.measure import environment, operands, timer
from perf.measure.operands import Check, Operands, Problem
from perf.measure.providers import CUBLAS, OURS
from perf.pages import __main__ as pages
from perf.pages.results import Results
from tests.support.lab_fakes import take_gpu_away
from tests.support.processes import printed
from tests.support.report_records import SURROUNDINGS, keys, made_up_sweep, spread
from triton_gemm.functional import left_to_torch, other_products
from triton_gemm.functional.activations import ACTIVATIONS
from triton_gemm.problem import UnsupportedOperandError
from triton_gemm.runtime import aot
from triton_gemm.suites import ALL, LARGE_M, PROJECTIONS, SUITES, Suite, chosen, unseen
from triton_gemm.suites.shapes import Shape, cube, spaced
from triton_gemm.tuning import timing

TINY = (Shape(24, 16, 40, name="tiny", layout="nt"), cube(17, "tn", pad=1, offset=1))


@pytest.mark.parametrize("suite", SUITES.values(), ids=SUITES)
def test_shapes_are_of_a_suites_regime_and_a_seed_decides_about_others(suite: Suite) -> None:
    keys = [shape.key for shape in suite.shapes]
    assert len(set(keys)) == len(keys) > 5
    assert suite.reason and suite.kind in ("graph", "host", "queue") and suite.unit in ("TFLOPS", "GB/s", "us")
    drawn = unseen(suite, 7, 12)
    assert drawn == unseen(suite, 7, 12) and drawn != unseen(suite, 8, 12)
    assert [shape.key for shape in (*suite.shapes, *drawn) if not suite.regime(shape)] == []
    assert len({shape.key for shape in drawn} - set(keys)) == 12


def test_suites_hold_what_they_are_named_for() -> None:
    assert {1536, 3072, 5120, 6144, 512, 16384} <= {shape.M for shape in SUITES["square"].shapes}
    named = {shape.name.rpartition(" ")[0] for shape in SUITES["llm"].shapes}
    assert len({(s.N, s.K) for s in SUITES["llm"].shapes}) * 8 == len(SUITES["llm"].shapes)
    assert named >= {"Llama-3 8B", "Llama-3 70B", "Qwen3 32B", "DeepSeek-V3"} <= set(PROJECTIONS)
    assert {s.key for s in SUITES["llm"].shapes if s.M >= LARGE_M} == {s.key for s in SUITES["llm-large"].shapes}
    assert max(2 * s.N * s.K for s in SUITES["decode"].shapes) > 100e6
    assert {(256, 7168), (576, 7168), (1536, 7168)} < {(s.N, s.K) for s in SUITES["router"].shapes}
    assert any(s.offset for s in SUITES["odd"].shapes) and any(s.pad for s in SUITES["odd"].shapes)
    assert {s.layout for s in SUITES["layouts"].shapes} == {"nn", "nt", "tn", "tt"}
    assert {s.activation for s in SUITES["epilogue"].shapes} == {None, *ACTIVATIONS}
    assert "llm-large" not in ALL


def test_a_limit_spaces_shapes_evenly() -> None:
    shapes = SUITES["square"].shapes
    assert spaced(shapes, None) == spaced(shapes, 99) == shapes
    assert spaced(shapes, 3) == (shapes[0], shapes[len(shapes) // 2], shapes[-1])
    assert len(spaced(shapes, 1)) == 1 and len(set(spaced(SUITES["llm"].shapes, 20))) == 20
    assert len(chosen(SUITES["square"], 4, seed=3)) == 4


def test_a_score_is_mean_minimum_and_losers() -> None:
    one, two, three, four = keys("square", 4)
    (score,) = scores.scores(made_up_sweep("square", {one: 2.0, two: 0.5, three: 0.8, four: 1.0}))
    assert score.mean == pytest.approx((2 * 0.5 * 0.8) ** 0.25)
    assert (score.minimum, score.losers, score.met) == (0.5, (two, three), False)
    (good,) = scores.scores(made_up_sweep("square", {one: 1.10, two: 0.99}))
    (incomplete,) = scores.scores(made_up_sweep("square", {one: 1.10, two: None}))
    assert good.met is True and (incomplete.missing, incomplete.met) == (1, False)
    assert scores.scores(made_up_sweep("square", {one: None})) == []
    assert Score("layouts", CUBLAS, {one: 2.0}, None).met is None


def test_scores_beside_cublas() -> None:
    projections = keys("llm", 8)
    both = scores.scores(made_up_sweep("llm", dict.fromkeys(projections, 1.2)))
    assert [(score.suite, len(score.ratios)) for score in both] == [("llm", 8), ("llm-large", 3)]
    assert both[1].target == scores.TARGETS["llm-large", CUBLAS]
    to_eager, to_compiled = scores.scores(made_up_sweep("epilogue", dict.fromkeys(keys("epilogue", 2), 1.2)))
    assert (to_compiled.over, to_compiled.mean) == (COMPILED, pytest.approx(1.08))
    assert to_eager.met and to_compiled.met
    light, heavy = (next(s.key for s in SUITES["decode"].shapes if (2 * s.N * s.K > 100e6) is h) for h in (False, True))
    found = scores.scores(made_up_sweep("decode", {light: 1.0, heavy: 1.0}, copy_tbs=1.0))
    share = next(score for score in found if score.over == COPY)
    assert list(share.ratios) == [heavy] == list(share.losers)
    shape = made_up_sweep("decode", {heavy: 1.0})["shapes"][heavy]
    moved = 2 * (shape["M"] * shape["K"] + shape["K"] * shape["N"] + shape["M"] * shape["N"])
    assert share.ratios[heavy] == pytest.approx(moved / 2e-3 / 1e12)
    assert all(suite in SUITES for suite, _ in scores.TARGETS)


def test_a_sweep_is_compared_with_one_before(capsys: pytest.CaptureFixture[str]) -> None:
    """Over shapes that both timed; a mean below what was asked for fails, and so does nothing in common."""
    first, second, third, fourth = keys("square", 4)
    before = made_up_sweep("square", {first: 1.0, second: 2.0, third: None, fourth: 1.0})
    now = made_up_sweep("square", {first: 0.9, second: 2.0, third: 1.0})
    assert scores.changes(before, now) == {first: pytest.approx(0.9), second: pytest.approx(1.0)}
    console = bench.Console(width=200)
    for least, slower in ((0.94, False), (0.95, True), (None, False)):
        assert bench.show_changes([now], {"square": before}, least, console) == slower
    assert f"0.949 over 2 shapes, at worst 0.900: {first}" in capsys.readouterr().out
    assert bench.show_changes([now], {"square": made_up_sweep("square", {fourth: 1.0})}, 0.5, console)
    assert not bench.show_changes([now], {}, 0.5, console)


def test_a_baseline_is_a_sweep_of_the_suite_or_a_folder_of_them(tmp_path: Path) -> None:
    write_json(tmp_path / "square.json", made_up_sweep("square", {keys("square", 1)[0]: 1.0}))
    for given in (tmp_path, tmp_path / "square.json"):
        assert set(bench.baselines(bench.parse(["square", "--baseline", str(given)]))) == {"square"}
    with pytest.raises(ValueError, match="is no sweep of llm"):
        bench.baselines(bench.parse(["llm", "--baseline", str(tmp_path / "square.json")]))
    with pytest.raises(OSError):
        bench.baselines(bench.parse(["llm", "--baseline", str(tmp_path)]))


def test_a_record_has_a_line_for_each_list_of_figures(tmp_path: Path) -> None:
    data = {"gpu": "a \n name", "times": [[1.5, "one"], [2, None]], "none": {}, "shapes": [{"M": 1, "rows": [[1], []]}]}
    write_json(tmp_path / "record.json", data)
    assert read_json(tmp_path / "record.json") == data
    lines = (tmp_path / "record.json").read_text().split("\n")
    assert lines[2:6] == [' "times": [', '  [1.5,"one"],', "  [2,null]", " ],"]


def test_figures_that_are_too_good_are_named() -> None:
    size = "4096x4096x4096 nn"
    assert len(scores.suspicious([made_up_sweep("square", {size: 1.3})])) == 1
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA H200"):
        fast = made_up_sweep("square", {size: 1.05}, environment={**SURROUNDINGS, "gpu": gpu})
        fast["shapes"][size]["providers"][OURS]["time_ms"] = spread(2 * 4096**3 / 950e9)
        assert scores.suspicious([fast]) == [f"square {size}: 950 TFLOPS"]
    good = [made_up_sweep("square", {size: 1.05}), made_up_sweep("square", {"512x512x512 nn": 1.3})]
    assert scores.suspicious(good) == []


def test_a_table_says_what_failed_and_has_cells_for_every_column() -> None:
    failed = made_up_sweep("square", {keys("square", 1)[0]: None})
    assert "FAILED: a result is off" in bench_tables.suite([failed], "square")
    for name, suite in SUITES.items():
        every = made_up_sweep(name, {shape.key: 1.01 for shape in suite.shapes})
        rows = [bench_tables.row(every, key) for key in every["shapes"]]
        assert len({tuple(row) for row in rows}) == 1


def test_the_newest_committed_sweeps_of_a_gpu_are_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And those of a torch and the Triton that it brings."""
    one, two = keys("square", 2)
    for version, ratio in (("3.10.0", 1.5), ("3.6.0", 1.25)):
        surroundings = {**SURROUNDINGS, "triton": version, "torch": "2.12.0"}
        folder = bench_tables.folder_of(tmp_path, surroundings)
        write_json(folder / "square.json", made_up_sweep("square", {one: ratio}, environment=surroundings))
    unseen = made_up_sweep("square", {two: 1.0}, unseen=5, environment=surroundings)
    write_json(folder / "square-unseen-5.json", unseen)
    assert folder == tmp_path / "made-up-gpu" / "bench" / "3.6.0"
    found = bench_tables.committed(tmp_path)
    versions = [("3.6.0", None), ("3.6.0", 5), ("3.10.0", None)]
    assert [(sweep["environment"]["triton"], sweep["unseen"]) for sweep in found] == versions
    assert "| square unseen 5 |" in bench_tables.pages(found[:2])[bench_tables.PAGE]
    monkeypatch.setattr(environment, "RESULTS", tmp_path)
    monkeypatch.setattr(pages, "PAGES", ())
    pages.rewrite()
    for file in tmp_path.rglob("*.md"):
        assert file.parent.name == "3.10.0" and "1.500" in file.read_text()
    assert pages.stale() == []
    for made in found[:2]:
        made["environment"]["torch"] = "2.11.0+cu130"
    assert environment.newest(found) == found


def test_every_committed_sweep_is_on_a_page() -> None:
    for made, sweeps in bench_tables.by_place(Results.read(environment.RESULTS).sweeps):
        index = bench_tables.page_of(environment.RESULTS, made)
        for found in sweeps:
            page = index.with_name(f"{found['suite']}.md")
            assert f"[{found['suite']}]({page.name})" in index.read_text()
            assert all(f"\n| {key} | " in page.read_text() for key in found["shapes"])
            assert page.read_text().count("\n") <= 400


def test_shapes_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["--list"]) == 0
    out = capsys.readouterr().out
    assert [line.split()[:2] for line in out.splitlines()] == [[n, str(len(s.shapes))] for n, s in SUITES.items()]
    assert bench.main(["square", "llm", "--list", "--limit", "2"]) == 0
    out = capsys.readouterr().out
    assert "512x512x512 nn" in out and "Llama-3 8B qkv" in out


@pytest.fixture
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets the bench work on the CPU, where providers compute and replays take no time; and a suite of tiny shapes."""
    take_gpu_away(monkeypatch)
    monkeypatch.setattr(timer, "QUEUE_LENGTH", 4)
    monkeypatch.setattr(sweep, "clocks_under_load", lambda _: {"clocks_sm": 1755})
    monkeypatch.setattr(environment, "describe", lambda _: dict(SURROUNDINGS))
    monkeypatch.setitem(peers.PEERS, OURS, lambda problem: timer.Provider("", peers.providers.fused_in_torch(problem)))
    for kind in ("graph", "host", "queue"):
        monkeypatch.setitem(SUITES, f"tiny-{kind}", tiny(kind))


def tiny(kind: str) -> Suite:
    unit = "TFLOPS" if kind == "graph" else "us"
    return Suite(f"tiny-{kind}", "tiny shapes", TINY, lambda s: s.M < 64, lambda r: cube(r.randint(4, 60)), kind, unit)


@pytest.mark.usefixtures("no_gpu")
def test_the_command_measures_and_writes_down(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench.main(["tiny-graph", "tiny-queue", "--out", str(tmp_path), "--budget", "0.01"]) == 0
    out = capsys.readouterr().out
    assert out.count("  24x16x40 nt ") == 2
    assert all(words in out for words in ("17x17x17 tn pad 1 offset 1", "geometric mean", "tiny-graph.json"))
    measured = read_json(tmp_path / "tiny-graph.json")
    assert measured["environment"] == {**SURROUNDINGS, "sources": environment.source_hash("bench")}
    of_queue = read_json(tmp_path / "tiny-queue.json")["environment"]["sources"]
    assert of_queue == environment.source_hash("host") != measured["environment"]["sources"], "the host's time"
    assert measured["clocks_before"] == measured["clocks_after"] == {"clocks_sm": 1755}
    shape = measured["shapes"]["24x16x40 nt"]
    assert (shape["seed"], shape["name"], scores.ratio(shape)) == (0, "tiny", 1.0)
    assert shape["providers"][OURS]["error"]["bound"] < 1
    queue = read_json(tmp_path / "tiny-queue.json")["shapes"]["24x16x40 nt"]["providers"]
    assert 0 < queue[OURS]["least_ms"] <= queue[OURS]["time_ms"]["median"] and queue[OURS]["ratio"]["median"] > 0
    assert bench.main(["tiny-host", "--unseen", "3", "--limit", "1", "--out", str(tmp_path), "--dtype", "fp16"]) == 0
    (host,) = read_json(tmp_path / "tiny-host-fp16-unseen-3.json")["shapes"].values()
    assert host["mode"] == "fp16"


@pytest.mark.usefixtures("no_gpu")
def test_what_is_wrong_or_missing_is_reported(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file, not_taken = tmp_path / "one.json", Mock(side_effect=UnsupportedOperandError("rows are not aligned"))
    monkeypatch.setitem(peers.PEERS, OURS, lambda _: timer.Provider("", lambda a, b, c: a[:, :-1] @ b[:-1]))
    monkeypatch.setitem(peers.PEERS, "peer", lambda _: timer.Provider("", not_taken))
    assert bench.main(["tiny-graph", "--json", str(file), "--providers", f"{OURS},{CUBLAS},peer"]) == 1
    assert f"FAILED {OURS} on tiny-graph 24x16x40 nt" in capsys.readouterr().err
    results = read_json(file)["shapes"]["24x16x40 nt"]["providers"]
    assert results["peer"] == {"absent": "rows are not aligned"} and "time_ms" in results[CUBLAS]


@pytest.mark.usefixtures("no_gpu")
def test_an_interrupted_sweep_keeps_what_it_has(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = timer.Provider("", lambda a, b, c: a @ b)
    monkeypatch.setitem(peers.PEERS, OURS, Mock(side_effect=[first, KeyboardInterrupt]))
    assert bench.main(["tiny-graph", "--out", str(tmp_path)]) == 130
    assert len(read_json(tmp_path / "tiny-graph.json")["shapes"]) == 1


@pytest.mark.usefixtures("no_gpu")
@pytest.mark.parametrize("rows", [None, 16])
@pytest.mark.parametrize(
    "problem",
    [
        Problem(48, 24, 40, "bf16", layout="tt", pad=1, offset=1),
        Problem(48, 24, 40, "fp16", batch=3, layout="nt"),
        Problem(48, 24, 40, "bf16", layout="nt", bias="n", activation="gelu"),
        Problem(48, 24, 40, "bf16", bias="m", activation="silu"),
        Problem(48, 24, 40, "fp16", batch=2, bias="n", activation="relu"),
        Problem(48, 24, 40, "fp16", activation="gelu_tanh"),
    ],
    ids=str,
)
def test_torch_passes_the_check_and_a_lost_column_does_not(problem: Problem, rows: int | None) -> None:
    laid = Operands(problem, {problem.dtype}, 1)
    a, b, c, *bias = laid.arguments()[0]
    assert ["n" if x.stride(-1) == 1 else "t" for x in (a, b)] == list(problem.layout)
    assert {x.storage_offset() for x in (a, b, c)} == {problem.offset}
    check = Check(laid, operands.check_rows(problem, rows))
    result = peers.providers.fused_in_torch(problem)(a, b, c, *bias)
    assert isinstance(result, torch.Tensor) and result.shape == c.shape
    error, complaint = check.verdict(result)
    assert complaint is None and error["vs_torch"] == pytest.approx(1.0, abs=0.5)
    assert check.verdict(torch.cat([result[..., 1:], result[..., :1]], -1))[1] is not None
    result[..., -1, -1] = math.nan
    assert "not finite" in str(check.verdict(result)[1])


@pytest.mark.usefixtures("no_gpu")
def test_rows_to_check_hold_the_edges_and_fit_the_work() -> None:
    rows = operands.check_rows(Problem(5000, 1024, 1024, "bf16"), 1024)
    assert rows is not None and 1000 < len(rows) <= 1024 and {0, 4999} <= set(rows.tolist())
    large = operands.check_rows(Problem(16384, 16384, 16384, "bf16"), 1024)
    assert large is not None and 2 * len(large) * 16384**2 <= operands.CHECK_FLOP
    assert operands.check_rows(Problem(4, 57344, 8192, "bf16"), 1024) is None
    assert operands.check_rows(Problem(5000, 8, 8, "bf16"), None) is None


def test_bytes_and_flop_count_the_batch() -> None:
    problem = Problem(2, 3, 5, "bf16", batch=7)
    assert (problem.flop, problem.bytes()) == (2 * 7 * 2 * 3 * 5, 2 * 7 * (2 * 5 + 5 * 3 + 2 * 3))
    assert problem.bytes({torch.float32, torch.bfloat16}) == 7 * (2 * (10 + 15) + 6 * 6)


def test_ratios_to_other_providers_are_taken_round_by_round(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(timing, "settle", lambda *_, **__: None)
    made = [
        timer.Subject(timer.Provider(name, print), {}, ms, SimpleNamespace(repeats=1, start=lambda ms=ms: lambda: ms))
        for name, ms in ((OURS, 1.0), (CUBLAS, 2.0), (COMPILED, 3.0))
    ]
    timer._time(made, CUBLAS, 0.01, sweep.PACE, (COMPILED,))
    assert made[0].result["ratio"]["median"] == 2.0 and made[0].result["ratio_to"][COMPILED]["median"] == 3.0
    assert "ratio_to" not in made[2].result


def test_clocks_have_settled_only_after_two_equal_stretches(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def read() -> float:
        nonlocal now
        now += 0.05
        return 1.0 if now > 1.0 else 2.0 - now  # the GPU slows down in its first second

    monkeypatch.setattr(timing.time, "perf_counter", lambda: now)
    monkeypatch.setattr(timing, "SETTLED", 0.01)
    timing.settle(lambda: read, patience_s=60.0)
    assert 1.25 < now < 10
    begin = now
    timing.settle(lambda: read, patience_s=0.03)
    assert now - begin < 2 * timing.STRETCH_S


def test_a_queue_counts_every_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    made: list[int] = []
    read = timing.Queue([lambda: made.append(0), lambda: made.append(1)], 5, drain=True).start()
    assert made == [0, 1, 0, 1, 0] and 0 <= read() < 1000


def test_importing_the_bench_makes_no_peer() -> None:
    """In a process of its own: other tests import Inductor."""
    printed("import sys, perf.bench.__main__; sys.exit('torch._inductor.compile_fx' in sys.modules)")


@pytest.mark.parametrize("transposed", [False, True])
def test_the_tutorial_peer_compiles_for_hopper(transposed: bool) -> None:
    half = torch.empty(256, 256, dtype=torch.bfloat16)
    tiles = {"BLOCK_M": 128, "BLOCK_N": 128, "BLOCK_K": 64}
    arguments: dict[str, Any] = {"B_TRANSPOSED": transposed, "GROUP": peers.GROUP_M, **tiles}
    arguments |= {name: TensorDescriptor.from_tensor(half, [1, 1]) for name in ("a_desc", "b_desc", "c_desc")}
    arguments |= dict.fromkeys("MNK", 256)
    peers.set_blocks(arguments)
    launch = aot.CapturedLaunch(peers.tutorial_kernel.fn, {**arguments, "num_warps": 4, "num_stages": 4})
    compiled = aot.compile_launch(launch, (9, 0))
    assert compiled.spills == 0 and {"HGMMA", "UTMALDG", "UTMASTG"} <= set(compiled.instructions)


def rows_of(record: str) -> list[dict[str, str]]:
    return list(csv.DictReader((environment.RESULTS / record).read_text().splitlines()))


def test_routing_leaves_to_torch_what_records_show_slower() -> None:
    """`left_to_torch.SLOWER` is what some suite of what `use()` routes has below 0.9, by each GPU's newest Triton, and
    the mean of small batches of fp32 in a record of their own."""
    routed = {"fp64": torch.float64, "ieee": torch.float32, "tf32": torch.float32, "bf16": torch.bfloat16}
    slower: dict[tuple[int, int], dict[torch.dtype, float]] = {}
    for made in environment.newest(bench_tables.committed(environment.RESULTS)):
        dtype = routed.get(made["dtype"])
        for _, score in bench_tables.named_scores(made):
            if dtype is not None and made["kind"] == "graph" and made["unseen"] is None and score.over == CUBLAS:
                found = slower.setdefault(tuple(made["environment"]["capability"]), {})
                if score.mean < 0.9:
                    found[dtype] = min(round(score.mean, 2), found.get(dtype, 1.0))
    ratios: dict[bool, list[float]] = {True: [], False: []}
    for row in rows_of("h200/attention-ieee.csv"):
        small = max(int(row[name]) for name in "MNK") < left_to_torch.SMALL
        ratios[small].append(float(row["torch us"]) / float(row["us"]))
    slower[9, 0][torch.float32] = round(statistics.geometric_mean(ratios[True]), 2)
    assert slower == left_to_torch.SLOWER and statistics.geometric_mean(ratios[False]) > 1


def test_groups_along_k_are_left_to_torch_by_the_record() -> None:
    ratios: dict[str, list[float]] = {"rows": [], "products": []}
    for row in rows_of("h100-80gb-hbm3/grouped.csv"):
        ratios[row["groups_of"]].append(float(row["torch_us"]) / float(row["triton_gemm_us"]))
    assert round(statistics.geometric_mean(ratios["products"]), 2) == other_products.K_IN_GROUPS[9, 0] < 0.9
    assert statistics.geometric_mean(ratios["rows"]) > other_products.NOT_SLOWER


def test_scales_that_are_routed_are_those_of_the_records() -> None:
    """Kinds for which the records of every GPU, of its newest Triton, show no suite slower than torch."""
    means: dict[tuple[str | None, bool], list[float]] = {}
    for made in environment.newest(bench_tables.committed(environment.RESULTS)):
        if made["suite"].startswith("fp8") and made["unseen"] is None:
            kind = SUITES[made["suite"]].shapes[0].scales, "fast" in made["suite"]
            scores = [score for _, score in bench_tables.named_scores(made) if score.over == CUBLAS]
            means.setdefault(kind, []).extend(score.mean for score in scores)
    assert len(means) == 5
    good = {kind for kind, found in means.items() if min(found) >= other_products.NOT_SLOWER}
    assert good == other_products.SCALES[9, 0]
