"""Whether a GPU can be measured: a reference GEMM takes as long after the trial rounds as before them, and as long as
it took at best, and nothing slows the clocks down."""

from __future__ import annotations

from dataclasses import dataclass

TOLERANCE = 0.05  # of the reference GEMM's time, and of clocks
STEADY = 1.1  # p80/p20 limit of the reference GEMM's times; on a shared GPU the spread is far larger


@dataclass(frozen=True)
class Conditions:
    """ms: of the reference GEMM, on settled clocks; mhz: the multiprocessors' clock under it, 0 if unknown; slowed: why
    clocks are lower than they should be, in words; spread: the 80th percentile of its times over the 20th."""

    ms: float
    mhz: int = 0
    slowed: tuple[str, ...] = ()
    spread: float = 1.0


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


def _apart(x: float, y: float) -> bool:
    return max(x, y) > min(x, y) * (1 + TOLERANCE)
