"""What several checks ask."""

from __future__ import annotations

import traceback
from collections import Counter
from collections.abc import Callable, Mapping
from pathlib import Path
from random import Random
from typing import Any

import torch

from . import causes
from .trace import Trace, WrongError, by_kernels, diagnosis, matrix

# What errors of Python and Triton do not say.
ADVICE = dict.fromkeys(("unexpected type fp32", "> and triton.language.float32"), ": `/` makes fp32, use `//`.") | {
    "'float' object cannot be interpreted": ": `/` makes fractions, use `//`.",
    "define __round__": ": Python's `round` knows no value of a kernel. `tl.cdiv` rounds a quotient up, `//` down.",
    "must be real number, not tensor": ": Python's `math` knows no value of a kernel, `tl` has functions for them.",
    "operand type(s) for **": ": Triton has no `**` of a kernel's values. Exclusive or is `^`.",
    "inline_asm not supported": ": what is right on a GPU does not run here; use integers.",
    "argument '_semantic'": ": coordinates are given as one list, as in `load([row, column])`.",
    "'NoneType'": ": a function that ends without `return` gives None.",
    "'tuple' object": ": one value is to be returned.",
    "'float' object has no attribute": ": numbers are Python's in the interpreter, fp32 on a GPU, and need no cast.",
    "unsigned tensor and a negative": ": to Python `~` of a number is negative: write its 32 bits out, in hexadecimal.",
    "UnboundLocalError": ": an `if` or a loop that does not run does not set it.",
    "operands of type triton.language.float32": ": `/` makes fp32, use `//`.",
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
    return f"{where}{type(error).__name__}: {text}".partition("\n")[0]


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
    errors: Mapping[str, str] | None = None,
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
            advice = next(
                (advice for word, advice in {**(errors or {}), **ADVICE}.items() if word in error_text(error)), None
            )
            if advice is None:
                raise
            raise WrongError(error_text(error, Path(exercise.__file__)).rstrip(": ") + advice) from None
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
            times = f"computed {count[tile]} times" if count[tile] else "never computed"
            advice = never * (not count[tile])
            raise WrongError(f"tile {tile} of C, counted from 0, is {times}; each is to be computed once.{advice}")
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
