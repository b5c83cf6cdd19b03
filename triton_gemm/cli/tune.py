"""`triton-gemm tune`: choose by measurement, and keep it."""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import typer
from rich.console import Console

from ..problem import GemmProblem
from ..selection.select import Selection
from ..tables.files import Bits
from ..tables.records import named, plain
from . import output, products, words


@products.takes_gemms
@output.command
def tune(
    gemms: products.Gemms,
    budget: words.Budget = "2m",
    bits: words.Bits = "same",
    measure: Annotated[
        Literal["graph", "eager"], typer.Option(help="What is timed: a CUDA graph's replay, or calls from Python.")
    ] = "graph",
    resume: Annotated[
        bool, typer.Option("--resume", help="Skip what was tuned before with the same versions.")
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="How often to tune each GEMM; the report says how often the same candidate won.")
    ] = 1,
    device: Annotated[str | None, typer.Option(metavar="cuda:N", help="The GPU to tune on; by default cuda:0.")] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Print the candidates and time nothing; --device may be h200.")
    ] = False,
    as_json: output.Json = False,
) -> None:
    """Time the candidates for your GEMMs on this GPU, and save the fastest in your table.

    `triton-gemm tune --shapes 4096x4096x4096,16x14336x4096 --dtype bf16 --layout nt --budget 2m`

    Linear layers are given by their weights, and tuned for all these numbers of rows. With --rows the weights of
    --shapes-from are tuned in the same way:

    `triton-gemm tune --weights 4096x4096,1536x7168 --rows 1-4096 --budget 5m`

    Your programs then use the table: see `triton-gemm cache show`. With --bits same, the default, tuned kernels give
    the same bits as untuned ones. Each winner is saved at once, so tuning can be interrupted, and --resume continues
    it. The exit status is 1 if a GEMM could not be measured, or its winner not stored.
    """
    seconds, rows = words.seconds(budget), None if gemms.rows is None else words.rows(gemms.rows)
    problems = products.chosen(gemms, None if gemms.weights is None or rows is None else [1])  # each weight once
    if rows is not None and gemms.weights is None and gemms.shapes_from is None:
        raise output.wrong_call("--rows goes with --weights or --shapes-from")
    tuning, given = products.tuning(), gemms.shapes_from or problems
    if dry_run:
        planned = tuning.planned(given, words.device(device), bits, rows)
        names = {problem: _candidates(problem, selections, bits) for problem, selections in planned.items()}
        shapes = [{"problem": plain(problem), "candidates": x} for problem, x in names.items()]
        output.show({"shapes": shapes}, as_json, lambda console: _show_plan(console, names))
        return
    gpu = words.gpu(device)
    if not sys.stderr.isatty():  # in a terminal tuning shows what it tries and the best so far
        _log_to_stderr()
    report = tuning.tune(
        given,
        budget=seconds,
        bits=bits,
        measure=measure,
        resume=resume,
        repeat=repeat,
        rows=rows,
        device=gpu,
    )
    output.show(report.as_dict(), as_json, lambda console: console.print(str(report), soft_wrap=True))
    if any(one.outcome in ("failed", "refused", "not stored") for one in report.shapes):
        raise typer.Exit(output.FAILED)


def _candidates(problem: GemmProblem, selections: Sequence[Selection], bits: Bits) -> list[str]:
    """The names of all that would be timed, torch's product the last."""
    from ..tuning.of_torch import torchs_product

    with_torch = bits == "any" and torchs_product(problem)[0] is not None
    return [*map(named, selections), *["torch"] * with_torch]


def _show_plan(console: Console, every: Mapping[GemmProblem, Sequence[str]]) -> None:
    for problem, names in every.items():
        console.print("\n    ".join([words.problem_text(problem), *names]), soft_wrap=True, highlight=False)
    count = output.counted(sum(map(len, every.values())), "candidate")
    console.print(f"{count} for {output.counted(len(every), 'GEMM')}; nothing was timed")


def _log_to_stderr() -> None:
    """Has tuning say a line for each product."""
    log = logging.getLogger("triton_gemm.tuning")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))
