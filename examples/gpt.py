"""A small GPT in plain torch: training, and generation by a decode step that a CUDA graph can hold.

Nothing here knows of triton_gemm. Its products are those of torch.nn.Linear and F.linear, so that

    with triton_gemm.use():
        next_token_loss(model, tokens).backward()

runs all of them, and their derivatives', on triton_gemm, compiled or not. examples/bench_gpt.py measures both.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

# For each layer the keys and the values of what was read so far: [B, heads, length, width / heads].
Cache = list[tuple[torch.Tensor, torch.Tensor]]


@dataclass(frozen=True)
class GptConfig:
    """A decoder's shape. vocabulary: padded to a multiple of 128, as GPT-2's 50257 is here."""

    vocabulary: int = 50304
    context: int = 1024
    layers: int = 12
    heads: int = 16
    width: int = 1024


class Attention(nn.Module):
    """Causal attention of several heads."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.qkv = nn.Linear(config.width, 3 * config.width)
        self.out = nn.Linear(config.width, config.width)

    def forward(
        self,
        x: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """x [B, T, width] to the same; with the layer's `past`, which x at `positions` [T] is written into first."""
        q, k, v = self.qkv(x).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)  # [B, heads, T, width / heads]
        if past is None or positions is None:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        else:
            keys, values = past
            keys.index_copy_(2, positions, k)
            values.index_copy_(2, positions, v)
            # Shapes do not depend on the position: all of the cache is read, and what is not written yet masked.
            seen = torch.arange(keys.shape[2], device=x.device) <= positions[:, None]  # [T, length]
            y = F.scaled_dot_product_attention(q, keys, values, attn_mask=seen)
        return self.out(y.transpose(1, 2).flatten(-2))


class Block(nn.Module):
    """Attention and a two-layer perceptron, each added to what comes in."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(config.width), nn.LayerNorm(config.width)
        self.attention = Attention(config)
        self.up = nn.Linear(config.width, 4 * config.width)
        self.down = nn.Linear(4 * config.width, config.width)

    def forward(
        self,
        x: torch.Tensor,
        past: tuple[torch.Tensor, torch.Tensor] | None = None,
        positions: torch.Tensor | None = None,
    ) -> torch.Tensor:
        x = x + self.attention(self.norm1(x), past, positions)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class Gpt(nn.Module):
    """Tokens to the logits of those that follow them; the head's weight is the embedding's."""

    def __init__(self, config: GptConfig) -> None:
        super().__init__()
        self.config = config
        self.embedding = nn.Embedding(config.vocabulary, config.width)
        self.position = nn.Embedding(config.context, config.width)
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.layers))
        self.norm = nn.LayerNorm(config.width)
        for module in self.modules():
            if isinstance(module, (nn.Linear, nn.Embedding)):
                nn.init.normal_(module.weight, std=0.02)
            if isinstance(module, nn.Linear):
                nn.init.zeros_(module.bias)

    def forward(
        self, tokens: torch.Tensor, cache: Cache | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Logits [B, T, vocabulary] of tokens [B, T]: a sequence from its start or, with a cache, what stands at
        `positions` [T] of sequences whose earlier tokens the cache has seen. They are added to it."""
        if positions is None:
            positions = torch.arange(tokens.shape[1], device=tokens.device)
        x = self.embedding(tokens) + self.position(positions)
        for i, block in enumerate(self.blocks):
            x = block(x) if cache is None else block(x, cache[i], positions)
        return F.linear(self.norm(x), self.embedding.weight)

    def new_cache(self, batch: int, length: int) -> Cache:
        """A cache of `batch` sequences of up to `length` tokens, in the weights' dtype. Zeros, since what is masked is
        multiplied by 0."""
        config, like = self.config, self.embedding.weight
        shape = (batch, config.heads, length, config.width // config.heads)
        return [(like.new_zeros(shape), like.new_zeros(shape)) for _ in range(config.layers)]


def next_token_loss(model: Callable[[torch.Tensor], torch.Tensor], tokens: torch.Tensor) -> torch.Tensor:
    """The mean cross entropy of each of tokens [B, T + 1] but the first, given those before it."""
    logits = model(tokens[:, :-1])
    return F.cross_entropy(logits.flatten(0, 1).float(), tokens[:, 1:].flatten())


class Decoder:
    """Greedy generation of `batch` sequences of up to `length` tokens, by default the model's context. A step works on
    the same memory and the same shapes every time, so that `capture` can record it in a CUDA graph.

    forward: what computes the model's logits, torch.compile(model) for instance.
    """

    def __init__(
        self, model: Gpt, batch: int, length: int | None = None, forward: Callable[..., torch.Tensor] | None = None
    ) -> None:
        device = model.embedding.weight.device
        self.forward = model if forward is None else forward
        self.cache = model.new_cache(batch, length or model.config.context)
        self.tokens = torch.zeros(batch, 1, dtype=torch.int64, device=device)  # the last of each sequence
        self.position = torch.zeros(1, dtype=torch.int64, device=device)  # where they stand
        self.run: Callable[[], None] = self.step

    @torch.no_grad()
    def step(self) -> None:
        """Reads the last tokens and puts the likeliest next ones in their place."""
        logits = self.forward(self.tokens, self.cache, self.position)  # [B, 1, vocabulary]
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.add_(1)

    def capture(self) -> None:
        """Records the step in a CUDA graph, which `run` replays from then on. It keeps the kernels of its capture."""
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            for _ in range(3):  # compiles, and makes what libraries allocate once
                self.step()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            self.step()
        self.position.zero_()
        self.run = graph.replay

    @torch.no_grad()
    def generate(self, prompt: torch.Tensor, count: int) -> torch.Tensor:
        """The `count` tokens [B, count] that follow prompt [B, T]; T + count is at most `length`."""
        positions = torch.arange(prompt.shape[1], device=prompt.device)
        logits = self.forward(prompt, self.cache, positions)
        self.tokens.copy_(logits[:, -1].argmax(-1, keepdim=True))
        self.position.fill_(prompt.shape[1])
        found = [self.tokens.clone()]
        while len(found) < count:
            self.run()
            found.append(self.tokens.clone())
        return torch.cat(found, dim=1)
