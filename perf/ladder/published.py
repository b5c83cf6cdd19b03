"""The five published experiments that the ladder retells, and their figures, each on its author's GPU.

Which CUDA kernel retells which published one is written in `reference_cuda.TWINS`; here are the shapes and figures.
"""

from __future__ import annotations

from dataclasses import dataclass

from reference_cuda import TWINS, Twin, Variant


@dataclass(frozen=True)
class Kernel:
    """A published kernel; `published` is in its experiment's unit."""

    id: str
    title: str
    published: float | None = None


@dataclass(frozen=True)
class Experiment:
    """One source: kernels on one shape, the first of them its naive one."""

    id: str
    source: str
    size: int
    unit: str
    kernels: tuple[Kernel, ...]
    published_cublas: float | None = None
    title: str = ""  # as published
    date: str | None = None
    gpu: str | None = None
    address: str | None = None

    @property
    def cited(self) -> str:
        """Title, date, GPU and address in words, also those that are not known."""
        facts = {"date": self.date, "GPU": self.gpu, "address": self.address and f"<{self.address}>"}
        known = "; ".join(f"{name}: {fact or 'not known'}" for name, fact in facts.items())
        return f"*{self.title}*; M = N = K = {self.size}; {known}."

    def published_speedup(self, kernel: Kernel) -> float | None:
        """Over the source's own naive kernel."""
        naive = self.kernels[0].published
        if kernel.published is None or naive is None:
            return None
        return naive / kernel.published if self.unit == "ms" else kernel.published / naive

    def published_share(self, kernel: Kernel) -> float | None:
        """Of the source's own cuBLAS figure."""
        if kernel.published is None or self.published_cublas is None:
            return None
        if self.unit == "ms":
            return self.published_cublas / kernel.published
        return kernel.published / self.published_cublas


EXPERIMENTS = (
    Experiment(
        "S0",
        "Naive GEMM vs shared memory tiling (Korean blog, 2025-11)",
        1024,
        "ms",
        (Kernel("S0.1", "naive", 2.163), Kernel("S0.2", "shared-memory tiling", 1.758)),
        title="Naive GEMM vs Shared Memory Tiling GEMM Test",
        date="2025-11-30",
    ),
    Experiment(
        "S1",
        "CUDA shared memory matrix product (Korean study notes, ch. 10), int32",
        1024,
        "ms",
        (Kernel("S1", "shared-memory tiling, int32"),),
        title="CUDA 프로그래밍 Study Ch 10. CUDA 공유 메모리를 활용한 행렬 곱셈 프로그램",
        date="2023-11-22",
    ),
    Experiment(
        "S2",
        "FastCuda guide (docs/gemm_optimization)",
        1024,
        "ms",
        (
            Kernel("S2.1", "V1 naive"),
            Kernel("S2.2", "V2 shared memory"),
            Kernel("S2.3", "V3 register blocking"),
            Kernel("S2.4", "V4 warp tiling, double-buffered"),
            Kernel("S2.5", "V5 TF32 tensor cores"),
            Kernel("S2.6", "V6 FP16 tensor cores"),
        ),
        title="GEMM Optimization Guide",
        gpu="RTX 4090 and RTX 5060 are named, without figures",
        address=(
            "https://github.com/loveSunning/FastCuda/blob/b209ccc06b434ca80daa31e45778a5232ff8432f/"
            "docs/gemm_optimization.md"
        ),
    ),
    Experiment(
        "S3",
        "GEMM deep dive 1 (Korean blog, 2025-10), RTX 5090",
        1024,
        "ms",
        (
            Kernel("S3.1", "naive, uncoalesced", 3.944),
            Kernel("S3.2", "coalesced", 0.518),
            Kernel("S3.3", "shared-memory caching", 0.249),
            Kernel("S3.4", "1-D thread tiling", 0.249),
        ),
        published_cublas=0.0453,
        title="[CUDA] GEMM 파헤치기 - 1",
        date="2025-10-26",
        gpu="RTX 5090",
    ),
    Experiment(
        "S4",
        "CUDA matmul step by step (student article, cuda-matmul), RTX 3060",
        4096,
        "GFLOPS",
        (
            Kernel("S4.0", "naive, uncoalesced", 103),
            Kernel("S4.1", "block tiling", 411),
            Kernel("S4.2", "thread tiling", 745),
            Kernel("S4.3", "2-D thread tiling", 2150),
            Kernel("S4.4", "tensor cores", 3066),
            Kernel("S4.5", "tensor cores, warp tiling", 6688),
        ),
        title="an article on matrix multiplication with tensor cores, and its code",
        gpu="RTX 3060",
        address="https://github.com/vantaa89/cuda-matmul",
    ),
)


def twin_of(kernel_id: str) -> tuple[Twin, Variant]:
    """The CUDA kernel that retells a published one."""
    found = [(twin, variant) for twin in TWINS.values() for variant in twin.variants if kernel_id in variant.retells]
    if len(found) != 1:
        raise LookupError(f"{len(found)} variants in reference_cuda.TWINS retell {kernel_id}")
    return found[0]


def mode_of(twin: Twin, variant: Variant) -> str:
    """The precision class, a key of `operands.MODE_DTYPES`, that a variant is measured in."""
    return "int32" if str(variant.dtype) == "torch.int32" else twin.precision
