"""Every address that kernels on pointers read or write is that of an element, whatever the shapes and strides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path
from types import ModuleType

import pytest
import torch
from torch import Tensor

from tests.support import planted_bugs
from tests.support.address_recorder import (
    ANYHOW,
    FAR,
    LONGEST,
    READ,
    READ_FIRST,
    RESULT,
    Draw,
    Recorder,
    handed_on,
    operands_of,
    recorded,
)
from tests.support.kernel_mutants import MUTANTS, ROWS_OF_32_BITS, Mutant, kernels_with, mutant
from tests.support.table_fakes import HOPPER
from tests.support.tiers import one
from triton_gemm import kernels
from triton_gemm.arithmetic import ARITHMETICS
from triton_gemm.kernels.launch import Launch
from triton_gemm.ladder import LADDER
from triton_gemm.problem import GemmProblem, Layout


def part(package: ModuleType, name: str) -> ModuleType:
    """A module of triton_gemm.kernels, or of a copy of it."""
    return import_module(f"{package.__name__}.{name}")


def launch(recorder: Recorder, package: ModuleType, launches: tuple[Launch, ...], operands: dict[str, Tensor]) -> None:
    """Runs launches on the recorder's operands and what they hand on to one another."""
    operands |= handed_on(recorder, launches)
    for made in launches:
        made.kernel[made.grid](
            **part(package, "launch").materialise(made, operands, {"alpha": 1.0, "beta": 1.0}), **made.options
        )
    recorder.check()


# ---- Kernels ----


def portable(package: ModuleType, draw: Draw) -> None:
    module = part(package, "portable")
    shape = draw.choice([(32, 32, 16), (64, 16, 32), (16, 64, 32)])
    config = module.Config(*shape, num_warps=4, num_stages=2, GROUP_M=draw.choice([1, 2]))
    dtype, precision = draw.choice(
        [(torch.float16, "half"), (torch.float32, "ieee"), (torch.float64, "fp64"), (torch.int8, "int8")]
    )
    out_dtype = (
        torch.int32 if dtype == torch.int8 else draw.choice([dtype, torch.float32]) if dtype.itemsize == 2 else dtype
    )
    m, n, k = shape
    a, b, c = draw.product(dtype, (draw.side(m), draw.near(n), draw.near(k, 6)), out_dtype)
    problem = GemmProblem.of(
        a, b, c, precision=precision, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"])
    )
    long = problem.M == LONGEST
    step, split_k = (1, 1) if long else (draw.choice([1, 3, FAR]), draw.choice([1, 1, 2, 3]))
    with recorded() as recorder:
        operands = operands_of(recorder, problem, a, b, c, step)
        launch(recorder, package, module.launches(problem, config, split_k, stride_bias=step), operands)


def scaled(package: ModuleType, draw: Draw) -> None:
    module = part(package, "portable")
    config = module.Config(32, draw.choice([32, 64]), 64, num_warps=4, num_stages=2, GROUP_M=2)
    kind = draw.choice(["tensor", "rows", "blocks", "blocks"])
    a, b, c = draw.product(torch.float8_e5m2, (draw.near(32), draw.near(128), draw.near(128)), torch.float16)
    if a.dim() == 3:
        a, b, c = a[0], b[0], c[0]
    problem = GemmProblem.of(a, b, c, precision="fp8", scales=kind)
    split_k = draw.choice([1, 2])
    with recorded() as recorder:
        launch(recorder, package, module.launches(problem, config, split_k), operands_of(recorder, problem, a, b, c))


def grouped(package: ModuleType, draw: Draw) -> None:
    """Groups of rows, or along K; with ends that go back, or beyond, and empty groups."""
    module, dtype, groups = part(package, "portable"), torch.float16, draw.randint(1, 6)
    config = module.Config(32, 32, 16, num_warps=4, num_stages=2, GROUP_M=2)
    of_rows = draw.random() < 0.5
    M, N, K = draw.near(32, 12), draw.near(32), draw.near(16, 6)
    a = draw.matrices(None, M, K, dtype)
    b = draw.matrices(groups if of_rows else None, K, N, dtype)
    c = draw.matrices(None if of_rows else groups, M, N, dtype, result=True)
    problem = GemmProblem.of(a, b, c, groups="m" if of_rows else "k")
    extent = M if of_rows else K
    ends = sorted(draw.randint(0, extent) for _ in range(groups))
    wrong = draw.random() < 0.5
    if wrong:
        ends = draw.choice([[extent + 9, -3] * 3, [draw.randint(-3, extent + 9) for _ in range(6)]])[:groups]
    with recorded() as recorder:
        operands = operands_of(recorder, problem, a, b, c)
        for operand in recorder.operands:
            operand.seen = None  # what belongs to no group is not read
            operand.use = ANYHOW if wrong else operand.use
        operands["ends"] = recorder.add("ends", torch.tensor(ends, dtype=torch.int32), READ)
        launch(recorder, package, module.launches(problem, config), operands)


