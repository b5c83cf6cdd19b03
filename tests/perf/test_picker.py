"""The page on which a reader guesses: it shows what the records say, and what is offered gives nothing away."""

from __future__ import annotations

import base64
import gzip
import json
import math
import random
import re
from pathlib import Path
from typing import Any

import pytest
import torch

from perf.common.files import read_json
from perf.ladder import explorer, picker
from perf.measure.environment import RESULTS
from tests.perf.test_explorer import BROWSER, posted
from tests.perf.test_limits import row as limits_row
from triton_gemm import kernels
from triton_gemm.hardware.gpus import bandwidth, named_device
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem
from triton_gemm.reporting.explanation import described


@pytest.fixture(scope="module")
def found() -> list[dict[str, Any]]:
    return picker.found()


def test_six_are_offered_the_fastest_and_the_choice_among_them(found: list[dict[str, Any]]) -> None:
    """In an order in which the fastest stands anywhere."""
    places = []
    for one in (one for gpu in found for one in gpu["puzzles"]):
        offered = one["offered"]
        assert len({*offered}) == picker.OFFERED and {0, one["choice"]} <= {*offered}
        kinds = [picker.kind(one["names"][place]) for place in offered]
        assert len({*kinds}) >= picker.OFFERED - (one["choice"] != 0)  # only these two may differ in how K is cut alone
        assert one["us"] == sorted(one["us"]) and len(one["us"]) == len(one["names"]) == len(one["work"])
        places.append(offered.index(0))
    assert len(places) > 600 and all(places.count(place) > 0.12 * len(places) for place in range(picker.OFFERED))


@pytest.mark.parametrize(
    ("name", "work"),
    [
        ("warp_specialised 64x144x64 4 warps 7 stages cluster 4x2, 1 tiles in 15 parts", (8, 120, 440)),
        ("warp_specialised 64x96x128 4 warps 4 stages, 9 tiles in 14 parts", (9, 126, 1320)),
        ("warp_specialised 128x64x64 8 warps 5 stages, 2 tiles in 3 parts, swap_ab", (9, 13, 1320)),
        ("portable 64x64x64 4 warps 3 stages", (15, 15, 1656)),
        ("portable 64x64x64 group 8 4 warps 3 stages, K in 3 parts", (15, 45, 1656)),
        ("gemv 16 warps", None),
    ],
)
def test_pieces_of_work(name: str, work: tuple[int, int, int] | None) -> None:
    """Of 168 x 272: cut tiles count once for each part, and a cluster's tiles are cut together and load once."""
    assert picker.work(name, 168, 272) == work


def test_the_page_is_one_file_of_what_the_records_have(found: list[dict[str, Any]]) -> None:
    page = picker.filled(picker.TEMPLATE, found)
    assert len(page) < 2**19 and not re.search(r"https?:|src=|<link|@import|fetch\(", page)
    (data,) = re.findall(r'id="data">(.*)</script>', page)
    assert json.loads(gzip.decompress(base64.b64decode(data))) == json.loads(json.dumps(found))
    record = read_json(RESULTS / "h200" / "tuning" / "3.9.0" / "unseen-11.json")
    product = random.Random(1).choice([x for x in record["products"] if "nt" in x["product"] and len(x["times"]) > 20])
    (h200,) = (gpu for gpu in found if gpu["name"] == "NVIDIA H200")
    (one,) = (x for x in h200["puzzles"] if product["product"].startswith("x".join(map(str, x["sizes"])) + " "))
    assert [*map(list, zip(one["us"], one["names"], strict=True))] == product["times"]
    memory, units = h200["peaks"]
    assert (memory, f"{units / 1e6:.0f}") == (bandwidth(named_device("h200")), limits_row("H200")[4])
    assert picker.peaks("NVIDIA of another name") is None
    assert (one["torch"], one["names"][one["choice"]]) == (product["torch_us"], product["choice"])


def items(name: str, problem: GemmProblem) -> int:
    """Programs of a candidate's launch, or where these go from item to item, all items; read back from its name."""
    found = re.match(
        r"(\w+) (\d+)x(\d+)x(\d+)(?: group (\d+))? (\d+) warps (\d+) stages(?: cluster (\d)x(\d))?"
        r"(?:, (?:(\d+) tiles|K) in (\d+) parts)?",
        name,
    )
    assert found is not None
    kernel, *figures = found.groups()
    m, n, k, group, warps, stages, *cluster, tiles, parts = (int(x or 0) for x in figures)
    module, more = kernels.named(kernel), [group] * (group > 0) + cluster * (cluster[0] > 0)
    problem = kernels.repack.repacked(problem, tuple(x for x in "ab" if f"{x} repacked" in name))
    problem = problem.swap_ab() if "swap_ab" in name else problem
    programs = kernel != "warp_specialised"
    work = parts or 1 if programs else Schedule(2**31, tiles, parts or 1, reduction="second launch" in name)
    first, *_ = module.launches(problem, module.Config(m, n, k, warps, stages, *more), work)
    return math.prod(first.grid) if programs else first.arguments["num_items"]


