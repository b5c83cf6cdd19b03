"""Every wrong argument to every public function, made of their signatures: what is public, one right call of each, the
kind of each parameter, and values that no parameter of that kind may have.

A public function or parameter that is not in these tables fails `test_every_parameter_has_wrong_values`.
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from pathlib import Path
from typing import Any

import numpy as np
import torch

import triton_gemm
from tests.support.table_fakes import HOPPER, another, problem_of
from triton_gemm import nn as nn

ROOT = Path(__file__).parents[2]
Arguments = dict[str, Any]
Errors = tuple[type[BaseException], ...]

# --- What is public ---


def public() -> dict[str, Callable[..., Any]]:
    """All functions of `triton_gemm.__all__`, and what documents name of its modules: `tables.store(...)`."""
    found = {name: getattr(triton_gemm, name) for name in triton_gemm.__all__}
    for path in (ROOT / "README.md", *(ROOT / "docs").glob("*.md")):
        text = path.read_text()
        names = re.findall(r"\btriton_gemm\.((?:\w+\.)*\w+)\.(\w+)", text)
        names += [("tables", name) for name in re.findall(r"(?<![\w/.])tables\.(\w+)\(", text)]
        for module, name in names:
            first = getattr(triton_gemm, module.partition(".")[0], None)
            if first is None or inspect.ismodule(first):
                one = getattr(import_module(f"triton_gemm.{module}"), name, None)
                if one is not None:
                    found[f"{module}.{name}"] = one
    found.pop("problem.aligned", None)  # what docs/tuning.md says that two modules use
    return {name: x for name, x in found.items() if inspect.isfunction(x) or x in (nn.Linear, nn.GatedLinear)}


def parameters(function: Callable[..., Any]) -> list[str]:
    return list(inspect.signature(function).parameters)


# --- A right call of each ---

# Those that take nothing.
WITHOUT = {"current_policy", "disable", "inductor.register", "inductor.unregister"}
WITHOUT |= {f"tables.{name}" for name in ("folder", "ignored", "clear", "reload")}
WITHOUT |= {f"calibration.{name}" for name in ("reload",)}
PRODUCTS = ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm", "linear", "grouped_matmul", "scaled_matmul")


def right(device: str, folder: Path) -> dict[str, Arguments]:
    """Arguments of a call of each function that works, the products on that device. Of those in NOT_CALLED the call is
    only right but for what the machine lacks."""

    def ones(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        return torch.ones(shape, dtype=dtype, device=device)

    a, b, x, y = ones(2, 3), ones(3, 5), ones(2, 2, 3), ones(2, 3, 5)
    half, eight = {"dtype": torch.bfloat16}, torch.float8_e4m3fn
    offs = torch.tensor([1, 2], dtype=torch.int32, device=device)
    problem, exported = problem_of(), folder / "exported.json"
    named = {"device": HOPPER}
    return {
        "matmul": {"input": a, "other": b},
        "mm": {"input": a, "mat2": b},
        "bmm": {"input": x, "mat2": y},
        "mv": {"input": a, "vec": ones(3)},
        "addmm": {"input": ones(5), "mat1": a, "mat2": b},
        "baddbmm": {"input": ones(5), "batch1": x, "batch2": y},
        "linear": {
            **{"input": a, "weight": ones(5, 3), "bias": ones(5), "activation": "reglu"},
            **{"residual": ones(2, 5), "gate": ones(5, 3), "gate_bias": ones(5)},
        },
        "grouped_matmul": {
            **{"mat_a": ones(4, 16, **half), "mat_b": ones(2, 16, 8, **half), "offs": offs},
            **{"activation": "reglu", "gate": ones(2, 16, 8, **half)},
        },
        "scaled_matmul": {
            **{"a": ones(16, 32).to(eight), "b": ones(16, 32).to(eight).T},
            **{"scale_a": ones(1), "scale_b": ones(1), "bias": ones(16, **half)},
        },
        "explain": {"input": a, "other": b, "bias": ones(5), **named},
        "nn.Linear": {"in_features": 3, "out_features": 5},
        "nn.GatedLinear": {"in_features": 3, "out_features": 5},
        "selection_fingerprint": named,
        "check_ranks": named,
        "set_policy": {"name": "cached"},
        "policy": {"name": "cached"},
        "batch_invariant": {},
        "enable": {},
        "use": {},
        "report_routing": {},
        "wait_until_compiled": {"timeout": 1.0},
        "record_shapes": {"path": folder / "shapes.json"},
        "tune": {"shapes": [(64, 64, 64)]},
        "compare": {"shapes": [(64, 64, 64)]},
        "calibrate": {},
        "prepare": {"model_or_weights": [(64, 64)], "rows": [1], **named},
        "runtime.policies.set_tuner": {"tuner": None},
        "tables.store": {"problem": problem, "selection": another(problem), "us": 1.0, "default_us": 2.0, **named},
        "tables.export_to": {"path": exported, **named},
        "tables.import_from": {"path": exported},
        "tables.merge": {"paths": [exported], "out": folder / "merged.json"},
        "tables.verify": named,
    }


MODULES = "nn.Linear", "nn.GatedLinear"
# For want of a group of ranks, a GPU, or a compiler; and what is called later.
NOT_CALLED = {"check_ranks", "tune", "compare", "calibrate", "prepare", *MODULES}

# --- Kinds of parameters, and what none of that kind may be ---


@dataclass(frozen=True)
class Kind:
    """wrong: values, or functions of the right value (a tensor) that make them; raises: one of these, where torch has
    no such argument; optional: whether None is right."""

    wrong: tuple[Any, ...]
    raises: Errors = (TypeError, ValueError)
    optional: bool = True


class Of:
    """A wrong value that is made of the right tensor."""

    def __init__(self, name: str, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
        self.name, self.make = name, make

    def __repr__(self) -> str:
        return self.name


NOTHING = object()
NO_TENSORS = (1.5, "x", [1.0], np.ones((2, 3)), NOTHING)
WRONG_TENSORS = (
    Of("int64", lambda x: x.to(torch.int64)),
    Of("complex", lambda x: x.float().to(torch.complex64)),
    Of("bool", lambda x: x.float().to(torch.bool)),
    Of("sparse", lambda x: x.float().to_sparse()),
    Of("meta", lambda x: x.to("meta")),
    Of("longer", lambda x: torch.cat([x.float()] * 2, -1).to(x.dtype)),
    Of("6-D", lambda x: x.expand(1, 2, 1, *x.shape) if x.dim() == 3 else x.expand(1, 2, 1, 2, *x.shape)),
)
NO_FLAGS = (1, 0, "no", "", [True], torch.ones(2), NOTHING)
NO_WORDS = ("x", "", 1, True, ["model"], {}, np.ones(2), NOTHING)
NO_NUMBERS = ("1", [1], torch.ones(2), torch.ones((), requires_grad=True), NOTHING)
RUNTIME = (TypeError, ValueError, RuntimeError, NotImplementedError)

KINDS = {
    "tensor": Kind((*NO_TENSORS, None, *WRONG_TENSORS), RUNTIME, optional=False),
    "added": Kind((*NO_TENSORS, *WRONG_TENSORS), RUNTIME),
    "scale": Kind((*NO_TENSORS, None, *WRONG_TENSORS[:-1]), RUNTIME, optional=False),
    "out": Kind((*NO_TENSORS, torch.ones(1, dtype=torch.float64), torch.ones(1, requires_grad=True)), RUNTIME),
    "dtype": Kind(("float32", 1, 1.5, [], np.float32, NOTHING), (TypeError,)),
    "number": Kind((*NO_NUMBERS, None), (TypeError,)),
    "positive": Kind((*NO_NUMBERS, 0, -1.0, float("nan"), float("inf"), None)),
    "positive or none": Kind((*NO_NUMBERS, 0, -1.0, float("nan"), float("inf"))),
    "budget": Kind((*NO_NUMBERS, 0, -1.0, float("nan"), None)),
    "timeout": Kind((*NO_NUMBERS, -1.0, float("nan"))),
    "flag": Kind(NO_FLAGS, (TypeError,)),
    "word": Kind(NO_WORDS, (ValueError,)),
    "word or tensors": Kind((*NO_WORDS, (torch.ones(1),), [1, 2]), RUNTIME),
    "text": Kind((1, ["x"], NOTHING), (TypeError,)),
    "size": Kind((1.5, "4", [4], -1, True, NOTHING), RUNTIME),
    "torch's": Kind(("x", [1], NOTHING), RUNTIME),
    "device": Kind(("nonsense", -3, 1.5, [0], "sm_71", NOTHING), RUNTIME),
    "info": Kind((0, "sm_71", torch.device("cpu"), NOTHING), (TypeError, ValueError)),
    "path": Kind((1, 1.5, [1], NOTHING), (TypeError,)),
    "kinds": Kind((1, "matmul", ["mm", 2], [["mm"]], [np.ones(2)], NOTHING)),
    "some kinds": Kind((1, "matmul", ["mm", 2], [["mm"]], [np.ones(2)], NOTHING, (), [], torch.complex64)),
    "callback": Kind((1, "x", [print], NOTHING), (TypeError,)),
    "collection": Kind((1, NOTHING, [1], [(1, 2)], "x", b"x"), (TypeError, ValueError, OSError)),
    "weights": Kind(
        (1, NOTHING, (), [1], [(1, 0)], [(1.5, 2)], torch.ones(2, 2), [torch.ones(2)], "x"), optional=False
    ),
    "rows": Kind((1.5, "4", 0, -1, True, (), [0], [1, 2.0], ["x"], torch.ones(2), NOTHING), optional=False),
    "value": Kind((1, "x", [1], None, NOTHING), (TypeError,), optional=False),
    "group": Kind((1, "x", NOTHING), (AttributeError, *RUNTIME)),  # torch.distributed's own
}
# The parameters of each kind; `function.parameter` where a name means something else in that function.
OF_KINDS = {
    "tensor": "input other mat2 vec mat1 batch1 batch2 weight mat_a mat_b a b offs gate",
    "scale": "scale_a scale_b",
    "added": "addmm.input baddbmm.input bias residual gate_bias",
    "dtype": "out_dtype dtype",
    "number": "alpha beta",
    "flag": "batch_invariant use_fast_accum enabled parts reset resume keep required learn prepare.bias",
    "word": "precision activation name bits measure layout group_dim first_calls",
    "size": "M N K batch groups repeat least_rows workers",
    "torch's": " ".join(f"{x}.{y}" for x in MODULES for y in ("in_features", "out_features", "device")),
    "positive": "us default_us",
    "positive or none": "torch_us",
    "text": "measured by",
    "kinds": "exclude",
    "some kinds": "only",
    "callback": "predicate progress tuner",
    "collection": "shapes configs paths",
    "weights": "model_or_weights",
    "rows": "rows",
    "path": "path prepare.cache tables.merge.out",
    "device": "explain.device tune.device compare.device calibrate.device prepare.device "
    "selection_fingerprint.device check_ranks.device",
    "value": "problem selection",
    "out": "out",
    "budget": "budget",
    "timeout": "timeout",
    "word or tensors": "scales",
    "info": "device",
    "group": "group",
}
OF_PARAMETERS: Mapping[str, str] = {name: kind for kind, names in OF_KINDS.items() for name in names.split()}
# What torch.nn.Linear takes without a look.
UNCHECKED = {f"{name}.bias" for name in MODULES}


def kind_of(function: str, parameter: str) -> Kind | None:
    name = OF_PARAMETERS.get(f"{function}.{parameter}") or OF_PARAMETERS.get(parameter)
    return None if name is None else KINDS[name]


@cache
def cases(*functions: str) -> list[tuple[str, str]]:
    """Every parameter of the public functions, or of some: its function's name and its own."""
    found = public()
    every = [(name, parameter) for name in found for parameter in parameters(found[name])]
    return [case for case in every if not functions or case[0] in functions]


