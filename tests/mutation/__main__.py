"""Mutants of the package, and whether the tests catch them: python -m tests.mutation [GROUP ...]

Draws mutants of each group of sources by a seed, changes a copy of the checkout in build/mutation, and runs the fast
tests that reach the changed line until one fails. Goes on where it was stopped. Prints the mutants that survive; exit
status 1 if fewer than 95 % of those that a test could tell from the original were caught, or a survivor has no reason
in tests/mutation/survivors.json. No GPU is needed.
"""

from __future__ import annotations

import argparse
import fcntl
import json
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Any

from tests.mutation import report, runner
from tests.mutation.operators import Mutant
from tests.mutation.runner import GROUPS, NO_TEST, ROOT, Group, Verdict, Worker

FOLDER = ROOT / "build" / "mutation"
SEED, SAMPLE, SECONDS, WANTED = 17, 60, 60.0, 0.95


class Journal:
    """What became of a tree's mutants, a line each."""

    def __init__(self, path: Path, tree: Path, tests: Sequence[str], seconds: float) -> None:
        self.path, self.seconds = path, seconds
        self.sources = [runner.package_digest(tree), runner.helpers_digest(tree)]
        self.digests = {name: runner.digest([tree / name]) for name in tests}
        self.tests = runner.digest([tree / name for name in tests])
        lines = path.read_text().splitlines() if path.exists() else []
        self.known = {
            one["verdict"]["name"]: one for one in map(json.loads, lines) if one.get("sources") == self.sources
        }

    def __getitem__(self, mutant: Mutant) -> Verdict | None:
        """What is known of it, if the tests that it is known by are as they were."""
        one = self.known.get(mutant.name)
        if one is None:
            return None
        found = Verdict(**one["verdict"])
        file = found.by.partition("::")[0]
        if file in self.digests:
            return found if one["by"] == self.digests[file] else None
        return found if one["tests"] == self.tests and one["budget"] >= self.seconds else None

    def add(self, found: Verdict) -> None:
        by = self.digests.get(found.by.partition("::")[0])
        line = {
            "sources": self.sources,
            "tests": self.tests,
            "by": by,
            "budget": self.seconds,
            "verdict": asdict(found),
        }
        with self.path.open("a") as file:
            file.write(json.dumps(line) + "\n")


@contextmanager
def workers(tree: Path, scratch: Path) -> Iterator[dict[bool, Worker]]:
    found = {kind: Worker(tree, scratch, kind) for kind in (True, False)}
    try:
        yield found
    finally:
        for worker in found.values():
            worker.close()


def run(
    groups: Sequence[Group], sample: int | None, seed: int, seconds: float, words: str = ""
) -> tuple[dict[str, list[Verdict]], dict[str, Any]]:
    """Verdicts by group, and their record; with `words`, of the mutants that have them in their name, whatever is
    known of them."""
    FOLDER.mkdir(parents=True, exist_ok=True)
    lock = (FOLDER / "lock").open("w")
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        sys.exit(f"error: another run works in {FOLDER}")
    tree = FOLDER / "tree"
    runner.copy(tree)
    of_tree = report.described(tree)
    drawn = {group.name: group.sample(None if words else sample, seed, tree) for group in groups}
    if words:
        drawn = {name: [one for one in mutants if words in one.name] for name, mutants in drawn.items()}
    print(f"{sum(map(len, drawn.values()))} mutants; measuring first which test runs which line", flush=True)
    with workers(tree, FOLDER / "scratch") as ready:
        found: dict[str, list[Verdict]] = {name: [] for name in drawn}
        for group in groups:
            name, mutants = group.name, drawn[group.name]
            journal = Journal(FOLDER / "journal.jsonl", tree, group.files(), seconds)
            lines = runner.measured(ready, FOLDER / "map", group.files(), tree)
            began = time.monotonic()
            for i, mutant in enumerate(mutants):
                verdict = None if words else journal[mutant]
                if verdict is None:
                    verdict = runner.judged(mutant, tree, ready, lines, seconds)
                    journal.add(verdict)
                    what = f"{verdict.outcome:9} {mutant.name}"
                    print(f"[{name} {i + 1}/{len(mutants)}, {time.monotonic() - began:.0f} s] {what}", flush=True)
                    if words:
                        print(
                            f"    by {verdict.by or verdict.tests}: {verdict.words} ({verdict.seconds} s)", flush=True
                        )
                found[name].append(verdict)
    sizes = {group.name: len(group.mutants(tree)) for group in groups}
    known = report.known_survivors(tree / report.KNOWN.relative_to(ROOT))
    return found, report.record(found, sizes, seed, seconds, known, of_tree)


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
    parser.add_argument("--list", action="store_true", help="print the mutants, and run none")
    parser.add_argument("--update", action="store_true", help="write the record, and the table in docs/reliability.md")
    given = parser.parse_args(arguments)
    if wrong := sorted(set(given.groups) - set(names)):
        parser.error(f"no group is named {', '.join(wrong)}; there are {', '.join(names)}")
    if given.update and (given.groups or given.only or 0 < given.sample < SAMPLE):
        parser.error(f"--update writes a run of all groups, of {SAMPLE} mutants each or more")
    groups = [group for group in GROUPS if not given.groups or group.name in given.groups]
    if given.list:
        for group in groups:
            print(
                "\n".join(one.name for one in group.sample(given.sample or None, given.seed) if given.only in one.name)
            )
        return 0
    found, made = run(groups, given.sample or None, given.seed, given.seconds, given.only)
    known = {one["mutant"]: one for of in made["mutants"].values() for one in of["drawn"] if "why" in one}
    print("\n" + report.table(made))
    survivors = [one for verdicts in found.values() for one in verdicts if one.outcome in ("survived", NO_TEST)]
    unknown = [one for one in survivors if one.name not in known]
    for one in survivors:
        about = known.get(one.name)
        what = NO_TEST if one.outcome == NO_TEST else f"survived {one.tests} tests"
        print(f"{what}: {one.name}" + (f"\n  {about['kind']}: {about['why']}" if about else ""))
    if given.update:
        report.save(made)
    total = sum((report.counts(of["drawn"]) for of in made["mutants"].values()), start=Counter())
    if unknown or report.rate(total) < WANTED:
        print(f"FAILED: {100 * report.rate(total):.1f} % caught; survivors without a reason: {len(unknown)}")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
