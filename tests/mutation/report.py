"""What mutants became of a run: the record, the table on the page, and those that are known to survive."""

from __future__ import annotations

import json
import platform
from collections import Counter
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from perf.measure import environment
from tests.mutation.runner import NO_TEST, ROOT, Verdict, package_digest

RECORD = ROOT / "perf" / "results" / "mutation" / "mutants.json"
KNOWN = Path(__file__).parent / "survivors.json"
PAGE = ROOT / "docs" / "reliability.md"
BEGIN, END = "<!-- mutants -->\n", "<!-- end of mutants -->"
KINDS = ("equivalent", "left")


def known_survivors(path: Path = KNOWN) -> dict[str, dict[str, str]]:
    """By name: the kind, "equivalent" where no caller could tell it from the original, or "left"; and why."""
    return {one["mutant"]: one for one in json.loads(path.read_text())}


def described(tree: Path) -> dict[str, str | None]:
    """The commit of this checkout, which `tree` was just copied from, and the digest of the package there."""
    return {"commit": environment.commit(), "sources": package_digest(tree)}


def record(
    verdicts: Mapping[str, Sequence[Verdict]],
    sizes: Mapping[str, int],
    seed: int,
    seconds: float,
    known: Mapping[str, Mapping[str, str]],
    tree: Mapping[str, str | None],
) -> dict[str, Any]:
    """A run on what `described` says of a tree, with what was known then of those that survived."""
    return {
        "seed": seed,
        "seconds": seconds,
        **tree,
        "python": platform.python_version(),
        **{name: version(name) for name in ("torch", "triton")},
        "mutants": {
            name: {
                "all": sizes[name],
                "drawn": [_said(one, known.get(one.name, {})) for one in sorted(found, key=lambda one: one.name)],
            }
            for name, found in verdicts.items()
        },
    }


def _said(one: Verdict, known: Mapping[str, str]) -> dict[str, str]:
    found = {"mutant": one.name, "outcome": one.outcome}
    if one.outcome == "survived":
        return found | {name: known[name] for name in ("kind", "why") if name in known}
    return found | {"by": one.by}


def counts(drawn: Sequence[Mapping[str, str]]) -> Counter[str]:
    """How many had each outcome; of the survivors, how many are equivalent."""
    found = Counter(one["outcome"] for one in drawn)
    found["equivalent"] = sum(one.get("kind") == "equivalent" for one in drawn)
    return found


def rate(found: Counter[str]) -> float:
    """The share of mutants that are no equivalents that was caught, those that timed out included; 1 of none."""
    caught = found["caught"] + found["timed out"]
    others = caught + found["survived"] - found["equivalent"] + found[NO_TEST]
    return caught / others if others else 1.0


def table(made: Mapping[str, Any]) -> str:
    rows, total, sizes = [], Counter[str](), Counter[str]()
    for name, of_group in made["mutants"].items():
        drawn = of_group["drawn"]
        found = counts(drawn)
        total += found
        sizes += Counter({"all": of_group["all"], "drawn": len(drawn)})
        rows.append(_row(name, of_group["all"], len(drawn), found))
    rows.append(_row("**all**", sizes["all"], sizes["drawn"], total))
    head = "| sources | mutants | run | caught | timed out | equivalent | survived | no test | caught of the others |"
    return "\n".join([head, "| :-- |" + " --: |" * 8, *rows]) + "\n"


def _row(name: str, size: int, drawn: int, found: Counter[str]) -> str:
    survived = found["survived"] - found["equivalent"]
    cells = [size, drawn, found["caught"], found["timed out"], found["equivalent"], survived, found[NO_TEST]]
    return f"| {name} | {' | '.join(f'{cell:,}' for cell in cells)} | {100 * rate(found):.1f} % |"


def survivors(made: Mapping[str, Any]) -> str:
    """Those that a test could tell from the original and none does, with the reason, as a list."""
    lines = [
        f"- `{one['mutant']}`: {one.get('why', 'no reason is known.')}"
        for of_group in made["mutants"].values()
        for one in of_group["drawn"]
        if one["outcome"] == "survived" and one.get("kind") != "equivalent"
    ]
    return "\n".join(lines) + "\n" if lines else "None survived that a test could tell from the original.\n"


def origin(made: Mapping[str, Any]) -> str:
    """Which commit and sources a run was of, in a sentence; "changed since" where the sources are not today's."""
    at = f"Commit `{made['commit']}`" if made["commit"] else "Commit not recorded"
    return f"{at}, sources `{made['sources']}`{'' if made['sources'] == package_digest() else environment.CHANGED}."


def written(page: str, made: Mapping[str, Any]) -> str:
    """The page with the table and the list of a run."""
    before, rest = page.split(BEGIN)
    how = (
        f"Seed {made['seed']}, tests of {made['seconds']:g} s for each mutant, Python {made['python']}, "
        f"torch {made['torch']}, Triton {made['triton']}. {origin(made)}"
    )
    return f"{before}{BEGIN}\n{table(made)}\n{how}\n\n{survivors(made)}\n{END}" + rest.split(END, 1)[1]


def save(made: Mapping[str, Any]) -> None:
    RECORD.parent.mkdir(parents=True, exist_ok=True)
    RECORD.write_text(json.dumps(made, indent=1) + "\n")
    PAGE.write_text(written(PAGE.read_text(), made))
