"""`triton-gemm calibrate`: fit the cost model to this GPU."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import calibration
from ..calibration import Progress
from ..tuning.shown import shown
from . import output, words


@output.command
def calibrate(
    budget: words.Budget = "60s",
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Measure and report, and store nothing.")] = False,
    device: words.Gpu = None,
    as_json: output.Json = False,
) -> None:
    """Fit the cost model to this GPU, by timing candidates of fixed GEMMs for about a minute.

    The fitted model then chooses for every GEMM without a table entry, on all GPUs with this GPU key. It may choose
    other kernels, whose results may differ in their last bits. `triton-gemm cache ls` shows the file, `triton-gemm
    cache clear --models` deletes it. The exit status is 1 if the GPU was throttled or shared, or nothing was stored.
    """
    seconds = words.seconds(budget)
    with shown(None, step_text) as (progress, _):
        report = calibration.calibrate(seconds, keep=not dry_run, progress=progress, device=words.gpu(device))
    output.show(report.as_dict(), as_json, lambda console: console.print(str(report), soft_wrap=True))
    if report.outcome == "refused" or (report.outcome == "not kept" and not dry_run):
        raise typer.Exit(output.FAILED)


def step_text(step: Progress) -> str:
    """A step in one line."""
    p = step.problem
    return (
        f"{step.number}/{step.count} {words.problem_text(p)}: {step.timed} candidates timed; "
        f"{max(0.0, step.seconds_left):.0f} s left"
    )
