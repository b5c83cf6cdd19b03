"""Compares today's choices with the committed ones, for all listed products in bf16: python -m perf.choices

Needs no GPU. A product's choice may differ from that in perf/results/<gpu>/choices.csv only if the newest trial that
timed both finds it at most 2 % slower. In the mean choices may become 0.3 % slower. Choices that no trial has timed are
listed, and may be 3 % of all; `python -m perf.tuning suites` times them. --changes, a step of `make check`, does not
count those that are the committed ones. --update writes today's choices. Kits are left out, so that a changed kernel is
no changed choice. Exit status: 1 if a limit is exceeded, 2 for a mistake in the call.
"""

from __future__ import annotations

import csv
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from perf.common import arguments as args
from perf.common.files import shown, times_of
from perf.common.formats import percent
from perf.measure.environment import RESULTS, ROOT, slug
from perf.tuning.runs import suites
from perf.tuning.tables import committed
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.gpus import named_device
from triton_gemm.runtime import policies
from triton_gemm.tables.records import named

TRITON = "3.9.0"  # of the trials
# Choices depend on Triton's version and on whether it has clusters, as `inline_asm` shows.
CHILD = f"""
import triton, triton.experimental.gluon.language as language
triton.__version__, language.inline_asm = {TRITON!r}, getattr(language, "inline_asm", None)
from perf.choices import child
child()
"""
GPUS = {"NVIDIA H100 80GB HBM3": "h100", "NVIDIA H200": "h200"}  # by the name in a record
ONE, MEAN, UNKNOWN = 0.02, 0.003, 0.03  # what one choice may lose, all in the mean, and the share without a trial
FILE, COLUMNS = "choices.csv", ("product", "choice")
Times = Mapping[str, float]  # microseconds by candidate


@dataclass(frozen=True)
class Found:
    """A product's choice before and today. lost: today's time over the time before, less 1; None: no trial timed both,
    or the choice if it is new."""

    product: str
    before: str | None
    today: str
    lost: float | None


def timed_products(gpu: str, results: Path) -> dict[str, list[Times]]:
    """The trials of each product on a GPU with Triton TRITON, the newest first."""
    records = [x for x in committed(results) if (x["environment"]["gpu"], x["environment"]["triton"]) == (gpu, TRITON)]
    found: dict[str, list[Times]] = {}
    for record in sorted(records, key=lambda record: record["environment"]["date"], reverse=True):
        for product in record["products"]:
            found.setdefault(product["product"], []).append(times_of(product))
    return found


def chosen(gpu: str) -> dict[str, str]:
    """Today's choice for each listed product."""
    device = named_device(GPUS[gpu])
    return {problem_text(x): named(policies.choose(x, device)) for x in suites()}


def child() -> None:
    """Prints the choices on all GPUS as JSON."""
    print(json.dumps({gpu: chosen(gpu) for gpu in GPUS}))


def chosen_as_recorded() -> dict[str, dict[str, str]]:
    """Today's choices by GPU with Triton TRITON, whichever is installed."""
    command, without_kits = [sys.executable, "-c", CHILD], {**os.environ, "TRITON_GEMM_KIT": "0"}
    done = subprocess.run(command, cwd=ROOT, env=without_kits, stdout=subprocess.PIPE, text=True, check=True)
    found: dict[str, dict[str, str]] = json.loads(done.stdout)
    return found


def compared(
    today: Mapping[str, str], before: Mapping[str, str], timed: Mapping[str, Sequence[Times]]
) -> Iterator[Found]:
    for product, choice in today.items():
        known = before.get(product)
        names = {choice, known or choice}
        times = next((times for times in timed.get(product, ()) if names <= times.keys()), None)
        lost = None if times is None else times[choice] / times[known or choice] - 1
        yield Found(product, known, choice, lost)


def exceeded(found: Sequence[Found]) -> list[str]:
    """The limits that today's choices exceed, and by which products."""
    slower = [x for x in found if x.lost is not None and x.lost > ONE]
    known = [x.lost for x in found if x.lost is not None]
    mean = sum(known) / max(len(known), 1)
    unknown = [x for x in found if x.lost is None]
    lines = [f"{x.product}: {x.before} -> {x.today} is {percent(x.lost)} slower" for x in slower]
    if mean > MEAN:
        lines.append(f"today's choices are {100 * mean:.2g} % slower in the mean")
    if len(unknown) > UNKNOWN * len(found):
        lines += [
            f"{len(unknown)} of {len(found)} choices were timed in no trial; `python -m perf.tuning suites` times them"
        ]
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser("choices", __doc__)
    parser.add_argument("--update", action="store_true", help="write today's choices")
    parser.add_argument("--changes", action="store_true", help="do not count unchanged choices that no trial has timed")
    parser.add_argument("--missing", choices=GPUS.values(), help="print only the products of this GPU not recorded yet")
    given = parser.parse_args(arguments)
    if given.missing:
        args.refuse(parser, given, ("update", "changes"), "--missing prints products alone")
    failed = False
    for gpu, today in chosen_as_recorded().items():
        file = RESULTS / slug(gpu) / FILE
        before = dict(csv.reader(file.read_text().splitlines()[1:])) if file.exists() else {}
        found = list(compared(today, before, timed_products(gpu, RESULTS)))
        if given.changes:
            found = [replace(x, lost=0.0) if x.before == x.today else x for x in found]
        changed = [x for x in found if x.before not in (None, x.today)]
        unknown = [x for x in found if x.lost is None]
        if given.missing is not None:
            for x in unknown if GPUS[gpu] == given.missing else ():
                print(x.product)
            continue
        print(f"{gpu}: {len(found)} products, {len(changed)} changed, {len(unknown)} not recorded")
        for x in unknown:
            print(f"  not recorded: {x.product}: {x.today}")
        for line in (lines := exceeded(found)):
            print(f"  {line}", file=sys.stderr)
        failed |= bool(lines)
        if given.update:
            with file.open("w", newline="") as opened:
                csv.writer(opened, lineterminator="\n").writerows([COLUMNS, *today.items()])
            print(f"Written to {shown(file)}.")
    return int(failed and not given.update)


if __name__ == "__main__":
    sys.exit(main())
