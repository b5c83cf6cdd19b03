"""The bench's peers that choose by measuring: absent, with the reason, where they cannot; never in others' figures."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

from perf.bench import __main__ as bench
from perf.bench import peers, plots, scores, sweep
from perf.bench import tables as bench_tables
from perf.bench.scores import AUTOTUNED, INDUCTOR, TUNED, Sweep
from perf.measure import timer
from perf.measure.operands import Problem
from perf.measure.providers import CUBLAS, OURS
from tests.support.lab_fakes import take_gpu_away
from tests.support.report_records import keys, made_up_sweep, spread
from triton_gemm.suites import SUITES

PROBLEM = Problem(24, 16, 40, "bf16", layout="nt")
NAMES = (OURS, CUBLAS, *AUTOTUNED)


class TunableOp:
    """torch.cuda.tunable of a GPU: tunes products of matrices in 16 bits, each once."""

    def __init__(self) -> None:
        self.enabled = False
        self.prepared = Mock()
        self.set_cublaslt_requested_algo_count = self.prepared.count
        self.set_filename, self.set_rotating_buffer_size = self.prepared.file, self.prepared.rotating
        self.tuning_enable = self.prepared.tuning
        self.results: dict[str, str] = {}
        self.library = "cublas"

    def enable(self, on: bool) -> None:
        self.enabled = on

    def get_results(self) -> tuple[tuple[str, str, str, float], ...]:
        return tuple(("GemmTunableOp_BFloat16_TN", name, found, 0.1) for name, found in self.results.items())

    def preferred_blas_library(self, wanted: str | None = None) -> str:
        self.library = wanted or self.library
        return self.library

    def mm(self, a: torch.Tensor, b: torch.Tensor, *, out: torch.Tensor) -> torch.Tensor:
        if self.enabled and a.itemsize == 2:
            self.results.setdefault(f"{a.shape} {b.shape}", f"Gemm_Cublaslt_id_{len(self.results)}")
        return MM(a, b, out=out)


MM = torch.mm


@pytest.fixture
def tunable(monkeypatch: pytest.MonkeyPatch) -> TunableOp:
    made = TunableOp()
    monkeypatch.setattr(torch.cuda, "tunable", made)
    monkeypatch.setattr(torch.backends.cuda, "preferred_blas_library", made.preferred_blas_library)
    monkeypatch.setattr(torch, "mm", made.mm)
    return made


@pytest.fixture(autouse=True)
def no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    take_gpu_away(monkeypatch)
    monkeypatch.setitem(peers.PEERS, OURS, lambda problem: timer.Provider("", peers.providers.fused_in_torch(problem)))
    monkeypatch.setattr(torch, "compile", lambda function, **_: function)
    monkeypatch.setattr(peers, "_chosen", {})
    peers._prepare_tunable_op.cache_clear()


def measure(problem: Problem = PROBLEM, names: tuple[str, ...] = NAMES) -> dict[str, Any]:
    found: dict[str, Any] = sweep.measure(problem, "graph", names, 0.01)["providers"]
    return found


def test_tuned_cublaslt_is_measured_apart_from_cublas(tunable: TunableOp, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[tuple[bool, str]] = []

    def call(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
        seen.append((tunable.enabled, tunable.library))
        return a @ b

    monkeypatch.setitem(peers.PEERS, OURS, lambda problem: timer.Provider("", call))
    found = measure(names=(TUNED, OURS, CUBLAS))
    assert found[TUNED]["config"] == "Gemm_Cublaslt_id_0"
    assert found[TUNED]["time_ms"]["median"] == 1.0 and found[OURS]["ratio_to"][TUNED]["median"] == 1.0
    assert set(seen) == {(False, "cublas")}
    assert (tunable.enabled, tunable.library) == (False, "cublas")
    tunable.prepared.rotating.assert_called_once_with(-1)
    tunable.prepared.tuning.assert_called_once_with(True)
    assert Path(tunable.prepared.file.call_args[0][0]).parent.is_dir(), "no file where the bench was started"
    assert measure()[TUNED]["config"] == "Gemm_Cublaslt_id_0", "tuned before"
    assert len(tunable.results) == 1


def test_a_product_that_is_not_tuned_is_absent(tunable: TunableOp) -> None:
    found = measure(Problem(24, 16, 40, "fp64"))
    assert found[TUNED]["absent"] == "TunableOp does not tune this product"
    assert not any(key in found[TUNED] for key in ("time_ms", "failed"))
    assert (tunable.enabled, tunable.library) == (False, "cublas")
    assert TUNED not in found[OURS]["ratio_to"] and found[CUBLAS]["time_ms"]


def test_a_torch_without_candidates_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "tunable", SimpleNamespace(enable=lambda _: pytest.fail("switched on")))
    assert measure()[TUNED] == {"absent": f"TunableOp of torch {torch.__version__} has no candidates on CUDA"}


def test_compiling_is_not_in_the_time_and_is_bounded(tunable: TunableOp, monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config

    now, limits = 0.0, []

    def compiled(function: timer.Call, *, mode: str, dynamic: bool) -> timer.Call:
        made = False

        def call(*arguments: torch.Tensor) -> object:
            nonlocal now, made
            if not made:
                limits.append(config.precompilation_timeout_seconds)
                now += takes
            made = True
            return function(*arguments)

        assert (mode, dynamic) == ("max-autotune-no-cudagraphs", False)
        return call

    monkeypatch.setattr(torch, "compile", compiled)
    monkeypatch.setattr(peers.time, "perf_counter", lambda: now)
    takes = 12.34
    found = measure()[INDUCTOR]
    assert found["compile_s"] == 12.3 and found["time_ms"]["median"] == 1.0
    takes = peers.COMPILE_S + 5
    found = measure()[INDUCTOR]
    assert found["absent"] == f"torch.compile took {takes} s, more than {peers.COMPILE_S} s" and "time_ms" not in found
    assert limits == [peers.COMPILE_S] * 2

    error = torch._dynamo.exc.TorchDynamoException("no compiler\nand more")
    monkeypatch.setattr(torch, "compile", Mock(side_effect=error))
    assert measure()[INDUCTOR] == {"absent": "torch.compile: no compiler"}


@pytest.mark.parametrize("mode", ["int8", "fp16", "tf32"])
def test_the_compiled_peer_computes_every_precision(mode: str, tunable: TunableOp) -> None:
    found = measure(Problem(32, 16, 64, mode), (CUBLAS, INDUCTOR))
    assert found[INDUCTOR]["time_ms"] and "failed" not in found[INDUCTOR]


def swept(suite: str, *peers: dict[str, Any]) -> Sweep:
    """A sweep of so many shapes in which the peers have those results."""
    largest = [shape.key for shape in SUITES[suite].shapes if shape.key.startswith("4096x4096x4096")]
    sweep = made_up_sweep(suite, dict.fromkeys([*largest, *keys(suite, 1)][: len(peers)], 1.2))
    for shape, peer in zip(sweep["shapes"].values(), peers, strict=True):
        shape["providers"][OURS]["ratio_to"] = {name: spread(0.8) for name, found in peer.items() if "time_ms" in found}
        shape["providers"] |= peer
    return sweep


TIMED = {"time_ms": spread(0.8), "error": {"norm": 2e-3, "componentwise": 2e-2}}
ABSENT = {"absent": "TunableOp of torch 2.11.0 has no candidates on CUDA"}


def test_pages_show_peers_where_they_were_measured() -> None:
    without = swept("square", {}, {})
    assert [score.over for score in scores.scores(without)] == [CUBLAS]
    assert bench_tables.absences(without) == []
    sweeps = [swept("square", {TUNED: ABSENT, INDUCTOR: TIMED}, {TUNED: ABSENT, INDUCTOR: {"absent": "slow"}})]
    found = [(score.over, len(score.ratios), score.missing) for score in scores.scores(sweeps[0])]
    assert found == [(CUBLAS, 2, 0), (INDUCTOR, 1, 1)]
    page = "".join(bench_tables.pages(sweeps).values())
    assert f"| to {TUNED} | to {INDUCTOR} |" in page and f"| square | {TUNED} |" not in page
    assert f"{TUNED} is absent on all shapes: {ABSENT['absent']}." in page
    assert f"{INDUCTOR} is absent on 1 of 2 shapes: slow." in page
    assert f"| square | {INDUCTOR} | 1 (+ 1 not timed) | 0.800 | 0.800 |" in page


def test_the_picture_shows_peers_where_they_were_measured(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    legends: list[set[str]] = []
    monkeypatch.setattr(plots, "legend_below", lambda axes: legends.append({*axes.get_legend_handles_labels()[1]}))
    for peer in ({}, {TUNED: TIMED, INDUCTOR: ABSENT}):
        points = bench_tables.points([swept("tf32", peer), swept("ieee", {})])
        assert plots.precisions(points, "somewhere", tmp_path / "precision.png").is_file()
    assert legends == [{OURS, CUBLAS}, {OURS, CUBLAS, TUNED}]
    assert f"| {TUNED} tf32 |" in bench_tables.precision([swept("tf32", {TUNED: TIMED})])


def test_the_command_adds_them() -> None:
    options = bench.parse(["square", "--peers"]).options
    assert options.providers_of(SUITES["square"]) == NAMES
    assert options.providers_of(SUITES["epilogue"]) == (OURS, CUBLAS, scores.COMPILED, *AUTOTUNED)
    chosen = bench.parse(["square", "--peers", "--providers", f"cuBLAS,{TUNED}"]).options
    assert chosen.providers_of(SUITES["square"]) == (CUBLAS, TUNED, INDUCTOR)
    assert bench.parse(["square"]).options.providers_of(SUITES["square"]) == (OURS, CUBLAS)
