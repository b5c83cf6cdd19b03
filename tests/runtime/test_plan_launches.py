"""What a plan compiles, loads and launches, without a GPU."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch
import triton

from tests.runtime.test_plan import half
from tests.support import fake_driver
from tests.support.patches import replace_all
from tests.support.table_fakes import HOPPER
from tests.support.threads import at_once
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.hardware.device import INTERPRETER, device_of_capability
from triton_gemm.kernels.launch import Launch
from triton_gemm.problem import PRODUCT, GemmProblem, Request
from triton_gemm.runtime import binaries, interpreted_plan, plan, step
from triton_gemm.selection.select import launches, select


class FakeDriver:
    """In the place of compiler and GPU: notes what is compiled, for operands of which dtypes, and what is launched, on
    which stream and values."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compiled: list[tuple[Launch, dict[str, torch.Tensor], dict[str, float]]] = []
        self.launched: list[tuple[Launch, int, dict[str, Any]]] = []
        self.contexts: list[int] = []
        self.device, self.requested = 0, 0
        self.memory = [torch.empty(4), torch.zeros(4, dtype=torch.int32)]
        replace_all(monkeypatch, plan, device_info=lambda _: HOPPER, workspace=self.workspace)
        replace_all(monkeypatch, plan, current_device=lambda: self.device, current_stream=lambda index: 70 + index)
        monkeypatch.setattr(plan, "ensure_context", self.contexts.append)
        monkeypatch.setattr(step.kits, "code_of", lambda *_: None)
        replace_all(monkeypatch, step, compiled=self.compile, machine_code=lambda launch: launch)
        monkeypatch.setattr(step.Step, "_load", lambda made, launch: self.load(made, launch))
        monkeypatch.setattr(torch.cuda, "device", self.on_device)

    def compile(self, launch: Launch, operands: dict[str, torch.Tensor], scalars: dict[str, float]) -> Launch:
        self.compiled.append((launch, dict(operands), dict(scalars)))
        return launch

    def load(self, made: step.Step, launch: Launch) -> None:
        assert made.launch is launch
        names = "alpha", "beta", *made.places
        made.call = lambda stream, values: self.launched.append((launch, stream, dict(zip(names, values, strict=True))))

    def workspace(self, device: int, stream: int, nbytes: int) -> list[torch.Tensor]:
        assert (device, stream) == (self.device, 70 + self.device)
        self.requested = nbytes
        return self.memory

    @contextmanager
    def on_device(self, index: int) -> Iterator[None]:
        before, self.device = self.device, index
        yield
        self.device = before


LAUNCHED: dict[str, tuple[tuple[int, int, int], torch.dtype, Request]] = {
    "one launch": ((4096, 2048, 512), torch.bfloat16, PRODUCT),
    "one launch with a bias": ((4096, 2048, 512), torch.bfloat16, Request(bias="n")),
    "parts that are added up in the workspace": ((128, 128, 16384), torch.bfloat16, PRODUCT),
    "copies, and a second launch": ((256, 320, 512), torch.float32, Request(precision="tf32x3")),
    "a copy, a workspace and a bias": ((128, 129, 16384), torch.bfloat16, Request(alpha=2.0, bias="n")),
}


