"""A rung's record: what tests, report and pages need to know of its module, and which configurations its kernel has."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
import triton

from ..arithmetic import ARITHMETICS
from ..config import GemmConfig
from ..hardware.device import DeviceInfo

# Where an fp32 kernel without tensor cores is compiled ahead of time and tested.
FMA_CAPABILITIES = ((8, 0), (8, 9), (9, 0), (10, 0), (12, 0))

HEADER_FIELDS = ("Changes", "Why", "Predicts", "Came out", "Requires", "Tuning", "Bound by", "Next")
OPTIONAL_FIELD = "Came out"  # what measuring taught, where that is more than a number

MAX_WARPS = 32  # of a program: 1024 threads

# A rung's configuration: one, several to tune over (a tuple), or None for the best of its own.
Choice = GemmConfig | tuple[triton.Config, ...] | None
TUNERS: dict[str, Any] = {}  # by rung's id: which configuration won is read there


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


def triton_config(config: GemmConfig) -> triton.Config:
    """Triton's form of a configuration."""
    return triton.Config(config.meta(), num_warps=config.num_warps, num_stages=config.num_stages)


def gemm_config(config: triton.Config) -> GemmConfig:
    """What a configuration of Triton's says of tiles, warps and stages; TypeError for names that no rung has."""
    return GemmConfig(**config.kwargs, num_warps=config.num_warps, num_stages=config.num_stages)
