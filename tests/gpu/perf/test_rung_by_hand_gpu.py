"""A rung by hand on a GPU, as one types it."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path

import pytest
import torch

from perf.ladder.rungs_and_twins import runs_on
from tests.support.processes import python
from triton_gemm.hardware.device import device_info
from triton_gemm.ladder import LADDER
from triton_gemm.ladder.command import spelled

ROOT = Path(__file__).parents[3]
HEADING = "tile,warps,stages,group ms TFLOPS of cuBLAS error registers shared KiB spills"


def command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return python("-m", "triton_gemm.ladder", *arguments, TRITON_INTERPRET=None)


def lines(done: subprocess.CompletedProcess[str]) -> dict[str, list[str]]:
    """The cells below the heading, by configuration."""
    assert done.returncode == 0, done.stdout + done.stderr
    title, heading, *rest = done.stdout.splitlines()
    assert torch.cuda.get_device_name() in title
    assert " ".join(heading.split()) == HEADING
    return {line.split()[0]: line.replace(" %", "%").split()[1:] for line in rest}


def assert_plausible(cells: list[str], flop: float, largest_error: float) -> None:
    ms, tflops, share, error, registers, shared, spills = cells
    assert float(ms) > 0
    assert float(tflops.replace(",", "")) == pytest.approx(flop / float(ms) / 1e9, rel=0.02)
    assert 1 < float(share.rstrip("%")) < 1000
    assert 0 < float(error) < largest_error
    assert 16 <= int(registers) <= 255 and 0 < float(shared) < 227 and spills == "0"


def test_tunings_are_recorded_once_and_drawn(tmp_path: Path) -> None:
    """Every legal configuration is timed; a second run finds nothing left to do."""
    capability = torch.cuda.get_device_capability()
    rungs = [rung for rung in LADDER if rung.id in ("k03", "k08", "k10") and runs_on(rung, capability)]
    names = ",".join(rung.id for rung in rungs)
    call = [ROOT / "perf" / "report.py", "--tuning", "--sizes", "512", "--rungs", names]
    out = tmp_path / "out"
    for count in range(2):
        done = python(*call, "--out", out, TRITON_CACHE_DIR=str(tmp_path / "cache"))
        assert done.returncode == 0, done.stderr
        assert ("tuning k03_blocked" in done.stderr) == (count == 0)
    tuned = json.loads((out / "results.json").read_text())["tuning"]
    assert list(tuned) == [f"{rung.name} {'ieee' if rung.id == 'k03' else 'fp16'} 512x512x512" for rung in rungs]
    for rung, found in zip(rungs, tuned.values(), strict=True):
        legal = rung.legal_configs(device_info(torch.device("cuda")), rung.dtypes[0])
        assert list(found["configs"]) == [spelled(config) for config in legal]
        for facts in found["configs"].values():
            assert 0 < facts["time_ms"]["p20"] <= facts["time_ms"]["median"] <= facts["time_ms"]["p80"] < 10
            assert 16 <= facts["registers"] <= 255 and facts["blocks_per_sm"] >= 1 and facts["spills"] == 0
    assert (out / "tuning.png").exists()
    assert "## What the autotuner timed" in (out / "report.md").read_text()


def test_one_configuration_of_k06() -> None:
    found = lines(command("k06", "--shape", "1024x768x512", "--config", "128x64x16,4,3", "--budget", "0.05"))
    assert list(found) == ["cuBLAS", "128x64x16,4,3,8"]
    ms, tflops, share, error = found["cuBLAS"]
    assert float(ms) > 0 and float(tflops) > 0 and share == "100%" and 0 < float(error) < 1e-5
    assert_plausible(found["128x64x16,4,3,8"], 2.0 * 1024 * 768 * 512, 1e-5)


def test_all_configurations_and_the_best() -> None:
    if torch.cuda.get_device_capability() < (8, 0):
        pytest.skip("k08 wants sm_80")
    configs = ("64x64x64,8,4,8", "64x64x32,4,4,8")
    chosen = [word for config in configs for word in ("--config", config)]
    done = command("k08", "--size", "1400", "--dtype", "bf16", "--layout", "nt", *chosen, "--budget", "0.05")
    found = lines(done)
    assert set(found) == {"cuBLAS", "best:", *configs}
    for config in configs:
        assert_plausible(found[config], 2.0 * 1400**3, 1e-2)
    best = done.stdout.splitlines()[-1].split()
    assert float(best[1]) == min(float(found[config][0]) for config in configs)


def test_an_illegal_configuration_is_refused_in_a_sentence() -> None:
    done = command("k06", "--config", "256x256x64,4,4")
    assert done.returncode == 2 and done.stdout == ""
    assert done.stderr.startswith("error: k06 cannot take 256x256x64,4,4,8 on ") and done.stderr.count("\n") == 1


def test_facts_for_another_architecture_are_no_timings() -> None:
    done = command("k06", "--arch", "sm_80", "--config", "64x64x16,4,3", "--size", "64")
    assert done.returncode == 0, done.stderr
    assert "Nothing is timed: --arch" in done.stdout and " ms" not in done.stdout
