"""A consumer: one warpgroup that multiplies its rows of every tile by `wgmma`, and hands the sums to the epilogue."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda.gdc import gdc_wait

from .cluster import free_slot, join_cluster
from .output import load_bias, load_first_c, prefetch_c, store_gated_tile, store_part_of_tile, store_tile
from .ring import instruction_k, matrix, next_slot, previous_slot
from .split_sums import share_sums
from .wide import start_wide_products
from .work import item_of, number_of_items


@gluon.jit
def mma_partition(config, ring, work, output, staging, CONSUMER: gl.constexpr):
    """A consumer warpgroup: for each work item of this program, multiplies rows CONSUMER * ROWS to
    (CONSUMER + 1) * ROWS of its tile from the ring's slots, frees these, and runs the epilogue. With SPLIT_K the owner
    of a tile adds the other programs' partial sums and stores C; the others only write theirs. `arguments` explains
    the parameters."""
    join_cluster(config)
    if config.PDL:
        gdc_wait()
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    MAIN_N: gl.constexpr = config.MAIN_N
    EPI_TILES: gl.constexpr = config.BLOCK_N // config.EPI_N  # wide ones
    LOADS_C: gl.constexpr = config.HAS_BETA and config.C_TMA
    EARLY_BIAS: gl.constexpr = "" if config.PROMOTE or config.IN_TURN else config.EARLY_BIAS
    slot = 0
    phase = 0
    count = 0  # of epilogue tiles
    for index in range(gl.program_id(0), number_of_items(work, config), gl.num_programs(0)):
        # Locate the tile
        item = item_of(work, index, output.M, config)
        batch = item.batch
        if config.REDUCTION:
            batch += item.part * (work.split_tiles // work.per_batch)
        m = item.m + CONSUMER * ROWS
        n = item.n
        rows_end = item.rows_end
        owned = True
        if config.SPLIT_K:
            owned = item.part == 0
        if LOADS_C:
            if owned:
                prefetch_c(output, batch, m, n, config)

        # Main loop
        if config.IN_TURN:
            acc, tail, slot, phase = multiply_in_turn(ring, item.k_end, work.split_k, slot, phase, n, CONSUMER, config)
        elif config.PROMOTE:
            acc, tail, slot, phase = multiply_with_promotion(
                ring, item.k_begin, item.k_end, slot, phase, n, CONSUMER, config
            )
        else:
            acc, tail, slot, phase = multiply(ring, item.k_begin, item.k_end, slot, phase, CONSUMER, config)
        # What the epilogue reads comes under the last products: a bias where registers are left for it.
        if LOADS_C:
            if owned:
                load_first_c(output, staging, count, batch, m, n, config)
        bias = load_bias(output, m, n, rows_end, MAIN_N, EARLY_BIAS, config)
        tail_bias = load_bias(output, m, n + MAIN_N, rows_end, config.TAIL_N, EARLY_BIAS, config)
        if not (config.PROMOTE or config.IN_TURN):
            acc, tail = finish_products(ring, acc, tail, slot, item.k_end > item.k_begin, config)

        # Epilogue
        if config.SPLIT_K:
            acc, tail = share_sums(acc, tail, output, work, index, item, owned, CONSUMER, config)
        if config.GATE:
            store_gated_tile(acc, tail, output, staging, count, batch, m, n, rows_end, config)
            count += EPI_TILES
        elif owned:
            store_tile(acc, bias, output, staging, count, batch, m, n, rows_end, 0, config)
            FIRST: gl.constexpr = MAIN_N // config.EPI_N
            if config.REST_N:
                store_part_of_tile(
                    tail,
                    config.BLOCK_N - MAIN_N,
                    output,
                    staging,
                    count + FIRST,
                    batch,
                    m,
                    n + MAIN_N,
                    rows_end,
                    config,
                )
            elif config.TAIL_N:
                store_tile(
                    tail, tail_bias, output, staging, count + FIRST, batch, m, n + MAIN_N, rows_end, FIRST, config
                )
            count += EPI_TILES
    if config.C_TMA:
        tma.store_wait(0)


@gluon.jit
def multiply(ring, k_begin, k_end, slot, phase, CONSUMER: gl.constexpr, config):
    """(acc, tail, slot, phase): sums over k-tiles from k_begin to k_end, from `slot` on, and the slot after them. The
    last one's products may be under way, as `steps_in_flight` says."""
    IN_FLIGHT: gl.constexpr = steps_in_flight(ring.a.dtype, config.A_COLUMN_MAJOR)
    acc, tail = accumulators(ring, config)
    for kt in range(k_begin, k_end):
        acc, tail = start_products(ring, acc, tail, slot, phase, CONSUMER, config)
        acc, tail = wait_for_products(acc, tail, IN_FLIGHT, config)
        if IN_FLIGHT:
            # The step before this one is done, so its slot may be filled again.
            free_slot(ring, previous_slot(slot, config), kt > k_begin, config)
        else:
            free_slot(ring, slot, True, config)
        slot, phase = next_slot(slot, phase, config)
    return acc, tail, slot, phase


