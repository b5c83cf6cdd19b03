"""Turns: Python hears of a plan again after so many calls, though C++ launches them.

A plan that has a turn counts its calls down, in C++ by one decrement. At zero C++ leaves one call to Python, and after
that was launched the learner (`learning`) is told. A plan without a turn costs nothing: that is every plan, unless a
rule of `use` learns. The learner may name another plan, of the same bits, that calls run on instead.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from ctypes import c_int64
from typing import TYPE_CHECKING, Any, Protocol

from ..selection import generation

if TYPE_CHECKING:
    from .plan import GemmPlan

EVERY = 256  # calls of a plan, after which Python hears of it


class Turn:
    """Of a plan. left: calls until Python hears of it, at whose address C++ counts down, too; product: the learner's
    own."""

    def __init__(self, product: Any) -> None:
        self.product, self.count, self.left = product, EVERY, c_int64(EVERY)

    def again(self, count: int = EVERY) -> int:
        """Counts down from `count`; how many calls there were since that was begun last."""
        calls, self.count = self.count - self.left.value, count
        self.left.value = count
        return calls


class Learner(Protocol):
    def new(self, plan: GemmPlan) -> Any:
        """What a plan's turn has as its product, or None for a plan that takes no turns."""

    def turn(self, plan: GemmPlan, operands: tuple[Any, ...], stream: int) -> None:
        """Calls of a plan were launched, the last of them on these operands and this stream. It never raises."""

    def stop(self) -> None:
        """Nothing learns any more: ends what is under way, and gives its memory back."""


make: Callable[[], Learner] | None = None  # set by `learning`, which is above
active: Callable[[], bool] = bool  # whether a rule learns; set by `functional.routing`, which is above
counts: Counter[str] = Counter()  # of what was learned, for `report_routing`
_learner: Learner | None = None  # from the first rule that learns on


def begin() -> None:
    """Call it after a rule that learns was added. Plans from before the first of them are made anew."""
    global _learner
    if _learner is None and make is not None:
        _learner = make()
        generation.advance()


def end() -> None:
    """Call it after such a rule was removed."""
    if _learner is not None and not active():
        _learner.stop()


def give(plan: GemmPlan) -> None:
    """Gives a new plan a turn, if there is a learner and it wants that."""
    product = None if _learner is None else _learner.new(plan)
    if product is not None:
        plan.turn = Turn(product)


def take(plan: GemmPlan, operands: tuple[Any, ...], stream: int) -> None:
    """The turn of a plan has come. operands: as `GemmPlan.run` takes them."""
    if _learner is not None and active():
        _learner.turn(plan, operands, stream)
    elif plan.turn is not None:
        plan.turn.again()


def forget() -> None:
    """In a forked child: what its parent was learning is not its own. It learns anew where a rule begins there."""
    global _learner
    _learner = None
