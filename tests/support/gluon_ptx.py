"""PTX in Gluon kernels, interpreted for `gluon_on_cpu`."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import numpy as np
import torch

from tests.support.gluon_memory import PANEL, Barrier, Barriers, Shared, arrive_later, start_load, start_products
from tests.support.gluon_threads import WARP, Accumulators, Program, Tensor, here, whole

# Where another CTA's shared memory is: its rank, the number of a buffer, and bytes in it.
CTA, BUFFER = 1 << 32, 1 << 24
COPY = "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes"
ARITHMETIC: dict[str, Callable[..., Any]] = {
    **dict.fromkeys(("mov.u32", "mov.b32", "mov.b64", "cvta.param.u64", "cvt.u16.u32"), lambda x: x),
    **{"add.s32": np.add, "sub.s32": np.subtract, "mul.lo.s32": np.multiply, "min.s32": np.minimum},
    "and.b32": np.bitwise_and,
    **{"shl.b32": np.left_shift, "shr.u32": np.right_shift},
    **{
        "setp.ge.s32": np.greater_equal,
        "setp.ne.b32": np.not_equal,
        "setp.lt.and.s32": lambda x, y, also: (x < y) & also,
    },
    **{"mad.lo.s32": lambda x, y, z: x * y + z, "mapa.shared::cluster.u32": lambda x, rank: x % CTA + rank * CTA},
}
LANES, EVERY_LANE = np.arange(WARP), np.ones(WARP, dtype=bool)


def inline_asm(asm: str, constraints: str = "", arguments: Sequence[Any] = (), results: Sequence[Any] = ()) -> Any:
    """Runs PTX in each warp of a partition, whose registers hold a value for each lane."""
    if results:
        sums, threads = sum(x.values.numel() for x in arguments[:2]), WARP * here.warps
        assert constraints.count("=f") * threads == sums, "not as many registers as there are sums"
        return wide_products(asm, *arguments)
    given: dict[str, Any] = {f"${i}": address_of(x) for i, x in enumerate(arguments)}
    given |= {"%laneid": LANES, "%cluster_ctarank": here.program.rank}
    given |= {name: i for i, name in enumerate(here.program.descriptors)}
    effects = []

    def value(operand: str) -> Any:
        return given[operand] if operand in given else int(operand)

    for predicate, opcode, operands in statements(asm):
        active = given[predicate] & EVERY_LANE if predicate else EVERY_LANE
        if opcode in ARITHMETIC:
            into, *others = operands
            result = ARITHMETIC[opcode](*(value(x) for x in others))
            given[into] = np.where(active, result, given.get(into, 0)) if predicate else result
        elif opcode == "elect.sync":
            given[operands[0].removeprefix("_|")] = LANES == 0
        else:
            columns = [np.broadcast_to(value(x), WARP) for x in operands if x != "_"]
            effects += [
                (EFFECTS[opcode], [int(column[lane]) for column in columns])
                for lane in (active.nonzero()[0] if columns else (0,))
            ]
    for effect, numbers in effects:
        for _ in range(here.warps):
            effect(*numbers)


@cache
def statements(asm: str) -> list[tuple[str, str, list[str]]]:
    """(predicate, opcode, operands) of each instruction."""
    found = []
    for text in re.split(r"[;\n]+", asm.strip("{} \n")):
        words = text.split(maxsplit=1)
        if words and words[0] != ".reg":
            predicate, opcode, rest = re.fullmatch(r"(?:@(\w+) )?(\S+) ?(.*)", text.strip()).groups()  # type: ignore[union-attr]
            found.append((predicate or "", opcode, re.findall(r"[^\s,{}\[\]]+", rest)))
    return found


def address_of(x: Any) -> int:
    """Of a tile or barrier in the shared memory of a cluster's first CTA, as Triton gives them; or a number."""
    if not isinstance(x, Shared | Barrier):
        return int(x)
    for number, buffer in enumerate(here.program.memory):
        if isinstance(x, Barrier) and isinstance(buffer, Barriers) and any(x is one for one in buffer):
            return number * BUFFER + 8 * [x is one for one in buffer].index(True)
        if isinstance(x, Shared) and isinstance(buffer, Shared):
            start = x.values.data_ptr() - buffer.values.data_ptr()
            if 0 <= start < buffer.values.numel() * buffer.values.itemsize:
                return number * BUFFER + start
    raise AssertionError("no shared memory of this program")


