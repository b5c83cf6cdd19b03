"""What the autotuner timed for a rung: taken from the tuner, kept, drawn next to a model, and told."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perf.common.dataclass_json import to_json
from perf.ladder import autotuner, clock_model, plots, report_page, rungs_and_twins, tables, tasks
from perf.ladder import report as climb
from perf.ladder.record import FILE, Ceilings, Record, Spread, TunedConfig, TunedRung, committed
from perf.measure import environment
from perf.measure.environment import Environment
from perf.measure.operands import Problem
from perf.measure.roofline import HOPPERS_L2_SHARE, TYPICAL, clock
from perf.pages import rung_page
from perf.pages.results import Results
from tests.support.kernel_mutants import RUNGS
from tests.support.report_records import OPTIONS, SURROUNDINGS, block, committed_record, figures_of
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER
from triton_gemm.ladder.command import spelled
from triton_gemm.ladder.record import TUNERS, triton_config

TUNED = [rung for rung in LADDER if len(rung.configs) > 1]
K08 = RUNGS["k08"]
CUBE = Problem(4096, 4096, 4096, "fp16")
KEY = tasks.tuning_key(K08, CUBE)
LARGE, SMALL = GemmConfig(128, 256, 64, 8, 8, 4), GemmConfig(64, 64, 32, 8, 4, 4)


def tuned(ms: float) -> TunedConfig:
    time_ms = Spread(median=ms, p20=0.98 * ms, p80=1.03 * ms)
    return TunedConfig(time_ms=time_ms, registers=168, shared=98304, spills=0, blocks_per_sm=1)


def entry(mode: str = "fp16", size: int = 4096, **milliseconds: float | None) -> TunedRung:
    """A tuning of k08; a configuration's name is as `spelled`, with `_` for what an identifier cannot have."""
    configs = {}
    for name, ms in milliseconds.items():
        text = name.removeprefix("t").replace("_", ",")
        configs[text] = TunedConfig() if ms is None else tuned(ms)
    return TunedRung(rung=K08.name, mode=mode, M=size, N=size, K=size, configs=configs)


FIVE = {
    **{"t128x256x64_8_4_8": 0.25, "t128x256x64_8_5_8": 0.20, "t128x256x64_8_5_16": 0.21, "t128x128x64_8_4_8": 0.24},
    **{"t64x64x32_4_4_8": 0.5, "t128x256x64_8_6_8": None},
}


@pytest.fixture
def record(tmp_path: Path) -> Record:
    """Nothing but a tuning of k08."""
    made = Record(tmp_path, SURROUNDINGS)
    made.put_added(made.tuning, KEY, entry(**FIVE))
    return made


# --- Taken and kept ---


def test_what_tuning_timed_and_what_it_compiled_to_are_a_rungs_details(monkeypatch: pytest.MonkeyPatch) -> None:
    rung = RUNGS["k03"]
    timed, failed = rung.configs[-1], rung.configs[0]
    monkeypatch.setattr(rungs_and_twins, "device_info", lambda _: SimpleNamespace(capability=(9, 0)))
    timings = {triton_config(timed): [2.0, 1.0, 3.0], triton_config(failed): [math.inf] * 3}
    monkeypatch.setattr(TUNERS["k03"], "configs_timings", timings, raising=False)
    monkeypatch.setattr(TUNERS["k03"], "best_config", triton_config(timed), raising=False)
    provider = rungs_and_twins.rung_provider(rung, (256, 256, 256), torch.float32, inspect=True)
    details = provider.details()
    assert details["config"] == str(timed) and list(details["tuning"]) == [timed, failed]
    facts = details["tuning"][timed]
    assert facts.time_ms == Spread(median=2.0, p20=1.0, p80=3.0)
    assert (facts.registers, facts.spills) == (details["registers"], 0)
    assert facts.blocks_per_sm >= 1 and details["tuning"][failed].time_ms is None
    plain = rungs_and_twins.rung_provider(rung, (256, 256, 256), torch.float32, inspect=False).details()
    assert plain["tuning"][timed] == TunedConfig(time_ms=facts.time_ms) and "registers" not in plain
    assert rungs_and_twins.timings(RUNGS["k01"]) == {}


