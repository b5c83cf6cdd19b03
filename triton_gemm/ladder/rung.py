"""What every rung shares that is not GEMM: its record, its arguments and its autotuner."""

from __future__ import annotations

import inspect
import logging
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, wraps
from numbers import Real
from typing import Any

import torch
import triton

from .. import compat
from ..arithmetic import ARITHMETICS, name_of
from ..compat import INTERPRETED, interpreting
from ..config import OPTIONS, GemmConfig
from ..hardware.device import DeviceInfo, device_info
from ..hardware.driver import ensure_context
from ..problem import aligned

log = logging.getLogger("triton_gemm.autotune")

# Where an fp32 kernel without tensor cores is compiled ahead of time and tested.
FMA_CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))

HEADER_FIELDS = ("Changes", "Why", "Predicts", "Came out", "Requires", "Tuning", "Bound by", "Next")
OPTIONAL_FIELD = "Came out"  # what measuring taught, where that is more than a number

MAX_WARPS = 32  # of a program: 1024 threads

# A rung's configuration: one, several to tune over (a tuple), or None for the best of its own.
Choice = GemmConfig | tuple[triton.Config, ...] | None


@dataclass(frozen=True)
class Rung:
    """One rung: what tests, report and pages need to know of its module.

    Attributes:
        module: the module's dotted name; its last part, `k06_pipelined`, names the rung.
        title: a few words for plots and tables.
        precision: "ieee", "tf32" or "half" (fp16 and bf16 operands, fp32 accumulation).
        dtypes: operand dtypes it takes.
        capabilities: the compute capabilities it claims to run on.
        instructions: for each of them, what the SASS of its compiled form must contain.
        twins: stems in `reference_cuda` of its twins, the CUDA kernels that teach the same idea.
        configs: what the autotuner explores; the first legal one is the default without tuning.
        descriptors: whether operands come as TMA descriptors.
        staged_outputs: tiles of C in shared memory beside those of A and B: without and with beta C.
        interpretable: whether Triton's interpreter can run it (it knows no Gluon).
        least: the smallest value its kernel takes of a configuration's field, where that is not 1.
        most: the largest value its kernel takes of a field, beside the 32 warps of a program.
        rows_per_warp: rows of a tile that each warp must have at least.
        predicted: the header's factor as data: (rung compared with, factor at 4096^3 on an H100).
    """

    module: str
    title: str
    precision: str
    dtypes: tuple[torch.dtype, ...]
    instructions: Mapping[tuple[int, int], tuple[str, ...]]
    configs: tuple[GemmConfig, ...]
    twins: tuple[str, ...] = ()
    descriptors: bool = False
    staged_outputs: tuple[int, int] = (0, 0)
    interpretable: bool = True
    least: Mapping[str, int] = field(default_factory=lambda: {"BLOCK_K": 16})  # what `tl.dot` takes
    most: Mapping[str, int] = field(default_factory=dict)
    rows_per_warp: int = 1
    predicted: tuple[str, float] | None = None

    @property
    def name(self) -> str:
        """The file's name without its ending: `k03_blocked`."""
        return self.module.rpartition(".")[2]

    @property
    def id(self) -> str:
        """The number: `k03`."""
        return self.name.partition("_")[0]

    @property
    def capabilities(self) -> tuple[tuple[int, int], ...]:
        return tuple(self.instructions)

    @property
    def out_dtypes(self) -> tuple[torch.dtype, ...]:
        """The dtypes it stores C in."""
        arithmetic = ARITHMETICS[self.precision]
        return (*arithmetic.dtypes, *arithmetic.out_dtypes)

    @property
    def launch(self) -> Callable[..., None]:
        """`launch(a, b, c, alpha=1.0, beta=0.0, config=None, configs=None)`: c [M, N] = alpha a [M, K] @ b [K, N] +
        beta c, asynchronously, on the current stream of the current device, which must be the tensors'. alpha and beta
        are numbers, NaN and infinities among them; with alpha = 0 neither a nor b is read, with beta = 0 not c. Without
        a `config` the first call tunes, over `configs` (`triton.Config` or `GemmConfig`), or over the rung's own. What
        cannot be right raises before any memory is touched, as `check` says. Autograd hears of nothing."""
        launch: Callable[..., None] = sys.modules[self.module].launch
        return launch

    @cached_property
    def header(self) -> dict[str, str]:
        """The fields of the module's docstring, in order."""
        text = sys.modules[self.module].__doc__ or ""
        text = text[text.index("Changes: ") :].partition("\n\n")[0]
        parts = re.split(rf"^({'|'.join(HEADER_FIELDS)}): ", text, flags=re.MULTILINE)
        return {name: " ".join(body.split()) for name, body in zip(parts[1::2], parts[2::2], strict=True)}

    def legal_configs(
        self,
        device: DeviceInfo,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        *,
        reads_output: bool = False,
        aligned: bool = True,
    ) -> list[GemmConfig]:
        """The configurations that fit `device` for operands of `dtype` and C of `out_dtype` (default: the same).

        reads_output: beta is not 0; aligned: as `problem.aligned`, which TMA does not need.
        """
        circumstances = {"reads_output": reads_output, "aligned": aligned}
        return [c for c in self.configs if self.illegal(c, device, dtype, out_dtype, **circumstances) is None]

    def illegal(
        self,
        config: GemmConfig,
        device: DeviceInfo,
        dtype: torch.dtype,
        out_dtype: torch.dtype | None = None,
        *,
        reads_output: bool = False,
        aligned: bool = True,
    ) -> str | None:
        """Why `device` cannot run any `config`, one of `configs` or not, in the circumstances of `legal_configs`, or
        that it would spill; None if neither."""
        return self.misfit(config) or config.illegal(
            device,
            dtype.itemsize,
            (out_dtype or dtype).itemsize,
            tensor_cores=ARITHMETICS[self.precision].tensor_cores(device.capability),
            staged_outputs=self.staged_outputs[reads_output],
            reads_output=reads_output,
            aligned=aligned or self.descriptors,
            buffers=self.slots(config, device.capability),
        )

    def slots(self, config: GemmConfig, capability: tuple[int, int]) -> int:
        """Tiles of A and of B in shared memory. FFMAs, as `mma`, wait for what they read, and take one less than the
        stages."""
        waits = not ARITHMETICS[self.precision].tensor_cores(capability)
        return config.tile.buffers((8, 0) if waits else capability)

    def misfit(self, config: GemmConfig) -> str | None:
        """Why the kernel has no such configuration on any device, or None if it has."""
        wanted, given = self.configs[0].meta(), config.meta()
        lacking, foreign = (
            [name for name in wanted if name not in given],
            [name for name in given if name not in wanted],
        )
        if lacking:
            return f"it lacks {' and '.join(lacking)}"
        if foreign:
            return f"this kernel has no {' and no '.join(foreign)}"
        for name, value in config.kwargs().items():
            least, most = self.least.get(name, 1), {"num_warps": MAX_WARPS, **self.most}.get(name)
            if not isinstance(value, int) or value < least:
                return f"{name} is {value!r}, not a whole number from {least} on"
            if most is not None and value > most:
                return f"{name} is {value}, and this kernel takes {most} at most"
            if name not in ("GROUP_M", "num_stages") and value & (value - 1):
                return f"{name} is {value}, not a power of two"
        rows = self.rows_per_warp * config.num_warps
        if self.rows_per_warp > 1 and (config.BLOCK_M or 0) < rows:
            return f"BLOCK_M is {config.BLOCK_M}, and {config.num_warps} warps of this kernel want {rows} rows"
        return None