def wrong_values(function: str, parameter: str, arguments: Arguments) -> Iterator[tuple[Any, Errors]]:
    """Values that this parameter may not have, and what they may raise where torch has no say."""
    kind = kind_of(function, parameter)
    for value in kind.wrong:
        if isinstance(value, Of):
            yield value.make(arguments[parameter]), kind.raises
        elif value is not None or parameter not in arguments or not kind.optional:
            yield value, kind.raises


# --- What torch does with the same ---


def _explained(input: Any, other: Any, bias: Any = None, **_: Any) -> Any:
    product = torch.matmul(input, other)
    return product if bias is None or bias is True else torch.add(product.to("meta"), bias.to("meta"))  # of any device


def _scaled(a: Any, b: Any, scale_a: Any, scale_b: Any, bias: Any, **how: Any) -> Any:
    return torch._scaled_mm(a, b, scale_a, scale_b, bias=bias, **{"out_dtype": torch.bfloat16, **how})


def _linear(
    input: Any, weight: Any, bias: Any, activation: Any, residual: Any = None, gate: Any = None, gate_bias: Any = None
) -> Any:
    if gate is None:
        raise ValueError("a gate is a second weight")
    up, before = (torch.nn.functional.linear(input, *pair) for pair in ((weight, bias), (gate, gate_bias)))
    product = before.relu() * up
    if (
        before.shape != up.shape
        or before.dtype != up.dtype
        or any(x is not None and x.dim() != 1 for x in (bias, gate_bias))
    ):
        raise RuntimeError("weight and gate are of one shape and dtype, and biases [N]")
    if isinstance(residual, torch.Tensor) and (residual.dtype != product.dtype or residual.dim() > product.dim()):
        raise RuntimeError("a residual is of the result's dtype, and broadcasts to it")
    return product if residual is None else torch.add(product, residual)


