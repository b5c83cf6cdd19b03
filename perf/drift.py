"""What other Tritons make of the kernels: python -m perf.drift [--triton WHAT ...]

Compiles every kernel in all its configurations for one GPU (--gpu), which need not be there, with each Triton that is
named. Reports which registers, spills, shared memory, instructions and machine code are not those of the committed
record of that version; of a version without one, of the last before it. --triton names a version, which pip installs
into build/drift; a Python interpreter; a folder that has triton in it, as `pip install --no-deps --target FOLDER WHEEL`
makes one; or "here", this interpreter's Triton. By default all versions that are supported. Exit status: 1 if something
that compiled does not, or spills more than before, 2 for a mistake in the call or a Triton that cannot be had.
"""

from __future__ import annotations

import argparse
import csv
import hashlib
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from dataclasses import replace
from functools import cache, partial
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from typing import NamedTuple

os.environ.pop("TRITON_INTERPRET", None)

try:
    import triton

    from perf.common import arguments as args
    from perf.measure.environment import RESULTS, ROOT, of_child
    from triton_gemm import kernels
    from triton_gemm.arithmetic import ARITHMETICS, HALF, IEEE, TF32, Arithmetic
    from triton_gemm.config import TileConfig
    from triton_gemm.hardware.device import DeviceInfo
    from triton_gemm.hardware.gpus import named_device
    from triton_gemm.kernels import reduction
    from triton_gemm.kernels.candidate import Work
    from triton_gemm.kernels.launch import Launch, materialise
    from triton_gemm.kernels.schedule import Schedule
    from triton_gemm.kernels.warp_specialised.configs import listed, of_itemsize
    from triton_gemm.problem import GemmProblem
    from triton_gemm.runtime import aot, binaries
    from triton_gemm.suites.problems import gemm_problem
    from triton_gemm.suites.shapes import Shape
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    print(f"error: {error}; pip install -e '.[dev]'", file=sys.stderr)
    sys.exit(2)

VERSIONS = ("3.6.0", "3.7.1", "3.8.0", "3.9.0")  # the last of each minor version that is supported
GPUS = ("sm_90", "sm_80", "sm_89", "sm_100", "sm_120")
FOLDER = RESULTS / "drift"
INSTALLED = ROOT / "build" / "drift"

FIGURES = ("registers", "spills", "shared", "instructions")
# SASS opcodes that are counted by themselves: tensor cores and multiply-adds, TMA and other copies, barriers.
OPCODES = (
    *("HGMMA", "QGMMA", "IGMMA", "HMMA", "IMMA", "DMMA", "FFMA", "UTMALDG", "UTMASTG", "LDGSTS", "LDG", "STG"),
    *("LDSM", "STSM", "LDS", "STS", "BAR", "SYNCS", "WARPGROUP"),
)
COLUMNS = ("case", *FIGURES, *OPCODES, "sass", "error")
Row = dict[str, str]  # of a record, by column; a kernel that does not compile has an error, and nothing else
ENDED = "the compiler ended its process"

# M, N, K and layout of A and B. A configuration is compiled in the first of these that its kernel takes: "nt" is
# `linear`'s, the narrow ones are for the kernels of a few rows.
PRODUCTS = (
    Shape(1024, 1280, 2048, layout="nt"),
    Shape(1024, 1280, 2048, layout="nn"),
    *(Shape(rows, 1280, 2048, layout=layout) for rows in (1, 2, 4, 16) for layout in ("nt", "nn")),
)
ODD = Shape(1023, 1279, 2047, layout="nn")  # whose rows TMA cannot read, so that they are copied
LONG = Shape(256, 320, 32768, layout="nt")  # whose parts of K a second launch adds up
PARTS = (8, 32)  # of K; the second launch reads more of many at once


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    here = ("here", triton.__version__)
    return max(compare(given) if what in here else compare_with(what, given) for what in given.triton)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = args.parser("drift", __doc__)
    parser.add_argument("--triton", nargs="+", default=VERSIONS, metavar="WHAT", help="versions to try")
    parser.add_argument("--gpu", default=GPUS[0], choices=GPUS, help="what is compiled for (%(default)s)")
    parser.add_argument("--only", default="", metavar="WORDS", help="cases that have these words in their name")
    parser.add_argument("--jobs", type=args.count, default=os.cpu_count() or 1, metavar="N", help="processes")
    parser.add_argument("--update", action="store_true", help="write the records")
    found = parser.parse_args(arguments)
    if found.update and found.only:
        parser.error("--update with --only would leave cases out of the record")
    return found


