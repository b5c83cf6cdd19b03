"""The page to play with: its figures are those of the package's functions, and what cannot run says why."""

from __future__ import annotations

import json
import random
import re
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from perf.ladder import explorer
from triton_gemm.hardware.device_model import model_of
from triton_gemm.kernels import portable
from triton_gemm.ladder import k04_grouped
from triton_gemm.selection.select import credible

BROWSER = shutil.which("chromium") or shutil.which("google-chrome")


@pytest.fixture(scope="module")
def found() -> explorer.Explored:
    return explorer.explored()


def points(count: int) -> list[dict[str, Any]]:
    draw = random.Random(0)
    return [{axis: draw.choice(values) for axis, values in explorer.AXES.items()} for _ in range(count)]


def test_a_time_is_the_models_where_a_configuration_can_run(found: explorer.Explored) -> None:
    can_run = 0
    for point in points(2000):
        problem, device = explorer.problem_of(point["precision"], point["shape"], point["gpu"])
        config = portable.Config(*(point[axis] for axis in explorer.CHOICES))
        why = portable.illegal(problem, device, config)
        assert found.at("illegal", **point) == (why or "")  # of every shape, though it is kept for one
        time = found.at("time", **point)
        if why is not None:
            assert time == 0
            continue
        can_run += 1
        predicted = credible(portable.microseconds(problem, config, 1, model_of(device)), problem, device)
        assert time == pytest.approx(predicted, rel=0.006)
        speed = found.at("flop", **point) / time / 1e6
        assert speed <= 1.01 * min(found.at(f"most by {limit}", **point) for limit in ("units", "memory"))
    assert 500 < can_run < 1500


@pytest.mark.parametrize(
    ("gpu", "tile", "why"),
    [
        ("rtx4090", (128, 128, 64, 8, 5), "needs 131328 bytes of shared memory, NVIDIA GeForce RTX 4090 has 101376"),
        ("a100", (128, 128, 64, 8, 5), ""),
        ("h100", (256, 256, 32, 8, 2), "256 accumulators leave too few of a thread's 256 registers"),
    ],
)
def test_what_cannot_run_says_why(found: explorer.Explored, gpu: str, tile: tuple[int, ...], why: str) -> None:
    assert found.at("illegal", gpu=gpu, precision="half", **dict(zip(explorer.CHOICES, tile, strict=True))) == why


def test_figures_by_hand(found: explorer.Explored) -> None:
    point = {"gpu": "h100", "precision": "half", "shape": (4096, 4096, 4096), "BLOCK_M": 128, "BLOCK_N": 128}
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
    assert found.at("most by units", **point) == 989
    assert found.at("measured", gpu="h100") and not found.at("measured", gpu="rtx4090")


def test_the_order_of_tiles_is_the_ladders(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(k04_grouped, "tl", SimpleNamespace(minimum=min))
    order = [k04_grouped.grouped_pid.fn(tile, 10, 7, 4) for tile in range(70)]
    assert list(explorer.grouped(10, 7, 4)) == order


def test_the_fastest_is(found: explorer.Explored) -> None:
    for gpu, precision in (("a100", "tf32"), ("b200", "int8")):
        where = {"gpu": gpu, "precision": precision, "shape": (16, 14336, 4096)}
        best = found.at("best", **where)
        choices = {axis: explorer.AXES[axis][place] for axis, place in zip(explorer.CHOICES, best, strict=True)}
        time = found.at("time", **where, **choices)
        others = (found.at("time", **{**point, **where}) for point in points(500))
        assert 0 < time <= min(other for other in others if other)


def test_the_page_is_one_small_file_with_every_figure(found: explorer.Explored, tmp_path: Path) -> None:
    page = explorer.page(found)
    assert len(page) < 2**20
    assert not re.search(r"https?:|src=|<link|@import|fetch\(", page)  # it asks for nothing else
    (data,) = re.findall(r"^const DATA = (.*);$", page, re.MULTILINE)
    assert json.loads(data) == json.loads(json.dumps(found.as_dict()))
    looked_up = set(re.findall(r'at\("(\w+)"', page))
    assert {"illegal", "time", "programs", "chosen"} <= looked_up <= found.tables.keys()
    assert len(found.tables["time"].values) == 6 * 4 * 3 * 5 * 5 * 4 * 2 * 5


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
def test_a_browser_shows_what_python_looks_up(found: explorer.Explored, tmp_path: Path) -> None:
    page, point = explorer.page(found), {"gpu": 5, "precision": 1, "shape": 2, "BLOCK_M": 1, "BLOCK_N": 2}
    point |= {"BLOCK_K": 3, "num_warps": 0, "num_stages": 0, "GROUP_M": 1}
    path = tmp_path / "page.html"
    path.write_text(page.replace("\nstart();", f"\nObject.assign(state, {json.dumps(point)});\nstart();"))
    command = [str(BROWSER), "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom", path.as_uri()]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    where = {axis: explorer.AXES[axis][place] for axis, place in point.items()}
    at = {**where, "programs": found.at("programs", **where)}
    (verdict,) = re.findall(r'<div id="verdict"[^>]*>(.*?)</div>', done.stdout, re.DOTALL) or [done.stderr]
    assert f"<strong>{found.at('time', **where):g} us</strong>" in verdict
    for figure in ("registers", "programs", "patch", "bytes_per_flop"):
        assert f"<td>{found.at(figure, **at)}</td>" in done.stdout
    assert "trust the order, not the times" in verdict
