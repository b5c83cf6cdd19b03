"""What every kernel offers, and what keeps device code readable: short files, and short lists of parameters."""

import ast
from pathlib import Path

import pytest

import triton_gemm.kernels

KERNELS = Path(triton_gemm.kernels.__file__ or "").parent
MOST_LINES = 400
MOST_PARAMETERS = 12  # of a function that other device code calls; a kernel has one for each argument of its launch


@pytest.mark.parametrize("name", triton_gemm.kernels.KERNELS)
def test_a_kernel_offers_what_the_protocol_says(name: str) -> None:
    kernel, protocol = triton_gemm.kernels.named(name), triton_gemm.kernels.Kernel
    offered = [*protocol.__annotations__, *(member for member in vars(protocol) if not member.startswith("_"))]
    assert {"Config", "Costs", "candidates", "illegal", "launches", "microseconds", "order_of_sums"} <= set(offered)
    assert [member for member in offered if not hasattr(kernel, member)] == []
    assert name in triton_gemm.kernels.__all__


def test_no_file_of_a_kernel_in_parts_is_long() -> None:
    files = [path for package in ("warp_specialised", "portable") for path in (KERNELS / package).glob("*.py")]
    assert [path.name for path in files if len(path.read_text().splitlines()) > MOST_LINES] == []


def jit_functions(source: str) -> dict[str, int]:
    """The number of parameters of each function that `jit` decorates."""
    return {
        node.name: len([*node.args.posonlyargs, *node.args.args, *node.args.kwonlyargs])
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.FunctionDef)
        and any("jit" in ast.unparse(decorator).split("(")[0].split(".") for decorator in node.decorator_list)
    }


def test_no_device_function_below_a_kernel_has_many_parameters() -> None:
    found = [(name, n) for path in KERNELS.rglob("*.py") for name, n in jit_functions(path.read_text()).items()]
    assert [one for one in found if one[1] > MOST_PARAMETERS and not one[0].endswith("_kernel")] == []
    source = "@gluon.jit(do_not_specialize=[])\ndef k(a, b, *, C): ...\n@triton.jit\ndef f(x): ...\ndef g(y): ..."
    assert jit_functions(source) == {"k": 3, "f": 1}