def checked(rung: Rung) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Decorates a rung's `launch` so that a call that `check` refuses raises, and nothing is launched. Kernels read and
    write memory, and know nothing of torch's negative bit (of `x.conj().imag`): here such operands become plain."""

    def decorate(launch: Callable[..., None]) -> Callable[..., None]:
        @wraps(launch)
        def call(
            a: torch.Tensor,
            b: torch.Tensor,
            c: torch.Tensor,
            alpha: float = 1.0,
            beta: float = 0.0,
            config: GemmConfig | None = None,
            configs: Iterable[GemmConfig | triton.Config] | None = None,
            **options: Any,
        ) -> None:
            alpha, beta = _number(rung, "alpha", alpha), _number(rung, "beta", beta)
            chosen = check(rung, a, b, c, beta, config, configs)
            if a.is_cuda and not INTERPRETED:
                ensure_context(a.device.index)  # which tensor maps want, and Triton does not make
            plain = c.resolve_neg()
            with interpreting:
                launch(a.resolve_neg(), b.resolve_neg(), plain, alpha, beta, chosen, **options)
            if plain is not c:
                c.copy_(plain)

        of_call, of_launch = inspect.signature(call, follow_wrapped=False), inspect.signature(launch)
        own = [p for p in of_launch.parameters.values() if p.kind is p.KEYWORD_ONLY]
        shared = [p for p in of_call.parameters.values() if p.kind is not p.VAR_KEYWORD]
        call.__signature__ = of_call.replace(parameters=shared + own)  # type: ignore[attr-defined]
        return call

    return decorate


