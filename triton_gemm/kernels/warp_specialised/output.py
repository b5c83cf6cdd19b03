"""From accumulators to C: a tile leaves in epilogue tiles of EPI_N columns, through a few buffers and by TMA where TMA
can store C, else by pointers."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from ...compat import tma_load, tma_store
from ..epilogue import after_activation, before_activation, biased, gated, scaled, scaled_once
from ..tiles import whole
from .arguments import Staging
from .prefetch import prefetch_tile
from .ring import matrix


@gluon.jit
def allocate_staging(output, unused, CONSUMER: gl.constexpr, config):
    """A consumer's Staging; `unused` where it needs none."""
    buffers = unused
    loaded = unused
    rest = unused
    if config.C_TMA and config.CONSUMERS > CONSUMER:
        desc = output.desc
        buffers = gl.allocate_shared_memory(desc.dtype, [config.C_BUFFERS] + desc.block_shape, desc.layout)
        if config.REST_N:
            TILES: gl.constexpr = config.BLOCK_N % config.EPI_N // config.REST_N
            rest = gl.allocate_shared_memory(
                desc.dtype, [TILES] + output.rest_desc.block_shape, output.rest_desc.layout
            )
        if config.HAS_BETA:
            loaded = gl.allocate_shared_memory(gl.int64, [config.C_BUFFERS, 1], mbarrier.MBarrierLayout())
            for buffer in gl.static_range(config.C_BUFFERS):
                mbarrier.init(loaded.index(buffer), count=1)
    return Staging(buffers, rest, loaded)


@gluon.jit
def prefetch_c(output, batch, m, n, config):
    """Prefetches a consumer's rows of the tile at (m, n) of C."""
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    MAIN_N: gl.constexpr = config.MAIN_N
    prefetch_tile(output.ptr, output.desc, batch, m, n, ROWS, MAIN_N, config.C_COLUMN_MAJOR)
    if config.TAIL_N:
        prefetch_tile(output.ptr, output.desc, batch, m, n + MAIN_N, ROWS, config.TAIL_N, config.C_COLUMN_MAJOR)


