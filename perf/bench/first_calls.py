"""Measure the first calls of a process, with an empty compile cache: python -m perf.bench first-calls.

Each scenario is a process of its own. It calls `linear` on 240 products, or on 40 of a weight that no suite has, and
then calls them again until nothing is compiled any more. The record says how long calls take, which of them open a
class of bits, and when the fastest kernels run. With --orders processes call the products in other orders instead: each
must give the same bits. Exit status: 1 if bits differ, 2 for a mistake in the call, 130 if interrupted.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import islice
from random import Random
from tempfile import TemporaryDirectory
from typing import Any

import torch

import triton_gemm
from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown, write_json
from perf.common.formats import Cell
from perf.measure import environment, operands
from perf.measure.environment import ROOT
from triton_gemm.suites.shapes import Shape

NAME = "first-calls"
WEIGHTS = ((4096, 4096), (6144, 4096), (28672, 4096), (4096, 14336), (1536, 7168), (2112, 7168))  # N, K
POWERS = tuple(2**i for i in range(5, 12))  # rows of every weight
DRAWN, LEAST, MOST = 33, 65, 2047  # more rows of each
SEED = 0
UNSEEN = 5632, 2048, 4096  # N, K and most rows of a weight that no suite has, so that no kit was chosen for it
SLOW_MS = 50.0
PATIENCE_S = 60.0  # for what is compiled in the background, and for the first pass
BACKGROUND, KIT = "TRITON_GEMM_BACKGROUND", "TRITON_GEMM_KIT"
NO_KIT = "no kit"
CHILD = f"from {__name__} import child; child()"
OURS, TORCH = "triton_gemm", "torch"

Call = Callable[[], torch.Tensor]
Run = dict[str, Any]


def products(order: int = 0) -> list[Shape]:
    """The products, weights one after another. order: if not 0, a seed that all are shuffled by; -1: of UNSEEN."""
    random = Random(SEED)
    if order == -1:
        N, K, most = UNSEEN
        return [Shape(M, N, K, layout="nt") for M in random.sample(range(1, most + 1), len(POWERS) + DRAWN)]
    others = sorted({*range(LEAST, MOST + 1)} - {*POWERS})
    found = []
    for N, K in WEIGHTS:
        rows = [*POWERS, *random.sample(others, DRAWN)]
        random.shuffle(rows)
        found += [Shape(M, N, K, layout="nt") for M in rows]
    if order:
        Random(order).shuffle(found)
    return found


# --- In a scenario's process ---


def child() -> None:
    """Measures OURS or TORCH, as the command line says, in the order that it says. Prints one line of JSON."""
    function, order = sys.argv[1:]
    shapes = products(int(order))
    pairs = inputs(shapes)
    linear = triton_gemm.linear if function == OURS else torch.nn.functional.linear
    calls = {shape.key: partial(linear, *pair) for shape, pair in zip(shapes, pairs, strict=True)}
    found = measure(calls, triton_gemm.wait_until_compiled, torch.cuda.synchronize)
    if function == OURS:
        classes = [triton_gemm.explain(x, weight.t()).bits for x, weight in pairs]
        found["opens"] = [name not in classes[:i] for i, name in enumerate(classes[: len(found["calls_ms"])])]
    print(json.dumps(found))


def inputs(shapes: Sequence[Shape]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """x [M, K] and weight [N, K] of each product, the same in any order. Memory for all results is left to torch's
    allocator, so that no call waits for the driver to give it."""
    random = torch.Generator(operands.DEVICE).manual_seed(SEED)
    draw = partial(torch.randn, generator=random, device=operands.DEVICE, dtype=torch.bfloat16)
    weights = {(N, K): draw(N, K) for N, K in sorted({(shape.N, shape.K) for shape in shapes})}
    rows = {K: draw(max(shape.M for shape in shapes), K) for K in sorted({shape.K for shape in shapes})}
    two_passes = 2 * sum(shape.M * shape.N for shape in shapes)
    torch.empty(two_passes, device=operands.DEVICE, dtype=torch.bfloat16)
    return [(rows[shape.K][: shape.M], weights[shape.N, shape.K]) for shape in shapes]


def measure(
    calls: Mapping[str, Call],
    wait: Callable[[float], bool],
    synchronize: Callable[[], None],
    clock: Callable[[], float] = time.perf_counter,
) -> Run:
    """Times the first calls by product, as many as PATIENCE_S is enough for, and passes over them until `wait(0)` says
    that nothing is compiled any more.

    changed: products whose last result differs bitwise from the first. compiled_s: None if PATIENCE_S was not enough.
    """

    def one_pass(calls: Mapping[str, Call], until: float = math.inf) -> tuple[list[float], list[torch.Tensor]]:
        times: list[float] = []
        results = []
        for call in calls.values():
            begin = clock()
            if begin > until:
                break
            results.append(call())
            synchronize()
            times.append(clock() - begin)
        return times, results

    synchronize()
    begin = clock()
    first, results = one_pass(calls, begin + PATIENCE_S)
    calls = dict(islice(calls.items(), len(first)))
    deadline = clock() + PATIENCE_S
    while not (compiled := wait(0)) and clock() < deadline:
        one_pass(calls)
    compiled_s = clock() - begin if compiled else None
    one_pass(calls)  # in which products take their kernels
    last, again = one_pass(calls)
    bits = [(result.view(torch.int16), other.view(torch.int16)) for result, other in zip(results, again, strict=True)]
    return {
        "calls_ms": {key: round(1000 * seconds, 3) for key, seconds in zip(calls, first, strict=True)},
        "compiled_s": compiled_s,
        "last_pass_s": sum(last),
        "changed": [key for key, pair in zip(calls, bits, strict=True) if not torch.equal(*pair)],
        "digests": {key: digest(result) for key, (result, _) in zip(calls, bits, strict=True)},
    }


def digest(result: torch.Tensor) -> str:
    return hashlib.sha256(result.cpu().numpy().data).hexdigest()


# --- The command ---


def run(function: str, cache: str, background: bool = True, order: int = 0, kit: bool = True) -> Run:
    """What a fresh process prints. cache: the folder of compiled kernels; CalledProcessError if the process fails."""
    surroundings = {**os.environ, "TRITON_CACHE_DIR": cache}
    for variable, on in {BACKGROUND: background, KIT: kit}.items():
        surroundings.pop(variable, None)
        surroundings |= {} if on else {variable: "0"}
    command = [sys.executable, "-c", CHILD, function, str(order)]
    done = subprocess.run(command, cwd=ROOT, env=surroundings, stdout=subprocess.PIPE, text=True, check=True)
    found: Run = json.loads(done.stdout.splitlines()[-1])
    return found


def scenarios() -> Iterator[tuple[str, Run]]:
    with _cache() as first, _cache() as second, _cache() as third, _cache() as fourth:
        yield "background", run(OURS, first)
        yield "off", run(OURS, second, background=False)
        yield "warm cache", run(OURS, first)
        yield NO_KIT, run(OURS, third, kit=False)
        yield TORCH, run(TORCH, second)
        yield "unseen weight", run(OURS, fourth, order=-1)
        yield f"unseen weight, {TORCH}", run(TORCH, second, order=-1)


def orders(count: int) -> Iterator[tuple[str, Run]]:
    for order in range(1, count + 1):
        for background in (True, False):
            with _cache() as cache:
                yield f"order {order}, background {'on' if background else 'off'}", run(OURS, cache, background, order)


def _cache() -> TemporaryDirectory[str]:
    return TemporaryDirectory(ignore_cleanup_errors=True)  # a worker may still write there


def differences(runs: Mapping[str, Run]) -> list[str]:
    """What has other bits in a last pass, and in which scenarios of ours it has other bits than in the first one. What
    a scenario had no time for is not compared, nor what a Triton compiles that is another than the kit's."""
    ours = {name: run for name, run in runs.items() if "opens" in run and name != NO_KIT}
    first, *others = ours
    found = [f"{key}: {name} has other bits in the last pass" for name, run in ours.items() for key in run["changed"]]
    for name in others:
        digests = ours[name]["digests"]
        found += [
            f"{key}: {name} gives other bits than {first}"
            for key, value in ours[first]["digests"].items()
            if digests.get(key, value) != value
        ]
    return found


