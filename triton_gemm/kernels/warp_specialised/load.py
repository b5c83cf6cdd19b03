"""The producer: one warp that fills the ring by TMA."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.ampere import async_copy
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.language.extra.cuda.gdc import gdc_wait

from ...compat import async_load
from .cluster import blocks_of_b, join_cluster, load, loaded_rows
from .ring import WARP, next_slot
from .work import item_of, number_of_items

# Numbers of the operands' tensor maps among the kernel's.
A_DESC = gl.constexpr(0)
B_DESC = gl.constexpr(1)
B_TAIL_DESC = gl.constexpr(2)


@gluon.jit
def load_partition(config, inputs, ring, work):
    """Fills every slot of the ring that has been emptied, in the order in which the consumers read them."""
    join_cluster(config)
    if config.PDL:
        gdc_wait()
    a_desc = inputs.a_desc
    b_desc = inputs.b_desc
    tail_desc = inputs.b_tail_desc
    ROWS: gl.constexpr = config.BLOCK_M // config.CONSUMERS
    B_SLOT: gl.constexpr = blocks_of_b(config.WIDE_MMA, config.BLOCK_N)
    TAIL: gl.constexpr = config.TAIL_N if not config.WIDE_MMA else 0
    MAIN: gl.constexpr = config.BLOCK_N if config.WIDE_MMA else config.MAIN_N
    a_rows: gl.constexpr = config.CONSUMERS * loaded_rows(config.A_COPIED or ROWS, config.CLUSTER_N)
    b_rows: gl.constexpr = loaded_rows(config.B_COPIED or MAIN, config.CLUSTER_M)
    k_bytes: gl.constexpr = a_desc.block_type.nbytes // ROWS
    tail_bytes: gl.constexpr = tail_desc.block_type.nbytes if TAIL else 0
    slot = 0
    phase = 1  # the first round finds every slot empty
    for index in range(gl.program_id(0), number_of_items(work, config), gl.num_programs(0)):
        item = item_of(work, index, inputs.M, config)
        for step in range(item.k_begin * config.TERMS, item.k_end * config.TERMS):
            k = step // config.TERMS * config.BLOCK_K
            batch_a = item.batch * inputs.a_batches
            batch_b = item.batch * inputs.b_batches
            if config.TERMS > 1:
                term = step % config.TERMS
                batch_a += gl.to_tensor(config.A_PLANES) >> 2 * term & 3
                batch_b += gl.to_tensor(config.B_PLANES) >> 2 * term & 3
            full = ring.full.index(slot)
            mbarrier.wait(ring.empty.index(slot), phase)
            mbarrier.expect(full, (a_rows + b_rows) * k_bytes + tail_bytes)
            for w in gl.static_range(config.CONSUMERS):
                row = item.m + w * ROWS
                a_tile = ring.a.index(slot * config.CONSUMERS + w)
                load(a_desc, A_DESC, batch_a, row, k, full, a_tile, True, not config.A_COLUMN_MAJOR, config)
            b_tile = ring.b.index(slot * B_SLOT)
            load(b_desc, B_DESC, batch_b, item.n, k, full, b_tile, False, config.B_COLUMN_MAJOR, config)
            if TAIL:
                tail = item.n if config.GATE else item.n + config.MAIN_N
                b_tail = ring.b_tail.index(slot)
                load(tail_desc, B_TAIL_DESC, batch_b, tail, k, full, b_tail, False, config.B_COLUMN_MAJOR, config)
            if config.SCALES == "blocks":
                load_scales(ring, slot, inputs, step, work.k_tiles, item.m, item.n)
                async_copy.mbarrier_arrive(full, increment_count=False)
            slot, phase = next_slot(slot, phase, config)
    if config.CLUSTER_M * config.CLUSTER_N > 1:
        wait_for_peers(ring, slot, phase, config)


@gluon.jit
def wait_for_peers(ring, slot, phase, config):
    """The producer's end in a cluster: waits until every slot is empty, from the one it would fill next on. So no peer
    arrives at barriers of a CTA that has ended."""
    for _ in range(config.NUM_STAGES):
        mbarrier.wait(ring.empty.index(slot), phase)
        slot, phase = next_slot(slot, phase, config)


@gluon.jit
def load_scales(ring, slot, inputs, kt, k_tiles, m, n):
    """Starts to copy k-tile kt's scales into a slot: A's from row m on; B's for the block of 128 columns that holds n
    and for the next. In memory A's are [k-tiles, M], B's [N / 128 rounded up, k-tiles]."""
    layout: gl.constexpr = gl.BlockedLayout([1], [WARP], [1], [0])
    rows = m + gl.arange(0, ring.a_scales.shape[1], layout)
    async_load(ring.a_scales.index(slot), inputs.a_scale_ptr + kt.to(gl.int64) * inputs.M + rows, mask=rows < inputs.M)
    blocks = n // 128 + gl.arange(0, WARP, layout)
    wanted = (blocks < n // 128 + 2) & (blocks < (inputs.N + 127) // 128)
    async_load(ring.b_scales.index(slot), inputs.b_scale_ptr + blocks.to(gl.int64) * k_tiles + kt, mask=wanted)
