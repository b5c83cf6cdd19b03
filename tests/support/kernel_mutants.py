"""Kernels with planted bugs: a rung's source with a piece of it replaced, as a module of its own, or all of
triton_gemm.kernels, as a package of its own.

Triton reads a kernel's source from its file, so a mutant is written to one. It is loaded under a name in
triton_gemm.ladder, from where it imports lower rungs as the original does, or in triton_gemm.
"""

from __future__ import annotations

import importlib.util
import shutil
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from triton_gemm import kernels
from triton_gemm.ladder import LADDER, Rung

RUNGS = {rung.id: rung for rung in LADDER}


@dataclass(frozen=True)
class Mutant:
    """`old` replaced by `new` in the source of a rung; both may be several lines."""

    rung: str
    changes: tuple[tuple[str, str], ...]

    @property
    def original(self) -> Rung:
        return RUNGS[self.rung]

    def load(self, folder: Path) -> ModuleType:
        """The module that has the bug; fails if the rung's source no longer holds what is to be replaced."""
        text = Path(sys.modules[self.original.module].__file__ or "").read_text()
        for old, new in self.changes:
            assert old in text, f"{self.original.name} has no {old!r}: bring tests/support/kernel_mutants.py up to date"
            text = text.replace(old, new)
        path = folder / f"{self.original.name}_mutant.py"
        path.write_text(text)
        return _loaded(f"{self.original.module}_mutant_{abs(hash((self, str(folder)))):x}", path)


def kernels_with(changes: Sequence[tuple[str, str]], folder: Path) -> ModuleType:
    """A copy of triton_gemm.kernels in which `old` is `new`, for each (old, new), wherever a module has it."""
    copy = folder / "kernels"
    shutil.copytree(Path(kernels.__file__ or "").parent, copy, ignore=shutil.ignore_patterns("__pycache__"))
    for old, new in changes:
        found = [path for path in copy.rglob("*.py") if old in path.read_text()]
        assert found, f"no kernel has {old!r}"
        for path in found:
            path.write_text(path.read_text().replace(old, new))
    return _loaded(f"triton_gemm.kernels_{abs(hash((tuple(changes), str(folder)))):x}", copy / "__init__.py", [copy])


def _loaded(name: str, path: Path, folders: Sequence[Path] | None = None) -> ModuleType:
    """The module in a file, or the package with these folders."""
    places = None if folders is None else list(map(str, folders))
    spec = importlib.util.spec_from_file_location(name, path, submodule_search_locations=places)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def mutant(rung: str, *changes: tuple[str, str]) -> Mutant:
    return Mutant(rung, changes)


# Only strides beyond 32 bits show it (test_addresses, windows).
ROWS_OF_32_BITS = mutant("k03", ("offs_m[:, None].to(tl.int64) * stride_am", "offs_m[:, None] * stride_am"))

