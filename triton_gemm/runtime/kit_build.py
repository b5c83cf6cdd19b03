"""Building a kit (`kit`), where there need be no GPU, anew only what changed."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from ..compat import compiled_by, machine_code, without_lines
from ..hardware.device import DeviceInfo
from ..problem import GemmProblem
from ..selection.select import Selection
from . import kit
from .binaries import identity, launches_on, operands_of
from .precompile import Compilable, compile_each
from .worker import error_line

# Environment variables of Triton, and those that change no machine code.
SETTINGS = ("TRITON_", "PTXAS_", "DISABLE_PTXAS_", "DISABLE_LLVM_", "LLVM_", "MLIR_", "NVPTX_")
HARMLESS = {"TRITON_CACHE_DIR", "TRITON_HOME", "TRITON_INTERPRET", "TRITON_LIBCUDA_PATH"}


@dataclass(frozen=True)
class Built:
    """A kit that was written. kernels: how many it holds; compiled: how many of those the file did not have before;
    nbytes: the file's size; failures: a sentence for each kernel that did not compile."""

    kernels: int
    compiled: int
    nbytes: int
    failures: tuple[str, ...] = field(default=())


def compilables(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> dict[str, Compilable]:
    """What a selection launches on a GPU, by the keys of a kit."""
    made = launches_on(device, problem, selection)
    operands = operands_of(problem, made)
    return {kit.key_of(identity(launch, operands)): (launch, operands) for launch in made}


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
    if changed := sorted(x for x in os.environ if x.startswith(SETTINGS) and x not in HARMLESS and "_GEMM_" not in x):
        raise ValueError(f"{', '.join(changed)} may change what Triton compiles: unset it")
    made_by = compiled_by()
    kernels = _kept(file, launches, capability, made_by)
    missing = {key: of for key, of in launches.items() if key not in kernels}
    failures: list[str] = []
    progress(0, len(missing))
    with without_lines():
        for done, (key, job) in enumerate(compile_each(missing, capability, cache, workers), 1):
            launch, _ = missing[key]
            try:
                kernels[key] = kit.Kernel(machine_code(job.result()), kit.sources_of(launch.kernel))
            except Exception as error:  # the compiler's, of one of many
                failures.append(f"{launch.kernel.__name__}: {error_line(error)}")
            progress(done, len(missing))
    file.parent.mkdir(parents=True, exist_ok=True)
    kit.write(file, capability, kernels, made_by)
    compiled = len(missing) - len(failures)
    return Built(len(kernels), compiled, file.stat().st_size, tuple(dict.fromkeys(failures)))


def _kept(
    file: Path, keys: Mapping[str, Compilable], capability: tuple[int, int], made_by: Mapping[str, str]
) -> dict[str, kit.Kernel]:
    """What the file has of these kernels and would be compiled to the same."""
    found: dict[str, kit.Kernel] = {}
    with suppress(OSError, kit.DamagedError):
        before = kit.read(file)
        if (before.capability, before.made_by) == (capability, made_by):
            for key in before.kernels:  # in the file's order, so that each group is unpacked once
                if key in keys and (code := before.find(key)) is not None:
                    found[key] = kit.Kernel(code, before.sources[code.symbol])
    return found
