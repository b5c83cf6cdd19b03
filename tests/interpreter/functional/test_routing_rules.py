"""The rules of `use()` and `enable()`: what their arguments route, and which are refused."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import triton_gemm
from tests.interpreter.functional.test_routing import draw, ours
from tests.interpreter.functional.test_routing import fresh as fresh
from triton_gemm.functional import routing

EVERY = (*routing.ROUTED, *routing.PRODUCTS)


@pytest.mark.parametrize(
    ("rule", "routed"),
    [
        ({"only": "mm"}, {"mm": 2}),
        ({"only": ["mm", "addmm"]}, {"mm": 2, "addmm": 1}),
        ({"only": torch.float16}, {"mm": 1}),
        ({"only": ("mm", torch.float16)}, {"mm": 1}),
        ({"exclude": "addmm"}, {"mm": 2}),
        ({"exclude": torch.float16}, {"mm": 1, "addmm": 1}),
        ({}, {"mm": 2, "addmm": 1}),
    ],
    ids=str,
)
def test_one_name_or_dtype_is_one(rule: dict[str, object], routed: dict[str, int]) -> None:
    with triton_gemm.use(**rule):
        torch.mm(draw(3, 3), draw(3, 3)), torch.addmm(draw(3), draw(3, 3), draw(3, 3))
        torch.mm(draw(3, 3, dtype=torch.float16), draw(3, 3, dtype=torch.float16))
    assert ours() == routed


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        *(({"only": nothing}, "only is empty; leave it out to route everything") for nothing in ((), [])),
        ({"only": "mm", "exclude": "mm"}, "only of mm and exclude of mm leaves no operator"),
        ({"only": ("mm", torch.float32), "exclude": torch.float32}, "only of mm, torch.float32 and exclude of"),
        ({"only": torch.complex64}, "only of torch.complex64 leaves no operator with a dtype it computes"),
        ({"only": ("_int_mm", torch.bfloat16)}, "only of _int_mm, torch.bfloat16 leaves"),
        ({"exclude": EVERY}, "exclude of _grouped_mm, _int_mm, "),
    ],
    ids=str,
)
def test_a_rule_that_routes_nothing_is_refused(rule: dict[str, object], why: str) -> None:
    with pytest.raises(ValueError, match=rf"enable\(\): nothing is routed, as {why}"):
        triton_gemm.enable(**rule)
    assert routing._rules == []


def test_an_empty_exclude_and_dtypes_of_one_operator_are_right() -> None:
    for rule in ({"exclude": ()}, {"only": None}, {"only": torch.int8}, {"exclude": EVERY[1:]}):
        with triton_gemm.use(**rule):
            torch.mm(draw(3, 3), draw(3, 3))
    assert ours() == {"mm": 3}


@pytest.mark.parametrize("wrong", ["conv2d", ["mm", "conv2d"], ("float16",), (torch.float32, 3)], ids=str)
def test_other_names_are_refused_before_anything_is_routed(wrong: object) -> None:
    for argument in ("only", "exclude"):
        with pytest.raises(ValueError, match=f"{argument} must have dtypes or names of mm, bmm, addmm, baddbmm, "):
            triton_gemm.enable(**{argument: wrong})
        with pytest.raises(ValueError, match=r"use\(\): "), triton_gemm.use(**{argument: wrong}):
            pass


def test_a_predicates_mistake_is_reported_as_that() -> None:
    """Python takes a TypeError of `@` for a sign that tensors have none."""
    with pytest.raises(TypeError, match=r"enable\(\): argument 'predicate' is called with \(op, a, b\): too many"):
        triton_gemm.enable(predicate=lambda a, b: True)
    a = draw(3, 3)
    with (
        triton_gemm.use(predicate=lambda op, a, b: a + None),
        pytest.raises(RuntimeError, match=r"use\(\): the predicate raised TypeError: unsupported operand"),
    ):
        a @ a


@pytest.mark.parametrize("answer", ["x", None, 1, torch.tensor(True)], ids=repr)
def test_a_predicate_returns_a_bool(answer: object) -> None:
    a, message = draw(3, 3), rf"use\(\): the predicate must return a bool, not {type(answer).__name__}"
    with triton_gemm.use(predicate=lambda *_: answer), pytest.raises(RuntimeError, match=message):
        a @ a
    with triton_gemm.use(predicate=lambda *_: np.bool_(True)):
        a @ a
    assert ours() == {"mm": 1}
