"""Pages: what they are filled with, from the committed results and from made-up ones."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest

from perf.ladder.record import FILE, Record
from perf.measure import environment
from perf.measure.providers import CUBLAS
from perf.pages import __main__ as pages
from perf.pages import blocks
from perf.pages.results import Results
from tests.support.report_records import SURROUNDINGS, made_up_record


@pytest.fixture
def record(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Record:
    return made_up_record(tmp_path, monkeypatch)


def test_pages_show_the_results_that_are_committed() -> None:
    assert pages.stale() == []


NONE = Results([], [], [])


def test_pages_are_filled_between_their_markers_only(record: Record, tmp_path: Path) -> None:
    text = "before\n<!-- results:ladder -->\nold\n<!-- /results -->\nafter\n"
    results = Results([record], [], [])
    filled = blocks.filled(text, results, tmp_path)
    assert filled.startswith("before\n<!-- results:ladder -->\n")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "old" not in filled
    assert "k11 " in filled
    assert blocks.filled(filled, results, tmp_path) == filled
    with pytest.raises(ValueError, match="no block"):
        blocks.filled(text.replace("ladder", "nonsense"), results, tmp_path)


@pytest.mark.parametrize("name", sorted(blocks.BLOCKS.keys() - {"packages"}))  # which is made of the sources
def test_a_block_without_results_says_so(name: str, tmp_path: Path) -> None:
    text = f"<!-- results:{name} -->\n<!-- /results -->\n"
    assert "committed yet" in blocks.filled(text, NONE, tmp_path)


def second_gpu(record: Record, folder: Path, factor: float) -> Record:
    """The same ladder on an H200, measured later, with all but cuBLAS `factor` times as fast."""
    made = {"gpu": "NVIDIA H200", "triton": "3.9.0", "date": "2026-06-01T00:00:00+00:00", "commit": None}
    data = json.loads((record.folder / FILE).read_text())
    data["environment"] |= made
    data["ceilings"]["measured"]["copy_tbs"] = 4.3
    for problem in data["problems"].values():
        for name, result in problem["providers"].items():
            if name != CUBLAS:
                result["time_ms"] = {key: value / factor for key, value in result["time_ms"].items()}
    folder.mkdir()
    (folder / "results.json").write_text(json.dumps(data))
    return Record.read(folder)


def block(name: str, results: Results, folder: Path) -> str:
    return blocks.filled(f"<!-- results:{name} -->\n<!-- /results -->", results, folder)


def test_two_gpus_stand_side_by_side(record: Record, tmp_path: Path) -> None:
    other = second_gpu(record, tmp_path / "h200", 2.0)
    alone, both = Results([record], [], []), Results([record, other], [], [])
    table = block("ladders", both, tmp_path)
    header = next(line for line in table.splitlines() if line.startswith("| rung"))
    per_gpu = "Made-up GPU, TFLOPS | of cuBLAS | rung / twin | H200, TFLOPS | of cuBLAS | rung / twin |"
    assert header == f"| rung | precision | {per_gpu}"
    k03 = next(line.split(" | ") for line in table.splitlines() if line.startswith("| k03"))
    assert float(k03[5]) == pytest.approx(2 * float(k03[2]), rel=0.01)
    assert f"[the whole report]({os.path.relpath(record.folder, tmp_path)}/report.md)" in table.replace("](r", "](./r")
    assert "[the whole report](h200/report.md). Commit not recorded (changed since)." in table
    assert "NVIDIA H200, torch 2.11.0, Triton 3.9.0, CUDA 13.0" in table
    # The newest picture, both GPUs' words and tables for a rung; what docs/ladder.md explains stays the first GPU's.
    assert "](h200/ladder.png)" in block("picture", both, tmp_path)
    assert "Made-up GPU" in block("picture", alone, tmp_path)
    for name in ("roofline", "factors", "targets", "sweep-ieee"):
        assert block(name, both, tmp_path) == block(name, alone, tmp_path)
        assert "Made-up GPU" in block(name, both, tmp_path)
    rung = block("k03", both, tmp_path)
    assert "**Measured** on Made-up GPU: " in rung
    assert "**Measured** on H200: " in rung
    assert block("ladder", both, tmp_path).count("| k03 blocked | ieee |") == 2


def test_what_differs_between_the_gpus_is_read_from_their_records(record: Record, tmp_path: Path) -> None:
    both = Results([record, second_gpu(record, tmp_path / "h200", 1.0)], [], [])
    rows = [line.strip("| ").split(" | ") for line in block("gpus", both, tmp_path).splitlines() if "|" in line]
    table = {name: cells for name, *cells in rows}
    assert rows[0][-2:] == ["Made-up GPU", "H200"]
    assert table["copy, read and written, TB/s"] == ["2.9", "4.3"]
    assert table["SMs"] == ["132", "132"]
    assert float(table["best cuBLAS fp16, TFLOPS"][0]) > 600
    sweep = {"suite": "decode", "copy_tbs": 2.8, "shapes": {}, "environment": {**SURROUNDINGS, "gpu": "Third"}}
    only_bench = block("gpus", Results([record], [sweep], []), tmp_path)
    assert "| copy, as suite `decode` measured it, TB/s |  | 2.8 |" in only_bench


@pytest.fixture
def page_of_two(record: Record, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a folder of results of a project that does not exist; both GPUs' sources are today's."""
    results = tmp_path / "results"
    results.mkdir()
    record.folder = results / "made-up-gpu"
    record.folder.mkdir()
    record.environment["sources"] = "1" * 12
    record.save()
    second_gpu(record, results / "h200", 2.0)
    target = tmp_path / "README.md"
    target.write_text("<!-- results:ladders -->\n<!-- /results -->\n")
    monkeypatch.setattr(environment, "RESULTS", results)
    monkeypatch.setattr(pages, "PAGES", (target,))
    monkeypatch.setattr(environment, "source_hash", lambda _: "1" * 12)
    return target


@pytest.mark.full
def test_pages_say_when_the_sources_changed_and_are_not_stale_for_that(
    page_of_two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    reports = {environment.RESULTS / gpu / "report.md" for gpu in ("made-up-gpu", "h200")}
    assert set(pages.stale()) == {page_of_two, *reports}
    assert pages.main(["--check"]) == 1
    assert "is stale: python -m perf.pages" in capsys.readouterr().err
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    assert "Commit `abc1234`." in page_of_two.read_text()
    assert "Commit not recorded." in page_of_two.read_text()
    report = environment.RESULTS / "made-up-gpu" / "report.md"
    assert "- Commit `abc1234`\n" in report.read_text()

    monkeypatch.setattr(environment, "source_hash", lambda _: "2" * 12)
    assert pages.stale() == []
    pages.rewrite()
    assert page_of_two.read_text().count("(changed since).") == 2
    assert "- Commit `abc1234` (changed since)\n" in report.read_text()
    assert pages.stale() == []
    report.unlink()
    assert pages.stale() == [report]
