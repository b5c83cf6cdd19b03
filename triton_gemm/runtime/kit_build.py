"""Building a kit (`kit`), where there need be no GPU, anew only what changed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Callable, Container, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from ..compat import compiled_by, machine_code, without_lines
from ..hardware.device import DeviceInfo
from ..problem import GemmProblem
from ..selection.select import Selection
from . import kit, kits, native_file, precompile
from .precompile import Compilable, compile_each, gather
from .worker import error_line

# Environment variables of Triton, and those that change no machine code.
SETTINGS = ("TRITON_", "PTXAS_", "DISABLE_PTXAS_", "DISABLE_LLVM_", "LLVM_", "MLIR_", "NVPTX_")
HARMLESS = {"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH", "TRITON_PRINT_AUTOTUNING"}
MOST = 16384  # kernels of a user's kit, of whose index each takes less than a thousandth of a MB


@dataclass(frozen=True)
class Built:
    """A kit that was written."""

    kernels: int  # how many it holds
    compiled: int  # of those, how many the file did not have before
    nbytes: int  # the file's size
    failures: tuple[str, ...] = field(default=())  # a sentence for each kernel that did not compile


@dataclass(frozen=True)
class Extended(Built):
    """A user's kit."""

    file: Path = Path()
    problems: int = 0  # how many were given
    needed: int = 0  # how many kernels they need
    shipped: int = 0  # of those, how many are left out, as the package's own kit has them
    # How many the file had before and has no more, by why: made by other "compilers", of other "sources", or "shipped"
    # by now.
    dropped: Mapping[str, int] = field(default_factory=dict)
    seconds: float = 0.0  # that it took


