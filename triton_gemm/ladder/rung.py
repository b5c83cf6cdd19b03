"""What every rung shares that is not GEMM: its record (`record`), checks of its arguments (`launch_checks`), and here
its autotuner and its launch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
import triton

from .. import compat
from ..compat import INTERPRETED
from ..config import OPTIONS, GemmConfig
from ..hardware.device import device_info
from ..problem import aligned
from .launch_checks import checked, given_configs
from .record import FMA_CAPABILITIES, TUNERS, Choice, Rung, gemm_config, triton_config

__all__ = [
    "FMA_CAPABILITIES",
    "Autotuner",
    "Choice",
    "Rung",
    "autotune",
    "checked",
    "pointer_arguments",
    "run",
    "tune_key",
]

log = logging.getLogger("triton_gemm.autotune")


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


def autotune(rung: Rung, *, pre_hook: Callable[[dict[str, Any]], None] | None = None) -> Callable[[Any], Autotuner]:
    """`triton.autotune` over a rung's configurations. The kernel's arguments come by keyword.

    pre_hook: changes the arguments, the configuration's among them, before each launch. It is the kernel's own and not
    that of a `triton.Config`, because Triton keeps no winners on disk for configurations that have hooks
    (autotuner.py, `check_disk_cache`).
    """

    def decorate(kernel: Any) -> Autotuner:
        if pre_hook is not None:
            kernel.add_pre_run_hook(lambda **arguments: pre_hook(arguments))
        tuner = TUNERS[rung.id] = Autotuner(rung, kernel, tuple(map(triton_config, rung.configs)))
        return tuner

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
