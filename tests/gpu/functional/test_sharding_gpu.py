"""Products of DTensors and parallel models on several GPUs, with NCCL, and whether ranks choose alike."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from tests.support import table_fakes
from tests.support.sharded_processes import launch
from triton_gemm.hardware.device import current_device_info


@pytest.mark.slow
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize(("group", "shape"), [("line", (2,)), ("grid", (2, 2))])
def test_gpus_compute_what_one_does(group: str, shape: tuple[int, ...], dtype: torch.dtype, tmp_path: Path) -> None:
    needed = torch.Size(shape).numel()
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} CUDA devices")
    launch(group, shape, "cuda", dtype, tmp_path)


def rank(number: int, folder: Path) -> None:
    os.environ["TRITON_GEMM_CACHE_DIR"] = str(folder / str(number))
    torch.cuda.set_device(number)
    dist.init_process_group("nccl", init_method=f"file://{folder}/meeting", rank=number, world_size=2)
    messages = table_fakes.messages_of_check_ranks(number, current_device_info())
    dist.destroy_process_group()
    (folder / f"{number}.json").write_text(json.dumps(messages))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_the_message_names_what_ranks_differ_in(tmp_path: Path) -> None:
    mp.spawn(rank, (tmp_path,), nprocs=2)
    agree, by_tables, by_policy = json.loads((tmp_path / "0.json").read_text())
    assert [agree, by_tables, by_policy] == json.loads((tmp_path / "1.json").read_text())
    assert agree == "" and "differ in tables" in by_tables and "policy" in by_policy
