"""The learner: which trials run, and what comes of them. A thread aside counts calls (`runtime.turns`), begins trials,
and goes on with them. One trial at a time has launches added to calls."""

from __future__ import annotations

import logging
import math
import threading
import time
from collections.abc import Callable
from itertools import islice
from typing import Any

import torch

from ..compat import stream_of_graph_trees
from ..hardware.device import device_info
from ..hardware.graphs import allow_during_captures, rest
from ..problem import problem_text
from ..runtime import background, kits, policies, turns
from ..runtime.plan import MAX_PLANS, GemmPlan, keep
from ..runtime.worker import Question
from ..tables import files, learned, versions
from ..tables.records import named
from .candidates import Outcome, is_foreign, predicted_us
from .statistics import LONGEST_US, Product, Tempo
from .trial import Call, NoTrialError, Trial

AT_ONCE = 4  # trials, of which one has memory, and the others wait for workers and to load modules
POLL_S, SOON_S = 0.1, 0.004  # between polls of the thread aside: of calls; and of trials while there are samples
STALE_S, AGAIN_S = 30.0, 60.0  # a trial that could not go on for so long is given up; and is tried again then
HELD_S, LEAST_FREE = 300.0, 512 << 20  # and one that has memory for so long, or leaves the GPU fewer bytes
FAILURES, FINISH_S = 3, 2.0  # errors after which nothing is learned any more; how long the end of a process waits
LOST = 700  # CUDA's errors from here on, as of an illegal access, are those of a GPU that runs nothing any more
log = logging.getLogger("triton_gemm.learning")


