"""Speed compared with torch, a table for each GPU, and the speed of the ladder.

All of it comes from the committed records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import geometric_mean, median
from typing import Any

from perf.bench import scores
from perf.bench.scores import Score, Sweep
from perf.bench.tables import origin, where
from perf.common import formats
from perf.common.formats import Cell
from perf.ladder import views
from perf.ladder.record import Record
from perf.measure.providers import CUBLAS

# What a suite is, in half a line; of int8 by layout, as torch._int_mm is slow with `nn` alone.
SUITES = {
    "square": "M = N = K from 512 to 16384",
    "llm": "projections of language models, 1 to 8192 tokens",
    "llm-large": "projections of language models, 1024 to 8192 tokens",
    "decode": "weights that come from memory, up to 64 tokens",
    "mid": "M from 128 to 1024, N and K from 1000 to 8000",
    "prefill": "projections of language models, 100 to 1000 tokens; unseen rows of listed weights",
    "shortk": "K from 256 to 1024, large M and N",
    "bigk": "K from 16384, M and N up to 512",
    "odd": "rows that are not 16-byte aligned",
    "batched": "3-D operands",
    "epilogue": "linear layers with bias and activation",
    "small": "GEMMs that end sooner than Python launches the next",
    "tf32": "fp32 rounded to TF32",
    "ieee": "fp32 on CUDA cores, against SGEMM",
    "bf16x6": "fp32 by six bf16 products, against SGEMM",
    "fp8": "one scale for each operand",
    "fp8-rows": "a scale for each row and column",
    "fp8-blocks": "scales of 1x128 and 128x128",
    "int8 nt": "int8 to int32, weights as in a linear layer",
    "int8 nn": "int8 to int32, row-major",
    "fp64": "against DGEMM",
}
# Variants of these, which README leaves to docs/performance.md.
VARIANTS = {
    "router": "up to 32 rows, N from 64 to 2560, K from 4096",
    "layouts": "large GEMMs, nn, nt, tn and tt",
    "host": "Python's time for a call",
    "host-fp8": "Python's time for a scaled fp8 call",
    "tf32x3": "fp32 by three TF32 products, against SGEMM",
    "bf16x3": "fp32 by three bf16 products, against SGEMM",
    "bf16x9": "fp32 by nine bf16 products, against SGEMM",
    "fp8-fast": "as fp8, fast accumulation",
    "fp8-fast-rows": "as fp8-rows, fast accumulation",
}
BY_LAYOUT = ("int8",)
# README's first figures, in as few words.
GLANCE = {
    "odd": "rows that are not 16-byte aligned",
    "bf16x6": 'fp32 by `precision="bf16x6"` (against IEEE SGEMM)',
    "int8 nt": "int8 linear layers",
    "decode": "up to 64 rows",
    "prefill": "100 to 1000 rows",
    "mid": "medium sizes",
    "square": "M = N = K",
    "fp8": "fp8 (scales of operands)",
    "fp8-rows": "fp8 (scales of rows)",
    "fp8-blocks": "fp8 (scales of blocks)",
    "fp64": "fp64",
}
EVEN = 1.05  # means between 1 / EVEN and EVEN count as even
SLOWER = 0.95  # ratios below it are counted
COLUMNS = ("mean", "worst", "where", f"below {SLOWER}")


@dataclass
class _Row:
    """One suite's ratios by the seed that drew a shape, None where it is listed, and the shape's key."""

    ratios: dict[tuple[int | None, str], float] = field(default_factory=dict)
    missing: int = 0  # shapes that were not timed
    sweeps: list[Sweep] = field(default_factory=list)

    def mean(self, unseen: bool) -> float | None:
        """The geometric mean over listed or unseen shapes; None where there are none."""
        found = [ratio for (seed, _), ratio in self.ratios.items() if unseen == (seed is not None)]
        return geometric_mean(found) if found else None

    @property
    def speed(self) -> float:
        """What decides the order."""
        return self.mean(unseen=True) or self.mean(unseen=False) or 0.0

    def cells(self, words: str) -> list[Cell]:
        """Words, and those of COLUMNS."""
        worst = min(self.ratios, key=self.ratios.__getitem__)
        words += f" ({self.missing} not timed)" if self.missing else ""
        slower = sum(ratio < SLOWER for ratio in self.ratios.values())
        return [words, f"{self.speed:.2f}", f"{self.ratios[worst]:.2f}", worst[1], f"{slower} of {len(self.ratios)}"]


def speed(
    sweeps: Sequence[Sweep], words: Mapping[str, str], link: Callable[[dict[str, Any]], str], short: bool = False
) -> str:
    """A row for each suite of one GPU that `words` names, the fastest first, below what was measured: a table of those
    with unseen shapes, and one of the others.

    `link` gives the address of an environment's page. short: without the others, and the commits.
    """
    rows = _rows(sweeps, {name: f"`{name}`: {text}" for name, text in words.items()})
    tables: list[str] = []
    for kind in ("unseen", "listed"):
        of = [(name, row) for name, row in rows.items() if (row.mean(unseen=True) is None) == (kind == "listed")]
        if of and not (short and tables):
            columns = (f"torch's time over ours; the mean is of {kind} shapes", *COLUMNS)
            tables.append(formats.table(columns, (row.cells(name) for name, row in of)))
    made = "; ".join(dict.fromkeys(map(where, sweeps)))
    date = f" {origin(sweep for row in rows.values() for sweep in row.sweeps)}" if not short else ""
    return "\n\n".join([f"{made}: [every suite and shape]({link(sweeps[0]['environment'])}).{date}", *tables])


def glance(
    sweeps: Sequence[Sweep],
    models: Mapping[str, Mapping[str, Sequence[float]]],
    minutes: Mapping[str, Mapping[str, float]],
) -> str:
    """Where it is faster, even and slower than torch on one GPU, of GLANCE; ratios of whole models, by where they were
    measured and by kind; and by version of Triton which share of torch's tokens models make in a first minute."""
    kinds = "faster", f"even, to {100 * (EVEN - 1):.0f} %", "slower"
    found: dict[tuple[str, bool], list[str]] = {}  # by that, and by whether shapes are unseen
    worst: dict[bool, float] = {}  # of single shapes, by that
    for name, row in _rows(sweeps, GLANCE).items():
        for (seed, _), ratio in row.ratios.items():
            worst[seed is not None] = min(ratio, worst.get(seed is not None, ratio))
        kind = kinds[0 if row.speed > EVEN else 2 if row.speed < 1 / EVEN else 1]
        found.setdefault((kind, row.mean(unseen=True) is not None), []).append(f"{name} {row.speed:.2f}")
    cells = [[kind, *(", ".join(found.get((kind, unseen), ["none"])) for unseen in (True, False))] for kind in kinds]
    cells.append(
        ["the slowest single shape", *(f"{worst[unseen]:.2f}" if unseen in worst else "" for unseen in (True, False))]
    )
    table = formats.table(("torch's time over ours, means", "unseen shapes", "listed shapes"), cells)
    lines = []
    for place, ratios in models.items():
        each = "; ".join(
            f"{kind} {geometric_mean(of):.2f}, median {median(of):.2f}, {min(of):.2f} at worst"
            for kind, of in ratios.items()
        )
        lines.append(f"- Whole models and `examples/gpt.py`, torch's time over ours ({place}): {each}.")
    for triton, shares in minutes.items():
        each = ", ".join(f"{model} {share:.2f}" for model, share in shares.items())
        alone = "" if any(triton in place for place in models) else ", with which no other model was measured"
        lines.append(f"- Tokens in the first minute of a process, ours over torch's (Triton {triton}{alone}): {each}.")
    table += "\n\n" + "\n".join(lines)
    return f"One {where(sweeps[0])}:\n\n{table}"


