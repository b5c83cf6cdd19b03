"""Where it is faster: torch's time over ours by the weight of a linear layer and its number of rows, one map a GPU.

It is made of the newest sweep of the suite `llm`, as an SVG with a background of its own, for light and dark pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from xml.sax.saxutils import escape

from perf.bench import scores
from perf.bench import tables as bench_tables
from perf.bench.scores import Sweep
from perf.common.style import DARK_SVG
from triton_gemm.suites import PROJECTIONS

SUITE, FILE = "llm", "map.svg"
EQUAL = 1.02  # ratios between 1 / EQUAL and EQUAL count as equal
# Colours up to a ratio, orange where torch is faster and blue where it is not, which are told apart with any colour
# vision; the last has none above it.
COLOURS = (
    (0.9, "#b35806", "below 0.90"),
    (1 / EQUAL, "#fdb863", "0.90 to 0.98"),
    (EQUAL, "#eeeeee", "0.98 to 1.02"),
    (1.1, "#bcdcf0", "1.02 to 1.10"),
    (1.25, "#6aaed6", "1.10 to 1.25"),
    (float("inf"), "#1f5f99", "1.25 or more"),
)
PALE_TEXT = ("#b35806", "#1f5f99")  # on these colours
LEFT, CELL, ROW, TOP, MARGIN = 300, 54, 19, 64, 14


def listed(sweeps: Sequence[Sweep]) -> Sweep | None:
    """Of one GPU's sweeps the one that the map shows."""
    return next((sweep for sweep in sweeps if sweep["suite"] == SUITE and sweep.get("unseen") is None), None)


def unseen(sweeps: Sequence[Sweep]) -> list[Sweep]:
    """Of one GPU's sweeps those of the same suite's shapes that were drawn."""
    return [sweep for sweep in sweeps if sweep["suite"] == SUITE and sweep.get("unseen") is not None]


def file_of(results: Path, sweep: Sweep) -> Path:
    """Where the map of a sweep belongs."""
    return bench_tables.folder_of(results, sweep["environment"]) / FILE


def picture(sweep: Sweep) -> str:
    """The map as an SVG: a row for each weight, model by model, and a column for each number of rows of the input."""
    ratios = _ratios(sweep)
    columns = sorted({m for m, _, _ in ratios})
    width = LEFT + CELL * len(columns) + MARGIN
    title = f"torch's time over triton_gemm's: {sweep['dtype']} linear layers of language models"
    parts = [
        _text(MARGIN, 22, title, "", 'font-size="15" font-weight="bold"'),
        _text(MARGIN, 41, bench_tables.where(sweep), fill="#555"),
        _text(MARGIN, TOP, "weight: out x in features", fill="#555"),
        _text(LEFT - 8, TOP, "rows of the input:", "end", fill="#555"),
        *(_text(LEFT + CELL * (i + 0.5), TOP, str(m), "middle") for i, m in enumerate(columns)),
    ]
    y = TOP + 6
    for model, projections in PROJECTIONS.items():
        known = {name: size for name, size in projections.items() if any(key[1:] == size for key in ratios)}
        if known:
            parts.append(_text(MARGIN, y + 14, model, "", 'font-weight="bold"'))
        for name, (n, k) in known.items():
            parts.append(_text(LEFT - 8, y + 14, f"{name}, {n} x {k}", "end"))
            parts.append("".join(_cell(LEFT + CELL * i, y, ratios.get((m, n, k))) for i, m in enumerate(columns)))
            y += ROW
        y += 6 if known else 0
    for i, (_, colour, words) in enumerate(COLOURS):
        x = MARGIN + i * (width - 2 * MARGIN) / len(COLOURS)
        parts.append(f'<rect x="{x:g}" y="{y + 10}" width="14" height="14" fill="{colour}" stroke="#999"/>')
        parts.append(_text(x + 20, y + 21, words))
    parts.append(_text(MARGIN, y + 43, "orange: torch is faster", fill="#b35806"))
    parts.append(_text(width - MARGIN, y + 43, "blue: triton_gemm is faster", "end", fill="#1f5f99"))
    height = y + 56
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    background = f'{DARK_SVG}<rect width="{width}" height="{height}" rx="6" fill="white"/>'
    return "\n".join([f'{head} role="img" font-family="sans-serif" font-size="12">', background, *parts, "</svg>\n"])


def _ratios(sweep: Sweep) -> dict[tuple[int, int, int], float | None]:
    """By (M, N, K); None where one of the two was not timed."""
    return {(shape["M"], shape["N"], shape["K"]): scores.ratio(shape) for shape in sweep["shapes"].values()}


def _cell(x: float, y: float, ratio: float | None) -> str:
    box = f'<rect x="{x:g}" y="{y:g}" width="{CELL - 1}" height="{ROW - 1}"'
    if ratio is None:
        return f'{box} fill="none" stroke="#ccc"/>'
    colour = next(colour for most, colour, _ in COLOURS if ratio < most)
    fill = "white" if colour in PALE_TEXT else "#222"
    return f'{box} fill="{colour}"/>' + _text(x + CELL / 2, y + 13.5, f"{ratio:.2f}", "middle", fill=fill)


def _text(x: float, y: float, words: str, anchor: str = "", more: str = "", fill: str = "#222") -> str:
    place = f' text-anchor="{anchor}"' if anchor else ""
    return f'<text x="{x:g}" y="{y:g}"{place} fill="{fill}"{more and " " + more}>{escape(words)}</text>'


def caption(sweep: Sweep, drawn: Sequence[Sweep], dated: bool = True) -> str:
    """What the map shows, and how many of its products are faster, in words; beside them those of `unseen` sweeps.
    dated: whether it says at which commit."""
    counts = []
    for kind, sweeps in {"listed": [sweep], "unseen": drawn}.items():
        known = [ratio for each in sweeps for ratio in _ratios(each).values() if ratio is not None]
        faster, slower = sum(ratio >= EQUAL for ratio in known), sum(ratio < 1 / EQUAL for ratio in known)
        if known:
            counts.append(f"of {len(known)} {kind} GEMMs triton_gemm is faster on {faster}, torch on {slower}")
    date = f" {bench_tables.origin([sweep])}" if dated else ""
    return f"{bench_tables.where(sweep)}: {'; '.join(counts)}. The others are within 2 %.{date}"
