"""GemmConfig's legality, the autotuner around Triton's, and what LADDER says of its rungs. No kernel is compiled."""

import ast
import inspect
import itertools
import logging
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import triton
from hypothesis import given
from hypothesis import strategies as st

from reference_cuda import TWINS
from tests.support.table_fakes import HOPPER
from triton_gemm.config import OPTIONS, GemmConfig
from triton_gemm.hardware.device import SHARED_MEMORY, DeviceInfo, device_of_capability
from triton_gemm.ladder import LADDER, Rung, k06_pipelined, k10_tma, k11_warp_specialised
from triton_gemm.ladder import rung as rungs
from triton_gemm.ladder.record import HEADER_FIELDS, OPTIONAL_FIELD, triton_config
from triton_gemm.ladder.rung import Autotuner, autotune, tune_key
from triton_gemm.runtime import aot

RUNGS = pytest.mark.parametrize("rung", LADDER, ids=lambda rung: rung.id)

POWERS = st.sampled_from([16, 32, 64, 128, 256])
CONFIGS = st.builds(
    GemmConfig,
    BLOCK_M=POWERS,
    BLOCK_N=POWERS,
    BLOCK_K=POWERS,
    GROUP_M=st.sampled_from([1, 8]),
    num_warps=st.sampled_from([1, 2, 4, 8]),
    num_stages=st.integers(1, 6),
)
LAUNCHES = st.fixed_dictionaries(
    {
        "itemsize": st.sampled_from([2, 4]),
        "out_itemsize": st.sampled_from([2, 4]),
        "staged_outputs": st.integers(0, 2),
        "tensor_cores": st.booleans(),
        "reads_output": st.booleans(),
        "aligned": st.booleans(),
    }
)


def test_a_launch_takes_what_is_set() -> None:
    config = GemmConfig(BLOCK_M=64, BLOCK_N=32, num_warps=8, num_stages=2)
    assert config.meta() == {"BLOCK_M": 64, "BLOCK_N": 32}
    assert config.kwargs() == {"BLOCK_M": 64, "BLOCK_N": 32, "num_warps": 8, "num_stages": 2, **OPTIONS}
    assert str(config) == "64x32 8 warps 2 stages"
    assert str(replace(config, BLOCK_K=16, GROUP_M=8)) == "64x32x16 group 8 8 warps 2 stages"


def test_the_message_of_an_illegal_config_has_both_numbers() -> None:
    large = GemmConfig(BLOCK_M=128, BLOCK_N=256, BLOCK_K=64, num_warps=8, num_stages=5)
    assert large.illegal(HOPPER, 2, 2) == "needs 246016 bytes of shared memory, sm_90 has 232448"
    heavy = replace(large, num_warps=4, num_stages=3)
    assert heavy.illegal(HOPPER, 2, 2) == "would spill: 256 accumulators are more than half of a thread's 256 registers"
    assert replace(heavy, num_warps=8).illegal(HOPPER, 2, 2) is None


