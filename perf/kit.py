"""Builds the machine code that the package is to ship, without a GPU: python -m perf.kit.

What it holds is chosen by use: GEMMs of the suites, of perf.models' passes, and drawn ones of every regime, in the
choices for an H100 and an H200, with the dtypes, epilogues and derivatives that models use. A kernel's weight is the
sum of the weights of the GEMMs that need it. If candidates tie, the one whose kernels most GEMMs share is taken.
COUNT kernels are compiled, or kept from the file: the heaviest, and one of STAND_INS as a stand-in for GEMMs that would
wait for the compiler without it.

--served SEED prints the share of other GEMMs that need no other kernel. --verify recompiles a random 5 % of the kernels
and compares their machine code. Building and these two run with Triton 3.9; pip installs it into build/drift if it is
missing. --bits I/N compares results of the kit with results of kernels that the installed Triton compiles. It needs a
GPU, and runs part I of N. --check counts kernels whose source has changed, with any Triton.

Exit status: 1 if a kernel failed, differs or is stale, or there is no kit to check; 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory

import torch
import triton

from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown
from perf.drift import toolchain
from perf.measure.environment import ROOT
from perf.models import products, zoo
from triton_gemm.cli.words import problem_text
from triton_gemm.compat import without_lines
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import kit, kit_build, kits, policies, precompile, stand_ins
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.runtime.precompile import Compilable
from triton_gemm.selection.select import Selection
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape
from triton_gemm.tuning.operands import operands

GPUS = ("h100", "h200")
OTHER_GPUS = ("h100-pcie", "h20")  # with other numbers of multiprocessors, which it is held to
CAPABILITY = (9, 0)
FILE = kits.SHIPPED / kits.NAMES[CAPABILITY]
TRITON = "3.9.0"  # that compiles it
CACHE = ROOT / "build" / "kit"  # Triton's cache, of kernels without lines
COUNT, STAND_INS, SEED = 1500, 6, 1
SAMPLED = 2  # of so many GEMMs that would wait, one is looked at
DRAWN_AGAIN = 20  # one of so many kernels is compiled again
# Of 2,000 drawn GEMMs.
DRAWN = {"prefill": 600, "decode": 600, "mid": 300, "square": 50, "shortk": 100, "bigk": 100, "small": 150}
DRAWN |= {"layouts": 50, "batched": 50}
LAYERS = 200  # of models, with drawn rows, each forward with its epilogues and backward
# Of models that the kit is held to: N and K of the linear layers, as Hugging Face's configurations have them.
UNSEEN = {
    "gemma-2-9b": ((4096, 3584), (2048, 3584), (3584, 4096), (14336, 3584), (3584, 14336)),
    "mistral-small-24b": ((4096, 5120), (1024, 5120), (5120, 4096), (32768, 5120), (5120, 32768)),
}
MODES = {"bf16": 1.0, "fp16": 0.5, "tf32": 0.1, "ieee": 0.05, "bf16x6": 0.02, "fp8": 0.05, "fp8 fast": 0.1}
MODES |= {"fp64": 0.05}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LISTED, FORWARD, BACKWARD, OTHERS = 4.0, 3.0, 1.5, 1.0  # weights of one GEMM
# What a layer adds to its product, and how often.
EPILOGUES = {"plain": 1.0, "bias": 0.4, "beta": 0.2, "gelu": 0.1, "silu": 0.05, "swiglu": 0.3}


@dataclass(frozen=True)
class Call:
    """A GEMM that is made, how much it counts, and in which groups of a table it is."""

    problem: GemmProblem
    weight: float
    groups: tuple[str, ...]


def calls(seed: int) -> Iterator[Call]:
    """What the kit is chosen for, or with another seed held to: a quarter as many drawn GEMMs, and other models."""
    random = Random(seed)
    for name, number in DRAWN.items():
        for shape in unseen(SUITES[name], seed, number if seed == SEED else max(1, number // 4)):
            yield from in_modes(shape, OTHERS, "plain")
    for suite in SUITES.values() if seed == SEED else ():
        for shape in suite.shapes if suite.mode is None else ():
            yield from in_modes(replace(shape, weights=0, trained=False), LISTED, "plain")
    for of in filter(products.is_read, zoo.LIST):
        for problem in products.problems(of, seed):
            for mode in HALVES if problem.dtype == torch.bfloat16 else ("ieee",):
                dtype = HALVES.get(mode, problem.dtype)
                of_mode = replace(problem, dtype=dtype, out_dtype=dtype)
                yield Call(of_mode, FORWARD / (1 + (mode == "fp16")), groups_of(of_mode, mode, "of passes", ""))
    known = sorted({(x.N, x.K) for name in ("prefill", "decode", "llm") for x in SUITES[name].shapes})
    for _ in range(LAYERS):
        model = "" if seed == SEED else random.choice([*UNSEEN])
        N, K = random.choice(UNSEEN[model] if model else known)
        M = max(1, min(8192, round(2 ** random.uniform(0, 13))))
        if M > 64 and random.random() < 0.7:
            M -= M % 64
        for epilogue, often in EPILOGUES.items():
            for mode in HALVES:
                problem = with_epilogue(gemm_problem(Shape(M, N, K, layout="nt"), mode), epilogue)
                yield Call(problem, FORWARD * often * MODES[mode], groups_of(problem, mode, epilogue, model))
        for back in (Shape(M, K, N), Shape(N, K, M, layout="tn")):
            yield from in_modes(back, BACKWARD, "backward", [*HALVES], model)


def in_modes(shape: Shape, weight: float, what: str, modes: Sequence[str] = (), model: str = "") -> Iterator[Call]:
    """Calls of a shape in these modes, by default in all."""
    for mode in modes or MODES:
        if shape.batch is None or "fp8" not in mode:
            of = replace(shape, layout="nt") if "fp8" in mode else shape
            problem = gemm_problem(replace(of, scales="tensor" if "fp8" in mode else None), mode)
            yield Call(problem, weight * MODES[mode], groups_of(problem, mode, what, model))


def with_epilogue(problem: GemmProblem, epilogue: str) -> GemmProblem:
    if epilogue == "bias":
        return replace(problem, bias="n")
    if epilogue == "beta":
        return replace(problem, has_beta=True)
    if epilogue == "swiglu":
        return replace(problem, gate=True, activation="silu")
    return problem if epilogue == "plain" else replace(problem, activation=epilogue)


def groups_of(problem: GemmProblem, mode: str, epilogue: str, model: str) -> tuple[str, ...]:
    rows = "1 row" if problem.M == 1 else next(f"to {n} rows" for n in (16, 64, 512, 4096, 1 << 40) if n >= problem.M)
    order = "".join("n" if x.strides[2] == 1 else "t" for x in (problem.a, problem.b))
    return tuple(filter(None, ("all", rows.replace(f"to {1 << 40}", "more"), mode, order, model, epilogue)))


Option = dict[str, Compilable]  # a candidate's launches, by the keys of their kernels


def selections_of(call: Call, gpu: str) -> list[Selection]:
    """A call's choice on a GPU, and the ties of a model's choice."""
    device = named_device(gpu)
    choice = policies.choose(call.problem, device)
    return list(kits.ties(call.problem, device, choice)) if choice.source == "model" else [choice]


def options_of(call: Call, gpu: str) -> list[Option]:
    """The launches of each of `selections_of`."""
    return [kit_build.compilables(named_device(gpu), call.problem, x) for x in selections_of(call, gpu)]


def _keys_of(pair: tuple[Call, str]) -> list[tuple[str, ...]]:
    return [tuple(option) for option in options_of(*pair)]


def needed(seed: int, part: tuple[int, int] = (1, 1)) -> list[tuple[Call, str, list[tuple[str, ...]]]]:
    """Each call once per GPU, with the keys of its options; of how many parts of the calls which. All cores look for
    them, by processes."""
    pairs = [(call, gpu) for call in calls(seed) for gpu in GPUS][part[0] - 1 :: part[1]]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found = pool.map(_keys_of, pairs, chunksize=100)
        return [(*one, keys) for one, keys in zip(pairs, found, strict=True)]


def chosen(count: int, seed: int = SEED) -> Option:
    """The `count` launches with the largest weights, by the keys of their kernels. A call's weight goes to the
    tie whose kernels the most calls can use."""
    votes: dict[str, float] = {}
    origin: dict[str, tuple[Call, str]] = {}
    every = needed(seed)
    for call, gpu, options in every:
        for key in dict.fromkeys(key for option in options for key in option):
            votes[key] = votes.get(key, 0.0) + call.weight
            origin.setdefault(key, (call, gpu))
    weights: dict[str, float] = {}
    for call, _, options in every:
        for key in max(options, key=lambda keys: min(votes[key] for key in keys)):  # of equals the first
            weights[key] = weights.get(key, 0.0) + call.weight
    heaviest = sorted(weights, key=weights.__getitem__, reverse=True)
    have = frozenset(heaviest[: count - count // STAND_INS])
    waiting = [(call, gpu) for call, gpu, options in every if not any(have.issuperset(keys) for keys in options)]
    more = for_stand_ins(waiting[::SAMPLED], have, count - len(have))
    found = list(dict.fromkeys((*heaviest[: len(have)], *more, *heaviest)))[:count]
    launches: Option = {}
    for pair in dict.fromkeys(origin[key] for key in found if key in origin):
        launches |= {key: of for option in options_of(*pair) for key, of in option.items()}
    for pair in dict.fromkeys(pair for key, pair in more.items() if key not in launches):
        for option in stand_in_options(*pair):
            launches |= option
    return {key: launches[key] for key in found}


def stand_in_options(call: Call, gpu: str) -> Iterator[Option]:
    """The launches of each candidate that may stand in for a call's choice."""
    device = named_device(gpu)
    for selection in stand_ins.alike(call.problem, selections_of(call, gpu)[0], device, (), True):
        yield kit_build.compilables(device, call.problem, selection)


