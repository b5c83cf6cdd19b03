"""perf.bench alone: which candidates it times, and what the model's choices lose in its committed records."""

from __future__ import annotations

import csv
from collections.abc import Sequence
from functools import partial
from itertools import chain, repeat
from statistics import fmean
from typing import Any

import pytest

from perf.bench import alone
from perf.calibrate.times import PRODUCT
from perf.measure import environment
from tests.support.lab_fakes import CPU, others, small
from tests.support.lab_fakes import no_gpu as no_gpu
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.selection.select import select
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tables.records import named
from triton_gemm.tuning.gpu import Gpu
from triton_gemm.tuning.journal import Journal

HOPPER = named_device("h100")


@pytest.fixture(autouse=True)
def clusters(monkeypatch: pytest.MonkeyPatch) -> None:
    """As with the Triton of the records."""
    monkeypatch.setattr(alone.policies, "choose", select)
    monkeypatch.setattr(alone.policies, "by_model", select)  # neither remembers choices without clusters
    monkeypatch.setattr(forms, "CLUSTERS", True)


def test_a_candidate_of_each_tile_and_cluster() -> None:
    problem = gemm_problem(alone.PRODUCTS[1], "bf16")
    found = alone.of_each_tile(problem, HOPPER, alone.CANDIDATES)
    assert select(problem, HOPPER).algorithm in {x.algorithm for x in found}
    configs: list[Any] = [x.config for x in found]
    kinds = [(x.BLOCK_M, x.BLOCK_N, x.ctas) for x in configs]
    assert len(set(kinds)) >= len(kinds) - 2 >= 6, "the choices of table and model may be of one kind with another"
    assert len(alone.of_each_tile(problem, HOPPER, 2)) == 2


def test_what_a_block_tells(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of the second half, when the clock has fallen."""

    times = chain(repeat(1.0, 32), repeat(2.0))
    monkeypatch.setattr(alone, "clock_mhz", lambda: lambda: 1500.0)
    assert alone.alone(lambda: partial(next, times), 4.0) == (2.0, 1500.0)


@pytest.mark.usefixtures("no_gpu")
def test_products_are_measured_in_turns_and_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(alone, "clock_mhz", lambda: lambda: 1500.0)
    monkeypatch.setattr(alone, "settle", lambda *_: None)
    lab = Gpu(CPU, Journal(None, "1"), "any", "graph")
    found = list(alone.measure(lab, small(), others(small())))
    assert [row[1] for row in found] == [alone.CUBLAS, *map(named, others(small()))]
    assert {tuple(row[2:]) for row in found} == {("1000", "1.000", "1000", "1.000", "1500")}


def regrets(gpu: str, column: str) -> Sequence[float]:
    """What the model's choices lose, of those that were measured."""
    times: dict[str, dict[str, float]] = {}
    with (environment.RESULTS / gpu / alone.FILE).open(newline="") as opened:
        for row in csv.DictReader(opened):
            if row["candidate"] != alone.CUBLAS:
                times.setdefault(row["product"], {})[row["candidate"]] = float(row[column])
    device = named_device("h200" if gpu == "h200" else "h100")
    found = []
    for product, own in times.items():
        words = PRODUCT.fullmatch(product)
        assert words is not None
        _, M, N, K, _, layout, _ = words.groups()
        choice = named(select(gemm_problem(Shape(int(M), int(N), int(K), layout=layout), "bf16"), device))
        whole = {name: us for name, us in own.items() if "parts" not in name}  # others are of other bits
        if choice in whole:
            found.append(whole[choice] / min(whole.values()) - 1)
    return found


@pytest.mark.parametrize(("gpu", "turns", "by_itself"), [("h100-80gb-hbm3", 0.005, 0.01), ("h200", 0.015, 0.025)])
def test_choices_are_good_in_turns_and_alone(gpu: str, turns: float, by_itself: float) -> None:
    for column, most in (("turns_us", turns), ("alone_us", by_itself)):
        found = regrets(gpu, column)
        assert len(found) >= 12 and fmean(found) <= most and max(found) < 0.06, (column, fmean(found), max(found))
