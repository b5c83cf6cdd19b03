"""One multiplication as plain values: GemmProblem is all that the choice of a kernel depends on, Request what a call
says besides its operands. Also what makes operands a problem or not."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple, get_args

import torch

from .arithmetic import ARITHMETICS, IEEE, SHORT_NAMES, Arithmetic, Planes, default_arithmetic

# Gates, for `activation=` of a linear layer with a gate, and what each applies to the gate's product.
Gate = Literal["swiglu", "geglu", "geglu_tanh", "reglu"]
GATES: dict[str, str] = {"swiglu": "silu", "geglu": "gelu", "geglu_tanh": "gelu_tanh", "reglu": "relu"}
# What may be applied to a product, for `activation=`: "gelu" is the one with erf, "gelu_tanh" its approximation.
Activation = Literal["relu", "gelu", "gelu_tanh", "silu"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation)


class UnsupportedOperandError(ValueError):
    """A kernel cannot take these operands as they lie in memory; the text says which and why."""


@dataclass(frozen=True)
class Layout:
    """How a matrix, or a batch of them, lies in memory."""

    strides: tuple[int, int, int]  # of batch, row and column, in elements
    aligned: bool = True  # whether its first element's address is a multiple of 16

    @classmethod
    def of(cls, x: torch.Tensor) -> Layout:
        """The layout of x [rows, columns] or [batch, rows, columns]. A dimension of size 1 is never stepped along, so
        it gets the stride that a contiguous matrix would have."""
        batch, row, column = x.stride() if x.dim() == 3 else (0, *x.stride())
        rows, columns = x.shape[-2:]
        if columns == 1:
            column = 1 if row != 1 or rows == 1 else rows
        if rows == 1:
            row = round_up(columns, 16) if column == 1 else 1
        if x.dim() == 2 or x.shape[0] == 1:
            batch = 0
        return cls((batch, row, column), x.data_ptr() % 16 == 0)

    @property
    def column_major(self) -> bool:
        """Whether the unit stride runs down the columns."""
        return self.strides[2] != 1 and self.strides[1] == 1

    @property
    def transposed(self) -> Layout:
        batch, row, column = self.strides
        return Layout((batch, column, row), self.aligned)

    def tma_illegal(self, itemsize: int) -> str | None:
        """Why TMA cannot read such matrices in place, or None if it can.

        CUDA driver API, cuTensorMapEncodeTiled: a base on 16 bytes, a unit stride, the others positive multiples of
        16 bytes below 2^40.
        """
        batch, row, column = self.strides
        if not self.aligned:
            return "its first element is not aligned to 16 bytes"
        if 1 not in (row, column):
            return f"neither of its strides {(row, column)} is 1"
        pitch = (row if column == 1 else column) * itemsize
        if pitch % 16 or not 0 < pitch < 2**40:
            return f"its rows are {pitch} bytes apart, not a positive multiple of 16"
        if batch * itemsize % 16 or not 0 <= batch * itemsize < 2**40:
            return f"its matrices are {batch * itemsize} bytes apart, not a positive multiple of 16"
        return None


class Request(NamedTuple):
    """What a call says in addition to its operands: C = activation(alpha A B + beta C + bias). It is a named tuple,
    because every call makes one, and those cost less to make than frozen dataclasses."""

    # Factors of the product and of what is added to it. What is added is C itself in a plan, as in BLAS, and beta = 0
    # does not read it. Whole numbers, because compilers take a float that is no constant of the source for a variable.
    alpha: float = 1
    beta: float = 0
    activation: str | None = None  # None or one of ACTIVATIONS
    out_dtype: torch.dtype | None = None  # C's; None: `result_dtype`
    precision: str | None = None  # name of an `Arithmetic`; None: `default_arithmetic`
    bias: str | None = None  # None, or what has a value of its own: each row of C, "m", or each column, "n"
    scales: str | None = None  # as in GemmProblem
    groups: str | None = None  # as in GemmProblem
    # Whether rows have the same bits for any number of rows; None: as the policy says.
    batch_invariant: bool | None = None
    residual: bool = False  # whether beta C is added last, to what the activation gives
    gate: bool = False  # as in GemmProblem
    preactivation: bool = False  # as in GemmProblem

    def problem(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> GemmProblem:
        """What this is of a, b and c. As in BLAS alpha = 0 reads neither a nor b."""
        names = ("activation", "precision", "bias", "scales", "groups", "gate", "preactivation")
        fields = {name: getattr(self, name) for name in names}
        residual = self.residual and self.beta != 0 and self.activation is not None
        problem = GemmProblem.of(a, b, c, has_beta=self.beta != 0, residual=residual, **fields)
        return replace(problem, K=0) if self.alpha == 0 else problem


# Made once, because making one takes a tenth of a call. Most calls say no more.
PRODUCT, SUM = Request(), Request(beta=1)


@dataclass(frozen=True)
class GemmProblem:
    """c = activation(alpha a @ b + beta c + bias), as far as the choice of a kernel depends on it.

    a is [batch, M, K], b [batch, K, N], c [batch, M, N].
    """

    batch: int
    M: int
    N: int
    K: int
    dtype: torch.dtype  # the operands', or their planes' once they are split
    out_dtype: torch.dtype  # C's
    precision: str  # name of an `Arithmetic`
    a: Layout  # how A lies in memory
    b: Layout
    c: Layout
    has_beta: bool = False  # whether C is read
    bias: str | None = None  # None, "m" (one value a row) or "n" (one a column)
    activation: str | None = None  # None or one of ACTIVATIONS
    # None or a `ScaleKind`. "tensor": one for A and one for B. "rows": one for each row of A and column of B. "blocks":
    # one for 1 x 128 of A and 128 x 128 of B.
    scales: str | None = None
    # None, or the dimension that is cut into `batch` groups, whose ends are in the GPU's memory. "m": a is [M, K] and c
    # [M, N], and each group of rows has a matrix of b for its own. "k": a is [M, K] and b [K, N], and each group of
    # products has a matrix of c.
    groups: str | None = None
    # Whether beta C is added to what the activation gives, not before it. Without an activation there is no difference,
    # and it is False.
    residual: bool = False
    # Whether c = activation(a @ gate + gate_bias) * (a @ b + bias). The gate is a second matrix, or one for each group
    # of rows, that lies as b does. Then bias is None or "n".
    gate: bool = False
    # Whether what the activation is applied to is stored as well, as a matrix that lies as c does and is rounded as c
    # is. With a gate both products are. A backward needs it. It changes neither c nor what is chosen.
    preactivation: bool = False

    def __post_init__(self) -> None:
        assert self.activation is not None or not self.preactivation, "without an activation C is what it is applied to"
        if self.K == 0 and self.arithmetic.planes:  # an empty sum is the same in every precision
            object.__setattr__(self, "precision", IEEE.name)

    @classmethod
    def of(
        cls,
        a: torch.Tensor,
        b: torch.Tensor,
        c: torch.Tensor,
        *,
        precision: str | None = None,
        groups: str | None = None,
        **fields: Any,
    ) -> GemmProblem:
        """The problem of multiplying a [(batch,) M, K] and b [(batch,) K, N] into c [(batch,) M, N], by default in the
        operands' `default_arithmetic`. fields: those that operands do not tell."""
        batch = next((x.shape[0] for x in ((b, c) if groups else (c,)) if x.dim() == 3), 1)
        M, K = a.shape[-2:]
        return cls(
            batch=batch,
            M=M,
            N=b.shape[-1],
            K=K,
            dtype=a.dtype,
            out_dtype=c.dtype,
            precision=precision or default_arithmetic(a.dtype).name,
            a=Layout.of(a),
            b=Layout.of(b),
            c=Layout.of(c),
            groups=groups,
            **fields,
        )

    @property
    def added(self) -> int:
        """Kernels' constant HAS_BETA: whether the epilogue adds beta C, and 2 where it does so after the activation."""
        return 2 if self.residual else self.has_beta

    @property
    def auxiliary(self) -> tuple[str, ...]:
        """The operands in addition to A, B and C, by name: those that kernels read, then those that they only write. A
        gate's "preactivation" is a @ gate + gate_bias, and "ungated" is a @ b + bias."""
        names = ("bias",) * (self.bias is not None) + ("a_scale", "b_scale") * (self.scales is not None)
        names += ("gate",) * self.gate + ("gate_bias",) * (self.gate and self.bias is not None)
        names += ("ends",) * (self.groups is not None)
        return names + ("preactivation",) * self.preactivation + ("ungated",) * (self.preactivation and self.gate)

    @property
    def arithmetic(self) -> Arithmetic:
        """How A and B are multiplied: the record that `precision` names."""
        return ARITHMETICS[self.precision]

    @property
    def planes(self) -> Planes:
        """What A and B are sums of; one plane each where they are multiplied as they are."""
        return self.arithmetic.planes or _one_plane(self.dtype)

    def to_choose_for(self) -> GemmProblem:
        """The same without what a choice ignores, so that a product with gradients has the bits of one without."""
        return replace(self, preactivation=False) if self.preactivation else self

    def swap_ab(self) -> GemmProblem:
        """The same product as c^T = b^T a^T."""
        assert self.scales != "blocks", "A's blocks of scales are not B's"
        assert self.groups != "m", "groups of rows are not groups of columns"
        assert not self.gate, "a gate is a second B"
        bias = {None: None, "m": "n", "n": "m"}[self.bias]
        return replace(
            self,
            M=self.N,
            N=self.M,
            a=self.b.transposed,
            b=self.a.transposed,
            c=self.c.transposed,
            bias=bias,
        )

    def tma_illegal(self) -> str | None:
        """Why TMA cannot read A and B in place, or None if it can."""
        for name, layout, shape in (("a", self.a, (self.M, self.K)), ("b", self.b, (self.K, self.N))):
            why = layout.tma_illegal(self.dtype.itemsize)
            if why is not None:
                return f"{name} {shape}: {why}"
        return None


