"""`triton-gemm build`: the extension that launches repeated calls."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from ..runtime import native_build, native_file
from . import output


@output.command
def build(
    into: Annotated[
        Path | None,
        typer.Option(file_okay=False, metavar="DIR", help="The folder to build it in; by default your cache folder."),
    ] = None,
    as_json: output.Json = False,
) -> None:
    """Build the C++ extension that launches repeated calls, without a GPU, unless it is there.

    A process that repeats calls builds it by itself, in the background. Build it where an image is built, if there is
    no compiler at run time, or another user runs it:

    `triton-gemm build --into /opt/triton_gemm`

    Set `TRITON_GEMM_NATIVE=/opt/triton_gemm/triton_gemm_native.so` in the image. It needs a C++ compiler: `CXX`, or
    g++, c++ or clang++ on the path. Exit status 1 if it cannot be built.
    """
    if into is None and native_file.setting() not in ("0", "1"):
        raise output.FailedError(
            f"TRITON_GEMM_NATIVE is {native_file.setting()}, so what is built in the cache folder would not be loaded: "
            "unset it, or build with --into"
        )
    try:
        path, _ = native_build.checked(into and into.expanduser().absolute())
    except ImportError as error:
        raise output.FailedError(str(error)) from None
    output.show({"file": path}, as_json, lambda console: console.print(str(path), soft_wrap=True))
