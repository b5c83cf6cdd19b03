"""What the compiler makes of the kernel of outer products, for GPUs that are not here."""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from triton.runtime.jit import JITFunction

from tests.ladder.test_compile_rungs import main_loop
from tests.support.compiled_kernels import CAPABILITIES, HOPPER, Capability, Three, compiled, product
from triton_gemm.config import REGISTERS_PER_SM, TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.kernels import fma
from triton_gemm.problem import GemmProblem

MAIN = fma.CONFIGS[0]


def fp32(size: Three = (1024, 2048, 4096), order: str = "n", *, gap: int = 0, step: int = 1) -> GemmProblem:
    """A along M and B along N, whose pitches are whole vectors; order, gap and step: of C."""
    M, N, _ = size
    how = {"steps": (1, 1, step), "gaps": (-M % 4, -N % 4, gap), "dtype": torch.float32, "precision": "ieee"}
    return product(size, "tn" + order, **how)


PLAIN, ODD, LONG = fp32(), fp32((1021, 2045, 4093), gap=1), fp32((4096, 4096, 14336))
ODD_LONG = fp32((4095, 4093, 14335), gap=1)
EVERYTHING = {"has_beta": True, "bias": "n", "activation": "gelu_tanh"}
# The problem, and in how many parts K is.
CIRCUMSTANCES = {
    "plain": (PLAIN, 1),
    "odd": (ODD, 1),
    "steps": (fp32(step=2), 1),
    "column-major": (fp32(order="t"), 1),
    "beta": (replace(PLAIN, has_beta=True), 1),
    "gelu": (replace(PLAIN, bias="n", activation="gelu"), 1),
    "split": (PLAIN, 4),
    "split in 16": (PLAIN, 16),
    "in turn": (LONG, 4),
    "everything": (replace(PLAIN, **{**EVERYTHING, "bias": "m"}), 1),
    "everything split": (replace(PLAIN, has_beta=True, bias="n", activation="silu"), 3),
    "everything in turn": (replace(LONG, **EVERYTHING), 4),
    "odd gelu": (replace(ODD, bias="m", activation="gelu"), 1),
    "odd everything": (replace(ODD, **EVERYTHING), 1),
    "odd everything split": (replace(ODD, has_beta=True, bias="m", activation="silu"), 3),
    "odd everything in turn": (replace(ODD_LONG, **{**EVERYTHING, "bias": "m"}), 4),
}


def sass_of(problem: GemmProblem, config: TileConfig, parts: int = 1, capability: Capability = HOPPER) -> str:
    sass: str = compiled(problem, fma.launches(problem, config, parts), capability).asm["sass"]
    return sass


# --- The main loop in SASS ---

REGISTER = re.compile(r"R(\d+)(\.reuse)?$")


def clashes(loop: list[tuple[str, list[str]]]) -> float:
    """How many clocks an FFMA waits on average because two of its registers lie in one bank, the even or the odd ones.

    A register marked `.reuse` is kept for the same operand of the next instruction, which does not read it again.
    """
    kept: dict[int, str] = {}
    waits = []
    for opcode, operands in loop:
        found = [REGISTER.match(x) for x in operands[1:4]] if opcode == "FFMA" else []
        read = {x[1] for place, x in enumerate(found) if x and kept.get(place) != x[1]}
        kept = {place: x[1] for place, x in enumerate(found) if x and x[2]}
        if opcode == "FFMA":
            banks = Counter(int(register) % 2 for register in read)
            waits.append(max(0, max(banks.values(), default=0) - 1))
    return sum(waits) / len(waits)


def why_not(name: str, config: TileConfig, capability: Capability) -> str | None:
    problem, parts = CIRCUMSTANCES[name]
    return fma.illegal(problem, device_of_capability(capability), config, parts)


def in_turn(name: str, config: TileConfig) -> tuple[Capability, Capability]:
    """Hopper and one other architecture in turn."""
    turn = list(CIRCUMSTANCES).index(name) + fma.CONFIGS.index(config)
    return HOPPER, CAPABILITIES[1 + turn % 4]


