"""The CUDA twins without a GPU: what their kernels compute, what nvcc makes of them, what the loader says.

What they compute is checked by g++: cuda_on_cpu.h runs a kernel's threads as fibers, barrier by barrier.
"""

import ctypes
import functools
import re
import shutil
import subprocess
from pathlib import Path

import pytest
import torch
import triton

import reference_cuda
from reference_cuda import TWINS, TwinUnavailable, ptxas, resources, toolchain
from tests.ladder.test_compile_rungs import counted
from tests.support.processes import printed

ROOT = Path(__file__).resolve().parents[2]
SOURCES = ROOT / "reference_cuda"
PUBLISHED = {
    *("S0.1", "S0.2", "S1", "S2.1", "S2.2", "S2.3", "S2.4", "S2.5", "S2.6"),
    *("S3.1", "S3.2", "S3.3", "S3.4", "S4.0", "S4.1", "S4.2", "S4.3", "S4.4", "S4.5"),
}
VARIANTS = [
    pytest.param(stem, variant, id=f"{stem}-{variant.name}")
    for stem, twin in TWINS.items()
    for variant in twin.variants
]


def test_every_published_kernel_has_a_variant():
    retold = [kernel for twin in TWINS.values() for variant in twin.variants for kernel in variant.retells]
    assert sorted(retold) == sorted(PUBLISHED)


def test_every_source_is_a_twin_that_needs_only_the_cuda_toolkit():
    assert sorted(path.stem for path in SOURCES.glob("*.cu")) == list(TWINS)
    for path in [*SOURCES.glob("*.cu"), *SOURCES.glob("*.cuh"), *SOURCES.glob("*.h")]:
        assert not re.search(r"#include\s*[<\"](torch|ATen|c10|pybind11)", path.read_text()), path.name


def test_import_compiles_nothing_and_touches_no_gpu():
    assert set(reference_cuda.__all__) >= {"TWINS", "Twin", "Variant", "LoadedTwin", "TwinUnavailable"}
    assert all(hasattr(reference_cuda, name) for name in reference_cuda.__all__)
    printed(
        "import sys, torch, reference_cuda\n"
        "assert not torch.cuda.is_initialized()\n"
        "assert not {'triton_gemm', 'triton', 'torch.utils.cpp_extension'} & set(sys.modules)\n"
    )


class Gemm(ctypes.Structure):
    """struct Gemm of gemm.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("a", "b", "c")),
        *((name, ctypes.c_int) for name in ("M", "N", "K")),
        *((name, ctypes.c_double) for name in ("alpha", "beta")),
        ("stream", ctypes.c_void_p),
    )


@pytest.fixture(scope="session")
def compile_for_cpu(tmp_path_factory):
    """Compile a twin's source with g++, as it is or with one piece of it replaced."""
    folder = tmp_path_factory.mktemp("cuda_on_cpu")
    for header in ("cuda_runtime.h", "cuda_runtime_api.h", "cuda_fp16.h", "mma.h"):
        (folder / header).write_text('#include "cuda_on_cpu.h"\n')
    command = ["g++", "-x", "c++", "-std=c++17", "-O2", "-w", "-shared", "-fPIC", "-fno-gnu-unique"]
    command += ["-fno-strict-aliasing", "-fsanitize=undefined", "-fno-sanitize-recover"]
    command += [f"-I{folder}", f"-I{ROOT / 'tests' / 'support'}", f"-I{SOURCES}"]
    (folder / "probe.cpp").write_text("_Float16 half;\n")
    probe = [*command, str(folder / "probe.cpp"), "-o", str(folder / "probe.so")]
    if shutil.which("g++") is None or subprocess.run(probe, capture_output=True).returncode:
        pytest.skip("needs g++ 12 or newer with libubsan")
    libraries = {}

    def compile_(stem, old="", new=""):
        if (stem, old, new) not in libraries:
            text = (SOURCES / f"{stem}.cu").read_text()
            assert old in text
            name = folder / f"{stem}_{len(libraries)}"
            name.with_suffix(".cu").write_text(text.replace(old, new, 1))
            subprocess.run([*command, str(name.with_suffix(".cu")), "-o", str(name.with_suffix(".so"))], check=True)
            libraries[stem, old, new] = ctypes.CDLL(str(name.with_suffix(".so")))
        return libraries[stem, old, new]

    return compile_


def window(matrix, offset, fill):
    """A copy of the matrix `offset` elements past a 64-byte boundary, within a buffer full of `fill`."""
    buffer = torch.full((matrix.numel() + 160,), fill, dtype=matrix.dtype)
    start = -buffer.data_ptr() // matrix.element_size() % 64 + 32 + offset
    view = buffer[start : start + matrix.numel()].view(matrix.shape)
    view.copy_(matrix)
    return buffer, view


