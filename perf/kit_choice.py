"""Which GEMMs the shipped machine code is chosen for, and the kernels that these need most."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from functools import partial
from multiprocessing import get_context
from random import Random
from typing import Any

import torch

from perf.models import products, zoo
from triton_gemm.hardware.gpus import named_device
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import kit_build, kits, policies, stand_ins
from triton_gemm.runtime.precompile import Compilable
from triton_gemm.selection.select import Selection
from triton_gemm.suites import SUITES, unseen
from triton_gemm.suites.problems import gemm_problem
from triton_gemm.suites.shapes import Shape

GPUS = ("h100", "h200")
OTHER_GPUS = ("h100-pcie", "h20")  # with other numbers of multiprocessors, which it is held to
COUNT, STAND_INS, SEED = 2000, 6, 1
SAMPLED = 2  # of so many GEMMs that would wait, one is looked at
# Of 2,000 drawn GEMMs.
DRAWN = {"prefill": 600, "decode": 600, "mid": 300, "square": 50, "shortk": 100, "bigk": 100, "small": 150}
DRAWN |= {"layouts": 50, "batched": 50}
LAYERS = 200  # of models, with drawn rows, each forward with its epilogues and backward
# Of models that the kit is held to: N and K of the linear layers, as Hugging Face's configurations have them.
UNSEEN = {
    "gemma-2-9b": ((4096, 3584), (2048, 3584), (3584, 4096), (14336, 3584), (3584, 14336)),
    "mistral-small-24b": ((4096, 5120), (1024, 5120), (5120, 4096), (32768, 5120), (5120, 32768)),
}
MODES = {"bf16": 1.0, "fp16": 0.5, "tf32": 0.1, "ieee": 0.05, "bf16x6": 0.02, "fp8": 0.05, "fp8 fast": 0.1}
MODES |= {"fp64": 0.05}
HALVES = {"bf16": torch.bfloat16, "fp16": torch.float16}
LISTED, FORWARD, BACKWARD, OTHERS = 4.0, 3.0, 1.5, 1.0  # weights of one GEMM
# What a layer adds to its product: how often, and how its GEMM problem differs.
EPILOGUES: dict[str, tuple[float, dict[str, Any]]] = {
    "plain": (1.0, {}),
    "bias": (0.4, {"bias": "n"}),
    "beta": (0.2, {"has_beta": True}),
    "gelu": (0.1, {"activation": "gelu"}),
    "silu": (0.05, {"activation": "silu"}),
    "swiglu": (0.3, {"gate": True, "activation": "silu"}),
}


@dataclass(frozen=True)
class Call:
    """A GEMM that is made, how much it counts, and in which groups of a table it is."""

    problem: GemmProblem
    weight: float
    groups: tuple[str, ...]


def calls(seed: int) -> Iterator[Call]:
    """What the kit is chosen for, or with another seed held to: a quarter as many drawn GEMMs, and other models."""
    random = Random(seed)
    for name, number in DRAWN.items():
        for shape in unseen(SUITES[name], seed, number if seed == SEED else max(1, number // 4)):
            yield from in_modes(shape, OTHERS, "plain")
    for suite in SUITES.values() if seed == SEED else ():
        for shape in suite.shapes if suite.mode is None else ():
            yield from in_modes(replace(shape, weights=0, trained=False), LISTED, "plain")
    for of in filter(products.is_read, zoo.LIST):
        for problem in products.problems(of, seed):
            for mode in HALVES if problem.dtype == torch.bfloat16 else ("ieee",):
                dtype = HALVES.get(mode, problem.dtype)
                of_mode = replace(problem, dtype=dtype, out_dtype=dtype)
                yield Call(of_mode, FORWARD / (1 + (mode == "fp16")), groups_of(of_mode, mode, "of passes", ""))
    known = sorted({(x.N, x.K) for name in ("prefill", "decode", "llm") for x in SUITES[name].shapes})
    for _ in range(LAYERS):
        model = "" if seed == SEED else random.choice([*UNSEEN])
        N, K = random.choice(UNSEEN[model] if model else known)
        M = max(1, min(8192, round(2 ** random.uniform(0, 13))))
        if M > 64 and random.random() < 0.7:
            M -= M % 64
        for epilogue, (often, changes) in EPILOGUES.items():
            for mode in HALVES:
                problem = replace(gemm_problem(Shape(M, N, K, layout="nt"), mode), **changes)
                yield Call(problem, FORWARD * often * MODES[mode], groups_of(problem, mode, epilogue, model))
        for back in (Shape(M, K, N), Shape(N, K, M, layout="tn")):
            yield from in_modes(back, BACKWARD, "backward", [*HALVES], model)


def in_modes(shape: Shape, weight: float, what: str, modes: Sequence[str] = (), model: str = "") -> Iterator[Call]:
    """Calls of a shape in these modes, by default in all."""
    for mode in modes or MODES:
        if shape.batch is None or "fp8" not in mode:
            of = replace(shape, layout="nt") if "fp8" in mode else shape
            problem = gemm_problem(replace(of, scales="tensor" if "fp8" in mode else None), mode)
            yield Call(problem, weight * MODES[mode], groups_of(problem, mode, what, model))


def groups_of(problem: GemmProblem, mode: str, epilogue: str, model: str) -> tuple[str, ...]:
    rows = "1 row" if problem.M == 1 else next(f"to {n} rows" for n in (16, 64, 512, 4096, 1 << 40) if n >= problem.M)
    order = "".join("n" if x.strides[2] == 1 else "t" for x in (problem.a, problem.b))
    return tuple(filter(None, ("all", rows.replace(f"to {1 << 40}", "more"), mode, order, model, epilogue)))


Option = dict[str, Compilable]  # a candidate's launches, by the keys of their kernels


def selections_of(call: Call, gpu: str) -> list[Selection]:
    """A call's choice on a GPU, and the ties of a model's choice."""
    device = named_device(gpu)
    choice = policies.choose(call.problem, device)
    return list(kits.ties(call.problem, device, choice)) if choice.source == "model" else [choice]


def options_of(call: Call, gpu: str) -> list[Option]:
    """The launches of each of `selections_of`."""
    return [kit_build.compilables(named_device(gpu), call.problem, x) for x in selections_of(call, gpu)]


def _keys_of(pair: tuple[Call, str]) -> list[tuple[str, ...]]:
    return [tuple(option) for option in options_of(*pair)]


def needed(seed: int) -> list[tuple[Call, str, list[tuple[str, ...]]]]:
    """Each call once per GPU, with the keys of its options. All cores look for them, by processes."""
    pairs = [(call, gpu) for call in calls(seed) for gpu in GPUS]
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        found = pool.map(_keys_of, pairs, chunksize=100)
        return [(*one, keys) for one, keys in zip(pairs, found, strict=True)]


def chosen(count: int, seed: int = SEED) -> Option:
    """The `count` launches with the largest weights, by the keys of their kernels. A call's weight goes to the
    tie whose kernels the most calls can use."""
    votes: dict[str, float] = {}
    origin: dict[str, tuple[Call, str]] = {}
    every = needed(seed)
    for call, gpu, options in every:
        for key in dict.fromkeys(key for option in options for key in option):
            votes[key] = votes.get(key, 0.0) + call.weight
            origin.setdefault(key, (call, gpu))
    weights: dict[str, float] = {}
    for call, _, options in every:
        for key in max(options, key=lambda keys: min(votes[key] for key in keys)):  # of equals the first
            weights[key] = weights.get(key, 0.0) + call.weight
    heaviest = sorted(weights, key=weights.__getitem__, reverse=True)
    have = frozenset(heaviest[: count - count // STAND_INS])
    waiting = [(call, gpu) for call, gpu, options in every if not any(have.issuperset(keys) for keys in options)]
    more = for_stand_ins(waiting[::SAMPLED], have, count - len(have))
    found = list(dict.fromkeys((*heaviest[: len(have)], *more, *heaviest)))[:count]
    launches: Option = {}
    for pair in dict.fromkeys(origin[key] for key in found if key in origin):
        launches |= {key: of for option in options_of(*pair) for key, of in option.items()}
    for pair in dict.fromkeys(pair for key, pair in more.items() if key not in launches):
        for option in stand_in_options(*pair):
            launches |= option
    return {key: launches[key] for key in found}


def stand_in_options(call: Call, gpu: str) -> Iterator[Option]:
    """The launches of each candidate that may stand in for a call's choice."""
    device = named_device(gpu)
    for selection in stand_ins.alike(call.problem, selections_of(call, gpu)[0], device, (), True):
        yield kit_build.compilables(device, call.problem, selection)


