"""What is committed under perf/results."""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any

from perf import battery
from perf.accuracy import tables as accuracy_tables
from perf.bench import first_calls
from perf.bench import tables as bench_tables
from perf.bench.scores import Sweep
from perf.ladder import record, views
from perf.ladder.record import Record
from perf.measure import environment
from perf.measure.environment import Records
from perf.models import learning
from perf.models import tables as model_tables
from perf.pages import gpt_tables
from perf.tuning import tables as tuning_tables

KINDS: dict[str, Records] = {  # by the block that shows them
    "gpt": gpt_tables.RECORDS,
    "accuracy": accuracy_tables.RECORDS,
    "battery": battery.RECORDS,
    "tuned": tuning_tables.RECORDS,
    first_calls.NAME: first_calls.RECORDS,
    learning.NAME: learning.RECORDS,
    "models": model_tables.RECORDS,
}


@dataclass(frozen=True)
class Results:
    """What is committed, in the order of GPUs: reports, sweeps, and records of KINDS. Of each GPU those with its newest
    Triton; older ones are evidence of docs/log."""

    records: list[Record]
    sweeps: list[Sweep]
    others: dict[str, list[dict[str, Any]]] = field(default_factory=dict)

    @classmethod
    def read(cls, folder: Path) -> Results:
        sweeps = environment.newest(bench_tables.committed(folder))
        others = {name: environment.newest(kind.committed(folder)) for name, kind in KINDS.items()}
        return cls(record.committed(folder), sweeps, others)

    def on(self, gpu: str) -> Results:
        """What was measured on the GPU whose folder is `gpu`."""

        def measured(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
            return [each for each in records if environment.slug(each["environment"]["gpu"]) == gpu]

        reports = [each for each in self.records if environment.slug(each.environment["gpu"]) == gpu]
        others = {name: measured(records) for name, records in self.others.items()}
        return Results(reports, measured(self.sweeps), others)

    @cached_property
    def main(self) -> Record | None:
        """The record that docs/ladder.md explains: the one with the most rungs; of several the first measured."""
        order = sorted(self.records, key=lambda record: str(record.environment["date"]))
        return max(order, key=lambda record: len(views.ladder(record)), default=None)

    @cached_property
    def latest(self) -> Record | None:
        """The record that was measured last."""
        return record.latest(self.records)
