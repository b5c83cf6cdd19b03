"""The models of perf.models, very small ones, on the CPU: under `use()` their logits, gradients and generated tokens
are torch's, and every product is routed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from tests.support import training_runs

pytest.importorskip("transformers")
pytest.importorskip("peft")

from perf.models import cases, measuring, zoo
from perf.models.tables import OURS, TORCH
from triton_gemm.functional import routing

THERE: dict[str, Any] = {"tiny": True, "device": "cpu"}
EXACT = 2e-6  # of fp32 against fp64
TRAINED = ("llama-1b", "gpt2", "mixtral-8x7b", "vit-base", "llama-1b-lora")


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    routing._unregister()
    torch.compiler.reset()


def work(name: str, case: str) -> cases.Work:
    model = zoo.BY_NAME[name]
    assert case in model.cases
    return cases.prepare(model, case, zoo.build(model, **THERE, dtype=torch.float32), **THERE)


def assert_right(found: dict[str, Any]) -> None:
    assert "wrong" not in found
    assert max(found["errors"].values()) < EXACT
    assert found["routing"]["left"] == {}


# Two of Llama's kind are the same model when they are small, apart from their sizes.
@pytest.mark.parametrize("name", [m.name for m in zoo.LIST if zoo.FORWARD in m.cases and m.name != "llama-8b"])
def test_logits(name: str) -> None:
    assert_right(measuring.checked(work(name, zoo.FORWARD)))


@pytest.mark.parametrize("name", ["llama-1b", "llama-1b-lora", "gemma2-2b"])
def test_weights_alone_are_in_bf16(name: str) -> None:
    """Frequencies of angles are not: at far positions they would be wrong by more than all products."""
    model = zoo.BY_NAME[name]
    built = zoo.build(model, **THERE, dtype=torch.bfloat16)
    assert {p.dtype for p in built.parameters()} == {torch.bfloat16}
    angles = [buffer.dtype for name, buffer in built.named_buffers() if name.endswith("inv_freq")]
    assert angles and {*angles} == {torch.float32}


def test_a_compiled_model_is_routed() -> None:
    assert_right(measuring.checked(work("bert-base", zoo.COMPILED)))


@pytest.mark.parametrize("name", TRAINED)
def test_gradients(name: str) -> None:
    assert_right(measuring.checked(work(name, zoo.TRAIN)))


def test_a_training_loop_goes_on() -> None:
    """Gradients are right in its first step, and the weights change in each."""
    loop = work("nanogpt", zoo.LOOP)
    assert_right(measuring.checked(loop))
    before = loop.result(TORCH)
    with measuring.within(OURS):
        loop.run(OURS)
    after = loop.result(TORCH)
    assert all(not torch.equal(before[name], after[name]) for name in before)


@pytest.mark.parametrize(
    ("name", "case"),
    [
        ("llama-1b", zoo.DYNAMIC),
        ("gpt2", zoo.STATIC),
        pytest.param("t5-base", zoo.DYNAMIC, marks=[pytest.mark.full, pytest.mark.slow]),
        pytest.param("qwen2-moe", zoo.DYNAMIC, marks=pytest.mark.full),
    ],
)
def test_generated_tokens(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cases, "TINY_GENERATED", 2)
    generating = work(name, case)
    results = {}
    for provider in (TORCH, OURS):
        with measuring.within(provider):
            results[provider] = generating.result(provider)
    assert torch.equal(results[TORCH][0], results[OURS][0])
    assert generating.error(results[OURS], generating.truth()) < EXACT


def test_a_wrong_product_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    training_runs.drop_last_of_k(monkeypatch)
    assert "where torch's is" in measuring.checked(work("llama-1b", zoo.FORWARD))["wrong"]


def test_what_is_not_routed_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "within", lambda _: measuring.nullcontext())
    assert measuring.checked(work("vit-base", zoo.FORWARD))["wrong"] == "no product ran on triton_gemm"


def test_torch_takes_its_turn_without_overrides() -> None:
    with measuring.within(OURS):
        torch.mm(torch.ones(2, 2), torch.ones(2, 2))
    assert routing._overrides.libraries
    with measuring.within(TORCH):
        assert not routing._overrides.libraries


def test_rounds_and_what_they_say() -> None:
    x = torch.ones(4, 4)
    timed = cases.Work("4", 4, lambda _: torch.mm(x, x), lambda _: x @ x, lambda: x @ x, lambda a, b: 0.0)
    found = measuring.measure(timed, budget_s=0.01)
    assert found["settled"] and found["rounds"] == measuring.ROUNDS[0]
    assert found["per_s"][OURS] > 0 and found["ratio"]["p20"] <= found["ratio"]["median"] <= found["ratio"]["p80"]
    assert found["routing"] == {"ours": 1, "left": {}}


def test_what_is_still_being_compiled_is_not_settled(monkeypatch: pytest.MonkeyPatch) -> None:
    runs: list[int] = []
    assert measuring.settled(lambda: runs.append(1)) and len(runs) == 1
    monkeypatch.setattr(measuring.background, "counts", counts := measuring.background.Counter())
    counted = iter([1, 1, 0])
    assert measuring.settled(lambda: counts.update(waited=next(counted)))  # in its third run nothing is new
    assert not measuring.settled(lambda: counts.update(waited=1))
    monkeypatch.setattr(measuring.triton_gemm, "wait_until_compiled", lambda timeout: False)
    assert not measuring.settled(lambda: None)
