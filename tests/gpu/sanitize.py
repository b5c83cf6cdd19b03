"""What sanitizers watch: `python -m tests.gpu.sanitize WHAT`.

`rungs`, `twins` and `kernels` are launched on ragged sizes; operands are whole allocations, or end where theirs ends,
so that what lies outside them belongs to nobody. compute-sanitizer watches them from outside. `consan` compiles rungs
and kernels with Triton's ConSan, which watches shared memory and barriers from inside, each in a process of its own: a
kernel that ConSan stops takes its context along. What is PTX of ours ConSan does not see, and takes barriers that such
PTX serves for deadlocks: it watches no clusters and no products of any width.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
import triton
import triton.language as tl

from reference_cuda import TWINS, load
from tests.mutants import K11_RACE, MUTANTS, READS_OUTSIDE, Mutant
from tests.random_products import Memory
from tests.ways import Alone, circumstances, shared, ways
from triton_gemm.device import DeviceInfo, device_info
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.plan import InterpretedPlan

SIZES = [(127, 65, 33), (200, 270, 150), (1, 140, 70), (37, 20, 0), (128, 256, 64)]
TMA_SIZES = [(120, 72, 40), (200, 272, 152), (8, 136, 72), (128, 256, 64)]  # rows of whole 16 bytes
SCALARS = [(1.0, 0.0), (-0.5, 2.0)]
WAYS, WAYS_OF_CONSAN = 6, 1  # to compute a product
CONSAN = {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
LIMIT_S = 150.0  # of a process that ConSan watches


def gpu() -> DeviceInfo:
    return device_info(torch.device("cuda"))


# --- Launches ---


def operands(size: tuple[int, int, int], dtype: torch.dtype, out_dtype: torch.dtype) -> list[torch.Tensor]:
    M, N, K = size
    sides = ((M, K, dtype), (K, N, dtype), (M, N, out_dtype))
    return [torch.ones(rows, columns, dtype=kind, device="cuda") for rows, columns, kind in sides]


def runnable(rungs: Sequence[Rung] = LADDER) -> Iterator[Rung]:
    capability = torch.cuda.get_device_capability()
    yield from (rung for rung in rungs if capability in rung.capabilities)


def rungs(share: str) -> Iterator[str]:
    for rung in runnable(list(shared({rung.name: rung for rung in LADDER}, share).values())):
        yield from launch_rung(rung, rung.launch)


def launch_rung(rung: Rung, launch: Callable[..., None]) -> Iterator[str]:
    config = rung.legal_configs(gpu(), rung.dtypes[0])[-1]
    for size in TMA_SIZES if rung.descriptors else SIZES:
        for alpha, beta in SCALARS:
            a, b, c = operands(size, rung.dtypes[0], rung.dtypes[0])
            launch(a, b, c, alpha, beta, config=config)
            torch.cuda.synchronize()
            yield f"{rung.name} {size} {beta:g}"


def twins(share: str) -> Iterator[str]:
    for stem, twin in shared(dict(TWINS), share).items():
        loaded = load(stem)
        for variant in twin.variants:
            for size in SIZES:
                for alpha, beta in ((1, 0), (2, -1)):
                    loaded.launch(*operands(size, variant.dtype, variant.out_dtype), alpha, beta, variant=variant.name)
                    torch.cuda.synchronize()
                    yield f"{stem} {variant.name} {size} {beta:g}"


def kernels(share: str) -> Iterator[str]:
    """What matmul launches, in every form."""
    for prepared, found in ways(shared(circumstances(), share), Alone("cuda"), gpu(), WAYS):
        for way in found:
            prepared.call_by(way.plan(prepared.request.problem(*prepared.operands), "cuda"))
            torch.cuda.synchronize()
            yield str(way)


# --- ConSan ---


def watched_by_consan(device: DeviceInfo) -> list[str]:
    """The names of what ConSan watches, each for a process of its own."""
    names = [rung.name for rung in LADDER if device.capability in rung.capabilities]
    for _, found in ways(circumstances(), Memory("cpu"), device, WAYS_OF_CONSAN, inline_ptx=False):
        names += map(str, found)
    return names


def consan(only: str) -> Iterator[str]:
    """One of them, in this process. Triton's own launcher gives instrumented kernels the memory that they note things
    in, and `InterpretedPlan` is what calls kernels by Triton."""
    for rung in runnable():
        if rung.name == only:
            yield from launch_rung(rung, rung.launch)
    device, name = gpu(), only.partition(": ")[0]
    if name not in circumstances():
        return
    # All of them, because what was taken before decides.
    for prepared, found in ways(circumstances(), Memory("cpu"), device, WAYS_OF_CONSAN, inline_ptx=False):
        for way in found:
            if str(way) == only:
                on_gpu = type(prepared)(way.problem, Alone("cuda"), by_plan=True)
                described = on_gpu.request.problem(*on_gpu.operands)
                with torch.device("cuda"):
                    on_gpu.call_by(InterpretedPlan(described, way.selection))
                torch.cuda.synchronize()
                yield only


def watch_by_consan(jobs: int) -> Iterator[tuple[str, str | None]]:
    """(name, what is wrong or None) of each."""

    def watch(name: str) -> tuple[str, str | None]:
        command = [sys.executable, "-m", "tests.gpu.sanitize", "consan", "--only", name]
        try:
            done = subprocess.run(
                command,
                env={**os.environ, **CONSAN},
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=LIMIT_S,
            )
        except subprocess.TimeoutExpired:
            return name, f"did not end within {LIMIT_S:.0f} s"
        if done.returncode == 0 and "\ndone: " in done.stdout:
            return name, None
        lines = [line for line in done.stdout.splitlines() if "Assertion" in line or "Error" in line]
        return name, " ".join((lines or done.stdout.splitlines())[-1:])[:300] or f"exit status {done.returncode}"

    with ThreadPoolExecutor(jobs) as pool:
        yield from pool.map(watch, watched_by_consan(gpu()))


# --- Planted bugs ---


def planted(bug: Mutant) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as folder:
        yield from launch_rung(bug.original, bug.load(Path(folder)).launch)


@triton.jit
def divergent_kernel(x_ptr):
    """A barrier of the program at which only some of its threads arrive."""
    offs = tl.arange(0, 128)
    asm: tl.constexpr = """{
.reg .pred some;
.reg .b32 thread;
mov.u32 thread, %tid.x;
setp.lt.u32 some, thread, 70;
@some bar.sync 0;
mov.b32 $0, $1;
}"""
    x = tl.inline_asm_elementwise(asm, "=r,r", [tl.load(x_ptr + offs)], tl.int32, is_pure=False, pack=1)
    tl.store(x_ptr + offs, x)


def divergent() -> Iterator[str]:
    divergent_kernel[(1,)](torch.ones(128, dtype=torch.int32, device="cuda"), num_warps=4)
    torch.cuda.synchronize()
    yield "divergent"


PLANTED: dict[str, Callable[[], Iterator[str]]] = {
    "read": lambda: planted(READS_OUTSIDE),
    "write": lambda: planted(MUTANTS["store-one-row-too-many"]),
    "barrier": divergent,
    "race": lambda: planted(K11_RACE),
}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("what", choices=("rungs", "twins", "kernels", "consan", *PLANTED), metavar="WHAT")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="a part of them")
    parser.add_argument("--only", help="of what ConSan watches one, in this process")
    parser.add_argument("--jobs", type=int, default=8, help="processes that ConSan watches at a time")
    given = parser.parse_args(arguments)
    if given.what == "consan" and given.only is None:
        return report(watch_by_consan(given.jobs))
    of_what = {"rungs": rungs, "twins": twins, "kernels": kernels}
    if given.what in PLANTED:
        launched = PLANTED[given.what]()
    else:
        launched = consan(given.only) if given.what == "consan" else of_what[given.what](given.share)
    number = 0
    for number, name in enumerate(launched, 1):
        print(name, flush=True)
    print(f"{number:,} launches")
    print(f"done: {given.what}")
    return 0 if number else 1


def report(found: Iterator[tuple[str, str | None]]) -> int:
    """Prints what was watched; the exit status."""
    number = failed = 0
    for number, (name, wrong) in enumerate(found, 1):
        print(name if wrong is None else f"FAILED: {name}: {wrong}", flush=True)
        failed += wrong is not None
    print(f"{number:,} launches")
    return 1 if failed or not number else 0


if __name__ == "__main__":
    sys.exit(main())
