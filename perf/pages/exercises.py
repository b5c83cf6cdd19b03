"""Pages of the exercises, docs/exercises/eNN.md: the kernel with its hole, and what helps in folds."""

from __future__ import annotations

import re
from pathlib import Path

from perf.common import formats
from perf.common.files import link
from perf.measure.environment import ROOT
from triton_gemm.ladder import Rung
from triton_gemm.ladder.exercises import EXERCISES, Exercise
from triton_gemm.ladder.exercises.command import PROGRAM

FOLDER = ROOT / "docs" / "exercises"
RUNG = re.compile(r"\bk\d\d\b")
# The exercises that a rung's source solves: its code is best read after them.
SOLVED = {"k01": [5], "k02": [1], "k03": [2], "k04": [4], "k07": [7]}
SOLVED |= {"k08": [8], "k09": [8, 10], "k10": [5, 8, 10, 11], "k11": [5, 10, 13]}


def pages() -> dict[Path, str]:
    return {_file(exercise): _page(exercise) for exercise in EXERCISES}


def table(folder: Path) -> str:
    """All of them, for a page in this folder: what each is about, and its rungs."""
    rows = []
    for exercise in EXERCISES:
        name, about = exercise.title.removesuffix(".").split(": ")
        about, _, rungs = about.partition(" (")
        linked = f"[{exercise.number} {name}]({link(_file(exercise), folder)})"
        rows.append((linked, about, _rungs(rungs[:-1], folder)))
    return formats.table(["exercise", "idea", "read before"], rows)


def of(rung: Rung, folder: Path) -> str:
    """Links to the exercises that name this rung."""
    named = [one for one in EXERCISES if rung.id in one.title]
    return ", ".join(f"[{one.number}]({link(_file(one), folder)})" for one in named)


def spoils(rung: Rung) -> str:
    """What is said of a rung's source where it is folded or linked: "; it spoils exercise 4", or nothing."""
    numbers = SOLVED.get(rung.id, [])
    named = re.sub(", ([0-9]+)$", r" and \1", ", ".join(map(str, numbers)))
    return f"; it spoils exercise{'s'[: len(numbers) - 1]} {named}" if numbers else ""


def _page(exercise: Exercise) -> str:
    name, about = exercise.title.split(": ", 1)
    docstring, _, code = exercise.unfilled[3:].partition('"""')
    number, rest = exercise.number, re.sub(r"docs/(\w+\.md)", r"[docs/\1](../\1)", docstring.partition("\n")[2].strip())
    commands = (
        f"{PROGRAM} start {number}  # copies {exercise.name}.py into ./gemm_exercises\n"
        f"{PROGRAM} check {number}  # what is wrong with it, or that it is solved"
    )
    parts = [
        f"# Exercise {number}: {name}",
        f"**Idea** {_rungs(about, FOLDER)} [All exercises](../exercises.md).",
        rest,
        f"```sh\n{commands}\n```",
        "Fill in what is between `FILL IN` and `END`:",
        f"```python\n{code.strip()}\n```",
        *(formats.folded(f"Hint {i}", hint) for i, hint in enumerate(exercise.hints, 1)),
        formats.folded("Solution", f"```python\n{exercise.solution}```"),
    ]
    return "\n\n".join(parts) + "\n"


def _rungs(text: str, folder: Path) -> str:
    """The text, in which rungs are links."""
    return RUNG.sub(lambda found: f"[{found[0]}]({link(FOLDER / f'../ladder/{found[0]}.md', folder)})", text)


def _file(exercise: Exercise) -> Path:
    return FOLDER / f"e{exercise.number:02}.md"
