"""Tables for tests: a GPU that is not there, problems and entries for it, and a folder of tables for a test."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import strategies as st

import triton_gemm
from triton_gemm import calibration, kernels, tables
from triton_gemm.arithmetic import ARITHMETICS, ScaleKind
from triton_gemm.hardware.device import DeviceInfo, device_of_capability
from triton_gemm.kernels.candidate import Algorithm
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import ACTIVATIONS, GemmProblem, Layout
from triton_gemm.runtime import policies
from triton_gemm.selection import generation
from triton_gemm.selection.bit_classes import bit_class
from triton_gemm.selection.select import Selection, illegal, ranked
from triton_gemm.tables import files, records
from triton_gemm.tables.records import Entry

HOPPER: DeviceInfo = device_of_capability((9, 0))


def problem_of(M: int = 512, N: int = 1024, K: int = 2048, dtype: torch.dtype = torch.bfloat16) -> GemmProblem:
    layouts = Layout((0, K, 1)), Layout((0, N, 1)), Layout((0, N, 1))
    return GemmProblem(1, M, N, K, dtype, dtype, "half", *layouts)


def another(problem: GemmProblem, nth: int = 1, bits: bool = True) -> Selection:
    """A legal selection that is not the model's choice: the nth best by the model of those that give the choice's bits,
    or with bits=False of those that do not."""
    legal = (
        Selection.of(candidate, "")
        for _, candidate in ranked(problem, HOPPER)
        if illegal(problem, HOPPER, candidate) is None
    )
    choice = next(legal)
    same = bit_class(problem, choice)
    others = (selection for selection in legal if (bit_class(problem, selection) == same) == bits)
    return next(islice(others, nth - 1, None))


def store(problem: GemmProblem, nth: int = 1, device: DeviceInfo = HOPPER, **how: object) -> bool:
    return tables.store(problem, another(problem, nth), device, **{"us": 1.0, "default_us": 2.0, **how})


def found(problem: GemmProblem, **how: Any) -> Any:
    selection = tables.lookup(problem, HOPPER, **how)
    return selection and (selection.kernel, selection.config, selection.work, selection.source)


def chosen(problem: GemmProblem, nth: int = 1, source: str = "user's table") -> Any:
    selection = another(problem, nth)
    return selection.kernel, selection.config, selection.work, source


def own_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's folders of tables and of extensions, empty, in this test alone, and no tables that are shipped; what
    is logged once is logged again."""
    monkeypatch.setenv("TRITON_GEMM_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "caches"))  # `cache clear` deletes extensions
    monkeypatch.setattr(tables.queries, "SHIPPED", tmp_path / "shipped")
    files.say_once.cache_clear()
    tables.queries._ignored.clear()
    tables.reload()
    return tmp_path / "tables"


def read_environment_again() -> None:
    policies._of_environment.cache_clear()
    policies._invariant_in_environment.cache_clear()
    policies.learns_in_environment.cache_clear()


@contextmanager
def default_policy() -> Iterator[None]:
    """No policy but the default, and no tuner, inside and after."""

    def reset() -> None:
        policies._process = policies._tuner = None
        read_environment_again()
        generation.advance()

    reset()
    try:
        yield
    finally:
        reset()


def messages_of_check_ranks(number: int, device: DeviceInfo) -> list[str]:
    """On one of two ranks, each with a folder of its own: as they begin, after both have stored different entries, and
    after the second took another policy; "" where it does not raise."""
    problem, messages = problem_of(), []
    for step in ("agree", "tables", "policy"):
        if step == "tables":
            tables.store(problem, another(problem, number + 1), device, us=1.0, default_us=2.0)
        if step == "policy" and number:
            triton_gemm.set_policy("model")
        try:
            triton_gemm.check_ranks(device=device)
            messages.append("")
        except RuntimeError as error:
            messages.append(str(error))
    return messages


def table_in(folder: Path) -> Path:
    (path,) = folder.glob("*.json")
    return path


# --- Anything that may be in a table ---

SIZES = st.integers(1, 2**31)
LAYOUTS = st.builds(Layout, st.tuples(*3 * [st.integers(0, 2**40)]), st.booleans())
OPERANDS = [(dtype, x.name) for x in ARITHMETICS.values() for dtype in x.dtypes]


@st.composite
def problems(draw: st.DrawFn) -> GemmProblem:
    dtype, precision = draw(st.sampled_from(OPERANDS))
    return GemmProblem(
        *(draw(SIZES) for _ in range(3)),
        draw(st.one_of(st.just(0), SIZES)),
        *(dtype, draw(st.sampled_from([torch.float32, torch.bfloat16, torch.int32])), precision),
        *(draw(LAYOUTS) for _ in range(3)),
        draw(st.booleans()),
        *(draw(st.sampled_from([None, *x])) for x in ("mn", ACTIVATIONS, ScaleKind.__args__, "mk")),
    )


@st.composite
def entries(draw: st.DrawFn) -> Entry:
    kernel = draw(st.sampled_from(kernels.KERNELS))
    hopper = kernel == "warp_specialised"
    sides = ([192] * hopper, [96, 160] * hopper, [])  # that are no powers of two, along M, N and K
    tile = [draw(st.sampled_from([1, 2, 8, 64, 1024, *more])) for more in sides]
    num_warps = draw(st.sampled_from([1, 4, *[12] * hopper]))
    config = kernels.named(kernel).Config(*tile, num_warps, draw(st.integers(1, 8)))
    split_k = draw(st.integers(1, 64))
    split = draw(st.integers(0, 64))
    schedule = Schedule(split * split_k + draw(st.integers(1, 132)), split, split_k, draw(st.integers(1, 16)))
    algorithm = Algorithm(
        kernel=kernel,
        config=config,
        work=draw(st.sampled_from([split_k, schedule])),
        swap_ab=draw(st.booleans()),
        packed=draw(st.sampled_from([(), ("a",), ("b",), ("a", "b")])),
    )
    return Entry(
        algorithm=algorithm,
        us=draw(st.floats(records.LEAST_US, 1e9)),
        default_us=draw(st.floats(records.LEAST_US, 1e9)),
        measured=draw(st.text(max_size=40)),
        by=draw(st.text(max_size=40)),
        default=draw(st.text(max_size=40)),
    )


@contextmanager
def own_models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """The user's folder of calibrated models, empty, with tables and a policy of this test alone."""
    with default_policy():
        own_folder(tmp_path, monkeypatch)
        calibration.reload()
        yield tmp_path / "models"
    calibration.reload()
