"""What the compiler makes of each rung, for GPUs that are not here: that it fits, spills nothing, keeps its claims."""

import re
from collections import Counter
from dataclasses import replace

import pytest
import torch
from triton.backends.nvidia.compiler import get_ptxas

from tests.support.compiled_kernels import CAPABILITIES, compile_call
from tests.support.kernel_mutants import RUNGS
from triton_gemm import compat
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, REGISTERS_PER_SM, GemmConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.ladder import LADDER, Rung
from triton_gemm.runtime import aot

Capability = tuple[int, int]

ALIGNED = (512, 1536, 1024)  # all strides divisible by 16: wide loads, TMA
NARROW = (512, 768, 1024)  # too few columns to turn A for
ODD = (509, 767, 1021)  # the compiler may assume nothing of any stride


def arch(capability: Capability) -> str:
    return "sm_{}{}".format(*capability)


def every_config(*rungs: Rung) -> pytest.MarkDecorator:
    """Each legal configuration of these rungs on each GPU that they claim."""
    cases = [
        pytest.param(rung, capability, config, id=f"{rung.id}-{arch(capability)}-{config}".replace(" ", "-"))
        for rung in rungs
        for capability in rung.capabilities
        for config in rung.legal_configs(device_of_capability(capability), rung.dtypes[0])
    ]
    return pytest.mark.parametrize(("rung", "capability", "config"), cases)


def default(rung: Rung, capability: Capability, **circumstances: bool) -> GemmConfig:
    return rung.legal_configs(device_of_capability(capability), rung.dtypes[0], **circumstances)[0]


def compiled(
    rung: Rung, capability: Capability, config: GemmConfig, *, dtype=None, size=ALIGNED, **options
) -> list[aot.Compiled]:
    """What a launch of `rung` compiles to; the kernel that multiplies is the last."""
    return compile_call(rung.launch, size, dtype or rung.dtypes[0], capability, config=config, **options)


def assert_fits(
    rung: Rung, capability: Capability, config: GemmConfig, *, spills: int = 0, **options: object
) -> aot.Compiled:
    """Within the registers and shared memory of the GPU and of the legality predicate; returns the GEMM's kernel.

    spills: how many instructions of the GEMM spill, none of them in its main loop.
    """
    kernels = compiled(rung, capability, config, **options)
    gemm = kernels[-1]
    for kernel in kernels:
        assert kernel.spills == (spills if kernel is gemm else 0), f"{kernel.name}: {kernel.spills} spills"
        assert kernel.registers <= MAX_REGISTERS_PER_THREAD
    assert not spills or not any(opcode.startswith(("STL", "LDL")) for opcode, _ in main_loop(gemm.asm["sass"]))
    dtype = options.get("dtype") or rung.dtypes[0]
    out_dtype = options.get("out_dtype") or dtype
    staged, slots = rung.staged_outputs["beta" in options] * out_dtype.itemsize, rung.slots(config, capability)
    promised = config.tile.shared_memory(dtype.itemsize, staged, slots)
    assert gemm.shared <= SHARED_MEMORY[capability], "does not fit the GPU"
    assert gemm.shared <= promised, "needs more shared memory than Rung.illegal counts"
    return gemm


INSTRUCTION = re.compile(r"^\s+/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?(\S+)\s*(.*?)\s*;", re.MULTILINE)


def main_loop(sass: str, of: str = "FFMA") -> list[tuple[str, list[str]]]:
    """(opcode, operands) of the instructions from where the backward branch over most FFMAs leads, to it; of: another
    instruction than FFMA."""
    code = [(int(address, 16), opcode, operands) for address, opcode, operands in INSTRUCTION.findall(sass)]
    best: list[tuple[str, list[str]]] = []
    for end, opcode, operands in code:
        target = re.search(r"0x([0-9a-f]+)", operands)
        if opcode.startswith("BRA") and target and int(target[1], 16) < end:
            loop = [(o, x.split(", ")) for address, o, x in code if int(target[1], 16) <= address <= end]
            best = max(best, loop, key=lambda found: sum(o.partition(".")[0] == of for o, _ in found))
    return best


@pytest.mark.parametrize("capability", CAPABILITIES, ids=arch)
def test_instructions_are_what_nvdisasm_names(capability: Capability) -> None:
    """By opcode: those of the last rung, which has most."""
    rung = [rung for rung in LADDER if capability in rung.capabilities][-1]
    config = default(rung, capability)
    named = aot.compile_call(rung.launch, ALIGNED, rung.dtypes[0], capability, config=config)
    for kernel, expected in zip(compiled(rung, capability, config), named, strict=True):
        assert replace(kernel, asm={}) == replace(expected, asm={})
        assert kernel.asm["sass"] == expected.asm["sass"]


