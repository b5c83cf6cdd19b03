"""Where things lie in the CUDA twins: a thread's results and the banks of shared memory, a drawing for each of k05, k06
and k08. Addresses are the sources' own expressions, evaluated for each thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from perf.ladder.drawings.canvas import EMPTY, GREEN, ORANGE, PINK, Drawing, boxes, frame, key, words
from perf.ladder.drawings.places import OF_A_THREAD, thread, threads
from perf.ladder.drawings.traces import WARP, Results
from perf.measure.environment import ROOT
from reference_cuda import TWINS

BANKS, WORD = 32, 4  # of shared memory, and bytes of a bank's word
BYTES = {"float": 4, "half": 2}
DECLARED = re.compile(r"\b(?:const|constexpr) int (\w+ = .*?);")
PART = re.compile(r"(\w+) = ((?:[^,()]|\([^()]*\))+)")
SHARED = re.compile(r"__shared__ (\w+) (\w+)((?:\[[^\]]+\])+);")


@dataclass(frozen=True)
class Source:
    """A twin's source and its template's parameters: what its integers are in a thread."""

    text: str
    parameters: dict[str, int]

    @classmethod
    def of(cls, stem: str) -> Source:
        """In its default variant."""
        text = (ROOT / "reference_cuda" / f"{stem}.cu").read_text()
        kernel = TWINS[stem].variants[0].kernel
        values = kernel.partition("<")[2].rstrip(">").split(", ")
        names = re.findall(r"\w+ (\w+)", re.findall(r"template <(.*)>\n__global__", text)[0])
        return cls(text, {name: int(x) for name, x in zip(names, values, strict=True) if x.isdigit()})

    def value(self, expression: str, names: dict[str, int]) -> int:
        """Of an expression of integers that are not negative, where C divides as Python's `//`."""
        return int(eval(expression.replace("threadIdx.x", "thread").replace("/", "//"), {"__builtins__": {}}, names))

    def names(self, thread: int) -> dict[str, int]:
        """Every `const int` of the kernel, in this thread of the first block."""
        found = {"thread": thread, **self.parameters, "pid_m": 0, "pid_n": 0, "stage": 0}
        for declared in DECLARED.findall(self.text):
            for name, expression in PART.findall(declared):
                if "blockIdx" not in expression and "ceil_div" not in expression:
                    found[name] = self.value(expression, found)
        return found

    @cached_property
    def shared(self) -> dict[str, tuple[int, list[int]]]:
        """Bytes of an element, and extents, of what is in shared memory."""
        names = self.names(0)
        return {
            name: (BYTES[kind], [self.value(extent, names) for extent in re.findall(r"\[(.*?)\]", extents)])
            for kind, name, extents in SHARED.findall(self.text)
        }

    def address(self, tile: str, indices: Sequence[str], names: dict[str, int]) -> int:
        """In bytes from a tile's begin."""
        size, extents = self.shared[tile]
        place = 0
        for extent, index in zip(extents, indices, strict=True):
            place = place * extent + self.value(index, names)
        return place * size

    def accesses(self, tile: str) -> list[list[str]]:
        """The indices of each expression that reads or writes a tile, in the source's order."""
        uses = re.findall(rf"(?<!float )(?<!half )\b{tile}((?:\[[^\]]+\])+)", self.text)
        return [re.findall(r"\[(.*?)\]", use) for use in uses]

    def results(self, thread: int) -> tuple[list[int], list[int]]:
        """Rows and columns of the results that a thread stores."""
        names, call = self.names(thread), re.findall(r"store(?:_pack<VECTOR>)?\(c, (.*?), (.*?), M,\s", self.text)[-1]
        steps = {name: self._loop(name, names) for name in "ij"}
        many = 4 if "store_pack" in self.text else 1
        rows = {self.value(call[0], {**names, "i": i}) for i in steps["i"]}
        columns = {self.value(call[1], {**names, "j": j}) + x for j in steps["j"] for x in range(many)}
        return sorted(rows), sorted(columns)

    def _loop(self, name: str, names: dict[str, int]) -> range:
        """Of the last loop over a name; once where there is none around the store of C."""
        epilogue = self.text[: self.text.rindex("store")].rpartition("}\n\n#pragma unroll")[2]
        found = re.findall(rf"int {name} = 0; {name} < (\w+); (?:\+\+{name}|{name} \+= (\d+))", epilogue)
        return range(0, self.value(found[-1][0], names), int(found[-1][1] or 1)) if found else range(1)


