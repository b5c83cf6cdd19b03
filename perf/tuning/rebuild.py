"""Rebuilds a table of measured choices from a tuning record, for the present cost model, without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import triton_gemm
from perf.tuning.runs import RUNS, SEED
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.gpus import named_device
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, ranked, select
from triton_gemm.tables import Silicon
from triton_gemm.tables.files import TRITON, Table
from triton_gemm.tables.records import Entry, named

GAIN = 0.02  # as a share; candidates that were dropped early were timed for a few rounds only


def table_of(record: Mapping[str, Any]) -> Table:
    """The fastest candidate of each product in the record, among those in the bit class of the model's present choice.

    A product gets an entry if its present choice was timed in the same race and was slower by more than GAIN and more
    than the noise. Raises ValueError if the record is of another Triton version, or was tuned with bits="any".
    """
    made = record["environment"]
    if not made["triton"].startswith(f"{TRITON}.") or record["bits"] != "same":
        raise ValueError(f'the record is of Triton {made["triton"]}, bits="{record["bits"]}"; this is {TRITON}, "same"')
    device = named_device(made["gpu"])
    problems = {problem_text(x): x for x in RUNS[record["run"]].problems(record["seed"] or SEED)}
    entries = {}
    for product in record["products"]:
        problem, us = problems[product["product"]], {name: us for us, name in product["times"]}
        choice = select(problem, device)
        default, same = named(choice), bit_class(problem, choice)
        ways = (Selection.of(candidate, "") for _, candidate in ranked(problem, device))
        timed = [(us[named(way)], way) for way in ways if named(way) in us and bit_class(problem, way) == same]
        if default not in us or not timed:
            continue
        least, fastest = min(timed, key=lambda one: one[0])
        if us[default] / least - 1 > max(GAIN, product["noise"]):
            entries[problem] = Entry(
                algorithm=fastest.algorithm,
                us=least,
                default_us=us[default],
                measured=made["date"],
                by=f"triton_gemm {triton_gemm.__version__}, Triton {made['triton']}, torch {made['torch']}",
                default=default,
            )
    return Table(Silicon.of(device), TRITON, "same", entries)
