"""Exercises: kernels with one hole each, checked in Triton's interpreter, or where Gluon has none in a simulation.

A file `solutions/eNN_idea.py` is a solution. Between `# FILL IN` and `# BEFORE:` are the lines to find; behind that, as
comments up to `# END`, what the exercise has instead. An exercise is made from its solution, without the hints at its
end, so that there is one source of both.
"""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

SOLUTIONS = Path(__file__).with_name("solutions")
_HOLE = re.compile(
    r"^(?P<task>(?P<indent> *)# FILL IN: .*?\n)(?P<filled>.*?)^(?P=indent)# BEFORE:\n(?P<before>.*?)"
    r"^(?P<end>(?P=indent)# END\n)",
    re.MULTILINE | re.DOTALL,
)


@dataclass(frozen=True)
class Exercise:
    """One exercise. number: from 1 on; name: its file's, without the ending; text: the solution's source."""

    number: int
    name: str
    text: str

    @cached_property
    def _hole(self) -> re.Match[str]:
        found = _HOLE.search(self.text)
        assert found is not None, f"{self.name} has no hole"
        return found

    @property
    def title(self) -> str:
        """The first line of its docstring."""
        return self.text.partition("\n")[0].strip('"')

    @property
    def hints(self) -> tuple[str, ...]:
        """Sentences that lead to the solution, the broadest first."""
        names: dict[str, tuple[str, ...]] = {}
        exec(self.text[self.text.index("\nHINTS = ") :], names)
        return names["HINTS"]

    @property
    def solution(self) -> str:
        """The lines that fill the hole."""
        return self._hole["filled"]

    @property
    def before(self) -> str:
        """The lines that the exercise has in the hole."""
        comments = self._hole["before"].splitlines(keepends=True)
        indent = self._hole["indent"]
        return "".join(indent + line[len(indent) :].removeprefix("# ") for line in comments)

    def filled(self, lines: str) -> str:
        """The exercise's file with these lines in its hole, and without hints."""
        hole = self._hole
        made = self.text[: hole.start()] + hole["task"] + lines + hole["end"] + self.text[hole.end() :]
        return made[: made.index("\n\nHINTS = ")]

    @property
    def unfilled(self) -> str:
        """The exercise's file as a learner gets it."""
        return self.filled(self.before)

    def missing(self, text: str) -> list[str]:
        """Lines of the exercise outside of its hole that a file's `text` lacks, as `ast` writes them."""
        outside, there = (_statements(one) for one in (self.filled(f"{self._hole['indent']}pass\n"), text))
        return [line for line in outside if line not in there and line != "pass"]


def _statements(text: str) -> list[str]:
    """Its lines without comments, docstrings and indentation."""
    tree = ast.parse(text)
    for node in ast.walk(tree):
        body = getattr(node, "body", [])
        if (
            isinstance(body, list)
            and body
            and isinstance(body[0], ast.Expr)
            and isinstance(body[0].value, ast.Constant)
        ):
            body[0] = ast.Pass()
    return [line.strip() for line in ast.unparse(tree).splitlines() if line.strip()]


EXERCISES = tuple(
    Exercise(number, path.stem, path.read_text())
    for number, path in enumerate(sorted(SOLUTIONS.glob("e[0-9][0-9]_*.py")), 1)
)
