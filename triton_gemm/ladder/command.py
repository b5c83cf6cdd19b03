"""`python -m triton_gemm.ladder`: lists the rungs, or runs one in one configuration or in all that are legal.

This module has the command line, the lists, and how a configuration is spelled. What runs and measures a rung is the
repository's `perf.ladder.by_hand`, which a wheel does not hold; it is imported when a rung is to be run.
"""

from __future__ import annotations

import argparse
import importlib
import math
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NoReturn

import torch

from ..config import GemmConfig
from ..hardware.device import architecture
from . import LADDER, Rung
from .exercises import command as exercises

Size = tuple[int, int, int]

PROGRAM = "python -m triton_gemm.ladder"
RUNNER = "perf.ladder.by_hand"
DESCRIPTION = """\
Runs one rung of the ladder, in one configuration or in all that are legal, and prints a line for each.

On a GPU a line has the time, TFLOPS, the share of cuBLAS's speed, the error against fp64, and the registers, shared
memory and spills of the compiled kernel. Without a GPU, or with --arch, nothing is timed: the error is that of Triton's
interpreter on a small shape, and the rest is what the compiler makes of the kernel for an architecture.

Without a rung, and with --list, rungs and configurations are listed. To run one takes a clone of the repository.
`exercise` instead of a rung has kernels with holes to fill in, without a GPU and a clone: exercise --help.

Exit status: 1 if a configuration fails or is wrong, 2 for a mistake in the call, 130 if interrupted.
"""
EXAMPLES = f"""\
examples:
  {PROGRAM}                                     the rungs
  {PROGRAM} k06 --list                          what k06's autotuner explores
  {PROGRAM} k06 --size 2048                     all of that, measured
  {PROGRAM} k06 --config 128x64x16,4,3          one configuration, on the rung's list or not
  {PROGRAM} k08 --shape 4096x1400x4096 --layout nt --dtype bf16
  {PROGRAM} k11 --arch sm_90                    what the compiler makes of k11, without a GPU
  {PROGRAM} exercise                            exercises, and which of them are solved
"""
DTYPES = {"fp16": torch.float16, "bf16": torch.bfloat16, "fp32": torch.float32}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
LAYOUTS = ("nn", "nt", "tn", "tt")
SIZE = 4096
BUDGET_S = 0.2


class MistakeError(Exception):
    """A call that cannot be followed; the text is the sentence that says why."""


@dataclass(frozen=True)
class Call:
    """The command line, parsed; None is what the machine or the rung decides.

    configs: empty for all legal ones; arch: a compute capability to compile for, and to time nothing.
    """

    rung: Rung | None
    listing: bool
    shape: Size | None
    dtype: torch.dtype | None
    layout: str
    configs: tuple[GemmConfig, ...]
    arch: tuple[int, int] | None
    budget_s: float | None


def main(arguments: Sequence[str] | None = None) -> int:
    """Follows the command line; its exit status."""
    given = sys.argv[1:] if arguments is None else arguments
    if given[:1] == ["exercise"]:
        return exercises.main(given[1:], Parser)
    call = parse(given)
    if call.rung is None or call.listing:
        show_rungs(call)
        return 0
    try:
        run = importlib.import_module(RUNNER).run
    except ModuleNotFoundError as error:
        what = f"{error}: pip install {error.name}"
        if error.name in ("perf", "perf.ladder"):
            what = "rungs are run and measured by the repository's `perf`, which is not installed: run this in a clone"
        print(f"error: {what}", file=sys.stderr)
        return 1
    status: int = run(call)
    return status


def show_rungs(call: Call) -> None:
    """The rungs, and with --list their configurations; without an argument how to go on."""
    for rung in LADDER if call.rung is None else (call.rung,):
        takes = f"{' '.join(NAMES[dtype] for dtype in rung.dtypes):<10} {claims(rung):<18}"
        count = f"{len(rung.configs)} configuration{'s' if len(rung.configs) > 1 else ''}"
        print(f"{rung.id} {rung.title:<24} {takes} {count}")
        for config in rung.configs if call.listing else ():
            print(f"  {spelled(config)}")
    if not call.listing:
        print(f"\n{EXAMPLES}\n{PROGRAM} --help says more.")


def claims(rung: Rung) -> str:
    """The architectures that a rung is for, in words."""
    first, *others = map(architecture, rung.capabilities)
    return f"{first} and newer" if others else first


def spelled(config: GemmConfig) -> str:
    """A configuration as `--config` takes it: 128x64x16,4,3,8."""
    tile = "x".join(str(size) for name, size in config.meta().items() if name != "GROUP_M")
    launch = [config.num_warps, config.num_stages, *([] if config.GROUP_M is None else [config.GROUP_M])]
    return ",".join([tile, *map(str, launch)])


