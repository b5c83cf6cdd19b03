"""`make explore` also writes a page on which a reader guesses which of six candidates is the fastest for a GEMM, and
then sees the times of all, the cost model's choice among them, and torch's where it was timed.

Everything on it is from the committed records of `perf.tuning` of GEMMs that were drawn at random.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from zlib import crc32

from perf.common.files import read_json
from perf.ladder.explorer import PAGE as EXPLORER
from perf.ladder.explorer import filled
from perf.measure import environment
from perf.measure.environment import RESULTS
from triton_gemm.hardware.gpus import bandwidth, named_device, rate

PAGE = EXPLORER.with_name("picker.html")
TEMPLATE = Path(__file__).with_suffix(".html")
OFFERED = 6  # candidates to guess among
SIZES = re.compile(r"(\d+)x(\d+)x(\d+) bf16 ([nt]{2})")  # no batch, and none of the rare operands
TILE, CLUSTER = re.compile(r" (\d+)x(\d+)x\d+ "), re.compile(r" cluster (\d+)x(\d+)")
PARTS = re.compile(r"(?:(\d+) tiles|\bK) in (\d+) parts")  # of some tiles or clusters, or of all
GLITCH = 3  # a slowest candidate that took longer than so many times the next one is not offered: it was timed once


def offered(names: Sequence[str], choice: int) -> list[int]:
    """Places of the candidates to guess among, of all by their times: the fastest, the choice, and others over the
    whole range, none like these or like one another but for how K is cut. Their order says nothing of their times;
    fewer than OFFERED where all others are alike."""
    found = {0, choice}
    first = {kind(name): place for place, name in reversed([*enumerate(names)])}
    for place in found:
        first.pop(kind(names[place]), None)
    others = sorted(first.values())
    if len(others) < OFFERED - len(found):
        return sorted(found)
    left = OFFERED - len(found)
    found.update(others[(i + 1) * len(others) // left - 1] for i in range(left))
    return sorted(found, key=lambda place: crc32(names[place].encode()))


def kind(name: str) -> tuple[str, ...]:
    """A candidate's kernel, tile, cluster and orientation: what the page lets a reader tell apart."""
    tile, cluster = (pattern.search(name) for pattern in (TILE, CLUSTER))
    return (
        name.partition(" ")[0],
        *(found[0] if found else "" for found in (tile, cluster)),
        "swap_ab" * ("swap_ab" in name),
    )


def work(name: str, M: int, N: int) -> tuple[int, int, int] | None:
    """The tiles of C of a candidate, whole clusters of them, into how many pieces of work they are cut, and how many
    elements of A and B they load for each k, a cluster once and none beyond the matrices; None for a kernel without
    tiles."""
    tile, cluster, parts = (pattern.search(name) for pattern in (TILE, CLUSTER, PARTS))
    if tile is None:
        return None
    m, n = (1, 1) if cluster is None else map(int, cluster.groups())
    rows, columns = (N, M) if "swap_ab" in name else (M, N)
    down, across = -(-rows // (m * int(tile[1]))), -(-columns // (n * int(tile[2])))
    clusters = down * across
    pieces = clusters if parts is None else clusters + int(parts[1] or clusters) * (int(parts[2]) - 1)
    return clusters * m * n, pieces * m * n, across * rows + down * columns


def puzzles(record: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """The GEMMs of a record with enough candidates of different kinds, of which the choice is one."""
    for product in record["products"]:
        sizes, times = SIZES.fullmatch(product["product"]), product.get("times", [])
        if sizes is None or len(times) < 2 * OFFERED:
            continue
        names = [name for _, name in times]
        among = names[:-1] if times[-1][0] > GLITCH * times[-2][0] else names
        if product["choice"] not in among:
            continue
        M, N, K = (int(x) for x in sizes.groups()[:3])
        choice = names.index(product["choice"])
        six = offered(among, choice)
        if len(six) < OFFERED:
            continue
        yield {
            "sizes": [M, N, K],
            "layout": sizes[4],
            "torch": product.get("torch_us"),
            "us": [us for us, _ in times],
            "names": names,
            "work": [work(name, M, N) for name in names],
            "choice": choice,
            "offered": six,
        }


def peaks(gpu: str) -> tuple[float, float] | None:
    """Bytes and FLOP in a microsecond by page 0 of the ladder, of a GPU that has a data sheet."""
    with suppress(ValueError):
        device = named_device(gpu)
        return bandwidth(device), 2 * device.num_sms * rate(device, "half")
    return None


def found() -> list[dict[str, Any]]:
    """The GEMMs by GPU. Of a GEMM in several records the newest counts."""
    records: dict[str, list[dict[str, Any]]] = {}
    for file in sorted(RESULTS.glob("*/tuning/*/unseen-*.json")):
        record = read_json(file)
        records.setdefault(record["environment"]["gpu"], []).append(record)
    gpus = []
    for gpu, of_gpu in sorted(records.items(), reverse=True):
        of_gpu.sort(key=lambda record: str(record["environment"]["date"]))
        by_sizes = {(*x["sizes"], x["layout"]): x for record in of_gpu for x in puzzles(record)}
        made = [f"{environment.named(x['environment'])}, {environment.place(x['environment'])}" for x in of_gpu]
        sms = of_gpu[-1]["environment"]["num_sms"]
        known = {"name": gpu, "sms": sms, "peaks": peaks(gpu)}
        gpus.append({**known, "made": [*dict.fromkeys(made)], "puzzles": [*by_sizes.values()]})
    return gpus


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="python -m perf.ladder.picker", description=__doc__)
    parser.add_argument("--out", type=Path, default=PAGE, help="default build/picker.html")
    out: Path = parser.parse_args(arguments).out
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(filled(TEMPLATE, found()))
    print(f"{out}: open it in a browser ({out.stat().st_size / 2**10:.0f} KiB)")


if __name__ == "__main__":
    main()
