"""What matmul launches, kernel by kernel, in every configuration and schedule: right, tidy, and the same every time.

Operands are windows in buffers of NaN and C a window in a buffer of sentinels, so that what is read or written
outside shows.
"""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
import torch

from tests.checks import NAN, SENTINEL, fp32_precision
from tests.epilogues import expected
from tests.numerics import mode_of
from triton_gemm import cost_model, workspace
from triton_gemm.config import GemmConfig
from triton_gemm.device import DeviceInfo, device_info
from triton_gemm.kernels import gemv, portable, warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.plan import GemmPlan
from triton_gemm.problem import ACTIVATIONS, GemmProblem
from triton_gemm.select import Selection, select

pytestmark = pytest.mark.gpu
hopper = pytest.mark.skipif(
    "torch.cuda.is_available() and torch.cuda.get_device_capability() != (9, 0)", reason="needs Hopper"
)

Size = tuple[int, int, int]
DEVICE = torch.device("cuda", 0)


def gpu() -> DeviceInfo:
    return device_info(DEVICE)


@dataclass(frozen=True)
class Case:
    """A product, and how it lies in memory. size: M, N, K; orders: of a, b and c, `n` row-major, `t` column-major;
    pad: the pitch of a and b is a multiple of it; gap: unused elements after each row (or column) of c, beyond
    multiples of 16; offset, c_offset: of each first element, of c's besides, from a 16-byte boundary; step: distance of
    neighbours in a and b.

    batch: how many, or None; between: matrices lie between one another's rows; shared: all take a's first.
    """

    size: Size
    orders: str = "nnn"
    pad: int = 8
    gap: int = 0
    offset: int = 0
    c_offset: int = 0
    step: int = 1
    batch: int | None = None
    between: bool = False
    shared: bool = False
    dtype: torch.dtype = torch.bfloat16
    out_dtype: torch.dtype | None = None
    alpha: float = 1.0
    beta: float = 0.0
    bias: str | None = None
    activation: str | None = None
    integers: bool = False