def for_stand_ins(pairs: Sequence[tuple[Call, str]], have: frozenset[str], count: int) -> dict[str, tuple[Call, str]]:
    """At most `count` kernels, each with a call of these that has a stand-in with it, beside those that there are. One
    after another the kernel is taken with which the most weight of calls has its first stand-in."""
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        lacking = list(pool.map(partial(_lacking, have), pairs, chunksize=20))
    calls_of: dict[str, list[int]] = {}
    for i, keys in enumerate(lacking):
        for key in keys:
            calls_of.setdefault(key, []).append(i)
    gains = {key: sum(pairs[i][0].weight for i in of) for key, of in calls_of.items()}
    found: dict[str, tuple[Call, str]] = {}
    served: set[int] = set()
    while len(found) < count and gains and gains[best := max(gains, key=gains.__getitem__)] > 1e-6:
        found[best] = pairs[calls_of[best][0]]
        for i in set(calls_of[best]) - served:
            for key in lacking[i]:
                gains[key] -= pairs[i][0].weight
        served.update(calls_of[best])
    return found


def _lacking(have: frozenset[str], pair: tuple[Call, str]) -> tuple[str, ...]:
    """The kernels each of which is all that a stand-in for a call lacks; none where one lacks nothing."""
    found: dict[str, None] = {}
    for option in stand_in_options(*pair):
        lacking = option.keys() - have
        if not lacking:
            return ()
        if len(lacking) == 1:
            found |= dict.fromkeys(lacking)
    return tuple(found)


