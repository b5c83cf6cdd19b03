"""The page to play with: its figures are those of the package's functions and records, and what cannot run says why."""

from __future__ import annotations

import base64
import gzip
import itertools
import json
import random
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import triton

from perf.common import formats
from perf.ladder import clock_model, compiled, explorer, static
from perf.ladder.record import Record
from perf.measure import environment
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import portable
from triton_gemm.ladder import k04_grouped
from triton_gemm.ladder.command import spelled
from triton_gemm.selection.select import credible

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")
SQUARE = (4096, 4096, 4096)


@pytest.fixture(scope="module")
def found() -> explorer.Explored:
    return explorer.explored()


def points(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{axis: draw.choice(values) for axis, values in explorer.AXES.items()} for _ in range(count)]


@pytest.mark.full
def test_a_time_is_the_models_where_a_configuration_can_run(found: explorer.Explored) -> None:
    can_run = {True: 0, False: 0}
    for point in points(4000):
        problem, device = explorer.problem_of(point["kernel"], point["shape"], point["gpu"])
        choices, time = [point[axis] for axis in explorer.CHOICES], found.at("time", **point)
        if found.at("illegal", **point):
            assert time == 0
            continue
        rung = explorer.RUNGS.get(point["kernel"])
        can_run[rung is not None] += 1
        speed = found.at("flop", **point) / time / 1e6
        assert speed <= 1.01 * min(found.at(f"most by {limit}", **point) for limit in ("units", "memory"))
        if rung is None:
            config = portable.Config(*choices)
            assert portable.illegal(problem, device, config) is None  # of every shape, though it is kept for one
            us = portable.microseconds(problem, config, 1, model_of(device))
            assert time == pytest.approx(credible(us, problem, device), rel=0.006)
        else:
            limits = [found.at(f"most by {limit}", **point) for limit in ("L2", "shared memory", "issue slots")]
            assert speed <= 1.01 * min(limit for limit in limits if limit)
            assert found.at("bound", **point)
    assert can_run[True] > 800 and can_run[False] > 400


@pytest.mark.parametrize(
    ("kernel", "gpu", "tile", "why"),
    [
        ("half", "rtx4090", (128, 128, 64, 8, 5), "needs 131328 bytes of shared memory, .* has 101376"),
        ("half", "a100", (128, 128, 64, 8, 5), ""),
        ("k06", "h200", (128, 64, 16, 4, 3), ""),
        ("half", "h100", (128, 128, 64, 8, 1), "the cost model knows no portable kernel of one stage"),
        ("k08", "h100", (256, 256, 32, 8, 2), "would spill: 256 accumulators are more than half of a thread's 256 .*"),
        ("k06", "h100", (128, 128, 16, 4, 3), "would spill: 128 accumulators are more than a quarter of .*"),
        ("k11", "b200", (128, 128, 64, 8, 3), "k11 is for sm_90"),
        ("k10", "a100", (64, 64, 64, 4, 3), "k10 is .*"),
    ],
)
def test_what_cannot_run_says_why(
    found: explorer.Explored, kernel: str, gpu: str, tile: tuple[int, ...], why: str
) -> None:
    choices = dict(zip(explorer.CHOICES, tile, strict=True))
    assert re.fullmatch(why, found.at("illegal", kernel=kernel, gpu=gpu, **choices))


