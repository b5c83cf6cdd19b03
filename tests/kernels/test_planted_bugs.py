"""Each planted bug of a simulated kernel (`planted_bugs.json`) is caught by the check of its group, which passes on the
kernel as it is."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.kernels import test_fma as of_fma
from tests.kernels import test_gated as of_gates
from tests.kernels import test_k_groups as of_k_groups
from tests.kernels import test_mma_fp64 as of_mma_fp64
from tests.kernels import test_preactivation as of_preactivations
from tests.kernels import test_scales as of_scales
from tests.kernels import test_skinny as of_skinny
from tests.kernels.test_addresses_simulated import FEW, KERNELS
from tests.support import planted_bugs
from tests.support.address_recorder import Draw
from tests.support.gluon_on_cpu import simulated
from tests.support.kernel_cases import Case, blocks, of_bytes, reduced
from tests.support.preactivations import check as check_stored
from tests.support.preactivations import check_gated, storing
from tests.support.simulated_plans import check
from tests.support.tiles_on_cpu import CLUSTERED, IN_TURN, check_in_turn, of_few, of_tile, of_width
from triton_gemm.kernels import fma, mma_fp64, skinny, warp_specialised
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.kernels.warp_specialised.configs import GATED

# A bug's changes: a piece of the source, what replaces it, and so on.
BUGS: dict[str, dict[str, list[str]]] = json.loads(Path(__file__).with_name("planted_bugs.json").read_text())
BYTES = warp_specialised.configs(torch.int8)
SPLIT = Schedule(9, split_tiles=3, split_k=3)
Module = SimpleNamespace


def sums(module: Module) -> None:
    """By one of two configurations: with four epilogue tiles and four buffers, or one and two."""
    for config, tiles in ((of_tile(128, 256), 18), (of_tile(128, 64), 54)):
        for schedule in (Schedule(3, group_m=2), Schedule(3 * tiles, tiles, split_k=3, group_m=2)):
            check(Case((330, 520, 700), "nnn", batch=2), config, schedule, module)


def bytes_(module: Module) -> None:
    config = of_tile(128, 192, among=BYTES)
    for case in of_bytes(config, 0):
        check(case, config, SPLIT, module)


def clusters(module: Module) -> None:
    """In 4 x 2 CTAs, with a tail that has fewer slices than CTAs share it: where C is read, else one `wgmma` spans
    both."""
    config = next(c for c in CLUSTERED if (c.BLOCK_M, c.BLOCK_N) == (64, 144) and c.CLUSTER_M == 4)
    check(Case((250, 280, 1000), "ntn", beta=0.5), config, Schedule(1), module)
    check(Case((250, 280, 1000), "nnn"), config, Schedule(3, split_tiles=1, split_k=3), module)


def widths(module: Module) -> None:
    """In tiles of one wide store and three narrow ones, shared by four, whose last slice ends beyond the tile; of three
    and three, with two blocks of rows; and of three and five, one of which is wide and of the tail."""
    check(Case((520, 168, 700), "ntn"), of_width(64, 88, (4, 1)), Schedule(1), module)
    for orders in ("ttn", "ntn"):
        split = Schedule(6, split_tiles=2, split_k=3)
        check(Case((264, 112, 500), orders, bias="n"), of_width(256, 120), split, module)
    check(Case((120, 456, 500), "ntn"), of_width(64, 232), Schedule(3), module)
    for orders in ("ttn", "ntn"):
        check(Case((250, 112, 700), orders), of_width(256, 112, k=128), Schedule(1), module)


def few_rows(module: Module) -> None:
    """In tiles with a tail and without, A along K and across it."""
    for few in (5, 20):
        check(Case((few, 120, 700), "ntn"), of_few((64, 64, 128)), Schedule(1), module)
        check(Case((120, few, 700), "ntt"), of_few((64, 64, 128)), Schedule(1), module)
    check(Case((72, 40, 300), "ntn"), of_width(64, 88), Schedule(1), module)
    check(Case((24, 64, 300), "ttn"), of_few((64, 64, 64)), Schedule(1), module)


def beta(module: Module) -> None:
    """In eight epilogue tiles through four buffers."""
    for schedule in (Schedule(3, group_m=2), Schedule(6, split_tiles=2, split_k=3, group_m=2)):
        check(Case((330, 520, 400), "nnn", beta=0.5), of_tile(128, 256), schedule, module)


unchanged = cache(partial(simulated, "warp_specialised"))


def in_turn(module: Module) -> None:
    """In tiles with a tail, by one `wgmma` or two, in parts of unequal lengths, and in some that are empty."""
    for config, orders in ((of_width(64, 88), "ntn"), (next(c for c in IN_TURN if c.tail_n), "nnn")):
        m, n, k = blocks(config)
        for depth in (8 * k - 3, 2 * k):
            check_in_turn(Case((m + 8, n + 8, depth), orders, out_dtype=torch.float32), config, 3, unchanged(), module)


def second_launch(module: Module) -> None:
    config = of_tile(64, 32, 128)
    for case in (
        Case((73, 40, 600), "ntn", batch=2, alpha=0.7),
        Case((73, 40, 600), "ntn", batch=3, between=True),
        Case((65, 40, 2310), "nnn"),
    ):
        check(case, config, reduced(case, config, 18 if case.batch is None else 3), module)


def promotion(module: Module) -> None:
    for tile, scales in ((of_scales.BY_ROWS, "rows"), (of_scales.BY_COLUMNS, "blocks"), (of_scales.DEEP, "rows")):
        check(of_scales.case(scales), tile, SPLIT, module)


def scales(module: Module, kind: str) -> None:
    for exponents in ((-106, -146), (-40, -146), (115, 0), (-115, 0), (60, 80)):
        of_scales.check(kind, exponents, "whole", module)


def preactivations(module: Module) -> None:
    """By TMA and by pointers, less than a tile; and in narrow epilogue tiles."""
    plan_of, narrow = of_preactivations.plan_of, of_preactivations.NARROW
    for name in ("batch", "residual-batch"):
        check_stored(storing(name, (40, 24, 200)), plan_of(module, of_tile(64, 32), Schedule(3)))
    check_stored(storing("bias-n", (72, 88, 200)), plan_of(module, narrow, Schedule(1)))


def preactivations_of_gates(module: Module) -> None:
    plan_of = of_preactivations.plan_of(module, GATE, Schedule(2))
    check_gated((70, 136, 200), "swiglu", plan_of, biased=True)
    of_preactivations.check_groups(module)


def outer_products(module: Module) -> None:
    for split_k in of_fma.SPLITS:
        for orders in ("tnn", "nnn"):
            case = Case((70, 75, 99), orders, batch=2, pad=1 if orders == "nnn" else 8, alpha=0.5, **of_fma.FP32)
            of_fma.check(case, fma.CONFIGS[-1], split_k, module)


def skinny_tiles(module: Module) -> None:
    for config in skinny.CONFIGS[::2]:
        for size in ((19, 5, 1304), (5, 19, 1304), (5, 19, 136)):
            of_skinny.check(Case(size, "ntn", pad=64, batch=2), config, module)


def fp64(module: Module) -> None:
    main, last = mma_fp64.CONFIGS[0], mma_fp64.CONFIGS[-1]
    for K, orders, config in ((99, "tnn", main), (99, "ntn", last), (29, "tnn", main)):
        case = Case((70, 75, K), orders, batch=2, pad=1 if orders == "ntn" else 8, alpha=0.5, **of_mma_fp64.FP64)
        of_mma_fp64.check(case, config, module)


def addresses(module: Module, kernel: str) -> None:
    for seed in range(FEW):
        KERNELS[kernel](module, Draw(seed))


PLANES = Case((70, 72, 1050), "ntn", dtype=torch.float32, precision="bf16x6")
GATE = of_tile(64, 64, among=GATED)
WARP_SPECIALISED: dict[str, Callable[[Module], None]] = {
    **{"sums": sums, "bytes": bytes_, "clusters": clusters, "widths": widths, "few rows": few_rows, "beta": beta},
    **{"parts in turn": in_turn, "second launch": second_launch, "promotion": promotion},
    "planes": partial(check, PLANES, of_tile(128, 128), Schedule(2)),
    "scales of rows": partial(scales, kind="fp8-rows"),
    "scales of matrices": partial(scales, kind="fp8-tensor"),
    "groups of K": partial(of_k_groups.of_sizes, config=of_k_groups.SMALL),
    "gates": partial(of_gates.check, config=GATE, size=(70, 136, 200), programs=2, name="swiglu", biased=True),
    "gates of groups": partial(of_gates.check_groups, config=GATE, name="swiglu"),
    **{"preactivations": preactivations, "preactivations of gates": preactivations_of_gates},
}
# The kernel of each group, and its check.
CHECKS: dict[str, tuple[str, Callable[[Module], None]]] = {
    **{group: ("warp_specialised", one) for group, one in WARP_SPECIALISED.items()},
    **{"fma": ("fma", outer_products), "skinny": ("skinny", skinny_tiles), "mma_fp64": ("mma_fp64", fp64)},
    **{f"addresses of {kernel}": (kernel, partial(addresses, kernel=kernel)) for kernel in KERNELS},
}


def test_every_group_has_a_check() -> None:
    assert set(BUGS) == set(CHECKS)


@pytest.mark.parametrize(
    ("group", "bug"),
    [
        pytest.param(group, bug, id=f"{group}: {bug}")
        for group, bugs in BUGS.items()
        for bug in (planted_bugs.UNCHANGED, *bugs)
    ],
)
def test_planted_bugs_are_caught(group: str, bug: str) -> None:
    kernel, check_of_group = CHECKS[group]
    changes = BUGS[group].get(bug, [])
    module = simulated(kernel, [*zip(changes[::2], changes[1::2], strict=True)])
    with planted_bugs.caught(bug):
        for _ in range(4 if changes else 1):  # programs that overwrite each other's sums may run one after the other
            check_of_group(module)
