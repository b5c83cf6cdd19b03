"""`python -m tests.support.nan_windows`: products amid NaN, into results amid sentinels, held to fp64.

Operands begin 0 to 3 elements beyond a multiple of 16 bytes. Every rung runs, and every kernel in each of its forms,
with other values at every call: an element that is read outside of an operand makes a NaN, one that is written outside
of the result is no sentinel any more. With --far, an operand's first and last elements are more than 2^31 elements, and
bytes, apart, and what an offset cut to 32 bits would reach is NaN or not allocated.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from tests.support.kernel_forms import SKIPPED, Far, Separate, Size, Variant, circumstances, shared, variants
from tests.support.kernel_mutants import MUTANTS, ROWS_OF_32_BITS, Mutant
from tests.support.random_products import VALUES, Memory, Prepared, Problem
from triton_gemm.compat import INTERPRETED
from triton_gemm.hardware.device import DeviceInfo, device_info
from triton_gemm.ladder import LADDER, Rung

DEVICE = "cpu" if INTERPRETED else "cuda"
OFFSETS = (0, 1, 2, 3)
ALIGNED, UNALIGNED = 6, 3  # variants of a GEMM whose operands are aligned to 16 bytes, and of one whose are not
OF_RUNGS: Size = (20, 24, 40) if INTERPRETED else (144, 72, 104)
AT_ONCE = 100  # verdicts that wait on the GPU
FAR = (
    *("bf16 nnn", "bf16 ntn", "bf16 tnn", "bf16 nnt", "bf16 few", "bf16 few, row-major", "bf16 few columns"),
    *("bf16 long", "bf16 to fp32", "bf16 beta", "bf16 batch", "bf16 groups of rows", "bf16 groups of products"),
    *("fp32 ieee", "fp32 tf32", "fp32 bf16x6", "fp32 few", "fp64", "int8", "float8_e4m3fn by blocks"),
)

# Of rung k03, called as a plan is: what is written outside, read outside, and an offset of 32 bits.
PLANTED: dict[str, Mutant] = {
    "write": MUTANTS["store-one-column-too-many"],
    "read": MUTANTS["k-mask-one-too-far"],
    "far": ROWS_OF_32_BITS,
}


@dataclass
class Call:
    """Operands, what multiplies them, and how to call it in words."""

    name: str
    prepared: Prepared
    plan: Any

    def verdict(self, values: str, seed: int) -> torch.Tensor:
        """As `Prepared.verdict`: (wrong elements, share of the bound, bytes written outside)."""
        self.prepared.fill(values, seed)
        self.prepared.call_by(self.plan)
        return self.prepared.verdict()


def calls(memory: Memory, device: DeviceInfo, problems: dict[str, Problem], offset: int) -> Iterator[Call]:
    most = UNALIGNED if offset else ALIGNED
    placed = {name: replace(problem, offset=offset) for name, problem in problems.items()}
    for prepared, found in variants(placed, memory, device, most):
        for variant in found:
            yield planned(variant, prepared, memory.device)


def planned(variant: Variant, prepared: Prepared, device: str) -> Call:
    problem = prepared.problem
    plan = variant.plan(prepared.request.problem(*prepared.operands), device)
    return Call(f"{variant}, offset {problem.offset}", prepared, plan)


class ByRung:
    """A rung's launch, or that of a mutant, called as a plan is, in its last legal configuration."""

    def __init__(self, rung: Rung, launch: Callable[..., None], device: DeviceInfo) -> None:
        self.launch = launch
        self.config = rung.legal_configs(device, rung.dtypes[0])[-1]

    def run(
        self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, _: tuple[torch.Tensor, ...], alpha: float, beta: float
    ) -> None:
        self.launch(a, b, c, alpha, beta, config=self.config)


def by_rungs(memory: Memory, device: DeviceInfo, offset: int) -> Iterator[Call]:
    """Each rung that runs here, with and without beta C; those that need TMA only where it can read operands."""
    for rung in LADDER:
        if not (rung.interpretable if INTERPRETED else device.capability in rung.capabilities):
            continue
        if rung.descriptors and offset:
            continue
        precision = None if rung.precision == "half" else rung.precision
        dtype = str(rung.dtypes[0]).removeprefix("torch.")
        problem = Problem("mm", OF_RUNGS, dtype, precision, offset=offset, gap=8 if rung.descriptors else 9)
        for case in (problem, replace(problem, operation="addmm", added="matrix", alpha=-0.5, beta=2)):
            plan = ByRung(rung, rung.launch, device)
            name = f"{rung.name}, {case.operation}, offset {offset}"
            yield Call(name, Prepared(case, memory, by_plan=True), plan)


