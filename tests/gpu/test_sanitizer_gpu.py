"""compute-sanitizer over every rung, twin and kernel: no access outside, no race. And it sees one that is planted."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from reference_cuda import TWINS, toolchain

pytestmark = pytest.mark.gpu

ROOT = Path(__file__).parents[2]
FOUND = 9  # the exit status asked for when something is found

MEMCHECK = ["--tool", "memcheck", "--check-api-memory-access=no", "--kernel-name-exclude", "kns=nvjet"]
RACECHECK = ["--tool", "racecheck", "--racecheck-report", "all"]


@pytest.fixture(scope="module")
def sanitizer() -> str:
    homes = [os.environ.get("CUDA_HOME"), os.environ.get("CUDA_PATH"), "/usr/local/cuda"]
    folders = [f"{home}/{folder}" for home in homes if home for folder in ("bin", "compute-sanitizer")]
    found = shutil.which("compute-sanitizer", path=os.pathsep.join([os.environ.get("PATH", ""), *folders]))
    if found is None:
        pytest.skip("compute-sanitizer not found: install the CUDA toolkit, or set CUDA_HOME to it")
    return found


def watch(sanitizer: str, options: list[str], command: list[str]) -> subprocess.CompletedProcess[str]:
    paths = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    environment = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": paths}
    return subprocess.run(
        [sanitizer, *options, "--error-exitcode", str(FOUND), *command],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def script(what: str) -> list[str]:
    return [sys.executable, str(Path(__file__).parent / "sanitize.py"), what]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["rungs", "twins", "kernels"])
def test_memcheck(sanitizer: str, what: str) -> None:
    done = watch(sanitizer, MEMCHECK, script(what))
    assert done.returncode == 0 and "\ndone" in done.stdout, done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_racecheck_of_the_twins(sanitizer: str) -> None:
    done = watch(sanitizer, RACECHECK, script("twins"))
    assert done.returncode == 0 and "\ndone" in done.stdout, done.stdout[-5000:]


# --- The sanitizer can fail ---


def test_memcheck_sees_a_read_outside_that_changes_no_result(sanitizer: str) -> None:
    done = watch(sanitizer, MEMCHECK, script("mutant"))
    assert done.returncode == FOUND and "Invalid __global__ read" in done.stdout, done.stdout[-5000:]


MAIN = """
#include "twin.cu"

int main() {
  Gemm gemm{nullptr, nullptr, nullptr, 127, 130, 70, 1.0, 0.0, nullptr};
  void* buffers[3];
  for (void*& buffer : buffers) {
    if (cudaMalloc(&buffer, 1 << 18) != cudaSuccess || cudaMemset(buffer, 0, 1 << 18) != cudaSuccess) return 1;
  }
  gemm.a = buffers[0], gemm.b = buffers[1], gemm.c = buffers[2];
  return launch("VARIANT", gemm) != cudaSuccess || cudaDeviceSynchronize() != cudaSuccess;
}
"""
BARRIER = "__syncthreads();"
WITH_BARRIERS = [stem for stem in TWINS if BARRIER in (toolchain.SOURCES / f"{stem}.cu").read_text()]


def build(stem: str, barriers_removed: int, folder: Path) -> Path:
    """An executable that launches the twin once, without the first of its barriers if 1 is removed."""
    text = (toolchain.SOURCES / f"{stem}.cu").read_text()
    (folder / "twin.cu").write_text(text.replace(BARRIER, "", barriers_removed))
    (folder / "main.cu").write_text(MAIN.replace("VARIANT", TWINS[stem].variants[0].name))
    arch = "sm_{}{}".format(*torch.cuda.get_device_capability())
    program = folder / "program"
    command = [toolchain.find_nvcc(), *toolchain.NVCC_FLAGS, f"-arch={arch}", "-lineinfo", f"-I{toolchain.SOURCES}"]
    subprocess.run([*command, str(folder / "main.cu"), "-o", str(program)], check=True)
    return program


@pytest.mark.parametrize("removed", [0, 1], ids=["as-it-is", "one-barrier-removed"])
@pytest.mark.parametrize("stem", WITH_BARRIERS)
def test_racecheck_sees_a_missing_barrier(sanitizer: str, stem: str, removed: int, tmp_path: Path) -> None:
    done = watch(sanitizer, RACECHECK, [str(build(stem, removed, tmp_path))])
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazard", done.stdout)
    assert hazards is not None, done.stdout[-5000:]
    assert (int(hazards[1]) > 0, done.returncode) == ((True, FOUND) if removed else (False, 0)), done.stdout[-5000:]
