"""What a case of a model runs, and how its results are held to fp64."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import nn

from perf.models import zoo
from perf.models.nanogpt import Loop
from perf.models.tables import OURS, TORCH
from perf.models.truth import error, error_of_gradients, gradients, twin
from perf.models.zoo import Model

TINY_GENERATED = 4
Called = Callable[..., Any]
Inputs = Mapping[str, torch.Tensor]
There = Mapping[str, Any]
# Compiled steps of `generate` are kept apart by an option that changes nothing else: CUDA graphs hold the kernels that
# they were captured with, and Dynamo takes one compiled model for another where all their options are equal.
RERECORDED = {TORCH: 1 << 20, OURS: (1 << 20) + 1}


@dataclass(frozen=True)
class Work:
    """shape: what a run reads, in words. amount: tokens or images of a run. run(provider): once, to be timed.

    result(provider): what is compared; truth(): with what, in fp64; error(result, truth): by how much it differs.
    """

    shape: str
    amount: int
    run: Callable[[str], object]
    result: Callable[[str], Any]
    truth: Callable[[], Any]
    error: Callable[[Any, Any], float]


def prepare(model: Model, case: str, built: nn.Module, *, tiny: bool, device: str) -> Work:
    """The work of a case of a model that was built."""
    there: dict[str, Any] = {"tiny": tiny, "device": device}
    if case in zoo.GENERATING:
        return _generating(model, built, case == zoo.STATIC, there)
    inputs = zoo.inputs_of(model, built, **there)
    compiler = {"backend": "eager"} if tiny else {"dynamic": False}
    called = torch.compile(built, **compiler) if case in (zoo.COMPILED, zoo.LOOP_COMPILED) else built
    if case in (zoo.FORWARD, zoo.COMPILED):
        return _forward(model, built, called, inputs, there)
    return _training(model, built, called, inputs, there, loops=case != zoo.TRAIN)


def _sizes(model: Model, inputs: Inputs) -> tuple[str, int]:
    if model.inputs == "image":
        rows, _, height, width = inputs["pixel_values"].shape
        return f"{rows} of {height} x {width}", rows
    rows, length = inputs["input_ids"].shape
    if model.inputs == "encoder-decoder":
        answered = inputs["labels"].shape[1]
        return f"{rows} x {length} + {answered}", rows * (length + answered)
    return f"{rows} x {length}", rows * length


def _in_fp64(inputs: Mapping[str, Any]) -> dict[str, Any]:
    """Inputs of a model in fp64: pixels, as all others are integers."""
    return {name: x.double() if name == "pixel_values" else x for name, x in inputs.items()}


def _forward(model: Model, built: nn.Module, called: Called, inputs: Inputs, there: There) -> Work:
    """All logits, without a cache."""
    caches = model.inputs in ("causal", "encoder-decoder")
    given: dict[str, Any] = {**inputs, **({"use_cache": False} if caches else {})}
    labels = given.pop("labels")
    if model.inputs == "encoder-decoder":
        given["decoder_input_ids"] = labels

    @torch.no_grad()
    def logits(call: Called) -> torch.Tensor:
        found: torch.Tensor = call(**given).logits
        return found

    @torch.no_grad()
    def truth() -> torch.Tensor:
        found: torch.Tensor = twin(model, built, **there)(**_in_fp64(given)).logits
        return found.float()

    shape, amount = _sizes(model, inputs)
    return Work(shape, amount, lambda _: logits(called), lambda _: logits(called), truth, error)


def _generating(model: Model, built: Any, static: bool, there: There) -> Work:
    """New tokens by `generate`, always the likeliest. Their logits are held to those of an fp64 model that reads the
    same tokens at once, so that another token at a near tie is no error."""
    prompt = zoo.prompt_of(model, built, **there)
    rows, length = prompt.shape
    count = TINY_GENERATED if there["tiny"] else model.generated
    given: dict[str, Any] = {"max_new_tokens": count, "min_new_tokens": count, "do_sample": False}
    given["attention_mask"] = torch.ones_like(prompt)
    if static:
        given["cache_implementation"] = "static"

    def generate(provider: str, **more: Any) -> Any:
        if static and there["device"] == "cuda":
            more["compile_config"] = _compile_config(provider)
        return built.generate(input_ids=prompt, **given, **more)

    def result(provider: str) -> tuple[torch.Tensor, torch.Tensor]:
        found = generate(provider, return_dict_in_generate=True, output_logits=True)
        return found.sequences, torch.stack(found.logits, 1)

    @torch.no_grad()
    def compare(result: tuple[torch.Tensor, torch.Tensor], exact: nn.Module) -> float:
        tokens, logits = result
        if model.inputs == "encoder-decoder":
            expected = exact(input_ids=prompt, decoder_input_ids=tokens[:, :-1]).logits
        else:
            expected = exact(input_ids=tokens[:, :-1]).logits[:, length - 1 :]
        return error(logits, expected)

    return Work(f"{rows} x {count}", rows * count, generate, result, partial(twin, model, built, **there), compare)


def _compile_config(provider: str) -> Any:
    """What mode="reduce-overhead" is, transformers' default for static caches, with an option of the provider's."""
    from transformers.generation import CompileConfig

    options = {"triton.cudagraphs": True, "triton.cudagraph_unexpected_rerecord_limit": RERECORDED[provider]}
    return CompileConfig(mode=None, options=options)


def _training(model: Model, built: nn.Module, called: Called, inputs: Inputs, there: There, loops: bool) -> Work:
    """Forward and backward; in a loop also the update of the weights, under autocast."""
    loop = Loop(built, there["device"]) if loops else None

    def backward() -> None:
        with torch.autocast(there["device"], torch.bfloat16, enabled=loops and not there["tiny"]):
            loss = called(**inputs).loss
        loss.backward()

    def run(_: str) -> None:
        backward()
        if loop is not None:
            loop.update()
        built.zero_grad(set_to_none=True)

    def result(_: str) -> dict[str, torch.Tensor]:
        backward()
        found = {name: p.grad for name, p in built.named_parameters() if p.grad is not None}
        built.zero_grad(set_to_none=True)
        return found

    def truth() -> dict[str, torch.Tensor]:
        return gradients(twin(model, built, **there), _in_fp64(inputs))

    shape, amount = _sizes(model, inputs)
    return Work(shape, amount, run, result, truth, error_of_gradients)
