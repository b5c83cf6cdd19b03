"""The learner: what races, and what comes of it. Each turn of a plan is told to it (`runtime.turns`)."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch

from ..compat import in_transform, launch_hooks, must_dispatch, stream_of_graph_trees
from ..hardware.device import device_info
from ..problem import problem_text
from ..runtime import background, kits, policies, turns
from ..runtime.plan import MAX_PLANS, GemmPlan, keep
from ..runtime.workspace import PER_THREAD
from ..tables import files, learned, versions
from ..tables.records import named
from .aside import Aside
from .candidates import is_foreign, predicted_us
from .race import Call, NoRaceError, Outcome, Race
from .statistics import LONGEST_US, Product, Tempo

EVERY = 64  # calls of any plan between its turns, while there is a race
AT_ONCE = 4  # races, of which one has memory, and the others wait for kernels
STALE_S, AGAIN_S = 30.0, 60.0  # a race whose product is not called for so long is given up; and is tried again then
log = logging.getLogger("triton_gemm.learning")


class Tuner:
    """Threads may come at once: whoever finds another here goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.here = threading.Lock()
        self.products: dict[Any, Product] = {}
        self.tempo = Tempo()
        self.aside = Aside()
        self.races: dict[Product, Race] = {}
        self.broken = False

    def new(self, plan: GemmPlan) -> Product | None:
        problem, selection = plan.problem, plan.selection
        if problem.groups or problem.preactivation or policies.current_policy().name not in ("cached", "tune"):
            return None
        key = _key(plan)
        found = self.products.get(key)
        if found is None:
            us = predicted_us(problem, device_info(plan.device), selection)
            if not us < math.inf:
                return None
            found = Product(problem, selection, plan.index, us, self.clock())
            found.over = us > LONGEST_US or self._is_known(plan)
            keep(self.products, key, found, MAX_PLANS)
        found.plans.add(plan)
        return found

    def _is_known(self, plan: GemmPlan) -> bool:
        """Whether it was learned before, with the same versions, that a plan's kernel is the fastest."""
        device = device_info(plan.device)
        entry = learned.entry(plan.problem, device, _triton_of(plan))
        return entry is not None and entry.algorithm == plan.selection.algorithm and entry.by == versions()

    def turn(self, plan: GemmPlan, operands: tuple[Any, ...], stream: int) -> None:
        if plan.turn is None:
            return
        product: Product = plan.turn.product
        calls = plan.turn.again(EVERY if self.races else 4 * turns.EVERY if product.over else turns.EVERY)
        product.calls += calls
        self.tempo.of_calls += calls * product.us
        if product.saved_us:
            turns.counts["microseconds saved"] += round(calls * product.saved_us)
        if self.broken or not self.here.acquire(blocking=False):
            return
        try:
            if _may_race(plan, stream):
                with torch.inference_mode():
                    self._go_on(plan, Call(product, operands[1], stream))
        except Exception as error:
            log.warning("nothing is learned any more in this process: %s: %s", type(error).__name__, error)
            self.broken = True
            self._give_up()
        finally:
            if not turns.active():  # a rule has ended meanwhile
                self._give_up()
            self.here.release()

    def _go_on(self, plan: GemmPlan, call: Call) -> None:
        now = self.clock()
        for race in list(self.races.values()):
            if now > race.at + STALE_S:
                self._give_up(race)
            elif race.is_on(plan.index, call.stream):
                try:
                    outcome = race.step(call)
                except NoRaceError as why:
                    log.debug("%s is not raced now: %s", problem_text(race.product.problem), why)
                    self._give_up(race)
                else:
                    if outcome is not None:
                        self._learn(race, outcome)
        if len(self.races) < AT_ONCE and call.product not in self.races and call.product.pays(now):
            device = device_info(plan.device)
            l2 = torch.cuda.get_device_properties(plan.index).L2_cache_size
            ask = partial(self.aside.ask, index=plan.index)
            self.races[call.product] = Race(call.product, plan, call.stream, device, l2, self.tempo, ask, self.clock)

    def _learn(self, race: Race, outcome: Outcome) -> None:
        """Has calls run on the winner from now on, and stores it."""
        product, winner = race.product, outcome.plan
        self._end(race)
        product.over = True
        turns.counts["GEMMs raced"] += outcome.candidates > 1
        if winner is not None:
            turns.counts["kernels replaced"] += 1
            own = Product(product.problem, winner.selection, product.index, outcome.us, self.clock(), over=True)
            own.saved_us, winner.turn = outcome.before_us - outcome.us, turns.Turn(own)
            own.plans.add(winner)
            keep(self.products, _key(winner), own, MAX_PLANS)
            for plan in list(product.plans):
                plan.instead = winner
                plan.turn.left.value = 0
            names = named(winner.selection), named(product.selection)
            log.info("%s instead of %s: %.3g us, before %.3g us", *names, outcome.us, outcome.before_us)
        if outcome.candidates > 1 and policies.current_policy().bits == "same":  # with others it holds for this process
            selection = product.selection if winner is None else winner.selection
            us, before_us = (outcome.before_us,) * 2 if winner is None else (outcome.us, outcome.before_us)
            store = partial(
                learned.store,
                product.problem,
                selection,
                device_info(race.plan.device),
                before=product.selection,
                us=us,
                before_us=before_us,
                samples=outcome.samples,
                triton=_triton_of(race.plan),
            )
            self.aside.ask(store, product.index).add_done_callback(_say_why_not)

    def _give_up(self, *races: Race) -> None:
        """Ends these, or all, which may begin again later."""
        for race in races or list(self.races.values()):
            race.product.not_before = self.clock() + AGAIN_S
            self._end(race)

    def _end(self, race: Race) -> None:
        self.races.pop(race.product, None)
        race.close()

    def stop(self) -> None:
        if self.here.acquire(blocking=False):  # else whoever is here looks, be it this thread before a signal
            try:
                self._give_up()
            finally:
                self.here.release()


def _say_why_not(stored: Future[bool]) -> None:
    if (error := stored.exception()) is not None:
        log.warning("what was learned is not stored: %s: %s", type(error).__name__, error)


def _key(plan: GemmPlan) -> Any:
    selection = plan.selection
    return plan.problem, selection.algorithm, selection.batch_invariant, selection.kit, plan.index


def _triton_of(plan: GemmPlan) -> str:
    """The minor version of Triton whose tables a plan's selection is from."""
    device = device_info(plan.device)
    return kits.others(device.capability)[0] if is_foreign(plan.selection, device) else files.TRITON


def _may_race(plan: GemmPlan, stream: int) -> bool:
    """Whether launches may be added here: none under capture, by whoever measures or watches, or on a stream of each
    thread or of Inductor's graphs."""
    return not (
        torch.cuda.is_current_stream_capturing()
        or background.is_held()
        or must_dispatch()
        or in_transform()
        or launch_hooks()
        or stream == PER_THREAD
        or stream_of_graph_trees(plan.index) == stream
    )