# Told --regAllocOptLevel=2, as by Triton 3.9, ptxas 13.4 spills an index or two around the main loop for one more block
# on a multiprocessor. k07's four warps, whose `mma` reads operands from registers, spill around it as well.
# (assembler, rung, capability, tile, warps): instructions. 8 bytes of a thread in k05, 12 in k06.
SPILLS = {
    ("13.4", "k05", (9, 0), "64x128x32", 4): 3,
    ("13.4", "k06", (9, 0), "64x64x16", 4): 5,
    ("13.4", "k06", (12, 0), "64x64x16", 4): 5,
    ("12.8", "k07", (8, 9), "128x128x32", 4): 7,
}


def known_spills(rung: Rung, capability: Capability, config: GemmConfig) -> int:
    assembler, tile = get_ptxas(10 * capability[0] + capability[1]).version, str(config).partition(" ")[0]
    return SPILLS.get((assembler, rung.id, capability, tile, config.num_warps), 0)


def has(kernel: aot.Compiled, instruction: str) -> bool:
    return any(name.startswith(instruction) for name in kernel.instructions) or instruction in kernel.asm["sass"]


@pytest.mark.few(shows=lambda rung, capability, config: {rung.id, capability, (rung.id, config.num_warps)})
@every_config(*LADDER)
def test_every_config(rung: Rung, capability: Capability, config: GemmConfig) -> None:
    of_k07 = known_spills(rung, capability, config) if rung.id == "k07" else 0
    gemm = assert_fits(rung, capability, config, spills=of_k07)
    missing = [text for text in rung.instructions[capability] if not has(gemm, text)]
    assert not missing, f"claimed and not in the SASS: {missing}"


EVERYWHERE = [
    pytest.param(rung, capability, id=f"{rung.id}-{arch(capability)}")
    for rung in LADDER
    for capability in rung.capabilities
]
HALF = [rung for rung in LADDER if rung.precision == "half"]
TMA = [RUNGS["k10"], RUNGS["k11"]]
POINTERS = [rung for rung in LADDER if rung not in TMA]  # whose kernels take any strides
HOPPER = (9, 0)


@pytest.mark.few(shows=lambda rung, capability: {capability})
@pytest.mark.parametrize(("rung", "capability"), EVERYWHERE)
def test_beta_spills_nothing(rung: Rung, capability: Capability) -> None:
    assert_fits(rung, capability, default(rung, capability, reads_output=True), alpha=0.5, beta=2.0)


@pytest.mark.few(shows=lambda rung, capability, config: {rung.id, capability})
@every_config(RUNGS["k05"], RUNGS["k06"])
def test_a_that_is_not_turned_spills_nothing_else(rung: Rung, capability: Capability, config: GemmConfig) -> None:
    assert_fits(rung, capability, config, size=NARROW, spills=known_spills(rung, capability, config))


@pytest.mark.few(shows=lambda rung, capability: {capability})
@pytest.mark.parametrize(("rung", "capability"), [case for case in EVERYWHERE if case.values[0] in POINTERS])
def test_odd_sizes_spill_nothing(rung: Rung, capability: Capability) -> None:
    assert_fits(rung, capability, default(rung, capability, aligned=False), size=ODD)


@pytest.mark.few
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rung", HALF, ids=lambda rung: rung.id)
def test_bfloat16_to_itself_and_to_float32(rung: Rung, out_dtype: torch.dtype) -> None:
    legal = rung.legal_configs(device_of_capability(HOPPER), torch.bfloat16, out_dtype)
    gemm = assert_fits(rung, HOPPER, legal[0], dtype=torch.bfloat16, out_dtype=out_dtype)
    assert "BF16" in gemm.asm["sass"]


@pytest.mark.few(shows=lambda rung, layout: {layout})
@pytest.mark.parametrize("layout", ["nt", "tn", "tt"])
@pytest.mark.parametrize("rung", [RUNGS["k06"], RUNGS["k07"], RUNGS["k08"], *TMA], ids=lambda rung: rung.id)
def test_layouts_keep_the_claims(rung: Rung, layout: str) -> None:
    gemm = assert_fits(rung, HOPPER, default(rung, HOPPER), layout=layout)
    assert all(text in gemm.asm["sass"] for text in rung.instructions[HOPPER])