# Which document errors of their own: torch only says what is right.
WITH_OWN_ERRORS = {"explain", "grouped_matmul", "scaled_matmul"}
_TORCHS: dict[str, Callable[..., Any]] = {
    "explain": _explained,
    "scaled_matmul": _scaled,
    "grouped_matmul": torch.nn.functional.grouped_mm,
    **{name: getattr(torch, name) for name in ("matmul", "mm", "bmm", "mv", "addmm", "baddbmm")},
    "linear": _linear,
    **dict.fromkeys(MODULES, torch.nn.Linear),
}


def torchs_error(function: str, parameter: str, arguments: Arguments) -> BaseException | bool | None:
    """What torch's function of that name raises for the same arguments, None where it takes them, and False where torch
    has no such function or argument."""
    ours = {"precision", "activation", "batch_invariant"}
    if function not in _TORCHS or parameter in ours:
        return False
    try:
        _TORCHS[function](**arguments)
    except NotImplementedError:  # this build of torch has no kernel for it
        return False
    except Exception as error:
        return False if function in WITH_OWN_ERRORS else error
    return None


def call(function: str, arguments: Arguments) -> Any:
    """What the function gives; blocks are entered and left, and what is routed is taken back."""
    found = public()[function](**arguments)
    if isinstance(found, AbstractContextManager):
        with found:
            return None
    if function == "enable":
        triton_gemm.disable()
    return found


# Words of Python's or torch's about the inside of a function, which tell a caller nothing.
INSIDE = re.compile(
    r"has no attribute|unhashable|is not subscriptable|is not iterable|object is not callable|ambiguous|not supported "
    r"between|unsupported operand|positional argument|JSON|^$|unpack"
)


def names_argument(error: BaseException, parameter: str, value: Any) -> bool:
    """Whether the words of an error name the caller's argument, or say what it is."""
    text = str(error)
    return INSIDE.search(text) is None and any(x and x.lower() in text.lower() for x in (parameter, *facts(value)))


def facts(value: Any) -> list[str]:
    """What an error may say of a value."""
    if isinstance(value, torch.Tensor):
        of = (value.dtype, value.layout, value.device, list(value.shape), f"{value.dim()}-D")
        return [str(x).removeprefix("torch.") for x in of]
    inside = [fact for x in value for fact in facts(x)] if isinstance(value, (list, tuple)) else []
    return [type(value).__name__, repr(value), str(value), *inside]
