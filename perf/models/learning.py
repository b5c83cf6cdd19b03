"""Measure what use(learn=True) finds in a service: python -m perf.models.learning.

GEMMs that are drawn (--seed) are called as a service would call them, mixed and with gaps. What runs after so many
calls of each (--calls) is then judged by times of all candidates of the same bits, apart. With --models, models answer
requests instead, in processes with learning and without, which take turns: tokens of the first and the third minute.
Intervals that are shorter than in service (--load, --minute) are in the record. Exit status: 2 for a wrong call.
"""

from __future__ import annotations

import argparse
import math
import os
import random
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any

import torch

import triton_gemm
from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown, write_json
from perf.measure import environment
from perf.measure.compile_ahead import compile_ahead
from perf.models.tables import LEARNING, OURS
from perf.models.zoo import BY_NAME
from triton_gemm import tables
from triton_gemm.cli.words import problem_text
from triton_gemm.hardware.device import current_device_info
from triton_gemm.learning import trial
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime.plan import plan_for
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import spaced
from triton_gemm.tables.records import named
from triton_gemm.tuning import planned
from triton_gemm.tuning.operands import operands

NAME = "learning"
CACHED = 600 << 20  # bytes that the allocator has cached, as a service has
BLOCK, CALLS = 8, [10_000, 30_000]  # of each GEMM in a block, after which there is a gap; and in all
REGIMES = {"decode": 22, "prefill": 20, "mid": 12, "bigk": 6}
WAIT_S, JUDGE_S = 90.0, 2.0  # for the kernels of the first calls; of timing the candidates of a GEMM


def drawn(seed: int, count: int) -> list[GemmProblem]:
    """Of the regimes that services have; all of a count of 60."""
    shapes = [shape for name, several in REGIMES.items() for shape in unseen(SUITES[name], seed, several)]
    return list(spaced([gemm_problem(shape, "bf16") for shape in shapes], count))


class Service:
    """GEMMs that are called in any order, `rate` calls a second in the mean. calls: of each so far."""

    def __init__(self, problems: Sequence[GemmProblem], rate: float, seed: int) -> None:
        device = torch.device("cuda", torch.cuda.current_device())
        self.operands = [operands(x, 1, device, seed)[0] for x in problems]
        self.rate, self.random, self.calls = rate, random.Random(seed), 0

    def run(self, calls: int, end: float = math.inf) -> list[float]:
        """Until each was called so often, or that time has come; seconds of the host for each call."""
        host: list[float] = []
        while self.calls < calls and time.perf_counter() < end:
            order, begin = [x for x in self.operands for _ in range(BLOCK)], time.perf_counter()
            self.random.shuffle(order)
            for a, b, *_ in order:
                at = time.perf_counter()
                triton_gemm.matmul(a, b)
                host.append(time.perf_counter() - at)
            torch.cuda.synchronize()
            self.calls += BLOCK
            gap = len(order) / self.rate - (time.perf_counter() - begin)
            time.sleep(max(0.0, 2 * gap * self.random.random()))
        return host

    def runs(self) -> list[str]:
        """The kernel that each runs on."""
        return [named(plan_for(a, b, c).selection) for a, b, c, *_ in self.operands]


