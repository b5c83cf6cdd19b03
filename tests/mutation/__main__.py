"""Mutants of the package, and whether the tests catch them: python -m tests.mutation [GROUP ...]

Draws mutants of each group of sources by a seed, changes a copy of the checkout, and runs the fast tests that reach the
changed line until one fails. Goes on where it was stopped. Prints the mutants that survive; exit status 1 if fewer than
95 % of those that a test could tell from the original were caught, or a survivor has no reason in
tests/mutation/survivors.json. No GPU is needed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.mutation import report, runner
from tests.mutation.runner import GROUPS, LEFT_OUT, NO_TEST, ROOT, Group

FOLDER = ROOT / "build" / "mutation"
SEED, SAMPLE, SECONDS, WANTED = 17, 60, 60.0, 0.95


def run(
    groups: Sequence[Group], sample: int | None, seed: int, seconds: float, words: str = "", root: Path = ROOT
) -> dict[str, Any]:
    """The record of a run; with `words`, of the mutants that have them in their name, whatever is known of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    with tempfile.TemporaryDirectory(dir=FOLDER) as scratch:
        tree = Path(scratch) / "tree"
        shutil.copytree(root, tree, ignore=LEFT_OUT)
        for group in groups:
            mutants = group.sample(None if words else sample, seed, tree)
            mutants = [one for one in mutants if words in one.name]
            journal = FOLDER / f"{group.name}-{seconds:g}-{runner.digest(tree, group.files())}.jsonl"
            lines = journal.read_text().splitlines() if journal.exists() else []
            known = {one["mutant"]: one for one in map(json.loads, lines)}
            maps = runner.measured(tree, FOLDER, group.files())
            for i, mutant in enumerate(mutants):
                if mutant.name not in known or words:
                    verdict = known[mutant.name] = runner.judged(mutant, tree, maps, seconds)
                    with journal.open("a") as file:
                        file.write(json.dumps(verdict) + "\n")
                    print(f"[{group.name} {i + 1}/{len(mutants)}]", *verdict.values(), flush=True)
            drawn = report.with_reasons([known[mutant.name] for mutant in mutants])
            found[group.name] = {"all": len(group.mutants(tree)), "drawn": drawn}
        return report.record(found, seed, seconds, tree)


def main(arguments: Sequence[str] | None = None) -> int:
    summary, _, more = (__doc__ or "").partition("\n\n")
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutation", description=summary.partition(":")[0] + ".", epilog=more
    )
    names = [group.name for group in GROUPS]
    parser.add_argument("groups", nargs="*", metavar="GROUP", help=f"of {', '.join(names)}; by default all")
    parser.add_argument("--sample", type=int, default=SAMPLE, metavar="N", help=f"mutants a group; {SAMPLE}, 0 for all")
    parser.add_argument("--seed", type=int, default=SEED, help="of the sample")
    parser.add_argument(
        "--seconds", type=float, default=SECONDS, help=f"of tests that a mutant has to survive; {SECONDS:g}"
    )
    parser.add_argument("--only", default="", metavar="WORDS", help="mutants that have these words in their name")
    parser.add_argument("--update", action="store_true", help="write the record, and the table in docs/reliability.md")
    given = parser.parse_args(arguments)
    if wrong := sorted(set(given.groups) - set(names)):
        parser.error(f"no group is named {', '.join(wrong)}; there are {', '.join(names)}")
    if given.update and (given.groups or given.only or 0 < given.sample < SAMPLE):
        parser.error(f"--update writes a run of all groups, of {SAMPLE} mutants each or more")
    groups = [group for group in GROUPS if not given.groups or group.name in given.groups]
    made = run(groups, given.sample or None, given.seed, given.seconds, given.only)
    print("\n" + report.table(made["mutants"]))
    drawn = [one for group in made["mutants"].values() for one in group["drawn"]]
    survivors = [one for one in drawn if one["outcome"] in ("survived", NO_TEST)]
    for one in survivors:
        print(f"{one['outcome']}: {one['mutant']}" + (f"\n  {one['kind']}: {one['why']}" if "why" in one else ""))
    if given.update:
        report.save(made)
    unknown, rate = sum("why" not in one for one in survivors), report.rate(report.counts(drawn))
    if unknown or rate < WANTED:
        print(f"FAILED: {100 * rate:.1f} % caught; survivors without a reason: {unknown}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
