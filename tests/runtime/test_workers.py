"""Processes, threads and many problems, without a GPU: workers that are forked or spawned, caches that stay small, and
calls that end before they are done."""

from __future__ import annotations

import functools
import importlib
import multiprocessing
import os
import pkgutil
import threading
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch

import triton_gemm
from tests.runtime.test_plan import half, key_of, plan_without_a_gpu
from tests.support import fake_driver
from tests.support.patches import replace_all
from tests.support.processes import os_forked, printed
from tests.support.table_fakes import HOPPER, problem_of
from tests.support.threads import at_once
from triton_gemm.functional import api, fast_path
from triton_gemm.hardware import driver as hardware_driver
from triton_gemm.problem import Request
from triton_gemm.runtime import plan, policies, step, workspace
from triton_gemm.selection.select import remembered

SECONDS = 60  # after which a worker hangs
NOT_IMPORTED = ("triton_gemm.ladder.", "triton_gemm.cli", "triton_gemm.__main__")  # rungs, and commands


def modules() -> Iterator[Any]:
    """All of the package that a product may use."""
    for found in pkgutil.walk_packages(triton_gemm.__path__, "triton_gemm."):
        if not found.name.startswith(NOT_IMPORTED):
            yield importlib.import_module(found.name)


# --- Forked and spawned workers ---

LOCKS = (type(threading.Lock()), type(threading.RLock()))


def locks() -> dict[str, Any]:
    """Every lock of every module once, by its first name."""
    found: dict[int, tuple[str, Any]] = {}
    for module in modules():
        for name, value in vars(module).items():
            if isinstance(value, LOCKS):
                found.setdefault(id(value), (f"{module.__name__}.{name}", value))
    return dict(found.values())


def planned() -> list[str]:
    """What a worker does that plans: new products, under a policy of its own."""
    triton_gemm.set_policy("model")  # advances the generation, as a new table would
    sizes = [(100 + os.getpid() % 50, 72, 136), (512, 1024, 2048)]
    return [str(policies.choose(problem_of(*size), HOPPER)) for size in sizes][1:]


FORK = """
from tests.runtime import test_workers
test_workers.fork_while_all_is_locked()
"""


def fork_while_all_is_locked() -> None:
    """Every lock is held by another thread at the fork, those of a plan that is being compiled too."""
    held, made = locks(), step.Step(SimpleNamespace(arguments={}), ())
    named = {"runtime.plan._planning", "tables.queries._lock", "functional.overrides._lock"}
    assert {f"triton_gemm.{name}" for name in named} <= set(held)
    plan.PLANS["compiling",] = SimpleNamespace(steps=[made])
    taken, end = threading.Event(), threading.Event()

    def hold() -> None:
        for lock in (*held.values(), made.compiling):
            lock.acquire()
        taken.set()
        end.wait()
        for lock in (*held.values(), made.compiling):
            lock.release()

    holder = threading.Thread(target=hold, daemon=True)
    holder.start()
    taken.wait()

    def free() -> None:
        for name, lock in locks().items():
            assert lock.acquire(timeout=5), f"{name} is held for ever: compat.free_in_children"
        assert made.compiling.acquire(timeout=5), "a plan's step is held for ever"

    assert os_forked(free)() == os_forked(planned)() == 0
    end.set()
    holder.join()


def test_a_forked_worker_plans_whatever_its_parent_held() -> None:
    """Where threads of the parent plan, compile, route and record at the fork."""
    printed(FORK)


def test_a_spawned_worker_plans_as_its_parent() -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        theirs = pool.apply_async(planned).get(SECONDS)
    policy = policies._process
    try:
        assert planned() == theirs
    finally:
        policies._process = policy


# --- 100,000 problems ---

# By module: caches that stay small, because there are few devices, dtypes, configurations and tables as keys.
SMALL = {
    "compat.native": "native_key",
    "compat.torch_compile": "_inductor_choices",
    "functional.left_to_torch": "warn_of_a_guess",
    "hardware.device": "_cuda_device",
    "hardware.driver": "_library _primary_context cublas_version",
    "hardware.graphs": "own_stream",
    "reporting.fingerprint": "_sources",
    "tables.files": "has_flock",
    "kernels": "__getattr__",
    "learning.block": "_pattern",
    "kernels.warp_specialised.configs": "listed of_itemsize",
    "kernels.warp_specialised.costs": "_step",
    "kernels.warp_specialised.host": "wide_columns wide_memory",
    "kernels.warp_specialised.widths": "_deepest _forms",
    "hardware.nvml": "gpu power_limit",
    "problem": "_one_plane",
    "tables.queries": "_users_folder",
}


def caches() -> dict[str, Any]:
    found = {}
    for module in modules():
        for value in vars(module).values():
            if isinstance(value, functools._lru_cache_wrapper) and value.__module__ == module.__name__:
                found[f"{value.__module__}.{value.__name__}"] = value
    return found


