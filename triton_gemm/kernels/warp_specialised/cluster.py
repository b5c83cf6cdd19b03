"""Thread-block clusters: programs that run at the same time, on neighbouring tiles, and share what they load, by TMA
multicast.

Each CTA of a cluster is a program with a tile of its own, and all that the kernel does is the same with and without
clusters but for what is here. CTA number i + CLUSTER_M * j, its rank, has the i-th tile along M and the j-th along N of
the cluster's. CTAs of equal i share A, those of equal j share B; a CTA's peers are all of those, itself included. Of
what is shared each CTA loads a slice, into the shared memory of all that share it. So each asks L2 for as much as every
other, and takes in more than its own port from L2 gives.

A slot is full when all of its bytes have come, whichever CTA loaded them. It is empty when all peers' consumers have
read theirs, into which this CTA loads as well. So each consumer arrives at the empty barriers of all peers. Bytes may
come before a CTA says how many it expects: the phase of its barrier cannot end before.

Nothing waits for ever. All CTAs of a cluster run at the same time, and go through the same steps. Let all loads of the
steps before step t be issued, by all CTAs. Then their slots become full, and consumers free the slot of step
t - NUM_STAGES. (They do so after the products of the step after it are begun, which is before t, with two stages or
more.) So every producer issues its loads of step t. Otherwise partitions wait for what their own CTA began, and for
partial sums of clusters that have started before (`schedule`). A CTA ends when nothing comes to its memory any more.
Its consumers have then seen all its slots full, and its producer, in the end, all of them empty
(`load.wait_for_peers`).

This is PTX, of which Triton knows nothing. In Triton's own clusters (`num_ctas`) a tensor is the whole cluster's, and
one CTA loads for all others. A barrier of all warps precedes each arrival, and a fence of the whole GPU's memory the
end.
"""

from __future__ import annotations

from triton import constexpr_function
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from ...compat import tensor_map_parameter, tma_load

KERNEL = "warp_specialised_kernel"
MAX_CTAS = 8  # of a cluster, on every GPU that has them
CONSUMER_WARPS = 4


