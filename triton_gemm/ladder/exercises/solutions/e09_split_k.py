"""Split K: where C has fewer tiles than the GPU has SMs, several programs share a tile's K (k09).

That is split-K, which docs/glossary.md explains and matmul's kernels do (docs/kernels.md, "Split-K reductions"). Each
program sums a part of K into a workspace, and a second kernel adds the parts in order, so that every run has the same
bits. The parts must cover K once, also where its k-tiles are not a multiple of the parts.

Checked: C of K = 200, which is 13 k-tiles of 16, and of other K, in 3 parts; how often each k is summed in a tile;
where parts begin. The longest part may have a third of the k-tiles, rounded up.
"""

import torch
import triton
import triton.language as tl


@triton.jit
def kernel(a_ptr, b_ptr, sums_ptr, M, K, stride_a, stride_b, stride_s, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    part = tl.program_id(2)
    # FILL IN: this part's k, from `first` to before `last`: whole k-tiles of BLOCK, but at K's end.
    steps = tl.cdiv(tl.cdiv(K, BLOCK), SPLIT_K)
    first = part * steps * BLOCK
    last = tl.minimum(first + steps * BLOCK, K)
    # BEFORE:
    # first = 0
    # last = K
    # END
    offs = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + offs[:, None]
    columns = tl.program_id(1) * BLOCK + offs[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for k in range(first, last, BLOCK):
        a = tl.load(a_ptr + rows * stride_a + k + offs[None, :], mask=k + offs[None, :] < last, other=0.0)
        b = tl.load(b_ptr + (k + offs[:, None]) * stride_b + columns, mask=k + offs[:, None] < last, other=0.0)
        acc = tl.dot(a, b, acc, input_precision="ieee")
    tl.store(sums_ptr + (part * M + rows) * stride_s + columns, acc)


@triton.jit
def add_parts(sums_ptr, c_ptr, M, stride_s, stride_c, SPLIT_K: tl.constexpr, BLOCK: tl.constexpr):
    offs = tl.arange(0, BLOCK)
    rows = tl.program_id(0) * BLOCK + offs[:, None]
    columns = tl.program_id(1) * BLOCK + offs[None, :]
    acc = tl.zeros((BLOCK, BLOCK), dtype=tl.float32)
    for part in range(SPLIT_K):
        acc += tl.load(sums_ptr + (part * M + rows) * stride_s + columns)
    tl.store(c_ptr + rows * stride_c + columns, acc)


def run(a, b, c, sums: torch.Tensor):
    """c [M, N] = a [M, K] @ b [K, N] in fp32, row-major; M and N are multiples of 16, and sums is [3 M, N]."""
    (M, K), N = a.shape, b.shape[1]
    grid, options = (M // 16, N // 16, 3), {"SPLIT_K": 3, "BLOCK": 16}
    kernel[grid](a, b, sums, M, K, a.stride(0), b.stride(0), sums.stride(0), **options)
    add_parts[grid[:2]](sums, c, M, sums.stride(0), c.stride(0), **options)


HINTS = (
    "Count k-tiles, not elements: there are `tl.cdiv(K, BLOCK)`, and a part takes a third of them, rounded up.",
    "Rounded up, the last part would go beyond K: `tl.minimum(.., K)` ends it there.",
)
