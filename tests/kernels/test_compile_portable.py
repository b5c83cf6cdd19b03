"""What the compiler makes of the portable kernel and of the repacking one, for GPUs that are not here."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Hashable
from dataclasses import dataclass, replace
from pathlib import Path

import pytest
import torch
import triton

from tests.ladder.test_compile_rungs import loads_of_c, stride_multiplications
from tests.support import compiled_kernels
from tests.support.compiled_kernels import CAPABILITIES, HOPPER, Capability, compile_launch, product
from tests.support.kernel_cases import DTYPES
from triton_gemm.arithmetic import EMULATED
from triton_gemm.compat import compiling_for
from triton_gemm.config import MAX_REGISTERS_PER_THREAD, TileConfig
from triton_gemm.hardware.device import SHARED_MEMORY, device_of_capability
from triton_gemm.kernels import launch as kernel_launch
from triton_gemm.kernels import portable, repack
from triton_gemm.kernels.schedule import Schedule
from triton_gemm.problem import GemmProblem, Layout
from triton_gemm.runtime import aot, binaries
from triton_gemm.selection.select import select

PRECISIONS = list(portable.CONFIGS)


@dataclass(frozen=True)
class Circumstance:
    """A product as far as registers depend on it. orders: of a, b and c, `n` row-major, `t` column-major;
    step: distance of neighbours in memory."""

    size: tuple[int, int, int]
    orders: str = "nnn"
    step: int = 1
    out_dtype: torch.dtype | None = None
    has_beta: bool = False
    bias: str | None = None
    activation: str | None = None
    split_k: int = 1
    scales: str | None = None
    residual: bool = False

    def problem(self, precision: str) -> GemmProblem:
        """8-bit operands have scales and give bf16, where nothing else is said."""
        dtype = DTYPES.get(precision, torch.float32)
        out_dtype = self.out_dtype or (torch.bfloat16 if dtype.itemsize == 1 else dtype)
        scales = (self.scales or "tensor") if dtype.itemsize == 1 and out_dtype != torch.int32 else None
        how = {"dtype": dtype, "out_dtype": out_dtype, "precision": precision, "scales": scales}
        epilogue = {name: getattr(self, name) for name in ("has_beta", "bias", "activation", "residual")}
        return product(self.size, self.orders, steps=(self.step,) * 3, **how, **epilogue)

    def legal(self, precision: str, capability: Capability) -> list[TileConfig]:
        problem, device = self.problem(precision), device_of_capability(capability)
        return [
            config
            for config in portable.configs(precision, capability)
            if portable.illegal(problem, device, config, self.split_k) is None
        ]

    def exists(self, precision: str, capability: Capability) -> bool:
        """Whether there is such a product, on such a GPU."""
        dtype = DTYPES.get(precision, torch.float32)
        if dtype.itemsize == 1 and dtype.is_floating_point and capability < (8, 9):
            return False
        if self.scales is not None:
            return dtype.itemsize == 1 and (self.scales != "blocks" or precision == "fp8")
        if self.out_dtype is not None and dtype.itemsize == 4:
            return False  # C is fp32 already
        return self.out_dtype != torch.int32 or precision == "int8"


TILE = portable.Config(BLOCK_M=64, BLOCK_N=64, BLOCK_K=64, num_warps=4, num_stages=3)
ALIGNED = Circumstance((512, 768, 1024))
CIRCUMSTANCES = {
    "aligned": ALIGNED,
    "k-major": replace(ALIGNED, orders="ntn"),
    "k-major-int32": replace(ALIGNED, orders="ntn", out_dtype=torch.int32),
    "odd": Circumstance((509, 767, 1021)),
    "odd-transposed": Circumstance((509, 767, 1021), "tnt"),
    "even": Circumstance((510, 770, 1002), "ntn"),
    "steps": Circumstance((512, 768, 1024), step=2),
    "odd-columns": Circumstance((509, 767, 1024), "ntn"),
    "beta": replace(ALIGNED, has_beta=True),
    "gelu": replace(ALIGNED, bias="n", activation="gelu"),
    "split": replace(ALIGNED, split_k=3),
    "everything": replace(ALIGNED, has_beta=True, bias="m", activation="gelu", split_k=3),
    "odd-everything": Circumstance((509, 767, 1021), "nnn", 1, None, True, "n", "gelu_tanh", 2),
    "residual": replace(ALIGNED, has_beta=True, bias="n", activation="gelu", residual=True),
    "float32": replace(ALIGNED, out_dtype=torch.float32),
    "int32": replace(ALIGNED, out_dtype=torch.int32),
    "odd-int32": Circumstance((509, 767, 1021), out_dtype=torch.int32, split_k=2),
    "rows": replace(ALIGNED, scales="rows", bias="n"),
    "odd-rows": Circumstance((509, 767, 1021), scales="rows"),
    "blocks": replace(ALIGNED, orders="ntn", scales="blocks", bias="n"),
    "odd-blocks": Circumstance((509, 767, 1021), scales="blocks"),
    "rows-gelu": replace(ALIGNED, scales="rows", bias="n", activation="gelu"),
    "odd-blocks-gelu": Circumstance((509, 767, 1021), scales="blocks", bias="n", activation="gelu"),
}


def compiled(
    circumstance: Circumstance, precision: str, config: TileConfig, capability: Capability = HOPPER
) -> aot.Compiled:
    problem = circumstance.problem(precision)
    return compiled_kernels.compiled(problem, portable.launches(problem, config, circumstance.split_k), capability)


def assert_fits(gemm: aot.Compiled, config: TileConfig, itemsize: int, capability: Capability) -> None:
    assert gemm.spills == 0
    assert gemm.registers <= min(MAX_REGISTERS_PER_THREAD, 65_536 // (32 * config.num_warps))
    assert gemm.shared <= SHARED_MEMORY[capability], "does not fit the GPU"
    assert gemm.shared <= config.shared_memory(itemsize, buffers=config.buffers(capability)), "needs more than it says"


def instruction(precision: str, config: TileConfig, capability: Capability) -> str:
    """What multiplies, a pattern: sm_90 and sm_100 have instructions for 64 rows and four warps."""
    if precision == "ieee":
        return "FFMA"
    if precision == "fp64":
        return "DMMA" if capability in ((8, 0), (9, 0)) else "D.*MA"  # Triton 3.9 has DMMA on sm_100 too
    multiplied = {"int8": "I", "fp8": "Q", "fp8 fast": "Q"}.get(precision, "H")
    if config.BLOCK_M < 64 or config.num_warps < 4:  # where warps have none for fp8, Triton makes fp16 of it
        return "HMMA" if multiplied == "Q" and capability[0] in (9, 10) else f"{multiplied}MMA"
    if capability[0] == 10 and precision == "int8":
        return "(UTC)?IMMA"  # before Triton 3.9 by warps
    return {9: f"{multiplied}GMMA", 10: f"UTC{multiplied}MMA"}.get(capability[0], f"{multiplied}MMA")


def products_of(precision: str) -> list[str]:
    """In CIRCUMSTANCES: of 8 bits also K-major, as `linear` has operands, and of int8 also with its sums as results."""
    eight = precision in ("int8", "fp8", "fp8 fast")
    return ["aligned", *["k-major"] * eight, *["int32", "k-major-int32"] * (precision == "int8")]


def every_figure(precision: str, name: str, config: TileConfig, capability: Capability) -> set[Hashable]:
    """What the fast tier shows: every precision and product on every architecture, every height, width and number of
    warps."""
    figures = enumerate((config.BLOCK_M, config.BLOCK_N, config.num_warps))
    return {(precision, capability), (precision, name), *figures}


@pytest.mark.few(shows=every_figure)
@pytest.mark.parametrize(
    ("precision", "name", "config", "capability"),
    [
        pytest.param(precision, name, config, capability, id=f"{precision}-{name}-{config}-sm_{major}{minor}")
        for precision in PRECISIONS
        for name in products_of(precision)
        for capability in CAPABILITIES
        for major, minor in (capability,)
        if CIRCUMSTANCES[name].exists(precision, capability)
        for config in CIRCUMSTANCES[name].legal(precision, capability)
    ],
)
def test_every_config(precision: str, name: str, config: TileConfig, capability: Capability) -> None:
    circumstance = CIRCUMSTANCES[name]
    gemm = compiled(circumstance, precision, config, capability)
    assert_fits(gemm, config, circumstance.problem(precision).dtype.itemsize, capability)
    multiplied = instruction(precision, config, capability)
    assert any(re.match(multiplied, opcode) for opcode in gemm.instructions)  # FFMA2 on sm_100
    assert gemm.instructions["LDGSTS"]


@pytest.mark.parametrize("precision", ["fp8", "fp8 fast"])
@pytest.mark.parametrize("capability", [(8, 9), (12, 0)])
def test_fp8_has_the_full_rate_of_every_architecture(capability: Capability, precision: str) -> None:
    """On 12.0 by scales of blocks."""
    circumstance = CIRCUMSTANCES["k-major"]
    for config in circumstance.legal(precision, capability)[::4]:
        sass = compiled(circumstance, precision, config, capability).asm["sass"]
        scaled = capability[0] == 12
        assert bool(re.search(r"QMMA\.SF\.", sass)) == scaled and bool(re.search(r"QMMA\.1", sass)) != scaled


def in_turn(precision: str, name: str) -> Capability:
    return CAPABILITIES[(list(CIRCUMSTANCES).index(name) + PRECISIONS.index(precision)) % 5]


@pytest.mark.few(shows=lambda precision, name, capability: {precision})
@pytest.mark.parametrize(
    ("precision", "name", "capability"),
    [
        pytest.param(precision, name, capability, id=f"{precision}-{name}-sm_{capability[0]}{capability[1]}")
        for precision in PRECISIONS
        for name, circumstance in CIRCUMSTANCES.items()
        for capability in dict.fromkeys((HOPPER, in_turn(precision, name)))
        if circumstance.exists(precision, capability)
    ],
)
def test_the_largest_legal_tiles_spill_nothing(precision: str, name: str, capability: Capability) -> None:
    """On Hopper and on one other architecture in turn."""
    circumstance = CIRCUMSTANCES[name]
    config = circumstance.legal(precision, capability)[0]
    gemm = compiled(circumstance, precision, config, capability)
    assert_fits(gemm, config, circumstance.problem(precision).dtype.itemsize, capability)


@pytest.mark.parametrize("precision", PRECISIONS)
@pytest.mark.parametrize("capability", CAPABILITIES)
def test_every_circumstance_has_a_config_everywhere(capability: Capability, precision: str) -> None:
    for name, circumstance in CIRCUMSTANCES.items():
        if circumstance.exists(precision, capability):
            assert circumstance.legal(precision, capability), name


TMA_CASES = {
    **{orders: replace(ALIGNED, orders=orders) for orders in ("nnn", "ntn", "tnn", "ttn")},
    "ragged": Circumstance((509, 760, 1000), activation="relu"),
    "fp32": replace(ALIGNED, has_beta=True, bias="m", activation="relu", out_dtype=torch.float32),
}
TMA_CONFIGS = [((major, 0), config) for major, of in portable.TMA_CONFIGS.items() for config in of]


@pytest.mark.few(shows=lambda name, capability, config: {(capability, config), (capability, name)})
@pytest.mark.parametrize("name", TMA_CASES)
@pytest.mark.parametrize(("capability", "config"), TMA_CONFIGS, ids=str)
def test_tma(capability: Capability, config: portable.Config, name: str) -> None:
    """Warps are specialised on Blackwell; nothing spills, and large tiles refuse an epilogue that would."""
    problem, device = TMA_CASES[name].problem("half"), device_of_capability(capability)
    why = portable.illegal(problem, device, config, Schedule(132))
    assert (why is not None) == (name == "fp32" and config.accumulators() > 64)
    gemm = compiled_kernels.compiled(problem, portable.launches(problem, config, Schedule(132)), capability)
    assert why or (gemm.spills == 0 and gemm.shared <= SHARED_MEMORY[capability])
    assert gemm.instructions["UTMALDG"] and gemm.instructions[{9: "HGMMA", 10: "UTCHMMA", 12: "HMMA"}[capability[0]]]
    assert ("ttg.warp_specialize" in gemm.asm["ttgir"]) == (capability[0] >= 10)


# --- Sums ---


@pytest.mark.few(shows=lambda capability: {capability[0] >= 10})
@pytest.mark.parametrize("capability", [HOPPER, (8, 9), (10, 0), (12, 0)])
def test_fp8_is_summed_in_fp32_every_k_tile_unless_fast_sums_will_do(capability: Capability) -> None:
    """At most 128 of K; Triton itself would do that on Hopper only, and only where it is told to."""
    circumstance = replace(ALIGNED, orders="ntn", out_dtype=torch.float32)
    config = circumstance.legal("fp8", capability)[0]
    assert config.BLOCK_K <= 128
    adds = {p: fp32_additions(compiled(circumstance, p, config, capability)) for p in ("fp8", "fp8 fast")}
    assert adds["fp8"] - adds["fp8 fast"] >= config.accumulators()


def fp32_additions(gemm: aot.Compiled) -> int:
    return sum(n * (2 if name.endswith("2") else 1) for name, n in gemm.instructions.items() if name in ADDITIONS)


ADDITIONS = ("FADD", "FADD2", "FFMA", "FFMA2")


@pytest.mark.few
@pytest.mark.parametrize("precision", EMULATED)
@pytest.mark.parametrize("capability", [(8, 0), (10, 0)])
def test_planes_of_a_k_tile_are_summed_apart(capability: Capability, precision: str) -> None:
    config = ALIGNED.legal(precision, capability)[0]
    gemm = compiled(ALIGNED, precision, config, capability)
    products = len(re.findall(r"tt\.dot ", gemm.asm["ttir"]))
    assert products == len(EMULATED[precision].terms)
    assert fp32_additions(gemm) >= config.accumulators()


def test_long_sums_of_int8_wrap() -> None:
    """`mma` saturates: what may leave int32 is added by itself, and Triton does not merge it with the product."""
    for K, summed in ((2**17 - 64, "tt.dot %a, %b, %acc_"), (2**17, "tt.dot %a, %b, %cst")):
        gemm = compiled(Circumstance((512, 768, K), "ntn", out_dtype=torch.int32), "int8", TILE, (8, 0))
        assert "satfinite" in gemm.asm["ptx"] and summed in gemm.asm["ttir"]


@pytest.mark.parametrize("dtype", [torch.int8, torch.bfloat16], ids=str)
@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_only_sums_of_int8_may_wrap_under_triton_debug(
    capability: Capability, dtype: torch.dtype, tmp_path: Path
) -> None:
    """Its assertions of what overflows stay in all other kernels."""
    out_dtype = torch.int32 if dtype == torch.int8 else dtype
    problem = product((512, 768, 2**17), "ntn", dtype=dtype, out_dtype=out_dtype)
    device = device_of_capability(capability)
    made = binaries.launches_on(device, problem, select(problem, device))
    with triton.knobs.runtime.scope(), compiling_for(capability, tmp_path):
        triton.knobs.runtime.debug = True
        found = [
            kernel_launch.compiled(x, binaries.operands_of(problem, made), binaries.SCALARS).asm["ptx"] for x in made
        ]
    assert ["__assertfail" in ptx for ptx in found] == [dtype != torch.int8] * len(made)


@pytest.mark.parametrize("capability", [HOPPER, (8, 0)])
def test_fp64_multiplies_by_tensor_cores_and_is_nowhere_fp32(capability: Capability) -> None:
    circumstance = CIRCUMSTANCES["beta"]
    gemm = compiled(circumstance, "fp64", circumstance.legal("fp64", capability)[0], capability)
    assert gemm.instructions["DMMA"] and ".f32" not in gemm.asm["ptx"]


# --- Loads ---


def copies(ptx: str) -> Counter[int]:
    """How many `cp.async` of how many bytes, and loads of global memory as 0 bytes."""
    found = Counter(int(size, 0) for size in re.findall(r"cp\.async\.c[ag]\.shared\.global .*?\], (0x[0-9a-f]+)", ptx))
    found[0] = len(re.findall(r"ld\.global", ptx))
    return +found


@pytest.mark.parametrize(
    ("size", "orders", "width"),
    [
        pytest.param((100, 200, 1024), "ntn", 16, id="ragged rows along k"),
        pytest.param((99, 201, 1000), "ntt", 16, id="odd rows along a k with a tail"),
        pytest.param((104, 200, 333), "tnn", 16, id="a tail of an odd k across"),
        pytest.param((100, 204, 333), "tnn", 8, id="rows of 8 bytes"),
        pytest.param((99, 201, 1002), "ntt", 4, id="rows of 4 bytes"),
        pytest.param((100, 200, 1001), "ntn", 0, id="rows of an odd pitch"),
    ],
)
def test_loads_are_as_wide_as_the_operands_allow(size, orders: str, width: int) -> None:
    widths = copies(compiled(Circumstance(size, orders), "half", TILE).asm["ptx"])
    assert set(widths) == {width}


def test_whole_tiles_along_k_need_no_mask() -> None:
    ttir = compiled(replace(ALIGNED, orders="ntn", size=(100, 200, 1024)), "half", TILE).asm["ttir"]
    loads = re.findall(r"tt\.load (\S+) ", ttir)
    assert len(loads) == 2 and not any(load.endswith(",") for load in loads)


@pytest.mark.parametrize("orders", ["nnn", "ttt"])
def test_offsets_multiply_in_64_bits(orders: str) -> None:
    ttir = compiled(Circumstance((509, 767, 1021), orders), "half", TILE).asm["ttir"]
    types = stride_multiplications(ttir)
    assert len(types) >= 2 and all("i64" in kind for kind in types), types


def test_what_is_not_asked_for_is_not_compiled() -> None:
    plain = compiled(ALIGNED, "half", TILE)
    split = compiled(replace(ALIGNED, split_k=2, has_beta=True), "half", TILE)
    assert loads_of_c(plain.asm["ttir"]) == 0 and "atom." not in plain.asm["ptx"]
    assert loads_of_c(split.asm["ttir"]) == 1 and split.asm["ptx"].count("atom.") == 1


def test_sizes_and_strides_of_a_kind_share_a_variant() -> None:
    """Sizes may even be 1 or multiples of 16, and strides lie beyond 2^32."""
    problem = Circumstance((510, 770, 1001)).problem("half")
    far = Layout((0, 2**33 + 1, 1))
    other = replace(problem, M=1, N=16, a=far, b=Layout((0, 2, 1)), c=Layout((0, 18, 1)))
    ttir = set()
    for each in (problem, other):
        (launch,) = portable.launches(each, TILE)
        constexprs = {"A_VECTOR": 1, "B_VECTOR": 2, "C_VECTOR": 2}
        assert {name: launch.arguments[name] for name in constexprs} == constexprs
        ttir.add(compiled_kernels.compiled(each, [launch]).asm["ttir"])
    assert len(ttir) == 1


# --- Repacking ---


@pytest.mark.parametrize(
    ("layout", "column_major", "loads", "stores"),
    [
        pytest.param(Layout((0, 4095, 1)), None, "b16", "b16", id="odd pitch"),
        pytest.param(Layout((0, 1, 4095)), None, "b16", "b16", id="odd pitch, column-major"),
        pytest.param(Layout((0, 4098, 1), False), None, "b16", "b16", id="unaligned"),
        pytest.param(Layout((0, 4098, 1)), None, "b32", "b32", id="even pitch"),
        pytest.param(Layout((0, 0, 1)), None, "v4.b32", "v4.b32", id="expanded"),
        pytest.param(Layout((0, 4095, 1)), True, "b16", "v4.b32", id="odd pitch, turned"),
        pytest.param(Layout((0, 4096, 1)), True, "v4.b32", "v4.b32", id="turned"),
    ],
)
def test_repacking_moves_lines(layout: Layout, column_major: bool | None, loads: str, stores: str) -> None:
    """Neighbouring threads move neighbouring elements, or whole vectors."""
    size = (1, 4096, 4090) if layout.strides[1] in (4098,) else (1, 4096, 4088)
    launch, _ = repack.launch("x", "out", layout, size, torch.bfloat16, column_major=column_major)
    kernel = compile_launch(launch, {"x": torch.bfloat16, "out": torch.bfloat16})
    assert kernel.spills == 0 and kernel.registers <= 128
    ptx = kernel.asm["ptx"]
    assert set(re.findall(r"ld\.global\S*?\.((?:v\d\.)?b\d+)", ptx)) == {loads}
    assert set(re.findall(r"st\.global\S*?\.((?:v\d\.)?b\d+)", ptx)) == {stores}
    types = stride_multiplications(kernel.asm["ttir"])
    assert types and all("i64" in kind for kind in types), types


@pytest.mark.parametrize("turned", [False, True])
def test_repacked_elements_of_a_warp_are_neighbours(turned: bool) -> None:
    """And change threads only where the copy is turned; what is computed of a single row or column may."""
    launch, _ = repack.launch("x", "out", Layout((0, 4095, 1)), (1, 4096, 4095), torch.bfloat16, column_major=turned)
    ttgir = compile_launch(launch, {"x": torch.bfloat16, "out": torch.bfloat16}).asm["ttgir"]
    tile = f"tensor<{launch.arguments['BLOCK_M']}x{launch.arguments['BLOCK_N']}x"
    assert bool(re.search(rf"ttg\.convert_layout .* : {tile}", ttgir)) == turned
    assert turned or re.search(r"sizePerThread = \[1, 1\], threadsPerWarp = \[1, 32\]", ttgir)
