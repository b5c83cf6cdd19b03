"""Measures what tuning is worth on this GPU: what the model's choices lose, what `tune` finds, whether it does again.

`listed` tunes the listed products of language models with the bits of the model's choice, which is what a shipped table
comes from; `unseen` 200 products that are drawn with --seed in every regime, with any bits, so that choices are held to
the fastest kernel there is; `twice` 60 of these, each tuned twice; `layers` 24 projections at 100 to 1000 tokens.
`llama-3-8b` and other models tune a model's weights for 1 to 4096 rows, or those that --weights names, and
`llama-3-8b-rows` 40 of its products with rows that are drawn, which says what tables are worth there, shipped ones and
those of the runs before. A record of each is written to perf/results/<gpu>/tuning/<Triton>/.

Neither your own tables nor your calibrated model are used or changed: --table writes what was found into a file for
`triton-gemm cache import`. --rebuild RECORD... rebuilds such a file from records, for the present cost model, and
measures nothing. Exit status: 1 if a product could not be measured, 2 for a mistake in the call, 130 if interrupted.

With TRITON_GEMM_CAPABILITY=8.0 in the environment the GPU is treated as an older one, without Hopper's kernels.
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from perf.common import arguments as args
from perf.common.files import read_json, shown, write_json
from perf.measure import environment
from perf.measure.compile_ahead import compile_ahead
from perf.measure.environment import RESULTS
from perf.tuning import tables
from perf.tuning.rebuild import table_of
from perf.tuning.runs import MODELS, RUNS, SEED, Run
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.device import current_device_info
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import policies
from triton_gemm.selection.select import Selection
from triton_gemm.suites.shapes import spaced
from triton_gemm.tables import export_to
from triton_gemm.tables.records import named
from triton_gemm.tuning import planned, tune
from triton_gemm.tuning.report import SHAPE_FIELDS, ShapeReport, TuningReport, values
from triton_gemm.tuning.rows import grid

PART = 20  # products after which the record is written


def record_of(
    run: Run,
    seed: int,
    report: TuningReport,
    used: Mapping[GemmProblem, Selection] | None = None,
    weights: Sequence[str] = (),
    shard: tuple[int, int] = (1, 1),
    some: str | None = None,
) -> dict[str, Any]:
    """A record, with its environment. used: what tables, or the model, had for each product before; weights: those
    that were tuned of a model's, "NxK", where that is not all; shard: which part of the products, of how many; some: a
    name for those of a file."""
    return {
        "environment": environment.describe(tables.FOLDER),
        "run": run.name,
        "what": run.what,
        "seed": seed if run.drawn else None,
        **({"weights": list(weights)} if weights else {}),
        **({"shard": list(shard)} if shard[1] > 1 else {}),
        **({"some": some} if some else {}),
        "capability": list(current_device_info().capability),
        **{name: getattr(report, name) for name in ("bits", "measure")},
        "repeat": run.repeat,
        "seconds": round(report.seconds, 1),
        "products": [_product(one, (used or {}).get(one.problem)) for one in report.shapes],
    }


def _product(report: ShapeReport, used: Selection | None) -> dict[str, Any]:
    """A report in plain values of five digits, None for what was not measured."""
    selections = {"choice": report.choice, "winner": report.selection}
    found = {
        "product": problem_text(report.problem),
        **values(report, *(name for name in SHAPE_FIELDS if name not in ("problem", "calls", "selection"))),
        **{name: selection and named(selection) for name, selection in selections.items()},
        "used_us": next((us for us, name in report.times if used is not None and name == named(used)), None),
    }
    rounded: dict[str, Any] = json.loads(json.dumps(found), parse_float=lambda x: float(f"{float(x):.5g}"))
    return rounded


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.rebuild is not None:
        return rebuild(given.rebuild, given.table)
    if not torch.cuda.is_available():
        print("error: tuning is measured on a GPU, and there is none", file=sys.stderr)
        return 2
    logging.basicConfig(format="%(relativeCreated)8.0f ms  %(message)s")
    logging.getLogger("triton_gemm.tuning").setLevel(logging.INFO)  # a line for each product
    try:
        with TemporaryDirectory() as folder:
            os.environ["TRITON_GEMM_CACHE_DIR"] = folder  # until this process ends
            whole = [measure(RUNS[name], given) for name in given.runs]
    except KeyboardInterrupt:
        print("interrupted: what was measured is recorded, but for the last products", file=sys.stderr)
        return 130
    return 0 if all(whole) else 1


def rebuild(sources: Sequence[Path], out: Path) -> int:
    """Writes the table rebuilt from records; the exit status."""
    try:
        table = table_of(*map(read_json, sources))
        out.write_text(table.text())
    except (OSError, ValueError) as error:
        print(f"error: {', '.join(map(shown, sources))}: {error}", file=sys.stderr)
        return 2
    print(f"{len(table.entries)} entries, written to {shown(out)}")
    return 0


def measure(run: Run, given: argparse.Namespace) -> bool:
    """Measures a run and writes its record; whether all of its products could be measured."""
    wanted = [x for x in run.problems(given.seed) if not given.weights or f"{x.N}x{x.K}" in given.weights]
    if given.products is not None:
        names = given.products.read_text().splitlines()
        wanted = [x for x in wanted if problem_text(x) in names]
        print(f"{len(wanted)} of {len(names)} products of {given.products.name} are of {run.name}")
    index, parts = given.shard
    problems = list(spaced(wanted, given.limit))[index - 1 :: parts]
    if not problems:
        print(f"no product of {run.name} is asked for")
        return True
    device = current_device_info()
    if given.warm:
        compile_ahead(planned(problems, device, run.bits, run.rows))
    used = {x: policies.choose(x, device) for x in problems} if run.rows is None else None
    count = len(problems) * (1 if run.rows is None else len(grid(run.rows)))
    budget = given.budget or run.seconds * run.repeat * count
    how: dict[str, Any] = {"bits": run.bits, "repeat": run.repeat, "rows": run.rows}
    some = given.products and given.products.stem
    report = TuningReport((), device.name, run.bits, "graph", budget, 0.0)
    for i in range(0, len(problems), PART):
        part = problems[i : i + PART]
        found = tune(part, budget=budget * (len(part) / len(problems)), **how, progress=lambda _: None)
        seconds = report.seconds + found.seconds
        report = replace(found, shapes=report.shapes + found.shapes, budget=budget, seconds=seconds)
        record = record_of(run, given.seed, report, used, given.weights, given.shard, some)
        path = tables.path_of(given.out or RESULTS, record)
        write_json(path, record)
    print("\n".join(["", *tables.worst(record), "", tables.text(record)]))
    print(f"Written to {shown(path)}; `python -m perf.pages` shows it.", flush=True)
    if given.table is not None:
        export_to(given.table, bits=run.bits)
    return all(one.measured for one in report.shapes)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = args.parser("tuning", __doc__)
    add = parser.add_argument
    add("runs", nargs="*", type=args.name_of(RUNS), metavar="RUN", help=f"of {', '.join(RUNS)}")
    add("--seed", type=int, default=SEED, help=f"draws other products; default {SEED}")
    add("--limit", type=args.count, metavar="N", help="at most N products, evenly spaced")
    seconds = ", ".join(f"{run.name} {run.seconds:g}" for run in RUNS.values())
    add("--budget", type=args.count, metavar="S", help=f"seconds for a run; default for each trial {seconds}")
    add("--weights", type=lambda words: words.split(","), default=(), metavar="NxK,NxK", help="of a model's only these")
    lines = "only those that it names, a line each, as `python -m perf.choices --missing GPU` prints them"
    add("--products", type=args.path, metavar="FILE", help=lines)
    add("--shard", type=args.shard, default=(1, 1), metavar="I/N", help="one of N parts of the products")
    add("--warm", action="store_true", help="compile everything first, on all cores")
    add("--out", type=args.path, metavar="DIR", help="instead of perf/results")
    add("--table", type=args.path, metavar="FILE", help="write what was found there, too")
    add("--rebuild", type=args.path, metavar="RECORD", nargs="+", help="rebuild --table from these; measures nothing")
    given = parser.parse_args(arguments)
    if not (given.runs or given.rebuild):
        parser.error(f"name a RUN of {', '.join(RUNS)}")
    for name in given.runs if given.weights else ():
        named_of = [f"{N}x{K}" for N, K in MODELS.get(name, ())]
        if not set(given.weights).issubset(named_of):
            parser.error(f"--weights must be of {name}'s: {', '.join(named_of) or 'it has none'}")
    if given.rebuild is not None and (given.runs or given.weights or given.table is None):
        parser.error("--rebuild needs --table and takes no RUN and no --weights")
    if given.rebuild is not None:
        args.refuse(parser, given, ("shard", "products"), "--rebuild measures nothing")
    if given.products is not None and not given.products.is_file():
        parser.error(f"--products: there is no file {given.products}")
    return given


if __name__ == "__main__":
    sys.exit(main())
