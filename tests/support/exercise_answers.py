"""Answers to the ladder's exercises: wrong ones with what is said of them, and right ones that are not the solution."""

from __future__ import annotations

import triton

from triton_gemm.ladder.exercises import EXERCISES

COMPARES_CHAINS = triton.__version__ >= "3.9"  # each element by `x < y < z`; and adds to sums in fp16, if given such

BY_NAME = {exercise.name: exercise for exercise in EXERCISES}

# What is wrong with the hole as the learner gets it.
UNFILLED = {
    "e01_coalesce": "32 sectors in one load of a",
    "e02_mask": "reads a[0, 45], and a has 37 rows and 45 columns, counted from 0. Mask off rows from",
    "e03_tile": "4 FLOP are done for each byte that is read; 16 are asked. Reads of each element of A: 4, of B: 4.",
    "e04_group": "of A: 1, of B: 16; in groups of 4 rows they are 4 and 4. All waves read 170 strips, where 84",
    "e05_beta": "C is read with beta = 0: 6 loads",
    "e06_pipeline": "when k-tile 0 is multiplied, k-tile 1 of a and b was not asked for yet",
    "e07_tf32": "1.00073242 becomes 1, and should become 1.00097656",
    "e08_accumulate": "63 times 0.5 is 2048, and should be 2080",
    "e09_split_k": "k = 0 is summed by 3 of the 3 parts",
    "e10_persistent": "tile (1, 2) of C, counted from 0, is never computed; each is to be computed once. There are 12 "
    "tiles and 5 programs: some compute 3.",
    "e11_tma": "coordinates count elements, not tiles",
    "e12_swizzle": "take 8 wavefronts",
    "e13_ring": "deadlock: load waits while the phase of `empty` of slot 0 is 0, and it has turned 0 times",
}

IF = ("rounded = tl.where(x == x, rounded, 0x7FFFE000)", "if x == x:\n        rounded = bits")