@given(CONFIGS, st.sampled_from(["BLOCK_M", "BLOCK_N", "BLOCK_K", "num_stages"]), LAUNCHES)
def test_a_smaller_config_stays_legal(config: GemmConfig, field: str, launch: dict) -> None:
    value = getattr(config, field)
    smaller = replace(config, **{field: max(1, value - 1 if field == "num_stages" else value // 2)})
    assert smaller.shared_memory(2, 4) <= config.shared_memory(2, 4)
    if config.illegal(HOPPER, **launch) is None:
        assert smaller.illegal(HOPPER, **launch) is None


@given(CONFIGS, st.integers(0, 300_000), st.integers(0, 100_000), LAUNCHES)
def test_a_larger_gpu_takes_what_a_smaller_took(config: GemmConfig, shared: int, more: int, launch: dict) -> None:
    small, large = (DeviceInfo("gpu", (9, 0), 132, size) for size in (shared, shared + more))
    if config.illegal(small, **launch) is None:
        assert config.illegal(large, **launch) is None


@given(CONFIGS, LAUNCHES)
def test_tensor_cores_take_what_ffmas_take(config: GemmConfig, launch: dict) -> None:
    if config.illegal(HOPPER, **{**launch, "tensor_cores": False}) is None:
        assert config.illegal(HOPPER, **{**launch, "tensor_cores": True}) is None


class FakeKernel:
    """Stands where a JITFunction would: notes its launches, writes C, and fails on the tiles it is told to."""

    arg_names = ("a_ptr", "b_ptr", "c_ptr", "M", "N", "K", "HAS_BETA", "TUNE_KEY")

    def __init__(self, failures: dict[int, Exception]) -> None:
        self.failures = failures
        self.launched: list[int] = []

    @staticmethod
    def fn() -> None:
        """Triton looks for the Python function under a kernel, and takes its name."""

    def run(self, *, c_ptr: torch.Tensor, BLOCK_M: int, **_: object) -> None:
        if BLOCK_M in self.failures:
            raise self.failures[BLOCK_M]
        self.launched.append(BLOCK_M)
        c_ptr += 1


RUNG = Rung(
    module="tests.k99_fake",
    title="fake",
    precision="ieee",
    dtypes=(torch.float32,),
    instructions={},
    configs=tuple(GemmConfig(BLOCK_M=m, BLOCK_N=32, BLOCK_K=32, num_warps=8) for m in (16, 32, 64, 128, 4096)),
)


@pytest.fixture
def tune(monkeypatch: pytest.MonkeyPatch):
    """tune(failures) launches a fake kernel through the autotuner, and returns what came of it."""

    def do_bench(call, quantiles):
        call()
        call()
        return [1.0 / kernel.launched[-1]] * 3  # larger tiles are faster

    def tune(
        failures: dict[int, Exception], beta: float = 0.0, configs: Sequence[GemmConfig | triton.Config] = ()
    ) -> torch.Tensor:
        nonlocal kernel
        kernel = FakeKernel(failures)
        monkeypatch.delitem(rungs.TUNERS, RUNG.id, raising=False)
        tuner = autotune(RUNG)(kernel)
        tuner = tuner.over(configs) if configs else tuner
        tuner.cache_results = False  # the disk's key asks the driver
        tuner._do_bench = do_bench
        a, b, c = torch.zeros(64, 32), torch.zeros(32, 48), torch.zeros(64, 48)
        arguments = {"a_ptr": a, "b_ptr": b, "c_ptr": c, "M": 64, "N": 48, "K": 32, "HAS_BETA": beta != 0}
        for _ in range(2):
            tuner[(1,)](**arguments, TUNE_KEY=tune_key(a, b, c, beta))
        tune.kernel, tune.tuner = kernel, tuner
        return c

    kernel = FakeKernel({})
    with triton.knobs.autotuning.scope():  # which takes back the environment variable, too
        triton.knobs.autotuning.print = False
        yield tune


def test_tuning_tries_each_legal_config_and_keeps_the_best(tune) -> None:
    tune({})
    trials, calls = tune.kernel.launched[:-2], tune.kernel.launched[-2:]
    assert trials == [16, 16, 32, 32, 64, 64, 128, 128]  # 4096 was pruned before anything was launched
    assert calls == [128, 128]  # the second call did not tune again


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("PassManager::run failed\nand more"),
        triton.runtime.errors.OutOfResources(300_000, 232_448, "shared memory"),
        triton.runtime.errors.PTXASError("ptxas died"),
        ValueError("wgmma needs 64 rows"),
        AssertionError(),
    ],
    ids=lambda error: type(error).__name__,
)
def test_a_config_that_fails_costs_a_line_in_the_log(tune, error: Exception, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="triton_gemm.autotune"):
        tune({128: error})
    assert tune.kernel.launched[-1] == 64
    (record,) = caplog.records
    text = record.getMessage()
    assert record.name == "triton_gemm.autotune" and "BLOCK_M: 128" in text and "\n" not in text
    assert "PassManager::run failed" in text or not isinstance(error, RuntimeError)
    with pytest.raises(KeyboardInterrupt):  # which is no failure of a configuration
        tune({16: KeyboardInterrupt()})


@pytest.mark.parametrize("failures", [{}, {64: RuntimeError("late")}], ids=["all run", "one fails"])
def test_tuning_with_beta_leaves_c_as_it_was(tune, failures: dict[int, Exception]) -> None:
    assert (tune(failures, beta=1.0) == 2).all()  # the two calls, and none of the trials


def test_the_key_holds_dtypes_shape_and_stride_classes(tune) -> None:
    tune({})
    (key,) = tune.tuner.cache
    assert key[:3] == (64, 48, 32) and key[4:] == ("torch.float32",) * 3
    assert key[3].startswith("float32:v1 float32:v1 float32:v1 ")


def test_stride_classes() -> None:
    a = torch.zeros(64, 64)

    def key(x: torch.Tensor) -> str:
        return tune_key(x, a, a, 0.0).split()[0].removeprefix("float32:")

    assert key(a) == "v1"
    assert key(a.T) == "1v"
    assert key(a[:, 4:]) == "v1"
    assert key(a[:, 1:]) == "s1"  # rows no longer start on 16 bytes
    assert key(torch.zeros(64, 63)) == "s1"
    assert key(a[:, ::2]) == "vs"


@pytest.mark.parametrize("rung", [k10_tma, k11_warp_specialised], ids=["k10", "k11"])
def test_the_key_of_descriptors_holds_dtypes(rung, monkeypatch: pytest.MonkeyPatch) -> None:
    """A configuration that fits 16-bit C need not fit 32-bit C."""
    keys = []

    def note(_rung: Rung, _kernel: object, _grid: object, arguments: dict, _config: object) -> None:
        dtypes = [str(value.dtype) for value in arguments.values() if hasattr(value, "dtype")]  # as Triton's key
        keys.append((arguments["TUNE_KEY"], *dtypes))

    monkeypatch.setattr(rung, "run", note)
    a, b = (torch.zeros(64, 64, dtype=torch.float16, device="meta") for _ in "ab")
    for c in (a.clone(), a.float()):
        rung.launch(a, b, c)
    rung.launch(a.bfloat16(), b.bfloat16(), a.bfloat16())
    assert len(set(keys)) == 3, keys


MINE = [triton.Config({"BLOCK_M": m, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=8, num_stages=1) for m in (32, 64, 8192)]


def test_a_users_configurations_are_tuned_instead_of_the_rungs(tune, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, logger="triton_gemm.autotune"):
        tune({}, configs=MINE)
    assert tune.kernel.launched == [32, 32, 64, 64, 64, 64]
    (record,) = caplog.records
    text = record.getMessage()
    assert "fn leaves out 8192x32x16 8 warps 1 stages: needs" in text and "bytes of shared memory" in text
    assert tune.tuner.best_config is MINE[1]
    assert list(tune.tuner.configs_timings) == MINE[:2]


def test_what_triton_alone_knows_of_a_configuration_is_kept(tune) -> None:
    """Triton's configurations and GemmConfigs may be mixed."""
    narrow = triton.Config({"BLOCK_M": 64, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=8, num_stages=1, maxnreg=64)
    tune({}, configs=[RUNG.configs[1], narrow])
    assert tune.kernel.launched == [32, 32, 64, 64, 64, 64] and tune.tuner.best_config.maxnreg == 64


def test_where_no_configuration_fits_all_reasons_are_named(tune) -> None:
    other = triton.Config({"BLOCK_M": 4096, "BLOCK_N": 32, "BLOCK_K": 16}, num_warps=8, num_stages=1)
    reasons = r"none of the configurations here: 8192x32x16 .*: needs.*; 4096x32x16 .*needs"
    with pytest.raises(ValueError, match=reasons):
        tune({}, configs=[MINE[2], other])


def test_one_list_has_one_tuner(tune) -> None:
    tune({})
    assert tune.tuner.over(MINE) is tune.tuner.over(list(MINE)) is not tune.tuner.over(MINE[:1])
    assert tune.tuner.over(MINE).fn is tune.tuner.fn


def test_timings_are_those_of_the_last_tuning(tune) -> None:
    """Triton 3.9 times nothing where one configuration is left, and would show those of the shape before."""
    tune({})
    assert len(tune.tuner.configs_timings) == 4
    operands = {f"{name}_ptr": torch.zeros(64, 64) for name in "abc"}
    tune.tuner.prune_configs(operands | {"HAS_BETA": False, "M": 64, "N": 64, "K": 64})
    assert tune.tuner.configs_timings == {}


@pytest.mark.parametrize(
    ("module", "kernel"),
    [(k06_pipelined, "pipelined_kernel"), (k10_tma, "tma_kernel"), (k11_warp_specialised, "warp_specialised_kernel")],
    ids=["k06", "k10", "k11"],
)
@pytest.mark.parametrize("own", [False, True], ids=["the rung's", "a user's"])
def test_a_second_process_finds_the_winner_on_disk(
    module, kernel: str, own: bool, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A new tuner stands for the process: nothing but the disk is shared. Kernels are noted and not launched."""
    target = triton.backends.compiler.GPUTarget("cuda", 90, 32)
    fake = SimpleNamespace(active=SimpleNamespace(get_current_target=lambda: target))
    monkeypatch.setattr(triton.runtime.autotuner, "driver", fake)
    monkeypatch.setattr(rungs, "device_info", lambda _: HOPPER)
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    original, clock = getattr(module, kernel), itertools.count(10, -1)
    trials: list[object] = []

    def do_bench(call: Callable[[], object], quantiles: object) -> list[float]:
        call()
        trials.append(call)
        return [next(clock)] * 3  # the last is the fastest

    rung = module.RUNG
    wanted = tuple(map(triton_config, rung.configs[:3])) if own else None
    monkeypatch.setattr(triton.runtime.Autotuner, "do_bench", property(lambda _: do_bench))
    x = torch.zeros(256, 256, dtype=rung.dtypes[0], device="meta")
    last = None
    assert isinstance(original, Autotuner) and original.cache_results
    assert {"M", "N", "K", "TUNE_KEY"} == set(original.keys)
    for process in range(2):
        fresh = Autotuner(rung, original.fn, original.configs[:4])
        monkeypatch.setattr(module, kernel, fresh)
        with aot.capture() as launches:
            module.launch(x, x, x.clone(), configs=wanted)
        assert len(trials) == (3 if own else 4), f"process {process + 1}"
        last = launches[-1].arguments
    best = rung.configs[2 if own else 3]
    assert last is not None and {name: last[name] for name in best.meta()} == best.meta()
    if rung.descriptors:
        assert last["c_desc"].block_shape == [best.BLOCK_M, best.BLOCK_N]
        assert last["a_desc"].block_shape == [best.BLOCK_M, best.BLOCK_K]


@RUNGS
def test_what_a_rung_names_exists(rung: Rung) -> None:
    assert set(rung.twins) <= set(TWINS)
    assert set(rung.capabilities) <= set(SHARED_MEMORY) and rung.capabilities
    for capability, dtype in itertools.product(rung.capabilities, rung.dtypes):
        assert rung.legal_configs(device_of_capability(capability), dtype), f"sm_{capability}"
    earlier = [other.id for other in LADDER[: LADDER.index(rung)]]
    assert rung.predicted is None if rung.id == "k01" else rung.predicted[0] in earlier
    assert rung.precision in ("ieee", "tf32", "half")
    assert len(set(rung.configs)) == len(rung.configs)
    assert rung.id in ("k01", "k02") or len(rung.configs) > 1, "nothing to tune"


@RUNGS
def test_a_rung_is_short_and_has_a_header(rung: Rung) -> None:
    """Lines of code; the header is prose and not counted."""
    assert tuple(rung.header) == tuple(x for x in HEADER_FIELDS if x != OPTIONAL_FIELD or x in rung.header)
    assert all(len(text.split()) >= 3 for text in rung.header.values()), "a field says nothing"
    text = Path(inspect.getfile(sys.modules[rung.module])).read_text()
    header = ast.parse(text).body[0]
    lines = len(text.splitlines()) - (header.end_lineno or 0)
    assert lines <= (220 if rung.id == "k11" else 150)


def test_the_ladder_is_in_order_and_every_twin_has_a_rung() -> None:
    assert [rung.id for rung in LADDER] == [f"k{number:02}" for number in range(1, len(LADDER) + 1)]
    files = sorted(path.stem for path in Path(inspect.getfile(k06_pipelined)).parent.glob("k[0-9]*.py"))
    assert [rung.name for rung in LADDER] == files
    assert {stem for rung in LADDER for stem in rung.twins} == set(TWINS)
    for rung in LADDER:
        assert all(rung.id in TWINS[stem].rungs for stem in rung.twins)
