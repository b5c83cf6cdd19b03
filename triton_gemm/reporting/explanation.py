"""explain: which kernel a product would run on, and why. Nothing is launched, and no GPU is needed to ask about one."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from inspect import signature
from typing import Any, Literal, ParamSpec, get_args

import torch

from .. import arguments
from ..arithmetic import DTYPES, FLOATING, SCALED, Precision, ScaleKind, result_dtype
from ..compat import INTERPRETED
from ..functional import matrices, rules, scaled
from ..hardware.device import INTERPRETER, DeviceInfo, device_info
from ..hardware.device_model import origin
from ..hardware.gpus import named_device
from ..operands import Order, operands_of_sizes
from ..problem import Activation, GemmProblem, Request
from ..runtime import kits, plan, policies
from ..selection.bit_classes import bit_class
from ..selection.select import Selection, next_best

Scales = tuple[torch.Tensor, torch.Tensor] | ScaleKind
Device = torch.device | str | DeviceInfo
P = ParamSpec("P")

# What no function takes together.
_ALONE = {
    "groups": ("bias", "beta", "scales"),
    "scales": ("beta", "precision"),
    "beta": ("bias",),
}


def described(
    input: torch.Tensor | None = None,
    other: torch.Tensor | None = None,
    *,
    M: int | None = None,
    N: int | None = None,
    K: int | None = None,
    dtype: torch.dtype | None = None,
    batch: int = 1,
    layout: Order = "nn",
    bias: torch.Tensor | bool | None = None,
    activation: Activation | None = None,
    beta: float = 0,
    groups: torch.Tensor | int | None = None,
    group_dim: Literal["M", "N", "K"] = "M",
    scales: Scales | None = None,
    use_fast_accum: bool = False,
    precision: Precision | None = None,
    batch_invariant: bool | None = None,
    out_dtype: torch.dtype | None = None,
    device: Device | None = None,
) -> tuple[GemmProblem, DeviceInfo, bool]:
    """What `explain` of the same arguments is about, with its errors: a problem, the GPU to choose for, and whether
    groups are of columns."""
    arguments.flag("explain", "batch_invariant", batch_invariant, or_none=True)
    arguments.count("batch", batch)
    arguments.one_of("explain", "layout", layout, get_args(Order))
    arguments.one_of("explain", "group_dim", group_dim, ("M", "N", "K"))
    beta = arguments.number("explain", "beta", beta)
    arguments.flag("explain", "use_fast_accum", use_fast_accum)
    sizes = {"M": M, "N": N, "K": K, "dtype": dtype}
    if input is None and other is None and M is not None and N is not None and K is not None and dtype is not None:
        if groups is not None and batch != 1:
            raise ValueError("explain(): groups divide one matrix, so batch must be 1")
        batch_a = batch_b = batch if batch != 1 else None
        if groups is not None:
            batch_a, batch_b = (_count(groups) if group_dim == dim else None for dim in ("N", "M"))
        a, b = operands_of_sizes(M, N, K, dtype, layout, batch_a, batch_b)
    elif any(x is not None for x in sizes.values()) or input is None:
        raise TypeError("explain() takes two tensors, input and other, or M, N, K and dtype")
    else:
        arguments.tensors("explain", input=input, other=other)
        assert other is not None
        if (batch, layout, group_dim) != (1, "nn", "M"):
            raise TypeError("explain(): batch, layout and group_dim go with sizes; tensors have their own")
        a, b = input, other
    bias = None if bias is False else bias
    if bias is not None and bias is not True:
        arguments.tensor("explain", "'bias'", bias)
    given = {"bias": bias is not None, "activation": activation is not None, "beta": beta != 0}
    given |= {"groups": groups is not None, "scales": scales is not None, "precision": precision is not None}
    for one, others in _ALONE.items():
        together = [name for name in others if given[name]]
        if given[one] and together:
            raise ValueError(f"explain(): {one} and {together[0]} do not go together")
    if scales is None and groups is None and a.dtype in SCALED and a.dtype not in DTYPES:
        kinds = ", ".join(map(repr, get_args(ScaleKind)))
        raise NotImplementedError(f"explain(): {a.dtype} needs scales: give scales, one of {kinds}")
    if use_fast_accum and scales is None:
        raise ValueError("explain(): use_fast_accum goes with scales")
    info = _device_info(device, a)
    request = Request(1.0, beta, activation, out_dtype, precision)
    if groups is not None:
        problem = _of_groups(a, b, groups, request)
    elif scales is not None:
        problem = _scaled(a, b, scales, bias, use_fast_accum, request)
    else:
        problem = _product(a, b, bias, request)
    return problem, info, groups is not None and a.dim() == 3


def _takes(arguments: Callable[P, object]) -> Callable[[Callable[..., Selection]], Callable[P, Selection]]:
    """Has a function take what `arguments` takes: for people, for tools and for type checkers."""

    def taking(function: Callable[..., Selection]) -> Callable[P, Selection]:
        own = signature(function).return_annotation
        function.__signature__ = signature(arguments).replace(return_annotation=own)  # type: ignore[attr-defined]
        function.__annotations__ = {**arguments.__annotations__, "return": own}
        arguments.__qualname__ = function.__qualname__  # as Python's own errors name it
        return function

    return taking


@_takes(described)
def explain(*operands: Any, **given: Any) -> Selection:
    """Which kernel and configuration a GEMM runs on, on which GPU, and why. Nothing is launched or tuned.

    It takes two tensors as `matmul` does, outside of autocast, or sizes::

        print(triton_gemm.explain(a, b))
        print(triton_gemm.explain(M=4096, N=4096, K=4096, dtype=torch.bfloat16, layout="nt", device="sm_90"))

    The other arguments say which function is explained, without gradients:

    - `matmul`, `mm`, `bmm`, `mv`: none; out_dtype as in `mm`.
    - `linear(x, weight, ...)`: other = weight.t(), bias = True or the bias itself.
    - `addmm`, `baddbmm`: bias = their input; or a beta that is not 0, where C itself is read and scaled, as with an
      input of C's size.
    - `grouped_matmul`: groups = their number, or offs.
    - `scaled_matmul`: scales = "tensor", "rows" or "blocks", or (scale_a, scale_b); with a bias, use_fast_accum, and
      out_dtype, by default bf16.

    Predicted times are never shorter than a GPU's data sheet allows. If the GPU was not measured, the reason says so:
    then trust the order of candidates, not their times. If strides make a GEMM several launches, the first is
    explained.

    Args:
        input, other: Tensors [.., M, K] and [.., K, N], or vectors.
        M, N, K, dtype: Sizes in elements, in place of tensors. Addresses are then multiples of 16 bytes.
        batch: The number of matrices of these sizes.
        layout: How A and B of these sizes lie in memory, "n" by rows or "t" by columns: "nt" is `linear`'s.
        group_dim: Which of the sizes is divided into groups: "M" (rows of A), "N" (columns of B) or "K". That size is
            the one of all groups together.
        bias, beta, groups, scales, use_fast_accum, out_dtype: See above.
        activation: Of the functions that have one.
        precision, batch_invariant: As in `matmul`.
        device: The GPU to choose for. None: that of the tensors, or the current one. "cuda:1" or a torch.device is a
            GPU in this machine. "a100", "RTX 4090" and others are names of GPUs that need not be here, and "sm_90" is
            any of that compute capability, with 132 multiprocessors. Or a `DeviceInfo`.

    Returns:
        A `Selection`.

    Raises:
        TypeError: Neither two tensors nor M, N, K and dtype.
        ValueError: A combination that no function has, or an unknown device.
        RuntimeError: Nothing would be launched, or there is no GPU and none is named. The explained function's own
            errors are raised, too.
    """
    problem, info, of_columns = described(*operands, **given)
    selection = plan.selection_for(problem, info, invariant=given.get("batch_invariant"))
    if selection.source == "model":
        selection = next_best(problem, info, selection)
    bits = bit_class(problem, selection)
    selection = replace(selection, kit=kits.serves(problem, info, selection))
    if of_columns:  # they are multiplied as groups of rows of c^T
        selection = replace(selection, algorithm=selection.algorithm._replace(swap_ab=True))
    return replace(selection, device=info.name, policy=policies.current_policy().name, bits=bits, model=origin(info))


def _product(a: torch.Tensor, b: torch.Tensor, bias: torch.Tensor | bool | None, request: Request) -> GemmProblem:
    """Of matmul, linear and addmm: the first launch's."""
    epilogue = request.activation is not None or bias is not None or request.beta != 0
    rules.matmul(a, b)
    rules.activation("explain", request.activation)
    tensor = bias if isinstance(bias, torch.Tensor) else None
    rules.strided("explain", tensor)
    rules.implemented("explain", a, b, dtypes=FLOATING if epilogue else DTYPES)
    rules.precision("explain", request.precision, a.dtype)
    added = None if tensor is None else _like(tensor)
    rules.out_dtype(result_dtype(a.dtype) if request.out_dtype is None else request.out_dtype, a, added)
    a = a.unsqueeze(0) if a.dim() == 1 else a
    b = b.unsqueeze(1) if b.dim() == 1 else b
    c = torch.empty(matrices.shape_of(a, b), dtype=request.out_dtype or result_dtype(a.dtype), device="meta")
    if added is not None:
        vector = matrices.vector_of(added, c.shape)
        request = request._replace(bias=vector[1], beta=0.0) if vector else request._replace(beta=1.0)
        if not rules.expands(added, tuple(c.shape)):
            rules.refuse(lambda *_: added.expand(c.shape), input=a, other=b, bias=added)
    elif bias is not None:
        request = request._replace(bias="n")
    if c.numel() == 0:
        raise _nothing(a, b)
    return request.problem(*next(matrices.views(a, b, c, join_rows=request.bias != "m")))


