"""`triton-gemm tune`: choose by measurement, and keep it."""

from __future__ import annotations

import logging
import sys
from typing import Annotated, Literal

import typer

from . import output, products, words


@output.command
def tune(
    shapes: words.Shapes = None,
    suite: words.Suite = None,
    shapes_from: words.ShapesFrom = None,
    dtype: words.DtypeOfSizes = None,
    layout: words.LayoutOfSizes = None,
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long it may take: 90s, 2m, 1h.")] = "2m",
    bits: words.Bits = "same",
    measure: Annotated[
        Literal["graph", "eager"], typer.Option(help="What is timed: a CUDA graph's replay, or calls from Python.")
    ] = "graph",
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what was tuned before, with the same versions.")
    ] = False,
    repeat: Annotated[
        int, typer.Option(min=1, help="Measure so often; the report says how often the same candidate won.")
    ] = 1,
    device: Annotated[str | None, typer.Option(metavar="cuda:N", help="The GPU to tune on; by default cuda:0.")] = None,
    as_json: output.Json = False,
) -> None:
    """Time the candidates for your products on this GPU, and keep the fastest in your table.

    `triton-gemm tune --shapes 4096x4096x4096,16x14336x4096 --dtype bf16 --layout nt --budget 2m`

    What you run then uses it, without a change: see `triton-gemm cache show`. With --bits same, the default, the
    tuned kernels give the same bits as the untuned ones. What was found is kept after each product, so it can be
    interrupted, and goes on with --resume. The exit status is 1 if a product could not be measured, or what
    was found could not be stored.
    """
    seconds, gpu = words.seconds(budget), words.gpu(device)
    problems = products.chosen(shapes, suite, shapes_from, dtype, layout)
    tuning = products.tuning()
    if not sys.stderr.isatty():  # in a terminal tuning shows what it tries and the best so far
        _log_to_stderr()
    report = tuning.tune(
        problems if shapes_from is None else shapes_from,
        budget=seconds,
        bits=bits,
        measure=measure,
        resume=resume,
        repeat=repeat,
        device=gpu,
    )
    output.show(report.as_dict(), as_json, lambda console: console.print(str(report), soft_wrap=True))
    if any(one.outcome in ("failed", "refused", "not stored") for one in report.shapes):
        raise typer.Exit(output.FAILED)


def _log_to_stderr() -> None:
    """Has tuning say a line for each product."""
    log = logging.getLogger("triton_gemm.tuning")
    log.setLevel(logging.INFO)
    log.addHandler(logging.StreamHandler(sys.stderr))
