"""Operands of a problem, what torch runs for it, and how wrong that is: on the CPU, where torch has the same."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from tests.support.lab_fakes import CPU, small
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.tuning import operands as drawn
from triton_gemm.tuning import timing, truth
from triton_gemm.tuning.of_torch import fp32_precision, scales_of, torchs_product
from triton_gemm.tuning.operands import BETA, operands

FP32 = {"dtype": torch.float32, "out_dtype": torch.float32, "precision": "ieee"}
FP8 = {"dtype": torch.float8_e4m3fn, "precision": "fp8", "b": Layout((0, 1, 96))}
INT8 = {"dtype": torch.int8, "out_dtype": torch.int32, "precision": "int8"}
GROUPS = {"groups": "m", "batch": 4, "b": Layout((96 * 64, 64, 1))}
BATCH = {"batch": 3, "a": Layout((48 * 96, 96, 1)), "b": Layout((96 * 64, 64, 1)), "c": Layout((48 * 64, 64, 1))}

# What torch has, and the largest error: of one rounding to C's dtype, and of two where an activation follows.
HAS: dict[str, tuple[dict[str, Any], float]] = {
    "bf16": ({}, 0.003),
    "bf16 nt": ({"b": Layout((0, 1, 96))}, 0.003),
    "a column of C": ({"c": Layout((0, 1, 48))}, 0.003),
    "fp16": ({"dtype": torch.float16, "out_dtype": torch.float16}, 0.0004),
    "fp32": (FP32, 1e-6),
    "fp64": ({"dtype": torch.float64, "out_dtype": torch.float64, "precision": "fp64"}, 1e-14),
    "int8": (INT8, 0.0),
    "bias": ({"bias": "n"}, 0.003),
    "bias of rows": ({"bias": "m", **FP32}, 1e-6),
    "bias and gelu": ({"bias": "n", "activation": "gelu", **FP32}, 1e-6),
    "gelu_tanh": ({"activation": "gelu_tanh"}, 0.005),
    "silu": ({"activation": "silu", **FP32}, 1e-6),
    "relu": ({"activation": "relu"}, 0.003),
    "added to C": ({"has_beta": True}, 0.003),
    "added to C, with a bias": ({"has_beta": True, "bias": "n", **FP32}, 1e-6),
    "batch": (BATCH, 0.003),
    "batch with a bias": ({**BATCH, "bias": "n"}, 0.003),
    "batch, added to C": ({**BATCH, "has_beta": True}, 0.003),
    "groups of rows": (GROUPS, 0.003),
    "groups of K": ({"groups": "k", "batch": 4, "c": Layout((48 * 64, 64, 1))}, 0.003),
    "fp8": ({**FP8, "scales": "tensor"}, 0.003),
    "nothing to sum": ({"K": 0, **FP32}, 0.0),
}

LACKS: dict[str, tuple[dict[str, Any], str]] = {
    "planes": ({**FP32, "precision": "bf16x3"}, "torch has no fp32 product in bf16x3"),
    "int8 with scales": ({**INT8, "scales": "rows", "out_dtype": torch.bfloat16}, "products with scales of fp8 alone"),
    "int8 with a bias": ({**INT8, "bias": "n"}, "torch's product of int8 has no batch and no epilogue"),
    "batch of int8": ({**INT8, **BATCH}, "no batch"),
    "groups with a bias": ({**GROUPS, "bias": "n"}, "torch's grouped product has no epilogue"),
    "groups with relu": ({**GROUPS, "activation": "relu"}, "no epilogue"),
    "a gate": ({"gate": True, "activation": "silu"}, "torch has no product with a gate"),
    "groups with a gate": ({**GROUPS, "gate": True, "activation": "silu"}, "torch has no product with a gate"),
}


@pytest.mark.parametrize("case", HAS)
def test_torchs_product_is_that_of_the_problem(case: str) -> None:
    """Against fp64, which knows epilogues, scales and groups by itself."""
    changes, at_most = HAS[case]
    problem = small(**changes)
    product, why = torchs_product(problem)
    assert product is not None and not why
    (of,) = operands(problem, 1, CPU)
    c0 = of[2].clone() if problem.has_beta else None
    if c0 is None:
        of[2].fill_(float("nan") if of[2].is_floating_point() else -1)
    found = product(*of, beta=BETA if problem.has_beta else 0.0)
    assert found is of[2] or problem.groups or problem.activation
    assert found.shape == of[2].shape and found.dtype == problem.out_dtype
    (error,) = truth.relative_errors(problem, of, c0, [found])
    assert error <= at_most
    if problem.K and problem.dtype.is_floating_point:
        (wrong,) = truth.relative_errors(problem, of, c0, [found * 1.01])
        assert 0.005 < wrong < 0.02, "which sees a mistake of one percent"


@pytest.mark.parametrize("groups", [None, 1, 4])
def test_truth_knows_gates(groups: int | None) -> None:
    problem = small(gate=True, activation="silu", **({} if groups is None else {**GROUPS, "batch": groups}))
    ((a, b, _, gate, *_),) = operands(problem, 1, CPU)
    before, up = ((a.double().view(groups or 1, -1, 96) @ x.double()).view(48, 64) for x in (gate, b))
    found = (torch.nn.functional.silu(before) * up).bfloat16()
    errors = truth.relative_errors(problem, (a, b, found, gate, *_), None, [found, found * 1.01])
    assert errors[0] <= 0.003 and 0.005 < errors[1] < 0.02


CASES: dict[str, dict[str, Any]] = {
    **{name: changes for name, (changes, _) in HAS.items()},
    "unaligned rows that are padded": {"a": Layout((0, 104, 1), aligned=False)},
    "a batch that shares B": {"batch": 3, "a": Layout((48 * 96, 96, 1)), "c": Layout((48 * 64, 64, 1))},
    "bias of rows, added to fp32": {"bias": "m", "out_dtype": torch.float32},
    "scales": {"dtype": torch.float8_e4m3fn, "precision": "fp8", "scales": "rows", "bias": "n"},
    "blocks": {"dtype": torch.float8_e4m3fn, "precision": "fp8", "scales": "blocks"},
    "one group": {"groups": "m", "batch": 1},
}


@pytest.mark.parametrize("case", CASES)
def test_operands_are_those_of_the_problem(case: str) -> None:
    problem = small(**CASES[case])
    sets = operands(problem, 2, CPU)
    a, b, c, *auxiliary = sets[0]
    names = ("has_beta", "bias", "activation", "scales", "groups", "precision")
    made = GemmProblem.of(a, b, c, **{name: getattr(problem, name) for name in names})
    if case == "one group":
        assert b.dim() == 3 and c.dim() == 2
    assert made == problem
    assert len(auxiliary) == len(problem.auxiliary) and all(x.is_contiguous() for x in auxiliary)
    for x in (a, b, c, *auxiliary):
        assert x.dtype.itemsize == 1 or not x.is_floating_point() or bool(torch.isfinite(x).all())
        assert not x.is_floating_point() or x.numel() < 4 or x.float().std() > 0.1
    assert not problem.K or a.data_ptr() != sets[1][0].data_ptr()
    assert all(x is y for x, y in zip(auxiliary, sets[1][3:], strict=True))
    if problem.groups:
        size = problem.M if problem.groups == "m" else problem.K
        assert auxiliary[0].tolist() == [size * (i + 1) // problem.batch for i in range(problem.batch)]


def test_memory_bounds_the_sets() -> None:
    problem = small()
    size = drawn.nbytes(problem)
    assert timing.set_count(1 << 30, 50 << 20, 80 << 30) == 1
    assert size == 2 * (48 * 96 + 96 * 64 + 48 * 64)
    assert drawn.sets_of(problem, 50 << 20, 80 << 30) == timing.MAX_SETS
    assert drawn.sets_of(problem, 10 * size, 80 << 30) == 20
    assert drawn.sets_of(problem, 10 * size, 10 * size) == 4
    with pytest.raises(torch.OutOfMemoryError):
        drawn.sets_of(problem, 10 * size, 2 * size)


@pytest.mark.parametrize("case", LACKS)
def test_what_torch_lacks_has_a_reason(case: str) -> None:
    changes, why = LACKS[case]
    product, message = torchs_product(small(**changes))
    assert product is None and why in message


@pytest.mark.parametrize("scales", ["tensor", "rows", "blocks"])
def test_scales_are_those_of_the_error(scales: str) -> None:
    """The CPU's torch has one scale for each operand alone, so others are multiplied here, where they lie otherwise."""
    problem = small(M=200, N=300, K=400, dtype=torch.float8_e4m3fn, precision="fp8", scales=scales)
    problem = replace(problem, a=Layout((0, 400, 1)), b=Layout((0, 1, 400)), c=Layout((0, 300, 1)))
    (of,) = operands(problem, 1, CPU)
    a, b, _, a_scale, b_scale = (x.double() for x in of)
    if scales == "rows":
        a_scale = a_scale[:, None]
    elif scales == "blocks":
        a_scale = torch.stack([a_scale[k // 128] for k in range(400)], 1)
        b_scale = torch.stack([torch.stack([b_scale[n // 128, k // 128] for n in range(300)]) for k in range(400)])
    assert scales == "blocks" or all(x.is_contiguous() for x in scales_of(of)), "torch takes no others"
    assert truth.relative_errors(problem, of, None, [(a * a_scale) @ (b * b_scale)])[0] < 1e-14


def test_some_rows_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(truth, "ROWS", 5)
    for changes in ({}, BATCH, GROUPS, {"bias": "m"}):
        problem = small(**changes, out_dtype=torch.float32, dtype=torch.float32, precision="ieee")
        (of,) = operands(problem, 1, CPU)
        product, _ = torchs_product(problem)
        assert truth.relative_errors(problem, of, None, [product(*of)])[0] < 1e-6
    of[2][-1] = float("nan")
    assert truth.relative_errors(problem, of, None, [of[2]]) == [float("inf")], "the last is among them"


def test_another_precision_of_the_result_is_torchs_out_dtype(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which only CUDA has."""
    calls: list[Any] = []
    monkeypatch.setattr(torch, "mm", lambda a, b, **how: calls.append(how))
    problem = small(out_dtype=torch.float32)
    (of,) = operands(problem, 1, CPU)
    product, _ = torchs_product(problem)
    assert product is not None and product(*of) is of[2]
    assert calls == [{"out": of[2], "out_dtype": torch.float32}]


def test_fp32_is_multiplied_as_the_problem_says(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[str] = []
    settings = torch.backends.cuda.matmul
    monkeypatch.setattr(torch, "mm", lambda *_, **how: seen.append(settings.fp32_precision))
    before = settings.fp32_precision
    for precision in ("tf32", "ieee"):
        problem = small(**{**FP32, "precision": precision})
        product, _ = torchs_product(problem)
        product(*operands(problem, 1, CPU)[0])
        with fp32_precision("tf32"):
            product(*operands(problem, 1, CPU)[0])
    assert seen == ["tf32", "tf32", before, "ieee"] and settings.fp32_precision == before


def test_an_activation_is_torchs() -> None:
    x = torch.randn(100, dtype=torch.float64)
    expected = {"relu": F.relu(x), "gelu": F.gelu(x), "gelu_tanh": F.gelu(x, approximate="tanh"), "silu": F.silu(x)}
    assert truth.ACTIVATIONS.keys() == expected.keys()
    assert all(torch.equal(f(x.clone()), expected[name]) for name, f in truth.ACTIVATIONS.items())
