"""What the compiler makes of the rungs' configurations: registers, shared memory, spills, in a committed table.

`python -m perf.ladder.compiled` compiles each rung's own configurations for each architecture, and for sm_90 also those
around them, without a GPU. Rows of this Triton that are there already are kept, so that a second run continues.
"""

from __future__ import annotations

import argparse
import csv
import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import cache
from pathlib import Path
from statistics import median
from typing import NamedTuple

import triton

from perf.ladder import clock_model, static
from perf.ladder.autotuner import config_of
from perf.ladder.record import StaticFacts
from perf.measure.environment import RESULTS
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, GemmConfig
from triton_gemm.hardware.device import architecture, device_of_capability
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.ladder.command import spelled

FILE = RESULTS / "compiled.csv"
RUNGS = LADDER[2:]  # those with tiles
EDGES = (32, 64, 128, 256)
DEPTHS = {"ieee": (16, 32), "tf32": (16, 32), "half": (32, 64)}


class Row(NamedTuple):
    """A rung's configuration without its GROUP_M, which changes no register. Columns of the table."""

    triton: str
    rung: str
    target: str
    config: str
    registers: int
    shared: int
    spills: int
    blocks_per_sm: int


def jobs() -> Iterator[static.Job]:
    """All that the table has."""
    for rung in RUNGS:
        stages = 3 if any(config.num_stages > 1 for config in rung.configs) else 1
        around = itertools.product(EDGES, EDGES, DEPTHS[rung.precision], (4, 8))
        grid = [replace(rung.configs[0], BLOCK_M=m, BLOCK_N=n, BLOCK_K=k, num_warps=w, num_stages=stages)
                for m, n, k, w in around]  # fmt: skip
        for capability in rung.capabilities:
            device, seen = device_of_capability(capability), set[str]()
            for config in (*rung.configs, *(grid if capability == static.TUNED_CAPABILITY else ())):
                if named(config) not in seen and rung.illegal(config, device, rung.dtypes[0]) is None:
                    seen.add(named(config))
                    yield static.Job(rung, config, capability, default=False)


def named(config: GemmConfig) -> str:
    """As `spelled`, without GROUP_M."""
    return spelled(replace(config, GROUP_M=None))


def read(path: Path = FILE) -> list[Row]:
    with path.open(newline="") as file:
        rows = itertools.islice(csv.reader(file), 1, None)
        return [
            Row(version, rung, target, config, *map(int, figures)) for version, rung, target, config, *figures in rows
        ]


@cache
def of_rung(name: str, target: str) -> dict[GemmConfig, Row]:
    """A rung's rows for an architecture, by configuration without GROUP_M."""
    return {config_of(row.config): row for row in read() if (row.rung, row.target) == (name, target)}


@cache
def alike(name: str, target: str) -> tuple[dict[tuple[int, int, int], int], int]:
    """Compiled registers by BLOCK_M, BLOCK_N and warps, and what a thread has beside its sums, in the median."""
    configs = {config: row.registers for config, row in of_rung(name, target).items()}
    found = {(config.tile.BLOCK_M, config.tile.BLOCK_N, config.num_warps): used for config, used in configs.items()}
    return found, int(median([used - config.accumulators() for config, used in configs.items()] or [64]))


def row_of(rung: Rung, capability: tuple[int, int], config: GemmConfig) -> Row | None:
    return of_rung(rung.id, architecture(capability)).get(replace(config, GROUP_M=None))


def registers(rung: Rung, capability: tuple[int, int], config: GemmConfig) -> tuple[int, str]:
    """Of a thread, and where the figure comes from: `compiled` if that is this configuration, else an estimate."""
    row = row_of(rung, capability, config)
    if row is not None:
        return row.registers, f"compiled by Triton {row.triton}" + f", {row.spills} spills" * bool(row.spills)
    found, beside = alike(rung.id, architecture(capability))
    same = found.get((config.tile.BLOCK_M, config.tile.BLOCK_N, config.num_warps))
    if same is not None:
        return same, "compiled with another BLOCK_K or num_stages"
    return min(MAX_REGISTERS_PER_THREAD, config.accumulators() + beside), "estimated from other tiles"


def shared(rung: Rung, capability: tuple[int, int], config: GemmConfig) -> int:
    """Bytes of a program: compiled, or counted."""
    row = row_of(rung, capability, config)
    if row is not None:
        return row.shared
    itemsize = rung.dtypes[0].itemsize
    return config.tile.shared_memory(itemsize, rung.staged_outputs[0] * itemsize, rung.slots(config, capability))


def blocks_per_sm(rung: Rung, capability: tuple[int, int], config: GemmConfig) -> int:
    """Programs that an SM has room for."""
    row = row_of(rung, capability, config)
    if row is not None:
        return row.blocks_per_sm
    used, _ = registers(rung, capability, config)
    return clock_model.blocks_per_sm(used, shared(rung, capability, config), config.num_warps, capability)


def write(path: Path = FILE) -> None:
    """Adds what the table lacks."""
    kept = {row[:4]: row for row in read(path) if row.triton == triton.__version__} if path.exists() else {}
    keys = {(triton.__version__, job.rung.id, job.target, named(job.config)): job for job in jobs()}
    missing = {job.key: key for key, job in keys.items() if key not in kept}
    print(f"{len(missing)} of {len(keys)} configurations are to be compiled")

    def done(key: str, facts: StaticFacts) -> None:
        if facts.failed is not None:
            print(f"{key}: {facts.failed}")
            return
        figures = (facts.registers, facts.shared, facts.spills, facts.blocks_per_sm)
        kept[missing[key]] = Row(*missing[key], *(figure or 0 for figure in figures))
        with path.open("w", newline="") as file:
            csv.writer(file, lineterminator="\n").writerows([Row._fields, *(kept[k] for k in keys if k in kept)])

    static.compile_all([job for key, job in keys.items() if key not in kept], done)


def main(arguments: Sequence[str] | None = None) -> None:
    argparse.ArgumentParser(prog="python -m perf.ladder.compiled", description=__doc__).parse_args(arguments)
    write()


if __name__ == "__main__":
    main()
