"""Rebuilds a table of measured choices from a tuning record, for the present cost model, without measuring."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import triton_gemm
from perf.common.files import times_of
from perf.tuning.runs import RUNS, SEED
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.device import DeviceInfo
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, ranked, select
from triton_gemm.tables import GpuKey
from triton_gemm.tables.files import TRITON, Table
from triton_gemm.tables.records import Entry, named
from triton_gemm.tuning.rows import of_weights

GAIN = 0.02  # as a share; candidates that were dropped early were timed for a few rounds only


def table_of(*records: Mapping[str, Any]) -> Table:
    """The fastest candidate of each product in the records, among those in the bit class of the model's present choice.

    A product gets an entry if its present choice was timed in the same trial and was slower by more than GAIN and more
    than the noise. What a later record timed takes the place of an earlier record's product. Raises ValueError if a
    record is of another Triton version, or was tuned with bits="any", or if they are of several GPUs.
    """
    entries: dict[GemmProblem, Entry] = {}
    devices = {named_device(record["environment"]["gpu"]) for record in records}
    if len(devices) != 1:
        raise ValueError("the records are of several GPUs")
    (device,) = devices
    for record in records:
        made = record["environment"]
        if not made["triton"].startswith(f"{TRITON}.") or record["bits"] != "same":
            of = f'Triton {made["triton"]}, bits="{record["bits"]}"'
            raise ValueError(f'the record is of {of}; this is {TRITON}, "same"')
        run = RUNS[record["run"]]
        problems = dict.fromkeys(run.problems(record["seed"] or SEED), 1)
        ranges = {} if run.rows is None else of_weights(problems, run.rows)
        fewest = {problem: least for problem, (_, least) in ranges.items()}
        by_text = {problem_text(x): x for x in ranges or problems}
        for product in record["products"]:
            problem = by_text[product["product"]]
            found = _fastest(problem, product, device, fewest.get(problem, 0))
            if product["times"]:
                entries.pop(problem, None)
            if found is not None:
                by = f"triton_gemm {triton_gemm.__version__}, Triton {made['triton']}, torch {made['torch']}"
                entries[problem] = replace(found, measured=made["date"], by=by)
    return Table(GpuKey.of(device), TRITON, "same", entries)


def _fastest(problem: GemmProblem, product: Mapping[str, Any], device: DeviceInfo, least_rows: int) -> Entry | None:
    """The entry of a product, without its origin, or None."""
    us = times_of(product)
    choice = select(problem, device)
    default, same = named(choice), bit_class(problem, choice)
    selections = (Selection.of(candidate, "") for _, candidate in ranked(problem, device))
    timed = [(us[named(x)], x) for x in selections if named(x) in us and bit_class(problem, x) == same]
    if default not in us or not timed:
        return None
    least, fastest = min(timed, key=lambda one: one[0])
    if us[default] / least - 1 <= max(GAIN, product["noise"]):
        return None
    return Entry(fastest.algorithm, least, us[default], "", "", default, least_rows)
