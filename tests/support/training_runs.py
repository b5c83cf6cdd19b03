"""Training the example's GPT on text made here, and how far two runs of the same precision may be apart."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from examples.gpt import Gpt, GptConfig, next_token_loss
from triton_gemm.functional import fast_path, matrices
from triton_gemm.selection import generation

WORDS, LETTERS = 64, "abcdefghijklmnopqrstuvwxyz"
WINDOW = 10  # steps whose losses are averaged
FACTOR = 2  # of the spread of torch's runs: as much again as they show themselves
# Beyond it, of the loss: what another order of sums does not show. bf16: an eighth of its unit, for partial sums that
# one of both rounds and the other does not; tf32: twice its unit, since whether operands are truncated to it or rounded
# is not specified; ieee: what is left of the average over all tokens.
FLOOR = {"bf16": 2**-11, "tf32": 2**-10, "ieee": 2**-22}

Loss = Callable[[Gpt, torch.Tensor], torch.Tensor]


def text(length: int) -> torch.Tensor:
    """Characters [length] of made-up words, a few of them frequent: something to learn in 200 steps."""
    draw = random.Random(0)
    words = ["".join(draw.choices(LETTERS, k=draw.randint(2, 6))) for _ in range(WORDS)]
    drawn = draw.choices(words, weights=[1 / (1 + i) for i in range(WORDS)], k=length)
    return torch.tensor([ord(letter) for letter in " ".join(drawn)[:length]])


def reorder(model: Gpt, seed: int) -> None:
    """The same function with its units in another order: all products then sum in another order, and nothing else
    changes, in this step and in those of training. Seed 0 leaves them as they are."""
    if seed == 0:
        return
    generator = torch.Generator().manual_seed(seed)
    config = model.config
    x = torch.randperm(config.width, generator=generator)
    hidden = torch.randperm(4 * config.width, generator=generator)
    heads = torch.arange(config.width).view(config.heads, -1)[torch.randperm(config.heads, generator=generator)]
    qkv = torch.arange(3 * config.width).view(3, -1)[:, heads.flatten()].flatten()

    def permute(module: torch.nn.Module, rows: torch.Tensor | None = None, columns: torch.Tensor | None = None) -> None:
        for parameter in module.parameters(recurse=False):
            if rows is not None:
                parameter.data.copy_(parameter.data[rows.to(parameter.device)])
            if columns is not None and parameter.dim() == 2:
                parameter.data.copy_(parameter.data[:, columns.to(parameter.device)])

    permute(model.embedding, columns=x)
    permute(model.position, columns=x)
    permute(model.norm, rows=x)
    for block in model.blocks:
        permute(block.norm1, rows=x)
        permute(block.attention.qkv, rows=qkv, columns=x)
        permute(block.attention.out, rows=x, columns=heads.flatten())
        permute(block.norm2, rows=x)
        permute(block.up, rows=hidden, columns=x)
        permute(block.down, rows=x, columns=hidden)


def train(
    config: GptConfig,
    steps: int,
    batch: int,
    *,
    precision: str = "ieee",
    device: str = "cpu",
    loss_of: Loss = next_token_loss,
    order: int = 0,
) -> torch.Tensor:
    """The losses [steps] of a run that is always the same but for its rounding: the order of the model's units and of
    a batch's sequences is that of seed `order`, and what multiplies is the caller's affair."""
    torch.manual_seed(0)
    model = Gpt(config).to(device)
    reorder(model, order)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    drawn, shuffled = torch.Generator().manual_seed(1), torch.Generator().manual_seed(order)
    read = text(100 * config.context).unfold(0, config.context + 1, 1)  # [.., T + 1], every place to start from
    losses = []
    for _ in range(steps):
        tokens = read[torch.randint(len(read), (batch,), generator=drawn)]
        tokens = tokens[torch.randperm(batch, generator=shuffled)] if order else tokens
        with torch.autocast(device, torch.bfloat16, enabled=precision == "bf16"):
            loss = loss_of(model, tokens.to(device))
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return torch.stack(losses).double().cpu()


def assert_a_run_like_torchs(ours: torch.Tensor, theirs: Sequence[torch.Tensor], precision: str) -> None:
    """ours: the losses [steps] of a run; theirs: those of torch's, which differ in the order of their sums alone.

    Averaged over WINDOW steps, ours are not farther from the mean of theirs than FACTOR times what any of them is
    anywhere, and the precision's FLOOR.
    """
    runs = torch.stack([x.view(-1, WINDOW).mean(1) for x in theirs])
    mean = runs.mean(0)
    spread = float((runs - mean).abs().max())
    away = (ours.view(-1, WINDOW).mean(1) - mean).abs()
    allowed = FACTOR * spread + FLOOR[precision] * mean
    assert bool((away <= allowed).all()), (
        f"{float((away / allowed).max()):.1f} times as far as allowed: {away.tolist()}, torch's spread is {spread:.2g}"
    )


def drop_last_of_k(patch: pytest.MonkeyPatch) -> None:
    """Plants a bug: products leave out the last element of K, also those that were made before."""
    compute = matrices.compute

    def without_the_last(x: matrices.Operands, *how: Any) -> tuple[torch.Tensor, fast_path.Known]:
        return compute(x._replace(a=x.a[..., :-1], b=x.b[..., :-1, :]), *how)[0], fast_path.SLOW

    patch.setattr(matrices, "compute", without_the_last)
    generation.advance()  # what was kept is computed anew
