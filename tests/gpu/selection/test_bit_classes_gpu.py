"""Candidates of one class give the same bits on a GPU, and add in the same tree."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import replace

import pytest
import torch

from tests.gpu.kernels.test_kernels_gpu import DEVICE, gpu, hopper
from tests.support.fprev import Tree, of_products
from tests.support.kernel_cases import Case, Operands, bits
from triton_gemm.arithmetic import FP8
from triton_gemm.kernels import KERNELS, warp_specialised
from triton_gemm.kernels.candidate import Candidate
from triton_gemm.kernels.schedule import Schedule, clusters_at_once
from triton_gemm.problem import ACTIVATIONS, GemmProblem
from triton_gemm.runtime.plan import GemmPlan
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, ranked

MEMBERS = 3  # of each class, at least: of every kernel, and of as many tiles and ways round as there are
CLASSES = 3  # with several members, for each problem: the largest, and those of kernels that none of these has

FP32 = {"dtype": torch.float32}
BYTES = {"dtype": FP8.dtypes[0], "out_dtype": torch.bfloat16, "orders": "ntn", "pad": 16}
# k-tiles 64 deep end elsewhere than those 128 deep, and the last of either is not full.
FEWEST, FEW, MANY = (3, 264, 1064), (13, 264, 1064), (333, 520, 1064)
KINDS: dict[str, dict[str, object]] = {
    "bf16": {},
    "bf16 nt": {"orders": "ntn"},
    "bf16 tn": {"orders": "tnn"},
    "bf16 to fp32": {"out_dtype": torch.float32, "orders": "ntn"},
    "bf16 odd": {"orders": "ntn", "pad": 1, "offset": 1},
    "fp16": {"dtype": torch.float16, "out_dtype": torch.float32},
    "bias": {"bias": "n", "orders": "ntn", "alpha": 0.7},
    "bias of rows": {"bias": "m", "orders": "ntt"},
    "relu": {"bias": "n", "activation": "relu"},
    "beta": {"beta": 0.3, "alpha": 0.7},
    **{name: {"bias": "n", "activation": name, "alpha": 0.7} for name in ACTIVATIONS if name != "relu"},
    "batch": {"batch": 3, "orders": "ntn"},
    "ieee": {**FP32, "precision": "ieee", "alpha": 0.7, "bias": "n"},
    "tf32": {**FP32, "precision": "tf32"},
    "tf32 tt": {**FP32, "precision": "tf32", "orders": "ttn"},
    **{name: {**FP32, "precision": name} for name in ("bf16x3", "bf16x6", "bf16x9", "tf32x3")},
    "fp64": {"dtype": torch.float64},
    "fp64 beta": {"dtype": torch.float64, "beta": 0.3, "alpha": 0.7},
    "int8": {"dtype": torch.int8, "out_dtype": torch.int32, "orders": "ntn", "pad": 16},
    "int8 rows": {"dtype": torch.int8, "out_dtype": torch.bfloat16, "orders": "ntn", "pad": 16, "scales": "rows"},
    "fp8": {**BYTES, "precision": "fp8", "scales": "tensor"},
    "fp8 rows": {**BYTES, "precision": "fp8", "scales": "rows", "bias": "n"},
    "fp8 blocks": {**BYTES, "precision": "fp8", "scales": "blocks"},
    "fp8 fast": {**BYTES, "precision": "fp8 fast", "scales": "tensor", "out_dtype": torch.float32},
}


SKINNY = ("bf16 nt", "bf16 to fp32", "bias", "bias of rows", "batch")  # what `skinny` takes


def selections(problem: GemmProblem) -> dict[str, list[Selection]]:
    """Of all legal candidates, by class."""
    found = defaultdict(list)
    for _, candidate in ranked(problem, gpu(), any_bits=True):
        if illegal(problem, gpu(), candidate) is None:
            selection = Selection.of(candidate, "by a test")
            found[bit_class(problem, selection)].append(selection)
    return found


def unlike(members: list[Selection], count: int) -> list[Selection]:
    """So many of them, as unlike one another as there are: the model's first of each kernel, then each as far from all
    before."""

    def traits(x: Selection) -> list[object]:
        tile = x.config.BLOCK_M, x.config.BLOCK_N, x.config.BLOCK_K
        second = x.schedule is not None and x.schedule.reduction
        return [x.swap_ab, x.packed, *tile, x.config.num_warps, x.work == 1, second, second]

    chosen = list({x.kernel: x for x in reversed(members)}.values())[::-1]
    rest = [x for x in members if x not in chosen]
    while rest and len(chosen) < count:
        farthest = max(
            rest, key=lambda x: min(sum(p != q for p, q in zip(traits(x), traits(y), strict=True)) for y in chosen)
        )
        chosen.append(farthest)
        rest.remove(farthest)
    return chosen


def supported(case: Case) -> bool:
    return not (case.dtype.itemsize == 1 and case.dtype.is_floating_point and gpu().capability < (8, 9))


def compared_classes(problem: GemmProblem) -> dict[str, list[Selection]]:
    """Of classes with several members the largest, and of each kernel that none of them has the largest of its."""
    several = {name: members for name, members in selections(problem).items() if len(members) > 1}
    largest = sorted(several, key=lambda name: -len(several[name]))
    chosen = largest[:CLASSES]
    for kernel in KERNELS:
        of_it = [name for name in largest if any(x.kernel == kernel for x in several[name])]
        chosen += of_it[: not set(of_it) & set(chosen)]
    return {name: several[name] for name in chosen}


def of_all_magnitudes(case: Case) -> Operands:
    """Sums of such values lose other bits in any other order."""
    operands = Operands(case, DEVICE)
    if case.dtype.itemsize > 1:
        for x in (operands.a, operands.b):
            x.mul_(torch.exp2(torch.randint(-6, 3, x.shape, device=DEVICE, generator=operands.generator)))
    return operands


def assert_same_bits(operands: Operands, name: str, selections: list[Selection]) -> None:
    """All give the bits of the first."""
    case, results = operands.case, []
    for selection in selections:
        operands.c.copy_(operands.c0)
        auxiliary = (*([] if operands.bias is None else [operands.bias]), *operands.scales)
        plan = GemmPlan(operands.problem, selection, DEVICE)
        plan.run(operands.a, operands.b, operands.c, auxiliary, case.alpha, case.beta)
        results.append((selection, bits(operands.c).clone()))
    (first, expected), *others = results
    for other, found in others:
        wrong = int((found != expected).sum())
        assert wrong == 0, f"{name}: {wrong} of {found.numel()} elements of {other} are not those of {first}"


def compare(operands: Operands) -> int:
    """How many members of classes gave the bits of another."""
    compared = 0
    for name, members in compared_classes(operands.problem).items():
        chosen = unlike(members, MEMBERS)
        assert_same_bits(operands, name, chosen)
        compared += len(chosen) - 1
    return compared


@pytest.mark.parametrize(
    ("kind", "size"),
    [
        *(pytest.param(kind, MANY, id=f"{kind}-many") for kind in KINDS),
        *(pytest.param(kind, FEW, id=f"{kind}-few") for kind in (*SKINNY, "bf16", "bf16 odd", "ieee", "tf32")),
        *(pytest.param(kind, FEWEST, id=f"{kind}-fewest") for kind in SKINNY),
    ],
)
def test_equal_classes_give_equal_bits(kind: str, size: tuple[int, int, int]) -> None:
    """A class of `gemv` is one configuration: there is nothing to compare it with."""
    case = Case(size, **KINDS[kind])  # type: ignore[arg-type]
    if not supported(case):
        pytest.skip("there is no such product on this GPU")
    assert compare(of_all_magnitudes(case)) > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_zeros_beyond_k_leave_signs_of_zeros(dtype: torch.dtype) -> None:
    """Products that are less than any number, of both signs: sums of nothing but those, and with a few others."""
    case = Case(MANY, "ntn", dtype=dtype, out_dtype=torch.float32, precision="ieee" if dtype == torch.float32 else None)
    operands = Operands(case, DEVICE)
    operands.a.mul_(2.0**-80), operands.b.mul_(2.0**-80)
    operands.a[: case.size[0] // 2, ::97] = 1.0
    assert compare(operands) > 0


@pytest.mark.parametrize("splits", [1, 2, 4])
def test_what_is_cut_alike_is_one_class_whatever_the_tile(splits: int) -> None:
    """Without the model's choice: every kernel, tile and way round that sums 4 x 256 x 1024 in one of these ways."""
    operands = Operands(Case((48, 64, 1024), "ntn", out_dtype=torch.float32), DEVICE)
    wanted = "one sum along K" if splits == 1 else f"K in {splits} parts of {1024 // splits}"
    members = selections(operands.problem)[f"bf16, tensor cores, {wanted}"]
    assert len(members) > 3
    assert_same_bits(operands, wanted, unlike(members, 8))


