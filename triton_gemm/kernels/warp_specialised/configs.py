"""The warp-specialised kernel's configurations: tiles, and the clusters that they come in."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache

import torch

from ...config import TileConfig


@dataclass(frozen=True)
class Config(TileConfig):
    """A tile and its cluster. BLOCK_N is a power of two, or the sum of two of them, or with one wide `wgmma` any
    multiple of 8. num_warps counts those that multiply, four for each consumer. num_stages is of the ring."""

    CLUSTER_M: int = 1  # CTAs of a cluster along M, each with a tile of its own (`cluster`)
    CLUSTER_N: int = 1  # and along N

    @property
    def ctas(self) -> int:
        """Of a cluster."""
        return self.CLUSTER_M * self.CLUSTER_N

    @property
    def main_n(self) -> int:
        """Columns of a tile whose sums are in its first tensor: the largest power of two."""
        return 1 << self.BLOCK_N.bit_length() - 1

    @property
    def tail_n(self) -> int:
        """Columns of the second tensor: the power of two that holds the rest, or 0."""
        rest = self.BLOCK_N - self.main_n
        return rest and 1 << (rest - 1).bit_length()

    def accumulators(self, sum_itemsize: int = 4) -> int:
        return self.BLOCK_M * (self.main_n + self.tail_n) * sum_itemsize // (4 * 32 * self.num_warps)

    def tiles(self, M: int, N: int) -> int:
        """Tiles of clusters in a matrix [M, N]."""
        return -(-M // (self.BLOCK_M * self.CLUSTER_M)) * -(-N // (self.BLOCK_N * self.CLUSTER_N))

    @property
    def with_gate(self) -> Config:
        """The tile of both products, where one of this configuration has a gate."""
        return replace(self, BLOCK_N=2 * self.BLOCK_N)

    def __str__(self) -> str:
        return super().__str__() + (f" cluster {self.CLUSTER_M}x{self.CLUSTER_N}" if self.ctas > 1 else "")


# What `select` chooses among, for 16-bit operands.
_FIGURES = (
    (128, 256, 64, 8, 4),
    (128, 256, 64, 8, 3),  # where C is fp32
    (256, 128, 64, 8, 3),
    (192, 128, 64, 12, 4),
    (256, 192, 64, 8, 3),
    (192, 192, 64, 12, 3),
    (128, 192, 64, 8, 4),
    (128, 160, 64, 8, 5),
    (192, 96, 64, 12, 5),
    (128, 96, 64, 8, 6),
    (128, 128, 64, 8, 6),
    (128, 128, 64, 8, 5),  # where scales come along
    (64, 256, 64, 4, 4),
    (128, 64, 128, 8, 4),
    (64, 128, 128, 4, 4),
    (64, 96, 128, 4, 4),
    (64, 64, 128, 4, 6),
    (128, 32, 128, 8, 5),
    (64, 32, 128, 4, 8),
    (128, 16, 128, 8, 5),
    (64, 16, 128, 4, 8),
    (64, 16, 64, 4, 8),
)
CONFIGS = tuple(Config(*figures) for figures in _FIGURES)

# And in clusters of these forms.
_CLUSTERED = {
    (64, 96, 64, 4, 10): ((2, 2), (4, 2)),
    (64, 128, 64, 4, 8): ((2, 1), (2, 2), (4, 2), (2, 4)),
    (64, 144, 64, 4, 7): ((2, 2), (4, 2), (2, 4)),
    (128, 80, 64, 8, 7): ((2, 1), (2, 2)),
    (128, 96, 64, 8, 6): ((2, 1), (2, 2), (4, 2), (2, 4)),
    (128, 128, 64, 8, 6): ((2, 1), (1, 2), (2, 2), (4, 2)),
    (128, 160, 64, 8, 5): ((2, 1), (2, 2)),
    (256, 128, 64, 8, 3): ((2, 1), (1, 2)),
    (128, 256, 64, 8, 4): ((2, 1),),
}
CLUSTERED = tuple(Config(*figures, *form) for figures, forms in _CLUSTERED.items() for form in forms)

# For products with a gate: half as wide, since two tiles of B come for one of C.
GATED = tuple(
    replace(config, BLOCK_N=config.BLOCK_N // 2)
    for config in CONFIGS
    if config.BLOCK_N >= 32 and not config.tail_n
)  # fmt: skip
GATED_CLUSTERED = tuple(
    replace(config, BLOCK_N=config.BLOCK_N // 2) for config in CLUSTERED if not config.tail_n
)  # fmt: skip

FEW_ROWS = 64  # or columns, that C has at most: the other operand is read once, from memory
LONG = 8  # of a sum, how many times as long as C's longer side

# For long sums: all tiles are cut, and a second launch adds their parts up. These are small tiles in clusters that span
# a small C, so that each operand comes from memory to one cluster. C's parts are fp32.
_FOR_LONG_SUMS = {
    (64, 16, 128, 4, 10): ((1, 4),),
    (64, 32, 128, 4, 8): ((1, 4), (2, 4)),
    (64, 64, 128, 4, 6): ((2, 2), (4, 2), (2, 4)),
    (64, 128, 128, 4, 4): ((2, 2), (4, 1), (4, 2)),
    (64, 128, 64, 4, 8): ((4, 1),),
    (128, 128, 64, 8, 5): ((2, 1), (2, 2)),
}
FOR_LONG_SUMS = tuple(Config(*figures, *form) for figures, forms in _FOR_LONG_SUMS.items() for form in forms)


def configs(dtype: torch.dtype, clusters: bool = False) -> tuple[Config, ...]:
    """CONFIGS, or those of CLUSTERED, for operands, or planes, of that dtype: as many bytes along K."""
    return of_itemsize(CLUSTERED if clusters else CONFIGS, dtype.itemsize)


@cache
def of_itemsize(found: tuple[Config, ...], itemsize: int) -> tuple[Config, ...]:
    """Configurations for operands of that size instead of 2 bytes: as many bytes along K."""
    return tuple(replace(config, BLOCK_K=config.BLOCK_K * 2 // itemsize) for config in found)


@cache
def listed(itemsize: int, clusters: bool, long_sums: bool) -> tuple[Config, ...]:
    """CONFIGS for operands of that size, those in clusters, and those for long sums."""
    return of_itemsize(CONFIGS + CLUSTERED * clusters + FOR_LONG_SUMS * long_sums, itemsize)
