"""Sanitizers over every rung, twin and kernel: no access outside, no barrier that waits for ever, no race. And they see
what is planted."""

import re
import subprocess
from pathlib import Path

import pytest
import torch

from reference_cuda import TWINS, toolchain
from tests.gpu import sanitize
from tests.gpu.kernels.test_kernels_gpu import hopper
from tests.gpu.sanitize import FOUND, LAUNCH, SKIPPED, watch

SHARES = 8


@pytest.fixture(scope="module")
def sanitizer() -> None:
    if sanitize.sanitizer() is None:
        pytest.skip("compute-sanitizer not found: install the CUDA toolkit, or set CUDA_HOME to it")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("what", ["rungs", "twins", *(f"kernels {i + 1}/{SHARES}" for i in range(SHARES))])
@pytest.mark.parametrize("tool", ["memcheck", "synccheck"])
@pytest.mark.usefixtures("sanitizer")
def test_nothing_is_found(tool: str, what: str) -> None:
    name, _, share = what.partition(" ")
    done = watch(tool, [*LAUNCH, name, "--share", share or "1/1"])
    print(done.stdout)
    if done.returncode == SKIPPED:
        pytest.skip([line for line in done.stdout.splitlines() if not line.startswith("=")][-1])
    assert done.returncode == 0 and re.search(r"^\d[\d,]* launches$", done.stdout, re.M), done.stdout[-5000:]


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.usefixtures("sanitizer")
def test_racecheck_of_the_twins() -> None:
    done = watch("racecheck", [*LAUNCH, "twins"])
    assert done.returncode == 0 and re.search(r"^\d[\d,]* launches$", done.stdout, re.M), done.stdout[-5000:]


# --- The sanitizers can fail ---


@pytest.mark.parametrize(
    ("tool", "bug", "words"),
    [
        ("memcheck", "read", "Invalid __global__ read"),  # which changes no result
        ("memcheck", "write", "Invalid __global__ write"),
        ("synccheck", "barrier", "Barrier error detected"),
    ],
)
@pytest.mark.usefixtures("sanitizer")
def test_what_is_planted_is_found(tool: str, bug: str, words: str) -> None:
    done = watch(tool, [*LAUNCH, bug])
    assert done.returncode == FOUND and words in done.stdout, done.stdout[-5000:]


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
@pytest.mark.usefixtures("sanitizer")
def test_racecheck_sees_a_missing_barrier(stem: str, removed: int, tmp_path: Path) -> None:
    done = watch("racecheck", [str(build(stem, removed, tmp_path))])
    hazards = re.search(r"RACECHECK SUMMARY: (\d+) hazard", done.stdout)
    assert hazards is not None, done.stdout[-5000:]
    assert (int(hazards[1]) > 0, done.returncode) == ((True, FOUND) if removed else (False, 0)), done.stdout[-5000:]


# --- ConSan ---

consan = pytest.mark.skipif(sanitize.version() < sanitize.OLDEST_CONSAN, reason="needs Triton 3.9's ConSan")


@consan
@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("share", range(SHARES))
def test_consan(share: int) -> None:
    assert sanitize.watch_by_consan(f"{share + 1}/{SHARES}", jobs=2) == 0


@consan
@hopper
def test_consan_sees_a_race() -> None:
    """k11's consumers read what TMA still writes."""
    found = sanitize.consan(["race"])
    assert found is not None and ("pending access" in found or "outstanding" in found)