def _rows(sweeps: Sequence[Sweep], words: Mapping[str, str]) -> dict[str, _Row]:
    """The suites that `words` names, by these words, the fastest first."""
    rows: dict[str, _Row] = {}
    for sweep in sweeps:
        for name, score in _named(sweep):
            if name in words:
                dtype = ", fp16" if sweep["dtype"] == "fp16" else ""
                row = rows.setdefault(f"{words[name]}{dtype}", _Row())
                row.ratios |= {(sweep.get("unseen"), key): ratio for key, ratio in score.ratios.items()}
                row.missing += score.missing
                row.sweeps.append(sweep)
    return dict(sorted(rows.items(), key=lambda x: -x[1].speed))


def _named(sweep: Sweep) -> Iterator[tuple[str, Score]]:
    """The scores to torch that a sweep decides, as SUITES and VARIANTS name them."""
    parts = {"": sweep["shapes"]}
    if sweep["suite"] in BY_LAYOUT:
        parts = {}
        for key, shape in sweep["shapes"].items():
            parts.setdefault(f" {shape.get('layout', 'nn')}", {})[key] = shape
    for layout, shapes in parts.items():
        found = scores.scores({**sweep, "shapes": shapes})
        yield from ((score.suite + layout, score) for score in found if score.over == CUBLAS)


def climb(record: Record) -> str:
    """What the last rung reaches, in a sentence that leaves the others to guess: the block `climb`."""
    steps = [step for step in views.ladder(record) if step.tflops]
    if not steps:
        return "No rung's speed is committed yet."
    last = steps[-1]
    size, share = views.ladder_size(record), formats.percent(last.share(last.rung.name))
    of = f", {share} of cuBLAS in the same precision" if share else ""
    reached = f"{last.rung.id} reaches {formats.number(last.tflops)} TFLOPS"
    return f"On one {record.environment['gpu']}, at M = N = K = {size}, {reached}{of}."
