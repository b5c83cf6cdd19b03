"""Gluon kernels on the CPU: their source run as it stands, with torch in the place of the GPU.

Gluon has no interpreter. Here each partition of each program is a thread, of which one runs at a time, until it waits.
What is asynchronous on a GPU happens as late as it may: a TMA load when its barrier is waited for, until when the tile
holds NaN; a `wgmma` and a TMA store when their end is waited for; a copy by `cp.async` at the barrier of a program's
threads after its end was waited for; an arrival from another CTA of a cluster when the barrier is waited for. So a wait
that is missing, a slot filled too early and a buffer used again too early give wrong results; accesses outside of
operands, accesses to the shared memory of a program that has ended or not begun, and programs that wait for one another
for ever raise. How threads hold a tensor is not modelled: layouts are the compiler's affair. What clusters do in PTX is
interpreted, instruction by instruction.
"""

from __future__ import annotations

import ast
import builtins
import importlib.util
import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
import triton

import triton_gemm.kernels
from tests.support import gluon_memory as memory
from tests.support.gluon_ptx import inline_asm, inline_asm_elementwise
from tests.support.gluon_threads import Machine, Memory, Program, Tensor, atomic_add, here, load, prefetch, store, whole
from triton_gemm.compat import tensor_map_parameter
from triton_gemm.kernels.launch import Launch, Scalar, TensorMap
from triton_gemm.kernels.launch import Pointer as Address

KERNELS = Path(triton_gemm.kernels.__file__ or "").parent
# Modules and packages of triton_gemm.kernels that run here.
SIMULATED = ("epilogue", "fma", "groups", "portable", "programmatic", "reduction", "schedule", "skinny", "splitk")
SIMULATED += ("mma_fp64", "tiles", "warp_specialised")


def counted(*bounds: Any) -> Iterator[Tensor]:
    """`range`, whose numbers are as good as other tensors."""
    return map(Tensor, range(*(int(bound) for bound in bounds)))


def decorator(function: Any = None, **options: Any) -> Any:
    return function if function is not None else lambda function: function


def nothing(*arguments: Any, **options: Any) -> None:
    return None


def language() -> SimpleNamespace:
    types = {
        name: getattr(torch, name) for name in ("float64", "float32", "float16", "bfloat16", "int8", "int32", "int64")
    }
    layouts = ("NVMMADistributedLayout", "SliceLayout", "BlockedLayout", "DotOperandLayout")
    layouts += ("DistributedLinearLayout", "SwizzledSharedLayout")
    return SimpleNamespace(
        **types,
        **dict.fromkeys(layouts, nothing),
        constexpr=lambda value: value,
        program_id=lambda axis: Tensor(here.program.id[axis]),
        num_programs=lambda axis: Tensor(here.program.grid[axis]),
        num_warps=lambda: here.program.warps,
        arange=lambda start, end, layout=None: Tensor(torch.arange(start, end, dtype=torch.int32)),
        zeros=lambda shape, dtype, layout=None: Tensor(torch.zeros(shape, dtype=dtype)),
        where=lambda condition, x, y: Tensor(torch.where(*(whole(value) for value in (condition, x, y)))),
        minimum=lambda x, y: Tensor(torch.minimum(*torch.broadcast_tensors(whole(x), whole(y)))),
        maximum=lambda x, y: Tensor(torch.maximum(*torch.broadcast_tensors(whole(x), whole(y)))),
        cdiv=lambda x, y: (x + (y - 1)) // y,
        to_tensor=lambda x: Tensor(whole(x)),
        abs=lambda x: Tensor(x.data.abs()),
        exp=lambda x: Tensor(x.data.exp()),
        erf=lambda x: Tensor(x.data.erf()),
        sum=lambda x, axis: Tensor(x.data.sum(axis)),
        convert_layout=lambda x, layout, assert_trivial=False: x,
        join=lambda x, y: Tensor(torch.stack((x.data, y.data), -1)),
        **named(load, store, atomic_add, inline_asm, inline_asm_elementwise),
        **named(memory.debug_barrier, memory.allocate_shared_memory, memory.warp_specialize),
        static_assert=nothing,
        static_range=range,
    )


