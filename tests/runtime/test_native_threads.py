"""Calls that C++ launches in threads that Python did not start, beside signals, forks and the garbage collector: in
processes of their own, which must end by themselves."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.processes import printed
from tests.support.tiers import one

pytestmark = pytest.mark.slow

BEGINNING = """
import ctypes, gc, os, signal, sys, threading, time, warnings
from pathlib import Path
import pytest, torch, triton_gemm
from tests.runtime import test_native_products as products
from tests.support import fake_driver
from triton_gemm.functional import fast_path, ops, routing
from triton_gemm.problem import SUM
from triton_gemm.runtime import native, plan, policies
from triton_gemm.selection import generation

warnings.simplefilter("ignore")
patch = pytest.MonkeyPatch()
driver = products.route(patch, sys.argv[1])
fake_driver.plan_for_hopper(patch)
# What a driver would launch with, and needs no Python: a function of libc that does nothing and returns 0.
nothing = ctypes.cast(ctypes.CDLL(None).posix_spawnattr_destroy, ctypes.c_void_p).value
A = B = products.A = products.B = products.OUT = torch.ones(64, 64, dtype=torch.bfloat16)
X = torch.eye(8)
# Graphs of autograd keep these, too: torch takes the GIL where a thread drops a tensor that Python alone keeps then.
graphs = [x * torch.ones((), requires_grad=True) for x in (A, X)]

def know(overload="mm"):
    products.make_known(driver, overload)
    native.module().connect(*[nothing] * 4)

def launched():
    return routing._by_cpp.launched(True).get("mm", 0)

scripted = torch.jit.CompilationUnit('''
def multiply(a, b, count: int):
    c = a
    for _ in range(count):
        c = torch.mm(c, b)
    return c
def start(a, b, count: int):
    return torch.jit.fork(multiply, a, b, count)
def fill(a, b, c, count: int):
    for _ in range(count):
        torch.mm(a, b, out=c)
    return count
def start_filling(a, b, c, count: int):
    return torch.jit.fork(fill, a, b, c, count)
def add(x, count: int):
    vector, y = x[0], x
    for _ in range(count):
        vector = torch.addmv(vector, x, vector)
        y = torch.mm(y, x).addmm_(x, x)
    return y + vector
def start_adding(x, count: int):
    return torch.jit.fork(add, x, count)
def multiply_integers(x, count: int):
    x = x.to(torch.int8)
    for _ in range(count):
        x = torch._int_mm(x, x).to(torch.int8)
    return x
def start_integers(x, count: int):
    return torch.jit.fork(multiply_integers, x, count)
''')

def start(count, threads=2):
    # Of what is in the table, and of what stays torch's.
    return [scripted.start(x, y, count) for x, y in ((A, B), (X, X))[:threads]]

def holding_the_gil(running, patience_s=20):
    # Whether they end while this thread holds the GIL.
    usleep = ctypes.PyDLL(None).usleep
    until = time.monotonic() + patience_s
    while not all(x.done() for x in running) and time.monotonic() < until:
        usleep(1000)
    return all(x.done() for x in running)
"""

# Each with what it must do, in a sentence.
SCRIPTS = {
    "rules begin and end": """
with triton_gemm.use(only=torch.bfloat16):
    know()
    torch.mm(A, B)
    assert launched() == 1
for _ in range(3):
    running = start(3_000) + start(3_000)
    while not all(x.done() for x in running):
        with triton_gemm.use(only=torch.bfloat16):
            torch.mm(X, X)
        try:
            with triton_gemm.use(only="bmm"):
                raise KeyError
        except KeyError:
            pass
    assert all(x.wait().shape[0] in (8, 64) for x in running)
assert launched() > 0
""",
    "no call needs the GIL where nothing is routed": """
with triton_gemm.use(only=torch.bfloat16):
    know()
sys.setswitchinterval(1000)
assert holding_the_gil([*start(300), scripted.start_adding(X, 300), scripted.start_integers(X, 300)])
assert launched() == 0
""",
    # Also if operands have new addresses, as results do, and if K is split.
    "no call in the table needs the GIL": """
C = torch.empty_like(A)
products.OUT = C
long = [torch.ones(*size, dtype=torch.bfloat16) for size in ((64, 8192), (8192, 256), (64, 256))]
graphs += [x * torch.ones((), requires_grad=True) for x in (C, *long)]
patch.setattr(native, "is_of_stream", lambda *_: True)
with triton_gemm.use(only=torch.bfloat16):
    know()
    know("mm.out")
    torch.mm(A, B, out=C)
    products.A, products.B, products.OUT = long
    know("mm.out")
    torch.mm(*long[:2], out=long[2])
    sys.setswitchinterval(1000)
    filling = [scripted.start_filling(*x, 100) for x in ((A, B, C), (A, B, C), long)]
    assert holding_the_gil([*filling, scripted.start(A, B, 100)])
    assert products.launched() == {"mm": 100, "mm.out": 302}
    assert any(x.plan.shares for x in routing._rules[-1].fast.calls.values())