def measure(problems: Sequence[GemmProblem], given: argparse.Namespace) -> dict[str, Any]:
    trial.LOADED_S = given.load
    begin = time.perf_counter()

    def say(what: str) -> None:
        print(f"[{time.perf_counter() - begin:.0f} s] {what}", flush=True)

    service = Service(problems, given.rate, given.seed)
    say("the operands are there")
    torch.empty(CACHED, dtype=torch.uint8, device="cuda")  # and freed at once
    with triton_gemm.use(learn=False):
        service.run(2 * BLOCK)
        triton_gemm.wait_until_compiled(WAIT_S)
        say("kernels of the first calls are compiled")
        before, picks = service.run(given.calls[0] // 10), {"0": service.runs()}
    say("without learning")
    service.calls, started, during = 0, time.perf_counter(), []
    with triton_gemm.use(learn=True):
        for calls in given.calls:
            during += service.run(calls, started + given.limit)
            picks[str(service.calls)] = service.runs()
            say(f"{service.calls} calls of each with learning")
    seconds, counts = time.perf_counter() - started, triton_gemm.report_routing()
    return {
        "seconds": round(seconds, 1),
        "host_us": {"before": quantiles(before), "learning": quantiles(during)},
        **{name: counts.get((NAME, name), 0) for name in ("GEMMs raced", "kernels replaced")},
        "products": judged(problems, picks, say),
    }


def quantiles(host: list[float]) -> list[float]:
    """The median, 99.9 % and the longest, in microseconds."""
    found = sorted(host)
    return [round(1e6 * found[min(len(found) - 1, int(share * len(found)))], 1) for share in (0.5, 0.999, 1.0)]


def judged(
    problems: Sequence[GemmProblem], picks: Mapping[str, Sequence[str]], say: Callable[[str], None]
) -> list[dict[str, Any]]:
    """Of each GEMM the times of all candidates of the same bits, and what ran after so many calls."""
    compile_ahead(planned(problems, current_device_info(), "same"))
    say("all candidates are compiled")
    report = triton_gemm.tune(problems, budget=JUDGE_S * len(problems), bits="same", progress=lambda _: None)
    say("all candidates are timed")
    times = {x.problem: [[float(f"{us:.5g}"), name] for us, name in x.times] for x in report.shapes if x.measured}
    return [
        {"product": problem_text(x), "times": times.get(x, []), "runs": {name: of[i] for name, of in picks.items()}}
        for i, x in enumerate(problems)
    ]


def of_models(names: Sequence[str], minute: float) -> dict[str, Any]:
    """New tokens of each model in the first and the third minute, with learning and without."""
    from perf.models.first_minute import at_moments, take_turns

    ends, found = [minute * i for i in (1, 2, 3)], {}
    for name in names:
        curves = take_turns(BY_NAME[name], (OURS, LEARNING), ends[-1])
        found[name] = {x: list(at_moments(curve, ends).values()) for x, curve in curves.items()}
    return found


def regrets(products: Sequence[Mapping[str, Any]], calls: str) -> list[float]:
    """Of what ran after so many calls, over the fastest of the same bits. What was not timed is left out."""
    timed = [({name: us for us, name in x["times"]}, x["runs"][calls]) for x in products]
    return [us[run] / min(us.values()) - 1 for us, run in timed if run in us]


GEMMS = ("GEMMs", "calls a second", "seconds between modules", "calls of each", "regret, mean", "worst", "of")
HOST = ("GEMMs", "calls a second", "host of a call, us", "median", "99.9 %", "longest")
MODELS = ("model", "seconds of a minute", "tokens in the third", "without learning", "of the first", "of without")


def text(*records: Mapping[str, Any]) -> str:
    """Tables of GEMMs, of the host, and of models."""
    gemms, host, models = [], [], []
    for record in records:
        for name, of in record.get("models", {}).items():
            first, third = ({x: y[i] - (y[i - 1] if i else 0) for x, y in of.items()} for i in (0, 2))
            ratios = third[LEARNING] / first[LEARNING], third[LEARNING] / third[OURS]
            cells = [name, f"{record['minute']:g}", f"{third[LEARNING]:.0f}", f"{third[OURS]:.0f}"]
            models.append([*cells, *(f"{x:.3f}" for x in ratios)])
        cells = [f"{len(record.get('products', ()))}, seed {record.get('seed')}", f"{record.get('rate', 0):g}"]
        for calls in record["products"][0]["runs"] if "products" in record else ():
            found = regrets(record["products"], calls)
            regret = (f"{100 * fmean(found):.2f} %", f"{100 * max(found):.1f} %") if found else ("", "")
            gemms.append([*cells, f"{record['load']:g}", calls, *regret, len(found)])
        host += [[*cells, name, *(f"{x:g}" for x in us)] for name, us in record.get("host_us", {}).items()]
    tables = (GEMMS, gemms), (HOST, host), (MODELS, models)
    return "\n\n".join(formats.table(columns, rows) for columns, rows in tables if rows)


NOTHING = f"Nothing is committed yet; `python -m perf.models.{NAME}` on a GPU measures it."
RECORDS = environment.Records(f"{NAME}/{{triton}}/*.json", NAME, NOTHING, text)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser(f"models.{NAME}", __doc__)
    parser.add_argument("--seed", type=int, default=1, help="draws other GEMMs (%(default)s)")
    parser.add_argument("--gemms", type=args.count, default=60, metavar="N", help="(%(default)s)")
    parser.add_argument("--calls", type=args.count, nargs="+", default=CALLS, metavar="N", help="of each GEMM")
    parser.add_argument("--rate", type=float, default=12_000.0, metavar="N", help="calls a second (%(default)s)")
    parser.add_argument("--load", type=float, default=trial.LOADED_S, metavar="S", help="between modules (%(default)s)")
    parser.add_argument("--limit", type=float, default=math.inf, metavar="S", help="of learning; what came is judged")
    parser.add_argument("--models", nargs="+", choices=tuple(BY_NAME), metavar="NAME", help=f"of {', '.join(BY_NAME)}")
    parser.add_argument("--minute", type=float, default=60.0, metavar="S", help="seconds of a minute (%(default)s)")
    given = parser.parse_args(arguments)
    made = environment.describe(NAME)
    if made["gpu"] is None:
        print(f"error: {NAME} needs a CUDA GPU, and torch sees none here", file=sys.stderr)
        return 2
    with TemporaryDirectory() as folder:
        os.environ["TRITON_GEMM_CACHE_DIR"] = folder  # until this process ends
        tables.reload()
        if given.models:
            name, how = "models", {"minute": given.minute, "models": of_models(given.models, given.minute)}
        else:
            name, how = f"seed-{given.seed}", {x: getattr(given, x) for x in ("seed", "rate", "load")}
            how |= measure(drawn(given.seed, given.gemms), given)
    file, record = RECORDS.path(environment.RESULTS, made).with_name(f"{name}.json"), {"environment": made, **how}
    write_json(file, record)
    print(f"{text(record)}\n\nWritten to {shown(file)}; `python -m perf.pages` shows it.")
    return 0


if __name__ == "__main__":
    sys.exit(main())
