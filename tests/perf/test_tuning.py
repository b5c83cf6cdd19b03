"""perf.tuning: which products it draws, its records and their table, and the command with a tuner that is made up."""

from __future__ import annotations

import json
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perf.common.files import read_json
from perf.measure import compile_ahead, environment
from perf.pages import blocks
from perf.pages.results import Results
from perf.tuning import __main__ as command
from perf.tuning import rebuild, tables
from perf.tuning.runs import DRAWN, LAYERS, MODELS, NUMBERS, ROWS, RUNS, TWICE, drawn, listed
from tests.support.patches import replace_all
from tests.support.report_records import SURROUNDINGS
from tests.support.tiers import one
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.select import select
from triton_gemm.suites import SUITES
from triton_gemm.suites.shapes import spaced
from triton_gemm.tables.queries import SHIPPED
from triton_gemm.tables.records import named
from triton_gemm.tables.weights import weight_of
from triton_gemm.tuning.candidates import candidates
from triton_gemm.tuning.report import Again, ShapeReport, TuningReport
from triton_gemm.tuning.rows import grid, of_weights

H200 = named_device("h200")
LATER = "4608x7168-7168x2304-512x7168-7168x256-256x7168"  # weights for which a run had no time
# The shipped tables: of a folder of results the records, in this order.
SHIPPED_FROM = {
    "h100-80gb-hbm3": (
        *("listed", "llama-3-8b", "qwen-3-32b-a82030d", "qwen-3-32b", "qwen-3-32b-5120x25600"),
        *("deepseek-v3-tp8-a82030d", "deepseek-v3-tp8", f"deepseek-v3-tp8-{LATER}"),
        "suites-rest-h100-1of2",
    ),
    "h200": (
        *("llama-3-8b", "qwen-3-32b", "deepseek-v3-tp8", "suites-1of2", "suites-2of2"),
        *(f"suites-rest-h200-{part}of4" for part in (1, 2, 3, 4)),
    ),
}


def test_what_is_drawn_and_listed() -> None:
    problems = drawn(3)
    assert len(problems) == len(set(problems)) == sum(DRAWN.values()) == 200
    assert problems == drawn(3) and not set(problems).intersection(drawn(4))
    assert not set(problems).intersection(listed(3)), "what someone may have tuned for"
    long = [problem.K >= 16384 for problem in problems]
    assert 8 <= sum(long[:100]) <= sum(long) - 8, "regimes alternate"
    twice = RUNS["twice"].problems(3)
    assert len(set(twice)) == TWICE and set(twice) <= set(problems)
    of_layers = RUNS["layers"].problems(3)
    assert len(set(of_layers)) == LAYERS and all(100 <= problem.M <= 1000 for problem in of_layers)
    assert len(listed(1)) == len(set(listed(1))) >= len(SUITES["llm"].shapes)


def report_of(problem: GemmProblem, times: tuple[float, float, float], *again: Again, **more: Any) -> ShapeReport:
    """Of microseconds: the choice's, the winner's, the fastest's."""
    choice = select(problem, H200)
    outcome = "tuned" if times[1] < times[0] else "stays"
    return ShapeReport(problem, 1, outcome, choice, choice, *times, 0.001, 20, 10, 24, again=again, **more)


def tuned(problems: list[GemmProblem]) -> list[ShapeReport]:
    """The fourth has nothing to be compared with, and there was no time for others."""
    return [
        report_of(problems[0], (10.0, 8.0, 8.0), Again(True, 0.0), stored=True, torch_us=9.0),
        report_of(problems[1], (10.0, 10.0, 10.0), Again(False, 0.005), torch_us=8.0, torch_faster=True),
        report_of(problems[2], (10.0, 10.0, 9.9), Again(False, -0.02), failed=(("a kernel", "it is too large"),)),
        *(replace(report_of(problem, (10.0, 10.0, 10.0)), timed=1) for problem in problems[3:4]),
        *(ShapeReport(problem, 1, "no time") for problem in problems[4:]),
    ]


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> dict[str, Any]:
    """The command on a GPU that is not there; what `tune` was told."""
    given: dict[str, Any] = {}

    def tune(problems: Any, **how: Any) -> TuningReport:
        given.update(how, problems=list(problems))
        return TuningReport(tuple(tuned(list(problems))), H200.name, how["bits"], "graph", how["budget"], 12.34)

    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", "a user's")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "describe", lambda measured: SURROUNDINGS)
    replace_all(monkeypatch, command, tune=tune, RESULTS=tmp_path, current_device_info=lambda: H200)
    monkeypatch.setattr(command, "export_to", lambda path, bits: Path(path).write_text(bits))
    return given