def with_parts(problem: GemmProblem, parts: int) -> dict[str, dict[str, list[Selection]]]:
    """By class, and by who adds them up, what multiplies in so many parts of all tiles: the program that sums them in
    turn, owners, or a second launch."""
    found: dict[str, dict[str, list[Selection]]] = defaultdict(lambda: defaultdict(list))
    for given, algorithm in warp_specialised.candidates(problem, gpu()):
        config, whole = algorithm.config, algorithm.work
        if whole.split_tiles:
            continue
        tiles = given.batch * config.tiles(given.M, given.N)
        schedules = {
            "in turn": replace(whole, split_k=parts),
            "owners": Schedule(tiles * parts, tiles, parts),
            "second launch": Schedule(tiles * parts, tiles, parts, reduction=True),
        }
        for who, work in schedules.items():
            cut = Candidate(given, algorithm._replace(work=work))
            fits = work.programs <= clusters_at_once(config.ctas, gpu().num_sms)
            if fits and illegal(problem, gpu(), cut) is None:
                selection = Selection.of(cut, "by a test")
                found[bit_class(problem, selection)][who].append(selection)
    return found


IN_TURN = [kind for kind in KINDS if "fp64" not in kind and "int8" not in kind and kind != "ieee"]


@hopper
@pytest.mark.parametrize(
    ("kind", "parts"),
    [*((kind, 4) for kind in IN_TURN), *((x, 3) for x in ("bf16 nt", "tf32", "bf16x6", "fp8 blocks"))],
)
def test_parts_in_turn_have_the_bits_of_shared_ones(kind: str, parts: int) -> None:
    """Whoever adds them, in tiles as unlike as there are; uneven ones in k-tiles of one depth."""
    operands = of_all_magnitudes(Case((333, 520, 2040), **KINDS[kind]))  # type: ignore[arg-type]
    compared = 0
    for name, by in with_parts(operands.problem, parts).items():
        chosen = [unlike(members, 3 if who == "in turn" else 1) for who, members in by.items()]
        assert_same_bits(operands, name, [selection for found in chosen for selection in found])
        compared += len(by) > 1 and "in turn" in by
    assert compared > 0, "nobody else has the class of parts in turn"