def addresses_of(
    source: Source, tile: str, indices: Sequence[str], lane: int, bytes_wide: int, **more: int
) -> list[int]:
    """The words that a lane of the first warp asks of shared memory at once."""
    first = source.address(tile, indices, {**source.names(lane), **more}) // WORD
    return list(range(first, first + bytes_wide // WORD))


def turns(addresses: Iterable[Sequence[int]]) -> list[int]:
    """When shared memory serves each of several neighbouring words that are asked together: a bank has one word a
    turn."""
    busy, found = [0] * BANKS, []
    for each in addresses:
        found.append(max(busy[word % BANKS] for word in each))
        for word in each:
            busy[word % BANKS] = found[-1] + 1
    return found


def _banks(
    axes: Axes, title: str, addresses: Sequence[Sequence[int]], colors: Sequence[str], most: int, text: str
) -> int:
    """A column for each bank and a row for each turn, of which there are so many."""
    when = turns(addresses)
    count = max(when) + 1
    boxes(axes, [(0, BANKS, 0, count)], EMPTY)
    for each, y, color in zip(addresses, when, colors, strict=True):
        boxes(axes, [(each[0] % BANKS, each[0] % BANKS + len(each), y, y + 1)], color, 0.5)
    names, ticks = {y + 0.5: f"turn {y + 1}" for y in range(count)}, {x: str(x) for x in range(0, BANKS + 1, 8)}
    title = f"{title}: {count} turn{'s' if count > 1 else ''}"
    frame(axes, title, (0, BANKS), (0, most), names=names, ticks=ticks, xlabel=text)
    axes.tick_params(axis="y", labelsize=8)
    return count


# ---- k05: a thread's registers ----


def results_of(stem: str) -> Results:
    """Of thread 0, and of its warp."""
    source = Source.of(stem)
    names = source.names(0)
    lanes = [source.results(lane) for lane in range(WARP)]
    warp = [sorted({place for lane in lanes for place in lane[i]}) for i in (0, 1)]
    return Results((names["BLOCK_M"], names["BLOCK_N"]), *lanes[0], *warp)


def thread_tiled() -> Drawing:
    found = {
        stem[:3]: results_of(stem) for stem in ("c04_thread_tiled_1d", "c05_thread_tiled_2d", "c06_register_blocked")
    }
    c04, c05, c06 = (f"{results.words / results.count:.3g}" for results in found.values())
    caption = (
        "The results of one thread on the way to k05: a column of C in c04, a square in c05, and in c06 a smaller "
        "square with contiguous operands, loaded as 16-byte vectors. Words loaded per FMA: "
        f"{c04}, {c05} and {c06}."
    )
    return Drawing("The results that one thread holds in c04, c05 and c06", caption, threads(found, (7.6, 3)))


# ---- k06: warp tiles, and A transposed on its way to shared memory ----


def stored_transposed(source: Source) -> list[list[int]]:
    """The word that each lane of the first warp stores of A, and then their turns are those of one store."""
    return [
        addresses_of(source, "a_tile", source.accesses("a_tile")[0], lane, WORD, i=0, j=0, p=0) for lane in range(WARP)
    ]


def warp_tiled() -> Drawing:
    source, results = Source.of("c07_warp_tiled"), results_of("c07_warp_tiled")
    bare_rows = replace(source, text=source.text.replace("[BLOCK_M + 4]", "[BLOCK_M]"))
    figure, panels = plt.subplot_mosaic(
        [["tile", "plain"], ["tile", "padded"]], figsize=(7.6, 3.2), width_ratios=(1, 1.1), gridspec_kw={"hspace": 0.7}
    )
    thread(panels["tile"], "c07", results)
    rows = [source.value(source.accesses("a_tile")[0][1], {**source.names(lane), "j": 0}) for lane in range(WARP)]
    colors_of = dict(zip(sorted(set(rows)), (PINK, ORANGE), strict=True))
    plain, padded = (
        _banks(panels[name], f"A, rows of {one.shared['a_tile'][1][-1]} words, {title}", stored_transposed(one),
               [colors_of[row] for row in rows], 2, text)
        for name, title, one, text in (
            ("plain", "no padding", bare_rows, ""), ("padded", "as in c07", source, "bank of shared memory")
        )
    )  # fmt: skip
    of_rows = {f"stored to row {row} of A's tile": color for row, color in colors_of.items()}
    key(panels["tile"], {**OF_A_THREAD, **of_rows}, -0.2, ncols=3)
    caption = (
        f"A warp of c07 has {len(results.warp_rows)} x {len(results.warp_columns)} results, a thread of it "
        f"{len(results.rows)} x {len(results.columns)} in squares of 4 x 4. Right, one store of a warp that "
        f"transposes A: {plain} wavefronts, and {padded} with the padding that c07 has."
    )
    return Drawing("c07's warp tile, and how it stores A without conflicts", caption, figure)


# ---- k08: fragments from padded rows ----


def fragment_rows(source: Source, tile: str) -> list[list[int]]:
    """The words of the eight rows of 16 bytes that a fragment load reads at a time."""
    names = {**source.names(0), "i": 0}
    row, column = next(indices for indices in source.accesses(tile) if indices != source.accesses(tile)[0])
    return [addresses_of(source, tile, (f"{row} + {r}", column), 0, 16, **names) for r in range(8)]


def padded() -> Drawing:
    source = Source.of("c10_wmma_fp16_padded")
    plain = replace(source, text=source.text.replace("PAD = 8", "PAD = 0"))
    figure, panels = plt.subplots(
        2, 2, figsize=(7.6, 3.6), gridspec_kw={"height_ratios": (2, 8), "hspace": 0.55, "wspace": 0.2}
    )
    counts = []
    for line, tile, most, text in zip(panels, ("a_tile", "b_tile"), (2, 8), ("", "bank of shared memory"), strict=True):
        for axes, title, one in zip(line, ("no padding", "as in c10"), (plain, source), strict=True):
            addresses, (size, extents) = fragment_rows(one, tile), one.shared[tile]
            name = f"{tile[0].upper()}, rows of {size * extents[-1]} bytes, {title}"
            counts.append(_banks(axes, name, addresses, [GREEN] * 8, most, text))
            for row, (each, turn) in enumerate(zip(addresses, turns(addresses), strict=True)):
                words(axes, each[0] % BANKS + 2, turn + 0.5, row, fontsize=8)
    key(panels[1][0], {"16 bytes of a row of the fragment, by its number": GREEN}, -0.28)
    a, padded_a, b, padded_b = counts
    caption = (
        f"A fragment load of c10 reads 16 bytes of eight rows at a time. Without padding, shared memory needs {a} "
        f"wavefronts for A and {b} for B; with 16 bytes more a row, {padded_a} and {padded_b}. "
        "k08's layouts swizzle instead."
    )
    return Drawing("The banks that a fragment load of c10 reads, with and without padding", caption, figure)