# --- Which Triton ---


def compare_with(what: str, given: argparse.Namespace) -> int:
    """Runs this command with another Triton, and returns its exit status."""
    try:
        python, folder = toolchain(what)
        options = [f"--gpu={given.gpu}", f"--only={given.only}", f"--jobs={given.jobs}", *["--update"] * given.update]
        command = [python, "-m", "perf.drift", "--triton", "here", *options]
        status = subprocess.run(command, env=of_child(str(folder or ""))).returncode
        return status if status in (0, 1) else 2
    except (OSError, ValueError, subprocess.CalledProcessError) as error:
        print(f"error: {what}: {error}", file=sys.stderr)
        return 2


def toolchain(what: str) -> tuple[str, Path | None]:
    """The Python interpreter for --triton WHAT, and the folder of its Triton where that is not the interpreter's own.
    pip installs a version without torch: this interpreter's is imported."""
    path = Path(what).resolve()
    if path.is_file():
        return what, None
    folder = path if path.is_dir() else INSTALLED / what
    if folder != path and not (folder / "triton" / "__init__.py").exists():
        pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--quiet", "--disable-pip-version-check"]
        subprocess.run([*pip, "--target", str(folder), f"triton=={what}"], check=True)
    if not (folder / "triton" / "__init__.py").exists():
        raise ValueError(f"{folder} has no folder triton with an __init__.py")
    return sys.executable, folder


# --- Records ---


def compare(given: argparse.Namespace) -> int:
    """Compiles with the Triton of this interpreter, and prints what differs from the record."""

    def chosen(name: str) -> bool:
        return all(word in name for word in given.only.split())

    names = list(filter(chosen, every(given.gpu)))
    if not names:
        print(f"error: no kernel has {given.only!r} in its name", file=sys.stderr)
        return 2
    found = compile_all(names, given.jobs, partial(compile_case, gpu=given.gpu))
    before = base(triton.__version__, given.gpu)
    known = {} if before is None else {name: row for name, row in read(before).items() if chosen(name)}
    changed = [name for name, row in found.items() if row != known.get(name, row)]
    worse = [name for name in changed if is_worse(known[name], found[name])]
    for name in changed:
        print(f"{'WORSE: ' * (name in worse)}{name}: {difference(known[name], found[name])}")
    for name, row in found.items():
        if name not in known and (before or row["error"]):
            print(f"{name}: only here {row['error']}".rstrip())
    for name in known.keys() - found.keys():
        print(f"{name}: only in the record")
    compared = f"against {before.name}: {len(changed)} differ, {len(worse)} worse" if before else "without a record"
    print(f"Triton {triton.__version__}, {given.gpu}, {len(found)} kernels, {compared}")
    if given.update:
        with (FOLDER / f"{given.gpu}-triton-{triton.__version__}.csv").open("w", newline="") as file:
            writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
            writer.writeheader()
            writer.writerows(found.values())
    return int(bool(worse) and not given.update)


def base(version: str, gpu: str) -> Path | None:
    """The record that a version is compared with: its own, or else that of the last before it."""

    def order(version: str) -> tuple[list[int], str]:
        return [int(digits) for digits in re.findall(r"\d+", version)[:3]], version

    records = {path.stem.partition("-triton-")[2]: path for path in FOLDER.glob(f"{gpu}-triton-*.csv")}
    earlier = [known for known in records if order(known) <= order(version)]
    return records[max(earlier, key=order)] if earlier else None


def read(path: Path) -> dict[str, Row]:
    with path.open(newline="") as file:
        return {row["case"]: {name: row.get(name) or "" for name in COLUMNS} for row in csv.DictReader(file)}


