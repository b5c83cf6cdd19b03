"""Checks of a rung's arguments: a launch that cannot be right raises, before any memory is touched."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterable, Mapping
from functools import wraps
from numbers import Real
from typing import Any

import torch
import triton

from ..arithmetic import name_of
from ..compat import INTERPRETED, interpreting
from ..config import GemmConfig
from ..hardware.device import device_info
from ..hardware.driver import ensure_context
from .record import TUNERS, Choice, Rung, gemm_config, triton_config


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
    in their memory. All are on the current CUDA device, or in Triton's interpreter on the CPU. Tensors on `meta`, whose
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
