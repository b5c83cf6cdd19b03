"""`use()` begins and ends while other threads multiply, a signal's handler raises, the garbage collector ends blocks,
and another library overrides the same products: in processes of their own, which must end by themselves."""

from __future__ import annotations

import pytest

from tests.support.processes import printed
from tests.support.tiers import one

BEGINNING = """
import gc, signal, sys, threading, time, warnings
import torch, triton_gemm
from triton_gemm.functional import routing
warnings.simplefilter("ignore")
X = torch.eye(8)
"""

# Each with what it prints at its end.
SCRIPTS = {
    "threads of Python": """
failures, until = [], time.monotonic() + 3
def multiply():
    try:
        while time.monotonic() < until and not failures:
            with triton_gemm.use(only=torch.float64):
                assert torch.mm(X, X).equal(X)
            assert torch.mm(X, X).equal(X)
    except BaseException as error:
        failures.append(error)
threads = [threading.Thread(target=multiply) for _ in range(4)]
[thread.start() for thread in threads]
[thread.join() for thread in threads]
assert not failures, failures
assert ("mm", "triton_gemm") not in triton_gemm.report_routing()
""",
    # torch frees a kernel that is taken back, and these threads are not Python's, so that it does not know of them.
    "threads that Python did not start": """
start = torch.jit.CompilationUnit('''
def multiply(x, count: int):
    for _ in range(count):
        x = torch.mm(x, x)
    return x
def start(x, count: int):
    return torch.jit.fork(multiply, x, count)
''').start
for _ in range(4):
    running = [start(X, 500) for _ in range(4)]
    while not all(x.done() for x in running):
        with triton_gemm.use(only="bmm"):
            pass
    assert all(x.wait().equal(X) for x in running)
""",
    # A block whose generator is part of a cycle ends when the collector comes to it, which may be within another's
    # beginning or end, in the same thread.
    "blocks that the collector ends": """
class Holder: pass
def abandon():
    def hold():
        with triton_gemm.use(only="bmm"):
            yield
    holder = Holder()
    holder.generator, holder.self = hold(), holder
    next(holder.generator)
gc.disable()
def collecting(function):
    def called(*arguments):
        gc.collect(0)
        return function(*arguments)
    return called
for owner, name in ((routing._by_cpp, "change"), (torch.library, "get_kernel")):
    before = getattr(owner, name)
    for _ in range(20):
        abandon()
        setattr(owner, name, collecting(before))
        with triton_gemm.use(only="mm"):
            torch.mm(X, X)
            if name == "get_kernel":
                routing._overrides._register_anew()
        abandon()
        triton_gemm.enable()
        triton_gemm.disable()
        setattr(owner, name, before)
gc.collect()
assert routing._rules == [], routing._rules
""",
    "a signal's handler with a block": """
def handle(*_):
    with triton_gemm.use(only="bmm"):
        torch.mm(X, X)
signal.signal(signal.SIGALRM, handle)
signal.setitimer(signal.ITIMER_REAL, 1e-3, 1e-3)
until = time.monotonic() + 3
while time.monotonic() < until:
    with triton_gemm.use(only="bmm"):
        torch.mm(X, X)
    routing._unregister()
signal.setitimer(signal.ITIMER_REAL, 0)
assert routing._rules == [], routing._rules
""",
    # As a signal's handler may, wherever Python looks for signals: at each line, and where functions begin.
    "handlers that raise": """
class Stop(Exception): pass
def block():
    with triton_gemm.use(only="mm"):
        with triton_gemm.use(only="bmm"):
            pass
def stop_at(number):
    def trace(frame, event, argument):
        nonlocal number
        if frame.f_code.co_filename not in (routing.__file__, sys.modules[routing.Rule.__module__].__file__):
            return None
        number -= event in ("call", "line")
        if number == 0:
            raise Stop
        return trace
    return trace
block()
at, stopped = 0, True
while stopped:
    at, stopped = at + 1, False
    sys.settrace(stop_at(at))
    try:
        block()
    except Stop:
        stopped = True
    sys.settrace(None)
    gc.collect()
    assert routing._rules == [], at
assert at > 50, at
""",
    "another library's override that ends first": """
def other():
    library, before = torch.library.Library("aten", "IMPL"), torch.library.get_kernel("aten::mm", "CPU")
    library.impl("mm", lambda keys, *x: before.call_boxed(keys, *x) + 1, "CPU", with_keyset=True, allow_override=True)
    return library
theirs = other()
assert torch.mm(X, X).equal(X + 1)
with triton_gemm.use(exclude="mm"):
    assert torch.mm(X, X).equal(X + 1), "what stays torch's is theirs"
    theirs._destroy()
    assert torch.mm(X, X).equal(X)
    assert torch.bmm(X[None], X[None])[0].equal(X)
assert torch.mm(X, X).equal(X)
assert triton_gemm.report_routing()["bmm", "triton_gemm"] == 1
with triton_gemm.use():
    assert torch.mm(X, X).equal(X) and triton_gemm.report_routing()["mm", "triton_gemm"] == 1
""",
    "a first block that is interrupted": """
impl = torch.library.Library.impl
for number in range(1, 12):
    left = number
    def interrupted(*arguments, **named):
        global left
        left -= 1
        if left == 0:
            raise KeyboardInterrupt
        return impl(*arguments, **named)
    torch.library.Library.impl = interrupted
    try:
        with triton_gemm.use():
            raise AssertionError("nothing has interrupted it")
    except KeyboardInterrupt:
        pass
    torch.library.Library.impl = impl
    assert torch.mm(X, X).equal(X) and not routing._rules and not routing._overrides.libraries
    with triton_gemm.use():
        assert torch.mm(X, X).equal(X)
    routing._unregister()
""",
    "a module that is loaded again": """
import importlib
for _ in range(2):
    with triton_gemm.use():
        assert torch.mm(X, X).equal(X)
    importlib.reload(routing)
    assert torch.mm(X, X).equal(X) and torch.addmv(X[0], X, X[0]).equal(2 * X[0])
    with routing.use():
        assert torch.mm(X, X).equal(X) and torch.addmv(X[0], X, X[0]).equal(2 * X[0])
""",
    "another library's override that ends last": """
with triton_gemm.use():
    library, before = torch.library.Library("aten", "IMPL"), torch.library.get_kernel("aten::mm", "CPU")
    library.impl("mm", lambda keys, *x: before.call_boxed(keys, *x) + 1, "CPU", with_keyset=True, allow_override=True)
    assert torch.mm(X, X).equal(X + 1)
assert torch.mm(X, X).equal(X + 1)
library._destroy()
assert torch.mm(X, X).equal(X)
with triton_gemm.use():
    assert torch.mm(X, X).equal(X)
assert triton_gemm.report_routing() == {("mm", "triton_gemm"): 2}
""",
}


@pytest.mark.few(shows=one)
@pytest.mark.slow
@pytest.mark.parametrize("name", SCRIPTS)
def test_products_go_on(name: str) -> None:
    assert printed(BEGINNING + SCRIPTS[name] + "print('ended')\n", timeout=120) == "ended\n"
