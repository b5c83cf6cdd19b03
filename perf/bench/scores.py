"""What a sweep comes to: geometric mean, minimum and losing shapes of each suite, against targets. Pure arithmetic.

A sweep is a dict as `perf/bench/sweep.py` writes it: one suite's shapes by key, each with its providers' results.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import geometric_mean
from typing import Any

from perf.measure.providers import CUBLAS, OURS
from perf.measure.roofline import SUSPICIOUS_RATIO, too_fast
from triton_gemm.suites import LARGE_M, LARGE_WEIGHT_BYTES
from triton_gemm.suites.shapes import ITEMSIZE

Sweep = dict[str, Any]
Result = dict[str, Any]

COMPILED = "torch.compile"
TUNED = "cuBLASLt-tuned"
INDUCTOR = "Inductor-max-autotune"
AUTOTUNED = (TUNED, INDUCTOR)  # peers that choose by measuring, which `--peers` adds
COPY = "copy bandwidth"
SUSPECTS = ("square", "layouts")  # suites in which no honest kernel is far beyond cuBLAS
SUSPECT_SIZE = 2048


@dataclass(frozen=True)
class Target:
    """What the geometric mean and the minimum of a suite's ratios are to reach."""

    mean: float
    minimum: float | None = None


_OVER_CUBLAS: dict[str, tuple[float, ...]] = {
    **dict.fromkeys(("square", "llm-large", "layouts"), (1.04, 0.98)),
    **{"mid": (1.15, 1.0), "prefill": (1.04, 0.95), "shortk": (1.12, 1.02), "decode": (1.12, 1.0)},
    **{"bigk": (1.3, 1.05), "odd": (3.0, 1.5), "batched": (1.1, 1.0), "epilogue": (1.15, 1.0)},
    **{"small": (1.0, 0.95), "tf32": (1.0, 0.95), "ieee": (0.97, 0.92), "host": (1.0,), "fp64": (0.9,)},
    **{"bf16x6": (2.0,), "bf16x9": (1.4,), "fp8": (1.0,), "fp8-fast": (1.0,), "int8": (1.2,)},
    **{"fp8-rows": (1.05,), "fp8-fast-rows": (1.05,), "fp8-blocks": (1.1,)},
}
# By suite, and by what the ratios are to.
TARGETS = {(suite, CUBLAS): Target(*least) for suite, least in _OVER_CUBLAS.items()}
TARGETS |= {("decode", COPY): Target(0.92), ("epilogue", COMPILED): Target(1.05, 1.0)}


@dataclass(frozen=True)
class Score:
    """One suite's ratios to one thing. `ratios` are ours by shape; losers have less than 1 or, of the memory's copy
    bandwidth, less than the target."""

    suite: str
    over: str
    ratios: Mapping[str, float]
    target: Target | None
    missing: int = 0

    @property
    def mean(self) -> float:
        return geometric_mean(self.ratios.values())

    @property
    def minimum(self) -> float:
        return min(self.ratios.values())

    @property
    def losers(self) -> tuple[str, ...]:
        """The shapes that lose, the worst first."""
        level = self.target.mean if self.over == COPY and self.target else 1.0
        return tuple(sorted((key for key, ratio in self.ratios.items() if ratio < level), key=self.ratios.__getitem__))

    @property
    def met(self) -> bool | None:
        """Whether the target is reached by all shapes that were to be measured; None without a target."""
        if self.target is None:
            return None
        least = self.target.minimum
        return self.missing == 0 and self.mean >= self.target.mean and (least is None or self.minimum >= least)


def scores(sweep: Sweep) -> list[Score]:
    """Every score that a sweep decides; the projections with many tokens count as a suite of their own."""
    name, shapes = sweep["suite"], sweep["shapes"]
    found = list(_scores(name, sweep, shapes))
    if name == "llm":
        found += _scores("llm-large", sweep, {key: shape for key, shape in shapes.items() if shape["M"] >= LARGE_M})
    return found


def _scores(name: str, sweep: Sweep, shapes: Mapping[str, Any]) -> Iterator[Score]:
    for over in (CUBLAS, *((COMPILED,) if name == "epilogue" else ()), *AUTOTUNED):
        yield from _score(name, over, {key: ratio(shape, OURS, over) for key, shape in shapes.items()})
    if name == "decode" and sweep.get("copy_tbs"):
        large = {key: shape for key, shape in shapes.items() if ITEMSIZE * shape["N"] * shape["K"] > LARGE_WEIGHT_BYTES}
        yield from _score(name, COPY, {key: copy_share(shape, sweep["copy_tbs"]) for key, shape in large.items()})


