"""What is committed under perf/results."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from perf.bench import tables as bench_tables
from perf.bench.scores import Sweep
from perf.ladder import views
from perf.ladder.record import FILE, Record
from perf.measure import environment
from perf.pages import gpt_tables


@dataclass(frozen=True)
class Results:
    """What is committed, each in the order of GPUs and Triton versions: reports, sweeps of the bench, GPTs."""

    records: list[Record]
    sweeps: list[Sweep]
    models: list[dict[str, Any]]

    @classmethod
    def read(cls, folder: Path) -> Results:
        records = [Record.read(path.parent) for path in folder.glob(f"*/{FILE}")]
        records.sort(key=lambda record: environment.order(record.environment))
        return cls(records, bench_tables.committed(folder), gpt_tables.committed(folder))

    @cached_property
    def main(self) -> Record | None:
        """The record that docs/ladder.md explains: the one with the most rungs; of several the first measured."""
        order = sorted(self.records, key=lambda record: str(record.environment["date"]))
        return max(order, key=lambda record: len(views.ladder(record)), default=None)

    @cached_property
    def latest(self) -> Record | None:
        """The record that was measured last."""
        return max(self.records, key=lambda record: str(record.environment["date"]), default=None)
