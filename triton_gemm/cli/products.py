"""Which products a command is about: --shapes, --suite, --shapes-from or --weights."""

from __future__ import annotations

from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch

from ..arithmetic import DTYPES, FLOATING
from ..hardware.device import INTERPRETER
from ..layers import problems_of
from ..operands import Order
from ..problem import GemmProblem
from ..suites import SUITES
from ..suites.problems import gemm_problem
from . import output, words


class Layers(NamedTuple):
    """--weights and what goes with it."""

    weights: str | None
    rows: list[int] | None
    bias: bool


def chosen(
    shapes: str | None,
    suite: str | None,
    shapes_from: Path | None,
    dtype: str | None,
    layout: Order | None,
    layers: Layers,
) -> list[GemmProblem]:
    """The problems that a call names in one of these ways. dtype, layout: of --shapes, by default bf16 and nn, and the
    dtype of --weights and of suites of 16 bits; refused where they would be ignored."""
    given = {"--shapes": shapes, "--suite": suite, "--shapes-from": shapes_from, "--weights": layers.weights}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise output.wrong_call(f"give one of {', '.join(given)}" + f", not {' and '.join(named)}" * bool(named))
    if layers.weights is not None:
        return of_layers(layers.weights, layers.rows, layers.bias, words.dtype(dtype or "bf16"), layout)
    if layers.rows is not None or layers.bias:
        raise output.wrong_call(f"{'--bias' if layers.rows is None else '--rows'} goes with --weights")
    if shapes is not None:
        return [problem(*sizes, words.dtype(dtype or "bf16"), layout or "nn") for sizes in words.shapes(shapes)]
    if layout is not None:
        raise output.wrong_call(f"--layout: the GEMMs of {named[0]} have their own")
    if suite is not None:
        return of_suite(suite, None if dtype is None else words.dtype(dtype))
    assert shapes_from is not None
    if dtype is not None:
        raise output.wrong_call("--dtype: the GEMMs of --shapes-from have their own")
    return recorded(shapes_from)


def problem(batch: int, M: int, N: int, K: int, dtype: torch.dtype, layout: Order) -> GemmProblem:
    """A plain product."""
    if dtype not in DTYPES:
        raise output.wrong_call(f"--shapes: {dtype} needs scales; record such GEMMs, and use --shapes-from")
    found, _ = words.asked(M=M, N=N, K=K, dtype=dtype, batch=batch, layout=layout, device=INTERPRETER)
    return found


def of_layers(
    weights: str, rows: list[int] | None, bias: bool, dtype: torch.dtype, layout: Order | None
) -> list[GemmProblem]:
    """The problems of linear layers with these weights, for these numbers of rows."""
    if rows is None:
        raise output.wrong_call("--weights: give --rows, too, as in --rows 1-512")
    if layout not in (None, "nt"):
        raise output.wrong_call("--layout: --weights are linear layers, whose layout is nt")
    if dtype not in (FLOATING if bias else DTYPES):
        raise output.wrong_call(f"--dtype: linear layers{' with a bias' * bias} cannot be {dtype}")
    return list(problems_of(words.weights(weights), rows, dtype, bias))


def of_suite(name: str, dtype: torch.dtype | None) -> list[GemmProblem]:
    """The problems of a suite: one of 16 bits in a dtype, by default bf16; others have their own."""
    if name not in SUITES:
        raise output.wrong_call(f"--suite: {name!r} is not one of {', '.join(SUITES)}")
    suite = SUITES[name]
    if suite.mode and dtype is not None:
        raise output.wrong_call(f"--dtype: the GEMMs of --suite {name} have their own")
    mode = suite.mode or {torch.bfloat16: "bf16", torch.float16: "fp16"}.get(dtype or torch.bfloat16)
    if mode is None:
        raise output.wrong_call(f"--suite {name} takes --dtype bf16 or fp16")
    return list(dict.fromkeys(gemm_problem(shape, mode) for shape in suite.shapes))


def recorded(path: Path) -> list[GemmProblem]:
    """The problems of a file of `record_shapes`, the most called first."""
    if not path.is_file():
        raise output.wrong_call(f"--shapes-from: there is no file {path}")
    if not (found := tuning().read_shapes(path)):
        raise output.wrong_call(f"--shapes-from: {path} has no GEMM; {tuning().recording.HOW}")
    return list(found)


def tuning() -> Any:
    """The package that tunes, which is imported when it is needed."""
    return import_module("triton_gemm.tuning")
