"""The models: a fixed list of configurations, with random weights, and of what is run with each.

Widths, heads, experts and vocabularies are those of the model that is named. Layers are cut, so that all of the list is
measured in minutes: every layer multiplies by the same shapes, but the head of a cut model weighs more than its own.
transformers is imported when a model is built.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from perf.models.nanogpt import NanoGpt

FORWARD, COMPILED = "forward", "forward, compiled"
DYNAMIC, STATIC = "generate, dynamic cache", "generate, static cache"
TRAIN, LOOP, LOOP_COMPILED = "training step", "training loop", "training loop, compiled"
FIRST_MINUTE = "first minute"
CASES = (FORWARD, COMPILED, DYNAMIC, STATIC, TRAIN, LOOP, LOOP_COMPILED, FIRST_MINUTE)
TRAINING = (TRAIN, LOOP, LOOP_COMPILED)  # cases with a backward pass
GENERATING = (DYNAMIC, STATIC)
OF_A_DECODER = (FORWARD, DYNAMIC, STATIC, TRAIN)
TINY_LENGTH = 8

Sizes = Mapping[str, Any]


@dataclass(frozen=True)
class Model:
    """One of the list.

    kind: the names of its classes in transformers, the config's without `Config`. like: which model has these sizes.
    sizes, tiny: what its config is given, in the list and in Triton's interpreter. rows, length: what a forward pass
    and a training step read. asked, prompt, generated: how many prompts of how many tokens get how many new ones. more:
    what changes the model that was built.
    """

    name: str
    kind: tuple[str, str]
    like: str
    sizes: Sizes
    tiny: Sizes
    cases: tuple[str, ...]
    rows: int = 4
    length: int = 512
    requests: int = 8
    prompt: int = 128
    generated: int = 32
    attention: str = "sdpa"
    inputs: str = "causal"  # or "masked", "encoder-decoder", "image"
    more: Callable[[nn.Module], nn.Module] = field(default=lambda model: model)

    @property
    def unit(self) -> str:
        return "images" if self.inputs == "image" else "tokens"


_TINY = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4, "vocab_size": 97}
_T5_STARTS = {"decoder_start_token_id": 0}  # an answer; by default it is unknown
_TINY_LLAMA = {**_TINY, "intermediate_size": 96, "num_key_value_heads": 2, "max_position_embeddings": 64}


def _llama(**sizes: Any) -> dict[str, Any]:
    """What models of Llama's kind are given, by short names."""
    names = {"width": "hidden_size", "inner": "intermediate_size", "layers": "num_hidden_layers", "vocab": "vocab_size"}
    names |= {"heads": "num_attention_heads", "kv": "num_key_value_heads"}
    return {names.get(name, name): size for name, size in sizes.items()}


_LLAMA_1B = _llama(width=2048, inner=8192, layers=8, heads=32, kv=8, vocab=128256, tie_word_embeddings=True)