def test_figures_by_hand(found: explorer.Explored) -> None:
    point = {"kernel": "half", "gpu": "h100", "shape": SQUARE, "BLOCK_M": 128, "BLOCK_N": 128}
    point |= {"BLOCK_K": 64, "num_warps": 8, "num_stages": 3, "GROUP_M": 8}
    assert found.at("registers", **point) == 128 * 128 // 256 + 80
    assert found.at("shared", **point) == 3 * 2 * 128 * 64 * 2 + 256
    assert found.at("programs", **point) == 1  # 256 threads of 144 registers
    assert found.at("bytes_per_flop", **point) == 0.0156  # (128 + 128) 2 / (2 128 128)
    assert found.at("tiles", **point) == 1024
    first = {**point, "programs": 1}
    assert (found.at("waves", **first), found.at("idle", **first)) == (7.76, 3)  # 1024 / 132, of 8
    assert found.at("patch", **first) == "8 x 17"
    assert found.at("patch_mib", **first) == 25  # (8 + 17) 128 rows of 4096 in 2 bytes
    assert found.at("patch", **{**first, "GROUP_M": 1}) == "5 x 32"
    assert found.at("patch", **{**first, "GROUP_M": explorer.ALL_ROWS}) == "32 x 5"
    assert found.at("known", gpu="h100") and not found.at("known", gpu="rtx4090")
    k08 = {**point, "kernel": "k08"}
    assert (found.at("registers", **k08), found.at("programs", **k08)) == (114, 2)
    assert found.at("registers_from", **k08).startswith("compiled by Triton ")
    assert found.at("programs", **{**k08, "kernel": "k09"}) == 1  # persistent
    assert f"{found.at('most by power', kernel='k08', gpu='h200'):.0f}" == "686"  # what cuBLAS reached in fp16
    assert found.at("bound", **{**k08, "BLOCK_N": 256}) == "power"
    assert not found.at("most by power", kernel="k06", gpu="h200")
    k06 = {**point, "kernel": "k06", "BLOCK_N": 64, "BLOCK_K": 16, "num_warps": 4}
    assert found.at("shared", **k06) == found.at("shared", **{**k06, "gpu": "a100"}) == 2 * 192 * 16 * 4  # two slots
    deeper = {**k06, "num_stages": 6}
    assert found.at("registers_from", **deeper) == "compiled with another BLOCK_K or num_stages"


def test_one_peak_in_explorer_report_and_roofline(found: explorer.Explored) -> None:
    for kernel, mode, peak in (("k06", "ieee", 66.9), ("k07", "tf32", 495), ("k08", "fp16", 989)):
        assert found.at("most by units", kernel=kernel, gpu="h100") == pytest.approx(peak, rel=2e-3)
        best = clock_model.ceiling(explorer.RUNGS[kernel].configs[0], mode, 4 if kernel < "k08" else 2, (9, 0))
        assert best.tflops / best.share == pytest.approx(peak, rel=2e-3)


def tuned_rows() -> Iterator[tuple[str, str, float]]:
    """(rung, configuration, TFLOPS) as autotuner.md prints them."""
    text = (environment.RESULTS / "h200" / "autotuner.md").read_text()
    for section in text.split("\n## ")[1:]:
        for config, tflops in re.findall(r"^\| (\d+x\S+) \| ([\d.,]+) \|", section, re.MULTILINE):
            yield section[:3], config, float(tflops.replace(",", ""))


def test_every_row_of_the_tuner_is_shown_and_modelled_within_half(found: explorer.Explored) -> None:
    alone = [one for one in found.measured if (one["gpu"], one["how"]) == ("h200", "kernel alone")]
    shown = {}
    for one in alone:
        tile, others = one["choices"][:3], [*one["choices"][3:], *[one["group"]] * bool(one["group"])]
        shown[one["kernel"], ",".join(["x".join(map(str, tile)), *map(str, others)])] = one
    rows = list(tuned_rows())
    assert len(rows) == len(shown) == 92
    for rung, config, tflops in rows:
        one = shown[rung, config]
        assert one["tflops"] == pytest.approx(tflops, rel=0.005) and "Triton 3.9.0" in one["made"]
        point = {"kernel": rung, "gpu": "h200", **dict(zip(explorer.CHOICES, one["choices"], strict=True))}
        assert not found.at("illegal", **point) and "compiled by" in found.at("registers_from", **point)
        predicted = 2 * 4096**3 / found.at("time", shape=SQUARE, **point) / 1e6
        assert 1 / 1.5 <= predicted / tflops <= 1.5, (rung, config, predicted, tflops)


def test_the_ladders_own_times_are_shown(found: explorer.Explored) -> None:
    for folder, gpu in (("h100-80gb-hbm3", "h100"), ("h200", "h200")):
        record = Record.read(environment.RESULTS / folder)
        whole = [one for one in found.measured if (one["gpu"], one["how"]) == (gpu, "whole rung")]
        shown = {(one["kernel"], one["shape"][0]) for one in whole}
        assert shown >= {*itertools.product(explorer.RUNGS, (4096, 1024))}
        for one in whole:
            rung = explorer.RUNGS[one["kernel"]]
            mode = "fp16" if rung.precision == "half" else rung.precision
            (problem,) = [p for p in record.problems.values() if (p.M, p.mode, p.hot) == (one["shape"][0], mode, False)]
            assert one["tflops"] == pytest.approx(problem.tflops(rung.name), rel=1e-3)


