"""Puts the committed results and the rungs' headers into README.md and pages in docs/, between markers.

`python -m perf.pages` rewrites them, the pages of the exercises, and those in the folders of the results: each
report.md, and for each GPU the shapes of the bench. It draws the pictures of all records again. With `--check` it
changes nothing and fails where pages are stale.
A block reads `<!-- results:NAME -->`, its contents, `<!-- /results -->`; the names are in `perf/pages/blocks.py`.
`results:NAME on GPU` shows one GPU alone, named as its folder of results.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from perf.bench import plots as bench_plots
from perf.bench import tables as bench_tables
from perf.common.files import read_json
from perf.ladder import plots, report_page
from perf.measure import environment
from perf.measure.environment import ROOT
from perf.pages import architecture, blocks, exercises, rung_page, speed_map
from perf.pages.results import Results

FILLED = (
    *["accuracy", "architecture", "exercises", "ladder", "log/tuning", "models"],
    *["performance", "performance-h100", "precision", "reliability", "tuning", "use"],
)
PAGES = (
    ROOT / "README.md",
    *(ROOT / "docs" / f"{name}.md" for name in FILLED),
    *sorted(rung_page.RUNG_PAGES.glob("*.md")),
)


def written() -> dict[Path, str]:
    """Every page, as it is made of today's results."""
    results = Results.read(environment.RESULTS)
    found = {path: blocks.filled(path.read_text(), results, path.parent) for path in PAGES}
    found |= {architecture.PICTURE: architecture.picture(), **exercises.pages()}
    for record in results.records:
        pages = report_page.texts(record, record.folder.glob("*.png"))
        found |= {record.folder / name: text for name, text in pages.items()}
    for made, sweeps in bench_tables.by_place(results.sweeps):
        folder = bench_tables.folder_of(environment.RESULTS, made)
        found |= {folder / name: text for name, text in bench_tables.pages(sweeps).items()}
        if (shown := speed_map.listed(sweeps)) is not None:
            found[speed_map.file_of(environment.RESULTS, shown)] = speed_map.picture(shown)
    return found


def stale() -> list[Path]:
    """The pages that differ from what they would be rewritten to.

    That sources have changed since a measurement makes no page stale: else each first edit of a kernel would.
    """
    return [
        path
        for path, text in written().items()
        if not path.exists() or _without_age(path.read_text()) != _without_age(text)
    ]


def _without_age(text: str) -> str:
    return text.replace(environment.CHANGED, "")


def rewrite() -> None:
    for record in Results.read(environment.RESULTS).records:
        plots.everything(record, record.folder)
    for path, text in written().items():
        path.write_text(text)
    for folder in environment.RESULTS.glob(f"*/{bench_tables.FOLDER}/*"):
        sweeps = [read_json(path) for path in folder.glob("*.json")]
        points = bench_tables.points(sweeps)
        if len({point.mode for point in points}) > 1:  # one has nothing to be compared with
            bench_plots.precisions(points, bench_tables.where(sweeps[0]), folder / bench_tables.PICTURE)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.pages", description=__doc__)
    parser.add_argument("--check", action="store_true", help="change nothing; fail where a page is stale")
    if not parser.parse_args(arguments).check:
        rewrite()
        return 0
    old = stale()
    for path in old:
        print(f"{os.path.relpath(path)} is stale: python -m perf.pages", file=sys.stderr)
    return 1 if old else 0


if __name__ == "__main__":
    sys.exit(main())
