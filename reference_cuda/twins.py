"""The list of twins: what each source file holds, which rung it stands beside, whose kernel it retells."""

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class Variant:
    """One set of template parameters of a twin."""

    name: str
    """What `launch(variant=...)` takes."""
    params: str
    """The block's tile of M, N and K, and each thread's or warp's share of it."""
    kernel: str
    """The instantiation that aligned shapes run: a key of `resources(stem)`."""
    seeds: tuple[str, ...] = ()
    """The published kernels that it retells."""
    dtype: torch.dtype = torch.float32
    """Of both operands."""

    @property
    def out_dtype(self) -> torch.dtype:
        return torch.int32 if self.dtype == torch.int32 else torch.float32


@dataclass(frozen=True)
class Twin:
    """One `.cu` file. The first variant is the default."""

    stem: str
    title: str
    rungs: tuple[str, ...]
    variants: tuple[Variant, ...]
    precision: str = "ieee"
    """How floating-point operands are multiplied: ieee, tf32 or fp16; always summed in fp32."""
    min_capability: tuple[int, int] = (7, 0)

    @property
    def rung(self) -> str:
        """The rung it stands beside; where there are several, the one whose idea it has."""
        return self.rungs[0]

    @property
    def dtypes(self) -> tuple[torch.dtype, ...]:
        return tuple(dict.fromkeys(variant.dtype for variant in self.variants))

    @property
    def out_dtype(self) -> torch.dtype:
        return self.variants[0].out_dtype

    def variant(self, name: str | None = None) -> Variant:
        """The variant of that name, by default the first."""
        if name is None:
            return self.variants[0]
        for variant in self.variants:
            if variant.name == name:
                return variant
        known = ", ".join(variant.name for variant in self.variants)
        raise ValueError(f"{self.stem} has no variant {name!r}; it has {known}")


_HALF = torch.float16
_INT = torch.int32

TWINS: dict[str, Twin] = {
    twin.stem: twin
    for twin in (
        Twin(
            "c01_naive_uncoalesced",
            "naive, uncoalesced",
            ("k01",),
            (
                Variant("256", "block of 256 rows, 1 column", "naive_uncoalesced_kernel<256, 1>", ("S3.1",)),
                Variant("32x32", "block of 32x32", "naive_uncoalesced_kernel<32, 32>", ("S4.0",)),
            ),
        ),
        Twin(
            "c02_naive_coalesced",
            "naive, coalesced",
            ("k02",),
            (
                Variant("32x32", "block of 32x32", "naive_coalesced_kernel<32, 32>", ("S0.1",)),
                Variant("256", "block of 1 row, 256 columns", "naive_coalesced_kernel<1, 256>", ("S3.2",)),
                Variant("16x16", "block of 16x16", "naive_coalesced_kernel<16, 16>", ("S2.1",)),
            ),
        ),
        Twin(
            "c03_shared_tiled",
            "shared-memory tiling",
            ("k03", "k04"),
            (
                Variant("fp32_32", "tile 32", "shared_tiled_kernel<float, 32, 0>", ("S0.2", "S3.3")),
                Variant("fp32_32_pad", "tile 32, padded", "shared_tiled_kernel<float, 32, 1>", ("S2.2",)),
                Variant("fp32_16", "tile 16", "shared_tiled_kernel<float, 16, 0>", ("S4.1",)),
                Variant("fp32_16_pad", "tile 16, padded", "shared_tiled_kernel<float, 16, 1>"),
                Variant("int32_16", "tile 16", "shared_tiled_kernel<int, 16, 0>", ("S1",), _INT),
                Variant("int32_16_pad", "tile 16, padded", "shared_tiled_kernel<int, 16, 1>", (), _INT),
                Variant("int32_32", "tile 32", "shared_tiled_kernel<int, 32, 0>", (), _INT),
                Variant("int32_32_pad", "tile 32, padded", "shared_tiled_kernel<int, 32, 1>", (), _INT),
            ),
        ),
        Twin(
            "c04_thread_tiled_1d",
            "1-D thread tiling",
            ("k05",),
            (
                Variant("64x64x8_8", "64x64x8, 8 rows each", "thread_tiled_1d_kernel<64, 64, 8, 8>", ("S3.4",)),
                Variant(
                    "32x32x32_8",
                    "32x32x32, 8 rows each",
                    "thread_tiled_1d_kernel<32, 32, 32, 8>",
                    ("S4.2",),
                ),
            ),
        ),
        Twin(
            "c05_thread_tiled_2d",
            "2-D thread tiling",
            ("k05",),
            (
                Variant(
                    "64x64x8_8x8",
                    "64x64x8, 8x8 each",
                    "thread_tiled_2d_kernel<64, 64, 8, 8, 8>",
                    ("S4.3",),
                ),
            ),
        ),
        Twin(
            "c06_register_blocked",
            "float4 register blocking",
            ("k05",),
            (Variant("64x64x16_4x4", "64x64x16, 4x4 each", "register_blocked_kernel<true>", ("S2.3",)),),
        ),
        Twin(
            "c07_warp_tiled",
            "double-buffered warp tiling",
            ("k06",),
            (
                Variant("128x128x8_8x8", "128x128x8, 8x8 each", "warp_tiled_kernel<8, true>", ("S2.4",)),
                Variant("128x128x16_8x8", "128x128x16, 8x8 each", "warp_tiled_kernel<16, true>"),
            ),
        ),
        Twin(
            "c08_wmma_tf32",
            "wmma TF32",
            ("k07",),
            (Variant("64x64x8_4w", "64x64x8, 4 warps", "wmma_tf32_kernel<true>", ("S2.5",)),),
            precision="tf32",
            min_capability=(8, 0),
        ),
        Twin(
            "c09_wmma_fp16",
            "wmma FP16, one warp a tile",
            ("k08",),
            (Variant("16x16_1w", "16x16, 1 warp", "wmma_fp16_kernel<true>", ("S4.4",), _HALF),),
            precision="fp16",
        ),
        Twin(
            "c10_wmma_fp16_padded",
            "wmma FP16, padded shared memory",
            ("k08",),
            (Variant("64x64x16_4w", "64x64x16, 4 warps", "wmma_fp16_padded_kernel<true>", ("S2.6",), _HALF),),
            precision="fp16",
        ),
        Twin(
            "c11_wmma_fp16_warp_tiled",
            "wmma FP16, warp tiling",
            ("k08",),
            (
                Variant(
                    "128x128_4w",
                    "128x128x32, 4 warps, 4x4 fragments each",
                    "wmma_fp16_warp_tiled_kernel<2, 2, 32, true>",
                    dtype=_HALF,
                ),
                Variant(
                    "64x64_1w",
                    "64x64x16, 1 warp, 4x4 fragments",
                    "wmma_fp16_warp_tiled_kernel<1, 1, 16, true>",
                    ("S4.5",),
                    _HALF,
                ),
            ),
            precision="fp16",
        ),
    )
}