""",
    # Once Python has decided a call like them, and left it to torch.
    "nor does what a rule leaves to torch": """
with triton_gemm.use(only=torch.bfloat16):
    torch.mm(X, X)
    triton_gemm.report_routing(reset=True)
    sys.setswitchinterval(1000)
    assert holding_the_gil([scripted.start(X, X, 300), scripted.start_adding(X, 300)])
    assert triton_gemm.report_routing(reset=True) == {
        ("addmm_", "torch: it is not routed"): 300,
        ("addmv", "torch: it is not routed"): 300,
        ("mm", "torch: torch.float32 is not in only="): 600,
    }
    assert triton_gemm.report_routing() == {}
""",
    # Under rules that C++ keeps, and where Python decides each call.
    "threads of Python run while torch's own kernel computes": """
large = torch.ones(1500, 1500, dtype=torch.float64)
ticks, until = [], []
def tick():
    while not until:
        ticks.append(time.monotonic())
        time.sleep(1e-3)
thread = threading.Thread(target=tick, daemon=True)
thread.start()
for rule in ({"exclude": torch.float64}, {"predicate": lambda *_: False}):
    with triton_gemm.use(**rule):
        for call in (lambda: torch.mm(large, large), lambda: torch.addmm(large, large, large, beta=2)):
            begin = time.monotonic()
            call()
            end = time.monotonic()
            times = [begin, *(x for x in ticks if begin < x < end), end]
            gap = max(y - x for x, y in zip(times, times[1:]))
            assert gap < 0.8 * (end - begin), (rule, gap, end - begin)
until.append(True)
thread.join()
""",
    # As a signal's handler may, wherever Python looks for signals. What C++ does then is what the rules say.
    "handlers that raise leave C++ with the rules": """
class Stop(Exception): pass
files = [sys.modules[x].__file__ for x in (routing.__name__, routing.Rule.__module__, type(routing._by_cpp).__module__)]
def block():
    with triton_gemm.use(only="bmm"):
        with triton_gemm.use(only=torch.bfloat16):
            pass
def switch():
    triton_gemm.enable(only=torch.bfloat16)
    triton_gemm.disable()
def within():
    with triton_gemm.use(only=torch.bfloat16):
        triton_gemm.enable(only="bmm")
        triton_gemm.disable()
def stop_at(number):
    def trace(frame, event, argument):
        nonlocal number
        if frame.f_code.co_filename not in files:
            return None
        number -= event in ("call", "line", "return")
        if number == 0:
            raise Stop
        return trace
    return trace
with triton_gemm.use(only=torch.bfloat16):
    know()
for function in (block, switch, within):
    function()
    at, stopped = 0, True
    while stopped:
        at, stopped = at + 1, False
        sys.settrace(stop_at(at))
        try:
            function()
        except Stop:
            stopped = True
        sys.settrace(None)
        launched()
        routed = bool(routing._rules) and "bmm" not in routing._rules[-1].only
        torch.mm(A, B)
        assert launched() == routed, (function, at, routing._rules)
        while routing._rules:
            routing._end(routing._rules[-1])
        torch.mm(A, B)
        assert launched() == 0, (function, at)
    assert at > 30, at
""",
    "libraries beneath and above enter and leave": """
def library(add):
    found, before = torch.library.Library("aten", "IMPL"), torch.library.get_kernel("aten::mm", "CPU")
    kernel = lambda keys, *x: before.call_boxed(keys, *x) + add
    found.impl("mm", kernel, "CPU", with_keyset=True, allow_override=True)
    return found
with triton_gemm.use(only=torch.bfloat16):
    know()
routing._unregister()
for first in ("beneath", "above"):
    for rule in ({}, {"exclude": "mm"}):
        beneath = library(1)
        with triton_gemm.use(**({"only": "bmm"} if rule else {"only": torch.bfloat16})):
            above = library(10)
            assert torch.mm(X, X).equal(X + 11)
            (beneath if first == "beneath" else above)._destroy()
            assert torch.mm(X, X).equal(X + (10 if first == "beneath" else 1))
            assert torch.mm(X, X).equal(X + (10 if first == "beneath" else 1))
            (above if first == "beneath" else beneath)._destroy()
            assert torch.mm(X, X).equal(X)
            launched()
            torch.mm(A, B)
            assert launched() == (not rule)
        assert torch.mm(X, X).equal(X)
        routing._unregister()