def compile_ahead(file: Path, launches: Option) -> None:
    """Leaves what a file lacks in Triton's cache, by a process a core: threads wait for one another in the compiler."""
    try:
        held = kit.read(file)
        missing = [key for key in launches if key not in held.kernels or not held.is_current(key)]
    except (OSError, kit.DamagedError):
        missing = [*launches]
    fork = get_context("fork")
    with ProcessPoolExecutor(mp_context=fork, initializer=_take, initargs=(launches,)) as pool:
        for done, _ in enumerate(pool.map(_compile, missing), 1):
            progress(done, len(missing))


_launches: Option = {}  # of a process of `compile_ahead`


def _take(launches: Option) -> None:
    _launches.update(launches)


def _compile(key: str) -> None:
    with without_lines():
        for _ in precompile.compile_each({key: _launches[key]}, CAPABILITY, CACHE, 1):
            pass  # what fails does so again when the kit is built, which says it


def served(keys: Iterable[str], seed: int) -> list[list[formats.Cell]]:
    """Of each group of GEMMs their number, and the share that needs no other kernel: by the model's choice, by that or
    its ties, or until its own kernel is compiled by a stand-in."""
    pairs = [(call, gpu) for call in calls(seed) for gpu in (*GPUS, *OTHER_GPUS)]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        ranks = pool.map(partial(_rank, frozenset(keys)), pairs, chunksize=100)
        found: dict[str, list[int]] = {}
        for (call, gpu), rank in zip(pairs, ranks, strict=True):
            for group in (*(call.groups if gpu in GPUS else ()), f"{gpu}, {named_device(gpu).num_sms} SMs"):
                found.setdefault(group, []).append(rank)
    return [
        [group, len(of), *(f"{100 * sum(x <= most for x in of) / len(of):.0f} %" for most in range(3))]
        for group, of in found.items()
    ]


