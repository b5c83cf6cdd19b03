"""First calls on a GPU: no bit depends on what was compiled when, and nothing is left of a process that is killed."""

from __future__ import annotations

import json
import signal
import time
from pathlib import Path
from typing import Any

from tests.support.processes import printed, started

CALLS = """
import hashlib, json, random, sys, time
import torch, triton_gemm
from triton_gemm.runtime import background

rows = [32, 64, 100, 128, 200, 256, 300, 512, 725, 831, 1024, 1543, 1728, 1814]
random.Random(int(sys.argv[1])).shuffle(rows)
weights = [(4096, 4096), (1536, 7168)]
maker = torch.Generator("cuda").manual_seed(0)
half = dict(dtype=torch.bfloat16, device="cuda")
w = {size: torch.randn(size, generator=maker, **half) for size in weights}
x = torch.randn(max(rows), 7168, generator=maker, **half)
digests, longest = {}, {}
for turn in ("first", "last"):
    for size in weights:
        for M in rows:
            a = x[:M, : size[1]].contiguous()
            torch.cuda.synchronize()
            begin = time.perf_counter()
            c = triton_gemm.linear(a, w[size])
            torch.cuda.synchronize()
            longest[turn] = max(longest.get(turn, 0), time.perf_counter() - begin)
            bits = c.view(torch.int16).cpu().numpy().tobytes()
            digests[f"{turn} {M} {size}"] = hashlib.sha256(bits).hexdigest()
    done = triton_gemm.wait_until_compiled(120)
print(json.dumps({"digests": digests, "counts": background.counts, "longest": longest, "done": done}), flush=True)
"""


def run(cache: Path, seed: int, background: bool) -> dict[str, Any]:
    how = {"TRITON_CACHE_DIR": str(cache), "TRITON_GEMM_BACKGROUND": str(int(background))}
    found: dict[str, Any] = json.loads(printed(CALLS, seed, **how).splitlines()[-1])  # type: ignore[arg-type]  # variables
    return found


def test_no_bit_depends_on_what_was_compiled_when(tmp_path: Path) -> None:
    """Fresh processes with empty caches and other orders, with the background and without; then from a full cache."""
    runs = [run(tmp_path / str(seed), seed, background) for seed, background in ((0, True), (1, True), (2, False))]
    runs.append(run(tmp_path / "1", 3, background=True))
    digests = [{**x["digests"]} for x in runs]
    assert digests[0] == digests[1] == digests[2] == digests[3]
    for first in [name for name in digests[0] if name.startswith("first")]:
        assert digests[0][first] == digests[0][first.replace("first", "last")]
    cold, warm = runs[0], runs[3]
    assert cold["done"] and cold["counts"]["stand-in"] > cold["counts"]["waited"], cold["counts"]
    assert cold["longest"]["last"] < 1 and set(warm["counts"]) == {"loaded"}, (cold["longest"], warm["counts"])


def test_a_killed_process_leaves_no_worker(tmp_path: Path) -> None:
    process = started(CALLS, 0, TRITON_CACHE_DIR=str(tmp_path), TRITON_GEMM_BACKGROUND="1")
    try:
        deadline = time.monotonic() + 120
        while not (workers := children_of(process.pid)) and time.monotonic() < deadline:
            time.sleep(0.1)
        assert workers
    finally:
        process.send_signal(signal.SIGKILL)
        process.wait()
    while any(Path(f"/proc/{pid}").exists() for pid in workers) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not [pid for pid in workers if Path(f"/proc/{pid}").exists()]


def children_of(parent: int) -> list[int]:
    """The workers that a process has started."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            is_child = entry.name.isdecimal() and f"\nPPid:\t{parent}\n" in (entry / "status").read_text()
            if is_child and b"runtime.worker" in (entry / "cmdline").read_bytes():
                found.append(int(entry.name))
        except OSError:  # it has ended meanwhile
            continue
    return found
