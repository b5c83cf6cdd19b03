"""perf.kit: what the shipped machine code is chosen for, which kernels that takes, and the command."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from perf import kit as command
from perf import kit_choice as choice
from perf.models import products, zoo
from tests.support.patches import replace_all
from triton_gemm.kernels import forms
from triton_gemm.runtime import kit, kit_build

SEEDS = 5, 6


def in_turn(function: Any, values: Any, **_: Any) -> Any:
    """In the place of a pool of processes, which see no fakes."""
    return map(function, values)


@pytest.fixture(autouse=True)
def few(monkeypatch: pytest.MonkeyPatch) -> None:
    modes = {"bf16": 1.0, "fp16": 0.5, "fp8": 0.1}
    replace_all(monkeypatch, choice, DRAWN={"prefill": 4, "decode": 4}, LAYERS=3, MODES=modes)
    monkeypatch.setattr(zoo, "LIST", (zoo.BY_NAME["bert-base"],))


def test_what_is_called() -> None:
    """The same for a seed, others for another; every epilogue and both derivatives, in 16 bits."""
    first, again, other = (list(choice.calls(seed)) for seed in (SEEDS[0], *SEEDS))
    assert first == again != other
    epilogues = {call.groups[-1] for call in first}
    assert epilogues == {*choice.EPILOGUES, "backward", "of passes"}
    assert {call.groups[2] for call in first} == {"bf16", "fp16", "fp8"}
    of = {call.groups[-1]: call.problem for call in first}
    assert of["swiglu"].gate and of["swiglu"].activation == "silu"
    assert of["bias"].bias == "n" and of["beta"].has_beta
    assert {call.groups[3] for call in first if call.groups[-1] == "backward"} == {"nn", "tn"}
    assert all(call.groups[0] == "all" and call.weight > 0 for call in first)


def test_what_models_multiply() -> None:
    """Rotary embeddings, routers and experts of prompts of every residue, single tokens, and a training step."""
    model = zoo.BY_NAME["mixtral-8x7b"]
    found = products.problems(model, SEEDS[0])
    inner = model.sizes["intermediate_size"]
    rotary = [x for x in found if x.K == 1]
    assert {x.N % products.RESIDUES for x in rotary} == set(range(products.RESIDUES))
    assert {x.dtype for x in rotary} == {torch.float32} and {x.batch for x in rotary} == {1}
    experts = [x for x in found if x.groups == "m"]
    assert {(x.batch, x.N) for x in experts} >= {(8, 2 * inner), (8, 4096)}
    assert {x.M for x in experts if x.N == 4096} >= {2 * rows for rows in products.DECODED}
    linear, rows = {(x.M, x.N, x.K) for x in found if x.groups is None}, model.rows * model.length
    assert {(1, 8, 4096), (rows, 4096, 4096), (32000, 4096, rows)} <= linear  # a router, a layer, a weight's gradient
    assert [*found] == [*products.problems(model, SEEDS[0])] != [*products.problems(model, SEEDS[1])]


def test_the_heaviest_kernels_are_chosen() -> None:
    every, some = (choice.chosen(count, SEEDS[0]) for count in (10**6, 10))
    assert list(every)[:9] == list(some)[:9] and len(some) == 10 and len(every) > 20
    needed = choice.needed(SEEDS[0])
    assert all(keys[0] for _, _, keys in needed)
    assert len(needed) == 2 * len(list(choice.calls(SEEDS[0])))


def test_of_ties_a_kernel_that_others_need_is_chosen(monkeypatch: pytest.MonkeyPatch) -> None:
    """A call's choice, which it alone needs, is left out where it has a tie that others need."""
    calls = [choice.Call(None, weight, (name,)) for weight, name in ((5.0, "a"), (1.0, "b"), (3.0, "c"))]  # type: ignore[arg-type]
    options = {"a": [{"own": 1}, {"shared": 2}], "b": [{"shared": 2}], "c": [{"two": 3, "shared": 2}]}
    replace_all(monkeypatch, choice, GPUS=("h100",), calls=lambda _: calls, for_stand_ins=lambda *_: {})
    monkeypatch.setattr(choice, "options_of", lambda call, _: options[call.groups[0]])
    assert choice.chosen(9) == {"shared": 2, "two": 3} and choice.chosen(1) == {"shared": 2}