def test_a_record_and_its_table(given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["twice", "--seed", "5", "--limit", "5", "--table", str(tmp_path / "table")]) == 1
    assert (given["bits"], given["repeat"], given["budget"]) == ("same", 2, 20.0)
    assert (tmp_path / "table").read_text() == "same"
    file = tmp_path / "made-up-gpu/tuning/3.6.0/twice-5.json"
    record = read_json(file)
    assert tables.committed(tmp_path) == [record]
    assert [found["outcome"] for found in record["products"]] == ["tuned", "stays", "stays", "stays", "no time"]
    assert record["seconds"] == 12.3 and record["products"][4]["choice_us"] is None
    assert record["products"][2]["failed"] == [["a kernel", "it is too large"]]
    cells = tables.row(record)
    assert cells["GEMMs"] == "5 drawn in all regimes, each tuned twice, 3 of them compared"
    lost = f"{100 * ((1.25 * 10 / 9.9) ** (1 / 3) - 1):.1f} %"
    assert [cells[f"regret, {of}"] for of in ("mean", "median", "worst")] == [lost, "1.0 %", "25.0 %"]
    assert (cells["GEMMs over 10 %"], cells["regret after"], cells["stored"]) == (1, "0.3 %", 1)
    assert (cells["same winner again"], cells["again within 1 %"]) == ("33 %", "67 %")
    assert cells["candidates, timed"] == "20, 10"
    assert [found["torch_us"] for found in record["products"]] == [9.0, 8.0, None, None, None]
    assert cells["torch / what runs: mean, least"] == f"{(9 / 8) ** 0.5:.3f}, 1.000"
    printed = capsys.readouterr().out
    assert f"{record['products'][0]['product']}: 10 us, fastest 8 us (25.0 %)" in printed and "twice-5.json" in printed
    page = blocks.BLOCKS["tuned"](Results([], [], {"tuned": tables.committed(tmp_path)}), tmp_path)
    assert page.startswith("Made-up GPU, torch 2.11.0") and "| 5 drawn in all regimes, each" in page


def test_several_runs(given: dict[str, Any], tmp_path: Path) -> None:
    assert command.main(["listed", "unseen", "--limit", "3", "--budget", "7", "--out", str(tmp_path)]) == 0
    names = {path.name for path in (tmp_path / "made-up-gpu/tuning/3.6.0").iterdir()}
    assert names == {"listed.json", "unseen-1.json"}
    assert (given["bits"], given["repeat"], given["budget"]) == ("any", 1, 7)


def test_a_gpu_that_is_treated_as_an_older_one(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "current_device_info", lambda: replace(H200, capability=(8, 0)))
    assert command.main(["unseen", "--limit", "3"]) == 0
    (record,) = tables.committed(command.RESULTS)
    assert tables.path_of(Path(), record).name == "unseen-1-sm_80.json"
    part = record | {"capability": record["environment"]["capability"], "weights": ["8x16", "8x32"]}
    assert tables.path_of(Path(), part | {"run": "a", "seed": None}).name == "a-8x16-8x32.json"
    assert tables.row(record)["GEMMs"] == "3 drawn in all regimes, as sm_80"


