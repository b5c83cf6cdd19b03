"""The page that plays: its counts are those of the drawings, and it plays in a browser."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from perf.ladder import player
from perf.ladder.drawings import pictures, replay, traces
from tests.perf.test_explorer import BROWSER, opened, posted
from triton_gemm.ladder.exercises.player import page, rectangles, scene


@pytest.fixture(scope="module")
def scenes() -> dict[str, dict[str, Any]]:
    return {scene["name"]: scene for scene in player.scenes()}


def caption(rung: str) -> str:
    return pictures.path(rung).read_text().partition("<desc>")[2].partition("</desc>")[0]


@pytest.mark.full
def test_what_is_drawn_in_time_or_place_is_played(scenes: dict[str, dict[str, Any]]) -> None:
    assert tuple(scenes) == player.PLAYED
    assert len(page([*scenes.values()])) < 100_000


@pytest.mark.parametrize(
    ("rung", "operand", "wavefronts", "l1"),
    [("k01", "a", 32, "Wavefronts are what L1 takes: 32 for this load"), ("k02", "b", 4, "L1 needs 4 wavefronts for")],
)
def test_a_warps_sectors_are_those_of_the_drawing(
    scenes: dict[str, Any], rung: str, operand: str, wavefronts: int, l1: str
) -> None:
    access, steps = traces.load_of(rung, operand), scenes[rung]["steps"]
    assert len(steps) == traces.WARP
    moved = [cell for step in steps for cell in step["cells"] if cell[1] == "moved"]
    assert len(moved) == len(access.sectors)
    total = 32 * len(moved)
    sentence = f"Sectors moved: {len(moved)}, of 32 bytes. Of {total} bytes the load uses {access.used}."
    assert steps[-1]["says"].endswith(sentence)
    used = "them all" if access.used == total else f"{access.used} of these"
    assert f"touches {len(moved)} sectors of 32 bytes, {total} bytes in all, and uses {used}." in caption(rung)
    assert scenes[rung]["note"].endswith(f"L1 takes this load in {wavefronts} wavefronts.")
    assert l1 in caption(rung)


@pytest.mark.parametrize(("rung", "strips"), [("k03", 259), ("k04", 91)])
def test_a_wave_has_the_strips_of_the_drawing(scenes: dict[str, Any], rung: str, strips: int) -> None:
    steps = scenes[rung]["steps"]
    assert steps[-1]["says"].startswith("660 programs need ") and f"= {strips} tiles" in steps[-1]["says"]
    assert str(strips) in caption("k04")
    tiles = sum(cell[4] * cell[5] for step in steps for cell in step["cells"] if cell[0] == "c")
    assert tiles == 660


@pytest.mark.parametrize("rung", ["k06", "k08", "k09", "k11"])
def test_bars_are_those_of_the_clock(scenes: dict[str, Any], rung: str) -> None:
    clocks = {"k09": lambda: replay.tile_after_tile("k09", 3, 8), "k11": lambda: replay.ring().clock}
    clock = clocks.get(rung, lambda: replay.pipelined(rung, {"k06": 8, "k08": 10}.get(rung, 0)))()
    scene = scenes[rung]
    for what, kind in (("product", "product"), ("copy", player.LOAD), ("store", "store")):
        played = [(bar[2], bar[3]) for bar in scene["bars"] if bar[1] == kind and not bar[5]]
        drawn = [(bar.start, bar.end) for bar in clock.of_kind(what)]
        assert sorted(played) == sorted(drawn)
    assert scene["end"] == max(bar[3] for bar in scene["bars"])


def test_elements_are_few_rectangles() -> None:
    assert rectangles([0, 0, 1, 1, 3], [4, 5, 4, 5, 4]) == [(0, 4, 2, 2), (3, 4, 1, 1)]
    assert rectangles([2, 2], [0, 2]) == [(2, 0, 1, 1), (2, 2, 1, 1)]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("name", ["k04", "k11"])
def test_it_plays_by_keyboard_on_a_phone_in_the_dark(scenes: dict[str, Any], name: str, tmp_path: Path) -> None:
    text = page([*scenes.values()])
    assert not re.search(r"https?:|src=|<link|@import|fetch\(", text)  # it asks for nothing else
    script = """<script>
      const key = (name) => dispatchEvent(new KeyboardEvent("keydown", { key: name }));
      const seen = { first: at, rects: element("picture").querySelectorAll("rect").length };
      key("ArrowRight"); key("ArrowRight"); key("ArrowLeft");
      seen.one = at; key(" ");
      setTimeout(() => {
        seen.playing = at; key(" ");
        element("place").value = last(); element("place").oninput({ target: element("place") });
        Object.assign(seen, { width: innerWidth, wide: document.documentElement.scrollWidth, hash: location.hash,
          says: element("says").textContent, dark: getComputedStyle(document.body).backgroundColor,
          more: element("picture").querySelectorAll("rect").length, chosen: element("scene").value });
        parent.postMessage(JSON.stringify(seen), "*");
      }, 3000);
    </script></html>"""
    dark = "--blink-settings=preferredColorScheme=0"
    seen = posted(text.replace("</html>", script), tmp_path, f"#{name}", dark, script="", width=390)
    assert (seen["first"], seen["one"], seen["chosen"]) == (0, 1, name) and seen["playing"] > 3
    assert seen["wide"] <= seen["width"] == 390 and seen["more"] > seen["rects"]
    assert max(map(int, re.findall(r"\d+", seen["dark"]))) < 64
    steps = scenes[name].get("steps")
    assert seen["hash"] == f"#{name}-{len(steps) - 1 if steps else 240}"
    assert seen["says"] == steps[-1]["says"] if steps else "loads: 16 ended; products: 16 ended" in seen["says"]


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize(("wrong", "fragment", "place"), [("it is wrong.", "", 2), (None, "", 0), ("no.", "#own-1", 1)])
def test_a_wrong_run_opens_at_its_last_step(wrong: str | None, fragment: str, place: int, tmp_path: Path) -> None:
    grid = {"name": "a", "label": "a", "rows": 1, "columns": 3, "x": 0, "y": 0}
    steps = [{"says": f"step {i}.", "cells": [("a", "load", 0, i, 1, 1)]} for i in range(3)]
    text = page([scene("own", "One run", grids=[grid], steps=steps, wrong=wrong)])
    assert f">step {place}.</" in opened(text, tmp_path, fragment)