def problem_text(problem: GemmProblem) -> str:
    """A problem for people: 16x14336x4096 bf16 nt, and what else is not usual."""
    batch = f"{problem.batch}x" if problem.batch != 1 else ""
    layout = "".join("t" if x.column_major else "n" for x in (problem.a, problem.b))
    words = [f"{batch}{problem.M}x{problem.N}x{problem.K}", SHORT_NAMES.get(problem.dtype, str(problem.dtype)), layout]
    usual = problem.dtype != torch.float32 and problem.arithmetic is default_arithmetic(problem.dtype)
    words += [problem.precision] * (not usual)
    words += [f"bias {problem.bias}"] * bool(problem.bias) + [problem.activation or ""] * bool(problem.activation)
    words += ["+ residual" if problem.residual else "+ beta C"] * problem.has_beta
    words += [f"scales {problem.scales}"] * bool(problem.scales)
    words += ["gated"] * problem.gate + ["with preactivation"] * problem.preactivation
    words += [f"groups of {problem.groups}"] * bool(problem.groups)
    words += [f"to {str(problem.out_dtype).removeprefix('torch.')}"] * (problem.out_dtype != problem.dtype)
    words += [f"{x} not aligned" for x in "abc" if not getattr(problem, x).aligned]
    return " ".join(words)


