"""Hopper's production kernel: persistent, warp-specialised, TMA in and out, asynchronous `wgmma`, any operand layout.

One warp loads, one to three warpgroups multiply, each the rows of its own part of the tile. A warpgroup shares nothing
with the other but the ring of loaded tiles, so that one may store its part of C while the other has the tensor cores
to itself. C leaves in parts of 64 columns through two small buffers, which is what lets a fourth stage fit.

The tiles of a partial wave are cut along K, so that no multiprocessor idles (`schedule`). Launches follow one another
programmatically: while one grid runs out the next sets up its barriers and has its first k-tiles fetched into L2, and
waits for the other's end only before it reads or writes memory.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.language.extra.cuda.gdc import gdc_launch_dependents, gdc_wait

from ...compat import async_load, prefetch, tma_load, tma_store
from ..epilogue import epilogue, scaled
from ..groups import listed
from ..schedule import locate, work_of
from ..splitk import arrive, wait_for

WARP = gl.constexpr(32)


@gluon.jit
def ask_for(x_ptr, desc, batch, row, column, ROWS: gl.constexpr, COLUMNS: gl.constexpr, COLUMN_MAJOR: gl.constexpr):
    """Has ROWS x COLUMNS of X at (row, column) fetched into L2."""
    first = column if COLUMN_MAJOR else row
    second = row if COLUMN_MAJOR else column
    fetched: gl.constexpr = 2 * instruction_k(desc.dtype)  # elements in 64 bytes
    count: gl.constexpr = max((ROWS if COLUMN_MAJOR else COLUMNS) // fetched, 1)
    layout: gl.constexpr = gl.BlockedLayout([1, 1], [8, 4], [4, 1], [1, 0])
    rows = first + gl.arange(0, COLUMNS if COLUMN_MAJOR else ROWS, gl.SliceLayout(1, layout))
    columns = second + gl.arange(0, count, gl.SliceLayout(0, layout)) * fetched
    x_ptr += batch.to(gl.int64) * desc.strides[0]
    offsets = gl.minimum(rows, desc.shape[1] - 1).to(gl.int64)[:, None] * desc.strides[1]
    prefetch(x_ptr + offsets + gl.minimum(columns, desc.shape[2] - 1)[None, :])


@gluon.jit
def ask_for_first_tiles(
    a_ptr, b_ptr, a_desc, b_desc, order, k_tiles, split, parts, a_batches, b_batches,
    CONSUMERS: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, BLOCK_K: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr, A_PLANES: gl.constexpr, B_PLANES: gl.constexpr,
):  # fmt: skip
    """Has this program's first two k-tiles fetched into L2. That reads nothing the grid before may still write: a line
    of L2 that is written later is written there."""
    rows: gl.constexpr = BLOCK_M // CONSUMERS
    tile_id, _, k_begin, _ = work_of(gl.program_id(0), k_tiles, split, parts)
    batch, pid_m, pid_n = locate(tile_id, *order)
    m = pid_m * BLOCK_M
    n = pid_n * BLOCK_N
    k = k_begin * BLOCK_K
    batch_a = batch * a_batches + (A_PLANES & 3)
    batch_b = batch * b_batches + (B_PLANES & 3)
    for w in gl.static_range(CONSUMERS):
        ask_for(a_ptr, a_desc, batch_a, m + w * rows, k, rows, 2 * BLOCK_K, A_COLUMN_MAJOR)
    ask_for(b_ptr, b_desc, batch_b, k, n, 2 * BLOCK_K, BLOCK_N - REST_N, B_COLUMN_MAJOR)
    if REST_N:
        ask_for(b_ptr, b_desc, batch_b, k, n + BLOCK_N - REST_N, 2 * BLOCK_K, REST_N, B_COLUMN_MAJOR)


@gluon.jit
def load_partition(
    a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
    a_scale_ptr, b_scale_ptr, M, N, order, num_items, k_tiles, split, parts, a_batches, b_batches,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, BLOCK_K: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr, TERMS: gl.constexpr, A_PLANES: gl.constexpr,
    B_PLANES: gl.constexpr, SCALED: gl.constexpr, GROUPS: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """The producer: fills every slot of the ring that has been emptied, in the order in which they are consumed.

    Of operands that are sums of planes each k-tile comes once for each of the TERMS: A_PLANES and B_PLANES name its
    planes, two bits a term, the first in the lowest. SCALED: with its scales.
    """
    if PDL:
        gdc_wait()
    num_stages: gl.constexpr = b_tiles.shape[0]
    consumers: gl.constexpr = a_tiles.shape[0] // num_stages
    rows: gl.constexpr = BLOCK_M // consumers
    b_bytes: gl.constexpr = b_desc.block_type.nbytes + (b_rest_desc.block_type.nbytes if REST_N else 0)
    slot = 0
    phase = 1  # the first round finds every slot empty
    if GROUPS:
        num_items = gl.load(tiles_ptr)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        tile_id, _, k_begin, k_end = work_of(item, k_tiles, split, parts)
        if GROUPS:
            batch, m, _, pid_n, k_end = listed(tiles_ptr, tile_id, k_tiles)
        else:
            batch, pid_m, pid_n = locate(tile_id, *order)
            m = pid_m * BLOCK_M
        n = pid_n * BLOCK_N
        for step in range(k_begin * TERMS, k_end * TERMS):
            k = step // TERMS * BLOCK_K
            batch_a = batch * a_batches
            batch_b = batch * b_batches
            if TERMS > 1:
                term = step % TERMS
                batch_a += gl.to_tensor(A_PLANES) >> 2 * term & 3
                batch_b += gl.to_tensor(B_PLANES) >> 2 * term & 3
            full = full_bars.index(slot)
            mbarrier.wait(empty_bars.index(slot), phase)
            mbarrier.expect(full, consumers * a_desc.block_type.nbytes + b_bytes)
            for w in gl.static_range(consumers):
                row = m + w * rows
                a_tile = a_tiles.index(slot * consumers + w)
                tma_load(a_desc, [batch_a, k, row] if A_COLUMN_MAJOR else [batch_a, row, k], full, a_tile)
            tma_load(b_desc, [batch_b, n, k] if B_COLUMN_MAJOR else [batch_b, k, n], full, b_tiles.index(slot))
            if REST_N:
                rest = n + BLOCK_N - REST_N
                b_rest_tile = b_rest_tiles.index(slot)
                tma_load(b_rest_desc, [batch_b, rest, k] if B_COLUMN_MAJOR else [batch_b, k, rest], full, b_rest_tile)
            if SCALED:
                load_scales(scales, slot, a_scale_ptr, b_scale_ptr, step, k_tiles, m, n, M, N)
                async_copy.mbarrier_arrive(full, increment_count=False)
            slot, phase = next_slot(slot, phase, num_stages)


@gluon.jit
def load_scales(scales, slot, a_scale_ptr, b_scale_ptr, kt, k_tiles, m, n, M, N):
    """k-tile kt's scales into a slot: A's from row m on, and B's of the 128 columns that n is among and of the next
    128. In memory A's lie [k-tiles, M], B's [N / 128 rounded up, k-tiles]."""
    a_scales, b_scales = scales
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [1], [0])
    rows = m + gl.arange(0, a_scales.shape[1], layout)
    async_load(a_scales.index(slot), a_scale_ptr + kt.to(gl.int64) * M + rows, mask=rows < M)
    blocks = n // 128 + gl.arange(0, WARP, layout)
    wanted = (blocks < n // 128 + 2) & (blocks < (N + 127) // 128)
    async_load(b_scales.index(slot), b_scale_ptr + blocks.to(gl.int64) * k_tiles + kt, mask=wanted)


@gluon.jit
def next_slot(slot, phase, num_stages: gl.constexpr):
    """The ring's next slot; the phase turns when the ring has gone round."""
    slot += 1
    wrapped = slot == num_stages
    return gl.where(wrapped, 0, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def previous_slot(slot, num_stages: gl.constexpr):
    # Not a variable `previous = slot`: Triton takes one for unchanged in a loop before which it was slot, too.
    return gl.where(slot == 0, num_stages - 1, slot - 1)


@gluon.jit
def matrix(tile, COLUMN_MAJOR: gl.constexpr):
    """A tile in shared memory [1, rows, columns] as a matrix; as its transpose where it lies so."""
    flat = tile.reshape((tile.shape[1], tile.shape[2]))
    return flat.permute((1, 0)) if COLUMN_MAJOR else flat


@gluon.jit
def halves(x):
    """The left and the right half of x's columns, without moving data between threads."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape((rows, 2, columns // 2)).permute((0, 2, 1)).split()


@gluon.jit
def accumulators(ROWS: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Zeros [ROWS, COLUMNS] as one warpgroup's `wgmma` of operands of that dtype wants them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, instruction_k(dtype)]
    )
    return gl.zeros((ROWS, COLUMNS), gl.int32 if dtype == gl.int8 else gl.float32, layout)


@constexpr_function
def instruction_k(dtype):
    """Elements along K of one `wgmma`: 32 bytes."""
    return 8 if dtype == gl.float32 else 16 if dtype == gl.float16 or dtype == gl.bfloat16 else 32


@constexpr_function
def by_registers(dtype, column_major):
    """Whether A goes to `wgmma` through registers: in shared memory it reads both ways round only what has 16 bits."""
    return column_major and dtype == gl.float32


@constexpr_function
def still_running(dtype, a_column_major):
    """Steps whose products run on into the next: none beside A in registers, which the next step fills."""
    return 0 if by_registers(dtype, a_column_major) else 1


@gluon.jit
def left_operand(tile, COLUMN_MAJOR: gl.constexpr, acc_layout: gl.constexpr):
    """A's tile for `wgmma`."""
    if by_registers(tile.dtype, COLUMN_MAJOR):
        return matrix(tile, COLUMN_MAJOR).load(gl.DotOperandLayout(0, acc_layout, 1))
    else:
        return matrix(tile, COLUMN_MAJOR)


@gluon.jit
def start(
    acc, rest, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr,
    REST_N: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """(acc, rest) with the products of the slot's tiles, under way once they have come."""
    mbarrier.wait(full_bars.index(slot), phase)
    layout: gl.constexpr = acc.type.layout
    a = left_operand(a_tiles.index(slot * CONSUMERS + CONSUMER), A_COLUMN_MAJOR, layout)
    acc = warpgroup_mma(a, matrix(b_tiles.index(slot), B_COLUMN_MAJOR), acc, is_async=True)
    if REST_N:
        rest = warpgroup_mma(a, matrix(b_rest_tiles.index(slot), B_COLUMN_MAJOR), rest, is_async=True)
    return acc, rest


@gluon.jit
def multiply(
    k_begin, k_end, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, empty_bars, CONSUMER: gl.constexpr,
    CONSUMERS: gl.constexpr, ROWS: gl.constexpr, MAIN_N: gl.constexpr, REST_N: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr,
):  # fmt: skip
    """(acc, rest, slot, phase): sums over k-tiles from k_begin to k_end, from `slot` on, and the slot after them. The
    last one's products may be under way, as `still_running` says."""
    num_stages: gl.constexpr = b_tiles.shape[0]
    IN_FLIGHT: gl.constexpr = still_running(a_tiles.dtype, A_COLUMN_MAJOR)
    acc = accumulators(ROWS, MAIN_N, a_tiles.dtype)
    rest = accumulators(ROWS, REST_N, a_tiles.dtype) if REST_N else acc
    for kt in range(k_begin, k_end):
        acc, rest = start(
            acc, rest, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, CONSUMER, CONSUMERS, REST_N,
            A_COLUMN_MAJOR, B_COLUMN_MAJOR,
        )  # fmt: skip
        if REST_N:
            acc, rest = warpgroup_mma_wait(2 * IN_FLIGHT, deps=(acc, rest))
        else:
            acc = warpgroup_mma_wait(IN_FLIGHT, deps=(acc,))
        if IN_FLIGHT:
            # The step before this one is done, so its slot may be filled again.
            mbarrier.arrive(empty_bars.index(previous_slot(slot, num_stages)), pred=kt > k_begin)
        else:
            mbarrier.arrive(empty_bars.index(slot))
        slot, phase = next_slot(slot, phase, num_stages)
    return acc, rest, slot, phase


@gluon.jit
def multiply_in_pieces(
    k_begin, k_end, slot, phase, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, n,
    CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, ROWS: gl.constexpr, MAIN_N: gl.constexpr, REST_N: gl.constexpr,
    A_COLUMN_MAJOR: gl.constexpr, B_COLUMN_MAJOR: gl.constexpr, TERMS: gl.constexpr, SCALED: gl.constexpr,
):  # fmt: skip
    """As `multiply`, but nothing is under way in the end, and a k-tile's sums are added up in fp32, where SCALED times
    a scale for each row of A and for each 128 columns of B.

    The tensor cores cut off what they add to a sum below its last bit (of fp8 below its 14th), so a k-tile's products,
    of all planes the smallest first, are summed, and these sums rounded to nearest. Those of the main part are added
    while the rest's products run. (Across the loop's end ptxas would take such products one by one: C7514.)
    """
    num_stages: gl.constexpr = b_tiles.shape[0]
    acc = accumulators(ROWS, MAIN_N, a_tiles.dtype)
    rest = accumulators(ROWS, REST_N, a_tiles.dtype) if REST_N else acc
    for _ in range(k_begin, k_end):
        if TERMS == 1:
            more = accumulators(ROWS, MAIN_N, a_tiles.dtype)
            more_rest = accumulators(ROWS, REST_N, a_tiles.dtype) if REST_N else more
            more, more_rest = start(
                more, more_rest, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, CONSUMER, CONSUMERS, REST_N,
                A_COLUMN_MAJOR, B_COLUMN_MAJOR,
            )  # fmt: skip
            slot, phase = next_slot(slot, phase, num_stages)
        else:
            more, more_rest, slot, phase = multiply(
                0, TERMS, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, empty_bars, CONSUMER, CONSUMERS,
                ROWS, MAIN_N, REST_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR,
            )  # fmt: skip
        used = previous_slot(slot, num_stages)
        factors = (n, n, n)
        if SCALED:
            factors = scales_of(scales, used, CONSUMER * ROWS, acc)
        if REST_N:
            more, more_rest = warpgroup_mma_wait(1, deps=(more, more_rest))
            acc = added(acc, more, n, factors, False, SCALED)
            more_rest = warpgroup_mma_wait(0, deps=(more_rest,))
            mbarrier.arrive(empty_bars.index(used))
            rest = added(rest, more_rest, n, factors, True, SCALED)
        else:
            more = warpgroup_mma_wait(0, deps=(more,))
            mbarrier.arrive(empty_bars.index(used))
            acc = added(acc, more, n, factors, False, SCALED)
    return acc, rest, slot, phase


@gluon.jit
def scales_of(scales, slot, row, acc):
    """A slot's scales: A's [rows] of acc's rows, the first of which is `row`, and B's two [1]."""
    a_scales, b_scales = scales
    of_rows = a_scales.index(slot).slice(row, acc.shape[0]).load(gl.SliceLayout(1, acc.type.layout))
    left = b_scales.index(slot).slice(0, 1).load(gl.SliceLayout(0, acc.type.layout))
    right = b_scales.index(slot).slice(1, 1).load(gl.SliceLayout(0, acc.type.layout))
    return of_rows, left, right


@gluon.jit
def added(acc, more, n, scales, REST: gl.constexpr, SCALED: gl.constexpr):
    """acc + more, whose columns begin at n, times its scales. The REST of a tile begins at n + 128, n being a multiple
    of 64, and is 64 wide."""
    if not SCALED:
        return acc + more
    else:
        of_rows, left, right = scales
        layout: gl.constexpr = acc.type.layout
        of_rows = gl.convert_layout(of_rows, gl.SliceLayout(1, layout))
        if REST:
            of_columns = gl.convert_layout(right, gl.SliceLayout(0, layout))[None, :]
        else:
            # Only two halves are told apart, so that a thread needs two registers for all its columns.
            columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
            of_columns = gl.where(columns < 64, left, gl.where(n % 128 == 0, left, right))[None, :]
        return acc + more * (of_rows[:, None] * of_columns)


@gluon.jit
def consume_partition(
    c_desc, c_parts, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr, c_ptr, bias_ptr,
    workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm, stride_cn, alpha, beta, order,
    num_items, k_tiles, split, parts, CONSUMER: gl.constexpr, CONSUMERS: gl.constexpr, BLOCK_M:
    gl.constexpr, BLOCK_N: gl.constexpr, REST_N: gl.constexpr, PART_N: gl.constexpr, A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr, C_COLUMN_MAJOR: gl.constexpr, C_TMA: gl.constexpr, HAS_BETA: gl.constexpr, BIAS:
    gl.constexpr, EARLY_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, SCALES: gl.constexpr, GROUPS: gl.constexpr,
    SPLIT: gl.constexpr, TERMS: gl.constexpr, IN_PIECES: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """One warpgroup: multiplies its rows of every tile and stores them, or shares partial sums with other programs.

    A tile's width is a power of two, or the sum of two of them, MAIN_N + REST_N, with accumulators for each.
    """
    if PDL:
        gdc_wait()
    ROWS: gl.constexpr = BLOCK_M // CONSUMERS
    MAIN_N: gl.constexpr = BLOCK_N - REST_N
    PARTS: gl.constexpr = BLOCK_N // PART_N
    slot = 0
    phase = 0
    count = 0  # of parts of C
    if GROUPS:
        num_items = gl.load(tiles_ptr)
    for item in range(gl.program_id(0), num_items, gl.num_programs(0)):
        # Locate the tile
        tile_id, part, k_begin, k_end = work_of(item, k_tiles, split, parts)
        rows_end = M
        if GROUPS:
            batch, m, rows_end, pid_n, k_end = listed(tiles_ptr, tile_id, k_tiles)
        else:
            batch, pid_m, pid_n = locate(tile_id, *order)
            m = pid_m * BLOCK_M
        m += CONSUMER * ROWS
        n = pid_n * BLOCK_N
        mine = True
        if SPLIT:
            mine = part == 0
        if HAS_BETA and C_TMA:
            if mine:
                ask_for(c_ptr, c_desc, batch, m, n, ROWS, MAIN_N, C_COLUMN_MAJOR)
                if REST_N:
                    ask_for(c_ptr, c_desc, batch, m, n + MAIN_N, ROWS, REST_N, C_COLUMN_MAJOR)

        # Main loop
        if not IN_PIECES:
            acc, rest, slot, phase = multiply(
                k_begin, k_end, slot, phase, a_tiles, b_tiles, b_rest_tiles, full_bars, empty_bars, CONSUMER,
                CONSUMERS, ROWS, MAIN_N, REST_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR,
            )  # fmt: skip
            # What the epilogue reads comes under the last products: a bias where registers are left for it.
            if HAS_BETA and C_TMA:
                if mine:
                    load_first_parts(c_desc, c_parts, count, batch, m, n, PART_N, PARTS, C_COLUMN_MAJOR)
            bias = bias_of(bias_ptr, m, n, rows_end, N, ROWS, MAIN_N, PART_N, EARLY_BIAS)
            rest_bias = bias_of(bias_ptr, m, n + MAIN_N, rows_end, N, ROWS, REST_N, PART_N, EARLY_BIAS)
            if still_running(a_tiles.dtype, A_COLUMN_MAJOR):
                if REST_N:
                    acc, rest = warpgroup_mma_wait(0, deps=(acc, rest))
                else:
                    acc = warpgroup_mma_wait(0, deps=(acc,))
                mbarrier.arrive(empty_bars.index(previous_slot(slot, b_tiles.shape[0])), pred=k_end > k_begin)
        else:
            acc, rest, slot, phase = multiply_in_pieces(
                k_begin, k_end, slot, phase, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, n, CONSUMER,
                CONSUMERS, ROWS, MAIN_N, REST_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, TERMS, SCALES == "blocks",
            )  # fmt: skip
            if HAS_BETA and C_TMA:
                if mine:
                    load_first_parts(c_desc, c_parts, count, batch, m, n, PART_N, PARTS, C_COLUMN_MAJOR)
            bias = bias_of(bias_ptr, m, n, rows_end, N, ROWS, MAIN_N, PART_N, "")
            rest_bias = bias_of(bias_ptr, m, n + MAIN_N, rows_end, N, ROWS, REST_N, PART_N, "")

        # Epilogue
        if SPLIT:
            counter = counters_ptr + tile_id * CONSUMERS + CONSUMER
            stride: gl.constexpr = ROWS * BLOCK_N  # from one block of partial sums to the next
            ROOM: gl.constexpr = 64 if CONSUMERS < 3 else 32  # registers for what others summed
            sums = by_thread(acc)
            sums_layout: gl.constexpr = acc.type.layout
            if REST_N:
                rest_sums = by_thread(rest)
                rest_layout: gl.constexpr = rest.type.layout
            if mine:
                others = gl.where(item < split * parts, parts - 1, 0)
                if others > 0:
                    wait_for(counter, others)
                block = tile_id * CONSUMERS + CONSUMER
                sums = with_others(sums, workspace_ptr, block, split * CONSUMERS, others, stride, ROOM)
                acc = by_row(sums, ROWS, MAIN_N, sums_layout)
                if REST_N:
                    rest_ptr = workspace_ptr + ROWS * MAIN_N
                    rest_sums = with_others(rest_sums, rest_ptr, block, split * CONSUMERS, others, stride, ROOM)
                    rest = by_row(rest_sums, ROWS, REST_N, rest_layout)
            else:
                block = ((part - 1) * split + tile_id) * CONSUMERS + CONSUMER
                gl.store(sums_pointers(workspace_ptr, block, sums, stride), sums.to(gl.float32, bitcast=True))
                if REST_N:
                    rest_ptr = workspace_ptr + ROWS * MAIN_N
                    pointers = sums_pointers(rest_ptr, block, rest_sums, stride)
                    gl.store(pointers, rest_sums.to(gl.float32, bitcast=True))
                arrive(counter)
        if mine:
            store_tile(
                acc, bias, c_desc, c_parts, count, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, m, n, rows_end,
                N, stride_cb, stride_cm, stride_cn, alpha, beta, PART_N, 0, PARTS, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                BIAS, EARLY_BIAS, ACTIVATION, SCALES,
            )  # fmt: skip
            if REST_N:
                FIRST: gl.constexpr = MAIN_N // PART_N
                store_tile(
                    rest, rest_bias, c_desc, c_parts, count + FIRST, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch,
                    m, n + MAIN_N, rows_end, N, stride_cb, stride_cm, stride_cn, alpha, beta, PART_N, FIRST, PARTS,
                    C_COLUMN_MAJOR, C_TMA, HAS_BETA, BIAS, EARLY_BIAS, ACTIVATION, SCALES,
                )  # fmt: skip
            count += PARTS
    if C_TMA:
        tma.store_wait(0)


@gluon.jit
def with_others(sums, workspace_ptr, block, step, others, stride: gl.constexpr, ROOM: gl.constexpr):
    """sums and the `others` programs' for the same tile, in blocks `step` apart, as many at once as ROOM registers of a
    thread hold; of larger blocks first all left halves, then all right ones."""
    REGISTERS: gl.constexpr = sums.shape[0] * 4 // 128
    if REGISTERS > ROOM:
        half: gl.constexpr = sums.shape[0] // 2
        left, right = sums.reshape((2, half, 4)).permute((1, 2, 0)).split()
        left = with_others(left, workspace_ptr, block, step, others, stride, ROOM)
        right = with_others(right, workspace_ptr + half * 4, block, step, others, stride, ROOM)
        joined = gl.join(left, right).permute((2, 0, 1)).reshape((2 * half, 4))
        sums = gl.convert_layout(joined, sums.type.layout, assert_trivial=True)
    else:
        AT_ONCE: gl.constexpr = ROOM // REGISTERS
        for first in range(0, others, AT_ONCE):
            for i in gl.static_range(AT_ONCE):
                pointers = sums_pointers(workspace_ptr, block + (first + i) * step, sums, stride)
                others_sums = gl.load(pointers, mask=first + i < others, other=0.0, cache_modifier=".cg")
                sums += others_sums.to(sums.dtype, bitcast=True)
    return sums


@gluon.jit
def load_first_parts(
    c_desc, c_parts, count, batch, m, n, PART_N: gl.constexpr, PARTS: gl.constexpr, C_COLUMN_MAJOR: gl.constexpr
):  # fmt: skip
    """Starts to load as many parts of the tile at (m, n) of C as there are buffers."""
    buffers, _ = c_parts
    tma.store_wait(0)
    for p in gl.static_range(min(buffers.shape[0], PARTS)):
        load_part(c_desc, c_parts, count + p, batch, m, n + p * PART_N, C_COLUMN_MAJOR)


@gluon.jit
def load_part(c_desc, c_parts, count, batch, m, n, C_COLUMN_MAJOR: gl.constexpr):
    """Starts to load the part at (m, n) of C, this warpgroup's number `count`, into its buffer; what was stored from
    there must have been read."""
    buffers, loaded = c_parts
    buffer = count % buffers.shape[0]
    mbarrier.expect(loaded.index(buffer), c_desc.block_type.nbytes)
    corner = [batch, n, m] if C_COLUMN_MAJOR else [batch, m, n]
    tma_load(c_desc, corner, loaded.index(buffer), buffers.index(buffer))


@gluon.jit
def store_tile(
    acc, bias, c_desc, c_parts, count, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, m, n, M, N, stride_cb,
    stride_cm, stride_cn, alpha, beta, PART_N: gl.constexpr, FIRST: gl.constexpr, PARTS: gl.constexpr, C_COLUMN_MAJOR:
    gl.constexpr, C_TMA: gl.constexpr, HAS_BETA: gl.constexpr, BIAS: gl.constexpr, EARLY_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """Stores acc at (m, n) of C, part after part, the first as this warpgroup's number `count`, and number FIRST of the
    tile's PARTS. bias: each part's, if EARLY_BIAS."""
    layout: gl.constexpr = part_layout(PART_N)
    parts = columns_in_parts(acc, PART_N)
    if ACTIVATION != "" and len(parts) == 4:
        # An activation is long: written out four times, for each warpgroup, it would not fit the instruction cache.
        first, second, third, fourth = parts
        first_bias, second_bias, third_bias, fourth_bias = bias
        for p in range(4):
            store_part(
                gl.convert_layout(first, layout), first_bias, c_desc, c_parts, count + p, FIRST + p, c_ptr, bias_ptr,
                a_scale_ptr, b_scale_ptr, batch, m, n + p * PART_N, M, N, stride_cb, stride_cm, stride_cn, alpha, beta,
                PARTS, C_COLUMN_MAJOR, C_TMA, HAS_BETA, BIAS, EARLY_BIAS, ACTIVATION, SCALES,
            )  # fmt: skip
            first, second, third, fourth = second, third, fourth, first
            if EARLY_BIAS == "n":
                first_bias, second_bias, third_bias, fourth_bias = second_bias, third_bias, fourth_bias, first_bias
    else:
        for p in gl.static_range(len(parts)):
            store_part(
                gl.convert_layout(parts[p], layout), bias[p], c_desc, c_parts, count + p, FIRST + p, c_ptr, bias_ptr,
                a_scale_ptr, b_scale_ptr, batch, m, n + p * PART_N, M, N, stride_cb, stride_cm, stride_cn, alpha, beta,
                PARTS, C_COLUMN_MAJOR, C_TMA, HAS_BETA, BIAS, EARLY_BIAS, ACTIVATION, SCALES,
            )  # fmt: skip


@constexpr_function
def part_layout(columns):
    """How a warpgroup holds a part of C, whose columns are as many: as `wgmma` left its sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def bias_of(
    bias_ptr, m, n, M, N, ROWS: gl.constexpr, COLUMNS: gl.constexpr, PART_N: gl.constexpr, BIAS: gl.constexpr
):  # fmt: skip
    """A tuple of the bias of each part of a tile [ROWS, COLUMNS] at (m, n); of something else where there is none."""
    layout: gl.constexpr = part_layout(PART_N)
    if COLUMNS > PART_N:
        half: gl.constexpr = COLUMNS // 2
        left = bias_of(bias_ptr, m, n, M, N, ROWS, half, PART_N, BIAS)
        return left + (bias_of(bias_ptr, m, n + half, M, N, ROWS, half, PART_N, BIAS) if BIAS == "n" else left)
    elif BIAS == "m":
        offs_m = m + gl.arange(0, ROWS, gl.SliceLayout(1, layout))
        return (gl.load(bias_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None],)
    elif BIAS == "n":
        offs_n = n + gl.arange(0, PART_N, gl.SliceLayout(0, layout))
        return (gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :],)
    else:
        return (n,)


@gluon.jit
def columns_in_parts(x, PART_N: gl.constexpr):
    """x [rows, columns] as a tuple of [rows, PART_N], whose number is a power of two."""
    if x.shape[1] == PART_N:
        return (x,)
    else:
        left, right = halves(x)
        return columns_in_parts(left, PART_N) + columns_in_parts(right, PART_N)


@gluon.jit
def store_part(
    sums, bias, c_desc, c_parts, count, p, c_ptr, bias_ptr, a_scale_ptr, b_scale_ptr, batch, m, n, M, N, stride_cb,
    stride_cm, stride_cn, alpha, beta, PARTS: gl.constexpr, C_COLUMN_MAJOR: gl.constexpr, C_TMA: gl.constexpr, HAS_BETA:
    gl.constexpr, BIAS: gl.constexpr, EARLY_BIAS: gl.constexpr, ACTIVATION: gl.constexpr, SCALES: gl.constexpr,
):  # fmt: skip
    """The epilogue of sums [rows, columns] at (m, n) of C, number p of the tile's PARTS. A TMA store runs on, under
    what comes after; where TMA loads C's own values, the part that follows by as many as there are buffers less one
    comes then into the buffer before this one's."""
    if not C_TMA:
        # A warp's threads side by side along C's unit stride, of which an accumulator's row has only four.
        side: gl.constexpr = min(32, sums.shape[0 if C_COLUMN_MAJOR else 1])
        threads: gl.constexpr = [side, 32 // side] if C_COLUMN_MAJOR else [32 // side, side]
        warps: gl.constexpr = [1, 4] if C_COLUMN_MAJOR else [4, 1]
        order: gl.constexpr = [0, 1] if C_COLUMN_MAJOR else [1, 0]
        sums = gl.convert_layout(sums, gl.BlockedLayout([1, 1], threads, warps, order))
    layout: gl.constexpr = sums.type.layout
    offs_m = m + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    offs_n = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    c = None
    if C_TMA:
        buffers, loaded = c_parts
        BUFFERS: gl.constexpr = buffers.shape[0]
        c_part = buffers.index(count % BUFFERS)
        if HAS_BETA:
            mbarrier.wait(loaded.index(count % BUFFERS), count // BUFFERS & 1)
            c = matrix(c_part, C_COLUMN_MAJOR).load(layout)
    else:
        c_ptrs = (
            c_ptr
            + batch.to(gl.int64) * stride_cb
            + offs_m[:, None].to(gl.int64) * stride_cm
            + offs_n[None, :].to(gl.int64) * stride_cn
        )
        mask = (offs_m < M)[:, None] & (offs_n < N)[None, :]
        if HAS_BETA:
            c = gl.load(c_ptrs, mask=mask, other=0.0)
    if BIAS == "m" and EARLY_BIAS == "":
        bias = gl.load(bias_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
    if BIAS == "n" and EARLY_BIAS == "":
        bias = gl.load(bias_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
    if SCALES == "rows":
        a_scale = gl.load(a_scale_ptr + offs_m, mask=offs_m < M, other=0.0)[:, None]
        b_scale = gl.load(b_scale_ptr + offs_n, mask=offs_n < N, other=0.0)[None, :]
        sums = scaled(sums, a_scale, b_scale)
    if SCALES == "tensor":
        sums = scaled(sums, gl.load(a_scale_ptr), gl.load(b_scale_ptr))
    out = epilogue(sums, alpha, beta, c, bias, HAS_BETA, BIAS != "", ACTIVATION).to(c_ptr.dtype.element_ty)
    if C_TMA:
        if not HAS_BETA:
            tma.store_wait(BUFFERS - 1)  # stores from the other buffers may still read
        matrix(c_part, C_COLUMN_MAJOR).store(out)
        fence_async_shared()
        if C_COLUMN_MAJOR:
            tma_store(c_desc, [batch, n, m], c_part)
        else:
            tma_store(c_desc, [batch, m, n], c_part)
        if HAS_BETA and PARTS > BUFFERS:
            if (p > 0) & (p - 1 + BUFFERS < PARTS):
                tma.store_wait(1)
                load_part(
                    c_desc, c_parts, count + BUFFERS - 1, batch, m, n + (BUFFERS - 1) * sums.shape[1], C_COLUMN_MAJOR
                )
    else:
        gl.store(c_ptrs, out, mask=mask)


@gluon.jit
def by_thread(acc):
    """acc [rows, columns] as [threads and so on, 4], without moving data: a row holds two pairs of a thread, so that
    threads side by side read and write 16 bytes side by side."""
    R: gl.constexpr = acc.shape[0] // 64
    C: gl.constexpr = acc.shape[1] // 8
    # rows: 64s, warp, upper or lower half, lane // 4; columns: 8s, lane % 4, pair
    return acc.reshape((R, 4, 2, 8, C, 4, 2)).permute((0, 4, 1, 3, 5, 2, 6)).reshape((R * C * 128, 4))


@gluon.jit
def by_row(x, ROWS: gl.constexpr, COLUMNS: gl.constexpr, layout: gl.constexpr):
    """What `by_thread` undoes."""
    x = x.reshape((ROWS // 64, COLUMNS // 8, 4, 8, 4, 2, 2)).permute((0, 2, 5, 3, 1, 4, 6)).reshape((ROWS, COLUMNS))
    return gl.convert_layout(x, layout)


@gluon.jit
def sums_pointers(workspace_ptr, block, x, stride: gl.constexpr):
    """Where x, of `by_thread`, lies in block number `block` of the workspace, each `stride` elements."""
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    columns = gl.arange(0, 4, gl.SliceLayout(0, layout))
    return workspace_ptr + block.to(gl.int64) * stride + rows[:, None] * 4 + columns[None, :]


@gluon.jit(do_not_specialize=["num_m", "num_items", "k_tiles", "group", "per_band", "per_batch", "split", "parts",
                              "a_batches", "b_batches", "alpha", "beta", "M", "N", "stride_cb"])  # fmt: skip
def warp_specialised_kernel(
    a_desc,
    b_desc,
    b_rest_desc,
    c_desc,
    a_ptr,
    b_ptr,
    tiles_ptr,
    c_ptr,
    bias_ptr,
    workspace_ptr,
    counters_ptr,
    a_scale_ptr,
    b_scale_ptr,
    M,
    N,
    stride_cb,
    stride_cm,
    stride_cn,
    alpha,
    beta,
    num_m,
    num_items,
    k_tiles,
    group,
    per_band,
    per_batch,
    split,
    parts,
    a_batches,
    b_batches,
    A_COLUMN_MAJOR: gl.constexpr,
    B_COLUMN_MAJOR: gl.constexpr,
    C_COLUMN_MAJOR: gl.constexpr,
    C_TMA: gl.constexpr,
    HAS_BETA: gl.constexpr,
    BIAS: gl.constexpr,
    EARLY_BIAS: gl.constexpr,
    ACTIVATION: gl.constexpr,
    SCALES: gl.constexpr,
    GROUPS: gl.constexpr,
    SPLIT: gl.constexpr,
    CONSUMERS: gl.constexpr,
    BLOCK_M: gl.constexpr,
    BLOCK_N: gl.constexpr,
    REST_N: gl.constexpr,
    BLOCK_K: gl.constexpr,
    PART_N: gl.constexpr,
    C_BUFFERS: gl.constexpr,
    TERMS: gl.constexpr,
    A_PLANES: gl.constexpr,
    B_PLANES: gl.constexpr,
    IN_PIECES: gl.constexpr,
    num_stages: gl.constexpr,
    PDL: gl.constexpr,
):
    order = (num_m, group, per_band, per_batch)  # of tiles: as `locate` wants it
    if PDL:
        gdc_launch_dependents()
        if not GROUPS:
            ask_for_first_tiles(
                a_ptr, b_ptr, a_desc, b_desc, order, k_tiles, split, parts, a_batches, b_batches,
                CONSUMERS, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, A_COLUMN_MAJOR, B_COLUMN_MAJOR, A_PLANES, B_PLANES,
            )  # fmt: skip
    a_tiles = gl.allocate_shared_memory(a_desc.dtype, [num_stages * CONSUMERS] + a_desc.block_shape, a_desc.layout)
    b_tiles = gl.allocate_shared_memory(b_desc.dtype, [num_stages] + b_desc.block_shape, b_desc.layout)
    b_rest_tiles = b_tiles
    if REST_N:
        b_rest_tiles = gl.allocate_shared_memory(
            b_rest_desc.dtype, [num_stages] + b_rest_desc.block_shape, b_rest_desc.layout
        )
    full_bars = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
    empty_bars = gl.allocate_shared_memory(gl.int64, [num_stages, 1], mbarrier.MBarrierLayout())
    BLOCKS: gl.constexpr = SCALES == "blocks"
    scales = (a_tiles, b_tiles)  # partitions take no None: what is not used is something else
    if BLOCKS:
        scales_layout: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        a_scales = gl.allocate_shared_memory(gl.float32, [num_stages, BLOCK_M], scales_layout)
        scales = (a_scales, gl.allocate_shared_memory(gl.float32, [num_stages, WARP], scales_layout))
    for slot in gl.static_range(num_stages):
        mbarrier.init(full_bars.index(slot), count=1 + WARP if BLOCKS else 1)  # scales arrive by each thread's copies
        mbarrier.init(empty_bars.index(slot), count=CONSUMERS)
    c_parts_0 = parts_of_c(c_desc, a_tiles, C_TMA, HAS_BETA, C_BUFFERS)
    c_parts_1 = parts_of_c(c_desc, a_tiles, C_TMA and CONSUMERS > 1, HAS_BETA, C_BUFFERS)
    c_parts_2 = parts_of_c(c_desc, a_tiles, C_TMA and CONSUMERS > 2, HAS_BETA, C_BUFFERS)
    fence_async_shared()

    # Three times the same partitions: Gluon takes no list of them that is put together, nor tuples with constants in
    # variables.
    # fmt: off
    if CONSUMERS == 1:
        gl.warp_specialize(
            [
                (consume_partition, (
                    c_desc, c_parts_0, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 0, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (load_partition, (
                    a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars,
                    tiles_ptr, a_scale_ptr, b_scale_ptr, M, N, order, num_items, k_tiles, split, parts,
                    a_batches, b_batches, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, A_COLUMN_MAJOR, B_COLUMN_MAJOR, TERMS,
                    A_PLANES, B_PLANES, BLOCKS, GROUPS, PDL,
                )),
            ],
            [1],
            [24],
        )
    elif CONSUMERS == 2:
        gl.warp_specialize(
            [
                (consume_partition, (
                    c_desc, c_parts_0, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 0, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (consume_partition, (
                    c_desc, c_parts_1, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 1, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (load_partition, (
                    a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars,
                    tiles_ptr, a_scale_ptr, b_scale_ptr, M, N, order, num_items, k_tiles, split, parts,
                    a_batches, b_batches, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, A_COLUMN_MAJOR, B_COLUMN_MAJOR, TERMS,
                    A_PLANES, B_PLANES, BLOCKS, GROUPS, PDL,
                )),
            ],
            [4, 1],
            [240, 24],
        )
    else:
        gl.warp_specialize(
            [
                (consume_partition, (
                    c_desc, c_parts_0, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 0, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (consume_partition, (
                    c_desc, c_parts_1, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 1, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (consume_partition, (
                    c_desc, c_parts_2, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars, tiles_ptr,
                    c_ptr, bias_ptr, workspace_ptr, counters_ptr, a_scale_ptr, b_scale_ptr, M, N, stride_cb, stride_cm,
                    stride_cn, alpha, beta, order, num_items, k_tiles, split, parts, 2, CONSUMERS,
                    BLOCK_M, BLOCK_N, REST_N, PART_N, A_COLUMN_MAJOR, B_COLUMN_MAJOR, C_COLUMN_MAJOR, C_TMA, HAS_BETA,
                    BIAS, EARLY_BIAS, ACTIVATION, SCALES, GROUPS, SPLIT, TERMS, IN_PIECES, PDL,
                )),
                (load_partition, (
                    a_desc, b_desc, b_rest_desc, a_tiles, b_tiles, b_rest_tiles, scales, full_bars, empty_bars,
                    tiles_ptr, a_scale_ptr, b_scale_ptr, M, N, order, num_items, k_tiles, split, parts,
                    a_batches, b_batches, BLOCK_M, BLOCK_N, REST_N, BLOCK_K, A_COLUMN_MAJOR, B_COLUMN_MAJOR, TERMS,
                    A_PLANES, B_PLANES, BLOCKS, GROUPS, PDL,
                )),
            ],
            [4, 4, 1],
            [160, 160, 24],
        )
    # fmt: on


@gluon.jit
def parts_of_c(c_desc, unused, BY_TMA: gl.constexpr, LOADED: gl.constexpr, C_BUFFERS: gl.constexpr):
    """The buffers through which a warpgroup stores C, and what tells that C's own values are there; `unused` where it
    needs none."""
    buffers = unused
    loaded = unused
    if BY_TMA:
        buffers = gl.allocate_shared_memory(c_desc.dtype, [C_BUFFERS] + c_desc.block_shape, c_desc.layout)
        if LOADED:
            loaded = gl.allocate_shared_memory(gl.int64, [C_BUFFERS, 1], mbarrier.MBarrierLayout())
            for buffer in gl.static_range(C_BUFFERS):
                mbarrier.init(loaded.index(buffer), count=1)
    return buffers, loaded