def named(*functions: Callable[..., Any]) -> dict[str, Callable[..., Any]]:
    """The functions by their names."""
    return {function.__name__: function for function in functions}


def hopper() -> SimpleNamespace:
    barriers = named(memory.init, memory.arrive, memory.expect, memory.wait)
    return SimpleNamespace(
        fence_async_shared=nothing,
        mbarrier=SimpleNamespace(**barriers, MBarrierLayout=nothing),
        tma=SimpleNamespace(**named(memory.store_wait)),
        **named(memory.warpgroup_mma, memory.warpgroup_mma_wait),
    )


LANGUAGE = language()
TRITON = SimpleNamespace(
    jit=decorator,
    constexpr_function=decorator,
    language=LANGUAGE,
    cdiv=triton.cdiv,
    next_power_of_2=triton.next_power_of_2,
)
MODULES: dict[str, Any] = {
    "triton": TRITON,
    "triton.language": TRITON,  # as `import a.b` means it
    "triton.experimental": SimpleNamespace(gluon=SimpleNamespace(jit=decorator)),
    "triton.experimental.gluon": SimpleNamespace(language=LANGUAGE),
    "triton.experimental.gluon.language.nvidia.ampere": SimpleNamespace(
        async_copy=SimpleNamespace(**named(memory.mbarrier_arrive)), mma_v2=memory.mma_v2
    ),
    "triton.experimental.gluon.language.nvidia.hopper": hopper(),
    "triton.experimental.gluon.language.nvidia.ampere.async_copy": SimpleNamespace(
        **named(memory.commit_group, memory.wait_group)
    ),
    "triton.language.extra.cuda.gdc": SimpleNamespace(gdc_launch_dependents=nothing, gdc_wait=nothing),
    "triton_gemm.compat": SimpleNamespace(
        **named(memory.async_load, memory.reinterpret, memory.tma_load, memory.tma_store),
        **named(prefetch, tensor_map_parameter),
        dot_operand=lambda x: x,
        round_to=lambda x, dtype: x.to(dtype),
        number=lambda x, dtype: x,
        multiply_add=lambda x, y, z: x * y + z,
        reciprocal=lambda x: Tensor(1.0 / x.data),
        power_of_two=lambda x: Tensor(torch.exp2(x.data)),
        aggregate=dataclass(frozen=True),
    ),
    "triton_gemm.kernels.forms": SimpleNamespace(clusters=lambda: True),
}


class Numbers(ast.NodeTransformer):
    """A kernel's variables that begin as a whole number, or count, are tensors, as in Triton."""

    def visit_Module(self, node: ast.Module) -> ast.AST:
        for function in node.body:
            decorators = getattr(function, "decorator_list", [])
            if isinstance(function, ast.FunctionDef) and any("jit" in ast.unparse(one) for one in decorators):
                self.generic_visit(function)
        return node

    def visit_Assign(self, node: ast.Assign) -> ast.AST:
        if isinstance(node.value, ast.Constant) and type(node.value.value) is int:
            node.value = ast.Call(ast.Name("Number", ast.Load()), [node.value], [])
        return node

    def visit_Name(self, node: ast.Name) -> ast.AST:
        return ast.Name("Counted", node.ctx) if node.id == "range" else node


def sources() -> dict[str, str]:
    """The source of every simulated module by its name in triton_gemm.kernels, those of packages included."""
    found = {}
    for name in SIMULATED:
        package = KERNELS / name
        files = package.glob("*.py") if package.is_dir() else [KERNELS / f"{name}.py"]
        for file in files:
            module = ".".join(file.relative_to(KERNELS).with_suffix("").parts).removesuffix(".__init__")
            found[module] = file.read_text()
    return found


def simulated(name: str, changes: Sequence[tuple[str, str]] = ()) -> SimpleNamespace:
    """A module of triton_gemm.kernels whose kernels run here, with pieces of the source replaced that it or what it
    imports has."""
    texts = sources()
    for old, new in changes:
        assert any(old in source for source in texts.values()), f"no kernel has {old!r}"
        texts = {module: source.replace(old, new) for module, source in texts.items()}
    return module(name, texts, {})