@lru_cache(maxsize=64)
def both_products(problem: GemmProblem) -> GemmProblem:
    """Of a problem with a gate one product of both matrices beside each other, which costs as much but for what is
    stored."""
    return replace(problem, N=2 * problem.N, gate=False)


@cache
def _one_plane(dtype: torch.dtype) -> Planes:
    return Planes(dtype, 1, ((0, 0),))


def aligned(*tensors: torch.Tensor) -> bool:
    """Whether Triton sees that every row of the tensors can be moved 16 bytes at a time.

    It looks whether addresses, sizes and strides are multiples of 16 (runtime/jit.py, `specialize_impl`).
    """
    return all(
        x.data_ptr() % 16 == 0
        and all(size % 16 == 0 for size in x.shape)
        and all(s == 1 or s % 16 == 0 for s in x.stride())
        for x in tensors
    )


def tma_illegal(x: torch.Tensor) -> str | None:
    """Why TMA cannot read x [rows, columns] in place, or None if it can: as `Layout.tma_illegal`."""
    row, column = x.stride()
    return Layout((0, row, column), x.data_ptr() % 16 == 0).tma_illegal(x.element_size())


def column_major(x: torch.Tensor) -> bool:
    """Whether x's unit stride runs down the columns."""
    return x.stride(1) != 1


def tma_operands_illegal(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> str | None:
    """Why TMA cannot take a product's operands and its row-major result in place, or None if it can."""
    for name, x in (("a", a), ("b", b), ("c", c)):
        why = tma_illegal(x)
        if why is None and name == "c" and column_major(x):
            why = "it is column-major"
        if why is None and name == "c" and x.shape[1] * x.element_size() % 16:
            why = "its rows end inside 16 bytes, and TMA stores no less (triton#11583)"
        if why is not None:
            return f"{name} {tuple(x.shape)}: {why}"
    return None


def round_up(value: int, multiple: int) -> int:
    """The least multiple that is no less."""
    return -(-value // multiple) * multiple
