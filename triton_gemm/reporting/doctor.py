"""What works on this machine and what does not, found without a GPU too: plain data, which `triton-gemm doctor` shows.

Each examination looks at one thing. If one fails, that is what it found, and the others go on.
"""

from __future__ import annotations

import hashlib
import os
import platform
import re
import subprocess
import sysconfig
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict, astuple, dataclass, replace
from importlib import metadata
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import torch
import triton

from .. import tables
from ..compat import CLUSTERS, INTERPRETED, TESTED, c_compiler, cache_folder, cxx_compiler
from ..hardware.device import (
    CAPABILITY,
    SHARED_MEMORY,
    DeviceInfo,
    architecture,
    device_info,
    has_gpu,
    wrong_capability,
)
from ..hardware.device_model import model_of, origin
from ..hardware.driver import driver_version
from ..runtime import background, kits, native_build, native_file, policies
from . import storage
from .storage import Found, Status

_NAMES = "BACKGROUND BATCH_INVARIANT BITS CACHE_DIR CAPABILITY COMMIT KIT LEARN NATIVE POLICY USE"
VARIABLES = tuple(f"TRITON_GEMM_{name}" for name in _NAMES.split())
# Variables of others that change what is compiled, where it is kept, or which GPU is seen.
OTHERS = re.compile(r"TRITON_(?!GEMM_)\w+|CUDA_VISIBLE_DEVICES|CUDA_HOME|CC|PTXAS_OPTIONS|TORCHINDUCTOR_CACHE_DIR")
OLDEST = (8, 0)  # compute capability


@dataclass(frozen=True)
class Finding:
    """What an examination found."""

    about: str  # a word
    status: Status  # "broken" keeps this machine from its purpose, "note" is worth knowing, "set" is a variable's value
    says: str  # a sentence
    do: str = ""  # what to do about it


@dataclass(frozen=True)
class Diagnosis:
    """All findings, and the GPUs that torch sees."""

    findings: tuple[Finding, ...]
    devices: tuple[DeviceInfo, ...]

    @property
    def broken(self) -> bool:
        return any(finding.status == "broken" for finding in self.findings)

    def document(self) -> dict[str, Any]:
        """For programs, and for `--device` of another machine: with power limits, by which tables are found there."""
        devices = [replace(x, power_limit=tables.GpuKey.of(x).power_limit) for x in self.devices]
        return asdict(replace(self, devices=tuple(devices))) | {"broken": self.broken}

    def __str__(self) -> str:
        """For people: a line for each finding, and what to do below it."""
        width = max(len(finding.about) for finding in self.findings)
        lines, before = [], ""
        for about, status, says, do in map(astuple, self.findings):
            word = "BROKEN" if status == "broken" else status
            lines.append(f"{'' if about == before else about:<{width}}  {word:<6}  {says}")
            lines += [f"{'':<{width + 10}}{do}"] if do else []
            before = about
        broken = sum(finding.status == "broken" for finding in self.findings)
        return "\n".join([*lines, f"{broken} broken" if broken else "nothing is broken"])


def examine() -> Diagnosis:
    """Looks at everything, and multiplies two small matrices if there is a GPU. Nothing is raised."""
    findings: list[Finding] = []
    for about, examination in EXAMINATIONS.items():
        try:
            findings += [Finding(about, *found) for found in examination()]
        except Exception as error:  # it is what doctors look for
            words = (str(error).strip() or "no words").splitlines()[0]
            findings.append(Finding(about, "broken", f"{type(error).__name__}: {words}"))
    return Diagnosis(tuple(findings), _devices())


def _devices() -> tuple[DeviceInfo, ...]:
    try:
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        return tuple(device_info(torch.device("cuda", index)) for index in range(count))
    except Exception:  # `_gpu` tells
        return ()


# --- What it runs on ---


