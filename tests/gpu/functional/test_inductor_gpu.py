"""The products as candidates of Inductor's autotuning on a GPU: timed, right, and in CUDA graphs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch._inductor.config

from tests.gpu.calls import launches_ours
from tests.support.product_views import draw
from triton_gemm import inductor

pytestmark = pytest.mark.slow

MODE = "max-autotune-no-cudagraphs"
THEIRS = set(inductor.KERNELS)
OURS = {f"triton_gemm_{name}" for name in THEIRS}

CALLS: dict[str, tuple[Callable[..., torch.Tensor], tuple[tuple[int, ...], ...]]] = {
    "mm": (torch.mm, ((256, 512), (512, 384))),
    "mm of a weight": (lambda a, w: a @ w.mT, ((24, 512), (384, 512))),
    "linear": (torch.nn.functional.linear, ((256, 512), (384, 512), (384,))),
    "addmm": (lambda c, a, b: torch.addmm(c, a, b, alpha=0.5, beta=2), ((256, 384), (256, 512), (512, 384))),
    "bmm": (torch.bmm, ((3, 256, 512), (3, 512, 384))),
    "baddbmm": (lambda c, a, b: torch.baddbmm(c, a, b, alpha=2), ((3, 256, 384), (3, 256, 512), (3, 512, 384))),
}


@pytest.fixture(autouse=True)
def registered(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TORCHINDUCTOR_CACHE_DIR", str(tmp_path))  # nothing is timed that was timed before
    torch._dynamo.reset()
    inductor.register()
    yield
    inductor.unregister()
    torch._dynamo.reset()


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> dict[str, float]:
    """The candidates that are timed, by name, with their milliseconds."""
    return watch(monkeypatch, lambda name, ms: ms)


@pytest.fixture
def winning(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, float]]:
    """As `timed`, but ours win, and Inductor's templates are not compiled."""
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):
        yield watch(monkeypatch, lambda name, ms: ms if name not in OURS else 1e-6)


def watch(monkeypatch: pytest.MonkeyPatch, reported: Callable[[str, float], float]) -> dict[str, float]:
    from torch._inductor.select_algorithm import AlgorithmSelectorCache

    measured = AlgorithmSelectorCache.benchmark_choice.__func__  # type: ignore[attr-defined]
    found: dict[str, float] = {}

    def benchmark(cls: type, choice: Any, arguments: Any) -> float:
        found[choice.name] = measured(cls, choice, arguments)
        return reported(choice.name, found[choice.name])

    monkeypatch.setattr(AlgorithmSelectorCache, "benchmark_choice", classmethod(benchmark))
    return found


def operands(call: str, dtype: torch.dtype) -> list[torch.Tensor]:
    return [draw(*shape, dtype=dtype, seed=i).cuda() for i, shape in enumerate(CALLS[call][1])]


def assert_like(found: torch.Tensor, expected: torch.Tensor) -> None:
    bound = 2e-5 if found.dtype == torch.float32 else 2e-2
    assert ((found - expected).double().norm() / expected.double().norm()) < bound


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("call", CALLS)
def test_what_is_chosen_is_ours_and_right(call: str, dtype: torch.dtype, winning: dict[str, float]) -> None:
    function, arguments = CALLS[call][0], operands(call, dtype)
    compiled = torch.compile(function, mode=MODE, dynamic=False)
    assert_like(compiled(*arguments), function(*arguments))
    assert OURS & set(winning) and THEIRS & set(winning), winning
    assert launches_ours(lambda: compiled(*arguments))


def test_it_is_timed_with_the_templates_and_whatever_wins_is_right(timed: dict[str, float]) -> None:
    a, w, bias = (draw(*s, dtype=torch.bfloat16, seed=i).cuda() for i, s in enumerate(((4096, 4096),) * 2 + ((4096,),)))
    linear = torch.nn.functional.linear
    assert_like(torch.compile(linear, mode=MODE, dynamic=False)(a, w, bias), linear(a, w, bias))
    assert 0 < timed["triton_gemm_addmm"] < 10 * timed["addmm"], timed
    assert len(timed) > 3, f"no template was timed: {timed}"


def test_for_any_number_of_rows(winning: dict[str, float]) -> None:
    w, bias = (draw(*shape, dtype=torch.bfloat16, seed=3).cuda() for shape in ((384, 512), (384,)))
    compiled = torch.compile(lambda x: torch.nn.functional.linear(x, w, bias), mode=MODE, dynamic=True)
    for rows in (256, 3, 1000):
        x = draw(rows, 512, dtype=torch.bfloat16).cuda()
        assert_like(compiled(x), torch.nn.functional.linear(x, w, bias))
    assert launches_ours(lambda: compiled(x))


def test_in_a_cuda_graph_and_in_training(winning: dict[str, float]) -> None:
    layer = torch.nn.Linear(512, 384, device="cuda", dtype=torch.bfloat16)
    compiled = torch.compile(layer, mode="max-autotune", dynamic=False)
    x = draw(256, 512, dtype=torch.bfloat16).cuda()
    for _ in range(4):  # warms up, captures, replays
        with torch.no_grad():
            assert_like(compiled(x).clone(), layer(x))
    with torch.no_grad():
        assert launches_ours(lambda: compiled(x))
    expected = torch.autograd.grad(layer(x).square().sum(), layer.parameters())
    for _ in range(3):
        torch.compiler.cudagraph_mark_step_begin()
        found = torch.autograd.grad(compiled(x).square().sum(), layer.parameters())
        for one, other in zip(found, expected, strict=True):
            assert_like(one, other)


def test_tensors_of_the_cpu_and_integers_stay_torchs(timed: dict[str, float]) -> None:
    a, b = draw(64, 96), draw(96, 32)
    with torch._inductor.config.patch(max_autotune_gemm_backends="ATEN"):  # not its templates in C++
        torch.testing.assert_close(torch.compile(torch.mm, mode=MODE)(a, b), a @ b)
    a, b = (torch.randint(-9, 9, shape, device="cuda", dtype=torch.int8) for shape in ((64, 96), (96, 32)))
    assert torch.equal(torch.compile(torch._int_mm, mode=MODE)(a, b), torch._int_mm(a, b))
    assert not OURS & set(timed), timed
