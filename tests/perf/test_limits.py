"""Page 0 of the ladder: its sums, and that peaks are the same wherever they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from perf.common import formats
from perf.ladder.drawings import traces
from perf.measure import roofline
from perf.pages import limits, rung_page
from triton_gemm.hardware.device import RESERVED, SHARED_MEMORY
from triton_gemm.hardware.gpus import named_device
from triton_gemm.ladder import LADDER

PAGE = rung_page.RUNG_PAGES / "limits.md"
ROOT = Path(__file__).parents[2]
HOPPER = (9, 0)


def row(first: str) -> list[str]:
    (line,) = re.findall(rf"^\| {first}.*", PAGE.read_text(), re.MULTILINE)
    return [cell.strip() for cell in line.strip("|").split("|")]


def test_a_word_is_explained_where_it_is_first_used() -> None:
    """The page stands before the one that explains words of GPUs."""
    words = "kernel rung GEMM FMA cache thread unit tensor.core TF32 peak SM L2 shared.memory FFMA tile program warp "
    words += "register Hopper stage slot latency L1 bank lane wavefront swizzle layout"
    after = PAGE.read_text().partition("glossary.md")[2]
    prose = re.sub(r"<!-- .*?<!-- /results -->|`.*?`|^#.*?$|\]\(.*?\)", "", after, flags=re.DOTALL | re.MULTILINE)
    for word in words.split():
        first = re.search(rf"(fp32 )?\b[{word[0].upper()}{word[0].lower()}]{word[1:]}s?\b", prose)
        assert first is not None and prose[first.start() - 1] == "*", word


def test_sums_by_hand() -> None:
    """2 x 4096^3 FLOP; three matrices of 64 or 32 MiB; the data sheets' peaks."""
    assert "137 GFLOP on an H100" in PAGE.read_text()
    assert row("fp32 units")[1:4] == ["192", "2,054", "60"]  # 137.4 / 66.9 ms; 201 MB / 3.352 TB/s
    assert row("16 bits")[1:4] == ["96", "139", "30"]
    assert row("H100")[2:6] == ["66.9", "495", "989", "3.35"] and row("H100")[6] == "20"
    assert row("H100")[-1] == "1,980 / 1,830" and row("A100")[-1] == "1,410"
    assert [row(name)[2] for name in ("k06,", "k08,")] == ["24", "144"]  # 2 slots of 12 KiB, and 3 of 48
    most, own = SHARED_MEMORY[HOPPER] // 2**10, RESERVED // 2**10
    assert f"has {most + own} KiB of shared memory. A program may ask for {most} of them" in PAGE.read_text()
    # Words for FMAs times the counted FMAs; lanes share words, so less was counted, even with all that is stored.
    for rung, words, fmas in (("k03", 12, 32), ("k05", 20, 64), ("k06", 20, 64)):
        pipe, by_rule, counted = (float(cell.removesuffix(" %")) for cell in row(f"{rung} \\|")[2:])
        assert by_rule == pytest.approx(4 * pipe * words / fmas, abs=2.5) and counted < by_rule
    assert row("k03,")[-4:] == ["5", "25", "16", "5"]  # 65536 / 96 / 128; 228 / (8 + 1); 2048 / 128


@pytest.mark.parametrize("mode", limits.MODES)
def test_peaks_of_pages_and_kernels_are_those_of_page_0(mode: str) -> None:
    """k08's header names one; the reports' rooflines and model are of the same function."""
    gpu = named_device("h100")
    shown = formats.number(limits.peak(gpu, mode))
    assert shown == row("H100")[2 + [*limits.MODES].index(mode)]
    per_sm = roofline.flop_per_clock(roofline.TYPICAL[HOPPER], mode) * roofline.clock(roofline.TYPICAL[HOPPER], mode)
    assert per_sm * gpu.num_sms / 1e6 == limits.peak(gpu, mode)


def test_no_page_names_another_peak() -> None:
    known = {formats.number(limits.peak(named_device(gpu), mode)) for gpu in limits.GPUS for mode in limits.MODES}
    texts = [
        path.read_text() for path in (ROOT / "README.md", *rung_page.RUNG_PAGES.glob("*.md"), ROOT / "docs/ladder.md")
    ]
    texts += [str(rung.header) for rung in LADDER]
    named = re.findall(r"(?:units' |peak of |peak is )(\d[\d.,]*) TFLOPS", " ".join(texts))
    assert named and {*named} <= known


@pytest.mark.parametrize(("rung", "column", "size"), [("k01", 1, (256,)), ("k02", 2, (512,)), ("k03", 3, (64, 64))])
def test_layouts_are_the_compilers(rung: str, column: int, size: tuple[int, ...]) -> None:
    layout = traces.Blocked.of(traces.compiled(rung).asm["ttgir"])
    named = {"`sizePerThread`": layout.elements, "`threadsPerWarp`": layout.lanes, "`warpsPerCTA`": layout.warps}
    covers = tuple(e * t * w for e, t, w in zip(layout.elements, layout.lanes, layout.warps, strict=True))
    named |= {"covers": covers, "repeats": tuple(all_ // c for all_, c in zip(size, covers, strict=True))}
    for name, numbers in named.items():
        assert row(name)[column] == " x ".join(map(str, numbers)), name
