"""Today's choices against the committed ones: what counts as slower, which race is taken, and the command. And against
kernels that ran alone."""

from __future__ import annotations

import csv
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from statistics import fmean

import pytest

from perf import choices
from perf.calibrate.times import PRODUCT
from perf.measure.environment import RESULTS, slug
from perf.tuning.runs import listed, suites
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.selection.select import select
from triton_gemm.suites import SUITES
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named

H100 = "NVIDIA H100 80GB HBM3"
RACES = {"x": [{"a": 10.0, "b": 10.5}, {"a": 10.0, "c": 9.0}], "y": [{"b": 1.0}]}


def lost(today: Mapping[str, str], before: Mapping[str, str]) -> list[float | None]:
    return [x.lost for x in choices.compared(today, before, RACES)]


def test_both_choices_are_taken_from_one_race() -> None:
    assert lost({"x": "b", "y": "b"}, {"x": "a"}) == [pytest.approx(0.05), 0]
    assert lost({"x": "c"}, {"x": "a"}) == [pytest.approx(-0.1)], "of an older race, as the newest has no c"
    assert lost({"x": "c"}, {"x": "b"}) == lost({"y": "a"}, {}) == lost({"z": "a"}, {}) == [None]
    assert lost({"x": "b"}, {"x": "b"}) == [0]


def found(*lost: float | None) -> list[choices.Found]:
    return [choices.Found(f"product {i}", "a", "b", x) for i, x in enumerate(lost)]


def test_limits() -> None:
    good = found(*[0.0] * 100)
    assert not choices.exceeded(good + found(0.019, -0.2)) and not choices.exceeded(good + found(*[None] * 3))
    [one] = choices.exceeded(good + found(0.021))
    assert one == "product 0: a -> b is 2.1 % slower"
    [mean] = choices.exceeded(found(*[0.004] * 10))
    assert "0.4 % slower in the mean" in mean
    [unknown] = choices.exceeded(good + found(*[None] * 4))
    assert "4 of 104 choices" in unknown


def test_the_newest_race_comes_first(tmp_path: Path) -> None:
    for day, gpu, triton in ((1, H100, "3.9.0"), (2, H100, "3.9.0"), (3, H100, "3.8.0"), (4, "NVIDIA H200", "3.9.0")):
        write(tmp_path, f"{day}-{triton}", {"x": {"a": float(day)}}, day, gpu, triton)
    assert choices.timed_products(H100, tmp_path) == {"x": [{"a": 2.0}, {"a": 1.0}]}


def write(
    results: Path, name: str, times: Mapping[str, Mapping[str, float]], day: int, gpu: str = H100, triton: str = "3.9.0"
) -> None:
    products = [{"product": x, "times": [[us, candidate] for candidate, us in of.items()]} for x, of in times.items()]
    made = {"gpu": gpu, "triton": triton, "date": f"2026-11-0{day}"}
    file = results / slug(gpu) / "tuning" / triton / f"{name}.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps({"environment": made, "products": products}))


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """With the choices of this Triton."""
    monkeypatch.setattr(choices, "RESULTS", tmp_path)
    today = choices.chosen(H100)
    monkeypatch.setattr(choices, "chosen_as_recorded", lambda: {H100: today})
    (tmp_path / slug(H100)).mkdir()
    assert choices.main([]) == 1 and "timed in no trial" in capsys.readouterr().err
    assert choices.main(["--missing", "h100"]) == 0 and capsys.readouterr().out.splitlines() == list(today)
    committed = tmp_path / slug(H100) / choices.FILE
    assert choices.main(["--changes"]) == 1 and choices.main(["--update", "--changes"]) == 0
    assert choices.main(["--changes"]) == 0, "what is as committed needs no race"
    write(tmp_path, "suites", {product: {choice: 10.0, "faster": 9.0} for product, choice in today.items()}, 1)
    assert choices.main([]) == choices.main(["--update"]) == choices.main([]) == 0
    product, choice = next(iter(today.items()))
    text = committed.read_text()
    assert f"{product},{choice}" in text
    committed.write_text(text.replace(f"{product},{choice}", f"{product},faster"))
    capsys.readouterr()
    for options in ([], ["--changes"]):
        assert choices.main(options) == 1
        assert f"{product}: faster -> {choice} is 11 % slower" in capsys.readouterr().err


def test_choices_are_those_of_the_recorded_triton() -> None:
    """In a process where Triton is what it was for the records: with clusters, and the shipped table."""
    found = choices.chosen_as_recorded()
    assert found.keys() == choices.GPUS.keys()
    for gpu in found:
        assert sum(" cluster " in choice for choice in found[gpu].values()) > 50


def test_all_suites_are_in_the_run() -> None:
    plain = {shape.key for suite in SUITES.values() if suite.mode is None for shape in suite.shapes}
    assert set(listed()) <= set(suites()) and len(suites()) > 0.8 * len(plain)


@pytest.mark.parametrize(("gpu", "turns", "alone"), [("h100-80gb-hbm3", 0.005, 0.01), ("h200", 0.015, 0.025)])
def test_choices_are_good_in_turns_and_alone(
    gpu: str, turns: float, alone: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Alone, a kernel has the clock that its power allows. Of candidates that cut no sum."""
    monkeypatch.setattr(forms, "CLUSTERS", True)  # as with the Triton that they were measured on
    measured = csv.DictReader((RESULTS / gpu / "alone.csv").read_text().splitlines())
    rows = [row for row in measured if row["candidate"] != "cuBLAS" and "parts" not in row["candidate"]]
    device = named_device(gpu.partition("-")[0])
    for column, most in (("turns_us", turns), ("alone_us", alone)):
        found = []
        for product, of in groupby(rows, key=lambda row: row["product"]):
            us = {row["candidate"]: float(row[column]) for row in of}
            _, M, N, K, _, layout, _ = PRODUCT.fullmatch(product).groups()  # type: ignore[union-attr]
            choice = named(select(gemm_problem(Shape(int(M), int(N), int(K), layout=layout)), device))
            found += [us[choice] / min(us.values()) - 1] if choice in us else []
        assert len(found) >= 12 and fmean(found) <= most and max(found) < 0.06, (column, fmean(found), max(found))