# What the interpreter can run. Each is caught by the checks that the rungs pass (interpreter/ladder/test_mutants.py).
MUTANTS: dict[str, Mutant] = {
    "k-tail-unmasked-in-a": mutant("k03", ("a_ptrs, mask=offs_k[None, :] < K - k, other=0.0", "a_ptrs")),
    "k-tail-unmasked-in-b": mutant("k03", ("b_ptrs, mask=offs_k[:, None] < K - k, other=0.0", "b_ptrs")),
    "k-mask-one-too-far": mutant("k03", ("< K - k", "<= K - k")),
    "k-mask-one-short": mutant("k03", ("< K - k", "< K - k - 1")),
    "last-k-tile-dropped": mutant("k03", ("range(0, K, BLOCK_K)", "range(0, K - BLOCK_K + 1, BLOCK_K)")),
    "last-k-dropped-in-a-strip": mutant("k01", ("range(K)", "range(K - 1)")),
    "strides-of-b-swapped": mutant(
        "k03",
        ("offs_k[:, None] * stride_bk", "offs_k[:, None] * stride_bn"),
        (".to(tl.int64) * stride_bn", " * stride_bk"),
    ),
    "strides-of-c-swapped": mutant(
        "k03", ("offs_m * stride_cm + offs_n * stride_cn", "offs_m * stride_cn + offs_n * stride_cm")
    ),
    "a-steps-by-b": mutant("k03", ("tl.cast(BLOCK_K, tl.int64) * stride_ak", "tl.cast(BLOCK_K, tl.int64) * stride_bk")),
    "a-is-taken-for-row-major": mutant("k03", (" * stride_ak", "")),
    "rows-wrap-at-n": mutant("k03", ("BLOCK_M)) % M", "BLOCK_M)) % N")),
    "store-one-row-too-many": mutant("k03", ("offs_m < M", "offs_m <= M")),
    "store-one-column-too-many": mutant("k03", ("offs_n < N", "offs_n <= N")),
    "store-one-column-short": mutant("k03", ("offs_n < N", "offs_n < N - 1")),
    "store-unmasked-rows": mutant("k01", ("acc, offs_m < M,", "acc, offs_m >= 0,")),
    "alpha-ignored": mutant("k01", ("alpha * acc", "acc")),
    "alpha-times-c-too": mutant("k01", ("tl.load(c_ptrs", "alpha * tl.load(c_ptrs")),
    "beta-twice": mutant("k01", ("out += beta * ", "out += beta * beta * ")),
    "beta-ignored": mutant("k01", ("out += beta * ", "out += ")),
    "beta-zero-reads-c": mutant("k01", ("if HAS_BETA:", "if True:")),
    "alpha-zero-reads-operands": mutant(
        "k01",
        ("pointer_arguments(a, b, c, alpha, beta)", '{**pointer_arguments(a, b, c, alpha, beta), "K": a.shape[1]}'),
    ),
    "last-band-not-lower": mutant("k04", ("tl.minimum(num_m - first_m, GROUP_M)", "GROUP_M")),
    "band-as-wide-as-high": mutant("k04", ("(GROUP_M * num_n)", "(GROUP_M * num_m)")),
    "band-transposed": mutant(
        "k04", ("first_m + within % rows, within // rows", "first_m + within // rows, within % rows")
    ),
    "tf32-truncated": mutant("k07", ("bits + 0x1000", "bits")),
    "turned-but-not-read-as-turned": mutant("k05", ("repacked(a.T)[:, :M].T", "repacked(a.T)[:, :M].reshape(a.shape)")),
    "transposed-rows-cut-short": mutant("k05", ("(r < rows) & (k < padded)", "(r < rows) & (k < columns - 1)")),
    "tf32-rounds-a-twice": mutant("k07", ("repacked(b.T, round_tf32).T", "repacked(b, round_tf32).T")),
    "sums-in-16-bit": mutant(
        "k08",
        (
            "acc = tl.dot(dot_operand(a), dot_operand(b), acc)",
            "acc = tl.dot(dot_operand(a), dot_operand(b), acc).to(tl.float16).to(tl.float32)",
        ),
    ),
    "accumulator-kept-from-the-last-tile": mutant(
        "k09",
        ("    for tile_id in", "    acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n    for tile_id in"),
        ("        acc = tl.zeros((BLOCK_M, BLOCK_N), dtype=tl.float32)\n\n", "\n"),
    ),
    "one-tile-a-program": mutant(
        "k09", ("num_m * num_n, tl.num_programs(0)", "tl.program_id(0) + 1, tl.num_programs(0)")
    ),
    "tma-coordinates-swapped": mutant("k10", ("b_desc.load([k, n])", "b_desc.load([n, k])")),
    "tma-transpose-forgotten": mutant(
        "k10", ("a_desc.load([k, m]).T if A_COLUMN_MAJOR else", "a_desc.load([k, m]) if A_COLUMN_MAJOR else")
    ),
    "tma-tile-off-by-one": mutant("k10", ("n = pid_n * BLOCK_N", "n = pid_n * BLOCK_N + 8")),
}

# What only reads outside its operands, and ignores what it finds there: for memcheck.
READS_OUTSIDE = mutant("k03", ("BLOCK_N)) % N", "BLOCK_N))"))

# The ring of k11 with k_tiles <= num_stages and a tile a program: no slot is filled twice, so that the loader need not
# wait, and its wait can be taken away to see what the other one is for. With it, a loader that waits for a
# slot that was handed back too early would wait for ever.
LOADER_WAIT = "mbarrier.wait(empty_bars.index(slot), phase ^ 1)"
MULTIPLIER_WAIT = "mbarrier.wait(full_bars.index(slot), (step // num_stages) & 1)"
K11_WITHOUT_THE_LOADERS_WAIT = mutant("k11", (LOADER_WAIT, "pass"))
K11_WITHOUT_WAITS = mutant("k11", (LOADER_WAIT, "pass"), (MULTIPLIER_WAIT, "pass"))
# And what waits for nothing that it reads, for ConSan.
K11_RACE = mutant("k11", (MULTIPLIER_WAIT, "pass"))