def _versions() -> Found:
    """The hash tells commits of one version apart."""
    yield "good", f"{tables.versions()}, Python {platform.python_version()}; the package's files have hash {_hash()}"
    for name, version in (("torch", torch.__version__), ("Triton", triton.__version__)):
        oldest, newest = TESTED[name]
        numbers = tuple(map(int, re.findall(r"\d+", version)[:2]))
        if numbers < oldest:
            yield "broken", f"{name} {version} is too old", f"install {name} {_dotted(oldest)} or newer"
        elif numbers > newest:
            yield "note", f"{name} {version} is newer than what this package was tested with, {_dotted(newest)}"
    with suppress(metadata.PackageNotFoundError):
        own = re.search(r"\btriton ?== ?(\d+\.\d+)", "\n".join(metadata.requires("torch") or ()))
        if own and own[1] != tables.files.TRITON:
            yield "note", f"torch {torch.__version__} comes with Triton {own[1]}, and this is {triton.__version__}"
    if INTERPRETED:
        do = "unset TRITON_INTERPRET to use the GPU" if has_gpu() else ""
        yield "note", "TRITON_INTERPRET is set: kernels run in Triton's interpreter, on the CPU, slowly", do


def _hash() -> str:
    """A hash of the package's sources and kits, those left out that this user may not read."""
    package = Path(__file__).parents[1]
    found = hashlib.sha256()
    for file in sorted(x for x in package.rglob("*") if x.suffix in (".py", ".h", ".cpp", ".cu", ".kit")):
        with suppress(OSError):
            found.update(f"{file.relative_to(package)}\n".encode() + file.read_bytes())
    return found.hexdigest()[:12]


def _dotted(version: tuple[int, int]) -> str:
    return ".".join(map(str, version))


def _gpu() -> Found:
    if torch.version.hip:
        yield "broken", f"torch {torch.__version__} is for AMD's GPUs, and this package for NVIDIA's"
    elif torch.cuda.is_available():
        yield from _gpus()
    elif not has_gpu():
        do = "`explain`, `warmup` and `cache` need none: name a GPU, as in --device h200"
        products = "" if INTERPRETED else ". Products of CPU tensors run with TRITON_INTERPRET=1, slowly"
        yield "note", "this machine has no NVIDIA GPU", do + products
    elif torch.version.cuda is None:
        yield "broken", f"there is a GPU, but torch {torch.__version__} was built without CUDA", "install another"
    else:
        yield "broken", f"there is a GPU, but torch cannot use it: {_why_not()}", "see `nvidia-smi`, and the driver"


def _gpus() -> Found:
    for index, device in enumerate(_devices()):
        power = tables.GpuKey.of(device).power_limit
        says = f"cuda:{index} is {device.name}: {architecture(device.capability)}, {device.num_sms} SMs, {power} W"
        if device.capability < OLDEST:
            yield "broken", f"{says}, and compute capability {_dotted(OLDEST)} is the oldest that works"
        else:
            yield "good", says


def _why_not() -> str:
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return "CUDA_VISIBLE_DEVICES hides it"
    try:
        torch.zeros(1, device="cuda")
    except Exception as error:
        return str(error).splitlines()[0]
    return "it does not say why"


def _driver() -> Found:
    if not has_gpu():
        return
    newest = driver_version()
    about = Path("/proc/driver/nvidia/version")
    release = re.search(r"Kernel Module\D*([\d.]+)", about.read_text()) if about.exists() else None
    says = f"driver {release[1] if release else 'of unknown release'}, for CUDA up to {_dotted(newest)}"
    wanted = tuple(map(int, (torch.version.cuda or "0.0").split(".")[:2]))
    if wanted[0] > newest[0]:
        why = f"{says}, and torch is built for CUDA {torch.version.cuda}"
        yield "broken", why, "update the driver, or install an older torch"
    else:
        yield "good", f"{says}; torch is built for {torch.version.cuda}"


def _kernels() -> Found:
    """What kernels the GPUs have."""
    for device in {device.capability: device for device in _devices()}.values():
        if device.capability == (9, 0):
            yield "good", f"{device.name} runs `warp_specialised`: wgmma, TMA"
            if not CLUSTERS:
                yield "note", f"clusters need Triton 3.9 or a kit, this is {triton.__version__}"
        elif device.capability >= OLDEST:
            yield "note", f"{device.name} runs `portable` and the small kernels: `warp_specialised` is for sm_90"
        if device.capability not in SHARED_MEMORY:
            yield "note", f"{architecture(device.capability)} is not known to this package"
        source = model_of(device).source
        if origin(device) == "calibrated":
            yield "good", f"the cost model of {device.name} is the user's, {source}"
        elif origin(device) == "derived":
            do = "calibrate in a minute, with `triton-gemm calibrate`, and tune your shapes, with `triton-gemm tune`"
            yield "note", f"predicted times for {device.name} are {source.split(':')[0][:60]}, not measured", do


