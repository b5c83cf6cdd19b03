"""Pages: what they are filled with, from the committed results and from made-up ones."""

from __future__ import annotations

import itertools
import re
from pathlib import Path

import pytest

from perf.common import formats
from perf.ladder import autotuner, views
from perf.ladder.drawings.traces import HOPPER, RUNGS
from perf.ladder.record import Record
from perf.measure import environment
from perf.pages import __main__ as pages
from perf.pages import blocks, limits, rung_page
from perf.pages.results import Results
from tests.ladder.test_compile_rungs import compiled, listed, main_loop
from tests.support.report_records import NO_RESULTS, SURROUNDINGS, block, committed_record


def test_a_table_has_words_to_the_left_and_figures_to_the_right() -> None:
    rows = [(1, 2, "1.5 to 2", "`portable`", "not in time"), (2, None, "1 to 3", "[k01](k01.md)", 0.3)]
    head, line, first, *_ = formats.table("abcde", [*rows, (3, 4, "5", None, 7)]).splitlines()
    assert (head, line) == ("| a | b | c | d | e |", "| :-- | --: | --: | :-- | --: |")
    assert first == "| 1 | 2 | 1.5 to 2 | `portable` | not in time |"
    assert formats.table("ab", []) == "| a | b |\n| :-- | --: |"


def test_pages_show_the_results_that_are_committed() -> None:
    assert pages.stale() == []


def test_a_page_says_where_two_runs_chose_differently() -> None:
    record = Record.read(environment.RESULTS / "h200")
    chosen = {step.rung.id: step.own.config for step in views.ladder(record)}
    tunings = autotuner.shown(record)
    differ = [tuning for tuning in tunings if chosen[tuning.rung.id] != str(tuning.fastest.config)]
    assert 0 < len(differ) < len(tunings)
    for tuning in tunings:
        (share,) = [tuning.share(one) for one in tuning.timed if str(one.config) == chosen[tuning.rung.id]]
        words = "".join(rung_page._tuned(tuning.rung, record))
        assert (f": here {100 * share:.1f} % of that speed." in words) == (tuning in differ) == ("another run" in words)


def test_pages_are_filled_between_their_markers_only(tmp_path: Path) -> None:
    text = "before\n<!-- results:ladder -->\nold\n<!-- /results -->\nafter\n"
    results = Results([committed_record(tmp_path)], [])
    filled = blocks.filled(text, results, tmp_path)
    assert filled.startswith("before\n<!-- results:ladder -->\n")
    assert filled.endswith("<!-- /results -->\nafter\n")
    assert "old" not in filled
    assert "k11 " in filled
    assert blocks.filled(filled, results, tmp_path) == filled
    with pytest.raises(ValueError, match="no block"):
        blocks.filled(text.replace("ladder", "nonsense"), results, tmp_path)


@pytest.mark.parametrize(
    "name", sorted(blocks.BLOCKS.keys() - {"packages", "list-of-models", "exercises", *limits.BLOCKS})
)  # which are made of the sources
def test_a_block_without_results_says_so(name: str) -> None:
    assert "committed yet" in block(name, NO_RESULTS)


def test_a_page_names_a_gpu_that_only_the_bench_has_seen(tmp_path: Path) -> None:
    sweep = {"suite": "decode", "copy_tbs": 2.8, "shapes": {}, "environment": {**SURROUNDINGS, "gpu": "Third"}}
    found = block("gpus", Results([committed_record(tmp_path)], [sweep]))
    assert "| copy, as suite `decode` measured it, TB/s |  | 2.8 |" in found


@pytest.fixture
def page_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A page and a folder of results of a project that does not exist: little of each GPU, at today's sources."""
    results, target = tmp_path / "results", tmp_path / "README.md"
    target.write_text("<!-- results:ladders -->\n<!-- /results -->\n")
    for record, commit in zip(Results.read(environment.RESULTS).records, ("abc1234", None), strict=True):
        record.folder = results / record.folder.name
        record.folder.mkdir(parents=True)
        record.environment |= {"sources": "1" * 12, "commit": commit}
        record.problems = {key: record.problems[key] for key in ("fp16 4096x4096x4096",)}
        record.tuning = {key: entry for key, entry in record.tuning.items() if key.startswith("k11")}
        record.save()
    monkeypatch.setattr(environment, "RESULTS", results)
    monkeypatch.setattr(pages, "PAGES", (target,))
    monkeypatch.setattr(environment, "source_hash", lambda _: "1" * 12)
    return target