def test_tensor_cores_are_faster_on_hopper(found: explorer.Explored) -> None:
    """k07 than k06, wherever both run; where memory binds both, or latency, as fast."""
    compared = 0
    for gpu, shape, *choices in itertools.product(
        ("h100", "h200"), explorer.AXES["shape"], *(explorer.AXES[axis] for axis in explorer.CHOICES)
    ):
        point = {"gpu": gpu, "shape": shape, **dict(zip(explorer.CHOICES, choices, strict=True))}
        ieee, tf32 = (found.at("time", kernel=kernel, **point) for kernel in ("k06", "k07"))
        if ieee and tf32:
            compared += 1
            bounds = {found.at("bound", kernel=kernel, **point) for kernel in ("k06", "k07")}
            waits = all(bound.startswith(("memory", "latency")) for bound in bounds)
            assert tf32 < ieee or (tf32 == ieee and waits), point
    assert compared > 4000


def test_the_order_of_tiles_is_the_ladders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k04_grouped, "tl", SimpleNamespace(minimum=min))
    order = [k04_grouped.grouped_pid.fn(tile, 10, 7, 4) for tile in range(70)]
    assert list(explorer.grouped(10, 7, 4)) == order


def test_the_fastest_is(found: explorer.Explored) -> None:
    for gpu, kernel in (("a100", "tf32"), ("b200", "int8"), ("h200", "k08")):
        where = {"gpu": gpu, "kernel": kernel, "shape": (16, 14336, 4096)}
        best = found.at("best", **where)
        choices = {axis: explorer.AXES[axis][place] for axis, place in zip(explorer.CHOICES, best, strict=True)}
        time = found.at("time", **where, **choices)
        others = (found.at("time", **{**point, **where}) for point in points(500))
        assert 0 < time <= min(other for other in others if other)


def test_every_configuration_of_a_rung_is_compiled() -> None:
    rows = {(row.rung, row.target, row.config) for row in compiled.read()}
    assert {(job.rung.id, job.target, compiled.named(job.config)) for job in compiled.jobs()} == rows
    assert {row.triton for row in compiled.read()} == {triton.__version__} or triton.__version__ != "3.7.1"


@pytest.mark.skipif(triton.__version__ != compiled.read()[0].triton, reason="the table is of another Triton")
@pytest.mark.parametrize("rung", ["k04", "k11"])
def test_a_row_is_what_the_compiler_says(rung: str) -> None:
    job = next(job for job in compiled.jobs() if job.rung.id == rung and job.target == "sm_90")
    facts = static.facts(job, static.capture(job.rung, job.config, job.size, job.dtype))
    row = compiled.row_of(job.rung, (9, 0), job.config)
    assert row is not None and row.config + f",{job.config.GROUP_M}" == spelled(job.config)
    assert row[4:] == (facts.registers, facts.shared, facts.spills, facts.blocks_per_sm)


def test_the_page_is_one_small_file_with_every_figure(found: explorer.Explored) -> None:
    page = explorer.page(found)
    assert len(page) < 2**19 and "redict" not in explorer.TEMPLATE.read_text()  # a model's figure is modelled
    assert not re.search(r"https?:|src=|<link|@import|fetch\(", page)  # it asks for nothing else
    (data,) = re.findall(r'id="data">(.*)</script>', page)
    assert json.loads(gzip.decompress(base64.b64decode(data))) == json.loads(json.dumps(found.as_dict()))
    lookups = set(re.findall(r'at\("(\w+)"', page))
    assert {"illegal", "time", "programs", "chosen", "bound"} <= lookups <= found.tables.keys()
    assert len(found.tables["time"].values) == 13 * 6 * 3 * 5 * 5 * 4 * 2 * 6


def opened(page: str, folder: Path, fragment: str, *switches: str, script: str = "", width: int = 0) -> str:
    """The page's text in a browser, once it has run, `script` last; width: of a frame, whose messages are the title."""
    path = folder / "page.html"
    path.write_text(page.replace("DATA = data; start();", f"DATA = data; start(); {script}"))
    if width:  # windows are wider than a phone
        frame = f'<iframe width="{width}" height="700" style="border: 0" src="page.html{fragment}"></iframe>'
        path, fragment = folder / "frame.html", ""
        path.write_text(f"<script>onmessage = (event) => {{ document.title = event.data; }}</script>{frame}")
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--virtual-time-budget=10000", *switches]
    command += ["--dump-dom", f"{path.as_uri()}{fragment}"]
    return subprocess.run(command, capture_output=True, text=True, timeout=120).stdout


