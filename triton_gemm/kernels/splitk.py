"""Sums that several programs share, and which of the programs adds them up, in one launch. The order is always the
same, so that the same bits come out of every run. Partial sums are of the sums' own dtype.

Where a grid may be larger than the machine, no program may wait for one that starts later. Each stores its part and
arrives at its tile's counter. The last to arrive adds all parts, from the lowest k to the highest, whichever part came
last. Where tiles are so many that a tile's programs run one after the other anyway, each adds to what those before it
left, and waits for its turn. In a persistent grid the program with a tile's first k-tiles waits for the others, and
keeps its own part in registers (stream-K, Osama et al., PPoPP 2023).
"""

import triton
import triton.language as tl

MAX_COUNTERS = 16_384  # int32 at the start of a stream's workspace


@triton.jit
def last_to_arrive(counter_ptr, arrivals):
    """Whether this program is the last of `arrivals` to come here; then all others' stores before are visible to it.

    The counter is 0 before the first and after the last.
    """
    tl.debug_barrier()  # all of the program's stores come before its one arrival
    last = tl.atomic_add(counter_ptr, 1, sem="acq_rel", scope="gpu") == arrivals - 1
    if last:
        tl.store(counter_ptr, 0)
    return last


@triton.jit
def arrive(counter_ptr):
    """Counts this program: a program that waits for it sees what all of its threads stored before."""
    tl.debug_barrier()
    tl.atomic_add(counter_ptr, 1, sem="release", scope="gpu")


@triton.jit
def wait_for(counter_ptr, arrivals):
    """Waits until `arrivals` programs have arrived, and sets the counter back to 0; only one program may wait."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < arrivals:
        pass
    tl.store(counter_ptr, 0)


@triton.jit
def wait_turn(counter_ptr, turn, last):
    """Waits until `turn` programs have arrived; the last sets the counter back to 0."""
    while tl.atomic_add(counter_ptr, 0, sem="acquire", scope="gpu") < turn:
        pass
    if last:
        tl.store(counter_ptr, 0)