def test_some_are_chosen_as_stand_ins(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that the most calls lack, which would wait without: of what one lacks, one is enough."""
    monkeypatch.setattr(choice, "ProcessPoolExecutor", lambda **_: nullcontext(SimpleNamespace(map=in_turn)))
    options: dict[str, list[dict[str, Any]]] = {"a": [{"x": 1}, {"y": 1}], "b": [{"y": 1, "had": 1}]}
    options |= {"c": [{"had": 1}, {"x": 1}], "d": [{"two": 1, "more": 1}, {"z": 1}]}
    calls = [choice.Call(None, weight, (name,)) for name, weight in zip("abcd", (1.0, 2.0, 9.0, 0.5), strict=True)]  # type: ignore[arg-type]
    monkeypatch.setattr(choice, "stand_in_options", lambda call, _: options[call.groups[0]])
    pairs = [(call, "h100") for call in calls]
    found = choice.for_stand_ins(pairs, frozenset({"had"}), 9)
    assert found == {"y": pairs[0], "z": pairs[3]}
    assert list(choice.for_stand_ins(pairs, frozenset({"had"}), 1)) == ["y"]


def test_the_share_that_is_served() -> None:
    """Of all kernels all, of none nothing, and of some less among GEMMs that none was chosen for."""
    every = choice.chosen(10**6, SEEDS[0])
    rows = command.served(every, SEEDS[0])
    assert {tie for group, *_, tie, _ in rows if "SMs" not in str(group)} == {"100 %"}
    assert {share for *_, share in command.served((), SEEDS[0])} == {"0 %"}
    (_, number, *shares), *others = command.served(every, SEEDS[1])
    assert number == 2 * len(list(choice.calls(SEEDS[1])))
    assert [number // 2] * 4 == [count for group, count, *_ in others if "SMs" in str(group)]
    own, tie, stand_in = (float(str(share).removesuffix(" %")) for share in shares)
    assert 0 < own <= tie < stand_in < 100


def test_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "some.kit"
    assert command.main(["--check", "--out", str(file)]) == 1 and "there is no" in capsys.readouterr().err
    real, launches = kit_build.build, choice.chosen(10**6, SEEDS[0])
    shortest = {key: of for key, of in launches.items() if of[0].kernel.__name__ == "skinny_kernel"}
    requested: dict[str, Any] = {}

    def build(*given: Any, **how: Any) -> kit_build.Built:
        requested.update(how, launches=given[1])
        return real(given[0], dict(list(shortest.items())[:1]), *given[2:], **how | {"cache": tmp_path / "cache"})

    monkeypatch.setattr(kit_build, "build", build)
    monkeypatch.setattr(command, "chosen", lambda count: dict(list(launches.items())[:count]))
    monkeypatch.setattr(command, "compile_ahead", lambda *_: None)
    assert command.main(["--out", str(file), "--count", "7"]) == 0
    assert len(requested["launches"]) == 7 and requested["cache"] == command.CACHE
    assert "1 kernels, 1 compiled" in capsys.readouterr().out
    assert command.main(["--served", str(SEEDS[0]), "--out", str(file)]) == 0
    assert "1 kernels, 0 of them stale" in (out := capsys.readouterr().out) and "swiglu" in out
    monkeypatch.setattr(kit, "source_hash", lambda _: "changed")
    assert command.main(["--check", "--out", str(file)]) == 1 and "1 of them stale" in capsys.readouterr().out


def test_what_a_file_lacks_is_compiled_ahead(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Into the cache that the kit is built from."""
    every = choice.chosen(10**6, SEEDS[0])
    skinny = [key for key, of in every.items() if of[0].kernel.__name__ == "skinny_kernel"]
    launches = {key: every[key] for key in skinny[:2]}
    monkeypatch.setattr(command, "CACHE", tmp_path / "cache")
    command.compile_ahead(tmp_path / "some.kit", launches)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 2
    kit_build.build(tmp_path / "some.kit", launches, (9, 0), cache=command.CACHE)
    assert len(list((tmp_path / "cache").rglob("*.cubin"))) == 2
    monkeypatch.setattr(command, "CACHE", tmp_path / "other")
    command.compile_ahead(tmp_path / "some.kit", launches)
    assert not list(tmp_path.glob("other/*"))


def test_bits_are_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each kernel of the kit once, with what the installed Triton compiles, where it can."""
    with forms.of_kits():
        needed = [x for x in choice.needed(SEEDS[0]) if x[0].groups[-1] == "bias"]
    keys = dict.fromkeys(key for *_, options in needed for key in options[0])
    launched = []

    def output(problem: object, selection: object, device: object, of_kits: bool) -> torch.Tensor:
        launched.append(of_kits)
        if not of_kits and len(launched) > 4:
            raise RuntimeError("this Triton has no clusters")
        return torch.tensor([len(launched) // 4])

    replace_all(monkeypatch, command, needed=lambda _: needed, output=output)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    with forms.of_kits():
        pairs = command.calls_of_each(SimpleNamespace(kernels=keys))  # type: ignore[arg-type]
    assert len(keys) / 3 < len(pairs) <= len(keys) < len(needed)
    found = command.compare(frozenset(keys), pairs)
    assert found.keys == keys.keys() and len(found.other) == found.same == 1 and "bias n" in found.other[0]
    assert launched == [True, False] * (found.refused + 2) and found.refused > 0
