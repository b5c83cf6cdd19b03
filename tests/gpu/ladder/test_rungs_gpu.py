"""Every rung on a GPU: the interpreter's checks on real kernels, and what only a GPU shows."""

import subprocess
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import triton
from triton.backends.nvidia.compiler import get_ptxas

from reference_cuda import load
from tests.gpu.calls import captured
from tests.support import awkward_sizes
from tests.support.kernel_mutants import RUNGS
from tests.support.numerics import error_bound, reference
from tests.support.processes import python
from tests.support.product_checks import (
    RULES,
    TMA_VIEWS,
    VIEWS,
    Product,
    error_within_bound,
    fp32_precision,
    integers_exact,
    nearest_tf32,
    of_rung,
    operands,
    run,
    same_bits,
    tf32_edges,
)
from triton_gemm import compat
from triton_gemm.compat import CLUSTERS
from triton_gemm.config import GemmConfig
from triton_gemm.hardware.device import device_info
from triton_gemm.ladder import LADDER, Rung, k07_tf32
from triton_gemm.ladder.k05_register_tiled import repacked
from triton_gemm.ladder.rung import TUNERS, Autotuner, triton_config

SIZES = {**awkward_sizes.SMALL, **awkward_sizes.LARGE}


def skip_unless_claimed(rung: Rung) -> None:
    capability = torch.cuda.get_device_capability()
    newer = len(rung.capabilities) > 1 and capability > rung.capabilities[0]
    if capability not in rung.capabilities and not newer:
        pytest.skip(f"{rung.name} does not claim to run on compute capability {capability}")


def product_of(
    rung: Rung, dtype: torch.dtype | None = None, out_dtype: torch.dtype | None = None, config: GemmConfig | None = None
) -> Product:
    """The rung with `config`, or the first that this GPU can take with and without beta C."""
    skip_unless_claimed(rung)
    dtype = dtype or rung.dtypes[0]
    legal = rung.legal_configs(device_info(torch.device("cuda")), dtype, out_dtype, reads_output=True)
    return of_rung(rung, dtype, config or legal[0], "cuda", out_dtype)


BY_RUNG = pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.id)
BY_RUNG_AND_DTYPE = pytest.mark.parametrize(
    ("rung", "dtype"),
    [
        pytest.param(rung, dtype, id=f"{rung.id}-{str(dtype).removeprefix('torch.')}")
        for rung in LADDER
        for dtype in rung.dtypes
    ],
)

# --- What a kernel computes ---


@pytest.mark.parametrize("size", SIZES.values(), ids=SIZES)
@BY_RUNG
def test_sizes(rung: Rung, size: awkward_sizes.Size) -> None:
    product = product_of(rung)
    for alpha, beta in ((1.0, 0.0), (-0.5, 2.0)):
        error_within_bound(product, size, VIEWS["nn"], alpha, beta)
        integers_exact(product, size, VIEWS["nn"], 2 * alpha, beta)


@pytest.mark.parametrize(
    ("rung", "view"),
    [
        pytest.param(rung, VIEWS[name], id=f"{rung.id}-{name}")
        for rung in LADDER
        for name in (TMA_VIEWS if rung.id in ("k10", "k11") else VIEWS)
    ],
)
def test_views(rung: Rung, view) -> None:
    product = product_of(rung)
    for size in (awkward_sizes.SMALL["ragged-many-tiles"], awkward_sizes.LARGE["odd-everything"]):
        error_within_bound(product, size, view)
        integers_exact(product, size, view)


@pytest.mark.parametrize("rule", RULES.values(), ids=RULES)
@BY_RUNG_AND_DTYPE
def test_rules(rung: Rung, dtype: torch.dtype, rule: Callable) -> None:
    rule(product_of(rung, dtype), awkward_sizes.SMALL["ragged-many-tiles"])


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bfloat16", "float32"])
@pytest.mark.parametrize("rung", [r for r in LADDER if r.precision == "half"], ids=lambda r: r.id)
def test_bfloat16_to_itself_and_to_float32(rung: Rung, out_dtype: torch.dtype) -> None:
    product = product_of(rung, torch.bfloat16, out_dtype)
    for alpha, beta in ((1.0, 0.0), (-0.5, 2.0)):
        error_within_bound(product, awkward_sizes.LARGE["odd-everything"], VIEWS["nn"], alpha, beta, kind="wide")


