"""What tuning shows of its progress: a line that changes where a terminal is watched, else a line in the log for each
problem."""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeVar

from .report import Progress, ShapeReport

log = logging.getLogger("triton_gemm.tuning")

Step = TypeVar("Step")
Callback = Callable[[Step], None] | None


@contextmanager
def shown(
    progress: Callback[Step], text: Callable[[Step], str]
) -> Iterator[tuple[Callback[Step], Callable[[ShapeReport], None]]]:
    """(callback for every step, callback for the end of every problem). progress: a user's callback, instead of a line
    in the terminal; text: that line."""

    def logged(report: ShapeReport) -> None:
        log.info("%s", report)

    if progress is not None or not sys.stderr.isatty():
        yield progress, logged
        return
    try:
        from rich.console import Console
    except ModuleNotFoundError:
        yield None, logged
        return
    console = Console(stderr=True, highlight=False)
    with console.status("compiling") as status:

        def line(report: ShapeReport) -> None:
            logged(report)
            console.print(str(report), soft_wrap=True)

        yield lambda step: status.update(text(step)), line


def step_text(step: Progress) -> str:
    """A step in one line."""
    p = step.problem
    gain = f", {100 * (step.choice_us / step.best_us - 1):+.1f} %" if step.best_us > 0 else ""
    return (
        f"{step.number}/{step.count} {p.M}x{p.N}x{p.K}: {step.timed} of {step.candidates} timed, best "
        f"{step.best_us:.4g} us{gain}: {step.best.kernel} {step.best.config}; {max(0.0, step.seconds_left):.0f} s left"
    )