def posted(*page_folder_and_fragment: Any, script: str, width: int = 1400) -> Any:
    """What a script posts that the page runs, in a frame of that width."""
    (title,) = re.findall(r"<title>(.*?)</title>", opened(*page_folder_and_fragment, script=script, width=width))
    return json.loads(title)


def verdict(text: str) -> str:
    (found,) = re.findall(r'<div id="verdict"[^>]*>(.*?)</div>', text, re.DOTALL) or [text]
    return re.sub(r"<.*?>", "", found)


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_what_python_looks_up(found: explorer.Explored, tmp_path: Path) -> None:
    page = explorer.page(found)
    text = opened(page, tmp_path, "#tf32-32x64x128-4-2-4-rtx5090-16x14336x4096")
    where = {"kernel": "tf32", "gpu": "rtx5090", "shape": (16, 14336, 4096), "BLOCK_M": 32, "BLOCK_N": 64}
    where |= {"BLOCK_K": 128, "num_warps": 4, "num_stages": 2, "GROUP_M": 4}
    assert f"({formats.number(found.at('time', **where))} us)" in verdict(text)
    assert "trust the order, not the times" in verdict(text)
    for figure in ("registers", "programs", "patch", "bytes_per_flop"):
        assert f"<td>{found.at(figure, **where)}</td>" in text
    above = opened(page, tmp_path, "#k06-64x64x16-4-3-8-h200-4096x4096x4096")
    assert "leaves out broadcasts within a warp" in verdict(above) and "shared memory, no broadcast" in above
    assert "Measured, too: guess" in verdict(above) and "46.4" not in verdict(above)
    k03 = opened(page, tmp_path, "#k03-64x64x16-4-1-all")
    assert "The rung has none: its programs go down" in k03 and "38.4 TFLOPS measured" in verdict(k03)
    spills = opened(page, tmp_path, "#k06-128x128x16-4-3-8-h200-4096x4096x4096")
    assert verdict(spills).startswith("would spill: 128 accumulators are") and "cannot run" not in verdict(spills)
    by_power = opened(page, tmp_path, "#k08-128x256x64-8-3-8-h200-4096x4096x4096")
    assert "686 TFLOPS modelled" in verdict(by_power)  # as the ceiling