def compilables(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> dict[str, Compilable]:
    """What a selection launches on a GPU, by the keys of a kit."""
    return {kit.key_of(x): of for x, of in precompile.compilables(device, problem, selection).items()}


def build(
    file: Path,
    launches: Mapping[str, Compilable],
    capability: tuple[int, int],
    *,
    cache: str | os.PathLike[str],
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Built:
    """Writes the kit of launches by key. What the file has from the same sources and compilers is kept.

    cache: a folder for Triton's cache, which has nothing else; workers, progress: as `precompile` takes them. Nothing
    may be launched meanwhile. What cannot be compiled is left out. ValueError where the environment changes what Triton
    compiles.
    """
    made_by = _compilers()
    kernels: dict[str, kit.Kernel] = {}
    with suppress(OSError, kit.DamagedError):
        kernels = _current(kit.read(file), capability, made_by, launches)
    missing = {key: of for key, of in launches.items() if key not in kernels}
    made, failures = _compiled(missing, capability, cache, workers, progress)
    file.parent.mkdir(parents=True, exist_ok=True)
    nbytes = _write(file, capability, kernels | made, made_by)
    return Built(len(kernels | made), len(made), nbytes, failures)


def extend(
    file: Path,
    problems: Sequence[GemmProblem],
    devices: Sequence[DeviceInfo],
    *,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    **how: Any,
) -> Extended:
    """Adds what problems need on devices of one compute capability to a user's kit, which need not be there.

    It keeps all of the file's kernels of the same sources and compilers, whoever needs them, and drops the others. So
    the file depends on what was asked of it since, and not on the order. The package's own kit's kernels are left out.
    how: `selecting` and `also`, as `precompile` takes them. Others that extend a kit in this folder are waited for.

    ValueError where the environment changes what Triton compiles, for GPUs that no kit is for, for a file that is not a
    kit, and for more kernels than MOST. OSError where others could write to the file or its folder, or this process
    cannot. RuntimeError where Triton interprets kernels.
    """
    begin = time.perf_counter()
    made_by = _compilers()
    capability, *others = {device.capability for device in devices}
    if others or capability not in kits.NAMES:
        known = " or ".join(f"{major}.{minor}" for major, minor in kits.NAMES)
        given = ", ".join(sorted(f"{x.name} ({x.capability[0]}.{x.capability[1]})" for x in devices))
        raise ValueError(f"a kit is for GPUs of one compute capability, {known}, not for {given}")
    wanted, not_launched = gather(problems, devices, **how)
    needed = {kit.key_of(x): of for x, of in wanted.get(capability, {}).items()}
    launches, shipped = needed, _shipped(capability)
    if kits.others(capability):  # of their machine code only what was chosen from them is run
        wanted, _ = gather(problems, devices, of_kits=False, **how)
        launches = {kit.key_of(x): of for x, of in wanted.get(capability, {}).items()}
        shipped = set()
    with _alone(file) as where, TemporaryDirectory() as cache:
        kernels: dict[str, kit.Kernel] = {}
        dropped: dict[str, int] = {}
        with suppress(FileNotFoundError), opened(file) as found:
            kernels = _current(found, capability, made_by, found.kernels.keys() - shipped)
            for key in found.kernels.keys() - kernels.keys():
                why = "compilers" if found.made_by != made_by else "shipped" if key in shipped else "sources"
                dropped[why] = dropped.get(why, 0) + 1
        missing = {key: of for key, of in launches.items() if key not in kernels and key not in shipped}
        if (count := len(kernels) + len(missing)) > MOST:
            raise ValueError(f"{file} would have {count} kernels, and {MOST} are the most: give another file")
        made, failures = _compiled(missing, capability, cache, workers, progress)
        nbytes = _write(where, capability, kernels | made, made_by)
    return Extended(
        *(len(kernels | made), len(made), nbytes, (*dict.fromkeys(not_launched), *failures)),
        file=file,
        problems=len(problems),
        needed=len(needed),
        shipped=len(needed.keys() & shipped) + len(needed.keys() - launches.keys()),
        dropped=dropped,
        seconds=time.perf_counter() - begin,
    )


@contextmanager
def opened(file: Path) -> Iterator[kit.Kit]:
    """A user's kit. FileNotFoundError where there is none, ValueError where it is no kit, OSError as `open_safely`."""
    try:
        descriptor = native_file.open_safely(file)
    except ImportError as error:
        raise ValueError(str(error)) from None
    try:
        yield kit.read(Path(f"/proc/self/fd/{descriptor}"))
    except kit.DamagedError as error:
        raise ValueError(f"{file}: {error}") from None
    finally:
        os.close(descriptor)


@contextmanager
def _alone(file: Path) -> Iterator[Path]:
    """The file by a name that stays its own, alone among who extends kits in its folder, which is made. OSError where
    others may write to the folder, or this process may not."""
    file.parent.mkdir(0o755, parents=True, exist_ok=True)
    with native_file.opened(file.parent) as folder:
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{file.parent} cannot be written to")
        descriptor = os.open(folder, os.O_RDONLY)
        try:
            with suppress(OSError):  # its file system has no locks
                fcntl.flock(descriptor, fcntl.LOCK_EX)
            yield folder / file.name
        finally:
            os.close(descriptor)


def _compilers() -> dict[str, str]:
    """Their versions. ValueError where the environment changes what they compile."""
    if changed := sorted(x for x in os.environ if x.startswith(SETTINGS) and x not in HARMLESS and "_GEMM_" not in x):
        raise ValueError(f"{', '.join(changed)} may change what Triton compiles: unset it")
    return compiled_by()


def _shipped(capability: tuple[int, int]) -> set[str]:
    """The keys of current kernels of the package's own kit, if it has one, whatever TRITON_GEMM_KIT is here."""
    with suppress(OSError, kit.DamagedError):
        found = kit.read(kits.SHIPPED / kits.NAMES[capability])
        return set(filter(found.is_current, found.kernels))
    return set()


def _current(
    before: kit.Kit, capability: tuple[int, int], made_by: Mapping[str, str], keys: Container[str]
) -> dict[str, kit.Kernel]:
    """What a kit has of these kernels and would be compiled to the same."""
    found: dict[str, kit.Kernel] = {}
    if (before.capability, before.made_by) == (capability, made_by):
        for key in before.kernels:  # in the file's order, so that each group is unpacked once
            if key in keys and (code := before.find(key)) is not None:
                found[key] = kit.Kernel(code, before.sources[code.symbol])
    return found


def _compiled(
    launches: Mapping[str, Compilable],
    capability: tuple[int, int],
    cache: str | os.PathLike[str],
    workers: int | None,
    progress: Callable[[int, int], None],
) -> tuple[dict[str, kit.Kernel], tuple[str, ...]]:
    """Kernels, and a sentence for each that did not compile."""
    found: dict[str, kit.Kernel] = {}
    failures: list[str] = []
    progress(0, len(launches))
    kernels = {key: launch.kernel for key, (launch, _) in launches.items()}
    # Before threads compile: Python 3.11 may fail to parse in one thread while another one does.
    sources = {kernel: kit.sources_of(kernel) for kernel in dict.fromkeys(kernels.values())}
    with without_lines():
        for done, (key, job) in enumerate(compile_each(launches, capability, cache, workers), 1):
            kernel = kernels[key]
            try:
                found[key] = kit.Kernel(machine_code(job.result()), sources[kernel])
            except Exception as error:  # the compiler's, of one of many
                failures.append(f"{kernel.__name__}: {error_line(error)}")
            progress(done, len(launches))
    return found, tuple(dict.fromkeys(failures))


def _write(
    file: Path, capability: tuple[int, int], kernels: Mapping[str, kit.Kernel], made_by: Mapping[str, str]
) -> int:
    """Writes a kit whole, with permissions that `open_safely` wants, and returns its size. It is written in a folder
    that only this user may enter: whatever the umask, nobody else can have it open."""
    try:
        with TemporaryDirectory(prefix=".kit-", dir=file.parent) as inside:
            made = Path(inside, file.name)
            kit.write(made, capability, kernels, made_by)
            made.chmod(0o644)
            os.replace(made, file)
            return file.stat().st_size
    except OSError as error:
        raise OSError(error.errno, error.strerror, str(file.resolve())) from None
