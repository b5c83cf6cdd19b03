"""When a race pays, and what may be spent."""

from __future__ import annotations

import pytest

from tests.support.table_fakes import problem_of
from triton_gemm.learning.statistics import COST, GAIN, LEAST_CALLS, SHARE, Product, Tempo
from triton_gemm.selection.select import Selection


def product(calls: int, **how: float) -> Product:
    selection: Selection = None  # type: ignore[assignment]  # no matter
    return Product(problem_of(), selection, 0, 20.0, 0.0, calls, **how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("calls", "seconds", "pays"),
    [
        (LEAST_CALLS - 1, 1.0, False),
        (LEAST_CALLS, 1.0, True),  # as many each second
        (1000, 10.0, True),
        (1000, 100.0, False),  # in ten minutes 6000 more
        (int(COST / GAIN) + 1, 1e6, True),  # it was called long enough
        (int(COST / GAIN) - 1, 1e6, False),
    ],
)
def test_a_race_pays_where_calls_go_on(calls: int, seconds: float, pays: bool) -> None:
    assert product(calls).pays(seconds) == pays
    assert not product(calls, over=True).pays(seconds)
    assert not product(calls, not_before=seconds + 1).pays(seconds)


def test_races_have_a_share_of_the_time() -> None:
    tempo = Tempo(of_calls=1000.0)
    assert tempo.allows(SHARE * 1000) and not tempo.allows(SHARE * 1000 + 1)
    tempo.spent = 5.0
    assert tempo.allows(SHARE * 1000 - 5) and not tempo.allows(SHARE * 1000)