def module(name: str, sources: Mapping[str, str], loaded: dict[str, SimpleNamespace]) -> SimpleNamespace:
    """The module of that name in `sources`, as if of triton_gemm.kernels; `loaded` holds those imported already."""
    is_package = any(one.startswith(f"{name}.") for one in sources)
    full_name = f"triton_gemm.kernels.{name}"
    package = full_name if is_package else full_name.rpartition(".")[0]

    def imported(wanted: str, globals_: Any = None, locals_: Any = None, names: Any = (), level: int = 0) -> Any:
        absolute = importlib.util.resolve_name("." * level + wanted, package) if level else wanted
        inner = absolute.removeprefix("triton_gemm.kernels.")
        if inner in sources:
            if inner not in loaded:
                loaded[inner] = module(inner, sources, loaded)
            return loaded[inner]
        return MODULES.get(absolute) or builtins.__import__(wanted, globals_, locals_, names, level)

    namespace = {
        "__name__": full_name,  # where dataclasses look for what they are made of
        "__package__": package,
        "__builtins__": {**vars(builtins), "__import__": imported, "Counted": counted, "Number": Tensor},
    }
    path = KERNELS.joinpath(*name.split("."), "__init__") if is_package else KERNELS.joinpath(*name.split("."))
    tree = ast.fix_missing_locations(Numbers().visit(ast.parse(sources[name])))
    exec(compile(tree, f"{path}.py", "exec", dont_inherit=True), namespace)
    return SimpleNamespace(**{key: value for key, value in namespace.items() if not key.startswith("__")})


def extent(x: torch.Tensor) -> int:
    """Elements from x's first to its last; up to whole 16 bytes, as vectors are read, where its memory has them."""
    last = sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    vector = 16 // x.itemsize
    return min((last + vector) // vector * vector, x.untyped_storage().nbytes() // x.itemsize - x.storage_offset())


def run(launch: Launch, operands: Mapping[str, torch.Tensor], scalars: Mapping[str, float]) -> None:
    """One launch of a simulated module's kernel; raises what a thread raised, DeadlockError among it.

    operands: by name, the workspace and counters that the launch asks for included.
    """
    kinds = launch.kernel.__annotations__

    def argument(name: str, value: Any) -> Any:
        if isinstance(value, Address):
            x = operands[value.operand]
            return Memory(torch.as_strided(x, (extent(x),), (1,), x.storage_offset()))
        if isinstance(value, TensorMap):
            return memory.Descriptor(value, operands[value.operand])
        if isinstance(value, Scalar):
            return Tensor(torch.tensor(scalars[value.name], dtype=torch.float32))
        if value is None or "constexpr" in kinds.get(name, ""):
            return value
        return Tensor(torch.tensor(value)) if "int64" in kinds.get(name, "") else Tensor(value)

    arguments = [argument(name, value) for name, value in launch.arguments.items()]
    maps = [argument for argument in arguments if isinstance(argument, memory.Descriptor)]  # the first parameters
    named = {tensor_map_parameter(launch.kernel.__name__, i, len(one.block_shape)): one for i, one in enumerate(maps)}
    machine, ids = Machine(), itertools.product(*(range(size) for size in reversed(launch.grid)))
    warps = launch.options["num_warps"]
    programs: list[Program] = []
    for numbers in ids:  # of which the last counts fastest, a program's first
        cluster = programs[-1].cluster if len(programs) % launch.cluster else []
        programs.append(Program(numbers[::-1], launch.grid, warps, named, cluster))
        cluster.append(programs[-1])

    def whole_program(program: Program) -> Callable[[], None]:
        def run() -> None:
            launch.kernel(*arguments)
            program.end()

        return run

    with machine.turn:
        threads = [machine.start(whole_program(program), program, warps) for program in programs]
    for thread in threads:
        thread.join()
    if machine.error is not None:
        raise machine.error