def check(
    rung: Rung,
    a: torch.Tensor,
    b: torch.Tensor,
    c: torch.Tensor,
    beta: float = 0.0,
    config: GemmConfig | None = None,
    configs: Iterable[GemmConfig | triton.Config] | None = None,
) -> Choice:
    """What to launch with: `config`, or `configs` as a tuple. Refuses a launch of `rung` that would read or write
    outside its operands, or fail later in other words.

    Wanted are strided a [M, K] and b [K, N] of one of the rung's `dtypes` and c [M, N] of one of its `out_dtypes`, not
    in their memory, all on the current CUDA device; on the CPU in Triton's interpreter only. Tensors on `meta`, whose
    GPU is not known, pass for `aot.capture`. A config must be one that the rung's kernel has and that the GPU can run.
    So must each of `configs`, but that of several those that the GPU cannot run are left out when they are tuned. What
    would spill counts as such.

    Raises TypeError for what is no tensor, no configuration or of another dtype, and ValueError for everything else.
    """
    for name, x in (("a", a), ("b", b), ("c", c)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{rung.name}: {name} is of type {type(x).__name__}; pass a torch.Tensor")
        if x.layout != torch.strided:
            raise TypeError(f"{rung.name}: {name} is {x.layout}; pass a strided tensor, as {name}.to_dense() is")
        if x.dim() != 2:
            raise ValueError(f"{rung.name}: {name} has shape {tuple(x.shape)}; pass a matrix, which has two dimensions")
        wanted = rung.out_dtypes if name == "c" else rung.dtypes
        if x.dtype not in wanted:
            names = " or ".join(name_of(dtype) for dtype in wanted)
            raise TypeError(
                f"{rung.name}: {name} is {name_of(x.dtype)}; pass {names}, or take another rung "
                f"(python -m {__package__} lists what each takes)"
            )
    if a.dtype != b.dtype:
        raise TypeError(
            f"{rung.name}: a is {name_of(a.dtype)} and b {name_of(b.dtype)}; convert one to the other's dtype"
        )
    if a.shape[1] != b.shape[0]:
        raise ValueError(
            f"{rung.name}: a {tuple(a.shape)} cannot be multiplied by b {tuple(b.shape)}; b wants {a.shape[1]} rows"
        )
    if c.shape != (a.shape[0], b.shape[1]):
        raise ValueError(
            f"{rung.name}: c has shape {tuple(c.shape)}; a {tuple(a.shape)} times b {tuple(b.shape)} wants "
            f"{(a.shape[0], b.shape[1])}"
        )
    if _folded(c):
        raise ValueError(f"{rung.name}: c is expanded, so that results would share memory; pass c.contiguous()")
    for name, x in (("a", a), ("b", b)):
        if not x.is_meta and _overlap(x, c):
            raise ValueError(f"{rung.name}: c lies in the memory of {name}, which is still read; pass another c")
    _check_device(rung, a, b, c)
    if configs is not None:
        if config is not None:
            raise ValueError(f"{rung.name}: config is one configuration and configs are several to tune; pass one")
        chosen = given_configs(rung, configs)
        if len(chosen) == 1:  # Triton launches a single one as it is
            _check_config(rung, gemm_config(chosen[0]), a, c, beta)
        return chosen
    if config is None:
        return None
    if not isinstance(config, GemmConfig):
        raise TypeError(f"{rung.name}: config is of type {type(config).__name__}; pass a triton_gemm.config.GemmConfig")
    _check_config(rung, config, a, c, beta)
    return config


def _number(rung: Rung, name: str, x: Any) -> float:
    """x as a float, so that 1 and 1.0 run the same compiled kernel; TypeError for what is no real number."""
    if isinstance(x, torch.Tensor):
        raise TypeError(f"{rung.name}: {name} is a torch.Tensor; pass a number, as {name}.item() is of one element")
    if not isinstance(x, Real):
        raise TypeError(f"{rung.name}: {name} is of type {type(x).__name__}; pass a real number")
    try:
        return float(x)
    except OverflowError:
        raise ValueError(f"{rung.name}: {name} is a whole number beyond those of a float; pass a smaller one") from None


def given_configs(rung: Rung, configs: Iterable[GemmConfig | triton.Config]) -> tuple[triton.Config, ...]:
    """A user's configurations in Triton's form. TypeError for what is none; ValueError for those that the rung's kernel
    cannot have on any GPU, and for a rung without a tuner."""
    if rung.id not in TUNERS:
        raise ValueError(f"{rung.name} has no tuner; pass one configuration, as config")
    if not isinstance(configs, Iterable) or isinstance(configs, str | Mapping):
        kind = type(configs).__name__
        raise TypeError(f"{rung.name}: configs is of type {kind}; pass a list of triton.Config or GemmConfig")
    found = []
    for config in configs:
        if not isinstance(config, GemmConfig | triton.Config):
            raise TypeError(f"{rung.name}: configs has a {type(config).__name__}; pass triton.Config or GemmConfig")
        given = triton_config(config) if isinstance(config, GemmConfig) else config
        why = f"num_ctas is {given.num_ctas}, and rungs run without clusters" if given.num_ctas != 1 else None
        foreign = [name for name in given.kwargs if name not in rung.configs[0].meta()]
        if foreign:
            why = f"this kernel has no {' and no '.join(foreign)}"
        _refuse(rung, config, why or rung.misfit(gemm_config(given)))
        found.append(given)
    if not found:
        raise ValueError(f"{rung.name}: configs is empty; pass at least one triton.Config")
    return tuple(found)


def _check_config(rung: Rung, config: GemmConfig, a: torch.Tensor, c: torch.Tensor, beta: float) -> None:
    why = rung.misfit(config)
    if why is None and a.is_cuda and not INTERPRETED:
        why = rung.illegal(config, device_info(a.device), a.dtype, c.dtype, reads_output=beta != 0)
    _refuse(rung, config, why)


def _refuse(rung: Rung, config: GemmConfig | triton.Config, why: str | None) -> None:
    """Raises ValueError where there is a reason `why`."""
    if why is not None:
        raise ValueError(
            f"{rung.name} {refusing(why)} the configuration {config}: {why}; "
            f"python -m {__package__} {rung.id} --list shows some that it takes"
        )


def refusing(why: str) -> str:
    """The verb for a configuration: one that would spill could run."""
    return "does not take" if why.startswith("would spill") else "cannot take"


def _check_device(rung: Rung, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> None:
    device = a.device
    if not device == b.device == c.device:
        raise ValueError(f"{rung.name}: a is on {a.device}, b on {b.device}, c on {c.device}; move them to one device")
    if INTERPRETED:
        if not rung.interpretable:
            raise ValueError(f"{rung.name}: Triton's interpreter knows no Gluon; unset TRITON_INTERPRET and use a GPU")
        if device.type not in ("cpu", "cuda"):
            raise ValueError(f"{rung.name}: a, b and c are on {device}; Triton's interpreter wants them on the CPU")
    elif device.type == "cpu":
        raise ValueError(
            f"{rung.name}: a, b and c are on the CPU; move them to a CUDA device, or set TRITON_INTERPRET=1 before "
            "Python starts to run the kernel in Triton's interpreter"
        )
    elif device.type not in ("cuda", "meta"):
        raise ValueError(f"{rung.name}: a, b and c are on {device}; move them to a CUDA device")
    elif device.type == "cuda" and device.index != torch.cuda.current_device():
        raise ValueError(
            f"{rung.name}: a, b and c are on {device}, and the current device is cuda:{torch.cuda.current_device()}; "
            "launch inside `with torch.cuda.device(a.device):`"
        )


def _folded(x: torch.Tensor) -> bool:
    """Whether elements of a matrix lie in one place, as those of expanded ones do and of rows that overlap."""
    (rows, columns), (down, right) = x.shape, x.stride()
    if x.numel() < 2:
        return False
    if (rows > 1 and down == 0) or (columns > 1 and right == 0):
        return True
    if rows < 2 or columns < 2:
        return False
    step = math.gcd(down, right)  # right / step rows down lies what is down / step columns to the right
    return right // step < rows and down // step < columns


def _overlap(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether x and y share an element for certain: they begin with the same, or overlap and have no gaps."""
    (x_first, x_end, x_dense), (y_first, y_end, y_dense) = map(_span, (x, y))
    return x_first < y_end and y_first < x_end and (x_first == y_first or (x_dense and y_dense))


def _span(x: torch.Tensor) -> tuple[int, int, bool]:
    """The addresses of x's first byte and behind its last, and whether every byte between is x's."""
    if x.numel() == 0:
        return 0, 0, True
    elements = 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))
    return x.data_ptr(), x.data_ptr() + elements * x.element_size(), elements == x.numel()


def pointer_arguments(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, alpha: float, beta: float) -> dict[str, Any]:
    """The arguments that kernels on plain pointers share, for a [M, K], b [K, N], c [M, N] of any strides.

    BLAS: alpha = 0 reads neither A nor B (no K is left), beta = 0 does not read C.
    """
    (M, K), N = a.shape, b.shape[1]
    return {
        "a_ptr": a,
        "b_ptr": b,
        "c_ptr": c,
        "M": M,
        "N": N,
        "K": K if alpha != 0 else 0,
        "stride_am": a.stride(0),
        "stride_ak": a.stride(1),
        "stride_bk": b.stride(0),
        "stride_bn": b.stride(1),
        "stride_cm": c.stride(0),
        "stride_cn": c.stride(1),
        "alpha": alpha,
        "beta": beta,
        "HAS_BETA": beta != 0,
    }


def tune_key(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor, beta: float) -> str:
    """What decides the best configuration beside the shape: the GPU, whether C is read, dtypes and stride classes.

    A class says what the compiler may assume of a stride, as `problem.aligned`: `1` unit, `v` a multiple of 16
    elements on an aligned base, `s` neither.
    """

    def stride_class(x: torch.Tensor) -> str:
        on_boundary = x.data_ptr() % 16 == 0
        return "".join("1" if s == 1 else "v" if s % 16 == 0 and on_boundary else "s" for s in x.stride())

    operands = (f"{str(x.dtype).removeprefix('torch.')}:{stride_class(x)}" for x in (a, b, c))
    return " ".join([*operands, "reads C" if beta != 0 else "", device_info(a.device).name])


def operand(arguments: Mapping[str, Any], name: str) -> torch.Tensor:
    """The tensor behind a kernel's argument `<name>_ptr` or `<name>_desc`."""
    pointer = arguments.get(f"{name}_ptr")
    tensor: torch.Tensor = arguments[f"{name}_desc"].base if pointer is None else pointer
    return tensor


def triton_config(config: GemmConfig) -> triton.Config:
    """Triton's form of a configuration."""
    return triton.Config(config.meta(), num_warps=config.num_warps, num_stages=config.num_stages)


def gemm_config(config: triton.Config) -> GemmConfig:
    """What a configuration of Triton's says of tiles, warps and stages; TypeError for names that no rung has."""
    return GemmConfig(**config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages)


class Autotuner(compat.Autotuner):
    """`triton.autotune`'s tuner of a rung, keyed on the shape and `TUNE_KEY`; it keeps winners on disk.

    What `Rung.illegal` refuses is left out before anything is compiled. A configuration that fails costs a line in the
    log and not the tuning: Triton catches three kinds of exception (autotuner.py, `_bench`); a compiler pass that
    fails raises others.
    """

    def __init__(self, rung: Rung, kernel: Any, configs: Sequence[triton.Config]) -> None:
        super().__init__(
            kernel,
            kernel.arg_names,
            list(configs),
            ["M", "N", "K", "TUNE_KEY"],
            reset_to_zero=None,
            restore_value=None,
            cache_results=True,
        )
        self.rung = rung
        self._over: dict[tuple[triton.Config, ...], Autotuner] = {}

    def over(self, configs: Iterable[GemmConfig | triton.Config]) -> Autotuner:
        """The tuner of the same kernel that chooses among a user's `configs`; the same one for the same configurations.

        Raises TypeError and ValueError as `check` does.
        """
        given = given_configs(self.rung, configs)
        if given not in self._over:
            self._over[given] = Autotuner(self.rung, self.fn, given)
        return self._over[given]

    def legal(self, arguments: dict[str, Any]) -> list[triton.Config]:
        """The configurations that fit the GPU and these arguments of the kernel, by name. Of a user's the others are
        named in the log; ValueError where none is left."""
        a, b, c = (operand(arguments, name) for name in "abc")
        device = device_info(a.device)
        circumstances = {"reads_output": arguments["HAS_BETA"], "aligned": aligned(a, b, c)}
        why = {x: self.rung.illegal(gemm_config(x), device, a.dtype, c.dtype, **circumstances) for x in self.configs}
        found = [config for config, reason in why.items() if reason is None]
        left_out = {str(gemm_config(config)): reason for config, reason in why.items() if reason is not None}
        if not found:
            reasons = "; ".join(f"{config}: {reason}" for config, reason in left_out.items())
            raise ValueError(f"{self.rung.name} can take none of the configurations here: {reasons}")
        for config, reason in left_out.items() if TUNERS.get(self.rung.id) is not self else ():
            log.warning("%s leaves out %s: %s", self.base_fn.__name__, config, reason)
        return found

    def trial(self, measure: Callable[[], list[float]], config: triton.Config, meta: dict[str, Any]) -> list[float]:
        c = operand(meta, "c")
        saved = c.clone() if meta["HAS_BETA"] else None  # each trial adds to C
        why = "does not fit"
        timing = [float("inf")] * 3
        try:
            timing = measure()
        except Exception as error:
            why = f"{type(error).__name__}: {error}".splitlines()[0]
        if saved is not None:
            c.copy_(saved)
        if timing[0] == float("inf"):
            log.warning("%s leaves out %s: %s", self.base_fn.__name__, config, why)
        return timing


TUNERS: dict[str, Autotuner] = {}  # by rung's id: which configuration won is read there


def autotune(rung: Rung, *, pre_hook: Callable[[dict[str, Any]], None] | None = None) -> Callable[[Any], Autotuner]:
    """`triton.autotune` over a rung's configurations. The kernel's arguments come by keyword.

    pre_hook: changes the arguments, the configuration's among them, before each launch. It is the kernel's own and not
    that of a `triton.Config`, because Triton keeps no winners on disk for configurations that have hooks
    (autotuner.py, `check_disk_cache`).
    """

    def decorate(kernel: Any) -> Autotuner:
        if pre_hook is not None:
            kernel.add_pre_run_hook(lambda **arguments: pre_hook(arguments))
        TUNERS[rung.id] = Autotuner(rung, kernel, tuple(map(triton_config, rung.configs)))
        return TUNERS[rung.id]

    return decorate


def run(
    rung: Rung,
    kernel: Autotuner,
    grid: Callable[[Mapping[str, Any]], tuple[int, ...]],
    arguments: dict[str, Any],
    config: Choice,
) -> None:
    """Launches `kernel` with `config`, with the best of several, or with the tuned one of the rung's own; the
    interpreter has nothing to tune, and takes the first."""
    if isinstance(config, tuple):
        kernel, config = kernel.over(config), None
    if config is None and INTERPRETED:
        config = gemm_config(kernel.configs[0])
    if config is None:
        kernel[grid](**arguments, **OPTIONS)
    else:
        kernel.fn[grid](**arguments, **config.kwargs())
