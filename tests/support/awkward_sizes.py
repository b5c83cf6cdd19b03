"""Sizes (M, N, K) that products are tried on, by the name of what is awkward about them.

M != N != K wherever a size is free: a square hides swapped strides.
"""

Size = tuple[int, int, int]

# The interpreter's and the GPU's. Cheap: its cost grows with the number of tiles.
SMALL: dict[str, Size] = {
    "ragged": (127, 65, 33),  # no size is a multiple of anything a kernel tiles by
    "ragged-many-tiles": (200, 270, 150),  # several tiles each way, the last of each partial; K tail of 22
    "aligned": (128, 256, 64),  # whole tiles: masks are all true
    "k-tail-of-one": (70, 90, 129),  # the last k-tile holds one column
    "k-below-block": (40, 72, 5),  # the first k-tile is already the tail
    "k-one": (33, 66, 1),  # an outer product
    "k-zero": (37, 20, 0),  # an empty sum: C = beta C
    "one-row": (1, 140, 70),  # a row's stride means nothing
    "one-column": (140, 1, 70),  # a column's stride means nothing
    "one": (1, 1, 1),
    "turned": (5, 1030, 33),  # enough columns to turn A for
    "tall": (530, 3, 40),  # one partial tile across, a low last band of the grouped order
    "wide": (3, 530, 40),
}

# For kernels that compute strips of 256 rows one by one, in the interpreter: few results, every edge.
STRIPS: dict[str, Size] = {
    "ragged": (300, 3, 7),
    "exact-strip": (256, 2, 4),
    "k-one": (33, 4, 1),
    "k-zero": (37, 4, 0),
    "one-row": (1, 9, 6),
    "one-column": (9, 1, 6),
    "one": (1, 1, 1),
}

# For a GPU besides: more tiles than multiprocessors, long sums, and the default tiles of every rung.
LARGE: dict[str, Size] = {
    "more-tiles-than-sms": (2050, 1930, 200),  # persistent programs go round more than once
    "long-sum": (130, 258, 8200),  # the ring of k-tiles wraps round many times
    "odd-everything": (1021, 509, 767),  # rows start on no boundary: no wide loads
    "aligned-large": (1024, 768, 512),
}

# Where an output has no elements there is nothing to launch.
EMPTY: dict[str, Size] = {"no-rows": (0, 5, 7), "no-columns": (5, 0, 7), "nothing": (0, 0, 0)}
