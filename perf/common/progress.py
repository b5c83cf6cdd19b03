"""Progress: a bar where there is a terminal, a line for each step where there is none."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

Advance = Callable[[str], None]


@dataclass(frozen=True)
class Task:
    """A step of a report; `run(advance)` calls `advance(label)` for each of its `steps` as it ends."""

    label: str
    steps: int
    run: Callable[[Advance], None]


def run(tasks: Iterable[Task], console: Console) -> None:
    """Runs the tasks in order, showing each of their steps."""
    tasks = list(tasks)
    total = sum(task.steps for task in tasks)
    if not console.is_terminal:
        _run_in_lines(tasks, total)
        return
    columns = (BarColumn(), MofNCompleteColumn(), TimeElapsedColumn(), TextColumn("{task.description}"))
    with Progress(*columns, console=console) as bar:
        line = bar.add_task("", total=total)
        for task in tasks:
            bar.update(line, description=task.label)
            task.run(lambda label: bar.update(line, advance=1, description=label))


def _run_in_lines(tasks: list[Task], total: int) -> None:
    begin = time.perf_counter()
    count = 0

    def advance(label: str) -> None:
        nonlocal count
        count += 1
        print(f"[{count:3d}/{total}] {time.perf_counter() - begin:6.1f} s  {label}", file=sys.stderr, flush=True)

    for task in tasks:
        task.run(advance)