def barrier_at(program: Program, address: int) -> Barrier:
    buffer = program.memory[address // BUFFER]
    assert isinstance(buffer, Barriers) and address % 8 == 0
    return buffer[address % BUFFER // 8]


def arrive_at(address: int) -> None:
    arrive_later(barrier_at(here.program.peer(address // CTA), address % CTA))


def multicast(into: int, number: int, x: int, y: int, z: int, full: int, peers: int) -> None:
    """A copy of one box to the same place in the shared memory of several CTAs, whose barriers count it."""
    assert 0 < peers < 1 << len(here.program.cluster)
    for rank in range(len(here.program.cluster)):
        if peers >> rank & 1:
            copy(into, number, x, y, z, full, here.program.peer(rank))


def copy(into: int, number: int, x: int, y: int, z: int, full: int, peer: Program | None = None) -> None:
    """A copy of one box to this CTA's own shared memory, or the same place in a peer's."""
    descriptor = list(here.program.descriptors.values())[number]
    _, rows, columns = descriptor.box
    assert into // CTA == full // CTA == here.program.rank
    peer = peer or here.program
    tiles = peer.memory[into % CTA // BUFFER]
    assert isinstance(tiles, Shared) and tiles.shape[1:] == descriptor.block_shape
    *_, outer, inner = tiles.shape
    width = min(inner, PANEL // descriptor.dtype.itemsize) * descriptor.dtype.itemsize
    row, within = divmod(into % BUFFER, width)
    assert within == 0 and row % 8 == 0, "not where a box may lie"
    if rows > outer:  # blocks of it after one another
        box = tiles.values.view(1, -1, PANEL // descriptor.dtype.itemsize)[:, row : row + rows]
        assert box.shape[1] == rows, "not where a box may lie"
    else:
        panel, row = divmod(row, outer)
        tile, panel = divmod(panel, inner // columns)
        assert row + rows <= outer, "not where a box may lie"
        box = tiles.values[tile][:, row : row + rows, panel * columns : (panel + 1) * columns]
    start_load(descriptor, (z, y, x), barrier_at(peer, full % CTA), box)


def rows_of(x: Shared) -> torch.Tensor:
    """All rows of 128 bytes from x to the end of its buffer."""
    buffer, within = divmod(address_of(x), BUFFER)
    memory = here.program.memory[buffer]
    assert isinstance(memory, Shared) and within % PANEL == 0
    return memory.values.view(-1, PANEL // memory.values.itemsize)[within // PANEL :]


def wide_products(asm: str, acc: Tensor, tail: Tensor, a: Shared, b: Shared) -> tuple[Accumulators, Accumulators]:
    """The products of one k-tile in PTX: the addresses of A and of B move in steps of 16 bytes; registers are given in
    eights of columns, four for 64 rows, those of acc before those of tail."""
    tensors = Accumulators.of(acc), Accumulators.of(tail)
    eights = [
        (x, row, column) for x in tensors for row in range(0, x.shape[0], 64) for column in range(0, x.shape[1], 8)
    ]
    steps = r"add.s64 a_k, a, (\d+);\nadd.s64 b_k, b, (\d+);\n"
    product = r"wgmma.mma_async.sync.aligned.m64n(\d+)k16.f32.b?f16.b?f16 {(.*)}, a_k, b_k, add, 1, 1, ([01]), 0;"
    found = re.findall(steps + product, asm)
    assert len(found) == asm.count("wgmma.mma_async") and asm.count("wgmma.commit_group") == 1
    left, right, products = a.values[0], rows_of(b), []
    for of_a, of_b, width, registers, transposed in found:
        (row, k), (column, of_k) = divmod(16 * int(of_a), PANEL), divmod(16 * int(of_b), PANEL)
        panel, row = divmod(row, left.shape[0])
        k += panel * PANEL
        first = left[row : row + 64, k // 2 : k // 2 + 16]
        if int(transposed):  # panels of 64 of its columns
            first = left[row : row + 16, 64 * panel : 64 * panel + 64].T
        second = right[column : column + int(width), of_k // 2 : of_k // 2 + 16].T
        numbers = [int(x) for x in re.findall(r"\$(\d+)", registers)]
        assert len(numbers) == int(width) // 2 and first.shape[0] == 64 and second.shape[1] == int(width)
        assert all(n % 4 == 0 and numbers[i : i + 4] == [*range(n, n + 4)] for i, n in [*enumerate(numbers)][::4]), (
            "registers of different columns"
        )
        used = [eights[n // 4] for n in numbers[::4]]
        for x in tensors:
            mine = [i for i, (tensor, _, _) in enumerate(used) if tensor is x]
            if mine:
                _, row, column = used[mine[0]]
                assert mine == [*range(mine[0], mine[0] + len(mine))], "columns of B that do not follow one another"
                assert [used[i] for i in mine] == [(x, row, column + 8 * i) for i in range(len(mine))]
                sums = x.values[row : row + 64, column : column + 8 * len(mine)]
                products.append((sums, first, second[:, 8 * mine[0] : 8 * mine[-1] + 8]))
    start_products(products, *tensors)
    return tensors


def publish() -> None:
    here.program.published = True


def join() -> None:
    here.program.joined += 1
    here.machine.changed()


def wait_for_all() -> None:
    here.machine.wait_until(here.program.all_joined)


EFFECTS: dict[str, Callable[..., None]] = {
    COPY: copy,
    f"{COPY}.multicast::cluster": multicast,
    "mbarrier.arrive.shared::cluster.b64": arrive_at,
    "fence.mbarrier_init.release.cluster": publish,
    "barrier.cluster.arrive.relaxed.aligned": join,
    "barrier.cluster.wait.acquire.aligned": wait_for_all,
}


PTX = {"fma.rn.f32": lambda a, b, c: (a.double() * b.double() + c.double()).float(), "mul.rn.f32": lambda a, b: a * b}


def inline_asm_elementwise(
    asm: str, constraints: str, args: Sequence[Any], dtype: torch.dtype, is_pure: bool, pack: int
) -> Tensor:
    if asm.startswith("mma"):
        return mma_by_element(*(x.data for x in args))
    operands = torch.broadcast_tensors(*(whole(x) for x in args))
    return Tensor(PTX[opcode_of(asm, len(args), pack)](*operands))


def mma_by_element(a: torch.Tensor, b: torch.Tensor, acc: torch.Tensor) -> Tensor:
    """`mma_fp64`'s products, whose registers `test_mma_fp64` follows: fragments [m / 8, 8, 1, k, 1] and
    [1, 8, n / 8, k, 1] of operands, and sums [m / 8, 8, n / 8, 4, 2]."""
    products = torch.einsum("irk,cjk->irjc", a[:, :, 0, :, 0], b[0, ..., 0])
    return Tensor(acc + products.reshape(acc.shape))


@cache
def opcode_of(asm: str, inputs: int, pack: int) -> str:
    """The one instruction of which `asm` makes each of `pack` elements, out of the inputs' elements of that number."""
    opcodes, made = set(), []
    for line in asm.split("\n"):
        opcode, rest = line.split(maxsplit=1)
        result, *others = map(int, re.findall(r"\$(\d+)", rest))
        assert others == [result + pack * (1 + i) for i in range(inputs)], "an element out of others"
        opcodes.add(opcode)
        made.append(result)
    assert sorted(made) == list(range(pack)) and len(opcodes) == 1
    return opcodes.pop()