# Rows of 1400 elements of fp16 start on 16 bytes; wide, narrow: whether an operand is loaded 16 or 2 bytes at a time.
@pytest.mark.few
@pytest.mark.parametrize(
    ("size", "wide", "narrow"),
    [
        pytest.param((1400, 1400, 1400), False, True, id="all"),
        pytest.param((1400, 1408, 1408), True, False, id="M"),
        pytest.param((1408, 1400, 1408), True, True, id="N"),  # of B's rows
        pytest.param((1408, 1408, 1400), True, True, id="K"),  # of A's rows
    ],
)
@pytest.mark.parametrize("rung", [RUNGS["k08"], RUNGS["k09"]], ids=["k08", "k09"])
def test_16_bytes_at_a_time_only_in_multiples_of_16_elements(rung: Rung, size, wide: bool, narrow: bool) -> None:
    """As k08's header says of row-major operands."""
    config = default(rung, HOPPER, aligned=False)
    loads = re.findall(r"\b(?:LDGSTS|LDG)\.\S+", compiled(rung, HOPPER, config, size=size)[-1].asm["sass"])
    assert {"LDGSTS" in load for load in loads} == {kind for kind, seen in ((True, wide), (False, narrow)) if seen}
    assert all(load.endswith(".128" if "LDGSTS" in load else ".U16") for load in loads)


def test_tma_has_no_such_cliff() -> None:
    for size in ((1400, 1400, 1400), (1408, 1408, 1408)):
        sass = compiled(RUNGS["k10"], HOPPER, RUNGS["k10"].configs[0], size=size)[-1].asm["sass"]
        assert "UTMALDG" in sass and "LDGSTS" not in sass and "LDG.E.U16" not in sass


def test_tf32_rounds_by_the_instruction() -> None:
    *rounding, _ = compiled(RUNGS["k07"], HOPPER, default(RUNGS["k07"], HOPPER))
    assert [kernel.name for kernel in rounding] == ["repack_kernel"] * 2
    assert all("cvt.rna.tf32.f32" in kernel.asm["ptx"] for kernel in rounding)


def ancestors(ttir: str) -> dict[str, set[str]]:
    """What each value of a function in TTIR is computed from, its arguments included."""
    found: dict[str, set[str]] = {}

    def sources(names: list[str]) -> set[str]:
        return {source for name in names for source in ({name} | found.get(name, set()))}

    for line in ttir.splitlines():
        code = line.partition(" loc(")[0]
        for target, start in re.findall(r"(%\w+) = (%\w+(?:#\d+)?)", code.partition("iter_args")[2]):
            found[target] = sources([start.partition("#")[0]])
        assigned = re.match(r"\s*(%\w+)(?::\d+)? = (.*)", code)
        if assigned:
            found[assigned[1]] = sources(re.findall(r"%\w+", assigned[2]))
    return found


def stride_multiplications(ttir: str) -> list[str]:
    """The types of all multiplications with a factor that was made from a stride."""
    made_of = ancestors(ttir)
    return [
        kind
        for factors, kind in re.findall(r"= arith\.muli ([^:]*) : (\S+)", ttir)
        if any(
            root.startswith("%stride_")
            for factor in re.findall(r"%\w+", factors)
            for root in (factor, *made_of.get(factor, ()))
        )
    ]


@pytest.mark.few(shows=lambda rung: {rung.dtypes})
@pytest.mark.parametrize("rung", POINTERS, ids=lambda rung: rung.id)
def test_offsets_multiply_in_64_bits(rung: Rung) -> None:
    ttir = compiled(rung, HOPPER, default(rung, HOPPER), size=ODD, layout="nt")[-1].asm["ttir"]
    types = stride_multiplications(ttir)
    assert len(types) >= 2 and all("i64" in kind for kind in types), types


def loads_of_c(ttir: str) -> int:
    made_of = ancestors(ttir)
    loads = re.findall(r"(?:tt\.load|tt\.descriptor_load) (%\w+)", ttir)
    return sum(any(name.startswith("%c_") for name in {load, *made_of.get(load, ())}) for load in loads)


@pytest.mark.few(shows=lambda rung: {rung.precision, (rung.descriptors, rung.id == "k11")})
@pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.id)
def test_beta_zero_compiles_to_no_load_of_c(rung: Rung) -> None:
    config = default(rung, HOPPER, reads_output=True)
    without, with_beta = (compiled(rung, HOPPER, config, beta=beta)[-1].asm for beta in (0.0, 2.0))
    if rung.id == "k11":  # Gluon, whose intermediate code names no operand
        assert "ld.global" not in without["ptx"] and "ld.global" in with_beta["ptx"]
    else:
        assert loads_of_c(without["ttir"]) == 0 and loads_of_c(with_beta["ttir"]) == 1


