"""What mutants became of a run: the record, the table on the page, and those that are known to survive."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perf.measure import environment
from tests.mutation.runner import NO_TEST, ROOT, digest

RECORD = ROOT / "perf" / "results" / "mutation" / "mutants.json"
KNOWN = Path(__file__).parent / "survivors.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->"
HEAD = "| sources | mutants | run | caught | timed out | equivalent | survived | no test | caught of the others |"

Verdict = Mapping[str, str]


def with_reasons(verdicts: Iterable[Verdict], known: Path = KNOWN) -> list[Verdict]:
    """By name, and of a survivor that is known the kind, "equivalent" where no caller could tell it from the original
    or "left", and why."""
    reasons = {one["mutant"]: one for one in json.loads(known.read_text())}
    found = [one | reasons.get(one["mutant"], {}) if one["outcome"] == "survived" else one for one in verdicts]
    return sorted(found, key=lambda one: one["mutant"])


def record(groups: Mapping[str, Any], seed: int, seconds: float, tree: Path) -> dict[str, Any]:
    """groups: of each, how many mutants there are, `all`, and what became of the `drawn`. tree: what was run, a copy
    of this checkout."""
    made = {"seed": seed, "seconds": seconds, "commit": environment.commit(), "sources": digest(tree)}
    made |= {"python": platform.python_version(), **{name: version(name) for name in ("torch", "triton")}}
    return {**made, "mutants": groups}


def counts(drawn: Iterable[Verdict]) -> Counter[str]:
    """How many had each outcome; of the survivors, those that are equivalent by themselves."""
    return Counter("equivalent" if one.get("kind") == "equivalent" else one["outcome"] for one in drawn)


def rate(found: Counter[str]) -> float:
    """The share of mutants that are no equivalents that was caught, those that timed out included; 1 of none."""
    caught = found["caught"] + found["timed out"]
    others = caught + found["survived"] + found[NO_TEST]
    return caught / others if others else 1.0


def table(groups: Mapping[str, Any]) -> str:
    def row(name: str, size: int, drawn: Sequence[Verdict]) -> str:
        found = counts(drawn)
        outcomes = [found[x] for x in ("caught", "timed out", "equivalent", "survived", NO_TEST)]
        cells = " | ".join(f"{cell:,}" for cell in (size, len(drawn), *outcomes))
        return f"| {name} | {cells} | {100 * rate(found):.1f} % |"

    rows = [row(name, group["all"], group["drawn"]) for name, group in groups.items()]
    drawn = [one for group in groups.values() for one in group["drawn"]]
    rows.append(row("**all**", sum(group["all"] for group in groups.values()), drawn))
    return "\n".join([HEAD, "| :-- |" + " --: |" * 8, *rows]) + "\n"


def survivors(groups: Mapping[str, Any]) -> str:
    """Those that a test could tell from the original and none does, with the reason, as a list."""
    drawn = [one for group in groups.values() for one in group["drawn"]]
    left = [one for one in drawn if one["outcome"] == "survived" and one.get("kind") != "equivalent"]
    lines = [f"- `{one['mutant']}`: {one.get('why', 'no reason is known.')}\n" for one in left]
    return "".join(lines) or "None survived that a test could tell from the original.\n"


def written(page: str, made: Mapping[str, Any]) -> str:
    """The page with the table and the list of a run, which says where its sources are not today's."""
    before, rest = page.split(BEGIN)
    since = "" if made["sources"] == digest(ROOT) else environment.CHANGED
    how = (
        f"Seed {made['seed']}, tests of {made['seconds']:g} s for each mutant, Python {made['python']}, "
        f"torch {made['torch']}, Triton {made['triton']}. "
        f"Commit `{made['commit']}`, sources `{made['sources']}`{since}."
    )
    groups = made["mutants"]
    return f"{before}{BEGIN}\n{table(groups)}\n{how}\n\n{survivors(groups)}\n{END}" + rest.split(END, 1)[1]


def save(made: Mapping[str, Any]) -> None:
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), made))