def _of_groups(a: torch.Tensor, b: torch.Tensor, groups: torch.Tensor | int, request: Request) -> GemmProblem:
    """Of grouped_matmul."""
    offs = groups if isinstance(groups, torch.Tensor) else torch.empty(_count(groups), dtype=torch.int32, device="meta")
    rules.grouped(_like(a), _like(b), _like(offs))
    rules.activation("explain", request.activation)
    rules.implemented("explain", a, b, dtypes=FLOATING)
    rules.out_dtype(request.out_dtype, a)
    rules.precision("explain", request.precision, a.dtype)
    if a.dim() == 3:
        a, b = b.mT, a.mT
    count = () if b.dim() == 3 else (_count(groups),)
    c = torch.empty((*count, a.shape[0], b.shape[-1]), dtype=request.out_dtype or a.dtype, device="meta")
    if c.numel() == 0 or a.shape[1] == 0 or _count(groups) == 0:
        raise _nothing(a, b)
    return request._replace(groups="k" if count else "m").problem(a, b, c)


def _scaled(
    a: torch.Tensor,
    b: torch.Tensor,
    scales: Scales,
    bias: torch.Tensor | bool | None,
    use_fast_accum: bool,
    request: Request,
) -> GemmProblem:
    """Of scaled_matmul."""
    out_dtype = torch.bfloat16 if request.out_dtype is None else request.out_dtype
    rules.mm(a, b)
    rules.activation("explain", request.activation)
    if isinstance(scales, (tuple, list)) and len(scales) == 2:
        scale_a, scale_b = scales
        arguments.tensors("explain", scale_a=scale_a, scale_b=scale_b)
        given = _like(scale_a), _like(scale_b)
    else:
        given = _scales(scales, a, b)
    row = _like(bias) if isinstance(bias, torch.Tensor) else None
    if bias is True:
        row = torch.empty(b.shape[1:], dtype=out_dtype, device="meta")
    kind, _ = scaled.check(_like(a), _like(b), *given, row, out_dtype, use_fast_accum)
    c = torch.empty((a.shape[0], b.shape[1]), dtype=out_dtype, device="meta")
    if c.numel() == 0:
        raise _nothing(a, b)
    request = scaled.request_of(a.dtype, use_fast_accum, kind, row is not None, request.activation)
    return request.problem(a, b, c)


