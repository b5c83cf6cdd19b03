"""The report's pictures: that all is drawn, no text lies on another, and lines and colours can be told apart."""

from __future__ import annotations

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from matplotlib.colors import to_rgb

from perf.bench import plots as bench_plots
from perf.bench import tables as bench_tables
from perf.common import formats, style
from perf.ladder import autotuner, curves, plots, published, report_page, tables, views
from perf.ladder.record import FILE, Record, Result, Spread
from perf.measure import environment
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS
from tests.support.report_records import OPTIONS, add_static_facts, committed_record, figures_of, overlapping, texts_of
from triton_gemm.ladder import LADDER

RECORDS = sorted(path.parent.name for path in environment.RESULTS.glob(f"*/{FILE}"))


@pytest.fixture
def record(tmp_path: Path) -> Record:
    return committed_record(tmp_path)


# Colour without one kind of cones, in linear RGB: Machado, Oliveira and Fernandes, "A physiologically-based model for
# simulation of color vision deficiency", 2009; and Oklab, in which distances are as they are seen: Ottosson, 2020.
VISIONS = (
    np.eye(3),
    [[0.152286, 1.052583, -0.204868], [0.114503, 0.786281, 0.099216], [-0.003882, -0.048116, 1.051998]],
    [[0.367322, 0.860646, -0.227968], [0.280085, 0.672501, 0.047413], [-0.011820, 0.042940, 0.968881]],
    [[1.255528, -0.076749, -0.178779], [-0.078411, 0.930809, 0.147602], [0.004733, 0.691367, 0.303900]],
)
CONES = [[0.4122214708, 0.5363325363, 0.0514459929], [0.2119034982, 0.6806995451, 0.1073969566]]
CONES += [[0.0883024619, 0.2817188376, 0.6299787005]]
OKLAB = [[0.2104542553, 0.7936177850, -0.0040720468], [1.9779984951, -2.4285922050, 0.4505937099]]
OKLAB += [[0.0259040371, 0.7827717662, -0.8086757660]]
OKABE_ITO = {"#000000", "#e69f00", "#56b4e9", "#009e73", "#f0e442", "#0072b2", "#d55e00", "#cc79a7"}


@pytest.fixture
def figures(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    return figures_of(monkeypatch, plots, curves, bench_plots)


def made_up_points() -> list[bench_tables.Point]:
    """Modes whose speed and error are nearly the same, and one without an error."""
    modes = {"ieee": 50, "fp8": 970, "fp8-blocks": 960, "fp8-rows": 965, "fp8-fast": 1000, "int8": 1100}
    return [
        bench_tables.Point(provider, mode, layout, speed, {"norm": 0.0 if mode == "int8" else 1.7e-3})
        for mode, speed in modes.items()
        for layout in ("nn", "nt")
        for provider in ("triton_gemm", CUBLAS)
    ]


def named_lines(figure: Any) -> list[Any]:
    """The lines that a reader has to find by their name."""
    return [line for axes in figure.axes for line in axes.lines if not str(line.get_label()).startswith("_")]


def text_of(figure: Any) -> str:
    return " ".join(text.get_text() for text in texts_of(figure)).replace("\n", " ")


@pytest.mark.parametrize("gpu", RECORDS)
def test_everything_is_drawn_and_no_text_lies_on_another(gpu: str, figures: dict[str, Any], tmp_path: Path) -> None:
    record = Record.read(environment.RESULTS / gpu)
    add_static_facts(record)
    plots.everything(record, tmp_path)
    bench_plots.precisions(made_up_points(), "Made-up GPU", tmp_path / "precision.png")
    expected = {"ladder", "roofline", "factors", "static-resources", "precision"}
    expected |= {f"sweep-{mode}" for mode in OPTIONS.modes}
    expected |= {f"experiment-{source.id}" for source in published.EXPERIMENTS if len(source.kernels) > 1}
    expected |= {"tuning"} if autotuner.shown(record) else set()
    assert figures.keys() == {f"{name}.png" for name in expected}
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}
    assert "sm_89 L40S, RTX 40" in text_of(figures["static-resources.png"])
    header, *rows = (tmp_path / "sweep-ieee.csv").read_text().splitlines()
    assert header.startswith("size,provider,tflops,tflops_p20,tflops_p80")
    assert len(rows) >= len(OPTIONS.sizes)


