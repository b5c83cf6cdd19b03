"""Records of tuning as tables: what the command prints and docs/performance.md shows."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from statistics import fmean, geometric_mean, median
from typing import Any

from perf.common import formats
from perf.common.formats import Cell
from perf.measure.environment import Records

FOLDER = "tuning"
MUCH = 0.1  # that a choice loses

Record = Mapping[str, Any]


def path_of(results: Path, record: Record) -> Path:
    """Where the record of a run belongs."""
    made = record["environment"]
    seed = "" if record["seed"] is None else str(record["seed"])
    part = "of".join(map(str, record.get("shard", ())))
    words = filter(None, (record["run"], record.get("some"), *record.get("weights", ()), seed, part, older(record)))
    return RECORDS.path(results, made).with_name(f"{'-'.join(words)}.json")


def older(record: Record) -> str:
    """As which older GPU it was treated, as sm_80, or nothing."""
    capability = record["capability"]
    return "" if capability == record["environment"]["capability"] else f"sm_{''.join(map(str, capability))}"


def compared(record: Record) -> list[Mapping[str, Any]]:
    """The products whose choice was timed with others, or that have no others: what it loses in the rest is unknown."""
    return [x for x in record["products"] if x["fastest_us"] and (x["timed"] > 1 or x["candidates"] == 1)]


def row(record: Record) -> dict[str, Cell]:
    """What a run came to, by column."""
    measured = compared(record)
    count = len(record["products"])
    part = f", part {' of '.join(map(str, record['shard']))}" if "shard" in record else ""
    words = f"{count} {record['what']}{part}" + (f", as {older(record)}" if older(record) else "")
    words += f", {len(measured)} of them compared" if len(measured) < count else ""
    cells: dict[str, Cell] = {"GEMMs": words, "commit": record["environment"]["commit"], "bits": record["bits"]}
    cells["seconds"] = f"{record['seconds']:.0f}"
    if not measured:
        return cells
    lost = [found["choice_us"] / found["fastest_us"] for found in measured]
    used = [found["used_us"] / found["fastest_us"] for found in measured if found.get("used_us")]
    again = [repeat for found in measured for repeat in found["again"]]
    known, timed = (fmean(found[name] for found in measured) for name in ("candidates", "timed"))
    return cells | {
        "candidates, timed": f"{known:.0f}, {timed:.0f}",
        "regret, mean": _points(geometric_mean(lost)),
        "regret, median": _points(median(lost)),
        "regret, worst": _points(max(lost)),
        "GEMMs over 10 %": sum(x > 1 + MUCH for x in lost),
        "in use before: mean, worst": (
            f"{_points(geometric_mean(used))}, {_points(max(used))}" if 2 * len(used) > len(measured) else None
        ),
        "regret after": _points(geometric_mean(found["us"] / found["fastest_us"] for found in measured)),
        "stored": sum(found["outcome"] == "tuned" for found in measured),
        "same winner again": _share(repeat["same"] for repeat in again),
        "again within 1 %": _share(abs(repeat["slower"]) <= 0.01 for repeat in again),
        "torch / what runs: mean, least": _over_served(record),
    }


def _over_served(record: Record) -> str | None:
    """Torch's time over that of what `use()` runs after tuning, which is torch's kernel where that was faster."""
    times = [(found["torch_us"], found) for found in record["products"] if found.get("torch_us")]
    served = [1.0 if found["torch_faster"] else torch_us / found["us"] for torch_us, found in times]
    return f"{geometric_mean(served):.3f}, {min(served):.3f}" if served else None


def worst(record: Record, count: int = 10) -> list[str]:
    """The products whose choice loses most, a line each: times, choice and winner."""
    measured = sorted(compared(record), key=lambda found: found["fastest_us"] / found["choice_us"])
    return [
        f"{found['product']}: {found['choice_us']:.4g} us, fastest {found['fastest_us']:.4g} us "
        f"({_points(found['choice_us'] / found['fastest_us'])}); {found['choice']} -> {found['winner']}"
        for found in measured[:count]
    ]


def _points(ratio: float) -> str:
    """By how much it is more than 1."""
    return f"{100 * (ratio - 1):.1f} %"


def _share(found: Any) -> str | None:
    given = list(found)
    return f"{100 * fmean(given):.0f} %" if given else None


def text(*records: Record) -> str:
    """The table of the records of one GPU and Triton."""
    return formats.table_of(map(row, records))


NOTHING = "No tuning is committed yet; `python -m perf.tuning` on a GPU measures it."
RECORDS = Records("tuning/{triton}/*.json", FOLDER, NOTHING, text)
committed = RECORDS.committed
