"""The GEMM problems of the listed models' passes, read from torch's operators on the meta device, without memory."""

from __future__ import annotations

from collections.abc import Callable
from random import Random
from typing import Any
from unittest import mock

import torch
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode

from perf.models import zoo
from perf.models.zoo import Model
from triton_gemm.problem import PRODUCT, SUM, GemmProblem, Request

DECODED = 1, 2, 4, 8, 16, 32  # sequences that are given a token each
LONGEST = 1024  # tokens of a prompt
RESIDUES = 16  # of prompts' lengths, on which alignment depends; each third of the prompts, by length, has each
PROMPTS = 3 * RESIDUES


def is_read(model: Model) -> bool:
    """Whether `problems` can trace a model: those of transformers can be built on the meta device."""
    return bool(model.kind[0])


def problems(model: Model, seed: int) -> dict[GemmProblem, None]:
    """What a model multiplies in bf16: prompts of drawn lengths, single tokens, and a training step."""
    built: Any = zoo.build(model, tiny=False, device="meta", dtype=torch.bfloat16)
    random = Random(seed)
    reader = _Reader()
    attention = mock.patch.object(functional, "scaled_dot_product_attention", _attention)
    with attention, reader:
        if model.inputs == "causal":
            drawn = (int(LONGEST ** (0.4 + 0.6 * (i + random.random()) / PROMPTS)) for i in range(PROMPTS))
            prompts = [(1, length - length % RESIDUES + i % RESIDUES + 1) for i, length in enumerate(drawn)]
            for rows, length in (*prompts, *((rows, 1) for rows in DECODED)):
                with torch.no_grad():
                    built(input_ids=torch.zeros(rows, length, dtype=torch.long, device="meta"))
        inputs = zoo.inputs_of(model, built, tiny=False, device="cpu")
        built(**{name: x.to("meta") for name, x in inputs.items()}).loss.backward()
    return reader.found


def _attention(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *_: Any, **__: Any) -> torch.Tensor:
    """Of the shape of torch's, which multiplies in kernels of its own on a GPU, and by `bmm` on the meta device."""
    return query * key.sum() + value.sum() if value.shape[-1] == query.shape[-1] else query.new_empty(0)


def _grouped(a: torch.Tensor, b: torch.Tensor, *_: Any) -> tuple[torch.Tensor, torch.Tensor, Request] | None:
    return (a, b, Request(groups="m")) if (a.dim(), b.dim()) == (2, 3) else None


def _sum(added: torch.Tensor, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, Request]:
    return a, b, Request(bias="n") if added.dim() == 1 else SUM


Read = Callable[..., "tuple[torch.Tensor, torch.Tensor, Request] | None"]
READ: dict[Any, Read] = {
    torch.ops.aten.mm.default: lambda a, b: (a, b, PRODUCT),
    torch.ops.aten.bmm.default: lambda a, b: (a, b, PRODUCT),
    torch.ops.aten.addmm.default: _sum,
    torch.ops.aten.baddbmm.default: _sum,
    torch.ops.aten._grouped_mm.default: _grouped,
}


class _Reader(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.found: dict[GemmProblem, None] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        product = READ[func](*args) if func in READ else None
        if product is not None:
            a, b, request = product
            self.found[request.problem(a, b, result)] = None
        return result