@gluon.jit
def load_first_c(output, staging, count, batch, m, n, config):
    """Starts to load as many epilogue tiles of the tile at (m, n) of C as there are buffers."""
    tma.store_wait(0)
    for p in gl.static_range(min(staging.buffers.shape[0], config.BLOCK_N // config.EPI_N)):
        load_c(output, staging, count + p, batch, m, n + p * config.EPI_N, config)


@gluon.jit
def load_c(output, staging, count, batch, m, n, config):
    """Starts to load the epilogue tile at (m, n) of C, this consumer's number `count`, into its buffer; what was stored
    from there must have been read."""
    buffer = count % staging.buffers.shape[0]
    mbarrier.expect(staging.loaded.index(buffer), output.desc.block_type.nbytes)
    corner = [batch, n, m] if config.C_COLUMN_MAJOR else [batch, m, n]
    tma_load(output.desc, corner, staging.loaded.index(buffer), staging.buffers.index(buffer))


@gluon.jit
def load_bias(output, m, n, rows_end, COLUMNS: gl.constexpr, BIAS: gl.constexpr, config):
    """A tuple of the bias of each epilogue tile of the COLUMNS at (m, n); of something else where BIAS is ""."""
    layout: gl.constexpr = epilogue_layout(config.EPI_N)
    if COLUMNS > config.EPI_N:
        half: gl.constexpr = COLUMNS // 2
        left = load_bias(output, m, n, rows_end, half, BIAS, config)
        return left + (load_bias(output, m, n + half, rows_end, half, BIAS, config) if BIAS == "n" else left)
    elif BIAS == "m":
        offs_m = m + gl.arange(0, config.BLOCK_M // config.CONSUMERS, gl.SliceLayout(1, layout))
        return (gl.load(output.bias_ptr + offs_m, mask=offs_m < rows_end, other=0.0)[:, None],)
    elif BIAS == "n":
        offs_n = n + gl.arange(0, config.EPI_N, gl.SliceLayout(0, layout))
        return (gl.load(output.bias_ptr + offs_n, mask=offs_n < output.N, other=0.0)[None, :],)
    else:
        return (n,)


@gluon.jit
def store_tile(acc, bias, output, staging, count, batch, m, n, rows_end, FIRST: gl.constexpr, config):
    """Stores acc at (m, n) of C in epilogue tiles, of which the first is this consumer's number `count`, and number
    FIRST of its tile. bias: of `load_bias`, used where EARLY_BIAS."""
    EPI_N: gl.constexpr = config.EPI_N
    layout: gl.constexpr = epilogue_layout(EPI_N)
    tiles = split_columns(acc, EPI_N)
    if config.ACTIVATION != "" and len(tiles) == 4:
        # An activation is long: written out four times, for each consumer, it would not fit the instruction cache.
        first, second, third, fourth = tiles
        first_bias, second_bias, third_bias, fourth_bias = bias
        for p in range(4):
            sums = gl.convert_layout(first, layout)
            store_epilogue_tile(
                sums, first_bias, output, staging, count + p, FIRST + p, batch, m, n + p * EPI_N, rows_end, config
            )
            first, second, third, fourth = second, third, fourth, first
            if config.EARLY_BIAS == "n":
                first_bias, second_bias, third_bias, fourth_bias = second_bias, third_bias, fourth_bias, first_bias
    else:
        for p in gl.static_range(len(tiles)):
            sums = gl.convert_layout(tiles[p], layout)
            store_epilogue_tile(
                sums, bias[p], output, staging, count + p, FIRST + p, batch, m, n + p * EPI_N, rows_end, config
            )


@gluon.jit
def store_gated_tile(up, gate, output, staging, count, batch, m, n, rows_end, config):
    """As `store_tile`, of a tile whose gate has sums of its own."""
    EPI_N: gl.constexpr = config.EPI_N
    layout: gl.constexpr = epilogue_layout(EPI_N)
    ups = split_columns(up, EPI_N)
    gates = split_columns(gate, EPI_N)
    for p in gl.static_range(len(ups)):
        sums = gl.convert_layout(ups[p], layout)
        of_gate = gl.convert_layout(gates[p], layout)
        bias = None
        gate_bias = None
        if config.BIAS == "n":
            offs_n = n + p * EPI_N + gl.arange(0, EPI_N, gl.SliceLayout(0, layout))
            bias = gl.load(output.bias_ptr + offs_n, mask=offs_n < output.N, other=0.0)[None, :]
            gate_bias = gl.load(output.gate_bias_ptr + offs_n, mask=offs_n < output.N, other=0.0)[None, :]
        sums = biased(sums, bias, config.BIAS != "")
        of_gate = biased(of_gate, gate_bias, config.BIAS != "")
        if output.preactivation is not None:
            number = config.STORES * (count + p)
            store_beside(
                sums, output.ungated, output, staging.buffers, number, batch, m, n + p * EPI_N, rows_end, config
            )
            store_beside(
                of_gate, output.preactivation, output, staging.buffers, number + 1, batch, m, n + p * EPI_N, rows_end,
                config,
            )  # fmt: skip
        sums = gated(sums, of_gate, config.ACTIVATION)
        store_epilogue_tile(sums, n, output, staging, count + p, p, batch, m, n + p * EPI_N, rows_end, config)


@gluon.jit
def store_part_of_tile(acc, COLUMNS: gl.constexpr, output, staging, count, batch, m, n, rows_end, config):
    """As `store_tile`, of the first COLUMNS of acc, of which the last leave in narrow epilogue tiles of REST_N."""
    EPI_N: gl.constexpr = config.EPI_N
    REST_N: gl.constexpr = config.REST_N
    WIDE: gl.constexpr = COLUMNS // EPI_N
    for p in gl.static_range(WIDE):
        sums = gl.convert_layout(columns_from(acc, p * EPI_N, EPI_N), epilogue_layout(EPI_N))
        store_epilogue_tile(sums, n, output, staging, count + p, p, batch, m, n + p * EPI_N, rows_end, config)
    STORES: gl.constexpr = config.STORES
    if STORES == 1:
        tma.store_wait(config.BLOCK_N // EPI_N)  # what was stored before this tile has been read
    for p in gl.static_range((COLUMNS - WIDE * EPI_N) // REST_N):
        begin = WIDE * EPI_N + p * REST_N
        sums = gl.convert_layout(columns_from(acc, begin, REST_N), epilogue_layout(REST_N))
        beside = output.preactivation_rest
        out = epilogue_tile(
            sums, n, None, beside, output, staging.rest, STORES * p, batch, m, n + begin, rows_end, config
        )
        if STORES == 1:
            store_by_tma(out, output.rest_desc, staging.rest.index(p), batch, m, n + begin, config)
        else:
            store_in_turn(out, output.rest_desc, staging.rest, STORES * p + 1, batch, m, n + begin, config)


@gluon.jit
def columns_from(x, BEGIN: gl.constexpr, COLUMNS: gl.constexpr):
    """COLUMNS of x [rows, columns] from BEGIN on, a power of two and a multiple of it."""
    if x.shape[1] == COLUMNS:
        return x
    else:
        left, right = halves(x)
        half: gl.constexpr = x.shape[1] // 2
        if BEGIN < half:
            return columns_from(left, BEGIN, COLUMNS)
        else:
            return columns_from(right, BEGIN - half, COLUMNS)


@constexpr_function
def epilogue_layout(columns):
    """How a consumer's threads hold an epilogue tile of so many columns: as `wgmma` left its sums."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, columns, 16])


@gluon.jit
def split_columns(x, EPI_N: gl.constexpr):
    """x [rows, columns] as a tuple of [rows, EPI_N], whose number is a power of two."""
    if x.shape[1] == EPI_N:
        return (x,)
    else:
        left, right = halves(x)
        return split_columns(left, EPI_N) + split_columns(right, EPI_N)


@gluon.jit
def halves(x):
    """The left and the right half of x's columns, without moving data between threads."""
    rows: gl.constexpr = x.shape[0]
    columns: gl.constexpr = x.shape[1]
    return x.reshape((rows, 2, columns // 2)).permute((0, 2, 1)).split()


@gluon.jit
def store_epilogue_tile(sums, bias, output, staging, count, p, batch, m, n, rows_end, config):
    """The epilogue of sums [rows, EPI_N] at (m, n) of C, number p of its tile's. A TMA store runs on, under what comes
    after. Where TMA loads C's own values, the epilogue tile that is as many further on as there are buffers, less one,
    is then loaded into the buffer of the one before."""
    C_COLUMN_MAJOR: gl.constexpr = config.C_COLUMN_MAJOR
    HAS_BETA: gl.constexpr = config.HAS_BETA
    if not config.C_TMA:
        sums = gl.convert_layout(sums, coalesced_layout(sums.shape[0], sums.shape[1], C_COLUMN_MAJOR))
    layout: gl.constexpr = sums.type.layout
    c = None
    number = config.STORES * count
    if config.C_TMA:
        BUFFERS: gl.constexpr = staging.buffers.shape[0]
        buffer = staging.buffers.index((number + (config.STORES - 1)) % BUFFERS)
        if HAS_BETA:
            mbarrier.wait(staging.loaded.index(count % BUFFERS), count // BUFFERS & 1)
            c = matrix(buffer, C_COLUMN_MAJOR).load(layout)
    else:
        c_ptrs, mask = pointers_like_c(output.ptr, sums, output, batch, m, n, rows_end)
        if HAS_BETA:
            c = gl.load(c_ptrs, mask=mask, other=0.0)
    out = epilogue_tile(
        sums, bias, c, output.preactivation, output, staging.buffers, number, batch, m, n, rows_end, config
    )
    if config.C_TMA:
        if not HAS_BETA:
            tma.store_wait(BUFFERS - 1)  # stores from the other buffers may still read
        store_by_tma(out, output.desc, buffer, batch, m, n, config)
        EPI_TILES: gl.constexpr = config.BLOCK_N // config.EPI_N
        if HAS_BETA and EPI_TILES > BUFFERS:
            if (p > 0) & (p - 1 + BUFFERS < EPI_TILES):
                tma.store_wait(1)
                load_c(output, staging, count + BUFFERS - 1, batch, m, n + (BUFFERS - 1) * config.EPI_N, config)
    else:
        gl.store(c_ptrs, out, mask=mask)


@gluon.jit
def epilogue_tile(sums, bias, c, beside, output, buffers, number, batch, m, n, rows_end, config):
    """What is stored at (m, n) of C, where its own values are c, and the bias, if it came early, `bias`. With a gate it
    is the sums, which have been through the epilogue. Without one stores what the activation is applied to, as
    `store_beside`, unless `beside` is None."""
    if config.GATE:
        return sums.to(output.ptr.dtype.element_ty)
    else:
        return ungated_tile(sums, bias, c, beside, output, buffers, number, batch, m, n, rows_end, config)


@gluon.jit
def ungated_tile(sums, bias, c, beside, output, buffers, number, batch, m, n, rows_end, config):
    """`epilogue_tile` without a gate."""
    BIAS: gl.constexpr = config.BIAS
    layout: gl.constexpr = sums.type.layout
    offs_m = m + gl.arange(0, sums.shape[0], gl.SliceLayout(1, layout))
    offs_n = n + gl.arange(0, sums.shape[1], gl.SliceLayout(0, layout))
    if BIAS == "m" and config.EARLY_BIAS == "":
        bias = gl.load(output.bias_ptr + offs_m, mask=offs_m < rows_end, other=0.0)[:, None]
    if BIAS == "n" and config.EARLY_BIAS == "":
        bias = gl.load(output.bias_ptr + offs_n, mask=offs_n < output.N, other=0.0)[None, :]
    alpha = output.alpha
    ONLY_SCALED: gl.constexpr = config.SCALES == "rows" and BIAS == "" and config.HAS_BETA != 1
    if config.SCALES == "rows":
        a_scale = gl.load(output.a_scale_ptr + offs_m, mask=offs_m < rows_end, other=0.0)[:, None]
        b_scale = gl.load(output.b_scale_ptr + offs_n, mask=offs_n < output.N, other=0.0)[None, :]
        # Nothing is added to the product: alpha is multiplied into the scales of columns, not into each element.
        sums = scaled(sums, a_scale, alpha * b_scale if ONLY_SCALED else b_scale)
    if config.SCALES == "tensor":
        sums, power = scaled_once(sums, gl.load(output.a_scale_ptr), gl.load(output.b_scale_ptr))
        alpha *= power
    if not ONLY_SCALED:
        sums = before_activation(sums, alpha, output.beta, c, bias, config.HAS_BETA, BIAS != "")
    if beside is not None:
        store_beside(sums, beside, output, buffers, number, batch, m, n, rows_end, config)
    sums = after_activation(sums, output.beta, c, config.HAS_BETA, config.ACTIVATION)
    return sums.to(output.ptr.dtype.element_ty)


@gluon.jit
def store_beside(x, beside, output, buffers, number, batch, m, n, rows_end, config):
    """Stores x at (m, n), rounded as C is, in the matrices `beside`, which have C's strides: by TMA as
    `store_in_turn` where STORES is 2 or more, else by pointers."""
    x = x.to(output.ptr.dtype.element_ty)
    if config.STORES > 1:
        store_in_turn(x, beside, buffers, number, batch, m, n, config)
    elif config.C_TMA:
        store_from_sums(x, beside, output, batch, m, n, rows_end, config)
    else:
        pointers, mask = pointers_like_c(beside, x, output, batch, m, n, rows_end)
        gl.store(pointers, x, mask=mask)


@gluon.jit
def pointers_like_c(ptr, x, output, batch, m, n, rows_end):
    """(pointers, mask) of x at (m, n) of the matrices at ptr, which have C's strides. C's pointers and those of what is
    stored beside it are alike: so the compiler computes offsets and mask once, and both fit a thread's registers."""
    layout: gl.constexpr = x.type.layout
    offs_m = m + gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))
    offs_n = n + gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))
    pointers = (
        ptr
        + batch.to(gl.int64) * output.stride_b
        + offs_m[:, None].to(gl.int64) * output.stride_m
        + offs_n[None, :].to(gl.int64) * output.stride_n
    )
    return pointers, (offs_m < rows_end)[:, None] & (offs_n < output.N)[None, :]


@gluon.jit
def store_from_sums(x, ptr, output, batch, m, n, rows_end, config):
    """Stores x at (m, n) of the matrices at ptr, from the registers that hold x. As TMA can store C, its rows are
    aligned to pairs of elements, which a thread stores at once. One base address has all but the offsets within the
    tile, so columns differ by constants, which take no registers."""
    VECTOR: gl.constexpr = 1 if config.C_COLUMN_MAJOR else 2
    layout: gl.constexpr = x.type.layout
    rows = gl.arange(0, x.shape[0], gl.SliceLayout(1, layout))[:, None]
    columns = gl.arange(0, x.shape[1], gl.SliceLayout(0, layout))[None, :]
    stride_m = whole(output.stride_m, VECTOR)
    ptr += batch.to(gl.int64) * whole(output.stride_b, VECTOR)
    ptr += m.to(gl.int64) * stride_m + whole(n, VECTOR).to(gl.int64) * output.stride_n
    pointers = ptr + rows.to(gl.int64) * stride_m + columns.to(gl.int64) * output.stride_n
    mask = (rows < rows_end - m) & (columns < whole(output.N - n, VECTOR))
    gl.store(pointers, x, mask=mask)


@gluon.jit
def store_in_turn(out, desc, buffers, number, batch, m, n, config):
    """As `store_by_tma`, where it is this consumer's store of that number through these buffers, which take turns."""
    BUFFERS: gl.constexpr = buffers.shape[0]
    tma.store_wait(BUFFERS - 1)  # all but those from the other buffers have been read
    store_by_tma(out, desc, buffers.index(number % BUFFERS), batch, m, n, config)


@gluon.jit
def store_by_tma(out, desc, buffer, batch, m, n, config):
    """Starts to store an epilogue tile at (m, n) of C, through a buffer from which nothing is stored any more."""
    matrix(buffer, config.C_COLUMN_MAJOR).store(out)
    fence_async_shared()
    tma_store(desc, [batch, n, m] if config.C_COLUMN_MAJOR else [batch, m, n], buffer)


@constexpr_function
def coalesced_layout(rows, columns, column_major):
    """How a consumer's threads hold an epilogue tile that goes to C by pointers: a warp's threads are neighbours along
    C's unit stride; of an accumulator's row only four are."""
    side = min(32, rows if column_major else columns)
    threads = [side, 32 // side] if column_major else [32 // side, side]
    warps = [1, 4] if column_major else [4, 1]
    return gl.BlockedLayout([1, 1], threads, warps, [0, 1] if column_major else [1, 0])