def _with_lora(model: nn.Module) -> nn.Module:
    """Adapters of rank 16 at every linear layer but the head, in the model's dtype; the rest is frozen. Both of their
    matrices are random, so that their products are not zero."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=16, lora_alpha=32, target_modules="all-linear", init_lora_weights=False)
    return get_peft_model(model, config, autocast_adapter_dtype=False)


LLAMA = ("Llama", "LlamaForCausalLM")
LIST = (
    Model(
        name="llama-1b",
        kind=LLAMA,
        like="Llama 3.2 1B, 8 of 16 layers",
        sizes=_LLAMA_1B,
        tiny=_TINY_LLAMA,
        cases=(*OF_A_DECODER, COMPILED, FIRST_MINUTE),
        requests=1,
    ),
    Model(
        name="llama-8b",
        kind=LLAMA,
        like="Llama 3.1 8B, 4 of 32 layers",
        sizes=_llama(width=4096, inner=14336, layers=4, heads=32, kv=8, vocab=128256),
        tiny=_TINY_LLAMA,
        cases=OF_A_DECODER,
    ),
    Model(
        name="qwen2-7b",
        kind=("Qwen2", "Qwen2ForCausalLM"),
        like="Qwen 2 7B, 4 of 28 layers",
        sizes=_llama(width=3584, inner=18944, layers=4, heads=28, kv=4, vocab=152064),
        tiny=_TINY_LLAMA,
        cases=OF_A_DECODER,
        requests=1,
    ),
    Model(
        name="gemma2-2b",
        kind=("Gemma2", "Gemma2ForCausalLM"),
        like="Gemma 2 2B, 4 of 26 layers",
        sizes=_llama(width=2304, inner=9216, layers=4, heads=8, kv=4, vocab=256000, head_dim=256),
        tiny={**_TINY_LLAMA, "head_dim": 16, "query_pre_attn_scalar": 16},
        cases=OF_A_DECODER,
        attention="eager",  # which alone caps its scores
    ),
    Model(
        name="gpt2",
        kind=("GPT2", "GPT2LMHeadModel"),
        like="GPT-2, 6 of 12 layers",
        sizes={"n_embd": 768, "n_head": 12, "n_layer": 6, "vocab_size": 50257, "n_positions": 1024},
        tiny={"n_embd": 64, "n_head": 4, "n_layer": 2, "vocab_size": 97, "n_positions": 64},
        cases=(*OF_A_DECODER, COMPILED),
        rows=8,
    ),
    Model(
        name="mixtral-8x7b",
        kind=("Mixtral", "MixtralForCausalLM"),
        like="Mixtral 8x7B, 2 of 32 layers",
        sizes=_llama(width=4096, inner=14336, layers=2, heads=32, kv=8, vocab=32000, num_local_experts=8),
        tiny={**_TINY_LLAMA, "num_local_experts": 4},
        cases=(*OF_A_DECODER, FIRST_MINUTE),
        requests=1,
    ),
    Model(
        name="qwen2-moe",
        kind=("Qwen2Moe", "Qwen2MoeForCausalLM"),
        like="Qwen 1.5 MoE A2.7B, 4 of 24 layers",
        sizes=_llama(
            width=2048,
            inner=5632,
            layers=4,
            heads=16,
            kv=16,
            vocab=151936,
            moe_intermediate_size=1408,
            shared_expert_intermediate_size=5632,
            num_experts=60,
            num_experts_per_tok=4,
        ),
        tiny={
            **_TINY_LLAMA,
            "moe_intermediate_size": 48,
            "shared_expert_intermediate_size": 96,
            "num_experts": 4,
            "num_experts_per_tok": 2,
        },
        cases=OF_A_DECODER,
    ),
    Model(
        name="bert-base",
        kind=("Bert", "BertForMaskedLM"),
        like="BERT base, 6 of 12 layers",
        sizes={"num_hidden_layers": 6},
        tiny={**_TINY, "intermediate_size": 96, "max_position_embeddings": 64},
        cases=(FORWARD, COMPILED, TRAIN),
        rows=32,
        length=128,
        inputs="masked",
    ),
    Model(
        name="t5-base",
        kind=("T5", "T5ForConditionalGeneration"),
        like="T5 base, 4 and 4 of 12 and 12 layers",
        sizes={"d_model": 768, "d_kv": 64, "d_ff": 3072, "num_layers": 4, "num_heads": 12, **_T5_STARTS},
        tiny={"d_model": 64, "d_kv": 16, "d_ff": 96, "num_layers": 2, "num_heads": 4, "vocab_size": 97, **_T5_STARTS},
        cases=OF_A_DECODER,
        rows=8,
        inputs="encoder-decoder",
    ),
    Model(
        name="vit-base",
        kind=("ViT", "ViTForImageClassification"),
        like="ViT base, patches of 16, 6 of 12 layers",
        sizes={"num_hidden_layers": 6, "num_labels": 1000},
        tiny={
            **{name: size for name, size in _TINY.items() if name != "vocab_size"},
            "intermediate_size": 96,
            "image_size": 16,
            "patch_size": 8,
            "num_labels": 11,
        },
        cases=(FORWARD, COMPILED, TRAIN),
        rows=64,
        inputs="image",
    ),
    Model(
        name="llama-1b-lora",
        kind=LLAMA,
        like="Llama 3.2 1B with LoRA of rank 16, 8 of 16 layers",
        sizes=_LLAMA_1B,
        tiny=_TINY_LLAMA,
        cases=OF_A_DECODER,
        requests=4,
        more=_with_lora,
    ),
    Model(
        name="nanogpt",
        kind=("", ""),
        like="nanoGPT's loop on GPT-2, 6 of 12 layers",
        sizes={},
        tiny={"vocabulary": 97, "context": 64, "layers": 2, "heads": 4, "width": 64},
        cases=(LOOP, LOOP_COMPILED),
        rows=12,
        length=1024,
    ),
)
BY_NAME = {model.name: model for model in LIST}


def listed() -> list[tuple[Model, str]]:
    """Every model with every case of it, in the order of the list."""
    return [(model, case) for model in LIST for case in CASES if case in model.cases]


def key(model: Model, case: str) -> str:
    """Under which name a record has a case."""
    return f"{model.name}, {case}"


def build(model: Model, *, tiny: bool, device: str, dtype: torch.dtype, experts: str = "grouped_mm") -> nn.Module:
    """The model with random weights, the same ones for a seed, a device and a dtype, without dropout."""
    torch.manual_seed(0)
    given = model.tiny if tiny else model.sizes
    if not model.kind[0]:
        with torch.device(device):
            own = NanoGpt(**given).eval()
        return own.double() if dtype == torch.float64 else own  # fp32, which autocast wants
    import transformers

    transformers.logging.set_verbosity_error()
    config = getattr(transformers, f"{model.kind[0]}Config")(**given)
    more = {"experts_implementation": experts} if "experts" in " ".join(given) else {}
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype)
    try:
        with torch.device(device), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            made: Any = getattr(transformers, model.kind[1])._from_config(
                config, attn_implementation=model.attention, dtype=dtype, **more
            )
            made = model.more(made)
    finally:
        torch.set_default_dtype(before)
    if getattr(made, "generation_config", None) is not None:
        made.generation_config.eos_token_id = None  # so that answers are as long as they are asked to be
        made.generation_config.pad_token_id = 0
    return made.eval()


def inputs_of(model: Model, built: nn.Module, *, tiny: bool, device: str) -> dict[str, torch.Tensor]:
    """What a forward pass reads, with labels."""
    random = torch.Generator(device).manual_seed(1)
    rows, length = (2, TINY_LENGTH) if tiny else (model.rows, model.length)
    config: Any = built.config
    if model.inputs == "image":
        size = config.image_size
        pixels = torch.randn(rows, 3, size, size, generator=random, device=device)
        labels = torch.randint(config.num_labels, (rows,), generator=random, device=device)
        return {"pixel_values": pixels.to(next(built.parameters()).dtype), "labels": labels}
    tokens = torch.randint(1, config.vocab_size, (rows, length), generator=random, device=device)
    if model.inputs == "encoder-decoder":
        return {"input_ids": tokens, "labels": tokens[:, : max(1, length // 4)].contiguous()}
    if not model.kind[0]:
        return {"input_ids": tokens, "labels": tokens.roll(-1, 1)}
    return {"input_ids": tokens, "labels": tokens}


def prompt_of(model: Model, built: nn.Module, *, tiny: bool, device: str) -> torch.Tensor:
    """[asked, prompt] tokens to go on from."""
    random = torch.Generator(device).manual_seed(2)
    shape = (2, TINY_LENGTH) if tiny else (model.requests, model.prompt)
    config: Any = built.config
    return torch.randint(1, config.vocab_size, shape, generator=random, device=device)
