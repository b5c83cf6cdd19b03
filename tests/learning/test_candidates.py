"""What is raced: of the incumbent's class of bits, and predicted to be nearly as fast."""

from __future__ import annotations

from dataclasses import replace

import pytest

from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm.kernels import forms
from triton_gemm.learning import candidates as module
from triton_gemm.learning.candidates import SLOWER, candidates
from triton_gemm.learning.halving import MOST
from triton_gemm.runtime import kits
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import select


@pytest.mark.parametrize("sizes", [(4, 8192, 2048), (64, 4096, 4096), (333, 4096, 4096), (2048, 1024, 512)], ids=str)
def test_candidates_are_alike_and_near(sizes: tuple[int, int, int]) -> None:
    problem = problem_of(*sizes)
    incumbent = select(problem, HOPPER)
    (own_us, first), *others = candidates(problem, HOPPER, incumbent)
    assert first is incumbent and 1 <= len(others) < MOST
    assert [us for us, _ in others] == sorted(us for us, _ in others)
    assert {bit_class(problem, x) for _, x in others} == {bit_class(problem, incumbent)}
    assert len({x.algorithm for _, x in [(own_us, first), *others]}) == 1 + len(others)
    for us, x in others:
        assert us <= SLOWER * own_us and x.source == "user's table" and not x.kit
        assert module.predicted_us(problem, HOPPER, x) == us


def test_of_a_kit_of_another_triton_all_are_the_kits(monkeypatch: pytest.MonkeyPatch) -> None:
    problem = problem_of(64, 4096, 4096)
    monkeypatch.setattr(kits, "others", lambda _: ["3.9"])
    held: list[bool] = []

    def holds(problem: object, device: object, selection: object, foreign: bool = False) -> bool:
        held.append(foreign)
        return len(held) % 2 == 1

    monkeypatch.setattr(kits, "holds", holds)
    with forms.of_kits():
        incumbent = select(problem, HOPPER)

    incumbent = replace(incumbent, kit=True)
    _, *others = candidates(problem, HOPPER, incumbent)
    assert others and all(x.kit for _, x in others) and all(held)
