"""What a program runs is recorded: by every function, routed, in other threads, backwards and compiled."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import triton_gemm
from tests.support.threads import at_once
from triton_gemm.functional import api
from triton_gemm.problem import GemmProblem
from triton_gemm.runtime import plan
from triton_gemm.tuning import read_shapes


def recorded(path: Path, program: Callable[[], object]) -> Counter[tuple[int, int, int, int]]:
    """How often products of each batch, M, N and K ran."""
    with triton_gemm.record_shapes(path):
        program()
    sizes: Counter[tuple[int, int, int, int]] = Counter()
    for problem, calls in read_shapes(path).items():
        sizes[problem.batch, problem.M, problem.N, problem.K] += calls
    return sizes


def random(*shape: int, **how: Any) -> torch.Tensor:
    return torch.randn(shape, **how)


def test_every_launch_counts(tmp_path: Path) -> None:
    a, b, weight, bias = random(8, 16), random(16, 24), random(24, 16), random(24)

    def program() -> None:
        for _ in range(3):
            triton_gemm.matmul(a, b)
        triton_gemm.linear(a, weight, bias, "relu")
        triton_gemm.bmm(random(2, 8, 16), random(2, 16, 4))

    triton_gemm.matmul(a, b)  # planned before, and served by the fast path
    assert api._fast.calls or plan.PLANS
    path = tmp_path / "shapes.json"
    assert recorded(path, program) == {(1, 8, 24, 16): 4, (2, 8, 4, 16): 1}
    found = read_shapes(path)
    assert list(found.values()) == sorted(found.values(), reverse=True)
    (fused,) = (problem for problem in found if problem.activation == "relu")
    assert fused.bias == "n" and fused.b.column_major and isinstance(fused, GemmProblem)
    assert recorded(path, lambda: None) == {}, "the file of before is replaced"


def test_a_block_that_records_nothing_warns(tmp_path: Path) -> None:
    """torch's own products are not recorded, unless they are routed."""
    with pytest.warns(RuntimeWarning, match=r"no GEMM was recorded in .*torch's own under use\(\)") as caught:
        assert recorded(tmp_path / "shapes.json", lambda: torch.mm(random(4, 4), random(4, 4))) == {}
    assert [Path(x.filename).name for x in caught] == ["test_recording.py"]
    with pytest.raises(KeyError), triton_gemm.record_shapes(tmp_path / "shapes.json"):  # the error says enough
        raise KeyError


def test_routed_products_and_backwards_count(tmp_path: Path) -> None:
    layer = torch.nn.Linear(16, 24)

    def program() -> None:
        with triton_gemm.use():
            layer(random(8, 16, requires_grad=True)).sum().backward()

    program()
    sizes = recorded(tmp_path / "shapes.json", program)
    assert sizes == {(1, 8, 24, 16): 1, (1, 8, 16, 24): 1, (1, 24, 16, 8): 1}


def test_threads_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Triton's interpreter runs one kernel at a time, so here they run none."""
    monkeypatch.setattr(plan.InterpretedPlan, "run", lambda *_: None)
    a, b = random(8, 16), random(16, 24)

    def program() -> None:
        at_once(*4 * [lambda: [triton_gemm.matmul(a, b) for _ in range(200)]])

    assert recorded(tmp_path / "shapes.json", program) == {(1, 8, 24, 16): 800}


def test_compiled_functions_count(tmp_path: Path) -> None:
    a, b = random(8, 16), random(16, 24)
    compiled = torch.compile(lambda a, b: triton_gemm.matmul(a, b) + 1, backend="aot_eager", fullgraph=True)
    compiled(a, b)

    def program() -> None:
        compiled(a, b)
        compiled(a, b)

    assert recorded(tmp_path / "shapes.json", program) == {(1, 8, 24, 16): 2}


def test_blocks_may_be_nested_and_cost_nothing_after(tmp_path: Path) -> None:
    a, b = random(8, 16), random(16, 24)
    run = plan.InterpretedPlan.run
    with triton_gemm.record_shapes(tmp_path / "outer.json"):
        triton_gemm.matmul(a, b)
        with triton_gemm.record_shapes(tmp_path / "inner.json"):
            triton_gemm.matmul(a, b)
        triton_gemm.matmul(a, b)
        assert plan.InterpretedPlan.run is not run
    assert plan.InterpretedPlan.run is run, "the method is as it was"
    assert list(read_shapes(tmp_path / "outer.json").values()) == [3]
    assert list(read_shapes(tmp_path / "inner.json").values()) == [1]


def test_what_ran_before_an_exception_is_written(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    with pytest.raises(KeyError), triton_gemm.record_shapes(path):
        triton_gemm.matmul(random(8, 16), random(16, 24))
        raise KeyError
    assert len(read_shapes(path)) == 1
    with pytest.raises(FileNotFoundError, match="no folder"), triton_gemm.record_shapes(tmp_path / "none" / "x.json"):
        pytest.fail("it is said before anything runs")
    assert [file.name for file in tmp_path.iterdir()] == ["shapes.json"]


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"format": 2, "products": []}', '{"format": 1, "products": [{"calls": 1}]}', "[" * 10_000]
)
def test_other_files_are_refused(text: str, tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    path.write_text(text)
    with pytest.raises(ValueError, match="record_shapes"):
        read_shapes(path)


@pytest.mark.parametrize("calls", [0, -3])
def test_no_product_is_called_less_than_once(calls: int, tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    with triton_gemm.record_shapes(path):
        triton_gemm.matmul(random(8, 16), random(16, 24))
    path.write_text(path.read_text().replace('"calls": 1', f'"calls": {calls}'))
    with pytest.raises(ValueError, match=f"a product has {calls} calls"):
        read_shapes(path)


def test_the_file_is_readable(tmp_path: Path) -> None:
    path = tmp_path / "shapes.json"
    recorded(path, lambda: triton_gemm.matmul(random(8, 16), random(16, 24)))
    (line,) = json.loads(path.read_text())["products"]
    assert line["calls"] == 1 and (line["problem"]["M"], line["problem"]["dtype"]) == (8, "float32")
