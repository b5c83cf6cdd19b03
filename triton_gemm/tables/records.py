"""Records of a table as JSON and back, and whether what a file says may be launched.

A record is a dataclass, and is written by its fields: one that a kernel's Config gains is written too, and where a file
lacks it, it has its default. What is read is held to the fields' types; it is data, and nothing in it is called.
"""

from __future__ import annotations

import json
import math
import sys
import types
import typing
from dataclasses import dataclass, fields, is_dataclass
from datetime import datetime, timezone
from functools import lru_cache
from typing import Any, get_args, get_origin

import torch
import triton

from .. import kernels
from ..arithmetic import ARITHMETICS, ScaleKind
from ..hardware.device import DeviceInfo
from ..hardware.driver import cublas_version
from ..kernels.candidate import Algorithm
from ..kernels.schedule import Schedule
from ..problem import ACTIVATIONS, GemmProblem
from ..selection.select import Selection

LARGEST = 2**48  # of sizes and strides, in elements
LONGEST = 200  # characters of a text
LEAST_US = 0.01  # microseconds that anything takes: a file that says less would win against all others
OPTIONAL = ("least_rows", "torch_us", "torch", "samples")  # fields of an entry that a file has where they say something
RARE = ("residual", "gate", "preactivation")  # fields of a problem, likewise

_DTYPES = {
    str(dtype).removeprefix("torch."): dtype
    for x in ARITHMETICS.values()
    for dtype in (*x.dtypes, *x.out_dtypes, x.accumulator)
}
_NAMES: dict[str, tuple[Any, ...]] = {
    "precision": tuple(ARITHMETICS),
    "bias": (None, "m", "n"),
    "activation": (None, *ACTIVATIONS),
    "scales": (None, *get_args(ScaleKind)),
    "groups": (None, "m", "k"),
}


class WrongError(ValueError):
    """What a file says is no record; the text says why."""


@dataclass(frozen=True)
class Entry:
    """What was measured to be fastest for a problem.

    Attributes:
        algorithm: what is launched. In a file its fields stand beside the others.
        us: microseconds that it took.
        default_us: those of the model's choice at the same time.
        measured: when, as ISO 8601 has it.
        by: what measured it.
        default: which choice of the model's that was, as `named` says it, or nothing where that is not known.
        least_rows: the fewest rows M that it serves, if they are fewer than the problem's; 0: it serves those alone.
        torch_us: microseconds that torch's product took at the same time, if it was faster by more than noise, or 0.
        torch: the versions of torch and cuBLAS that were faster, or nothing.
        samples: of a kernel that was learned in service, and of the one that it replaced, which `default` and
            `default_us` are of; 0: it was tuned.
    """

    algorithm: Algorithm
    us: float
    default_us: float
    measured: str
    by: str
    default: str = ""
    least_rows: int = 0
    torch_us: float = 0.0
    torch: str = ""
    samples: int = 0

    def selection(self, problem: GemmProblem, source: str) -> Selection:
        """As `select` would say it. source: whose table this is from."""
        of_range = f" for {self.least_rows} rows and more" * (self.least_rows > 0)
        times = f"{self.us:.3g} us measured on {self.measured[:10]}{of_range}"
        reason = f"{times}, the model's choice {self.default_us:.3g} us"
        if self.samples:
            reason = f"{self.us:.3g} us in service on {self.measured[:10]}, {self.samples} samples"
            reason += f", before {self.default_us:.3g} us" if self.us != self.default_us else "; nothing was faster"
        reason += f", torch {self.torch_us:.3g} us" * bool(self.torch)
        return Selection(self.algorithm, reason, problem.precision, source)

    def order(self) -> tuple[float, str]:
        """Of two entries for one problem the lesser is kept when tables are merged: the faster one, and of equals
        always the same."""
        return self.us, text_of(plain(self))


def now() -> str:
    """As `measured` of an entry has it."""
    return datetime.now(timezone.utc).isoformat(timespec="seconds")


def versions() -> str:
    """Of this package and what it runs on."""
    package = sys.modules[__name__.partition(".")[0]]
    return f"triton_gemm {package.__version__}, Triton {triton.__version__}, torch {torch.__version__}"


