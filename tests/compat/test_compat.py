"""What is private of torch and Triton, use by use: a version that breaks one fails here, by its name."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import triton

from tests.compat import torch_checks, triton_checks
from triton_gemm import compat

ROOM = Path(compat.__file__).parent
PACKAGE = ROOM.parent
VERSIONS = f"torch {torch.__version__} and Triton {triton.__version__}"


def _tested() -> None:
    for name, version in (("torch", torch.__version__), ("Triton", triton.__version__)):
        oldest, newest = compat.TESTED[name]
        assert oldest <= tuple(map(int, version.split(".")[:2])) <= newest


# The names of `compat` that a check tests, where they are not the check's own name.
TESTED_NAMES = {
    "_library_of": "library_of before_withdrawal",
    "_autotuner": "Autotuner",
    "_clusters": "CLUSTERS",
    "_tested": "TESTED",
    "_build_driver_module": "build_driver_module c_compiler MODULE_NAMES_DRIVER",
    "_caches": "cache_folder caching_in",
    "_elsewhere": "compilations compiling_for Compiling compiling forget_compiled",
    "_capture": "JITFunction compile_kernel",
    "_single_level": "SingleLevelFunction single_level_autograd",
    "_devices": "current_device current_stream occupy",
    "_sizes": "differ may_differ",
    "_forward": "differentiates_forward dual forward_grad_enabled",
    "_backward": "context_of_backward backward_here",
    "_hash_triton": "hash_triton hash_triton_in_background",
    "_products": "int_mm scaled_mm",
    "_launching": "loading",
    "_machine_code": "MachineCode machine_code",
    "_extension": "cxx_compiler import_native native_commands native_key native_refused set_up_native",
}
CHECKS = {
    name: check
    for of in (globals(), vars(torch_checks), vars(triton_checks))
    for name, check in of.items()
    if name[0] == "_" and inspect.isfunction(check)
}
USES = {use for name in CHECKS for use in TESTED_NAMES.get(name, name[1:]).split()}
# Public names of Gluon that 3.9 changed, and device functions: every kernel's tests use them.
PUBLIC = {"INTERPRETED", "async_load", "reinterpret", "tma_load", "tma_store", "dot_operand", "multiplies_block_scaled"}
PUBLIC |= {"multiply_add", "number", "power_of_two", "prefetch", "reciprocal", "round_tf32", "round_to"}


@pytest.mark.parametrize("name", CHECKS)
def test_each_use_works(name: str) -> None:
    try:
        CHECKS[name]()
    except Exception as error:
        uses = TESTED_NAMES.get(name, name[1:])
        pytest.fail(f"compat.{uses} does not work with {VERSIONS}: {type(error).__name__}: {error}")


def test_each_use_is_tried() -> None:
    defined = set()
    for node in (node for path in ROOM.glob("*.py") for node in ast.parse(path.read_text()).body):
        if isinstance(node, (ast.FunctionDef, ast.ClassDef)):
            defined.add(node.name)
        elif isinstance(node, (ast.Assign, ast.AnnAssign)):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            defined |= {target.id for target in targets if isinstance(target, ast.Name)}
    assert {name for name in defined if not name.startswith("_")} | {"JITFunction", "aggregate"} == {*USES, *PUBLIC}
    assert set(compat.__all__) == {*USES, *PUBLIC}


def test_no_module_of_the_room_has_the_name_of_what_it_offers() -> None:
    assert {path.stem for path in ROOM.glob("*.py")}.isdisjoint(compat.__all__)


def private(source: str) -> Iterator[str]:
    """The private names of torch and Triton in a module: with an underscore in front, or imported from below Triton's
    compiler, backends and JIT."""
    tree = ast.parse(source)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute):
            dotted = ast.unparse(node)
            if dotted.startswith(("torch.", "triton.", "tl.", "gl.")) and re.match("_[^_]", node.attr):
                yield dotted
        elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith(("torch", "triton")):
            words = [*(node.module or "").split("."), *(alias.name for alias in node.names)]
            internal = (node.module or "").startswith(("triton.backends", "triton.compiler", "triton.runtime"))
            if internal or any(word.startswith("_") for word in words):
                yield f"{node.module}: {', '.join(alias.name for alias in node.names)}"


def test_private_names_are_found() -> None:
    source = "import torch\ntorch._C._x()\nfrom triton.runtime.jit import JITFunction\ntorch.mm(a, torch.__version__)"
    assert sorted(private(source)) == ["torch._C", "torch._C._x", "triton.runtime.jit: JITFunction"]


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_no_other_module_names_what_is_private(path: Path) -> None:
    if path.parent != ROOM:
        assert list(private(path.read_text())) == []