@pytest.mark.parametrize(
    ("rung", "config"),
    [
        pytest.param(rung, config, id=f"{rung.id}-{config}".replace(" ", "-"))
        for rung in LADDER
        if rung.id >= "k03"
        for config in {(c.BLOCK_M, c.BLOCK_N, c.BLOCK_K, c.num_warps): c for c in rung.configs}.values()
    ],
)
def test_every_tile(rung: Rung, config: GemmConfig) -> None:
    assembler = get_ptxas(90).version
    if CLUSTERS and (assembler, rung.id, config.BLOCK_M, config.BLOCK_N) == ("13.0", "k09", 128, 256):
        pytest.skip("ptxas of CUDA 13.0 miscompiles what Triton 3.9 gives it for this tile (docs/log/assemblers.md)")
    product = product_of(rung, config=config)
    if config not in rung.legal_configs(device_info(torch.device("cuda")), product.dtype):
        pytest.skip("does not fit this GPU")
    error_within_bound(product, awkward_sizes.LARGE["aligned-large"])
    integers_exact(product, awkward_sizes.LARGE["more-tiles-than-sms"])


@BY_RUNG
def test_same_bits_from_run_to_run(rung: Rung) -> None:
    product = product_of(rung)
    a, b, c0 = operands(product, awkward_sizes.LARGE["more-tiles-than-sms"])
    first = run(product, a, b, c0, 1.0, 1.0)
    assert all(torch.equal(run(product, a, b, c0, 1.0, 1.0), first) for _ in range(5))


# --- Beside the twin ---


@pytest.mark.parametrize(
    ("rung", "stem"), [pytest.param(rung, stem, id=f"{rung.id}-{stem}") for rung in LADDER for stem in rung.twins]
)
def test_rung_and_twin_agree(rung: Rung, stem: str) -> None:
    twin = load(stem)
    product = product_of(rung, twin.twin.dtypes[0], torch.float32)
    for size in (
        awkward_sizes.SMALL["ragged"],
        awkward_sizes.LARGE["odd-everything"],
        awkward_sizes.LARGE["aligned-large"],
    ):
        for alpha, beta in ((1.0, 0.0), (-0.5, 2.0)):
            a, b, c0 = operands(product, size)
            ours = run(product, a, b, c0, alpha, beta)
            theirs = c0.clone() if beta else torch.full_like(c0, float("nan"))
            twin.launch(a, b, theirs, alpha, beta)
            truth = reference(a, b, c0, alpha, beta)
            bounds = [
                error_bound(a, b, c0, alpha, beta, mode, torch.float32) for mode in (product.mode, twin.twin.precision)
            ]
            assert ((ours.double() - truth).abs() <= bounds[0]).all()
            assert ((theirs.double() - truth).abs() <= bounds[1]).all()
            assert ((ours.double() - theirs.double()).abs() <= bounds[0] + bounds[1]).all()


# --- TF32 ---