# --- What compiles ---


def _compiler() -> Found:
    """GCC or Clang: Triton builds its driver module with it, once."""
    command = c_compiler()
    why = "there is no C compiler" if command is None else _fails(command)
    if why is None:
        yield "good", f"{command} and Python's headers, with which Triton builds its driver module"
    elif any(cache_folder().glob("*/cuda_utils*.so")):
        yield "note", f"{why}, but Triton's driver module is in its cache"
    else:
        do = "install gcc and python3-dev, or run `triton-gemm warmup` where there are, and copy Triton's cache"
        says = f"{why}, and Triton needs one to build its driver module, before it compiles kernels that no kit has"
        yield ("broken" if has_gpu() and not kits.exist() else "note"), says, do


def _fails(compiler: str) -> str | None:
    """Why a C compiler builds nothing for Python, or None."""
    if not Path(sysconfig.get_paths()["include"], "Python.h").exists():
        return "Python's headers are missing (Python.h)"
    try:
        done = subprocess.run([compiler, "--version"], capture_output=True, text=True, timeout=60)
    except OSError as error:
        return f"{compiler}: {error.strerror}"
    first = (done.stdout or done.stderr).splitlines()[:1]
    return f"{compiler} --version failed: {' '.join(first)}" if done.returncode else None


def _native() -> Found:
    """What launches repeated calls."""
    by_python = "Python launches repeated calls, not C++"
    if (wrong := native_file.wrong()) is not None:
        yield "broken", wrong, "set it to one of these, or unset it"
    given = native_file.setting() not in ("0", "1")
    why = native_build.why_not()
    where = native_file.path()
    if why is not None and not given:
        yield "good", f"C++ for repeated calls is off: {why}"
    elif where is None:
        yield "note", f"{by_python}: there is no cache folder", "set HOME or XDG_CACHE_HOME, or install platformdirs"
    else:
        try:
            os.close(native_file.open_checked(where))
            off = f"{where} can be loaded; C++ for repeated calls is off: {why}"
            yield "good", f"C++ launches repeated calls, by {where}" if why is None else off
        except (OSError, ImportError) as error:
            if given:
                yield "broken", f"{by_python}, as TRITON_GEMM_NATIVE is {where}: {error}", _instead(where, error)
            elif isinstance(error, PermissionError):
                yield "note", f"{by_python}: {error}", "or delete the file, if you do not know it"
            else:
                yield _to_be_built(by_python)


def _instead(where: Path, error: Exception) -> str:
    """What to do about the extension that TRITON_GEMM_NATIVE names."""
    do = f"build it with `triton-gemm build --into {where.parent}`"
    if storage.says_what_to_do(error):
        do = "or delete the file, if you do not know it"
    elif where.name != f"{native_file.NAME}.so":  # which that writes
        do = f"set it to the file that `triton-gemm build --into DIR` writes, DIR/{native_file.NAME}.so"
    return f"{do}, or unset TRITON_GEMM_NATIVE"


def _to_be_built(by_python: str) -> tuple[Status, str, str]:
    try:
        compiler = cxx_compiler()
    except RuntimeError as error:
        return "note", f"{by_python}: {error}", "set CXX to a command"
    if compiler is None:
        return "note", f"{by_python}: there is no C++ compiler", "set CXX, or install g++"
    says = f"C++ launches repeated calls once {compiler[0]} has built an extension, in the background"
    return "good", says, "`triton-gemm build` builds it now"


def _ptxas() -> Found:
    targets: dict[str, set[str]] = {"ptxas": set()}
    for capability in {device.capability for device in _devices()}:
        name = "ptxas_blackwell" if capability >= (10, 0) else "ptxas"
        targets.setdefault(name, set()).add(architecture(capability) + "a" * (capability >= (9, 0)))  # as Triton does
    for name, compiled_for in targets.items():
        tool = getattr(triton.knobs.nvidia, name)  # which runs it; RuntimeError where it cannot be run
        wanted = os.environ.get(variable := f"TRITON_{name.upper()}_PATH")
        if wanted and wanted != tool.path:
            yield "note", f"{variable} is {wanted}, which does not run; Triton takes {tool.path}", f"unset {variable}"
        known = subprocess.run([tool.path, "--help"], capture_output=True, text=True, timeout=60).stdout
        if lacking := sorted(target for target in compiled_for if f"'{target}'" not in known):
            how = f"unset {variable}, or set it to a newer one"
            yield "broken", f"{name} {tool.version}, {tool.path}, does not know {' and '.join(lacking)}", how
        else:
            yield "good", f"{name} {tool.version}, {tool.path}"


