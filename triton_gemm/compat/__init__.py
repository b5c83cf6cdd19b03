"""Everything private of torch and Triton that this package touches, and what differs between their versions.

torch 2.11 to 2.15 and Triton 3.6 to 3.9. No other package names what is private. `test_compat.py` tries each use by
itself, so that a version which breaks one is told apart from all else that then fails. Other packages import from here,
not from the modules:

- `language`: whether Triton's interpreter runs kernels, and device functions that know it
- `interpreter`: what kernels touch in Triton's interpreter
- `gluon`: names of Gluon
- `compiler`: compiles kernels for any GPU, here or not
- `building`: what Triton builds with a C compiler, without a GPU's driver
- `launching`: compiled kernels as machine code, and hooks on kernel loads and launches
- `native`: builds and loads the extension that launches calls like one before
- `tuner`: that of `triton.autotune`
- `devices`: torch's devices and streams
- `autograd`: torch's autograd
- `dispatcher`: torch's dispatcher, and DTensor's
- `products`: torch's products of 8-bit matrices
- `torch_compile`: Dynamo and Inductor
- `locks`: those that a forked child finds free
"""

# First, since it says what is missing where Triton cannot be imported.
from .language import (
    INTERPRETED,
    decorating,
    dot_operand,
    interpreting,
    multiplies_block_scaled,
    multiply_add,
    number,
    power_of_two,
    prefetch,
    reciprocal,
    round_tf32,
    round_to,
)

# isort: split
from .autograd import (
    SingleLevelFunction,
    backward_here,
    context_of_backward,
    dual,
    forward_grad_enabled,
    grad_enabled,
    increment_versions,
    single_level_autograd,
)
from .building import MODULE_NAMES_DRIVER, build_driver_module, c_compiler
from .compiler import (
    Compiling,
    JITFunction,
    cache_folder,
    caching_in,
    compilations,
    compile_kernel,
    compiled_by,
    compiles_anew,
    compiling,
    compiling_for,
    forget_compiled,
    from_cache,
    hash_triton,
    hash_triton_in_background,
    set_triton_hash,
    without_lines,
)
from .devices import (
    current_device,
    current_stream,
    fills_what_is_empty,
    is_profiling,
    memory_segments,
    occupy,
    stream_of_graph_trees,
)
from .dispatcher import (
    before_withdrawal,
    below_autograd,
    differ,
    differentiates_forward,
    in_transform,
    is_wrapper,
    library_of,
    may_differ,
    must_dispatch,
    overlaps_itself,
    override_functions,
    share_sharding_decisions,
    withdraw,
)
from .gluon import (  # type: ignore[attr-defined]
    CLUSTERS,
    aggregate,
    async_load,
    reinterpret,
    tensor_map_parameter,
    tma_load,
    tma_store,
)
from .interpreter import watching
from .launching import MachineCode, launch_hooks, load_hook, loading, machine_code
from .locks import free_in_children
from .native import cxx_compiler, import_native, native_commands, native_key, native_refused, set_up_native
from .products import int_mm, scaled_mm
from .torch_compile import hide_from_dynamo, offer_to_inductor
from .tuner import Autotuner

# The oldest and the newest versions, (major, minor), that the tests are run with.
TESTED = {"torch": ((2, 11), (2, 15)), "Triton": ((3, 6), (3, 9))}

__all__ = [
    "CLUSTERS",
    "INTERPRETED",
    "MODULE_NAMES_DRIVER",
    "TESTED",
    "Autotuner",
    "Compiling",
    "JITFunction",
    "MachineCode",
    "SingleLevelFunction",
    "aggregate",
    "async_load",
    "backward_here",
    "before_withdrawal",
    "below_autograd",
    "build_driver_module",
    "c_compiler",
    "cache_folder",
    "caching_in",
    "compilations",
    "compile_kernel",
    "compiled_by",
    "compiles_anew",
    "compiling",
    "compiling_for",
    "context_of_backward",
    "current_device",
    "current_stream",
    "cxx_compiler",
    "decorating",
    "differ",
    "differentiates_forward",
    "dot_operand",
    "dual",
    "fills_what_is_empty",
    "forget_compiled",
    "forward_grad_enabled",
    "free_in_children",
    "from_cache",
    "grad_enabled",
    "hash_triton",
    "hash_triton_in_background",
    "hide_from_dynamo",
    "import_native",
    "in_transform",
    "increment_versions",
    "int_mm",
    "interpreting",
    "is_profiling",
    "is_wrapper",
    "launch_hooks",
    "library_of",
    "load_hook",
    "loading",
    "machine_code",
    "may_differ",
    "memory_segments",
    "multiplies_block_scaled",
    "multiply_add",
    "must_dispatch",
    "native_commands",
    "native_key",
    "native_refused",
    "number",
    "occupy",
    "offer_to_inductor",
    "overlaps_itself",
    "override_functions",
    "power_of_two",
    "prefetch",
    "reciprocal",
    "reinterpret",
    "round_tf32",
    "round_to",
    "scaled_mm",
    "set_triton_hash",
    "set_up_native",
    "share_sharding_decisions",
    "single_level_autograd",
    "stream_of_graph_trees",
    "tensor_map_parameter",
    "tma_load",
    "tma_store",
    "watching",
    "withdraw",
    "without_lines",
]
