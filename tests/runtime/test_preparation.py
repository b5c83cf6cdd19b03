"""Preparing linear layers: what is compiled is what their calls run on, and what is none of theirs is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.nn.utils import parametrizations, parametrize, prune, skip_init

import triton_gemm
from tests.support import plan_fakes
from tests.support.patches import noted, replace_all
from tests.support.table_fakes import HOPPER
from triton_gemm import layers, preparation
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import binaries, native_build, policies, precompile
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape

BF16, HALF, FLOAT = torch.bfloat16, torch.float16, torch.float32
Identities = set[object]


@pytest.fixture
def compiled(monkeypatch: pytest.MonkeyPatch) -> Identities:
    """What tells those binaries apart that were compiled: nothing is."""
    found: Identities = set()
    note = lambda launch, given, _: found.add(binaries.identity(launch, given))  # noqa: E731
    replace_all(monkeypatch, precompile, compiled=note, build_driver_module=lambda *_: None)
    return found


def linear(N: int, K: int, **how: Any) -> torch.nn.Linear:
    kind = triton_gemm.nn.Linear if how.keys() - {"bias", "dtype"} else torch.nn.Linear
    return kind(K, N, **{"dtype": BF16, **how}).requires_grad_(False)


def planned(plans: list[plan_fakes.FakePlan], call: Callable[[], object]) -> Identities:
    """Of the binaries that a call would launch on a GPU."""
    plans.clear()
    call()
    (plan,) = plans
    made = binaries.launches_on(HOPPER, plan.problem, plan.selection)
    operands = binaries.operands_of(plan.problem, made)
    return {binaries.identity(launch, operands) for launch in made}


@pytest.mark.parametrize("shape", [(M,) for M in (1, 2, 5, 16, 100, 257)] + [(3, 33), (1, 2, 1)], ids=str)
@pytest.mark.parametrize(
    "layer",
    [
        *(linear(512, 256, bias=bias, dtype=dtype) for bias in (False, True) for dtype in (BF16, HALF, FLOAT)),
        *(
            linear(33, 65),
            linear(1, 64),
            linear(48, 1),
            skip_init(torch.nn.Linear, 0, 40, dtype=BF16),
            linear(64, 64, dtype=torch.float64),
        ),
        *(linear(256, 512, activation="gelu"), linear(256, 96, dtype=FLOAT, precision="bf16x3", bias=False)),
        *(linear(512, 8192, batch_invariant=True), linear(512, 8192, batch_invariant=False)),
    ],
    ids=str,
)
def test_what_is_compiled_is_what_calls_run_on(
    layer: torch.nn.Linear, shape: tuple[int, ...], compiled: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = preparation.prepare(layer, torch.Size(shape).numel(), device=HOPPER)
    assert made.problems == 1 and made.failures == ()
    plans = plan_fakes.take_plans_away(monkeypatch)
    x = torch.zeros(*shape, layer.in_features, dtype=layer.weight.dtype)
    own = {name: getattr(layer, name, None) for name in ("activation", "precision", "batch_invariant")}
    assert planned(plans, lambda: triton_gemm.linear(x, layer.weight, layer.bias, **own)) == compiled
    if isinstance(layer, triton_gemm.nn.Linear):
        monkeypatch.setattr("triton_gemm.runtime.plan.PLANS", {})
        for module in (plan_fakes.api, plan_fakes.ops):
            module._fast.calls.clear()
        assert planned(plans, lambda: layer(x)) == compiled


@pytest.mark.parametrize("how", [{}, {"dtype": FLOAT}, {"batch_invariant": True}], ids=str)
@pytest.mark.parametrize("bias", [False, True])
def test_gated_layers_are_compiled(
    bias: bool, how: dict[str, Any], compiled: Identities, monkeypatch: pytest.MonkeyPatch
) -> None:
    """By one kernel in 16 bits, by two products else."""
    layer = triton_gemm.nn.GatedLinear(256, 512, bias, **{"dtype": BF16, **how}).requires_grad_(False)
    assert preparation.prepare(layer, 100, device=HOPPER).problems == 1
    plans = plan_fakes.take_plans_away(monkeypatch)
    assert planned(plans, lambda: layer(torch.zeros(100, 256, dtype=layer.weight.dtype))) == compiled
    assert plans[0].problem.gate == (not how)


def test_the_test_can_fail(compiled: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    preparation.prepare(linear(512, 256, bias=False), 100, device=HOPPER)
    plans = plan_fakes.take_plans_away(monkeypatch)
    weight, bias = torch.zeros(512, 256, dtype=BF16), torch.zeros(512, dtype=BF16)
    for rows, added in ((1, None), (100, bias), (2000, None)):
        x = torch.zeros(rows, 256, dtype=BF16)
        assert planned(plans, partial(triton_gemm.linear, x, weight, added)) != compiled


def test_batch_invariance_is_each_layers_own(compiled: Identities) -> None:
    """And else that of the policy that counts here."""

    def of(*layers: torch.nn.Linear) -> Identities:
        compiled.clear()
        assert preparation.prepare(torch.nn.ModuleList(layers), 1, device=HOPPER).problems == 1
        return set(compiled)

    plain, invariant, variant = (linear(512, 8192, batch_invariant=x) for x in (None, True, False))
    assert of(plain) == of(variant) != of(invariant)
    assert of(plain, invariant) == of(plain) | of(invariant)
    with policies.batch_invariant():
        assert of(plain) == of(invariant) != of(variant)


class Model(torch.nn.Module):
    def __init__(self, device: str) -> None:
        super().__init__()
        how: dict[str, Any] = {"device": device, "dtype": HALF}
        self.embedding = torch.nn.Embedding(7, 64, **how)
        self.blocks = torch.nn.ModuleList(torch.nn.Linear(64, 96, **how) for _ in range(3))
        self.plain = torch.nn.Linear(64, 96, bias=False, **how)
        self.ours = triton_gemm.nn.Linear(96, 64, activation="relu", **how)
        self.empty = skip_init(torch.nn.Linear, 64, 0, **how)


def linear_problem(M: int, N: int, K: int, mode: str = "bf16", **more: Any) -> GemmProblem:
    return gemm_problem(Shape(M, N, K, layout="nt", **more), mode)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_a_model_is_each_of_its_kinds_of_layers_once(device: str) -> None:
    found = layers.problems_of(Model(device), range(1, 4), BF16, False)
    wanted = [
        linear_problem(M, N, K, "fp16", **how)
        for N, K, how in ((96, 64, {"bias": "n"}), (96, 64, {}), (64, 96, {"bias": "n", "activation": "relu"}))
        for M in (1, 2, 3)
    ]
    assert list(found) == wanted and all(x == {None} for x in found.values())


def test_weights_are_tensors_and_pairs() -> None:
    tensors = (torch.empty(96, 64, dtype=HALF), torch.nn.Parameter(torch.empty(64, 96, device="meta")))
    of = layers.problems_of
    assert list(of(tensors, 5, BF16, False)) == [linear_problem(5, 96, 64, "fp16"), linear_problem(5, 64, 96, "ieee")]
    pairs = iter([(96, 64), [96, 64], torch.Size((64, 96)), (np.int64(96), 64)])
    assert list(of(pairs, [7, 7], BF16, True)) == [
        linear_problem(7, 96, 64, bias="n"),
        linear_problem(7, 64, 96, bias="n"),
    ]
    (transposed,) = of([torch.empty(64, 96, dtype=BF16).t()], 5, BF16, False)
    assert transposed == replace(linear_problem(5, 96, 64), b=replace(transposed.b, strides=(0, 96, 1)))


def test_rows_are_numbers_of_any_kind() -> None:
    def rows(given: Any) -> list[int]:
        return [problem.M for problem in layers.problems_of([(96, 64)], given, BF16, False)]

    assert rows(range(3, 9, 2)) == rows(iter((3, 5, 7))) == rows(np.array([3, 5, 7, 3])) == [3, 5, 7]
    assert rows(4) == rows(np.int64(4)) == rows({4}) == [4]


class Quantized(torch.Tensor):
    @classmethod
    def __torch_function__(cls, *call: Any, **how: Any) -> Any:
        return super().__torch_function__(*call, **how)


def with_weight(weight: torch.Tensor | None, kind: type[torch.nn.Linear] = torch.nn.Linear) -> torch.nn.Linear:
    made = kind(8, 8, dtype=BF16)
    made.weight = None if weight is None else torch.nn.Parameter(weight, requires_grad=False)
    return made


class Packed(torch.nn.Linear):
    """As libraries of quantization make them, whose forward unpacks the weight."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        raise NotImplementedError


