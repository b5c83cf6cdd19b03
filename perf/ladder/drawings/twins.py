"""Where things lie in the CUDA twins: a thread's results and the banks of shared memory. Addresses are the sources' own
expressions, evaluated for each thread."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

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

    def without(self, padding: str) -> Source:
        """The source with rows of shared memory that are not padded by this."""
        assert padding in self.text
        return replace(self, text=self.text.replace(padding, ""))

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

    def words(self, tile: str, indices: Sequence[str], lane: int, count: int, **more: int) -> list[int]:
        """The neighbouring words that a lane of the first warp asks of shared memory at once."""
        first = self.address(tile, indices, {**self.names(lane), **more}) // WORD
        return list(range(first, first + count))


def turns(addresses: Iterable[Sequence[int]]) -> list[int]:
    """When shared memory serves each of several neighbouring words that are asked together: a bank has one word a
    turn."""
    busy, found = [0] * BANKS, []
    for each in addresses:
        found.append(max(busy[word % BANKS] for word in each))
        for word in each:
            busy[word % BANKS] = found[-1] + 1
    return found


def results_of(stem: str) -> Results:
    """Of thread 0, and of its warp."""
    source = Source.of(stem)
    names = source.names(0)
    lanes = [source.results(lane) for lane in range(WARP)]
    warp = [sorted({place for lane in lanes for place in lane[i]}) for i in (0, 1)]
    return Results((names["BLOCK_M"], names["BLOCK_N"]), *lanes[0], *warp)


def stored_transposed(source: Source) -> list[list[int]]:
    """The word that each lane of the first warp stores of A, transposed on its way to shared memory, at once."""
    return [source.words("a_tile", source.accesses("a_tile")[0], lane, 1, i=0, j=0, p=0) for lane in range(WARP)]


def fragment_rows(source: Source, tile: str) -> list[list[int]]:
    """The words of the eight rows of 16 bytes that a fragment load reads at a time."""
    row, column = next(indices for indices in source.accesses(tile) if indices != source.accesses(tile)[0])
    return [source.words(tile, (f"{row} + {r}", column), 0, 16 // WORD, i=0) for r in range(8)]
