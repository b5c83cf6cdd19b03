"""What every product must do, whoever computes it: the same checks for rungs, their mutants, and matmul.

Each operand is a window in a buffer of NaN and the output a window in a buffer of sentinels, so that what is read
or written outside shows. The output itself starts as NaN unless it is read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial

import torch

from tests.support.numerics import error_bound, mode_of, reference
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import Rung

NAN = float("nan")
SENTINEL = -77.0  # exact in every dtype

SCALARS = [(1.0, 0.0), (1.0, 1.0), (-0.5, 2.0), (0.0, 3.0)]


@dataclass(frozen=True)
class Product:
    """Something that computes c = alpha a @ b + beta c, and what may be asked of it.

    mode: how it multiplies, a key of perf.measure.numerics.ARITHMETIC. tma: operands need a base on 16 bytes, a unit
    stride and the other a multiple of 16 bytes, and c is row-major. scaled: whether it takes alpha and beta.
    """

    multiply: Callable[[torch.Tensor, torch.Tensor, torch.Tensor, float, float], object]
    dtype: torch.dtype
    mode: str
    out_dtype: torch.dtype
    device: str = "cpu"
    tma: bool = False
    scaled: bool = True

    @property
    def scalars(self) -> list[tuple[float, float]]:
        return SCALARS if self.scaled else SCALARS[:1]


def of_rung(
    rung: Rung,
    dtype: torch.dtype,
    config: GemmConfig | None,
    device: str = "cpu",
    out_dtype: torch.dtype | None = None,
    launch: Callable[..., object] | None = None,
) -> Product:
    """`rung`, or a mutant's `launch` in its place, on operands of `dtype`."""
    call = launch or rung.launch
    return Product(
        lambda a, b, c, alpha, beta: call(a, b, c, alpha, beta, config=config),
        dtype,
        mode_of(rung.precision, dtype),
        out_dtype or dtype,
        device,
        tma=rung.descriptors,
    )


@dataclass(frozen=True)
class View:
    """How matrices lie in memory. orders: of a, b and c, `n` row-major or `t` column-major.

    gap: unused elements after each row (or column); step: distance of neighbours in it; offset: of the first element
    from a 16-byte boundary; expanded: a's rows are one row, b's columns one column, by a stride of 0.
    """

    orders: str = "nnn"
    gap: int = 0
    step: int = 1
    offset: int = 0
    expanded: bool = False


VIEWS: dict[str, View] = {
    "nn": View(),
    "nt": View("ntn"),
    "tn": View("tnn"),
    "tt": View("ttn"),
    "gaps": View(gap=3),
    "steps": View("tnt", gap=5, step=2),
    "unaligned": View(offset=1),
    "c-column-major": View("nnt"),
    "expanded": View(expanded=True),
}
# TMA takes these, once rows are padded to 16 bytes.
TMA_VIEWS = ["nn", "nt", "tn", "tt", "gaps"]


def views(product: Product) -> list[str]:
    return TMA_VIEWS if product.tma else list(VIEWS)


