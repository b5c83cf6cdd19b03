"""Measure whole models of transformers with random weights, by torch and by triton_gemm: python -m perf.models

A fixed list: forward passes, `generate` with a dynamic and a static cache, training steps, torch.compile, and the first
minute of a process. Both take turns in one process when nothing is compiled any more; logits and gradients are held to
an fp64 model of the same weights first. Each case is written when it was measured, so that a run that is cut short
keeps what it has, and a run of some models adds to the record. Without a GPU, --tiny runs very small models in Triton's
interpreter, which shows that they work and times nothing. Exit status: 1 if a case failed or is wrong, 2 for a mistake
in the call, 130 if interrupted.

Several GPUs of a host share the list, a process each: CUDA_VISIBLE_DEVICES=0 python -m perf.models --shard 1/2.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
import time
import traceback
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

from perf.common import arguments as args
from perf.common.files import read_json, shown
from perf.measure import environment
from perf.models import record, tables, zoo
from perf.models.zoo import Model
from triton_gemm.compat import INTERPRETED
from triton_gemm.runtime import background
from triton_gemm.tuning import timing

BUDGET_S = 2.0
# Seconds that a case takes, roughly: what shards are made equal by.
COSTS = {zoo.FIRST_MINUTE: 240, zoo.STATIC: 40, zoo.COMPILED: 20, zoo.LOOP_COMPILED: 30}
MOST_WORKERS = 12  # that compile, instead of a process's two
Job = tuple[Model, str]


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    if given.list:
        print(tables.list_of_models())
        return 0
    if given.merge:
        return merge(given.merge, given.out)
    jobs = chosen(given)
    if given.tiny and not INTERPRETED:
        print("error: --tiny needs TRITON_INTERPRET=1, set before Python starts", file=sys.stderr)
        return 2
    if not given.tiny and not torch.cuda.is_available():
        print("error: this needs a CUDA GPU, and torch sees none here; --tiny runs in the interpreter", file=sys.stderr)
        return 2
    made = record.described()
    if made["packages"]["transformers"] is None:
        print("error: this needs transformers, and peft for a model with LoRA: pip install '.[dev]'", file=sys.stderr)
        return 2
    file = None if given.tiny and given.out is None else file_of(given.out, made)
    # All is compiled before anything is timed.
    background.WORKERS = max(background.WORKERS, min(MOST_WORKERS, len(os.sched_getaffinity(0)) // given.shard[1]))
    failed = []
    try:
        for i, (name, found) in enumerate(results(jobs, given), 1):
            if file is not None:
                dropped = record.add(file, made, {name: found})
                if dropped:
                    print(f"dropped {len(dropped)} cases of {shown(file)}, of other versions", file=sys.stderr)
            print(f"[{i:2d}/{len(jobs)}] {found['seconds']:5.1f} s  {summary(name, found)}", flush=True)
            if "failed" in found or "wrong" in found:
                failed.append(name)
    except KeyboardInterrupt:
        return 130
    for name in failed:
        print(f"FAILED {name}", file=sys.stderr)
    if file is not None and file.exists():
        if given.shard[1] == 1:
            print(f"\n{tables.text(read_json(file))}\n")
        print(f"Written to {shown(file)}; `python -m perf.pages` shows it.")
    if given.tiny:
        print("The interpreter's times mean nothing, so none were taken.")
    return 1 if failed else 0


def results(jobs: Sequence[Job], given: argparse.Namespace) -> Iterator[tuple[str, dict[str, Any]]]:
    """Name and result of each case, as it comes; what fails says why. Ends where the GPU can do nothing more."""
    built: Any = None
    of: Model | None = None
    for model, case in jobs:
        began = time.perf_counter()
        if model is not of and built is not None:
            built = None
            free()
        try:
            if case == zoo.FIRST_MINUTE:
                built = None
                free()
                from perf.models import first_minute

                found = first_minute.measure(model)
            else:
                if built is None:
                    built, of = build(model, given.tiny), model
                found = measured(model, case, built, given)
        except Exception as error:
            traceback.print_exc()
            found = {"failed": error_text(error)}
        free()
        yield zoo.key(model, case), {**found, "seconds": round(time.perf_counter() - began, 1)}
        if lost():
            print("error: the GPU's context is lost, and the rest of the list is not measured", file=sys.stderr)
            return


def build(model: Model, tiny: bool) -> Any:
    dtype = torch.float32 if tiny else torch.bfloat16
    return zoo.build(model, tiny=tiny, device="cpu" if tiny else "cuda", dtype=dtype)


def measured(model: Model, case: str, built: Any, given: argparse.Namespace) -> dict[str, Any]:
    from perf.models import cases, measuring

    torch.compiler.reset()
    work = cases.prepare(model, case, built, tiny=given.tiny, device="cpu" if given.tiny else "cuda")
    return measuring.measure(work, given.budget, timed=not given.tiny)


def free() -> None:
    """Gives back what the case before took."""
    torch.compiler.reset()
    gc.collect()
    if torch.cuda.is_available() and not lost():
        torch.cuda.empty_cache()


def lost() -> bool:
    """Whether no kernel can run any more."""
    return torch.cuda.is_available() and timing.lost() is not None


def error_text(error: Exception) -> str:
    """What went wrong, and where, in a line."""
    frames = traceback.extract_tb(error.__traceback__)
    where = f" ({Path(frames[-1].filename).name}:{frames[-1].lineno})" if frames else ""
    first = next((line for line in str(error).splitlines() if line.strip()), "")
    return f"{type(error).__name__}: {first[:300]}{where}"


def summary(name: str, found: dict[str, Any]) -> str:
    """A result in a line: the cells of its row, or the ratio of a first minute."""
    if "tokens" in found:
        return f"{name}: {found['ratio']['median']:.3f} of torch's tokens"
    cells = tables.row(name, name.partition(", ")[2], found)
    return ", ".join(f"{heading} {cell}".strip() for heading, cell in cells.items() if cell)


def merge(others: Sequence[Path], out: Path | None) -> int:
    """Adds the cases of records to those of their GPUs and Tritons."""
    for other in others:
        found = read_json(other)
        file = file_of(out, found["environment"])
        dropped = record.add(file, found["environment"], found["cases"])
        print(f"{len(found['cases'])} cases of {shown(other)} added to {shown(file)}, {len(dropped)} dropped")
    return 0


def file_of(out: Path | None, made: dict[str, Any]) -> Path:
    committed = tables.RECORDS.path(environment.RESULTS, made)
    return committed if out is None else out / committed.name


# --- What is chosen ---


def chosen(given: argparse.Namespace) -> list[Job]:
    """The cases that are asked for, of this shard."""
    jobs = [
        (model, case)
        for model, case in zoo.listed()
        if (not given.models or model.name in given.models)
        and (not given.case or any(word in case for word in given.case))
        and not any(word in case for word in given.skip)
        and not (given.tiny and case == zoo.FIRST_MINUTE)
    ]
    return shards(jobs, given.shard[1])[given.shard[0] - 1]


def shards(jobs: Sequence[Job], count: int) -> list[list[Job]]:
    """The jobs in `count` parts that take about as long. A model's are together, but its first minute, a process of its
    own, may be elsewhere."""
    groups: dict[tuple[str, bool], list[Job]] = {}
    for model, case in jobs:
        groups.setdefault((model.name, case == zoo.FIRST_MINUTE), []).append((model, case))
    parts: list[list[Job]] = [[] for _ in range(count)]
    for group in sorted(groups.values(), key=cost, reverse=True):
        min(parts, key=cost).extend(group)
    order = {(model.name, case): i for i, (model, case) in enumerate(jobs)}
    return [sorted(part, key=lambda job: order[job[0].name, job[1]]) for part in parts]


def cost(jobs: Sequence[Job]) -> int:
    return sum(COSTS.get(case, 12) for _, case in jobs)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = args.parser("models", __doc__, allow_abbrev=False)
    add = parser.add_argument
    names = f"of {', '.join(zoo.BY_NAME)}. Default: all"
    add("models", nargs="*", type=args.name_of(zoo.BY_NAME), default=[], metavar="NAME", help=names)
    cases = f"cases with such a word; there are {'; '.join(zoo.CASES)}"
    add("--case", nargs="+", default=[], metavar="WORD", help=cases)
    add("--skip", nargs="+", default=[], metavar="WORD", help="not cases with such a word")
    add("--shard", type=args.shard, default=(1, 1), metavar="I/N", help="one of N parts of the list")
    add("--budget", type=float, default=BUDGET_S, help="seconds of rounds a case (%(default)s)")
    add("--tiny", action="store_true", help="very small models in Triton's interpreter; needs no GPU")
    add("--list", action="store_true", help="show the models and their cases")
    add("--merge", type=args.path, nargs="+", metavar="FILE", help="add these records to those here")
    add("--out", type=args.path, metavar="DIR", help="default perf/results/<gpu>/models; the file is <Triton>.json")
    given = parser.parse_args(arguments)
    for word in (*given.case, *given.skip):
        if not any(word in case for case in zoo.CASES):
            parser.error(f"no case with {word!r}; there are {'; '.join(zoo.CASES)}")
    if not given.budget > 0:
        parser.error("--budget is seconds, more than 0")
    others = ("models", "case", "skip", "shard", "budget", "tiny")
    if given.list:
        args.refuse(parser, given, (*others, "merge", "out"), "--list measures nothing")
    if given.merge:
        args.refuse(parser, given, others, "--merge measures nothing")
    if not (given.list or given.merge) and given.shard == (1, 1) and not chosen(given):
        parser.error("no model of these has such a case")
    return given


if __name__ == "__main__":
    sys.exit(main())
