"""What products of groups are: each group's by itself, in fp64."""

from __future__ import annotations

import torch

import triton_gemm
from tests.support.epilogue_truth import activated
from tests.support.numerics import error_bound, mode_of
from triton_gemm.arithmetic import default_arithmetic

KINDS = ("rows", "columns", "products")


def draw(
    kind: str, total: int, groups: int, rows: int, columns: int, dtype: torch.dtype, device: str = "cpu"
) -> list[torch.Tensor]:
    """Two operands of which a dimension of size `total` is in groups."""
    shapes = {
        "rows": ((total, rows), (groups, rows, columns)),
        "columns": ((groups, columns, rows), (rows, total)),
        "products": ((rows, total), (total, columns)),
    }[kind]
    return [torch.randn(shape, device=device).to(dtype) for shape in shapes]


def matrices_of(a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Each group's matrices, views of a and b."""
    ends = offs.tolist()
    groups = [slice(begin, end) for begin, end in zip([0, *ends], ends, strict=False)]
    return [
        (
            a[i] if a.dim() == 3 else a[group] if b.dim() == 3 else a[:, group],
            b[i] if b.dim() == 3 else b[:, group] if a.dim() == 3 else b[group],
        )
        for i, group in enumerate(groups)
    ]


def listed_tiles(ends: list[int], total: int, side: int, columns: int) -> torch.Tensor:
    """The list that `kernels.groups` writes of groups of `total` rows, tiles of `side` rows and so many across."""
    tiles = [
        (group, row, column, end)
        for group, (begin, end) in enumerate(zip([0, *ends], [*ends, total], strict=True))
        for row in range(begin, end, side)
        for column in range(columns)
    ]
    return torch.tensor([(len(tiles), len(ends), 0, 0), *tiles], dtype=torch.int32)


def gated(
    a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, offs: torch.Tensor, activation: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """Of groups of rows activation(a @ gate) * (a @ b), differentiably, in the operands' dtype and 0 beyond the last
    group; and how large a sum of both products' rounding errors may be, for one of 1."""
    parts, sizes = [], []
    for (x, up), (_, before) in zip(matrices_of(a, b, offs), matrices_of(a, gate, offs), strict=True):
        parts.append(activated(x @ before, activation) * (x @ up))
        sizes.append((x.abs() @ before.abs() + 1) * (x.abs() @ up.abs() + 1))
    found, size = torch.cat(parts), torch.cat(sizes).detach()
    rest = a.new_zeros(len(a) - len(found), b.shape[-1])
    return torch.cat([found, rest]), torch.cat([size, rest])


def assert_gated(
    a: torch.Tensor, b: torch.Tensor, gate: torch.Tensor, offs: torch.Tensor, activation: str, c: torch.Tensor
) -> None:
    """Whether c is `gated` of these operands, rounded once from sums in fp32, or for fp64 in that."""
    truth, size = gated(a.double(), b.double(), gate.double(), offs, activation)
    roundoff = torch.finfo(c.dtype).eps / 2
    of_sums = (a.shape[1] + 16) * 2.0 ** (-52 if a.dtype == torch.float64 else -24)
    wrong = ~((c.double() - truth).abs() <= roundoff * truth.abs() * 1.01 + of_sums * size)
    assert c.shape == truth.shape and not wrong.any(), f"{int(wrong.sum())}, first {wrong.nonzero()[:1].tolist()}"


def assert_right(
    a: torch.Tensor, b: torch.Tensor, offs: torch.Tensor, c: torch.Tensor, precision: str | None = None
) -> None:
    """Whether c is the product of groups that end at offs, as accurate as one product is; and 0 beyond the last."""
    mode = mode_of(precision or default_arithmetic(a.dtype).name, a.dtype)
    made = [
        (x.double() @ y.double(), error_bound(x, y, None, 1.0, 0.0, mode, c.dtype)) for x, y in matrices_of(a, b, offs)
    ]
    if a.dim() == b.dim() == 2:
        truth, bound = (torch.stack(parts) for parts in zip(*made, strict=True))
    else:
        dim = 0 if b.dim() == 3 else 1
        truth, bound = (torch.cat(parts, dim) for parts in zip(*made, strict=True))
        rest = c.narrow(dim, truth.shape[dim], c.shape[dim] - truth.shape[dim])
        assert (rest == 0).all()
        c = c.narrow(dim, 0, truth.shape[dim])
    assert c.shape == truth.shape and ((c.double() - truth).abs() <= bound).all()


def assert_right_as_torchs(kind: str, total: int, rows: int, columns: int, offs: torch.Tensor) -> None:
    """Ours and torch's of groups that end at offs are as accurate, and of one dtype; B lies as torch takes it."""
    a, b = draw(kind, total, len(offs), rows, columns, torch.bfloat16, offs.device.type)
    b = b.mT.contiguous().mT if kind == "rows" else b
    found = [product(a, b, offs=offs) for product in (triton_gemm.grouped_matmul, torch.nn.functional.grouped_mm)]
    assert found[0].dtype == found[1].dtype
    for c in found:
        assert_right(a, b, offs, c)
