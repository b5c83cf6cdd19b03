"""Compiling ahead of time what products will run on, into Triton's cache, where there need be no GPU.

What is found in that cache depends on the installation of Triton, this package's sources and the environment variables
that change what Triton compiles: compile in the image that will run, or in one that is made the same way. It also
depends on the selection, and so on the GPU, its tables and the policy.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from itertools import product
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

import torch

from ..compat import INTERPRETED, build_driver_module, cache_folder, compilations, compiling_for, forget_compiled
from ..hardware.device import DeviceInfo
from ..kernels.launch import Launch, compiled
from ..problem import GemmProblem
from ..selection.select import Selection
from .background import held
from .binaries import SCALARS, identities, identity, launches_on, operands_of
from .plan import selection_for
from .worker import error_line

Compilable = tuple[Launch, Mapping[str, torch.Tensor]]  # a launch, and operands as `operands_of` has them
_Key = TypeVar("_Key")
SELECTING_S = 0.1  # between two calls of `selecting`: a selection takes less than a millisecond


@dataclass(frozen=True)
class Precompiled:
    """What was compiled."""

    kernels: int  # how many there are
    compiled: int  # of those, how many were not in the cache before
    problems: int  # how many were given
    cache: Path  # the folder of Triton's cache
    seconds: float  # that it took
    failures: tuple[str, ...] = field(default=())  # of problem or kernel, a sentence each
    # Why Triton's driver module was not built, so that the machine with the GPU needs a C compiler; or None.
    driver_module: str | None = None
    in_kits: int = 0  # how many more kernels kits have, which nothing compiles
    # Why there is no C++ extension, which `prepare` and `triton-gemm warmup` build too unless it is there; or None.
    extension: str | None = None


def compilables(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> dict[Hashable, Compilable]:
    """What a selection launches on a GPU, by `identity`."""
    made = launches_on(device, problem, selection)
    operands = operands_of(problem, made)
    return {identity(launch, operands): (launch, operands) for launch in made}


def gather(
    problems: Sequence[GemmProblem],
    devices: Iterable[DeviceInfo],
    *,
    selecting: Callable[[int, int], None] = lambda done, total: None,
    also: Callable[[GemmProblem, DeviceInfo], Iterable[Selection]] = lambda problem, device: (),
    invariants: Mapping[GemmProblem, Collection[bool | None]] = MappingProxyType({}),
    of_kits: bool = True,
    left_out: set[Hashable] | None = None,
) -> tuple[dict[tuple[int, int], dict[Hashable, Compilable]], list[str]]:
    """What problems launch, by compute capability and `identity`, and a sentence for each that cannot be launched.
    Arguments, and RuntimeError, as `precompile`. of_kits: also what was chosen because a kit holds it; else `left_out`
    gets its kernels' identities."""
    if INTERPRETED:
        raise RuntimeError("TRITON_INTERPRET=1 has Triton interpret kernels, and nothing is compiled: unset it")
    failures: list[str] = []
    wanted: dict[tuple[int, int], dict[Hashable, Compilable]] = {}
    pairs = list(product(devices, problems))
    last_call = time.perf_counter()
    selecting(0, len(pairs))
    for done, (device, problem) in enumerate(pairs):
        if time.perf_counter() - last_call > SELECTING_S:
            last_call = time.perf_counter()
            selecting(done, len(pairs))
        of_capability = wanted.setdefault(device.capability, {})
        try:
            invariances = invariants.get(problem, (None,))
            selections = [*(selection_for(problem, device, invariant=x) for x in invariances), *also(problem, device)]
        except RuntimeError as error:
            failures.append(str(error))
            continue
        for selection in selections:
            if selection.kit and not of_kits:
                if left_out is not None:
                    left_out |= {(device.capability, x) for x in identities(device, problem, selection)}
                continue
            try:
                of_capability |= compilables(device, problem, selection)
            except Exception as error:  # whoever chose it, other selections are compiled
                sizes = f"{problem.M}x{problem.N}x{problem.K}"
                failures.append(f"{sizes}, {selection.kernel} {selection.config}: {error_line(error)}")
    selecting(len(pairs), len(pairs))
    return wanted, failures


def compile_each(
    launches: Mapping[_Key, Compilable],
    capability: tuple[int, int],
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
) -> Iterator[tuple[_Key, Future[Any]]]:
    """Compiles launches, and yields each key once its kernel is compiled, or has failed, in whichever order. cache,
    workers: as `precompile` takes them."""
    with (
        held(),  # workers would write into the other cache
        compiling_for(capability, cache),
        ThreadPoolExecutor(workers or os.cpu_count()) as pool,
    ):
        forget_compiled(launch.kernel for launch, _ in launches.values())
        jobs = {pool.submit(compiled, *of, SCALARS): key for key, of in launches.items()}
        try:
            for job in as_completed(jobs):
                yield jobs[job], job
        except BaseException:  # an interruption does not wait for what has not begun
            pool.shutdown(cancel_futures=True)
            raise


def precompile(
    problems: Sequence[GemmProblem],
    devices: Iterable[DeviceInfo],
    *,
    cache: str | os.PathLike[str] | None = None,
    workers: int | None = None,
    progress: Callable[[int, int], None] = lambda done, total: None,
    selecting: Callable[[int, int], None] = lambda done, total: None,
    also: Callable[[GemmProblem, DeviceInfo], Iterable[Selection]] = lambda problem, device: (),
    invariants: Mapping[GemmProblem, Collection[bool | None]] = MappingProxyType({}),
) -> Precompiled:
    """Compiles what every problem would run on, on each of the devices, under the policy that counts here, and the
    driver module that Triton builds with a C compiler. Choices that kits hold are not compiled.

    Biases are taken to have C's dtype, and to begin at multiples of 16 bytes as torch's do. Nothing may be launched
    meanwhile.

    Args:
        devices: GPUs, here or not (`device_model.named_device`).
        cache: The folder that TRITON_CACHE_DIR will name, by default Triton's own.
        workers: Threads, by default one for each core.
        progress: Called with how many kernels are done, and of how many.
        selecting: Called before that as well, with how many problems' kernels are chosen, and of how many.
        also: Other selections for a problem to compile, as a tuner would time them.
        invariants: Of problems whose calls say whether they are batch-invariant, what they say.

    Raises:
        RuntimeError: Triton interprets kernels.
    """
    begin = time.perf_counter()
    in_kits: set[Hashable] = set()
    how: dict[str, Any] = {"selecting": selecting, "also": also, "invariants": invariants}
    wanted, failures = gather(problems, devices, of_kits=False, left_out=in_kits, **how)
    total = sum(map(len, wanted.values()))
    found: dict[str, bool] = {}
    done = 0

    def note(kernel: str, was_there: bool) -> None:
        found.setdefault(kernel, was_there)

    progress(0, total)
    for capability, launches in wanted.items():
        with compilations(note):
            for key, job in compile_each(launches, capability, cache, workers):
                if (wrong := job.exception()) is not None:
                    failures.append(f"{launches[key][0].kernel.__name__}: {error_line(wrong)}")
                done += 1
                progress(done, total)
    return Precompiled(
        kernels=len(found),
        compiled=sum(not was_there for was_there in found.values()),
        problems=len(problems),
        cache=Path(cache or cache_folder()),
        seconds=time.perf_counter() - begin,
        failures=tuple(dict.fromkeys(failures)),
        driver_module=build_driver_module(cache),
        in_kits=len(in_kits),
    )
