"""`triton-gemm tune`: choose by measurement, and keep it."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import typer
from rich.console import Console
from rich.status import Status

from ..suites import SUITES
from . import output, products, words
from .cache import BitsWord


@output.command
def tune(
    shapes: words.Shapes = None,
    suite: Annotated[
        str | None, typer.Option(metavar="NAME", help=f"The shapes of a suite: {', '.join(SUITES)}.")
    ] = None,
    shapes_from: words.ShapesFrom = None,
    dtype: words.Dtype = "bf16",
    layout: words.Layout = "nn",
    budget: Annotated[str, typer.Option(metavar="TIME", help="How long it may take: 90s, 2m, 1h.")] = "2m",
    bits: BitsWord = "same",
    measure: Annotated[
        Literal["graph", "eager"], typer.Option(help="What is timed: a CUDA graph's replay, or calls from Python.")
    ] = "graph",
    resume: Annotated[
        bool, typer.Option("--resume", help="Leave out what was tuned before, with the same versions.")
    ] = False,
    device: Annotated[str | None, typer.Option(metavar="cuda:N", help="The GPU to tune on; by default cuda:0.")] = None,
    as_json: output.Json = False,
) -> None:
    """Time the candidates for your products on this GPU, and keep the fastest in your table.

    `triton-gemm tune --shapes 4096x4096x4096,16x14336x4096 --dtype bf16 --layout nt --budget 2m`

    What you run then uses it, without a change: see `triton-gemm cache show`. With --bits same, the default, the
    tuned kernels give the same bits as the untuned ones. What was found is kept after each product, so it can be
    interrupted, and goes on with --resume.
    """
    seconds = words.seconds(budget)
    problems = products.chosen(shapes, suite, shapes_from, words.dtype(dtype), layout)
    tuning = products.tuning()
    errors = Console(stderr=True, highlight=False, markup=False)
    with _Telling(errors) as telling:
        report = tuning.tune(
            problems if shapes_from is None else shapes_from,
            budget=seconds,
            bits=bits,
            measure=measure,
            resume=resume,
            progress=telling,
            device=device,
        )
    output.show(report.as_dict(), as_json, lambda console: console.print(str(report), soft_wrap=True))
    if any(one.outcome in ("failed", "refused") for one in report.shapes):
        raise typer.Exit(output.FAILED)


class _Telling:
    """What is tried and the best so far: a line that changes, or where there is no terminal one for each product."""

    def __init__(self, console: Console) -> None:
        self.console, self.number = console, 0
        self.status: Status | None = Status("", console=console) if console.is_terminal else None

    def __enter__(self) -> _Telling:
        if self.status is not None:
            self.status.start()
        return self

    def __exit__(self, *_: object) -> Literal[False]:
        if self.status is not None:
            self.status.stop()
        return False

    def __call__(self, now: Any) -> None:
        where = f"{now.number}/{now.count} {words.problem_text(now.problem)}"
        if self.status is not None:
            best = f"{now.best.kernel} {now.best.config} {now.best_us:.4g} us" if now.best_us else ""
            times = f"{now.timed} of {now.candidates} timed; model's choice {now.choice_us:.4g} us, best {best}"
            self.status.update(f"{where}: {times}; {now.seconds_left:.0f} s left")
        elif now.number != self.number:
            self.console.print(where, soft_wrap=True)
        self.number = now.number
