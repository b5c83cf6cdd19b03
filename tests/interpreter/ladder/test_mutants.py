"""The checks can fail: every planted bug is caught by what the rungs pass."""

from collections.abc import Callable
from pathlib import Path

import pytest

from tests.support.awkward_sizes import SMALL, STRIPS
from tests.support.kernel_mutants import MUTANTS, Mutant, mutant
from tests.support.product_checks import battery, of_rung
from tests.support.tiers import one


def steps(planted: Mutant, launch: Callable[..., object] | None) -> dict[str, Callable[[], None]]:
    """What is asked of a rung, on a few sizes that show every edge, with small tiles in high bands."""
    rung = planted.original
    if rung.id in ("k01", "k02"):
        sizes = {name: STRIPS[name] for name in ("ragged", "k-one")}
    else:
        sizes = {name: SMALL[name] for name in ("ragged", "ragged-many-tiles", "k-one", "turned")}
    config = min(rung.configs, key=lambda config: (config.accumulators() * config.num_warps, -(config.GROUP_M or 0)))
    return battery(of_rung(rung, rung.dtypes[0], config, launch=launch), sizes)


def killer(planted: Mutant, launch: Callable[..., object]) -> str | None:
    """The first check that the mutant fails, or None if it survives."""
    for name, check in steps(planted, launch).items():
        try:
            check()
        except AssertionError:
            return name
    return None


@pytest.mark.parametrize("name", MUTANTS)
def test_the_mutant_is_caught(name: str, tmp_path: Path) -> None:
    planted = MUTANTS[name]
    assert killer(planted, planted.load(tmp_path).launch), "it survives every check"


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("rung", sorted({planted.rung for planted in MUTANTS.values()}))
def test_an_unchanged_copy_survives(rung: str, tmp_path: Path) -> None:
    """So that it is the bug that is caught, and not the way a mutant is made."""
    planted = mutant(rung)
    assert killer(planted, planted.load(tmp_path).launch) is None
