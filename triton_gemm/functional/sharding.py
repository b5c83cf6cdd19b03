"""How torch.ops.triton_gemm.gemm is sharded: the rule by which DTensors are multiplied where their shards lie.

torch.distributed.tensor is imported only by who uses it, so the rule is registered by the operator's first call after
that (`register`). All communication is DTensor's.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from ..compat import share_sharding_decisions

if TYPE_CHECKING:
    from torch.distributed.tensor.placement_types import Placement

ACTIVATION = 5  # its place among the operator's arguments

_registered: object = None  # the operator; where its module is loaded again, there is another


def register() -> None:
    """Registers the rule with DTensor, once; nothing before torch.distributed.tensor is imported."""
    global _registered
    gemm = torch.ops.triton_gemm.gemm.default
    if _registered is gemm or "torch.distributed.tensor" not in sys.modules:
        return
    from torch.distributed.tensor.experimental import register_sharding

    register_sharding(gemm)(_rule)
    share_sharding_decisions(gemm, ACTIVATION)  # one taken without an activation must not serve a call with one
    _registered = gemm


def is_sharded(*tensors: torch.Tensor | None) -> bool:
    """Whether one is a DTensor."""
    module = sys.modules.get("torch.distributed.tensor")
    return module is not None and any(isinstance(x, module.DTensor) for x in tensors)


def can_join(x: torch.Tensor, dims: Sequence[int]) -> bool:
    """Whether these dimensions of x can become one where its shards lie: it is no DTensor, or one that is sharded along
    none of them but evenly along the first."""
    module = sys.modules.get("torch.distributed.tensor")
    if module is None or not isinstance(x, module.DTensor):
        return True
    first, *others = dims
    shards = 1
    for size, placement in zip(x.device_mesh.shape, x.placements, strict=True):
        if any(placement.is_shard(dim) for dim in others):
            return False
        if placement.is_shard(first):
            shards *= size
    return x.shape[first] % shards == 0


def _rule(
    a: Any,
    b: Any,
    input: Any = None,
    alpha: float = 1.0,
    beta: float = 1.0,
    activation: str | None = None,
    out_dtype: torch.dtype | None = None,
    precision: str | None = None,
    batch_invariant: bool | None = None,
    *_: None,
) -> list[tuple[list[Placement], list[Placement | None]]]:
    """`acceptable` of the operator's arguments as DTensor describes them, with a place for each. A gate and a residual
    have no rule (`ops`)."""
    shapes = acceptable(a.shape, b.shape, None if input is None else input.shape, activation)
    return [([output], [*inputs, *(None,) * 9]) for output, inputs in shapes]


def acceptable(
    a: Sequence[int], b: Sequence[int], input: Sequence[int] | None = None, activation: str | None = None
) -> list[tuple[Placement, list[Placement | None]]]:
    """How the product of these shapes may lie along one dimension of a mesh, and a, b and input for it.

    Replicated; sharded along a dimension of the batch, M or N, each operand along its own dimension of that, or
    replicated where it is broadcast; or sharded along K. Then it is a sum of partial ones, `input` too, which an
    activation does not allow.
    """
    from torch.distributed.tensor import Partial, Replicate, Shard

    batch = torch.broadcast_shapes(a[:-2], b[:-2])
    shape = (*batch, a[-2], b[-1])
    # What of each operand goes along the result's dimensions: a has no N, b no M.
    along = ((*a[:-1], None), (*b[:-2], None, b[-1]), input)

    def sharded(operand: Sequence[int | None] | None, dim: int) -> Placement | None:
        if operand is None:
            return None
        own = dim - len(shape) + len(operand)
        return Shard(own) if own >= 0 and operand[own] == shape[dim] else Replicate()

    added: Placement | None = None if input is None else Replicate()
    found: list[tuple[Placement, list[Placement | None]]] = [(Replicate(), [Replicate(), Replicate(), added])]
    for dim in range(len(shape)):
        found.append((Shard(dim), [sharded(operand, dim) for operand in along]))
    if activation is None:
        summand = None if input is None else Partial()
        found.append((Partial(), [Shard(len(a) - 1), Shard(len(b) - 2), summand]))
    return found