def gemv(package: ModuleType, draw: Draw) -> None:
    module = part(package, "gemv")
    while True:
        rows = draw.randint(1, module.MAX_ROWS)
        n, k, warps, stages = draw.choice([(16, 256, 1, 1), (32, 32, 2, 3), (64, 32, 4, 1), (2, 512, 1, 1)])
        dtype = draw.choice([torch.float16, torch.float32])
        a, b, c = draw.product(dtype, (rows, draw.side(n), draw.near(k)))
        problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
        config = module.Config(1 << (rows - 1).bit_length(), n, k, warps, stages)
        split_k = draw.choice([1, 1, 2, 4]) if problem.N < LONGEST else 1
        if module.illegal(problem, HOPPER, config, split_k) is None:
            break
    with recorded() as recorder:
        launch(recorder, package, module.launches(problem, config, split_k), operands_of(recorder, problem, a, b, c))


def repack(package: ModuleType, draw: Draw) -> None:
    module = part(package, "repack")
    dtype, planes = torch.float16, None
    if draw.random() < 0.5:
        dtype, planes = torch.float32, ARITHMETICS[draw.choice(["bf16x3", "tf32x3"])].planes
    batch, rows, columns = draw.choice([1, 3]), draw.near(64), draw.near(64, 9)
    x = draw.matrices(batch, rows, columns, dtype)
    column_major = draw.choice([None, False, True])
    made, copy = module.launch(
        "x", "out", Layout.of(x), (batch, rows, columns), dtype, column_major=column_major, planes=planes
    )
    (place,) = made.temporaries
    inner = rows if copy.column_major else columns
    whole = made.arguments["OUT_VECTOR"]
    with recorded() as recorder:
        out = torch.empty(place.shape, dtype=place.dtype, device="meta")[..., : -(-inner // whole) * whole]
        operands = {"x": recorder.add("x", x, READ), "out": recorder.add("out", out, RESULT)}
        launch(recorder, package, (replace(made, temporaries=()),), operands)


def reduction(package: ModuleType, draw: Draw) -> None:
    module = part(package, "reduction")
    dtype = draw.choice([torch.float16, torch.float32])
    a, b, c = draw.product(dtype, (draw.near(20), draw.near(24), 64))
    problem = GemmProblem.of(a, b, c, has_beta=draw.random() < 0.3, bias=draw.choice([None, "m", "n"]))
    if draw.random() < 0.3:
        problem = replace(problem, scales=draw.choice(["rows", "tensor"]))
    parts = draw.choice([2, 16, 17, 18, 33])
    temporary = module.sums_of(problem, parts)
    layout = module.parts_of(problem).c
    M, N = problem.M, problem.N
    rows, columns = (-(-M // 4) * 4, N) if layout.column_major else (M, -(-N // 4) * 4)
    shape, strides = (parts, problem.batch, rows, columns), (problem.batch * layout.strides[0], *layout.strides)
    with recorded() as recorder:
        operands = operands_of(recorder, problem, a, b, c)
        for operand in recorder.operands[:2]:
            operand.seen = None
        place = torch.empty(temporary.shape, device="meta")
        operands["sums"] = recorder.add("sums", place.as_strided(shape, strides), READ)
        seen = recorder.operands[-1].seen
        assert seen is not None
        seen.reshape(shape)[:, :, M:] = seen.reshape(shape)[..., N:] = True  # what fills up vectors need not be
        launch(recorder, package, (module.launch(problem, parts),), operands)


def rung(call: Callable[..., None], number: str, draw: Draw) -> None:
    """call: the rung's `launch`, without its checks, which want tensors with memory."""
    original = next(one for one in LADDER if one.id == number)
    dtype = original.dtypes[0]
    config = min(original.configs, key=lambda config: config.accumulators() * config.num_warps)
    if number in ("k01", "k02"):
        sizes = draw.near(256, 2), draw.randint(1, 4), draw.randint(1, 5)
    elif draw.random() < 0.2:
        sizes = 5, 1030, 33  # wide enough that A is transposed, and that there is more than one group of tiles
    else:
        sizes = draw.near(config.BLOCK_M), draw.near(config.BLOCK_N), draw.near(config.BLOCK_K)
    a, b, c = (x[0] if x.dim() == 3 else x for x in draw.product(dtype, sizes))
    beta = draw.choice([0.0, 1.0])
    with recorded() as recorder:
        for name, x, use in (("a", a, READ), ("b", b, READ), ("c", c, READ_FIRST if beta else RESULT)):
            recorder.add(name, x, use)
        call(a, b, c, 1.0, beta, config)
        recorder.check()


KERNELS: dict[str, Callable[[ModuleType, Draw], None]] = {
    function.__name__: function for function in (portable, scaled, grouped, gemv, repack, reduction)
}
RUNGS = tuple(one.id for one in LADDER if one.interpretable and one.id != "k10")  # whose operands are pointers
FEW, MANY = 25, 200  # sets of shapes and strides


def check(name: str, draw: Draw) -> None:
    if name in KERNELS:
        KERNELS[name](kernels, draw)
    else:
        rung(unchecked(mutant(name).original.launch), name, draw)


def unchecked(call: Callable[..., None]) -> Callable[..., None]:
    inner: Callable[..., None] = call.__wrapped__  # type: ignore[attr-defined]
    return inner


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("name", [*KERNELS, *RUNGS])
def test_every_address_is_an_element_s(name: str) -> None:
    for seed in range(FEW):
        check(name, Draw(seed))


@pytest.mark.full
@pytest.mark.parametrize("name", [*KERNELS, *RUNGS])
def test_every_address_of_many_sets(name: str) -> None:
    for seed in range(FEW, MANY):
        check(name, Draw(seed))


# ---- Planted bugs ----

A_MASK, B_MASK = "mask=a_mask_m[:, None] & a_mask_k[None, :]", "mask=b_mask_k[:, None] & b_mask_n[None, :]"
A_SCALE = "a_scale_ptr + block.to(tl.int64) * M + offs_m, mask=offs_m < M, other=0.0"
SHARED_TILE = "(SPLIT_K * BLOCK_M * BLOCK_N)"
# The kernel whose addresses are checked, and what is changed.
BUGS: dict[str, tuple[str, tuple[tuple[str, str], ...]]] = {
    "c-one-column-too-many": ("portable", (("mask_n = offs_n < whole(out.N", "mask_n = offs_n <= whole(out.N"),)),
    "c-rows-not-masked": (
        "portable",
        (("    mask = mask_m[:, None] & mask_n[None, :]\n    c_ptrs", "    mask = mask_n[None, :]\n    c_ptrs"),),
    ),
    "c-strides-swapped": (
        "portable",
        (("out.stride_m, out.stride_n, epi.UNIT", "out.stride_n, out.stride_m, epi.UNIT"),),
    ),
    "bias-not-masked": ("portable", (("out.stride_bias, mask=mask_m, other=0.0)", "out.stride_bias)"),)),
    "bias-without-its-stride": ("portable", (("offs_n * out.stride_bias", "offs_n"),)),
    "k-tail-of-a-not-masked": ("portable", ((A_MASK, "mask=a_mask_m[:, None] & everywhere_k[None, :]"),)),
    "k-tail-of-b-not-masked": ("portable", ((B_MASK, "mask=everywhere_k[:, None] & b_mask_n[None, :]"),)),
    "k-tail-one-too-far": ("portable", (("offs_k < whole(left, B_VECTOR", "offs_k <= whole(left, B_VECTOR"),)),
    "k-tail-one-short": ("portable", (("offs_k < whole(left, A_VECTOR", "offs_k + 1 < whole(left, A_VECTOR"),)),
    "rows-of-a-not-replaced": ("portable", (("inside(offs_m, M, BLOCK_M)", "offs_m"),)),
    "columns-of-b-replaced-one-late": ("portable", (("inside(offs_n, N, BLOCK_N)", "inside(offs_n, N + 1, BLOCK_N)"),)),
    "b-steps-by-columns": (
        "portable",
        (("BLOCK_K * whole(stride_bk, B_VECTOR)", "BLOCK_K * whole(stride_bn, B_VECTOR)"),),
    ),
    "batches-begin-by-rows": ("portable", (("batch * whole(stride_az, A_VECTOR)", "batch * stride_am"),)),
    "strides-of-32-bits": ("portable", (("stride_am: tl.int64", "stride_am: tl.int32"),)),
    "tiles-share-partial-sums": ("portable", ((f"tile.to(tl.int64) * {SHARED_TILE}", "tile * (BLOCK_M * BLOCK_N)"),)),
    "last-part-not-added-up": ("portable", (("pid_k * share", "pid_k * (share - 1)"),)),
    "scales-of-rows-not-masked": ("scaled", ((A_SCALE, A_SCALE.replace("offs_m < M", "offs_m >= 0")),)),
    "scales-of-blocks-rounded-down": ("scaled", (("tl.cdiv(K, SCALED) + block", "K // SCALED + block"),)),
    "a-matrix-for-rows-of-no-group": (
        "grouped",
        (("end_k = tl.where(group < tl.load(tiles_ptr + 1), K, 0)", "end_k = K"),),
    ),
    "the-list-of-tiles-overflows": ("grouped", ((" & (first + tiles < limit)", ""),)),
    "groups-end-with-the-matrix": ("grouped", (("entry_ptr + 3), tl.load", "entry_ptr + 3) + 1, tl.load"),)),
    "groups-along-k-not-clamped": (
        "grouped",
        (("tl.minimum(tl.load(ends_ptr + group), K)", "tl.load(ends_ptr + group)"),),
    ),
    "gemv-columns-of-32-bits": ("gemv", (("columns = offs_n.to(tl.int64)", "columns = offs_n"),)),
    "gemv-k-of-32-bits": (
        "gemv",
        (
            ("tl.cast(kt, tl.int64) * BLOCK_K", "kt * BLOCK_K"),
            ("tl.arange(0, BLOCK_K).to(tl.int64)", "tl.arange(0, BLOCK_K)"),
        ),
    ),
    "gemv-rows-not-clamped": ("gemv", (("rows = tl.minimum(offs_m, M - 1)", "rows = offs_m"),)),
    "gemv-k-tail-of-b-not-masked": ("gemv", (("mask=in_n & in_k", "mask=in_n"),)),
    "gemv-c-rows-not-masked": ("gemv", (("(offs_m < out.M)[:, None] & (offs_n", "(offs_n"),)),
    "gemv-tiles-share-partial-sums": ("gemv", ((f"tile_id * {SHARED_TILE}", "tile_id * (BLOCK_M * BLOCK_N)"),)),
    "repack-reads-one-column-too-many": ("repack", (("x_mask_n = offs_n < whole", "x_mask_n = offs_n <= whole"),)),
    "repack-fills-the-pitch": ("repack", (("(offs_n < padded)", "(offs_n < pitch)"),)),
    "repack-planes-overlap": ("repack", (("out_ptr += batch * PLANES * matrix", "out_ptr += batch * matrix"),)),
    "reduction-a-part-too-many": ("reduction", (("mask & (first + i < parts)", "mask & (first + i <= parts)"),)),
    "reduction-a-part-too-few": ("reduction", (("range(1, parts, AT_ONCE)", "range(2, parts, AT_ONCE)"),)),
    "reduction-all-sides-padded": ("reduction", (("if SUMS_UNIT == 0 else M", ""),)),
    "reduction-batches-ignored": ("reduction", (("c_ptr + start, M", "c_ptr, M"),)),
}
OF_RUNGS: dict[str, Mutant] = {
    name: MUTANTS[name]
    for name in (
        *("k-mask-one-too-far", "k-tail-unmasked-in-a", "rows-wrap-at-n", "store-one-row-too-many"),
        "transposed-rows-cut-short",
    )
} | {
    "columns-do-not-wrap": mutant("k03", ("BLOCK_N)) % N", "BLOCK_N))")),
    "rows-of-32-bits": ROWS_OF_32_BITS,
    "strip-not-masked": mutant("k01", ("acc, offs_m < M,", "acc, offs_m >= 0,")),
    "band-as-wide-as-high": mutant("k04", ("(GROUP_M * num_n)", "(GROUP_M * num_m)")),
    "last-band-not-lower": mutant("k04", ("tl.minimum(num_m - first_m, GROUP_M)", "GROUP_M")),
}


@planted_bugs.with_each(BUGS)
def test_planted_bugs_are_caught(bug: str, tmp_path: Path) -> None:
    name, changes = BUGS.get(bug, ("portable", ()))
    package = kernels_with(changes, tmp_path)
    with planted_bugs.caught(bug):
        for seed in range(FEW):
            KERNELS[name](package, Draw(seed))


@planted_bugs.with_each(OF_RUNGS)
def test_planted_bugs_of_rungs_are_caught(bug: str, tmp_path: Path) -> None:
    planted_in = OF_RUNGS.get(bug, mutant("k04"))
    call = unchecked(planted_in.load(tmp_path).launch)
    with planted_bugs.caught(bug):
        for seed in range(FEW):
            rung(call, planted_in.rung, Draw(seed))