""",
    "tables that end are used again": """
def resident():
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
with triton_gemm.use(only=torch.bfloat16):
    know()
    [known] = routing._rules[-1].fast.calls.values()
    entry = native.entry_of(known.plan, *known.like)
call = "mm", A, B, (), SUM, None, True
def kept_and_dropped():
    table = native.table(native.module(), plan.MAX_PLANS)
    assert table.take(*call) is None, "it has another's calls"
    table.keep(call, entry)
    assert table.take(*call) is not None
for _ in range(100):
    kept_and_dropped()
before = resident()
for _ in range(3000):
    kept_and_dropped()
assert resident() - before < 20e6
""",
    "what handlers raise is heard": """
class Stop(Exception): pass
def handle(*_):
    raise Stop
signal.signal(signal.SIGALRM, handle)
with triton_gemm.use(only=torch.bfloat16):
    know()
    with policies.policy("cached"):
        pass  # from now on C++ asks for the policy of a backward
    heard = 0
    for i in range(400):
        try:
            signal.setitimer(signal.ITIMER_REAL, 2e-5 + i % 40 * 5e-6)
            for _ in range(400):
                torch.mm(A, B)
            signal.pause()
        except Stop:
            heard += 1
assert heard == 400, heard
""",
    "an entry that ends may call the table": """
with triton_gemm.use(only=torch.bfloat16):
    know()
    fast = routing._rules[-1].fast
    table = fast.table
    [known] = fast.calls.values()
    entry = native.entry_of(known.plan, *known.like)
    calls = 0
    class Ends:
        def __del__(self):
            global calls
            calls += 1
            table.take("mm", A, B, (), SUM, None, True)
            if calls % 3 == 0:
                table.forget()
            table.keep(arguments(calls), entry)
    def arguments(rows):
        return "mm", torch.empty(rows + 1, 64, dtype=torch.bfloat16), B, (), SUM, None, True
    small = native.table(native.module(), 3)
    for i in range(50):
        small.keep(arguments(i), entry._replace(plan=Ends()))
    small.keep(arguments(1), entry)
    small.forget()
    assert calls == 50, calls
""",
    "threads keep, forget and find": """
with triton_gemm.use(only=torch.bfloat16):
    know()
    fast = routing._rules[-1].fast
    [known] = fast.calls.values()
    entry = native.entry_of(known.plan, *known.like)
    running, ended = start(20_000), []
    def change():
        out = torch.empty_like(A)
        for i in range(2000):
            others = "mm", torch.empty(i + 1, 64, dtype=torch.bfloat16), B, (), SUM, None, True
            fast.table.keep(others, entry)
            fast.take("mm", A, B, (), SUM, out if i % 2 else None, dispatched=True)
            if i % 100 == 0:
                fast.table.forget()
                fast.table.keep(("mm", A, B, (), SUM, None, True), entry)
            if i % 500 == 0:
                generation.advance()
        ended.append(True)
    threads = [threading.Thread(target=change) for _ in range(2)]
    [x.start() for x in threads]
    [x.join() for x in threads]
    assert len(ended) == 2 and all(x.wait().shape[0] in (8, 64) for x in running)
    assert launched() > 0
""",
    "a child that is forked before launches by itself": """
child = os.fork()
if child == 0:
    signal.alarm(60)
    with triton_gemm.use(only=torch.bfloat16):
        know()
        torch.mm(A, B)
        os._exit(launched() != 1)
assert os.waitpid(child, 0)[1] == 0
""",
    # While threads look up calls. (Those that ask Python for more may hold a lock of its own at the fork.)
    "a child that was forked meanwhile multiplies": """
C = products.OUT = torch.empty_like(A)
graphs.append(C * torch.ones((), requires_grad=True))
with triton_gemm.use(only=torch.bfloat16):
    know("mm.out")
    torch.mm(A, B, out=C)
    running = [scripted.start_filling(A, B, C, 300_000) for _ in range(2)]
    children = 0
    while not all(x.done() for x in running):
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            assert torch.mm(X, X).equal(X)
            routing._rules[-1].fast.table.take("mm.out", A, B, (), SUM, C, True)
            os._exit(0)
        assert os.waitpid(child, 0)[1] == 0
        children += 1
    assert children > 3, children
""",
}


@pytest.mark.few(shows=one)
@pytest.mark.parametrize("name", SCRIPTS)
def test_calls_go_on(name: str, extension: Path) -> None:
    script = BEGINNING + SCRIPTS[name] + "print('ended', flush=True)\n"
    assert printed(script, extension) == "ended\n"
