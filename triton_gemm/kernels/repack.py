"""Repack: copies matrices of any strides and alignment to where TMA can read them, row- or column-major, and splits
fp32 ones into planes whose sum they are (`arithmetic.py`).

A copy has a pitch of whole 16 bytes; wide rows start on whole 128-byte lines, so that a box of TMA touches no more
lines than it fills. Rows of an odd pitch are read, and written, one element a thread. That is no hindrance. 2 bytes a
thread are 64 bytes a warp, and an SM needs one such load and one store in ten clocks to keep up with memory. With 32
loads of each thread under way, four programs on an SM have 32 KiB in flight, where 20 KiB hide the latency. (Writes of
16 bytes would make the compiler give a thread 8 neighbours to read, one by one: 4 lines a load instead of one.) A
matrix that is turned goes through shared memory in square tiles, read and written along its unit strides.

Predicts: the time of moving every element twice. 4096 x 4095 of bf16 are 67 MB: 22 us at the 3 TB/s that a copy
reaches on an H100, and a launch.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl

from ..arithmetic import HALF, Planes
from ..hardware.device_model import LINE, DeviceModel
from ..problem import GemmProblem, Layout
from .launch import Launch, Pointer, Temporary
from .planes import split
from .programmatic import follow
from .tiles import tile_pointers, vector, whole

WIDE_ROW = 1024  # bytes; padding to whole lines adds at most an eighth to it
MAX_GRID = 2**31 - 1  # programs; CUDA C++ Programming Guide, "Technical Specifications per Compute Capability"
ELEMENTS = 4096  # of a program
NUM_WARPS = 4


@triton.jit(do_not_specialize=["rows", "columns", "stride_xz", "stride_xm", "stride_xn", "pitch"])
def repack_kernel(
    x_ptr,
    out_ptr,
    rows: tl.int32,
    columns: tl.int32,
    stride_xz: tl.int64,
    stride_xm: tl.int64,
    stride_xn: tl.int64,
    pitch: tl.int64,
    X_UNIT: tl.constexpr,
    X_VECTOR: tl.constexpr,
    OUT_VECTOR: tl.constexpr,
    PLANES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    PDL: tl.constexpr,
):
    """out [batch, PLANES, rows, pitch], row-major, becomes x [batch, rows, columns], or planes that add up to x.
    Dimension X_UNIT of x (0, 1 or None) has stride 1. What is left of a row's last OUT_VECTOR elements becomes 0."""
    follow(PDL)

    # Locate the tile
    num_m = tl.cdiv(rows, BLOCK_M)
    num_n = tl.cdiv(columns, BLOCK_N)
    pid = tl.program_id(0)
    batch = (pid // (num_m * num_n)).to(tl.int64)
    pid_m = pid % (num_m * num_n) // num_n
    pid_n = pid % num_n
    offs_m = pid_m.to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    offs_n = pid_n.to(tl.int64) * BLOCK_N + tl.arange(0, BLOCK_N)

    x_ptr += batch * whole(stride_xz, X_VECTOR)
    x_ptrs = tile_pointers(x_ptr, offs_m, offs_n, stride_xm, stride_xn, X_UNIT, X_VECTOR)
    x_mask_m = offs_m < whole(rows, X_VECTOR if X_UNIT == 0 else 1)
    x_mask_n = offs_n < whole(columns, X_VECTOR if X_UNIT == 1 else 1)
    x = tl.load(x_ptrs, mask=x_mask_m[:, None] & x_mask_n[None, :], other=0.0, eviction_policy="evict_first")

    matrix = rows * whole(pitch, OUT_VECTOR)
    out_ptr += batch * PLANES * matrix
    padded = tl.cdiv(columns, OUT_VECTOR) * OUT_VECTOR
    mask = (offs_m < rows)[:, None] & (offs_n < padded)[None, :]
    planes = split(x, out_ptr.dtype.element_ty, PLANES)
    for i in tl.static_range(PLANES):
        out_ptrs = tile_pointers(out_ptr + i * matrix, offs_m, offs_n, pitch, 1, 1, OUT_VECTOR)
        tl.store(out_ptrs, planes[i], mask=mask)


def launch(
    operand: str,
    out: str,
    layout: Layout,
    shape: tuple[int, int, int],
    dtype: torch.dtype,
    *,
    column_major: bool | None = None,
    planes: Planes | None = None,
) -> tuple[Launch, Layout]:
    """The launch that copies `operand` into a temporary called `out`, and how the copy lies in memory.

    planes: what fp32 is to be split into; matrices of a batch have all their planes side by side.

    shape: batch, rows and columns, none of them 0; layout: the operand's; column_major: whether the copy is to be,
    by default as the operand is. Matrices that are one, by a batch stride of 0, are copied once and stay one.
    """
    if column_major is None:
        column_major = layout.column_major
    planes = planes or Planes(dtype, 1, ((0, 0),))
    copy = _copy(layout, shape, column_major, planes)
    batch, rows, columns = shape
    pitch = copy.strides[1]
    if column_major:  # the kernel writes row-major: it copies the transpose
        layout, rows, columns, pitch = layout.transposed, columns, rows, copy.strides[2]
    if layout.strides[0] == 0:
        batch = 1
    unit, x_vector = vector(layout, (rows, columns), dtype)
    widest = 16 // planes.dtype.itemsize
    out_vector = widest if unit == 0 else x_vector
    block_n = min(512 if unit == 1 else 64, triton.next_power_of_2(columns))
    block_n = max(block_n, widest)
    block_m = ELEMENTS // block_n
    arguments = {
        "x_ptr": Pointer(operand),
        "out_ptr": Pointer(out),
        "rows": rows,
        "columns": columns,
        **dict(zip(("stride_xz", "stride_xm", "stride_xn"), layout.strides, strict=True)),
        "pitch": pitch,
        "X_UNIT": unit,
        "X_VECTOR": x_vector,
        "OUT_VECTOR": out_vector,
        "PLANES": planes.count,
        "BLOCK_M": block_m,
        "BLOCK_N": block_n,
        "PDL": False,
    }
    made = Launch(
        repack_kernel,
        (batch * triton.cdiv(rows, block_m) * triton.cdiv(columns, block_n), 1, 1),
        arguments,
        {"num_warps": NUM_WARPS},
        temporaries=(Temporary(out, (batch, planes.count, rows, pitch), planes.dtype),),
    )
    return made, copy


def _copy(layout: Layout, shape: tuple[int, int, int], column_major: bool, planes: Planes) -> Layout:
    """How the copy of a matrix lies in memory."""
    _, rows, columns = shape
    if column_major:
        rows, columns = columns, rows
    itemsize = planes.dtype.itemsize
    alignment = (LINE if columns * itemsize >= WIDE_ROW else 16) // itemsize
    pitch = -(-columns // alignment) * alignment
    step = planes.count * rows * pitch if layout.strides[0] else 0
    return Layout((step, 1, pitch) if column_major else (step, pitch, 1))


def _matrix(problem: GemmProblem, name: str) -> tuple[Layout, tuple[int, int, int], bool]:
    """The layout of operand "a" or "b", its batch, rows and columns, and whether a copy of it is column-major."""
    layout, rows, columns = (problem.a, problem.M, problem.K) if name == "a" else (problem.b, problem.K, problem.N)
    # Tensor cores want all but 16 bits along K, outer products both operands across it.
    arithmetic = problem.arithmetic
    across = layout.column_major if arithmetic is HALF else name == ("a" if arithmetic.instruction == "fma" else "b")
    return layout, (problem.batch, rows, columns), across


def copy_of(problem: GemmProblem, name: str) -> tuple[Launch, Layout]:
    """The launch that copies operand "a" or "b" to where the kernel can read it, and the copy's layout."""
    layout, shape, column_major = _matrix(problem, name)
    planes = problem.arithmetic.planes
    return launch(name, f"packed_{name}", layout, shape, problem.dtype, column_major=column_major, planes=planes)


def repacked(problem: GemmProblem, packed: tuple[str, ...]) -> GemmProblem:
    """The problem after its `packed` operands were copied."""
    if not packed:
        return problem
    planes = problem.planes
    a = _copy(*_matrix(problem, "a"), planes) if "a" in packed else problem.a
    b = _copy(*_matrix(problem, "b"), planes) if "b" in packed else problem.b
    return replace(problem, a=a, b=b, dtype=planes.dtype)


def illegal(problem: GemmProblem, packed: tuple[str, ...]) -> str | None:
    """Why the `packed` operands of a problem cannot be copied, or None if they can."""
    for name in packed:
        if problem.batch * problem.K * max(problem.M, problem.N) > MAX_GRID:  # fewer elements are fewer programs
            programs = copy_of(problem, name)[0].grid[0]
            if programs > MAX_GRID:
                return f"copying {name} takes {programs} programs, and a grid has at most {MAX_GRID}"
    return None


def microseconds(problem: GemmProblem, packed: tuple[str, ...], model: DeviceModel) -> float:
    """Predicted time of copying the `packed` operands of a problem."""
    time = 0.0
    for name in packed:
        rows = problem.M if name == "a" else problem.N
        moved = problem.dtype.itemsize + problem.planes.dtype.itemsize * problem.planes.count
        layout = problem.a if name == "a" else problem.b
        _, row, column = layout.strides
        lines, columns = (rows, problem.K) if (row < column) == (name == "b") else (problem.K, rows)
        block = min(512, 1 << (columns - 1).bit_length())  # of which what lies beyond the rows' ends takes time too
        elements = problem.batch * lines * -(-columns // block) * block
        one_by_one = max(row, column) * problem.dtype.itemsize % 16 != 0
        time += model.copy[0] + elements * moved / model.copied[one_by_one]
        time += model.copy[1] * min(1.0, elements / (ELEMENTS * model.num_sms))
    return time