def torchs_versions() -> str:
    """Of torch, and of the cuBLAS that it loaded or else the CUDA that it was built for."""
    cuda = torch.version.cuda
    cublas = cublas_version(cuda)
    return f"torch {torch.__version__}" + (f", cuBLAS {cublas}" if cublas else f", CUDA {cuda}" if cuda else "")


def named(selection: Selection) -> str:
    """A selection in words that are the same whatever chose it, why, and where its machine code is from."""
    return str(Selection(selection.algorithm, "", selection.precision)).rstrip(": ")[:LONGEST]


def text_of(value: object) -> str:
    """One line of JSON, the same for equal records."""
    return json.dumps(value, allow_nan=False)


def plain(x: Any) -> Any:
    """A record, or a value of its fields, as JSON has it."""
    if is_dataclass(x):
        found = {field.name: plain(getattr(x, field.name)) for field in fields(x)}
        if isinstance(x, GemmProblem):
            found = {name: value for name, value in found.items() if value or name not in RARE}
        if isinstance(x, Entry):
            found = {name: value for name, value in found.items() if value or name not in OPTIONAL}
        return found.pop("algorithm", {}) | found
    if isinstance(x, Algorithm):
        return {name: plain(value) for name, value in x._asdict().items()}
    if isinstance(x, torch.dtype):
        return str(x).removeprefix("torch.")
    return [plain(y) for y in x] if isinstance(x, tuple) else x


def read(kind: Any, x: Any) -> Any:
    """What `plain` made of a value of that type; WrongError for anything else."""
    if kind in (bool, int, str):
        if type(x) is kind and not (kind is int and abs(x) > LARGEST) and not (kind is str and len(x) > LONGEST):
            return x
    elif kind is float:
        if type(x) in (int, float) and 0 <= x < LARGEST and math.isfinite(x):
            return float(x)
    elif kind is torch.dtype:
        if isinstance(x, str) and x in _DTYPES:
            return _DTYPES[x]
    elif is_dataclass(kind):
        return _read_record(kind, x)
    elif get_origin(kind) is tuple:
        kinds = get_args(kind)
        if isinstance(x, list) and (kinds[-1] is ... or len(x) == len(kinds)) and len(x) < LONGEST:
            return tuple(read(kinds[0] if kinds[-1] is ... else kinds[i], y) for i, y in enumerate(x))
    elif get_origin(kind) in (typing.Union, types.UnionType) and type(None) in get_args(kind):
        return None if x is None else read(next(k for k in get_args(kind) if k is not type(None)), x)
    raise WrongError(f"{str(x)[:40]!r} is not a valid {getattr(kind, '__name__', kind)}")


@lru_cache(maxsize=64)
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _read_record(kind: Any, x: Any) -> Any:
    if not isinstance(x, dict):
        raise WrongError(f"{str(x)[:40]!r} is not a valid {kind.__name__}")
    hints = _hints(kind)
    if not x.keys() <= hints.keys():
        raise WrongError(f"a {kind.__name__} has {', '.join(hints)}, not {', '.join(map(str, x))[:80]}")
    values = {name: read(hints[name], value) for name, value in x.items()}
    if kind is GemmProblem:
        for name, allowed in _NAMES.items():
            if values.get(name, allowed[0]) not in allowed:
                raise WrongError(f"{values[name]!r} is not a valid {name}")
    try:
        found = kind(**values)
    except (TypeError, AssertionError) as error:  # a field is missing, or a schedule could not be followed
        raise WrongError(str(error)) from None
    # Without an element of C nothing is launched.
    sizes: tuple[int, ...] = (found.batch - 1, found.M - 1, found.N - 1, found.K) if kind is GemmProblem else ()
    if kind is Schedule:  # who owns a tile waits for programs that have started
        waits = found.programs - found.split_tiles * found.split_k
        sizes = (found.split_tiles, found.programs - 1, found.split_k - 1, found.group_m - 1, found.unit - 1, waits)
    if min(sizes, default=0) < 0:
        raise WrongError(f"{kind.__name__} of {x}"[:200])
    return found


