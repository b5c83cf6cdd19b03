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
from perf.models import tables as model_tables
from perf.pages import gpt_tables
from perf.tuning import tables as tuning_tables


@dataclass(frozen=True)
class Results:
    """What is committed, in the order of GPUs: reports, sweeps, GPTs, accuracy, batteries, tunings, first calls,
    transformers' models. Of each GPU those with its newest Triton; older ones are evidence of
    docs/log.md. calls: Python's time of calls."""

    records: list[Record]
    sweeps: list[Sweep]
    models: list[dict[str, Any]]
    accuracies: list[dict[str, Any]] = field(default_factory=list)
    batteries: list[dict[str, Any]] = field(default_factory=list)
    tunings: list[dict[str, Any]] = field(default_factory=list)
    first_calls: list[dict[str, Any]] = field(default_factory=list)
    whole_models: list[dict[str, Any]] = field(default_factory=list)
    calls: list[Sweep] = field(default_factory=list)

    @classmethod
    def read(cls, folder: Path) -> Results:
        modules = (bench_tables, gpt_tables, accuracy_tables, battery, tuning_tables, first_calls, model_tables)
        newest = (environment.newest(tables.committed(folder)) for tables in modules)
        return cls(record.committed(folder), *[*newest, bench_tables.committed_calls(folder)])

    @cached_property
    def main(self) -> Record | None:
        """The record that docs/ladder.md explains: the one with the most rungs; of several the first measured."""
        order = sorted(self.records, key=lambda record: str(record.environment["date"]))
        return max(order, key=lambda record: len(views.ladder(record)), default=None)

    @cached_property
    def latest(self) -> Record | None:
        """The record that was measured last."""
        return record.latest(self.records)
