"""The example's GPT on a GPU: 200 steps of training_runs, and generation, on these kernels and on torch's."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch

import triton_gemm
from examples.gpt import Decoder, Gpt, GptConfig, next_token_loss
from tests.support import training_runs

CONFIG = GptConfig(vocabulary=128, context=64, layers=2, heads=4, width=128)
STEPS, BATCH = 200, 16
ORDERS = 4  # of torch's runs


@contextmanager
def fp32_multiplied_as(precision: str) -> Iterator[None]:
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if precision == "tf32" else "highest")
    try:
        yield
    finally:
        torch.set_float32_matmul_precision(before)


def run(precision: str, loss_of: training_runs.Loss, order: int = 0) -> torch.Tensor:
    with fp32_multiplied_as(precision):
        return training_runs.train(
            CONFIG, STEPS, BATCH, precision=precision, device="cuda", loss_of=loss_of, order=order
        )


def assert_ours_are_as_torchs(precision: str, loss_of: training_runs.Loss) -> list[torch.Tensor]:
    """Losses and routing of ours; the losses of torch's runs."""
    triton_gemm.report_routing(reset=True)
    theirs = [run(precision, loss_of, order) for order in range(ORDERS)]
    assert not triton_gemm.report_routing()
    with triton_gemm.use():
        ours = run(precision, loss_of)
    assert_all_products_were_ours()
    training_runs.assert_a_run_like_torchs(ours, theirs, precision)
    return theirs


def assert_all_products_were_ours() -> None:
    """Five matrices are multiplied with, the head's without a bias; each product has two derivatives."""
    routed = triton_gemm.report_routing()
    assert {where for _, where in routed} == {"triton_gemm"}
    products = STEPS * (4 * CONFIG.layers + 1)
    assert sum(routed.values()) == 3 * products


@pytest.mark.slow
@pytest.mark.parametrize("precision", training_runs.FLOOR)
def test_training_is_as_with_torch(precision: str, monkeypatch: pytest.MonkeyPatch) -> None:
    theirs = assert_ours_are_as_torchs(precision, next_token_loss)
    assert theirs[0][-training_runs.WINDOW :].mean() < 0.7 * theirs[0][0], "it learns"
    training_runs.drop_last_of_k(monkeypatch)
    with triton_gemm.use():
        wrong = run(precision, next_token_loss)
    with pytest.raises(AssertionError, match="times as far as allowed"):
        training_runs.assert_a_run_like_torchs(wrong, theirs, precision)


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "tf32"])
def test_compiled_training_is_as_with_torch(precision: str) -> None:
    torch._dynamo.reset()
    assert_ours_are_as_torchs(precision, torch.compile(next_token_loss, fullgraph=True, dynamic=False))


@pytest.mark.slow
@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("batch", [1, 5])
def test_a_graphed_decode_step_generates_what_an_eager_one_does(batch: int, compiled: bool) -> None:
    torch.manual_seed(0)
    torch._dynamo.reset()
    model = Gpt(CONFIG).cuda().bfloat16()
    forward: Any = torch.compile(model, dynamic=False) if compiled else None
    prompts = torch.randint(CONFIG.vocabulary, (3, batch, 8), device="cuda")
    eager, graphed = (Decoder(model, batch, forward=forward) for _ in range(2))

    def steps(decoder: Decoder) -> torch.Tensor:
        """40, from the start."""
        decoder.tokens.fill_(1)
        decoder.position.zero_()
        for _ in range(40):
            decoder.run()
        return decoder.tokens.clone()

    triton_gemm.report_routing(reset=True)
    with triton_gemm.use():
        expected = [eager.generate(prompt, 50) for prompt in prompts]
        graphed.capture()
        assert {where for _, where in triton_gemm.report_routing()} == {"triton_gemm"}
        for _ in range(4):
            for prompt, tokens in zip(prompts, expected, strict=True):
                assert torch.equal(graphed.generate(prompt, 50), tokens)
        last = steps(eager)
        assert torch.equal(steps(graphed), last)
    triton_gemm.report_routing(reset=True)
    assert torch.equal(steps(graphed), last), "the graph keeps its kernels"
    assert not triton_gemm.report_routing()
