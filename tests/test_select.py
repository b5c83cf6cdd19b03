"""What matmul chooses, for GPUs that are not here; and what it says where there is none."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import triton_gemm
from triton_gemm.device import SHARED_MEMORY, device_of_capability
from triton_gemm.ladder import LADDER
from triton_gemm.problem import GemmProblem
from triton_gemm.select import RUNGS, select

SIZES = st.integers(1, 2**17)
PROBLEMS = st.builds(
    lambda M, N, K, kind, aligned, tma: GemmProblem(M, N, K, *kind, aligned, tma),
    SIZES,
    SIZES,
    SIZES,
    st.sampled_from(
        [
            (torch.float32, "ieee"),
            (torch.float32, "tf32"),
            (torch.float16, "half"),
            (torch.bfloat16, "half"),
        ]
    ),
    st.booleans(),
    st.sampled_from([None, "a (3, 5): its rows are 10 bytes apart, not a positive multiple of 16"]),
)


@settings(max_examples=300, deadline=None)
@given(PROBLEMS, st.sampled_from([capability for capability in SHARED_MEMORY if capability >= (8, 0)]))
def test_the_choice_runs_on_the_gpu(problem: GemmProblem, capability: tuple[int, int]) -> None:
    device = device_of_capability(capability)
    choice = select(problem, device)
    rung = RUNGS[choice.kernel]
    assert choice.config in rung.legal_configs(device, problem.dtype, aligned=problem.aligned)
    assert problem.dtype in rung.dtypes and rung.precision == problem.precision
    assert capability in rung.capabilities or (len(rung.capabilities) > 1 and capability > rung.capabilities[0])
    assert problem.tma is None or rung.id not in ("k10", "k11")
    assert choice.reason and select(problem, device) == choice


def test_an_old_gpu_is_told_what_is_needed() -> None:
    problem = GemmProblem(64, 64, 64, torch.float16, "half", True, None)
    with pytest.raises(RuntimeError, match=r"compute capability 8\.0 or newer"):
        select(problem, device_of_capability((7, 5)))


def test_every_rung_can_be_looked_up() -> None:
    assert list(RUNGS) == [rung.id for rung in LADDER]


def test_cpu_tensors_name_the_interpreter() -> None:
    for call in (triton_gemm.matmul, triton_gemm.explain):
        with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
            call(torch.ones(2, 3), torch.ones(3, 4))
