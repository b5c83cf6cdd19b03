"""Measure triton_gemm against cuBLAS on suites of shapes: python -m perf.bench SUITE [SUITE...].

Prints a line for each shape as it is measured, and a summary against the targets; everything goes to one JSON file a
suite, written after each shape. Exit status: 1 if a provider gave wrong results, 2 for a mistake in the call, 130 if
interrupted.

`first-calls` is no suite of shapes. It measures the first calls of a process, and has its own options: `python -m
perf.bench first-calls --help`.

With --baseline each suite is compared with a sweep made before, by the ratios to cuBLAS of both, so that two cards of
one kind may be compared. --fail-below makes exit status 1 of a slower one.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import geometric_mean
from typing import Any

os.environ.pop("TRITON_INTERPRET", None)
os.environ.pop("PYTORCH_TUNABLEOP_ENABLED", None)  # cuBLAS is measured as it is; the tuned one is a peer

try:
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from perf.bench import first_calls, scores, sweep
    from perf.bench import tables as bench_tables
    from perf.bench.peers import PEERS
    from perf.bench.scores import AUTOTUNED, Sweep
    from perf.common import arguments as args
    from perf.common.files import read_json, shown
    from perf.common.formats import Cell
    from perf.measure import environment
    from perf.measure.providers import OURS
    from triton_gemm.suites import ALL, PRECISION, SUITES, Suite, chosen
    from triton_gemm.tuning.timing import DeviceLostError
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]'")

WIDE = 200  # columns where there is no terminal
SHAPE_WIDTH, CELL_WIDTH = 34, 10


def main(arguments: Sequence[str] | None = None) -> int:
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] == first_calls.NAME:
        return first_calls.main(arguments[1:])
    call = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if call.list:
        show_list(call, console)
        return 0
    surroundings = environment.describe("bench")
    if surroundings["gpu"] is None:
        print("error: the bench needs a CUDA GPU, and torch sees none here; --list shows the suites", file=sys.stderr)
        return 2
    folder = call.out or bench_tables.folder_of(environment.RESULTS, surroundings)
    files = {suite.name: call.json or folder / sweep.file_name(suite, call.options) for suite in call.suites}
    try:
        before = baselines(call)
    except (OSError, ValueError) as error:
        print(f"error: --baseline: {error}", file=sys.stderr)
        return 2
    try:
        for file in files.values():
            file.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        print(f"error: cannot write to {file.parent}: {error.strerror or error}", file=sys.stderr)
        return 2
    done: list[Sweep] = []
    try:
        for suite in call.suites:
            done.append(one(suite, call.options, files[suite.name], surroundings, console))
    except KeyboardInterrupt:
        print("interrupted: what was measured is kept", file=sys.stderr)
        return 130
    except DeviceLostError as lost:
        print(f"error: the GPU cannot be used any more {lost}; what was measured is kept", file=sys.stderr)
        return 1
    finally:
        show_summary(done, console)
        slower = show_changes(done, before, call.fail_below, console)
        for found in done:
            console.print(f"{found['suite']}: {shown(files[found['suite']])}", highlight=False, soft_wrap=True)
    failures = scores.failures(done)
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    for line in scores.suspicious(done):
        print(f"too good to be true until shown otherwise: {line}", file=sys.stderr)
    return 1 if failures or slower else 0


def baselines(call: argparse.Namespace) -> dict[str, Sweep]:
    """The sweep of each suite to compare with; none without --baseline. ValueError where it is another suite's."""
    given, found = call.baseline, dict[str, Sweep]()
    if given is None:
        return found
    for suite in call.suites:
        file = given / sweep.file_name(suite, call.options) if given.is_dir() else given
        found[suite.name] = read_json(file)
        if found[suite.name].get("suite") != suite.name:
            raise ValueError(f"{file} is no sweep of {suite.name}")
    return found


def show_changes(done: Sequence[Sweep], before: Mapping[str, Sweep], least: float | None, console: Console) -> bool:
    """Each suite against its baseline, and its slowest shape; whether a mean is below `least`."""
    slower = False
    for found in (one for one in done if one["suite"] in before):
        changes = scores.changes(before[found["suite"]], found)
        mean = geometric_mean(changes.values()) if changes else 0.0
        worst = min(changes, key=changes.__getitem__, default="no shape is in both")
        below = least is not None and mean < least
        line = f"{scores.label(found)} against the baseline: {mean:.3f} over {len(changes)} shapes"
        line += f", at worst {changes[worst]:.3f}: {worst}" if changes else f": {worst}"
        console.print(line, style="red" if below else "", highlight=False, soft_wrap=True)
        slower |= below
    return slower


def one(suite: Suite, options: sweep.Options, file: Path, surroundings: Mapping[str, Any], console: Console) -> Sweep:
    """Measures a suite, a line for each shape."""
    total = len(chosen(suite, options.limit, options.unseen))
    console.print(f"\n{suite.name}: {suite.reason}", style="bold", highlight=False)
    begin = time.perf_counter()
    heading = True
    live: Sweep = {"suite": suite.name, "unit": suite.unit, "shapes": {}}

    def show(key: str, result: dict[str, Any]) -> None:
        nonlocal heading
        live["shapes"][key] = result
        cells = bench_tables.row(live, key)
        if heading:
            show_line({name: name for name in cells}, "", console, "bold")
            heading = False
        counted = f"{len(live['shapes'])}/{total} {time.perf_counter() - begin:.0f} s"
        ratio = scores.ratio(result)
        style = "red" if ratio is None or ratio < 1 else "green" if ratio > 1 else ""
        show_line(cells, counted, console, style)

    sources = environment.source_hash(bench_tables.measured(suite.kind))
    return sweep.run(suite, options, file, {**surroundings, "sources": sources}, show)