def test_every_cache_has_a_bound() -> None:
    """But those by what a process has few of; a problem is nothing of that."""
    unbounded = {name for name, found in caches().items() if found.cache_info().maxsize is None}
    assert unbounded == {f"triton_gemm.{module}.{name}" for module, names in SMALL.items() for name in names.split()}


def test_a_hundred_thousand_problems_stay_within_the_caches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Plans, fast paths and selections, of products that each come once and of some that come again."""
    made = plan_without_a_gpu(half(64, 32), half(32, 48), half(64, 48))
    replace_all(monkeypatch, plan, PLANS={}, _new_plan=lambda *_: made)
    monkeypatch.setattr(api, "_fast", fast_path.FastPath())
    by_model = functools.lru_cache(remembered.cache_info().maxsize)(lambda problem, device: made.selection)
    monkeypatch.setattr(policies, "remembered", by_model)
    monkeypatch.setattr(policies.tables, "lookup", lambda *_: None)
    memory = half(1)
    b, first = memory.expand(32, 48), None
    for M in range(1, 100_001):
        a, c = memory.expand(M, 32), memory.expand(M, 48)
        assert plan.plan_for(a, b, c) is made
        if M % 10 == 0:
            problem = Request().problem(a, b, c)
            policies.choose(problem, HOPPER)
            first = first or problem
            key, nothing = api._fast.take("matmul", a, b, (), Request())
            assert nothing is None
            api._fast.keep(key, fast_path.Known(made, object))
        assert len(plan.PLANS) <= plan.MAX_PLANS
    assert len(plan.PLANS) == len(api._fast.calls) == plan.MAX_PLANS
    assert by_model.cache_info().currsize == by_model.cache_info().maxsize == plan.MAX_PLANS
    assert first is not None and by_model.cache_info().misses == 10_000


def test_an_address_that_comes_again_with_other_strides_has_another_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the same memory, and with the same shapes: what is launched knows the strides it was made with."""
    memory = half(64 * 64)
    b, c = half(32, 48), half(64, 48)
    layouts = [(32, 1), (1, 64), (64, 1), (33, 1), (0, 1)]
    views = [memory.as_strided((64, 32), strides) for strides in layouts]
    made = lambda problem, *_: SimpleNamespace(problem=problem, instead=None, selection=None)  # noqa: E731
    replace_all(monkeypatch, plan, PLANS={}, _new_plan=made)
    for x in [*views, *reversed(views)]:
        assert plan.plan_for(x, b, c).problem.a.strides == (0, *x.stride())
    assert len(plan.PLANS) == len(layouts) == len({key_of(x, b, c) for x in views})
    assert len(layouts) == len({plan.key_of(Request(), x, b, None) for x in views}), "where the call makes its result"


# --- Calls that end before they are done ---


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> plan.GemmPlan:
    """A plan that compiles nothing, and is found by `plan_for`."""
    fake_driver.launch_on_device_0(monkeypatch)
    made = plan_without_a_gpu(half(64, 32), half(32, 48), half(64, 48))
    replace_all(monkeypatch, plan, PLANS={}, _new_plan=lambda *_: made)
    return made


@pytest.mark.parametrize("error", [KeyboardInterrupt("Ctrl-C"), RuntimeError("PassManager::run failed")], ids=repr)
@pytest.mark.parametrize("where", ["choice", "compiler", "loading"])
def test_after_an_interruption_or_an_error_the_next_call_begins_anew(
    where: str, error: BaseException, on_a_gpu: plan.GemmPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ctrl-C, or an error, while a kernel is chosen, compiled or loaded leaves no lock held, and nothing half made."""
    a, b, c = half(64, 32), half(32, 48), half(64, 48)
    driver = fake_driver.take_driver(monkeypatch)
    replace_all(monkeypatch, step, compiled=lambda launch, *_: launch, machine_code=fake_driver.made_up)
    places = {"choice": (plan, "_new_plan"), "compiler": (step, "compiled"), "loading": (hardware_driver, "load")}
    with monkeypatch.context() as patch:
        patch.setattr(*places[where], Mock(side_effect=error))
        for _ in range(2):
            with pytest.raises(type(error), match=str(error)):
                plan.multiply(a, b, c)
    assert not on_a_gpu.compiled and all(one.call is None for one in on_a_gpu.steps) and driver.by_python == []
    at_once(*16 * [lambda: plan.multiply(a, b, c)])  # in threads, which would wait if the lock were still held
    assert len(driver.by_python) == 16 * len(on_a_gpu.steps) and on_a_gpu.compiled and len(driver.kernels) == 1


@pytest.fixture
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The id of the capture that is under way, or 0. Workspaces are on the CPU, and none exists yet."""
    number = [0]
    replace_all(monkeypatch, workspace, _workspaces={}, capture_id=lambda _: number[0])
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: number[0] > 0)
    for name in ("empty", "zeros"):
        make = getattr(torch, name)
        on_the_cpu = lambda *size, device, make=make, **how: make(*size, device="cpu", **how)  # noqa: E731
        monkeypatch.setattr(workspace.torch, name, on_the_cpu)
    return number