def row(name: str, run: Run) -> dict[str, Cell]:
    """A scenario by column."""
    times, opens = list(run["calls_ms"].values()), run.get("opens")
    slow, seconds = [ms > SLOW_MS for ms in times], run["compiled_s"]
    over = f"over {SLOW_MS:.0f} ms"
    cells: dict[str, Cell] = {"scenario": name, "calls": len(times), "all calls, s": f"{sum(times) / 1000:.2f}"}
    cells |= {over: sum(slow), "longest, ms": f"{max(times):,.0f}"}
    if opens is not None:
        none = sum(late and not opened for late, opened in zip(slow, opens, strict=True))
        cells |= {"open a bit class": sum(opens), f"{over}, open none": none}
        cells["all compiled after, s"] = "not in time" if seconds is None else f"{seconds:.1f}"
    return cells | {"last pass, s": f"{run['last_pass_s']:.3f}"}


def text(record: Mapping[str, Any]) -> str:
    """The table of one record, and whether bits are equal."""
    table = formats.table_of(row(name, run) for name, run in record["scenarios"].items())
    differ = record["differences"]
    bits = (
        f"**Bits differ: {len(differ)} times.**" if differ else "Every scenario and pass of ours gives the same bits."
    )
    return f"{table}\n\n{bits}"


NOTHING = f"No first calls are committed yet; `python -m perf.bench {NAME}` on a GPU measures them."
RECORDS = environment.Records(f"{NAME}/results.json", NAME, NOTHING, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser(f"bench {NAME}", __doc__)
    parser.add_argument("--orders", type=args.count, metavar="N", help="compare the bits of N orders of the products")
    parser.add_argument("--json", type=args.path, metavar="FILE", help=f"default perf/results/<gpu>/{RECORDS.files}")
    given = parser.parse_args(arguments)
    if given.orders:
        args.refuse(parser, given, ("json",), "--orders writes no record")
    made = environment.describe(NAME)
    if made["gpu"] is None:
        print(f"error: {NAME} needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    runs: dict[str, Run] = {}
    record: dict[str, Any] = {}
    file = given.json or RECORDS.path(environment.RESULTS, made)
    try:
        for name, found in orders(given.orders) if given.orders else scenarios():
            runs[name] = found
            seconds = sum(found["calls_ms"].values()) / 1000
            print(f"{name}: {len(found['calls_ms'])} calls in {seconds:.2f} s", flush=True)
            kept = {name: {key: run[key] for key in run if key != "digests"} for name, run in runs.items()}
            record = {"environment": made, "scenarios": kept, "differences": differences(runs)}
            if not given.orders:  # at once, so that what follows may be interrupted
                write_json(file, record)
    except subprocess.CalledProcessError as error:
        print(f"error: a scenario's process ended with {error.returncode}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130
    for line in record["differences"]:
        print(f"FAILED {line}", file=sys.stderr)
    print(f"\n{text(record)}")
    if not given.orders:
        print(f"\nWritten to {shown(file)}; `python -m perf.pages` shows it.")
    return 1 if record["differences"] else 0
