"""The products as candidates of Inductor's autotuning: which are offered, that what is chosen is right, and that
another process finds it in the cache."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from tests.support.processes import python
from tests.support.product_views import draw
from triton_gemm import inductor
from triton_gemm.functional import matrices


@pytest.fixture(autouse=True)
def undone() -> Iterator[None]:
    yield
    inductor.unregister()
    assert torch.compiler.config.cache_key_tag == ""


PROGRAM = """
import torch
from torch._dynamo.utils import counters
from torch._inductor import config
from torch._inductor.select_algorithm import AlgorithmSelectorCache
from triton_gemm import inductor
from triton_gemm.functional import matrices

def products(x, weight, bias, y, z, input):
    return (
        torch.nn.functional.linear(x, weight, bias),
        torch.addmm(x @ weight.mT, x, weight.mT, alpha=0.5, beta=-1),
        torch.bmm(y, z),
        torch.baddbmm(input, y, z, alpha=2),
    )

def run(rows=24, **how):
    torch._dynamo.reset()
    timed.clear(), computed.clear()
    made = torch.compile(products, mode="max-autotune-no-cudagraphs", **how)
    for m in range(rows, rows + 1 + how.get("dynamic", False)):
        shapes = ((m, 40), (16, 40), (16,), (3, 24, 16), (3, 16, 20), (3, 24, 20))
        operands = [torch.randn(shape) for shape in shapes]
        for found, right in zip(made(*operands), products(*operands), strict=True):
            torch.testing.assert_close(found, right)

def benchmark(cls, choice, arguments):
    timed.append(choice.name)
    return 1.0 if choice.name in OURS else 2.0  # ours win, whatever the interpreter takes

