"""Compiling ahead of time: what a plan on a GPU asks Triton's cache for is there, and so is what needs a C compiler."""

from __future__ import annotations

import json
import pkgutil
import shutil
import subprocess
import threading
import time
from collections import defaultdict
from collections.abc import Hashable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from triton.runtime.jit import JITCallable

import triton_gemm
from tests.support.patches import replace_all
from tests.support.processes import printed, soon
from tests.support.table_fakes import HOPPER, problem_of
from triton_gemm import compat
from triton_gemm.hardware.device import DeviceInfo, device_of_capability
from triton_gemm.kernels import warp_specialised
from triton_gemm.kernels.candidate import Algorithm, Candidate
from triton_gemm.kernels.launch import compiled
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime import binaries, precompile
from triton_gemm.runtime.compiling import Compiler
from triton_gemm.selection.select import Selection, launches, ranked, select

# A process of its own makes plans as a call does on a GPU, with operands that have addresses, and says for each kernel
# whether Triton found it.
RUN = """
import json, sys
from unittest import mock
import torch
from tests.support.table_fakes import HOPPER
from triton_gemm import compat
from triton_gemm.runtime import binaries, plan
from triton_gemm.runtime.step import Step
from tests.runtime import test_precompile

found = {}
problems = [test_precompile.BEYOND] if sys.argv[1:] else test_precompile.PROBLEMS
with (
    mock.patch.object(plan, "device_info", lambda device: HOPPER),
    mock.patch.object(Step, "_load", lambda *_: None),
    compat.compiling_for((9, 0)),
    compat.compilations(lambda kernel, hit: found.setdefault(kernel, hit)),
):
    for problem in problems:
        made = plan.GemmPlan(problem, plan.selection_for(problem, HOPPER), torch.device("cuda", 0))
        operands = binaries.operands_of(problem, [step.launch for step in made.steps])
        for name, like in operands.items():
            memory = torch.empty(128, dtype=like.dtype)
            operands[name] = memory[1:] if name == "b" and not problem.b.aligned else memory
        for step in made.steps:
            step.compile(operands)
print(json.dumps(found))
"""
# For a process without a C compiler and with a driver that does nothing: Triton loads its driver module.
LOAD = """
import triton
from triton.backends.nvidia.driver import CudaUtils
CudaUtils()
print("loaded")
"""


UNALIGNED = replace(problem_of(100, 60, 40), b=Layout((0, 60, 1), aligned=False))
# The first two share a kernel; Triton compiles the third and fourth apart, because of 1000's last bits.
PROBLEMS = [problem_of(), problem_of(511), problem_of(1, 1024, 1024), problem_of(1, 1000, 1024)]
PROBLEMS += [problem_of(17, 33, 65), problem_of(100, 60, 40), UNALIGNED]
BEYOND = problem_of(2048, 2048, 2048)


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(cache: Path) -> precompile.Precompiled:
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_LIBCUDA_PATH", str(cache / "driver"))  # as an image says where its driver will be
        patch.setattr(compat.building.nvidia, "libcuda_dirs", compat.building.nvidia.libcuda_dirs.__wrapped__)
        return precompile.precompile(PROBLEMS, [HOPPER], cache=cache)


def test_a_plan_finds_in_the_cache_what_was_compiled_ahead(cache: Path, made: precompile.Precompiled) -> None:
    assert made.failures == () and made.cache == cache
    first, second, *others = (set(binaries.identities(HOPPER, x, select(x, HOPPER))) for x in PROBLEMS)
    assert first == second and made.kernels == made.compiled == len(first.union(*others)) >= len(PROBLEMS) - 1
    found = json.loads(printed(RUN, TRITON_CACHE_DIR=str(cache), TRITON_GEMM_KIT="0"))
    assert len(found) == made.kernels and all(found.values())
    assert not all(json.loads(printed(RUN, "beyond", TRITON_CACHE_DIR=str(cache), TRITON_GEMM_KIT="0")).values())


def test_strides_of_a_c_that_tma_stores_make_no_other_binary() -> None:
    """Those of another C do: the kernel computes addresses with them."""

    def made(columns: int, pitch: int) -> tuple[Hashable, ...]:
        a, b = (torch.empty(sizes, dtype=torch.bfloat16, device="meta") for sizes in ((512, 4096), (columns, 4096)))
        c = torch.empty(512, pitch, dtype=torch.bfloat16, device="meta")[:, :columns]
        problem = GemmProblem.of(a, b.T, c)
        candidate = Candidate(
            problem, Algorithm("warp_specialised", warp_specialised.Config(128, 64, 64, 8, 4), Schedule(132))
        )
        return binaries.identities(HOPPER, problem, Selection.of(candidate, ""))

    assert made(72, 72) == made(4096, 4096) == made(64, 1032)
    assert made(63, 1024) != made(63, 1032) != made(64, 1032)