def is_worse(before: Row, after: Row) -> bool:
    """Whether it no longer compiles, or spills more: what is to be mended before that Triton is supported."""
    fails = bool(after["error"]) and not before["error"]
    return fails or int(after["spills"] or 0) > int(before["spills"] or 0)


def difference(before: Row, after: Row) -> str:
    if before["error"] or after["error"]:
        return f"{before['error'] or 'compiled'} -> {after['error'] or 'compiles'}"
    moved = [f"{name} {before[name]} -> {after[name]}" for name in (*FIGURES, *OPCODES) if before[name] != after[name]]
    return ", ".join(moved or ["other machine code of the same figures"])


# --- Compiling ---


def compile_all(names: Sequence[str], jobs: int, work: Callable[[str], Row]) -> dict[str, Row]:
    """What `work` makes of each name, in processes that run one case at a time: a compiler may abort, which costs its
    case alone."""
    own = threading.local()  # each thread has a process

    def run(name: str) -> Row:
        if not hasattr(own, "process"):
            own.process = ProcessPoolExecutor(1, mp_context=get_context("spawn"))
        try:
            row: Row = own.process.submit(work, name).result()
            return row
        except BrokenProcessPool:
            del own.process
            return failed(name, ENDED)

    found: dict[str, Row] = {}
    with ThreadPoolExecutor(jobs) as threads:
        for name, row in zip(names, threads.map(run, names), strict=True):
            found[name] = row
            print(f"[{len(found):3d}/{len(names)}] {name}", file=sys.stderr, flush=True)
    return found


def compile_case(name: str, gpu: str = GPUS[0]) -> Row:
    """What a case becomes: registers of a thread, loads and stores of local memory, bytes of shared memory, and
    instructions in the kernel's text. Or why it does not compile."""
    try:
        _, launch, problem = every(gpu)[name]
        arguments = materialise(launch, binaries.operands_of(problem, [launch]), binaries.SCALARS)  # without memory
        captured = aot.CapturedLaunch(launch.kernel, {**arguments, **launch.options})
        made = aot.compile_launch(captured, named_device(gpu).capability)
    except Exception as error:
        first = next(iter(str(error).strip().splitlines()), "")
        return failed(name, f"{type(error).__name__}: {first}"[:120])
    figures = (made.registers, made.spills, made.shared, made.instructions.total())
    values = (name, *figures, *(made.instructions[opcode] for opcode in OPCODES), machine_code(made.asm["sass"]), "")
    return dict(zip(COLUMNS, map(str, values), strict=True))


def failed(name: str, error: str) -> Row:
    return dict.fromkeys(COLUMNS, "") | {"case": name, "error": error}


def machine_code(sass: str) -> str:
    """The start of the SHA-256 of a kernel's instructions and their encoding, whatever the kernel is called."""
    lines = [line.strip() for line in sass.splitlines() if line.lstrip().startswith("/*")]
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


# --- Cases ---


class Case(NamedTuple):
    """One kernel to compile. name: kernel, precision, product and configuration, by which records know it."""

    name: str
    launch: Launch
    problem: GemmProblem


@cache
def every(gpu: str = GPUS[0]) -> dict[str, Case]:
    """All cases of a GPU in GPUS by name, those of one kernel after one another."""
    device = named_device(gpu)
    programmatic = device.capability >= (9, 0)  # as `binaries.launches_on` does
    makers: tuple[Callable[[Arithmetic], Iterator[Case]], ...] = (
        partial(_for_long_sums, device=device),
        *(partial(_of_kernel, kernel, device=device) for kernel in kernels.KERNELS),
        _second_launches,
        _copies,
    )
    found: dict[str, Case] = {}
    for maker, arithmetic in product(makers, ARITHMETICS.values()):
        for case in maker(arithmetic):
            launch = case.launch.programmatic() if programmatic else case.launch
            found.setdefault(case.name, case._replace(launch=launch))
    return found