@pytest.mark.parametrize("fails", [1, 2], ids=["memory", "counters"])
def test_a_workspace_that_does_not_fit_leaves_the_one_before(
    fails: int, captures: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """torch's error is raised, and the next call that fits works."""
    full = [fails]

    def allocate(make: Callable[..., torch.Tensor], *size: Any, **how: Any) -> torch.Tensor:
        full[0] -= 1
        if full[0] == 0:
            raise torch.OutOfMemoryError("CUDA out of memory.")
        return make(*size, **how)

    for name in ("empty", "zeros"):
        monkeypatch.setattr(workspace.torch, name, functools.partial(allocate, getattr(torch, name)))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        workspace.workspace(0, 7, 1 << 20)
    assert not workspace._workspaces
    small = workspace.workspace(0, 7, 1 << 20)
    full[0] = 1
    with pytest.raises(torch.OutOfMemoryError):
        workspace.workspace(0, 7, 64 << 20)
    assert workspace.workspace(0, 7, 1 << 20) is small and int(small[1].sum()) == 0
    larger = workspace.workspace(0, 7, 64 << 20)
    assert larger[0].numel() == 16 << 20 and larger[1] is small[1], "counters that a launch may still use are kept"


def test_the_memory_of_captures_that_ended_is_given_up(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """By the next launch outside of captures, not by launches in others. New workspaces are reported to followers."""
    monkeypatch.setattr(workspace, "_followers", [])
    unreported: list[int] = []
    for _ in range(2):
        workspace.follow(unreported.clear)
    for captures[0], kept, changes in ((0, [0], True), (5, [0, 5], True), (6, [0, 5, 6], True), (0, [0], False)):
        unreported.append(1)
        found = workspace.workspace(0, 7, 1 << 20)
        assert [key[2] for key in workspace._workspaces] == kept and changes != bool(unreported)
        assert workspace.is_of_stream(0, 7, found) == (captures[0] == 0)


def test_the_per_thread_stream_is_another_in_each_thread(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All these streams have one handle. Freed memory goes to another thread only after a synchronisation."""
    waited: list[int] = []
    monkeypatch.setattr(torch.cuda, "synchronize", waited.append)

    def take() -> list[torch.Tensor]:
        found = workspace.workspace(0, workspace.PER_THREAD, 1 << 20)
        assert workspace.workspace(0, workspace.PER_THREAD, 1 << 20) is found
        return found

    found = [one for _ in range(workspace.MAX_WORKSPACES + 3) for one in at_once(take)]
    assert len({id(x) for x in found}) == len(found), "also where a thread has the number of one that has ended"
    assert len(workspace._workspaces) == workspace.MAX_WORKSPACES and waited == [0] * 3
    assert not workspace.is_of_stream(0, workspace.PER_THREAD, found[-1])
    assert workspace.workspace(0, 7, 1 << 20) is workspace.workspace(0, 7, 1 << 20)


def test_nothing_is_kept_of_the_pool_of_graph_trees(captures: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """Inductor warms up and captures in this pool, on a stream of its own, and overwrites the pool."""
    monkeypatch.setattr(workspace, "stream_of_graph_trees", lambda device: 7 if device == 0 else None)
    for captures[0] in (0, 5):
        memory, counters = workspace.workspace(0, 7, 1 << 20)
        assert memory.numel() == workspace.MINIMUM // 4 and int(counters.sum()) == 0
        again = workspace.workspace(0, 7, 1 << 20)
        assert memory is not again[0] and counters is not again[1] and not workspace._workspaces
        assert not workspace.is_of_stream(0, 7, again)
    for captures[0], device, stream in ((0, 0, 8), (5, 0, 8), (0, 1, 7)):
        assert workspace.workspace(device, stream, 1 << 20) is workspace.workspace(device, stream, 1 << 20)
    assert list(workspace._workspaces) == [(0, 8, 0, 0), (1, 7, 0, 0)]


def test_a_plan_without_memory_launches_nothing_and_then_works(
    on_a_gpu: plan.GemmPlan, monkeypatch: pytest.MonkeyPatch
) -> None:
    a, b, c = half(64, 32), half(32, 48), half(64, 48)
    launched: list[object] = []
    on_a_gpu.steps = [SimpleNamespace(call=lambda stream, _: launched.append(stream))]
    on_a_gpu.compiled = True
    on_a_gpu.shares = on_a_gpu.allocates = True
    on_a_gpu.names = ("a", "b", "c", "workspace", "counters")
    monkeypatch.setattr(plan, "workspace", Mock(side_effect=torch.OutOfMemoryError("CUDA out of memory.")))
    with pytest.raises(torch.OutOfMemoryError, match="CUDA out of memory"):
        plan.multiply(a, b, c)
    assert launched == []
    monkeypatch.setattr(plan, "workspace", lambda *_: [half(8), half(8)])
    plan.multiply(a, b, c)
    assert launched == [0]