def for_stand_ins(pairs: Sequence[tuple[Call, str]], have: frozenset[str], count: int) -> dict[str, tuple[Call, str]]:
    """At most `count` kernels, each with a call of these that has a stand-in with it, beside those that there are. One
    after another the kernel is taken with which the most weight of calls has its first stand-in."""
    with ProcessPoolExecutor(mp_context=get_context("fork")) as pool:
        lacking = list(pool.map(partial(_lacking, have), pairs, chunksize=20))
    calls_of: dict[str, list[int]] = {}
    for i, keys in enumerate(lacking):
        for key in keys:
            calls_of.setdefault(key, []).append(i)
    gains = {key: sum(pairs[i][0].weight for i in of) for key, of in calls_of.items()}
    found: dict[str, tuple[Call, str]] = {}
    served: set[int] = set()
    while len(found) < count and gains and gains[best := max(gains, key=gains.__getitem__)] > 1e-6:
        found[best] = pairs[calls_of[best][0]]
        for i in set(calls_of[best]) - served:
            for key in lacking[i]:
                gains[key] -= pairs[i][0].weight
        served.update(calls_of[best])
    return found


def _lacking(have: frozenset[str], pair: tuple[Call, str]) -> tuple[str, ...]:
    """The kernels each of which is all that a stand-in for a call lacks; none where one lacks nothing."""
    found: dict[str, None] = {}
    for option in stand_in_options(*pair):
        lacking = option.keys() - have
        if not lacking:
            return ()
        if len(lacking) == 1:
            found |= dict.fromkeys(lacking)
    return tuple(found)
