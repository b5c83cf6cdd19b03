"""Tokens a second of examples/gpt.py, by torch and by triton_gemm, eager and compiled: python -m examples.bench_gpt

Training is a step of forward, backward and AdamW in bf16; decoding is a step in a CUDA graph, at several batches. The
four take turns in one process, round by round, and what they compute is compared first. Without a GPU, `--tiny` runs a
very small model in Triton's interpreter, which shows that it works and times nothing. Exit status: 1 if results are
wrong or did not come from triton_gemm, 2 for a mistake in the call.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

if "--tiny" in sys.argv:
    os.environ["TRITON_INTERPRET"] = "1"  # before triton is imported

import torch

import triton_gemm
from examples.gpt import Decoder, Gpt, GptConfig, next_token_loss
from triton_gemm.runtime.background import held

try:
    from rich.console import Console
    from rich.table import Table

    from perf.common import arguments as args
    from perf.common.files import write_json
    from perf.measure import environment
    from perf.measure.timer import percentiles
    from perf.pages import gpt_tables
    from triton_gemm.tuning.timing import interleave, ratios
except ModuleNotFoundError as error:
    if __name__ != "__main__":
        raise
    sys.exit(f"error: {error}; pip install -e '.[dev]'")

TINY = GptConfig(vocabulary=128, context=16, layers=1, heads=2, width=32)
WIDE = 200  # columns where there is no terminal
HEAD = 64  # columns of each head
DECODED = 256  # tokens that a cache holds: few, so that a step is mostly weights
LAYERS, ROUNDS = 12, 20
TOLERANCE = 5e-2  # bf16 keeps 8 bits, and every layer rounds to them


@dataclass(frozen=True)
class Variant:
    """How a step is run: by torch's kernels or ours, of the eager model or of the compiled one."""

    name: str
    ours: bool = False
    compiled: bool = False

    def routed(self) -> AbstractContextManager[None]:
        return triton_gemm.use() if self.ours else nullcontext()


VARIANTS = (
    Variant(gpt_tables.TORCH),
    Variant(gpt_tables.OURS, ours=True),
    Variant(gpt_tables.TORCH_COMPILED, compiled=True),
    Variant(gpt_tables.OURS_COMPILED, ours=True, compiled=True),
)
BASELINES = {gpt_tables.OURS: gpt_tables.TORCH, gpt_tables.OURS_COMPILED: gpt_tables.TORCH_COMPILED}


