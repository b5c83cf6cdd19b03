"""Every twin on a GPU: against fp64, exact on integers, touching nothing that it should not."""

import itertools

import pytest
import torch

from reference_cuda import TWINS, LoadedTwin, TwinUnavailable, Variant, load_all
from tests.gpu.calls import captured, launched
from tests.support.numerics import reference
from tests.support.product_checks import (
    SCALARS,
    Check,
    Product,
    View,
    a_nan_stays_in_its_row,
    alpha_zero_reads_no_operand,
    error_within_bound,
    integers_exact,
    operands,
    run,
)

SHAPES = [
    pytest.param((127, 65, 33), id="ragged"),
    pytest.param((513, 257, 129), id="ragged-large"),
    pytest.param((1, 1, 1), id="one"),
    pytest.param((256, 192, 64), id="aligned"),
    pytest.param((144, 272, 48), id="whole-fragments"),
    pytest.param((136, 72, 1000), id="k-tail"),
    pytest.param((130, 66, 1), id="k-one"),
    pytest.param((64, 128, 0), id="k-zero"),
    pytest.param((1, 300, 77), id="one-row"),
    pytest.param((300, 1, 77), id="one-column"),
]
VARIANTS = [
    pytest.param(stem, variant, id=f"{stem}-{variant.name}")
    for stem, twin in TWINS.items()
    for variant in twin.variants
]
FLOAT_VARIANTS = [param for param in VARIANTS if param.values[1].dtype.is_floating_point]
DEFAULTS = [pytest.param(stem, twin.variants[0], id=stem) for stem, twin in TWINS.items()]


@pytest.fixture(scope="session")
def twins() -> dict[str, LoadedTwin]:
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    loaded = load_all()
    for result in loaded.values():
        if isinstance(result, TwinUnavailable):
            pytest.fail(str(result))
    return loaded


def product_of(twin: LoadedTwin, variant: Variant) -> Product:
    def multiply(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> None:
        twin.launch(a, b, c, alpha, beta, variant=variant.name)

    return Product(multiply, variant.dtype, twin.twin.precision, variant.out_dtype, "cuda")


@pytest.mark.parametrize("offset", [0, 1], ids=["on-16-bytes", "off-16-bytes"])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stem", "variant"), FLOAT_VARIANTS)
def test_error_is_within_the_bound(
    twins: dict[str, LoadedTwin], stem: str, variant: Variant, shape: tuple[int, int, int], offset: int
) -> None:
    for alpha, beta in (*SCALARS, (2, 0)):
        error_within_bound(product_of(twins[stem], variant), shape, View(offset=offset), alpha, beta)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize(("stem", "variant"), VARIANTS)
def test_integers_are_exact(
    twins: dict[str, LoadedTwin], stem: str, variant: Variant, shape: tuple[int, int, int]
) -> None:
    for (alpha, beta), offset in itertools.product([(1, 0), (3, -2)], [0, 1]):
        integers_exact(product_of(twins[stem], variant), shape, View(offset=offset), alpha, beta)


@pytest.mark.parametrize(("stem", "variant"), [p for p in VARIANTS if p.values[1].dtype == torch.int32])
def test_int32_is_exact_beyond_what_fp32_holds(twins: dict[str, LoadedTwin], stem: str, variant: Variant) -> None:
    a, b, c0 = (
        torch.randint(-4000, 4001, shape, dtype=torch.int32, device="cuda")
        for shape in ((67, 100), (100, 45), (67, 45))
    )
    c = run(product_of(twins[stem], variant), a, b, c0, 1, -100_001)
    assert torch.equal(c.double(), reference(a, b, c0, 1, -100_001))


@pytest.mark.parametrize("rule", [a_nan_stays_in_its_row, alpha_zero_reads_no_operand])
@pytest.mark.parametrize(("stem", "variant"), FLOAT_VARIANTS)
def test_rules(twins: dict[str, LoadedTwin], stem: str, variant: Variant, rule: Check) -> None:
    rule(product_of(twins[stem], variant), (70, 90, 50))


@pytest.mark.parametrize("shape", [(0, 5, 7), (5, 0, 7), (0, 0, 0)])
@pytest.mark.parametrize(("stem", "variant"), DEFAULTS)
def test_empty_results_are_no_launch(
    twins: dict[str, LoadedTwin], stem: str, variant: Variant, shape: tuple[int, int, int]
) -> None:
    a, b, c = operands(product_of(twins[stem], variant), shape)
    torch.cuda.synchronize()
    assert launched(lambda: twins[stem].launch(a, b, c)) == []


@pytest.mark.parametrize(("stem", "variant"), DEFAULTS)
def test_launches_on_the_current_stream(twins: dict[str, LoadedTwin], stem: str, variant: Variant) -> None:
    a, b, c = operands(product_of(twins[stem], variant), (64, 64, 64), "integers")
    graph, _ = captured(lambda: twins[stem].launch(a, b, c))
    c.zero_()
    graph.replay()
    assert torch.equal(c.double(), reference(a, b))


# More than 2^31 elements of C, then of A.
@pytest.mark.parametrize("shape", [(131072, 16400, 1), (131072, 8, 16400)], ids=["in-c", "in-a"])
@pytest.mark.parametrize(("stem", "variant"), DEFAULTS)
def test_offsets_pass_2_to_the_31(
    twins: dict[str, LoadedTwin], stem: str, variant: Variant, shape: tuple[int, int, int]
) -> None:
    m, n, k = shape
    if torch.cuda.mem_get_info()[0] < 12 << 30:
        pytest.skip("needs 12 GiB of free GPU memory")
    a = torch.ones(m, k, dtype=variant.dtype, device="cuda")
    b = torch.ones(k, n, dtype=variant.dtype, device="cuda")
    c = torch.full((m, n), float("nan"), device="cuda")
    a[-2:] = 2
    twins[stem].launch(a, b, c)
    assert (c[-2:] == 2 * k).all() and (c[:-2].amax(), c[:-2].amin()) == (k, k)


def test_a_cuda_error_says_which_launch(twins: dict[str, LoadedTwin]) -> None:
    with pytest.raises(RuntimeError, match="invalid argument"):
        twins["c01_naive_uncoalesced"].module.launch("no such", 0, 0, 0, 1, 1, 1, 1.0, 0.0, 0)