def _product() -> Found:
    """Whether a product is right, from compiling it to its result."""
    if not torch.cuda.is_available() or INTERPRETED or torch.cuda.get_device_capability() < OLDEST:
        return
    from ..functional.api import matmul

    a = torch.arange(64 * 96, device="cuda").remainder(7).reshape(64, 96).to(torch.bfloat16)
    b = torch.arange(96 * 80, device="cuda").remainder(5).reshape(96, 80).to(torch.bfloat16)
    with policies.policy("model"):
        c = matmul(a, b)
    if torch.equal(c.double(), (a.double() @ b.double()).to(torch.bfloat16).double()):
        yield "good", "a small product is right"
    else:
        yield "broken", "a small product is wrong", "report it, with the output of `triton-gemm doctor --json`"


# --- Settings ---


def _policy() -> Found:
    on_gpu = torch.cuda.is_available() and not INTERPRETED  # nothing is compiled in the background elsewhere
    wrong = {"TRITON_GEMM_BACKGROUND": background.wrong(), kits.VARIABLE: native_file.wrong(kits.VARIABLE)}
    wrong |= {x: policies.wrong(x) for x in policies.VARIABLES}
    here = torch.cuda.is_available()
    own = torch.cuda.get_device_capability() if here and os.environ.get(CAPABILITY) else None
    wrong[CAPABILITY] = wrong_capability(own)
    if (use := os.environ.get("TRITON_GEMM_USE", "")) not in ("", "0", "1"):
        wrong["TRITON_GEMM_USE"] = f"TRITON_GEMM_USE must be 0 or 1, not {use!r}: it counts as 0"
    of_gpus = ("TRITON_GEMM_BACKGROUND", CAPABILITY, "TRITON_GEMM_USE")
    for variable, why in wrong.items():
        if why is not None:
            says = f"{why}; without a GPU it has no effect" if variable in of_gpus and not here else why
            yield "broken", says, f"set {variable} to a right value, or unset it"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # which say the same
        found = policies.current_policy()
    switches = {"batch invariance": found.batch_invariant, "learning": policies.learns_in_environment()}
    if on_gpu:
        switches["compiling in the background"] = background.enabled()
    parts = [f"{found.name}, bits {found.bits}", *(f"{x} {'on' if on else 'off'}" for x, on in switches.items())]
    yield "good", ", ".join(parts)


def _environment() -> Found:
    for name, value in sorted(os.environ.items()):
        if name.startswith("TRITON_GEMM_") and name not in VARIABLES:
            yield "note", f"{name} is unknown, and nothing reads it", f"it may be one of {', '.join(VARIABLES)}"
        elif name in VARIABLES or OTHERS.fullmatch(name):
            yield "set", f"{name}={value}"
    if os.environ.get("TRITON_GEMM_USE") == "1":
        no_effect, do = "TRITON_GEMM_USE=1 has no effect, as", "or call triton_gemm.enable()"
        if os.environ.get("TORCH_DEVICE_BACKEND_AUTOLOAD", "1") != "1":
            says = f"{no_effect} TORCH_DEVICE_BACKEND_AUTOLOAD keeps torch from calling triton_gemm"
            yield "note", says, f"unset TORCH_DEVICE_BACKEND_AUTOLOAD, {do}"
        if not any(found.name == "triton_gemm" for found in entry_points(group="torch.backends")):
            yield "note", f"{no_effect} triton_gemm is not installed, and only importable", f"install it by pip, {do}"


EXAMINATIONS: dict[str, Callable[[], Found]] = {
    "versions": _versions,
    "GPU": _gpu,
    "driver": _driver,
    "kernels": _kernels,
    "compiler": _compiler,
    "kits": lambda: storage.machine_code(_devices()),
    "calls": _native,
    "ptxas": _ptxas,
    "caches": storage.caches,
    "tables": lambda: storage.stored(_devices()),
    "policy": _policy,
    "environment": _environment,
    "product": _product,
}