def test_precisions_without_any_error_are_drawn(tmp_path: Path) -> None:
    exact = [point for point in made_up_points() if point.mode == "int8"]
    assert bench_plots.precisions(exact, "Made-up GPU", tmp_path / "precision.png").exists()


def seen(colour: str, vision: Any) -> Any:
    """Where a colour lies in Oklab, in hundredths."""
    rgb = np.array(to_rgb(colour))
    linear = np.where(rgb <= 0.04045, rgb / 12.92, ((rgb + 0.055) / 1.055) ** 2.4)
    return 100 * np.array(OKLAB) @ np.cbrt(np.array(CONES) @ np.clip(np.array(vision) @ linear, 0, 1))


def test_a_rung_has_a_colour_and_a_mark_that_can_be_told_from_any_others() -> None:
    """With all cones by its colour. With one kind missing by its mark, where its colour is near another's."""
    assert len(LADDER) == len(set(style.RUNG_COLORS)) == len(style.RUNG_COLORS) == len(style.RUNG_MARKS)
    assert {colour.lower() for colour in style.PALETTE} < OKABE_ITO
    line_styles = list(zip(style.RUNG_COLORS, style.RUNG_MARKS, strict=True))
    for (one, mark), (other, another) in itertools.combinations(line_styles, 2):
        usual, *lacking = (float(np.linalg.norm(seen(one, of) - seen(other, of))) for of in VISIONS)
        assert usual > 13 and min(lacking) > (12 if mark == another else 6), (one, other)
    for colour in style.RUNG_COLORS:
        assert seen(colour, VISIONS[0])[0] < 78  # not too pale


