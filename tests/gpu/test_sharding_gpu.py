"""Products of DTensors and parallel models on several GPUs, with NCCL."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.sharded import launch

pytestmark = pytest.mark.gpu


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "shape"), [("line", (2,)), ("grid", (2, 2))])
def test_gpus_compute_what_one_does(group: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    needed = torch.Size(shape).numel()
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    launch(group, shape, "cuda", dtype, tmp_path)
