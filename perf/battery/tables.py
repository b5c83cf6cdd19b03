"""Records of the battery as tables: what the command prints and docs/reliability.md shows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from perf.common import formats
from perf.common.files import read_json
from perf.common.formats import Cell
from perf.measure import environment
from perf.measure.environment import slug

NOTHING = "No battery is committed yet; `make gpu-battery` runs it."
COLUMNS = ("check", "what is tried", "cases", "failures", "planted bugs found", "seconds")

Record = Mapping[str, Any]


def path_of(results: Path, surroundings: Mapping[str, Any]) -> Path:
    """Where the record of a GPU and a Triton belongs."""
    version = ".".join(str(surroundings["triton"]).split(".")[:2])
    return results / slug(surroundings["gpu"]) / f"battery-{version}.json"


def committed(results: Path) -> list[dict[str, Any]]:
    """Every record under `results`, by GPU and Triton version."""
    found = [read_json(path) for path in results.glob("*/battery-*.json")]
    return sorted(found, key=lambda record: environment.order(record["environment"]))


def rows(record: Record) -> list[list[Cell]]:
    """A row of COLUMNS for each section, and one for all."""
    found: list[list[Cell]] = []
    for section in record["sections"]:
        cases = f"{section['cases']:,}" if section["cases"] or not section["not_run"] else "**not run**"
        failures = len(section["failures"])
        planted = f"{section['found']} of {section['planted']}" if section["planted"] else None
        words = f"**{failures}**" if failures else "0" if section["cases"] else None
        found.append([section["name"], section["what"], cases, words, planted, f"{section['seconds']:.0f}"])
    sections = record["sections"]
    total, failed = sum(x["cases"] for x in sections), sum(len(x["failures"]) for x in sections)
    seen = f"{sum(x['found'] for x in sections)} of {sum(x['planted'] for x in sections)}"
    found.append(["all", None, f"{total:,}", failed, seen, f"{record['seconds']:.0f}"])
    return found


def notes(record: Record) -> list[str]:
    """What could not run, and what failed, in lines."""
    found = []
    for section in record["sections"]:
        found += [f"- Not run: {section['name']}, {job}: {why}" for job, why in section["not_run"].items()]
        found += [f"- Failed: {section['name']}, {words}" for words in section["failures"]]
    return found


def text(record: Record) -> str:
    """The table of one record, and its notes."""
    return "\n\n".join(filter(None, [formats.table(COLUMNS, rows(record)), "\n".join(notes(record))]))


def tables(records: Sequence[Record]) -> str:
    """The tables of all records, and what they were run on."""
    return environment.under_origins(records, "battery", text) or NOTHING
