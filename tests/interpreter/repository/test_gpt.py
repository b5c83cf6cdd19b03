"""The example's GPT on the CPU: it trains and generates on these kernels as with torch's."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

import triton_gemm
from examples.gpt import Decoder, Gpt, GptConfig
from tests.support import training_runs

CONFIG = GptConfig(vocabulary=128, context=12, layers=1, heads=2, width=16)
STEPS, BATCH = training_runs.WINDOW, 2


@pytest.fixture(scope="module")
def theirs() -> list[torch.Tensor]:
    return [training_runs.train(CONFIG, STEPS, BATCH, order=order) for order in range(4)]


def ours() -> torch.Tensor:
    triton_gemm.report_routing(reset=True)
    with triton_gemm.use():
        losses = training_runs.train(CONFIG, STEPS, BATCH)
    assert {where for _, where in triton_gemm.report_routing()} == {"triton_gemm"}
    return losses


def test_it_trains_as_with_torch(theirs: list[torch.Tensor]) -> None:
    assert theirs[0][-1] < theirs[0][0]
    training_runs.assert_a_run_like_torchs(ours(), theirs, "ieee")


def test_a_wrong_product_shows_in_the_losses(theirs: list[torch.Tensor], monkeypatch: pytest.MonkeyPatch) -> None:
    training_runs.drop_last_of_k(monkeypatch)
    with pytest.raises(AssertionError, match="times as far as allowed"):
        training_runs.assert_a_run_like_torchs(ours(), theirs, "ieee")


def test_another_order_is_the_same_function() -> None:
    model, reordered = (Gpt(GptConfig(vocabulary=64, context=16, layers=2, heads=4, width=32)).double() for _ in "ab")
    reordered.load_state_dict(model.state_dict())
    training_runs.reorder(reordered, 1)
    tokens = torch.randint(64, (2, 16))
    assert not torch.equal(model.embedding.weight, reordered.embedding.weight)
    torch.testing.assert_close(model(tokens), reordered(tokens))


@pytest.mark.parametrize("routed", [False, True], ids=["torch", "ours"])
def test_decoding_with_the_cache_is_decoding_without(routed: bool) -> None:
    torch.manual_seed(0)
    config = replace(CONFIG, vocabulary=32)
    model = Gpt(config)
    prompt = torch.randint(config.vocabulary, (2, 3))
    if routed:
        triton_gemm.enable()
    try:
        found = Decoder(model, 2).generate(prompt, 3)
        with torch.no_grad():
            logits = model(torch.cat([prompt, found], 1))[:, 2:-1]  # [2, 3, vocabulary]
            cache = model.new_cache(2, 6)
            steps = [
                model(tokens[:, None], cache, torch.tensor([i]))
                for i, tokens in enumerate(torch.cat([prompt, found], 1)[:, :-1].unbind(1))
            ]
    finally:
        if routed:
            triton_gemm.disable()
    assert torch.equal(found, logits.argmax(-1))
    torch.testing.assert_close(torch.cat(steps, 1)[:, 2:], logits, rtol=1e-4, atol=1e-5)
