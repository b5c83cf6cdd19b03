"""What the kernel's functions pass on to one another, each group of arguments as one aggregate."""

from __future__ import annotations

from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import tma

from ...compat import aggregate


@aggregate
class Config:
    """Constants: the tile, the layouts, and what the kernel does.

    A tile is BLOCK_M x BLOCK_N. Its sums are in two tensors. The main part has MAIN_N columns, a power of two. The tail
    has TAIL_N, the power of two that holds the rest of BLOCK_N, or 0. C leaves in epilogue tiles of EPI_N columns
    through C_BUFFERS buffers, and what is left of its width in narrow ones of REST_N. STORES: how many matrices TMA
    stores of each, C and what is stored beside it, or 1 where pointers store the latter.
    WIDE_MMA: one `wgmma`, in PTX, has the whole width, any multiple of 8; else main part and tail have one each, and
    BLOCK_N is their sum.
    TERMS, A_PLANES, B_PLANES: operands that are sums of planes have TERMS products for each k-tile. A_PLANES and
    B_PLANES say of which planes, two bits a term, the first in the lowest.
    PROMOTE: whether the sums of a k-tile leave the tensor core's accumulators to be added in fp32. WAVES: in how many
    parts of the tile one after another. PIECES: of a k-tile, in how many parts along K.
    SPLIT_K: whether owners of tiles add other programs' sums to their own (`split_sums`). REDUCTION: whether each part
    of K has its own matrices of C instead, which a second launch adds up (`reduction`). IN_TURN: whether a program sums
    all parts of its tile, one after another. UNIT: k-tiles of which parts are multiples.
    EARLY_BIAS: BIAS where the bias is loaded before the last products are done, else "".
    A_COPIED, B_COPIED: the number of rows of A's tile, and of columns of B's, that are copied where the matrix has
    fewer, or 0 for all. TMA takes twice as long to fill a row with zeros as to load one, and uninitialised rows affect
    only rows and columns of C that are not stored.
    CLUSTER_M, CLUSTER_N: CTAs of a cluster along M and along N (`cluster`).
    GATE: whether C is activation(A gate) (A B), of a second B. The tail is the gate's part of the tile, as wide as the
    main part, and BLOCK_N is the width of one.
    """

    CONSUMERS: gl.constexpr
    NUM_STAGES: gl.constexpr
    BLOCK_M: gl.constexpr
    BLOCK_N: gl.constexpr
    MAIN_N: gl.constexpr
    TAIL_N: gl.constexpr
    BLOCK_K: gl.constexpr
    EPI_N: gl.constexpr
    REST_N: gl.constexpr
    C_BUFFERS: gl.constexpr
    STORES: gl.constexpr
    A_COLUMN_MAJOR: gl.constexpr
    B_COLUMN_MAJOR: gl.constexpr
    C_COLUMN_MAJOR: gl.constexpr
    C_TMA: gl.constexpr
    HAS_BETA: gl.constexpr
    BIAS: gl.constexpr
    EARLY_BIAS: gl.constexpr
    ACTIVATION: gl.constexpr
    SCALES: gl.constexpr
    GROUPED: gl.constexpr
    SPLIT_K: gl.constexpr
    REDUCTION: gl.constexpr
    IN_TURN: gl.constexpr
    UNIT: gl.constexpr
    TERMS: gl.constexpr
    A_PLANES: gl.constexpr
    B_PLANES: gl.constexpr
    PROMOTE: gl.constexpr
    WAVES: gl.constexpr
    PIECES: gl.constexpr
    WIDE_MMA: gl.constexpr
    A_COPIED: gl.constexpr
    B_COPIED: gl.constexpr
    CLUSTER_M: gl.constexpr
    CLUSTER_N: gl.constexpr
    GATE: gl.constexpr
    PDL: gl.constexpr