@pytest.mark.parametrize("round_tf32", [k07_tf32.round_tf32, compat.round_tf32], ids=["k07", "kernels"])
def test_rounding_to_tf32_is_that_of_the_interpreter(round_tf32: Any) -> None:
    skip_unless_claimed(RUNGS["k07"])
    x = tf32_edges().cuda()
    out = repacked(x.view(2, -1), round_tf32)[:, : x.numel() // 2]
    assert same_bits(out.reshape(-1), nearest_tf32(x))


def test_truncated_operands_err_more_than_cublas_and_rounded_ones_do_not() -> None:
    rung = RUNGS["k07"]
    product = product_of(rung)
    a, b, c = operands(product, (1024, 768, 2048))
    truth = reference(a, b)
    config = rung.legal_configs(device_info(a.device), torch.float32)[0]

    def error(result: torch.Tensor) -> float:
        return float((result.double() - truth).norm())

    with fp32_precision("tf32"):
        cublas = error(a @ b)
    rung.launch(a, b, c, config=config)
    rounded = error(c)
    k07_tf32.launch(a, b, c, config=config, round_operands=False)
    truncated = error(c)
    assert rounded <= 1.1 * cublas
    assert 2.0 * cublas < truncated < 3.5 * cublas, f"{truncated / cublas:.2f} times cuBLAS"


# --- Graphs ---


@BY_RUNG
def test_can_be_captured_in_a_graph(rung: Rung) -> None:
    product = product_of(rung)
    a, b, c = operands(product, awkward_sizes.SMALL["aligned"], "integers")
    product.multiply(a, b, c, 1.0, 0.0)  # compiles
    graph, _ = captured(lambda: product.multiply(a, b, c, 1.0, 0.0))
    for factor in (2, 3):
        b.mul_(factor)
        graph.replay()
        assert torch.equal(c, reference(a, b).to(c.dtype))


# --- Tuning ---


@pytest.fixture
def tuning(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> list[str]:
    """Three configurations a rung, an empty cache on disk; the list grows by a line for each that is timed."""
    timed: list[str] = []
    all_legal, bench = Autotuner.legal, Autotuner._bench

    def note(self: Autotuner, *args: object, config: triton.Config, **meta: object) -> list[float]:
        timed.append(str(config))
        return bench(self, *args, config=config, **meta)

    monkeypatch.setattr(Autotuner, "legal", lambda *args: all_legal(*args)[-3:])
    monkeypatch.setattr(Autotuner, "_bench", note)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_PRINT_AUTOTUNING", "1")
    return timed


@pytest.mark.parametrize("rung", [rung for rung in LADDER if len(rung.configs) > 1], ids=lambda rung: rung.id)
def test_tuning(rung: Rung, tuning: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    skip_unless_claimed(rung)
    product = of_rung(rung, rung.dtypes[0], None, "cuda")
    size = (256, 336, 144)
    a, b, c0 = operands(product, size, "integers")
    expected = reference(a, b, c0, 1.0, 2.0).to(c0.dtype)
    for _ in range(2):
        c = c0.clone()
        product.multiply(a, b, c, 1.0, 2.0)
        assert torch.equal(c, expected), "tuning left its own sums in C"
    assert len(tuning) == len(set(tuning)) > 1, "tuned twice, or not at all"
    assert "Triton autotuning for function" in capsys.readouterr().out


@pytest.mark.parametrize("name", ["k08", "k10", "k11"])
def test_winners_are_kept_on_disk(name: str, tuning: list[str]) -> None:
    rung = RUNGS[name]
    skip_unless_claimed(rung)
    product = of_rung(rung, torch.float16, None, "cuda")
    a, b, c = operands(product, (144, 256, 336), "integers")
    expected = reference(a, b).to(c.dtype)
    for _ in range(2):
        product.multiply(a, b, c.fill_(float("nan")), 1.0, 0.0)
        assert torch.equal(c, expected)
        TUNERS[name].cache.clear()  # as a new process would find it
    assert len(tuning) == len(set(tuning)) > 1


@pytest.mark.parametrize("name", ["k06", "k08", "k10", "k11"])
def test_a_users_configurations_are_tuned(name: str, tuning: list[str], caplog: pytest.LogCaptureFixture) -> None:
    """One that has no shared memory here is left out with its reason; the fastest of the rest is kept on disk."""
    rung = RUNGS[name]
    skip_unless_claimed(rung)
    product = of_rung(rung, rung.dtypes[0], None, "cuda")
    a, b, c = operands(product, (256, 384, 192), "integers")
    expected = reference(a, b).to(c.dtype)
    right = rung.configs[-1]
    deeper, too_deep = (triton_config(replace(right, num_stages=n)) for n in (right.num_stages + 1, 64))
    configs = [right, deeper, too_deep]
    for _ in range(2):
        rung.launch(a, b, c.fill_(float("nan")), configs=configs)
        assert torch.equal(c, expected)
        TUNERS[name].over(configs).cache.clear()
    assert len(tuning) == 2
    assert "bytes of shared memory" in caplog.text
    assert set(TUNERS[name].over(configs).configs_timings) == {triton_config(right), deeper}
    rung.launch(a, b, c.fill_(float("nan")), configs=[deeper])  # one is not tuned
    assert torch.equal(c, expected) and len(tuning) == 2


# --- A missing barrier ---

RING = """
import sys
from pathlib import Path
from tests.support import kernel_mutants
from tests.support.product_checks import error_within_bound, of_rung

rung = kernel_mutants.RUNGS["k11"]
config = rung.configs[0]
launch = getattr(kernel_mutants, sys.argv[1]).load(Path(sys.argv[2])).launch
size = (8 * config.BLOCK_M, 4 * config.BLOCK_N, config.num_stages * config.BLOCK_K)
error_within_bound(of_rung(rung, rung.dtypes[0], config, "cuda", launch=launch), size)
"""


def ring(name: str, folder: Path) -> subprocess.CompletedProcess[str]:
    """Runs a mutant of k11 in a process of its own: what it does to the GPU's context ends with it."""
    return python("-c", RING, name, folder)


def test_a_missing_mbarrier_wait_is_caught(tmp_path: Path) -> None:
    skip_unless_claimed(RUNGS["k11"])
    control = ring("K11_WITHOUT_THE_LOADERS_WAIT", tmp_path)
    assert control.returncode == 0, control.stderr
    broken = ring("K11_WITHOUT_WAITS", tmp_path)
    assert broken.returncode != 0 and "times the bound" in broken.stderr, broken.stderr
