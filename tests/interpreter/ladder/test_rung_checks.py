"""Wrong launches of rungs raise, in the interpreter as on a GPU, and touch nothing."""

import itertools
import math

import numpy
import pytest
import torch
import triton

from tests.support.tiers import one
from tests.support.wrong_launches import K, M, N, Wrong, cases
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung, k04_grouped, k11_warp_specialised

RUNGS = {rung.id: rung for rung in LADDER if rung.interpretable}


@cases(RUNGS.values(), "cpu", own=False)
def test_a_wrong_launch_raises_and_writes_nothing(rung: Rung, wrong: Wrong) -> None:
    before = [x.clone() if isinstance(x, torch.Tensor) and not x.is_sparse else None for x in wrong.operands]
    with pytest.raises(wrong.error, match=wrong.text):
        wrong.launch(rung)
    for x, was in zip(wrong.operands, before, strict=True):
        assert was is None or torch.equal(x, was)


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
def test_what_is_right_is_launched(rung: Rung) -> None:
    """Configurations that are on no list among them."""
    a, b, c = (torch.ones(shape, dtype=rung.dtypes[0]) for shape in ((M, K), (K, N), (M, N)))
    fields = rung.configs[0].meta()
    unlisted = GemmConfig(**dict.fromkeys(fields, 16))
    assert unlisted not in rung.configs
    for config in (None, rung.configs[-1], unlisted):
        for dtype in rung.out_dtypes:
            out = torch.full_like(c, float("nan"), dtype=dtype)
            rung.launch(a, b, out, config=config)
            assert (out == K).all()


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("rung", RUNGS.values(), ids=RUNGS)
def test_operands_with_the_negative_bit(rung: Rung) -> None:
    """Which `x.conj().imag` has: memory holds the values with the other sign."""
    dtype = rung.dtypes[0]
    generator = torch.Generator().manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randint(-3, 4, shape, generator=generator).to(dtype)

    values = draw(M, K), draw(K, N), draw(M, N)
    expected = 2 * values[0].double() @ values[1].double() + 3 * values[2].double()
    for negative in itertools.product((False, True), repeat=3):
        a, b, c = (torch._neg_view(-x) if bit else x.clone() for x, bit in zip(values, negative, strict=True))
        assert (a.is_neg(), b.is_neg(), c.is_neg()) == negative
        rung.launch(a, b, c, 2, 3)
        assert c.is_neg() == negative[2] and torch.equal(c.double(), expected)


def test_the_imaginary_part_of_a_conjugate() -> None:
    x = torch.complex(torch.ones(32, 32), torch.full((32, 32), 2.0))
    for a, value in ((x.imag, 2.0), (x.conj().imag, -2.0), (x.conj().real, 1.0)):
        c = torch.empty(32, 32)
        k04_grouped.launch(a, torch.eye(32), c)
        assert (c == value).all()


@pytest.mark.filterwarnings("ignore:invalid value")  # infinity times 0
@pytest.mark.parametrize("alpha", [2, True, 0.5, float("nan"), float("inf"), numpy.float32(0.5), numpy.int64(3), 2**70])
def test_alpha_and_beta_are_any_real_numbers(alpha: float) -> None:
    for rung in (RUNGS["k01"], RUNGS["k10"]):
        a, c = torch.eye(32, dtype=rung.dtypes[0]), torch.empty(32, 32, dtype=rung.out_dtypes[-1])
        rung.launch(a, a, c, alpha)
        assert torch.equal(c[0, :1], torch.full((1,), float(alpha), dtype=c.dtype)) or math.isnan(c[0, 0])
        rung.launch(a, a, c.fill_(1), 0, alpha)
        assert torch.equal(c[0, 1:2], torch.full((1,), float(alpha), dtype=c.dtype)) or math.isnan(c[0, 1])
        assert math.isnan(alpha) == math.isnan(c[0, 1])


def test_c_may_not_lie_in_an_operand() -> None:
    memory = torch.ones(64, 64)
    a, b = memory[:32, :32], memory[:32, 32:]  # halves of the same rows
    for c, name in ((a, "a"), (b, "b"), (a.T, "a")):
        with pytest.raises(ValueError, match=f"k04_grouped: c lies in the memory of {name}, which is still read"):
            k04_grouped.launch(a, b, c)
    assert (memory == 1).all()
    whole = torch.ones(96, 32)
    with pytest.raises(ValueError, match="c lies in the memory of b"):
        k04_grouped.launch(whole[:32], whole[32:64], whole[48:80])
    k04_grouped.launch(a, b, memory[32:, :32])
    k04_grouped.launch(whole[:32], whole[32:64], whole[64:])
    assert (memory[32:, :32] == 32).all() and (whole[64:] == 32).all()


@pytest.mark.parametrize("rung", [rung for rung in RUNGS.values() if len(rung.configs) > 1], ids=lambda rung: rung.id)
def test_a_users_configurations_run(rung: Rung) -> None:
    """The interpreter takes the first, as it does of the rung's own; k10's sets its descriptors' blocks."""
    a, b, c = (torch.ones(shape, dtype=rung.dtypes[0]) for shape in ((M, K), (K, N), (M, N)))
    mine = triton.Config(dict.fromkeys(rung.configs[0].meta(), 16), num_warps=2, num_stages=2)
    for configs in ([mine], [mine, rung.configs[0]]):
        rung.launch(a, b, c.fill_(float("nan")), configs=configs)
        assert (c == K).all()


def test_the_modules_own_launch_checks_too() -> None:
    a = torch.ones(32, 32)
    with pytest.raises(ValueError, match="k04_grouped: c has shape"):
        k04_grouped.launch(a, a, torch.empty(8, 32))
    assert k04_grouped.launch.__doc__.startswith("c = alpha a @ b")


def test_devices_must_be_one_and_have_memory() -> None:
    a, meta = torch.ones(32, 32), torch.ones(32, 32, device="meta")
    with pytest.raises(ValueError, match="a is on cpu, b on cpu, c on meta; move them to one device"):
        k04_grouped.launch(a, a, meta)
    with pytest.raises(ValueError, match="interpreter wants them on the CPU"):
        k04_grouped.launch(meta, meta, meta)


def test_gluon_is_not_interpreted() -> None:
    a = torch.ones(64, 64, dtype=torch.float16)
    with pytest.raises(ValueError, match="knows no Gluon"):
        k11_warp_specialised.launch(a, a, a.clone())