def config_of(rung: Rung, text: str) -> GemmConfig:
    """`spelled` backwards. What is left out comes from the first configuration of the rung that agrees with the rest,
    else from its first; raises MistakeError where the text is none of the rung's kind."""
    fields = list(rung.configs[0].meta())
    tile = [name for name in fields if name != "GROUP_M"]
    rest = ["num_warps", "num_stages", *(["GROUP_M"] if "GROUP_M" in fields else [])]
    sizes, *launch = text.split(",")
    numbers = [sizes.split("x"), launch]
    if not all(re.fullmatch("[0-9]+", n) for part in numbers for n in part) or not (
        len(numbers[0]) == len(tile) and len(launch) <= len(rest)
    ):
        form = f"{'x'.join(tile)}[,warps[,stages{'[,group]' if len(rest) > 2 else ''}]]"
        raise MistakeError(f"{rung.id} takes --config {form}, as {spelled(rung.configs[0])}, not {text!r}")
    given = dict(zip([*tile, *rest], map(int, [*numbers[0], *launch]), strict=False))
    agrees = (c for c in rung.configs if all(getattr(c, name) == value for name, value in given.items()))
    return replace(next(agrees, rung.configs[0]), **given)


class Parser(argparse.ArgumentParser):
    """Says a mistake in one sentence."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"error: {message}\n")


def parse(arguments: Sequence[str] | None) -> Call:
    parser = Parser(
        prog=PROGRAM, description=DESCRIPTION, epilog=EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("rung", nargs="?", metavar="RUNG", help=f"{LADDER[0].id} to {LADDER[-1].id}; without: a list")
    parser.add_argument("--list", action="store_true", help="show the configurations of the rung, or of all; run none")
    shape = parser.add_mutually_exclusive_group()
    shape.add_argument("--size", type=_size, metavar="N", help=f"M = N = K, default {SIZE}")
    shape.add_argument("--shape", type=_shape, metavar="MxNxK", help="C is M x N, and a sum has K products")
    parser.add_argument(
        "--config",
        action="append",
        default=[],
        metavar="MxNxK[,warps[,stages[,group]]]",
        help="tile and launch parameters, once or several times; default all that the GPU can run. A strip, as in k01 "
        "and k02, has one size. What is left out comes from the rung's first configuration that agrees",
    )
    parser.add_argument("--dtype", choices=DTYPES, help="of A, B and C, where the rung takes several")
    parser.add_argument("--layout", choices=LAYOUTS, default="nn", help="A and B: n row-major, t column-major")
    parser.add_argument("--arch", metavar="sm_90", help="time nothing; show what the rung compiles to there")
    parser.add_argument(
        "--budget", type=_seconds, metavar="SECONDS", help=f"of timing a configuration, default {BUDGET_S}"
    )
    given = parser.parse_args(arguments)
    known = {key: rung for rung in LADDER for key in (rung.id, rung.name)}
    if given.rung is not None and given.rung not in known:
        parser.error(f"no rung {given.rung!r}; there are {', '.join(rung.id for rung in LADDER)}")
    rung = known.get(given.rung)
    others = [name for name in ("size", "shape", "config", "dtype", "arch", "budget") if getattr(given, name)]
    others += ["layout"] if given.layout != "nn" else []
    if others and (rung is None or given.list):
        needs = "name a rung" if rung is None else "leave out --list"
        parser.error(f"--{others[0]} is for running a rung: {needs}")
    if rung is None:
        return Call(None, given.list, None, None, "nn", (), None, None)
    dtype = DTYPES[given.dtype] if given.dtype else None
    if dtype is not None and dtype not in rung.dtypes:
        parser.error(f"{rung.id} takes {' and '.join(NAMES[d] for d in rung.dtypes)}, not {given.dtype}")
    arches = {architecture(capability): capability for capability in rung.capabilities}
    if given.arch is not None and given.arch not in arches:
        parser.error(f"{rung.id} compiles for {', '.join(arches)}, not {given.arch!r}")
    try:
        configs = tuple(dict.fromkeys(config_of(rung, text) for text in given.config))
    except MistakeError as mistake:
        parser.error(str(mistake))
    size = None if given.size is None else (given.size,) * 3
    arch = None if given.arch is None else arches[given.arch]
    return Call(rung, given.list, given.shape or size, dtype, given.layout, configs, arch, given.budget)


def _size(text: str) -> int:
    if not re.fullmatch("[1-9][0-9]{0,5}", text):
        raise argparse.ArgumentTypeError(f"a size is a whole number from 1 to 999999, not {text!r}")
    return int(text)


def _shape(text: str) -> Size:
    if not re.fullmatch("[1-9][0-9]*(x[1-9][0-9]*){2}", text):
        raise argparse.ArgumentTypeError(f"a shape is three whole numbers from 1 on, as 4096x2048x1024, not {text!r}")
    M, N, K = map(int, text.split("x"))
    return M, N, K


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 < seconds < math.inf:
        raise argparse.ArgumentTypeError(f"a number of seconds above 0, not {text!r}")
    return seconds
