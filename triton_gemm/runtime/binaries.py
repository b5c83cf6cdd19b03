"""What Triton compiles for a selection: its launches, and what tells their binaries apart."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

import torch

from ..compat import MachineCode
from ..hardware.device import DeviceInfo
from ..kernels.launch import Launch, Pointer, TensorMap
from ..problem import GemmProblem
from ..selection.select import Selection, launches

SCALARS = {"alpha": 1.0, "beta": 0.0}  # what the first values of a call are, and what is compiled with
MAX_RECEIVED = 256  # of which each takes about 50 KB
Key = tuple[tuple[int, int], Hashable]  # a compute capability, and an identity

_received: dict[Key, MachineCode] = {}


def launches_on(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> tuple[Launch, ...]:
    """What a plan launches: on Hopper and later programmatically, where the kernel can be."""
    made = launches(problem, selection)
    return tuple(launch.programmatic() for launch in made) if device.capability >= (9, 0) else made


def operands_of(problem: GemmProblem, made: Sequence[Launch]) -> dict[str, torch.Tensor]:
    """What launches of the problem are compiled for: a few elements of each operand, without memory. Of operands only
    dtypes count, and whether addresses are multiples of 16 bytes."""
    outputs = ("c", "preactivation", "ungated")
    dtypes = dict.fromkeys(("a", "b", "gate"), problem.dtype)
    dtypes |= dict.fromkeys((*outputs, "bias", "gate_bias"), problem.out_dtype)
    dtypes |= dict.fromkeys(("a_scale", "b_scale", "workspace"), torch.float32)
    dtypes |= dict.fromkeys(("ends", "counters"), torch.int32)
    dtypes |= {temporary.name: temporary.dtype for launch in made for temporary in launch.temporaries}
    aligned = {"a": problem.a.aligned, "b": problem.b.aligned, "gate": problem.b.aligned}
    aligned |= dict.fromkeys(outputs, problem.c.aligned)

    def operand(name: str, dtype: torch.dtype) -> torch.Tensor:
        few = torch.empty(64, dtype=dtype, device="meta")
        return few if aligned.get(name, True) else few[1:]

    return {name: operand(name, dtype) for name, dtype in dtypes.items()}


def identities(device: DeviceInfo, problem: GemmProblem, selection: Selection) -> tuple[Hashable, ...]:
    """`identity` of all launches of a selection."""
    made = launches_on(device, problem, selection)
    operands = operands_of(problem, made)
    return tuple(identity(launch, operands) for launch in made)


def identity(launch: Launch, operands: Mapping[str, torch.Tensor]) -> Hashable:
    """Equal for launches that Triton compiles to one kernel: what it makes of arguments is their dtype and alignment,
    and of integers that are no compile-time constants their width and whether they are 1 or multiples of 16."""

    def kind(name: str, value: object) -> object:
        if isinstance(value, Pointer):
            return operands[value.operand].dtype, operands[value.operand].data_ptr() % 16 == 0
        if isinstance(value, TensorMap):
            return value.dtype, value.block
        parameter = parameters[name]
        if type(value) is int and not parameter.is_constexpr:
            wide = value.bit_length() > 31
            return wide if parameter.do_not_specialize else (wide, value == 1, value % 16 == 0)
        return str(value)

    parameters = {parameter.name: parameter for parameter in launch.kernel.params}
    arguments = tuple((name, kind(name, value)) for name, value in launch.arguments.items())
    return launch.kernel.__name__, arguments, tuple(launch.options.items())


def receive(made: Mapping[Key, MachineCode]) -> None:
    """Keeps what workers have compiled, so that this process need not look into Triton's cache, of which the first time
    takes a second. The oldest of MAX_RECEIVED are given up."""
    for key, code in made.items():
        _received.pop(key, None)
        _received[key] = code
        for oldest in [*_received][:-MAX_RECEIVED]:
            _received.pop(oldest, None)


def received(launch: Launch, operands: Mapping[str, torch.Tensor], capability: tuple[int, int]) -> MachineCode | None:
    """What a worker has compiled for a launch on a GPU of a compute capability."""
    return _received.get((capability, identity(launch, operands))) if _received else None