def test_pages_and_pictures_are_made_again_and_say_when_the_sources_changed(
    page_of_two: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Which alone makes no page stale."""
    first, second = (environment.RESULTS / gpu / "report.md" for gpu in ("h100-80gb-hbm3", "h200"))
    tuning = second.with_name("autotuner.md")
    assert set(pages.stale()) == {page_of_two, first, second, tuning}
    assert pages.main(["--check"]) == 1
    assert "is stale: python -m perf.pages" in capsys.readouterr().err
    assert pages.main([]) == 0
    assert pages.main(["--check"]) == 0
    for page, name in ((second, "ladder.png"), (tuning, "tuning.png")):
        assert f"]({name})" in page.read_text() and 5_000 < (second.parent / name).stat().st_size < 150_000
    assert "Commit `abc1234`." in page_of_two.read_text()
    assert "Commit not recorded." in page_of_two.read_text()
    assert "- Commit `abc1234`\n" in first.read_text()

    monkeypatch.setattr(environment, "source_hash", lambda _: "2" * 12)
    assert pages.stale() == []
    pages.rewrite()
    assert page_of_two.read_text().count("(changed since).") == 2
    assert "- Commit `abc1234` (changed since)\n" in first.read_text()
    assert pages.stale() == []
    first.unlink()
    assert pages.stale() == [first]


@pytest.mark.parametrize("page", sorted(rung_page.RUNG_PAGES.glob("k*.md")), ids=lambda page: page.stem)
def test_a_reader_can_guess_before_the_answer(page: Path) -> None:
    """Predictions, speeds and factors are folded, and what limits a rung."""
    shown = re.sub(r"<details>.*?</details>", "", page.read_text(), flags=re.DOTALL)
    assert "**Why**" in shown and "TFLOPS at" not in shown and "predicted" not in shown.lower()
    assert not re.search(r"\*\*(Predict|Measured|Came out|Bound by|Counted)", shown)


def test_what_pages_quote_and_link() -> None:
    """c03's loop on k03's page; terms of the glossary, at least once a ladder."""
    (loop,) = re.findall(r"```cuda\n(.*?)```", (rung_page.RUNG_PAGES / "k03.md").read_text(), re.DOTALL)
    assert loop in (environment.ROOT / "reference_cuda" / "c03_shared_tiled.cu").read_text()
    rungs = [page.read_text() for page in rung_page.RUNG_PAGES.glob("k*.md")]
    for term, place in rung_page.TERMS.items():
        assert any(re.search(rf"\[`?{term}s?`?\]\(../glossary.md#{place}\)", text) for text in rungs), term
    k11 = (rung_page.RUNG_PAGES / "k11.md").read_text()
    assert re.search(r"At 1024 x 1024 x 1024 it reaches [\d.]+ TFLOPS, 1.15 times k10", k11)


def test_what_two_stages_do() -> None:
    """k06's page: one slot, whose copies follow its last read, among the last FFMAs; k05 loads in three groups."""
    config = listed(RUNGS["k06"], 64, 128, 16, 4)
    k06 = compiled(RUNGS["k06"], HOPPER, config)[-1]
    assert config.num_stages == 2 and k06.shared == 4 * (64 + 128) * 16
    step = [opcode for opcode, _ in main_loop(k06.asm["sass"])]
    first, last = step.index("LDGSTS.E.BYPASS.128"), len(step) - step[::-1].index("LDS.128")
    left = sum(opcode == "FFMA" for opcode in step[first:])
    assert last < first and sum(opcode.startswith("LDGSTS") for opcode in step) == 6 and 0 < left < 1024 / 16
    k05 = main_loop(compiled(RUNGS["k05"], HOPPER, listed(RUNGS["k05"], 64, 128, 32, 4))[-1].asm["sass"])
    loads = [opcode[:3] for opcode, _ in k05 if opcode.startswith(("LDG", "STS"))]
    groups = [kind for kind, _ in itertools.groupby(loads)]
    assert loads.count("LDG") == 12 and groups == ["LDG", "STS"] * 3 and len(k05) >= 2 * len(step)
