"""Two tiers of tests: `make test` runs the fast one, `make test-all` (`pytest --tier=full`) all of them.

A test is in the fast tier unless it is marked:

    @pytest.mark.full                   only in the full tier
    @pytest.mark.few                    a few of its cases in the fast tier, that show every value of every parameter
    @pytest.mark.few(shows=pairs)       ... every pair of values of two parameters that some case has
    @pytest.mark.few(shows=one)         ... nothing in particular: one case
    @pytest.mark.few(shows=lambda rung, config: {...})
                                        ... everything that this function says of some case

A test that is named by itself (`pytest path::name`) runs with all of its cases. Tests of planted bugs must not be
marked: the fast tier finds every one of them.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Hashable, Iterable, Sequence
from itertools import combinations
from typing import Any

import pytest

Shown = Iterable[Hashable]
PLANTED = re.compile(r"planted|mutant|caught")


def each(**values: Any) -> Shown:
    return [(name, _key(value)) for name, value in values.items()]


def pairs(**values: Any) -> Shown:
    return combinations(each(**values), 2)


def one(**values: Any) -> Shown:
    return ["any"]


def _key(value: Any) -> Hashable:
    try:
        hash(value)
    except TypeError:
        return str(value)
    return value


def cover(shown: Sequence[Shown]) -> list[int]:
    """A few of the cases, by index, that together show all that any case shows: always one that adds most, and of these
    one of what was shown least."""
    shows = [frozenset(case) for case in shown]
    times: Counter[Hashable] = Counter()
    missing = set().union(*shows)
    chosen = []
    while missing:
        best = max(range(len(shows)), key=lambda i: (len(shows[i] & missing), -sum(times[x] for x in shows[i])))
        chosen.append(best)
        times.update(shows[best])
        missing -= shows[best]
    return chosen or [0]


def only_in_the_full_tier(items: list[pytest.Item]) -> set[pytest.Item]:
    left_out = {item for item in items if item.get_closest_marker("full")}
    functions = defaultdict(list)
    for item in items:
        if item.get_closest_marker("few") and item not in left_out:
            functions[item.nodeid.partition("[")[0]].append(item)
    for cases in functions.values():
        shows = cases[0].get_closest_marker("few").kwargs.get("shows", each)  # type: ignore[union-attr]
        chosen = cover([shows(**case.callspec.params) for case in cases])  # type: ignore[attr-defined]
        left_out.update(set(cases) - {cases[i] for i in chosen})
    return left_out


def choose(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Deselects what is not in the tier that `config` asks for; `rest` is the full one without the fast one."""
    slow = only_in_the_full_tier(items)
    wrong = sorted({item.nodeid.partition("[")[0] for item in slow if PLANTED.search(item.name.partition("[")[0])})
    if wrong:
        raise pytest.UsageError(f"the fast tier must find every planted bug, and leaves out: {', '.join(wrong)}")
    tier = config.getoption("tier")
    if tier == "full" or any("::" in argument for argument in config.args):
        return
    chosen = [item for item in items if (item in slow) == (tier == "rest")]
    if len(chosen) < len(items):
        config.hook.pytest_deselected(items=[item for item in items if (item in slow) != (tier == "rest")])
        items[:] = chosen