def _score(suite: str, over: str, ratios: Mapping[str, float | None]) -> Iterator[Score]:
    known = {key: value for key, value in ratios.items() if value is not None}
    if known:
        yield Score(suite, over, known, TARGETS.get((suite, over)), len(ratios) - len(known))


def ratio(shape: Mapping[str, Any], provider: str = OURS, over: str = CUBLAS) -> float | None:
    """The median over rounds of the time of `over` divided by the provider's; None where one was not timed."""
    found = spread(shape, provider, over)
    return None if found is None else found["median"]


def spread(shape: Mapping[str, Any], provider: str = OURS, over: str = CUBLAS) -> dict[str, float] | None:
    """Median, p20 and p80 of a provider's ratio to another."""
    result = shape["providers"].get(provider, {})
    found: dict[str, float] | None = result.get("ratio") if over == CUBLAS else result.get("ratio_to", {}).get(over)
    return found


def timed(shape: Mapping[str, Any], provider: str) -> Result | None:
    """A provider's result on a shape, if it was timed."""
    result: Result | None = shape["providers"].get(provider)
    return result if result is not None and "time_ms" in result else None


def tflops(shape: Mapping[str, Any], result: Result) -> float:
    """By the median time."""
    flop = 2 * shape.get("batch", 1) * shape["M"] * shape["N"] * shape["K"]
    return float(flop / result["time_ms"]["median"] / 1e9)


def gbs(shape: Mapping[str, Any], result: Result) -> float:
    """GB/s by the median time: A, B and C once."""
    M, N, K = shape["M"], shape["N"], shape["K"]
    moved = ITEMSIZE * shape.get("batch", 1) * (M * K + K * N + M * N)
    return float(moved / result["time_ms"]["median"] / 1e6)


def copy_share(shape: Mapping[str, Any], copy_tbs: float) -> float | None:
    """Our bytes a second over those of a copy."""
    own = timed(shape, OURS)
    return None if own is None else gbs(shape, own) / (1000 * copy_tbs)


def label(sweep: Sweep) -> str:
    """The suite's name, with what differs from its listed shapes in bf16."""
    words = [sweep["suite"]]
    words += [sweep["dtype"]] if sweep["dtype"] not in ("bf16", sweep["suite"]) else []
    words += [f"unseen {sweep['unseen']}"] if sweep.get("unseen") is not None else []
    return " ".join(words)


def changes(before: Sweep, now: Sweep) -> dict[str, float]:
    """Our speed now over that of a sweep before, both relative to cuBLAS, of each shape that is timed in both."""
    pairs = (
        (key, ratio(shape), ratio(before["shapes"].get(key, {"providers": {}}))) for key, shape in now["shapes"].items()
    )
    return {key: mine / theirs for key, mine, theirs in pairs if mine is not None and theirs is not None}


def failures(sweeps: Sequence[Sweep]) -> list[str]:
    """`provider on suite shape: reason` for all that failed the check."""
    return [
        f"{name} on {label(sweep)} {key}: {result['failed']}"
        for sweep in sweeps
        for key, shape in sweep["shapes"].items()
        for name, result in shape["providers"].items()
        if "failed" in result
    ]


def suspicious(sweeps: Sequence[Sweep]) -> list[str]:
    """Figures of large aligned products that are too good: measuring errors until shown otherwise."""
    found = []
    for sweep in sweeps:
        for key, shape in sweep["shapes"].items() if sweep["suite"] in SUSPECTS else ():
            own = timed(shape, OURS)
            if own is None or min(shape["M"], shape["N"], shape["K"]) < SUSPECT_SIZE:
                continue
            to_cublas, speed = ratio(shape), tflops(shape, own)
            if to_cublas is not None and to_cublas > SUSPICIOUS_RATIO:
                found.append(f"{label(sweep)} {key}: {to_cublas:.2f} of cuBLAS")
            if too_fast(speed, sweep["environment"]["gpu"]):
                found.append(f"{label(sweep)} {key}: {speed:.0f} TFLOPS")
    return found
