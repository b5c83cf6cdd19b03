"""The bench on a GPU, from its command to its file."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from perf.bench import __main__ as bench
from perf.bench import peers, scores
from perf.common.files import read_json
from perf.measure.providers import CUBLAS, OURS
from triton_gemm.suites import SUITES, Suite
from triton_gemm.suites.shapes import Shape, cube


def tiny(kind: str) -> Suite:
    shapes = (Shape(512, 1024, 768, layout="nt"), cube(256))
    return Suite(f"tiny-{kind}", "tiny", shapes, lambda s: True, lambda r: cube(64), kind, cold=1.0)


@pytest.mark.parametrize("kind", ["graph", "host", "queue"])
def test_a_tiny_suite_is_measured(kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, f"tiny-{kind}", tiny(kind))
    assert bench.main([f"tiny-{kind}", "--out", str(tmp_path), "--budget", "0.02"]) == 0
    measured = read_json(tmp_path / f"tiny-{kind}.json")
    assert measured["environment"]["gpu"]
    assert len(measured["shapes"]) == 2
    for shape in measured["shapes"].values():
        own, base = (scores.timed(shape, name) for name in (OURS, CUBLAS))
        assert own is not None and base is not None
        assert 0 < own["time_ms"]["p20"] <= own["time_ms"]["median"] <= own["time_ms"]["p80"]
        assert own["config"]
        assert own["error"]["bound"] < 1
        ratio = scores.ratio(shape)
        assert ratio is not None
        assert 0.05 < ratio < 20


@pytest.mark.slow  # torch.compile
def test_peers_that_choose_by_measuring(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(SUITES, "tiny-graph", tiny("graph"))
    monkeypatch.chdir(tmp_path)
    assert bench.main(["tiny-graph", "--out", str(tmp_path), "--budget", "0.02", "--peers"]) == 0
    for shape in read_json(tmp_path / "tiny-graph.json")["shapes"].values():
        inductor, tuned = (shape["providers"][name] for name in scores.AUTOTUNED[::-1])
        assert inductor["time_ms"]["median"] > 0 and 0 < inductor["compile_s"] <= peers.COMPILE_S
        assert 0.05 < shape["providers"][OURS]["ratio_to"][scores.INDUCTOR]["median"] < 20
        if hasattr(torch.cuda.tunable, "set_cublaslt_requested_algo_count"):
            assert tuned["config"] and tuned["time_ms"]["median"] > 0, tuned
        else:
            assert tuned == {"absent": f"TunableOp of torch {torch.__version__} has no candidates on CUDA"}
    if "absent" in tuned:
        assert f"{scores.TUNED} is absent on all shapes" in capsys.readouterr().out
    assert not torch.cuda.tunable.is_enabled()
    assert list(tmp_path.iterdir()) == [tmp_path / "tiny-graph.json"], "TunableOp wrote where the bench was started"


@pytest.mark.slow  # torch.compile
def test_a_peer_is_measured_beside(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SUITES, "tiny-graph", tiny("graph"))
    names = f"{OURS},{CUBLAS},{peers.TUTORIAL},{scores.COMPILED}"
    assert bench.main(["tiny-graph", "--out", str(tmp_path), "--budget", "0.02", "--providers", names]) == 0
    for shape in read_json(tmp_path / "tiny-graph.json")["shapes"].values():
        for name in (peers.TUTORIAL, scores.COMPILED):
            result = shape["providers"][name]
            assert "absent" in result or result["time_ms"]["median"] > 0