EVERYWHERE = [(n, config, where) for n in CIRCUMSTANCES for config in fma.CONFIGS for where in in_turn(n, config)]


@pytest.mark.few(shows=lambda name, config, capability: {capability, config})
@pytest.mark.parametrize(
    ("name", "config", "capability"),
    [
        pytest.param(name, config, where, id=f"{name}-{config}-sm_{where[0]}{where[1]}".replace(" ", "-"))
        for name, config, where in EVERYWHERE
        if why_not(name, config, where) is None
    ],
)
def test_nothing_is_spilled(name: str, config: TileConfig, capability: Capability) -> None:
    problem, parts = CIRCUMSTANCES[name]
    gemm = compiled(problem, fma.launches(problem, config, parts), capability)
    assert gemm.spills == 0
    assert gemm.registers * 32 * fma.WARPS_PER_SM <= REGISTERS_PER_SM
    assert gemm.shared <= min(config.shared_memory(4), SHARED_MEMORY[capability])


def test_only_on_sm_120_one_of_them_is_illegal() -> None:
    refused = [case for case in EVERYWHERE if why_not(*case) is not None]
    assert all(case[1:] == (MAIN, (12, 0)) and "everything in turn" in case[0] for case in refused)


@pytest.mark.few
@pytest.mark.parametrize("config", fma.CONFIGS, ids=lambda c: str(c).replace(" ", "-"))
@pytest.mark.parametrize("capability", CAPABILITIES, ids=lambda c: f"sm_{c[0]}{c[1]}")
def test_the_main_loop_is_ffmas_and_moves_of_16_bytes(capability: Capability, config: TileConfig) -> None:
    assert config.BLOCK_M and config.BLOCK_N and config.BLOCK_K
    loop = main_loop(sass_of(PLAIN, config, 1, capability))
    opcodes = Counter(opcode for opcode, operands in loop if "[RZ]" not in operands)  # ptxas's own `LDS RZ, [RZ]`
    assert opcodes["FFMA"] == fma.SIDE**2 * config.BLOCK_K
    moves = {
        opcode: count for opcode, count in opcodes.items() if opcode.startswith(("LD", "ST")) and "DEPBAR" not in opcode
    }
    loads = {opcode for opcode in moves if opcode.startswith("LDS.")}
    copies = {opcode for opcode in moves if opcode.startswith("LDGSTS")}
    assert loads == {"LDS.128"} and moves["LDS.128"] == 4 * config.BLOCK_K
    assert len(copies) == 1 and copies.pop().endswith(".128") and len(moves) == 2
    others = sum(opcodes.values()) - opcodes["FFMA"] - sum(moves.values())
    assert others <= 70, "more than one instruction in 15 FFMAs is neither"


@pytest.mark.few(shows=lambda name: {("odd" in name, "split" in name)})
@pytest.mark.parametrize("name", CIRCUMSTANCES)
def test_registers_of_an_ffma_rarely_clash(name: str) -> None:
    """With other GPUs' compilers they do more often; how fast those are was not measured."""
    assert clashes(main_loop(sass_of(CIRCUMSTANCES[name][0], MAIN, CIRCUMSTANCES[name][1]))) < 0.2


def test_the_order_of_fmas_keeps_registers_from_clashing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Row after row forwards is what Triton's own FMAs do."""
    serpentine = fma.SERPENTINE.value.split("\n")
    plain = "\n".join(sorted(serpentine, key=lambda line: int(line.split("$")[1].rstrip(", "))))
    monkeypatch.setattr(fma, "SERPENTINE", type(fma.SERPENTINE)(plain))
    forget_sources()
    try:
        assert clashes(main_loop(sass_of(PLAIN, MAIN))) > 0.2
    finally:
        forget_sources()


def forget_sources() -> None:
    """Makes Triton hash the kernel and all that it calls again."""
    for function in vars(fma).values():
        if isinstance(function, JITFunction):
            function.hash = None


def test_products_of_a_kind_share_a_variant() -> None:
    ptx = [compiled(x, fma.launches(x, MAIN)).asm["ptx"] for x in (PLAIN, fp32((1020, 2044, 77)))]
    assert ptx[0] == ptx[1]