def place(matrix: torch.Tensor, order: str, view: View, fill: float, *, tma: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """(buffer full of `fill`, copy of the matrix in the midst of it).

    The margins hold what a kernel touches that swaps strides or forgets a mask: it must fail, not crash.
    """
    rows, columns = matrix.shape
    outer, inner = (rows, columns) if order == "n" else (columns, rows)
    pitch = inner * view.step + view.gap
    if tma:
        pitch = max(8, -(-pitch // 8) * 8)
    margin = (max(outer, inner) + 256) * max(pitch, view.step) // 64 * 64 + 64
    buffer = torch.full((2 * margin + outer * pitch,), fill, dtype=matrix.dtype, device=matrix.device)
    strides = (pitch, view.step) if order == "n" else (view.step, pitch)
    window = buffer.as_strided((rows, columns), strides, margin + view.offset)
    window.copy_(matrix)
    return buffer, window


def run(
    product: Product,
    a: torch.Tensor,
    b: torch.Tensor,
    c0: torch.Tensor,
    alpha: float = 1.0,
    beta: float = 0.0,
    view: View = VIEWS["nn"],
) -> torch.Tensor:
    """The product's result; fails if it reads operands it must not, or writes anything but c."""
    order_a, order_b, order_c = view.orders
    kept_a, a_window = place(a[:1] if view.expanded else a, order_a, view, nothing(a.dtype), tma=product.tma)
    kept_b, b_window = place(b[:, :1] if view.expanded else b, order_b, view, nothing(a.dtype), tma=product.tma)
    a_window, b_window = a_window.expand_as(a), b_window.expand_as(b)
    start = c0 if beta != 0 else torch.full_like(c0, nothing(c0.dtype))
    buffer, c = place(start, order_c, view, SENTINEL, tma=product.tma)
    before = [x.clone() for x in (kept_a, kept_b)]

    product.multiply(a_window, b_window, c, alpha, beta)

    result = c.clone(memory_format=torch.contiguous_format)
    c.fill_(SENTINEL)
    assert (buffer == SENTINEL).all(), "wrote outside c"
    for kept, was in zip((kept_a, kept_b), before, strict=True):
        assert torch.equal(kept.nan_to_num(SENTINEL), was.nan_to_num(SENTINEL)), "changed an operand"
    return result


def nothing(dtype: torch.dtype) -> float:
    """What is no element of a matrix."""
    return NAN if dtype.is_floating_point else 101


def drawn_as(dtype: torch.dtype) -> torch.dtype:
    """The dtype that normal numbers are drawn in for `dtype`: of fp64 all bits."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def operands(
    product: Product, size: tuple[int, int, int], kind: str = "normal", *, expanded: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """a, b and the c to start from: `normal`, `integers` from -6 to 6, or `wide`, whose rows differ in scale."""
    M, N, K = size
    if product.tma:
        N = -(-N // 8) * 8  # TMA stores whole 16 bytes
    generator = torch.Generator().manual_seed(M + 1000 * N + 1_000_000 * K)

    def draw(rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        if kind == "integers":
            drawn = torch.randint(-6, 7, (rows, columns), generator=generator).float()
        else:
            drawn = torch.randn(rows, columns, generator=generator, dtype=drawn_as(dtype))
        if kind == "wide":
            drawn *= 2.0 ** torch.randint(-3, 4, (rows, 1), generator=generator)
        return drawn.to(dtype).to(product.device)

    a, b, c0 = draw(M, K, product.dtype), draw(K, N, product.dtype), draw(M, N, product.out_dtype)
    if expanded:
        a, b = a[:1].expand(M, K), b[:, :1].expand(K, N)
    return a, b, c0


def error_within_bound(
    product: Product,
    size: tuple[int, int, int],
    view: View = VIEWS["nn"],
    alpha: float = 1.0,
    beta: float = 0.0,
    kind: str = "normal",
) -> None:
    """Every element is as near to fp64 as rounding allows."""
    a, b, c0 = operands(product, size, kind, expanded=view.expanded)
    c = run(product, a, b, c0, alpha, beta, view)
    error = (c.double() - reference(a, b, c0, alpha, beta)).abs()
    bound = error_bound(a, b, c0, alpha, beta, product.mode, product.out_dtype)
    wrong = ~(error <= bound)  # NaN is wrong
    assert not wrong.any(), (
        f"alpha={alpha} beta={beta}: {int(wrong.sum())} of {wrong.numel()} elements, the first at "
        f"{wrong.nonzero()[0].tolist()}, are up to {(error / bound).nan_to_num(torch.inf).max():.3g} times the bound"
    )


def integers_exact(
    product: Product, size: tuple[int, int, int], view: View = VIEWS["nn"], alpha: float = 1.0, beta: float = 0.0
) -> None:
    """Sums of small integers are exact, and rounded once, to nearest even, when they are stored."""
    a, b, c0 = operands(product, size, "integers", expanded=view.expanded)
    c = run(product, a, b, c0, alpha, beta, view)
    assert torch.equal(c, reference(a, b, c0, alpha, beta).to(product.out_dtype))


def a_nan_stays_in_its_row(product: Product, size: tuple[int, int, int]) -> None:
    a, b, c0 = operands(product, size)
    row = size[0] // 2
    a[row, size[2] - 1] = NAN
    c = run(product, a, b, c0)
    assert c[row].isnan().all(), "a NaN was lost"
    assert int(c.isnan().sum()) == c.shape[1], "a NaN reached another row"


def alpha_zero_reads_no_operand(product: Product, size: tuple[int, int, int]) -> None:
    a, b, c0 = operands(product, size, "integers")
    c = run(product, a.fill_(NAN), b.fill_(torch.inf), c0, 0.0, 2.0)
    assert torch.equal(c, 2 * c0)
    assert (run(product, a, b, c0, 0.0, 0.0) == 0).all()


def beta_zero_does_not_read_c(product: Product, size: tuple[int, int, int]) -> None:
    a, b, c0 = operands(product, size, "integers")
    c = run(product, a, b, c0)  # into NaN
    assert not c.isnan().any()


def copies_are_exact(product: Product, size: tuple[int, int, int]) -> None:
    """A permutation's product copies bits: rows of b in another order, subnormals and the largest included."""
    M, N, K = size
    if product.tma:
        N = -(-N // 8) * 8  # TMA stores whole 16 bytes
    generator = torch.Generator().manual_seed(0)
    rows = torch.randint(K, (M,), generator=generator)
    a = torch.nn.functional.one_hot(rows, K).to(product.dtype)
    b = torch.randn(K, N, generator=generator).to(product.dtype)
    limits = torch.finfo(product.dtype)
    b[:, 0], b[:, -1] = limits.max, -limits.tiny
    if product.mode.startswith("tf32"):  # what ten bits of mantissa hold
        b = (b.view(torch.int32) & ~0x1FFF).view(torch.float32)
    elif product.mode == "bf16x3":  # what two planes hold
        b = (b.view(torch.int32) & ~0xFF).view(torch.float32)
    elif product.device != "cpu" or product.dtype != torch.bfloat16:  # the interpreter flushes bf16's subnormals
        b[:, N // 2] = limits.smallest_normal / 4
    a, b, rows = a.to(product.device), b.to(product.device), rows.to(product.device)
    c = run(product, a, b, torch.zeros(M, N, dtype=product.out_dtype, device=product.device))
    assert torch.equal(c, b[rows].to(product.out_dtype))


Check = Callable[[Product, tuple[int, int, int]], None]

# What is asked once, on one size: the sizes and views are the error's and the integers'.
RULES: dict[str, Check] = {
    check.__name__: check
    for check in (a_nan_stays_in_its_row, alpha_zero_reads_no_operand, beta_zero_does_not_read_c, copies_are_exact)
}


@contextmanager
def fp32_precision(value: str) -> Iterator[None]:
    """torch's setting for fp32 products; pytest's monkeypatch cannot undo it."""
    settings = torch.backends.cuda.matmul
    before, settings.fp32_precision = settings.fp32_precision, value
    try:
        yield
    finally:
        settings.fp32_precision = before


def tf32_edges() -> torch.Tensor:
    """fp32 values on which rounding to TF32 can go wrong: ties, their neighbours, carries, the ends of the range."""
    one = 0x3F800000
    bits = [one + low for low in (0, 1, 0xFFF, 0x1000, 0x1001, 0x1FFF, 0x2000, 0x2FFF, 0x3000, 0x3001)]
    bits += [0x3FFFEFFF, 0x3FFFF000, 0x3FFFFFFF]  # the mantissa carries into the exponent
    bits += [0x7F7FE000, 0x7F7FEFFF, 0x7F7FF000, 0x7F7FFFFF, 0x7F800000]  # the largest, and inf
    bits += [0, 1, 0xFFF, 0x1000, 0x1001, 0x2000, 0x7FEFFF, 0x7FF000, 0x7FFFFF, 0x800000]  # subnormals
    bits += [0x7FC00000, 0x7F800001, 0x7FFFFFFF]  # NaN
    bits += torch.randint(0x7F800000, (1000,), generator=torch.Generator().manual_seed(0)).tolist()
    positive = torch.tensor(bits, dtype=torch.int32).view(torch.float32)
    return torch.cat([positive, -positive])


def nearest_tf32(x: torch.Tensor) -> torch.Tensor:
    """x rounded to ten bits of mantissa, to nearest, ties away from zero: what `cvt.rna.tf32.f32` gives."""
    wide = x.double()
    exponent = torch.frexp(wide)[1].clamp(min=-125)  # of 2^exponent > |x|; subnormals share the least
    quantum = torch.ldexp(torch.ones_like(wide), exponent - 11)
    nearest = torch.floor(wide.abs() / quantum + 0.5) * quantum
    return torch.where(x.isfinite(), torch.copysign(nearest, wide), wide).float()


def same_bits(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Equal bit for bit, all NaNs being alike."""
    alike = (x.view(torch.int32) == y.view(torch.int32)) | (x.isnan() & y.isnan())
    return bool(alike.all())


def battery(product: Product, sizes: dict[str, tuple[int, int, int]]) -> dict[str, Callable[[], None]]:
    """Every check by name, each on few sizes: what an honest product passes and no mutant does."""
    steps: dict[str, Callable[[], None]] = {}
    for name, size in sizes.items():
        for alpha, beta in product.scalars:
            steps[f"error {name} {alpha:g} {beta:g}"] = partial(
                error_within_bound, product, size, VIEWS["nn"], alpha, beta
            )
    size = next(iter(sizes.values()))
    for name in views(product):
        steps[f"integers {name}"] = partial(integers_exact, product, size, VIEWS[name])
    for name, rule in RULES.items():
        if product.scaled or rule is not alpha_zero_reads_no_operand:
            steps[name] = partial(rule, product, size)
    return steps