def test_nothing_was_measured(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    def tune(problems: Any, **how: Any) -> TuningReport:
        reports = [ShapeReport(problem, 1, "refused", why="the clock fell") for problem in problems]
        return TuningReport(tuple(reports), H200.name, how["bits"], "graph", how["budget"], 1.0)

    monkeypatch.setattr(command, "tune", tune)
    assert command.main(["listed", "--limit", "2"]) == 1
    (record,) = tables.committed(command.RESULTS)
    assert tables.row(record)["GEMMs"] == "2 of language models, 0 of them compared"
    assert tables.worst(record) == []


def test_without_a_gpu_or_interrupted(
    monkeypatch: pytest.MonkeyPatch, given: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """What was measured before it was interrupted is recorded."""
    tune, budgets = command.tune, []

    def interrupted(problems: list[GemmProblem], **how: Any) -> TuningReport:
        budgets.append((len(problems), how["budget"]))
        if len(budgets) == 3:
            raise KeyboardInterrupt
        return tune(problems, **how)

    monkeypatch.setattr(command, "tune", interrupted)
    assert command.main(["listed", "--limit", "50", "--budget", "100"]) == 130
    assert budgets == [(20, 40.0), (20, 40.0), (10, 20.0)]
    (record,) = tables.committed(tmp_path)
    assert len(record["products"]) == 40 and record["seconds"] == 24.7
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert command.main(["listed"]) == 2
    assert "there is none" in capsys.readouterr().err


def test_everything_is_compiled_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """All candidates are handed to the compiler before the first is waited for."""
    order: list[str] = []

    gpu = SimpleNamespace(
        prepare=lambda problem, selections: order.append(f"{problem.M} {len(selections)}"),
        ready=lambda *_: order.count("wait") == 2,
        pause=lambda seconds: order.append("wait"),
    )
    monkeypatch.setattr(compile_ahead, "measuring", lambda *_: nullcontext(gpu))
    offered = {problem: candidates(problem, H200, select(problem, H200), "any") for problem in drawn(3)[:2]}
    compile_ahead.compile_ahead(offered)
    prepared = [f"{problem.M} {len(selections)}" for problem, selections in offered.items()]
    assert order == [*prepared, "wait", "wait"]


def test_warm_compiles_what_will_be_timed(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    compiled: list[dict[GemmProblem, Any]] = []
    monkeypatch.setattr(command, "compile_ahead", compiled.append)
    command.main(["unseen", "--limit", "3", "--warm"])
    assert compiled == [{x: candidates(x, H200, select(x, H200), "any") for x in given["problems"]}]


def test_parts_and_files_of_products(given: dict[str, Any], tmp_path: Path) -> None:
    """Parts are of different products and records, and together of all; a file names some."""
    found: list[GemmProblem] = []
    for part in (1, 2):
        command.main(["unseen", "--limit", "10", "--shard", f"{part}/2"])
        found += given["problems"]
    assert sorted(map(problem_text, found)) == sorted(map(problem_text, spaced(drawn(1), 10)))
    (tmp_path / "rest.txt").write_text("\n".join(["1x1x1 bf16 nn", *map(problem_text, found[:5])]))
    command.main(["unseen", "--products", str(tmp_path / "rest.txt")])
    assert sorted(map(problem_text, given["problems"])) == sorted(map(problem_text, found[:5]))
    records = (tmp_path / "made-up-gpu/tuning/3.6.0").iterdir()
    assert {x.stem for x in records} == {"unseen-1-1of2", "unseen-1-2of2", "unseen-rest-1"}


@pytest.mark.parametrize("model", MODELS)
def test_the_weights_of_a_model(model: str) -> None:
    """Each once; and numbers of rows of all of them that are drawn, few and many."""
    of, run = RUNS[model].problems(1), RUNS[f"{model}-rows"]
    assert len(of) == len(set(of)) == len(MODELS[model]) and {x.M for x in of} == {1}
    products = run.problems(5)
    assert {weight_of(x) for x in products} == {weight_of(x) for x in of} and run.rows is None
    assert NUMBERS - 5 <= len(products) == len(set(products)) <= NUMBERS and products != run.problems(6)
    assert 10 < sum(x.M < 100 for x in products) < 30


def test_weights_are_tuned_for_all_rows(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """With time for each number of rows that is measured."""
    warmed: list[Any] = []
    monkeypatch.setattr(command, "compile_ahead", warmed.append)
    assert command.main(["llama-3-8b", "--limit", "3", "--warm"]) == 0
    count = 3 * len(grid(ROWS))
    assert given["rows"] == ROWS and given["budget"] == RUNS["llama-3-8b"].seconds * count and len(warmed[0]) == count


def test_a_table_of_ranges_is_rebuilt() -> None:
    """Of winners, each with the rows that it stands for."""
    run = RUNS["llama-3-8b"]
    ranges = of_weights(dict.fromkeys(run.problems(1)[:1], 1), ROWS)
    products = []
    for problem in ranges:
        choice, *others = (named(x) for x in candidates(problem, H200, select(problem, H200), "same"))
        times = [[5.0, choice], *[[4.0, others[0]]] * (problem.M % 32 == 0 and bool(others))]
        products.append({"product": problem_text(problem), "noise": 0.0, "times": times})
    environment_of = SURROUNDINGS | {"gpu": H200.name, "triton": f"{rebuild.TRITON}.0", "date": "2026-11-26"}
    record = {"environment": environment_of, "run": run.name, "seed": None, "bits": "same", "products": products}
    entries = rebuild.table_of(record).entries
    assert 20 < len(entries) < len(ranges)
    for problem, entry in entries.items():
        assert problem.M % 32 == 0 and (entry.us, entry.default_us, entry.least_rows) == (4.0, 5.0, ranges[problem][1])
    other = record | {"environment": environment_of | {"gpu": named_device("h100").name}}
    with pytest.raises(ValueError, match="several GPUs"):
        rebuild.table_of(record, other)


def test_what_tables_had_is_measured(given: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """The record has the measured time of the selection that was in use before the race."""
    problem = drawn(5)[0]
    choice, other, *_ = candidates(problem, H200, select(problem, H200), "same")
    times = ((8.0, named(other)), (9.0, "another"), (10.0, named(choice)))
    report = replace(report_of(problem, (10.0, 8.0, 8.0)), times=times)
    whole = TuningReport((report,), H200.name, "same", "graph", 1, 1.0)
    for used, us in ((choice, 10.0), (other, 8.0)):
        record = command.record_of(RUNS["llama-3-8b-rows"], 5, whole, {problem: used})
        assert record["products"][0]["used_us"] == us
        cells = tables.row(record)
        assert cells["in use before: mean, worst"] == f"{100 * (us / 8 - 1):.1f} %, {100 * (us / 8 - 1):.1f} %"
    assert command.record_of(RUNS["unseen"], 5, whole)["products"][0]["used_us"] is None


def test_a_table_is_rebuilt_from_a_record(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = drawn(5)[0]
    choice, *others = candidates(problem, H200, select(problem, H200), "same")
    report = replace(report_of(problem, (10.0, 8.0, 8.0)), choice=choice, selection=others[0], noise=0.01)
    report = replace(report, times=((8.0, named(others[0])), (10.0, named(choice))))
    monkeypatch.setattr(environment, "describe", lambda _: SURROUNDINGS | {"gpu": H200.name, "date": "2026-11-26"})
    record = command.record_of(RUNS["unseen"], 5, TuningReport((report,), H200.name, "same", "graph", 1, 1.0))
    product, source, out = record["products"][0], tmp_path / "record.json", tmp_path / "table.json"
    source.write_text(json.dumps(record))
    monkeypatch.setattr(rebuild, "TRITON", "3.6")
    assert command.main(["--rebuild", str(source), "--table", str(out)]) == 0
    (entry,) = rebuild.table_of(record).entries.values()
    assert (entry.algorithm, entry.us, entry.default_us) == (others[0].algorithm, 8.0, 10.0)
    assert "1 entries" in capsys.readouterr().out and named(choice) in out.read_text()
    changes: list[dict[str, Any]] = [{"fastest_us": 9.0}, {"noise": 0.3}, {"times": []}]
    left, noisy, untimed = (record | {"products": [product | change]} for change in changes)
    assert not rebuild.table_of(left).entries, "a time of another clock than the final's"
    assert not rebuild.table_of(noisy).entries, "a gain within noise"
    assert [len(rebuild.table_of(record, later).entries) for later in (untimed, noisy)] == [1, 0]
    monkeypatch.setattr(rebuild, "TRITON", "3.8")
    assert command.main(["--rebuild", str(source), "--table", str(out)]) == 2
    assert "of Triton 3.6.0" in capsys.readouterr().err
    for wrong in (
        *([], ["none"], ["--rebuild", str(source)], ["unseen", "--rebuild", str(source), "--table", str(out)]),
        *(["llama-3-8b", "--weights", "1x1"], ["llama-3-8b", "unseen", "--weights", "4096x4096"]),
    ):
        with pytest.raises(SystemExit, match="2"):
            command.main(wrong)


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("gpu", SHIPPED_FROM)
def test_a_shipped_table_is_what_its_records_give(gpu: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "CLUSTERS", True)  # as with the Triton that it was measured on
    monkeypatch.setattr(rebuild, "TRITON", "3.9")
    folder = environment.RESULTS / gpu / "tuning/3.9.0"
    table = rebuild.table_of(*(read_json(folder / f"{name}.json") for name in SHIPPED_FROM[gpu]))
    assert table.text() == (SHIPPED / table.name).read_text() and len(table.entries) > 10