def test_nothing_was_measured_above_a_ceiling(found: explorer.Explored) -> None:
    """Shared memory of fp32 is none. The tuner does not wait until power limits the clock."""
    above = set()
    for one in found.measured:
        point = {name: one[name] for name in ("kernel", "gpu")} | {"shape": tuple(one["shape"])}
        point |= dict(zip(explorer.CHOICES, one["choices"], strict=True))
        for limit in ("units", "issue slots", "memory", "L2", "shared memory"):
            most = found.at(f"most by {limit}", **point)
            if most and one["tflops"] > most:
                assert limit == "shared memory" and found.at("no_broadcast", **point), (one, limit, most)
                above.add(one["kernel"])
    assert above == {"k03", "k04", "k05", "k06"}


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_guess_is_graded_by_what_was_measured(found: explorer.Explored, tmp_path: Path) -> None:
    script = """document.querySelectorAll("#BLOCK_M .bars button")[2].click();
      const verdict = (axis) => document.querySelector(`#${axis} .verdict`).textContent;
      parent.postMessage(JSON.stringify([verdict("BLOCK_M"), verdict("num_stages"), verdict("BLOCK_K")]), "*");"""
    guess, stages, depth = posted(explorer.page(found), tmp_path, "#k06-64x64x16-4-3", script=script)
    text = r"You said 64: 3,270 us modelled, 2,960 measured. Best by the model: 128, 2,390 us. "
    assert guess == f"{text}Best of the 2 measured: 128, 2,920 us."
    assert stages == "Which is fastest? Those timed: 3, 4. The model gives all the same time."
    assert depth == "Which is fastest by the model?"


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_all_is_shown_before_a_guess_where_the_address_says_so(found: explorer.Explored, tmp_path: Path) -> None:
    """Until another kernel is chosen without it, which is guessed anew."""
    script = """
      const bars = () => [...document.querySelectorAll("#num_warps .bars button")].map((bar) => bar.innerText);
      const before = bars(), hash = location.hash, open = element("records").open, box = element("all");
      box.click(); document.querySelector("#num_warps .bars button").click();
      const guessed = bars();
      element("kernel").value = 4; element("kernel").onchange({ target: element("kernel") });
      parent.postMessage(JSON.stringify({ before, hash, open, guessed, after: bars(), end: location.hash }), "*");"""
    seen = posted(explorer.page(found), tmp_path, "#k06-128x64x16-4-3-all", script=script)
    assert seen["before"] == seen["guessed"] != seen["after"] == ["4", "8"] and seen["open"]
    assert seen["hash"].endswith("-all") and not seen["end"].endswith("-all")


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_state_in_the_address_is_restored_and_a_slider_moves_under_its_verdict(
    found: explorer.Explored, tmp_path: Path
) -> None:
    """On a phone of 390 px, in the dark."""
    script = """
      const slider = document.querySelector("#num_stages input");
      const bars = (axis) => [...document.querySelectorAll(`#${axis} .bars button`)].map((bar) => bar.innerText);
      const unguessed = bars("num_stages"), records = element("records").open;
      document.querySelectorAll("#num_stages .bars button")[1].click();
      const label = () => document.querySelector("#num_stages .verdict").textContent;
      const guessed = label(), others = bars("num_warps");
      const before = element("verdict").textContent;
      document.querySelector("#GROUP_M input").scrollIntoView({ block: "end" });
      slider.value = 3; slider.dispatchEvent(new Event("input"));
      const hidden = element("verdict").textContent;
      element("records").open = true; show();
      const box = element("verdict").getBoundingClientRect();
      parent.postMessage(JSON.stringify({ before, hidden, after: element("verdict").textContent, width: innerWidth,
        trust: element("trust").textContent,
        wide: document.documentElement.scrollWidth, top: box.top, bottom: box.bottom, height: innerHeight, y: scrollY,
        text: slider.getAttribute("aria-valuetext"), hash: location.hash,
        aside: element("measured").scrollWidth - element("measured").parentNode.clientWidth,
        other: stagesAlike("num_warps", [1, 1]) + stagesAlike("num_stages", [2, 1]),
        unguessed, guessed, others, records, bars: bars("num_stages"),
        dark: getComputedStyle(document.body).backgroundColor }), "*");"""
    page, dark = explorer.page(found), "--blink-settings=preferredColorScheme=0"
    seen = posted(page, tmp_path, "#k06-128x64x16-4-3", dark, script=script, width=390)
    assert "Measured, too: guess" in seen["before"] and "bound by issue slots" in seen["before"]
    assert " TFLOPS measured" not in seen["before"] + seen["hidden"]
    assert "0.79 to 1.24 times the speed, over 11 configurations" in seen["trust"]
    assert seen["hash"] == "#k06-128x64x16-4-4-8-h200-4096x4096x4096" and seen["text"] == "4"
    assert "47.2 TFLOPS measured" in seen["after"]
    assert seen["wide"] <= seen["width"] == 390 and seen["aside"] <= 0  # nothing to scroll sideways
    where: dict[str, Any] = {"kernel": "k06", "gpu": "h200", "shape": SQUARE}
    where |= dict(zip(explorer.CHOICES, (128, 64, 16, 4, 4), strict=True))
    times = [found.at("time", **{**where, "num_stages": n}) for n in explorer.AXES["num_stages"]]
    same = {"kernel": "k06", "gpu": "h200", "how": "kernel alone", "group": 8}
    alone = [one for one in found.measured if same.items() <= one.items() and one["choices"][:4] == [128, 64, 16, 4]]
    timed = {one["choices"][4]: formats.number(2 * 4096**3 / one["tflops"] / 1e6) for one in alone}
    stages = explorer.AXES["num_stages"]
    assert [*timed] == [3, 4]
    assert seen["bars"] == [f"{formats.number(t)}\n{timed.get(n, '–')}" for n, t in zip(stages, times, strict=True)]
    assert seen["unguessed"] == [*"123456"] and seen["others"] == ["4", "8"] and not seen["records"]
    text = f"You said 2: {formats.number(times[1])} us modelled, not measured. All are alike by the model."
    assert seen["guessed"].startswith(f"{text} Best of the 2 measured: 4, {timed[4]} us. The model counts no ")
    assert seen["guessed"].endswith(" k06's page has what was measured, as times k05.") and seen["other"] == ""
    assert seen["y"] > 100 and 0 <= seen["top"] < seen["bottom"] < seen["height"] / 3
    assert max(map(int, re.findall(r"\d+", seen["dark"]))) < 64
    assert '<div id="verdict" role="status" aria-live="polite"' in page