def test_a_kernels_key_does_not_depend_on_which_comes_first() -> None:
    """Or one process would not find in the cache what another has compiled. Triton adds a function's globals to those
    callers alone that are hashed after it."""
    modules = [import_module(module.name) for module in pkgutil.walk_packages(triton_gemm.__path__, "triton_gemm.")]
    values = [value for module in modules for value in vars(module).values()]
    values += [value.fn for value in values if isinstance(value, compat.Autotuner)]
    functions = {id(value): value for value in values if isinstance(value, JITCallable)}.values()
    kernels = {f"{f.__module__}.{f._fn_name}": f for f in functions if f._fn_name.endswith("kernel")}
    assert len(kernels) > 15
    before = [(function, function.hash, function.used_global_vals) for function in functions]
    keys = defaultdict(set)
    try:
        for first in kernels.values():
            for function in functions:
                function.hash, function.used_global_vals = None, {}
            for name, kernel in (("", first), *kernels.items()):
                keys[name].add(kernel.cache_key)
    finally:
        for function, key, used in before:
            function.hash, function.used_global_vals = key, used
    del keys[""]
    assert {name: len(found) for name, found in keys.items()} == dict.fromkeys(kernels, 1)


def test_what_is_in_the_cache_is_not_compiled_again(cache: Path, made: precompile.Precompiled) -> None:
    calls: list[tuple[int, int]] = []
    again = precompile.precompile(PROBLEMS[:1], [HOPPER], cache=cache, progress=lambda *how: calls.append(how))
    assert again.compiled == 0 and again.problems == 1
    assert calls[0][0] == 0 and calls[-1][0] == calls[-1][1] == len(calls) - 1


def test_another_folder_gets_what_this_process_has_compiled(tmp_path: Path) -> None:
    for folder, new in (("first", 1), ("second", 1), ("first", 0)):
        again = precompile.precompile([BEYOND], [HOPPER], cache=tmp_path / folder)
        assert (again.kernels, again.compiled) == (1, new) and any((tmp_path / folder).rglob("*.cubin"))


def test_other_selections_are_compiled_as_well(cache: Path, made: precompile.Precompiled) -> None:
    problem = PROBLEMS[0]
    candidate = next(candidate for _, candidate in ranked(problem, HOPPER) if candidate.algorithm.kernel == "portable")
    other = Selection.of(candidate, "", "tuner")
    also = Mock(return_value=[select(problem, HOPPER), other])
    again = precompile.precompile([problem], [HOPPER], cache=cache, also=also)
    also.assert_called_once_with(problem, HOPPER)
    assert again.compiled == 1 and again.failures == ()


@pytest.mark.skipif(not (shutil.which("gcc") and shutil.which("nm")), reason="makes a driver's library with GCC")
def test_the_driver_module_needs_no_compiler_where_it_was_built(cache: Path, made: precompile.Precompiled) -> None:
    assert made.driver_module is None
    (module,) = cache.rglob("cuda_utils*.so")
    undefined = subprocess.run(["nm", "-D", "--undefined-only", module], capture_output=True, text=True, check=True)
    names = [line.split()[-1] for line in undefined.stdout.splitlines() if line.split()[-1].startswith("cu")]
    driver = cache / "driver"
    driver.mkdir()
    (driver / "driver.c").write_text("\n".join(f"int {name}(void) {{ return 0; }}" for name in names))
    options = ["-shared", "-fPIC", "-Wl,-soname,libcuda.so.1", "-o", driver / "libcuda.so.1", driver / "driver.c"]
    subprocess.run(["gcc", *options], check=True)
    surroundings = {"LD_LIBRARY_PATH": str(driver), "TRITON_LIBCUDA_PATH": str(driver), "CC": "/bin/false"}
    assert printed(LOAD, TRITON_CACHE_DIR=str(cache), **surroundings) == "loaded\n"
    with pytest.raises(AssertionError, match="CalledProcessError"):
        printed(LOAD, TRITON_CACHE_DIR=str(cache / "empty"), **surroundings)