@gluon.jit
def finish_products(ring, acc, tail, slot, some, config):
    """(acc, tail) once what `multiply` left under way is done, and its last slot is free; some: whether it had any."""
    if steps_in_flight(ring.a.dtype, config.A_COLUMN_MAJOR):
        acc, tail = wait_for_products(acc, tail, 0, config)
        free_slot(ring, previous_slot(slot, config), some, config)
    return acc, tail


@gluon.jit
def multiply_in_turn(ring, k_tiles, parts, slot, phase, n, CONSUMER: gl.constexpr, config):
    """As `multiply` of all k-tiles, but nothing is under way in the end, and K is in parts, cut as by `work_item`. Each
    part is summed from zero, and added in fp32, from the lowest k on. So do an owner (`split_sums`) and a second launch
    (`reduction`) add them, and all three give the same bits."""
    acc, tail = accumulators(ring, config)
    units = (k_tiles + config.UNIT - 1) // config.UNIT
    for part in range(parts):
        begin = part * units // parts * config.UNIT
        end = (part + 1) * units // parts * config.UNIT
        if config.UNIT > 1:
            end = gl.minimum(end, k_tiles)
        if config.PROMOTE:
            more, more_tail, slot, phase = multiply_with_promotion(ring, begin, end, slot, phase, n, CONSUMER, config)
        else:
            more, more_tail, slot, phase = multiply(ring, begin, end, slot, phase, CONSUMER, config)
            more, more_tail = finish_products(ring, more, more_tail, slot, end > begin, config)
        acc += more
        if config.TAIL_N:
            tail += more_tail
    return acc, tail, slot, phase


@gluon.jit
def multiply_with_promotion(ring, k_begin, k_end, slot, phase, n, CONSUMER: gl.constexpr, config):
    """As `multiply`, but nothing is under way in the end, and sums are promoted: those of each k-tile, or of each piece
    of a deep one, are added in fp32. With SCALES == "blocks" they are multiplied by a scale for each row of A and one
    for each 128 columns of B.

    Tensor cores cut off what they add to a sum below its last bit (of fp8 below its 14th). So they sum one piece's
    products, of all planes the smallest first, and these sums are rounded to nearest. Each element is summed in the
    same order in every tile.
    """
    if config.WAVES > 1:
        return multiply_in_waves(ring, k_begin, k_end, slot, phase, n, CONSUMER, config)
    elif config.PIECES > 1:
        return multiply_in_pieces(ring, k_begin, k_end, slot, phase, CONSUMER, config)
    else:
        return multiply_whole(ring, k_begin, k_end, slot, phase, n, CONSUMER, config)


@gluon.jit
def multiply_whole(ring, k_begin, k_end, slot, phase, n, CONSUMER: gl.constexpr, config):
    """`multiply_with_promotion` of a k-tile's products at once. The sums of the main part are added while the tail's
    products run. (Across the loop's end ptxas would take such products one by one: C7514.)"""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    acc, tail = accumulators(ring, config)
    for _ in range(k_begin, k_end):
        if config.TERMS == 1:
            more, more_tail = accumulators(ring, config)
            more, more_tail = start_products(ring, more, more_tail, slot, phase, CONSUMER, config)
            slot, phase = next_slot(slot, phase, config)
        else:
            more, more_tail, slot, phase = multiply(ring, 0, config.TERMS, slot, phase, CONSUMER, config)
        used = previous_slot(slot, config)
        factors = (n, n, n)
        if config.SCALES == "blocks":
            factors = load_factors(ring, used, CONSUMER * ROWS, acc)
        if config.TAIL_N:
            more, more_tail = warpgroup_mma_wait(1, deps=(more, more_tail))
            acc = promote(acc, more, n, factors, False, config)
            more_tail = warpgroup_mma_wait(0, deps=(more_tail,))
            free_slot(ring, used, True, config)
            tail = promote(tail, more_tail, n, factors, True, config)
        else:
            more = warpgroup_mma_wait(0, deps=(more,))
            free_slot(ring, used, True, config)
            acc = promote(acc, more, n, factors, False, config)
    return acc, tail, slot, phase


