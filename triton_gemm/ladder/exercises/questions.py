"""What several checks ask."""

from __future__ import annotations

import ast
import re
import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from . import causes
from .trace import Trace, WrongError, by_kernels, diagnosis, matrix, named

Advice = str | Callable[[str, ast.Module], str]  # of an error's text and the file; empty where it does not fit


def _divides(advice: str, otherwise: str = "") -> Callable[[str, ast.Module], str]:
    """Advice for a file in which there is a `/`, and for another."""

    def chosen(_: str, file: ast.Module) -> str:
        return advice if any(isinstance(node, ast.Div) for node in ast.walk(file)) else otherwise

    return chosen


def _unset(text: str, file: ast.Module) -> str:
    """On a variable that has no value: whether a line before sets it, which then did not run."""
    name, line = re.findall(r"variable '(\w+)'", text)[0], int(re.findall(r"line (\d+)", text)[0])
    functions = [node for node in ast.walk(file) if isinstance(node, ast.FunctionDef)]
    (this,) = (one for one in functions if one.lineno <= line <= (one.end_lineno or 0))
    names = (node for node in ast.walk(this) if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store))
    if any(node.id == name and node.lineno < line for node in names):
        return ": an `if` or a loop that does not run does not set it."
    return ": no line before sets it."


ROUND_UP = "use `//`, or `tl.cdiv(x, y)` to round up."
FP32 = f": `/` makes fp32, {ROUND_UP}"
# What errors of Python and Triton do not say.
ADVICE: dict[str, Advice] = {
    "unexpected type fp32": _divides(FP32),
    "operands of type triton.language.float32": _divides(FP32),
    "> and triton.language.float32": _divides(FP32, ": an offset is a whole number, and one is fp32."),
    "'float' object cannot be interpreted": _divides(f": `/` makes fractions, {ROUND_UP}"),
    "define __round__": ": Python's `round` knows no value of a kernel. `tl.cdiv` rounds a quotient up, `//` down.",
    "must be real number, not tensor": ": Python's `math` knows no value of a kernel, `tl` has functions for them.",
    "operand type(s) for **": ": Triton has no `**` of a kernel's values. Exclusive or is `^`.",
    "inline_asm not supported": ": what is right on a GPU does not run here; use integers.",
    "descriptor_base.load() got multiple": ": coordinates are given as one list, as in `load([row, column])`.",
    "<class 'list'> to tensor": ": a descriptor's own method loads, as in `a_desc.load([row, column])`.",
    "operand type(s) for @": ": in a kernel it is `tl.dot`.",
    **dict.fromkeys(("type object 'float'", "has no attribute 'fp"), ": a dtype is Triton's, as `tl.float32`."),
    "no attribute 'isnan'": ": a NaN alone is not equal to itself.",
    "cannot cast": ": an address is no value. `tl.load` reads what lies there.",
    "'NoneType'": ": None is what `tl.store` gives, and a function that ends without `return`.",
    "'tuple' object": ": a comma makes a tuple, and one value is wanted.",
    "'float' object has no attribute": ": numbers are Python's in the interpreter, fp32 on a GPU, and need no cast.",
    "unsigned tensor and a negative": ": write the 32 bits out, in hexadecimal. Python's `~` of a number is negative.",
    "UnboundLocalError": _unset,
}
RIGHT = "C is right, but "
DRAWN = 2  # cases of each exercise that its page does not name
RUNS: list[Any] = []  # what the file that is checked did: traces, or the ring's events


def error_text(error: BaseException, path: Path | None = None) -> str:
    """A sentence from what a check raised; the interpreter wraps what a kernel did."""
    while not isinstance(error, WrongError) and error.__cause__ is not None:
        error = error.__cause__
    if isinstance(error, WrongError):
        return str(error)
    file = path and path.resolve()
    lines = [one.lineno for one in traceback.extract_tb(error.__traceback__) if Path(one.filename).resolve() == file]
    text = str(error)
    if isinstance(error, SyntaxError):
        lines, text = [error.lineno], error.msg
    where = f"line {lines[-1]}: " if lines else ""
    return f"{where}{type(error).__name__}: {text}".partition("\n")[0].partition(" [[")[0]  # no block's elements


