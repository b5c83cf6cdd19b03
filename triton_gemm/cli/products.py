"""Which products a command is about: --shapes, --suite, --shapes-from or --weights."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple, get_type_hints

import torch

from ..arithmetic import DTYPES, FLOATING
from ..hardware.device import INTERPRETER
from ..layers import problems_of
from ..operands import Order
from ..problem import GemmProblem
from ..suites import SUITES
from ..suites.problems import gemm_problem
from . import output, words

_NAMED = inspect.Parameter.KEYWORD_ONLY


class Gemms(NamedTuple):
    """The options that name GEMMs. dtype, layout: of --shapes, by default bf16 and nn, and the dtype of --weights and
    of suites of 16 bits."""

    shapes: words.Shapes = None
    suite: words.Suite = None
    shapes_from: words.ShapesFrom = None
    weights: words.Weights = None
    rows: words.Rows = None
    bias: words.Bias = False
    dtype: words.DtypeOfSizes = None
    layout: words.LayoutOfSizes = None


def takes_gemms(command: Callable[..., None]) -> Callable[..., None]:
    """Gives a command the options of `Gemms` in place of its first parameter."""

    @functools.wraps(command)
    def run(**options: Any) -> None:
        command(Gemms(*(options.pop(name) for name in Gemms._fields)), **options)

    hints, defaults = get_type_hints(Gemms, include_extras=True), Gemms._field_defaults
    parameters = [inspect.Parameter(x, _NAMED, default=defaults[x], annotation=hints[x]) for x in Gemms._fields]
    _, *others = inspect.signature(command, eval_str=True).parameters.values()
    parameters += [x.replace(kind=_NAMED) for x in others]
    run.__signature__ = inspect.Signature(parameters)  # type: ignore[attr-defined]
    run.__annotations__ = {x.name: x.annotation for x in parameters}
    return run


def chosen(gemms: Gemms, rows: list[int] | None) -> list[GemmProblem]:
    """The problems that a call names in one of the ways of `Gemms`. What would be ignored is refused. rows: what --rows
    says."""
    shapes, suite, shapes_from, weights, _, bias, dtype, layout = gemms
    given = {"--shapes": shapes, "--suite": suite, "--shapes-from": shapes_from, "--weights": weights}
    named = [name for name, value in given.items() if value is not None]
    if len(named) != 1:
        raise output.wrong_call(f"give one of {', '.join(given)}" + f", not {' and '.join(named)}" * bool(named))
    if weights is not None:
        return of_layers(weights, rows, bias, words.dtype(dtype or "bf16"), layout)
    if rows is not None or bias:
        raise output.wrong_call(f"{'--bias' if rows is None else '--rows'} goes with --weights")
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
    found, _ = words.problem_and_device(M=M, N=N, K=K, dtype=dtype, batch=batch, layout=layout, device=INTERPRETER)
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