@gluon.jit
def multiply_in_waves(ring, k_begin, k_end, slot, phase, n, CONSUMER: gl.constexpr, config):
    """`multiply_with_promotion` of tiles with more sums. The products of a k-tile run in two waves, each of one half of
    the consumer's rows or columns, and both waves' accumulators have room in half as many registers. While one consumer
    promotes a wave, the other one has the tensor cores."""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    BY_ROWS: gl.constexpr = ROWS > 64
    M: gl.constexpr = ROWS // 2 if BY_ROWS else ROWS
    N: gl.constexpr = config.MAIN_N if BY_ROWS else config.MAIN_N // 2
    first = zeros(M, N, ring.a.dtype)
    second = first
    for _ in range(k_begin, k_end):
        mbarrier.wait(ring.full.index(slot), phase)
        a = matrix(ring.a.index(slot * config.CONSUMERS + CONSUMER), config.A_COLUMN_MAJOR)
        b = matrix(ring.b.index(slot), config.B_COLUMN_MAJOR)
        factors = (n, n, n)

        if config.SCALES == "blocks":
            factors = load_factors(ring, slot, CONSUMER * ROWS, first)
        more = start_wave(a, b, first, 0, BY_ROWS)
        more = warpgroup_mma_wait(0, deps=(more,))
        first = promote(first, more, n, factors, False, config)

        if config.SCALES == "blocks":
            # The second wave begins once the first is promoted: else ptxas gives both waves registers of their own, and
            # spills. So the sums are tied to an instruction, and what waits for the tiles begins another block of code.
            first = warpgroup_mma_wait(0, deps=(first,))
            mbarrier.wait(ring.full.index(slot), phase)
            factors = load_factors(ring, slot, CONSUMER * ROWS, first)
        more = start_wave(a, b, second, 1, BY_ROWS)
        more = warpgroup_mma_wait(0, deps=(more,))
        free_slot(ring, slot, True, config)
        second = promote(second, more, n, factors, not BY_ROWS, config)
        slot, phase = next_slot(slot, phase, config)
    layout: gl.constexpr = zeros(ROWS, config.MAIN_N, ring.a.dtype).type.layout
    acc = joined(first, second, 0 if BY_ROWS else 1, layout)
    return acc, acc, slot, phase


@gluon.jit
def multiply_in_pieces(ring, k_begin, k_end, slot, phase, CONSUMER: gl.constexpr, config):
    """`multiply_with_promotion` of k-tiles that are two pieces deep, each of which is promoted. The first one's sums
    are added while the second one's products run."""
    acc, tail = accumulators(ring, config)
    for _ in range(k_begin, k_end):
        mbarrier.wait(ring.full.index(slot), phase)
        a = matrix(ring.a.index(slot * config.CONSUMERS + CONSUMER), config.A_COLUMN_MAJOR)
        b = matrix(ring.b.index(slot), config.B_COLUMN_MAJOR)
        first = start_piece(a, b, acc, 0)
        second = start_piece(a, b, acc, 1)
        first, second = warpgroup_mma_wait(1, deps=(first, second))
        acc += first
        second = warpgroup_mma_wait(0, deps=(second,))
        free_slot(ring, slot, True, config)
        acc += second
        slot, phase = next_slot(slot, phase, config)
    return acc, tail, slot, phase


@gluon.jit
def start_piece(a, b, sums, PIECE: gl.constexpr):
    """The products of one half of a k-tile along K, under way."""
    K: gl.constexpr = a.shape[1] // 2
    zero = zeros(sums.shape[0], sums.shape[1], a.dtype)
    return warpgroup_mma(a.slice(PIECE * K, K, 1), b.slice(PIECE * K, K, 0), zero, is_async=True)


@gluon.jit
def start_wave(a, b, sums, WAVE: gl.constexpr, BY_ROWS: gl.constexpr):
    """The products of a k-tile's operands for a wave's sums, under way: of one half of a's rows, or of b's columns."""
    M: gl.constexpr = sums.shape[0]
    N: gl.constexpr = sums.shape[1]
    if BY_ROWS:
        a = a.slice(WAVE * M, M, 0)
    else:
        b = b.slice(WAVE * N, N, 1)
    return warpgroup_mma(a, b, zeros(M, N, a.dtype), is_async=True)


@gluon.jit
def joined(first, second, DIM: gl.constexpr, layout: gl.constexpr):
    """Two halves of sums along DIM as one tensor, without moving data between threads."""
    rows: gl.constexpr = first.shape[0]
    columns: gl.constexpr = first.shape[1]
    both = gl.join(first, second)
    if DIM == 0:
        both = both.permute((2, 0, 1)).reshape((2 * rows, columns))
    else:
        both = both.permute((0, 2, 1)).reshape((rows, 2 * columns))
    return gl.convert_layout(both, layout, assert_trivial=True)


