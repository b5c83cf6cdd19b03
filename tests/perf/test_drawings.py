"""The ladder's drawings: that the committed ones show what the kernels do today, and what that is."""

from __future__ import annotations

import subprocess
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import triton
from matplotlib import image

from perf.ladder.drawings import pictures, replay, traces, twins
from perf.ladder.drawings.replay import Clock, Loop
from tests.perf.test_explorer import BROWSER
from tests.support.kernel_mutants import RUNGS


@pytest.mark.parametrize("name", pictures.FACTS)
def test_a_drawing_shows_what_the_kernels_do_today(name: str) -> None:
    text = pictures.path(name).read_text()
    assert len(text) < 60_000 and "<dc:date>" not in text
    assert 'role="img"' in text and 0 < text.index("<title>") < text.index("<desc>") < text.index("<metadata>")
    assert "fill: #ffffff" in text.partition("axes_1")[0]  # its own background, for dark pages
    if f"Triton {triton.__version__}," not in text:
        pytest.skip("drawn of what another Triton compiles")
    digest = pictures.digest(name)
    changed = f"{pictures.path(name)} is to be drawn again, of `pictures.facts({name!r})`, and to name them, {digest!r}"
    assert digest in text, changed


def test_every_drawing_has_facts() -> None:
    assert {path.stem for path in pictures.FOLDER.glob("*.svg")} == pictures.FACTS.keys()


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_drawings_are_light_on_dark_where_pages_are_dark(tmp_path: Path, width: int) -> None:
    page, shot = tmp_path / "page.html", tmp_path / "shot.png"
    shown = "".join(f'<img width="{width}" src="{file.as_uri()}">' for file in sorted(pictures.FOLDER.glob("*.svg")))
    page.write_text(f'<meta name="color-scheme" content="light dark"><body style="margin: 0; width: {width}px">{shown}')
    for scheme, dark in enumerate((True, False)):
        options = [f"--blink-settings=preferredColorScheme={scheme}", "--window-size=1400,3000", f"--screenshot={shot}"]
        command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", *options, page.as_uri()]
        subprocess.run(command, capture_output=True, timeout=120, check=True)
        shades = image.imread(shot)[:, :width, :3].mean(axis=2)
        assert (np.median(shades) < 0.15) == dark and shades.max() > 0.85 and shades.min() < 0.15


def test_a_changed_trace_makes_its_drawing_stale(monkeypatch: pytest.MonkeyPatch) -> None:
    before = {rung: pictures.digest(rung) for rung in ("k03", "k04")}
    changed = {**traces.recorded(), "k04": traces.recorded()["k03"]}
    monkeypatch.setattr(traces, "recorded", lambda: changed)
    assert {rung for rung, digest in before.items() if pictures.digest(rung) != digest} == {"k04"}


