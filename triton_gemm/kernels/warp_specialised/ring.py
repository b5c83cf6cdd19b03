"""The ring of loaded k-tiles in shared memory, which the producer fills and the consumers empty."""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from .arguments import Ring
from .cluster import arrivals, blocks_of_b

WARP = gl.constexpr(32)


@gluon.jit
def allocate_ring(inputs, config):
    """A ring of NUM_STAGES slots, all empty."""
    STAGES: gl.constexpr = config.NUM_STAGES
    a_desc = inputs.a_desc
    b_desc = inputs.b_desc
    a = gl.allocate_shared_memory(a_desc.dtype, [STAGES * config.CONSUMERS] + a_desc.block_shape, a_desc.layout)
    B_SLOT: gl.constexpr = blocks_of_b(config.WIDE_MMA, config.BLOCK_N)
    b = gl.allocate_shared_memory(b_desc.dtype, [STAGES * B_SLOT] + b_desc.block_shape, b_desc.layout)
    b_tail = b
    if config.TAIL_N and not config.WIDE_MMA:
        tail_desc = inputs.b_tail_desc
        b_tail = gl.allocate_shared_memory(tail_desc.dtype, [STAGES] + tail_desc.block_shape, tail_desc.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    SCALED: gl.constexpr = config.SCALES == "blocks"
    a_scales = a
    b_scales = b
    if SCALED:
        flat: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [0])
        a_scales = gl.allocate_shared_memory(gl.float32, [STAGES, config.BLOCK_M], flat)
        b_scales = gl.allocate_shared_memory(gl.float32, [STAGES, WARP], flat)
    for slot in gl.static_range(STAGES):
        mbarrier.init(full.index(slot), count=1 + WARP if SCALED else 1)  # scales arrive by each thread's copies
        mbarrier.init(empty.index(slot), count=arrivals(config.CONSUMERS, config.CLUSTER_M, config.CLUSTER_N))
    return Ring(a, b, b_tail, a_scales, b_scales, full, empty)


@gluon.jit
def next_slot(slot, phase, config):
    """The ring's next slot; the phase flips when the ring has gone round."""
    slot += 1
    wrapped = slot == config.NUM_STAGES
    return gl.where(wrapped, 0, slot), phase ^ wrapped.to(gl.int32)


@gluon.jit
def previous_slot(slot, config):
    # Not a variable `previous = slot`: Triton takes one for unchanged in a loop before which it was slot, too.
    return gl.where(slot == 0, config.NUM_STAGES - 1, slot - 1)


@gluon.jit
def matrix(tile, COLUMN_MAJOR: gl.constexpr):
    """A tile in shared memory [1, rows, columns] as a matrix, a column-major one as its transpose."""
    flat = tile.reshape((tile.shape[1], tile.shape[2]))
    return flat.permute((1, 0)) if COLUMN_MAJOR else flat


@constexpr_function
def instruction_k(dtype):
    """Elements along K of one `wgmma`: 32 bytes."""
    return 8 if dtype == gl.float32 else 16 if dtype == gl.float16 or dtype == gl.bfloat16 else 32