def judged(found: list[tuple[Call, str, torch.Tensor]]) -> Iterator[str]:
    """What is wrong with calls, in words."""
    verdicts = torch.stack([verdict for *_, verdict in found]).tolist() if found else []
    for (call, values, _), (wrong, worst, outside) in zip(found, verdicts, strict=True):
        if outside:
            yield f"{call.name}, {values}: {outside:.0f} bytes were written that are no result's"
        if wrong:
            yield f"{call.name}, {values}: {wrong:.0f} elements are wrong, by up to {worst:.3g} times the bound"


def multiply(every: list[Call], number: int, say: Callable[[str], None]) -> int:
    """At least `number` calls, each of `every` as often as every other; returns how many. `say` is told what failed."""
    made: list[tuple[Call, str, torch.Tensor]] = []
    rounds = -(-number // len(every)) if every else 0
    for seed in range(rounds):
        for call in every:
            values = VALUES[seed % len(VALUES)]
            if values in ("nan", "inf") and call.prepared.problem.activation is not None:
                values = "normal"
            made.append((call, values, call.verdict(values, seed)))
            if len(made) >= AT_ONCE or INTERPRETED:
                for words in judged(made):
                    say(words)
                made = []
    for words in judged(made):
        say(words)
    return rounds * len(every)


def chosen(given: argparse.Namespace) -> Iterator[list[Call]]:
    """Calls that are to be made as often as one another: at one offset, of one operand that lies far."""
    device, first = device_info(torch.device(DEVICE)), given.share.startswith("1/")
    if given.planted:
        with tempfile.TemporaryDirectory() as folder:
            bug = PLANTED[given.planted]
            problem = Problem("mm", (144, 72, 100), precision="ieee", gap=8)
            memory = Far(DEVICE, "a") if given.planted == "far" else Separate(DEVICE)
            plan = ByRung(bug.original, bug.load(Path(folder)).launch, device)
            yield [Call("a planted bug", Prepared(problem, memory, by_plan=True), plan)]
    elif given.far:
        problems = {name: problem for name, problem in circumstances().items() if name in FAR}
        memory = Far(DEVICE, given.far[0])
        for memory.which in given.far:  # in the same memory
            yield [
                *calls(memory, device, shared(problems, given.share), 0),
                *(by_rungs(memory, device, 0) if first else ()),
            ]
    else:
        problems = shared(circumstances(), given.share)
        for offset in OFFSETS:
            memory = Separate(DEVICE)
            yield [*calls(memory, device, problems, offset), *(by_rungs(memory, device, offset) if first else ())]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.support.nan_windows", description=__doc__)
    parser.add_argument("--calls", type=int, default=10_000, help="at least; of each way as many")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="the products that are multiplied, a part of all")
    parser.add_argument("--far", nargs="+", choices=("a", "b", "c"), help="operands that span more than 2^31 elements")
    parser.add_argument("--planted", choices=PLANTED, help="multiply by a kernel with this bug, which is to be found")
    given = parser.parse_args(arguments)
    failed: list[str] = []
    if given.planted:  # so that the launch itself says what it did
        os.environ["CUDA_LAUNCH_BLOCKING"] = "1"

    def say(words: str) -> None:
        failed.append(words)
        print(f"FAILED: {words}", flush=True)

    needed = 1.2 * Far(DEVICE, "a").size if given.far or given.planted == "far" else 0
    if not INTERPRETED and not free_memory(needed):
        print(f"needs {needed / 2**30:.0f} GiB of the GPU's memory, free")
        return SKIPPED
    total, groups = 0, 1 if given.planted else len(given.far or OFFSETS)
    for every in chosen(given):
        total += multiply(every, -(-given.calls // groups), say)
    print(f"{total:,} products; {len(failed)} failures")
    return 1 if failed or not total else 0


def free_memory(needed: float, patience_s: float = 300.0) -> bool:
    """Whether the GPU has so many bytes free, within that time: tests that run beside this one free theirs."""
    deadline = time.monotonic() + patience_s
    while torch.cuda.mem_get_info()[0] < needed:
        if time.monotonic() > deadline:
            return False
        time.sleep(1.0)
    return True


if __name__ == "__main__":
    sys.exit(main())