def test_a_rung_has_one_colour_in_all_pictures(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    plots.everything(record, tmp_path)
    lines = [line for name in figures if name[:5] in ("sweep", "roofl") for line in named_lines(figures[name])]
    bars = [bar for axes in figures["ladder.png"].axes for bar in axes.patches]
    for rung, colour in zip(LADDER, style.RUNG_COLORS, strict=True):
        assert {line.get_color() for line in lines if str(line.get_label()).startswith(rung.id)} == {colour}
        assert to_rgb(colour) in {bar.get_facecolor()[:3] for bar in bars}
    marks = [line for line in figures["factors.png"].axes[0].lines if line.get_marker() == "o"]
    dots = {line.get_color() for line in marks if line.get_markersize() == 6 and len(line.get_xdata())}
    assert dots == {*style.RUNG_COLORS[1:]}  # k01 is over nothing


@pytest.mark.parametrize("gpu", RECORDS)
def test_panels_hold_every_line_and_few_each(gpu: str) -> None:
    record = Record.read(environment.RESULTS / gpu)
    names, problems = views.lines(record, "ieee"), views.squares(record, "ieee")
    panels = curves.panels_of(problems, names)
    assert len(panels) == 3 and {*itertools.chain(*panels)} == {*names}
    assert max(map(len, panels)) < curves.MOST_LINES < len(names)
    assert [CUBLAS in panel for panel in panels] == [False, True, True]  # k02 has a fifth of its speed
    lacking = [name for name in names if name != "k06_pipelined"]
    assert {*itertools.chain(*curves.panels_of(problems, lacking))} == {*lacking}  # its twin stays
    few = names[:3]
    assert curves.panels_of(problems, few) == [few]


@pytest.mark.full
def test_every_line_can_be_told_from_the_others(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    add_static_facts(record)
    plots.everything(record, tmp_path)
    for name in [*(f"sweep-{mode}.png" for mode in OPTIONS.modes), "roofline.png", "static-resources.png"]:
        lines = named_lines(figures[name])
        line_styles = {str(line.get_label()): (str(line.get_color()).lower(), line.get_marker()) for line in lines}
        others = {label: one for label, one in line_styles.items() if CUBLAS not in label and "FFMA" not in label}
        assert len(set(others.values())) == len(others) > 0, name
        assert {marker for _, marker in others.values()}.isdisjoint("D"), name
        assert {one for label, one in line_styles.items() if CUBLAS in label} <= {("#000000", "D")}, name
    assert len({line.get_label() for line in named_lines(figures["sweep-ieee.png"])}) == 14


@pytest.mark.full
def test_sizes_that_are_no_multiple_of_16_are_marks_apart_and_explained(
    record: Record, figures: dict[str, Any], tmp_path: Path
) -> None:
    plots.everything(record, tmp_path)
    sweep = figures["sweep-fp16.png"]
    lines = named_lines(sweep)
    assert all(set(line.get_xdata()) == {512, 1024, 2048, 4096, 6144, 8192} for line in lines)
    marks = [line for line in sweep.axes[0].lines if line.get_markerfacecolor() == "white"]
    assert sorted(line.get_xdata()[0] for line in marks) == [1400] * len(lines) + [3000] * len(lines)
    assert "multiple of 16" in text_of(sweep)
    record.problems = {key: problem for key, problem in record.problems.items() if problem.M % 16 == 0}
    pictures = plots.everything(record, tmp_path)
    assert "multiple of 16" not in text_of(figures["sweep-fp16.png"])
    assert "multiple of 16" not in report_page.write(record, pictures).read_text()


@pytest.mark.full
def test_the_ladder_shows_shares_of_what_it_draws(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    problem = record.problems[Problem(4096, 4096, 4096, "fp16").key]
    step = next(step for step in views.ladder(record) if step.rung.id == "k08")
    assert step.twin is not None
    shares = []
    for name in (step.rung.name, step.twin):
        result, cublas = problem.timed(name), problem.timed(CUBLAS)
        assert result is not None and cublas is not None
        of_other_rounds = Spread(median=3.21, p20=3.21, p80=3.21)
        problem.providers[name] = replace(result, ratio=of_other_rounds)
        shares.append(formats.percent(cublas.time_ms.median / result.time_ms.median))
    plots.everything(record, tmp_path)
    assert "321 %" not in text_of(figures["ladder.png"])
    assert all(f" {share} " in text_of(figures["ladder.png"]) for share in shares)
    row = next(line for line in tables.ladder(record).splitlines() if line.startswith("| k08"))
    assert f"| {shares[0]} |" in row


@pytest.mark.full
@pytest.mark.parametrize("kept", ["no cuBLAS", "no twins", "one rung", "odd sizes only"])
def test_a_record_that_lacks_much_is_drawn(kept: str, record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    keeps = {
        "no cuBLAS": lambda name: name != CUBLAS,
        "no twins": lambda name: not name.startswith("c0") and not name.startswith("c1"),
        "one rung": lambda name: name == "k03_blocked",
    }.get(kept, lambda name: True)
    for key, problem in list(record.problems.items()):
        providers = {name: result for name, result in problem.providers.items() if keeps(name)}
        record.problems[key] = replace(problem, providers=providers)
        if kept == "odd sizes only" and problem.M % 16 == 0 and not problem.hot:
            del record.problems[key]
    pictures = plots.everything(record, tmp_path)
    assert {"ladder.png", "sweep-ieee.png"} <= figures.keys()
    assert ("sweep-fp16.png" in figures) == (kept != "one rung")
    assert {name: overlapping(figure) for name, figure in figures.items() if overlapping(figure)} == {}
    report_page.write(record, pictures)


@given(st.lists(st.floats(-0.2, 1.2), min_size=1, max_size=20).map(sorted))
def test_names_are_spread_apart_and_stay_near(wanted: list[float]) -> None:
    gap = 0.04
    places = style.spread(wanted, gap, 0, 1)
    assert all(after - before >= gap - 1e-9 for before, after in itertools.pairwise(places))
    assert places[0] >= -1e-9
    assert places[-1] <= 1 + 1e-9
    if all(after - before >= gap for before, after in itertools.pairwise(wanted)) and 0 <= wanted[0] <= wanted[-1] <= 1:
        assert places == pytest.approx(wanted)


def test_what_failed_or_is_absent_is_named(record: Record, figures: dict[str, Any], tmp_path: Path) -> None:
    problem = Problem(4096, 4096, 4096, "ieee")
    record.problems[problem.key].providers["k06_pipelined"] = Result(failed="a result is off")
    for size in set(OPTIONS.sizes) - {4096}:
        del record.problems[Problem(size, size, size, "ieee").key].providers["k06_pipelined"]
    assert "k06_pipelined" not in views.lines(record, "ieee")
    assert record.failures() == [f"k06_pipelined on {problem.key}: a result is off"]
    written = report_page.write(record, [plots.ladder(record, tmp_path)]).read_text()
    assert "a result is off" in written
    assert "failed its check" in text_of(figures["ladder.png"])