class Planned:
    """One of LAUNCHED, planned for Hopper. shared: dtypes of the memory that its launches have in common."""

    def __init__(self, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
        self.driver = FakeDriver(monkeypatch)
        (M, N, K), self.dtype, request = LAUNCHED[name]
        shapes = {"a": (M, K), "b": (K, N), "c": (M, N), **({"bias": (N,)} if request.bias else {})}
        self.operands = {operand: torch.empty(shape, dtype=self.dtype) for operand, shape in shapes.items()}
        problem = request.problem(*(self.operands[operand] for operand in "abc"))
        selection = select(problem, HOPPER)
        self.plan = plan.GemmPlan(problem, selection, torch.device("cpu"))
        self.expected = [launch.programmatic() for launch in launches(problem, selection)]
        shares = any(launch.counters for launch in self.expected)
        self.shared = {"workspace": torch.float32, "counters": torch.int32} if shares else {}

    def run(self, **others: torch.Tensor) -> dict[str, int]:
        """Calls it on its operands, or others in their places; returns their addresses."""
        operands = {**self.operands, **others}
        a, b, c, *auxiliary = operands.values()
        self.plan.run(a, b, c, tuple(auxiliary), 3, 0.5)
        memory = zip(self.shared, self.driver.memory, strict=False)
        return {name: x.data_ptr() for name, x in (*operands.items(), *memory)}

    def assert_compiled(self) -> None:
        """Each launch once, for the dtypes of what it is launched on."""
        temporaries = {x.name: x.dtype for launch in self.expected for x in launch.temporaries}
        dtypes = {**dict.fromkeys("abc", self.dtype), **temporaries, **self.shared}
        assert [launch for launch, _, _ in self.driver.compiled] == self.expected
        for _, operands, _ in self.driver.compiled:
            assert {name: operands[name].dtype for name in dtypes} == dtypes


@pytest.mark.parametrize("ahead", [False, True])
@pytest.mark.parametrize("name", LAUNCHED)
def test_a_plan_compiles_each_launch_once(name: str, ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """At its first call, or ahead, for aligned operands that do not exist."""
    made = Planned(name, monkeypatch)
    for _ in range(2 * ahead):  # by two threads
        made.plan.compile()
        assert {*made.driver.contexts} == {0} and not made.driver.launched
    for _ in range(2):
        made.run()
        made.assert_compiled()
    for _, operands, scalars in made.driver.compiled * ahead:
        assert scalars == {"alpha": 1.0, "beta": 0.0}
        assert all(x.data_ptr() % 16 == 0 and x.is_meta for x in operands.values())


@pytest.mark.parametrize("name", LAUNCHED)
def test_a_plan_launches_on_what_it_is_given(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    made = Planned(name, monkeypatch)
    values = {"alpha": 3.0, "beta": 0.5, **made.run()}
    assert ("one launch" in name) == (len(made.expected) == 1 and not made.shared)
    assert made.plan.out_dtype == made.dtype
    assert made.driver.requested == (max(launch.workspace for launch in made.expected) if made.shared else 0)
    _, _, given = made.driver.launched[0]
    assert made.driver.launched == [(launch, 70, given) for launch in made.expected]
    temporaries = [x.name for launch in made.expected for x in launch.temporaries]
    assert [*given] == [*values, *temporaries] and {name: given[name] for name in values} == values
    assert len({given[name] for name in temporaries}.difference(values.values(), [0])) == len(temporaries)


@pytest.mark.parametrize(
    ("name", "operand"),
    [
        *((name, operand) for name in ("one launch", "parts that are added up in the workspace") for operand in "abc"),
        *(("one launch with a bias", operand) for operand in ("a", "b", "c", "bias")),
    ],
)
def test_a_plan_s_next_call_launches_on_other_addresses(
    name: str, operand: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And on those of before where nothing has moved."""
    made = Planned(name, monkeypatch)
    before = made.run()
    first, contexts = made.driver.launched.copy(), len(made.driver.contexts)
    assert made.run() == before and made.driver.launched == 2 * first and len(made.driver.contexts) == contexts
    after = made.run(**{operand: made.operands[operand].clone()})
    assert {name for name in after if after[name] != before[name]} == {operand}
    assert {name: made.driver.launched[-1][2][name] for name in after} == after


def test_a_plan_launches_on_the_stream_of_its_own_device(monkeypatch: pytest.MonkeyPatch) -> None:
    driver = FakeDriver(monkeypatch)
    a, b, c = half(4096, 512), half(512, 2048), half(4096, 2048)
    problem = GemmProblem.of(a, b, c)
    made = plan.GemmPlan(problem, select(problem, HOPPER), torch.device("cuda", 1))
    made.run(a, b, c)
    assert [stream for _, stream, _ in driver.launched] == [71] and set(driver.contexts) == {1} and driver.device == 0
    contexts = len(driver.contexts)
    assert [scalars for _, _, scalars in driver.compiled] == [{"alpha": 1.0, "beta": 0.0}]
    with driver.on_device(1):
        made.run(a, b, c)
    assert len(driver.contexts) == contexts and driver.launched[0] == driver.launched[1]


def test_the_interpreter_gets_the_workspace_that_a_launch_asks_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no byte less: what it writes beyond is another tensor's."""
    a, b, c = half(4, 40_000), half(40_000, 4), half(4, 4)
    made = plan.InterpretedPlan(problem := GemmProblem.of(a, b, c), select(problem, INTERPRETER))
    shared = [launch for launch in made.launches if launch.counters]
    assert shared and all(launch.workspace for launch in shared)
    seen: list[dict[str, Any]] = []

    def materialise(launch: Launch, operands: dict[str, torch.Tensor], scalars: dict[str, float]) -> dict[str, Any]:
        assert operands["workspace"].nbytes == launch.workspace and operands["workspace"].dtype == torch.float32
        assert operands["counters"].tolist() == [0] * launch.counters and operands["counters"].dtype == torch.int32
        seen.append({"launch": launch, **scalars})
        return {}

    run = type("Kernel", (), {"__getitem__": lambda *_: lambda **_: None})()
    made.launches = tuple(replace(launch, kernel=run) for launch in made.launches)
    monkeypatch.setattr(interpreted_plan, "materialise", materialise)
    made.run(a, b, c)
    assert [(one["alpha"], one["beta"]) for one in seen] == [(1.0, 0.0)] * len(made.launches)


def test_before_hopper_nothing_is_launched_programmatically() -> None:
    problem = GemmProblem.of(half(64, 64), half(64, 64), half(64, 64))
    for capability, programmatic in (((8, 0), False), ((8, 9), False), ((9, 0), True), ((10, 0), True)):
        device = device_of_capability(capability)
        for launch in binaries.launches_on(device, problem, select(problem, device)):
            assert launch.options.get("launch_pdl", False) == launch.arguments["PDL"] == programmatic


def test_a_selection_is_that_of_the_operands_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(plan, "device_info", lambda _: HOPPER)
    a, b, c = half(4096, 512), half(512, 2048), half(4096, 2048)
    assert plan.selection_of(a, b, c) == select(GemmProblem.of(a, b, c), HOPPER)


# --- Loading ---

MADE = fake_driver.made_up(Launch(None, (1, 1, 1), {}, {}), b"every")


@pytest.fixture
def loaded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What happens while machine code is loaded, slowly."""
    seen: list[tuple[Any, ...]] = []

    def load(code: bytes, symbol: str, shared: int) -> tuple[int, int]:
        time.sleep(0.02)
        number = sum(x[0] == "load" for x in seen)
        seen.append(("load", code, symbol, shared))
        return 100 + number, 200 + number

    monkeypatch.setattr(step, "_functions", {})
    replace_all(monkeypatch, hardware_driver, load=load, ensure_context=lambda device: seen.append(("context", device)))
    return seen


def test_machine_code_is_loaded_once_on_each_device(loaded: list[tuple[Any, ...]]) -> None:
    one, other = MADE, MADE._replace(code=b"other")
    found = [step.function_of(made, device) for _ in range(2) for made in (one, other) for device in (0, 1)]
    assert found == 2 * [200, 201, 202, 203]
    expected = [x for code in (b"every", b"other") for device in (0, 1) for x in (
        ("context", device), ("load", code, "made_up", 1024)
    )]  # fmt: skip
    assert loaded == expected


def test_threads_load_machine_code_once(loaded: list[tuple[Any, ...]]) -> None:
    """Each with a context: it may launch next."""
    assert at_once(*16 * [lambda: step.function_of(MADE, 1)]) == 16 * [200]
    assert [x for x in loaded if x[0] == "load"] == [("load", b"every", "made_up", 1024)]


def test_hooks_on_loads_are_called_around_each(loaded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch) -> None:
    for when in ("start", "end"):
        note = lambda *given, when=when: loaded.append((when, *given))  # noqa: E731
        monkeypatch.setattr(triton.knobs.runtime, f"kernel_load_{when}_hook", note)
    for code in (b"every", b"every", b"other"):
        step.function_of(MADE._replace(code=code), 0)
    (_, start, one, end), (_, start_2, other, end_2) = loaded[:4], loaded[4:]
    digest, digest_2 = end[-1], end_2[-1]
    assert start == ("start", None, None, "made_up", {}, digest) and end == ("end", 100, 200, "made_up", {}, digest)
    assert start_2[1:] == (None, None, "made_up", {}, digest_2) and end_2[1:3] == (101, 201) and digest != digest_2
    assert one[:2] == ("load", b"every") and other[:2] == ("load", b"other")
