"""What a process may do beside calls: free storages, use per-thread streams, wait with the GIL, begin and end `use()`
while a backward runs. Each in a process of its own, whose CUDA context must live to its end."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import printed

BEGINNING = """
import ctypes, sys, threading, time, warnings
import torch, triton_gemm
warnings.simplefilter("ignore")

def random(*shape):
    return torch.randn(*shape, device="cuda").bfloat16()

def is_alive():
    return torch.ones(8, device="cuda").sum().item() == 8
"""

SCRIPTS = {
    # FSDP keeps parameters as views at offsets of one storage, which it frees and fills again.
    "storages that are freed": """
def freed(*shape, offset=512):
    count = 1
    for size in shape:
        count *= size
    view = random(offset + count)[offset:].view(shape)
    return view

x, w = random(64, 256), freed(128, 256)
bias, gate, residual = freed(128), freed(128, 256), freed(64, 128)
groups = torch.tensor([30, 64], dtype=torch.int32, device="cuda")
experts = freed(2, 256, 128)
routed = triton_gemm.use()
CALLS = {
    "matmul": (w, lambda: triton_gemm.matmul(x, w.T)),
    "out": (w, lambda: triton_gemm.matmul(x, w.T, out=residual.clone())),
    "into": (residual, lambda: triton_gemm.matmul(x, w.T, out=residual)),
    "linear": (bias, lambda: triton_gemm.linear(x, w, bias)),
    "trained": (w, lambda: triton_gemm.linear(x.clone().requires_grad_(), w)),
    "gate": (gate, lambda: triton_gemm.linear(x, w, activation="swiglu", gate=gate)),
    "residual": (residual, lambda: triton_gemm.linear(x, w, residual=residual)),
    "groups": (experts, lambda: triton_gemm.grouped_matmul(x, experts, offs=groups)),
    "operator": (w, lambda: torch.ops.triton_gemm.gemm(x, w.T)),
    "mm": (w, lambda: torch.mm(x, w.T)),
    "addmm": (bias, lambda: torch.addmm(bias, x, w.T)),
}
with routed:
    for cold in (True, False):
        for name, (operand, call) in CALLS.items():
            for _ in range(0 if cold else 4):
                call()
            if cold:
                triton_gemm.set_policy("model")  # plans are made anew
            storage = operand.untyped_storage()
            size = storage.nbytes()
            kept = operand.clone()
            storage.resize_(0)
            try:
                call()
            except RuntimeError as error:
                assert "not allocated" in str(error) or "out of bounds" in str(error), (name, error)
            else:
                raise AssertionError(name)
            assert is_alive(), name
            storage.resize_(size)
            operand.copy_(kept)
            call()
            assert is_alive(), name
""",
    "streams of each thread": """
a, b = random(1, 4096), random(4096, 4096)
sizes = [(a, b), (random(16, 8192), random(8192, 512)), (random(200, 333), random(333, 111))]
expected = [triton_gemm.matmul(x, y) for x, y in sizes]
torch.cuda.synchronize()
wrong = []
def multiply():
    stream = torch.cuda.ExternalStream(2)
    with torch.cuda.stream(stream):
        for (x, y), truth in zip(sizes, expected):
            outs = [torch.empty_like(truth) for _ in range(100)]
            for out in outs:
                triton_gemm.matmul(x, y, out=out)
            stream.synchronize()
            wrong.extend(1 for out in outs if not out.equal(truth))
threads = [threading.Thread(target=multiply) for _ in range(4)]
[x.start() for x in threads]
[x.join() for x in threads]
assert not wrong, len(wrong)
""",
    # torch's allocator frees what it has cached, which waits for the stream, whose host function waits for the GIL.
    "memory that is freed first": """
cuda = ctypes.CDLL("libcuda.so.1")
host = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: None)
a, b = random(4096, 64), random(64, 4096)
triton_gemm.matmul(a[:256], b[:, :256])
total = torch.cuda.mem_get_info()[1]
torch.cuda.synchronize()
torch.cuda.empty_cache()
used = torch.cuda.memory_reserved()
torch.cuda.set_per_process_memory_fraction((used + (56 << 20)) / total)
calls = [lambda: triton_gemm.matmul(a, b), lambda: torch.mm(a, b)]
with triton_gemm.use():
    for call in calls:
        for _ in range(5):
            del_me = torch.empty(40 << 20, dtype=torch.uint8, device="cuda")
            del del_me
            torch.cuda._sleep(10**8)
            stream = torch.cuda.current_stream().cuda_stream
            assert cuda.cuLaunchHostFunc(ctypes.c_void_p(stream), host, None) == 0
            c = call()
            del c
            torch.cuda.empty_cache()
assert is_alive()
""",
    "a backward while use() ends": """
layers = torch.nn.Sequential(*(torch.nn.Linear(256, 256, device="cuda", dtype=torch.bfloat16) for _ in range(20)))
x = random(64, 256)
until, steps = time.monotonic() + 10, [0]
def train():
    while time.monotonic() < until:
        layers(x).sum().backward()
        steps[0] += 1
thread = threading.Thread(target=train)
thread.start()
while time.monotonic() < until:
    with triton_gemm.use():
        torch.mm(x, x.T)
    try:
        with triton_gemm.use(only="bmm"):
            raise KeyError
    except KeyError:
        pass
thread.join()
assert is_alive() and steps[0] > 20
""",
    "hooks that are assigned": """
import triton
a, b = random(256, 264), random(264, 128)
for _ in range(4):
    triton_gemm.matmul(a, b)
seen = []
before = triton.knobs.runtime.launch_enter_hook
triton.knobs.runtime.launch_enter_hook = lambda data: seen.append(data.get()["name"])
triton_gemm.matmul(a, b)
triton.knobs.runtime.launch_enter_hook = before
triton_gemm.matmul(a, b)
assert len(seen) >= 1 and len(seen) <= 3, seen
""",
    "gradients within inference mode": """
x, w = random(64, 256), random(128, 256).requires_grad_()
for _ in range(5):
    with torch.inference_mode(), torch.enable_grad():
        ours, theirs = triton_gemm.linear(x, w), torch.nn.functional.linear(x, w)
    assert (ours.requires_grad, ours.is_inference()) == (theirs.requires_grad, theirs.is_inference()) == (False, True)
    assert ours.grad_fn is None
    with torch.enable_grad():
        assert triton_gemm.linear(x, w).grad_fn is not None
""",
    "observers of operators": """
import tempfile, json
from torch.profiler import ExecutionTraceObserver
a, b = random(256, 264), random(264, 128)
for _ in range(4):
    triton_gemm.matmul(a, b)
with tempfile.NamedTemporaryFile(suffix=".json") as file:
    observer = ExecutionTraceObserver()
    observer.register_callback(file.name)
    observer.start()
    triton_gemm.matmul(a, b)
    observer.stop()
    observer.unregister_callback()
    assert "triton_gemm::gemm" in open(file.name).read()
""",
}


@pytest.fixture(scope="module")
def extension(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from triton_gemm.runtime import native_build

    return native_build.build(tmp_path_factory.mktemp("native"))


@pytest.mark.parametrize("native", [True, False], ids=["C++", "Python"])
@pytest.mark.parametrize("name", SCRIPTS)
def test_a_process_goes_on(name: str, native: bool, extension: Path) -> None:
    script = BEGINNING + SCRIPTS[name] + "print('ended')\n"
    assert printed(script, TRITON_GEMM_NATIVE=str(extension) if native else "0") == "ended\n"
