"""What was compiled, a CSV file for each version of Triton, and how two of them differ."""

from __future__ import annotations

import csv
import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from perf.measure.environment import RESULTS

FOLDER = RESULTS / "drift"
# What is compiled for, as `device_model.named_device` calls it: the first by default.
GPUS = ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120")
# SASS opcodes that are counted by themselves.
ARITHMETIC = ("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "DMMA", "FFMA")
COPIES = ("UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG", "LDSM", "STSM", "LDS", "STS")
BARRIERS = ("BAR", "SYNCS", "WARPGROUP")
MAIN = (*ARITHMETIC, *COPIES, *BARRIERS)
FIGURES = ("registers", "spills", "shared", "instructions")
COLUMNS = ("case", *FIGURES, *MAIN, "sass", "error")


@dataclass(frozen=True)
class Row:
    """What one case became. registers: of a thread; spills: loads and stores of local memory; shared: bytes of a block;
    instructions: in the kernel's text; main: of those how many are of each opcode in MAIN, where there are any; sass:
    the first 16 digits of the SHA-256 of the machine code; error: why it did not compile, and all else is 0."""

    registers: int = 0
    spills: int = 0
    shared: int = 0
    instructions: int = 0
    main: Mapping[str, int] = field(default_factory=dict)
    sass: str = ""
    error: str = ""

    def figures(self) -> dict[str, int]:
        return {name: getattr(self, name) for name in FIGURES} | {name: self.main.get(name, 0) for name in MAIN}


Record = Mapping[str, Row]


def path_of(version: str, folder: Path = FOLDER, gpu: str = GPUS[0]) -> Path:
    return folder / f"{gpu}-triton-{version}.csv"


def versions(folder: Path = FOLDER, gpu: str = GPUS[0]) -> list[str]:
    """That have a record, the oldest first."""
    found = (path.stem.partition("triton-")[2] for path in folder.glob(f"{gpu}-triton-*.csv"))
    return sorted(found, key=order)


def order(version: str) -> tuple[int, ...]:
    """By which versions are sorted; what follows the numbers, as in a nightly build's, does not count."""
    numbers = []
    for part in version.split("+")[0].split("."):
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        if not digits:
            break
        numbers.append(int(digits))
    return tuple(numbers)


def write(path: Path, record: Record) -> None:
    """Whole or not at all, in the order of the record."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".partial")
    with partial.open("w", newline="") as file:
        writer = csv.writer(file, lineterminator="\n")
        writer.writerow(COLUMNS)
        for name, row in record.items():
            figures = row.figures().values()
            writer.writerow([name, *(("" for _ in figures) if row.error else figures), row.sass, row.error])
    os.replace(partial, path)


def read(path: Path) -> dict[str, Row]:
    """What `write` wrote. ValueError for a file with other columns."""
    with path.open(newline="") as file:
        lines = csv.DictReader(file)
        if tuple(lines.fieldnames or ()) != COLUMNS:
            raise ValueError(f"{path.name} has other columns than {', '.join(COLUMNS)}: write it with --update")
        return {line["case"]: _row(line) for line in lines}


def _row(line: Mapping[str, str]) -> Row:
    if line["error"]:
        return Row(error=line["error"])
    main = {name: int(line[name]) for name in MAIN if line[name] != "0"}
    registers, spills, shared, instructions = (int(line[name]) for name in FIGURES)
    return Row(registers, spills, shared, instructions, main, line["sass"])


@dataclass(frozen=True)
class Change:
    """A case that is not as before."""

    case: str
    before: Row
    after: Row

    @property
    def figures(self) -> dict[str, tuple[int, int]]:
        """Those that differ, before and after; none where one of the two did not compile."""
        if self.before.error or self.after.error:
            return {}
        after = self.after.figures()
        return {name: (x, after[name]) for name, x in self.before.figures().items() if x != after[name]}

    @property
    def worse(self) -> bool:
        """Whether it no longer compiles, or spills more: what is to be mended before that Triton is supported."""
        fails = bool(self.after.error) and not self.before.error
        return fails or (not self.after.error and self.after.spills > self.before.spills)

    @property
    def weight(self) -> tuple[bool, bool, float]:
        """The heaviest changes first: worse, compiled or not, registers or shared memory, then instructions."""
        moved = max((abs(y - x) / max(x, 1) for x, y in self.figures.values()), default=0.0)
        return not self.worse, not (self.before.error or self.after.error), -moved

    def __str__(self) -> str:
        if self.after.error:
            return f"{self.case}: {self.after.error}"
        if self.before.error:
            return f"{self.case}: compiles, and did not: {self.before.error}"
        moved = [f"{name} {x} -> {y}" for name, (x, y) in self.figures.items()]
        return f"{self.case}: {', '.join(moved or ['other machine code of the same figures'])}"


@dataclass(frozen=True)
class Drift:
    """How a record differs from one before. new, gone: cases that only one of them has."""

    cases: int
    changes: list[Change]
    new: list[str]
    gone: list[str]

    def worse(self) -> list[Change]:
        return [change for change in self.changes if change.worse]

    def moved(self, figure: str) -> tuple[int, int]:
        """How many cases have more of it, and how many less."""
        steps = [change.figures[figure] for change in self.changes if figure in change.figures]
        return sum(y > x for x, y in steps), sum(y < x for x, y in steps)


def compare(before: Record, after: Record) -> Drift:
    changes = [Change(name, before[name], row) for name, row in after.items() if name in before and before[name] != row]
    return Drift(
        cases=len(after),
        changes=sorted(changes, key=lambda change: change.weight),
        new=[name for name in after if name not in before],
        gone=[name for name in before if name not in after],
    )