def run_on_cpu(library, variant, shape, alpha, beta, offset=0, backwards=False):
    """Whether the kernel gives exactly the product of small integers and writes nothing else."""
    m, n, k = shape
    generator = torch.Generator().manual_seed(m + n + k)

    def draw(dtype, *size):
        return torch.randint(-4, 5, size, generator=generator).to(dtype)

    poison = 10**8 if variant.dtype == torch.int32 else float("nan")
    a, b = draw(variant.dtype, m, k), draw(variant.dtype, k, n)
    c0 = draw(variant.out_dtype, m, n)
    expected = alpha * (a.double() @ b.double()) + beta * c0.double()
    if beta == 0:
        c0.fill_(poison)
    (_, a), (_, b), (around, c) = (window(matrix, offset, poison) for matrix in (a, b, c0))
    outside = torch.ones_like(around, dtype=torch.bool)
    outside[c.storage_offset() : c.storage_offset() + c.numel()] = False
    before = around.view(torch.int32)[outside].clone()

    ctypes.c_bool.in_dll(library, "run_backwards").value = backwards
    gemm = Gemm(a.data_ptr(), b.data_ptr(), c.data_ptr(), m, n, k, alpha, beta, None)
    assert library.launch(variant.name.encode(), ctypes.byref(gemm)) == 0
    return torch.equal(c.double(), expected) and torch.equal(around.view(torch.int32)[outside], before)


SHAPES = [
    pytest.param((127, 65, 33), id="ragged"),
    pytest.param((1, 1, 1), id="one"),
    pytest.param((64, 128, 0), id="no-k"),
    pytest.param((1, 140, 37), id="one-row"),
    pytest.param((140, 1, 37), id="one-column"),
    pytest.param((136, 72, 40), id="aligned"),
    pytest.param((144, 160, 48), id="whole-fragments"),
]


@pytest.mark.few(shows=lambda stem, variant, shape: {shape, shape == (127, 65, 33) and (stem, variant.name)})
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stem", "variant"), VARIANTS)
def test_computes_the_product(compile_for_cpu, stem, variant, shape):
    library = compile_for_cpu(stem)
    assert run_on_cpu(library, variant, shape, 1, 0)
    assert run_on_cpu(library, variant, shape, 2, -3, offset=1, backwards=True)
    assert library.launch(b"no such variant", ctypes.byref(Gemm(M=1, N=1))) != 0


WRITE_BARRIER = "__syncthreads();\n#pragma unroll"
READ_BARRIER = "    }\n    __syncthreads();\n"


@pytest.mark.parametrize(
    ("stem", "old", "new"),
    [
        pytest.param("c02_naive_coalesced", "k < K", "k < K - 1", id="dropped-k-tail"),
        pytest.param("c01_naive_uncoalesced", "size_t(k) * N", "size_t(k) * K", id="wrong-stride"),
        pytest.param("c03_shared_tiled", "K, N);\n    __syncthreads();", "K, N);", id="c03-no-write-barrier"),
        pytest.param("c03_shared_tiled", "[x];\n    __syncthreads();", "[x];", id="c03-no-read-barrier"),
        pytest.param("c04_thread_tiled_1d", "k0 < K;", "k0 + BLOCK_K <= K;", id="dropped-partial-tile"),
        pytest.param("c05_thread_tiled_2d", READ_BARRIER, "    }\n", id="c05-no-read-barrier"),
        pytest.param("c06_register_blocked", WRITE_BARRIER, "#pragma unroll", id="c06-no-write-barrier"),
        pytest.param("c07_warp_tiled", "__syncthreads();", "", id="c07-no-barrier"),
        pytest.param("c07_warp_tiled", "stage ^= 1", "stage = 0", id="c07-one-stage"),
        pytest.param("c10_wmma_fp16_padded", READ_BARRIER, "    }\n", id="c10-no-read-barrier"),
        pytest.param("c11_wmma_fp16_warp_tiled", WRITE_BARRIER, "#pragma unroll", id="c11-no-write-barrier"),
    ],
)
def test_a_broken_kernel_is_caught(compile_for_cpu, stem, old, new):
    """And the kernel as it is passes the same check."""

    def right(library):
        variant = TWINS[stem].variants[0]
        return all(run_on_cpu(library, variant, (70, 90, 50), 1, 0, backwards=order) for order in (False, True))

    assert right(compile_for_cpu(stem)) and not right(compile_for_cpu(stem, old, new))


@pytest.fixture(scope="module")
def nvcc():
    try:
        return toolchain.find_nvcc()
    except TwinUnavailable as error:
        pytest.skip(str(error))


@pytest.mark.few(shows=lambda stem, arch: {arch})
@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
@pytest.mark.parametrize("stem", TWINS)
def test_compiles_without_spills(nvcc, stem, arch):
    kernels = resources(stem, arch)
    assert {variant.kernel for variant in TWINS[stem].variants} <= kernels.keys()
    for name, kernel in kernels.items():
        assert kernel.spill_stores == kernel.spill_loads == kernel.stack == 0, name
        assert kernel.shared <= 48 << 10, name


