"""Wrong launches of rungs raise, in the interpreter as on a GPU, and touch nothing."""

import pytest
import torch
import triton

from tests.tiers import one
from tests.wrong_launches import K, M, N, Wrong, wrong_launches
from triton_gemm.config import GemmConfig
from triton_gemm.ladder import LADDER, Rung, k04_grouped, k11_warp_specialised

RUNGS = {rung.id: rung for rung in LADDER if rung.interpretable}


@pytest.mark.parametrize(
    ("rung", "wrong"),
    [
        pytest.param(rung, wrong, id=f"{rung.id}-{name}")
        for rung in RUNGS.values()
        for name, wrong in wrong_launches(rung, "cpu").items()
    ],
)
def test_a_wrong_launch_raises_and_writes_nothing(rung: Rung, wrong: Wrong) -> None:
    before = [x.clone() if isinstance(x, torch.Tensor) and not x.is_sparse else None for x in wrong.operands]
    with pytest.raises(wrong.error, match=wrong.says):
        rung.launch(*wrong.operands, 1.0, 2.0, config=wrong.config, configs=wrong.configs)
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
