"""Builds the machine code that the package is to ship, without a GPU: python -m perf.kit.

What it holds is chosen by use: GEMMs of the suites, of perf.models' passes, and drawn ones of every regime, in the
choices for an H100 and an H200, with the dtypes, epilogues and derivatives that models use. A kernel's weight is the
sum of the weights of the GEMMs that need it. If candidates tie, the one whose kernels most GEMMs share is taken.
COUNT kernels are compiled, or kept from the file: the heaviest, and one of STAND_INS as a stand-in for GEMMs that would
wait for the compiler without it.

--served SEED prints the share of other GEMMs that need no other kernel. --verify recompiles a random 5 % of the kernels
and compares their machine code. Building and these two run with Triton 3.9; pip installs it into build/drift if it is
missing. --bits compares results of each kernel of the kit with results of what the installed Triton compiles. It needs
a GPU. --check counts kernels whose source has changed, with any Triton.

Exit status: 1 if a kernel failed, differs or is stale, or there is no kit to check; 2 for a mistake in the call.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterable, Sequence
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from random import Random
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
import triton

from perf.common import arguments as args
from perf.common import formats
from perf.common.files import shown
from perf.drift import toolchain
from perf.kit_choice import (
    COUNT,
    GPUS,
    OTHER_GPUS,
    SEED,
    Call,
    Option,
    calls,
    chosen,
    needed,
    options_of,
    selections_of,
    stand_in_options,
)
from perf.measure.environment import ROOT, of_child
from triton_gemm.cli.words import problem_text
from triton_gemm.compat import without_lines
from triton_gemm.hardware.gpus import named_device
from triton_gemm.kernels import forms
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import kit, kit_build, kits, precompile, stand_ins
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.select import Selection
from triton_gemm.tuning.operands import operands

CAPABILITY = (9, 0)
FILE = kits.SHIPPED / kits.NAMES[CAPABILITY]
TRITON = "3.9.0"  # that compiles it
CACHE = ROOT / "build" / "kit"  # Triton's cache, of kernels without lines
DRAWN_AGAIN = 20  # one of so many kernels is compiled again
TOGETHER = 8  # GEMMs that a process compares before it says so


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


def calls_of_each(of: kit.Kit) -> list[tuple[Call, str]]:
    """GEMMs that need every kernel of a kit at least once, by their choice, its ties or a stand-in."""
    held = frozenset(of.kernels)
    every = [(call, gpu, [keys for keys in options if held.issuperset(keys)]) for call, gpu, options in needed(SEED)]
    waiting = [(call, gpu) for call, gpu, options in every if not options]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        by_stand_ins = list(pool.map(partial(_held_stand_ins, held), waiting, chunksize=20))
    every += [(*pair, options) for pair, options in zip(waiting, by_stand_ins, strict=True)]
    found: list[tuple[Call, str]] = []
    seen: set[str] = set()
    for call, gpu, options in every:
        if not seen.issuperset(key for keys in options for key in keys):
            seen.update(key for keys in options for key in keys)
            found.append((call, gpu))
    return found


def _held_stand_ins(held: frozenset[str], pair: tuple[Call, str]) -> list[tuple[str, ...]]:
    return [tuple(option) for option in stand_in_options(*pair) if held >= option.keys()]


def with_other_bits(of: kit.Kit, processes: int) -> list[str]:
    """On a GPU, the GEMMs in which machine code of the kit gives other bits than what the installed Triton compiles.
    Each kernel of the kit is launched. processes: how many compile and launch, side by side."""
    with forms.of_kits():
        pairs = calls_of_each(of)  # by forked processes, so before there is a context
    parts = [pairs[i : i + TOGETHER] for i in range(0, len(pairs), TOGETHER)]
    keys, found = frozenset(of.kernels), list[Compared]()
    with ProcessPoolExecutor(processes, get_context("spawn")) as pool:
        for done, compared in enumerate(pool.map(partial(compare, keys), parts), 1):
            found.append(compared)
            if done % 10 == 0:  # a run that is cut short has said what it found
                print(_sum_of(found, len(keys)), flush=True)
    print(_sum_of(found, len(keys)))
    return [text for compared in found for text in compared.other]


def _sum_of(found: Sequence[Compared], kernels: int) -> str:
    seen = frozenset[str]().union(*(x.keys for x in found))
    same, refused, other = sum(x.same for x in found), sum(x.refused for x in found), sum(len(x.other) for x in found)
    gemms = f"{same} with equal bits, {other} with others, {refused} not compiled here"
    return f"{len(seen)} of {kernels} kernels; GEMMs: {gemms}"


class Compared(NamedTuple):
    """Kernels that were launched; GEMMs with equal bits, those that this Triton cannot compile, those with others."""

    keys: frozenset[str]
    same: int
    refused: int
    other: list[str]


def compare(held: frozenset[str], pairs: Sequence[tuple[Call, str]]) -> Compared:
    """Launches each of a kit's kernels that these GEMMs need, and what the installed Triton compiles in its place."""
    seen: set[str] = set()
    same, refused, other = 0, 0, list[str]()
    device = torch.device("cuda", torch.cuda.current_device())
    with forms.of_kits():
        for call, gpu in pairs:
            selections: Iterable[Selection] = selections_of(call, gpu)
            if not any(held >= keys.keys() for keys in options_of(call, gpu)):
                selections = stand_ins.alike(call.problem, selections_of(call, gpu)[0], named_device(gpu), (), True)
            for selection in selections:
                keys = kit_build.compilables(named_device(gpu), call.problem, selection).keys()
                if not held >= keys or seen.issuperset(keys):
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
    return Compared(frozenset(seen), same, refused, other)


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
    return subprocess.run([sys.executable, "-m", "perf.kit", *arguments], env=of_child(str(folder))).returncode


def main(arguments: Sequence[str] | None = None) -> int:
    parser = args.parser("kit", __doc__)
    parser.add_argument("--out", type=args.path, default=FILE, metavar="FILE", help="default %(default)s")
    parser.add_argument("--count", type=args.count, default=COUNT, metavar="N", help="kernels (%(default)s)")
    parser.add_argument("--served", type=args.count, metavar="SEED", help="show which share of GEMMs is served")
    parser.add_argument("--verify", action="store_true", help="compile one of 20 kernels again")
    all_but_two = max(1, (os.cpu_count() or 1) - 2)
    what = "compare bits with those of compiled kernels, by N processes (all cores but two)"
    parser.add_argument("--bits", type=args.count, nargs="?", const=all_but_two, metavar="N", help=what)
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
