"""The ring: one warp loads k-tiles while others multiply, and barriers pass slots between them (k11).

The load warp fills a slot when `empty` has turned, the mma warps multiply it when `full` has. A barrier turns once for
each use of its slot. Its phase is a bit: 0 at the start, 1 after the first turn, 0 after the second. `wait(barrier, p)`
waits while the phase is p. So at the start `wait(barrier, 1)` passes at once, and `wait(barrier, 0)` waits for the
first turn.

Checked: C of 64 x 64 x 512 with 3 slots, and of other K with other numbers; no slot is filled that is not multiplied
yet, or multiplied before it is filled; no role waits for ever. The roles are simulated, one going on as far as it may
before the other does. `run` needs a Hopper.
"""

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait

from triton_gemm.compat import tma_load
from triton_gemm.ladder.exercises import ring


@gluon.jit
def phases(step, SLOTS: gl.constexpr):
    """What the load of k-tile `step` waits for at `empty`, and its product at `full`."""
    # FILL IN: 0 or 1, by how often the slot was used before.
    turn = step // SLOTS % 2
    return turn ^ 1, turn
    # BEFORE:
    # return 0, 0
    # END


@gluon.jit
def load(a_desc, b_desc, a_slots, b_slots, full, empty, K, BLOCK: gl.constexpr, SLOTS: gl.constexpr):
    for step in range(K // BLOCK):
        slot = step % SLOTS
        mbarrier.wait(empty.index(slot), phases(step, SLOTS)[0])
        mbarrier.expect(full.index(slot), a_desc.block_type.nbytes + b_desc.block_type.nbytes)
        tma_load(a_desc, [0, step * BLOCK], full.index(slot), a_slots.index(slot))
        tma_load(b_desc, [step * BLOCK, 0], full.index(slot), b_slots.index(slot))


@gluon.jit
def multiply(a_slots, b_slots, acc, full, empty, K, BLOCK: gl.constexpr, SLOTS: gl.constexpr):
    for step in range(K // BLOCK):
        slot = step % SLOTS
        mbarrier.wait(full.index(slot), phases(step, SLOTS)[1])
        acc = warpgroup_mma(a_slots.index(slot), b_slots.index(slot), acc, is_async=True)
        acc = warpgroup_mma_wait(0, deps=(acc,))
        mbarrier.arrive(empty.index(slot))
    return acc


def run(a, b, c):
    """c [64, 64] = a [64, K] @ b [K, 64] in fp16 with sums in fp32, K a multiple of 64."""
    ring.launch(load, multiply, a, b, c)


HINTS = (
    "Who fills the first round of slots must not wait, although `empty` has not turned yet.",
    "k-tile `step` is use number step // SLOTS of its slot, from 0. When it is there, `full` has turned once more than "
    "that; when the slot is free for it, `empty` has turned as often as that.",
    "A product waits for phase step // SLOTS % 2, and a load for the other one.",
)