def test_pieces_are_what_a_launch_has(found: list[dict[str, Any]]) -> None:
    """Of the offered candidates of a hundred GEMMs, of which some cut K for all of their tiles."""
    drawn = random.Random(2).sample([one for gpu in found for one in gpu["puzzles"]], 100)
    names = set()
    for one in drawn:
        (M, N, K), work = one["sizes"], one["work"]
        problem, *_ = described(M=M, N=N, K=K, dtype=torch.bfloat16, layout=one["layout"], device="h100")
        for place in (place for place in one["offered"] if work[place] is not None):
            name = one["names"][place]
            names.add(name)
            assert work[place][1] == items(name, problem), (name, one["sizes"])
    assert sum(", K in " in name for name in names) > 20 and sum(" tiles in " in name for name in names) > 100


def test_every_word_of_a_candidate_is_explained(found: list[dict[str, Any]]) -> None:
    """Behind tile, warps and stages; and links lead to pages."""
    text = picker.TEMPLATE.read_text()
    patterns = re.findall(r'^  \[/(.+?)/, "', text, re.MULTILINE)
    for name in {name for gpu in found for one in gpu["puzzles"] for name in one["names"]}:
        rest = re.sub(r"\d+x\d+x\d+|\d+ (warps|stages)", "", name)
        for part in re.split(r", | (?=cluster|group)", rest):
            assert any(re.search(pattern, name) and re.search(pattern.strip(", ^"), part) for pattern in patterns), part
    for page in (picker.TEMPLATE, explorer.TEMPLATE):
        links = re.findall(r'href="([^"#$]+)"', page.read_text())
        assert links and all((picker.PAGE.parent / link).resolve().is_file() for link in links)


def test_a_glitch_is_not_offered(found: list[dict[str, Any]]) -> None:
    all_us = [(one["us"], one["offered"]) for gpu in found for one in gpu["puzzles"]]
    glitches = [offered for us, offered in all_us if us[-1] > picker.GLITCH * us[-2] and len(us) - 1 in offered]
    assert not glitches and sum(us[-1] > picker.GLITCH * us[-2] for us, _ in all_us) > 20
    assert f"more than {picker.GLITCH} times as long as the next one, it is not among" in picker.TEMPLATE.read_text()


@pytest.mark.skipif(BROWSER is None, reason="there is no Chromium")
@pytest.mark.parametrize("width", [390, 1400])
def test_a_guess_shows_all_times(found: list[dict[str, Any]], tmp_path: Path, width: int) -> None:
    script = """const before = document.body.textContent;
      document.querySelectorAll("td button")[2].click();
      const rows = document.querySelectorAll("#candidates tr").length;
      const facts = element("facts").innerText, wide = document.documentElement.scrollWidth;
      parent.postMessage(JSON.stringify({ before, rows, facts, wide, hash: location.hash,
        words: [...document.querySelectorAll("#words i")].map((word) => word.innerText),
        after: element("verdict").textContent, score: element("score").textContent }), "*");"""
    seen = posted(picker.filled(picker.TEMPLATE, found), tmp_path, "#h100-17", script=script, width=width)
    (h100,) = (gpu for gpu in found if "H100" in gpu["name"])
    one = h100["puzzles"][17]
    slower, model = (one["us"][place] / one["us"][0] - 1 for place in (one["offered"][2], one["choice"]))
    assert "Guess the fastest." in seen["before"] and f"{one['us'][1]:.3g}" not in seen["before"].partition("SMs.")[2]
    for words in (f"Your guess is {100 * slower:.1f} % slower", f"choice {100 * model:.1f} %"):
        assert words in seen["after"]
    assert seen["rows"] == len(one["us"]) + 1 + (one["torch"] is not None) and "After 1 GEMM:" in seen["score"]
    _, pieces, loaded = one["work"][0]
    shown = [float(re.sub("[ %,]", "", line.split("\t")[1])) for line in seen["facts"].splitlines()[1:]]
    last = 100 * ((pieces - 1) % h100["sms"] + 1) / h100["sms"]
    figures = [one["us"][0], pieces / h100["sms"], last, 2 * one["sizes"][2] * loaded / 1e6]
    assert shown == pytest.approx(figures, rel=0.01)
    kernels_of = {name.partition(" ")[0] for name in one["names"]}
    assert kernels_of <= {*seen["words"]} and ("swap_ab" in seen["words"]) == any("swap_ab" in x for x in one["names"])
    assert seen["wide"] <= width and seen["hash"] == "#h100-17"