def counted(sass: str, of: str = "FFMA") -> Counter[str]:
    """The instructions of a step of the main loop, by opcode; of loads and copies their width, too."""
    names = []
    for opcode, _ in main_loop(sass, of):
        kind, *parts = opcode.split(".")
        wide = [part for part in parts if part in ("64", "128")] if kind.startswith(("LD", "ST")) else []
        names.append(".".join([kind, *wide]))
    return Counter(names)


def listed(rung: Rung, m: int, n: int, k: int, warps: int) -> GemmConfig:
    """The first of the rung's configurations with this tile and these warps."""
    wanted = (m, n, k, warps)
    return next(c for c in rung.configs if (c.BLOCK_M, c.BLOCK_N, c.BLOCK_K, c.num_warps) == wanted)


def programs_an_sm(kernel: aot.Compiled, config: GemmConfig) -> int:
    """As many as there are registers for, which are given to warps in multiples of 8 a thread."""
    return REGISTERS_PER_SM // (32 * config.num_warps * (-(-kernel.registers // 8) * 8))


def test_k01_and_k02_load_as_often_as_they_say() -> None:
    """k01: two rows a thread, each with its load of A, one load of B for both. k02: one load of each for four FMAs."""
    strip = {
        number: counted(compiled(RUNGS[number], HOPPER, RUNGS[number].configs[0])[-1].asm["sass"])
        for number in ("k01", "k02")
    }
    assert 2 * strip["k01"]["LDG"] == 3 * strip["k01"]["FFMA"] > 0
    assert strip["k02"]["LDG"] == strip["k02"]["LDG.128"] == strip["k02"]["FFMA"] // 4 > 0
    why, came_out = (RUNGS["k01"].header[part] for part in ("Why", "Came out"))
    assert "next seven steps" in why and "65 wavefronts for 64 FMAs of a warp" in came_out


@pytest.mark.few(shows=lambda number, tile, results, words: {number})
@pytest.mark.parametrize(
    ("number", "tile", "results", "words"),
    [
        ("k03", (64, 64, 16, 4), 32, 12),  # 4 x 8 results of a thread
        ("k03", (64, 64, 32, 8), 16, 8),  # 4 x 4
        ("k04", (64, 64, 16, 4), 32, 12),
        ("k05", (64, 128, 32, 4), 64, 20),  # 4 x 16, and not 8 x 8
        ("k05", (128, 64, 16, 4), 64, 20),
        ("k05", (128, 128, 32, 8), 64, 20),
        ("k05", (128, 128, 16, 8), 64, 20),
        ("k06", (128, 64, 16, 4), 64, 20),
    ],
)
def test_words_from_shared_memory_for_each_result(number: str, tile, results: int, words: int) -> None:
    config = listed(RUNGS[number], *tile)
    step = counted(compiled(RUNGS[number], HOPPER, config)[-1].asm["sass"])
    assert config.accumulators() == results and step["FFMA"] == results * config.BLOCK_K
    assert 0 <= words * config.BLOCK_K - 4 * step["LDS.128"] <= 4  # ptxas 13.4 moves one out of the loop
    if number == "k06":
        assert 64 * step["LDS.128"] == 5 * step["FFMA"]  # as its "Bound by" says


