"""perf.models without models: the list, records that are written and merged, tables, shards, and failures."""

from __future__ import annotations

import time
from argparse import Namespace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest

from perf.common.files import read_json, write_json
from perf.models import __main__ as models
from perf.models import first_minute, record, tables, zoo
from perf.models.tables import MEANWHILE, OURS, PROVIDERS, TORCH
from perf.pages.results import Results
from tests.support.patches import replace_all
from tests.support.report_records import SURROUNDINGS, block

MADE: dict[str, Any] = {**SURROUNDINGS, "triton": "3.9.0", "packages": {"transformers": "5.17.0", "peft": None}}


def timed(ratio: float, **more: Any) -> dict[str, Any]:
    return {
        "shape": "4 x 512",
        "errors": {TORCH: 1e-3, OURS: 1e-3},
        "routing": {"ours": 30, "left": {}},
        "per_s": {TORCH: 1000.0, OURS: 1000.0 * ratio},
        "ratio": {"median": ratio, "p20": ratio - 0.01, "p80": ratio + 0.01},
        "settled": True,
        **more,
    }


def record_of(**ratios: Any) -> dict[str, Any]:
    """Of cases of Llama, by a word of each."""
    names = {"forward": zoo.FORWARD, "static": zoo.STATIC, "train": zoo.TRAIN, "dynamic": zoo.DYNAMIC}
    of_case = {name: MADE[name] for name in record.OF_A_CASE}
    found = {name: {**of_case, **(timed(x) if isinstance(x, float) else x)} for name, x in ratios.items()}
    return {"environment": MADE, "cases": {f"llama-1b, {names[name]}": each for name, each in found.items()}}


def verdicts(found: dict[str, Any]) -> list[object]:
    return [tables.row(*each)[""] for each in tables.ordered(found)]


# --- The list ---


def test_every_model_is_listed_with_its_cases() -> None:
    names = [zoo.key(*each) for each in zoo.listed()]
    assert len(names) == len({*names}) == sum(len(model.cases) for model in zoo.LIST)
    assert all(model.name in tables.list_of_models() for model in zoo.LIST)
    assert {case for model in zoo.LIST for case in model.cases} == {*zoo.CASES}


def test_the_list_has_what_was_asked_for() -> None:
    kinds = {model.kind[0] for model in zoo.LIST}
    assert kinds >= {"Llama", "Qwen2", "Gemma2", "GPT2", "Mixtral", "Qwen2Moe", "Bert", "T5", "ViT"}
    generating = [model for model in zoo.LIST if model.inputs not in ("image", "masked") and model.kind[0]]
    assert all({*zoo.OF_A_DECODER} <= {*model.cases} for model in generating)


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_shards_are_the_list(count: int) -> None:
    jobs = zoo.listed()
    parts = models.shards(jobs, count)
    assert sorted(zoo.key(*job) for part in parts for job in part) == sorted(zoo.key(*job) for job in jobs)
    models_of = [{model.name for model, case in part if case != zoo.FIRST_MINUTE} for part in parts]
    assert sum(map(len, models_of)) == len(set().union(*models_of)), "a model's cases are together"
    costs = [models.cost(part) for part in parts]
    assert max(costs) <= max(1.5 * sum(costs) / count, max(models.COSTS.values()))


# --- Records ---


def test_cases_are_added_as_they_come_and_replaced_when_measured_again(tmp_path: Path) -> None:
    file = tmp_path / "new" / "3.9.0.json"
    assert record.add(file, MADE, {"a": {"seconds": 1}}) == []
    assert record.add(file, {**MADE, "commit": "def5678", "driver": "590"}, {"b": {"seconds": 2}}) == []
    assert record.add(file, MADE, {"a": {"seconds": 3}}) == []
    found = {name: (x["seconds"], x["commit"]) for name, x in read_json(file)["cases"].items()}
    assert found == {"a": (3, "abc1234"), "b": (2, "def5678")}