def test_why_there_is_no_driver_module(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("CC", str(tmp_path / "no-compiler"))
    monkeypatch.setenv("TRITON_LIBCUDA_PATH", str(tmp_path))
    monkeypatch.setattr(compat.building.nvidia, "libcuda_dirs", compat.building.nvidia.libcuda_dirs.__wrapped__)
    assert "no-compiler" in str(compat.build_driver_module(cache=tmp_path))
    monkeypatch.delenv("CC")
    monkeypatch.setattr(shutil, "which", lambda name: None)
    assert compat.build_driver_module() == "there is no C compiler: set CC, or install gcc"


class Crowded:
    """A compiler that fails while another one runs, as Triton 3.7.1 has."""

    def __init__(self) -> None:
        self.running = self.calls = 0
        self.met = threading.Event()

    def warmup(self, *_: Any, **how: Any) -> Any:
        self.calls += 1
        self.running += 1
        crowd = self.running > 1
        if crowd:
            self.met.set()
        self.met.wait(5)  # the first two meet
        time.sleep(0.02)
        self.running -= 1
        if crowd:
            raise RuntimeError("PassManager::run failed")
        return self


def test_what_fails_while_others_compile_is_compiled_again_by_itself(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Wherever it is compiled: ahead of time, or in the threads of a tuner."""
    problems = [problem_of(), problem_of(1, 1024, 1024), problem_of(17, 33, 65), problem_of(100, 60, 40)]
    monkeypatch.setattr(precompile, "build_driver_module", lambda *_: None)
    crowded = Crowded()
    monkeypatch.setattr(compat.JITFunction, "warmup", crowded.warmup)
    assert precompile.precompile(problems, [HOPPER], cache=tmp_path, workers=4).failures == ()
    assert crowded.calls > len(problems)
    jobs = {problem: launches(problem, select(problem, HOPPER))[-1] for problem in problems}
    again = Crowded()
    monkeypatch.setattr(compat.JITFunction, "warmup", again.warmup)
    compiler = Compiler(
        lambda job: compiled(jobs[job], binaries.operands_of(job, [jobs[job]]), binaries.SCALARS), threads=4
    )
    compiler.add(problems)
    assert soon(lambda: all(map(compiler.done, problems)), 60)
    compiler.close()
    assert [compiler.failure(problem) for problem in problems] == 4 * [None] and again.calls > len(problems)


def test_what_fails_by_itself_has_failed() -> None:
    compiling, fails = compat.Compiling(), Mock(side_effect=ValueError)
    for _ in range(2):
        with pytest.raises(ValueError):
            compiling(fails)
    assert fails.call_count == 2


def test_a_compiler_that_hangs_keeps_no_other_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compat.Compiling, "PATIENCE_S", 0.05)
    compiling, begun, stop = compat.Compiling(), threading.Event(), threading.Event()
    hanging = threading.Thread(target=compiling, args=(lambda: (begun.set(), stop.wait(30)),))
    hanging.start()
    begun.wait(5)
    fails_once = Mock(side_effect=[ValueError, 2])
    assert compiling(fails_once) == 2 and compiling(lambda: 5) == 5
    stop.set()
    hanging.join()


def test_it_says_what_it_could_not_compile(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    fails = Mock(side_effect=ValueError("ptxas\ndied"))
    replace_all(monkeypatch, precompile, compiled=fails, build_driver_module=lambda *_: None)
    made = precompile.precompile([problem_of()], [device_of_capability((7, 5)), HOPPER], cache=tmp_path)
    assert made.kernels == 0 and len(made.failures) == 2
    assert "needs compute capability 8.0" in made.failures[0]
    assert made.failures[1].endswith("_kernel: ValueError: ptxas")


def test_what_cannot_be_described_is_one_failure(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    def describe(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> Any:
        if problem.M == 64:
            raise KeyError(64)
        return launches(problem, selection)

    replace_all(monkeypatch, precompile, launches_on=describe)
    replace_all(monkeypatch, precompile, compiled=lambda *_: None, build_driver_module=lambda *_: None)
    done: list[tuple[int, int]] = []
    problems = [problem_of(64), problem_of()]
    made = precompile.precompile(problems, [HOPPER], cache=tmp_path, progress=lambda *how: done.append(how))
    (why,) = made.failures
    assert why.startswith("64x1024x2048, ") and why.endswith(": KeyError: 64")
    assert done[-1] == (1, 1)


def test_an_interruption_ends_it_soon(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    begun: list[Any] = []
    monkeypatch.setattr(precompile, "compiled", lambda *how: begun.append(how) or time.sleep(0.05))

    def interrupt(done: int, total: int) -> None:
        if done:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        precompile.precompile(PROBLEMS, [HOPPER], cache=tmp_path, workers=1, progress=interrupt)
    assert len(begun) < 4