def show_line(cells: Mapping[str, Cell], counted: str, console: Console, style: str) -> None:
    """One line of columns as wide as their names need; the last cell takes the room it needs."""
    (_, first), *middle, (_, last) = [(name, "" if cell is None else str(cell)) for name, cell in cells.items()]
    words = [f"{counted:>12}  {first:<{SHAPE_WIDTH}}"]
    words += [f"{cell:>{max(CELL_WIDTH, len(name))}}" for name, cell in middle]
    console.print(Text(" ".join([*words, " " + last]).rstrip(), style=style), soft_wrap=True)


def show_summary(done: Sequence[Sweep], console: Console) -> None:
    """Every suite against its targets, and which shapes lose."""
    rows = bench_tables.score_rows(done)
    if not rows:
        return
    table = Table(title="ratio of times: more than 1 is faster", title_justify="left")
    for i, name in enumerate(rows[0]):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in rows:
        style = {"met": "green", "missed": "red"}.get(str(row[""]), "")
        table.add_row(*map(str, row.values()), style=style)
    console.print()
    console.print(table)
    for score in (score for found in done for score in scores.scores(found) if score.losers):
        console.print(f"{score.suite}: {bench_tables.losers(score)}", highlight=False, soft_wrap=True)
    for line in (line for found in done for line in bench_tables.absences(found)):
        console.print(line, highlight=False, soft_wrap=True)


def show_list(call: argparse.Namespace, console: Console) -> None:
    """The shapes that would be measured; the suites and their sizes if none is named."""
    for name, suite in SUITES.items() if not call.suites else ():
        line = f"{name:<{max(map(len, SUITES))}} {len(suite.shapes):>4} shapes: {suite.reason}"
        console.print(line, highlight=False, soft_wrap=True)
    for suite in call.suites:
        console.print(f"{suite.name}: {suite.reason}", style="bold", highlight=False, soft_wrap=True)
        for shape in chosen(suite, call.options.limit, call.options.unseen):
            console.print(f"  {shape.key:<{SHAPE_WIDTH}} {shape.name}".rstrip(), highlight=False, soft_wrap=True)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line; its `suites` and `options`. No suites: their names are to be listed."""
    parser = args.parser("bench", __doc__)
    add = parser.add_argument
    known = ", ".join(SUITES)
    add("suites", nargs="*", metavar="SUITE", help=f"{known}; all but 16 bits: precision; all, llm-large aside: all")
    add("--dtype", choices=("bf16", "fp16"), help="of suites of 16 bits (bf16)")
    add("--json", type=args.path, metavar="FILE", help="where to write, if it is one suite")
    add("--out", type=args.path, metavar="DIR", help="default perf/results/<gpu>/bench/<triton version>")
    add("--budget", type=float, default=sweep.BUDGET_S, metavar="SECONDS", help="of timing a shape (%(default)s)")
    add("--limit", type=args.count, metavar="N", help="at most N shapes a suite, evenly spaced")
    add("--providers", type=args.names_of(PEERS), metavar="NAME,NAME", help=f"of {', '.join(PEERS)}")
    add("--peers", action="store_true", help=f"{' and '.join(AUTOTUNED)} as well")
    add("--unseen", type=int, metavar="SEED", help="other shapes of the same regimes, drawn at random")
    add("--baseline", type=args.path, metavar="FILE", help="compare with this sweep, or folder of sweeps")
    add("--fail-below", type=float, metavar="RATIO", help="exit status 1 where a suite's mean against it is less")
    add("--warm", action="store_true", help="compile all shapes' kernels first, many at once")
    add("--list", action="store_true", help="show the suites, or the shapes of those named; measures nothing")
    given = parser.parse_args(arguments)
    several = {"all": ALL, "precision": PRECISION}
    names = tuple(dict.fromkeys(name for word in given.suites for name in several.get(word, (word,))))
    for name in names:
        if name not in SUITES:
            parser.error(f"no suite {name!r}; there are {known}")
    if not names and not given.list:
        parser.error("name a SUITE, or --list them")
    if given.list:
        flags = ("dtype", "json", "out", "budget", "providers", "peers", "warm", "baseline", "fail_below")
        args.refuse(parser, given, flags, "--list measures nothing")
    if not names:
        args.refuse(parser, given, ("limit", "unseen"), "without a SUITE no shapes are listed")
    if all(SUITES[name].mode for name in names):
        args.refuse(parser, given, ("dtype",), f"{', '.join(names)}: the precision is the suite's own")
    if given.providers and OURS not in given.providers:
        args.refuse(parser, given, ("warm",), f"it compiles for {OURS}, which --providers leaves out")
    if given.json and len(names) > 1:
        parser.error("--json is for one suite; --out takes the files of several")
    if given.json and given.out:
        parser.error("--json and --out say the same thing twice")
    if given.fail_below is not None and given.baseline is None:
        parser.error("--fail-below needs a --baseline")
    if given.baseline and given.baseline.is_file() and len(names) > 1:
        parser.error("--baseline of several suites is a folder")
    if not 0 < given.budget < float("inf"):
        parser.error("--budget is a number of seconds above 0")
    dtype = given.dtype or sweep.Options.dtype
    of_shapes = (given.limit, given.providers, given.unseen, given.warm, given.peers)
    given.options = sweep.Options(dtype, given.budget, *of_shapes)
    given.suites = [SUITES[name] for name in names]
    return given


if __name__ == "__main__":
    sys.exit(main())