# Mistakes: what a solution has, what stands there instead, and what is said of it.
MISTAKES = [
    (
        *("e08_accumulate", BY_NAME["e08_accumulate"].solution),  # outer products
        "    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)\n    for k in range(0, K):\n"
        "        a = tl.load(a_ptr + rows * stride_a + k).to(tl.float32)\n"
        "        acc += a * tl.load(b_ptr + k * stride_b + columns).to(tl.float32)\n",
        "no `tl.dot` multiplies a and b",
    ),
    # Advice is given where it fits alone.
    (
        "e01_coalesce",
        "tl.zeros_like(lanes)",
        "tl.zeros((BLOCK,), tl.float32)",
        "an offset is a whole number, and one is fp32.",
    ),
    (
        "e02_mask",
        "tl.load(pointers, mask=inside, other=0.0)",
        "tl.load(ptr + tl.arange(0, 16)[:, None] * stride + tl.arange(0, 16)[None, :])",
        "a[0, 16] is never read.",
    ),
    (
        "e04_group",
        "group * GROUP_M + within % rows",
        "within % rows",
        "is computed 3 times, by programs 0, 64, 128; each",
    ),
    (
        "e04_group",
        "    rows = tl",
        "    rows = rows + tl",
        ": no line before sets it.",
    ),
    (
        "e11_tma",
        "acc = tl.dot(a, b, acc",
        'acc = tl.dot(a, b, acc, input_precision="ieee")\n        acc = tl.dot(a, b, acc',
        "is multiplied 2 times: it is loaded once, and its product must not be added again.",
    ),
    (
        *("e05_beta", "beta * tl.load(c_ptrs).to(tl.float32)"),
        *("(beta * tl.load(c_ptrs).to(tl.float32)).to(tl.float16)", "so that it is rounded once, when it is stored."),
    ),
    (
        *("e02_mask", "(rows[:, None] < height) & (columns[None, :] < width)"),
        *("(rows[:, None] < width) & (columns[None, :] < height)", "has the matrix's height and width exchanged."),
    ),
    (
        *("e02_mask", BY_NAME["e02_mask"].solution),
        "    rows, columns = tl.minimum(rows, height - 1), tl.minimum(columns, width - 1)\n"
        "    return tl.load(ptr + rows[:, None] * stride + columns[None, :])\n",
        "reads 16 elements of a more than once: lanes beyond K must be 0, and have other elements.",
    ),
    ("e07_tf32", "(bits + 0x1000) & 0xFFFFE000", "(x * 1.0).to(tl.uint32, bitcast=True)", "last 13 bits"),
    ("e13_ring", "return turn ^ 1", "return (step - SLOTS) // SLOTS & 1", "`//` and `%` round toward 0"),
    ("e05_beta", "tl.load(c_ptrs)", "c_ptrs", "cannot cast: an address is no value. `tl.load` reads"),
    (
        "e07_tf32",
        "x == x, rounded, 0x7FFFE000",
        "x == x, bits | 0x400000, rounded",
        "1.50024414, and should become 1 (bits 0x3F800800, 0x3FC00800 and 0x3F800000): it comes back with bit 0x400000",
    ),
    (
        "e07_tf32",
        "x == x, rounded, 0x7FFFE000",
        "bits > 0x7F800000, 0x7FC00000, rounded",
        "-1.00097656 (bits 0xBF801000, 0x7FC00000 and 0xBF802000): a number becomes NaN. `tl.where",
    ),
    ("e08_accumulate", "b, acc)", "b, acc, out_dtype=tl.float16)", "which is `out_dtype`, fp32 unless it is given."),
    ("e08_accumulate", "b, acc)", "b, acc, input_precision='fp32')", "Got fp32"),
    (
        "e08_accumulate",
        "range(0, K, BLOCK)",
        "range(0, BLOCK, BLOCK)",
        "K-tile 1, counted from 0, is multiplied 0 times: it is never",
    ),
    (
        "e08_accumulate",
        "dot(a, b",
        "dot(a, tl.trans(b)",
        "Each is a sum of tiles of a times one of b that is transposed.",
    ),
    ("e08_accumulate", "range(0, K, BLOCK)", "range(0, K)", "A k-tile begins at a multiple of BLOCK."),
    (
        "e08_accumulate",
        "range(0, K, BLOCK)",
        "range(0, K // BLOCK)",
        "A k-tile of a is loaded from k = 1 on: k-tiles begin at multiples of BLOCK = 16.",
    ),
    ("e08_accumulate", "acc = tl.dot(a, b, acc)", "acc += a @ b", "in a kernel it is `tl.dot`."),
    ("e08_accumulate", "dtype=tl.float32)", "dtype=float)", "a dtype is Triton's, as `tl.float32`."),
    (
        "e11_tma",
        "a_desc.load([pid_m * BLOCK, k])",
        "tl.load(a_desc, [pid_m * BLOCK, k])",
        "a descriptor's own method loads",
    ),
    # Right for some sizes alone, and for others of what the page allows not.
    (
        "e11_tma",
        "range(0, K, BLOCK)",
        "range(0, K + 8, BLOCK)",
        "C of 16 x 16 x 32 is right, but program (0, 0) multiplies 3",
    ),
    ("e11_tma", "range(0, K, BLOCK)", "range(0, (K + 8) // BLOCK * BLOCK, BLOCK)", "of 16 x 16 x 52: "),
    (
        *("e09_split_k", BY_NAME["e09_split_k"].solution),
        "    size = (K // SPLIT_K + 15) // 16 * 16\n    first = part * size\n    last = tl.minimum(first + size, K)\n",
        "but of 16 x 32 x 50: k = 48 is summed by no part",
    ),
    (
        "e09_split_k",
        "tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)",
        "K // (BLOCK * SPLIT_K) + 1",
        "C of 16 x 32 x 48 is right, but a part has 2 of the 3 k-tiles",
    ),
    (
        "e09_split_k",
        "tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)",
        "tl.cdiv(K, BLOCK) / SPLIT_K",
        "`/` makes fractions: `//` rounds",
    ),
    (
        "e04_group",
        "tl.minimum(num_m - group * GROUP_M, GROUP_M)",
        "tl.where(group == tl.cdiv(num_m, GROUP_M) - 1, num_m % GROUP_M, GROUP_M)",
        "but of 128 x 64 x 16: ",
    ),
    (
        *("e01_coalesce", "pid // strips + tl.zeros_like(lanes)"),
        "pid % (tl.num_programs(0) // strips) + tl.zeros_like(lanes)",
        "but of 16 x 64 x 4: ",
    ),
    ("e01_coalesce", "pid % strips * BLOCK + lanes", "(pid % strips * BLOCK + lanes + 1) % N", "amid a sector"),
    ("e05_beta", "if HAS_BETA:", "if beta < 0:", "with alpha = -1.25 and beta = 0.5 c[0, 0] is"),
    ("e05_beta", "out = alpha", "out = tl.abs(alpha)", "with alpha = -1.25 and beta = 0.5 c[0, 0] is"),
    (
        *("e08_accumulate", "range(0, K, BLOCK)", "range(0, K - K % (4 * BLOCK), BLOCK)"),
        "K-tile 4, counted from 0, is multiplied 0 times: it is never loaded.",
    ),
    (
        "e08_accumulate",
        "acc = tl.dot(a, b, acc)",
        "acc = tl.dot(a, b)",
        "C is the last k-tile's product alone",
    ),
    (
        *("e07_tf32", "rounded = tl.where(x"),
        "rounded = tl.where(((bits & 0x7F800000) == 0) & (bits >= 0x80000000), bits & 0xFFFFE000, rounded)\n"
        "    rounded = tl.where(x",
        "it is subnormal, at a tie",
    ),
    (
        *("e10_persistent", BY_NAME["e10_persistent"].solution),
        "    for i in range((tiles + 3) // tl.num_programs(0)):\n"
        "        tile = i * tl.num_programs(0) + tl.program_id(0)\n        if tile < tiles:\n"
        "            compute_tile(tile, a_ptr, b_ptr, c_ptr, N, K, stride_a, stride_b, stride_c, BLOCK)\n",
        "but of 176 x 16 x 16: tile (10, 0) of C",
    ),
    (
        "e13_ring",
        "turn = step // SLOTS % 2",
        "t = step // SLOTS\n    turn = 1 if t == 1 or t == 3 else 0",
        "but with 2 slots, 13",
    ),
    ("e13_ring", "step // SLOTS % 2", "step // SLOTS", "a phase is 0 or 1: take it modulo 2."),
    ("e13_ring", "turn ^ 1", "(step // SLOTS - 1) % 2", "`& 1` takes the last bit; `%` of a negative"),
    ("e13_ring", "turn ^ 1", "not turn", "`turn ^ 1` turns a bit round"),
    ("e12_swizzle", "chunk ^ (row % 8)", "(row - chunk) % 8", "`%` of a negative number is negative or 0"),
    ("e06_pipeline", "tl.dot(a, b, acc", "tl.dot(b, a, acc", "Each is a sum of tiles of b times one of a"),
    ("e07_tf32", "(bits + 0x1000)", "tl.where(x > 0, bits + 0x1000, bits - 0x1000)", "the sign is a bit of its own"),
    (
        *("e02_mask", "(rows[:, None] < height) & (columns[None, :] < width)"),
        *("rows[:, None] < height & columns[None, :] < width", "`&` and `|` bind closer than `<`"),
    ),
    ("e13_ring", "turn ^ 1", "~turn % 2", "`& 1` takes the last bit; `%` of a negative"),
    ("e13_ring", "turn ^ 1", "(step - SLOTS) // SLOTS % 2", "`%` of a negative number is negative or 0"),
    ("e12_swizzle", "return chunk", "chunk", "and a function that ends without `return`."),
    ("e02_mask", "mask=inside", "mask=not inside", "no `and`, `or` or `not`"),
    (
        *("e01_coalesce", BY_NAME["e01_coalesce"].solution),
        "    rows = pid // 3 + lanes * 0\n    columns = pid % 3 * 32 + lanes\n",
        "C of 64 x 96 x 8 is right, but of 8 x 160 x 8: program 24 reads a[8, 0]",
    ),
    (
        *("e04_group", BY_NAME["e04_group"].solution),
        "    g = pid // 64\n    w = pid % 64\n    r = tl.where(pid < 128, 4, 2)\n    return g * 4 + w % r, w // r\n",
        "C of 160 x 256 x 16 is right, but of 80 x 96 x 16: ",
    ),
    ("e04_group", "group * GROUP_M + within % rows, within // rows", "pid", "`tile_of` returns two values"),
    (
        *("e06_pipeline", BY_NAME["e06_pipeline"].solution),
        "    for k in range(0, K, 2 * BLOCK):\n        a, b = tl.load(a_ptrs), tl.load(b_ptrs)\n"
        "        next_a, next_b = tl.load(a_ptrs + BLOCK), tl.load(b_ptrs + BLOCK * stride_b)\n"
        '        acc = tl.dot(a, b, acc, input_precision="ieee")\n        a_ptrs += 2 * BLOCK\n'
        '        b_ptrs += 2 * BLOCK * stride_b\n        acc = tl.dot(next_a, next_b, acc, input_precision="ieee")\n',
        "was not asked for yet",
    ),
    ("e06_pipeline", "range(BLOCK, K", "range(16, 96", "but of 16 x 32 x 48: program 0 reads a[0, 48]"),
    (
        *(
            "e06_pipeline",
            '        b = next_b\n    acc = tl.dot(a, b, acc, input_precision="ieee")\n',
            "        b = next_b\n",
        ),
        "K-tile 5, counted from 0, is multiplied 0 times: it is the last one. Does its product come after",
    ),
    (
        *("e06_pipeline", '        b = next_b\n    acc = tl.dot(a, b, acc, input_precision="ieee")\n'),
        '        b = next_b\n    acc = tl.dot(a, b, acc, input_precision="ieee")\n'
        '    acc = tl.dot(a, b, acc, input_precision="ieee")\n',
        "K-tile 5, counted from 0, is multiplied 2 times: it is loaded once, and its product must not be added again",
    ),
    ("e08_accumulate", "range(0, K, BLOCK)", "range(0, 512, BLOCK)", "but of 32 x 48 x 80: program 0 reads a[0, 80]"),
    (
        "e08_accumulate",
        BY_NAME["e08_accumulate"].solution,
        BY_NAME["e08_accumulate"]
        .solution.replace("tl.float32)", "tl.float64)")
        .replace("acc = tl.dot(a, b, acc)", "acc += tl.dot(a, b)"),
        "sums in fp64",
    ),
    (
        "e08_accumulate",
        "tl.dot(a, b, acc)",
        "tl.dot(a.to(tl.float32), b.to(tl.float32), acc)",
        "But fp32 operands do not run",
    ),
    (
        *("e09_split_k", BY_NAME["e09_split_k"].solution),
        "    n = K // BLOCK // SPLIT_K * BLOCK\n    first = part * n\n"
        "    last = tl.where(part == SPLIT_K - 1, K, first + n)\n",
        "C of 16 x 32 x 232 is right, but a part has 7 of the 15 k-tiles; the longest needs 5. With C of 16 x 32 x 200",
    ),
    (
        *("e09_split_k", BY_NAME["e09_split_k"].solution),
        "    first = part * 80\n    last = tl.minimum(first + 80, K)\n",
        "C of 16 x 32 x 24 is right, but a part has 2 of the 2 k-tiles; the longest needs 1. With C of 16 x 32 x 200",
    ),
    (
        "e12_swizzle",
        "chunk ^ (row % 8)",
        "(chunk - row) % 8",
        "`%` of a negative number is negative or 0, in Triton as in C.",
    ),
    (
        "e13_ring",
        "step // SLOTS % 2",
        "step // 3 % 2",
        "C with 3 slots, 8 k-tiles is right, but with 4 slots, 8 k-tiles: ",
    ),
    ("e13_ring", "step // SLOTS % 2", "step / SLOTS % 2", "`/` makes fractions, use"),
    ("e13_ring", "return turn ^ 1, turn", "return turn", "`phases` returns two phases"),
    ("e02_mask", "rows[:, None] < height", "rows[:, None] < height - 1", "a[36, 0] is never read: the mask leaves out"),
    ("e02_mask", "other=0.0", 'other=float("nan")', "It is NaN, as are lanes beyond K"),
    ("e03_tile", "64, 64, 16", '64, "64", 16', "the tile is 64 x '64' x 16"),
    ("e01_coalesce", "* BLOCK + lanes", "+ lanes * strips", "its lanes are 3 elements apart in a row of b."),
    ("e01_coalesce", "* BLOCK + lanes", "* BLOCK + lanes + 1", "reads b[0, 96]"),
    ("e01_coalesce", "pid // strips", "pid % strips", "wrong"),
    (
        "e01_coalesce",
        "strips = N // BLOCK",
        "strips = N",
        "counted from 0. Strips of a row of C: 3, of 32 columns each, and in",
    ),
    (
        "e01_coalesce",
        "strips * BLOCK + lanes",
        "strips + lanes",
        "Others are written more than once: do programs overlap?",
    ),
    ("e01_coalesce", "pid // strips + tl.zeros_like(lanes)", "pid // N * BLOCK + lanes", "results lie on a diagonal"),
    ("e01_coalesce", "N // BLOCK", "N / BLOCK", "unexpected type fp32: `/` makes fp32, use `//`, or `tl.cdiv"),
    ("e02_mask", "rows[:, None] < height", "rows[:, None] <= height", "reads b[45, 0], and b has 45 rows"),
    ("e02_mask", " & (columns[None, :] < width)", "", "reads a[0, 45]"),
    (
        *("e02_mask", "(rows[:, None] < height) & (columns[None, :] < width)", "(rows < height) & (columns < width)"),
        "The mask is the same in every row of the block, as one of shape [16] is: the pointers' shape is [16, 16]",
    ),
    ("e02_mask", ", other=0.0", "", "without `other`"),
    ("e02_mask", "height) & (", "height) | (", "Mask off rows from `height`"),
    ("e02_mask", "height) & (", "height) and (", "Blocks take `&`, `|`, `^` and `~`"),
    (
        *("e02_mask", "(rows[:, None] < height)", "(-1 < rows[:, None] < 99)"),
        "reads b[45, 0]" if COMPARES_CHAINS else "and no chain, `0 <= x < m`",
    ),
    (
        *("e02_mask", "return tl.load(pointers, mask=inside, other=0.0)"),
        "return tl.load(ptr + (rows[:, None] % height) * stride + columns[None, :] % width)",
        "Program 0 reads 48 elements of a more than once: lanes beyond K must be 0",
    ),
    ("e02_mask", "other=0.0", "other=1.0", "Each is A B + 3: 3 lanes of the last k-tile lie beyond K = 45, where"),
    (
        "e03_tile",
        "64, 64, 16",
        "128, 128, 16",
        "would spill: 128 accumulators are more than a quarter of a thread's 256 registers. FFMAs",
    ),
    ("e03_tile", "64, 64, 16", "64, 64, 256", "has 166912. That is 2 slots of (64 + 64) x 256 x 4 bytes, one fewer"),
    ("e03_tile", "64, 64, 16", "32, 64, 32", "10.7 FLOP"),
    ("e03_tile", "64, 64, 16", "96, 64, 16", "powers of two"),
    ("e03_tile", "64, 64, 16", "128, 128, 16\nNUM_WARPS = 8", "are given, 4 and 3: the tile alone is to be found"),
    ("e04_group", "tl.minimum(num_m - group * GROUP_M, GROUP_M)", "GROUP_M", "reads a[160, 0]"),
    (
        "e04_group",
        "group * GROUP_M + within % rows, within // rows",
        "within // rows, within % rows",
        "is the row given first",
    ),
    (
        "e04_group",
        "within % rows, within // rows",
        "within % rows, within / rows",
        "float32: `/` makes fp32, use `//`, or `tl.cdiv",
    ),
    ("e04_group", "within % rows, within // rows", "within // num_n, within % num_n", "170 strips"),
    (
        *("e04_group", BY_NAME["e04_group"].solution, "    return pid % 40 // 4, pid // 40 * 4 + pid % 4\n"),  # columns
        "of programs 32 to 47, strips that are read of A: 4, of B: 8; in groups of 4 rows they are 4 and 4. All waves "
        "read 88 strips, where 84 are enough. Its groups have 4 columns, and all rows.",
    ),
    ("e05_beta", "if HAS_BETA:", "if True:", "C is read with beta = 0"),
    ("e05_beta", "out = alpha * acc", "out = (alpha * acc).to(tl.float16)", "other bits"),
    ("e05_beta", "beta * tl.load", "tl.load", "C is 0.7 A B + 1.0 C: beta is missing."),
    ("e05_beta", "alpha * acc", "acc", "with alpha = 0.7 and beta = 0 C is 1.0 A B: alpha is missing."),
    ("e05_beta", "        out +=", "        out = acc +", "C is 1.0 A B + -1.5 C: alpha is missing."),
    ("e05_beta", ".to(tl.float32)\n", "\n", "In the interpreter `beta * tl.load(c_ptrs)` has C's dtype"),
    ("e05_beta", "        out += beta *", "        out += alpha * beta *", "it is 0.7 (A B - 1.5 C)."),
    ("e05_beta", "out += beta", "out -= beta", "C is 0.7 A B + 1.5 C: beta C is subtracted."),
    ("e05_beta", "out += beta", "out += beta * beta", "is not 0.7 A B - 1.5 C, and rounding is not all"),
    (
        *("e05_beta", "out = alpha * acc\n    if HAS_BETA:\n        out +="),
        *("if HAS_BETA:\n        out = alpha * acc +", "an `if` or a loop that does not run does not set it."),
    ),
    (
        *("e05_beta", "out += beta * tl.load(c_ptrs).to(tl.float32)"),
        "out = alpha * (acc + beta / alpha * tl.load(c_ptrs).to(tl.float32))",
        "ZeroDivisionError: float division by zero, with alpha = 0, where C is beta C: divide by nothing that may be",
    ),
    (
        "e05_beta",
        "    if HAS_BETA:",
        "    out /= alpha != 0\n    if HAS_BETA:",
        "with alpha = 0 and beta = -1.5 c[0, 0] is nan",
    ),
    (
        *("e06_pipeline", "        a_ptrs += BLOCK\n        b_ptrs += BLOCK * stride_b\n", ""),
        "K-tile 0, counted from 0, is multiplied 6 times: it is loaded 6 times. Do pointers advance before each load?",
    ),
    ("e06_pipeline", "BLOCK * stride_b", "BLOCK", "The next k-tile of b is BLOCK * stride_b elements further."),
    ("e06_pipeline", "next_", "", "K-tile 0, counted from 0, is multiplied 0 times: did the next one replace it"),
    (
        *(
            "e06_pipeline",
            '        next_b = tl.load(b_ptrs)\n        acc = tl.dot(a, b, acc, input_precision="ieee")\n',
        ),
        '        acc = tl.dot(a, b, acc, input_precision="ieee")\n        next_b = tl.load(b_ptrs)\n',
        "when k-tile 0 is multiplied, k-tile 1 of b was not asked for yet",
    ),
    ("e06_pipeline", "range(BLOCK, K, BLOCK)", "range(0, K, BLOCK)", "The last k-tile has no next one"),
    ("e06_pipeline", "        a = next_a\n", "", "K-tile 0 of a, counted from 0, is multiplied by k-tile 1 of b."),
    ("e07_tf32", "bits + 0x1000", "bits + 0xFFF + ((bits >> 13) & 1)", "ties go to even here"),
    ("e07_tf32", "rounded = tl.where(x == x, rounded, 0x7FFFE000)", "pass", "A NaN stays one"),
    (
        "e07_tf32",
        "x == x, rounded, 0x7FFFE000",
        "x != x, bits, rounded",
        "becomes bits 0x7F800001. A NaN stays one: a tensor core ignores the last 13 bits",
    ),
    ("e07_tf32", "0x7FFFE000", "0x7F800001", "bits 0x7F800001 becomes bits 0x7F800001. A NaN stays one"),
    ("e07_tf32", "0x1000", "0x0FFF", "ties go toward zero here, and should go away from it."),
    ("e07_tf32", "x == x, rounded", "bits != 0x7F800001, rounded", "the NaN of bits 0xFF800001 becomes"),
    ("e07_tf32", "x == x, rounded", "(x == x) | (bits >= 0x80000000), rounded", "the NaN of bits 0xFF800001 becomes"),
    ("e07_tf32", "x == x, rounded", "tl.abs(x) < 3.4e38, rounded", "carries to infinity"),
    (
        *("e07_tf32", "    rounded = tl.where(x"),
        "    rounded = tl.where(bits == 0xFF800000, 0x7F800000, rounded)\n    rounded = tl.where(x",
        "-inf becomes inf, and should become -inf (bits 0xFF800000, 0x7F800000 and 0xFF800000): it lost its sign",
    ),
    (
        "e07_tf32",
        "    rounded = tl.where(x",
        "    rounded = tl.where(tl.abs(x) < 1e-38, bits & 0x80000000, rounded)\n    rounded = tl.where(x",
        "it is subnormal, below a tie",
    ),
    ("e07_tf32", "bits + 0x1000", "bits + 0x1000 - ((bits >> 13) & 1)", "not to odd"),
    ("e07_tf32", " & 0xFFFFE000", "", "its last 13 bits are not all 0"),
    ("e07_tf32", "(bits + 0x1000) & 0xFFFFE000", "(bits & 0xFFFFE000) + 0x1000", "its last 13 bits are not all 0"),
    ("e07_tf32", "0xFFFFE000", "0xFFFFF000", "its last 13 bits are not all 0"),
    ("e07_tf32", "0xFFFFE000", "0xFFFFC000", "14 bits are cleared, so that 9 of mantissa are kept"),
    ("e07_tf32", "(bits + 0x1000) & 0xFFFFE000", "(bits + 0x8000) & 0xFFFF0000", "as in bf16"),
    ("e07_tf32", "(bits + 0x1000) & 0xFFFFE000", "(bits + 0x800) & 0xFFFFF000", "11 bits of mantissa are kept"),
    (
        *("e08_accumulate", "b, acc)", "b, acc.to(tl.float16))"),
        "each 0.5 is rounded away" if COMPARES_CHAINS else "sums that `tl.dot` is given have",
    ),
    (
        "e08_accumulate",
        "(a, b, acc)",
        "(a.to(tl.float32), b, acc)",
        "Got fp32 and fp16: give `tl.dot` a and b as they are",
    ),
    ("e08_accumulate", "(a, b, acc)", "(a.to(tl.bfloat16), b.to(tl.bfloat16), acc)", "bf16 is multiplied as bits"),
    ("e08_accumulate", "tl.dot(a, b, acc)", "acc + tl.dot(a, b).to(tl.float16)", "be it a k-tile's product"),
    (
        *("e08_accumulate", BY_NAME["e08_accumulate"].solution),
        BY_NAME["e08_accumulate"].before.replace("float16", "bfloat16"),
        "Was it added in bf16, which has 8 bits, and the interpreter cannot add? Sums belong in fp32.",
    ),
    (
        *("e08_accumulate", "tl.dot(a, b, acc)\n", "tl.dot(a, b, acc)\n    acc = acc.to(tl.bfloat16).to(tl.float32)\n"),
        "all of them have bf16's 8 bits, of fp16's 11",
    ),
    (
        *("e08_accumulate", "tl.dot(a, b, acc)"),
        *(
            'tl.dot(a.to(tl.float32), b.to(tl.float32), acc, input_precision="ieee")',
            "do not run on fp16's tensor cores",
        ),
    ),
    ("e09_split_k", "tl.minimum(first + steps * BLOCK, K)", "first + steps * BLOCK", "A part ends at K at the latest."),
    ("e09_split_k", "first = part *", "first = (part - 1) *", "A part begins at k = 0 at the earliest."),
    (
        *("e09_split_k", "first = part", "first = tl.program_id(1)"),
        "k = 0 is summed by 3 of the 3 parts in tile (0, 0) of C, and should be by one: 200 are 13 k-tiles. `part` ",
    ),
    ("e09_split_k", "steps * BLOCK", "steps", "A part loads from k = 5 on, and parts begin at multiples of BLOCK."),
    ("e09_split_k", "tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)", "K // BLOCK // SPLIT_K", "k = 192 is summed by no part"),
    ("e09_split_k", "part * steps * BLOCK", "part * (steps - 1) * BLOCK", "k = 64 is summed by 2 of the 3 parts"),
    (
        *("e09_split_k", BY_NAME["e09_split_k"].solution),
        "    per = tl.cdiv(K, SPLIT_K)\n    first = part * per\n    last = tl.minimum(first + per, K)\n",
        "a part loads from k = 67 on: parts begin at multiples of BLOCK = 16",
    ),
    ("e10_persistent", "tiles, tl.num", "tiles - 1, tl.num", "tile (3, 2) of C, counted from 0, is never computed"),
    ("e10_persistent", "range(tl.program_id(0), tiles", "range(0, tiles", "computed 5 times"),
    (
        *("e10_persistent", "tl.program_id(0), tiles, tl.num_programs(0)"),
        *("3 * tl.program_id(0), tl.minimum(3 * tl.program_id(0) + 3, tiles)", "begin with tiles 0, 3, 6, 9"),
    ),
    (
        "e11_tma",
        "b_desc.load([k, pid_n * BLOCK])",
        "b_desc.load([pid_n * BLOCK, k])",
        "box of b that begins at row 0 and column 16",
    ),
    ("e11_tma", ', input_precision="ieee"', "", "`tl.dot` multiplies fp32 operands as TF32"),
    (
        "e11_tma",
        "for k in range(0, K, BLOCK)",
        "for k in range(0, K - BLOCK, BLOCK)",
        "never loads the box of a that begins at row 0",
    ),
    ("e11_tma", "for k in range(0, K, BLOCK)", "for k in range(0, K + BLOCK, BLOCK)", "multiplies 5 k-tiles of 4"),
    (
        "e12_swizzle",
        "chunk ^ (row % 8)",
        "(chunk + row) % 8",
        "chunk 1 of row 1 belongs in place 0, and is in place 2.",
    ),
    ("e12_swizzle", "chunk ^ (row % 8)", "chunk ^ row", "A place outside of 0 to 7 is none in its chunk's row"),
    ("e12_swizzle", "chunk ^ (row % 8)", "chunk ^ (row % 4)", "take 2 wavefronts"),
    ("e12_swizzle", "chunk ^ (row % 8)", "row % 8 + 0 * chunk", "the places 0 to 7 of the row, each in one of its own"),
    ("e13_ring", "return turn ^ 1, turn", "return 1, turn", "filled with k-tile 3 while k-tile 0 lies there"),
    ("e13_ring", "return turn ^ 1, turn", "return turn ^ 1, 0", "its k-tile has not arrived"),
    ("e13_ring", "return turn ^ 1, turn", "return turn, turn ^ 1", "its k-tile was never loaded"),
    ("e13_ring", "step // SLOTS % 2", "step % 2", "`full` to turn. It waited last while"),
    ("e13_ring", "step // SLOTS % 2", "step // (SLOTS + 1) % 2", "slot 0 is filled with k-tile 3"),
    ("e04_group", "group * GROUP_M + within % rows", "unknown", "NameError: name 'unknown' is not defined"),
    ("e04_group", "group * GROUP_M +", "group * GROUP_M + +)", "SyntaxError"),
    # What is told of sums, also where a k-tile of A is not whole, or a diagnosis cannot tell.
    ("e11_tma", "tl.dot(a, b, acc, ", "tl.dot(a, b, ", "C is the last k-tile's product alone"),
    (
        "e11_tma",
        "tl.dot(a, b, acc, ",
        "tl.dot(b, a, acc, ",
        "Each is a sum of tiles of b times one of a: `tl.dot(a, b)` it is.",
    ),
    (
        "e05_beta",
        "out += beta *",
        "out += beta.to(tl.float32) *",
        "numbers are Python's in the interpreter, fp32 on a GPU",
    ),
    (
        "e07_tf32",
        "rounded, 0x7FFFE000)",
        "0x7FFFE000, rounded)",
        "0x3F800000): a number becomes NaN. `tl.where",
    ),
    ("e12_swizzle", "row % 8", "row / 8", "float32: `/` makes fp32, use `//`, or `tl.cdiv"),
    ("e07_tf32", "& 0xFFFFE000", "& ~0x1FFF", "Python's `~` of a number is negative"),
    (
        *("e07_tf32", "(bits + 0x1000)"),
        *("tl.where(x < 0, bits - 0x1000, bits + 0x1000)", "the sign is a bit of its own, so what is added"),
    ),
    (
        *("e11_tma", "load([pid_m * BLOCK, k])"),
        *(
            "load([pid_m * BLOCK, k * BLOCK])",
            "Of the boxes that are multiplied 3 begin beyond a. Does k count elements",
        ),
    ),
    (
        "e02_mask",
        "(rows[:, None] < height) &",
        "(rows[:, None] < height) |",
        "a lane needs both comparisons, which is `&`.",
    ),
    ("e11_tma", "acc = tl.dot", "acc += tl.dot", "`acc += tl.dot(a, b, acc)` adds acc twice"),
    (
        "e11_tma",
        "tl.dot(a, b,",
        "tl.dot(a.to(tl.float16), b.to(tl.float16),",
        "940 of 960 are wrong. Operands are multiplied in fp16",
    ),
    ("e08_accumulate", "acc = tl.dot", "acc += tl.dot", "`acc += tl.dot(a, b, acc)` adds acc twice"),
    ("e08_accumulate", "acc = tl.dot(a, b, acc)", "acc = tl.dot(a, b, acc=acc) + acc", "adds acc twice"),
    (
        "e06_pipeline",
        "        acc = tl.dot(a, b, acc, ",
        "        acc = tl.dot(a, b, ",
        "k-tiles 4, 5, counted from 0, though 6 are",
    ),
    ("e06_pipeline", "acc = tl.dot", "tl.dot", "C is 0, though 6 are multiplied"),
    # Python that takes a block for one value.
    (
        "e07_tf32",
        *IF,
        "`if x == x:`: an `if` decides once for the whole block. For each element do `mask=` of a load or store, and",
    ),
    ("e07_tf32", *(IF[0], IF[1].replace("x == x", "x == x and x == 0")), "an `if` decides once for the whole block"),
    ("e07_tf32", IF[0], "rounded = rounded if x == x else 0x7FFFE000", "an `if` decides once for the whole block"),
    ("e07_tf32", IF[0], "while x != x:\n        rounded = 0x7FFFE000", "a `while` decides once for the whole block"),
    ("e07_tf32", "x == x, rounded", "not (x != x), rounded", "Blocks take `&`, `|`, `^` and `~`"),
    ("e07_tf32", "(bits + 0x1000)", "min(bits + 0x1000, 0xFFFFFFFF)", "of blocks it is `tl.minimum`."),
    (
        "e07_tf32",
        "(bits + 0x1000)",
        "((bits + 4096) / 8192 * 8192).to(tl.uint32)",
        "0x3F904000): it is below a tie.",
    ),
    (
        *("e07_tf32", "rounded = (bits"),
        'rounded = tl.inline_asm_elementwise("cvt.rna.tf32.f32 $0, $1;", "=r,r", [x], tl.uint32, True, 1)\n'
        "    rounded = (bits",
        "what is right on a GPU does not run here; use integers.",
    ),
    ("e12_swizzle", "chunk ^ (row % 8)", "chunk ** (row % 8)", "Exclusive or is `^`."),
    ("e12_swizzle", "chunk ^ (row % 8)", "[0, 1, 2, 3, 4, 5, 6, 7][chunk]", "a block is no index of a list"),
    (
        *("e02_mask", "(rows[:, None] < height) & (columns[None, :] < width)"),
        *(
            "(rows[None, :] < height) & (columns[:, None] < width)",
            "Either the mask's axes are exchanged: rows go down,",
        ),
    ),
    (
        *("e02_mask", "return tl.load(pointers, mask=inside,"),
        "pointers = ptr + (rows % height)[:, None] * stride + columns[None, :]\n"
        "    return tl.load(pointers, mask=columns[None, :] < width,",
        "C is right, but of a matrix of 37 rows and 45 columns `load_tile` gives",
    ),
    (
        *("e02_mask", "return tl.load(pointers, mask=inside,"),
        "pointers = ptr + rows[:, None] * stride + tl.minimum(columns, width - 1)[None, :]\n"
        "    return tl.load(pointers, mask=rows[:, None] < height,",
        "what lies outside of the matrix is 0.",
    ),
    # Python's functions of numbers.
    (
        "e09_split_k",
        "tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)",
        "round(K / BLOCK / SPLIT_K)",
        "Python's `round` knows no value",
    ),
    (
        *("e09_split_k", "steps = tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)"),
        "import math\n    steps = math.ceil(K / BLOCK / SPLIT_K)",
        "and `tl.cdiv(x, y)` up.",
    ),
    ("e03_tile", "64, 64, 16", "64, 64, 32 / 2", "64 x 64 x 16.0; Triton takes whole numbers, powers of two"),
    ("e05_beta", "    if HAS_BETA:", "    out = acc\n    if not not HAS_BETA:", "C is 1.0 A B: alpha is missing."),
    (
        *("e13_ring", BY_NAME["e13_ring"].solution),
        *(
            "    odd = step // SLOTS % 2 == 1\n    return not odd, odd\n",
            "a phase is an int32, 0 or 1, and no condition",
        ),
    ),
]