@pytest.fixture(scope="module")
def loops(nvcc, tmp_path_factory):
    """loops(stem, of): the instructions of a step of each kernel's main loop on sm_90, by the readable name."""
    cubin = tmp_path_factory.mktemp("cubin") / "kernel.cubin"

    @functools.cache
    def disassembled(stem):
        command = [nvcc, "-cubin", "-arch=sm_90", *toolchain.NVCC_FLAGS, f"{stem}.cu", "-o", str(cubin)]
        subprocess.run(command, cwd=SOURCES, check=True, capture_output=True)
        disassemble = [triton.knobs.nvidia.cuobjdump.path, "-sass", str(cubin)]
        sass = subprocess.run(disassemble, check=True, capture_output=True, text=True).stdout
        return [text.split(maxsplit=1) for text in sass.split("Function : ")[1:]]

    def count(stem, of):
        return {ptxas.readable(name): counted(code, of) for name, code in disassembled(stem)}

    return count


@pytest.mark.few(shows=lambda stem, kernel, of, step: {of})
@pytest.mark.parametrize(
    ("stem", "kernel", "of", "step"),
    [
        ("c01_naive_uncoalesced", "naive_uncoalesced_kernel<256, 1>", "FFMA", {"FFMA": 1, "LDG": 2}),
        ("c02_naive_coalesced", "naive_coalesced_kernel<32, 32>", "FFMA", {"FFMA": 1, "LDG": 2}),
        ("c03_shared_tiled", "shared_tiled_kernel<float, 32, 0>", "FFMA", {"FFMA": 32, "LDS": 32, "LDS.128": 8}),
        ("c03_shared_tiled", "shared_tiled_kernel<float, 32, 1>", "FFMA", {"FFMA": 32, "LDS": 64, "LDS.128": 0}),
        ("c04_thread_tiled_1d", "thread_tiled_1d_kernel<64, 64, 8, 8>", "FFMA", {"FFMA": 64, "LDS": 8, "LDS.128": 16}),
        ("c05_thread_tiled_2d", "thread_tiled_2d_kernel<64, 64, 8, 8, 8>", "FFMA", {"FFMA": 64, "LDS.128": 4}),
        ("c06_register_blocked", "register_blocked_kernel<true>", "FFMA", {"FFMA": 16, "LDS.128": 2}),
        ("c07_warp_tiled", "warp_tiled_kernel<8, true>", "FFMA", {"FFMA": 64, "LDS.128": 4}),
        ("c08_wmma_tf32", "wmma_tf32_kernel<true>", "HMMA", {"HMMA": 4 * 4, "BAR": 2}),
        ("c09_wmma_fp16", "wmma_fp16_kernel<true>", "HMMA", {"HMMA": 2}),
        ("c10_wmma_fp16_padded", "wmma_fp16_padded_kernel<true>", "HMMA", {"HMMA": 2 * 4, "LDSM": 4, "BAR": 2}),
        ("c11_wmma_fp16_warp_tiled", "wmma_fp16_warp_tiled_kernel<2, 2, 32, true>", "HMMA", {"HMMA": 32, "LDSM": 8}),
    ],
)
def test_a_step_has_the_instructions_that_its_text_counts(loops, stem, kernel, of, step):
    """The compiler may unroll the loop, so its counts are a multiple of those in the text."""
    found = loops(stem, of)[kernel]
    times, rest = divmod(found[of], step[of])
    assert times and not rest
    for opcode, count in step.items():
        assert found[opcode] == count * times, opcode


def test_c07_has_one_barrier_a_k_tile_and_c06_two(loops):
    assert loops("c07_warp_tiled", "FFMA")["warp_tiled_kernel<8, true>"]["BAR"] == 1
    assert loops("c06_register_blocked", "FFMA")["register_blocked_kernel<true>"]["BAR"] == 2


def test_readable_names():
    assert ptxas.readable("_Z4gemmILi8ELb1EEvPKfS1_Pfiiiff") == "gemm<8, true>"
    assert ptxas.readable("_Z4gemmIiLi16ELi0EEvPKT_S2_PS0_iiiS0_S0_") == "gemm<int, 16, 0>"
    assert ptxas.readable("_Z4gemmPKfS1_Pfiiiff") == "gemm"


def test_missing_nvcc_says_what_to_set(monkeypatch):
    monkeypatch.setenv("CUDA_HOME", "/nowhere")
    monkeypatch.setattr(shutil, "which", lambda *_, **__: None)
    with pytest.raises(TwinUnavailable, match=r"CUDA_HOME.*/nowhere"):
        resources("c01_naive_uncoalesced")
