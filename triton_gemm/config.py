"""Configurations: compile-time parameters of kernels, and whether a GPU has the registers and shared memory for one."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any

from .hardware.device import DeviceInfo

REGISTERS_PER_SM = 65_536
MAX_REGISTERS_PER_THREAD = 255
ASYNCHRONOUS = (9, 10, 11)  # compute capabilities, by major version, whose tensor cores have `wgmma` or `tcgen05`

# Options of every launch. Triton up to 3.9 fuses a multiplication with an addition unless told otherwise, from 3.10 on
# only if told: said here, results and speed are the same with both.
OPTIONS = {"enable_fp_fusion": True}


@dataclass(frozen=True)
class TileConfig:
    """The tile of one program (elements), its warps, and the stages of its pipeline. Every kernel has a subclass of its
    own, with what else it chooses at compile time."""

    BLOCK_M: int
    BLOCK_N: int
    BLOCK_K: int
    num_warps: int = 4
    num_stages: int = 1

    def meta(self) -> dict[str, int]:
        """The kernel's own compile-time parameters."""
        return {field.name: getattr(self, field.name) for field in fields(self) if field.name.isupper()}

    def tiles(self, M: int, N: int) -> int:
        """Tiles of a matrix [M, N]."""
        return -(-M // self.BLOCK_M) * -(-N // self.BLOCK_N)

    def buffers(self, capability: tuple[int, int]) -> int:
        """Tiles of A and of B in shared memory, in Triton's pipeline. `mma`, which waits for what it reads, takes one
        less than the stages; `wgmma` and `tcgen05` read while the next tile is loaded."""
        return self.num_stages if capability[0] in ASYNCHRONOUS else max(1, self.num_stages - 1)

    def shared_memory(self, itemsize: int, out_itemsize: int = 0, buffers: int | None = None) -> int:
        """Bytes of shared memory for `buffers` tiles of A and of B, by default `num_stages`, whose elements have
        `itemsize` bytes, and for one tile of C with `out_itemsize`. An upper bound."""
        stage = (self.BLOCK_M + self.BLOCK_N) * self.BLOCK_K * itemsize
        barriers = 256  # mbarriers, and what warp specialisation keeps of its own
        tiles = self.num_stages if buffers is None else buffers
        return tiles * stage + barriers + self.BLOCK_M * self.BLOCK_N * out_itemsize

    def accumulators(self, sum_itemsize: int = 4) -> int:
        """Registers of a thread that hold sums of so many bytes."""
        return self.BLOCK_M * self.BLOCK_N * sum_itemsize // (4 * 32 * self.num_warps)

    def illegal(
        self,
        device: DeviceInfo,
        itemsize: int,
        out_itemsize: int,
        *,
        sum_itemsize: int = 4,
        tensor_cores: bool = True,
        staged_outputs: int = 0,
        reads_output: bool = False,
        aligned: bool = True,
        buffers: int | None = None,
    ) -> str | None:
        """Why `device` cannot run this configuration, or why it would be slow, since it "would spill"; None if neither.

        Of a thread's registers accumulators may take half where tensor cores read operands from shared memory. They may
        take a quarter where FFMAs read operands from registers, or C comes back beside them. They may take an eighth
        where every element is moved by itself and wants an address and a predicate. On sm_100 accumulators live in
        tensor memory and pass through registers beside the converted tile. Above these ptxas spills.

        Args:
            itemsize, out_itemsize: Bytes of an element of A and B, and of C.
            sum_itemsize: Bytes of the sums kept for each.
            tensor_cores: Whether they multiply.
            staged_outputs: Tiles of C that lie in shared memory beside those of A and B.
            reads_output: Whether beta C is added.
            aligned: Whether operands can be moved 16 bytes at a time.
            buffers: As for `shared_memory`.
        """
        shared = self.shared_memory(itemsize, staged_outputs * out_itemsize, buffers)
        if shared > device.shared_memory:
            return f"needs {shared} bytes of shared memory, {device.name} has {device.shared_memory}"
        registers = min(MAX_REGISTERS_PER_THREAD + 1, REGISTERS_PER_SM // (32 * self.num_warps))
        accumulators = self.accumulators(sum_itemsize)
        share = 8 if not aligned else 4 if reads_output or not tensor_cores else 2
        if accumulators > registers // share:
            part = {2: "half", 4: "a quarter", 8: "an eighth"}[share]
            return f"would spill: {accumulators} accumulators are more than {part} of a thread's {registers} registers"
        if tensor_cores and device.capability[0] == 10 and accumulators * (4 + out_itemsize) // 4 > 3 * registers // 4:
            return f"would spill: {accumulators} accumulators and their results take too many of {registers} registers"
        return None

    def __str__(self) -> str:
        return _named(self.meta(), self.num_warps, self.num_stages)


@dataclass(frozen=True)
class GemmConfig:
    """Tile sizes (elements) and launch figures of a rung of the ladder; None where it has no such parameter."""

    BLOCK_M: int | None = None
    BLOCK_N: int | None = None
    BLOCK_K: int | None = None
    GROUP_M: int | None = None
    num_warps: int = 4
    num_stages: int = 1

    def meta(self) -> dict[str, int]:
        """The kernel's own compile-time parameters."""
        sizes = {field.name: getattr(self, field.name) for field in fields(self) if field.name.isupper()}
        return {name: value for name, value in sizes.items() if value is not None}

    def kwargs(self) -> dict[str, int]:
        """Everything a launch takes by keyword: `kernel[grid](*args, **config.kwargs())`."""
        return {**self.meta(), "num_warps": self.num_warps, "num_stages": self.num_stages, **OPTIONS}

    @property
    def tile(self) -> TileConfig:
        """What is kept on chip: of a rung without tiles of A and B only its sums."""
        staged = self.BLOCK_K if self.BLOCK_M and self.BLOCK_N else None
        return TileConfig(self.BLOCK_M or 1, self.BLOCK_N or 1, staged or 0, self.num_warps, self.num_stages)

    def shared_memory(self, itemsize: int, out_itemsize: int = 0) -> int:
        """As `TileConfig.shared_memory`; none for a rung without tiles of A and B."""
        return self.tile.shared_memory(itemsize, out_itemsize) if self.tile.BLOCK_K else 0

    def accumulators(self, sum_itemsize: int = 4) -> int:
        """As `TileConfig.accumulators`."""
        return self.tile.accumulators(sum_itemsize)

    def illegal(self, device: DeviceInfo, itemsize: int, out_itemsize: int, **how: Any) -> str | None:
        """As `TileConfig.illegal`."""
        return self.tile.illegal(device, itemsize, out_itemsize, **how)

    def __str__(self) -> str:
        return _named(self.meta(), self.num_warps, self.num_stages)


def _named(sizes: dict[str, int], num_warps: int, num_stages: int) -> str:
    tile = "x".join(str(size) for name, size in sizes.items() if name.startswith("BLOCK"))
    group = f" group {sizes['GROUP_M']}" if "GROUP_M" in sizes else ""
    return f"{tile}{group} {num_warps} warps {num_stages} stages"