# Other right answers: what the solution has, and what may stand there.
OTHERS = [
    (
        *("e06_pipeline", BY_NAME["e06_pipeline"].solution),  # the last load is masked off, by a scalar
        "    a = tl.load(a_ptrs)\n    b = tl.load(b_ptrs)\n    for k in range(BLOCK, K + BLOCK, BLOCK):\n"
        "        a_ptrs += BLOCK\n        b_ptrs += BLOCK * stride_b\n"
        "        next_a = tl.load(a_ptrs, mask=k < K, other=0.0)\n"
        "        next_b = tl.load(b_ptrs, mask=k < K, other=0.0)\n"
        '        acc = tl.dot(a, b, acc, input_precision="ieee")\n        a = next_a\n        b = next_b\n',
    ),
    ("e03_tile", "64, 64, 16", "tl.constexpr(128), tl.constexpr(64), tl.constexpr(32)"),
    ("e08_accumulate", "tl.dot(a, b, acc)", 'tl.dot(a, b, acc, input_precision="ieee")  # fp16'),
    ("e08_accumulate", "tl.dot(a, b, acc)", "tl.dot(a, b, acc)  # no input_precision= here"),
    (
        "e11_tma",
        "for k in range(0, K, BLOCK):",
        "for i in range(tl.cdiv(K, BLOCK)):\n        k = (tl.cdiv(K, BLOCK) - 1 - i) * BLOCK",
    ),
    (
        *("e10_persistent", "range(tl.program_id(0), tiles, tl.num_programs(0))"),
        "range(tiles - 1 - tl.program_id(0), -1, -tl.num_programs(0))",
    ),
    ("e01_coalesce", "pid // strips + tl.zeros_like(lanes)", "pid // strips"),
    ("e03_tile", "64, 64, 16", "128, 64, 32"),
    ("e04_group", "within % rows, within // rows", "rows - 1 - within % rows, within // rows"),
    ("e05_beta", "        out += beta * tl.load(c_ptrs)", "        out = out + beta * tl.load(c_ptrs)"),
    (
        "e06_pipeline",
        "        a_ptrs += BLOCK\n        b_ptrs += BLOCK * stride_b\n        next_a = tl.load(a_ptrs)\n"
        "        next_b = tl.load(b_ptrs)\n",
        "        next_a = tl.load(a_ptrs + k)\n        next_b = tl.load(b_ptrs + k * stride_b)\n",
    ),
    ("e07_tf32", "0x7FFFE000", "0xFFC00001"),
    ("e08_accumulate", "acc = tl.dot(a, b, acc)", "acc += tl.dot(a, b)"),
    (
        *("e08_accumulate", BY_NAME["e08_accumulate"].solution),  # two accumulators
        BY_NAME["e08_accumulate"]
        .solution.replace("    for k", "    odd = acc\n    for k")
        .replace(
            "        acc = tl.dot(a, b, acc)\n",
            "        if k // BLOCK % 2 == 1:\n            odd = tl.dot(a, b, odd)\n"
            "        else:\n            acc = tl.dot(a, b, acc)\n    acc += odd\n",
        ),
    ),
    ("e13_ring", "return turn ^ 1, turn", "return (step // SLOTS + 1) & 1, turn"),
    ("e13_ring", "return turn ^ 1, turn", "return gl.where(turn == 0, 1, 0), gl.minimum(turn, 1)"),
    ("e13_ring", "return turn ^ 1, turn", "return (turn == 0).to(gl.int32), gl.maximum(turn, 0)"),
    ("e05_beta", "    if HAS_BETA:", "    if not HAS_BETA:\n        out = alpha * acc\n    else:"),
    (
        *("e02_mask", "    return tl.load(pointers, mask=inside, other=0.0)\n"),
        "    pointers = ptr + (rows % height)[:, None] * stride + (columns % width)[None, :]\n"
        "    return tl.where(inside, tl.load(pointers), 0.0)\n",
    ),
    (
        *("e09_split_k", "tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)"),
        "tl.ceil(tl.cdiv(K, BLOCK) / SPLIT_K).to(tl.int32)",
    ),
    (
        "e10_persistent",
        "for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):",
        "tile = tl.program_id(0) - 5\n    while tile + 5 < tiles:\n        tile += 5",
    ),
]