@constexpr_function
def slices(outer, group):
    """Into how many slices a tile is cut that a `group` of CTAs share, each of `slice_rows`."""
    return -(-outer // slice_rows(outer, group))


@constexpr_function
def slice_rows(outer, group):
    """Of a tile with `outer` rows in shared memory: whole groups of 8, as TMA swizzles them. The last slice ends with
    the tile, and so may begin within the one before, of whose rows it loads some again."""
    return -(-outer // (8 * group)) * 8


@constexpr_function
def blocks_of_b(wide_mma, block_n):
    """How many blocks of its tensor map a tile of B is: with WIDE_MMA of 8 columns each."""
    return block_n // 8 if wide_mma else 1


@constexpr_function
def loaded_rows(copied, group):
    """How many rows come of a tile of which so many are copied, with those that two slices have."""
    return slices(copied, group) * slice_rows(copied, group)


@gluon.jit
def rank(config):
    """The number of this CTA in its cluster."""
    return gl.program_id(0) % (config.CLUSTER_M * config.CLUSTER_N)


@gluon.jit
def publish_barriers(config):
    """Makes this CTA's barriers ready for others, once they have joined it."""
    if config.CLUSTER_M * config.CLUSTER_N > 1:
        gl.inline_asm("fence.mbarrier_init.release.cluster;")


@gluon.jit
def join_cluster(config):
    """Waits until all of the cluster's CTAs have started and made their barriers. All partitions do so, as the barrier
    of a cluster is of all of its threads."""
    if config.CLUSTER_M * config.CLUSTER_N > 1:
        gl.inline_asm("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;")


@constexpr_function
def arrivals(consumers, cluster_m, cluster_n):
    """How many arrive at an empty barrier: each consumer, or in a cluster each warp of peers' consumers."""
    if cluster_m * cluster_n == 1:
        return consumers
    return consumers * CONSUMER_WARPS * (cluster_m + cluster_n - 1)


@gluon.jit
def free_slot(ring, slot, pred, config):
    """This consumer has read a slot: as far as it goes, the slot may be filled again."""
    if config.CLUSTER_M * config.CLUSTER_N == 1:
        mbarrier.arrive(ring.empty.index(slot), pred=pred)
    else:
        asm: gl.constexpr = arrive_asm(config.CLUSTER_M, config.CLUSTER_N)
        gl.inline_asm(asm, "r,r", [ring.empty.index(slot), gl.to_tensor(pred).to(gl.int32)])


@constexpr_function
def arrive_asm(cluster_m, cluster_n):
    """Lane l of each warp arrives at the barrier of peer number l: first those that share A, then others that share B.
    So no warp waits for the others, which may still read."""
    return f"""{{
.reg .pred chosen, beyond;
.reg .b32 lane, rank, i, first, other, peer, barrier;
mov.u32 lane, %laneid;
mov.u32 rank, %cluster_ctarank;
and.b32 i, rank, {cluster_m - 1};
sub.s32 first, rank, i;
mad.lo.s32 peer, lane, {cluster_m}, i;
sub.s32 other, lane, {cluster_n};
setp.ge.s32 beyond, other, i;
@beyond add.s32 other, other, 1;
setp.ge.s32 beyond, lane, {cluster_n};
@beyond add.s32 peer, first, other;
setp.ne.b32 chosen, $1, 0;
setp.lt.and.s32 chosen, lane, {cluster_m + cluster_n - 1}, chosen;
@chosen mapa.shared::cluster.u32 barrier, $0, peer;
@chosen mbarrier.arrive.shared::cluster.b64 _, [barrier];
}}"""


@gluon.jit
def load(desc, NUMBER: gl.constexpr, batch, column, k, full, tile, OF_A: gl.constexpr, K_MAJOR: gl.constexpr, config):
    """Starts to load the tile of an operand at `column`, a row of A or a column of B, and k. Of a tile that others load
    as well this CTA loads its slice, for all of them. Of a tile that extends past the matrix it loads only the first
    A_COPIED or B_COPIED rows. NUMBER: of the operand's tensor map among the kernel's."""
    corner = [batch, column, k] if K_MAJOR else [batch, k, column]
    GROUP: gl.constexpr = config.CLUSTER_N if OF_A else config.CLUSTER_M
    WIDE: gl.constexpr = config.WIDE_MMA and not OF_A
    OUTER: gl.constexpr = config.BLOCK_N if WIDE else desc.block_shape[1]
    COPIED: gl.constexpr = (config.A_COPIED if OF_A else config.B_COPIED) or OUTER
    if GROUP == 1 and COPIED == OUTER and not WIDE:
        tma_load(desc, corner, full, tile)
    else:
        asm: gl.constexpr = copy_asm(
            NUMBER, OUTER, COPIED, desc.block_shape, desc.block_type.nbytes, OF_A, config.CLUSTER_M, config.CLUSTER_N
        )
        gl.inline_asm(asm, "r,r,r,r,r", [tile, full, corner[2], corner[1], batch])


@constexpr_function
def copy_asm(number, outer, copied, block, nbytes, of_a, cluster_m, cluster_n):
    """One lane loads this CTA's slice of the first `copied` rows of a tile that has `outer` rows in shared memory. It
    loads panels of 128 bytes, to which TMA's swizzle is limited. (Triton gives the addresses of tiles and barriers in a
    cluster's first CTA.)"""
    _, rows, inner = block
    itemsize = nbytes // (rows * inner)
    group = cluster_n if of_a else cluster_m
    pieces, size, panel = slices(copied, group), slice_rows(copied, group), min(inner, 128 // itemsize)
    if of_a:  # number j of those of equal i
        mine, mask = "j", f"shl.b32 mask, {sum(1 << cluster_m * j for j in range(cluster_n))}, i;"
    else:
        mine, mask = "i", f"sub.s32 first, rank, i; shl.b32 mask, {(1 << cluster_m) - 1}, first;"
    copy = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
    multicast, peers = (".multicast::cluster", ", peers") if cluster_m * cluster_n > 1 else ("", "")
    loads = [f"@chosen {copy}{multicast} [into], [map, {{x, y, $4}}], [full]{peers};"] * (inner // panel)
    step = f"add.s32 x, x, {panel}; add.s32 into, into, {outer * panel * itemsize};"
    return f"""{{
.reg .pred chosen, elected;
.reg .b16 peers;
.reg .b32 rank, i, j, first, mask, begin, into, full, x, y;
.reg .b64 map;
mov.b64 map, {tensor_map_parameter(KERNEL, number, len(block))};
cvta.param.u64 map, map;
mov.u32 rank, %cluster_ctarank;
and.b32 i, rank, {cluster_m - 1};
shr.u32 j, rank, {cluster_m.bit_length() - 1};
{mask}
cvt.u16.u32 peers, mask;
mapa.shared::cluster.u32 into, $0, rank;
mapa.shared::cluster.u32 full, $1, rank;
mul.lo.s32 begin, {mine}, {size};
min.s32 begin, begin, {copied - size};
mad.lo.s32 into, begin, {panel * itemsize}, into;
mov.b32 x, $2;
add.s32 y, begin, $3;
elect.sync _|elected, -1;
setp.lt.and.s32 chosen, {mine}, {pieces}, elected;
{(chr(10) + step + chr(10)).join(loads)}
}}"""


@gluon.jit
def idle_partition(config):
    """Warps that only fill up the CTA's last warpgroup: the cluster's barrier is of all warps."""
    join_cluster(config)
