"""Every wrong argument to every public function raises what torch raises, in words about the argument, and the next
call is right. The arguments are made of the signatures (`tests/support/bad_arguments.py`)."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support import bad_arguments, table_fakes
from tests.support.bad_arguments import OF_PARAMETERS, UNCHECKED, WITHOUT, Arguments, Kind
from triton_gemm import arguments
from triton_gemm.functional import routing
from triton_gemm.runtime import policies

CASES = [case for case in bad_arguments.cases() if ".".join(case) not in UNCHECKED]


@pytest.fixture(scope="module")
def right(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Arguments]]:
    folder = tmp_path_factory.mktemp("right")
    with pytest.MonkeyPatch.context() as patch:
        table_fakes.own_folder(folder, patch)
        found = bad_arguments.right("cpu", folder)
        bad_arguments.call("tables.store", found["tables.store"])
        bad_arguments.call("tables.export_to", found["tables.export_to"])
        yield found


def test_every_parameter_has_wrong_values(right: dict[str, Arguments]) -> None:
    """A new public function or parameter needs a right call, and a kind."""
    public = bad_arguments.public()
    taking = {name for name, function in public.items() if inspect.signature(function).parameters}
    assert taking == set(right), "tests/support/bad_arguments.py: `right` has a call of each public function"
    assert set(public) - taking == WITHOUT - taking
    missing = [".".join(case) for case in CASES if bad_arguments.kind_of(*case) is None]
    assert missing == [], "tests/support/bad_arguments.py: OF_PARAMETERS says what kind each parameter is of"
    used = {name for case in bad_arguments.cases() for name in (case[1], ".".join(case))}
    assert set(OF_PARAMETERS) <= used


FIRST: dict[str, Any] = {}  # what the first right call of each function gave


def bits(result: Any) -> Any:
    return result.tolist() if isinstance(result, torch.Tensor) else None


def check(function: str, parameter: str, right: Arguments, value: Any, raises: bad_arguments.Errors) -> None:
    arguments = {**right, parameter: value}
    what = f"{value.layout} {value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else repr(value)
    shown = f"{function}({parameter}={what})"
    torchs = bad_arguments.torchs_error(function, parameter, arguments)
    try:
        bad_arguments.call(function, arguments)
    except Exception as error:
        message = f"{shown}: {words(error)}"
        if isinstance(torchs, BaseException) and not isinstance(error, NotImplementedError):
            assert type(error) is type(torchs), f"{message}\ntorch: {words(torchs)}"
        else:
            assert isinstance(error, raises), message
        torchs_own = isinstance(torchs, BaseException) and str(error).splitlines()[0] in str(torchs)
        assert torchs_own or function == "check_ranks" or bad_arguments.names_argument(error, parameter, value), message
    else:
        assert torchs is None, f"{shown} was taken; torch: {words(torchs)}"


def words(error: object) -> str:
    return f"{type(error).__name__}: {str(error)[:200]}"


@pytest.mark.few
@pytest.mark.parametrize(("function", "parameter"), CASES, ids=lambda name: name)
def test_a_wrong_argument_is_refused_and_the_next_call_is_right(
    function: str, parameter: str, right: dict[str, Arguments]
) -> None:
    policy, rules = policies.current_policy(), list(routing._rules)
    for value, raises in bad_arguments.wrong_values(function, parameter, right[function]):
        check(function, parameter, right[function], value, raises)
        assert policies.current_policy() == policy and routing._rules == rules
    if function not in bad_arguments.NOT_CALLED:  # whatever a bad one has left behind, it is still there
        again = bits(bad_arguments.call(function, right[function]))
        assert FIRST.setdefault(function, again) == again


SIZES = {"M": 64, "N": 32, "K": 16, "dtype": torch.float16, "device": table_fakes.HOPPER}


@pytest.mark.parametrize("parameter", ["M", "N", "K", "dtype", "batch", "layout", "groups", "group_dim", "scales"])
def test_a_wrong_size_is_refused(parameter: str) -> None:
    kind = bad_arguments.kind_of("explain", parameter)
    for value in kind.wrong:
        check("explain", parameter, SIZES, value, kind.raises)
    assert triton_gemm.explain(**SIZES).kernel


# --- What keeps the tests honest ---


def test_what_is_taken_or_raises_otherwise_is_noticed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    right = bad_arguments.right("cpu", tmp_path)["mm"]
    with monkeypatch.context() as patch, pytest.raises(AssertionError, match="was taken"):
        patch.setattr(arguments, "flag", lambda *_, **__: None)
        check("mm", "batch_invariant", right, "no", (TypeError,))
    for wrong in (ValueError("argument 'input' must be a matrix"), TypeError("'int' object has no attribute 'dim'")):

        def raises(*_: object, wrong: Exception = wrong, **__: object) -> None:
            raise wrong

        with monkeypatch.context() as patch, pytest.raises(AssertionError, match=r"mm\(input=1\.5\)"):
            patch.setattr(arguments, "tensors", raises)
            check("mm", "input", right, 1.5, (TypeError,))


def test_a_new_parameter_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    def mm(input: torch.Tensor, mat2: torch.Tensor, *, rounding: str = "nearest") -> None: ...

    monkeypatch.setattr(triton_gemm, "mm", mm)
    bad_arguments.cases.cache_clear()
    try:
        assert [case for case in bad_arguments.cases() if bad_arguments.kind_of(*case) is None] == [("mm", "rounding")]
    finally:
        monkeypatch.undo()
        bad_arguments.cases.cache_clear()


def test_every_kind_has_wrong_values() -> None:
    assert all(isinstance(kind, Kind) and kind.wrong and kind.raises for kind in bad_arguments.KINDS.values())