class Tuner:
    """Threads may come at once: a call that finds another here goes on."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self.clock = clock
        self.here = threading.Lock()
        self.finished, self.failures = threading.Event(), 0
        self.products: dict[Any, Product] = {}
        self.tempo = Tempo()
        self.thread: threading.Thread | None = None
        self.trials: dict[Product, Trial] = {}
        self.broken = False
        self.unwritten: list[Question] = []  # which workers are to write
        # When a trial was given its memory, the GPU's was read, and calls were counted.
        self.since = self.free_at = self.counted_at = -math.inf

    def new(self, plan: GemmPlan) -> None:
        problem, selection = plan.problem, plan.selection
        if problem.groups or problem.preactivation or policies.current_policy().name not in ("cached", "tune"):
            return
        key = _key(plan)
        found = self.products.get(key)
        if found is None:
            us = predicted_us(problem, device_info(plan.device), selection)
            if not us < math.inf:
                return
            found = Product(problem, selection, plan.index, us, self.clock())
            found.over = us > LONGEST_US or self._is_known(plan)
            keep(self.products, key, found, MAX_PLANS)
        found.add(plan)
        if self.thread is None:
            thread = threading.Thread(target=self._run, name="triton_gemm learner", daemon=True)
            thread.start()
            self.thread = thread

    def _is_known(self, plan: GemmPlan) -> bool:
        """Whether it was learned before, with the same versions, that a plan's kernel is the fastest."""
        device = device_info(plan.device)
        entry = learned.entry(plan.problem, device, _triton_of(plan))
        return entry is not None and entry.algorithm == plan.selection.algorithm and entry.by == versions()

    # --- In the thread aside, where no call waits ---

    def _run(self) -> None:
        allow_during_captures()
        while not self.finished.is_set():
            self.finished.wait(self.poll())

    def poll(self) -> float:
        """Goes on with all that it can; seconds until the next time."""
        begin = time.thread_time()
        with self.here:
            try:
                if turns.active() and not (self.broken or self.finished.is_set()):
                    if self.clock() >= self.counted_at + POLL_S:
                        self.counted_at = self.clock()
                        self._count()
                        self._choose()
                        self._write()
                    if not background.is_held():
                        self._go_on()
                    elif self.clock() > self.since + HELD_S:
                        self._give_up(*(x for x in self.trials.values() if x.has_turn))
                elif self.trials:
                    self._give_up(*self.trials.values())
            except Exception as error:
                self._break(error)
            is_soon = any(trial.has_turn for trial in self.trials.values())
        return max(SOON_S if is_soon else POLL_S, 4 * (time.thread_time() - begin))

    def _count(self) -> None:
        now, products = self.clock(), iter(list(self.products.values()))
        while some := list(islice(products, 8)):
            for product in some:
                if calls := sum(plan.turn.calls() for plan in product.plans):
                    product.at = now
                    product.calls += calls
                    self.tempo.of_calls += calls * product.us
                    if product.saved_us:
                        turns.counts["microseconds saved"] += round(calls * product.saved_us)
            rest()

    def _choose(self) -> None:
        """Begins trials of GEMMs that have had none yet, first of those that have taken most of the GPU's time."""
        now = self.clock()
        if len(self.trials) < AT_ONCE:
            paying = [x for x in list(self.products.values()) if x.pays(now) and x not in self.trials]
            paying.sort(key=lambda x: (bool(x.ranked), -x.worth))
            compiled = ((x, plan) for x in paying for plan in [y for y in x.plans if y.compiled][:1])
            for product, plan in islice(compiled, AT_ONCE - len(self.trials)):
                l2 = torch.cuda.get_device_properties(plan.index).L2_cache_size
                self.trials[product] = Trial(product, plan, device_info(plan.device), l2, self.tempo, self.clock)

    def _go_on(self) -> None:
        for trial in list(self.trials.values()):
            if self.finished.is_set() or background.is_held():
                return
            if not any(x.has_turn for x in self.trials.values()) and trial.is_prepared:
                trial.has_turn = True
                trial.at = self.since = self.clock()
            try:
                with torch.cuda.device(trial.product.index):
                    outcome = trial.go_on()
            except NoTrialError as why:
                log.debug("%s is not timed now: %s", problem_text(trial.product.problem), why)
                self._give_up(trial)
                continue
            except Exception as error:
                self.failures += 1
                if self.failures >= FAILURES or getattr(error, "error", 0) >= LOST:
                    raise
                log.warning("%s is not timed: %s: %s", problem_text(trial.product.problem), type(error).__name__, error)
                self._give_up(trial)
                continue
            now = self.clock()
            if not trial.needs_call:
                trial.at = now
            if outcome is not None:
                self._end(trial)
                rest()
                self._learn(trial, outcome)
            elif now > min(trial.product.at, trial.at) + STALE_S or (
                trial.has_turn and self._holds_too_much(trial, now)
            ):
                self._give_up(trial)
            elif trial.requested is not None:
                for plan in trial.product.plans:
                    plan.turn.request_call(True)

    def _holds_too_much(self, trial: Trial, now: float) -> bool:
        """Whether it has its memory too long, or others want it; read each second."""
        if now < self.free_at + 1:
            return False
        self.free_at = now
        return now > self.since + HELD_S or torch.cuda.mem_get_info(trial.product.index)[0] < LEAST_FREE

    def _learn(self, trial: Trial, outcome: Outcome) -> None:
        """Has calls run on the winner from now on, and stores it. The others are timed against it later."""
        product, winner = trial.product, outcome.plan
        own, product.over = product, True
        turns.counts["GEMMs raced"] += outcome.candidates > 1 and not product.ranked
        if winner is not None:
            turns.counts["kernels replaced"] += 1
            own = Product(product.problem, winner.selection, product.index, outcome.us, product.since, product.calls)
            own.before = product.before or product.selection
            own.saved_us = product.saved_us + outcome.before_us - outcome.us
            own.add(winner)
            self.products.pop(_key(trial.plan), None)  # plans that are made anew without a table are timed anew
            keep(self.products, _key(winner), own, MAX_PLANS)
            for plan in product.plans:
                plan.instead = winner
                plan.turn.hand_over()
            names = named(winner.selection), named(product.selection)
            log.info("%s instead of %s: %.3g us, before %.3g us", *names, outcome.us, outcome.before_us)
        own.over, own.ranked = not trial.later, [outcome.ranked, *trial.later]
        is_new = winner is not None or (own.over and own.before is None)
        if outcome.candidates > 1 and trial.keeps and is_new:
            rest()
            self._store(own, outcome.us, outcome.samples, trial.plan)

    def _store(self, product: Product, us: float, samples: int, plan: GemmPlan) -> None:
        before, device = product.before or product.selection, device_info(plan.device)
        times = {"us": us, "before_us": us + product.saved_us}

        def by_a_worker(*of: Any) -> bool:
            if (question := background.submit(plan, device, learned.write, *of)) is None:
                return learned.write(*of)
            self.unwritten.append(question)
            return True

        how = {"before": before, "samples": samples, "triton": _triton_of(plan), "by": by_a_worker}
        try:
            learned.store(product.problem, product.selection, device, **times, **how)  # type: ignore[arg-type]
        except Exception as error:
            log.warning("what was learned is not stored: %s: %s", type(error).__name__, error)

    def _write(self, at_end: bool = False) -> None:
        """Itself writes what workers could not. at_end: or have not yet, as long as nobody else keeps the folder."""
        for question in [x for x in self.unwritten if x.error is not None or at_end]:
            self.unwritten.remove(question)
            try:
                written = question.answer or question.function(*question.arguments)
            except Exception as error:
                log.warning("what was learned is not stored: %s: %s", type(error).__name__, error)
                written = False
            if at_end and not written:
                return

    # --- At calls ---

    def turn(self, plan: GemmPlan, b: torch.Tensor, stream: int) -> None:
        turn = plan.turn
        if turn is None:
            return
        turn.request_call(False)  # the thread aside requests it again, if need be
        trial = self.trials.get(turn.product)
        if trial is not None and trial.requested is not None and self.here.acquire(blocking=False):
            try:
                if _may_add_launches(plan, stream):
                    trial.take(Call(b, stream, policies.current_policy().bits))
            finally:
                self.here.release()

    # --- Anywhere ---

    def _break(self, error: Exception) -> None:
        log.warning("nothing is learned any more in this process: %s: %s", type(error).__name__, error)
        self.broken = True
        for trial in list(self.trials.values()):
            try:
                self._give_up(trial)
            except Exception:
                log.debug("a trial does not end", exc_info=True)

    def _give_up(self, *trials: Trial) -> None:
        """Ends these, which may begin again later."""
        for trial in list(trials):
            trial.product.not_before = self.clock() + AGAIN_S
            self._end(trial)

    def _end(self, trial: Trial) -> None:
        self.trials.pop(trial.product, None)
        trial.close()

    def stop(self) -> None:
        """May come anywhere, also amid a call or a poll, by a signal's handler or the garbage collector. What cannot be
        ended here ends when the thread aside polls."""
        turns.job.withdraw()
        if self.here.acquire(blocking=False):
            try:
                if turns.job.is_idle():
                    self._give_up(*self.trials.values())
            finally:
                self.here.release()

    def finish(self) -> None:
        """At the end of the process. The thread aside ends first: Python would stop it amid a function of torch's."""
        self.finished.set()
        turns.job.withdraw()
        for product in list(self.products.values()):
            for plan in product.plans:
                plan.turn.request_call(False)
        if self.thread is not None and self.thread is not threading.current_thread():
            self.thread.join(FINISH_S)
            if not self.thread.is_alive():
                self.stop()
                self._write(at_end=True)


def _key(plan: GemmPlan) -> Any:
    selection = plan.selection
    return plan.problem, selection.algorithm, selection.batch_invariant, selection.kit, plan.index


def _triton_of(plan: GemmPlan) -> str:
    """The minor version of Triton whose tables a plan's selection is from."""
    device = device_info(plan.device)
    return kits.others(device.capability)[0] if is_foreign(plan.selection, device) else files.TRITON


def _may_add_launches(plan: GemmPlan, stream: int) -> bool:
    """Whether launches may be added here: none under capture, by whoever measures or watches, or on a stream of
    Inductor's graphs."""
    return not (turns.is_watched() or background.is_held() or stream_of_graph_trees(plan.index) == stream)
