"""Products of tiles whose width is any multiple of 8, by one `wgmma` that spans it.

Triton's tensors have powers of two of columns, so that its own `wgmma` do, too. But m64nNk16 multiplies with every N
that is a multiple of 8. A narrow one for what is beyond a power of two takes more than its share: with A in shared
memory max(N / 2, 16 + N / 4) clocks. So here the instruction is PTX, and its sums are in the registers of two of
Triton's tensors, a main part and a tail. To Triton they are values that PTX gives back, for which it waits as for those
of its own `wgmma`.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from .cluster import blocks_of_b


@gluon.jit
def start_wide_products(ring, a_tile, acc, tail, slot, config):
    """(acc, tail) with the products of A's tile and of B's in the slot under way."""
    B_SLOT: gl.constexpr = blocks_of_b(True, config.BLOCK_N)
    asm: gl.constexpr = wide_mma_asm(
        acc.shape, tail.shape[1], config.BLOCK_N, config.BLOCK_K, ptx_type(ring.a.dtype), config.A_COLUMN_MAJOR
    )
    sums: gl.constexpr = (acc.shape[1] + tail.shape[1]) * acc.shape[0] // 128
    return gl.inline_asm(asm, tied(sums), [acc, tail, a_tile, ring.b.index(slot * B_SLOT)], [acc.type, tail.type])


@constexpr_function
def tied(sums):
    """Constraints of so many fp32 that are read and written, and of two addresses."""
    return ",".join(["=f"] * sums + [str(i) for i in range(sums)] + ["r", "r"])


@constexpr_function
def wide_mma_asm(acc_shape, tail_n, width, depth, kind, a_column_major):
    """PTX that adds the product of a k-tile of `depth` elements to a consumer's sums of rows x width. The sums are in
    its threads' registers: those of the main part, then those of the tail, the last of which may stay unused. Tiles are
    in panels of 128 bytes of each row, swizzled in groups of 8 rows, 1024 bytes apart (PTX ISA, "Shared Memory Matrix
    Layout"). B is K-major."""
    rows, main_n = acc_shape
    blocks, of_acc, of_tail = rows // 64, main_n // 2, tail_n // 2  # registers of 64 rows
    sums = blocks * (of_acc + of_tail)
    lines = [
        ".reg .pred add;",
        ".reg .b32 at;",
        ".reg .b64 a, b, a_k, b_k;",
        "setp.ne.b32 add, 1, 0;",
    ]
    for name, operand in (("a", 2 * sums), ("b", 2 * sums + 1)):
        lines += [
            f"and.b32 at, ${operand}, 0x3ffff;",
            "shr.u32 at, at, 4;",
            f"cvt.u64.u32 {name}, at;",
            f"or.b64 {name}, {name}, {1 << 62 | 1024 >> 4 << 32 | 1 << 16:#x};",
        ]
    lines.append("wgmma.fence.sync.aligned;")
    # Offsets are in units of 16 bytes, 8 for a row of a panel. 16 elements along K are 32 bytes of a row, or 16 rows.
    # A's next 64 rows begin 64 rows later in the panel, its next 64 columns with the next panel.
    a_block = 8 * (depth if a_column_major else 64)
    for block in range(blocks):
        first, second = block * of_acc, blocks * of_acc + block * of_tail
        used = [*range(first, first + of_acc), *range(second, second + width // 2 - of_acc)]
        registers = ", ".join(f"${i}" for i in used)
        for k in range(depth // 16):
            panel, inside = k // 4, k % 4 * 32 >> 4
            a_place = k * 8 * 16 if a_column_major else panel * 8 * rows + inside
            lines += [
                f"add.s64 a_k, a, {block * a_block + a_place};",
                f"add.s64 b_k, b, {panel * 8 * width + inside};",
                f"wgmma.mma_async.sync.aligned.m64n{width}k16.f32.{kind}.{kind} {{{registers}}}, a_k, b_k, add, 1, 1, "
                f"{int(a_column_major)}, 0;",
            ]
    lines.append("wgmma.commit_group.sync.aligned;")
    return "{\n" + "\n".join(lines) + "\n}"


@constexpr_function
def ptx_type(dtype):
    return "bf16" if dtype == gl.bfloat16 else "f16"
