"""Tables from other machines, which are merged; and what entries say of torch's product."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from tests.support.table_fakes import HOPPER, another, chosen, entries, found, problem_of, problems, store, table_in
from tests.tables.test_tables import CANNOT, GPU_KEY, few
from triton_gemm import tables
from triton_gemm.problem import GemmProblem
from triton_gemm.tables import files
from triton_gemm.tables.files import Table
from triton_gemm.tables.records import Entry


@few
@given(st.lists(st.dictionaries(problems(), entries(), max_size=3), min_size=1, max_size=4), st.randoms())
def test_merging_in_any_order_gives_the_same(held: list[dict[GemmProblem, Entry]], chance: random.Random) -> None:
    held.append({problem: replace(entry, us=1.0) for problem, entry in held[0].items()})
    turned = {problem: x.algorithm._replace(swap_ab=not x.algorithm.swap_ab) for problem, x in held[0].items()}
    held.append({problem: replace(x, us=1.0, algorithm=turned[problem]) for problem, x in held[0].items()})
    given_ = [Table(replace(GPU_KEY, name=str(i)), entries=x) for i, x in enumerate(held)]
    merged = files.merge(given_)
    shuffled = chance.sample(given_, len(given_))
    assert files.merge([files.merge(shuffled[:2]), *shuffled[1:]]).text() == merged.text()
    for problem, entry in merged.entries.items():
        assert entry.us == min(x[problem].us for x in held if problem in x)


def test_tables_of_several_kinds_are_not_merged() -> None:
    for other in (Table(replace(GPU_KEY, power_limit=350)), Table(GPU_KEY, "3.6"), Table(GPU_KEY, bits="any")):
        with pytest.raises(ValueError, match="of one kind"):
            files.merge([Table(GPU_KEY), other])


def test_tables_travel(folder: Path, tmp_path: Path) -> None:
    first, second, out = tmp_path / "first.json", tmp_path / "second.json", tmp_path / "both.json"
    store(problem_of(1)), store(problem_of(2), us=3.0)
    assert tables.export_to(first, HOPPER) == 2
    assert tables.clear() == 1 and found(problem_of(1)) is None and tables.export_to(second, HOPPER) == 0
    store(problem_of(2), 2, us=2.0), store(problem_of(3))
    tables.export_to(second, HOPPER)
    assert tables.merge([first, second], out) == 3
    assert tables.import_from(first) == 2
    assert table_in(folder).read_bytes() == out.read_bytes()
    assert found(problem_of(2)) == chosen(problem_of(2), 2), "the faster one"
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(ValueError, match=r"no such file|no regular file|cannot be read"):
            tables.import_from(path)


# An entry of another class of bits than the model's choice, and one that cannot run.
UNUSED = {"class": another(problem_of(), bits=False), "illegal": replace(another(problem_of()), algorithm=CANNOT)}


@pytest.mark.parametrize("fault", UNUSED)
def test_what_is_used_is_not_replaced_by_what_is_not(fault: str, folder: Path, tmp_path: Path) -> None:
    """Be it as fast as it may."""
    problem, used, unused, out = problem_of(), *(tmp_path / f"{name}.json" for name in ("used", "unused", "out"))
    assert tables.store(problem, UNUSED[fault], HOPPER, us=1.0, default_us=5.0)
    (entry,) = (entry for _, entry in tables.known(problem, HOPPER))
    assert not tables.serves(problem, HOPPER, entry)
    assert tables.serves(problem, HOPPER, entry, "any") == (fault == "class")
    tables.export_to(unused, HOPPER), tables.clear()
    store(problem, us=4.5)
    tables.export_to(used, HOPPER)
    tables.import_from(unused)
    assert found(problem) == chosen(problem)
    tables.clear(), tables.import_from(unused)
    assert found(problem) != chosen(problem)
    tables.import_from(used)
    assert found(problem) == chosen(problem), "the slower one, which is used"
    for order in ([used, unused], [unused, used]):
        assert tables.merge(order, out) == 1 and out.read_bytes() == table_in(folder).read_bytes()


@pytest.mark.parametrize("fault", UNUSED)
def test_of_a_table_of_another_triton_the_faster_entry_is_kept(fault: str, folder: Path, tmp_path: Path) -> None:
    """What runs there, and what its model chooses, is not known here."""
    problem, fast, slow, out = problem_of(), *(tmp_path / f"{name}.json" for name in ("fast", "slow", "out"))
    for path, selection, us in ((fast, UNUSED[fault], 1.0), (slow, another(problem), 4.5)):
        assert tables.store(problem, selection, HOPPER, us=us, default_us=5.0)
        tables.export_to(path, HOPPER), tables.clear()
        path.write_text(path.read_text().replace(f'"triton": "{files.TRITON}"', '"triton": "99.0"'))
    tables.import_from(fast), tables.import_from(slow)
    for order in ([fast, slow], [slow, fast]):
        assert tables.merge(order, out) == 1 and out.read_bytes() == table_in(folder).read_bytes()
        (entry,) = files.contents_of(out).table.entries.values()
        assert entry.us == 1.0


def test_an_entry_says_where_torch_is_faster(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With its versions, which must be those that run."""
    problem = problem_of()
    store(problem, bits="any")
    assert '"torch' not in table_in(folder).read_text() and not tables.torch_is_faster(problem, HOPPER)
    before = tables.contents(HOPPER, "any")
    assert store(problem, bits="any", torch_us=0.9)
    text = table_in(folder).read_text()
    entry = tables.entry(problem, HOPPER, "any")
    assert entry is not None and (entry.torch_us, entry.torch) == (0.9, tables.torchs_versions())
    read = files.parse(text.encode()).table
    assert read is not None and read.entries == {problem: entry} and read.text() == text
    assert tables.torch_is_faster(problem, HOPPER) and not tables.ignored()
    assert tables.contents(HOPPER, "any") != before, "ranks differ where one of them runs torch's"
    served = tables.lookup(problem, HOPPER, "any")
    assert served is not None and served.reason.endswith("the model's choice 2 us, torch 0.9 us")
    copy = folder.parent / "copy.json"
    assert tables.export_to(copy, HOPPER, "any") == 1 and copy.read_text() == text
    tables.clear()
    assert tables.import_from(copy) == 1 and tables.torch_is_faster(problem, HOPPER)
    assert not tables.torch_is_faster(problem, HOPPER, invariant=True)
    monkeypatch.setattr(tables.queries, "torchs_versions", lambda: "torch 9.9")
    assert not tables.torch_is_faster(problem, HOPPER) and tables.contents(HOPPER, "any") == before
    assert tables.ignored() == {
        "user's table: torch is faster, and its bits depend on the number of rows": 1,
        f"user's table: {entry.torch} is faster, and this is torch 9.9": 1,
    }