def main(arguments: Sequence[str] | None = None) -> int:
    given = parse(arguments)
    console = Console()
    if not console.is_terminal:
        console = Console(width=WIDE)
    if given.tiny:
        return tiny(console)
    if not torch.cuda.is_available():
        print("error: this needs a CUDA GPU, and torch sees none here; --tiny runs in the interpreter", file=sys.stderr)
        return 2
    surroundings = environment.describe("gpt")
    file = given.out / "gpt.json" if given.out else gpt_tables.RECORDS.path(environment.RESULTS, surroundings)
    file.parent.mkdir(parents=True, exist_ok=True)
    config = GptConfig(context=given.context, layers=given.layers, heads=given.width // HEAD, width=given.width)
    record: dict[str, Any] = {"environment": surroundings, "config": asdict(config), "quick": given.quick, "cases": {}}
    for name, measure in cases(config, given).items():
        began = time.perf_counter()
        case = record["cases"][name] = measure()
        case["seconds"] = time.perf_counter() - began
        write_json(file, record)
        console.print(f"{name}: took {case['seconds']:.0f} s, compiling included", highlight=False)
    show(record, console)
    failures = [
        f"{case}, {variant}: {result['failed']}"
        for case, found in record["cases"].items()
        for variant, result in found["variants"].items()
        if "failed" in result
    ]
    for failure in failures:
        print(f"FAILED {failure}", file=sys.stderr)
    return 1 if failures else 0


# --- What is measured ---


def cases(config: GptConfig, given: argparse.Namespace) -> dict[str, Callable[[], dict[str, Any]]]:
    """What is measured, by name."""
    torch.manual_seed(0)
    model = Gpt(config).cuda().bfloat16()
    forward = torch.compile(model, dynamic=False)  # one for both: a compiled graph asks torch for its products too
    found: dict[str, Callable[[], dict[str, Any]]] = {
        f"decode, batch {batch}": partial(decoding, model, forward, batch, given.rounds) for batch in given.decode
    }
    found[f"training, {given.batch} x {config.context}"] = partial(training, model, given.batch, given.rounds)
    return found


def decoding(
    model: Gpt, forward: Callable[..., torch.Tensor], batch: int, rounds: int, steps: int = 50
) -> dict[str, Any]:
    """Decode steps of `batch` sequences, each in the CUDA graph of its variant."""
    prompt = torch.randint(model.config.vocabulary, (batch, 1), device="cuda")
    decoders: dict[Variant, Decoder] = {}

    def logits(variant: Variant) -> torch.Tensor:
        """[batch, 1, vocabulary], of the first token; and the step is captured."""
        decoder = decoders[variant] = Decoder(model, batch, DECODED, forward if variant.compiled else None)
        with torch.no_grad():
            found = decoder.forward(prompt, decoder.cache, decoder.position)
        decoder.capture()
        return found

    def decode(variant: Variant) -> None:
        decoders[variant].position.zero_()
        for _ in range(steps):
            decoders[variant].run()

    results = checked(logits)
    times(results, decode, rounds, steps, batch)
    return {"tokens": batch, "target": gpt_tables.DECODE, "variants": results}


def training(model: Gpt, batch: int, rounds: int, steps: int = 2) -> dict[str, Any]:
    """Steps of AdamW on `batch` sequences of random tokens, as long as the context."""
    tokens = torch.randint(model.config.vocabulary, (batch, model.config.context + 1), device="cuda")
    compiled = torch.compile(next_token_loss, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=True)

    def backward(variant: Variant) -> None:
        (compiled if variant.compiled else next_token_loss)(model, tokens).backward()

    def gradient(variant: Variant) -> torch.Tensor:
        """All parameters' in one vector."""
        backward(variant)
        found = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        optimizer.zero_grad()
        return found

    def train(variant: Variant) -> None:
        for _ in range(steps):
            backward(variant)
            optimizer.step()
            optimizer.zero_grad()

    results = checked(gradient)
    times(results, train, rounds, steps, batch * model.config.context)
    return {"tokens": batch * model.config.context, "target": gpt_tables.TRAINING, "variants": results}


# --- How ---


def checked(compute: Callable[[Variant], torch.Tensor]) -> dict[str, Any]:
    """What each variant computes against the one before that torch ran, by name: `error`, relative and of the whole;
    `products`, how many ran on triton_gemm; and why it `failed` if either is not what it should be."""
    results: dict[str, Any] = {}
    computed: dict[str, torch.Tensor] = {}
    for variant in VARIANTS:
        triton_gemm.report_routing(reset=True)
        with variant.routed():
            found = computed[variant.name] = compute(variant).float()
        expected = computed[BASELINES.get(variant.name, gpt_tables.TORCH)]
        error = float((found - expected).norm() / expected.norm())
        products = sum(count for (_, where), count in triton_gemm.report_routing().items() if where == "triton_gemm")
        result = results[variant.name] = {"error": error, "products": products}
        if not error < TOLERANCE:
            result["failed"] = f"differs from torch by {error:.2g}"
        elif bool(products) != variant.ours:
            result["failed"] = f"{products} products ran on triton_gemm"
    return results


@held()
def times(results: dict[str, Any], run: Callable[[Variant], None], rounds: int, steps: int, tokens: int) -> None:
    """Adds what did not fail its `time_ms` of each of the `steps` of a `run`, `tokens_per_s`, and the `ratio` to
    torch's speed in the same round."""
    starts = {v.name: partial(turn, v, run, steps) for v in VARIANTS if "failed" not in results[v.name]}
    interleave(starts, 2)  # the GPU's clocks settle
    found = interleave(starts, rounds)
    for name, own in found.items():
        time_ms = percentiles(own)
        results[name] |= {"time_ms": time_ms, "tokens_per_s": 1000 * tokens / time_ms["median"]}
        if BASELINES.get(name) in found:
            results[name]["ratio"] = percentiles(ratios(found, name, BASELINES[name]))


def turn(variant: Variant, run: Callable[[Variant], None], steps: int) -> Callable[[], float]:
    """Runs it to its end, so that nobody's Python hides behind another's kernels; gives a step's milliseconds."""
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with variant.routed():
        torch.cuda.synchronize()
        begin.record()
        run(variant)
        end.record()
        end.synchronize()
    return lambda: begin.elapsed_time(end) / steps


def tiny(console: Console) -> int:
    """A few steps of a very small model on the CPU, by torch and in the interpreter."""
    losses: dict[str, list[float]] = {}
    for variant in VARIANTS[:2]:
        torch.manual_seed(0)
        model = Gpt(TINY)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        tokens = torch.randint(TINY.vocabulary, (2, TINY.context + 1))
        losses[variant.name] = []
        with variant.routed():
            for _ in range(4):
                loss = next_token_loss(model, tokens)
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
                losses[variant.name].append(loss.item())
            generated = Decoder(model, 2).generate(tokens[:, :4], 8)
        console.print(f"{variant.name}: losses {', '.join(f'{x:.4f}' for x in losses[variant.name])};", end=" ")
        console.print(f"then {generated[0].tolist()}", highlight=False)
    console.print(f"products: {triton_gemm.report_routing()}", highlight=False, soft_wrap=True)
    console.print("The interpreter's times mean nothing, so none are shown.")
    theirs, ours = losses.values()
    routed = any(where == "triton_gemm" for _, where in triton_gemm.report_routing())
    return 0 if routed and all(abs(a - b) < 1e-3 for a, b in zip(theirs, ours, strict=True)) else 1


def show(record: dict[str, Any], console: Console) -> None:
    table = Table(title=f"tokens/s, {gpt_tables.model(record)}", title_justify="left")
    for i, name in enumerate(gpt_tables.COLUMNS):
        table.add_column(name, justify="left" if i == 0 else "right")
    for row in gpt_tables.rows(record):
        table.add_row(*("" if cell is None else str(cell) for cell in row))
    console.print(table)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m examples.bench_gpt", description=__doc__, allow_abbrev=False)
    parser.add_argument("--layers", type=args.count, help=f"({LAYERS})")
    parser.add_argument("--width", type=args.count, default=1024, help=f"a multiple of {HEAD} (%(default)s)")
    parser.add_argument("--context", type=args.count, default=1024, help=f"at least {DECODED} (%(default)s)")
    parser.add_argument("--batch", type=args.count, default=8, help="of training (%(default)s)")
    parser.add_argument("--decode", type=args.count, nargs="+", default=[1, 4, 16], metavar="BATCH")
    parser.add_argument("--rounds", type=args.count, help=f"({ROUNDS})")
    parser.add_argument("--quick", action="store_true", help="two layers and five rounds, where these are not given")
    parser.add_argument("--tiny", action="store_true", help="a few steps in Triton's interpreter; needs no GPU")
    parser.add_argument(
        "--out", type=args.path, metavar="DIR", help="default perf/results/<gpu>/examples/<triton version>"
    )
    given = parser.parse_args(arguments)
    if given.tiny:
        flags = ("layers", "width", "context", "batch", "decode", "rounds", "quick", "out")
        args.refuse(parser, given, flags, "--tiny runs one small model and writes nothing")
    if given.width % HEAD:
        parser.error(f"--width is a multiple of {HEAD}")
    if given.context < DECODED:
        parser.error(f"--context is at least {DECODED}")
    given.layers = given.layers or (2 if given.quick else LAYERS)
    given.rounds = given.rounds or (5 if given.quick else ROUNDS)
    return given


if __name__ == "__main__":
    sys.exit(main())