# --- The trees ---

# dtype, precision, M and what stands for 1: which M hides, and fp32 counts.
SUMS = {
    "bf16": (torch.bfloat16, None, 2.0**100, 1.0),
    "fp16": (torch.float16, None, 2.0**15, 2.0**-24),
    "ieee": (torch.float32, "ieee", 2.0**100, 1.0),
    "tf32": (torch.float32, "tf32", 2.0**100, 1.0),
    "bf16x6": (torch.float32, "bf16x6", 2.0**100, 1.0),
    "fp64": (torch.float64, None, 2.0**100, 1.0),
}
ROWS, COLUMNS, TERMS = 64, 4, 256


def tree(problem: GemmProblem, selection: Selection, big: float, one: float) -> Tree:
    """In which every element of the product is summed."""
    b = torch.ones(COLUMNS, TERMS, dtype=problem.dtype, device=DEVICE).t()
    plan = GemmPlan(problem, selection, DEVICE)

    def multiply(a: torch.Tensor) -> torch.Tensor:
        c = torch.full((ROWS, COLUMNS), torch.nan, dtype=problem.out_dtype, device=DEVICE)
        plan.run(a, b, c)
        return c

    return of_products(TERMS, multiply, b, big=big, one=one, rows=ROWS)


@pytest.mark.parametrize("kind", SUMS)
def test_equal_classes_add_in_the_same_tree(kind: str) -> None:
    dtype, precision, big, one = SUMS[kind]
    shapes = ((ROWS, TERMS), (COLUMNS, TERMS), (ROWS, COLUMNS))
    a, b, c = (torch.empty(shape, dtype=dtype, device=DEVICE) for shape in shapes)
    problem = GemmProblem.of(a, b.t(), c, precision=precision)
    problem = replace(problem, out_dtype=torch.float32 if dtype.itemsize == 2 else dtype)
    trees = defaultdict(set)
    for name, members in selections(problem).items():
        if " of C " in name:  # other elements are summed otherwise
            continue
        for selection in unlike(members, 3):
            trees[name].add(tree(problem, selection, big, one))
    assert len(trees) > 1
    assert {name: len(found) for name, found in trees.items()} == dict.fromkeys(trees, 1)
    whole = [found for name, found in trees.items() if "one sum" in name]
    cut = [found for name, found in trees.items() if "parts" in name and "promoted" not in name]
    assert whole and all(one.isdisjoint(other) for one in whole for other in cut)