def problem(shape: Shape, arithmetic: Arithmetic) -> GemmProblem:
    """The product of that shape in a precision's main dtype, bf16 of the 16-bit ones, without an epilogue. Operands
    that have scales have one for each of them, and give bf16."""
    scales = None if arithmetic.plain else "tensor"
    return gemm_problem(replace(shape, scales=scales), "bf16" if arithmetic is HALF else arithmetic.name)


def _of_kernel(kernel: str, arithmetic: Arithmetic, device: DeviceInfo) -> Iterator[Case]:
    """The configurations that the kernel offers for one of the products, and those that it lists. Tiles as wide as a
    wave needs are offered and not listed, and what is listed for other sizes is not offered."""
    module = kernels.named(kernel)
    from_offers: dict[TileConfig, Case] = {}
    from_lists: dict[TileConfig, Case] = {}
    for shape in PRODUCTS:
        candidates = list(module.candidates(problem(shape, arithmetic), device))
        for made in dict.fromkeys(candidate.problem for candidate in candidates):
            offers = [candidate.algorithm for candidate in candidates if candidate.problem == made]
            whole: Work = Schedule(device.num_sms) if isinstance(offers[0].work, Schedule) else 1
            works: dict[TileConfig, list[Work]] = {}
            for algorithm in offers:
                works.setdefault(algorithm.config, [whole]).append(algorithm.work)
            for config in (*works, *_listed(kernel, made, device)):
                found = from_offers if config in works else from_lists
                legal = (w for w in works.get(config, [whole]) if module.illegal(made, device, config, w) is None)
                work = None if config in found else next(legal, None)
                if work is not None:
                    *_, launch = module.launches(made, config, work)
                    found[config] = Case(_name(kernel, arithmetic, shape, config), launch, made)
    yield from (from_lists | from_offers).values()


def _listed(kernel: str, made: GemmProblem, device: DeviceInfo) -> Sequence[TileConfig]:
    if kernel == "warp_specialised":
        return listed(made.dtype.itemsize, clusters=True, long_sums=False)
    if kernel == "portable":
        return kernels.portable.configs(made.precision, device.capability)
    found: Sequence[TileConfig] = kernels.named(kernel).CONFIGS
    return found


def _for_long_sums(arithmetic: Arithmetic, device: DeviceInfo) -> Iterator[Case]:
    """The warp-specialised kernel's configurations for sums that are cut, with all tiles cut for a second launch."""
    kernel = kernels.warp_specialised
    candidates = kernel.candidates(problem(LONG, arithmetic), device)
    for made in dict.fromkeys(candidate.problem for candidate in candidates):
        for config in of_itemsize(kernel.FOR_LONG_SUMS, made.planes.dtype.itemsize):
            tiles = config.tiles(made.M, made.N)
            work = Schedule(2 * tiles, tiles, 2, reduction=True)
            if kernel.illegal(made, device, config, work) is None:
                first, _ = kernel.launches(made, config, work)
                yield Case(_name("warp_specialised", arithmetic, LONG, config), first, made)


def _second_launches(arithmetic: Arithmetic) -> Iterator[Case]:
    """Those that add up the parts of K that another left in memory: in 16 bits and fp32, whatever was multiplied."""
    if arithmetic in (HALF, TF32):
        made = problem(LONG, arithmetic)
        for parts in PARTS:
            launch = replace(reduction.launch(made, parts), temporaries=(reduction.sums_of(made, parts),))
            yield Case(_name("reduction", arithmetic, LONG, f"{parts} parts"), launch, made)


def _copies(arithmetic: Arithmetic) -> Iterator[Case]:
    """Those that `kernels.repack` makes of operands which a kernel cannot read, or multiplies in planes."""
    if arithmetic in (HALF, IEEE, TF32) or arithmetic.planes:
        made = problem(ODD, arithmetic)
        for name in ("a", "b"):
            launch, _ = kernels.repack.copy_of(made, name)
            yield Case(_name("repack", arithmetic, ODD, name), launch, made)


def _name(kernel: str, arithmetic: Arithmetic, shape: Shape, words: object) -> str:
    return f"{kernel} {arithmetic.name}, {shape.M}x{shape.N}x{shape.K} {shape.layout}: {words}"


if __name__ == "__main__":
    sys.exit(main())