def for_each(
    *cases: tuple[int, ...], drawn: Callable[[Random], tuple[int, ...]], form: str = "of {} x {} x {}"
) -> Callable[[Callable[..., None]], Callable[[Any, Any], None]]:
    """A check of an exercise and its solution that asks `function` for each case, of sizes for example, and for others
    that the file's text decides: what is right for the page's sizes alone is no answer. form: a case as text."""

    def made(function: Callable[..., None]) -> Callable[[Any, Any], None]:
        def check(exercise: Any, solution: Any) -> None:
            random = Random(Path(exercise.__file__).read_bytes())
            for case in [*cases, *(drawn(random) for _ in range(DRAWN))]:
                try:
                    function(exercise, solution, *case)
                except Exception as error:
                    if case == cases[0]:
                        raise
                    text = error_text(error, Path(exercise.__file__))
                    right, this = form.format(*cases[0]), form.format(*case)
                    if text.startswith(RIGHT):
                        text = (
                            f"C {this} is right, but {text.removeprefix(RIGHT)} With C {right} there is nothing wrong."
                        )
                        raise WrongError(text) from error
                    raise WrongError(f"C {right} is right, but {this}: {text}") from error

        return check

    return made


def make_operands(M: int, N: int, K: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    return {"a": matrix(M, K, dtype), "b": matrix(K, N, dtype), "c": matrix(M, N, dtype, empty=True)}


def equals_product(trace: Trace, most: float = 2.0**-20, cause: Callable[[Trace], str] = lambda trace: "") -> None:
    """C is A B to within `most` of |A| |B|. cause: a sentence on why it is not."""
    a, b, c = (trace.operands[name].double() for name in "abc")
    wrong = ~((c - a @ b).abs() <= most * (a.abs() @ b.abs()))
    if wrong.any():
        row, column = (int(x) for x in wrong.nonzero()[0])
        value = f"is {float(c[row, column]):.6g}, and should be {float((a @ b)[row, column]):.6g}"
        stores = trace.counted("c", "store")
        never, twice = bool(stores[row, column] == 0), bool((stores > 1).any())
        overlap = " Others are written more than once: do programs overlap?" * (never and twice)
        why = (
            diagnosis(causes.doubled, trace) or diagnosis(causes.exchanged, trace) or diagnosis(cause, trace) or overlap
        )
        one = f"c[{row}, {column}] {'is never written' if never else value}"
        raise WrongError(f"{one}; {int(wrong.sum())} of {c.numel()} are wrong.{why}")


def traced(
    exercise: Any,
    operands: dict[str, torch.Tensor],
    *more: Any,
    outside: Callable[[str, int, int], str] = lambda name, row, column: "",
    errors: Mapping[str, Advice] | None = None,
) -> Trace:
    """Runs an exercise, and fails where PyTorch computes what a kernel should.

    outside: advice for an operand's element that is none, by name, row and column; errors: for errors with a word.
    """
    trace = Trace(**operands)
    RUNS.append(trace)
    trace.outside = outside
    with by_kernels(**operands):
        try:
            trace.run(exercise.run, *more)
        except Exception as error:
            path, known = Path(exercise.__file__), {**(errors or {}), **ADVICE}
            text = error_text(error, path)
            advice = next((advice for word, advice in known.items() if word in text), "")
            if callable(advice):
                advice = diagnosis(advice, text, ast.parse(path.read_bytes()))
            if not advice:
                raise
            raise WrongError(text.rstrip(": ") + advice) from None
    idle = operands.keys() - {access.operand for access in trace.accesses}
    if idle:
        raise WrongError(f"no kernel touches {' and '.join(sorted(idle))}: a kernel has to compute the result.")
    return trace


def stored_tiles(trace: Trace, never: str = "") -> dict[tuple[int, int, int], list[tuple[int, int]]]:
    """The tiles of C that each program stores; fails unless each is stored once. never: advice if one is not."""
    size = 16
    c = trace.operands["c"]
    found: dict[tuple[int, int, int], list[tuple[int, int]]] = {}
    for access in trace.of("c", "store"):
        found.setdefault(access.program, []).append((int(access.rows[0]) // size, int(access.columns[0]) // size))
    count = Counter(tile for tiles in found.values() for tile in tiles)
    for tile in ((i, j) for i in range(c.shape[0] // size) for j in range(c.shape[1] // size)):
        if count[tile] != 1:
            times = [named(program) for program, tiles in found.items() for one in tiles if one == tile]
            by = f"computed {len(times)} times, by {'program' if len({*times}) == 1 else 'programs'} "
            by = by + ", ".join(dict.fromkeys(times)) if times else "never computed"
            advice = never * (not times)
            raise WrongError(f"tile {tile} of C, counted from 0, is {by}; each is to be computed once.{advice}")
    return found


def same_bits(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """Where two tensors have the same bits."""
    whole = {2: torch.int16, 4: torch.int32}[x.element_size()]
    return x.contiguous().view(whole) == y.contiguous().view(whole)


def with_solution(solution: Any, operands: dict[str, torch.Tensor], *more: Any) -> torch.Tensor:
    """C as the solution computes it."""
    M, N = operands["c"].shape
    c = make_operands(M, N, 1, operands["c"].dtype)["c"].copy_(operands["c"])
    solution.run(operands["a"], operands["b"], c, *more)
    return c
