"""What sanitizers watch: `python -m tests.gpu.sanitize WHAT`, which test_sanitizer_gpu.py runs under each.

WHAT: `rungs`, `twins` and `kernels` are launched on ragged sizes; operands are whole allocations, or end where theirs
ends, so that the next byte is not allocated. Others are planted bugs, which a tool must find.

compute-sanitizer's `memcheck` and `synccheck` watch the process from outside. ConSan is Triton's: it compiles kernels
with checks of their barriers and of who reads and writes shared memory. A kernel that it stops takes the process along,
so that each has one of its own. It knows nothing of our PTX, and takes barriers that serve such PTX for deadlocks: it
watches no clusters, and no products by one `wgmma` of any width.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
import triton
import triton.language as tl

from reference_cuda import TWINS, TwinUnavailable, load
from tests.support.kernel_forms import SKIPPED, Alone, circumstances, forms, shared, variants
from tests.support.kernel_mutants import K11_RACE, MUTANTS, READS_OUTSIDE, Mutant
from tests.support.random_products import Memory, Prepared
from triton_gemm.hardware.device import DeviceInfo, device_info
from triton_gemm.ladder import LADDER, Rung

SIZES = [(127, 65, 33), (200, 270, 150), (1, 140, 70), (37, 20, 0), (128, 256, 64)]
TMA_SIZES = [(120, 72, 40), (200, 272, 152), (8, 136, 72), (128, 256, 64)]  # rows of whole 16 bytes
SCALARS = [(1.0, 0.0), (-0.5, 2.0)]
VARIANTS, VARIANTS_OF_CONSAN = 6, 1  # to compute a product
ROOT = Path(__file__).parents[2]
LAUNCH = (sys.executable, "-m", "tests.gpu.sanitize")
FOUND = 9  # exit status of a tool that has found an error
MEMCHECK = ["--tool", "memcheck", "--check-api-memory-access=no", "--kernel-name-exclude", "kns=nvjet"]
TOOLS = {
    # Calls of the driver that fail are errors of torch and Triton; one of Triton 3.9's may, which then makes another.
    "memcheck": [*MEMCHECK, "--report-api-errors=no"],
    "synccheck": ["--tool", "synccheck", "--kernel-name-exclude", "kns=nvjet"],
    "racecheck": ["--tool", "racecheck", "--racecheck-report", "all"],
}
CONSAN = {"TRITON_INSTRUMENTATION_MODE": "consan", "CUDA_LAUNCH_BLOCKING": "1"}
OLDEST_CONSAN = (3, 9)  # Triton 3.6's dies of `fma`, 3.7.1's takes minutes
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
    for prepared, found in variants(shared(circumstances(), share), Alone("cuda"), gpu(), VARIANTS):
        for variant in found:
            prepared.call_by(variant.plan(prepared.request.problem(*prepared.operands), "cuda"))
            torch.cuda.synchronize()
            yield str(variant)


# --- compute-sanitizer ---


def sanitizer() -> str | None:
    """Where compute-sanitizer is: on PATH, or in the CUDA toolkit."""
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    return shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))


def watch(tool: str, command: Sequence[str]) -> subprocess.CompletedProcess[str]:
    """Runs a command under compute-sanitizer, without torch's cache of memory. FOUND is its status if something was."""
    program = sanitizer()
    assert program is not None
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    options = [*TOOLS[tool], "--error-exitcode", str(FOUND)]
    streams: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.run([program, *options, *command], cwd=ROOT, env=environment, text=True, **streams)


# --- ConSan ---


def version() -> tuple[int, ...]:
    """Of Triton, major and minor."""
    return tuple(map(int, triton.__version__.split(".")[:2]))


def watched_by_consan(device: DeviceInfo) -> list[str]:
    """Names of the kernels that ConSan checks. Each runs in its own process."""
    names = [rung.name for rung in LADDER if device.capability in rung.capabilities]
    for _, found in variants(circumstances(), Memory("cpu"), device, VARIANTS_OF_CONSAN, inline_ptx=False):
        names += map(str, found)
    return names


def by_name(name: str) -> Iterator[str]:
    """One of them, launched by Triton, which gives instrumented kernels the memory that they note things in."""
    for rung in LADDER:
        if rung.name == name:
            yield from launch_rung(rung, rung.launch)
    circumstance = name.partition(": ")[0]
    if circumstance not in circumstances():
        return
    prepared = Prepared(circumstances()[circumstance], Alone("cuda"), by_plan=True)
    described = prepared.request.problem(*prepared.operands)
    for variant in forms(circumstance, prepared.problem, described, gpu()):
        if str(variant) == name:
            with torch.device("cuda"):
                prepared.call_by(variant.plan(described, "cuda", by_triton=True))
            torch.cuda.synchronize()
            yield name


def consan(command: Sequence[str]) -> str | None:
    """What ConSan finds in this command, or None."""
    try:
        done = subprocess.run(
            [*LAUNCH, *command],
            cwd=ROOT,
            env={**os.environ, **CONSAN},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=LIMIT_S,
        )
    except subprocess.TimeoutExpired:
        return f"did not end within {LIMIT_S:.0f} s"
    if done.returncode == 0:
        return None
    lines = [line for line in done.stdout.splitlines() if "ssert" in line or "Error" in line]
    messages = [*dict.fromkeys(lines), *done.stdout.splitlines()[-1:]]
    return " | ".join(messages)[:400] or f"exit status {done.returncode}"


def watch_by_consan(share: str, jobs: int) -> int:
    """Prints what each is found to do; the exit status."""
    names = list(shared(dict.fromkeys(watched_by_consan(gpu())), share))
    failed = 0
    with ThreadPoolExecutor(jobs) as pool:
        for name, wrong in zip(names, pool.map(lambda name: consan(["one", "--name", name]), names), strict=True):
            print(name if wrong is None else f"FAILED: {name}: {wrong}", flush=True)
            failed += wrong is not None
    print(f"{len(names):,} launches; {failed} failures")
    return 1 if failed or not names else 0


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


def launch(what: str, share: str, name: str) -> int:
    """Launches, and prints each; the exit status."""
    of_what: dict[str, Callable[[], Iterator[str]]] = {
        "rungs": lambda: rungs(share),
        "twins": lambda: twins(share),
        "kernels": lambda: kernels(share),
        "one": lambda: by_name(name),
        **PLANTED,
    }
    launched = 0
    try:
        for line in of_what[what]():
            print(line, flush=True)
            launched += 1
    except TwinUnavailable as error:
        print(error)
        return SKIPPED
    print(f"{launched:,} launches")
    return 0 if launched else 1


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.gpu.sanitize", description=__doc__)
    parser.add_argument("what", choices=("rungs", "twins", "kernels", "one", *PLANTED), metavar="WHAT")
    parser.add_argument("--share", default="1/1", metavar="I/N", help="a part of them")
    parser.add_argument("--name", default="", help="what `one` is: a rung, or a way as `kernels` prints it")
    given = parser.parse_args(arguments)
    return launch(given.what, given.share, given.name)


if __name__ == "__main__":
    sys.exit(main())
