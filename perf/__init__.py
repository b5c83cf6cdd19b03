"""Everything that measures; `python -m perf` lists the commands.

- `measure`: the one timer, and what it needs to be right: operands, errors, providers, the environment.
- `ladder`: the rungs and their CUDA twins; `report.py` is its command. `bench`: `matmul` on suites of shapes.
- `accuracy`: how wrong every kernel is. `battery`: all that shows kernels to be right, in one table.
- `calibrate`: the constants of the cost model. `tuning`: what its choices lose. `drift`: what other Tritons make of the
  kernels.
- `pages`: results as Markdown. `common`: what these rooms share.
- `results`: what was measured, a folder for each GPU.
"""

import sys
from pathlib import Path

COMMANDS = {
    "report": "climb the ladder: every rung, its CUDA twin and cuBLAS; static facts without a GPU",
    "bench": "suites of shapes against cuBLAS; --list shows them without a GPU",
    "accuracy": "errors of every kernel, precision and class of bits against fp64; small products without a GPU",
    "battery": "all that shows the kernels to be right on a GPU, in one table",
    "calibrate": "measure and fit the constants of the cost model",
    "tuning": "what the model's choices lose, and what tune finds, on products listed and drawn",
    "drift": "what other Tritons make of the kernels, against a record; needs no GPU",
    "pages": "put the committed results into README.md and docs/",
    "ladder.counters": "launch one CUDA twin once, for Nsight Compute",
    "ladder.interpret": "run the rungs in Triton's interpreter, against fp64",
}


def _lead_to_commands() -> None:
    """Ends `python -m perf`, and `python -m perf.NAME` of a module that is no command, with the list of commands.

    Python imports this package before it looks for the module that -m names, and meanwhile sys.argv[0] is "-m". So
    modules that only others use need not say so one by one.
    """
    name = sys.orig_argv[-len(sys.argv)].removeprefix("-m").removeprefix("perf").removeprefix(".")
    commands = "\n".join(f"  python -m perf.{command:<17} {what}" for command, what in COMMANDS.items())
    commands += f"\n  python -m {'triton_gemm.ladder':<22} one rung by hand"
    if not name:
        print(f"{commands}\n\nEach has --help.")
        sys.exit(0)
    path = Path(__file__).parent.joinpath(*name.split("."))
    if name not in COMMANDS and (path.with_suffix(".py").exists() or (path / "__init__.py").exists()):
        print(
            f"error: perf.{name} does nothing by itself, other modules use it; what runs:\n{commands}", file=sys.stderr
        )
        sys.exit(2)


if sys.argv[:1] == ["-m"]:
    _lead_to_commands()