class WithoutWeight(Packed):
    """Which is gone, as where it was given away or not loaded."""

    def __init__(self) -> None:
        super().__init__(8, 8)
        del self.weight


EIGHT = torch.nn.Linear(8, 8, device="meta", dtype=torch.float8_e4m3fn)
INT8 = torch.empty(8, 8, dtype=torch.int8)
LEFT_OUT = {
    "fp8": (EIGHT, "its weight is torch.float8_e4m3fn; linear takes torch.float32, "),
    "fp8 with a forward": (with_weight(INT8.to(torch.float8_e5m2), Packed), "its weight is torch.float8_e5m2"),
    "int8 with a bias": (with_weight(INT8), "its weight is torch.int8; linear takes torch.float32, "),
    "4 bits": (with_weight(torch.empty(32, 1, dtype=torch.uint8), Packed), "its weight is torch.uint8"),
    "flat": (with_weight(torch.empty(0, dtype=BF16)), r"its weight must be 2-D, [N, K], not 1-D"),
    "sparse": (with_weight(torch.eye(8, dtype=BF16).to_sparse()), "prepare takes strided tensors"),
    "subclass": (with_weight(torch.empty(8, 8).as_subclass(Quantized)), "its weight, of Quantized, or its bias has a"),
    "lazy": (torch.nn.LazyLinear(8, dtype=BF16), "its weight, of UninitializedParameter, or its bias has a"),
    "precision": (triton_gemm.nn.Linear(8, 8, precision="tf32").half(), "precision says how fp32 is"),
    "none": (with_weight(None), "has no attribute 'dim'"),
    "gone": (WithoutWeight(), "has no attribute 'weight'"),
}