def test_a_failure_does_not_replace_a_result(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    record.add(file, MADE, {"a": {"seconds": 1}, "b": {"failed": "no"}})
    record.add(file, MADE, {"a": {"failed": "out of memory"}, "b": {"failed": "again"}})
    assert "failed" not in read_json(file)["cases"]["a"]
    assert read_json(file)["cases"]["b"]["failed"] == "again"


def test_other_versions_drop_what_there_was(tmp_path: Path) -> None:
    file = tmp_path / "a.json"
    record.add(file, MADE, {"a": {}})
    assert record.add(file, {**MADE, "packages": {"transformers": "5.18.0"}}, {"b": {}}) == ["a"]
    assert list(read_json(file)["cases"]) == ["b"]


def test_records_are_merged_where_they_belong(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, found in {"one.json": record_of(forward=1.0), "two.json": record_of(static=1.1)}.items():
        write_json(tmp_path / name, found)
    others = [str(tmp_path / "one.json"), str(tmp_path / "two.json")]
    assert models.main(["--merge", *others, "--out", str(tmp_path / "out")]) == 0
    found = read_json(tmp_path / "out" / "3.9.0.json")
    assert list(found["cases"]) == ["llama-1b, forward", "llama-1b, generate, static cache"]
    assert "1 cases of" in capsys.readouterr().out


# --- Tables ---


def test_a_target_is_met_or_missed_and_training_is_reported() -> None:
    found = record_of(forward=1.02, static=0.98, train=0.9)
    assert verdicts(found) == ["met", "missed", "reported"]
    text = tables.summary(found)
    assert "2 cases of inference: 1.000 of torch in the geometric mean, 0.980 at least" in text and "missed)" in text
    assert "Below 0.99: llama-1b, generate, static cache." in text
    assert "Not measured: llama-1b, forward, compiled;" in text
    assert "met)" in tables.summary(record_of(forward=1.05, static=1.02, train=0.9))


def test_what_failed_is_wrong_or_did_not_settle_is_shown() -> None:
    found = record_of(
        forward={"failed": "OutOfMemoryError: a|b"},
        static=timed(1.2, wrong="an error of 1"),
        dynamic=timed(1.2, settled=False),
    )
    failed, unsettled, wrong = verdicts(found)
    assert failed == "FAILED: OutOfMemoryError: a/b"
    assert wrong == "WRONG: an error of 1" and unsettled == "met, while kernels were being compiled"
    assert "Below 0.99: llama-1b, forward; llama-1b, generate, static cache." in tables.summary(found)


def test_products_that_were_left_are_listed() -> None:
    found = record_of(forward=timed(1.0, routing={"ours": 5, "left": {"mm: int64 is not computed": 2}}))
    assert "| llama-1b, forward | mm: int64 is not computed | 2 |" in tables.text(found)
    assert "5 of 7" in tables.text(found)
    del found["cases"]["llama-1b, forward"]["routing"]  # a count that was not right
    assert "| 1.0e-03 |  | met |" in tables.text(found)


def test_a_first_minute_is_a_table_of_its_own() -> None:
    speeds = {TORCH: 100, OURS: 90, MEANWHILE: 99}
    tokens = {name: {f"{at:g}": at * speed for at in tables.MOMENTS} for name, speed in speeds.items()}
    found = {"environment": MADE, "cases": {"llama-1b, first minute": {"tokens": tokens, "ratio": {"median": 0.9}}}}
    assert "| ratio | 0.900 | 0.900 |" in tables.text(found) and "| ratio | 0.990 | 0.990 |" in tables.text(found)
    assert "of inference" not in tables.text(found)
    found["cases"]["llama-1b, first minute"] = {"failed": "no end"}
    assert "FAILED: no end" in tables.text(found)


def test_the_page_has_the_newest_triton(tmp_path: Path) -> None:
    for version in ("3.8.0", "3.9.0", "3.10.0"):
        found = record_of(forward=1.0)
        found["environment"] = {**MADE, "triton": version}
        write_json(tables.RECORDS.path(tmp_path, found["environment"]), found)
    shown = block("models", Results.read(tmp_path))
    assert "Triton 3.10.0" in shown and "Triton 3.9.0" not in shown
    assert "transformers 5.17.0. Commit `abc1234`" in shown


# --- A run ---


def given(**more: Any) -> Namespace:
    return Namespace(tiny=False, budget=1.0, **more)


def test_a_case_that_fails_says_why_and_the_rest_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(model: Any, case: str, built: Any, given: Any) -> dict[str, Any]:
        if case == zoo.STATIC:
            raise RuntimeError("\nno\nmore")
        return {"shape": built}

    replace_all(monkeypatch, models, build=lambda model, tiny: model.name, measured=measured)
    jobs = [(zoo.BY_NAME[name], case) for name in ("llama-1b", "gpt2") for case in (zoo.FORWARD, zoo.STATIC)]
    found = dict(models.results(jobs, given()))
    assert [x.get("shape") for x in found.values()] == ["llama-1b", None, "gpt2", None]
    assert found["gpt2, generate, static cache"]["failed"].startswith("RuntimeError: no (test_models.py:")
    name = "gpt2, generate, static cache"
    assert "FAILED: RuntimeError: no" in models.summary(name, found[name])


def test_a_model_that_cannot_be_built_fails_in_each_case(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(models, "build", Mock(side_effect=MemoryError("out of it")))
    found = dict(models.results([(zoo.BY_NAME["gpt2"], case) for case in (zoo.FORWARD, zoo.TRAIN)], given()))
    assert ["MemoryError: out of it" in x["failed"] for x in found.values()] == [True, True]


def test_nothing_runs_on_a_gpu_that_is_lost(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    replace_all(monkeypatch, models, build=lambda model, tiny: None, measured=lambda *_: {}, lost=lambda: True)
    assert len(list(models.results(zoo.listed()[:3], given()))) == 1
    assert "context is lost" in capsys.readouterr().err


def test_a_run_is_written_case_by_case(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """And what was measured stays when it is interrupted."""

    def results(jobs: Any, given: Any) -> Any:
        yield zoo.key(*jobs[0]), {**timed(1.0), "seconds": 1.0}
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "results", results)
    monkeypatch.setattr(models.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(record, "described", lambda: MADE)
    monkeypatch.setattr(models.background, "WORKERS", 99)
    assert models.main(["gpt2", "--out", str(tmp_path)]) == 130
    assert list(read_json(tmp_path / "3.9.0.json")["cases"]) == ["gpt2, forward"]
    printed = capsys.readouterr().out
    assert "gpt2, forward, tokens or images 4 x 512" in printed and "ratio 1.000, p20 to p80 0.990 to 1.010" in printed


def test_words_choose_cases() -> None:
    def names(*arguments: str) -> list[str]:
        return [zoo.key(*job) for job in models.chosen(models.parse(list(arguments)))]

    chosen = names("bert-base", "--case", "compiled", "training")
    assert chosen == ["bert-base, forward, compiled", "bert-base, training step"]
    assert len(names("--skip", "first", "static")) == len(names()) - 2 - 9
    assert names("llama-1b", "--tiny", "--case", "first", "training") == ["llama-1b, training step"]


# --- The first minute ---


def test_tokens_at_moments() -> None:
    found = first_minute.at_moments([(2.0, 32), (4.0, 64), (30.0, 96), (70.0, 128)])
    assert found == {"1": 16.0, "5": 65.2, "10": 71.4, "20": 83.7, "40": 104.0, "60": 120.0}


# A process that answers: torch's in half a second, and a worker of it counts in a file; ours in a second. Both write
# down requests' lengths, and how far the worker counted in their turns.
ANSWERS = """
import os, subprocess, sys, time
provider, folder = sys.argv[2], FOLDER
if provider == "torch":
    count = f"import time\\nwhile True: open({folder + '/count'!r}, 'a').write('x'), time.sleep(0.01)"
    subprocess.Popen([sys.executable, "-c", count], start_new_session=True)
    while not os.path.exists(folder + "/count"): time.sleep(0.01)
print("a library says hello")
print("ready", flush=True)
for line in sys.stdin:
    before = os.path.getsize(folder + "/count")
    time.sleep(0.1)
    print(line.strip(), os.path.getsize(folder + "/count") - before, file=open(f"{folder}/{provider}", "a"))
    print(0.5 if provider == "torch" else 1.0, flush=True)
"""


def test_processes_take_turns_until_the_time_is_over(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """They get the same requests, of many lengths. What one has started is stopped in the other's turns, and ends."""
    monkeypatch.setattr(first_minute, "CHILD", ANSWERS.replace("FOLDER", repr(str(tmp_path))))
    curves = first_minute.take_turns(zoo.BY_NAME["llama-1b"], PROVIDERS, 5.0)
    assert curves == {TORCH: [(i / 2, 32 * i) for i in range(1, 11)], OURS: [(float(i), 32 * i) for i in range(1, 6)]}
    first, second = ((tmp_path / name).read_text().split() for name in PROVIDERS)
    assert first[:10:2] == second[::2] and len({*first[::2]}) > 3
    assert all(first_minute.SHORTEST <= int(n) <= first_minute.LONGEST for n in first[::2])
    assert all(int(n) > 0 for n in first[1::2]) and {*second[1::2]} == {"0"}
    count = (tmp_path / "count").stat().st_size
    time.sleep(0.1)
    assert (tmp_path / "count").stat().st_size == count


def test_a_process_that_fails_says_how(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(first_minute, "CHILD", "import sys; sys.exit('no memory')")
    with pytest.raises(first_minute.ProcessError, match="torch: the process ended with 1: no memory"):
        first_minute.measure(zoo.BY_NAME["llama-1b"])
    monkeypatch.setattr(first_minute, "CHILD", "import time; time.sleep(60)")
    monkeypatch.setattr(first_minute, "PATIENCE_S", 0.1)
    with pytest.raises(first_minute.ProcessError, match="no answer"):
        first_minute.measure(zoo.BY_NAME["llama-1b"])


def test_the_ratio_is_of_the_last_moment(monkeypatch: pytest.MonkeyPatch) -> None:
    answer = "print(40.0 if 'gemm' in sys.argv[2] else 20.0, flush=True)"
    child = f"import sys\nprint('ready', flush=True)\nfor _ in sys.stdin: {answer}"
    monkeypatch.setattr(first_minute, "CHILD", child)
    found = first_minute.measure(zoo.BY_NAME["llama-1b"])
    assert found["ratio"] == {"median": 0.5} and found["tokens"][TORCH]["60"] == 96.0
    assert [*found["tokens"]] == [*PROVIDERS, MEANWHILE]
