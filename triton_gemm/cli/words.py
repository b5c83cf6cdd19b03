"""What words of a command line mean: sizes, dtypes, devices, durations."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any

import torch
import typer

from ..arithmetic import DTYPES, SCALED, SHORT_NAMES
from ..hardware.device import DeviceInfo, current_device_info, device_info
from ..hardware.gpus import NAMES, named_device
from ..operands import Order
from ..problem import GemmProblem
from ..problem import problem_text as problem_text
from ..reporting import explanation
from ..suites import SUITES
from ..tables import files
from ..tables.records import LARGEST, read
from .output import wrong_call

CUDA = r"cuda(:\d{1,3})?"
DTYPE_WORDS = {SHORT_NAMES[dtype]: dtype for dtype in dict.fromkeys((*DTYPES, *SCALED))}
_SIZE = r"(\d{1,15})"
MOST_ROWS = 2**20  # for each of which a kernel is chosen
_LONG = {str(dtype).removeprefix("torch."): dtype for dtype in (*DTYPE_WORDS.values(), torch.int32)}


Dtype = Annotated[
    str,
    typer.Option("--dtype", help=f"The operands' dtype: {', '.join(DTYPE_WORDS)}, or torch's name.", metavar="DTYPE"),
]
Layout = Annotated[
    Order, typer.Option(help="How A and B lie in memory: n by rows, t by columns; nt is a linear layer's.")
]
DtypeOfSizes = Annotated[
    str | None,
    typer.Option(
        "--dtype",
        help=f"For --shapes and --weights: {', '.join(DTYPE_WORDS)}, or torch's name; for a 16-bit --suite bf16 or "
        "fp16. By default bf16.",
        metavar="DTYPE",
        show_default=False,
    ),
]
LayoutOfSizes = Annotated[
    Order | None,
    typer.Option(
        "--layout",
        help="How A and B of --shapes lie in memory: n by rows, t by columns; nt is a linear layer's. By default nn.",
        show_default=False,
    ),
]
Device = Annotated[
    str | None,
    typer.Option(
        help="The GPU to choose for: "
        f"{', '.join(NAMES)}; cuda:1; or a file with the JSON that `triton-gemm doctor --json` prints on that GPU. "
        "By default the current one.",
        metavar="GPU",
        show_default=False,
    ),
]
Shapes = Annotated[
    str | None,
    typer.Option(
        help="M x N x K of each GEMM, with a batch before it if there is one: 4096x4096x4096,8x16x14336x4096.",
        metavar="MxNxK,...",
    ),
]
Suite = Annotated[str | None, typer.Option(metavar="NAME", help=f"The shapes of a suite: {', '.join(SUITES)}.")]
Bits = Annotated[
    files.Bits,
    typer.Option(help="same: only candidates with the bits of the model's choice; any: all, whatever their bits."),
]
ShapesFrom = Annotated[
    Path | None,
    typer.Option(help="A file that `triton_gemm.record_shapes` wrote while a model ran.", metavar="FILE"),
]
Weights = Annotated[
    str | None,
    typer.Option(help="N x K of linear layers' weights, out by in features: 28672x4096,4096x14336.", metavar="NxK,..."),
]
Rows = Annotated[
    str | None,
    typer.Option(help="Rows of the layers' inputs, all leading dimensions together: 1-512,2048.", metavar="A-B,C"),
]
Bias = Annotated[bool, typer.Option("--bias", help="The layers of --weights have a bias.")]
Gpu = Annotated[str | None, typer.Option("--device", metavar="cuda:N", help="The GPU; by default cuda:0.")]
Budget = Annotated[str, typer.Option(metavar="TIME", help="How long it may take: 90s, 2m, 1h.")]


def dtype(word: str) -> torch.dtype:
    """bf16, or bfloat16 as torch has it."""
    found = DTYPE_WORDS.get(word) or _LONG.get(word.removeprefix("torch."))
    if found is None:
        raise wrong_call(f"--dtype: {word!r} is not one of {', '.join(DTYPE_WORDS)}")
    return found


def shapes(text: str) -> list[tuple[int, int, int, int]]:
    """(batch, M, N, K) of each product; batch is 1 by default."""
    return _sizes("--shapes", text, rf"(?:{_SIZE}x)?{_SIZE}x{_SIZE}x{_SIZE}", "MxNxK", "16x14336x4096")


def weights(text: str) -> list[tuple[int, int]]:
    """(N, K) of each weight."""
    return _sizes("--weights", text, f"{_SIZE}x{_SIZE}", "NxK", "14336x4096")


def _sizes(option: str, text: str, pattern: str, called: str, example: str) -> list[Any]:
    found = []
    for word in text.split(","):
        sizes = re.fullmatch(rf"\s*{pattern}\s*", word.lower(), re.ASCII)
        numbers = tuple(map(int, sizes.groups(default="1"))) if sizes else (0,)
        if min(numbers) < 1 or max(numbers) > LARGEST:
            why = f"{word.strip()[:60]!r} is not {called} with numbers from 1 to {LARGEST}"
            raise wrong_call(f"{option}: {why}, as in {example}")
        found.append(numbers)
    return found


def rows(text: str) -> list[int]:
    """Numbers of rows: 1,2,8-16 with both ends."""
    found: dict[int, None] = {}
    for word in text.split(","):
        ends = re.fullmatch(r"\s*(\d{1,15})(?:\s*-\s*(\d{1,15}))?\s*", word, re.ASCII)
        first, last = (int(ends[1]), int(ends[2] or ends[1])) if ends else (0, 0)
        if not 1 <= first <= last <= MOST_ROWS:
            called = f"{word.strip()[:60]!r} is neither a number from 1 to {MOST_ROWS} nor a range of them"
            raise wrong_call(f"--rows: {called}, as in 1-512,2048")
        found |= dict.fromkeys(range(first, last + 1))
    return list(found)


def ends_and_powers(text: str) -> list[int]:
    """The same, of each range its ends and the powers of two between."""
    found = [rows(word) for word in text.split(",")]
    return list(dict.fromkeys(x for row in found for x in row if x in (row[0], row[-1]) or x & (x - 1) == 0))


def seconds(text: str) -> float:
    """ "90", "90s", "2m" or "1.5h" in seconds."""
    found = re.fullmatch(r"\s*(\d+(?:\.\d*)?|\.\d+)\s*([smh]?)\s*", text)
    value = float(found[1]) * {"": 1, "s": 1, "m": 60, "h": 3600}[found[2]] if found else 0.0
    if not value:
        raise wrong_call(f"--budget: {text!r} is not a duration above 0, such as 90s, 2m or 1h")
    return value


def device(word: str | None) -> DeviceInfo:
    """The GPU that a word names, by default the current one."""
    if word is None:
        if not torch.cuda.is_available():
            raise wrong_call("torch sees no GPU here: name one, as in --device h200; `triton-gemm doctor` says why")
        return current_device_info()
    if word.endswith(".json"):
        return _described(Path(word))
    if re.fullmatch(CUDA, word):
        here = torch.device(word)
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (here.index or 0) >= count:
            raise wrong_call(f"--device: there is no {word}: torch sees {count} GPUs")
        return device_info(here)
    try:
        return named_device(word)
    except ValueError:
        known = f"{', '.join(NAMES)}, cuda:0 or a .json file"
        older = "NVIDIA's GPUs before compute capability 8.0 and AMD's are not supported"
        raise wrong_call(f"--device: {word!r} is not one of {known}; {older}") from None


def gpu(word: str | None) -> str | None:
    """The GPU to measure: cuda or cuda:1, not one that is elsewhere."""
    if word is not None and not re.fullmatch(CUDA, word):
        raise wrong_call(f"--device: {word!r} is not a GPU of this machine, such as cuda:0")
    return word


def _described(path: Path) -> DeviceInfo:
    """The first GPU that `doctor --json` printed."""
    try:
        found: DeviceInfo = read(DeviceInfo, json.loads(path.read_text())["devices"][0])
        figures = (*found.capability, found.num_sms, found.shared_memory, found.bus_width, found.power_limit)
        if min(figures) < 0 or found.num_sms == 0:
            raise ValueError("the numbers cannot be a GPU's")
        return found
    except OSError as error:
        raise wrong_call(f"--device: {path} cannot be read: {error.strerror}") from None
    except LookupError:  # no document of that kind, or one of a machine without a GPU
        raise wrong_call(
            f"--device: {path} describes no GPU: run `triton-gemm doctor --json` on a machine with one"
        ) from None
    except (ValueError, TypeError, RecursionError) as error:
        raise wrong_call(f"--device: {path} describes no GPU: {error}") from None


def problem_and_device(**call: Any) -> tuple[GemmProblem, DeviceInfo]:
    """A product, as `explain` takes it, and its GPU. Errors of torch and the checks, RuntimeErrors as torch has
    them, are those of a wrong call."""
    try:
        return explanation.described(**call)[:2]
    except RuntimeError as error:
        raise wrong_call(str(error)) from None
