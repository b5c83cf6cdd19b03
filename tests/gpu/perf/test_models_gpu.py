"""The models of perf.models, very small ones in bf16, on a GPU; above all that the CUDA graphs of `generate` are apart
for torch and for us."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from perf.models import cases, measuring, zoo
from perf.models.tables import OURS, TORCH
from triton_gemm.functional import routing

THERE: dict[str, Any] = {"tiny": True, "device": "cuda"}
ONE_PASS = 16  # products of a forward pass of the small Llama
ROTARY = {"bmm: a batch of small float32 takes 1.2 times as long here, untuned"}  # positional embeddings'


@pytest.fixture(autouse=True)
def fresh() -> Iterator[None]:
    yield
    routing._unregister()
    torch.compiler.reset()


def work(name: str, case: str) -> cases.Work:
    model = zoo.BY_NAME[name]
    return cases.prepare(model, case, zoo.build(model, **THERE, dtype=torch.bfloat16), **THERE)


@pytest.mark.parametrize("case", [zoo.FORWARD, zoo.DYNAMIC, zoo.TRAIN])
@pytest.mark.parametrize("name", ["llama-1b", "gpt2"])
def test_results_are_as_near_to_fp64_as_torchs(name: str, case: str) -> None:
    found = measuring.checked(work(name, case))
    assert "wrong" not in found and found["routing"]["left"].keys() <= ROTARY


def test_experts_are_routed() -> None:
    """Their choice may flip in bf16, so errors say little."""
    assert measuring.checked(work("mixtral-8x7b", zoo.FORWARD))["routing"]["left"].keys() <= ROTARY


@pytest.mark.slow
def test_cuda_graphs_of_generate_are_apart() -> None:
    """torch's is captured first, and its compiled step must not be taken for ours, which captures products again."""
    generating = work("llama-1b", zoo.STATIC)
    for _ in range(2):
        generating.run(TORCH)
    found = measuring.checked(generating)
    assert "wrong" not in found
    assert found["routing"]["ours"] > ONE_PASS
    with measuring.within(OURS):
        generating.run(OURS)