def _scales(kind: object, a: torch.Tensor, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Scales of that kind without data, in the shapes that scaled_matmul takes."""
    (M, K), N = a.shape, b.shape[1]
    k, n = -(-K // 128), -(-N // 128)
    shapes = {"tensor": ((), ()), "rows": ((M, 1), (1, N)), "blocks": ((M, k), (k, n))}
    if not isinstance(kind, str) or kind not in shapes:
        raise ValueError(f"explain(): scales must be two tensors or one of {', '.join(shapes)}, not {kind!r}")
    scale_a, scale_b = (torch.empty(shape, dtype=torch.float32, device="meta") for shape in shapes[kind])
    return scale_a, scale_b


def _like(x: torch.Tensor) -> torch.Tensor:
    """x without its data."""
    return torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device="meta")


def _count(groups: torch.Tensor | int) -> int:
    if isinstance(groups, torch.Tensor):
        return groups.numel()
    arguments.count("groups", groups)
    return groups


def _nothing(a: torch.Tensor, b: torch.Tensor) -> RuntimeError:
    return RuntimeError(f"explain(): a product launches nothing for {list(a.shape)} and {list(b.shape)}")


def _device_info(device: Device | None, a: torch.Tensor) -> DeviceInfo:
    """The GPU that is chosen for."""
    if isinstance(device, DeviceInfo):
        return device
    try:
        where = a.device if device is None else torch.device(device)
    except RuntimeError:
        try:
            return named_device(str(device))
        except ValueError as error:
            raise ValueError(f"explain(): {error}") from None
    if where.type == "cpu" and not INTERPRETED:
        raise RuntimeError(
            'explain(): name a GPU to choose for, as in device="h200", which need not be here, '
            "or set TRITON_INTERPRET=1 before Python starts, for what CPU tensors run on then"
        )
    if INTERPRETED and where.type != "cuda":
        return INTERPRETER
    if not torch.cuda.is_available():
        raise RuntimeError('explain(): there is no GPU to choose for; name one, as in device="sm_90"')
    return device_info(where if where.type == "cuda" else torch.device("cuda"))