# What the interpreter takes and the compiler does not.
REFUSED = [
    (
        "e06_pipeline",
        "range(BLOCK, K, BLOCK):",
        "[*range(BLOCK, K, BLOCK)]:",
        "refuses `for k in [*range(BLOCK, K, BLOCK)]:`",
    ),
    (
        *("e08_accumulate", BY_NAME["e08_accumulate"].solution),
        BY_NAME["e08_accumulate"].before.replace(".to(tl.float16)", ""),
        "refuses `for k in range(0, K, BLOCK):`",
    ),
    (
        *("e10_persistent", "for tile in range(tl.program_id(0), tiles, tl.num_programs(0)):"),
        "for i in range(tiles):\n        tile = tl.program_id(0) + i * tl.num_programs(0)\n"
        "        if tile >= tiles:\n            break",
        "C is right in the interpreter, but Triton's compiler refuses `break`",
    ),
    (
        *("e09_split_k", "tl.cdiv(K, BLOCK)", "triton.cdiv(K, BLOCK)"),
        "refuses `steps = tl.cdiv(triton.cdiv(K, BLOCK), SPLIT_K)`: in a kernel it is `tl.cdiv`.",
    ),
    (
        "e13_ring",
        "turn ^ 1, turn",
        "turn ^ 1, turn.to(gl.int1)",
        "a phase is an int32, as `.to(gl.int32)` makes of a condition.",
    ),
    (
        *("e13_ring", "step // SLOTS % 2", "divmod(step, SLOTS)[0] % 2"),
        "C is right in the simulation, but Triton's compiler refuses",
    ),
    ("e05_beta", "out += beta *", "out += float(beta) *", "refuses `out += float(beta) * tl.load(c_ptrs)"),
]
