"""nanoGPT's model and what its loop does in a step, in plain torch: fp32 weights, products in bf16 by autocast, clipped
gradients, fused AdamW, and a learning rate that warms up and decays."""

from __future__ import annotations

import math
from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import nn

CLIPPED, RATE, LEAST_RATE, WARM_UP, DECAYED, WEIGHT_DECAY = 1.0, 6e-4, 6e-5, 2000, 600_000, 0.1


class Block(nn.Module):
    """Causal attention and a perceptron, without biases."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width, bias=False), nn.LayerNorm(width, bias=False)
        self.attention, self.projection = (nn.Linear(width, n * width, bias=False) for n in (3, 1))
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        q, k, v = self.attention(self.norm1(x)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.projection(y.transpose(1, 2).flatten(-2))
        return x + self.down(F.gelu(self.up(self.norm2(x))))


class NanoGpt(nn.Module):
    """GPT-2 without biases; the vocabulary is padded to a multiple of 64."""

    def __init__(
        self, vocabulary: int = 50304, context: int = 1024, layers: int = 6, heads: int = 12, width: int = 768
    ) -> None:
        super().__init__()
        self.config = SimpleNamespace(vocab_size=vocabulary)
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width, bias=False)
        for name, parameter in self.named_parameters():
            if parameter.dim() == 2:
                last = name.endswith(("projection.weight", "down.weight"))
                nn.init.normal_(parameter, std=0.02 / math.sqrt(2 * layers) if last else 0.02)

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> SimpleNamespace:
        """Logits, and the loss of each label given the tokens up to its own: labels are shifted by who calls."""
        x = self.tokens(input_ids) + self.positions(torch.arange(input_ids.shape[1], device=input_ids.device))
        for block in self.blocks:
            x = block(x)
        logits = F.linear(self.norm(x), self.tokens.weight)
        return SimpleNamespace(logits=logits, loss=F.cross_entropy(logits.flatten(0, 1), labels.flatten()))


class Loop:
    """What goes on from step to step: the optimizer and its rate."""

    def __init__(self, model: nn.Module, device: str) -> None:
        decayed = [p for p in model.parameters() if p.dim() >= 2]
        others = [p for p in model.parameters() if p.dim() < 2]
        groups = [{"params": decayed, "weight_decay": WEIGHT_DECAY}, {"params": others, "weight_decay": 0.0}]
        fused = {"fused": True} if device == "cuda" else {}
        self.model = model
        self.optimizer = torch.optim.AdamW(groups, lr=RATE, betas=(0.9, 0.95), **fused)
        self.done = 0

    def rate(self) -> float:
        if self.done < WARM_UP:
            return RATE * (self.done + 1) / (WARM_UP + 1)
        share = min(1.0, (self.done - WARM_UP) / (DECAYED - WARM_UP))
        return LEAST_RATE + 0.5 * (1 + math.cos(math.pi * share)) * (RATE - LEAST_RATE)

    def update(self) -> None:
        """The rest of a step, after its backward pass."""
        for group in self.optimizer.param_groups:
            group["lr"] = self.rate()
        nn.utils.clip_grad_norm_(self.model.parameters(), CLIPPED)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        self.done += 1
