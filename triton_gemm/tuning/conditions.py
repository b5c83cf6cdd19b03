"""Whether a GPU can be measured: a reference GEMM takes as long after the trial rounds as before them, and as long as
it took at best, and nothing slows the clocks down."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

TOLERANCE = 0.05  # of the reference GEMM's time, and of clocks
ATTEMPTS = 2  # at a trial during which the GPU was not fit to be measured
STEADY = 1.1  # p80/p20 limit of the reference GEMM's times; on a shared GPU the spread is far larger


@dataclass(frozen=True)
class Conditions:
    """What a trial was measured under."""

    ms: float  # milliseconds of the reference GEMM, on settled clocks
    mhz: int = 0  # the multiprocessors' clock under it, 0 if unknown
    slowed: tuple[str, ...] = ()  # why clocks are lower than they should be, in words
    spread: float = 1.0  # the 80th percentile of its times over the 20th


def complaint(before: Conditions, after: Conditions, best_ms: float) -> str | None:
    """Why times that were taken between the two do not count, or None. best_ms: the least that the reference product
    has taken."""
    slowed = dict.fromkeys(before.slowed + after.slowed)
    if slowed:
        return f"the GPU is {' and '.join(slowed)}"
    spread = max(before.spread, after.spread)
    if spread > STEADY:
        return f"a reference GEMM sometimes takes {spread:.2f} times as long: the GPU is shared"
    if _apart(before.ms, after.ms):
        return f"a reference GEMM took {1000 * before.ms:.3g} us before and {1000 * after.ms:.3g} us after"
    if min(before.ms, after.ms) > best_ms * (1 + TOLERANCE):
        return f"a reference GEMM takes {1000 * after.ms:.3g} us, and took {1000 * best_ms:.3g} us: the GPU is shared"
    if before.mhz and after.mhz and _apart(before.mhz, after.mhz):
        return f"the clock was at {before.mhz} MHz before and {after.mhz} MHz after"
    return None


class Monitor:
    """Judges a GPU from one trial to the next. measure: times a reference GEMM; now: the clock, in seconds."""

    def __init__(self, measure: Callable[[], Conditions], now: Callable[[], float]) -> None:
        self._measure, self._now = measure, now
        self.best_ms = math.inf  # of the reference GEMM
        self.at, self.measure_s = -math.inf, 0.0  # when it was timed last, and for how long
        self.why: str | None = None  # times of the last attempt do not count

    def before(self, recent_s: float = 0.0) -> Conditions:
        """The conditions before a trial: the last ones, if they are less than `recent_s` old."""
        if self._now() - self.at >= recent_s:
            begin, self.last = self._now(), self._measure()
            self.at = self._now()
            self.measure_s, self.best_ms = self.at - begin, min(self.best_ms, self.last.ms)
        return self.last

    def attempts(self, *, clock_lags: bool = False) -> Iterator[int]:
        """Numbers attempts at a trial, until the GPU is fit to be measured during one. Each attempt calls `before`."""
        for attempt in range(ATTEMPTS):
            yield attempt
            self.why = self.after(clock_lags=clock_lags)
            if self.why is None:
                return
            self.at = -math.inf

    def after(self, *, clock_lags: bool = False) -> str | None:
        """Why times since `before` do not count, or None. clock_lags: whether the driver's reading of the clock may be
        of the trial, and is read again if it alone is the reason."""
        before, after = self.last, self.before()
        why = complaint(before, after, self.best_ms)
        if clock_lags and why is not None and complaint(before, replace(after, mhz=0), self.best_ms) is None:
            why = complaint(before, self.before(), self.best_ms)
        return why


def _apart(x: float, y: float) -> bool:
    return max(x, y) > min(x, y) * (1 + TOLERANCE)