def test_a_wave_of_k03_and_of_k04() -> None:
    """Rows and columns of 64 x 64 tiles at 4096^3 in the first wave: five programs on each of 132 SMs."""
    rung, config = RUNGS["k03"], listed(RUNGS["k03"], 64, 64, 16, 4)
    assert programs_an_sm(compiled(rung, HOPPER, config)[-1], config) == 5
    wave, edge, group = 5 * 132, 4096 // 64, 8
    columns_first = [(pid % edge, pid // edge) for pid in range(wave)]  # a grid's first axis runs first
    grouped = [(pid // (group * edge) * group + pid % group, pid % (group * edge) // group) for pid in range(wave)]
    assert [len({tile[axis] for tile in columns_first}) for axis in (0, 1)] == [64, 11]
    assert [len({tile[axis] for tile in grouped}) for axis in (0, 1)] == [16, 64]
    text = "in k03 of 64 rows and 11 columns, with GROUP_M = 8 of 16 rows and 64 columns"
    assert text in RUNGS["k04"].header["Predicts"]


def test_programs_of_k05_on_an_sm() -> None:
    """With A transposed first and without: fragments of a row-major A take registers. ptxas 13.4 takes more for one."""
    rung = RUNGS["k05"]
    found = {}
    for tile in ((64, 128, 32, 4), (128, 64, 16, 4), (128, 128, 32, 8), (128, 128, 16, 8)):
        config = listed(rung, *tile)
        transposed, row_major = (compiled(rung, HOPPER, config, size=size)[-1] for size in (ALIGNED, NARROW))
        assert 0 < row_major.registers - transposed.registers <= 48
        found[tile[:3]] = programs_an_sm(transposed, config), programs_an_sm(row_major, config)
    assert found.pop((128, 128, 16)) in ((2, 1), (1, 1))
    assert found == {(64, 128, 32): (3, 3), (128, 64, 16): (3, 2), (128, 128, 32): (1, 1)}


def test_copies_of_a_k_tile() -> None:
    """k08: 12 of 16 bytes for each of 256 threads. k10, k11: boxes of 64 columns, one for A and four for B."""
    config = RUNGS["k08"].configs[0]
    step = counted(compiled(RUNGS["k08"], HOPPER, config)[-1].asm["sass"], "HGMMA")
    assert step["LDGSTS.128"] == 12 and 12 * 256 * 16 == (128 + 256) * 64 * 2 == config.shared_memory(2) // 3 - 85
    with aot.capture() as launches:
        RUNGS["k10"].launch(*aot.operands(ALIGNED, torch.float16), config=RUNGS["k10"].configs[0])
    kernel = compat.compile_kernel(launches[-1].kernel, launches[-1].arguments, HOPPER)
    assert [meta["block_size"] for meta in kernel.metadata.tensordesc_meta[:2]] == [[128, 64], [64, 64]]
    assert counted(compiled(RUNGS["k11"], HOPPER, RUNGS["k11"].configs[0])[-1].asm["sass"], "UTMALDG")["UTMALDG"] == 5


@pytest.mark.parametrize(
    ("dtype", "staged"), [(torch.float16, 0.5), (torch.bfloat16, 0.5), (torch.float32, 1)], ids=str
)
def test_c_beside_the_ring_of_k09(dtype: torch.dtype, staged: float) -> None:
    rung = RUNGS["k09"]
    config = rung.configs[0]
    tile = config.BLOCK_M * config.BLOCK_N * dtype.itemsize
    gemm = compiled(rung, HOPPER, config, out_dtype=dtype, dtype=torch.float16 if dtype == torch.float32 else dtype)[-1]
    assert gemm.shared == config.shared_memory(2) - 256 + staged * tile
    hopper = device_of_capability(HOPPER)
    assert "shared memory" in (rung.illegal(replace(config, num_stages=4), hopper, torch.float16) or "")


def test_slots_and_registers_of_k11() -> None:
    rung, hopper = RUNGS["k11"], device_of_capability(HOPPER)
    most = {}
    for m, n, warps, listed_slots in ((128, 256, 8, 3), (128, 128, 8, 5), (64, 128, 4, 6)):
        config = listed(rung, m, n, 64, warps)
        assert config.num_stages == listed_slots
        fits = [s for s in range(2, 20) if not rung.illegal(replace(config, num_stages=s), hopper, torch.float16)]
        most[m, n] = max(fits)
    assert most == {(128, 256): 3, (128, 128): 6, (64, 128): 8}
    sass = compiled(rung, HOPPER, rung.configs[0])[-1].asm["sass"]
    assert {int(count, 16) for count in re.findall(r"USETMAXREG\S+ .*?(0x\w+)", sass)} == {24, 240}


@pytest.mark.parametrize("rung", ["k06", "k07"])
@pytest.mark.parametrize(("stages", "fits"), [(4, True), (5, False)])
def test_the_bound_of_shared_memory_is_what_the_compiler_takes(rung: str, stages: int, fits: bool) -> None:
    """FFMAs and `mma` have one slot less than stages."""
    ada, capability = device_of_capability((8, 9)), (8, 9)
    config = replace(RUNGS[rung].configs[0], BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=stages)
    shared = compiled(RUNGS[rung], capability, config)[-1].shared
    assert shared == (stages - 1) * 2 * 64 * 64 * 4 and (shared <= ada.shared_memory) == fits
    assert (RUNGS[rung].illegal(config, ada, torch.float32) is None) == fits