def test_a_sweep_keeps_what_its_rungs_tuned_in_its_own_section(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    record = Record(tmp_path, SURROUNDINGS)
    measured = to_json(committed_record(tmp_path).problems[CUBE.key])
    measured["providers"][K08.name]["tuning"] = {LARGE: tuned(0.2)}
    measured["providers"][RUNGS["k09"].name]["tuning"] = {}
    monkeypatch.setattr(tasks.timer, "measure", lambda *_: measured)
    tasks._problem_task(record, CUBE, [], OPTIONS).run(lambda label: None)
    again = Record.read(tmp_path)
    assert "tuning" not in measured["providers"][K08.name] and again.problems[CUBE.key].timed(K08.name)
    assert list(again.tuning) == [KEY]
    assert again.tuning[KEY].configs == {"128x256x64,8,4,8": tuned(0.2)}
    assert again.tuning[KEY].made is None  # the record's own surroundings


def test_configurations_are_read_as_they_are_spelled() -> None:
    configs = [config for rung in TUNED for config in rung.configs]
    assert [autotuner.config_of(spelled(config)) for config in configs] == configs


def test_tunings_are_added_to_an_older_record_and_say_when_they_were_made(record: Record) -> None:
    ceilings = Ceilings(copy_tbs=2.9, copy_bytes=1 << 30, sm_clock_mhz=None)
    record.put(record.ceilings, "measured", ceilings)
    today: Environment = {**SURROUNDINGS, "sources": "1" * 12, "commit": "def5678"}
    added, state = Record.open(record.folder, today, fresh=False, adding=True)
    assert state == "what is measured is added"
    assert not added.has_tuning(KEY)  # of other sources
    added.put_added(added.tuning, KEY, entry(**FIVE))
    assert added.has_tuning(KEY)
    again = Record.read(record.folder)
    assert again.environment == SURROUNDINGS and again.ceilings == {"measured": ceilings}
    (found,) = autotuner.shown(again)
    assert found.made == today
    assert "ommit `def5678` (changed since)" in report_page.texts(again, [])[report_page.TUNING_FILE]

    same, state = Record.open(record.folder, SURROUNDINGS, fresh=False)  # the report goes on with its own record
    assert state.startswith("continuing") and same.ceilings
    with pytest.raises(ValueError, match="is of Made-up GPU, and this GPU is NVIDIA Other"):
        Record.open(record.folder, {**today, "gpu": "NVIDIA Other"}, fresh=False, adding=True)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A Hopper that is not there: whether providers are right is what it is told."""
    seen = SimpleNamespace(found={"config": "", "tuning": {LARGE: TunedConfig()}}, names=[])

    def is_right(provider: Any, _operands: Any, _check: Any, result: dict[str, Any], *, torchs: bool) -> bool:
        seen.names.append(provider.name)
        result |= seen.found
        return "failed" not in result

    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setattr(rungs_and_twins, "device_info", lambda _: SimpleNamespace(capability=(9, 0)))
    monkeypatch.setattr(rungs_and_twins, "precompile", lambda *_: seen.names.append("compiled"))
    monkeypatch.setattr(tasks.operands, "Operands", lambda *_: SimpleNamespace(sets=[(None, None)]))
    monkeypatch.setattr(tasks.operands, "Check", lambda *_: None)
    monkeypatch.setattr(tasks.timer, "is_right", is_right)
    return seen


def tuning_options(*arguments: str) -> tasks.Options:
    return climb.parse(["--tuning", *arguments])[0]


def test_a_run_for_tunings_tunes_every_rung_that_has_a_choice(
    tmp_path: Path, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record = Record(tmp_path, SURROUNDINGS)
    for task in tasks.tuning_tasks(record, tuning_options()):
        task.run(lambda label: None)
    assert [name for name in gpu.names if name != "compiled"] == [rung.name for rung in TUNED]
    assert gpu.names.count("compiled") == 3  # ieee, tf32, fp16
    assert {entry.M for entry in Record.read(tmp_path).tuning.values()} == {tasks.LADDER_SIZE}
    assert tasks.tuning_tasks(record, tuning_options()) == []  # nothing is left to do


def test_a_wrong_winner_is_a_failure_and_is_tuned_again(
    tmp_path: Path, gpu: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    record, options = Record(tmp_path, SURROUNDINGS), tuning_options("--rungs", "k08")
    gpu.found = {"failed": "a result is off"}
    for task in tasks.tuning_tasks(record, options):
        task.run(lambda label: None)
    assert record.failures() == [f"{KEY}: a result is off"]
    assert autotuner.shown(record) == []
    assert len(tasks.tuning_tasks(record, options)) == 2


def test_a_record_of_another_gpu_is_refused(
    record: Record, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(environment, "describe", lambda _: {**SURROUNDINGS, "gpu": "NVIDIA Other"})
    before = (record.folder / FILE).read_bytes()
    assert climb.main(["--tuning", "--out", str(record.folder)]) == 2
    assert "is of Made-up GPU" in capsys.readouterr().err
    assert (record.folder / FILE).read_bytes() == before


# --- The model ---


def clocks(
    config: GemmConfig, size: int = 4096, blocks: int = 1, mode: str = "fp16", persistent: bool = False
) -> float:
    itemsize, sizes = 4 if mode == "ieee" else 2, (size, size, size)
    return clock_model.clocks(config, mode, itemsize, (9, 0), sizes, 132, blocks, persistent=persistent)


def test_modelled_clocks_are_waves_of_steps() -> None:
    step = 2 * 128 * 256 * 64 / min(clock_model.limits(LARGE, "fp16", 2, (9, 0), sustained=True).values())
    slower = 1830 / 1980  # what passes at the highest clock, in clocks of the tensor cores' peak
    load = slower * (clock_model.LOADED_LATENCY_CLOCKS + 384 * 64 * 2 / HOPPERS_L2_SHARE)
    store = slower * 128 * 256 * 2 / HOPPERS_L2_SHARE
    ends = load + store
    assert clocks(LARGE) == pytest.approx(4 * (64 * step + ends))  # 512 tiles on 132 SMs
    assert clocks(LARGE, persistent=True) == pytest.approx(4 * (64 * step + store))
    two = clocks(replace(LARGE, num_stages=2), persistent=True)
    assert two == pytest.approx(4 * (64 * load + store))  # one is under way
    assert clocks(LARGE, 512) == pytest.approx(8 * step + ends)  # fewer tiles than SMs
    assert clocks(LARGE) < clocks(SMALL) and clocks(SMALL, 512) < clocks(LARGE, 512)


def test_latency_counts_where_nothing_hides_it() -> None:
    one = GemmConfig(64, 64, 16, None, 4, 1)
    alone, two, many = (clocks(one, blocks=blocks, mode="ieee") for blocks in (1, 2, 8))
    assert alone == pytest.approx(2 * two) and 2 * many > two > many
    staged = clocks(GemmConfig(64, 64, 16, None, 4, 2), blocks=1, mode="ieee")
    assert (
        alone
        > staged
        == clocks(GemmConfig(64, 64, 16, None, 4, 2), blocks=8, mode="ieee", persistent=True)
        + (alone - clocks(one, mode="ieee", persistent=True))
    )  # but for the ends of tiles


def test_every_committed_row_is_modelled_within_half_of_its_speed() -> None:
    """At the clock of the data sheet's peak; by what limits a rung, without a factor for a rung or a row."""
    rows = [
        (tuning, timed, timed.clocks / clock(TYPICAL[9, 0], tuning.mode))
        for record in committed(environment.RESULTS)
        for tuning in autotuner.shown(record)
        for timed in tuning.timed
        if timed.clocks is not None
    ]
    ratios = {
        (tuning.rung.id, spelled(timed.config)): 2 * math.prod(tuning.size) / us / 1e6 / timed.tflops
        for tuning, timed, us in rows
    }
    assert len(ratios) == len(rows) == 92
    assert {row: ratio for row, ratio in ratios.items() if not 1 / 1.5 <= ratio <= 1.5} == {}


def test_the_fastest_and_the_modelled_one_are_found(record: Record) -> None:
    (found,) = autotuner.shown(record)
    assert spelled(found.fastest.config) == "128x256x64,8,5,8"
    assert found.modelled is not None and found.modelled.config == LARGE  # of equal ones the first of the list
    assert found.expected(found.modelled) == found.fastest.tflops
    assert found.failed == (GemmConfig(128, 256, 64, 8, 8, 6),)
    assert found.fastest.tflops == pytest.approx(2 * 4096**3 / 0.2 / 1e9)
    assert found.fastest.low < found.fastest.tflops < found.fastest.high
    assert [timed.config.GROUP_M for timed in found.one_choice_off("GROUP_M")] == [16]
    assert found.one_choice_off("num_warps") == []
    words = autotuner.summary(found)
    assert "chose `128x256x64,8,4,8`, which reaches 80.0 % of that speed. `128x256x64,8,6,8` failed." in words
    assert tables.tuning(found).endswith("\n| 128x256x64,8,6,8 | failed |  |  |  |  |  |")
    assert "| 128x256x64,8,5,8 | 687 | 100 % | 667 to 701 |" in tables.tuning(found)
    record.tuning[KEY].configs["128x256x64,8,4,8"] = tuned(0.1)
    assert "The model chose the same configuration." in autotuner.summary(autotuner.shown(record)[0])


def test_what_is_not_known_is_left_out(record: Record) -> None:
    configs = record.tuning[KEY].configs
    for text in configs.keys() - {"128x256x64,8,5,8", "64x64x32,4,4,8"}:  # which differ in every parameter
        del configs[text]
    configs |= {text: replace(tuned, blocks_per_sm=None) for text, tuned in configs.items()}
    (found,) = autotuner.shown(record)
    assert found.modelled is None and found.expected(found.fastest) is None
    words = autotuner.summary(found)
    assert not any(part in words for part in ("The model", "one of these alone is changed", "failed"))
    results = Results([record], [])
    assert words in block("k08", results) and rung_page.NOTHING in block("k08", results)
    assert "of the fastest" in block("k08", results) and "of the fastest" not in block("k09", results)


def test_the_ladders_size_and_the_first_dtype_are_shown(record: Record) -> None:
    for mode, size in (("bf16", 4096), ("fp16", 512), ("fp16", 8192)):
        record.put_added(
            record.tuning, tasks.tuning_key(K08, Problem(size, size, size, mode)), entry(mode, size, **FIVE)
        )
    (found,) = autotuner.shown(record)
    assert (found.mode, found.size) == ("fp16", (4096, 4096, 4096))


def test_records_without_tunings_are_read(record: Record) -> None:
    text = (record.folder / FILE).read_text()
    older = text.replace('"tuning"', '"something else"')
    (record.folder / FILE).write_text(older)
    again = Record.read(record.folder)
    assert autotuner.shown(again) == [] and plots.tunings(again, record.folder) == []
    assert report_page.TUNING_FILE not in report_page.texts(again, [])


# --- Drawn ---


def test_every_configuration_and_the_modelled_one_are_drawn(
    record: Record, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    figures = figures_of(monkeypatch, plots)
    plots.tunings(record, tmp_path)
    drawn = {str(line.get_marker()): line.get_xdata() for line in figures[autotuner.PICTURE].axes[0].lines}
    assert {mark: sorted(map(float, shares)) for mark, shares in drawn.items()} == {
        "o": pytest.approx([40, 80, 250 / 3, 2000 / 21, 100]),
        "s": pytest.approx([80]),
    }


def test_without_a_gpu_nothing_is_drawn(tmp_path: Path) -> None:
    record = Record(tmp_path, {**SURROUNDINGS, "gpu": None})
    assert all("tuning" not in task.label for task in tasks.cpu_tasks(record, OPTIONS))
    assert plots.tunings(record, tmp_path) == []