def test_k01_moves_32_sectors_and_k02_4_for_each_fma() -> None:
    k01, k02 = traces.load_of("k01", "a"), traces.load_of("k02", "b")
    assert (len(k01.sectors), k01.used, k01.width) == (32, 128, 4)
    assert {second - first for first, second in pairwise(k01.lanes)} == {4 * 4096}  # rows of A
    assert (len(k02.sectors) // (k02.width // 4), k02.used) == (4, 32 * len(k02.sectors))
    assert "32 sectors of 32 bytes" in RUNGS["k01"].header["Why"]


def test_k03_loads_an_element_of_a_tile_once() -> None:
    k02, k03 = (traces.recorded()[rung] for rung in ("k02", "k03"))
    assert k03["most"] == 1 and k03["loaded"] / k03["fma"] == 1 / 64 + 1 / 64
    assert k02["loaded"] / k02["fma"] > 1


def test_a_wave_of_k04_reads_less() -> None:
    """W / GROUP_M + GROUP_M strips, where it was W / m + m, in whole strips."""
    k03, k04 = (traces.recorded()[rung] for rung in ("k03", "k04"))
    wave, edge = len(k04["tiles"]), k04["edge"]
    assert len({*map(tuple, k04["tiles"])}) == wave == len(k03["tiles"]) == 660
    assert [len(k03["a"]), len(k03["b"])] == [edge, -(-wave // edge)]
    assert [len(k04["a"]), len(k04["b"])] == [8, -(-wave // 8)]
    for trace in (k03, k04):
        assert [sorted({tile[i] for tile in trace["tiles"]}) for i in (0, 1)] == [trace["a"], trace["b"]]


def test_words_of_a_thread_of_k04_and_of_k05() -> None:
    found = {rung: traces.results_of(rung) for rung in ("k04", "k05")}
    assert {rung: (one.words, one.count) for rung, one in found.items()} == {"k04": (12, 32), "k05": (20, 64)}
    assert all(one.count == RUNGS[rung].configs[0].accumulators() for rung, one in found.items())
    assert "20 words for 64 FMAs" in RUNGS["k05"].header["Came out"]


@pytest.mark.parametrize("rung", ["k04", "k05"])
def test_lanes_of_a_layout_share_a_tile_out(rung: str) -> None:
    layout, config = traces.Blocked.of(traces.compiled(rung).asm["ttgir"]), RUNGS[rung].configs[0]
    places = [
        (row, column)
        for lane in range(32)
        for row in layout.indices(0, config.BLOCK_M or 0, lane)
        for column in layout.indices(1, config.BLOCK_N or 0, lane)
    ]
    assert len(places) == len(set(places)) == (config.BLOCK_M or 0) * (config.BLOCK_N or 0) // config.num_warps


def number(bits: int) -> float:
    """The fp32 number that has these bits."""
    return float(np.uint32(bits).view(np.float32))


def test_k07_rounds_to_the_nearest_that_a_tensor_core_reads() -> None:
    trace = traces.recorded()["k07"]
    for given, rounded in zip(trace["given"], trace["rounded"], strict=True):
        step = 2.0**-10 * (2 if number(given) > 2 else 1)
        assert rounded % 2**13 == 0  # bits that it does not read
        assert abs(number(rounded) - number(given)) <= step / 2
        assert 0 <= number(given) - number(given >> 13 << 13) < step
    assert "the error is 2.6 times that of cuBLAS; rounded, equal" in RUNGS["k07"].header["Predicts"]
    assert trace["errors"]["truncated"] / trace["errors"]["rounded"] == pytest.approx(2.6, rel=0.03)


THREADS = {"c04_thread_tiled_1d": 512, "c05_thread_tiled_2d": 64, "c06_register_blocked": 256, "c07_warp_tiled": 256}


def most_turns(together: list[list[int]]) -> int:
    return max(twins.turns(together)) + 1


@pytest.mark.parametrize("stem", THREADS)
def test_threads_of_a_twin_share_a_tile_out(stem: str) -> None:
    def shared_out(source: twins.Source) -> bool:
        held = [source.results(thread) for thread in range(THREADS[stem])]
        places = [(row, column) for rows, columns in held for row in rows for column in columns]
        m, n = twins.results_of(stem).tile
        return sorted(places) == [(row, column) for row in range(m) for column in range(n)]

    source = twins.Source.of(stem)
    assert shared_out(source)
    for right, wrong in (("* BLOCK_N + col", "* BLOCK_N + 2 * col"), ("+ row + i", "+ row")):
        assert right in source.text
        assert not shared_out(replace(source, text=source.text.replace(right, wrong)))


def test_words_of_a_thread_of_each_twin() -> None:
    """As the twins predict."""
    found = {stem[:3]: twins.results_of(stem) for stem in THREADS}
    words = {stem: (one.words, one.count) for stem, one in found.items()}
    assert words == {"c04": (9, 8), "c05": (16, 64), "c06": (8, 16), "c07": (16, 64)}
    assert (len(found["c07"].warp_rows), len(found["c07"].warp_columns)) == (64, 32)
    source = twins.Source.of("c07_warp_tiled")
    assert "Lanes i and i ^ 1 read the same of A, i and i ^ 2 the same of B" in source.text
    for lane in range(32):
        assert source.results(lane)[0] == source.results(lane ^ 1)[0]
        assert source.results(lane)[1] == source.results(lane ^ 2)[1]


def test_padding_spreads_stores_of_a_over_the_banks() -> None:
    for stem, comment, turns in (
        ("c06_register_blocked", "Four more floats a row halve the bank conflicts", (4, 2)),
        ("c07_warp_tiled", "no conflicts with BLOCK_K = 8", (2, 1)),
    ):
        padded = twins.Source.of(stem)
        plain = padded.without(" + 4")
        assert comment in padded.text
        assert tuple(most_turns(twins.stored_transposed(one)) for one in (plain, padded)) == turns


def test_padding_spreads_rows_of_a_fragment_over_the_banks() -> None:
    """Rows of 32 and 128 bytes put two and eight of them on the same banks; 16 bytes more a row put none."""
    padded = twins.Source.of("c10_wmma_fp16_padded")
    plain = padded.without(" + PAD")
    assert "Rows of 32 and 128 bytes put two and" in padded.text
    for tile, (before, after) in {"a_tile": (2, 1), "b_tile": (8, 1)}.items():
        found = [most_turns(twins.fragment_rows(one, tile)) for one in (plain, padded)]
        assert found == [before, after]


def in_order(clock: Clock) -> None:
    """Each tile is multiplied when it has arrived, and its slot filled again when that has ended."""
    arrived = {bar.step: bar for bar in clock.of_kind("copy")}
    last = dict[int, float]()
    for product in clock.of_kind("product"):
        copy = arrived[product.step]
        assert copy.slot == product.slot and copy.end <= product.start
        assert last.get(copy.slot, 0.0) <= copy.start
        last[copy.slot] = product.end


@pytest.mark.parametrize(("rung", "ahead", "slots"), [("k05", 0, 1), ("k06", 2, 2), ("k08", 2, 3), ("k09", 2, 3)])
def test_loads_and_products(rung: str, ahead: int, slots: int) -> None:
    loop = Loop.of(rung)
    assert (loop.ahead, loop.slots) == (ahead, slots)
    clock = replay.tile_after_tile(rung, 3, 8) if rung == "k09" else replay.pipelined(rung, 12)
    in_order(clock)
    assert len(clock.of_kind("product")) == len(clock.of_kind("copy")) == (24 if rung == "k09" else 12)


@pytest.mark.parametrize(("rung", "lost"), [("k06", "wait"), ("k08", "wait"), ("k08", "dot wait")])
def test_a_loop_that_does_not_wait_is_not_in_order(rung: str, lost: str) -> None:
    loop, clock = Loop.of(rung), Clock.of(rung)
    replace(loop, body=tuple(one for one in loop.body if one.name != lost)).run(clock, 12)
    with pytest.raises(AssertionError):
        in_order(clock)


def test_k06_hides_what_k05_waits_for() -> None:
    """The share of the time in which the units multiply, from the end of the first product."""
    busy = {}
    for rung in ("k05", "k06"):
        first, *products = replay.pipelined(rung, 8).of_kind("product")[:6]
        busy[rung] = sum(bar.end - bar.start for bar in products) / (products[-1].end - first.end)
    assert busy["k05"] < 0.75 < 0.99 < busy["k06"] <= 1


def test_k09_asks_for_the_next_tile_before_it_stores_this_one() -> None:
    trace = traces.recorded()["k09"]
    assert trace["programs"] == [list(range(program, 14, 4)) for program in range(4)]
    each = trace["k_tiles"]
    k08, k09 = (replay.tile_after_tile(rung, 3, each) for rung in ("k08", "k09"))
    first_store = k09.of_kind("store")[0]
    next_tile = [bar for bar in k09.of_kind("copy") if bar.step >= each]
    assert next_tile[0].start < next_tile[1].start < first_store.start
    assert len(k08.of_kind("store")) == len(k09.of_kind("store")) == 3 and k09.now < k08.now


def test_boxes_and_swizzle_of_tma() -> None:
    assert traces.boxes() == {"a": [128, 64], "b": [64, 64]}
    swizzle = traces.recorded()["k10"]["swizzle"]
    assert all(sorted(row) == list(range(8)) for row in swizzle)
    assert all(sorted(column) == list(range(8)) for column in zip(*swizzle, strict=True))


def test_roles_of_k11(monkeypatch: pytest.MonkeyPatch) -> None:
    trace = traces.recorded()["k11"]
    assert trace["right"]
    ring = replay.ring()
    in_order(ring.clock)
    assert len(ring.clock.of_kind("product")) == 16 and len(ring.clock.of_kind("store")) == 2
    assert ring.slots == RUNGS["k11"].configs[0].num_stages
    store = ring.clock.of_kind("store")[0]
    assert any(bar.step == 8 and bar.end <= store.start for bar in ring.clock.of_kind("copy"))
    assert any(bar.step == 8 and bar.start < store.end for bar in ring.clock.of_kind("product"))
    for role in ("load", "mma"):
        careless = {**trace, role: [step for step in trace[role] if step[0] != "wait"]}
        monkeypatch.setattr(traces, "recorded", lambda careless=careless: {"k11": careless})
        with pytest.raises(AssertionError):
            in_order(replay.ring().clock)