class Operands:
    """A case's tensors on the GPU, and the truth about it."""

    def __init__(self, case: Case) -> None:
        self.case = case
        M, N, K = case.size
        self.generator = torch.Generator(DEVICE).manual_seed(hash(case.size))
        out_dtype = case.out_dtype or case.dtype
        a, b = self.draw(M, K, case.dtype), self.draw(K, N, case.dtype)
        self.c0 = self.draw(M, N, out_dtype) if case.beta else self.draw(M, N, out_dtype).fill_(NAN)
        self.bias = None
        if case.bias is not None:
            self.bias = self.draw(1, M if case.bias == "m" else N, out_dtype).flatten()[: M if case.bias == "m" else N]
        self.a_buffer, self.a = self.place(a[:1] if case.shared else a, case.orders[0], NAN)
        self.a = self.a.expand_as(a)
        self.b_buffer, self.b = self.place(b, case.orders[1], NAN)
        self.c_buffer, self.c = self.place(self.c0, case.orders[2], SENTINEL, output=True)
        axis = {} if self.bias is None else {"bias": case.bias}
        self.problem = GemmProblem.of(
            self.a, self.b, self.c, has_beta=case.beta != 0, activation=case.activation, **axis
        )

    def draw(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        shape = (rows, columns) if self.case.batch is None else (self.case.batch, rows, columns)
        if self.case.integers:
            drawn = torch.randint(-6, 7, shape, generator=self.generator, device=DEVICE).float()
        else:
            drawn = torch.randn(shape, generator=self.generator, device=DEVICE)
        return drawn.to(dtype)

    def place(
        self, x: torch.Tensor, order: str, fill: float, *, output: bool = False
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """(buffer full of `fill`, copy of x in the midst of it)."""
        case, (rows, columns) = self.case, x.shape[-2:]
        batch = 1 if x.dim() == 2 else x.shape[0]
        outer, inner = (rows, columns) if order == "n" else (columns, rows)
        step = 1 if output else case.step
        pad = 16 if output else case.pad  # Triton compiles once for strides that are multiples of 16
        pitch = -(-inner * step // pad) * pad + (case.gap if output else 0)
        row, matrix = (batch * pitch, pitch) if case.between else (pitch, outer * pitch + 64)
        margin = (300 * row + 300) // 64 * 64
        buffer = torch.full((2 * margin + batch * (outer * pitch + 64),), fill, dtype=x.dtype, device=DEVICE)
        strides = (row, step) if order == "n" else (step, row)
        shape = (rows, columns) if x.dim() == 2 else (batch, rows, columns)
        window = buffer.as_strided(shape, (matrix, *strides)[-x.dim() :], margin + case.offset + output * case.c_offset)
        return buffer, window.copy_(x)

    def check(self, plan: GemmPlan, parts: int = 1, times: int = 1) -> None:
        """Runs the plan; fails unless C is right, the same each time, nothing else written, and all is tidied up."""
        case = self.case
        kept = [x.clone() for x in (self.a_buffer, self.b_buffer)]
        results = []
        for _ in range(times):
            self.c.copy_(self.c0)
            plan.run(self.a, self.b, self.c, self.bias, case.alpha, case.beta)
            results.append(self.c.clone())
        assert all(torch.equal(bits(results[0]), bits(result)) for result in results[1:]), "other bits"
        self.c.fill_(SENTINEL)
        assert (self.c_buffer == SENTINEL).all(), "wrote outside c"
        for buffer, was in zip((self.a_buffer, self.b_buffer), kept, strict=True):
            assert torch.equal(bits(buffer), bits(was)), "changed an operand"
        assert counters_are_zero(), "counters are not zero afterwards"
        precision = self.problem.precision
        truth, bound = expected(
            *(self.a, self.b, self.c0, case.alpha, case.beta, self.bias, case.bias or "n", case.activation),
            mode=mode_of(precision, case.dtype),
            out_dtype=self.c.dtype,
            parts=parts,
        )
        if case.integers:
            assert torch.equal(results[0], truth.to(self.c.dtype)), "integers are not exact"
        wrong = ~((results[0].double() - truth).abs() <= bound)  # NaN is wrong
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()}, the first at {wrong.nonzero()[0].tolist()}"


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.view({2: torch.int16, 4: torch.int32}[x.itemsize])


def counters_are_zero() -> bool:
    """On all streams; a graph zeroes its own before each replay."""
    torch.cuda.synchronize()
    kept = list(workspace._workspaces.items())
    return not any(bool(counters.any()) for (_, _, capture), (_, counters) in kept if not capture)


def check(case: Case, selection: Selection, times: int = 1) -> None:
    operands = Operands(case)
    parts = selection.split_k if selection.schedule is None else selection.schedule.parts
    operands.check(GemmPlan(operands.problem, selection, DEVICE), parts, times)


def ids(value: object) -> str | None:
    return str(value).replace(" ", "-") if isinstance(value, GemmConfig | str) else None


# --- The warp-specialised kernel ---


def persistent(config: GemmConfig, schedule: Schedule, **options: object) -> Selection:
    return Selection("warp_specialised", config, "by a test", schedule, **options)


def blocks(config: GemmConfig) -> Size:
    assert config.BLOCK_M and config.BLOCK_N and config.BLOCK_K
    return config.BLOCK_M, config.BLOCK_N, config.BLOCK_K


def wholes(config: GemmConfig) -> list[tuple[Size, Schedule]]:
    """Sizes and schedules without a split. Rows of C are whole 16 bytes, for TMA."""
    m, n, k = blocks(config)
    programs = gpu().num_sms
    return [
        ((m + 9, 2 * n + 8, 3 * k + 8), Schedule(6)),  # every edge is partial
        ((2 * m, n, 5 * k), Schedule(2)),  # every tile is whole
        ((3, 8, 5), Schedule(1)),  # far less than a tile, and a k-tile
        ((1, 8, 1), Schedule(1)),  # strides that mean nothing
        ((7 * m - 1, 3 * n - 8, k), Schedule(2, group=3)),  # programs go round more often than the ring
        ((12 * m, 13 * n, 2 * k + 1), Schedule(programs)),  # more tiles than multiprocessors
    ]


def splits(config: GemmConfig) -> list[tuple[Size, Schedule]]:
    m, n, k = blocks(config)
    programs = gpu().num_sms
    return [
        ((m + 9, 2 * n + 8, 7 * k + 8), Schedule(18, split=6, parts=3)),  # all tiles, in uneven parts
        ((3, 8, 40 * k + 3), Schedule(20, split=1, parts=20)),  # one tile: its owner adds nineteen others
        ((3 * m, 2 * n, 9 * k), Schedule(9, split=2, parts=4)),  # some programs have a part, others a whole tile
        ((2 * m, 2 * n, 8 * k), Schedule(24, split=3, parts=8)),  # a k-tile each, and one whole tile
        ((12 * m, 12 * n, 6 * k), Schedule(programs, split=12, parts=3)),  # as a last wave is cut
    ]


@hopper
@pytest.mark.parametrize("orders", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("config", warp_specialised.CONFIGS, ids=ids)
@pytest.mark.parametrize("schedules", [wholes, splits], ids=["whole", "split"])
def test_every_config_schedule_and_layout(schedules, config: GemmConfig, orders: str) -> None:
    for size, schedule in schedules(config):
        check(Case(size, orders + "n", integers=True), persistent(config, schedule), times=2)
        check(Case(size, orders + "n"), persistent(config, schedule))


CIRCUMSTANCES = {
    "c-column-major": {"orders": "tnt"},
    "c-odd": {"orders": "ntn", "gap": 1},
    "c-column-major-odd": {"orders": "nnt", "gap": 3},
    "c-rows-on-8-bytes": {"gap": 4},
    "c-unaligned": {"c_offset": 1},
    "c-rows-end-inside-16-bytes": {"ragged": 1},
    "beta": {"beta": -2.0, "alpha": 0.5},
    "beta-c-column-major": {"orders": "ttt", "beta": 1.0},
    "beta-c-odd": {"orders": "tnn", "gap": 1, "beta": 1.0},
    "bias-m": {"bias": "m"},
    "bias-n": {"bias": "n", "orders": "ntn"},
    **{name: {"activation": name, "alpha": 0.25} for name in ACTIVATIONS},
    "everything": {"bias": "n", "activation": "gelu", "beta": 0.5, "alpha": -0.5, "orders": "ntt"},
    "float32": {"out_dtype": torch.float32},
    "float16": {"dtype": torch.float16, "orders": "tnn"},
    "float16-to-float32-odd": {"dtype": torch.float16, "out_dtype": torch.float32, "gap": 1, "beta": 1.0, "bias": "m"},
    "batch": {"batch": 5},
    "batch-between": {"batch": 3, "between": True, "orders": "ntn"},
    "batch-of-one-a": {"batch": 4, "shared": True, "orders": "tnn"},
    "batch-column-major-odd": {"batch": 3, "orders": "ttt", "gap": 1, "bias": "m", "activation": "silu"},
}


def circumstance(name: str, size: Size, **defaults: object) -> Case:
    change = {**defaults, **CIRCUMSTANCES[name]}
    ragged = change.pop("ragged", 0)
    return Case((size[0], size[1] + ragged, size[2]), **change)


@hopper
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_every_circumstance(name: str) -> None:
    """With a large tile, and one other in turn, whole and split."""
    turn = list(CIRCUMSTANCES).index(name)
    probe = Operands(circumstance(name, (64, 64, 64))).problem
    legal = [c for c in warp_specialised.CONFIGS if warp_specialised.illegal(probe, gpu(), c) is None]
    for config in (legal[0], legal[1 + turn % (len(legal) - 1)]):
        m, n, k = blocks(config)
        for size in ((m + 8, 2 * n + 8, 6 * k + 3), (2 * m, n - 8, 4 * k)):
            case = circumstance(name, size)
            tiles = (case.batch or 1) * -(-case.size[0] // m) * -(-case.size[1] // n)
            check(case, persistent(config, Schedule(min(tiles, 5))))
            split = max(1, tiles - 1)
            check(case, persistent(config, Schedule(3 * split, split, parts=3, group=2)))


@hopper
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_in_all_that_the_cost_model_compares(seed: int) -> None:
    """Few of each; in the variants that the test of configurations compiles, too."""
    chance = random.Random(seed)
    for _ in range(6):
        size = tuple(chance.choice([1, 8, 40, 200, 1000, 3000]) + chance.randint(0, 70) for _ in range(3))
        size = (size[0], -(-size[1] // 8) * 8, size[2])
        operands = Operands(Case(size, chance.choice(["nn", "nt", "tn", "tt"]) + "n"))
        problem = operands.problem
        found = [
            (config, schedule)
            for config in warp_specialised.CONFIGS
            if warp_specialised.illegal(problem, gpu(), config) is None
            for schedule in cost_model.schedules(problem, config, gpu())
        ]
        for config, schedule in chance.sample(found, min(10, len(found))):
            operands.check(GemmPlan(problem, persistent(config, schedule), DEVICE), schedule.parts)


@hopper
@pytest.mark.parametrize("swapped", [False, True])
@pytest.mark.parametrize(
    ("packed", "lay"),
    [
        pytest.param(("a",), {"pad": 8}, id="a"),
        pytest.param(("b",), {"pad": 8}, id="b"),
        pytest.param(("a", "b"), {"pad": 1}, id="odd rows"),
        pytest.param(("a", "b"), {"pad": 8, "offset": 3}, id="unaligned"),
        pytest.param(("a", "b"), {"pad": 1, "step": 2}, id="steps"),
        pytest.param(("a", "b"), {"pad": 1, "batch": 3}, id="batch"),
    ],
)
def test_operands_are_copied_to_where_tma_reads(packed: tuple[str, ...], lay: dict, swapped: bool) -> None:
    schedule = Schedule(6, split=2, parts=3)
    choice = persistent(warp_specialised.CONFIGS[3], schedule, packed=packed, swapped=swapped)
    check(Case((300, 264, 517), "ntn", **lay), choice, times=2)


# --- The portable kernel ---

KINDS = {"half": torch.bfloat16, "tf32": torch.float32, "ieee": torch.float32}
LAYS = [
    {"orders": "nnn"},
    {"orders": "ttt", "pad": 1, "gap": 1},
    {"orders": "ntn", "pad": 2, "gap": 2},
    {"orders": "tnt", "step": 2, "pad": 1},
    {"orders": "nnt", "pad": 1, "offset": 1, "batch": 3},
]


@pytest.mark.parametrize(
    ("precision", "config"),
    [
        pytest.param(precision, config, id=f"{precision}-{ids(config)}")
        for precision, configs in portable.CONFIGS.items()
        for config in configs
    ],
)
def test_portable(precision: str, config: GemmConfig) -> None:
    """Each configuration in two of the layouts that it takes, one whole and one split."""
    m, n, k = blocks(config)
    turn = portable.CONFIGS[precision].index(config)
    with fp32_precision("tf32" if precision == "tf32" else "ieee"):

        def cases(lay: dict, split_k: int) -> list[Case]:
            sizes = ((m + 7, 2 * n + 3, 7 * k + 5), (2 * m, n, 8 * k))
            made = [Case(size, dtype=KINDS[precision], integers=size[0] == 2 * m, **lay) for size in sizes]
            return [case for case in made if portable.illegal(Operands(case).problem, gpu(), config, split_k) is None]

        ran = 0
        for first, split_k in ((turn, 1 + 2 * (turn % 2)), (turn + 2, 3 - 2 * (turn % 2))):
            lays = [LAYS[(first + i) % len(LAYS)] for i in range(len(LAYS))]
            found = next((found for lay in lays if (found := cases(lay, split_k))), [])
            for case in found:
                check(case, Selection("portable", config, "by a test", split_k=split_k), times=2)
                ran += 1
    assert ran, "takes no layout"


@pytest.mark.parametrize("name", CIRCUMSTANCES)
@pytest.mark.parametrize("split_k", [1, 4])
def test_portable_in_every_circumstance(split_k: int, name: str) -> None:
    case = circumstance(name, (130, 201, 600), pad=1)
    problem = Operands(case).problem
    legal = [c for c in portable.CONFIGS["half"] if portable.illegal(problem, gpu(), c, split_k) is None]
    check(case, Selection("portable", legal[0], "by a test", split_k=split_k))


# --- The GEMV ---


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("orders", ["nnn", "ntn", "ttt"])
@pytest.mark.parametrize("rows", [1, 3, 4])
def test_gemv(rows: int, orders: str, dtype: torch.dtype) -> None:
    """The default and one other in turn; on whole tiles and with tails, whole and split."""
    for pad, offset, size in ((8, 0, (rows, 2048, 4096)), (1, 1, (rows, 1037, 4099))):
        case = Case(size, orders, pad=pad, offset=offset, dtype=dtype)
        problem = Operands(case).problem
        default, split_k = gemv.default(problem, gpu())
        legal = [config for config in gemv.CONFIGS if gemv.illegal(problem, gpu(), config) is None]
        for config, split in ((default, split_k), (legal[(rows + offset) % len(legal)], 3 if offset else 1)):
            check(case, Selection("gemv", config, "by a test", split_k=split), times=2)


@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_gemv_in_every_circumstance(name: str) -> None:
    """As rows, and as columns."""
    for size, swapped in (((2, 201, 3000), False), ((201, 2, 3000), True)):
        case = circumstance(name, size, pad=1)
        problem = Operands(case).problem
        config, _ = gemv.default(problem.swapped if swapped else problem, gpu())
        check(case, Selection("gemv", config, "by a test", split_k=2, swapped=swapped))


# --- Whatever is selected ---


@pytest.mark.parametrize("seed", range(4))
def test_what_is_selected_for_random_problems(seed: int) -> None:
    """Small and odd ones, in any layout. Few epilogues, so that kernels are compiled once."""
    chance = random.Random(seed)
    for _ in range(12):
        size = tuple(chance.choice([1, 2, 4, 7, 16, 33, 64, 130, 515, 1024]) for _ in range(3))
        lay = chance.choice(LAYS)
        epilogue = chance.choice([{}, {}, {"beta": 1.0, "bias": "n", "activation": "relu"}])
        operands = Operands(Case(size, **lay, **epilogue))
        choice = select(operands.problem, gpu())
        parts = max(choice.split_k, choice.schedule.parts if choice.schedule else 1)
        operands.check(GemmPlan(operands.problem, choice, DEVICE), parts)


SMALL_TILES = next(c for c in portable.CONFIGS["half"] if blocks(c) == (64, 64, 64))
MIDDLE_TILES = next(c for c in warp_specialised.CONFIGS if blocks(c)[:2] == (128, 128))
SELECTIONS = {
    "warp-specialised": lambda: persistent(MIDDLE_TILES, Schedule(gpu().num_sms, split=24, parts=5)),
    "warp-specialised-whole": lambda: persistent(warp_specialised.CONFIGS[0], Schedule(12)),
    "portable": lambda: Selection("portable", SMALL_TILES, "by a test", split_k=4),
}


@pytest.mark.parametrize("name", [pytest.param(n, marks=hopper) if n[0] == "w" else n for n in SELECTIONS])
def test_the_same_bits_whatever_else_runs(name: str) -> None:
    """Programs come and go in any order while another stream keeps the multiprocessors busy."""
    operands = Operands(Case((700, 520, 4100), "ntn"))
    plan = GemmPlan(operands.problem, SELECTIONS[name](), DEVICE)
    operands.check(plan, parts=5)
    other, x = torch.cuda.Stream(), torch.randn(1500, 1500, device=DEVICE)
    torch.cuda.synchronize()
    results = []
    for i in range(20):
        if i >= 5:
            with torch.cuda.stream(other):
                for _ in range(1 + i % 4):
                    x = (x @ x).clamp(-1, 1)
        operands.c.fill_(NAN)
        plan.run(operands.a, operands.b, operands.c)
        results.append(operands.c.clone())
    assert counters_are_zero()
    assert all(torch.equal(result, results[0]) for result in results)


FAR = 2**30 + 8  # elements: three rows span more than 2^31


@pytest.mark.slow
@pytest.mark.parametrize("kernel", [pytest.param("warp_specialised", marks=hopper), "portable", "gemv"])
@pytest.mark.parametrize("which", ["a", "b", "c"])
def test_rows_may_lie_more_than_2_31_elements_apart(which: str, kernel: str) -> None:
    if torch.cuda.mem_get_info()[0] < 8 << 30:
        pytest.skip("needs 8 GiB")
    rows = 3
    M, N, K = (rows, 40, 64) if which in "ac" else (4, 40, rows)
    buffer = torch.empty(2 * FAR + 64, dtype=torch.bfloat16, device=DEVICE)
    shapes = {"a": (M, K), "b": (K, N), "c": (M, N)}
    tensors = {
        name: torch.randn(shape[0], 64, device=DEVICE).to(torch.bfloat16)[:, : shape[1]]
        for name, shape in shapes.items()
    }
    far = buffer.as_strided(shapes[which], (FAR + (which == "c"), 1))  # TMA cannot store that
    tensors[which] = far.copy_(tensors[which])
    a, b, c = tensors.values()
    problem = GemmProblem.of(a, b, c)
    if kernel == "warp_specialised":
        choice = persistent(warp_specialised.CONFIGS[-1], Schedule(2))
    elif kernel == "portable":
        choice = Selection("portable", portable.CONFIGS["half"][-1], "by a test")
    else:
        choice = Selection("gemv", gemv.default(problem, gpu())[0], "by a test")
    GemmPlan(problem, choice, DEVICE).run(a, b, c)
    truth, bound = expected(a, b, None, mode="bf16", out_dtype=c.dtype)
    assert ((c.double() - truth).abs() <= bound).all()