@gluon.jit
def start_products(ring, acc, tail, slot, phase, CONSUMER: gl.constexpr, config):
    """(acc, tail) with the products of the slot's tiles, under way once the tiles have come."""
    mbarrier.wait(ring.full.index(slot), phase)
    layout: gl.constexpr = acc.type.layout
    a_tile = ring.a.index(slot * config.CONSUMERS + CONSUMER)
    if config.WIDE_MMA:
        return start_wide_products(ring, a_tile, acc, tail, slot, config)
    else:
        a = left_operand(a_tile, config.A_COLUMN_MAJOR, layout)
        acc = warpgroup_mma(a, matrix(ring.b.index(slot), config.B_COLUMN_MAJOR), acc, is_async=True)
        if config.TAIL_N:
            tail = warpgroup_mma(a, matrix(ring.b_tail.index(slot), config.B_COLUMN_MAJOR), tail, is_async=True)
        return acc, tail


@gluon.jit
def wait_for_products(acc, tail, STEPS: gl.constexpr, config):
    """(acc, tail) once the products of all but the last STEPS steps are done."""
    GROUPS: gl.constexpr = 1 if config.WIDE_MMA else 2  # of products in a step
    if config.TAIL_N:
        acc, tail = warpgroup_mma_wait(GROUPS * STEPS, deps=(acc, tail))
    else:
        acc = warpgroup_mma_wait(STEPS, deps=(acc,))
    return acc, tail


@gluon.jit
def accumulators(ring, config):
    """(acc, tail): zeros for a consumer's rows of the main part of a tile and of its tail; acc again without a tail."""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    acc = zeros(ROWS, config.MAIN_N, ring.a.dtype)
    tail = acc
    if config.TAIL_N:
        tail = zeros(ROWS, config.TAIL_N, ring.a.dtype)
    return acc, tail


@gluon.jit
def zeros(ROWS: gl.constexpr, COLUMNS: gl.constexpr, dtype: gl.constexpr):
    """Zeros [ROWS, COLUMNS] as one warpgroup's `wgmma` of operands of that dtype wants them."""
    layout: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS, instruction_k(dtype)]
    )
    return gl.zeros((ROWS, COLUMNS), gl.int32 if dtype == gl.int8 else gl.float32, layout)


@gluon.jit
def left_operand(tile, COLUMN_MAJOR: gl.constexpr, acc_layout: gl.constexpr):
    """A's tile for `wgmma`."""
    if through_registers(tile.dtype, COLUMN_MAJOR):
        return matrix(tile, COLUMN_MAJOR).load(gl.DotOperandLayout(0, acc_layout, 1))
    else:
        return matrix(tile, COLUMN_MAJOR)


@constexpr_function
def through_registers(dtype, column_major):
    """Whether `wgmma` gets A from registers: from shared memory it reads only 16-bit operands in both orders, all
    others K-major."""
    return column_major and dtype == gl.float32


@constexpr_function
def steps_in_flight(dtype, a_column_major):
    """Steps whose products run on into the next: none where A goes through registers, which the next step fills."""
    return 0 if through_registers(dtype, a_column_major) else 1


@gluon.jit
def load_factors(ring, slot, row, acc):
    """A slot's scales: A's [rows] of acc's rows, the first of which is `row`, and B's two [1]."""
    of_rows = ring.a_scales.index(slot).slice(row, acc.shape[0]).load(gl.SliceLayout(1, acc.type.layout))
    left = ring.b_scales.index(slot).slice(0, 1).load(gl.SliceLayout(0, acc.type.layout))
    right = ring.b_scales.index(slot).slice(1, 1).load(gl.SliceLayout(0, acc.type.layout))
    return of_rows, left, right


@gluon.jit
def promote(acc, more, n, factors, TAIL: gl.constexpr, config):
    """acc + more, a k-tile's sums, times their scales. The tile's columns begin at n, a multiple of 64; its TAIL at
    n + 128, and is 64 wide."""
    if config.SCALES != "blocks":
        return acc + more
    else:
        of_rows, left, right = factors
        layout: gl.constexpr = acc.type.layout
        of_rows = gl.convert_layout(of_rows, gl.SliceLayout(1, layout))
        if TAIL:
            of_columns = gl.convert_layout(right, gl.SliceLayout(0, layout))[None, :]
        else:
            # Only two halves are told apart, so that a thread needs two registers for all its columns.
            columns = gl.arange(0, acc.shape[1], gl.SliceLayout(0, layout))
            of_columns = gl.where(columns < 64, left, gl.where(n % 128 == 0, left, right))[None, :]
        return acc + more * (of_rows[:, None] * of_columns)