def read_entry(x: Any) -> Entry:
    """The entry that `plain` wrote; WrongError where there is none."""
    if not isinstance(x, dict) or x.get("kernel") not in kernels.KERNELS:
        raise WrongError(f"no kernel is called {str(x.get('kernel') if isinstance(x, dict) else x)[:40]!r}")
    how = _hints(Algorithm) | {"config": kernels.named(x["kernel"]).Config}
    how["work"] = int if isinstance(x.get("work"), int) else Schedule
    hints = how | {name: kind for name, kind in _hints(Entry).items() if name != "algorithm"}
    if x.keys() | {"default", *OPTIONAL} != hints.keys():
        raise WrongError(f"an entry has {', '.join(hints)}, not {', '.join(map(str, x))[:80]}")
    values = {name: read(hints[name], value) for name, value in x.items()}
    entry = Entry(Algorithm(**{name: values.pop(name) for name in how}), **values)
    if entry.least_rows < 0:
        raise WrongError(f"it serves {entry.least_rows} rows")
    why = nonsense(entry.algorithm) or too_fast(entry)
    if not why and (bool(entry.torch) != bool(entry.torch_us) or entry.torch_us >= entry.us):
        why = f"torch {entry.torch[:40]!r} takes {entry.torch_us:.3g} us, and {entry.us:.3g} us is faster"
    if why:
        raise WrongError(why)
    return entry


def nonsense(algorithm: Algorithm) -> str | None:
    """Why no kernel ever takes such figures, or None. A tile's sides and its warps are powers of two, or in the
    warp-specialised kernel multiples of a warpgroup's 64 rows and 4 warps, and of `wgmma`'s 8 columns."""
    steps = {"BLOCK_M": 64, "BLOCK_N": 8, "num_warps": 4} if algorithm.kernel == "warp_specialised" else {}
    for name, value in plain(algorithm.config).items():
        if type(value) is not int:
            continue
        multiple = name in steps and value % steps[name] == 0
        odd = (name.startswith("BLOCK") or name == "num_warps") and value & (value - 1) and not multiple
        if odd or not 1 <= value <= 2**16:
            return f"{name} = {value}"
    if len(set(algorithm.packed)) < len(algorithm.packed) or not set(algorithm.packed) <= {"a", "b"}:
        return f"no operand is called {algorithm.packed}"
    work = algorithm.work
    least, most = (work, work) if isinstance(work, int) else (1, max(plain(work).values()))
    return f"work is dealt out as {work}" if least < 1 or most > 2**20 else None


def too_fast(entry: Entry) -> str | None:
    """Why nothing takes such times, or None."""
    times = (entry.us, entry.default_us, *[entry.torch_us] * bool(entry.torch))
    return next((f"it takes {us:.3g} us" for us in times if us < LEAST_US), None)


def illegal(problem: GemmProblem, device: DeviceInfo, algorithm: Algorithm) -> str | None:
    """Why `device` cannot run `algorithm` on `problem`, or None if it can: what the kernel says and, as a file may say
    what no kernel would propose, whether the work is that of the problem."""
    kernel, config, work, swap_ab, packed = algorithm
    if swap_ab and (problem.scales == "blocks" or problem.groups == "m"):
        return "it swaps what cannot be swapped"
    planes = {"a", "b"} if kernel == "warp_specialised" else set()  # others split operands as they load them
    if problem.planes.count > 1 and set(packed) != planes:
        return f"it copies {packed} to planes"
    try:
        why = kernels.repack.illegal(problem, packed)
        given = kernels.repack.repacked(problem, packed)
        given = given.swap_ab() if swap_ab else given
        why = why or kernels.named(kernel).illegal(given, device, config, work)
        if isinstance(work, Schedule) and (work.split_tiles or work.in_turn):
            tiles, k_tiles = given.batch * config.tiles(given.M, given.N), -(-given.K // config.BLOCK_K)
            if work.split_tiles > tiles or work.split_k > k_tiles or given.groups:
                why = why or f"{work} does not fit {tiles} tiles of {k_tiles} steps"
        elif isinstance(work, int) and work > max(1, given.K):
            why = why or f"K in {work} parts"
    except Exception as error:  # it was asked about figures that come from a file
        return f"{type(error).__name__}: {error}"
    return why
