"""The record of a run, `results.json`: written after every measurement, read to resume and to draw."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from perf.common.files import write_json
from perf.measure import environment

SECTIONS = ("twins", "problems", "ceilings", "experiments", "tuning", "static", "interpreter")
FILE = "results.json"


class Record:
    """The sections of a record, each a dict from a measurement's key to its result; `today`: the environment of new
    results, which for tunings need not be the record's."""

    def __init__(self, folder: Path, surroundings: dict[str, Any]) -> None:
        self.folder, self.today = folder, surroundings
        self.data: dict[str, Any] = {"environment": surroundings, **{name: {} for name in SECTIONS}}

    @classmethod
    def open(
        cls, folder: Path, surroundings: dict[str, Any], *, fresh: bool, adding: bool = False
    ) -> tuple[Record, str]:
        """The record of `folder`, to be continued if it was made in the same surroundings; and what became of it.

        adding: only tunings are added, which name their own surroundings, so that the rest stays whatever has changed;
        ValueError if it is of another GPU.

        Raises OSError where the folder cannot be written.
        """
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f".writable-{os.getpid()}"
        probe.write_text("")
        probe.unlink()
        record = cls(folder, surroundings)
        try:
            before = json.loads((folder / FILE).read_text())
        except FileNotFoundError:
            return record, "a new record"
        except ValueError:
            return record, f"{FILE} was unreadable: a new record"
        if fresh:
            return record, "a new record, the one that was there is dropped"
        made = before.get("environment", {})
        changed = _changed(made, surroundings)
        if changed and adding:
            if "gpu" in changed:
                raise ValueError(f"{folder / FILE} is of {made.get('gpu')}, and this GPU is {surroundings['gpu']}")
            record.data["environment"] = made
        elif changed:
            return record, f"a new record: {', '.join(changed)} changed since the one that was there"
        record.data |= {name: before.get(name, {}) for name in SECTIONS}
        return record, "tunings are added" if changed else "continuing the record that is there"

    @classmethod
    def read(cls, folder: Path) -> Record:
        """A finished record, to draw from."""
        data = json.loads((folder / FILE).read_text())
        record = cls(folder, data["environment"])
        record.data |= data
        return record

    def __getitem__(self, section: str) -> dict[str, Any]:
        found: dict[str, Any] = self.data[section]
        return found

    @property
    def environment(self) -> dict[str, Any]:
        return self["environment"]

    def put(self, section: str, key: str, result: dict[str, Any]) -> None:
        """Adds one measurement and saves: a run that ends here has lost nothing."""
        self[section][key] = result
        self.save()

    def put_problem(self, key: str, result: dict[str, Any]) -> None:
        """Adds a timed problem; providers of it that were timed before and not now stay."""
        before = self["problems"].get(key, {}).get("providers", {})
        result["providers"] = {**before, **result["providers"]}
        self.put("problems", key, result)

    def has_problem(self, key: str, providers: list[str], budget_s: float) -> bool:
        """Whether all of `providers` were timed on this problem, with at least this budget."""
        found = self["problems"].get(key)
        if found is None or found["budget_s"] < budget_s:
            return False
        return all(name in found["providers"] for name in providers)

    def put_tuning(self, key: str, result: dict[str, Any]) -> None:
        """Adds what a tuning timed, with its surroundings (`made`) where they are not the record's."""
        own = {"made": self.today} if _changed(self.environment, self.today) else {}
        self.put("tuning", key, {**result, **own})

    def has_tuning(self, key: str) -> bool:
        """Whether that was tuned in today's surroundings."""
        found = self["tuning"].get(key)
        return (
            found is not None
            and "failed" not in found
            and not _changed(found.get("made", self.environment), self.today)
        )

    def failures(self) -> list[str]:
        """`provider on problem: reason` for all that failed the check."""
        timed = [
            f"{name} on {key}: {result['failed']}"
            for key, problem in self["problems"].items()
            for name, result in problem["providers"].items()
            if "failed" in result
        ]
        tuned = [f"{key}: {result['failed']}" for key, result in self["tuning"].items() if "failed" in result]
        interpreted = [f"{key}: {row['failed']}" for key, row in self["interpreter"].items() if "failed" in row]
        compiled = [f"{key}: {row['failed']}" for key, row in self["static"].items() if "failed" in row]
        return timed + tuned + interpreted + compiled

    def save(self) -> None:
        """Writes the whole record; a reader sees the old one or the new one, never a part."""
        write_json(self.folder / FILE, self.data)


def _changed(made: dict[str, Any], today: dict[str, Any]) -> list[str]:
    """In what two surroundings differ that makes measurements differ."""
    return [name for name in environment.IDENTITY if made.get(name) != today.get(name)]