@aggregate
class Inputs:
    """The operands. b_tail_desc: for the tail of a tile; a_batches, b_batches: matrices (planes included) from one
    product of a batch to the next."""

    a_desc: tma.tensor_descriptor
    b_desc: tma.tensor_descriptor
    b_tail_desc: tma.tensor_descriptor
    a_ptr: gl.tensor
    b_ptr: gl.tensor
    a_scale_ptr: gl.tensor
    b_scale_ptr: gl.tensor
    M: gl.tensor
    N: gl.tensor
    a_batches: gl.tensor
    b_batches: gl.tensor


@aggregate
class Ring:
    """The ring of k-tiles in shared memory, and the barriers that say of each slot whether it is full or empty.

    a: one tile for each consumer and slot; b, b_tail: one for each slot, with WIDE_MMA in blocks of 8 columns;
    a_scales, b_scales: where operands have scales of blocks. Partitions take no None, so what is not used is something
    else.
    """

    a: gl.shared_memory_descriptor
    b: gl.shared_memory_descriptor
    b_tail: gl.shared_memory_descriptor
    a_scales: gl.shared_memory_descriptor
    b_scales: gl.shared_memory_descriptor
    full: gl.shared_memory_descriptor
    empty: gl.shared_memory_descriptor


@aggregate
class Work:
    """Which tiles there are, and in which order programs take them (`schedule`). In clusters all figures but num_items
    are those of clusters and their tiles. last_m, last_n: where a program's tile begins at the latest. tiles_ptr: the
    list of a grouped product's tiles (`groups`)."""

    num_items: gl.tensor
    k_tiles: gl.tensor
    split_tiles: gl.tensor
    split_k: gl.tensor
    num_m: gl.tensor
    group_m: gl.tensor
    per_group: gl.tensor
    per_batch: gl.tensor
    last_m: gl.tensor
    last_n: gl.tensor
    tiles_ptr: gl.tensor


@aggregate
class Item:
    """One item of work: a tile, or a range of its k-tiles. Part 0 of a tile's parts owns it; rows_end: where the rows
    of its group end, or of C."""

    tile_id: gl.tensor
    part: gl.tensor
    k_begin: gl.tensor
    k_end: gl.tensor
    batch: gl.tensor
    m: gl.tensor
    n: gl.tensor
    rows_end: gl.tensor


@aggregate
class Output:
    """C, of which rest_desc stores narrow epilogue tiles, what the epilogue reads, and where programs that share a tile
    leave partial sums. A stride of 1 is a constant, so that the compiler sees it, as is None for matrices that are not
    stored. preactivation: what the activation is applied to. ungated: with a gate the other product. These two are
    descriptors, with preactivation_rest for narrow epilogue tiles, or where STORES is 1 pointers."""

    desc: tma.tensor_descriptor
    rest_desc: tma.tensor_descriptor
    ptr: gl.tensor
    bias_ptr: gl.tensor
    a_scale_ptr: gl.tensor
    b_scale_ptr: gl.tensor
    M: gl.tensor
    N: gl.tensor
    stride_b: gl.tensor
    stride_m: gl.tensor | gl.constexpr
    stride_n: gl.tensor | gl.constexpr
    alpha: gl.tensor
    beta: gl.tensor
    workspace_ptr: gl.tensor
    counters_ptr: gl.tensor
    gate_bias_ptr: gl.tensor
    preactivation: tma.tensor_descriptor | gl.tensor | gl.constexpr
    preactivation_rest: tma.tensor_descriptor | gl.constexpr
    ungated: tma.tensor_descriptor | gl.tensor | gl.constexpr


@aggregate
class Staging:
    """One consumer's buffers between registers and C, those of narrow epilogue tiles, and the barriers that say whether
    C's own values are in them. Each is something else where C does not go by TMA, has no such tiles, or is not read."""

    buffers: gl.shared_memory_descriptor
    rest: gl.shared_memory_descriptor
    loaded: gl.shared_memory_descriptor