def test_what_is_asked_first_decides_whether_torch_is_faster(folder: Path) -> None:
    problem = problem_of()
    store(problem)
    assert not tables.torch_is_faster(problem, HOPPER)
    store(problem, bits="any", torch_us=0.9)
    assert tables.torch_is_faster(problem, HOPPER) and not tables.torch_is_faster(problem_of(1), HOPPER)


@pytest.mark.parametrize(
    "how", [{"torch_us": 1.0}, {"torch_us": 0.001}, {"torch_us": 0.0}, {"torch": ""}, {"torch": 3}, {"torch_us": -1}]
)
def test_an_entry_that_says_nonsense_of_torch_is_none(how: dict[str, object], folder: Path) -> None:
    store(problem_of(), bits="any", torch_us=0.9)
    document = json.loads(table_in(folder).read_text())
    document["entries"][0].update(how)
    found = files.parse(json.dumps(document).encode())
    assert found.wrong is not None and found.wrong[0] == "wrong-entries" and not found.table.entries


def test_torch_is_in_no_table_of_the_same_bits(folder: Path) -> None:
    with pytest.raises(ValueError, match='bits="any" alone'):
        store(problem_of(), torch_us=0.9)
    with pytest.raises(ValueError, match="is faster"):
        store(problem_of(), bits="any", torch_us=1.1)
    store(problem_of(), bits="any", torch_us=0.9)
    text = table_in(folder).read_text()
    found = files.parse(text.replace('"bits": "any"', '"bits": "same"').encode())
    assert found.wrong is not None and "other bits than the model's choice" in found.wrong[1]


def test_versions_of_torchs_product_name_its_library(monkeypatch: pytest.MonkeyPatch) -> None:
    cases = (None, None, ""), ("13.0", None, ", CUDA 13.0"), ("13.0", "13.1.0", ", cuBLAS 13.1.0")
    for cuda, cublas, of_library in cases:
        monkeypatch.setattr(torch.version, "cuda", cuda)
        monkeypatch.setattr(tables.records, "cublas_version", lambda cuda, found=cublas: found)
        assert tables.torchs_versions() == f"torch {torch.__version__}{of_library}"
