"""README's short summaries: where this package is faster than torch and where slower, and how far the ladder gets.

All of it comes from the committed records; docs/performance.md has every suite.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from perf.bench import scores
from perf.bench.scores import Sweep, geometric_mean
from perf.bench.tables import NOTHING
from perf.common import formats
from perf.ladder import views
from perf.ladder.record import Record
from perf.measure import environment
from perf.measure.providers import CUBLAS

# Suites by name, in a user's words. Variants of one (fp8's fast sums, say) are left to docs/performance.md.
SUITES = {
    "square": "squares",
    "llm": "projections of language models, 1 to 8192 tokens",
    "decode": "decoding, up to 64 tokens",
    "mid": "middle sizes, M from 128 to 1024",
    "prefill": "projections of language models, 100 to 1000 tokens",
    "shortk": "short K",
    "bigk": "long K",
    "odd": "rows that are not 16-byte aligned",
    "batched": "batches",
    "epilogue": "bias and activation",
    "small": "very small products",
    "tf32": "TF32",
    "ieee": "IEEE fp32",
    "bf16x6": '`precision="bf16x6"` against SGEMM',
    "fp8": "fp8",
    "fp8-rows": "fp8, row scales",
    "fp8-blocks": "fp8, block scales",
    "int8": "int8",
    "fp64": "fp64",
}
MODELS = {"decode": "a GPT's decode step", "training": "a GPT's training step"}
CLOSE = 0.03  # nearer than this to cuBLAS counts as the same
FASTER, SAME, SLOWER = "faster", f"within {100 * CLOSE:.0f} % on at least one GPU", "slower on at least one GPU"

Ratios = Mapping[str, float]  # torch's time (cuBLAS's, as a rule) over ours, by GPU


def speed(sweeps: Sequence[Sweep], models: Sequence[dict[str, Any]]) -> str:
    """Where we are faster than torch, as fast and slower, on each GPU: the block `summary`."""
    found: dict[str, dict[str, float]] = {words: {} for words in (*SUITES.values(), *MODELS.values())}
    for sweep in sweeps:  # of one suite the plain sweep comes first, before other dtypes and unseen shapes
        for score in scores.scores(sweep):
            if score.over == CUBLAS and score.suite in SUITES:
                found[SUITES[score.suite]].setdefault(sweep["environment"]["gpu"], score.mean)
    for model in models:
        for name, words in MODELS.items():
            ratios = _model_ratios(model, name)
            if ratios:
                found[words][model["environment"]["gpu"]] = geometric_mean(ratios)
    return table({words: ratios for words, ratios in found.items() if ratios})


def table(found: Mapping[str, Ratios]) -> str:
    """A row for each kind, the fastest first; of several GPUs the slowest decides."""
    if not found:
        return NOTHING
    gpus = sorted({gpu for ratios in found.values() for gpu in ratios})
    kinds: dict[str, list[str]] = {FASTER: [], SAME: [], SLOWER: []}
    for words, ratios in sorted(found.items(), key=lambda item: -geometric_mean(item[1].values())):
        figures = " / ".join(f"{ratios[gpu]:.2f}" if gpu in ratios else "–" for gpu in gpus)
        kinds[_kind(ratios.values())].append(f"{words} ({figures})")
    head = f"torch's time over ours on {' / '.join(map(environment.short, gpus))}, geometric mean over many shapes"
    lines = [[kind, "; ".join(names)] for kind, names in kinds.items() if names]
    return formats.table(["", head], lines).replace("--:", ":--")


def _kind(ratios: Iterable[float]) -> str:
    least = min(ratios)
    return FASTER if least > 1 + CLOSE else SLOWER if least < 1 - CLOSE else SAME


def _model_ratios(model: Mapping[str, Any], name: str) -> list[float]:
    """The ratios to torch of the cases of one kind, eager and compiled."""
    cases = [case for title, case in model["cases"].items() if title.startswith(name)]
    variants = [variant for case in cases for variant in case["variants"].values()]
    return [variant["ratio"]["median"] for variant in variants if variant.get("ratio")]


def climb(record: Record) -> str:
    """What the first and the last rung reach, in a sentence: the block `climb`."""
    steps = [step for step in views.ladder(record) if step.tflops]
    if not steps:
        return "No rung's speed is committed yet."
    first, last = steps[0], steps[-1]
    size, share = views.ladder_size(record), formats.percent(last.share(last.rung.name))
    ends = [f"{step.rung.id} reaches {formats.number(step.tflops)} TFLOPS" for step in (first, last)]
    of = f", {share} of cuBLAS in the same precision" if share else ""
    return f"On one {record.environment['gpu']}, at M = N = K = {size}, {ends[0]} and {ends[1]}{of}."