THEIRS = {"mm", "addmm", "bmm", "baddbmm"}
OURS = {f"triton_gemm_{name}" for name in THEIRS}
timed, computed = [], []
AlgorithmSelectorCache.benchmark_choice = classmethod(benchmark)
compute_into = matrices.compute_into
matrices.compute_into = lambda *arguments: computed.append(1) or compute_into(*arguments)
config.max_autotune_gemm_backends = "ATEN"
inductor.register()
run(dynamic=False)
"""
FIRST = """
assert set(timed) == OURS | THEIRS, timed
assert len(computed) == 5, "the winners are called"
run(dynamic=True)
assert set(timed) >= {"triton_gemm_addmm", "triton_gemm_mm"}, timed
computed.clear()
made = torch.compile(lambda a, b: a + b @ a, mode="default")
made(torch.ones(8, 8), torch.ones(8, 8))
assert not computed, "offered where nothing is tuned"
inductor.unregister()
run(dynamic=False)
assert not computed, "a graph that calls these kernels was found"
assert not timed, "torch alone is no choice"
"""
SECOND = """
assert counters["inductor"]["fxgraph_cache_hit"] == 1, counters
assert "fxgraph_cache_miss" not in counters["inductor"], counters
assert (timed, len(computed)) == ([], 5), (timed, computed)
"""


@pytest.mark.full
@pytest.mark.slow
def test_what_is_chosen_is_right_and_another_process_finds_it(tmp_path: Path) -> None:
    for checks in (FIRST, SECOND):
        file = tmp_path / "program.py"
        file.write_text(PROGRAM + checks)
        done = python(file, TORCHINDUCTOR_CACHE_DIR=str(tmp_path))
        assert done.returncode == 0, done.stderr[-3000:]


def node(dtype: torch.dtype = torch.bfloat16, device: str = inductor.DEVICE) -> Any:
    return SimpleNamespace(get_dtype=lambda: dtype, get_device=lambda: torch.device(device))


def layout(dtype: torch.dtype = torch.bfloat16, device: str = inductor.DEVICE) -> Any:
    return SimpleNamespace(dtype=dtype, device=torch.device(device))


def test_what_cannot_be_computed_is_not_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    takes = inductor._takes
    pair = [node(), node()]
    assert takes(pair, layout(), {})
    assert takes([node(), *pair], layout(), {"alpha": 1, "beta": 0.5})
    assert not takes(pair, layout(), {"alpha": 1j})
    assert not takes(pair, layout(torch.float32), {})
    assert not takes([node(), node(torch.float32)], layout(), {})
    assert not takes([node(), node(device="meta")], layout(), {})
    for dtype in (torch.int8, torch.int64, torch.complex64, torch.float8_e4m3fn):
        assert takes([node(dtype)] * 2, layout(dtype), {}) is (dtype in inductor.FLOATING)
    monkeypatch.setattr(inductor, "device_info", lambda _: SimpleNamespace(capability=(7, 5)))
    assert not takes(pair, layout(), {})
    monkeypatch.undo()
    monkeypatch.setattr(inductor, "DEVICE", "cuda")
    assert not takes(pair, layout(), {}), "a tensor of the CPU"


def test_where_it_is_offered(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor import config
    from torch._inductor.choices import InductorChoices
    from torch._inductor.select_algorithm import ExternKernelCaller, ExternKernelChoice
    from torch._inductor.virtualized import V

    def torchs(name: str) -> Any:
        caller = object.__new__(ExternKernelCaller)
        caller.choice, caller.input_nodes, caller.kwargs = SimpleNamespace(name=name), [node(), node()], {"alpha": 2}
        caller.layout = layout()
        return caller

    callers = [torchs("addmm"), torchs("bias_addmm"), torchs("mm_dtype"), object(), torchs("mm")]
    monkeypatch.setattr(InductorChoices, "get_template_configs", lambda *_, **__: callers)
    monkeypatch.setattr(ExternKernelChoice, "bind", lambda self, input_nodes, layout, **kwargs: (self.name, kwargs))
    inductor.register()

    def offered(cpp_wrapper: bool = False, **settings: bool) -> list[Any]:
        graph: Any = SimpleNamespace(cpp_wrapper=cpp_wrapper)
        with config.patch({"max_autotune": False, "max_autotune_gemm": False, **settings}), V.set_graph_handler(graph):
            found = InductorChoices().get_template_configs(None, [], "mm")
        assert found[: len(callers)] == callers
        return found[len(callers) :]

    ours = [("triton_gemm_addmm", {"alpha": 2}), ("triton_gemm_mm", {"alpha": 2})]
    assert offered(max_autotune=True) == offered(max_autotune_gemm=True) == ours
    assert offered() == [], "nothing is timed"
    assert offered(cpp_wrapper=True, max_autotune=True) == [], "C++ cannot call it"
    with torch.compiler.config.patch(cache_key_tag="another"):
        assert offered(max_autotune=True) == [], "graphs would be cached as those without"
    monkeypatch.setattr(inductor, "FLOATING", ())
    assert offered(max_autotune=True) == []
    inductor.unregister()


def test_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    a, b, bias, input = draw(24, 40), draw(40, 16), draw(16), draw(24, 16)
    for added in (bias, bias.expand(24, 16), input, input[:, :1], input[:1]):
        for alpha, beta in ((1, 1), (0.5, -2), (1, 0)):
            out = torch.full((24, 16), torch.nan)
            assert inductor._sum(added, a, b, out=out, alpha=alpha, beta=beta) is out
            torch.testing.assert_close(out, torch.addmm(added, a, b, alpha=alpha, beta=beta))
    with monkeypatch.context() as patch:
        added = []
        patch.setattr(matrices, "compute_into", lambda out, x, request: added.append(x.input.shape))
        inductor._sum(bias.expand(24, 16), a, b, out=out)
        assert added == [(16,)], "a bias is not copied into the result first"
    out = torch.empty(24, 16)
    inductor._sum(torch.full((16,), torch.nan), a, b, out=out, beta=0)
    torch.testing.assert_close(out, a @ b)


def test_to_register_twice_is_once_and_is_undone_at_once() -> None:
    from torch._inductor.choices import InductorChoices

    before = InductorChoices.get_template_configs
    with torch.compiler.config.patch(cache_key_tag="mine"):
        for _ in range(2):
            inductor.register()
            assert torch.compiler.config.cache_key_tag == f"mine{inductor.TAG}"
            assert InductorChoices.get_template_configs.__wrapped__ is before
        for _ in range(2):
            inductor.unregister()
            assert torch.compiler.config.cache_key_tag == "mine"
            assert InductorChoices.get_template_configs is before


def test_another_inductor_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch._inductor.choices import InductorChoices

    monkeypatch.delattr(InductorChoices, "get_template_configs")
    with pytest.raises(RuntimeError, match=r"Inductor of torch .* is not as expected: .*get_template_configs"):
        inductor.register()
    assert torch.compiler.config.cache_key_tag == ""