@pytest.mark.parametrize(("layer", "why"), LEFT_OUT.values(), ids=LEFT_OUT)
def test_layers_that_no_kernel_takes_are_left_out_and_named(
    layer: torch.nn.Linear, why: str, compiled: Identities
) -> None:
    made = preparation.prepare(torch.nn.ModuleDict({"up": linear(96, 64), "down": layer}), 1, device=HOPPER)
    (failure,) = made.failures
    assert failure.startswith("'down' is left out: ") and why in failure
    assert made.problems == 1 and compiled
    compiled.clear()
    alone = preparation.prepare(layer, 1, device=HOPPER)
    assert alone.problems == alone.kernels == 0 and not compiled
    assert alone.failures == (failure.replace("down", type(layer).__name__),)


def test_layers_that_libraries_have_changed_are_prepared() -> None:
    """Where their weight is one of linear's: it is computed once."""
    computed: list[torch.Tensor] = []

    class Noted(torch.nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            computed.append(weight)
            return weight

    parametrized = parametrize.register_parametrization(linear(96, 64), "weight", Noted(), unsafe=True)
    computed.clear()
    others = (parametrizations.weight_norm(linear(96, 64)), prune.identity(linear(96, 64), "weight"))
    for layer in (parametrized, *others, with_weight(torch.empty(96, 64, dtype=BF16), Packed)):
        left_out: list[str] = []
        assert list(layers.problems_of(layer, 1, BF16, False, left_out)) == [linear_problem(1, 96, 64, bias="n")]
        assert left_out == []
    assert len(computed) == 1


MODEL = torch.nn.Sequential(torch.nn.Linear(8, 8, dtype=torch.float16))


@pytest.mark.parametrize(
    ("given", "rows", "how", "error", "words"),
    [
        (MODEL, (), {}, ValueError, "argument 'rows' must have at least one number"),
        (MODEL, range(1, 1), {}, ValueError, "argument 'rows' must have at least one number"),
        (MODEL, range(0, 3), {}, ValueError, "argument 'rows' must be at least 1, not 0"),
        (MODEL, -3, {}, ValueError, "argument 'rows' must be at least 1, not -3"),
        (MODEL, [1, 2.0], {}, TypeError, "argument 'rows' must be int, not float"),
        (MODEL, "1-8", {}, TypeError, "argument 'rows' must be a collection, not str"),
        (MODEL, True, {}, TypeError, "argument 'rows' must be int, not bool"),
        (torch.nn.ReLU(), 1, {}, ValueError, "there are no linear layers in this ReLU"),
        (iter(()), 1, {}, ValueError, "there are no linear layers in this tuple_iterator"),
        ({"weight": INT8}, 1, {}, TypeError, r"weight 0 must be a Tensor \[N, K\] or a pair \(N, K\), not 'weight'"),
        ((8, 8), 1, {}, TypeError, r"weight 0 must be a Tensor \[N, K\] or a pair \(N, K\), not 8"),
        ([(8, 8), (8, 8, 8)], 1, {}, TypeError, r"weight 1 must be a Tensor .* not \(8, 8, 8\)"),
        ([(8, 0)], 1, {}, ValueError, "argument 'K' must be at least 1, not 0"),
        (INT8, 1, {}, TypeError, "must be a Module or several weights, not one Tensor"),
        (7, 1, {}, TypeError, "argument 'model_or_weights' must be a collection, not int"),
        ([INT8[0]], 1, {}, ValueError, r"weight 0 must be 2-D, \[N, K\], not 1-D"),
        ([INT8.long()], 1, {}, NotImplementedError, "weight 0 is torch.int64; linear takes torch.float32, "),
        ([INT8], 1, {"bias": True}, NotImplementedError, "weight 0 is torch.int8; linear takes torch.float32, "),
        ([INT8.half().to_sparse()], 1, {}, NotImplementedError, "prepare takes strided tensors"),
        ([(8, 8)], 1, {"dtype": torch.float8_e4m3fn}, NotImplementedError, "weight 0 is torch.float8_e4m3fn"),
        ([(8, 8)], 1, {"dtype": "bf16"}, TypeError, "argument 'dtype' must be torch.dtype, not str"),
        (MODEL, 1, {"device": "h300"}, ValueError, "device must be one of a100, .* not 'h300'"),
        (MODEL, 1, {"device": 0}, TypeError, "argument 'device' must be DeviceInfo or None, not int"),
        (MODEL, 1, {"cache": ""}, ValueError, "cache is empty; leave it out for Triton's own folder"),
        (MODEL, 1, {"workers": 0}, ValueError, "argument 'workers' must be at least 1, not 0"),
        (MODEL, 1, {"progress": lambda done: None}, TypeError, r"is called with \(done, total, what\)"),
    ],
)
def test_what_is_none_is_refused(
    given: Any, rows: Any, how: dict[str, Any], error: type[Exception], words: str, compiled: Identities
) -> None:
    with pytest.raises(error, match=words):
        preparation.prepare(given, rows, **{"device": HOPPER, **how})
    assert not compiled


def test_a_gpu_is_here_or_named(compiled: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(RuntimeError, match='there is no GPU to compile for; name one, as in device="h200"'):
        preparation.prepare([(96, 64)], 1)
    assert preparation.prepare([(96, 64)], 1, device="H200").kernels == 0
    by_name = set(compiled)
    preparation.prepare([(96, 64)], 1, device=named_device("h200"))
    assert compiled == by_name
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(preparation, "current_device_info", lambda: named_device("a100"))
    preparation.prepare([(4096, 4096)], 4096)
    assert compiled != by_name


def test_many_rows_are_few_kernels_and_one_selection_each(
    compiled: Identities, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    requested = noted(monkeypatch, precompile, "selection_for", lambda problem, *_, **how: problem)
    monkeypatch.setattr(precompile, "SELECTING_S", 0.0)
    reported: list[tuple[int, int, str]] = []
    model = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="meta", dtype=BF16) for _ in range(9)))
    made = preparation.prepare(
        *(model, range(1, 201)), device=HOPPER, cache=tmp_path, progress=lambda *how: reported.append(how)
    )
    assert len(requested) == len(set(requested)) == made.problems == 200
    assert made.failures == () and made.cache == tmp_path and 1 < len(compiled) < 30
    selected = [(done, 200, "selected") for done in (0, *range(201))]
    assert reported == selected + [(done, len(compiled), "compiled") for done in range(len(compiled) + 1)]


def test_why_there_is_no_extension_is_told(compiled: Identities, monkeypatch: pytest.MonkeyPatch) -> None:
    for why in ("there is no C++ compiler", None):
        monkeypatch.setattr(native_build, "ahead", lambda why=why: why)
        made = preparation.prepare([(96, 64)], 1, device=HOPPER)
        assert (made.extension, made.failures) == (why, ())


def test_progress_of_what_takes_no_time_is_its_ends(compiled: Identities) -> None:
    reported: list[tuple[int, int, str]] = []
    preparation.prepare([(96, 64)], [1, 2, 3], device=HOPPER, progress=lambda *how: reported.append(how))
    assert reported[0] == (0, 3, "selected") and reported[-1] == (len(compiled), len(compiled), "compiled")
    assert (3, 3, "selected") in reported


def test_what_no_kernel_takes_is_a_failure(compiled: Identities) -> None:
    made = preparation.prepare([(96, 64)], [1, 2**31], device=HOPPER)
    assert len(made.failures) == 1 and compiled