def _rank(keys: frozenset[str], pair: tuple[Call, str]) -> int:
    """0 where kernels of these keys serve a call's choice, 1 a tie, 2 a stand-in, 3 none."""
    call, gpu = pair
    device, selections = named_device(gpu), selections_of(call, gpu)

    def is_there(selection: Selection) -> bool:
        return keys >= kit_build.compilables(device, call.problem, selection).keys()

    found = next((i for i, selection in enumerate(selections) if is_there(selection)), None)
    if found is not None:
        return min(found, 1)
    return 3 - any(keys >= option.keys() for option in stand_in_options(call, gpu))


def verified(of: kit.Kit) -> list[str]:
    """The keys, of one of DRAWN_AGAIN kernels, whose machine code a compiler makes differently now. Which are drawn
    follows from the kit's hash."""
    drawn = Random(of.digest).sample(sorted(of.kernels), -(-len(of.kernels) // DRAWN_AGAIN))
    every = chosen(len(of.kernels))
    with TemporaryDirectory() as folder:
        again = Path(folder) / "again.kit"
        wanted = {key: every[key] for key in drawn if key in every}
        kit_build.build(again, wanted, of.capability, cache=Path(folder) / "cache", progress=progress)
        found = kit.read(again)
        print(f"{len(found.kernels)} kernels compiled again")
        return [key for key in drawn if key not in found.kernels or found.find(key) != of.find(key)]


def with_other_bits(of: kit.Kit, part: tuple[int, int]) -> list[str]:
    """On a GPU, the GEMMs in which machine code of the kit gives other bits than what the installed Triton compiles.
    Each kernel of the kit is launched. part: which of how many parts of the GEMMs."""
    seen: set[str] = set()
    same, refused, other = 0, 0, []
    with forms.of_kits():
        pairs = needed(SEED, part)  # by processes, so before there is a context
        device = torch.device("cuda", torch.cuda.current_device())
        for call, gpu, options in pairs:
            selections: Iterable[Selection] = selections_of(call, gpu)
            if not any(of.kernels.keys() >= set(keys) for keys in options):
                selections = stand_ins.alike(call.problem, selections_of(call, gpu)[0], named_device(gpu), (), True)
            for selection in selections:
                keys = kit_build.compilables(named_device(gpu), call.problem, selection).keys()
                if not of.kernels.keys() >= keys or seen.issuperset(keys):
                    continue
                seen.update(keys)
                by_kit = output(call.problem, selection, device, of_kits=True)
                try:
                    compiled = output(call.problem, selection, device, of_kits=False)
                except Exception:  # an older Triton's compiler, of clusters for example
                    refused += 1
                    continue
                if torch.equal(by_kit, compiled):
                    same += 1
                else:
                    other.append(f"{problem_text(call.problem)}: {selection}")
    print(f"{len(seen)} kernels; GEMMs: {same} with equal bits, {len(other)} with others, {refused} not compiled here")
    return other


def output(problem: GemmProblem, selection: Selection, device: torch.device, of_kits: bool) -> torch.Tensor:
    """The bytes of C, by machine code of kits where they have it, or compiled."""
    plan = GemmPlan(problem, selection, device)
    for step in plan.steps:
        step.foreign = step.foreign if of_kits else None
    a, b, c, *others = operands(problem, 1, device)[0]
    plan.run(a, b, c, tuple(others), 1.0, float(problem.has_beta))
    return c.reshape(-1).view(torch.uint8)


def with_triton(arguments: Sequence[str]) -> int:
    """Runs this command with the Triton that a kit is compiled by."""
    _, folder = toolchain(TRITON)
    paths = os.pathsep.join(filter(None, (str(folder), str(ROOT), os.environ.get("PYTHONPATH"))))
    return subprocess.run(
        [sys.executable, "-m", "perf.kit", *arguments], env=os.environ | {"PYTHONPATH": paths}
    ).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m perf.kit", description=__doc__.partition(":")[0])
    parser.add_argument("--out", type=args.path, default=FILE, metavar="FILE", help="default %(default)s")
    parser.add_argument("--count", type=args.count, default=COUNT, metavar="N", help="kernels (%(default)s)")
    parser.add_argument("--served", type=args.count, metavar="SEED", help="show which share of GEMMs is served")
    parser.add_argument("--verify", action="store_true", help="compile one of 20 kernels again")
    parser.add_argument("--bits", type=args.shard, metavar="I/N", help="compare bits with those of compiled kernels")
    parser.add_argument("--check", action="store_true", help="count stale kernels")
    given = parser.parse_args(arguments)
    if given.check or given.served or given.verify or given.bits:
        args.refuse(parser, given, ("count",), "--check, --served, --verify and --bits build nothing")
        try:
            found = kit.read(given.out)
        except FileNotFoundError:
            print(f"there is no {shown(given.out)}: `make kit` builds it", file=sys.stderr)
            return 1
        except (OSError, kit.DamagedError) as error:
            print(f"error: {shown(given.out)}: {error}", file=sys.stderr)
            return 2
        stale = [key for key in found.kernels if not found.is_current(key)]
        print(f"{shown(given.out)}: {len(found.kernels)} kernels, {len(stale)} of them stale")
        if given.served:
            head = "GEMMs", "number", "served by the choice", "or a tie", "or a stand-in"
            print(formats.table(head, served(found.kernels, given.served)))
        differ = verified(found) if given.verify else []
        for key in differ:
            print(f"compiled again, {found.kernels[key][2][0]} is other machine code", file=sys.stderr)
        other = with_other_bits(found, given.bits) if given.bits else []
        for text in other:
            print(f"other bits than compiled: {text}", file=sys.stderr)
        return int(bool(stale or differ or other))
    try:
        launches = chosen(given.count)
        compile_ahead(given.out, launches)
        built = kit_build.build(given.out, launches, CAPABILITY, cache=CACHE, progress=progress)
    except ValueError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{built.kernels} kernels, {built.compiled} compiled, {built.nbytes / 1e6:.2f} MB: {shown(given.out)}")
    for failure in built.failures:
        print(failure, file=sys.stderr)
    return int(bool(built.failures))


def progress(done: int, total: int) -> None:
    if done % 20 == 0 or done == total:
        print(f"{done} of {total} kernels compiled", file=sys.stderr, flush=True)


if __name__ == "__main__":
    for name in ("POLICY", "BITS"):
        os.environ.pop(f"TRITON_GEMM_{name}", None)
    if "--bits" not in sys.argv:
        os.environ["TRITON_GEMM_KIT"] = "0"  # choices do not depend on what is being built
    with TemporaryDirectory() as empty:  # no tables but the shipped ones
        os.environ["TRITON_GEMM_CACHE_DIR"] = empty
        anywhere = {"--check", "--help", "--bits"}.intersection(sys.argv)
        sys.exit(main() if anywhere or triton.__version__ == TRITON else with_triton(sys.argv[1:]))
